"""Rotary positions that are stretched: what a GGUF file says, and whether a configuration does."""

import math
from typing import Any

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.models.published.apertus import STRETCHED
from graphgen.models.published.config import Config
from graphgen.models.published.frequencies import llama3
from graphgen.models.published.gguf import Gguf
from graphgen.nn.position import rotary_frequencies
from graphgen.operands import Array
from graphgen.safetensors import Weight

SCALING = "rope.scaling."
FACTORS = "rope_freqs.weight"
LONG = {f"rope_factors_{name}.weight": f"{name}_factor" for name in ("short", "long")}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_GROWTH = ("mscale_all_dim", "llama_4_scaling_beta")
_LLAMA3_LENGTH = 8192
"""What all published checkpoints of Llama 3.1 to 3.3 have; files only have the result."""


def same(a: Any, b: Any) -> bool:
    """Whether two values are, numbers also if one is in float32; objects in what both have."""
    if isinstance(a, dict) and isinstance(b, dict):
        return all(same(x, b[name]) for name, x in a.items() if name in b)
    if isinstance(a, float | int) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=1e-6)
    return type(a) is type(b) and bool(a == b)


def scaled(file: Gguf, given: dict[str, Any], yarn: dict[str, Any]) -> dict[str, Any]:
    """`rope_scaling` of a configuration, if positions are stretched, from fields and tensors."""
    found, tensors = scaling_of(file, given, yarn), file.tensors
    factors = {key: tensors[name].read().tolist() for name, key in LONG.items() if name in tensors}
    if FACTORS in tensors:
        original = {"original_max_position_embeddings": _LLAMA3_LENGTH}
        factor = float(tensors[FACTORS].read().max())
        factors = {"rope_type": "llama3", "factor": factor, **_LLAMA3, **original}
    elif factors:
        factors["rope_type"] = "longrope"
        if (attention := given.get(f"{SCALING}attn_factor")) is not None:
            factors["attention_factor"] = attention
    if found and factors:
        what = f"{FACTORS if FACTORS in tensors else next(iter(LONG))} and {SCALING}type"
        problem = f"has both {what}, of which a configuration has one"
        raise GraphgenError(f"{file.path} {problem}; give --like DIR")
    return {"rope_scaling": found or factors} if found or factors else {}


def scaling_of(file: Gguf, given: dict[str, Any], yarn: dict[str, Any]) -> dict[str, Any]:
    """The kinds linear and yarn, of which the fields say all; longrope has tensors of factors.

    `yarn` are further fields of that kind, by the configuration's names.
    """
    given = {n.removeprefix(SCALING): x for n, x in given.items()}
    kind, factor = given.pop("type", None), given.pop("factor", None)
    length = given.pop("original_context_length", None)
    arch = str(file.fields.get("general.architecture"))
    if given.pop("finetuned", None) is False and arch.startswith("granite"):  # else a note
        what = f"{arch}.{SCALING}finetuned is false, so layers have no positions"
        raise GraphgenError(f"{file.path}: {what}; build the checkpoint that it was made of")
    turns = {f"beta_{x}": given.pop(f"yarn_beta_{x}", None) for x in ("fast", "slow")}
    defaults = dict.fromkeys(("attn_factor", "yarn_attn_factor", "yarn_ext_factor"), 1.0)
    if kind == "yarn" and isinstance(factor, float | int) and factor > 1.0:
        usual = 0.1 * math.log(factor) + 1.0  # what the kind's own formula gives
        if same(given.get("yarn_attn_factor"), usual):
            defaults["yarn_attn_factor"] = given["yarn_attn_factor"]
    for name, value in defaults.items():
        if given.get(name) == value:
            del given[name]
    if not LONG.keys().isdisjoint(file.tensors):
        given.pop("attn_factor", None)
        kind = None if kind == "longrope" else kind
    if kind is None and factor in (None, 1.0) and not given:
        return {}
    turns = {name: value for name, value in turns.items() if value is not None}
    if kind != "yarn":
        given |= {f"yarn_{name}": value for name, value in turns.items()}
    if kind not in ("linear", "yarn") or given:
        what = ", ".join(f"{SCALING}{n}" for n in given) or f"{SCALING}type {kind!r:.40}"
        raise GraphgenError(f"{file.path}: {what} is not supported; give --like DIR")
    found = {"rope_type": kind, "factor": factor}
    if kind == "yarn" and length is not None:
        found["original_max_position_embeddings"] = length
    return found | turns | yarn


def check_scaling(file: Gguf, found: dict[str, Any], config: Config) -> None:
    """Raise an error if rope.scaling of the file is not that of the configuration.

    Other kinds than linear and yarn have tensors of factors instead.
    """
    given = config.given("rope_scaling") or config.given("rope_parameters") or {}
    kind = given.get("rope_type", given.get("type")) if isinstance(given, dict) else None
    kind = kind if kind in ("linear", "yarn") else None
    wanted = given if kind is not None else {}
    length = "original_max_position_embeddings"
    alike = found.get("rope_type") == kind and (
        kind is None or same(found.get("factor"), wanted.get("factor"))
    )
    turns = {"beta_fast": 32.0, "beta_slow": 1.0} if kind == "yarn" else {}
    alike &= all(
        same(found.get(name, value), wanted.get(name) or value) for name, value in turns.items()
    )
    both = (n for n in found if n in (length, *_GROWTH) and wanted.get(n) is not None)
    if not alike or not all(same(found[name], wanted[name]) for name in both):
        scaled = found or "no rope.scaling"
        problem = f"has {scaled}, and {config.where} {wanted or 'neither linear nor yarn'}"
        raise GraphgenError(f"{file.path} {problem}: the two belong to different models")


def check_factors(file: Gguf, weight: Weight, config: Config) -> None:
    """Raise an error if factors of the file are not those of the configuration."""
    given = config.given("rope_scaling") or config.given("rope_parameters") or {}
    given = given if isinstance(given, dict) else {}
    given = STRETCHED if config.model_type == "apertus" and not given else given
    factors, name = weight.read(), weight.name
    if name in LONG:
        wanted: Array = np.array(given.get(LONG[name]) or [], np.float32)
    else:
        theta: Any = config.given("rope_theta") or given.get("rope_theta") or 1e4
        plain = rotary_frequencies(2 * weight.shape[0], theta=theta)
        wanted = np.ones_like(factors)
        if given.get("rope_type", given.get("type")) == "llama3":
            numbers = {n: float(x) for n, x in given.items() if isinstance(x, int | float)}
            longest = config.given("max_position_embeddings") or 0
            wanted = plain / llama3(plain, {"factor": 1.0, **numbers}, longest)
    if weight.shape != wanted.shape or not np.allclose(factors, wanted, rtol=1e-4):
        raise GraphgenError(
            f"{file.path}: {name} has other factors than rope_scaling of {config.where} "
            "gives; the two belong to different models"
        )
