"""Padding and repeating, and gradients of operators that take parts: padding undoes a slice."""

from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.graph import constant
from graphgen.op import primitive
from graphgen.ops.elementwise import less, maximum, minimum, neg, where
from graphgen.ops.layout import (
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
from graphgen.record import Operand, Tensor
from graphgen.traits import Trait


@primitive("Pad", traits=Trait.MOVES | Trait.SIZED)
def pad(x: Any, pads: Any, value: Any = None, axes: Any = None, *, mode: str = "constant") -> Any:
    """x with pads[i] elements before and pads[n + i] after it along the i-th of n axes.

    They hold `value` or 0, or with mode "edge", "reflect" or "wrap" elements of x; a negative
    number cuts elements off.
    """
    axes = range(x.ndim) if axes is None else [int(a) % x.ndim for a in axes]
    widths = np.zeros((x.ndim, 2), np.int64)
    widths[list(axes)] = np.reshape(pads, (2, -1)).T
    cut = np.maximum(-widths, 0)
    x = x[tuple(slice(a, n - b) for n, (a, b) in zip(x.shape, cut, strict=True))]
    fill = {"constant_values": 0 if value is None else value} if mode == "constant" else {}
    return np.pad(x, np.maximum(widths, 0), mode=mode, **fill)  # type: ignore[call-overload]


@pad.vjp
def _(
    g: Tensor, x: Tensor, pads: Tensor, value: Tensor, axes: Tensor, mode: str
) -> tuple[Tensor | None, ...]:
    """dx = g without the padding, which gives dvalue = Σ; elements of x in it are added to x's."""
    if mode != "constant":
        return add_at(pad(_places(x), pads, None, axes, mode=mode), g, x), None, None
    dx = shaped(pad(g, neg(pads), None, axes), x)
    given = value is not None
    return dx, None, _total(g) - _total(dx) if given else None


@slice_.vjp
def _(
    g: Tensor, y: Tensor, x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor, steps: Tensor
) -> Tensor:
    """dx = g with zeros around it, and with steps other than 1 also between its elements."""
    along, by = (constant(v) if isinstance(v, ir.Value) else v for v in (axes, steps))
    if (axes is not None and along is None) or (steps is not None and np.any(by != 1)):
        return add_at(slice_(_places(x), starts, ends, axes, steps), g, x)
    along = range(starts.shape[0]) if along is None else [int(a) for a in along]
    whole, part = (_sizes([dim(v, a) for a in along]) for v in (x, y))
    start = cast_like(starts, np.int64())
    start = where(less(start, 0), start + whole, start)
    before = minimum(maximum(start, 0), whole)
    return shaped(pad(g, concat(before, whole - before - part, axis=0), None, list(along)), x)


def _sizes(dims: list[Any]) -> Operand:
    """Results of `dim` as one list."""
    return concat(*(d if isinstance(d, ir.Value) else np.array([d]) for d in dims), axis=0)


def _total(x: Operand) -> Operand:
    return reduce_sum(x, None, keepdims=0)


def _places(x: Operand) -> Operand:
    """The flat index of each element of x."""
    return _reshape(arange(size(x)), shape(x))


def add_at(places: Operand, g: Operand, x: Operand) -> Operand:
    """Zeros of x's shape, to which g is added at these flat indices."""
    zeros, places, g = (_reshape(v, [-1]) for v in (zeros_like(x), places, g))
    return _reshape(scatter_elements(zeros, places, g, reduction="add"), shape(x))


def shaped(g: Operand, x: Operand) -> Operand:
    """g, known to have the shape of x."""
    if isinstance(g, ir.Value) and x.shape is not None:
        g.shape = ir.Shape(x.shape)
    return g


@primitive("Tile", traits=Trait.MOVES | Trait.SIZED)
def tile(x: Any, repeats: Any) -> Operand:
    """x repeated along each axis."""
    return np.tile(x, tuple(int(r) for r in repeats))


@tile.vjp
def _(g: Tensor, x: Tensor, repeats: Tensor) -> Tensor:
    """dx = Σ g over the repetitions."""
    pairs = concat(unsqueeze(repeats, [1]), unsqueeze(shape(x), [1]), axis=1)
    parts = _reshape(g, reshape(pairs, [-1]), allowzero=1)
    return shaped(reduce_sum(parts, list(range(0, 2 * rank(x), 2)), keepdims=0), x)
