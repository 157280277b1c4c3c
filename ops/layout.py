"""Operators that move, cut, join and cast elements without calculating, and sizes."""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError, user_line
from graphgen.infer import Dim, axis_from_front, describe, expect_distinct, expect_same
from graphgen.op import composite, primitive
from graphgen.operands import DTypeLike, size_as, to_dtype
from graphgen.record import Operands, SizeLike, Sizes, TensorLike, current_tape
from graphgen.traits import Trait
from graphgen.value import Size, Tensor, Value, sizes_of

Reduction: TypeAlias = Literal["none", "add", "mul", "max", "min"]
_REDUCTIONS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


@primitive("Shape", traits=Trait.SHAPE)
def _shape(x: Tensor, *, start: int = 0, end: int | None = None) -> Tensor:
    """The sizes of axes start to end."""
    return np.asarray(x.shape[start:end], np.int64)


def shape(x: Tensor) -> Tensor:
    """The sizes of x: an int64 array if they are known now, else a value."""
    dims = sizes_of(x)
    if dims is not None and all(isinstance(d, int) for d in dims):
        return np.asarray(dims, np.int64)
    return _shape(x)


def dim(x: Tensor, axis: int) -> Size | int:
    """The size of one axis: an int if it is known now, else a `Size`, which is used like one."""
    sizes = sizes_of(x)
    if sizes is not None and isinstance(size := size_at(x, axis), int):
        return size
    axis = axis if sizes is None else axis % len(sizes)
    made = _shape(x, start=axis, end=None if axis == -1 else axis + 1)
    if isinstance(made, Value):  # of a tensor of unknown rank, inference takes it for a list
        made.value.shape = ir.Shape([1])
    return size_from(made)


def size_from(made: Tensor, *, signed: bool = False) -> Size:
    """The size that stands in the graph as this int64[1]."""
    tape = current_tape()
    assert tape is not None and isinstance(made, Value)
    return Size(symbol_of(made) or tape.context.new_symbolic_dim(), made=made.value, signed=signed)


def symbol_of(size: Any) -> Dim | None:
    """What inference knows a size as, or the one element of an integer tensor."""
    tape = current_tape()
    if not isinstance(size, Value) or tape is None:
        return size.symbol if isinstance(size, Size) else None
    known = [*(tape.context.get_symbolic_value(size.value) or ())]
    return known[0] if len(known) == 1 else None


def size_at(x: Tensor, axis: int) -> Dim:
    """The size of one axis as inference has it. Raises GraphgenError if x has no such axis."""
    sizes = [*(sizes_of(x) or ())]
    if -len(sizes) <= axis < len(sizes):
        return sizes[axis]
    raise GraphgenError(f"{describe(x)} has no axis {axis}{user_line()}")


def _ints(sizes: Sizes) -> list[int]:
    """Sizes or axes, all of them known, as a primitive is given them."""
    known: Any = sizes
    return [int(size) for size in np.atleast_1d(np.asarray(known))]


def numpy_dtype(x: Tensor) -> np.dtype[Any]:
    """The numpy dtype of an array or a value."""
    dtype: Any = x.dtype
    return dtype.numpy() if isinstance(dtype, ir.DataType) else dtype


def rank(x: Tensor) -> int:
    """The number of axes. Raises GraphgenError if it is unknown."""
    sizes = sizes_of(x)
    if sizes is None:
        raise GraphgenError(f"{x!r}: its rank must be known before the run{user_line()}")
    return len(sizes)


@primitive("Cast", traits=Trait.MOVES | Trait.CHEAP | Trait.BY_ROWS)
def cast(x: TensorLike, *, to: DTypeLike, saturate: int = 1) -> Tensor:
    """x in the dtype `to`: gg.float16, np.float16 or "float16"; 8-bit floats saturate."""
    wanted = to_dtype(to)
    if saturate and wanted.is_floating_point() and wanted.bitwidth <= 8:
        x = np.clip(x, float(wanted.min), float(wanted.max))
    return np.asarray(x).astype(wanted.numpy())


@cast.vjp
def _(g: Tensor, x: Tensor) -> Tensor:
    """dx = g in x's dtype."""
    return cast_like(g, x)


@composite("CastLike", traits=Trait.MOVES)
def _cast_like(x: Tensor, like: Tensor, *, saturate: int = 1) -> Tensor:
    """x in the dtype of `like`."""
    return cast(x, to=ir.DataType.from_numpy(numpy_dtype(like)), saturate=saturate)


