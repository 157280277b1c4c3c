"""What `graphgen inspect` shows about a model: operators, sizes, FLOPs, blocks, critical path.

Published figures often count only the matrix products: those are `product_flops`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import networkx as nx
import onnx_ir as ir

from graphgen.display import (
    WIDTH,
    cut,
    in_notebook,
    on_screen,
    plain,
    preformatted,
    rich_table,
    table,
)
from graphgen.edit import infer_model
from graphgen.errors import GraphgenError
from graphgen.graph import count_nodes, count_operators, operator_name, parameters, present_inputs
from graphgen.infer import describe
from graphgen.measure.cost import Flops, UnknownSizeError, elements, flops, traffic
from graphgen.measure.feeds import at_sizes, symbols
from graphgen.places import block_of, shared, where_is
from graphgen.version import VERSION

if TYPE_CHECKING:
    from rich.table import Table

STEPS = 10  # nodes of the critical path that a table shows


@dataclass
class Block:
    """All nodes and parameters below one module path."""

    path: str
    nodes: int = 0
    parameters: int = 0
    flops: int | None = 0


@dataclass
class Step:
    """One node of the critical path."""

    name: str
    operator: str
    where: str
    flops: int


@dataclass
class CriticalPath:
    """The chain of dependent nodes with the most FLOPs: no schedule does less in sequence."""

    flops: int
    nodes: list[Step]

    def heaviest(self, count: int) -> list[Step]:
        """Those with the most FLOPs, in the order of the path; of equal ones, the first."""
        ranked = sorted(self.nodes, key=lambda step: -step.flops)[:count]
        chosen = {id(step) for step in ranked if step.flops}
        return [step for step in self.nodes if id(step) in chosen]

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield f"CriticalPath({self.flops:,} FLOPs in {len(self.nodes):,} nodes)"


@dataclass
class Inspection:
    """What is known about a model before it runs; `None` if sizes are missing.

    `missing_dims` lists the symbols whose sizes FLOPs and bytes of results need; `uncounted` lists
    the nodes whose cost is unknown. `depth` is the length of the longest chain of nodes.
    """

    inputs: dict[str, str]
    outputs: dict[str, str]
    operators: dict[str, int]
    nodes: int
    parameters: int
    weight_bytes: int
    read_bytes: int | None
    written_bytes: int | None
    peak_bytes: int | None
    flops: int | None
    product_flops: int | None
    missing_dims: list[str]
    uncounted: list[str]
    blocks: list[Block]
    depth: int
    critical_path: CriticalPath | None

    def to_json(self) -> dict[str, Any]:
        """The object that docs/inspect.schema.json describes."""
        return {"graphgen": VERSION, **asdict(self)}

    def lines(self, *, command: bool = False) -> list[str]:
        """The lines above the tables, for people at a prompt or, with `command`, of the command."""
        sizes = f"sizes={{{', '.join(f'{name!r}: ...' for name in self.missing_dims)}}}"
        dims = " ".join(f"--dim {name}=..." for name in self.missing_dims)
        flops = f"unknown; give {dims if command else sizes}"
        if self.flops is not None:
            flops = f"{self.flops:,}, of which {self.product_flops:,} in matrix products"
        rows = [
            *(("input", f"{name}: {text}") for name, text in self.inputs.items()),
            *(("output", f"{name}: {text}") for name, text in self.outputs.items()),
            ("parameters", f"{self.parameters:,}"),
            ("FLOPs", flops),
            ("weights", f"{self.weight_bytes:,} bytes"),
        ]
        if self.peak_bytes is not None:
            rows += [
                ("moved", f"{self.read_bytes:,} bytes read, {self.written_bytes:,} written"),
                ("memory", f"{self.peak_bytes:,} bytes of results at most"),
            ]
        rows.append(("depth", f"{self.depth} of {self.nodes} nodes"))
        rows += [("not counted", reason) for reason in self.uncounted]
        return [cut(plain(f"{name:<15}{text}"), 4 * WIDTH) for name, text in rows]

    def tables(self, depth: int, steps: int = STEPS) -> Iterator["Table"]:
        """Operators, blocks down to that depth, and the heaviest nodes of the critical path."""
        for title, cells in self._tables(depth, steps):
            yield rich_table(title, cells)

    def _tables(self, depth: int, steps: int) -> Iterator[tuple[str, list[list[str]]]]:
        """The title and cells of each table."""
        operators = sorted(self.operators.items(), key=lambda item: -item[1])
        yield "", _written(("operator", "nodes"), *operators)
        shown = [b for b in self.blocks if b.path.count(".") < depth]
        blocks = [
            (b.path, b.nodes, b.parameters, "" if b.flops is None else b.flops) for b in shown
        ]
        yield "", _written(("block", "nodes", "parameters", "FLOPs"), *blocks)
        if path := self.critical_path:
            heaviest = path.heaviest(steps)
            rows = [(step.where, step.operator, step.flops) for step in heaviest]
            if rest := sum(step.flops > 0 for step in path.nodes) - len(rows):
                flops = path.flops - sum(step.flops for step in heaviest)
                rows.append((f"{rest:,} others", "", flops))
            title = f"critical path: {path.flops:,} FLOPs"
            yield title, _written(("where", "operator", "FLOPs"), *rows)

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield f"Inspection of {self.nodes:,} nodes"
        yield from self.lines()

    @in_notebook
    def _repr_html_(self) -> str:
        tables = (table(title, cells) for title, cells in self._tables(3, STEPS))
        return "".join([preformatted(repr(self)), *tables])


def inspect(model: ir.Model, sizes: Mapping[str, int] | None = None) -> Inspection:
    """Count and measure a model at those sizes of its symbolic dimensions, without running it."""
    model = at_sizes(model, sizes or {})
    graph, missing = model.graph, symbols(model)
    context = infer_model(model)
    costs: dict[ir.Node, Flops] = {}
    uncounted = []
    for node in list(graph):
        try:
            costs[node] = flops(node, context)
        except UnknownSizeError:
            if not missing:
                uncounted.append(f"{operator_name(node)} at {where_is(node)}: sizes unknown")
        except GraphgenError as error:
            uncounted.append(str(error))
    counted = sum(c.total for c in costs.values())
    weights = [value.const_value for value in graph.initializers.values()]
    order = dependencies(graph, {node: cost.total for node, cost in costs.items()})
    moved = traffic(model)
    return Inspection(
        inputs={str(v.name): describe(v) for v in graph.inputs},
        outputs={str(v.name): describe(v) for v in graph.outputs},
        operators=count_operators(model),
        nodes=count_nodes(model),
        parameters=sum(elements(value) for value in parameters(graph).values()),
        weight_bytes=sum(tensor.nbytes for tensor in weights if tensor is not None),
        read_bytes=None if moved is None else moved.read,
        written_bytes=None if moved is None else moved.written,
        peak_bytes=None if moved is None else moved.peak,
        flops=None if missing else counted,
        product_flops=None if missing else sum(c.products for c in costs.values()),
        missing_dims=missing,
        uncounted=uncounted,
        blocks=_blocks(graph, None if missing else costs),
        depth=nx.dag_longest_path_length(order, weight=None),
        critical_path=None if missing else _critical_path(order),
    )


def _written(*rows: Sequence[str | int]) -> list[list[str]]:
    return [[cut(x) if isinstance(x, str) else f"{x:,}" for x in row] for row in rows]


def _blocks(graph: ir.Graph, costs: Mapping[ir.Node, Flops] | None) -> list[Block]:
    """A block for every module path and every one above it, in the order of the graph."""
    blocks: dict[str, Block] = {}
    for node in graph:
        for path in _above(block_of(node)):
            block = blocks.setdefault(path, Block(path))
            block.nodes += 1
            cost = None if costs is None else costs.get(node, Flops()).total
            block.flops = None if block.flops is None or cost is None else block.flops + cost
    for name, value in parameters(graph).items():
        owners = [path for path in _above(name.rpartition(".")[0]) if path in blocks]
        if not owners:  # a weight that was transposed when it was folded has a name of its own
            readers = (block_of(node).split(".") for node in value.consumers())
            owners = [path for path in _above(".".join(shared(readers))) if path in blocks]
        for path in owners:
            blocks[path].parameters += elements(value)
    return sorted(blocks.values(), key=lambda block: _natural(block.path))


def _above(path: str) -> list[str]:
    """`a`, `a.b` and `a.b.c` of `a.b.c`."""
    parts = path.split(".") if path else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _natural(path: str) -> list[tuple[bool, int, str]]:
    """A key that puts layer 2 before layer 10."""
    return [(p.isdigit(), int(p) if p.isdigit() else 0, p) for p in path.split(".")]


def dependencies(graph: ir.Graph, costs: Mapping[ir.Node, int]) -> Any:
    """Edges from "start" to all nodes, and from each node to those that use its results.

    An edge weighs as much as the node at its end costs.
    """
    order = nx.DiGraph()
    for node in graph:
        made_by = filter(None, (value.producer() for value in present_inputs(node)))
        edges = [(before, node) for before in ("start", *made_by)]
        order.add_edges_from(edges, weight=costs.get(node, 0))
    return order


def _critical_path(order: Any) -> CriticalPath | None:
    """The heaviest chain."""
    if not order:
        return None
    steps = [
        Step(str(node.name), operator_name(node), where_is(node), order["start"][node]["weight"])
        for node in nx.dag_longest_path(order)[1:]
    ]
    return CriticalPath(sum(step.flops for step in steps), steps)
