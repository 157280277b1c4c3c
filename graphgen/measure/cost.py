"""What operators cost: FLOPs follow from their declarations, bytes from their operands.

A matrix product costs 2 K for each element of its result, with K the inner size; a reduction costs
one for each input element, any other primitive one for each output element, and moving data
nothing; a composite costs what its body does. A product with quantized weights costs what the
product does: kernels unpack and scale weights as they read them, and read them packed.

A node reads each of its operands once, weights included, and writes its results, whatever a cache
or a fused kernel keeps: what lies between two nodes is written and read. A lookup or a Slice reads
what it takes, not the table; Shape and Size read nothing. A view (Reshape, Squeeze, Unsqueeze,
Flatten, Identity) moves nothing, but as an output of the graph it is a copy. A node with subgraphs
moves what crosses its edge.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import onnx_ir as ir

from graphgen.edit import infer_model
from graphgen.errors import GraphgenError
from graphgen.graph import operator_name
from graphgen.op import find_op, read_attributes
from graphgen.places import where_is
from graphgen.record import recording
from graphgen.subgraphs import reads
from graphgen.traits import Trait, has, lookup_of


class Flops(NamedTuple):
    """Floating-point operations of matrix products, and of everything else."""

    products: int = 0
    others: int = 0

    @property
    def total(self) -> int:
        """Both together."""
        return self.products + self.others

    def plus(self, other: "Flops") -> "Flops":
        """The sum, one by one."""
        return Flops(self.products + other.products, self.others + other.others)


class UnknownSizeError(Exception):
    """A value whose size is unknown before the run."""


def flops(node: ir.Node, context: Any) -> Flops:
    """The cost of one node. Raises GraphgenError for an operator whose cost is unknown."""
    op = find_op(node)
    if op is None:
        raise GraphgenError(f"{operator_name(node)} at {where_is(node)}: no cost is known of it")
    if op.composite:
        with recording(context=context) as tape:
            result = op.expand(node.inputs, read_attributes(op, node))
            results = result if isinstance(result, tuple) else (result,)
            tape.trim([tape.operand(value) for value in results])
            total = Flops()
            for part in tape.nodes:
                total = total.plus(flops(part, context))
            return Flops(total.products) if has(node, Trait.QUANTIZED) and total.products else total
    if op.counted is not None:
        sizes = [x if x is None else sizes_of(x) for x in node.inputs]
        found = int(op.counted(sizes_of(node.outputs[0]), *sizes, **read_attributes(op, node)))
        return Flops(products=found) if has(node, Trait.PRODUCT) else Flops(others=found)
    if has(node, Trait.MOVES | Trait.SHAPE | Trait.GENERATES):
        return Flops()
    return Flops(others=elements((node.inputs if has(node, Trait.REDUCES) else node.outputs)[0]))


def sizes_of(value: ir.Value) -> tuple[int, ...]:
    """Its shape; raises UnknownSizeError where that is not known before the run."""
    if value.shape is None or not value.shape.is_static():
        raise UnknownSizeError
    return tuple(value.shape.numpy())


def elements(value: ir.Value | None) -> int:
    """How many elements a value has. Raises UnknownSizeError if that is unknown before the run."""
    if value is None:
        raise UnknownSizeError
    return math.prod(sizes_of(value))


class Traffic(NamedTuple):
    """The bytes that all nodes read and write, and the most that results take together."""

    read: int
    written: int
    peak: int


def traffic(model: ir.Model) -> Traffic | None:
    """The bytes a model moves when each node runs once; None if a size or dtype is unknown.

    Sizes are those of the values' shapes: fix symbols and infer the model first.
    """
    read = written = 0
    try:
        for node, operands in reads(model.graph).items():
            moved = moves(node, operands)
            read, written = read + moved[0], written + moved[1]
        return Traffic(read, written, peak_alive(model.graph))
    except UnknownSizeError:
        return None


def of_model(model: ir.Model) -> tuple[int | None, Traffic | None]:
    """The FLOPs of all nodes, and the bytes they move; None if not all of that is known.

    Raises GraphgenError if the sizes of the model, which has no symbols, do not fit together.
    """
    context, total = infer_model(model), None
    with suppress(GraphgenError, UnknownSizeError):
        total = sum(flops(node, context).total for node in list(model.graph))
    return total, traffic(model)


def moves(node: ir.Node, operands: Collection[ir.Value]) -> tuple[int, int]:
    """The bytes that one node reads of the values in `operands`, and those it writes."""
    if is_view(node) or has(node, Trait.CONSTANT):
        return 0, 0
    written = sum(map(nbytes, used_outputs(node)))
    if has(node, Trait.VIEW | Trait.SHAPE):
        return written * has(node, Trait.VIEW), written
    sizes = {value: nbytes(value) for value in operands}
    if has(node, Trait.READS_PART) and (x := node.inputs[0]) is not None:
        sizes[x] = min(sizes[x], written)
    elif (lookup := lookup_of(node)) is not None:
        axis = node.attributes.get_int("axis", node.attributes.get_int("gather_axis", 0))
        for table in (node.inputs[i] for i in lookup.tables if i < len(node.inputs)):
            if table is not None:
                count = sizes_of(table)[axis]
                taken = min(count, elements(node.inputs[lookup.rows]))
                sizes[table] = nbytes(table) * taken // count
    return sum(sizes.values()), written


def is_view(node: ir.Node) -> bool:
    """Whether the result of a node shares its operand's memory; an output has its own memory."""
    return has(node, Trait.VIEW) and not node.outputs[0].is_graph_output()


