"""What GGUF files call the weights and the fields of a configuration."""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.models.published.config import Config
from graphgen.models.published.frequencies import llama3
from graphgen.models.published.gguf import Gguf
from graphgen.nn.position import rotary_frequencies
from graphgen.operands import Array
from graphgen.safetensors import Weight

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""By model_type: general.architecture."""

_LAYER = {
    "attn_norm": "input_layernorm",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}
_OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_SAME = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
"""Fields of the file that config.json has, too."""

_NEEDED = (*list(_SAME)[:4], "attention.layer_norm_rms_epsilon")
_SCALING = "rope.scaling."
_FACTORS = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_LENGTH = 8192
"""What all published checkpoints of Llama 3.1 to 3.3 have; files only have the result."""


def read_gguf(file: Gguf, config: Config) -> dict[str, Weight]:
    """The tensors of a file for the model that a configuration describes, by its names.

    Raises GraphgenError for an architecture that is not supported, and fields or tensors that
    contradict the configuration.
    """
    path, fields, arch = file.path, file.fields, _ARCHITECTURES.get(config.model_type)
    if arch is None:
        known = ", ".join(_ARCHITECTURES)
        raise GraphgenError(f"{path}: GGUF is read for {known}, not for {config.model_type}")
    if fields.get("general.architecture") != arch:
        problem = f"is for {fields.get('general.architecture')!r:.40}, {config.where} for {arch!r}"
        raise GraphgenError(f"{path} {problem}: they are of different models")
    for name, own in _SAME.items():
        value, wanted = fields.get(f"{arch}.{name}"), config.given(own)
        differ = None not in (value, wanted) and not _close(value, wanted)
        if differ and own not in ("max_position_embeddings", "vocab_size"):
            problem = f"{arch}.{name} is {value!r:.40}, but {config.where} has {own} {wanted!r:.40}"
            raise GraphgenError(f"{path}: {problem}: they are of different models")
    scaling = {n: fields[n] for n in fields if n.startswith(f"{arch}.{_SCALING}")}
    own_scaling = {n.removeprefix(f"{arch}."): x for n, x in scaling.items() if x != "none"}
    _check_scaling(file, _scaling(file, own_scaling) if own_scaling else {}, config)
    heads = {"q": "attention.head_count", "k": "attention.head_count_kv"}
    turned = {f"attn_{x}": fields.get(f"{arch}.{heads[x]}") for x in "qk" if arch == "llama"}
    found = dict[str, Weight]()
    for name, weight in file.tensors.items():
        if name == _FACTORS:
            _check_factors(file, weight, config)
            continue
        match = re.fullmatch(r"(?:blk\.(\d{1,4})\.)?(\w+)\.(weight|bias)", name)
        layer, part, last = match.groups() if match else (None, "", "")
        own_name = (_OTHERS if layer is None else _LAYER).get(part)
        if own_name is None:
            raise GraphgenError(f"{path}: {name!r} is not a tensor of {config.model_type}")
        if layer is not None and part in turned:
            count = turned[part]
            if type(count) is not int or count < 1 or weight.shape[0] % (2 * count):
                raise GraphgenError(f"{path}: {name} is {list(weight.shape)} for {count!r} heads")
            weight = replace(weight, heads=count)  # type: ignore[call-arg]
        own_name = own_name if layer is None else f"model.layers.{layer}.{own_name}"
        found[f"{own_name}.{last}"] = replace(weight, name=f"{own_name}.{last}")
    return found


def _close(a: Any, b: Any) -> bool:
    numbers = isinstance(a, float | int) and isinstance(b, float | int)
    return numbers and math.isclose(a, b, rel_tol=1e-6)


def config_fields(file: Gguf) -> dict[str, Any]:
    """The configuration that a file describes, as config.json would have it.

    Raises GraphgenError for an architecture or a field that is not supported.
    """
    fields, arch = file.fields, file.fields.get("general.architecture")
    if arch not in list(_ARCHITECTURES.values()):
        known = ", ".join(dict.fromkeys(_ARCHITECTURES.values()))
        raise GraphgenError(f"{file.path} is for {arch!r:.40}; supported are {known}")
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise GraphgenError(f"{file.path} has no token_embd.weight: it is not a whole model")
    found: dict[str, Any] = {"model_type": arch}
    own = {n.removeprefix(f"{arch}."): x for n, x in fields.items() if n.startswith(f"{arch}.")}
    if absent := [name for name in _NEEDED if name not in own]:
        raise GraphgenError(f"{file.path}: the field {arch}.{absent[0]} is missing")
    scaling = {n: own.pop(n) for n in [*own] if n.startswith(_SCALING) and own[n] != "none"}
    for name, value in own.items():
        given = _SAME.get(name)
        if given is None and not (name == "expert_count" and value == 0):
            raise GraphgenError(
                f"{file.path}: the field {arch}.{name} ({value!r:.40}) is not supported; give "
                "--like DIR, a folder with the config.json of the model"
            )
        if given is not None and not _close(found.setdefault(given, value), value):
            raise GraphgenError(f"{file.path}: {arch}.{name} is {value!r:.40}, not {found[given]}")
    found["vocab_size"] = table.shape[0]
    found["tie_word_embeddings"] = "output.weight" not in file.tensors
    biased = (f"blk.0.{part}.bias" in file.tensors for part in ("attn_q", "ffn_up"))
    if arch == "llama":
        found |= dict(zip(("attention_bias", "mlp_bias"), biased, strict=True))
    if scaling:
        found["rope_scaling"] = _scaling(file, scaling)
    if "rope_scaling" in found and _FACTORS in file.tensors:
        problem = f"has both {_FACTORS} and {arch}.{_SCALING}type, of which a configuration has one"
        raise GraphgenError(f"{file.path} {problem}; give --like DIR")
    if _FACTORS in file.tensors:
        factors = file.tensors[_FACTORS].read()
        original = {"original_max_position_embeddings": _LLAMA3_LENGTH}
        fit = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3, **original}
        found["rope_scaling"] = fit
    for name in ("bos", "eos"):
        value = fields.get(f"tokenizer.ggml.{name}_token_id")
        found |= {} if value is None else {f"{name}_token_id": value}
    return found


def _scaling(file: Gguf, given: dict[str, Any]) -> dict[str, Any]:
    kind, factor = (given.pop(f"{_SCALING}{n}", None) for n in ("type", "factor"))
    length = given.pop(f"{_SCALING}original_context_length", None)
    given.pop(f"{_SCALING}finetuned", None)  # a note
    if kind not in ("linear", "yarn") or given:
        what = ", ".join(given) or f"{_SCALING}type {kind!r:.40}"
        raise GraphgenError(f"{file.path}: {what} is not supported; give --like DIR")
    found = {"rope_type": kind, "factor": factor}
    if kind == "yarn" and length is not None:
        found["original_max_position_embeddings"] = length
    return found


def _check_scaling(file: Gguf, found: dict[str, Any], config: Config) -> None:
    """Raise an error if rope.scaling of the file is not that of the configuration.

    Other kinds than linear and yarn have tensors of factors instead.
    """
    given = config.given("rope_scaling") or config.given("rope_parameters") or {}
    kind = given.get("rope_type", given.get("type")) if isinstance(given, dict) else None
    kind = kind if kind in ("linear", "yarn") else None
    wanted = given if kind is not None else {}
    length = "original_max_position_embeddings"
    same = found.get("rope_type") == kind and (
        kind is None or _close(found.get("factor"), wanted.get("factor"))
    )
    both = found.get(length), wanted.get(length)
    if not same or (None not in both and not _close(*both)):
        scaled = found or "no rope.scaling"
        problem = f"has {scaled}, and {config.where} {wanted or 'neither linear nor yarn'}"
        raise GraphgenError(f"{file.path} {problem}: the two belong to different models")


def _check_factors(file: Gguf, weight: Weight, config: Config) -> None:
    """Raise an error if the factors of the file are not those of the configuration's llama3."""
    given = config.given("rope_scaling") or config.given("rope_parameters") or {}
    theta = config.given("rope_theta") or (isinstance(given, dict) and given.get("rope_theta"))
    factors, plain = weight.read(), rotary_frequencies(2 * weight.shape[0], theta=theta or 1e4)
    wanted: Array = np.ones_like(factors)
    if isinstance(given, dict) and given.get("rope_type", given.get("type")) == "llama3":
        numbers = {n: float(x) for n, x in given.items() if isinstance(x, int | float)}
        longest = config.given("max_position_embeddings") or 0
        wanted = plain / llama3(plain, {"factor": 1.0, **numbers}, longest)
    if weight.shape != wanted.shape or not np.allclose(factors, wanted, rtol=1e-4):
        raise GraphgenError(
            f"{file.path}: {weight.name} has other factors than rope_scaling of {config.where} "
            "gives; the two belong to different models"
        )
