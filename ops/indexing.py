"""x[...] on values, as on NumPy's arrays (https://numpy.org/doc/stable/user/basics.indexing.html).

Ints, slices, None and Ellipsis are basic indexing. Beside an array of ints or bools an int counts
as an array too: all of them broadcast together, and their axes stand where the first one stood, or
in front if a slice, None or Ellipsis stands between them.
"""

import functools
from typing import Any

import numpy as np

from graphgen.errors import GraphgenError, user_line
from graphgen.infer import describe, expect_same
from graphgen.ops.elementwise import add, where
from graphgen.ops.layout import (
    cast,
    concat,
    dim,
    gather,
    gather_nd,
    non_zero,
    rank,
    slice_,
    transpose,
    unsqueeze,
)
from graphgen.record import current_tape
from graphgen.value import METHODS, Deferred, Size, Tensor, Value, adopt, sizes_of

_FIRST, _LAST = -(2**63), 2**63 - 1
_BEYOND = 2**62  # behind the last element; with a negative step the runtime takes _LAST for _FIRST
_WHOLE = slice(None)


def index(x: Tensor, key: Any) -> Tensor:
    """x[key]. Raises GraphgenError for what NumPy would not take, with the user's line."""
    if isinstance(x, Deferred):
        x = adopt(x.resolve(current_tape()))
    try:
        keys, apart = _aligned(x, key if isinstance(key, tuple) else (key,))
        y = _sliced(x, keys)
        new = [i for i, k in enumerate(keys) if k is None]
        y = unsqueeze(y, new) if new else y
        places = {i: k for i, k in enumerate(keys) if k is not None and not isinstance(k, slice)}
        return _looked_up(y, places, apart) if places else y
    except (IndexError, ValueError) as error:
        raise GraphgenError(f"{describe(x)}[{_text(key)}]: {error}{user_line()}") from error


def _text(key: Any) -> str:
    """A key as it is written."""
    if isinstance(key, slice):
        parts = [key.start, key.stop] + ([] if key.step is None else [key.step])
        return ":".join("" if part is None else _text(part) for part in parts)
    if isinstance(key, tuple):
        return ", ".join(map(_text, key))
    if isinstance(key, (Value, np.ndarray)):
        return describe(key)
    return "..." if key is Ellipsis else repr(key)


def _aligned(x: Tensor, key: tuple[Any, ...]) -> tuple[list[Any], bool]:
    """One key for each axis of x, and None for each new axis; a mask is one array for each axis.

    And whether a `...` for no axis stands between arrays or ints.
    """
    parts = [_part(k) for k in key]
    sizes = sizes_of(x) or ()
    taken = sum(rank(k) if _is_mask(k) else k is not None and k is not Ellipsis for k in parts)
    if taken > rank(x):
        raise IndexError(f"there are {taken} indices for {rank(x)} dimensions")
    dots = [i for i, k in enumerate(parts) if k is Ellipsis]
    if len(dots) > 1:
        raise IndexError("only one ... can be written")
    rest = [_WHOLE] * (rank(x) - taken)
    at = dots[0] if dots else len(parts)
    keys, axis = list[Any](), 0
    for k in (*parts[:at], *rest, *parts[at + 1 :]):
        if _is_mask(k):
            keys += _places(k, sizes[axis : axis + rank(k)])
            axis += rank(k)
            continue
        if k is not None and isinstance(size := sizes[axis], int):
            _expect_inside(k, size, axis)
        keys.append(k)
        axis += k is not None
    looks_up = [k is not None and not isinstance(k, slice) for k in parts]
    return keys, bool(dots) and not rest and any(looks_up[:at]) and any(looks_up[at + 1 :])


def _part(key: Any) -> Any:
    """One index as an int, a size, a slice, None, Ellipsis, or a tensor of ints or bools."""
    if key is None or key is Ellipsis or isinstance(key, (slice, Size)):
        return key
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        return int(key)
    if isinstance(key, list) and not any(isinstance(k, Value) for k in key):
        key = np.asarray(key, None if key else np.int64)
    kind = key.dtype.kind if isinstance(key, (Value, np.ndarray)) else ""
    if kind == "b" and rank(key) > 0:
        return key
    if kind not in ("i", "u"):
        given = describe(key) if kind else repr(key)
        raise IndexError(
            f"{given} is not an index; use ints (a // b is one, a / b is not), slices, None, ..., "
            "and tensors of ints or bools"
        )
    if isinstance(key, Value):
        return key if key.dtype in (np.int64, np.int32) else cast(key, to=np.int64)
    return key.astype(np.int64) if rank(key) else int(key)


def _is_mask(key: Any) -> bool:
    return isinstance(key, (Value, np.ndarray)) and key.dtype == np.bool_


