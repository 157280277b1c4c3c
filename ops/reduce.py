"""Reductions. `axes` is ONNX's second input: absent means all axes; they keep size 1."""

from typing import Any

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.graph import constant
from graphgen.op import composite, primitive
from graphgen.operands import Array
from graphgen.ops.elementwise import (
    abs,
    div,
    equal,
    exp,
    less,
    less_or_equal,
    log,
    sqrt,
    where,
)
from graphgen.ops.layout import (
    _ints,
    arange,
    cast_like,
    dim,
    expand,
    numpy_dtype,
    rank,
    scatter_elements,
    shape,
    unsqueeze,
    zeros_like,
)
from graphgen.record import Sizes, TensorLike
from graphgen.traits import Trait
from graphgen.value import Tensor, Value


def _axes(x: Tensor, axes: Sizes | None, noop: int) -> tuple[int, ...]:
    given = () if axes is None else tuple(_ints(axes))
    return given if given or noop else tuple(range(rank(x)))


def _back(v: Tensor, x: Tensor, axes: Sizes | None, keepdims: int, noop: int) -> Tensor:
    """A reduced value with its axes of size 1 back in place."""
    if keepdims or (noop and axes is None):
        return v
    return unsqueeze(v, axes if axes is not None else list(range(rank(x))))


def _expect_exact(
    x: Tensor,
    axis: Sizes | None,
    noop: int,
    *,
    term: np.ufunc = np.positive,
    fold: np.ufunc = np.add,
    dtype: np.dtype[Any] | None = None,
) -> None:
    """Raise ValueError if the terms of an array of integers have a result that the runtime lacks.

    Its kernels calculate in float64, which has 53 bits, and then stop at the ends of the dtype,
    that of x if none is given.
    """
    if not _is_integers(x):
        return
    dtype = dtype or numpy_dtype(x)
    terms, axes = term(np.asarray(x, np.float64)), _axes(x, axis, noop)
    ends, y = np.iinfo(dtype), fold.reduce(terms, axes)
    exact = (fold.reduce(np.abs(terms), axes) < 2.0**53) & (ends.min <= y) & (y <= ends.max)
    if not np.all(exact):
        raise ValueError(
            f"a result is beyond 2⁵³ or the ends of {dtype}, where the runtime rounds or cuts off; "
            "cast to a wider dtype first, or to a float"
        )


def _is_integers(x: Tensor) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind in "iu"


