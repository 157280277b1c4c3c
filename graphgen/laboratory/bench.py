"""What the runtime makes of graphs, and how fast it runs them: sessions, a few open at once."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.laboratory.placement import Placement, placement, profile, tried
from graphgen.laboratory.rows import Elsewhere
from graphgen.laboratory.runs import fingerprint, optimized
from graphgen.measure.accuracy import Error, differ
from graphgen.measure.latency import LEAST, Latency, latency, measure, verdict
from graphgen.operands import Array
from graphgen.processor import memory
from graphgen.providers import CPU
from graphgen.runtime import DISABLED, QUIET, Provider, Session
from graphgen.traits import Trait, has

_LEVELS = {"off": "DISABLE_ALL", "basic": "ENABLE_BASIC", "extended": "ENABLE_EXTENDED"}
_SESSIONS = 12  # open together at most: the shorter a round, the more alike its runs

_MEMORY = 8 << 30  # where the system does not say

_LONGER = 85.0  # seconds for everything except measuring, from the start

_NO_TIME = "not measured, the time was up: give more --seconds, or fewer --kinds"

_PARTS = 8  # of a group's rounds; their medians show the machine's speed


@dataclass(eq=False)
class Run:
    """A session to measure: the first of all those for which the runtime makes the same graph."""

    name: str
    path: Path
    options: dict[str, str]
    nodes: int
    placement: Placement
    session_ms: float | None = None
    errors: list[Error] = field(default_factory=list)  # of each phase
    problem: str | None = None
    beside: dict["Run", tuple[Array, Array]] = field(default_factory=dict)
    """For each run measured with it: its own and the other's milliseconds (phases, rounds)."""


