"""Reading an image between its elements: at the places of a grid, in regions, and by offsets."""

import functools
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.infer import describe
from graphgen.op import composite
from graphgen.ops.elementwise import (
    abs,
    add,
    ceil,
    equal,
    floor,
    greater_or_equal,
    less,
    less_or_equal,
    logical_and,
    maximum,
    minimum,
    mul,
    round,
    where,
)
from graphgen.ops.layout import (
    arange,
    cast,
    cast_like,
    concat,
    dim,
    gather,
    rank,
    reshape,
    transpose,
    unsqueeze,
    zeros_like,
)
from graphgen.ops.linalg import matmul
from graphgen.ops.reduce import reduce_max, reduce_sum
from graphgen.ops.resizing import _cubic
from graphgen.ops.sizes import sizes_vector
from graphgen.record import TensorLike
from graphgen.traits import Trait
from graphgen.value import Tensor

Padding: TypeAlias = Literal["zeros", "border", "reflection"]

_CUBIC = -0.75


@composite("GridSample")
def grid_sample(
    x: Tensor,
    grid: Tensor,
    *,
    align_corners: int = 0,
    mode: Literal["linear", "nearest", "cubic"] = "linear",
    padding_mode: Padding = "zeros",
) -> Tensor:
    """x, (N, C, *sizes), at the places of `grid`, (N, *out, axes): (N, C, *out).

    A place has its last axis first, from -1 to 1: the middles of the elements at the ends if
    align_corners=1, else their outer edges. It is a weighted sum of the elements around it, of two
    along each axis, or of four if "cubic" (Keys, doi 10.1109/TASSP.1981.1163711), of two axes only.
    Beyond x there are zeros, the element at the border, or x reflected. The gradient of a place
    moved to the border is 0, as in PyTorch.
    """
    n = rank(x) - 2
    if mode == "cubic" and n != 2:
        raise GraphgenError(f"GridSample: mode is cubic, which is for 2 axes, and x has {n}")
    sizes = [cast_like(gather(sizes_vector(dim(x, 2 + i)), 0), grid) for i in range(n)]
    found: list[list[tuple[Tensor, Tensor]]] = []  # for each axis, indices in x and weights
    for i, size in enumerate(sizes):
        u = gather(grid, n - 1 - i, axis=-1)  # (N, *out)
        at = (u + 1.0) / 2.0 * (size - 1.0) if align_corners else ((u + 1.0) * size - 1.0) / 2.0
        inside = _inside(padding_mode, size, bool(align_corners))
        steps: list[tuple[Tensor, TensorLike]]
        if mode == "cubic":
            first = floor(at)
            steps = [(inside(first + k), _cubic(at - (first + k), _CUBIC)) for k in _AROUND]
        elif mode == "nearest":
            steps = [(round(inside(at)), 1.0)]
        else:
            at = inside(at)
            first = floor(at)
            steps = [(first, 1.0 - (at - first)), (first + 1.0, at - first)]
        found.append([_within(place, size, weight) for place, weight in steps])
    last = transpose(x, perm=[0, *range(2, n + 2), 1])
    images = reshape(arange(dim(x, 0)), [-1, *[1] * (rank(grid) - 2)])
    parts = [_at(last, images, corner) for corner in product(*found)]  # (N, *out, C)
    return transpose(functools.reduce(add, parts), perm=[0, n + 1, *range(1, n + 1)])


def _at(x: Tensor, images: Tensor, corner: Sequence[tuple[Tensor, TensorLike]]) -> Tensor:
    """Elements of x, (N, *sizes, C), at places along each axis, times their weights: (..., C)."""
    index = images
    for i, (place, _) in enumerate(corner):
        index = index * dim(x, 1 + i) + place
    rows = reshape(x, [-1, dim(x, rank(x) - 1)])
    weight: Any = functools.reduce(mul, (weight for _, weight in corner))
    return gather(rows, index) * cast_like(unsqueeze(weight, [-1]), x)


