"""Beginnings that rows have in common, whose keys and values need not be computed again."""

import operator
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from graphgen.operands import Array

CALL = 8
"""What a call of the decoder costs besides its tokens, in tokens of a prompt.

It reads all weights; in float32 that takes as long as computing about ten tokens.
"""

PAYS = 0.9
"""The share of the cost without common beginnings from which on they are worth it."""


class Beginning(NamedTuple):
    """The first `same` tokens of a row are those of row `of`.

    That is a row of the cache as it was, or with `new` one of the rows that are read before it.
    """

    of: int
    same: int
    new: bool


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two rows have in common."""
    return sum(takewhile(bool, map(operator.eq, one, other)))


def beginnings(
    rows: Sequence[Sequence[int]],
    adapters: Array,
    held: Sequence[Sequence[int]],
    held_adapters: Array,
    *,
    among: bool = True,
) -> dict[int, Beginning]:
    """What each row shares with rows that a cache holds, or with one `among` them.

    The rows come in the order in which they are to be read: sorted, so that the one before has the
    longest beginning in common. The last token of a row is read in any case: it gives the logits.
    Rows of different adapters have nothing in common.
    """
    found, last = dict[int, Beginning](), -1
    for row in sorted(range(len(rows)), key=lambda row: (int(adapters[row]), [*rows[row]])):
        most = rows[row][:-1]
        known = [
            Beginning(of, common(most, held[of]), False)
            for of in np.flatnonzero(held_adapters[: len(held)] == adapters[row]).tolist()
        ]
        if among and last >= 0 and adapters[last] == adapters[row]:
            known.append(Beginning(last, common(most, rows[last]), True))
        found[row] = max(known, key=lambda x: x.same, default=Beginning(0, 0, False))
        last = row
    return found


def pays(found: Mapping[int, Beginning], rows: Sequence[Sequence[int]], chunk: int) -> bool:
    """Whether it is worth reading rows one by one, each from behind its known beginning on.

    Otherwise they are read together, padded to the longest, if that has at most `chunk` tokens.
    """
    longest = max(map(len, rows))
    one_by_one = sum(cost(len(row) - found[i].same, chunk) for i, row in enumerate(rows))
    together = CALL + len(rows) * longest
    if longest > chunk:
        together = sum(cost(len(row), chunk) for row in rows)
    return any(x.same for x in found.values()) and one_by_one < PAYS * together


def cost(tokens: int, chunk: int, rows: int = 1) -> int:
    """Of reading that many tokens of each row in chunks, in tokens."""
    return rows * tokens + CALL * -(-tokens // chunk)