def cast_like(x: Tensor, like: Tensor) -> Tensor:
    """x in the dtype of `like`; x itself if it already has it."""
    to = numpy_dtype(like)
    return x if numpy_dtype(x) == to else cast(x, to=ir.DataType.from_numpy(to))


@primitive("Reshape", traits=Trait.MOVES | Trait.CHEAP | Trait.LAYOUT | Trait.VIEW | Trait.SIZED)
def _reshape(x: Tensor, shape: Sizes, *, allowzero: int = 0) -> Tensor:
    """x's elements in another shape; 0 keeps the size of that axis, -1 takes what is left."""
    sizes = [x.shape[i] if s == 0 and not allowzero else s for i, s in enumerate(_ints(shape))]
    return np.reshape(x, sizes)


@_reshape.vjp
def _(g: Tensor, x: Tensor) -> Tensor:
    """dx = g in x's shape."""
    return reshape_like(g, x)


def reshape_like(x: Tensor, like: Tensor) -> Tensor:
    """x in the shape of `like`, where a size of 0, also one at run time, really means 0."""
    known = all(isinstance(d, int) and d for d in sizes_of(like) or ())
    return _reshape(x, shape(like), allowzero=int(not known))


def reshape(x: Tensor, sizes: Sizes) -> Tensor:
    """x with the given sizes: ints (one may be -1) and results of `dim`.

    A size that x has at the same place is written 0, and one last unknown size -1.
    """
    if isinstance(x, Value) and isinstance(sizes, (list, tuple)):
        given, old = list(sizes), sizes_of(x) or ()
        for i, (size, kept) in enumerate(zip(sizes, old, strict=False)):
            if isinstance(size, (Size, Value)) and symbol_of(size) == kept:
                given[i] = 0
        for size in (size for size in sizes if isinstance(size, Value)):
            size_as("Reshape", size.value)
        unknown = [i for i, size in enumerate(given) if isinstance(size, (Size, Value))]
        settled = 0 in old or -1 in [s for s in given if isinstance(s, int)]
        if len(unknown) == 1 and not settled:
            return _reshape_to_rest(x, given, unknown[0])
        sizes = given
    return _reshape(x, sizes)


def _reshape_to_rest(x: Value, sizes: list[Any], axis: int) -> Tensor:
    """x with these sizes; that of `axis` is written -1, and must be what the others leave."""
    tape, wanted = current_tape(), symbol_of(sizes[axis])
    result = _reshape(x, [*sizes[:axis], -1, *sizes[axis + 1 :]])
    made = sizes_of(result)
    if tape is not None and made is not None and wanted is not None:
        try:
            expect_same([wanted, made[axis]], tape.context)
        except ValueError as error:
            raise GraphgenError(f"reshape({describe(x)}): {error}{user_line()}") from error
    return result


@primitive("Transpose", traits=Trait.MOVES | Trait.CHEAP | Trait.LAYOUT)
def transpose(x: Tensor, *, perm: Sequence[int] | None = None) -> Tensor:
    """Axis i of the result is axis perm[i] of x; without perm, all axes reversed."""
    return np.transpose(x, perm)


@transpose.vjp
def _(g: Tensor, perm: Sequence[int] | None) -> Tensor:
    """dx = g with the inverse permutation."""
    return transpose(g, perm=None if perm is None else [int(i) for i in np.argsort(perm)])


def swap_last(x: Tensor) -> Tensor:
    """Xᵀ in the last two axes."""
    return transpose(x, perm=swap_of(rank(x)))


def swap_of(n: int) -> list[int]:
    """The permutation of n axes that transposes matrices."""
    return [*range(n - 2), n - 1, n - 2]


@primitive("Unsqueeze", traits=Trait.MOVES | Trait.CHEAP | Trait.LAYOUT | Trait.VIEW)
def unsqueeze(x: Tensor, axes: Sizes) -> Tensor:
    """New axes of size 1, at these places of the result."""
    return np.expand_dims(x, tuple(_ints(axes)))


@unsqueeze.vjp
def _(g: Tensor, axes: Tensor) -> Tensor:
    """dx = g without the new axes."""
    return squeeze(g, axes)


def with_rank(x: Tensor, n: int) -> Tensor:
    """x with new leading axes of size 1, so that it has n."""
    return x if rank(x) >= n else unsqueeze(x, list(range(n - rank(x))))


