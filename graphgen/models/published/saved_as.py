"""The class that a checkpoint was saved from, by config.json, where another one is built."""

from collections.abc import Collection, Iterator

from graphgen.models.published.config import Config

_TASKS = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
    "ForConditionalGeneration": "text2text-generation",
}
"""The tasks by how the names of transformers' classes end."""


def other_head(config: Config, task: str, tasks: Collection[str]) -> str:
    """Which of the `tasks` has the head that the class has and `task` has not, in words; or ""."""
    named = config.given("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    found = next((own for ending, own in _TASKS.items() if name.endswith(ending)), task)
    return f"it was saved as {name}: --task {found}" if found in {*tasks} - {task} else ""


def own_code(config: Config) -> Iterator[str]:
    """A line where code comes with the checkpoint, which could compute something else."""
    if config.given("auto_map"):
        yield (
            f"{config.where}: auto_map names code that comes with the checkpoint, which is not "
            f"run: this is {config.model_type} as in transformers"
        )
