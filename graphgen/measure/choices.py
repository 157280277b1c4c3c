"""Which of several ways is the fastest on this machine, and what each loses: measured in turn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphgen.measure.latency import TIE, measure

_FAR = 1.5  # times the shortest time, beyond which a way is not measured any further


@dataclass(frozen=True)
class Way:
    """One of several: its shortest time, how many times as fast as the first it is, its error."""

    name: str
    ms: float
    times: float
    error: float | None = None


@dataclass(frozen=True)
class Choice:
    """What was measured for `rows` tokens at once, and which way was picked for what reason."""

    what: str
    rows: int
    ways: list[Way]
    picked: str
    why: str
    disturbed: float
    """The median of the first's times over its shortest: far above 1 where others ran."""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        ways = [vars(way) for way in self.ways]
        return {**vars(self), "ways": ways}


def choose(
    what: str,
    rows: int,
    runs: Sequence[tuple[str, Callable[[], object], float | None]],
    *,
    seconds: float = 1.0,
    worth: float | None = None,
    scale: float = 1.0,
) -> Choice:
    """Measure ways, each with its error, in turn, and pick one.

    The first is what is done without measuring. The shortest times count: whatever else runs on the
    machine can only make them longer. By default the fastest is picked, and of those that
    tie with it (3 %) the one with the least error. With `worth`, another than the first has to be
    that many times as fast. Times are multiplied by `scale`.
    """
    first = measure([run for _, run, _ in runs], seconds / 2)
    ms = first.min(axis=0)
    near = [i for i, one in enumerate(ms) if i == 0 or one <= _FAR * ms.min()]
    more = measure([runs[i][1] for i in near], seconds / 2, warm=True)
    ms[near] = np.minimum(ms[near], more.min(axis=0))
    own = np.concatenate([first[:, 0], more[:, 0]])
    ratios, disturbed = ms[0] / ms, float(np.median(own) / own.min())
    ways = [
        Way(name, float(m), float(times), error)
        for (name, _, error), m, times in zip(runs, ms * scale, ratios, strict=True)
    ]
    best = max(ways, key=lambda way: way.times)
    if worth is not None:
        picked, why = best.name, f"{best.times:.2f} times as fast as {ways[0].name}"
        if best.times < worth:
            picked, why = ways[0].name, f"no other is {worth:.2f} times as fast"
        return Choice(what, rows, ways, picked, why, disturbed)
    ties = [way for way in ways if best.times / way.times <= 1 + TIE]
    least = min(ties, key=lambda way: way.error or 0.0)
    why = "the fastest" if least is best else f"as fast as {best.name} to {TIE:.0%}, and loses less"
    return Choice(what, rows, ways, least.name, why, disturbed)
