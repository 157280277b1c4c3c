"""What `compare` found: rows to read, query and save."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import onnx_ir as ir

from graphgen.display import in_notebook, on_screen
from graphgen.errors import GraphgenError, one_of
from graphgen.laboratory.notebook import as_page
from graphgen.laboratory.report import at_sizes, brief, place, text
from graphgen.match import STATUSES, Site, Status
from graphgen.measure.accuracy import Error, finite
from graphgen.measure.latency import Latency
from graphgen.operands import Array
from graphgen.passes import Report, word_of
from graphgen.passes.fusions import FORMULAS, RECOGNIZED
from graphgen.processor import processor
from graphgen.targets import Device
from graphgen.version import VERSION

Kind: TypeAlias = Literal["baseline", "cumulative", "leave_one_out", "only", "runtime", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass
class Figures:
    """What a run costs and how exact it is at some sizes.

    `latency_ms` is of one run; `ratio` is to the baseline at the same level of the runtime's
    optimizations, in the same rounds; `verdict` says faster, slower or tie.
    """

    flops: int | None = None
    bytes: dict[str, int | None] = field(default_factory=dict)  # read, written, peak_alive
    latency_ms: Latency | None = None
    ratio: Latency | None = None
    verdict: str | None = None
    error: Error | None = None

    def phrases(self) -> list[str]:
        """What was measured, in words."""
        latency, ratio, error = self.latency_ms, self.ratio, self.error
        return [
            *([f"{latency.median:.3g} ms"] if latency else []),
            *([f"{ratio.median:.3f} of the baseline, {self.verdict}"] if ratio else []),
            *([f"error {error.rel_rms:.1e}"] if error else []),
        ]

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield f"{type(self).__name__}({', '.join(self.phrases())})"


@dataclass
class Elsewhere:
    """One graph on another provider: its nodes there and on the CPU, and copies between them.

    `error` is the largest relative RMS over phases and outputs; `problem` says why it does not run.
    """

    nodes: int = 0
    cpu: int = 0
    copies: int = 0
    error: float | None = None
    problem: str | None = None


@dataclass(repr=False)
class Row(Figures):
    """One graph, in one session.

    `sites` are those of the pass that the row is named after, or of all passes if one is left out.
    `measured_as` is the row whose session was measured: the runtime makes the same graph of both.
    `problem` says why there are no figures. `elsewhere` has what `providers` asked for. `decode`
    holds the figures of the decode step; with a cache, the row's own are of the prefill.
    """

    name: str = ""
    kind: Kind = "cumulative"
    passes: tuple[str, ...] = ()
    level: str = "all"
    disabled: tuple[str, ...] = ()  # optimizers of the runtime
    sites: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATUSES, 0))
    nodes: int | None = None
    parameters: int | None = None
    runtime_nodes: int | None = None  # what the session makes of them
    placement: dict[str, Any] = field(default_factory=dict)
    elsewhere: dict[str, Elsewhere] = field(default_factory=dict)  # by provider
    compile_ms: float | None = None
    session_ms: float | None = None
    measured_as: str = ""
    problem: str | None = None
    decode: Figures | None = None

    @property
    def fired(self) -> int:
        """How many sites were rewritten."""
        return self.sites["fired"]

    @property
    def missed(self) -> int:
        """How many candidates did not match."""
        return self.sites["missed"]

    @property
    def refused(self) -> int:
        """How many candidates matched but were left, because rewriting would not pay."""
        return self.sites["refused"]

    def phases(self) -> list[Figures]:
        """The figures of the prefill and of the decode step, or of the one run."""
        return [self, *([] if self.decode is None else [self.decode])]

    def phrases(self) -> list[str]:
        """The name of the row, its sites and nodes, and what was measured or why nothing was."""
        nodes = [] if self.nodes is None else [f"{self.nodes:,} nodes"]
        decode = [] if self.decode is None else [f"decode: {', '.join(self.decode.phrases())}"]
        problem = [] if self.problem is None else [self.problem]
        return [self.name, f"{self.fired} fired", *nodes, *super().phrases(), *decode, *problem]


@dataclass
class Comparison:
    """The rows of one model: `print(r)`, `r["fuse_attention"].fired`, `r.save("report.html")`."""

    model: str
    target: Device
    runtime: str
    threads: int | None
    seconds: float
    dims: dict[str, dict[str, int]] = field(default_factory=dict)  # of each phase
    reference: str = ""
    inputs: dict[str, str] = field(default_factory=dict)  # "given" or "invented"
    optimizers: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    report: Report | None = field(default=None, repr=False)  # of the whole pipeline
    stages: list[tuple[str, ir.Model]] = field(default_factory=list, repr=False)  # graphs
    feeds: dict[str, Array] = field(default_factory=dict, repr=False)  # of the first phase
    complete: bool = False

    def __getitem__(self, name: str) -> Row:
        """The row of that name: `fuse_attention`, `without fuse_attention`; `pipeline` is the last.

        A row of `cumulative` is named after the pass that was added.
        """
        if name == "pipeline" and (whole := self.result()) is not None:
            return whole
        for row in self.rows:
            if row.name == name:
                return row
        known = ", ".join(row.name for row in self.rows if row.kind != "runtime")
        raise GraphgenError(f"compare: there is no row {name!r}; there are {known}")

    def result(self) -> Row | None:
        """The row that gates judge: of the file compared against, else of the whole pipeline."""
        rows = [r for r in self.rows if r.kind == "cumulative"]
        return rows[-1] if rows else next((r for r in self.rows if r.kind == "other"), None)

    def sites(self, what: str | None = None, *, status: Status | None = None) -> list[Site]:
        """The candidates of the whole pipeline: of a pass or an operator, such as `attention`."""
        one_of("sites", Status | None, status=status)
        passes = self.report.passes if self.report else []
        known = {word for done in passes for word in _words(done.name)}
        if what is not None and what not in known:
            choices = ", ".join(sorted(known))
            raise GraphgenError(
                f"sites: {what!r} is not a pass or an operator; choose from {choices}"
            )
        return [
            site
            for done in passes
            if what is None or what in _words(done.name)
            for site in done.sites
            if status is None or site.status == status
        ]

    def conclusion(self) -> str:
        """What `result` gains in time, nodes, error and operators, in a line, as far as is known.

        `bert.onnx: 1.31 times as fast as given; 96 -> 73 nodes; error 2e-7; 3 attentions of 3`.
        """
        row, baseline = self.result(), self.rows[0] if self.rows else None
        if row is None or baseline is None or row.problem:
            return f"{self.model}: {row.problem if row else 'nothing was measured'}"
        name, given = (row.name, self.model) if row.kind == "other" else (self.model, "given")
        speeds = [
            f"{phase} {_speed(figures.ratio.median, figures.verdict)} {given}".lstrip()
            + (", a tie" if figures.verdict == "tie" else "")
            for phase, figures in zip(self.dims, row.phases(), strict=False)
            if figures.ratio is not None
        ]
        errors = [figures.error.rel_rms for figures in row.phases() if figures.error is not None]
        parts = [", ".join(speeds)]
        if baseline.nodes is not None and row.nodes is not None:
            parts.append(f"{baseline.nodes:,} -> {row.nodes:,} nodes")
        parts.append(f"error {max(errors):.0e}".replace("e-0", "e-") if errors else "")
        parts += self.report.conclusion()[1:] if self.report else []
        return f"{name}: {'; '.join(filter(None, parts))}"

    def to_json(self) -> dict[str, Any]:
        """The object that docs/compare.schema.json describes; non-finite figures are null."""
        keys = "model target runtime dims threads seconds reference inputs optimizers complete"
        remarks = [
            {"pass": done["name"], **site}
            for done in (self.report.to_json()["passes"] if self.report else ())
            for site in done["sites"]
        ]
        return {
            "graphgen": VERSION,
            "machine": str(processor()),
            "conclusion": self.conclusion(),
            **{key: getattr(self, key) for key in keys.split()},
            "rows": [finite(asdict(row)) for row in self.rows],
            "remarks": remarks,
        }

    def save(self, path: str | Path) -> None:
        """Write the report as .html, .json or .md, depending on the file's ending."""
        with place(Path(path)) as write:
            write(self.to_json(), self.stages, of=self)

    def failures(
        self, slower: float | None, differs: float | None, expect: Mapping[str, int]
    ) -> list[str]:
        """A sentence for each gate that `result` does not meet; see `graphgen compare --help`."""
        row, sentences = self.result(), []
        if row is None or row.problem or (self.complete and row.latency_ms is None):
            return [f"{row.name}: {row.problem}" if row else "no row was measured"]
        for phase, figures in zip(self.dims, row.phases(), strict=False):
            what = f"{row.name}{phase and ' at '}{phase}"
            ratio, error = figures.ratio, figures.error
            if slower is not None and ratio and ratio.low > 1 and ratio.median > 1 + slower:
                took = f"{ratio.median:.3f} ({ratio.low:.3f}-{ratio.high:.3f})"
                sentences.append(
                    f"{what} takes {took} of the baseline, at most {1 + slower:.3f} wanted"
                )
            if differs is not None and error and not error.rel_rms <= differs:
                sentences.append(
                    f"{what} differs by {error.rel_rms:.1e}, at most {differs:.0e} wanted"
                )
        return sentences + (self.report.unmet(expect) if self.report else [])

    @on_screen
    def __repr__(self) -> Iterator[str]:
        head = "Comparison" if self.complete else "Comparison, INTERRUPTED,"
        at = at_sizes(self.dims)
        yield f"{head} of {self.model} on {self.target} (onnxruntime {self.runtime}){at}"
        yield from brief(self.to_json())

    @in_notebook
    def _repr_html_(self) -> str:
        return as_page(self, self.to_json(), self.stages)

    def __str__(self) -> str:
        remarks = self.report.remarks() if self.report else []
        return "\n".join([text(self.to_json()), *remarks, self.conclusion()])


def _speed(ratio: float, verdict: str | None) -> str:
    """Milliseconds to the baseline's, in words."""
    if verdict == "slower":
        return f"takes {ratio:.2f} times as long as"
    return f"{1 / ratio:.2f} times as fast as"


def _words(name: str) -> set[str]:
    """The names of a pass, and of the operators that it makes."""
    made = [op for op, *_ in FORMULAS.get(name, ())] + [*RECOGNIZED.get(name, ())]
    return {name, name.removeprefix("fuse_"), *(word_of(op.name) for op in made)}
