"""The angles of rotary positions (arXiv 2104.09864), and the published ways to stretch them."""

import math
from typing import Any

import numpy as np

from graphgen import nn
from graphgen.errors import GraphgenError
from graphgen.models.published.config import Config
from graphgen.models.published.frequencies import (
    FIELDS,
    DynamicRotary,
    LongRotary,
    TemperedRotary,
    llama3,
    yarn,
)
from graphgen.nn.position import rotary_frequencies
from graphgen.operands import Array

_LISTS = ("short_factor", "long_factor")


def rotary(
    config: Config,
    head_dim: int,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    names: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
    parameters: dict[str, Any] | None = None,
) -> nn.Rotary:
    """Rotary positions, changed as `rope_parameters` (or `rope_scaling`) of the configuration say.

    The kinds are linear (divides positions, arXiv 2306.15595), llama3 (long waves only, arXiv
    2407.21783), yarn (arXiv 2309.00071), dynamic and longrope, which depend on the length of the
    text. `theta` and `partial` are those of a configuration without the fields that `names` call
    theta and the part of a head that is turned; if `partial` is None, the whole head has to be:
    transformers turns it whatever the field says. `parameters` are given instead of the fields.
    """
    try:
        with np.errstate(all="raise", under="ignore"):
            return _rotary(config, head_dim, theta, partial, names, parameters)
    except (ArithmeticError, ValueError) as error:
        problem = f"{config.where}: {config.model_type}: its rotary positions have no finite angles"
        raise GraphgenError(f"{problem} ({error}); fix rope_theta and rope_parameters") from error


def given_parameters(config: Config) -> dict[str, Any]:
    """What rope_parameters say, or rope_scaling, its older name; both have to agree."""
    given: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        found = config.raw(name, {})
        if not isinstance(found, dict):
            config.refuse(name, found, "an object")
        found = {key: value for key, value in found.items() if value is not None}
        if given and found and found != given:
            config.refuse("rope_scaling", given, f"absent, or as rope_parameters: {found}")
        given = found or given
    return given