@composite("RoiAlign")
def roi_align(
    x: Tensor,
    rois: Tensor,
    batch_indices: Tensor,
    *,
    coordinate_transformation_mode: Literal["half_pixel", "output_half_pixel"] = "half_pixel",
    mode: Literal["avg", "max"] = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Tensor:
    """Regions of images x, (N, C, H, W), as (R, C, output_height, output_width).

    A region, of `rois` (R, 4), has the corners x1, y1, x2, y2, times `spatial_scale`, in the image
    that `batch_indices`, int64 (R,), names (He et al., arXiv 1703.06870). It is divided into bins;
    each is the mean of sampling_ratio² places in it, or of as many as it has elements if that is 0,
    each between four elements; with "max", the largest of all four elements times their weights.
    "output_half_pixel" does not move corners by half an element, and takes sides of at least 1.
    """
    half = coordinate_transformation_mode == "half_pixel"
    corners = rois * spatial_scale - (0.5 if half else 0.0)
    axes = [
        _bins(gather(corners, 1 - i, axis=1), gather(corners, 3 - i, axis=1), count, half,
              sampling_ratio, cast_like(gather(sizes_vector(dim(x, 2 + i)), 0), rois))
        for i, count in enumerate((output_height, output_width))
    ]  # fmt: skip
    (rows, used_rows, many_rows), (columns, used_columns, many_columns) = axes

    def spread(v: Tensor, column: int) -> Tensor:
        """(R, bins, places) as (R, bins, places, 1, 1), or as (R, 1, 1, bins, places)."""
        return unsqueeze(v, [1, 2] if column else [3, 4])

    images = unsqueeze(batch_indices, [1, 2, 3, 4])
    steps = [
        [(spread(place, i), spread(weight, i)) for place, weight in axis]
        for i, axis in enumerate((rows, columns))
    ]
    last = transpose(x, perm=[0, 2, 3, 1])
    parts = [_at(last, images, corner) for corner in product(*steps)]  # (R, bins, places, .., C)
    used = unsqueeze(logical_and(spread(used_rows, 0), spread(used_columns, 1)), [-1])
    many = unsqueeze(many_rows * many_columns, [1, 2, 3])
    if mode == "max":
        most = where(used, functools.reduce(maximum, parts), -np.inf)
        y = where(equal(many, 0.0), 0.0, reduce_max(most, [2, 4], keepdims=0))
    else:
        total = where(used, functools.reduce(add, parts), 0.0)
        y = reduce_sum(total, [2, 4], keepdims=0) / maximum(many, 1.0)
    return transpose(y, perm=[0, 3, 1, 2])


def _bins(
    start: Tensor, end: Tensor, count: int, half: bool, ratio: int, size: Tensor
) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Along one axis the two elements around each place, with weights, (R, count, places).

    And which places count, (R, 1, places), and how many there are in a bin, (R,).
    """
    length = end - start if half else maximum(end - start, 1.0)
    bin_size = length / float(count)
    if ratio > 0:
        many = zeros_like(start) + float(ratio)
        most: Any = ratio
    else:
        many = maximum(ceil(bin_size), 0.0)
        most = cast(
            reduce_max(concat([many, cast_like(np.ones(1), many)], axis=0), [0], keepdims=0),
            to=ir.DataType.INT64,
        )
    number = cast_like(arange(most), start)  # (places,)
    at = unsqueeze(bin_size / maximum(many, 1.0), [1]) * (number + 0.5)  # (R, places)
    bins = cast_like(np.arange(count, dtype=np.float64), start)
    begin = unsqueeze(start, [1]) + unsqueeze(bin_size, [1]) * bins  # (R, count)
    at = unsqueeze(begin, [2]) + unsqueeze(at, [1])
    inside = logical_and(greater_or_equal(at, -1.0), less_or_equal(at, size))
    at = where(greater_or_equal(at, 0.0), at, 0.0)
    first = minimum(floor(at), size - 1.0)
    weight = where(greater_or_equal(first, size - 1.0), 0.0, at - first)
    steps = []
    for place, part in ((first, 1.0 - weight), (minimum(first + 1.0, size - 1.0), weight)):
        index = cast(where(inside, place, 0.0), to=ir.DataType.INT64)
        steps.append((index, where(inside, part, 0.0)))
    return steps, unsqueeze(less(number, unsqueeze(many, [1])), [1]), many


@composite("DeformConv", traits=Trait.PRODUCT)
def deform_conv(
    x: Tensor,
    w: Tensor,
    offset: Tensor,
    b: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    offset_group: int = 1,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """A convolution whose window has each element moved by an offset, between elements of x.

    x (N, C, *sizes) with w (O, C / group, *kernel) + b (O,) gives (N, O, *out). For each element of
    the kernel and each of `offset_group` groups of channels, `offset`, (N, groups · kernel · axes,
    *out), has a distance along each axis, and `mask`, (N, groups · kernel, *out), a factor (Zhu et
    al., arXiv 1811.11168). Around x there are zeros. Raises GraphgenError if the kernel's sizes are
    not known.
    """
    n = rank(x) - 2
    kernel = [*kernel_shape] if kernel_shape else [d for d in w.shape[2:] if isinstance(d, int)]
    if len(kernel) != n:
        raise GraphgenError(f"DeformConv: w is {describe(w)}; the kernel's sizes must be known")
    steps, apart = strides or [1] * n, dilations or [1] * n
    out = [dim(offset, 2 + i) for i in range(n)]
    elements = int(np.prod(kernel))
    places = np.stack(np.unravel_index(np.arange(elements), kernel))  # (axes, elements)
    moved = reshape(offset, [dim(x, 0), offset_group, elements, n, *out])
    found = []
    for i in range(n):
        shape = [1] * n
        shape[i] = -1
        begin = reshape(arange(out[i]) * steps[i] - (pads[i] if pads else 0), shape)
        own = np.reshape(places[i] * apart[i], [-1, *[1] * n])
        at = gather(moved, i, axis=3) + cast_like(
            begin + own, offset
        )  # (N, groups, elements, *out)
        size = cast_like(gather(sizes_vector(dim(x, 2 + i)), 0), offset)
        first = floor(at)
        around = [(first, 1.0 - (at - first)), (first + 1.0, at - first)]
        found.append([_within(place, size, weight) for place, weight in around])
    parted = reshape(x, [dim(x, 0) * offset_group, -1, *(dim(x, 2 + i) for i in range(n))])
    last = transpose(parted, perm=[0, *range(2, n + 2), 1])
    images = reshape(arange(dim(x, 0) * offset_group), [-1, offset_group, *[1] * (n + 1)])
    values = functools.reduce(add, (_at(last, images, corner) for corner in product(*found)))
    if mask is not None:
        values = values * unsqueeze(reshape(mask, [dim(x, 0), offset_group, elements, *out]), [-1])
    values = transpose(
        values, perm=[0, 1, n + 3, *range(2, n + 3)]
    )  # (N, groups, C, elements, *out)
    columns = reshape(values, [dim(x, 0), group, dim(w, 1) * elements, -1])
    y = matmul(reshape(w, [group, -1, dim(w, 1) * elements]), columns)
    y = reshape(y, [dim(x, 0), dim(w, 0), *out])
    return y if b is None else y + reshape(b, [-1, *[1] * n])


_AROUND = (-1.0, 0.0, 1.0, 2.0)


def _within(place: Tensor, size: Tensor, weight: TensorLike) -> tuple[Tensor, Tensor]:
    """A place as an index, and its weight: both are 0 if it is outside or NaN."""
    inside = logical_and(greater_or_equal(place, 0.0), less_or_equal(place, size - 1.0))
    weight = cast_like(inside, place) if isinstance(weight, float) else where(inside, weight, 0.0)
    return cast(where(inside, place, 0.0), to=ir.DataType.INT64), weight


def _inside(padding: Padding, size: Tensor, align: bool) -> Callable[[Tensor], Tensor]:
    """What moves places beyond the ends into x, unless zeros are there."""

    def clipped(at: Tensor) -> Tensor:
        end = size - 1.0
        return where(less_or_equal(at, 0.0), 0.0, where(greater_or_equal(at, end), end, at))

    def reflected(at: Tensor) -> Tensor:
        low, span = (0.0, size - 1.0) if align else (-0.5, size)
        far = abs(at - low)
        times = floor(far / maximum(span, 1.0))
        rest = far - span * times
        even = equal(times, floor(times / 2.0) * 2.0)
        return clipped(where(even, rest + low, span - rest + low))

    return {"zeros": lambda at: at, "border": clipped, "reflection": reflected}[padding]