@primitive("ReduceSum", traits=Trait.REDUCES)
def reduce_sum(
    x: Tensor, axis: Sizes | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    """Σ x over `axis`, one or a list (all if None); it keeps size 1 unless keepdims is 0."""
    _expect_exact(x, axis, noop_with_empty_axes)
    axes = _axes(x, axis, noop_with_empty_axes)
    return np.asarray(np.sum(x, axes, numpy_dtype(x), keepdims=bool(keepdims)))


@reduce_sum.vjp
def _(g: Tensor, x: Tensor, axis: Tensor, keepdims: int, noop_with_empty_axes: int) -> Tensor:
    """dx = g repeated."""
    return expand(_back(g, x, axis, keepdims, noop_with_empty_axes), shape(x))


@primitive("ReduceMean", traits=Trait.REDUCES)
def reduce_mean(
    x: Tensor, axis: Sizes | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    """mean x over `axis`, one or a list (all if None); it keeps size 1 unless keepdims is 0.

    ONNX leaves the mean of nothing open; onnxruntime has 0, and so has this.
    """
    _expect_exact(x, axis, noop_with_empty_axes, dtype=np.dtype(np.int64))
    axes = _axes(x, axis, noop_with_empty_axes)
    wide: np.dtype[Any] = np.dtype(np.float64) if _is_integers(x) else numpy_dtype(x)
    folded = np.mean if np.size(x) else np.sum
    y: Array = folded(x, axes, wide, keepdims=bool(keepdims))
    return np.asarray(y).astype(numpy_dtype(x))


@reduce_mean.vjp
def _(g: Tensor, x: Tensor, axis: Tensor, keepdims: int, noop_with_empty_axes: int) -> Tensor:
    """dx = g / n repeated, with n elements per mean."""
    g = _back(g, x, axis, keepdims, noop_with_empty_axes)
    elements = div(reduce_prod(shape(x), [0], keepdims=0), reduce_prod(shape(g), [0], keepdims=0))
    return expand(g / cast_like(elements, g), shape(x))


def _end(x: Tensor, sign: int) -> Any:
    """The largest element of x's dtype, or the smallest for a negative sign."""
    dtype = numpy_dtype(x)
    if dtype.kind in "iu":
        return np.iinfo(dtype).max if sign > 0 else np.iinfo(dtype).min
    return sign > 0 if dtype.kind == "b" else sign * np.inf


@primitive("ReduceMax", traits=Trait.REDUCES)
def reduce_max(
    x: Tensor, axis: Sizes | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    """max x over `axis`, one or a list (all if None); it keeps size 1 unless keepdims is 0.

    Of nothing it is -∞, or the smallest integer; an element of NaN counts or not, by the kernel.
    """
    axes = _axes(x, axis, noop_with_empty_axes)
    return np.asarray(np.max(x, axes, keepdims=bool(keepdims), initial=_end(x, -1)))


@reduce_max.vjp
def _(
    g: Tensor, y: Tensor, x: Tensor, axis: Tensor, keepdims: int, noop_with_empty_axes: int
) -> Tensor:
    """dx = g shared equally by the elements that equal the maximum."""
    return _share(g, y, x, axis, keepdims, noop_with_empty_axes)


def _share(g: Tensor, y: Tensor, x: Tensor, axis: Sizes | None, keepdims: int, noop: int) -> Tensor:
    g, y = _back(g, x, axis, keepdims, noop), _back(y, x, axis, keepdims, noop)
    hit = where(equal(x, y), cast_like(np.ones((), np.float32), x), 0.0)
    return hit * (g / reduce_sum(hit, axis, noop_with_empty_axes=noop))


@primitive("ReduceMin", traits=Trait.REDUCES)
def reduce_min(
    x: Tensor, axis: Sizes | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    """min x over `axis`, one or a list (all if None); it keeps size 1 unless keepdims is 0.

    Of nothing it is ∞, or the largest integer; an element of NaN counts or not, by the kernel.
    """
    axes = _axes(x, axis, noop_with_empty_axes)
    return np.asarray(np.min(x, axes, keepdims=bool(keepdims), initial=_end(x, 1)))


@reduce_min.vjp
def _(
    g: Tensor, y: Tensor, x: Tensor, axis: Tensor, keepdims: int, noop_with_empty_axes: int
) -> Tensor:
    """dx = g shared equally by the elements that equal the minimum."""
    return _share(g, y, x, axis, keepdims, noop_with_empty_axes)


@primitive("ReduceProd", traits=Trait.REDUCES)
def reduce_prod(
    x: Tensor, axis: Sizes | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    """Π x over `axis`, one or a list (all if None); it keeps size 1 unless keepdims is 0."""
    _expect_exact(x, axis, noop_with_empty_axes, fold=np.multiply)
    axes = _axes(x, axis, noop_with_empty_axes)
    return np.asarray(np.prod(x, axes, numpy_dtype(x), keepdims=bool(keepdims)))


@reduce_prod.vjp
def _(
    g: Tensor, y: Tensor, x: Tensor, axis: Tensor, keepdims: int, noop_with_empty_axes: int
) -> Tensor:
    """dx = g times the other elements: g y / x, except where there is a single zero."""
    g = _back(g, x, axis, keepdims, noop_with_empty_axes)
    zero = equal(x, 0.0)
    others = where(zero, 1.0, x)
    how: dict[str, Any] = {"noop_with_empty_axes": noop_with_empty_axes}
    zeros = reduce_sum(cast_like(zero, x), axis, **how)
    rest = g * reduce_prod(others, axis, **how)
    alone = where(equal(zeros, 1.0), rest, 0.0)
    return where(zero, alone, where(equal(zeros, 0.0), rest / others, 0.0))


@composite("ReduceSumSquare", traits=Trait.REDUCES)
def reduce_sum_square(
    x: Tensor, axis: Sizes | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    """Σ x² over `axis`, one or a list (all if None); it keeps size 1 unless keepdims is 0."""
    _expect_exact(x, axis, noop_with_empty_axes, term=np.square)
    return reduce_sum(x * x, axis, keepdims=keepdims, noop_with_empty_axes=noop_with_empty_axes)


@composite("ReduceL1", traits=Trait.REDUCES)
def reduce_l1(
    x: Tensor, axis: Sizes | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    """Σ |x| over `axis`, one or a list (all if None); it keeps size 1 unless keepdims is 0."""
    _expect_exact(x, axis, noop_with_empty_axes, term=np.absolute)
    return reduce_sum(abs(x), axis, keepdims=keepdims, noop_with_empty_axes=noop_with_empty_axes)


@composite("ReduceL2", traits=Trait.REDUCES)
def reduce_l2(
    x: Tensor, axis: Sizes | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    """√Σ x² over `axis`, one or a list (all if None); it keeps size 1 unless keepdims is 0."""
    return sqrt(
        reduce_sum(x * x, axis, keepdims=keepdims, noop_with_empty_axes=noop_with_empty_axes)
    )


@reduce_l2.vjp
def _(
    g: Tensor, y: Tensor, x: Tensor, axis: Tensor, keepdims: int, noop_with_empty_axes: int
) -> Tensor:
    """dx = g x / y, and 0 if all of them are 0."""
    g, y = (_back(v, x, axis, keepdims, noop_with_empty_axes) for v in (g, y))
    return x * (g / where(equal(y, 0.0), 1.0, y))


@composite("ReduceLogSum", traits=Trait.REDUCES)
def reduce_log_sum(
    x: Tensor, axis: Sizes | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    """ln Σ x over `axis`, one or a list (all if None); it keeps size 1 unless keepdims is 0."""
    return log(reduce_sum(x, axis, keepdims=keepdims, noop_with_empty_axes=noop_with_empty_axes))


@composite("ReduceLogSumExp", traits=Trait.REDUCES | Trait.REFERENCE_DIFFERS)
def reduce_log_sum_exp(
    x: Tensor, axis: Sizes | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    """ln Σ exp(x) over `axis`, one or a list (all if None); it keeps size 1 unless keepdims is 0.

    The maximum is subtracted first, so that exp cannot overflow, unless it is infinite: of nothing
    but -∞ the result is -∞, and with an ∞ it is ∞.
    """
    most = reduce_max(x, axis, noop_with_empty_axes=noop_with_empty_axes)
    most = where(equal(abs(most), np.inf), 0.0, most)
    y = log(reduce_sum(exp(x - most), axis, noop_with_empty_axes=noop_with_empty_axes)) + most
    return reduce_max(y, axis, keepdims=keepdims, noop_with_empty_axes=noop_with_empty_axes)


@reduce_log_sum_exp.vjp
def _(
    g: Tensor, y: Tensor, x: Tensor, axis: Tensor, keepdims: int, noop_with_empty_axes: int
) -> Tensor:
    """dx = g exp(x - y)."""
    g, y = (_back(v, x, axis, keepdims, noop_with_empty_axes) for v in (g, y))
    return g * exp(x - y)


@primitive("ArgMax", traits=Trait.REDUCES)
def argmax(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    """The index of the largest element along `axis`, int64; the first of equal ones.

    The axis keeps size 1 unless keepdims is 0. With select_last_index=1, the last of equal ones.
    """
    if select_last_index:
        flipped = np.flip(x, axis)
        index = x.shape[axis] - 1 - np.argmax(flipped, axis, keepdims=bool(keepdims))
    else:
        index = np.argmax(x, axis, keepdims=bool(keepdims))
    return np.asarray(index, np.int64)


@primitive("CumSum", traits=Trait.REDUCES)
def cumsum(x: Tensor, axis: TensorLike, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """y[i] = Σ x[j] over j ≤ i along `axis`, a scalar operand; the shape of x.

    `exclusive` sums over j < i; `reverse` goes from the end, over j ≥ i, or j > i.
    """
    along = int(np.asarray(axis).item())
    x = np.flip(np.asarray(x), along) if reverse else x
    y: Array = np.cumsum(x, along, numpy_dtype(x))
    if exclusive and np.size(x):  # not y - x, which has lost what is small next to x
        y = np.insert(np.delete(y, -1, along), 0, 0, along)
    return np.flip(y, along) if reverse else y


@cumsum.vjp
def _(g: Tensor, axis: Tensor, exclusive: int, reverse: int) -> Tensor:
    """dx = the running sum of g in the other direction."""
    return cumsum(g, axis, exclusive=exclusive, reverse=1 - reverse)


@composite("CumProd")
def cumprod(x: Tensor, axis: TensorLike, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """y[i] = Π x[j] over j ≤ i along `axis`, a scalar operand; the shape of x.

    `exclusive` multiplies over j < i; `reverse` goes from the end, over j ≥ i, or j > i. Without a
    kernel, and for gradients, `axis` must be known before the run, and memory for all pairs of
    elements along it is needed.
    """
    along = _place(x, axis)
    taken = _ordered(x, along, exclusive, reverse)
    return reduce_prod(where(taken, unsqueeze(x, [along]), 1), [along + 1], keepdims=0)


def _place(x: Tensor, axis: TensorLike) -> int:
    place = constant(axis.value) if isinstance(axis, Value) else np.asarray(axis)
    if place is None:
        raise GraphgenError("CumProd: axis must be known before the run; give a constant")
    return int(place.item()) % rank(x)


def _ordered(x: Tensor, along: int, strict: int, reverse: int) -> Tensor:
    """For pairs (p, q) of places along an axis, which becomes two, whether q ≤ p; q ≥ p in reverse.

    `strict` leaves out the equal ones.
    """
    numbers = arange(dim(x, along))
    p, q = unsqueeze(numbers, [1]), unsqueeze(numbers, [0])
    p, q = (q, p) if reverse else (p, q)
    found = less(q, p) if strict else less_or_equal(q, p)
    return unsqueeze(found, list(range(2, rank(x) - along + 1))) if rank(x) > along + 1 else found


@cumprod.vjp
def _(g: Tensor, x: Tensor, axis: Tensor, exclusive: int, reverse: int) -> Tensor:
    """dx[k] = Σ g[i] times the other factors of y[i], over the products that have x[k].

    A quotient y / x would be 0 / 0 at zeros: those before k are one running product, and those
    after it are a running product of their own for each k.
    """
    along = _place(x, axis)
    before = cumprod(x, axis, exclusive=1, reverse=reverse)
    later = where(_ordered(x, along, 1, 1 - reverse), unsqueeze(x, [along]), 1)
    after = cumprod(later, np.asarray(along + 1), exclusive=exclusive, reverse=reverse)
    parts = where(_ordered(x, along, exclusive, 1 - reverse), after * unsqueeze(g, [along]), 0)
    return before * reduce_sum(parts, [along + 1], keepdims=0)


@primitive("TopK", outputs=2, traits=Trait.MOVES | Trait.SIZED)
def top_k(
    x: Tensor, k: Sizes, *, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[Tensor, Tensor]:
    """The k largest elements along `axis` in order, and their indices, int64: (..., k, ...) each.

    The k smallest if largest=0; of equal elements the first. NaN is larger than all others. Both
    are outputs of one call: `values, indices = ops.top_k(x, 2)`.
    """
    array = np.asarray(x)
    back = -array if array.dtype.kind not in "iu" else ~array  # no integer overflows this way
    keys = (back, ~np.isnan(array)) if largest else (array,)
    order = np.lexsort(keys, axis)
    index = np.take(order, np.arange(_ints(k)[0]), axis)
    return np.take_along_axis(array, index, axis), index.astype(np.int64)


@top_k.vjp
def _(g: tuple[Tensor, ...], y: tuple[Tensor, ...], x: Tensor, axis: int) -> Tensor:
    """dx = g added into zeros at the indices."""
    return scatter_elements(zeros_like(x), y[1], g[0], axis=axis, reduction="add")