@primitive("Squeeze", traits=Trait.MOVES | Trait.CHEAP | Trait.LAYOUT | Trait.VIEW)
def squeeze(x: Tensor, axes: Sizes | None = None) -> Tensor:
    """x without these axes, which have size 1."""
    return np.squeeze(x, None if axes is None else tuple(_ints(axes)))


@squeeze.vjp
def _(g: Tensor, x: Tensor, axes: Tensor) -> Tensor:
    """dx = g with the axes back."""
    return reshape_like(g, x) if axes is None else unsqueeze(g, axes)


@primitive(
    "Flatten", traits=Trait.MOVES | Trait.CHEAP | Trait.LAYOUT | Trait.VIEW | Trait.SPLITS_AXES
)
def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    """Two axes: those before `axis` in one, the others in the second."""
    first = axis if axis == rank(x) else axis_from_front("Flatten", axis, rank(x))
    return np.reshape(x, (math.prod(x.shape[:first]), math.prod(x.shape[first:])))


@flatten.vjp
def _(g: Tensor, x: Tensor) -> Tensor:
    """dx = g in x's shape."""
    return reshape_like(g, x)


@primitive("Expand", traits=Trait.MOVES | Trait.CHEAP | Trait.LAYOUT | Trait.SIZED)
def expand(x: Tensor, sizes: Sizes) -> Tensor:
    """x repeated along its axes of size 1 (and new leading ones), broadcasting both ways."""
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(_ints(sizes)))).copy()


@expand.vjp
def _(g: Tensor) -> Tensor:
    """dx = Σ g over the repeated axes, which the walker does."""
    return g


@primitive("Concat", traits=Trait.MOVES | Trait.CHEAP | Trait.CARRIES)
def concat(*xs: Operands, axis: int) -> Tensor:
    """The operands joined along `axis`."""
    return np.concatenate(list[Any](xs), axis)


@concat.vjp
def _(g: Tensor, xs: Sequence[Tensor], axis: int) -> Tensor | tuple[Tensor, ...]:
    """Each operand gets its part of g."""
    if len(xs) == 1:
        return g
    return split(g, [dim(x, axis) for x in xs], axis=axis, num_outputs=len(xs))


def stack(*xs: Tensor | Sequence[Tensor], axis: int = 0) -> Tensor:
    """Operands of one shape side by side along a new axis: that `axis` of the result.

    Raises GraphgenError if there are none, or if their shapes differ.
    """
    given: Any = xs[0] if len(xs) == 1 and isinstance(xs[0], (list, tuple)) else xs
    shapes = [x.shape for x in given] if all(hasattr(x, "shape") for x in given) else []
    numbers = [[d for d in sizes if isinstance(d, int)] for sizes in zip(*shapes, strict=False)]
    if len({*map(len, shapes)}) != 1 or any(len({*sizes}) > 1 for sizes in numbers):
        shown = ", ".join(describe(x) if hasattr(x, "shape") else repr(x) for x in given)
        wanted = f"give one tensor or more, of one shape{user_line()}"
        raise GraphgenError(f"stack: the operands are {shown or 'none'}; {wanted}")
    return concat(*(unsqueeze(x, [axis]) for x in given), axis=axis)


