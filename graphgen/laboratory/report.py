"""Reports of comparisons, as docs/compare.schema.json describes them, as text and files.

It reads JSON, so a saved report can be shown again.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from graphgen.display import aligned
from graphgen.errors import GraphgenError
from graphgen.export.write import replacing
from graphgen.laboratory.overlays import overlays
from graphgen.laboratory.page import Overlay, layout, render
from graphgen.match import STATUSES

Report: TypeAlias = dict[str, Any]
Cells: TypeAlias = list[str]

LEVELS = ("off", "basic", "extended", "all")
"""The runtime's own optimizations, from none to its default."""

_WIDTH = 1000  # of tables that go into a file or a pipe, at most
_FORMS = (".html", ".json", ".md")
_SECONDS = 15.0  # for timing nodes, apart from the first and last graph


def text(report: Report) -> str:
    """The tables for a terminal; ties say tie. A table that is too wide is shown in parts.

    In a file or a pipe they are columns of text alone, and whole.
    """
    terminal = sys.stdout is not None and sys.stdout.isatty()
    plainly: dict[str, Any] = {"no_color": True, "highlight": False, "markup": False}
    console = Console(width=None if terminal else _WIDTH, **plainly)
    with console.capture() as captured:
        for title, columns, rows in _tables(report):
            console.print(title, soft_wrap=True)
            for part in _parts([columns, *rows], console.width):
                style: dict[str, Any] = {"box": SIMPLE_HEAD, "padding": (0, 1)}
                if not terminal:
                    style = {"box": None, "padding": (0, 2, 0, 0), "pad_edge": False}
                table = Table(**style)
                for i in part:
                    table.add_column(columns[i], justify="right" if i else "left", no_wrap=True)
                for row in rows:
                    table.add_row(*(row[i] for i in part))
                console.print(table)
    lines = [line.rstrip() for line in captured.get().rstrip().splitlines()]
    return "\n".join([*lines, *_problems(report)])


def _parts(rows: Sequence[Cells], width: int) -> list[list[int]]:
    """The columns of each part: the first, and as many others as fit next to it."""
    sizes = [3 + max(map(len, cells)) for cells in zip(*rows, strict=True)]
    parts = [[0]]
    for i in range(1, len(sizes)):
        if len(parts[-1]) > 1 and 2 + sum(sizes[j] for j in parts[-1]) + sizes[i] > width:
            parts.append([0])
        parts[-1].append(i)
    return parts


def brief(report: Report) -> list[str]:
    """The figures of the first table that say most, as lines for a prompt."""
    _, columns, rows = next(_tables(report))
    rest = ("missed", "refused", "in session", "compile ms", "argmax")
    shown = [i for i, name in enumerate(columns) if name not in rest and "95 %" not in name]
    return aligned([[cells[i] for i in shown] for cells in (columns, *rows)])


def markdown(report: Report) -> str:
    """The tables as GitHub shows them."""
    lines = []
    for title, columns, rows in _tables(report):
        lines += [f"**{title}**", ""]
        for cells in (columns, ["---", *["---:"] * (len(columns) - 1)], *rows):
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join([*lines, *_problems(report), str(report.get("conclusion", ""))])


@contextmanager
def place(path: Path, form: str = "", who: str = "compare") -> Iterator[Callable[..., None]]:
    """Hold the place of a report, or fail if it cannot be written; yield what writes it there.

    The writer takes the report, and for a page the names and graphs and whatever else `page.render`
    takes; or a comparison as `of`, to measure the time and error of its nodes now. An interrupt
    ends that, and the comparison is then not complete.
    """
    form = form or path.suffix
    if form not in _FORMS:
        raise GraphgenError(f"{who}: {path} must end in {', '.join(_FORMS)}; rename it")
    if form == ".html":
        layout()  # fails now if it is not installed
    with replacing(who, path) as [file]:
        file.touch()

        def write(report: Report, stages: Any, *, of: Any = None, **options: Any) -> None:
            if form == ".html":
                if of is not None and of.complete:
                    options["overlays"] = _nodes(of)
                content = render(report, stages, **options)
            elif form == ".md":
                content = markdown(report)
            else:
                content = json.dumps(report, indent=2, allow_nan=False) + "\n"
            file.write_text(content, encoding="utf-8")

        yield write


def _nodes(found: Any) -> dict[str, Overlay]:
    options = {} if found.threads is None else {"intra_op_num_threads": str(found.threads)}
    try:
        return overlays(
            found.stages,
            found.feeds,
            provider=found.target,
            options=options,
            exact=found.reference == "float64",
            seconds=_SECONDS,
        )
    except KeyboardInterrupt:
        found.complete = False
        return {}


