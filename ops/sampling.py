"""Reading an image between its elements: at the places of a grid, and in regions."""

import functools
from collections.abc import Callable
from itertools import product
from typing import Literal, TypeAlias

import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.op import composite
from graphgen.ops.elementwise import (
    abs,
    add,
    equal,
    floor,
    greater_or_equal,
    less_or_equal,
    logical_and,
    maximum,
    mul,
    round,
    where,
)
from graphgen.ops.layout import (
    arange,
    cast,
    cast_like,
    dim,
    gather,
    rank,
    reshape,
    transpose,
    unsqueeze,
)
from graphgen.ops.resizing import _cubic
from graphgen.ops.sizes import sizes_vector
from graphgen.record import TensorLike
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
    rows = reshape(transpose(x, perm=[0, *range(2, n + 2), 1]), [-1, dim(x, 1)])
    count = [1] * (rank(grid) - 2)
    images = reshape(arange(dim(x, 0)), [-1, *count])
    parts = list[Tensor]()
    for corner in product(*found):
        index = images
        for i, (place, _) in enumerate(corner):
            index = index * dim(x, 2 + i) + place
        weight = functools.reduce(mul, (weight for _, weight in corner))
        parts.append(gather(rows, index) * cast_like(unsqueeze(weight, [-1]), x))  # (N, *out, C)
    return transpose(functools.reduce(add, parts), perm=[0, n + 1, *range(1, n + 1)])


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
