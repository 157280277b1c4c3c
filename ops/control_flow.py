"""If, Loop and Scan: what they give their subgraphs, and what their results are.

The rules of the onnx-shape-inference package assume that a loop's state keeps its sizes, and that
what one branch knows is true of both; ours, registered instead, assume neither.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext, registry

from graphgen.errors import GraphgenError, user_line
from graphgen.infer import OPSET, Dim, axis_from_front, expect_same, infer, same_dim
from graphgen.op import is_a
from graphgen.operands import Array
from graphgen.ops.elementwise import identity
from graphgen.record import PATH, Tape, current_tape, recording
from graphgen.subgraphs import infer_graph, numbers_of, subgraphs_of
from graphgen.value import Tensor, Value, graph_value

Branch = Callable[[], Sequence[Tensor]]


def cond(
    condition: Tensor | np.bool_ | bool, then: Branch, otherwise: Branch
) -> tuple[Tensor, ...]:
    """The values of `then()` where the one bool of `condition` is True, else of `otherwise()`.

    Only one of them is computed, and their sizes may differ. Raises GraphgenError if they return
    different numbers of values.
    """
    tape = current_tape()
    if tape is None or not isinstance(condition, Value):
        return tuple(then() if condition else otherwise())
    branches = [record_branch(branch, tape) for branch in (then, otherwise)]
    first, second = (branch.outputs for branch in branches)
    if len(first) != len(second):
        raise GraphgenError(
            f"If: the branches give {len(first)} and {len(second)} values{user_line()}"
        )
    return tuple(map(Value, if_node(tape, condition.value, *branches).outputs))


def record_branch(branch: Branch, outer: Tape, inputs: Sequence[ir.Value] = ()) -> ir.Graph:
    """A branch as a graph that shares the names, weights and constants of those around it."""
    with recording(context=outer.context) as tape:
        tape.share(outer)
        # An outer value, or one that is already an output, becomes an output through a new node.
        results: list[ir.Value] = []
        for x in branch():
            value = graph_value(x)
            own = value is not None and value.producer() in tape.nodes and value not in results
            results.append(tape.operand(x if own else identity(x)))
        tape.trim(results)
        tape.kept = True
    return ir.Graph(inputs, results, nodes=tape.nodes, name="branch")


@registry.register("", "If", since_version=OPSET)
def _infer_if(context: ShapeInferenceContext, node: ir.Node) -> None:
    """What both branches agree on: other sizes are new symbols."""
    branches = subgraphs_of(node)
    for branch in branches:
        _check_count("outputs", len(branch.outputs), len(node.outputs))
    for branch in branches:
        infer_graph(branch, context)
    for value, *given in zip(node.outputs, *(branch.outputs for branch in branches), strict=True):
        value.type = next((v.type for v in given if v.type is not None), None)
        value.shape = _agreed([v.shape for v in given], context)


def _check_count(what: str, given: int, wanted: int) -> None:
    if given != wanted:
        raise ValueError(f"a subgraph has {given} {what} where the operator needs {wanted}")


def _agreed(shapes: Sequence[ir.Shape | None], context: ShapeInferenceContext) -> ir.Shape | None:
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes) or len({len(shape) for shape in known}) != 1:
        return None
    return ir.Shape(
        [
            dims[0] if all(same_dim(d, dims[0]) for d in dims) else context.new_symbolic_dim()
            for dims in zip(*known, strict=True)
        ]
    )


@registry.register("", "Loop", since_version=OPSET)
def _infer_loop(context: ShapeInferenceContext, node: ir.Node) -> None:
    """The last state, and the results of all iterations, stacked: their number is unknown."""
    [body], starts = subgraphs_of(node), node.inputs[2:]
    _check_count("inputs", len(body.inputs), len(node.inputs))
    _check_count("outputs", len(body.outputs), 1 + len(node.outputs))
    for value, dtype in zip(body.inputs, (ir.DataType.INT64, ir.DataType.BOOL), strict=False):
        value.type = value.type or ir.TensorType(dtype)
    _infer_body(body, body.inputs[2:], starts, body.outputs[1:], context)
    for value, inner in zip(node.outputs, body.outputs[1:], strict=True):
        value.type, value.shape = inner.type, _left(inner.shape, context)
    for value in node.outputs[len(starts) :]:
        if value.shape is not None:
            value.shape = ir.Shape([context.new_symbolic_dim(), *value.shape])
    for value, first in zip(node.outputs, body.inputs[2:], strict=False):
        value.shape = _left(first.shape, context)


@registry.register("", "Scan", since_version=OPSET)
def _infer_scan(context: ShapeInferenceContext, node: ir.Node) -> None:
    """The last state, and the results of all steps, stacked along the requested axis."""
    [body] = subgraphs_of(node)
    _check_count("inputs", len(body.inputs), len(node.inputs))
    _check_count("outputs", len(body.outputs), len(node.outputs))
    states = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    lengths: list[Dim] = []
    slices = zip(node.inputs[states:], body.inputs[states:], strict=True)
    axes = _axes(node, "scan_input_axes")
    for axis, (whole, part) in zip(axes, slices, strict=False):
        if whole is not None:
            part.type = whole.type or part.type
        part.shape = numbers_of(part.shape, context)
        if whole is not None and whole.shape is not None:
            dims = list(whole.shape)
            lengths.append(dims.pop(axis))
            part.shape = ir.Shape(dims)
    expect_same(lengths, context)
    length = lengths[-1] if lengths else context.new_symbolic_dim()
    _infer_body(body, body.inputs[:states], node.inputs[:states], body.outputs, context)
    for value, inner in zip(node.outputs, body.outputs, strict=True):
        value.type, value.shape = inner.type, _left(inner.shape, context)
    for axis, value in zip(_axes(node, "scan_output_axes"), node.outputs[states:], strict=False):
        if value.shape is not None:
            dims = list(value.shape)
            dims.insert(axis % (len(dims) + 1), length)
            value.shape = ir.Shape(dims)
    for value, first in zip(node.outputs, body.inputs[:states], strict=False):
        value.shape = _left(first.shape, context)


def _axes(node: ir.Node, name: str) -> Iterator[int]:
    given = node.attributes[name].as_ints() if name in node.attributes else ()
    return chain(given, repeat(0))


def _infer_body(
    body: ir.Graph,
    state: Sequence[ir.Value],
    starts: Sequence[ir.Value | None],
    results: Sequence[ir.Value],
    context: ShapeInferenceContext,
) -> None:
    """Infer a body whose state keeps the sizes that no iteration changes; the others are symbols.

    It first assumes the state's shape before the loop, then drops every size that the body changes,
    until none is left to drop.
    """
    changing: set[str | None] = set()
    for value, start in zip(state, starts, strict=True):
        value.type = start.type if start is not None and start.type is not None else value.type
        shape = start.shape if start is not None else None
        value.shape = shape if shape is not None else numbers_of(value.shape, context)
    while True:
        infer_graph(body, context)
        stable = True
        for value, result in zip(state, results, strict=False):
            shape = _agreed([value.shape, result.shape], context)
            if shape is None or value.shape is None:
                stable = stable and value.shape is None
                value.shape = None
                continue
            dims: list[Dim] = []
            for old, new in zip(value.shape, shape, strict=True):
                kept = same_dim(old, new) or (not isinstance(old, int) and old.value in changing)
                dims.append(old if kept else new)
                if not kept and isinstance(new, ir.SymbolicDim):
                    changing.add(new.value)
                    stable = False
            value.shape = ir.Shape(dims)
        if stable:
            return


def _left(shape: ir.Shape | None, context: ShapeInferenceContext) -> ir.Shape | None:
    """A shape as seen outside: sizes named by inference inside differ between iterations."""
    if shape is None:
        return None
    inside = re.compile(r"\b_d\d+\b")
    return ir.Shape([context.new_symbolic_dim() if inside.search(str(d)) else d for d in shape])


Ways = Sequence[tuple[int, bool]]


def scan(
    step: Callable[..., tuple[Sequence[Tensor], Sequence[Tensor]]],
    states: Sequence[Tensor],
    xs: Sequence[Tensor],
    *,
    axis: int = 0,
    reverse: bool = False,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The last states, and the ys stacked: states, ys[t] = step(*states, *(x[t] for x in xs)).

    t = 0 ... n - 1 along `axis` of every x, and of every y; if `reverse`, n - 1 ... 0. States keep
    their types and sizes. A step may read values around it, also parameters, and gradients go
    through all of them.

    Raises GraphgenError if there are no xs, or if a step returns other states than it takes.
    """
    count = len(states)
    if not xs:
        raise GraphgenError(
            f"Scan: there is nothing to step over; give at least one of xs{user_line()}"
        )

    def checked(*given: Tensor) -> list[Tensor]:
        after, ys = step(*given)
        if len(after) != count:
            problem = f"takes {count} states and gives {len(after)}"
            raise GraphgenError(f"Scan: the step {problem}; give a new one for each{user_line()}")
        return [*after, *ys]

    tape, way = current_tape(), (axis, reverse)
    places = [axis_from_front("Scan", axis, len(x.shape)) for x in xs]
    results: Sequence[Tensor]
    if tape is None or not any(isinstance(x, Value) for x in (*states, *xs)):
        before, parts = ([np.asarray(x) for x in given] for given in (states, xs))
        results = stepped(checked, before, parts, [(i, reverse) for i in places], repeat(way))
    else:
        given = [tape.operand(x) for x in (*states, *xs)]
        inputs = [ir.Value(type=x.type, shape=x.shape) for x in given]
        for place, value in zip(places, inputs[count:], strict=True):
            if value.shape is not None:
                value.shape = ir.Shape([d for i, d in enumerate(value.shape) if i != place])
        body = record_branch(lambda: checked(*map(Value, inputs)), tape, inputs)
        ways = [(i, reverse) for i in places], [way] * (len(body.outputs) - count)
        results = list(map(Value, scan_node(tape, body, given, *ways).outputs))
    return tuple(results[:count]), tuple(results[count:])


