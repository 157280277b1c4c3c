"""`gg.compare`: measure the passes of a pipeline, together and apart, and the runtime's own."""

import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import onnx_ir as ir
from rich.console import Console
from rich.progress import Progress

from graphgen import maps
from graphgen.arguments import checked
from graphgen.errors import GraphgenError, one_of
from graphgen.export.read import load
from graphgen.export.session import model_of
from graphgen.graph import ModelLike, parameters
from graphgen.laboratory.ablation import Ablation, Variant
from graphgen.laboratory.bench import Bench, Run
from graphgen.laboratory.others import in_background, optimized_by_others
from graphgen.laboratory.report import LEVELS
from graphgen.laboratory.rows import KINDS, Comparison, Figures, Kind, Row
from graphgen.laboratory.runs import fingerprint, optimizers
from graphgen.laboratory.shelf import Shelf
from graphgen.laboratory.sides import check_provider
from graphgen.match import STATUSES
from graphgen.measure import cost
from graphgen.measure.accuracy import references
from graphgen.measure.feeds import at_sizes, phases
from graphgen.operands import Array
from graphgen.passes import PIPELINE, passes_of, pipeline
from graphgen.runtime import Provider, Session
from graphgen.targets import Device, target as find_target
from graphgen.traits import Trait, has


@checked
def compare(
    model: str | os.PathLike[str] | ModelLike,
    *,
    dims: Mapping[str, int] | None = None,
    inputs: Mapping[str, Array] | None = None,
    target: Device = "cpu",
    passes: Sequence[str] = PIPELINE,
    with_passes: Sequence[str] = (),
    against: str | os.PathLike[str] | None = None,
    kinds: Sequence[Kind] | None = None,
    providers: Sequence[Provider] = (),
    seconds: float = 30.0,
    threads: int | None = None,
    progress: bool = False,
) -> Comparison:
    """Measure what each pass does to a model, what it gains, and what it costs.

    The passes see the model with its symbolic dimensions, as in `optimize`; `dims` are the sizes
    for the runs. With a cache there are two runs: the prefill, of all tokens with nothing before
    them, and the decode step, of one token after as many as `dims` says.

    Args:
        model: A path, or what `build`, `load` or `optimize` returned.
        dims: A size for each symbolic dimension of the inputs.
        inputs: Arrays for inputs, by name; others are random.
        target: `cpu` or `cuda`.
        passes, with_passes: The pipeline, as in `optimize`.
        against: Another file with the same inputs and outputs, instead of what the passes make.
        kinds: The rows in addition to the baseline and the whole pipeline: some of `cumulative`,
            `leave_one_out`, `only`, `runtime` and `other`; all by default.
        providers: Others that run the file, the graph after each pass and that of `against` once:
            `elsewhere` of their rows has the placement, copies between devices, and the error.
        seconds: How long to measure in all; each session runs at least 7 times.
        threads: How many threads a session has; by default the runtime's choice.
        progress: Show progress on stderr, if that is a terminal.

    Rows with the same graph are measured once, and so are sessions for which the runtime makes the
    same graph. A KeyboardInterrupt ends the work: the result so far is returned, not `complete`.

    Raises GraphgenError for a model that no session loads, dimensions without a size, and inputs
    for which no values can be generated.
    """
    path = Path(model) if isinstance(model, str | os.PathLike) else None
    given: Any = model if path else model_of(model, "compare")
    if not 0 <= seconds < math.inf:
        raise GraphgenError(f"compare: seconds is {seconds}; it must be at least 0")
    if not passes:
        raise GraphgenError("compare: there are no passes; give at least one")
    passes = pipeline(with_passes, passes)
    kinds = (KINDS[1:] if against is None else KINDS[-2:]) if kinds is None else kinds
    for kind in kinds:
        one_of("compare", Kind, kinds=kind)
    own = [kind for kind in kinds if kind not in KINDS[-2:]]
    if against is not None and (own or passes != PIPELINE):
        raise GraphgenError(
            f"compare: {f'kinds={own[0]!r}' if own else 'passes'} has no effect with against, which"
            " is compared instead of what passes make: leave one of them out"
        )
    for provider in providers:
        check_provider("compare", provider)
    name = str(path or given.graph.name)
    one_of("compare", Device, target=target)
    kernels = find_target(target)
    passes_of(passes, kernels)  # so that an unknown pass fails before any work is done
    found = Comparison(name, target, kernels.runtime, threads, seconds)
    console = Console(stderr=True)
    bar = Progress(console=console, disable=not (progress and console.is_terminal), transient=True)
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    try:
        with folder as place, ExitStack() as ends, bar, suppress(KeyboardInterrupt):
            work = _Work(found, model_of(given, "compare"), path, Path(place), bar, ends)
            work.start({n: np.asarray(x) for n, x in (inputs or {}).items()}, dict(dims or {}))
            work.gather(passes, kinds, None if against is None else Path(against))
            work.elsewhere(providers)
            work.measure()
            found.complete = True
    except OSError as error:  # all graphs are files in that folder
        problem = f"{folder.name} cannot be written: {error.strerror or error}"
        raise GraphgenError(f"compare: {problem}; set TMPDIR to another folder") from error
    return found


