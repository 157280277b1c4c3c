"""Columns of samples: numbers in the dtype of a model's input, rows of one length or of several."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.operands import Array


class Chunk(NamedTuple):
    """Rows one after another: row i is values[starts[i] : starts[i + 1]], or values[i] if None."""

    values: Array
    starts: Array | None = None

    def __len__(self) -> int:
        return len(self.values) if self.starts is None else len(self.starts) - 1


class Rows(Sequence[Array]):
    """Rows of chunks, which may be mapped from a file; each is converted when it is read.

    Raises GraphgenError for values that `dtype` cannot hold; `who` names the column.
    """

    def __init__(self, who: str, chunks: Iterable[Chunk], dtype: Any) -> None:
        self.chunks = [chunk for chunk in chunks if len(chunk)]
        self.dtype = np.dtype(dtype)
        self._ends = np.cumsum([len(chunk) for chunk in self.chunks])
        for chunk in self.chunks:
            mixed = chunk.values.dtype == bool != self.dtype  # as JSON's true and false
            if mixed or fitting(chunk.values, self.dtype) is None:
                raise GraphgenError(f"{who} has {chunk.values.dtype} that do not fit {dtype}")

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.chunks else 0

    def __getitem__(self, row: Any) -> Any:
        number = int(np.searchsorted(self._ends, row, "right"))
        values, starts = chunk = self.chunks[number]
        row -= self._ends[number] - len(chunk)
        found = values[row] if starts is None else values[starts[row] : starts[row + 1]]
        return np.asarray(found, self.dtype)

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """The shapes of the rows."""
        found = set[tuple[int, ...]]()
        for values, starts in self.chunks:
            sizes = [] if starts is None else np.unique(np.diff(starts)).tolist()
            found |= {(size, *values.shape[1:]) for size in sizes} or {values.shape[1:]}
        return found

    def arrays(self) -> Iterator[Array]:
        """What distinguishes these rows from others: their values, and where each row begins."""
        for values, starts in self.chunks:
            yield values if starts is None else values[starts[0] : starts[-1]]
        if len(self.shapes) > 1:
            yield self.sizes

    @property
    def sizes(self) -> Array:
        """The length of each row, 1 for a number."""
        found = [
            np.ones(len(c), np.int64) if c.starts is None else np.diff(c.starts)
            for c in self.chunks
        ]
        return np.concatenate(found) if found else np.zeros(0, np.int64)


Column: TypeAlias = Array | Sequence[Array]
"""Samples: an array, samples first, or a sequence of arrays, whose sizes may differ."""


def fitting(array: Array, dtype: Any) -> Array | None:
    """Numbers in a dtype, if it can hold all of them; floats are rounded, but stay finite."""
    if array.dtype.kind not in "biuf":
        return None
    if np.can_cast(array.dtype, dtype, "safe"):
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        converted = array.astype(dtype)
    if converted.dtype.kind == "f" and np.array_equal(np.isfinite(array), np.isfinite(converted)):
        return converted
    return converted if np.array_equal(array, converted) else None


def read_number(name: str, value: Any, dtype: Any) -> Array:
    """Numbers of JSON in the dtype of an input. Raises ValueError if it cannot hold them."""
    if np.dtype(dtype) != bool and bool in _kinds(value):  # NumPy takes true in a list for 1
        raise ValueError(f"{name!r} has true or false, but its input is {dtype}; give numbers")
    try:
        array = np.asarray(value)
    except ValueError:  # nested lists of different lengths
        array = np.asarray(None)
    if (found := fitting(array, dtype)) is None:
        raise ValueError(f"{name!r} is not a list of numbers that fit {dtype}")
    return found.astype(dtype, copy=False)


def _kinds(value: Any) -> set[type]:
    """The types of what stands in nested lists."""
    if not isinstance(value, list):
        return {type(value)}
    found = {*map(type, value)}
    return found.union(*map(_kinds, value)) if list in found else found