def is_if(node: ir.Node) -> bool:
    """Whether a node chooses between two graphs."""
    return is_a(node, "If")


def is_loop(node: ir.Node) -> bool:
    """Whether a node repeats a graph until a condition is false."""
    return is_a(node, "Loop")


def is_scan(node: ir.Node) -> bool:
    """Whether a node runs a graph step by step."""
    return is_a(node, "Scan")


def if_node(tape: Tape, condition: ir.Value, then: ir.Graph, otherwise: ir.Graph) -> ir.Node:
    """Record an If over two graphs with as many outputs."""
    graphs = [ir.AttrGraph("then_branch", then), ir.AttrGraph("else_branch", otherwise)]
    return _recorded(tape, "If", [condition], graphs, len(then.outputs))


def loop_node(tape: Tape, body: ir.Graph, given: Sequence[ir.Value | None]) -> ir.Node:
    """Record a Loop over a graph: of the most steps, the first condition and the first states."""
    return _recorded(tape, "Loop", given, [ir.AttrGraph("body", body)], len(body.outputs) - 1)


def scan_node(
    tape: Tape, body: ir.Graph, given: Sequence[ir.Value], inputs: Ways, outputs: Ways
) -> ir.Node:
    """Record a Scan over a graph; the last operands are scanned."""
    attributes: list[ir.Attr] = [
        ir.AttrGraph("body", body),
        ir.AttrInt64("num_scan_inputs", len(inputs)),
    ]
    for side, ways in (("input", inputs), ("output", outputs)):
        for i, what in enumerate(("axes", "directions")):
            if any(way[i] for way in ways):
                numbers = [int(way[i]) for way in ways]
                attributes.append(ir.AttrInt64s(f"scan_{side}_{what}", numbers))
    return _recorded(tape, "Scan", given, attributes, len(body.outputs))


