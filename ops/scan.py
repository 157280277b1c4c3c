"""Scan: one step after another, each with the state that the one before has left."""

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.infer import infer
from graphgen.op import PATH, Array, Operand, Tape, Value, current_tape
from graphgen.ops.control_flow import record_branch

Ways = Sequence[tuple[int, bool]]
"""Of each scanned input or output: its axis, and whether it goes from the end to the start."""


def scan(
    step: Callable[..., tuple[Sequence[Operand], Sequence[Operand]]],
    states: Sequence[Operand],
    xs: Sequence[Operand],
    *,
    axis: int = 0,
    reverse: bool = False,
) -> tuple[tuple[Operand, ...], tuple[Operand, ...]]:
    """The last states, and the ys stacked: states, ys[t] = step(*states, *(x[t] for x in xs)).

    t = 0 ... n - 1 along `axis` of every x, and of every y; if `reverse`, n - 1 ... 0. States keep
    their types and sizes. A step may read what stands around it, parameters too, and gradients go
    through all of that.

    Raises GraphgenError where there are no xs, and where a step gives other states than it takes.
    """
    count = len(states)
    if not xs:
        raise GraphgenError("Scan: there is nothing to step over; give at least one of xs")

    def checked(*given: Operand) -> list[Operand]:
        after, ys = step(*given)
        if len(after) != count:
            told = f"takes {count} states and gives {len(after)}"
            raise GraphgenError(f"Scan: the step {told}; give a new one for each")
        return [*after, *ys]

    tape, way = current_tape(), (axis, reverse)
    results: Sequence[Operand]
    if tape is None or not any(isinstance(x, ir.Value) for x in (*states, *xs)):
        results = stepped(checked, states, xs, [way] * len(xs), repeat(way))
    else:
        given = [tape.operand(x) for x in (*states, *xs)]
        inputs = [Value(type=x.type, shape=x.shape) for x in given]
        for value in inputs[count:]:
            if value.shape is not None:
                value.shape = ir.Shape([d for i, d in enumerate(value.shape) if i != axis])
        body = record_branch(lambda: checked(*inputs), tape, inputs)
        ways = [way] * len(xs), [way] * (len(body.outputs) - count)
        results = scan_node(tape, body, given, *ways).outputs
    return tuple(results[:count]), tuple(results[count:])


def scan_node(
    tape: Tape, body: ir.Graph, given: Sequence[ir.Value], inputs: Ways, outputs: Ways
) -> ir.Node:
    """Record a Scan over a graph; the last of what is given are scanned."""
    attributes: list[ir.Attr] = [
        ir.AttrGraph("body", body),
        ir.AttrInt64("num_scan_inputs", len(inputs)),
    ]
    for side, ways in (("input", inputs), ("output", outputs)):
        for i, what in enumerate(("axes", "directions")):
            if any(way[i] for way in ways):
                numbers = [int(way[i]) for way in ways]
                attributes.append(ir.AttrInt64s(f"scan_{side}_{what}", numbers))
    node = ir.Node("", "Scan", given, attributes, outputs=[Value() for _ in body.outputs])
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
    step: Callable[..., Sequence[Array]],
    states: Sequence[Array],
    xs: Sequence[Array],
    inputs: Ways,
    outputs: Iterable[tuple[int, bool]],
) -> list[Array]:
    """What a Scan computes, on arrays; `outputs` has the way of each that is stacked, or more."""
    sizes = {x.shape[axis] for x, (axis, _) in zip(xs, inputs, strict=True)}
    if len(sizes) > 1 or not min(sizes):
        raise GraphgenError(f"Scan: the lengths are {sorted(sizes)}; wanted one, of 1 or more")
    rows, n = [], sizes.pop()
    for t in range(n):
        places = zip(xs, inputs, strict=True)
        parts = [np.take(x, n - 1 - t if back else t, axis) for x, (axis, back) in places]
        results = step(*states, *parts)
        states = results[: len(states)]
        rows.append(results[len(states) :])
    stacked = [
        np.stack(column[::-1] if back else column, axis)
        for column, (axis, back) in zip(zip(*rows, strict=True), outputs, strict=False)
    ]
    return [*states, *stacked]
