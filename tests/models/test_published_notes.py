"""Fields that published files note beside those of their class: harmless ones are accepted."""

from typing import Any

import pytest
from test_checkpoint_page import CONFIGS

from graphgen.errors import GraphgenError
from graphgen.models.published import FAMILIES
from graphgen.models.published.config import Config

DUMP: dict[str, Any] = {  # what transformers 4 wrote of any model that is a part of another
    "_name_or_path": "",
    "add_cross_attention": False,
    "architectures": None,
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "decoder_start_token_id": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "finetuning_task": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "is_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "prefix": None,
    "problem_type": None,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "return_dict": True,
    "return_dict_in_generate": False,
    "sep_token_id": None,
    "suppress_tokens": None,
    "task_specific_params": None,
    "temperature": 1.0,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "tokenizer_class": None,
    "top_k": 50,
    "top_p": 1.0,
    "torch_dtype": None,
    "torchscript": False,
    "typical_p": 1.0,
    "use_bfloat16": False,
}
NOTES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-2-27b": ("gemma2", {"sliding_window_size": 4096}),
    "galactica": ("opt", {"learned_embeddings": True, "scale_embeddings": False}),
    "dolly-v2": ("gpt_neox", {"custom_pipelines": {"text-generation": {"impl": "a.B"}}}),
    "Qwen2.5-7B-Instruct-1M": (
        "qwen2",
        {"dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192}},
    ),
    "DialoGPT": ("gpt2", {"n_special": 0, "predict_special_tokens": True}),
    "roberta-base-squad2": ("roberta", {"language": "english", "name": "Roberta"}),
    "deberta-base-mnli": ("deberta", {"pooler": {"dropout": 0, "hidden_act": "gelu"}}),
    "TinyBERT": (
        "bert",
        {"cell": {}, "emb_size": 16, "pre_trained": "", "structure": [], "training": ""},
    ),
    "polyglot-ko": ("gpt_neox", {"num_steps": "global_step301000"}),
    "internlm2-7b-llama": ("llama", {"bias": False}),
    "Nous-Yarn-Llama-2": (
        "llama",
        {"rope_scaling": {"type": "yarn", "factor": 16.0, "finetuned": True}}
        | {"rope_parameters": None, "rope_theta": 1e4},
    ),
}


def build(kind: str, **more: Any) -> None:
    """Build every task of a small configuration with further fields."""
    given: dict[str, Any] = {**CONFIGS[kind], **more}
    for name, value in given.items():
        if name.endswith("_config") and isinstance(value, dict):
            given[name] = {**DUMP, **value} if "text" in name or "vision" in name else value
    for task in FAMILIES[kind].tasks.values():
        config = Config(given)
        task(config)
        config.finish()


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_fields_that_transformers_4_wrote_of_any_model(kind: str) -> None:
    build(kind, **DUMP | {n: x for n, x in CONFIGS[kind].items() if n in DUMP})


@pytest.mark.parametrize("name", NOTES)
def test_a_note_without_effect_is_accepted(name: str) -> None:
    kind, notes = NOTES[name]
    build(kind, **notes)


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        ("opt", {"learned_embeddings": False}),
        ("opt", {"scale_embeddings": True}),
        ("bert", {"emb_size": 7}),
        ("bert", {"cell": {"a": 1}}),
        ("llama", {"add_cross_attention": True}),
        ("llama", {"bias": True}),
    ],
)
def test_a_note_that_may_have_an_effect_is_refused(kind: str, note: dict[str, Any]) -> None:
    with pytest.raises(GraphgenError, match=next(iter(note))):
        build(kind, **note)
