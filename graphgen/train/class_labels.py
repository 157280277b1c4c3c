"""The labels of texts: numbers, several of them, or names of classes."""

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from graphgen.errors import GraphgenError, warn
from graphgen.export.columns import fitting, read_number
from graphgen.export.tables import Table
from graphgen.files import parse_json
from graphgen.models.published.conversation import nested
from graphgen.operands import Array
from graphgen.plan import TensorType


class Labels:
    """What makes labels of a column, of the dtype of `kind`, for a model of so many `classes`.

    `size` is how many numbers label a text, None if one does. `config` is that of the checkpoint,
    which may name classes. `names` are the numbers of classes, of all tables that were read.
    """

    def __init__(
        self, kind: TensorType, classes: int | None, size: int | None, config: Mapping[str, Any]
    ) -> None:
        self._kind, self._classes, self.size = kind, classes, size
        self._configured, self.names = _configured(config), dict[str, int]()

    def column(self, table: Table, name: str) -> Iterator[Array]:
        """The labels in a column: numbers, or names of classes."""
        if self.size is not None:
            return self._several(table, name, self.size)
        return self._each(table, name, [row[name] for row in table.rows([name])], table.where)

    def lists(self, table: Table, name: str) -> Iterator[list[Array]]:
        """The labels in a column of lists, as `column` has them; a list may be JSON as a text."""
        rows = [listed(row[name]) for row in table.rows([name])]
        for number, row in enumerate(rows):
            if not isinstance(row, list):
                raise GraphgenError(f"{table.where(number)}: {name!r} is {row!r:.40}; give a list")
        ends = [*itertools.accumulate(map(len, rows))]

        def where(place: int) -> str:
            return table.where(bisect.bisect_right(ends, place))

        found = self._each(table, name, [label for row in rows for label in row], where)
        return (list(itertools.islice(found, len(row))) for row in rows)

    def _each(
        self, table: Table, name: str, given: list[Any], where: Callable[[int], str]
    ) -> Iterator[Array]:
        """Labels of a column, which are numbers, or names of classes."""
        dtype = self._kind.dtype
        known = self.names or self._configured
        classes = table.classes(name) or []
        if known.keys() >= {*classes}:  # which may have other numbers
            given = [_named(label, classes) for label in given]
        elif known:
            warn(
                f"{table.path}: the classes of {name!r} are {', '.join(classes):.100}, and those "
                f"of the model {', '.join(known):.100}: their numbers count, not their names"
            )
        if not all(isinstance(label, str) and label in known for label in given):
            given = _numbered(given)
        texts = [isinstance(label, str) for label in given]
        for number, (label, text) in enumerate(zip(given, texts, strict=True)):
            same = isinstance(label, bool) == isinstance(given[0], bool)
            array = np.asarray(label) if same and isinstance(label, int | float) else None
            right = array is not None and fitting(array, dtype) is not None
            if texts[0]:  # a cell of CSV that is left out is no name
                right = text and (label != "" or label in known)
            if not right:
                raise GraphgenError(
                    f"{where(number)}: {name!r} is {label!r:.40}; give numbers that fit "
                    f"{dtype}, or names of classes, in every row"
                )
        if not texts[0]:
            self.names = self.names or {n: i for i, n in enumerate(classes)}
            return (np.asarray(label, dtype) for label in given)
        self.names = known or self._sorted(table, {*given})
        for number, label in enumerate(given):
            if label not in self.names:
                raise GraphgenError(
                    f"{where(number)}: {label!r:.60} is not one of the classes "
                    f"{', '.join(self.names)}"
                )
        return (np.asarray(self.names[label], dtype) for label in given)

    def _several(self, table: Table, name: str, size: int) -> Iterator[Array]:
        """The labels in a column with as many numbers in each row; a list may be JSON as a text."""
        for number, row in enumerate(table.rows([name])):
            try:
                label = self._named(listed(row[name]))
                array = np.atleast_1d(read_number(name, label, self._kind.dtype))
                if array.shape != (size,):
                    raise ValueError(f"{name!r} is {label!r:.40}; give {size} numbers")
            except ValueError as error:
                raise GraphgenError(f"{table.where(number)}: {error}") from error
            yield array

    def _named(self, label: Any) -> Any:
        """1 at each class that a list of names has, and 0 at the others."""
        known = self._configured
        names = isinstance(label, list) and all(isinstance(one, str) for one in label)
        if not names or not {*label} <= known.keys() or len(known) != self.size:
            return label
        return [int(name in label) for name in sorted(known, key=known.__getitem__)]

    def _sorted(self, table: Table, given: set[str]) -> dict[str, int]:
        """The numbers of classes in alphabetical order."""
        if np.dtype(self._kind.dtype).kind == "f":
            raise GraphgenError(f"{table.path}: labels are names; the loss wants numbers")
        if self._classes is not None and len(given) > self._classes:
            raise GraphgenError(
                f"{table.path} has {len(given)} classes, and the model {self._classes}: "
                f"{', '.join(sorted(given)):.200}"
            )
        return {name: number for number, name in enumerate(sorted(given))}


def listed(cell: Any) -> Any:
    """A list, which may be JSON as a text."""
    return nested(cell) if isinstance(cell, str) else cell


def _configured(config: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of classes that config.json names; {} if these are no names."""
    named = config.get("id2label")
    named = named if isinstance(named, dict) else {}
    found = {str(n): int(i) for i, n in named.items() if i.isdecimal()}
    return {} if all(name == f"LABEL_{i}" for name, i in found.items()) else found


def _named(label: Any, classes: Sequence[str]) -> Any:
    """The name of a label, if it is the number of a class."""
    return classes[label] if type(label) is int and 0 <= label < len(classes) else label


def _numbered(labels: list[Any]) -> list[Any]:
    """Labels as numbers if all are texts of numbers, as in CSV: sorted, "10" is before "9"."""
    try:
        found = [parse_json(label) for label in labels]
    except (TypeError, ValueError, RecursionError):
        return labels
    return found if all(type(label) in (int, float) for label in found) else labels