def _places(mask: Any, sizes: tuple[Any, ...]) -> list[Tensor]:
    """Where a mask is True: for each of its axes the places along it."""
    tape = current_tape()
    assert tape is not None
    for given, wanted in zip(sizes_of(mask) or (), sizes, strict=True):
        expect_same([wanted, given], tape.context)
    if not isinstance(mask, Value):
        return list(np.nonzero(mask))
    places = non_zero(mask)  # (axes, count)
    return [gather(places, i, axis=0) for i in range(rank(mask))]


def _expect_inside(key: Any, size: int, axis: int) -> None:
    """Raise IndexError for known places outside a known size."""
    known = np.asarray(key) if isinstance(key, (int, np.ndarray)) else np.zeros(0, np.int64)
    outside = known[(known < -size) | (known >= size)]
    if outside.size:
        raise IndexError(
            f"axis {axis} has {size} places, and {outside.flat[0]} is none of them"
            + (f"; use {-size} to {size - 1}" if size else "")
        )


def _sliced(x: Tensor, keys: list[Any]) -> Tensor:
    """x cut along the axes that have a slice."""
    starts, ends, axes, steps = list[Any](), list[Any](), list[int](), list[int]()
    for axis, k in enumerate(k for k in keys if k is not None):
        if not isinstance(k, slice) or _is_whole(k):
            continue
        step = 1 if k.step is None else _bound(k.step, "step")
        if not isinstance(step, int) or step == 0:
            raise ValueError(f"the step of a slice is {k.step!r}; it must be an int other than 0")
        start, end = (_FIRST, _LAST) if step > 0 else (_LAST, _FIRST)
        start = start if k.start is None else _bound(k.start, "start")
        end = end if k.stop is None else _bound(k.stop, "stop")
        starts.append(start)
        ends.append(end if step > 0 else _end_backwards(start, end, dim(x, axis)))
        axes.append(axis)
        steps.append(step)
    if not axes:
        return x
    return slice_(x, starts, ends, axes, steps if any(step != 1 for step in steps) else None)


def _is_whole(key: slice) -> bool:
    """Whether a slice is [:]; bounds may be values, which == does not compare with None."""
    return key.start is None and key.stop is None and key.step is None


def _end_backwards(start: Any, end: Any, size: Size | int) -> Any:
    """The end of a slice with a negative step, for which ONNX takes a start before the first
    element to be the first one, and NumPy nothing: nothing is what ends behind the last element."""
    if isinstance(end, int) and end >= 2**31 - 1:
        return _BEYOND
    if isinstance(start, int) and (start >= 0 or isinstance(size, int)):
        return _BEYOND if isinstance(size, int) and start < -size else end
    if isinstance(start, Size) and not start.signed:
        return end
    first, last = (Value(METHODS["vector"](p)) for p in (start, end))
    return where(first + size < 0, _BEYOND, last)


def _bound(bound: Any, what: str) -> Any:
    """A bound of a slice: an int that int64 has, or a size or value that is known at run time."""
    if isinstance(bound, Value) and bound.dtype.kind in "iu" and bound.shape in ((), (1,)):
        return bound if bound.dtype == np.int64 else cast(bound, to=np.int64)
    if isinstance(bound, Size):
        return bound
    if isinstance(bound, (int, np.integer)) and not isinstance(bound, bool):
        return min(max(int(bound), _FIRST), _LAST)
    raise ValueError(f"the {what} of a slice is {bound!r}; it must be an int or a size")


def _looked_up(x: Tensor, places: dict[int, Any], apart: bool) -> Tensor:
    """x at the places along some axes: ints drop theirs, arrays put their own axes there.

    Or in front, if places are `apart`.
    """
    if not any(isinstance(k, (Value, np.ndarray)) and rank(k) for k in places.values()):
        for dropped, (axis, k) in enumerate(places.items()):
            x = gather(x, k, axis=axis - dropped)
        return x
    if len(places) == 1:
        [(axis, k)] = places.items()
        return gather(x, k, axis=axis)
    front = [*places, *(i for i in range(rank(x)) if i not in places)]
    indices: Tensor = _together([_scalar(k) for k in places.values()])
    y = gather_nd(transpose(x, perm=front), indices)
    first, count = min(places), rank(indices) - 1
    if apart or [*places] != [*range(first, first + len(places))] or not first:
        return y
    axes = [*range(rank(y))]
    return transpose(y, perm=[*axes[count : count + first], *axes[:count], *axes[count + first :]])


def _scalar(k: Any) -> Any:
    """An index as a tensor."""
    if isinstance(k, Size):
        return Value(METHODS["number"]("index", k, np.dtype(np.int64), False))
    return np.asarray(k) if isinstance(k, int) else k


def _together(indices: list[Any]) -> Tensor:
    """Index tensors, broadcast, as one with a last axis of tuples."""
    if not any(isinstance(k, Value) for k in indices):
        return np.stack(np.broadcast_arrays(*indices), -1)
    indices = [k if k.dtype == np.int64 else cast(k, to=np.int64) for k in indices]
    nothing = functools.reduce(add, (k * 0 for k in indices))
    return concat(*(unsqueeze(k + nothing, [-1]) for k in indices), axis=-1)


METHODS["index"] = index