@primitive(
    "Split",
    outputs=lambda inputs, a: a["num_outputs"] or inputs[1].shape[0],
    traits=Trait.MOVES | Trait.SIZED,
)
def _split(
    x: Tensor, sizes: Sizes | None = None, *, axis: int = 0, num_outputs: int | None = None
) -> tuple[Tensor, ...]:
    """Parts of x along `axis`: of the given sizes, or `num_outputs` equal ones, the last smaller.

    Exactly one of `sizes` and `num_outputs` is given.
    """
    if sizes is None:
        step = -(-x.shape[axis] // (num_outputs or 1))
        each = [min(step, x.shape[axis] - i * step) for i in range(num_outputs or 1)]
    elif sum(each := _ints(sizes)) != x.shape[axis]:  # np.split lets the last part have the rest
        raise GraphgenError(f"Split: {each} of {x.shape[axis]}; give sizes of all{user_line()}")
    return tuple(np.split(np.asarray(x), np.cumsum(each)[:-1], axis))


@_split.vjp
def _(g: tuple[Tensor, ...], axis: int) -> Tensor:
    """dx = the parts' cotangents, joined; an unused part counts as zeros."""
    return concat(*g, axis=axis)


def split(
    x: Tensor, sizes: Sizes | None = None, *, axis: int, num_outputs: int
) -> tuple[Tensor, ...]:
    """`num_outputs` parts of x along `axis`, equal unless sizes are given."""
    if isinstance(sizes, (list, tuple)) and len(sizes) != num_outputs:
        raise GraphgenError(
            f"split: {len(sizes)} sizes, {sizes}, and num_outputs={num_outputs}; give one size for "
            f"each output{user_line()}"
        )
    parts = _split(x, sizes, axis=axis, num_outputs=num_outputs if sizes is None else None)
    return parts if isinstance(parts, tuple) else (parts,)


@primitive("Slice", traits=Trait.MOVES | Trait.READS_PART | Trait.SIZED)
def slice_(
    x: Tensor, starts: Sizes, ends: Sizes, axes: Sizes | None = None, steps: Sizes | None = None
) -> Tensor:
    """x[start:end:step] on each of the axes; the largest int as an end is the far end."""
    firsts, key = _ints(starts), [slice(None)] * len(x.shape)
    along = list(range(len(firsts))) if axes is None else _ints(axes)
    expect_distinct(along, len(x.shape))
    by = [1] * len(firsts) if steps is None else _ints(steps)
    for start, end, axis, step in zip(firsts, _ints(ends), along, by, strict=True):
        end = -(2**63) if step < 0 and end in (2**31 - 1, 2**63 - 1) else end
        start, end = (p + x.shape[axis] if p < 0 else p for p in (start, end))
        key[axis] = slice(max(start, 0), end if end >= 0 else None if step < 0 else 0, step)
    return np.asarray(x)[tuple(key)]


@primitive("Gather", traits=Trait.SCALAR | Trait.MOVES, looks_up=(1, (0,)))
def gather(x: Tensor, indices: TensorLike, *, axis: int = 0) -> Tensor:
    """The slices of x at the indices along `axis`; negative ones count from the end."""
    return np.take(x, np.asarray(indices), axis=axis)


@gather.vjp
def _(g: Tensor, x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """dx = g added into zeros at the indices, with the axis moved to the front."""
    n, k = rank(x), rank(indices)
    axis %= n
    if axis == 0:
        return _add_rows(zeros_like(x), indices, g)
    front = [axis, *(i for i in range(n) if i != axis)]
    middle = range(axis, axis + k)
    g_front = transpose(g, perm=[*middle, *(i for i in range(rank(g)) if i not in middle)])
    dx = _add_rows(zeros_like(transpose(x, perm=front)), indices, g_front)
    return transpose(dx, perm=[int(i) for i in np.argsort(front)])


def _add_rows(x: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """x with rows[i] added to x[indices[i]], i over all axes of the indices.

    It uses ScatterElements: the runtime's ScatterND adds rows with the same index in several
    threads at once, and loses some.
    """
    if not rank(indices):
        rows = unsqueeze(rows, [0])
    elif rank(indices) > 1:
        rest = [dim(x, i) for i in range(1, rank(x))]
        if all(isinstance(size, int) and size for size in rest):
            rows = _reshape(rows, [-1, *rest])
        else:  # -1 beside a size of 0 says nothing
            count = math.prod(dim(indices, i) for i in range(rank(indices)))
            rows = _reshape(rows, [count, *rest], allowzero=1)
    index = reshape(indices, [-1, *[1] * (rank(x) - 1)])
    return scatter_elements(x, expand(index, shape(rows)), rows, axis=0, reduction="add")


@primitive("GatherElements", traits=Trait.MOVES | Trait.READS_PART, looks_up=(1, (0,)))
def gather_elements(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    """out[i, j] = x[indices[i, j], j] for axis 0, and so on."""
    where = list(np.indices(indices.shape))  # take_along_axis would broadcast the other axes
    where[axis] = np.asarray(indices)
    return np.asarray(np.asarray(x)[tuple(where)])


@gather_elements.vjp
def _(g: Tensor, x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """dx = g added into zeros at the indices."""
    return scatter_elements(zeros_like(x), indices, g, axis=axis, reduction="add")


@primitive("ScatterElements", traits=Trait.MOVES | Trait.WRITES_OVER)
def scatter_elements(
    x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: Reduction = "none"
) -> Tensor:
    """x with the updates stored at the indices along `axis`, or added to what is there, etc."""
    where = list(np.indices(indices.shape))
    where[axis] = np.asarray(indices)
    return _scatter(x, tuple(where), updates, reduction)


@primitive("ScatterND", traits=Trait.MOVES)
def scatter_nd(
    x: Tensor, indices: Tensor, updates: Tensor, *, reduction: Reduction = "none"
) -> Tensor:
    """x with the updates stored, added etc. at the index tuples in the last axis of indices."""
    return _scatter(x, tuple(np.moveaxis(np.asarray(indices), -1, 0)), updates, reduction)


def _scatter(x: Tensor, where: tuple[Any, ...], updates: Tensor, reduction: Reduction) -> Tensor:
    result = np.array(x)
    if reduction == "none":
        result[where] = updates
    else:
        _REDUCTIONS[reduction].at(result, where, updates)
    return result


@primitive("GatherND", traits=Trait.MOVES | Trait.READS_PART, looks_up=(1, (0,)))
def gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    """x at the index tuples in the last axis of indices, in each row of the first `batch_dims`."""
    tuples = np.asarray(_in_all_axes(indices, batch_dims))
    return np.asarray(np.asarray(x)[tuple(np.moveaxis(tuples, -1, 0))])


@gather_nd.vjp
def _(g: Tensor, x: Tensor, indices: Tensor, batch_dims: int) -> Tensor:
    """dx = g added into zeros at the indices."""
    indices = _in_all_axes(indices, batch_dims)
    assert indices.shape is not None
    front = [dim(x, i) for i in range(int(indices.shape[-1]))]
    row: Tensor = np.zeros((), np.int64)  # of x with its leading axes joined
    for i, n in enumerate(front):  # taken from a range, since indices may be negative
        row = row * n + gather(arange(n), gather(indices, i, axis=-1))
    flat = reshape(x, [-1, *(dim(x, i) for i in range(len(front), rank(x)))])
    return reshape_like(_add_rows(zeros_like(flat), row, g), x)


def _in_all_axes(indices: Tensor, batch_dims: int) -> Tensor:
    """Tuples for the axes behind the first `batch_dims`, as tuples for these, too."""
    if not batch_dims:
        return indices
    sizes, batch = shape(slice_(indices, [0], [1], [-1])), list[Tensor]()
    for i in range(batch_dims):
        ones = [1] * (rank(indices) - i - 1)
        batch.append(expand(reshape(arange(dim(indices, i)), [-1, *ones]), sizes))
    return concat(*batch, indices, axis=-1)


@primitive("Range", traits=Trait.GENERATES)
def range_(start: TensorLike, limit: TensorLike, delta: TensorLike) -> Tensor:
    """start, start + delta, ... below limit (all scalars)."""
    bounds: list[Any] = [np.asarray(bound) for bound in (start, limit, delta)]
    return np.asarray(np.arange(*bounds, dtype=bounds[0].dtype))


def arange(count: SizeLike) -> Tensor:
    """0, 1, ..., count - 1 as int64; count is an int or a result of `dim`."""
    if isinstance(count, (Size, Value)):
        if isinstance(count, Value) and rank(count):
            count = squeeze(count, [0])
        return range_(0, count, 1)
    return np.arange(int(np.asarray(count).item()), dtype=np.int64)


@primitive("Size", traits=Trait.SHAPE)
def size(x: Tensor) -> Tensor:
    """The number of elements, an int64 scalar."""
    return np.asarray(math.prod(x.shape), np.int64)


def zeros_like(x: Tensor) -> Tensor:
    """Zeros of x's shape and dtype; a graph makes them at run time, so the file stays small."""
    tape, zero = current_tape(), np.zeros((), numpy_dtype(x))
    return expand(zero if tape is None else Value(tape.constant(zero)), shape(x))


@primitive("ConstantOfShape", traits=Trait.GENERATES)
def constant_of_shape(sizes: Sizes, *, value: ir.TensorProtocol | None = None) -> Tensor:
    """A tensor of the given sizes, filled with one value (float32 0 by default)."""
    fill = np.zeros(1, np.float32) if value is None else value.numpy()
    return np.full(tuple(_ints(sizes)), fill.reshape(-1)[0], fill.dtype)


@primitive("NonZero", traits=Trait.REDUCES)
def non_zero(x: Tensor) -> Tensor:
    """The index tuples of the elements that are not zero, one a column."""
    return np.stack(np.nonzero(x)).astype(np.int64)


def lowest_of(x: Tensor) -> float:
    """The lowest number of x's dtype, float32's for float64: that is float32 widened to check."""
    dtype = numpy_dtype(x)
    info: Any = ml_dtypes.finfo  # untyped there; numpy's own does not know bfloat16
    return float(info(np.float32 if dtype == np.float64 else dtype).min)
