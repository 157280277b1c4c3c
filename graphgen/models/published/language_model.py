"""The language model of a checkpoint that has parts for images or sound as well: it alone is built.

transformers gives the same logits for texts without images: the other parts only make vectors that
stand in the place of some tokens. PaliGemma is not among these, because it sees the tokens of a
prompt on both sides, nor are models with further layers in the decoder (Mllama).
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from graphgen.errors import GraphgenError

if TYPE_CHECKING:
    from graphgen.models.published.config import Config

W = TypeVar("W")

TYPES = {
    "gemma3": "gemma3_text",
    "got_ocr2": "qwen2",
    "idefics2": "mistral",
    "idefics3": "llama",
    "internvl": "qwen2",
    "kimi_k25": "deepseek_v3",
    "lighton_ocr": "qwen3",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "ovis2": "qwen2",
    "qwen2_audio": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "smolvlm": "llama",
    "video_llama_3": "qwen2",
    "video_llava": "llama",
    "vipllava": "llama",
    "voxtral": "llama",
}
"""The models of several parts, and the model type of their text part if it names none."""

_SAME = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"} | {
    "kimi_k2": "deepseek_v3"
}
"""Types of text parts that are others as long as a token has one position, as in texts."""

# What the classes of transformers use where a text part lacks these: such files are common.
_SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads".split()
_ABSENT = {
    "llama": (32000, 4096, 11008, 32, 32),
    "mistral": (32000, 4096, 14336, 32, 32),
    "ministral3": (131072, 4096, 14336, 34, 32),
    "qwen2": (151936, 4096, 22016, 32, 32),
    "qwen3": (151936, 4096, 22016, 32, 32),
    "gemma3_text": (262208, 2304, 9216, 26, 8),
    "deepseek_v3": (129280, 7168, 18432, 61, 128),
    "qwen3_5_text": (248320, 4096, 12288, 32, 16),
    "qwen3_5_moe_text": (248320, 2048, 0, 40, 16),
}
"""The types that a text part may have. The whole leaves out what others do with logits."""

_OF_ALL = re.compile(
    r"\w+_token_id|(torch_)?dtype|transformers_version|(quantization|compression)_config"
)
OF_IMAGES = ("mrope_section", "mrope_interleaved")  # which of three equal positions a feature has
_CAP = "final_logit_softcapping"
_NOTES = ("pixel_shuffle_factor", "use_resampler", "perceiver_config", "architectures")
TIED = "tie_word_embeddings"

PART_OF = "_part_of"
"""The field that says of which model a configuration is the language model's."""

_HEAD = re.compile(r"(?:(?:model\.)?language_model\.)?lm_head\.")
_BODY = re.compile(
    r"(?:model\.)?language_model\.(?:model\.)?|model\.text_model\.|"
    r"model\.(?=(?:layers|embed_tokens|norm)\.)"
)


def language_fields(fields: dict[str, Any], where: object) -> dict[str, Any]:
    """The fields of a config.json, or of its text part if the model is one of `TYPES`.

    Raises GraphgenError for a text part that is no object, or of another kind.
    """
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in TYPES:
        return fields
    text = fields.get("text_config")
    if text is None:  # older files have its fields among those of the whole
        text = {n: x for n, x in fields.items() if n != "model_type" and not n.endswith("_config")}
    if not isinstance(text, dict):
        raise GraphgenError(f"{where}: {kind}: text_config is {text!r:.60}; it must be an object")
    own = text.get("model_type", TYPES[kind])
    own = _SAME.get(own, own) if isinstance(own, str) else own
    if own not in _ABSENT:
        raise GraphgenError(
            f"{where}: {kind}: text_config is of model_type {own!r:.60}; the language models that "
            f"are built are of {', '.join(_ABSENT)}"
        )
    if text.get(_CAP):  # which the whole does not read
        raise GraphgenError(f"{where}: {kind}: {_CAP} is {text[_CAP]!r:.60}; it must be absent")
    found: dict[str, Any] = {"model_type": own, PART_OF: kind}
    found |= zip(_SIZES, _ABSENT[own], strict=True)
    found |= {name: x for name, x in fields.items() if _OF_ALL.fullmatch(name)}
    found |= {n: x for n, x in text.items() if n not in (*_NOTES, "model_type") and x is not None}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(found.get(name), dict):
            rope = {n: x for n, x in found[name].items() if n not in OF_IMAGES}
            found[name] = {n: "default" if x == "mrope" else x for n, x in rope.items()}
    found.pop(TIED, None)
    # Whether the whole is tied counts; without the field, whether there is a head.
    return found | ({TIED: fields[TIED]} if fields.get(TIED) is not None else {})


def language_weights(stored: Mapping[str, W]) -> dict[str, W]:
    """The weights of the language model, by the names that it has in a folder of its own."""
    found = dict[str, W]()
    for name, weight in stored.items():
        if head := _HEAD.match(name):
            found[f"lm_head.{name[head.end() :]}"] = weight
        elif body := _BODY.match(name):
            found[f"model.{name[body.end() :]}"] = weight
    return found


def language_only(config: "Config", stored: Mapping[str, W]) -> tuple[dict[str, W], str]:
    """The weights of the language model, and a line about those of the other parts.

    Where the fields do not say whether its head is tied, the weights do.
    """
    found = language_weights(stored)
    if config.given(TIED) is None:
        config.replace({TIED: "lm_head.weight" not in found})
    return found, (
        f"{config.where}: of {config.given(PART_OF)}, this is the language model, "
        f"{config.model_type}: {len(stored) - len(found)} weights of other parts are left out"
    )
