"""The published ways to stretch the frequencies of rotary positions to longer texts."""

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen import nn, ops
from graphgen.operands import Array
from graphgen.value import Tensor

FIELDS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
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
        "llama_4_scaling_beta",
    },
    "longrope": {
        "factor",
        "attention_factor",
        "short_factor",
        "long_factor",
        "original_max_position_embeddings",
    },
}
"""The fields of each kind."""


class LongRotary(nn.Rotary):
    """Frequencies for short and for long texts (LongRoPE, arXiv 2402.13753), by the last position.

    Both are the call's: if a text grows beyond `length` tokens, its first keys in the cache have to
    be computed again, as transformers and onnxruntime-genai do.
    """

    def __init__(self, frequencies: Array, long: Array, *, length: int, factor: float):
        super().__init__(frequencies, factor=factor)
        self.long, self.length = long, length

    def at(self, position_ids: Tensor) -> Tensor:
        """The long ones if a position is beyond the length."""
        beyond = ops.reduce_max(position_ids, keepdims=0) >= self.length
        return ops.where(beyond, self.long, self.frequencies)


class TemperedRotary(nn.Rotary):
    """Queries also grow with their places: times 1 + beta · log(1 + ⌊place / length⌋) (Llama 4)."""

    def __init__(self, frequencies: Array, *, factor: float, length: int, beta: float):
        super().__init__(frequencies, factor=factor)
        self.length, self.beta = length, beta

    def __call__(self, position_ids: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """Cosines, sines, and what queries are multiplied by, (B, T, 1)."""
        steps = ops.cast(ops.div(position_ids, np.int64(self.length)) + 1, to=ir.DataType.FLOAT)
        growth = ops.log(steps) * np.float32(self.beta) + np.float32(1)
        return *super().__call__(position_ids, x), ops.cast_like(ops.unsqueeze(growth, [2]), x)


class DynamicRotary(nn.Rotary):
    """Frequencies that a text of more than `length` tokens stretches (NTK, arXiv 2309.00071, 3.2).

    θ grows to θ · (s · n / length - s + 1)^(R / (R - 2)) at n tokens, for the tokens of this call.
    """

    def __init__(self, frequencies: Array, *, length: int, scale: float):
        super().__init__(frequencies)
        self.length, self.scale = length, scale

    def at(self, position_ids: Tensor) -> Tensor:
        """The frequencies at the last position of this call."""
        half = len(self.frequencies)
        count = ops.cast(ops.reduce_max(position_ids, keepdims=0) + 1, to=ir.DataType.FLOAT)
        count = ops.maximum(count, np.float32(self.length))
        stretch = count * np.float32(self.scale / self.length) - np.float32(self.scale - 1.0)
        powers = -np.arange(half, dtype=np.float32) / np.float32(max(half - 1, 1))
        return ops.pow(stretch, powers) * self.frequencies


def llama3(plain: Array, fields: dict[str, float], longest: int) -> Array:
    """Long waves are divided by the factor, short ones kept, with a smooth passage between them."""
    low, high = fields.get("low_freq_factor", 1.0), fields.get("high_freq_factor", 4.0)
    turns = fields.get("original_max_position_embeddings", longest) * plain / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - keep) * plain / fields["factor"] + keep * plain


def yarn(plain: Array, fields: dict[str, float], longest: int, theta: float) -> tuple[Array, float]:
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

    default = temperature(factor)
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        one, other = (temperature(factor, fields[n]) for n in ("mscale", "mscale_all_dim"))
        default = one / other
    return changed.astype(np.float32), fields.get("attention_factor", default)


def temperature(factor: float, mscale: float = 1.0) -> float:
    """What scores of a text that is `factor` times as long are multiplied by, twice, in yarn."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0
