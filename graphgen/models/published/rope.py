"""The angles of rotary positions (arXiv 2104.09864), and the published ways to stretch them."""

import math
from typing import Any

import numpy as np

from graphgen import nn
from graphgen.errors import GraphgenError
from graphgen.models.published.config import Config
from graphgen.nn.position import rotary_frequencies
from graphgen.operands import Array

_FIELDS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "yarn": {
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "truncate",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
    },
}


def rotary(config: Config, head_dim: int) -> nn.Rotary:
    """Rotary positions, changed as `rope_parameters` (or `rope_scaling`) of the configuration say.

    The kinds are linear (divides positions, arXiv 2306.15595), llama3 (long waves only, arXiv
    2407.21783) and yarn (arXiv 2309.00071). Kinds whose angles depend on the length of the prompt
    (dynamic, longrope) are refused: keys in a cache would have to be turned again.
    """
    found, factor = frequencies(config, head_dim)
    return nn.Rotary(found, factor=factor)


def frequencies(config: Config, head_dim: int) -> tuple[Array, float]:
    """The frequencies, float32 (R/2,), and the factor for cosines and sines."""
    try:
        with np.errstate(all="raise", under="ignore"):
            return _frequencies(config, head_dim)
    except (ArithmeticError, ValueError) as error:
        problem = f"{config.where}: {config.model_type}: its rotary positions have no finite angles"
        raise GraphgenError(f"{problem} ({error}); fix rope_theta and rope_parameters") from error


def _frequencies(config: Config, head_dim: int) -> tuple[Array, float]:
    given: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        found = config.raw(name, {})
        if not isinstance(found, dict):
            config.refuse(name, found, "an object")
        found = {key: value for key, value in found.items() if value is not None}
        if given and found and found != given:
            config.refuse("rope_scaling", given, f"absent, or as rope_parameters: {found}")
        given = found or given
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    if wrong := [name for name, value in given.items() if type(value) not in (bool, int, float)]:
        config.refuse("rope_parameters", given, f"an object with numbers for {', '.join(wrong)}")
    theta = float(given.pop("rope_theta", config.take("rope_theta", float, 10000.0)))
    # transformers rotates all features of these models, whatever the field says.
    config.expect("partial_rotary_factor", 1.0)
    if (partial := given.pop("partial_rotary_factor", 1.0)) != 1.0:
        config.refuse("partial_rotary_factor", partial, "1.0")
    absent = {"llama": 1 << 11, "mistral": 1 << 17}.get(config.model_type, 1 << 15)
    longest = config.take("max_position_embeddings", int, absent)
    if kind not in list(_FIELDS):
        config.refuse("rope_type", kind, f"one of {', '.join(_FIELDS)}")
    if unknown := sorted(set(given) - _FIELDS[kind]):
        config.refuse("rope_parameters", given, f"of {kind}'s fields only, without {unknown}")
    if head_dim % 2:
        config.refuse("head_dim", head_dim, "an even number of features")
    if theta <= 0.0:
        config.refuse("rope_theta", theta, "above 0")
    plain = rotary_frequencies(head_dim, theta=theta)
    fields = {name: float(value) for name, value in given.items()}
    if kind != "default" and not fields.get("factor", 0.0) >= 1.0:
        config.refuse("rope_parameters", given, "with a factor of at least 1")
    if kind == "linear":
        plain = plain / fields["factor"]
    elif kind == "llama3":
        if fields.get("low_freq_factor", 1.0) >= fields.get("high_freq_factor", 4.0):
            config.refuse("rope_parameters", given, "with low_freq_factor below high_freq_factor")
        plain = _llama3(plain, fields, longest)
    elif kind == "yarn":
        return _yarn(plain, fields, longest, theta)
    return plain.astype(np.float32), 1.0


def _llama3(plain: Array, fields: dict[str, float], longest: int) -> Array:
    """Long waves are divided by the factor, short ones kept, with a smooth passage between them."""
    low, high = fields.get("low_freq_factor", 1.0), fields.get("high_freq_factor", 4.0)
    turns = fields.get("original_max_position_embeddings", longest) * plain / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - keep) * plain / fields["factor"] + keep * plain


def _yarn(
    plain: Array, fields: dict[str, float], longest: int, theta: float
) -> tuple[Array, float]:
    """Features that turn fewer than beta_slow times are divided by the factor, fast ones kept."""
    size, factor = 2 * len(plain), fields["factor"]
    original = fields.get("original_max_position_embeddings", longest)

    def feature(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = feature(fields.get("beta_fast", 32.0)), feature(fields.get("beta_slow", 1.0))
    if fields.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (np.arange(size // 2) - low) / (high - low or 0.001)
    keep = 1.0 - np.clip(ramp, 0.0, 1.0)
    changed: Any = plain / factor * (1 - keep) + plain * keep

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    default = temperature(1.0)
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        default = temperature(fields["mscale"]) / temperature(fields["mscale_all_dim"])
    return changed.astype(np.float32), fields.get("attention_factor", default)
