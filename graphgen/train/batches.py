"""Batches in their order: from any iterable, named, and from the place where a run stopped."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from inspect import ismethod
from typing import Any, TypeVar, cast

from graphgen.arrays import as_array
from graphgen.errors import GraphgenError, user_line
from graphgen.export.named_losses import LABELS
from graphgen.plan import TensorType
from graphgen.train.data import Batch, Batches, Dataset, Given, checksum_of
from graphgen.train.parallel import Processes

_T = TypeVar("_T")


def stream(batches: Batches, first: int = 0, again: bool = False) -> Iterator[Given]:
    """The batches from number `first` on; with `again`, the end goes back to the start if it can.

    A `Dataset` or a list goes there at once; from anything else, earlier batches are read and
    skipped. A `Dataset` makes each batch while the one before is used.
    """
    if isinstance(batches, (Dataset, Sequence)):
        count = len(batches)
        numbers = itertools.count(first) if again and count else range(first, count)
        if isinstance(batches, Dataset):
            return _ahead(map(batches.at, numbers))
        return (batches[i % count] for i in numbers)
    return itertools.islice(_one_by_one(batches, again), first, None)


class Place:
    """Where a trainer is in its batches: number `used`, from which a later call goes on."""

    def __init__(self, inputs: Mapping[str, TensorType], who: str) -> None:
        self._inputs, self._who = inputs, who
        self.used = 0
        self.rest: int | None = None
        self._batches: Any = None
        self._first: Any = None
        self._stream: Iterator[Given] = iter(())
        self._left: Iterator[Given] | None = None
        self._kept: Iterator[Given] | None = None

    def go_on(
        self, batches: Batches, *, endless: bool, resumed: int | None = None, who: str
    ) -> None:
        """Take batches from number `resumed` on, else from where the last call stopped.

        Other batches begin at 0. If they are not `endless`, a `Dataset` or a list goes on to the
        end of its pass, and anything else does a whole pass. An iterator goes on by itself.
        """
        same = batches is self._batches or (ismethod(batches) and batches == self._batches)
        taken, left = (self.used, self._left) if same else (0, None)
        self._batches, self._left = batches, None
        self.used = taken if resumed is None else resumed
        iterator, seekable = isinstance(batches, Iterator), _seekable(batches)
        if resumed is None and not endless and not seekable and not iterator:
            self.used = 0
        count, self.rest = length(batches), None
        if seekable and not count:
            raise none_given(who)
        if not endless and count is not None:
            new = resumed is None and count > 0
            self.rest = count - self.used % count if new else max(0, count - self.used)
        endless = endless or seekable
        if resumed is None and endless and left is not None:
            self._stream = left
        elif seekable:
            self._stream = stream(batches, self.used, endless)
        else:
            source, skipped = _one_by_one(batches, endless), self.used
            if same and iterator:
                skipped -= taken
            else:
                if (first := next(source, None)) is None:
                    raise none_given(who)
                self._first, source = first, itertools.chain([first], source)
            if skipped < 0:
                raise GraphgenError(
                    f"{who}: the batches are an iterator, which is at batch {taken} and cannot go "
                    f"back to {resumed}; give a list, or a function that makes a new iterator"
                )
            self._stream = itertools.islice(source, skipped, None)
        self._left = self._stream if endless and not seekable else None

    def take(self, count: int) -> list[Batch]:
        """The next batches; they count as used only after `used_up`, not after an error."""
        self._kept, self._left = self._left, None
        rest = count if self.rest is None else min(count, self.rest)
        return [
            named(batch, self._inputs, f"{self._who}: batch {number}")
            for number, batch in enumerate(itertools.islice(self._stream, rest), self.used)
        ]

    def used_up(self, group: Sequence[Batch]) -> None:
        """Go on after what was taken."""
        self.used, self._left = self.used + len(group), self._kept
        self.rest = None if self.rest is None else self.rest - len(group)

    def described(self) -> dict[str, Any]:
        """What distinguishes these batches from others."""
        return describe(self._batches, self._first)


def describe(batches: Any, first: Given | None = None) -> dict[str, Any]:
    """What distinguishes batches: the first, their number and a checksum, each None if unknown."""
    if _seekable(batches):
        first = next(stream(batches), None)
    text = None
    with suppress(TypeError, ValueError, RuntimeError):  # training reports it
        items: Iterable[tuple[Any, Any]] = enumerate(first or ())
        items = sorted(first.items()) if isinstance(first, Mapping) else items
        arrays = {name: as_array(array) for name, array in items}
        parts = [f"{name} {array.dtype}{list(array.shape)}" for name, array in arrays.items()]
        if parts:
            text = f"{', '.join(parts)} with checksum {checksum_of(arrays.values()):08x}"
    whole = f"{batches.checksum():08x}" if isinstance(batches, Dataset) else None
    return {"first batch": text, "batches": length(batches), "checksum": whole}


def _ahead(items: Iterator[_T]) -> Iterator[_T]:
    """The items, each made by a thread while the one before is used."""
    end = object()
    with ThreadPoolExecutor(1, "batches") as thread:
        coming = thread.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = thread.submit(next, items, end)
            yield cast(_T, item)


def _seekable(batches: Any) -> bool:
    return isinstance(batches, (Dataset, Sequence))


def length(batches: Any) -> int | None:
    """How many batches make an epoch, if that is known."""
    if isinstance(batches, Sized):
        with suppress(TypeError):  # of a DataLoader that does not know it
            return len(batches)
    return None


def named(batch: Any, inputs: Mapping[str, TensorType], who: str) -> Batch:
    """A batch as arrays of numpy by name, in the order of the inputs.

    A tuple or a list holds an array for each input, in that order; if fields of a named tuple are
    called like inputs, they are taken by name. An array is anything that numpy can read, such as a
    tensor of torch on the CPU.
    """
    if isinstance(batch, tuple) and not inputs.keys().isdisjoint(getattr(batch, "_fields", ())):
        batch = cast(Any, batch)._asdict()
    if isinstance(batch, (tuple, list)):
        if len(batch) != len(inputs):
            raise GraphgenError(
                f"{who} is a {type(batch).__name__} of {len(batch)}; give one array for each of "
                f"{', '.join(inputs)}, in this order, or a dictionary"
            )
        batch = dict(zip(inputs, batch, strict=True))
    if not isinstance(batch, Mapping) or (inputs and not batch):
        raise GraphgenError(
            f"{who} is a {type(batch).__name__}; give a dictionary with arrays for "
            f"{', '.join(inputs)}, or a tuple of them"
        )
    order = [n for n in inputs if n in batch] + [n for n in batch if n not in inputs]
    try:
        return {name: as_array(batch[name]) for name in order}
    except (TypeError, ValueError, RuntimeError) as error:  # such as torch's
        raise GraphgenError(f"{who}: {error}; give arrays of numpy") from error


def own_part(
    batch: Batch, inputs: Mapping[str, TensorType], processes: Processes, who: str
) -> Batch:
    """This process's samples; arrays whose first dimension is not the samples' go whole."""
    if processes.size == 1:
        return batch
    if isinstance(samples := _samples(inputs), int):
        raise GraphgenError(
            f"{who}: the model takes {samples} samples, which {processes.size} processes cannot "
            "divide; build it with a name instead of that size"
        )
    mine = processes.share
    return {n: mine(a) if is_divided(n, inputs) else a for n, a in batch.items()}


def is_divided(name: str, inputs: Mapping[str, TensorType]) -> bool:
    """Whether an input has something for each sample."""
    dims = inputs[name].dims if name in inputs else None
    return name == LABELS or (dims is not None and dims[:1] == (_samples(inputs),))


def _samples(inputs: Mapping[str, TensorType]) -> int | str | None:
    """The number of samples of a batch, or its name: the first size of the first input with one."""
    first = {n: t.dims[0] if t.dims else None for n, t in inputs.items()}
    return next((d for n, d in first.items() if n != LABELS and d is not None), None)


def made(batches: Any) -> Iterable[Any]:
    """What a function of batches makes, or they themselves."""
    return cast(Callable[[], Iterable[Any]], batches)() if callable(batches) else batches


def none_given(who: str) -> GraphgenError:
    """The error of a call without any batch, which would do nothing."""
    return GraphgenError(
        f"{who}: there are no batches: what was given is empty, an iterator at its end, or a "
        f"DataLoader whose drop_last leaves none{user_line()}"
    )


def _one_by_one(batches: Any, again: bool) -> Iterator[Given]:
    while True:
        source = iter(made(batches))
        first = next(source, None)
        if first is None:
            return
        yield first
        yield from source
        if not again or source is batches:
            return