def parameters_by_kind(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """What rope_parameters say of layers that look to the start, and of local ones.

    Without an object for each kind, they are those of the former.
    """
    given = given_parameters(config)
    far, near = (given.get(kind, {}) for kind in ("full_attention", "sliding_attention"))
    if not isinstance(far, dict) or not isinstance(near, dict):
        config.refuse("rope_parameters", given, "an object for each kind of layer")
    return (far, near) if far or near else (given, {})


def _rotary(
    config: Config,
    head_dim: int,
    theta: float,
    partial: float | None,
    names: tuple[str, str],
    parameters: dict[str, Any] | None,
) -> nn.Rotary:
    given = given_parameters(config) if parameters is None else dict(parameters)
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    given.pop("finetuned", None)  # a note on yarn, whose kind says it
    if kind in ("su", "yarn") and config.model_type == "phi3":
        kind = "longrope"  # what it was called first
    if wrong := [name for name, value in given.items() if not _is_number(name, value)]:
        config.refuse("rope_parameters", given, f"an object with numbers for {', '.join(wrong)}")
    theta = float(given.pop("rope_theta", config.take(names[0], float, theta)))
    if partial is None:
        # transformers turns all features of these models, whatever the field says.
        config.expect(names[1], 1.0)
        if (part := given.pop("partial_rotary_factor", 1.0)) != 1.0:
            config.refuse("partial_rotary_factor", part, "1.0")
        turned = head_dim
    else:
        part = float(given.pop("partial_rotary_factor", config.take(names[1], float, partial)))
        turned = int(head_dim * part)
        if not 0 < turned <= head_dim:
            config.refuse(names[1], part, "above 0 and at most 1")
    absent = {"llama": 1 << 11, "mistral": 1 << 17, "phi3": 1 << 12, "gemma2": 1 << 13}
    absent |= {"gpt_oss": 1 << 17, "deepseek_v2": 1 << 11, "deepseek_v3": 1 << 12}
    longest = config.take("max_position_embeddings", int, absent.get(config.model_type, 1 << 15))
    if kind not in list(FIELDS):
        config.refuse("rope_type", kind, f"one of {', '.join(FIELDS)}")
    if unknown := sorted(set(given) - FIELDS[kind]):
        config.refuse("rope_parameters", given, f"of {kind}'s fields only, without {unknown}")
    if turned % 2:
        config.refuse("head_dim", turned, "an even number of features")
    if not theta >= 1.0:  # else angles grow beyond what float32 tells apart
        config.refuse("rope_theta", theta, "at least 1")
    plain = rotary_frequencies(turned, theta=theta)
    if kind == "longrope":
        return _longrope(config, plain, given, longest)
    fields = {name: float(value) for name, value in given.items()}
    if kind != "default" and not fields.get("factor", 0.0) >= 1.0:
        config.refuse("rope_parameters", given, "with a factor of at least 1")
    return _stretched(config, kind, plain, fields, longest, theta)


def _stretched(
    config: Config, kind: str, plain: Array, fields: dict[str, float], longest: int, theta: float
) -> nn.Rotary:
    """The frequencies for longer texts."""
    factor = 1.0
    if kind == "dynamic":
        return DynamicRotary(plain, length=longest, scale=fields["factor"])
    if kind == "linear":
        plain = plain / fields["factor"]
    elif kind == "llama3":
        if fields.get("low_freq_factor", 1.0) >= fields.get("high_freq_factor", 4.0):
            config.refuse("rope_parameters", fields, "with low_freq_factor below high_freq_factor")
        plain = llama3(plain, fields, longest)
    elif kind == "yarn":
        plain, factor = yarn(plain, fields, longest, theta)
    if "llama_4_scaling_beta" in fields:
        return _tempered(config, plain, factor, fields)
    return nn.Rotary(plain.astype(np.float32), factor=factor)


def _tempered(config: Config, plain: Array, factor: float, fields: dict[str, float]) -> nn.Rotary:
    """Ministral 3's: queries grow from the first length on."""
    length = fields.get("original_max_position_embeddings", 0.0)
    if config.model_type != "ministral3" or not length >= 1.0:
        wanted = "of ministral3 and with original_max_position_embeddings, or without beta"
        config.refuse("rope_parameters", fields, wanted)
    beta, frequencies = fields["llama_4_scaling_beta"], plain.astype(np.float32)
    return TemperedRotary(frequencies, factor=factor, length=int(length), beta=beta)


def _is_number(name: str, value: Any) -> bool:
    if name in _LISTS and isinstance(value, list):
        return all(type(x) in (int, float) for x in value)
    return type(value) in (bool, int, float)


def _longrope(config: Config, plain: Array, given: dict[str, Any], longest: int) -> nn.Rotary:
    """Each frequency divided by a factor of its own: one for short texts and one for long ones."""
    scales = [np.array(given.get(name, ()), np.float32) for name in _LISTS]
    for name, scale in zip(_LISTS, scales, strict=True):
        if scale.shape != plain.shape or not np.all(scale > 0.0):
            config.refuse(name, given.get(name), f"a list of {len(plain)} numbers above 0")
    name = "original_max_position_embeddings"
    # The class of Phi-3 has the field, so its default comes before what rope_parameters say.
    length = config.take(
        name, int, 4096 if config.model_type == "phi3" else given.get(name, longest)
    )
    ratio = float(given.get("factor", longest / length))
    factor = 1.0 if ratio <= 1.0 else math.sqrt(1.0 + math.log(ratio) / math.log(length))
    short, long = (np.asarray(plain / scale, np.float32) for scale in scales)
    return LongRotary(
        short, long, length=length, factor=float(given.get("attention_factor", factor))
    )
