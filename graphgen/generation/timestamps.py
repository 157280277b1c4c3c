"""Whisper's timestamps (arXiv 2212.04356, 2.3): which may come next, and the parts they mark.

A timestamp is a token that counts steps of the encoder from the start of a window; there are two
frames of features to a step. Parts of a text stand between two of them. A sound longer than a
window is read in several, each from the end of the last whole part on (3.8).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from graphgen.operands import Array

STEP = 2
"""Frames of features in a step of the encoder, whose second convolution has this stride."""


class Segment(NamedTuple):
    """A part of what a sound says: from and to which second, and its tokens, timestamps too."""

    start: float
    end: float
    tokens: list[int]


@dataclass(frozen=True)
class Timestamps:
    """The tokens from `first` on count steps; the one before says that there are none.

    `end` is the token that ends a row; the tokens before it are text. `latest` is the most steps
    before the first timestamp, if that is limited.
    """

    first: int
    end: int
    latest: int | None = None

    def choose(self, new: Sequence[int], scores: Array) -> None:
        """Set to -inf the scores (vocabulary,) of what may not follow the new tokens of a row.

        A row begins with a timestamp. Others come in pairs, the end of a part and the begin of the
        next, or before the end; they never fall. If all timestamps together are likelier than each
        other token, one of them comes.
        """
        first = self.first
        known = [token for token in new if token >= first]
        last = bool(new) and new[-1] >= first
        paired = len(new) < 2 or new[-2] >= first
        scores[first - 1] = -np.inf
        if last and paired:
            scores[first:] = -np.inf
        elif last:
            scores[: self.end] = -np.inf
        if known:  # a part has a length: only the begin of the next may repeat an end
            scores[first : known[-1] + (not last or paired)] = -np.inf
        if not new:
            scores[:first] = -np.inf
            if self.latest is not None:
                scores[first + self.latest + 1 :] = -np.inf
        text, marks = scores[:first].max(), scores[first:].astype(np.float64)
        most = max(marks.max(initial=-np.inf), np.finfo(np.float64).min)  # exp(-inf + inf) is NaN
        with np.errstate(divide="ignore"):  # where none may come
            if most + np.log(np.exp(marks - most).sum()) > text:
                scores[:first] = -np.inf

    def split(self, tokens: list[int], frames: int) -> tuple[list[tuple[int, int, list[int]]], int]:
        """The parts of a window, from and to which step, and how many of its frames they take.

        If its last part is not whole, the next window begins where that part does.
        """
        first = self.first
        marks = [token >= first for token in tokens]
        cuts = [i + 1 for i in range(len(tokens) - 1) if marks[i] and marks[i + 1]]
        if not cuts:
            last = next((token - first for token in reversed(tokens) if token >= first), 0)
            return [(0, last or frames // STEP, tokens)], frames
        whole = marks[-2:] == [False, True]  # nothing is said after the last part
        if whole:
            cuts.append(len(tokens))
        else:
            cuts[-1] += 1  # the begin of the part that is not whole shows that it is there
        parts = [tokens[begin:end] for begin, end in zip([0, *cuts[:-1]], cuts, strict=True)]
        found = [(part[0] - first, part[-1] - first, part) for part in parts]
        if whole:
            return found, frames
        begin, _, part = found[-1]
        end = part[-2] - first
        found[-1] = begin, end, part
        return found, end * STEP
