"""Resizing: a product with a matrix of weights along each axis, and so is its gradient."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen.graph import constant
from graphgen.infer import axis_from_front, same_dim
from graphgen.op import primitive
from graphgen.ops.elementwise import (
    abs,
    ceil,
    equal,
    floor,
    less,
    less_or_equal,
    logical_and,
    maximum,
    minimum,
    neg,
    where as choose,
)
from graphgen.ops.layout import (
    _ints,
    cast,
    cast_like,
    gather,
    numpy_dtype,
    range_,
    rank,
    shape,
    swap_last,
    transpose,
    unsqueeze,
)
from graphgen.ops.linalg import matmul
from graphgen.ops.padding import shaped
from graphgen.ops.reduce import reduce_max, reduce_min, reduce_sum
from graphgen.record import Sizes
from graphgen.traits import Trait
from graphgen.value import Tensor, Value

Mode: TypeAlias = Literal["nearest", "linear", "cubic"]
Rounding: TypeAlias = Literal["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]
Policy: TypeAlias = Literal["stretch", "not_larger", "not_smaller"]
Coordinates: TypeAlias = Literal[
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_half_pixel_for_nn",
    "tf_crop_and_resize",
]


class How(NamedTuple):
    """The attributes of a Resize that its weights depend on."""

    mode: Mode
    coordinates: Coordinates
    rounding: Rounding
    cubic: float
    antialias: int
    exclude_outside: int


@primitive(
    "Resize", traits=Trait.REFERENCE_DIFFERS | Trait.SIZED | Trait.OMITS_EMPTY | Trait.WIDTH_AS_ZERO
)
def resize(
    x: Tensor,
    roi: Tensor | None = None,
    scales: Tensor | None = None,
    sizes: Sizes | None = None,
    *,
    antialias: int = 0,
    axes: Sequence[int] | None = None,
    coordinate_transformation_mode: Coordinates = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: Policy = "stretch",
    mode: Mode = "nearest",
    nearest_mode: Rounding = "round_prefer_floor",
) -> Tensor:
    """x at other sizes: `scales` times its own, or `sizes`, along `axes` (all by default).

    Each element is a weighted sum of its neighbors, as the modes say. Beyond the region `roi` of
    "tf_crop_and_resize" it is `extrapolation_value`.
    """
    how = How(
        mode,
        coordinate_transformation_mode,
        nearest_mode,
        cubic_coeff_a,
        antialias,
        exclude_outside,
    )
    over = _along(x, axes)
    old = [x.shape[axis] for axis in over]
    given = None if sizes is None else np.asarray(_ints(sizes))
    factors = np.asarray(_factors(x, given, scales, over, keep_aspect_ratio_policy))
    new = [int(n * s) for n, s in zip(old, factors, strict=True)]
    if given is not None:
        whole = [int(np.floor(n * s + 0.5)) for n, s in zip(old, factors, strict=True)]
        new = given.tolist() if keep_aspect_ratio_policy == "stretch" else whole
    y, inside = np.asarray(x, np.float64), np.ones([1] * rank(x))
    for i, (axis, n, m) in enumerate(zip(over, old, new, strict=True)):
        if factors[i] == 1 and how.coordinates != "tf_crop_and_resize":
            continue
        counts = np.asarray(n), np.asarray(m)
        w = np.asarray(_weights(*counts, factors[i], _region(roi, i, len(over)), how))
        y = np.moveaxis(np.tensordot(y, w, ([axis], [1])), -1, axis)
        reached = w.any(1) if how.coordinates == "tf_crop_and_resize" else np.ones(m)
        inside = inside * np.reshape(reached, [-1 if a == axis else 1 for a in range(rank(x))])
    return np.where(inside, y, extrapolation_value).astype(numpy_dtype(x))


@resize.number
def _(number: Any, dtype: Any, bound: Mapping[str, Any]) -> Any:
    """Scales and the region are float32, whatever x is."""
    return np.dtype(np.float32) if np.asarray(number).dtype.kind == "f" else dtype


@resize.vjp
def _(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    roi: Tensor | None,
    scales: Tensor | None,
    sizes: Tensor | None,
    antialias: int,
    axes: Sequence[int] | None,
    coordinate_transformation_mode: Coordinates,
    cubic_coeff_a: float,
    exclude_outside: int,
    keep_aspect_ratio_policy: Policy,
    mode: Mode,
    nearest_mode: Rounding,
) -> Tensor:
    """dx = g times the weights, along each axis that changes."""
    how = How(
        mode,
        coordinate_transformation_mode,
        nearest_mode,
        cubic_coeff_a,
        antialias,
        exclude_outside,
    )
    over = _along(x, axes)
    factors = _factors(x, sizes, scales, over, keep_aspect_ratio_policy)
    known = constant(scales) if isinstance(scales, Value) else scales
    for i, axis in enumerate(over):
        if how.coordinates != "tf_crop_and_resize" and _is_kept(x, y, axis, known, i):
            continue
        n, m = (gather(shape(v), axis) for v in (x, y))
        w = cast_like(_weights(n, m, gather(factors, i), _region(roi, i, len(over)), how), g)
        if axis == rank(x) - 1:
            g = matmul(g, w)
        elif axis == rank(x) - 2:
            g = matmul(swap_last(w), g)
        else:
            perm = [*range(rank(x))]
            perm[axis], perm[-1] = perm[-1], perm[axis]
            g = transpose(matmul(transpose(g, perm=perm), w), perm=perm)
    return shaped(g, x)


def _is_kept(x: Tensor, y: Tensor, axis: int, scales: Any, i: int) -> bool:
    """Whether an axis keeps its size for sure, and with it each element."""
    if scales is not None:
        return bool(scales[i] == 1)
    return same_dim(*(_dim(v, axis) for v in (x, y)))


def _dim(x: Tensor, axis: int) -> Any:
    return x.value.shape[axis] if isinstance(x, Value) and x.value.shape else x.shape[axis]


def _along(x: Tensor, axes: Sequence[int] | None) -> list[int]:
    n = rank(x)
    return [axis_from_front("Resize", axis, n) for axis in (range(n) if axes is None else axes)]


def _factors(
    x: Tensor, sizes: Tensor | None, scales: Tensor | None, over: list[int], policy: Policy
) -> Tensor:
    """The new size by the old one, along each axis."""
    if sizes is None:
        assert scales is not None
        return scales
    old = gather(shape(x), np.array(over))
    each = _number(sizes) / _number(old)
    if policy == "stretch":
        return each
    one = reduce_min(each, [0]) if policy == "not_larger" else reduce_max(each, [0])
    return each * 0.0 + one


def _number(x: Any) -> Tensor:
    return cast(x, to=ir.DataType.FLOAT)


def _region(roi: Tensor | None, i: int, n: int) -> tuple[Tensor, Tensor] | None:
    if roi is None:
        return None
    return _number(gather(roi, i)), _number(gather(roi, n + i))


def _weights(
    n: Tensor, m: Tensor, scale: Any, region: tuple[Tensor, Tensor] | None, how: How
) -> Tensor:
    """The weights of n old elements in each of m new ones, float32[m, n].

    As the runtime does, positions are calculated in float32.
    """
    zero, one = np.int64(0), np.int64(1)
    old, new = (_number(range_(zero, count, one)) for count in (n, m))
    size, at = _number(n), _source(new, _number(n), _number(m), _number(scale), region, how)
    at, k = unsqueeze(at, [1]), unsqueeze(old, [0])
    if how.mode == "nearest":
        return _is_at(k, _rounded(at, how.rounding), size)
    if how.antialias:
        weights = _filtered(at, k, size, _number(scale), how)
    elif how.mode == "linear":
        weights = maximum(1.0 - abs(minimum(maximum(at, 0.0), size - 1.0) - k), 0.0)
    else:
        first = floor(at)
        weights = k * 0.0
        for step in (-1.0, 0.0, 1.0, 2.0):
            part, place = _cubic(at - (first + step), how.cubic), first + step
            if how.exclude_outside:
                weights = weights + part * _number(equal(k, place))
            else:
                weights = weights + part * _is_at(k, place, size)
        if how.exclude_outside:
            weights = weights / reduce_sum(weights, [1])
    if how.coordinates != "tf_crop_and_resize":
        return weights
    return weights * _number(logical_and(less_or_equal(0.0, at), less_or_equal(at, size - 1.0)))


def _source(
    o: Tensor, n: Tensor, m: Tensor, s: Tensor, region: tuple[Tensor, Tensor] | None, how: How
) -> Tensor:
    """Where each new element lies between the old ones."""
    single = equal(m, 1.0)
    if how.coordinates == "asymmetric":
        return o / s
    if how.coordinates == "tf_half_pixel_for_nn":
        return (o + 0.5) / s
    if how.coordinates == "align_corners":
        return choose(single, 0.0, o * (n - 1.0) / maximum(m - 1.0, 1.0))
    if how.coordinates == "tf_crop_and_resize":
        assert region is not None
        start, end = region
        step = (end - start) * (n - 1.0) / maximum(m - 1.0, 1.0)
        return choose(single, (start + end) * (n - 1.0) * 0.5, start * (n - 1.0) + o * step)
    middle = (o + 0.5) / s - 0.5
    if how.coordinates == "half_pixel_symmetric":
        return (n / 2.0) * (1.0 - m / (s * n)) + middle
    return choose(single, 0.0, middle) if how.coordinates == "pytorch_half_pixel" else middle


def _rounded(at: Tensor, rounding: Rounding) -> Tensor:
    if rounding == "floor":
        return floor(at)
    if rounding == "ceil":
        return ceil(at)
    return ceil(at - 0.5) if rounding == "round_prefer_floor" else floor(at + 0.5)


def _is_at(k: Tensor, place: Tensor, size: Tensor) -> Tensor:
    """1 for the element at a place, or at the end if it lies beyond."""
    return _number(equal(k, minimum(maximum(place, 0.0), size - 1.0)))


def _cubic(d: Tensor, a: float) -> Tensor:
    """Keys' cubic at a distance (doi 10.1109/TASSP.1981.1163711)."""
    d = abs(d)
    near = ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0
    far = ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a
    return choose(less(d, 1.0), near, choose(less(d, 2.0), far, 0.0))


def _filtered(at: Tensor, k: Tensor, size: Tensor, scale: Tensor, how: How) -> Tensor:
    """The weights of a filter that is as wide as a new element, normalized.

    What it reads beyond the ends is left out, or, as for a cubic, the element at the end.
    """
    narrow, reach = minimum(scale, 1.0), 1.0 if how.mode == "linear" else 2.0
    more = ceil(reach / narrow) + 1.0
    wide = (
        k if how.exclude_outside else unsqueeze(range_(neg(more), size + more, np.float32(1)), [0])
    )
    d = (wide - at) * narrow
    weights = maximum(1.0 - abs(d), 0.0) if how.mode == "linear" else _cubic(d, how.cubic)
    weights = weights / reduce_sum(weights, [1])
    return weights if how.exclude_outside else matmul(weights, _is_at(k, swap_last(wide), size))
