"""Several documents in a row, so that little is padded; the model keeps them apart."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from graphgen.export.columns import Chunk, Rows
from graphgen.operands import Array

_SOME = 256
"""Rows that are stored together."""


def fitted(sizes: Array, length: int) -> list[list[int]]:
    """Which documents share a row of at most `length` tokens: the numbers in each row.

    The largest come first, each into the fullest row that has room for it (best fit decreasing).
    """
    rows, with_room = list[list[int]](), defaultdict[int, list[int]](list)
    open_sizes = 0  # bit r is 1 if some row has room for r more tokens
    for document in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[document])
        enough = open_sizes >> size
        if enough:
            room = size + (enough & -enough).bit_length() - 1
            row = with_room[room].pop()
            open_sizes &= ~(1 << room) if not with_room[room] else -1
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(document)
        if rest := room - size:
            with_room[rest].append(row)
            open_sizes |= 1 << rest
    return rows


def packed(columns: Mapping[str, Rows], mask: str, length: int) -> dict[str, Rows]:
    """Columns whose rows hold several documents, which `mask` numbers from 1."""
    rows = fitted(columns[mask].sizes, length)
    return {
        name: Rows(
            name,
            [
                _joined(column, rows[at : at + _SOME], numbered=name == mask)
                for at in range(0, len(rows), _SOME)
            ],
            column.dtype,
        )
        for name, column in columns.items()
    }


def _joined(column: Rows, rows: Sequence[Sequence[int]], *, numbered: bool) -> Chunk:
    parts = [
        np.full(len(column[document]), number, np.int32) if numbered else column[document]
        for row in rows
        for number, document in enumerate(row, 1)
    ]
    values = np.concatenate(parts)
    if values.dtype == np.int64 and np.can_cast(np.min_scalar_type(values.max()), np.int32):
        values = values.astype(np.int32)  # half the memory: no token or label is larger
    ends = np.cumsum([len(part) for part in parts])
    last = np.cumsum([len(row) for row in rows]) - 1
    return Chunk(values, np.concatenate([[0], ends[last]]))
