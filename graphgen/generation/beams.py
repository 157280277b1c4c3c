"""Beam search: the best sequences of each row, found by keeping a few of them at a time."""

from collections.abc import Callable

import numpy as np

from graphgen.generation.options import Options
from graphgen.generation.sampling import largest
from graphgen.operands import Array

_NEVER = np.float32(-1e9)


class Beams:
    """For each row, `options.beams` open sequences and as many that have ended.

    `sequences` are the open ones, by row. A sequence ends at `most` tokens, or when `ends` says
    so; each step looks at `candidates` of each row.
    """

    def __init__(
        self,
        rows: int,
        options: Options,
        *,
        most: int,
        ends: Callable[[list[int]], bool],
        candidates: int,
    ) -> None:
        self._options, self._most, self._ends, self._candidates = options, most, ends, candidates
        self._scores = np.full((rows, options.beams), _NEVER)
        self._scores[:, 0] = 0
        self._done: list[list[tuple[float, list[int]]]] = [[] for _ in range(rows)]
        self._hopeful = [True] * rows
        self.sequences: list[list[list[int]]] = [
            [[] for _ in range(options.beams)] for _ in range(rows)
        ]

    def advance(self, scores: Array, *, last: bool = False) -> Array | None:
        """Extend by log probabilities (R · beams, vocabulary); return each sequence's parent row.

        None means that the search has ended, as it does with the `last` step.
        """
        options, beams = self._options, self._options.beams
        length = len(self.sequences[0][0]) + 1
        self._most = length if last else self._most
        scores = scores.reshape(len(self._done), beams, -1) + self._scores[..., None]
        vocabulary = scores.shape[-1]
        source = np.arange(len(self._done) * beams).reshape(-1, beams)
        for row, done in enumerate(self._done):
            top = largest(scores[row].reshape(-1), self._candidates)
            values = scores[row].reshape(-1)[top]
            before = self.sequences[row]
            longer = [[*before[i // vocabulary], int(i % vocabulary)] for i in top]
            ends = [length == self._most or self._ends(tokens) for tokens in longer]
            if self._hopeful[row] and not (len(done) == beams and options.early_stopping is True):
                means = (values / np.float32(length**options.length_penalty)).tolist()
                found = zip(means[:beams], longer, ends, strict=False)
                done += [(mean, tokens) for mean, tokens, end in found if end]
                done[:] = sorted(done, key=lambda found: -found[0])[:beams]
            values = values + np.array(ends, np.float32) * _NEVER
            on = largest(values, beams)
            self._scores[row], self.sequences[row] = values[on], [longer[i] for i in on]
            source[row] = row * beams + top[on] // vocabulary
            far = options.early_stopping == "never" and options.length_penalty > 0
            most = self._most if far else length
            hope = self._scores[row, 0] / np.float32(most**options.length_penalty)
            worst = done[-1][0] if len(done) == beams else _NEVER
            self._hopeful[row] = self._hopeful[row] and bool(hope > worst)
        full = options.early_stopping is True and all(len(done) == beams for done in self._done)
        if length == self._most or not any(self._hopeful) or full:
            return None
        return source.reshape(-1)

    def best(self, count: int = 1) -> list[list[int]]:
        """For each row, the best sequences that have ended, one row behind the other."""
        return [tokens for done in self._done for _, tokens in done[:count]]
