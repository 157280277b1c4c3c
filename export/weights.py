"""The table of a model's weights: which are trained, and why the others are not."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graphgen.display import Tabular


class Weight(NamedTuple):
    """A weight or constant of a model, whether it is trained, and why not or as what."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    trained: bool
    why: str


class Weights(Tabular, list[Weight]):
    """All weights of a model, as a list that shows itself as a table."""

    def cells(self) -> list[list[str]]:
        rows = [["weight", "type", "", "why"]]
        for w in self:
            rows.append([w.name, f"{w.dtype}{[*w.shape]}", ("frozen", "trained")[w.trained], w.why])
        return rows

    def packed(self, schemes: Mapping[str, str]) -> "Weights":
        """The same, with those that are kept in few bits."""
        return Weights(
            w._replace(dtype=schemes[w.name], why="kept in few bits") if w.name in schemes else w
            for w in self
        )

    def moved(self, names: Sequence[str]) -> "Weights":
        """The same, with statistics that batches move."""
        why = "a running statistic, moved by each batch"
        return Weights(w._replace(why=why) if w.name in names else w for w in self)

    def summary(self) -> str:
        """How many are trained."""
        trained = [math.prod(w.shape) for w in self if w.trained]
        return f"{len(trained):,} of {len(self):,} are trained, {sum(trained):,} parameters"

    def heading(self) -> str:
        return f"Weights: {self.summary()}"
