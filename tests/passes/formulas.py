"""Spellings of norms, activations and softmax that exporters and hands write, and look-alikes."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphgen import ops

GAIN = np.linspace(0.5, 2, 8, dtype=np.float32)
BIAS = np.linspace(-1, 1, 8, dtype=np.float32)
COLUMN = np.tile(GAIN, 8)[:, None, None]  # for 64 channels, before height and width
SHIFT = COLUMN[::-1].copy()
GAIN16, BIAS16 = GAIN.astype(np.float16), BIAS.astype(np.float16)
ROOT_2 = math.sqrt(2.0)


class Formula(NamedTuple):
    """A function, the operators that are left of it, and what it is called with."""

    body: Callable[[Any], Any]
    wanted: dict[str, int]
    dtype: str = "float32"
    shape: tuple[Any, ...] = ("b", "s", 8)


def mean(x: Any, axes: Any = (-1,)) -> Any:
    return ops.reduce_mean(x, list(axes))


def total(x: Any, **attributes: Any) -> Any:
    return ops.reduce_sum(x, [-1], **attributes)


def wide(x: Any) -> Any:
    return ops.cast(x, to=ir.DataType.FLOAT)


def unit(x: Any, epsilon: float = 1e-6, axes: Any = (-1,)) -> Any:
    d = x - mean(x, axes)
    return d / ops.sqrt(mean(d * d, axes) + epsilon)


def rms(x: Any, epsilon: float = 1e-6, axes: Any = (-1,)) -> Any:
    return x / ops.sqrt(mean(x * x, axes) + epsilon)


def clamped(x: Any) -> Any:
    m = mean(x)
    variance = ops.maximum(0.0, mean(x * x) - m * m)
    return (x - m) * (ops.reciprocal(ops.sqrt(variance + 1e-6)) * GAIN) + BIAS


def folded(x: Any) -> Any:
    m = mean(x)
    d = x - m
    inverse = (mean(d * d) + 1e-3) ** -0.5 * GAIN
    return x * inverse + (BIAS - m * inverse)


def moments(x: Any) -> Any:
    m = mean(x)
    return (x - m) / ops.sqrt(mean(x * x) - m * m + 1e-5) * GAIN + BIAS


def summed(x: Any) -> Any:
    d = x - total(x) / 8.0
    return GAIN * (d / ops.sqrt(total(d * d) * (1 / 8) + 1e-5)) + BIAS


def deviation(x: Any) -> Any:
    d = x - mean(x)
    std = ops.sqrt(mean(d * d))
    return d / ops.sqrt(std * std + 1e-5) * GAIN


def unkept(x: Any) -> Any:
    d = x - ops.unsqueeze(ops.reduce_mean(x, [2], keepdims=0), [2])
    variance = ops.reduce_mean(d * d, [2], keepdims=0) + 1e-5
    return d / ops.sqrt(ops.unsqueeze(variance, [2])) * GAIN + BIAS


def repeated(x: Any) -> Any:
    d = x - ops.expand(mean(x), ops.shape(x))
    return d / ops.expand(ops.sqrt(mean(d * d) + 1e-5), ops.shape(x))


def squared(x: Any) -> Any:
    d = x - mean(x)
    return d * ops.reciprocal(ops.sqrt(mean(d**2.0) + 1e-6)) * GAIN


def double_inside(x: Any) -> Any:
    d = ops.cast(x - mean(x), to=ir.DataType.DOUBLE)
    return ops.cast_like(d / ops.sqrt(mean(d * d) + 1e-12), x) * GAIN16 + BIAS16


def exp_over_sum(x: Any) -> Any:
    e = ops.exp(x)
    return e / total(e)


def times_reciprocal(x: Any) -> Any:
    e = ops.exp(x - ops.reduce_max(x, [-1]))
    return e * ops.reciprocal(total(e))


def maximum_of_some(x: Any) -> Any:
    e = ops.exp(x - ops.reduce_max(ops.where(ops.greater(x, 0.0), x, -1.0), [-1]))
    return e / total(e)


def gate(x: Any) -> Any:
    a, b = ops.split(x, num_outputs=2, axis=-1)
    return a * ops.sigmoid(a) * b


def tanh_gelu(x: Any, root: Any = 0.7978845608, cubic: Any = 0.044715) -> Any:
    return 0.5 * x * (1.0 + ops.tanh(root * (x + cubic * x**3.0)))


LAYER, RMS, GELU = {"LayerNormalization": 1}, {"RMSNormalization": 1}, {"Gelu": 1}
TURNED = {"Transpose": 2}
QUICK, SOFTMAX = {"com.microsoft::QuickGelu": 1}, {"Softmax": 1}
CASTS = {"Cast": 2}


def maximum_from_infinity(x: Any) -> Any:
    """As where a maximum of no elements is defined."""
    e = ops.exp(x - ops.maximum(ops.reduce_max(x, [-1]), -np.inf))
    return e / total(e)


def maximum_moved(x: Any) -> Any:
    top = ops.transpose(ops.maximum(ops.reduce_max(x, [-1], keepdims=0), -np.inf), perm=[1, 0])
    e = ops.exp(ops.transpose(x, perm=[1, 0, 2]) - ops.unsqueeze(top, [2]))
    return e / total(e)


FOUND = {
    "layer norm": Formula(lambda x: unit(x) * GAIN + BIAS, LAYER),
    "layer norm without gain": Formula(unit, LAYER),
    "layer norm, a number as gain": Formula(lambda x: unit(x) * 3.0, LAYER),
    "layer norm, gain [1, 1, 8]": Formula(
        lambda x: unit(x) * GAIN.reshape(1, 1, 8) + BIAS.reshape(1, 8), LAYER
    ),
    "layer norm, one gain for all": Formula(lambda x: unit(x) * GAIN[:1] + BIAS, LAYER),
    "layer norm without epsilon": Formula(lambda x: unit(x, 0.0) * GAIN + BIAS, LAYER),
    "layer norm by moments": Formula(moments, LAYER),
    "layer norm, variance clamped": Formula(clamped, LAYER),
    "layer norm, gain in the inverse": Formula(folded, LAYER),
    "layer norm by sums": Formula(summed, LAYER),
    "layer norm by the deviation": Formula(deviation, LAYER),
    "layer norm, axes left out and put back": Formula(unkept, LAYER),
    "layer norm, statistics repeated": Formula(repeated, LAYER),
    "layer norm, power and reciprocal": Formula(squared, LAYER),
    "layer norm in float16": Formula(
        lambda x: unit(x, 1e-3) * GAIN16 + BIAS16, LAYER, "float16"
    ),
    "layer norm in float32, then the gain": Formula(
        lambda x: ops.cast_like(unit(wide(x)), x) * GAIN16 + BIAS16, LAYER, "float16"
    ),
    "layer norm in float32 with the gain": Formula(
        lambda x: ops.cast_like(unit(wide(x)) * wide(GAIN16) + wide(BIAS16), x), LAYER, "float16"
    ),
    "layer norm in float32, gain in float32": Formula(
        lambda x: ops.cast_like(unit(wide(x)) * (GAIN / 3) + BIAS, x), CASTS | LAYER, "float16"
    ),
    "layer norm in double inside float16": Formula(double_inside, LAYER, "float16"),
    "layer norm in float64": Formula(
        # The attribute is a float32: only such an epsilon is kept to float64's precision.
        lambda x: unit(x, 2.0**-20) * GAIN.astype(np.float64), LAYER, "float64"
    ),
    "layer norm of rank 2": Formula(lambda x: unit(x) * GAIN + BIAS, LAYER, shape=("b", 8)),
    "layer norm of rank 4": Formula(
        lambda x: unit(x) * GAIN + BIAS, LAYER, shape=("b", 2, "s", 8)
    ),
    "layer norm over two axes": Formula(
        lambda x: unit(x, 1e-5, (2, 3)) * np.tile(GAIN, (4, 1)), LAYER, shape=("b", "s", 4, 8)
    ),
    "layer norm over two axes, gain of one": Formula(
        lambda x: unit(x, 1e-5, (-2, -1)) * GAIN, LAYER, shape=("b", "s", 4, 8)
    ),
    "layer norm of channels": Formula(
        lambda x: unit(x, axes=(1,)) * COLUMN + SHIFT, LAYER | TURNED, shape=("b", 64, "s", 3)
    ),
    "layer norm of channels, gain of one": Formula(
        lambda x: unit(x, axes=(-2,)) * GAIN[:1] + COLUMN[0], LAYER | TURNED, shape=("b", 64, "s")
    ),
    "layer norm of channels and rows": Formula(
        lambda x: unit(x, axes=(1, 2)) * COLUMN, LAYER | TURNED, shape=("b", 64, 3, "s")
    ),
    "rms norm of channels": Formula(
        lambda x: rms(x, axes=(1,)) * COLUMN, RMS | TURNED, shape=("b", 64, "s", 3)
    ),
    "rms norm": Formula(lambda x: GAIN * rms(x), RMS),
    "rms norm without gain": Formula(rms, RMS),
    "rms norm, one plus the gain": Formula(lambda x: rms(x) * (1.0 + GAIN), RMS),
    "rms norm, one over the root": Formula(
        lambda x: GAIN * (x * (1.0 / ops.sqrt(mean(x**2.0) + 1e-6))), RMS
    ),
    "rms norm, a power": Formula(lambda x: x * (1e-6 + mean(x * x)) ** -0.5 * GAIN, RMS),
    "rms norm by a sum": Formula(lambda x: x / ops.sqrt(total(x * x) / 8.0 + 1e-6), RMS),
    "rms norm without epsilon": Formula(lambda x: GAIN * rms(x, 0.0), RMS),
    "rms norm in float32, then the gain": Formula(
        lambda x: GAIN16 * ops.cast_like(rms(wide(x)), x), RMS, "float16"
    ),
    "gelu": Formula(lambda x: 0.5 * x * (1.0 + ops.erf(x / ROOT_2)), GELU),
    "gelu, factor in the middle": Formula(lambda x: x * 0.5 * (ops.erf(x / ROOT_2) + 1.0), GELU),
    "gelu, factor inside": Formula(lambda x: x * ((1.0 + ops.erf(x * 0.70710678)) * 0.5), GELU),
    "gelu, halves": Formula(lambda x: x * (0.5 + 0.5 * ops.erf(x * 0.70710678)), GELU),
    "gelu, mirrored": Formula(lambda x: x * 0.5 * (1.0 - ops.erf(-x / ROOT_2)), GELU),
    "gelu, doubled": Formula(lambda x: x * (1.0 + ops.erf(x / ROOT_2)), GELU | {"Mul": 1}),
    "gelu in float16": Formula(
        lambda x: x * 0.5 * (1.0 + ops.erf(x / np.float16(ROOT_2))), GELU, "float16"
    ),
    "gelu, a constant rounded to float16": Formula(
        lambda x: x * 0.5 * (1.0 + ops.erf(x / float(np.float16(ROOT_2)))), GELU | {"Mul": 2}
    ),
    "gelu, another argument": Formula(
        lambda x: x * (1.0 - ops.erf(x * -0.6)), GELU | {"Mul": 2}
    ),
    "gelu, tanh": Formula(tanh_gelu, GELU),
    "gelu, tanh of products": Formula(
        lambda x: 0.5 * x * (1.0 + ops.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))), GELU
    ),
    "gelu, tanh of a polynomial": Formula(
        lambda x: x * (0.5 * ops.tanh(x * (0.7978845608 + 0.0356774081 * x * x)) + 0.5), GELU
    ),
    "gelu, tanh as sigmoid": Formula(
        lambda x: x * ops.sigmoid(1.5957691216 * (x + 0.044715 * x * x * x)), GELU
    ),
    "gelu, tanh in float16": Formula(
        lambda x: tanh_gelu(x, np.float16(0.7978845608), np.float16(0.044715)), GELU, "float16"
    ),
    "gelu, tanh in float32 inside float16": Formula(
        lambda x: ops.cast_like(tanh_gelu(wide(x), cubic=0.044714998), x), CASTS | GELU, "float16"
    ),
    "silu": Formula(lambda x: ops.sigmoid(x) * x, QUICK),
    "silu by exp": Formula(lambda x: x / (1.0 + ops.exp(-x)), QUICK),
    "silu by tanh": Formula(lambda x: 0.5 * x * (1.0 + ops.tanh(0.5 * x)), QUICK),
    "quick gelu": Formula(lambda x: x * ops.sigmoid(1.702 * x), QUICK),
    "swiglu, packed": Formula(gate, QUICK | {"Mul": 1, "Split": 1}, shape=("b", "s", 16)),
    "relu": Formula(lambda x: ops.maximum(0.0, x), {"Relu": 1}),
    "softmax": Formula(ops.softmax, SOFTMAX),
    "softmax along another axis": Formula(lambda x: ops.softmax(x, axis=1), SOFTMAX),
    "softmax without the maximum": Formula(exp_over_sum, SOFTMAX),
    "softmax, times a reciprocal": Formula(times_reciprocal, SOFTMAX),
    "softmax, another maximum": Formula(maximum_of_some, SOFTMAX),
    "softmax, a maximum from -infinity on": Formula(maximum_from_infinity, SOFTMAX),
    "softmax, a maximum moved": Formula(maximum_moved, SOFTMAX | {"Transpose": 1}),
    "softmax of a scaled sum": Formula(
        lambda x: ops.softmax(x * 0.35 + BIAS), SOFTMAX | {"Add": 1, "Mul": 1}
    ),
    "softmax by its logarithm": Formula(lambda x: ops.exp(ops.log_softmax(x)), SOFTMAX),
    "softmax in float16": Formula(ops.softmax, SOFTMAX, "float16"),
    "softmax in float32 inside float16": Formula(
        lambda x: ops.cast_like(ops.softmax(wide(x)), x), CASTS | SOFTMAX, "float16"
    ),
    "log-softmax": Formula(ops.log_softmax, {"LogSoftmax": 1}),
}  # fmt: skip

BFLOAT16 = Formula(
    lambda x: ops.cast_like(unit(wide(x)), x) * GAIN.astype(ml_dtypes.bfloat16), LAYER, "bfloat16"
)


def outside_the_root(x: Any) -> Any:
    d = x - mean(x)
    return d / (ops.sqrt(mean(d * d)) + 1e-5) * GAIN


def unbiased(x: Any) -> Any:
    d = x - mean(x)
    return d / ops.sqrt(total(d * d) / 7.0 + 1e-5) * GAIN


def two_axes(x: Any) -> Any:
    """The mean along one axis, the squares along another of the same size."""
    m = mean(x, [1])
    return (x - m) / ops.sqrt(mean(x * x) - m * m + 1e2) * GAIN


def misaligned(x: Any) -> Any:
    """Statistics of the rows, taken from the columns: the axis was not put back."""
    d = x - ops.reduce_mean(x, [-1], keepdims=0)
    return d / ops.sqrt(mean(d * d) + 1e-5)


def repeated_sum(x: Any) -> Any:
    """A sum over more elements than there are in the numerator."""
    e = ops.exp(ops.reduce_max(x, [-1]))
    return e / total(ops.expand(e, ops.shape(x)))


def masked_exp(x: Any) -> Any:
    e = ops.exp(x - ops.reduce_max(x, [-1])) * (GAIN > 1).astype(np.float32)
    return e / total(e)


def guarded_sum(x: Any) -> Any:
    e = ops.exp(x - ops.reduce_max(x, [-1]))
    return e / (total(e) + 1e-6)


# What only looks alike, and what its remark says; those without one are no candidates.
ALIKE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "epsilon outside the root": (outside_the_root, "0.353553·Σ(x^2)^0.5 where 0.125·Σ(x^2) is"),
    "unbiased variance": (unbiased, "0.142857·Σ(x^2) where 0.125·Σ(x^2) is wanted"),
    "length": (lambda x: x / ops.maximum(ops.sqrt(total(x * x)), 1e-6), "max(Σ(x^2)^0.5, 1e-06)"),
    "channels first": (lambda x: unit(x, axes=(1,)), "(-2,) are the axes of sums, in FLOAT; wante"),
    "exp with a mask": (masked_exp, "·exp(x))^-1 where exp(x)·Σ(exp(x))^-1 is"),
    "epsilon in the sum": (guarded_sum, "1e-06 + exp(max(x))^-1·Σ(exp(x))"),
    "another sum": (lambda x: x * (1.5 + 0.5 * ops.erf(x / ROOT_2)), "erf(0.707107·x)·x where"),
    "another cubic": (lambda x: tanh_gelu(x, cubic=0.05), "exp(x^3)^-0.0797885 where"),
    "sigmoid of a sum": (lambda x: x * ops.sigmoid(x + 1.0), "exp(1)^-1·exp(x)^-1 where"),
    "root of a square": (lambda x: ops.sqrt(x * x) * ops.sigmoid(x), "·(x^2)^0.5 where"),
    "variance": (lambda x: mean((x - mean(x)) ** 2.0), ""),
    "softcap": (lambda x: 30.0 * ops.tanh(x / 30.0), ""),
    "gate": (lambda x: ops.sigmoid(x) * BIAS, ""),
}  # fmt: skip
