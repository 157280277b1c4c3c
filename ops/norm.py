"""Normalizations; float16 and bfloat16 are normalized in float32, as ONNX's stash_type wants."""

import functools

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError, user_line
from graphgen.infer import CHECKS, describe
from graphgen.op import composite
from graphgen.ops.elementwise import add, equal, pow, reciprocal, sqrt, where
from graphgen.ops.layout import (
    _reshape,
    cast,
    cast_like,
    dim,
    expand,
    numpy_dtype,
    rank,
    reshape,
    shape,
    slice_,
)
from graphgen.ops.padding import pad
from graphgen.ops.reduce import reduce_l1, reduce_l2, reduce_mean
from graphgen.record import TensorLike
from graphgen.traits import Trait
from graphgen.value import Tensor


def _axes(x: Tensor, axis: int) -> list[int]:
    """The normalized axes, `axis` to the last, counted from the end."""
    return list(range(axis if axis < 0 else axis - rank(x), 0))


def _stash(x: Tensor) -> Tensor:
    half = numpy_dtype(x).itemsize < 4
    return cast(x, to=ir.DataType.FLOAT) if half else x


@composite("LayerNormalization", traits=Trait.BY_ROWS | Trait.NORMALIZES)
def layer_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Tensor:
    """(x - mean) / √(variance + ε) · scale + bias over the axes from `axis` on (arXiv 1607.06450).

    scale and bias have the sizes of those axes. Statistics are in float32 if x is narrower. As in
    ONNX; `layer_norm` has an optional scale.
    """
    axes = _axes(x, axis)
    wide = _stash(x)
    d = wide - reduce_mean(wide, axes)
    y = cast_like(d / sqrt(reduce_mean(d * d, axes) + epsilon), x) * scale
    return y if bias is None else y + bias


@layer_normalization.vjp
def _(g: Tensor, x: Tensor, scale: Tensor, axis: int, epsilon: float) -> tuple[Tensor, ...]:
    """dx = (h - mean(h) - x̂ mean(h x̂)) / σ with h = g·scale; dscale = Σ g x̂; dbias = Σ g."""
    axes = _axes(x, axis)
    wide = _stash(x)
    d = wide - reduce_mean(wide, axes)
    inverse = reciprocal(sqrt(reduce_mean(d * d, axes) + epsilon))  # a product is faster
    normal = d * inverse
    h = cast_like(g * scale, wide)
    dx = (h - reduce_mean(h, axes) - normal * reduce_mean(h * normal, axes)) * inverse
    return cast_like(dx, x), g * cast_like(normal, x), g


@layer_normalization.output(1)
def _(x: Tensor, axis: int) -> Tensor:
    """The mean, in float32 if x is narrower."""
    return reduce_mean(_stash(x), _axes(x, axis))


@layer_normalization.output(2)
def _(x: Tensor, axis: int, epsilon: float) -> Tensor:
    """1 / √(variance + ε)."""
    axes, wide = _axes(x, axis), _stash(x)
    d = wide - reduce_mean(wide, axes)
    return reciprocal(sqrt(reduce_mean(d * d, axes) + epsilon))


