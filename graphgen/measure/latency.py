"""How long runs take relative to each other: interleaved, with intervals of medians."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from graphgen.operands import Array

TIE = 0.03
"""Ratios nearer to 1 are a tie: a machine varies as much from one minute to the next."""

LEAST = 7
"""The least number of rounds: with fewer than 6, no two bound a median with 95 %."""


@dataclass(frozen=True)
class Latency:
    """Milliseconds of one run: the median, its 95 % interval, and how many runs there were."""

    median: float
    low: float
    high: float
    runs: int


def measure(runs: Sequence[Callable[[], object]], seconds: float, *, warm: bool = False) -> Array:
    """Milliseconds (rounds, runs): all run once per round, each round in another order.

    None runs right after itself, because its data would still be in the processor's caches: if the
    order were only reversed, the first and the last would look faster than they are. An extra round
    warms up first, unless all are `warm`. It stops after `seconds`, but not before `LEAST` rounds.
    """
    for run in () if warm else runs:
        run()
    rng, last, rounds = np.random.default_rng(0), -1, list[list[float]]()
    end = time.perf_counter() + seconds
    while len(rounds) < LEAST or time.perf_counter() < end:
        spent = [0.0] * len(runs)
        order = rng.permutation(len(runs))
        order = order[::-1] if order[0] == last else order
        last = order[-1]
        for i in order:
            begin = time.perf_counter()
            runs[i]()
            spent[i] = (time.perf_counter() - begin) * 1e3
        rounds.append(spent)
    return np.asarray(rounds)


def latency(samples: Array) -> Latency:
    """The median and its 95 % interval, which holds for any distribution: ranks of the samples.

    The number of samples below the median is binomial(n, 1/2), about normal from n = 7 on:
    the ranks are n/2 ± 1.96 √n / 2.
    """
    ordered, n = np.sort(samples), len(samples)
    reach = 1.96 * np.sqrt(n) / 2
    low, high = max(0, int(np.floor(n / 2 - reach))), min(n - 1, int(np.ceil(n / 2 + reach)))
    return Latency(float(np.median(ordered)), float(ordered[low]), float(ordered[high]), n)


def verdict(samples: Array, baseline: Array) -> str:
    """`faster`, `slower` or `tie`: ratios within the same rounds, beyond `TIE` and their interval.

    What disturbs the machine disturbs both sides of a round.
    """
    ratio = latency(samples / baseline)
    if ratio.high < 1 and ratio.median < 1 - TIE:
        return "faster"
    return "slower" if ratio.low > 1 and ratio.median > 1 + TIE else "tie"
