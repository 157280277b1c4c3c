"""Which rewrite breaks the numbers, or the speed: `graphgen bisect`.

A step is a rewrite, or what a pass does apart from its rewrites. Numbers are found by halving: the
error of the unfused graph is within the tolerance, that of the whole pipeline beyond it. Between
two such states some step takes the error from within to beyond, and halving ends at one. If errors
only grow, it is the first and the only one; else there may be others, and an error that a later
step hides stays hidden.

Speed is measured for each site alone: a slow site in one layer of many is lost in the noise of the
whole. Of sites with equal parts, one is measured.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen.arguments import checked
from graphgen.display import on_screen
from graphgen.errors import GraphgenError
from graphgen.export.artifact_files import (
    CHECKPOINT,
    TRAINING,
    loss_in,
    parse_artifact,
    read_artifact,
)
from graphgen.export.checkpoint import Checkpoint
from graphgen.export.prepared import Prepared
from graphgen.export.session import Session, model_of
from graphgen.garbage import uncollected
from graphgen.graph import ModelLike
from graphgen.laboratory.text import short_text
from graphgen.match import Engine, Pass, PassReport, run_passes
from graphgen.measure import cost
from graphgen.measure.accuracy import differ, finite, gradients_differ, references
from graphgen.measure.feeds import at_sizes, given_sizes, invent
from graphgen.measure.latency import latency, measure
from graphgen.operands import Array
from graphgen.passes import PIPELINE, apply, passes_of, pipeline
from graphgen.passes.legalize import runnable
from graphgen.passes.repros import BOTH, DIFFERENCE, TIME, write
from graphgen.passes.training.accumulate import for_stock, results
from graphgen.passes.verify import parts_of
from graphgen.subgraphs import content
from graphgen.targets import Device, TargetName, target as find_target
from graphgen.traits import Trait, has
from graphgen.version import VERSION

AfterEach: TypeAlias = Callable[[str, ir.Model], None]
Apply: TypeAlias = Callable[
    [ir.Model, Sequence[Pass], Engine, AfterEach | None], Sequence[PassReport]
]
"""What runs passes on a model, in place: `graphgen.passes.apply`, or `run_passes` of match."""

View: TypeAlias = Callable[[ir.Model], ir.Model]
Measure: TypeAlias = Callable[[Sequence[Array], Sequence[Array]], float]

_LONGER = 3
"""The most measurements of one site, each twice as long as the last, in its own sessions."""


@dataclass
class Step:
    """A rewrite, or what a pass does apart from its rewrites, and what was found about it.

    In `figures`, error_before and error_after are of the whole model around it, error_alone of its
    site alone on what the whole computes there; ms_before and ms_after, and their ratio with its
    95 % interval ratio_low and ratio_high, of its site alone. `alike` holds the numbers of the
    other rewrites at fault, out of `compared` of the same kind, or with equal parts.
    """

    name: str  # of the pass
    index: int  # of the pass
    applied: int  # rewrites up to here
    number: int | None = None  # of the rewrite
    where: str = "the whole model"
    reason: str = "what it does apart from its rewrites"
    figures: dict[str, float] = field(default_factory=dict)
    alike: list[int] = field(default_factory=list)
    compared: int = 0
    folder: str | None = None

    def __str__(self) -> str:
        number = "" if self.number is None else f"rewrite {self.number}, "
        return f"{number}{self.name} at {self.where}: {self.reason}"

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield f"Step({self})"

    def text(self) -> str:
        """What was found about it, in lines."""
        figures = [f"{name.replace('_', ' ')} {x:.4g}" for name, x in self.figures.items()]
        lines = [str(self), *filter(None, [", ".join(figures)])]
        if self.compared:
            lines.append(f"of {self.compared} like it {len(self.alike)} more: {self.alike}")
        if self.folder is not None:
            lines.append(f"python {self.folder}/run.py shows it")
        return "\n  ".join(lines)


@dataclass
class Bisection:
    """What `bisect` found; `whole` is of all passes together, against none.

    `reference` is what errors are against, and empty if times were wanted; `undecided` lists what
    could not be measured, or not well enough for the limit. An interrupted search is not
    `complete`, and leaves `suspected` steps: numbers go wrong at at least one of them, if the whole
    is known to be beyond the limit; times were not measured.
    """

    limit: float
    whole: Step
    reference: str = ""
    steps: int = 0
    rewrites: int = 0
    probes: int = 0  # opened sessions
    guilty: list[Step] = field(default_factory=list)
    suspected: list[Step] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    complete: bool = False

    def to_json(self) -> dict[str, Any]:
        """The object that docs/bisect.schema.json describes; non-finite figures are null."""
        found: dict[str, Any] = finite({"graphgen": VERSION, **asdict(self)})
        return found

    def __str__(self) -> str:
        numbers = {"rewrite": self.rewrites, "step": self.steps, "session": self.probes}
        counts = ", ".join(f"{n} {word}{'s' * (n != 1)}" for word, n in numbers.items())
        counts += f"; errors against {self.reference}" if self.reference else ""
        counts += "" if self.complete else "; INTERRUPTED, not complete"
        lines = [step.text() for step in self.guilty]
        lines += ["no step is found guilty"] if self.complete and not lines else []
        if self.suspected:
            ends = [self.suspected[0], self.suspected[-1]][: len(self.suspected)]
            lines.append(
                f"{len(self.suspected)} steps are still suspected, the first and the last:"
            )
            lines += [step.text() for step in ends]
        lines += [f"undecided: {text}" for text in self.undecided]
        return "\n".join([f"limit {self.limit:g}; {counts}", self.whole.text(), *lines])

    @on_screen
    def __repr__(self) -> Iterator[str]:
        first, *rest = str(self).split("\n")
        yield f"Bisection with {first}"
        yield from rest


@dataclass(frozen=True)
class _Part:
    """Models before and after a step; `names` are the graph's values that they take."""

    step: Step
    models: Sequence[ir.Model]
    names: Sequence[str] | None = None  # None: the whole model's inputs


