"""Gradients of scatters with a reduction, and of what they are made of."""

from collections.abc import Callable
from typing import Any, TypeAlias

from graphgen.ops.elementwise import equal, logical_and, where
from graphgen.ops.layout import (
    cast_like,
    gather_elements,
    gather_nd,
    scatter_elements,
    scatter_nd,
    zeros_like,
)
from graphgen.value import Tensor

_Take: TypeAlias = Callable[[Tensor], Tensor]
_Put: TypeAlias = Callable[[Tensor, Tensor, Any], Tensor]


def _through(
    g: Tensor, y: Tensor, x: Tensor, updates: Tensor, reduction: str, take: _Take, put: _Put
) -> tuple[Tensor | None, ...]:
    """The cotangents of x and of updates, from what takes and puts elements at the indices."""
    if reduction == "none":
        return put(g, zeros_like(updates), "none"), None, take(g)
    if reduction == "add":
        return g, None, take(g)
    if reduction == "mul":
        # What meets no zero is the product without itself; of a single zero, the product of others.
        zero = equal(updates, 0.0)
        others = where(zero, 1.0, updates)
        zeros = take(put(zeros_like(x), cast_like(zero, updates), "add"))
        rest = take(g * put(x, others, "mul"))
        alone = logical_and(zero, equal(zeros, 1.0))
        dupdates = where(alone, rest, where(equal(zeros, 0.0), rest / others, 0.0))
        return put(g, updates, "mul"), None, dupdates
    ours, theirs = equal(x, y), equal(updates, take(y))
    share = g / put(cast_like(ours, g), cast_like(theirs, g), "add")
    return where(ours, share, 0.0), None, where(theirs, take(share), 0.0)


@scatter_elements.vjp
def _(
    g: Tensor, y: Tensor, x: Tensor, indices: Tensor, updates: Tensor, axis: int, reduction: str
) -> tuple[Tensor | None, ...]:
    """dupdates = g at the indices; dx = g, except where it was overwritten.

    A product gives each factor g times the others; "max" and "min" share g among equal elements.
    """

    def take(v: Tensor) -> Tensor:
        return gather_elements(v, indices, axis=axis)

    def put(v: Tensor, u: Tensor, how: Any) -> Tensor:
        return scatter_elements(v, indices, u, axis=axis, reduction=how)

    return _through(g, y, x, updates, reduction, take, put)


@scatter_nd.vjp
def _(
    g: Tensor, y: Tensor, x: Tensor, indices: Tensor, updates: Tensor, reduction: str
) -> tuple[Tensor | None, ...]:
    """As for `scatter_elements`."""

    def take(v: Tensor) -> Tensor:
        return gather_nd(v, indices)

    def put(v: Tensor, u: Tensor, how: Any) -> Tensor:
        return scatter_nd(v, indices, u, reduction=how)

    return _through(g, y, x, updates, reduction, take, put)
