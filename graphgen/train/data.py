"""Batches to train on: from files and functions, in an order that can resume at any batch."""

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from graphgen.display import fields, on_screen
from graphgen.errors import GraphgenError, check_seed
from graphgen.export.columns import Column, Rows
from graphgen.export.named_losses import IGNORED, LABELS
from graphgen.operands import Array
from graphgen.plan import TensorType

Batch: TypeAlias = Mapping[str, Array]
Given: TypeAlias = Mapping[str, Any] | Sequence[Any]
"""A batch as users may give it: see `graphgen.train.batches.named`."""
Batches: TypeAlias = Iterable[Given] | Callable[[], Iterable[Given]]


class LabelKind(NamedTuple):
    """What the labels of an input may be."""

    classes: int | None = None  # if known
    ignored: int | None = None  # the label that does not count
    weights: Sequence[float] | None = None  # of the classes; empty if they are unknown


Labels: TypeAlias = Mapping[str, LabelKind]
"""By input."""


class Padding(NamedTuple):
    """What the rows of a column are padded with, and to which size at least."""

    value: int = 0
    size: int | None = None


_NO_NUMBERS = "OSUMm"
"""The kinds of NumPy's dtypes that are texts, dates and other objects."""

_WINDOW = 64
"""Batches whose samples are sorted by length together."""


