"""The graphs that a comparison measures: a model after the passes, together and apart."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import onnx_ir as ir

from graphgen.match import PassReport
from graphgen.passes import Report, optimize
from graphgen.targets import TargetName, target as find_target

_TIDYING = ("canonicalize", "clean")


@dataclass
class Variant:
    """A graph, the passes that made it, and the reports of the passes whose sites belong to it."""

    name: str
    kind: str
    passes: tuple[str, ...]
    model: ir.Model
    reports: list[PassReport] = field(default_factory=list)
    compile_ms: float = 0.0


class Ablation:
    """Variants of a model under one pipeline; `report` and `stages` are of the whole pipeline.

    cumulative: The first pass, the first two, ... Here and below, `legalize` follows if no session
        would load the graph otherwise, and is then in the variant's `passes`.
    leave_one_out: The pipeline without one pass, wherever it occurs. The others then lack what they
        need from that pass: without `canonicalize`, few fusions find their site.
    only: One pass, after those at the start of the pipeline that fuse nothing (`canonicalize` and
        `clean`), because it looks for its sites in the graph that they make. Compare it with the
        cumulative row of the last of them. `canonicalize`, `clean` and `legalize` run alone.
    """

    def __init__(self, model: ir.Model, target: TargetName, passes: Sequence[str]) -> None:
        self._model, self._passes, self._profile = model, tuple(passes), find_target(target)
        self._optimize = partial(optimize, target=target)
        self.report: Report | None = None
        self.stages: list[tuple[str, ir.Model]] = []

    def cumulative(self) -> Iterator[Variant]:
        """After each pass; must come first."""
        models: list[ir.Model] = []
        best = self._optimize(
            self._model,
            passes=self._passes,
            after_each=lambda _, model: models.append(model.clone()),
        )
        self.report = best.report
        models[-1:] = [best.model]
        names = _numbered(self._passes)
        self.stages = [("baseline", self._model), *zip(names, models, strict=True)]
        for i, (name, model) in enumerate(self.stages[1:]):
            done, passes = best.report.passes[: i + 1], self._passes[: i + 1]
            made = Variant(name, "cumulative", passes, model, done[-1:], _ms(done))
            yield self._loadable(made)

    def leave_one_out(self) -> Iterator[Variant]:
        """Without each pass; after `cumulative`, whose result is reused if the pass did nothing."""
        assert self.report is not None
        for name in dict.fromkeys(self._passes):
            done, model = self.report.passes, self.stages[-1][1]
            own = [one for one in done if one.name == name]
            if name in _TIDYING or any(
                one.count("fired") or one.nodes_before != one.nodes_after for one in own
            ):
                first = self._passes.index(name)
                rest = [other for other in self._passes[first:] if other != name]
                best = self._optimize(self.stages[first][1], passes=rest)
                done, model = [*done[:first], *best.report.passes], best.model
            others = [one for one in done if one.name != name]
            passes = tuple(one.name for one in others)
            yield Variant(f"without {name}", "leave_one_out", passes, model, others, _ms(others))

    def only(self) -> Iterator[Variant]:
        """Each pass on its own; after `cumulative`."""
        assert self.report is not None
        fusing = (i for i, name in enumerate(self._passes) if name not in _TIDYING)
        first = next(fusing, 0)
        for name in dict.fromkeys(self._passes):
            start = 0 if name in (*_TIDYING, "legalize") else first
            best = self._optimize(self.stages[start][1], passes=(name,))
            done = [*self.report.passes[:start], *best.report.passes]
            passes = (*self._passes[:start], name)
            made = Variant(f"only {name}", "only", passes, best.model, done[start:], _ms(done))
            yield self._loadable(made)

    def _loadable(self, variant: Variant) -> Variant:
        """The variant, after `legalize` if the target could not load it otherwise."""
        nodes = variant.model.graph.all_nodes()
        if "legalize" not in variant.passes and any(map(self._profile.lacks, nodes)):
            best = self._optimize(variant.model, passes=("legalize",))
            variant.model, variant.passes = best.model, (*variant.passes, "legalize")
            variant.compile_ms += _ms(best.report.passes)
        return variant


def _ms(passes: Sequence[PassReport]) -> float:
    return sum(done.seconds for done in passes) * 1e3


def _numbered(names: Sequence[str]) -> list[str]:
    """`clean`, then `clean 2`.

    >>> _numbered(["clean", "fuse_norm", "clean"])
    ['clean', 'fuse_norm', 'clean 2']
    """
    times = [names[: i + 1].count(name) for i, name in enumerate(names)]
    return [f"{n} {t}" if t > 1 else n for n, t in zip(names, times, strict=True)]