@dataclass
class _Search:
    """The states of a model between the steps of a pipeline, and their sessions.

    `stages` holds the model and its state after each pass; `parts` those of the rewrites, in order;
    the last of `steps` is the whole.
    """

    found: Bisection
    model: ir.Model
    feeds: dict[str, Array]
    seconds: float
    folder: Path | None
    progress: Callable[[str], object]
    passes: Sequence[Pass]
    apply: Apply
    view: View
    error: Measure
    target: TargetName = "cpu"

    def __post_init__(self) -> None:
        self.limit, self.stages = self.found.limit, [self.view(self.model)]
        self.plain = self.open(self.stages[0])(self.feeds)
        self.steps, self.parts = list[Step](), list[_Part]()
        self._run()

    @uncollected
    def _run(self) -> None:
        """Run all passes; keep what each leaves, once if it changed nothing."""
        sites: dict[int, tuple[list[str], ir.Model, ir.Model]] = {}
        kept = content(self.model)

        def keep(*site: Any) -> None:
            sites[engine.applied + 1] = parts_of(*site)

        def stage(_: str, model: ir.Model) -> None:
            nonlocal kept
            before, kept = kept, content(model)
            self.stages.append(self.stages[-1] if kept == before else self.view(model))

        engine = Engine(verify=keep)
        reports = self.apply(self.model.clone(), self.passes, engine, stage)
        for index, done in enumerate(reports):
            numbered = sorted((s.number, s) for s in done.sites if s.number is not None)
            self.steps.append(Step(done.name, index, self.found.rewrites))
            for number, s in numbered:
                self.steps.append(Step(done.name, index, number, number, s.where, s.reason))
                if number in sites:
                    names, *models = sites[number]
                    self.parts.append(_Part(self.steps[-1], models, names))
                elif len(numbered) == 1:  # of several without parts, none is the whole pass
                    self.parts.append(_Part(self.steps[-1], self.stages[index : index + 2]))
            self.found.rewrites += len(numbered)
        self.found.steps, self.found.suspected = len(self.steps), [*self.steps]
        self.found.whole.applied = self.found.rewrites
        self.steps.append(self.found.whole)

    def state(self, i: int) -> ir.Model:
        """The model before a step."""
        step = self.steps[i]
        if step.number is None:
            return self.stages[step.index]
        model = self.model.clone()
        self.apply(model, self.passes[: step.index + 1], Engine(step.number - 1), None)
        return self.view(model)

    def open(self, model: ir.Model, *, fast: bool = False) -> Session:
        """A session, plain or with the runtime's own optimizations, as users run it."""
        self.found.probes += 1
        provider: Device = "cuda" if fast and self.target == "cuda" else "cpu"
        return Session(runnable(model, provider), provider=provider, optimize=fast)

    def values(self, i: int, parts: Iterable[_Part]) -> dict[str, Array]:
        """The values that some parts take, computed by the model before a step."""
        model = self.state(i).clone()
        known = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
        names = sorted(
            {name for part in parts for name in part.names or ()} & {*known} - {*self.feeds}
        )
        model.graph.outputs[:] = [known[name] for name in names]
        return self.feeds | dict(zip(names, self.open(model)(self.feeds), strict=True))

    def inputs(self, part: _Part, values: Mapping[str, Array]) -> dict[str, Array]:
        """The inputs of a part; those that are not values of the graph are random."""
        if part.names is None:
            return self.feeds
        given = {f"x{i}": values[n] for i, n in enumerate(part.names) if n in values}
        return given if len(given) == len(part.names) else invent(part.models[0], given)

    def blame(self, part: _Part, values: Mapping[str, Array], script: str) -> None:
        """Write what shows a step into the folder, and add the step to the guilty."""
        if self.folder is not None:
            pair = zip(BOTH, map(runnable, part.models), strict=True)
            models, feeds = dict(pair), self.inputs(part, values)
            part.step.folder = str(write(self.folder, part.step.name, models, feeds, script))
        self.found.guilty.append(part.step)

    def by_error(self) -> None:
        """The step that takes the error of the whole beyond the limit, by halving."""
        flops, _ = cost.of_model(self.stages[0])
        if any(has(node, Trait.QUANTIZED) for node in self.stages[0].graph.all_nodes()):
            flops = None  # kernels may round what they read: no step is at fault
        self.found.reference, [wanted] = references(
            self.stages[0], [self.feeds], [flops], lambda _: self.plain
        )
        errors, failures = {0: self.error(wanted, self.plain)}, dict[int, str]()
        if not errors[0] <= self.limit:
            raise GraphgenError(
                f"bisect: the unchanged model has an error of {errors[0]:.2g} against "
                f"{self.found.reference}, above the limit {self.limit:g}; give a larger tolerance"
            )
        last, whole = len(self.steps) - 1, self.found.whole
        whole.figures["error_before"] = errors[0]

        def beyond(i: int) -> bool:
            self.progress(f"step {i} of {last}")
            try:
                state = self.state(i)
                same = state is self.stages[0]
                got = self.plain if same else self.open(state)(self.feeds)
                errors[i] = self.error(wanted, got)
            except GraphgenError as error:  # a model that does not run is as wrong as can be
                errors[i], failures[i] = np.inf, f"; it does not run: {error}"
            return not errors[i] <= self.limit

        def suspect(low: int, high: int) -> list[Step]:
            steps = self.found.suspected = self.steps[low:high]
            steps[0].figures = {"error_before": errors[low]} | steps[0].figures
            steps[-1].figures["error_after"] = errors[high]
            return steps

        is_beyond = beyond(last)
        whole.figures["error_after"] = errors[last]
        if not is_beyond:
            return
        low, high = 0, last
        while len(suspect(low, high)) > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if beyond(middle) else (middle, high)
        step, values = self.steps[low], self.feeds
        blamed = _Part(step, [self.state(low), self.state(high)])
        alike = [part for part in self.parts if _kind(part.step) == _kind(step)]
        step.reason += failures.get(high, "")
        with suppress(GraphgenError):  # a site may not run alone, or lack its inputs
            values = self.values(low, alike)
        for part in alike:
            with suppress(GraphgenError):
                feeds = self.inputs(part, values)
                error = differ(*(self.open(model)(feeds) for model in part.models)).rel_rms
                if part.step is step:
                    step.figures["error_alone"], blamed = error, part
                else:
                    step.compared += 1
                    step.alike += [part.step.applied] if error > self.limit else []
        self.blame(blamed, values, DIFFERENCE)

    def by_time(self) -> None:
        """The steps whose own parts take longer by more than the limit."""
        rewritten = {part.step.index for part in self.parts}
        passes = [
            step for step in self.steps[:-1] if step.number is None and step.index not in rewritten
        ]
        beside = [_Part(step, self.stages[step.index : step.index + 2]) for step in passes]
        groups: dict[tuple[str, ...], list[_Part]] = {}
        for part in self.parts + beside:
            groups.setdefault(tuple(map(short_text, part.models)), []).append(part)
        slow: list[tuple[float, _Part]] = []
        pending = [parts for texts, parts in groups.items() if len({*texts}) > 1]
        try:
            while pending:
                part, *equal = pending[0]
                if lost := self.slower(part):
                    part.step.alike = [other.step.applied for other in equal]
                    part.step.compared = len(equal)
                    slow.append((lost * (1 + len(equal)), part))
                del pending[0]
        finally:
            rest = [part.step for parts in pending for part in parts]
            self.found.suspected = sorted(rest, key=lambda step: (step.index, step.applied))
            for _, part in sorted(slow, key=lambda found: -found[0]):
                self.blame(part, {}, TIME)
        whole = _Part(self.found.whole, [self.stages[0], self.stages[-1]])
        if self.slower(whole) and not slow:
            self.found.undecided.append("the whole is slower, though no step is by itself")

    def slower(self, part: _Part) -> float:
        """Milliseconds that the part after takes longer; 0 if not by more than the limit.

        Every pair of sessions, at least two, has to agree. If undecided, it is 0, and noted.
        """
        self.progress(f"measuring {part.step}")
        step, samples, lows = part.step, np.zeros((0, 2)), list[float]()
        try:
            feeds = {n: np.require(x, requirements="C") for n, x in self.inputs(part, {}).items()}
            for i in range(_LONGER):
                runs = [self.open(model, fast=True).bind(feeds) for model in part.models]
                taken = measure(runs, self.seconds * 2**i)
                samples = np.concatenate([samples, taken])
                lows.append(latency(taken[:, 1] / taken[:, 0]).low)
                before, after = np.median(samples, 0).tolist()
                ratio = latency(samples[:, 1] / samples[:, 0])
                step.figures = {"ms_before": before, "ms_after": after, "ratio": ratio.median}
                step.figures |= {"ratio_low": ratio.low, "ratio_high": ratio.high}
                if ratio.high < 1 + self.limit:
                    return 0.0
                if i and min(lows) > 1 + self.limit:
                    return float(after - before)
        except GraphgenError as error:
            self.found.undecided.append(f"{step}: {error}")
        else:
            self.found.undecided.append(step.text())
        return 0.0


