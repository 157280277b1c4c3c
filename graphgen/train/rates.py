"""The rate finder: a short run whose learning rate grows from step to step."""

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphgen.display import on_screen
from graphgen.errors import GraphgenError, user_line
from graphgen.export.write import replacing
from graphgen.operands import Array
from graphgen.train.batches import named, none_given, stream
from graphgen.train.data import Batches
from graphgen.train.engine import Engine, NotFiniteError
from graphgen.train.schedule import constant

_MEMORY = 0.9  # of the running mean of the loss
_DIVERGED = 4.0  # times the lowest mean


@dataclass(frozen=True, eq=False)
class RateCurve:
    """The loss of each step at its learning rate, and its running mean.

    `suggestion` is the rate at which the mean fell fastest, per factor of the rate, before its
    lowest point (after Smith, arXiv 1506.01186).
    """

    rates: Array
    losses: Array
    means: Array
    suggestion: float

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield (
            f"RateCurve of {len(self.rates)} steps, rates {self.rates[0]:.2g} to "
            f"{self.rates[-1]:.2g}: try {self.suggestion:.2g}"
        )

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw the curve as PNG. Raises GraphgenError without matplotlib."""
        try:
            import matplotlib
        except ImportError as error:
            raise GraphgenError(f"the curve needs matplotlib ({error})") from error
        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        axes.plot(self.rates, self.losses, alpha=0.35, label="each step")
        axes.plot(self.rates, self.means, label="running mean")
        axes.axvline(self.suggestion, linestyle="--", label=f"{self.suggestion:.2g}")
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss", title="rate finder")
        axes.grid(alpha=0.3)
        axes.legend()
        path = Path(path)
        with replacing("rate finder", path) as [file]:
            figure.savefig(file, dpi=120, format="png")
        pyplot.close(figure)
        return path


def find_rate(
    engine: Engine, batches: Batches, *, lowest: float, highest: float, steps: int
) -> RateCurve:
    """Train with rates from `lowest` to `highest`, each a constant factor above the one before.

    It ends when the loss has diverged; then everything is as before. Raises GraphgenError where
    there are too few batches, or the loss does not fall at any rate.
    """
    who = f"{engine.who}.find_rate"
    if not 0.0 < lowest < highest < math.inf or steps < 10:
        raise GraphgenError(
            f"{who}: lowest={lowest}, highest={highest}, steps={steps}: rates are positive and "
            f"grow, in at least 10 steps{user_line()}"
        )
    rates = np.geomspace(lowest, highest, steps).tolist()
    before, losses, means = engine.copied(), list[float](), list[float]()
    source = stream(batches, again=True)
    try:
        for number, rate in enumerate(rates):
            first = number * engine.accumulate
            group = [
                named(batch, engine.inputs, f"{who}: batch {first + i}")
                for i, batch in enumerate(itertools.islice(source, engine.accumulate))
            ]
            if not (group or losses):
                raise none_given(who)
            if not group:
                break
            line = engine.one_update(group, first, constant(rate))
            losses.append(line["loss"])
            kept = _MEMORY ** len(losses)  # the mean begins at 0, and is corrected as Adam's are
            whole = (means[-1] * (1 - kept / _MEMORY) if means else 0.0) * _MEMORY
            means.append((whole + (1 - _MEMORY) * losses[-1]) / (1 - kept))
            if means[-1] > _DIVERGED * min(means):
                break
    except NotFiniteError:
        pass  # the rate was too high
    finally:
        engine.restore(before)
    best = int(np.argmin(means)) if means else 0
    if best < 2:
        raise GraphgenError(
            f"{who}: the loss does not fall: {len(means)} steps from rate {lowest:g} to "
            f"{rates[max(len(means) - 1, 0)]:g}; begin lower, or take more steps or more batches"
        )
    at = int(np.argmin(np.gradient(means[: best + 1])))
    n = len(means)
    return RateCurve(np.array(rates[:n]), np.array(losses), np.array(means), float(rates[at]))
