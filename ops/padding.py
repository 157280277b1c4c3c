"""Padding and repeating, and gradients of operators that take parts: padding undoes a slice."""

from typing import Any, Literal, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen.graph import constant
from graphgen.infer import axis_from_front
from graphgen.op import primitive
from graphgen.ops.elementwise import less, maximum, minimum, neg, where
from graphgen.ops.layout import (
    _ints,
    _reshape,
    arange,
    cast_like,
    concat,
    dim,
    rank,
    reshape,
    scatter_elements,
    shape,
    size,
    slice_,
    unsqueeze,
    zeros_like,
)
from graphgen.ops.reduce import reduce_sum
from graphgen.ops.sizes import sizes_vector
from graphgen.record import Sizes, TensorLike
from graphgen.traits import Trait
from graphgen.value import Tensor, Value, sizes_of

Mode: TypeAlias = Literal["constant", "edge", "reflect", "wrap"]


@primitive("Pad", traits=Trait.MOVES | Trait.SIZED)
def pad(
    x: Tensor,
    pads: Sizes,
    value: TensorLike | None = None,
    axes: Sizes | None = None,
    *,
    mode: Mode = "constant",
) -> Tensor:
    """x with pads[i] elements before and pads[n + i] after it along the i-th of n axes.

    They hold `value` or 0, or with mode "edge", "reflect" or "wrap" elements of x; a negative
    number cuts elements off.
    """
    n = rank(x)
    widths = np.zeros((n, 2), np.int64)
    along = list(range(n)) if axes is None else [axis_from_front("Pad", i, n) for i in _ints(axes)]
    widths[along] = np.reshape(_ints(pads), (2, -1)).T
    cut = np.maximum(-widths, 0)
    kept = tuple(slice(a, size - b) for size, (a, b) in zip(x.shape, cut, strict=True))
    how: dict[str, Any] = {"mode": mode}
    if mode == "constant":
        how["constant_values"] = 0 if value is None else value
    return np.asarray(np.pad(np.asarray(x)[kept], np.maximum(widths, 0), **how))


@pad.vjp
def _(
    g: Tensor, x: Tensor, pads: Tensor, value: Tensor | None, axes: Tensor | None, mode: Mode
) -> tuple[Tensor | None, ...]:
    """dx = g without the padding, which gives dvalue = Σ; elements of x in it are added to x's."""
    if mode != "constant":
        return add_at(pad(places_of(x), pads, None, axes, mode=mode), g, x), None, None
    dx = shaped(pad(g, neg(pads), None, axes), x)
    given = value is not None
    return dx, None, _total(g) - _total(dx) if given else None


@slice_.vjp
def _(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    starts: Tensor,
    ends: Tensor,
    axes: Tensor | None,
    steps: Tensor | None,
) -> Tensor:
    """dx = g with zeros around it, and with steps other than 1 also between its elements."""
    along, by = (constant(v) if isinstance(v, Value) else v for v in (axes, steps))
    if axes is None and isinstance(count := dim(starts, 0), int):
        along = np.arange(count)
    if along is None or (steps is not None and np.any(by != 1)):
        return add_at(slice_(places_of(x), starts, ends, axes, steps), g, x)
    over = _ints(along)
    whole, part = (sizes_vector(*(dim(v, a) for a in over)) for v in (x, y))
    start = cast_like(starts, np.zeros((), np.int64))
    start = where(less(start, 0), start + whole, start)
    before = minimum(maximum(start, 0), whole)
    return shaped(pad(g, concat(before, whole - before - part, axis=0), None, over), x)


def _total(x: Tensor) -> Tensor:
    return reduce_sum(x, None, keepdims=0)


def places_of(x: Tensor) -> Tensor:
    """The flat index of each element of x."""
    return _reshape(arange(size(x)), shape(x))


def add_at(places: Tensor, g: Tensor, x: Tensor) -> Tensor:
    """Zeros of x's shape, to which g is added at these flat indices."""
    zeros, places, g = (_reshape(v, [-1]) for v in (zeros_like(x), places, g))
    return _reshape(scatter_elements(zeros, places, g, reduction="add"), shape(x))


def shaped(g: Tensor, x: Tensor) -> Tensor:
    """g, known to have the shape of x."""
    if isinstance(g, Value) and (sizes := sizes_of(x)) is not None:
        g.value.shape = ir.Shape(sizes)
    return g


@primitive("Tile", traits=Trait.MOVES | Trait.SIZED)
def tile(x: Tensor, repeats: Sizes) -> Tensor:
    """x repeated repeats[i] times along axis i: sizes times repeats."""
    return np.tile(np.asarray(x), _ints(repeats))


@tile.vjp
def _(g: Tensor, x: Tensor, repeats: Tensor) -> Tensor:
    """dx = Σ g over the repetitions."""
    pairs = concat(unsqueeze(repeats, [1]), unsqueeze(shape(x), [1]), axis=1)
    parts = _reshape(g, reshape(pairs, [-1]), allowzero=1)
    return shaped(reduce_sum(parts, list(range(0, 2 * rank(x), 2)), keepdims=0), x)