class Bench:
    """Runs of one model's graphs on the same inputs: `feeds` of each phase.

    The first run is the reference: it is measured in every group, and times are relative to it. So
    what disturbs the machine, or slows it down from one minute to the next, does not look like a
    difference between graphs.
    """

    def __init__(
        self,
        folder: Path,
        provider: Provider,
        threads: int | None,
        feeds: Sequence[Mapping[str, Array]],
        outputs: Sequence[str],
    ) -> None:
        self.folder, self.threads = folder, threads
        self.provider: Provider = provider
        self.feeds, self.outputs = feeds, outputs
        self.runs: dict[str, Run] = {}
        self.rounds: list[Array] = []  # the reference's milliseconds (phases, rounds) of each group
        self.wanted: list[list[Array]] = []  # results of each phase, the reference for errors
        self.begin = time.perf_counter()

    def run(self, name: str, path: Path, level: str = "all", disabled: Sequence[str] = ()) -> Run:
        """What the runtime makes of a graph. Raises GraphgenError if no session loads it."""
        options = {"graph_optimization_level": _LEVELS.get(level, "ENABLE_ALL")}
        options |= {DISABLED: ";".join(disabled)} if disabled else {}
        model = optimized(path, self.folder, options, self.provider)
        key = fingerprint(model.graph)
        count = sum(not has(node, Trait.CONSTANT) for node in model.graph.all_nodes())
        if key not in self.runs:
            self.runs[key] = Run(name, path, options, count, self._placed(path, options, count))
        return self.runs[key]

    def _placed(self, path: Path, options: Mapping[str, str], count: int) -> Placement:
        """Where the nodes run; with only one provider, all of them run there."""
        if self.provider == "cpu":
            return Placement({"CPUExecutionProvider": count}, 0)
        kernels = profile(path, self.feeds[0], runs=1, options=options, provider=self.provider)
        return placement(kernels.values())

    def elsewhere(self, path: Path, provider: Provider) -> Elsewhere:
        """What a graph is on another provider, run once in each phase."""
        try:
            results, own, placed = tried(path, self.feeds, self.outputs, provider)
        except GraphgenError as error:
            return Elsewhere(problem=str(error))
        nodes, copies = dict(placed.providers), placed.memcpy
        cpu = 0 if own == CPU else nodes.get(CPU, 0)
        errors = [differ(*pair).rel_rms for pair in zip(self.wanted, results, strict=True)]
        return Elsewhere(sum(nodes.values()) - cpu - copies, cpu, copies, max(errors))

    def measure(
        self, wanted: Sequence[tuple[int, Run, Run]], weights: int, seconds: float
    ) -> Iterator[tuple[int, int]]:
        """Measure runs, each next to another; yield after each group how many are done and in all.

        Each has a rank. Those of rank 0 are always measured; the others, in order, until `seconds`
        and 85 more have passed since the start. Groups are as large as a quarter of the memory
        allows: each session packs the `weights` for itself.
        """
        reference, begin = next(iter(self.runs.values())), time.perf_counter()
        size = max(1, min(_SESSIONS, (memory() or _MEMORY) // 4 // max(weights, 1)) - 2)
        ranks: dict[tuple[Run, Run], int] = {}
        for rank, run, other in sorted(wanted, key=itemgetter(0)):
            ranks.setdefault((run, other), rank)
        groups: dict[tuple[int, Run], list[Run]] = {(0, reference): []}
        for (run, other), rank in ranks.items():
            groups.setdefault((rank, other), []).append(run)
        done, total = 0, len(ranks)
        for (rank, other), runs in groups.items():
            while runs:
                spent = max(time.perf_counter() - begin, 1e-9)
                left = seconds + _LONGER - (time.perf_counter() - self.begin)
                last = int(left * done / spent)  # time for that many runs
                now = runs[: size if rank == 0 else max(0, min(size, last))]
                if now:
                    together = dict.fromkeys([reference, other, *now])
                    self._group([*together], other, seconds * len(now) / total)
                else:
                    now = runs
                    for run in (run for run in runs if not run.beside):
                        run.problem = run.problem or _NO_TIME
                done, runs = done + len(now), runs[len(now) :]
                yield done, total

    def _group(self, runs: Sequence[Run], other: Run, seconds: float) -> None:
        """Measure the runs in turn; the first is the reference."""
        opened = {run: session for run in runs if (session := self._open(run)) is not None}
        calls = [partial(session, feeds) for session in opened.values() for feeds in self.feeds]
        spent = measure(calls, seconds, warm=True).reshape(-1, len(opened), len(self.feeds))
        samples = {run: spent[:, i].T for i, run in enumerate(opened)}  # (phases, rounds)
        self.rounds.append(samples[runs[0]])
        for run, own in samples.items():
            for beside in {runs[0], other} & {*samples}:
                run.beside.setdefault(beside, (own, samples[beside]))

    def _open(self, run: Run) -> Session | None:
        """A session that has run once in each phase; None, with the problem noted, if it fails."""
        begin = time.perf_counter()
        try:
            session = Session(
                run.path,
                provider=self.provider,
                options=run.options | QUIET,
                threads=self.threads,
                outputs=self.outputs,
            )
            run.session_ms = (time.perf_counter() - begin) * 1e3
            results = [session(feeds) for feeds in self.feeds]  # warms it up, too
            run.errors = run.errors or list(map(differ, self.wanted, results))
        except GraphgenError as error:
            run.problem = str(error)
            return None
        return session

    def figures(self, run: Run, other: Run, phase: int) -> dict[str, Any]:
        """Latency, ratio to another run, verdict and error of a run in one phase, if known.

        The latency is the reference's, of all its rounds, times the ratio to it. The interval
        covers that of the ratio, and the reference's median as it changed from minute to minute.
        """
        found: dict[str, Any] = {"error": run.errors[phase] if run.errors else None}
        reference = next(iter(self.runs.values()))
        if reference not in run.beside:
            return found
        own, base = (samples[phase] for samples in run.beside[reference])
        ratio, rounds = latency(own / base), [samples[phase] for samples in self.rounds]
        parts = [x for r in rounds for x in np.array_split(r, min(_PARTS, len(r) // LEAST))]
        medians = [float(np.median(part)) for part in parts]
        whole = latency(np.concatenate(rounds))
        found["latency_ms"] = Latency(
            whole.median * ratio.median,
            min(whole.low, *medians) * ratio.low,
            max(whole.high, *medians) * ratio.high,
            len(own),
        )
        if other in run.beside:
            own, base = (samples[phase] for samples in run.beside[other])
            found |= {"ratio": latency(own / base), "verdict": verdict(own, base)}
        return found