def _kind(step: Step) -> tuple[int, str]:
    """The pass, and the name of a rewrite, without its figures."""
    return step.index, re.split(r"\d", step.reason)[0]


@checked
def bisect(
    model: str | os.PathLike[str] | ModelLike | Prepared,
    *,
    tolerance: float | None = None,
    slower_than: float | None = None,
    target: TargetName = "cpu",
    runtime: str | None = None,
    passes: Sequence[str] = PIPELINE,
    with_passes: Sequence[str] = (),
    dims: Mapping[str, int] | None = None,
    feeds: Mapping[str, Array] | None = None,
    seconds: float = 0.5,
    output: str | os.PathLike[str] | None = None,
    progress: Callable[[str], object] = lambda text: None,
) -> Bisection:
    """The step of `optimize` after which a model is wrong, or those that make it slower.

    The model is a path, or what `build`, `load` or `optimize` returned; or a folder of training
    artifacts, of which the steps are those of the trainer's lowering; or, for the steps that write
    them, an `export.prepared.Prepared`. Of these two, errors are those of the loss and of all
    gradients. `tolerance` bounds the relative RMS error with the runtime's own optimizations off,
    against what `compare` takes, float64 or the unfused graph; `slower_than`, such as 0.03, how
    much longer a site takes after a step, with them on, first measured for `seconds`. `target`,
    `runtime`, `passes`, `with_passes` are as for `optimize`; `dims` fix symbolic dimensions, as do
    arrays in `feeds`; other inputs are random. The folder `output` gets NUMBER-PASS for each step
    found: both models, inputs, run.py. A KeyboardInterrupt ends the work: the result so far is
    returned, not `complete`.

    Raises GraphgenError unless one limit is given, for inputs that cannot be generated, and for a
    model that no session runs unchanged, or that is not within the tolerance.
    """
    limits: dict[str, Any] = {"tolerance": tolerance, "slower_than": slower_than}
    folder = None if output is None else Path(output)
    how = limits | {"seconds": seconds, "output": folder, "progress": progress}
    view: View = ir.Model.clone
    given: Any = model
    if (training := _training(given)) is not None:
        if (target, runtime, *passes, *with_passes) != ("cpu", None, *PIPELINE):
            raise GraphgenError("bisect: no target or pass can be chosen for training artifacts")
        model, some, view, weights = training
        feeds = {**weights, **(feeds or {})}
        how |= {"view": view, "error": gradients_differ}
    else:
        some = passes_of(pipeline(with_passes, passes), find_target(target, runtime))
        model = model_of(given, "bisect")
        how |= {"apply": apply, "target": target}
    model = at_sizes(model, given_sizes(model, dims or {}, feeds or {}))
    return search(model, some, invent(view(model), feeds), **how)