@composite("RMSNormalization", traits=Trait.BY_ROWS | Trait.NORMALIZES)
def rms_normalization(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    """x / √(mean(x²) + ε) · scale over the axes from `axis` on (arXiv 1910.07467).

    scale has the sizes of those axes. Statistics are in float32 if x is narrower. As in ONNX;
    `rms_norm` has an optional scale.
    """
    return cast_like(_stash(x) / root_mean_square(x, axis, epsilon), x) * scale


def root_mean_square(x: Tensor, axis: int, epsilon: float) -> Tensor:
    """√(mean(x²) + ε) over the axes from `axis` on, in float32 if x is narrower."""
    return sqrt(reduce_mean(_stash(x) ** 2.0, _axes(x, axis)) + epsilon)


# Its own body: with the square as a power, runtimes without the operator fuse it when they load.
rms_normalization.variant(rms_normalization.function)


@rms_normalization.vjp
def _(g: Tensor, x: Tensor, scale: Tensor, axis: int, epsilon: float) -> tuple[Tensor, ...]:
    """dx = (h - x̂ mean(h x̂)) / r with h = g·scale, r the root mean square; dscale = Σ g x̂."""
    axes = _axes(x, axis)
    wide = _stash(x)
    inverse = reciprocal(sqrt(reduce_mean(wide * wide, axes) + epsilon))
    normal = wide * inverse
    h = cast_like(g * scale, wide)
    dx = (h - normal * reduce_mean(h * normal, axes)) * inverse
    return cast_like(dx, x), g * cast_like(normal, x)


@composite(
    "BatchNormalization",
    outputs=lambda inputs, attributes: 3 if attributes["training_mode"] else 1,
)
def batch_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> Tensor:
    """(x - mean) / √(variance + ε) · scale + bias, each (C,), of x (N, C, ...) (arXiv 1502.03167).

    The given statistics are used, or with training_mode=1 those of x, over all axes but C; the node
    then has two further outputs, statistics · momentum + those of x · (1 - momentum). The variance
    is that of N numbers, not N / (N - 1) times as much.
    """
    if training_mode:
        mean, variance = batch_statistics(x)
    factor = scale / sqrt(variance + epsilon)
    return (x - _of_channels(mean, x)) * _of_channels(factor, x) + _of_channels(bias, x)


def batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel, (C,), of x, (N, C, ...)."""
    axes = [axis for axis in range(rank(x)) if axis != 1]
    mean = reduce_mean(x, axes, keepdims=0)
    d = x - _of_channels(mean, x)
    return mean, reduce_mean(d * d, axes, keepdims=0)


@batch_normalization.output(1)
def _(x: Tensor, mean: Tensor, momentum: float, training_mode: int) -> Tensor:
    """The running mean that the batch has moved."""
    if not training_mode:
        return mean
    return mean * momentum + batch_statistics(x)[0] * (1.0 - momentum)


@batch_normalization.output(2)
def _(x: Tensor, variance: Tensor, momentum: float, training_mode: int) -> Tensor:
    """The running variance that the batch has moved."""
    if not training_mode:
        return variance
    return variance * momentum + batch_statistics(x)[1] * (1.0 - momentum)


batch_normalization.fixed = dict.fromkeys(("mean", "variance"), "a running statistic")


def _of_channels(v: Tensor, x: Tensor) -> Tensor:
    """(C,) as it broadcasts with x, (N, C, ...)."""
    return v if rank(x) == 2 else reshape(v, [-1, *[1] * (rank(x) - 2)])


@composite("InstanceNormalization")
def instance_normalization(
    x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5
) -> Tensor:
    """x, (N, C, ...), normalized in each channel, · scale + bias, (C,) (arXiv 1607.08022)."""
    d = x - reduce_mean(x, axes := list(range(2, rank(x))))
    y = d / sqrt(reduce_mean(d * d, axes) + epsilon)
    return y * _of_channels(scale, x) + _of_channels(bias, x)


@composite("GroupNormalization")
def group_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    num_groups: int,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Tensor:
    """x, (N, C, ...), normalized in groups of channels, · scale + bias, (C,) (arXiv 1803.08494)."""
    groups = reshape(_stash(x), [dim(x, 0), num_groups, -1])
    d = groups - reduce_mean(groups, [2])
    y = cast_like(_reshape(d / sqrt(reduce_mean(d * d, [2]) + epsilon), shape(x)), x)
    return y * _of_channels(scale, x) + _of_channels(bias, x)


def group_norm_by_instances(
    x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float, stash_type: int
) -> Tensor:
    """GroupNormalization as InstanceNormalization of (N, G, ...), as TorchScript writes it."""
    groups = reshape(_stash(x), [dim(x, 0), num_groups, -1])
    ones, zeros = (f(num_groups, numpy_dtype(groups)) for f in (np.ones, np.zeros))
    y = _reshape(instance_normalization(groups, ones, zeros, epsilon=epsilon), shape(x))
    return cast_like(y, x) * _of_channels(scale, x) + _of_channels(bias, x)


def _expect_tensors(who: str, *given: TensorLike | None) -> None:
    for x in given:
        if isinstance(x, (int, float)):
            raise GraphgenError(
                f"{who}: {x!r} is in the place of a gain or a bias, (features,); give epsilon by "
                f"its name{user_line()}"
            )


def _ones(x: Tensor) -> Tensor:
    """A scale that changes nothing, of the size of x's last axis."""
    return expand(np.ones(1, numpy_dtype(x)), [dim(x, -1)])


def layer_norm(
    x: Tensor, scale: Tensor | None = None, bias: Tensor | None = None, *, epsilon: float = 1e-5
) -> Tensor:
    """(x - mean) / √(variance + ε) · scale + bias over the last axis, (..., D) (arXiv 1607.06450).

    scale and bias are (D,), or left out. Raises GraphgenError if one of them has another size.
    """
    _expect_tensors("layer_norm", scale, bias)
    scale = _ones(x) if scale is None else scale
    return layer_normalization(x, scale, bias, epsilon=epsilon)


def rms_norm(x: Tensor, scale: Tensor | None = None, *, epsilon: float = 1e-5) -> Tensor:
    """x / √(mean(x²) + ε) · scale over the last axis, (..., D) (arXiv 1910.07467).

    scale is (D,), or left out. Raises GraphgenError if it has another size.
    """
    _expect_tensors("rms_norm", scale)
    scale = _ones(x) if scale is None else scale
    return rms_normalization(x, scale, epsilon=epsilon)


def _check_norm(node: ir.Node) -> None:
    x = node.inputs[0]
    assert x is not None and x.shape is not None
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else -1
    normalized = x.shape[axis:]
    for value, name in zip(node.inputs[1:], ("scale", "bias"), strict=False):
        if value is None or value.shape is None:
            continue
        pairs = zip(value.shape[::-1], normalized[::-1], strict=False)
        fixed = all(a in (1, b) for a, b in pairs if isinstance(a, int) and isinstance(b, int))
        if len(value.shape) > len(x.shape) or not fixed:
            raise ValueError(
                f"{name} is {describe(value)}; it must match the normalized dimensions "
                f"[{', '.join(map(str, normalized))}] of x"
            )


CHECKS |= dict.fromkeys(
    ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"), _check_norm
)


@composite("LpNormalization")
def _lp_normalization(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    """x / (Σ |x|ᵖ)^(1/p) along `axis`, p 1 or 2; zeros stay zeros."""
    if p not in (1, 2):
        raise GraphgenError(f"LpNormalization: p is {p}; it must be 1 or 2")
    size = (reduce_l1 if p == 1 else reduce_l2)(x, [axis])
    return x / where(equal(size, 0.0), 1.0, size)


@composite("LRN")
def _local_response_normalization(
    x: Tensor, *, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, size: int
) -> Tensor:
    """x / (bias + α/size Σ x²)^β over `size` neighboring channels of x, (N, C, ...)."""
    before, channels = (size - 1) // 2, dim(x, 1)
    squares = pad(x * x, [before, size - 1 - before], None, [1])
    near = (slice_(squares, [k], [channels + k], [1]) for k in range(size))
    return x / pow(bias + functools.reduce(add, near) * (alpha / size), beta)