class Dataset:
    """Batches of `size` samples, shuffled again in each epoch, without end.

    Batch i is the one at place i mod n of epoch i // n, n = `len(dataset)`; the order of epoch e is
    a function of (seed, e), or as given if `seed` is None. The last batch of an epoch may be
    smaller. A column is an array, samples first, or a sequence of arrays, which are padded to the
    longest of their batch: labels with -100, others with 0, or as `padding` says. With `by_length`,
    samples of similar length make a batch: each 64 batches are sorted by the longest column, and
    then all batches shuffled.

    Raises GraphgenError for columns without samples, of different lengths, or, if shuffled,
    shorter than a batch; `who` names the data in it.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        size: int,
        *,
        seed: int | None = 0,
        who: str = "data",
        by_length: bool = False,
        padding: Mapping[str, Padding] | None = None,
    ) -> None:
        check_seed(who, seed or 0)
        columns = {name: _column(f"{who}: {name!r}", x) for name, x in columns.items()}
        counts = {name: _length(column) for name, column in columns.items()}
        self._count = min(counts.values(), default=0)
        problem = ""
        if self._count == 0 or len({*counts.values()}) > 1:
            problem = "all arrays need the same number of samples, of at least 1"
        elif size < 1 or (size > self._count and seed is not None):
            problem = "a batch needs at least 1 sample, and at most as many as there are"
        if problem:
            found = ", ".join(f"{n} {c}" for n, c in counts.items()) or "nothing"
            raise GraphgenError(f"{who} has samples: {found}; --batch is {size}; {problem}")
        self._columns, self._size, self._seed, self._who = columns, size, seed, who
        self._padding = {LABELS: Padding(IGNORED)} if padding is None else padding
        self._sizes = np.max([_sizes(c) for c in columns.values()], axis=0) if by_length else None
        self._order = -1, self._ordered(np.arange(self._count), None)

    @on_screen
    def __repr__(self) -> Iterator[str]:
        order = "in order" if self._seed is None else f"shuffled with seed {self._seed}"
        yield f"Dataset of {self._count:,} samples in batches of {self._size:,}, {order}"
        yield from fields(columns=[_kind(name, x) for name, x in self._columns.items()])

    def __len__(self) -> int:
        return math.ceil(self._count / self._size)

    def __iter__(self) -> Iterator[Batch]:
        return map(self.at, range(len(self)))

    def check(self, labels: Labels) -> None:
        """Raise GraphgenError for labels that are not classes, before they are used."""
        for name in dict.fromkeys((*labels, LABELS)):
            column = self._columns.get(name)
            if column is None:
                continue
            padded = len(_shapes(column)) > 1
            if padded and column[0].dtype.kind == "f":
                raise GraphgenError(
                    f"{self._who}: {name} are numbers of different lengths, and what they would be "
                    "padded with would count in the loss: give rows of one length"
                )
            if padded and name != LABELS:
                raise GraphgenError(
                    f"{self._who}: {name} are labels of different lengths, which would be padded "
                    f"with 0, a class: pad them yourself, or call them {LABELS}"
                )
            if name not in labels:
                continue
            if isinstance(column, Rows) and not any(
                _wrong(chunk.values, labels[name]).any() for chunk in column.chunks
            ):
                continue  # faster than row by row, which finds the row
            whole = [column] if isinstance(column, np.ndarray) else (a[None] for a in column)
            for row, array in enumerate(whole):
                if array.dtype.kind in "iu":
                    _count(array, labels[name], who=self._who, first=row)

    def checksum(self) -> int:
        """The checksum of all samples, in the order in which they were given."""
        columns = [self._columns[name] for name in sorted(self._columns)]
        return checksum_of(array for column in columns for array in _arrays(column))

    def at(self, number: int) -> Batch:
        """The batch with this number, counted from 0 over all epochs."""
        epoch, place = divmod(number, len(self))
        kept, order = self._order  # read and set at once: another thread may be in another epoch
        if self._seed is not None and epoch != kept:
            random = np.random.default_rng([self._seed, epoch])
            order = self._ordered(random.permutation(self._count), random)
            self._order = epoch, order
        chosen = order[place * self._size : (place + 1) * self._size]
        return {
            name: column[chosen]
            if isinstance(column, np.ndarray)
            else _padded(column, chosen, self._padding.get(name, Padding()))
            for name, column in self._columns.items()
        }

    def _ordered(self, order: Array, random: np.random.Generator | None) -> Array:
        """The order in which samples of similar length stand together, if that is wanted."""
        if self._sizes is None:
            return order
        window = _WINDOW * self._size if random is not None else len(order)
        parts = [order[at : at + window] for at in range(0, len(order), window)]
        order = np.concatenate([x[np.argsort(self._sizes[x], kind="stable")] for x in parts])
        full = len(order) // self._size  # only the last batch may be smaller
        batches = order[: full * self._size].reshape(full, self._size)
        if random is not None:
            batches = random.permutation(batches)
        return np.concatenate([batches.reshape(-1), order[full * self._size :]])


def _column(who: str, column: Any) -> Column:
    """A column whose rows are arrays: those of a list may be lists themselves, or numbers.

    All have the dtype that holds each of them: that of the first would cut off 0.5 to 0. NumPy has
    one that holds texts and numbers, as texts; and true as 1: these are refused, with their row.
    """
    if not isinstance(column, (list, tuple)):
        if isinstance(column, np.ndarray) and column.dtype.kind in _NO_NUMBERS:
            raise GraphgenError(f"{who} is an array of {column.dtype}; give numbers")
        found: Column = column
        return found
    rows = list[Array]()
    for number, row in enumerate(column):
        try:
            array = np.asarray(row)
        except ValueError:  # nested lists of different lengths
            array = np.asarray(None)
        if array.dtype.kind in _NO_NUMBERS:
            raise GraphgenError(f"{who}, row {number}, is {row!r:.40}; give numbers")
        if rows and (array.dtype == bool) != (rows[0].dtype == bool):
            raise GraphgenError(
                f"{who}, row {number}, is {row!r:.40}, and row 0 {column[0]!r:.40}; give truth "
                "values in every row, or numbers"
            )
        rows.append(array)
    kinds = {row.dtype for row in rows}
    return [row.astype(np.result_type(*kinds)) for row in rows] if len(kinds) > 1 else rows


def _length(column: Column) -> int:
    return 0 if not np.iterable(column) else len(column)


def _sizes(column: Column) -> Array:
    """The length of each sample."""
    if isinstance(column, Rows):
        return column.sizes
    return np.array([row.shape[0] if row.ndim else 1 for row in column])


def _shapes(column: Column) -> set[tuple[int, ...]]:
    """The shapes of a column's samples."""
    if isinstance(column, np.ndarray):
        return {column.shape[1:]}
    return column.shapes if isinstance(column, Rows) else {row.shape for row in column}


def _arrays(column: Column) -> Iterable[Array]:
    if isinstance(column, np.ndarray):
        return [column]
    if isinstance(column, Rows):
        return column.arrays()
    sizes = [np.array([row.shape for row in column])] if len(_shapes(column)) > 1 else []
    return itertools.chain(column, sizes)