def at_sizes(phases: Mapping[str, Mapping[str, int]]) -> str:
    """` at prefill seq=8; decode seq=1`, or nothing for no sizes."""
    sizes = "; ".join(
        " ".join([phase, *(f"{name}={size}" for name, size in dims.items())]).strip()
        for phase, dims in phases.items()
    )
    return f" at {sizes}" if sizes else ""


def _tables(report: Report) -> Iterator[tuple[str, Cells, list[Cells]]]:
    """Title, columns and cells of each table."""
    phases: dict[str, dict[str, int]] = report["dims"]
    title = f"{report['model']} on {report['target']}"
    title += f" (onnxruntime {report['runtime']}; {report['machine']}){at_sizes(phases)}"
    title += f"; errors against {report['reference']}" if report["reference"] else ""
    title += "" if report["complete"] else "; INTERRUPTED, not complete"
    rows = [row for row in report["rows"] if row["kind"] != "runtime"]
    known = [_cells(row, [*phases]) for row in rows]
    yield title, [*known[0]] if known else [""], [[*row.values()] for row in known]
    for name in dict.fromkeys(name for row in rows for name in row["elsewhere"]):
        some = [row for row in rows if name in row["elsewhere"]]
        known_there = [[row["name"], *_elsewhere(row["elsewhere"][name])] for row in some]
        yield f"on {name}", ["", "nodes there", "on the CPU", "copies", "error"], known_there
    levels: dict[str, dict[str, Any]] = {}
    for row in report["rows"]:
        if row["level"] != "all":
            levels.setdefault(row["name"].rpartition(", ")[0], {})[row["level"]] = row
    for row in rows:
        levels.get(row["name"], {})["all"] = row
    if levels:
        cells = [[n, *(_short(found.get(v)) for v in LEVELS)] for n, found in levels.items()]
        yield "by the runtime's level: ms, and to the baseline at that level", ["", *LEVELS], cells
    if disabled := [[row["name"], _short(row)] for row in report["rows"] if row["disabled"]]:
        yield "without one of the runtime's optimizers: ms, and to all", ["", "all"], disabled


def _elsewhere(one: dict[str, Any]) -> Cells:
    """Nodes on a provider and on the CPU, copies and error; nothing where it does not run."""
    error = "infinite" if one["error"] is None else f"{one['error']:.1e}"
    counts = [_number(one[key]) for key in ("nodes", "cpu", "copies")]
    return ["", "", "", ""] if one["problem"] else [*counts, error]


def _problems(report: Report) -> Cells:
    rows = [f"{row['name']}: {row['problem']}" for row in report["rows"] if row["problem"]]
    return rows + [
        f"{row['name']} on {name}: {one['problem']}"
        for row in report["rows"]
        for name, one in row["elsewhere"].items()
        if one["problem"]
    ]


_NONE = dict.fromkeys(("latency_ms", "ratio", "verdict", "error"))
"""The figures of a phase that a row has none of."""


def _cells(row: dict[str, Any], phases: Sequence[str]) -> dict[str, str]:
    """The cells by their columns: first what decides, then what explains it."""
    cells, intervals, errors = {"": row["name"]}, {}, []
    for phase, figures in zip(phases, [row, row["decode"] or _NONE], strict=False):
        x, ratio = figures["latency_ms"], figures["ratio"]
        compared = ratio if row["kind"] != "baseline" else None
        cells[f"{phase} ms".strip()] = _ms(x["median"]) if x else ""
        cells[f"{phase} ratio".strip()] = f"{compared['median']:.3f}" if compared else ""
        cells[f"{phase} verdict".strip()] = figures["verdict"] or "" if compared else ""
        intervals[f"{phase} 95 %".strip()] = f"{_ms(x['low'])}-{_ms(x['high'])}" if x else ""
        errors += [figures["error"]] if figures["error"] else []
    largest = [e["rel_rms"] for e in errors]
    error = "infinite" if None in largest else f"{max(largest, default=0.0):.1e}"
    argmax = f"{min(e['argmax_agreement'] for e in errors):.3%}" if errors else ""
    spent = row["compile_ms"]
    return {
        **cells,
        "error": error if errors else "",
        "nodes": _number(row["nodes"]),
        **{status: _number(row["sites"][status]) for status in STATUSES},
        "in session": _number(row["runtime_nodes"]),
        "compile ms": _number(spent if spent is None else round(spent)),
        **intervals,
        "argmax": argmax,
    }


def _short(row: dict[str, Any] | None) -> str:
    """Milliseconds and verdict in each phase."""
    if row is None or row["problem"]:
        return ""
    known = [(p["latency_ms"], p["verdict"]) for p in (row, row["decode"]) if p and p["latency_ms"]]
    return "; ".join(f"{_ms(x['median'])} {verdict or ''}".strip() for x, verdict in known)


def _ms(x: float) -> str:
    return f"{x:.3g}" if x < 100 else f"{x:.0f}"


def _number(x: int | None) -> str:
    return "" if x is None else f"{x:,}"
