"""Two saved reports, row by row: what `compare --json` and `optimize --report` wrote."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, NamedTuple, TypeAlias

from graphgen.display import aligned, plain
from graphgen.errors import GraphgenError
from graphgen.measure.accuracy import finite
from graphgen.measure.latency import TIE
from graphgen.version import VERSION

_SETTINGS = ("graphgen", "model", "target", "machine", "runtime", "dims", "threads", "complete")


class Figures(NamedTuple):
    """What a report says of a row: ms are a median and its interval."""

    ms: tuple[float, float, float] | None = None
    error: float | None = None
    nodes: int | None = None


Pair: TypeAlias = tuple[Figures, Figures]


@dataclass(frozen=True)
class Reports:
    """The rows of two reports, in the order of the first; `settings` are those that differ.

    The ratio is ms of B to ms of A. B is faster or slower where the intervals do not overlap and
    the medians are more than 3 % apart, else it is a tie. `result` is what each pipeline ends with.
    """

    a: str
    b: str
    settings: dict[str, tuple[Any, Any]]
    rows: dict[str, Pair]
    result: Pair

    def to_json(self) -> dict[str, Any]:
        """The object that docs/diff-reports.schema.json describes; non-finite figures are null."""
        rows = [{"name": name, **_row(*pair)} for name, pair in self.rows.items()]
        found = {"a": self.a, "b": self.b, "settings": self.settings, "rows": rows}
        return {"graphgen": VERSION, **finite(found), "conclusion": self.conclusion()}

    def conclusion(self) -> str:
        """The results of both, and how many rows are faster or slower, in a line."""
        cells = _cells(_row(*self.result))
        text = ", ".join(f"{name} {cell}" for name, cell in cells.items() if cell)
        counts = Counter(_row(*x)["verdict"] or "in one" for x in self.rows.values()).most_common()
        rows = ", ".join(f"{n:,} {word}" for word, n in counts)
        return plain(f"{self.b} against {self.a}: {text}; {len(self.rows):,} rows: {rows}")

    def __str__(self) -> str:
        settings = [plain(f"{name}: {x} -> {y}") for name, (x, y) in self.settings.items()]
        cells = [[name, *_cells(_row(*pair)).values()] for name, pair in self.rows.items()]
        table = aligned([["", *_cells(_row(*self.result))], *cells])
        return "\n".join([*settings, *table, self.conclusion()])


def diff_reports(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str]) -> Reports:
    """Match the rows of two reports by name. Raises GraphgenError for what is not a report."""
    (mine, first), (theirs, second) = (_read(x, n) for x, n in zip((a, b), names, strict=True))
    settings = {key: (a.get(key), b.get(key)) for key in _SETTINGS if a.get(key) != b.get(key)}
    rows = {n: (mine.get(n, Figures()), theirs.get(n, Figures())) for n in {**mine, **theirs}}
    return Reports(*names, settings, rows, (first, second))


def _read(report: Mapping[str, Any], name: str) -> tuple[dict[str, Figures], Figures]:
    """The figures of each row, with a decode step in a row of its own, and those of the result.

    That is the last row of the pipeline, or else the file that `compare --against` named: what
    other optimizers make comes behind both.
    """
    rows, times, ends = dict[str, Figures](), Counter[str](), dict[bool, Figures]()
    try:
        for row in report["rows"] if "rows" in report else report["passes"]:
            own = str(row["name"])
            times[own] += 1
            own += f" {times[own]}" if times[own] > 1 else ""  # as `compare` calls them
            rows[own] = _figures(row)
            if row.get("decode"):
                rows[f"{own}, decode"] = _figures(row["decode"])
            if row.get("kind") in (None, "cumulative"):
                ends[True] = rows[own]
            elif row["kind"] == "other":
                ends.setdefault(False, rows[own])
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        wanted = "what `compare --json` or `optimize --report` wrote"
        raise GraphgenError(f"diff: {name} is not {wanted}: {error!r}") from error
    return rows, ends.get(True, ends.get(False, Figures()))


def _figures(row: Mapping[str, Any]) -> Figures:
    ms, error = row.get("latency_ms"), row.get("error")
    rms = float(inf if error["rel_rms"] is None else error["rel_rms"]) if error else None
    nodes = row.get("nodes", row.get("nodes_after"))
    median = (float(ms["median"]), float(ms["low"]), float(ms["high"])) if ms else None
    if median and not all(map(isfinite, median)):
        raise ValueError("a time is not finite")
    return Figures(median, rms, None if nodes is None else int(nodes))


def _row(a: Figures, b: Figures) -> dict[str, Any]:
    """The figures of both, and a verdict if they can be compared: by time, or else by nodes."""
    ratio = verdict = None
    if a.ms and b.ms and a.ms[0] > 0:
        ratio = b.ms[0] / a.ms[0]
        apart = abs(ratio - 1) > TIE and (b.ms[2] < a.ms[1] or b.ms[1] > a.ms[2])
        verdict = "tie" if not apart else "faster" if ratio < 1 else "slower"
    elif a.nodes is not None and b.nodes is not None:
        verdict = "changed" if a.nodes != b.nodes else "same nodes"
    medians = [x.ms[0] if x.ms else None for x in (a, b)]
    pairs = {"error": [a.error, b.error], "nodes": [a.nodes, b.nodes]}
    return {"ms": medians, "ratio": ratio, **pairs, "verdict": verdict}


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    """`0.912 -> 0.8` for each figure; one that both have alike stands once."""

    def both(key: str, form: str) -> str:
        x, y = ("-" if v is None else format(v, form) for v in row[key])
        return x.strip("-") if x == y else f"{x} -> {y}"

    ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
    cells = {"verdict": row["verdict"] or "", "ms": both("ms", ".3g"), "ratio": ratio}
    return {**cells, "error": both("error", ".1e"), "nodes": both("nodes", ",")}