def _kind(name: str, column: Column) -> str:
    """A column in words."""
    if not isinstance(column, np.ndarray):
        return f"{name}: arrays of {column[0].dtype}"
    return f"{name}: {TensorType(column.dtype, column.shape)}"


def _count(array: Array, kind: LabelKind, *, who: str, first: int = 0) -> float:
    """How many labels count, or the sum of their weights.

    One that is not a class, which the runtime may take for another, is refused with its row,
    counted from `first`.
    """
    classes, ignored, weights = kind
    counted = np.ones(array.shape, bool) if ignored is None else array != ignored
    wrong = _wrong(array, kind)
    if wrong.any():
        kept, at = array[counted], np.argwhere(wrong)[0]
        most = "the number of classes - 1" if classes is None else classes - 1
        spared = "" if ignored is None else f", or {ignored} where there is none"
        raise GraphgenError(
            f"{who}: labels go from {kept.min()} to {kept.max()}; they must be 0 to {most}"
            f"{spared}: row {first + int(at[0])} has {array[tuple(at)]}"
        )
    return float(np.take(weights, array[counted]).sum() if weights else counted.sum())


def _wrong(array: Array, kind: LabelKind) -> Array:
    """Where labels that are integers are neither a class nor ignored."""
    if array.dtype.kind not in "iu":
        return np.zeros(array.shape, bool)
    wrong = (array < 0) | (False if kind.classes is None else array >= kind.classes)
    return wrong if kind.ignored is None else wrong & (array != kind.ignored)


def check_rows(ids: Array, count: int, who: str) -> None:
    """Refuse ids that are no row of a table with `count`: the runtime takes -1 for the last one."""
    wrong = (ids < 0) | (ids >= count) if ids.dtype.kind in "iu" else np.zeros(ids.shape, bool)
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0])
        place = f"row {at[0]} has " if at else "it is "
        raise GraphgenError(f"{who} looks up rows 0 to {count - 1}: {place}{ids[at]}")


def weight_of(batch: Batch, labels: Labels, who: str, first: int = 0) -> float:
    """How many labels (or samples) a batch counts for; labels out of range are refused.

    Labels with weights count for their sum.
    """
    counts = [_count(a, labels[n], who=who, first=first) for n, a in _integers(batch, labels)]
    if counts:
        return counts[0]
    for name in (*labels, LABELS):
        if name in batch:
            return float(np.size(batch[name]))
    return float(next((len(array) for array in batch.values() if array.ndim), 1))


def is_sure(batch: Batch, labels: Labels) -> bool:
    """Whether it is known for how much the labels count.

    Not if weights are unknown, or if several inputs, or none, have weights or leave some out.
    """
    kinds = labels or {LABELS: LabelKind(ignored=IGNORED)}
    weighted = [kind.weights for kind in kinds.values() if kind.weights is not None]
    if len(labels) == 1:
        return all(weighted)
    left_out = any((a == kinds[n].ignored).any() for n, a in _integers(batch, kinds))
    return not weighted and not left_out


def _integers(batch: Batch, names: Iterable[str]) -> Iterator[tuple[str, Array]]:
    for name in names:
        array = np.atleast_1d(batch.get(name, 0.0))
        if array.dtype.kind in "iu":
            yield name, array


def tokens_in(batch: Batch) -> int:
    """The number of labels, or if there are none, of the first input's elements."""
    return np.asarray(batch[LABELS] if LABELS in batch else next(iter(batch.values()))).size


def _padded(column: Sequence[Array], chosen: Array, padding: Padding) -> Array:
    rows = [column[i] for i in chosen]
    shape = np.max([row.shape for row in rows], axis=0).astype(int)
    if padding.size is not None and shape.size:
        shape[0] = max(shape[0], padding.size)
    result = np.full((len(rows), *shape), padding.value, rows[0].dtype)
    for place, row in zip(result[..., None], rows, strict=True):  # a view, even of numbers
        place[..., 0][tuple(map(slice, row.shape))] = row
    return result


def checksum_of(arrays: Iterable[Array]) -> int:
    """The CRC-32 of the bytes of arrays, one after the other."""
    check = 0
    for array in arrays:
        whole: Any = np.ascontiguousarray(array).reshape(-1)
        check = zlib.crc32(whole.tobytes() if whole.dtype.hasobject else whole.view("u1"), check)
    return check