def used_outputs(node: ir.Node) -> list[ir.Value]:
    """The results that something reads; no others are made."""
    return [value for value in node.outputs if value.uses() or value.is_graph_output()]


def nbytes(value: ir.Value) -> int:
    """The bytes a value takes in memory. Raises UnknownSizeError if they are unknown."""
    if value.dtype is None or value.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        raise UnknownSizeError
    return math.ceil(elements(value) * value.dtype.itemsize)


def roots_of(
    graph: ir.Graph, shares: Callable[[ir.Node], bool] = is_view
) -> dict[ir.Value, ir.Value]:
    """For each result without its own memory, the value whose memory it shares."""
    found: dict[ir.Value, ir.Value] = {}
    for node in graph:
        if shares(node) and (x := node.inputs[0]) is not None:
            found[node.outputs[0]] = found.get(x, x)
    return found


def peak_alive(
    graph: ir.Graph,
    size: Callable[[ir.Value], int] = nbytes,
    *,
    roots: Mapping[ir.Value, ir.Value] | None = None,
    in_place: bool = False,
    elsewhere: Collection[ir.Value] = (),
) -> int:
    """The largest sum of results that are made and still needed, when nodes run in graph order.

    That is what a session with enable_mem_reuse and enable_mem_pattern off asks its arena for. By
    default a session keeps dead results for a later one of the same shape, 1.4 to 2.2 times as
    much in an encoder; kernels' scratch memory and the arena's rounding come on top.

    Args:
        graph: Its inputs and weights are not counted; its outputs stay to the end.
        size: The bytes of a value.
        roots: Whose memory a result is in; by default, views are in their operands'.
        in_place: Whether operators overwrite their first operand if they do so on the CPU.
        elsewhere: Values in the caller's memory.
    """
    shared = roots_of(graph) if roots is None else roots
    nodes, read = list(graph), reads(graph)
    last = {shared.get(v, v): i for i, n in enumerate(nodes) for v in read[n]}
    last.update((shared.get(v, v), len(nodes)) for v in graph.outputs)
    ends: dict[int, list[ir.Value]] = defaultdict(list)
    for value, i in last.items():
        ends[i].append(value)
    alive: dict[ir.Value, int] = {}
    total = peak = 0
    for i, node in enumerate(nodes):
        if in_place and has(node, Trait.WRITES_OVER) and (x := node.inputs[0]) is not None:
            over = shared.get(x, x)
            total -= alive.pop(over, 0) if last[over] == i else 0
        for value in used_outputs(node):
            if value not in shared and value not in elsewhere:
                alive[value] = size(value)
                total += alive[value]
        peak = max(peak, total)
        total -= sum(alive.pop(value, 0) for value in ends[i])
    return peak
