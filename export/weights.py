"""The table of a model's weights: which are trained, and why the others are not."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graphgen.display import Tabular, listed
from graphgen.errors import spelled, warn
from graphgen.export.optimizers import AdamW, Optimizer, Setting


class Weight(NamedTuple):
    """A weight or constant of a model, whether it is trained, and why not or as what."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    trained: bool
    why: str

    def updated(self, setting: Setting, usual: Setting) -> "Weight":
        """The same, with what is not as usual of its update."""
        if not self.trained:
            return self
        rate, decay = setting
        parts = [self.why, f"rate × {rate:g}" if rate != usual.rate else ""]
        if decay != usual.weight_decay:
            parts.append(f"weight decay {decay:g}" if decay else "no weight decay")
        return self._replace(why="; ".join(filter(None, parts)))


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

    def updated(self, optimizer: Optimizer) -> "Weights":
        """The same, with the rate and the decay of those that are not updated as the others."""
        usual = Setting(1.0, getattr(optimizer, "weight_decay", 0.0))
        found = Weights(w.updated(optimizer.setting(w.name), usual) for w in self)
        if isinstance(optimizer, AdamW) and optimizer.no_decay is not None:
            vectors = (w for w in self if w.trained and len(w.shape) == 1)
            if decay := [w.name for w in vectors if optimizer.setting(w.name).weight_decay]:
                warn(
                    f"artifacts: {spelled('no_decay', optimizer.no_decay)}: vectors that decay: "
                    f"{listed(decay, len(decay))}; name them, too, if they are biases or norms"
                )
        return found

    def summary(self) -> str:
        """How many are trained."""
        trained = [math.prod(w.shape) for w in self if w.trained]
        return f"{len(trained):,} of {len(self):,} are trained, {sum(trained):,} parameters"

    def heading(self) -> str:
        return f"Weights: {self.summary()}"
