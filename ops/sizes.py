"""Sizes that are known only at run time: arithmetic with them, alone and with tensors."""

from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError, user_line
from graphgen.infer import DeclaredSizes, same_dim, same_size
from graphgen.operands import UFUNCS
from graphgen.ops.layout import _shape, cast, concat, rank, size_at, size_from, squeeze, unsqueeze
from graphgen.record import SizeLike, current_tape
from graphgen.value import METHODS, Size, Tensor, Value

_INT64 = np.dtype(np.int64)

_UNSIGNED = (np.add, np.multiply, np.floor_divide, np.remainder, np.maximum, np.minimum)
"""Of numbers that are at least 0, the result is at least 0."""

_SIGNED = (np.subtract, np.negative)

_COMPARISONS = (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)


def same_size_at(x: Tensor, axis: int, y: Tensor, of: int) -> bool:
    """Whether axis `axis` of x and axis `of` of y are known to have one size."""
    return same_dim(size_at(x, axis), size_at(y, of))


def sizes_vector(*sizes: SizeLike) -> Tensor:
    """Sizes as int64[n]."""
    if all(isinstance(size, int) for size in sizes):
        return np.asarray(sizes, np.int64)
    vectors = [Value(vector(size)) for size in sizes]
    return concat(*vectors, axis=0) if len(vectors) > 1 else vectors[0]


def promise_same_size(x: Tensor, axis: int, y: Tensor, of: int) -> None:
    """Declare that axis `axis` of x and axis `of` of y have one size, despite different names."""
    tape = current_tape()
    if tape is not None and isinstance(tape.context, DeclaredSizes):
        tape.context.promised[size_at(x, axis)] = size_at(y, of)


def vector(size: SizeLike | ir.Value) -> ir.Value:
    """A size, or a tensor with one element, as int64[1] in the graph."""
    if isinstance(size, int):
        return _ir(np.array([size], _INT64))
    if not isinstance(size, Size):
        x = Value(_ir(size))
        return _ir(unsqueeze(x, [0])) if rank(x) == 0 else x.value
    if size.made is not None:
        return size.made
    assert size.at is not None
    value, axis = size.at
    return _ir(_shape(Value(value), start=axis, end=axis + 1))


def number(who: str, size: Size, dtype: np.dtype[Any], spread: bool) -> ir.Value:
    """A size as a number of another operand's dtype: a scalar, or `spread` along an axis of 1."""
    held = np.iinfo(dtype) if dtype.kind in "iu" else None
    narrow = held is not None and (held.max < 2**31 - 1 or (held.min == 0 and size.signed))
    if narrow or dtype.kind == "b":
        raise GraphgenError(
            f"{who}: the size {size} with a tensor of {dtype}, which may not hold it; cast the "
            f"tensor to int64 first{user_line()}"
        )
    x: Tensor = Value(vector(size))
    x = x if dtype == _INT64 else cast(x, to=dtype)
    return _ir(x if spread else squeeze(x, [0]))


def on_sizes(ufunc: np.ufunc, *sizes: Size | int) -> Any:
    """Python's operators on sizes and ints: a size, or, for comparisons, a bool."""
    if ufunc in _COMPARISONS:
        return _compared(ufunc, *sizes)
    if ufunc not in (*_UNSIGNED, *_SIGNED):
        raise GraphgenError(
            f"{ufunc.__name__} of {', '.join(map(str, sizes))}: a size is a whole number; "
            "calculate with + - * // %, or make it a tensor: ops.cast(size, to=gg.float32)"
            + user_line()
        )
    signed = any(x.signed if isinstance(x, Size) else x < 0 for x in sizes)
    operands = [Value(vector(x)) if isinstance(x, Size) else np.array([x], _INT64) for x in sizes]
    if ufunc is np.floor_divide and not signed:  # Div rounds towards zero, which is down then
        made = UFUNCS[np.divide](*operands)
    else:
        made = UFUNCS[ufunc](*operands)
    return size_from(made, signed=signed or ufunc in _SIGNED)


def _compared(ufunc: np.ufunc, a: Size | int, b: Size | int) -> Any:
    """A bool where the symbols decide it, whatever they stand for, else a value."""
    names = [x.symbol if isinstance(x, Size) else int(x) for x in (a, b)]
    if same_size(*names):
        return ufunc in (np.equal, np.less_equal, np.greater_equal)
    given = (Value(vector(x)) if isinstance(x, Size) else np.array([x], _INT64) for x in (a, b))
    return squeeze(UFUNCS[ufunc](*given), [0])


def _ir(x: Any) -> ir.Value:
    tape = current_tape()
    assert tape is not None
    return tape.operand(x)


METHODS["vector"], METHODS["number"], METHODS["on_sizes"] = vector, number, on_sizes
METHODS["cast"] = cast
