"""Gradients of scatters with a reduction, and of what they are made of; scatters of sequences."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from graphgen.op import composite
from graphgen.ops.elementwise import equal, logical_and, mod, where
from graphgen.ops.layout import (
    arange,
    cast_like,
    dim,
    expand,
    gather_elements,
    gather_nd,
    rank,
    reshape,
    scatter_elements,
    scatter_nd,
    shape,
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


@composite("TensorScatter")
def tensor_scatter(
    past_cache: Tensor,
    update: Tensor,
    write_indices: Tensor | None = None,
    *,
    axis: int = -2,
    mode: Literal["linear", "circular"] = "linear",
) -> Tensor:
    """`past_cache` with `update` over it along `axis`, from `write_indices`, int64 (B,), on.

    Both are (B, ...), and differ in the size of `axis` only; without indices writing begins at 0.
    "circular" goes on at the beginning after the end; with "linear", all must have a place.
    """
    n = rank(update)
    along = axis % n
    index = reshape(arange(dim(update, along)), [-1, *[1] * (n - 1 - along)])
    if write_indices is not None:
        index = index + reshape(write_indices, [-1, *[1] * (n - 1)])
    if mode == "circular":
        index = mod(index, dim(past_cache, along))
    return scatter_elements(past_cache, expand(index, shape(update)), update, axis=along)