def _recorded(
    tape: Tape, name: str, given: Sequence[ir.Value | None], attributes: Sequence[ir.Attr], n: int
) -> ir.Node:
    node = ir.Node("", name, given, attributes, outputs=[ir.Value() for _ in range(n)])
    node.metadata_props[PATH] = tape.path
    tape.nodes.append(node)
    infer(node, tape.context)
    return node


def ways_of(node: ir.Node, side: str) -> Ways:
    """The ways of a Scan's scanned inputs, or outputs: `side` is input or output."""
    scanned = node.attributes["num_scan_inputs"].as_int()
    count = scanned if side == "input" else len(node.outputs) - len(node.inputs) + scanned
    axes, directions = (
        node.attributes[name].as_ints() if name in node.attributes else [0] * count
        for name in (f"scan_{side}_axes", f"scan_{side}_directions")
    )
    return [(axis, bool(back)) for axis, back in zip(axes, directions, strict=True)]


def stepped(
    step: Callable[..., Sequence[Tensor]],
    states: Sequence[Array],
    xs: Sequence[Array],
    inputs: Ways,
    outputs: Iterable[tuple[int, bool]],
) -> list[Array]:
    """A Scan computed on arrays; `outputs` has the way of each stacked output, or more."""
    sizes = {x.shape[axis] for x, (axis, _) in zip(xs, inputs, strict=True)}
    if len(sizes) > 1 or not min(sizes):
        raise GraphgenError(
            f"Scan: the lengths are {sorted(sizes)}; wanted one, of 1 or more{user_line()}"
        )
    rows, n = [], sizes.pop()
    for t in range(n):
        places = zip(xs, inputs, strict=True)
        parts = [np.take(x, n - 1 - t if back else t, axis) for x, (axis, back) in places]
        results = [np.asarray(y) for y in step(*states, *parts)]
        states = results[: len(states)]
        rows.append(results[len(states) :])
    stacked = [
        np.stack(column[::-1] if back else column, axis)
        for column, (axis, back) in zip(zip(*rows, strict=True), outputs, strict=False)
    ]
    return [*states, *stacked]


def looped(step: Callable[..., Sequence[Array]], given: Sequence[Array | None]) -> list[Array]:
    """A Loop computed on arrays: of the most steps or None, a condition or None, and states.

    Without a step, nothing says how many results there are to stack, or their sizes.
    """
    most, condition = given[:2]
    states = [np.asarray(x) for x in given[2:]]
    rows, number = list[Sequence[Array]](), 0
    while (most is None or number < most) and (condition is None or condition):
        condition, *results = step(np.array(number), np.array(True), *states)
        states, number = results[: len(states)], number + 1
        rows.append(results[len(states) :])
    return [*states, *(np.stack(column) for column in zip(*rows, strict=True))]