def _training(given: Any) -> tuple[ir.Model, list[Pass], View, dict[str, Array]] | None:
    """A training graph, its passes, what is compared of it, and its weights; None for others."""
    if isinstance(given, Prepared):
        return given.training, given.passes, results, given.weights
    if not isinstance(given, str | os.PathLike) or not Path(given, TRAINING).is_file():
        return None
    path, saved = Path(given, TRAINING), Checkpoint.load(Path(given, CHECKPOINT))
    model = parse_artifact(path, read_artifact(path))
    accumulate = loss_in(model, path).get("accumulate", 1) > 1
    view = partial(results, accumulate=accumulate)
    return model, for_stock(accumulate), view, {**saved.trainable, **saved.frozen}


def search(
    model: ir.Model,
    passes: Sequence[Pass],
    feeds: dict[str, Array],
    *,
    tolerance: float | None = None,
    slower_than: float | None = None,
    apply: Apply = run_passes,
    view: View = ir.Model.clone,
    error: Measure = lambda wanted, got: differ(wanted, got).rel_rms,
    target: TargetName = "cpu",
    seconds: float = 0.5,
    output: Path | None = None,
    progress: Callable[[str], object] = lambda text: None,
) -> Bisection:
    """The step of any passes after which a model is wrong, as `bisect` finds those of `optimize`.

    `apply` runs passes on a model, in place; `view` gives a copy of it, before them, after them
    and in between, with the same outputs, whose `error` is that of the whole; `feeds` are all
    inputs of that copy.
    """
    limits = [limit for limit in (tolerance, slower_than) if limit is not None]
    if len(limits) != 1 or not 0 < limits[0] < np.inf or not 0 < seconds < np.inf:
        problem = "give either a tolerance or slower_than, above 0, and seconds above 0"
        raise GraphgenError(f"bisect: {problem}")
    found = Bisection(limits[0], Step("pipeline", len(passes), 0, reason="all steps"))
    with suppress(KeyboardInterrupt):
        steps = _Search(
            found, model, feeds, seconds, output, progress, passes, apply, view, error, target
        )
        (steps.by_time if tolerance is None else steps.by_error)()
        found.suspected, found.complete = [], True
    return found
