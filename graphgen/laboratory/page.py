"""One HTML file that shows what was done to a graph: rows of figures, and the graph, pass by pass.

The file needs nothing else: script, style and data are in it. A block is laid out when it is
opened, by dagre, the layered layout that comes with the package `netron`.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.export.write import replacing
from graphgen.graph import operator_name
from graphgen.infer import describe
from graphgen.laboratory.align import ids_of
from graphgen.measure.accuracy import finite
from graphgen.places import block_of, shared, source_of, where_is
from graphgen.subgraphs import subgraphs_of

_PIECE = 120
"""The most nodes directly in one block; a block with more is shown in pieces."""

Block = tuple[str, ...]


@dataclass(frozen=True)
class _Node:
    """What the page shows about a node; an input is (a node's number, which output), or a text."""

    name: str
    operator: str
    block: Block
    inputs: tuple[tuple[int, int] | str, ...] = ()
    attributes: str = ""
    outputs: tuple[tuple[str, str], ...] = ()  # names, types
    origin: str = ""


@dataclass
class _Stage:
    """A graph, by the nodes' numbers: a node has the same number in all stages."""

    name: str
    nodes: dict[int, _Node]
    where: dict[int, str]
    ids: dict[str, int]
    remarks: list[list[Any]] = field(default_factory=list)


@dataclass
class Overlay:
    """A figure to color nodes by: for each graph, values by the names of nodes.

    A closed block shows the sum of its nodes' values, or the largest.
    """

    unit: str
    values: Sequence[Mapping[str, float]] = field(repr=False)
    combine: Literal["sum", "max"] = "sum"
    note: str = ""  # how it was measured


def write(
    path: str | Path,
    report: Mapping[str, Any],
    graphs: Sequence[tuple[str, ir.Model]] = (),
    overlays: Mapping[str, Overlay] | None = None,
    *,
    same: Mapping[ir.Node, ir.Node] | None = None,
) -> Path:
    """Write what `render` gives; an existing file is replaced once the new one is complete."""
    path, text = Path(path), render(report, graphs, overlays, same=same)
    with replacing("page", path) as [file]:
        file.write_text(text, "utf-8")
    return path


def render(
    report: Mapping[str, Any],
    graphs: Sequence[tuple[str, ir.Model]] = (),
    overlays: Mapping[str, Overlay] | None = None,
    *,
    same: Mapping[ir.Node, ir.Node] | None = None,
) -> str:
    """The page as HTML.

    Args:
        report: What docs/compare.schema.json describes; any part of it may be missing. Its remarks
            are shown next to their nodes.
        graphs: The model as given, and after each pass, with names; or the two of a comparison.
        overlays: Figures of nodes, by the figure's name, such as "time".
        same: When two graphs are compared, the node of the second for each node of the first.
            Without it, nodes with the same name and operator are the same, as after the passes.

    Raises GraphgenError if the layout is not installed.
    """
    stages = list(_stages(graphs, same))
    if same is None:
        _tell(stages, report.get("remarks") or ())
    data = _data(report, stages, overlays or {}, "passes" if same is None else "diff")
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    folder = Path(__file__).with_name("page")
    parts = {"dagre.js": layout(), "data.json": text}
    template = (folder / "page.html").read_text("utf-8")
    return re.sub(
        r"\[\[(\S+)\]\]",
        lambda found: parts.get(found[1]) or (folder / found[1]).read_text("utf-8"),
        template,
    )


def _stages(
    graphs: Sequence[tuple[str, ir.Model]], same: Mapping[ir.Node, ir.Node] | None
) -> Iterator[_Stage]:
    """What the page shows of each graph."""
    numbers: dict[Hashable, int] = {}
    blocks: dict[int, Block] = {}
    twins = {theirs: mine for mine, theirs in (same or {}).items()}
    seen: dict[ir.Node, int] = {}
    for i, (name, model) in enumerate(graphs):
        nodes, times = list(model.graph.all_nodes()), Counter[Hashable]()
        for node in nodes:
            key = (node.name, node.op_type)
            times[key] += 1
            apart = i if same is not None else 0
            seen[node] = (
                seen[twins[node]]
                if node in twins
                else numbers.setdefault((apart, key, times[key]), len(numbers))
            )
        _place(nodes, seen, blocks)
        made: dict[ir.Value | None, tuple[int, int]] = {}
        shown = {}
        for value in model.graph.inputs:
            number = numbers.setdefault(f"input {value.name}", len(numbers))
            made[value] = number, 0
            shown[number] = _end("input", value)
        for node in nodes:
            made |= {v: (seen[node], k) for k, v in enumerate(node.outputs)}
        for node in nodes:
            read = [*node.inputs, *(v for g in subgraphs_of(node) for v in g.outputs)]
            shown[seen[node]] = _Node(
                node.name or "",
                operator_name(node),
                blocks[seen[node]],
                tuple(made.get(v) or _text(v) for v in read),
                ", ".join(f"{a.name}={_attribute(a)}" for a in node.attributes.values()),
                tuple((str(v.name), describe(v)) for v in node.outputs),
                source_of(node),
            )
        for value in model.graph.outputs:
            number = numbers.setdefault(f"output {value.name}", len(numbers))
            shown[number] = _end("output", value, made.get(value) or _text(value))
        where = {seen[node]: where_is(node) for node in nodes}
        yield _Stage(name, shown, where, {key: seen[n] for n, key in ids_of(model).items()})


def _end(kind: str, value: ir.Value, *read: tuple[int, int] | str) -> _Node:
    """An input or output of the graph."""
    outputs = ((str(value.name), describe(value)),)
    return _Node(str(value.name), kind, (), read, outputs=outputs)


def _place(
    nodes: Sequence[ir.Node], numbers: Mapping[ir.Node, int], blocks: dict[int, Block]
) -> None:
    """Find the block of each new node; one without a block goes where all its users are."""
    direct: dict[Block, list[int]] = {}
    for node in reversed(nodes):
        if (number := numbers[node]) in blocks:
            continue
        users = [use.node for v in node.outputs for use in v.uses()]
        known = [blocks.get(numbers.get(user, -1), ()) for user in users]
        blocks[number] = _block(node) or tuple(shared(known))
        direct.setdefault(blocks[number], []).append(number)
    for block, found in direct.items():
        for i in range(0, len(found), _PIECE) if len(found) > _PIECE else ():
            end = len(found) - i
            piece = f"nodes {max(end - _PIECE, 0) + 1} to {end}"
            blocks |= dict.fromkeys(found[i : i + _PIECE], (*block, piece))


def _tell(stages: Sequence[_Stage], remarks: Sequence[Any]) -> None:
    """Give each stage the remarks of its pass: they come in the order of the passes."""
    rest = [remark for remark in remarks if isinstance(remark, Mapping)]
    for before, after in pairwise(stages):
        changed = before.nodes.keys() ^ after.nodes.keys()
        names = {x.name: n for n, x in before.nodes.items()}
        makers = {name: n for n, x in after.nodes.items() for name, _ in x.outputs}
        places: dict[str, set[int]] = {}
        for number, place in [*before.where.items(), *after.where.items()]:
            places.setdefault(place, set()).add(number)
        own = re.sub(r" \d+$", "", after.name)  # the second time that a pass runs, "clean 2"
        while rest and rest[0].get("pass") == own:
            remark = rest.pop(0)
            found = places.get(str(remark.get("where")), set())
            if (
                len(found) > 1 and remark.get("status") == "fired"
            ):  # in a block, only what it changed
                found = found & changed
            if remark.get("node") in names:
                found = {names[remark["node"]]} | (found & changed)
            ends = [
                name for n in found & before.nodes.keys() for name, _ in before.nodes[n].outputs
            ]
            found = found | {makers[name] for name in ends if name in makers}
            parts = [remark.get(key) for key in ("status", "where", "reason", "number")]
            after.remarks.append([*parts, sorted(found)])


def layout() -> str:
    """The source of the layout, without what makes it a separate module.

    Raises GraphgenError if it is not installed: call this before long work.
    """
    found = find_spec("netron")
    source = Path(str(found.origin)).with_name("dagre.js") if found else None
    text = source.read_text("utf-8") if source is not None and source.is_file() else ""
    if "dagre.layout = (nodes, edges, layout, state) =>" not in text:
        raise GraphgenError(
            'page: the layout of graphs is missing; run pip install "graphgen-onnx[html]"'
        )
    return re.sub(r"^(export |\s*//).*\n?", "", text, flags=re.MULTILINE).replace(
        "</script", "<\\/script"
    )


def _data(
    report: Mapping[str, Any],
    stages: Sequence[_Stage],
    overlays: Mapping[str, Overlay],
    view: str,
) -> dict[str, Any]:
    """What the script reads; equal texts, and nodes that do not change, are in it once."""
    texts: dict[str, int] = {}
    rows: dict[tuple[int, _Node], int] = {}
    written: list[list[Any]] = []
    listed, last = [], set[int]()
    for stage in stages:
        present = set()
        for item in stage.nodes.items():
            if item not in rows:
                rows[item] = len(rows)
                written.append(_row(*item, texts))
            present.add(rows[item])
        listed.append(
            {
                "name": stage.name,
                "add": sorted(present - last),
                "drop": sorted(last - present),
                "remarks": finite(stage.remarks),
            }
        )
        last = present
    return {
        "view": view,
        "changed": [
            [
                [stage.ids[x] for x in change.get(side) or () if x in stage.ids]
                for side, stage in zip("ab", stages, strict=False)
            ]
            for change in (report.get("changes") or () if view == "diff" else ())
        ],
        "report": finite({k: v for k, v in report.items() if k != "pairs"}),
        "texts": list(texts),
        "nodes": written,
        "stages": listed,
        "overlays": [
            {
                "name": name,
                "unit": overlay.unit,
                "combine": overlay.combine,
                "note": overlay.note,
                "values": [
                    {n: _far(values[x.name]) for n, x in stage.nodes.items() if x.name in values}
                    for stage, values in zip(stages, overlay.values, strict=False)
                ],
            }
            for name, overlay in overlays.items()
        ],
    }


def _row(number: int, shown: _Node, texts: dict[str, int]) -> list[Any]:
    def text(content: str) -> int:
        return texts.setdefault(content, len(texts))

    return [
        number,
        shown.name,
        text(shown.operator),
        text("/".join(shown.block)),
        [given if isinstance(given, str) else list(given) for given in shown.inputs],
        text(shown.attributes),
        [[name, text(type_)] for name, type_ in shown.outputs],
        text(shown.origin),
    ]


def _far(figure: float) -> float | str:
    """An error that is infinite or not a number counts as the largest."""
    return float(figure) if math.isfinite(figure) else "Infinity"


def _block(node: ir.Node) -> Block:
    """The modules that a node is in, or those in the names that exporters give its results."""
    path = block_of(node)
    if not path:
        path = next(
            (str(v.name).rpartition("/")[0] for v in node.outputs if "/" in str(v.name)), ""
        )
    return tuple(re.findall(r"[^./]+(?:[./]\d+(?=[./]|$))*", path))


def _text(value: ir.Value | None) -> str:
    """A weight, a constant or an input of a subgraph; small ones with their content."""
    if value is None:
        return ""
    text, tensor = f"{value.name}: {describe(value)}", value.const_value
    small = tensor is not None and tensor.size <= 8
    return f"{text} = {tensor.numpy().tolist()}" if tensor is not None and small else text


def _attribute(attribute: ir.Attr) -> str:
    if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return "a graph"
    value = attribute.value
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 200 else f"{text[:200]}..."