class _Work:
    """One comparison at work: its files and sessions, and which row is which run."""

    def __init__(
        self,
        found: Comparison,
        model: ir.Model,
        path: Path | None,
        folder: Path,
        bar: Progress,
        ends: ExitStack,
    ) -> None:
        self.found, self.model, self.bar, self.folder, self.ends = found, model, bar, folder, ends
        self.shelf = Shelf(model, folder)
        self.file = self.shelf.write(model, "0") if path is None else self.shelf.copy(path, "0")
        self.source = path or self.file
        self.provider: Provider = found.target
        self.rows: list[tuple[int, Row, Run, Run]] = []  # rank, row, its run, that next to it
        self.graphs: dict[str, tuple[Row, Path, Run | None]] = {}  # by fingerprint, the first row
        self.result = ""  # the name of the row that gates judge

    def start(self, inputs: dict[str, Array], dims: dict[str, int]) -> None:
        """Set up the phases with their inputs, the reference for errors, and the first row."""
        found = self.found
        plain = Session(self.source, provider=self.provider, optimize=False, threads=found.threads)
        runs = phases(self.model, dims, inputs, plain)
        found.dims, feeds = {run.name: run.sizes for run in runs}, [run.feeds for run in runs]
        found.feeds = feeds[0]
        found.inputs = {n: "given" if n in inputs else "invented" for n in feeds[0]}
        self.bench = Bench(self.folder, self.provider, found.threads, feeds, list(plain.outputs))
        row = self._counted(Row(name="baseline", kind="baseline"), self.file, self.model)
        flops = [figures.flops for figures in row.phases()]
        found.reference, self.bench.wanted = references(self.model, feeds, flops, plain)
        run = self._add(row, self.file)
        if run is None:
            raise GraphgenError(str(row.problem))
        self.baseline = run
        self.graphs["baseline"] = (row, self.file, run)

    def gather(self, passes: Sequence[str], kinds: Sequence[Kind], against: Path | None) -> None:
        """Make all rows, with what is known about them before they run."""
        others: Iterator[tuple[str, Path | str]] = iter(())
        if against is None:
            if "other" in kinds:  # on another core, while passes work on one
                others = self.ends.enter_context(in_background(self._others))
            self._ablate(Ablation(self.model, self.found.target, passes), kinds)
        else:
            row = self._counted(Row(name=against.name, kind="other"), against, load(against))
            self.graphs["against"] = (row, against, self._add(row, against, self.baseline))
            self.result = row.name
        if "runtime" in kinds:
            self._cross()
        for name, made in self.bar.track(others, description="other optimizers"):
            row, run = Row(name=name, kind="other"), None
            if isinstance(made, str):
                row.problem = made
            elif (run := self._run(row, made)) is not None:
                model = None
                with suppress(GraphgenError):
                    model = load(made)
                with suppress(GraphgenError):
                    self._counted(row, made, model)
            self._place(row, run, self.baseline)

    def elsewhere(self, providers: Sequence[Provider]) -> None:
        """Run the file, the graph after each pass and the other file once on each provider."""
        wanted = ("baseline", "cumulative", "other")
        graphs = [graph for graph in self.graphs.values() if graph[0].kind in wanted]
        tasks: list[tuple[Provider, Row, Path]]
        tasks = [(provider, row, path) for provider in providers for row, path, _ in graphs]
        for provider, row, path in self.bar.track(tasks, description="other providers"):
            row.elsewhere[str(provider)] = self.bench.elsewhere(path, provider)

    def _ablate(self, ablation: Ablation, kinds: Sequence[Kind]) -> None:
        """Add the graphs of the pipeline; equal graphs share one file."""
        whole = list(self.bar.track(ablation.cumulative(), description="passes"))
        self.found.report, self.found.stages = ablation.report, ablation.stages
        variants: list[Iterable[Variant]] = [whole if "cumulative" in kinds else whole[-1:]]
        variants += [ablation.leave_one_out()] if "leave_one_out" in kinds else []
        variants += [ablation.only()] if "only" in kinds else []
        for variant in self.bar.track(chain(*variants), description="passes, apart"):
            model = self.shelf.refer(variant.model)
            key = fingerprint(model.graph)
            about: dict[str, Any] = {
                "name": variant.name,
                "kind": variant.kind,
                "passes": variant.passes,
                "sites": {s: sum(r.count(s) for r in variant.reports) for s in STATUSES},
                "compile_ms": variant.compile_ms,
            }
            if key in self.graphs:
                row, path, run = self.graphs[key]
                self._place(_like(row, **about), run, self.baseline)
            else:
                path = self.shelf.write(model, str(len(self.graphs)))
                row = self._counted(Row(**about), path, variant.model)
                self.graphs[key] = (row, path, self._add(row, path, self.baseline))
            if variant.model is whole[-1].model:
                self.result = self.graphs[key][0].name

    def _cross(self) -> None:
        """Add each graph at each runtime level; baseline and result without single optimizers."""
        graphs = [graph for graph in self.graphs.values() if graph[2] is not None]
        beside: dict[str, Run] = {}  # the baseline at each level
        for first, path, run in self.bar.track(graphs, description="the runtime's levels"):
            rank = 1 if first.name in ("baseline", self.result) else 2
            for level in LEVELS[:-1]:
                row = _like(first, name=f"{first.name}, {level}", kind="runtime", level=level)
                added = self._add(row, path, beside.get(level, self.baseline), rank)
                beside.setdefault(level, added or self.baseline)
            changing, idle = optimizers(path, self.provider) if rank == 1 else ([], [])
            if rank == 1:
                self.found.optimizers[first.name] = {"changing": changing, "idle": idle}
            for name in changing:
                row = _like(first, name=f"{first.name}, no {name}", kind="runtime")
                row.disabled = (name,)
                without = self._run(row, path)
                if without is not run:  # else another optimizer does the same
                    self._place(row, without, run, rank)

    def _others(self, stop: Event) -> Iterator[tuple[str, Path | str]]:
        """What other optimizers make of the file, or why they fail."""
        folder = self.folder / "others"
        try:
            folder.mkdir()
            yield from optimized_by_others(self.source, folder, self.found.target, stop=stop)
        except (GraphgenError, OSError) as error:
            yield "other optimizers", str(error)

    def _run(self, row: Row, path: Path) -> Run | None:
        try:
            return self.bench.run(row.name, path, row.level, row.disabled)
        except GraphgenError as error:
            row.problem = str(error)
            return None

    def _place(self, row: Row, run: Run | None, beside: Run | None, rank: int = 0) -> None:
        self.found.rows.append(row)
        if run is not None:
            row.runtime_nodes, row.measured_as = run.nodes, run.name
            row.placement = run.placement._asdict()
            self.rows.append((rank, row, run, beside or run))

    def _add(self, row: Row, path: Path, beside: Run | None = None, rank: int = 0) -> Run | None:
        run = self._run(row, path)
        self._place(row, run, beside, rank)
        return run

    def _counted(self, row: Row, path: Path, model: ir.Model | None) -> Row:
        """The row with the node count of its file, and the costs of its model in each phase."""
        row.decode = Figures() if len(self.found.dims) > 1 else None
        row.nodes = sum(not has(n, Trait.CONSTANT) for n in maps.load(path).graph.all_nodes())
        if model is not None:
            row.parameters = sum(cost.elements(v) for v in parameters(model.graph).values())
            figures = [_costs(model, sizes) for sizes in self.found.dims.values()]
            row.decode = figures[1] if figures[1:] else None
            row.flops, row.bytes = figures[0].flops, figures[0].bytes
        return row

    def measure(self) -> None:
        """Measure all runs, and fill in the rows after each group of them."""
        task = self.bar.add_task("measuring", total=None)
        wanted = [(rank, run, beside) for rank, _, run, beside in self.rows]
        for done, total in self.bench.measure(wanted, self.shelf.size, self.found.seconds):
            self.bar.update(task, completed=done, total=total)
            for _, row, run, beside in self.rows:
                row.session_ms, row.problem = run.session_ms, run.problem
                for i, figures in enumerate(row.phases()):
                    for name, value in self.bench.figures(run, beside, i).items():
                        setattr(figures, name, value)


def _like(row: Row, **changes: Any) -> Row:
    decode = None if row.decode is None else replace(row.decode)
    return replace(row, decode=decode, problem=None, elsewhere={}, **changes)


def _costs(model: ir.Model, sizes: Mapping[str, int]) -> Figures:
    """What a model computes and moves at those sizes; None if that is unknown."""
    try:
        flops, moved = cost.of_model(at_sizes(model, sizes, least=0))
    except GraphgenError as error:
        given = " ".join(f"{name}={size}" for name, size in sizes.items())
        raise GraphgenError(f"the model does not take {given}: {error}") from error
    names = ("read", "written", "peak_alive")
    return Figures(flops, {} if moved is None else dict(zip(names, moved, strict=True)))
