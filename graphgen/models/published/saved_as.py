"""The class that a checkpoint was saved from, by config.json: it says which task is built."""

from collections.abc import Iterator, Sequence

from graphgen.errors import GraphgenError
from graphgen.models.published.config import Config

_TASKS = {
    "ForCausalLM": ["text-generation"],
    "LMHeadModel": ["text-generation", "text2text-generation"],
    "HeadsModel": ["text-generation"],
    "ForConditionalGeneration": [
        "text2text-generation",
        "automatic-speech-recognition",
        "text-generation",
    ],
    "ForSequenceClassification": ["text-classification", "audio-classification"],
    "ForCTC": ["automatic-speech-recognition"],
    "ForTokenClassification": ["token-classification"],
    "ForQuestionAnswering": ["question-answering"],
    "ForMaskedLM": ["fill-mask"],
    "ForImageClassification": ["image-classification"],
    "CLIPModel": ["zero-shot-image-classification"],
    "SiglipModel": ["zero-shot-image-classification"],
    "Model": ["feature-extraction"],
}
"""The tasks by how the names of transformers' classes end; the first ending that fits counts."""


def class_of(config: Config) -> str:
    """The class that the checkpoint was saved from, or ""."""
    named = config.given("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _heads(config: Config) -> list[str]:
    """The tasks, of any family, that have the head of the class."""
    name = class_of(config)
    return next((own for ending, own in _TASKS.items() if name.endswith(ending)), [])


def default_task(config: Config, tasks: Sequence[str]) -> tuple[str, str]:
    """The task that is built if none is given, and a line that says why it is not the first.

    It is that of the class that the checkpoint was saved from, else the first of the `tasks`.
    Raises GraphgenError for a class with the head of a task that is not there.
    """
    name, heads = class_of(config), _heads(config)
    own = next((task for task in heads if task in tasks), None)
    if own is not None and own != tasks[0]:
        others = ", ".join(task for task in tasks if task != own)
        return own, f"it was saved as {name}: built for {own}; there are {others}, too (--task)"
    if own is not None or not name or heads == ["feature-extraction"]:
        return tasks[0], ""
    if not heads:
        return tasks[0], f"it was saved as {name}, whose head no task has: built for {tasks[0]}"
    raise GraphgenError(
        f"{config.where}: it was saved as {name}, and {config.model_type} has no task with that "
        f"head; --task builds it without: {' or '.join(tasks)}"
    )


def misfit_mend(config: Config, task: str, chosen: str | None, tasks: Sequence[str]) -> str:
    """How to get what a checkpoint has, whose weights do not fit the task; or ""."""
    saved = f"; it was saved as {class_of(config)}"
    if chosen is None:
        others = ", ".join(other for other in tasks if other != task)
        return f"{saved}: built for {task}; --task has {others}" if task != tasks[0] else ""
    own = next((own for own in _heads(config) if own in tasks), task)
    return f"{saved}: --task {own}" if own != task else ""


def own_code(config: Config) -> Iterator[str]:
    """A line where code comes with the checkpoint, which could compute something else."""
    if config.given("auto_map"):
        kind = "gte" if config.model_type == "new" else config.model_type
        yield (
            f"{config.where}: auto_map names code that comes with the checkpoint, which is not "
            f"run: this is {kind} as in transformers"
        )
