"""Normalisations; float16 and bfloat16 are normalised in float32, as ONNX's stash_type asks."""

from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.op import Operand, composite
from graphgen.ops.elementwise import sqrt
from graphgen.ops.layout import cast, cast_like, numpy_dtype, rank
from graphgen.ops.reduce import reduce_mean


def _axes(x: Operand, axis: int) -> list[int]:
    """The normalised axes, `axis` to the last, counted from the end."""
    return list(range(axis if axis < 0 else axis - rank(x), 0))


def _stash(x: Operand) -> Operand:
    half = numpy_dtype(x).itemsize < 4
    return cast(x, to=ir.DataType.FLOAT) if half else x


@composite("LayerNormalization")
def layer_normalization(
    x: Any,
    scale: Any,
    bias: Any = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Operand:
    """(x - mean) / √(variance + ε) · scale + bias over the last axes (arXiv 1607.06450)."""
    axes = _axes(x, axis)
    wide = _stash(x)
    d = wide - reduce_mean(wide, axes)
    y = cast_like(d / sqrt(reduce_mean(d * d, axes) + epsilon), x) * scale
    return y if bias is None else y + bias


@layer_normalization.vjp
def _(
    g: Any,
    y: Any,
    x: Any,
    scale: Any,
    bias: Any = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Operand:
    """dx = (h - mean(h) - x̂ mean(h x̂)) / σ with h = g·scale; dscale = Σ g x̂; dbias = Σ g."""
    axes = _axes(x, axis)
    wide = _stash(x)
    d = wide - reduce_mean(wide, axes)
    sigma = sqrt(reduce_mean(d * d, axes) + epsilon)
    normal = d / sigma
    h = cast_like(g * scale, wide)
    dx = (h - reduce_mean(h, axes) - normal * reduce_mean(h * normal, axes)) / sigma
    return cast_like(dx, x), g * cast_like(normal, x), g


@composite("RMSNormalization")
def rms_normalization(
    x: Any, scale: Any, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Operand:
    """x / √(mean(x²) + ε) · scale over the last axes (Zhang & Sennrich, arXiv 1910.07467)."""
    wide = _stash(x)
    root = sqrt(reduce_mean(wide**2.0, _axes(x, axis)) + epsilon)
    return cast_like(wide / root, x) * scale


# Its own body: with the square as a power, runtimes without the operator fuse it when they load.
rms_normalization.spelling(rms_normalization.function)


@rms_normalization.vjp
def _(
    g: Any,
    y: Any,
    x: Any,
    scale: Any,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Operand:
    """dx = (h - x̂ mean(h x̂)) / r with h = g·scale, r the root mean square; dscale = Σ g x̂."""
    axes = _axes(x, axis)
    wide = _stash(x)
    root = sqrt(reduce_mean(wide * wide, axes) + epsilon)
    normal = wide / root
    h = cast_like(g * scale, wide)
    dx = (h - normal * reduce_mean(h * normal, axes)) / root
    return cast_like(dx, x), g * cast_like(normal, x)


def layer_norm(
    x: Operand, scale: Operand = None, bias: Operand = None, *, epsilon: float = 1e-5
) -> Operand:
    """Layer normalisation over the last axis; the gain and the bias are optional."""
    scale = np.ones(x.shape[-1:], numpy_dtype(x)) if scale is None else scale
    return layer_normalization(x, scale, bias, epsilon=epsilon)


def rms_norm(x: Operand, scale: Operand = None, *, epsilon: float = 1e-5) -> Operand:
    """Root-mean-square normalisation over the last axis; the gain is optional."""
    scale = np.ones(x.shape[-1:], numpy_dtype(x)) if scale is None else scale
    return rms_normalization(x, scale, epsilon=epsilon)
