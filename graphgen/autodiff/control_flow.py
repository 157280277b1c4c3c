"""Reverse mode through If, Loop and Scan: a node of the same kind that goes back through them.

A branch, or a step, is computed again on the way back, from the values around it and the states
before it. So the states of all steps are kept, and of what a step makes in between nothing: a Loop
or Scan of n steps keeps n times its states, and computes each step twice.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.autodiff import reverse
from graphgen.edit import identity_of, splice
from graphgen.errors import GraphgenError
from graphgen.graph import constant, is_float, present_inputs
from graphgen.infer import Dim, describe, is_named, same_dim, same_shape
from graphgen.op import is_a
from graphgen.ops.control_flow import (
    Ways,
    if_node,
    is_if,
    is_loop,
    is_scan,
    loop_node,
    scan_node,
    ways_of,
)
from graphgen.ops.dropout import dropout_in_inference
from graphgen.ops.padding import shaped
from graphgen.places import where_is
from graphgen.record import Tape, recording
from graphgen.subgraphs import nodes_of, read_by
from graphgen.traits import Trait, has
from graphgen.value import Tensor, Value, adopt


def keep_states(node: ir.Node, context: Any) -> None:
    """Add outputs at the end of a Loop or Scan: its states before each step, stacked.

    Those of a Loop begin with the number of each step and the condition before it.
    """
    body = node.attributes["body"].as_graph()
    if is_loop(node):
        kept, given = body.inputs, node.inputs
        _expect_same_sizes(node, body)
    else:
        given = present_inputs(node)
        kept = body.inputs[: len(given) - len(ways_of(node, "input"))]
    for value in list(kept):
        body.append(identity_of(value))
        body.outputs.append(body[-1].outputs[0])
    with recording(context=context) as tape:
        if is_loop(node):
            new = loop_node(tape, body, given)
        else:
            outputs = [*ways_of(node, "output"), *[(0, False)] * len(kept)]
            new = scan_node(tape, body, present_inputs(node), ways_of(node, "input"), outputs)
        splice(node, tape, new.outputs[: len(node.outputs)])


def _expect_same_sizes(node: ir.Node, body: ir.Graph) -> None:
    """Raise GraphgenError for a Loop with a state that cannot be stacked."""
    for state, after in zip(body.inputs[2:], body.outputs[1:], strict=False):
        fixed = isinstance(state.type, ir.TensorType)
        if fixed and state.shape is not None and after.shape is not None:
            pairs = zip(state.shape, after.shape, strict=False)
            fixed = len(state.shape) == len(after.shape) and not any(_differ(*p) for p in pairs)
        if not fixed:
            raise GraphgenError(
                f"gradient: Loop ({where_is(node)}) changes its state {state.name} from "
                f"{describe(state)} to {describe(after)}; a gradient needs states that are tensors "
                "and keep their sizes"
            )


def _differ(old: Dim, new: Dim) -> bool:
    """Whether a size is known to become another, and does not only have another name."""
    if same_dim(old, new):
        return False
    grown = isinstance(new, ir.SymbolicDim) and str(old) in new.free_symbols()
    return grown or (is_named(old) and is_named(new))


def through(
    node: ir.Node, active: set[ir.Value], cotangents: dict[ir.Value, Tensor], tape: Tape
) -> bool:
    """Add the cotangents of what an If, Loop or Scan reads; whether it was one."""
    if is_if(node):
        _through_branches(node, active, cotangents, tape)
    elif is_loop(node) or is_scan(node):
        _through_steps(node, active, cotangents, tape)
    else:
        return False
    return True


def _again(node: ir.Node, graph: ir.Graph) -> ir.Graph:
    """A copy of a subgraph, to be computed again. Raises GraphgenError if it draws numbers."""
    for inner in nodes_of(graph):
        if has(inner, Trait.RANDOM) and not _is_settled(inner):
            raise GraphgenError(
                f"gradient: {inner.op_type} ({where_is(inner)}) draws random numbers in "
                f"{node.op_type} ({where_is(node)}), which the way back would draw anew; draw them "
                "outside of it"
            )
    return graph.clone(allow_outer_scope_values=True)


def _is_settled(node: ir.Node) -> bool:
    """Whether it is a Dropout outside of training."""
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    known = mode is None or ((array := constant(mode)) is not None and not array.any())
    return is_a(node, dropout_in_inference) and known


def _read_inside(node: ir.Node, active: set[ir.Value]) -> list[ir.Value]:
    """The active values around a node that its subgraphs read."""
    given = len(present_inputs(node))
    return [v for v in dict.fromkeys(islice(read_by(node), given, None)) if v in active]


def _like(value: ir.Value) -> ir.Value:
    return ir.Value(type=value.type, shape=value.shape)


Cotangents: TypeAlias = Callable[[ir.Value], Tensor | None]


def _go_back(
    tape: Tape,
    twin: ir.Graph,
    wrt: Sequence[ir.Value],
    seeds: Mapping[int, ir.Value],
    results: Callable[[Cotangents], Sequence[Tensor]],
) -> None:
    """Let a subgraph go back from the cotangents of its outputs, and give `results` instead.

    `seeds` has the cotangents by the output's place. The results are a function of what gives the
    cotangent of a value of `wrt`, or None.
    """
    within = reverse.prepared(twin, wrt, lambda: list(twin.outputs), tape.context)
    own: dict[ir.Value, Tensor] = {}
    with recording(context=tape.context) as inner:
        inner.share(tape)
        for place, g in seeds.items():
            y = twin.outputs[place]
            same = same_shape(g.shape, y.shape)
            part = Value(g) if same else shaped(ops.identity(Value(g)), adopt(y))
            reverse.add(own, within, [(y, part)])
        reverse.walk(twin, within, own, inner)
        found = results(own.get)
        made = set(inner.nodes)
        outputs = [reverse.owned(g, made, inner) for g in found]
        twin.extend(inner.nodes)
        inner.kept = True
    twin.outputs[:] = outputs


def _or_zeros(g: Tensor | None, value: ir.Value) -> Tensor:
    return ops.zeros_like(adopt(value)) if g is None else g


def _through_branches(
    node: ir.Node, active: set[ir.Value], cotangents: dict[ir.Value, Tensor], tape: Tape
) -> None:
    """Go back through an If: an If on the same condition whose branches are computed again."""
    around = _read_inside(node, active)
    arriving = {
        i: tape.operand(cotangents[y]) for i, y in enumerate(node.outputs) if y in cotangents
    }
    twins = {}
    for name in ("then_branch", "else_branch"):
        twin = twins[name] = _again(node, node.attributes[name].as_graph())
        _go_back(
            tape, twin, around, arriving, lambda g: [_or_zeros(g(value), value) for value in around]
        )
    back = if_node(tape, present_inputs(node)[0], twins["then_branch"], twins["else_branch"])
    parts = [shaped(adopt(g), adopt(x)) for g, x in zip(back.outputs, around, strict=True)]
    reverse.add(cotangents, active, zip(around, parts, strict=True))


class _Steps(NamedTuple):
    """The parts of a Loop or Scan whose states are kept: outside, and in its body."""

    starts: Sequence[ir.Value]
    """The states before the first step."""
    states: Sequence[ir.Value]
    kept: Sequence[ir.Value]
    xs: Sequence[ir.Value]
    """What is scanned, or for a Loop the kept numbers of the steps and conditions."""
    parts: Sequence[ir.Value]
    """A step's part of the xs."""
    ways: Ways
    outputs: Ways
    """How xs are scanned, and the outputs behind the states stacked."""


def _steps_of(node: ir.Node, body: ir.Graph) -> _Steps:
    """The parts; of a Loop's body, the condition is no output any more, nor what is kept."""
    given = present_inputs(node)
    if is_loop(node):
        starts, count = node.inputs[2:], len(node.inputs)
        kept = node.outputs[len(node.outputs) - count :]
        body.outputs[:] = body.outputs[1 : len(body.outputs) - count]  # `del` leaves their marks
        along = [(0, False)] * (len(body.outputs) - len(starts))
        states, parts = body.inputs[2:], body.inputs[:2]
        return _Steps(
            [x for x in starts if x is not None], states, kept[2:], kept[:2], parts,
            [(0, False)] * 2, along,
        )  # fmt: skip
    ways = ways_of(node, "input")
    count = len(given) - len(ways)
    first = len(node.outputs) - count
    body.outputs[first:] = []
    outputs = ways_of(node, "output")[: first - count]
    return _Steps(
        given[:count], body.inputs[:count], node.outputs[first:], given[count:],
        body.inputs[count:], ways, outputs,
    )  # fmt: skip


def _through_steps(
    node: ir.Node, active: set[ir.Value], cotangents: dict[ir.Value, Tensor], tape: Tape
) -> None:
    """Go back from the last step to the first: a Loop or Scan whose states are cotangents.

    Each step computes the original step again, from the states that were kept, and goes back. It
    carries the cotangents of the states and of all values that the steps read from outside.
    """
    around, twin = _read_inside(node, active), _again(node, node.attributes["body"].as_graph())
    s = _steps_of(node, twin)
    count = len(s.states)
    floats = [i for i, state in enumerate(s.states) if is_float(state)]
    scanned = [i for i, x in enumerate(s.xs) if x in active]
    inputs = [*(s.states[i] for i in floats), *(s.parts[i] for i in scanned)]
    carried = {i: _like(s.states[i]) for i in floats}
    sums = [_like(value) for value in around]
    places = range(count, len(twin.outputs))
    arriving = {i: _like(twin.outputs[i]) for i in places if node.outputs[i] in cotangents}

    def results(cotangent: Cotangents) -> list[Tensor]:
        total = [
            Value(old) if (g := cotangent(v)) is None else reverse.accumulate(Value(old), g)
            for v, old in zip(around, sums, strict=True)
        ]
        found = [_or_zeros(cotangent(v), v) for v in inputs]
        return [*found[: len(floats)], *total, *found[len(floats) :]]

    _go_back(tape, twin, [*inputs, *around], carried | arriving, results)
    last = [node.outputs[i] for i in floats]
    given = [
        *(_or_zeros(cotangents.get(y), y) for y in last),
        *(ops.zeros_like(adopt(value)) for value in around),
    ]
    stacks: list[Tensor] = [adopt(v) for v in (*s.kept, *s.xs)]
    stacks += [cotangents[node.outputs[i]] for i in arriving]
    states, slices = [*carried.values(), *sums], [*s.states, *s.parts, *arriving.values()]
    turned = [(axis, not back) for axis, back in s.ways]
    if is_loop(node):
        steps = ops.gather(ops.shape(adopt(s.xs[0])), 0)
        back = _loop_back(tape, twin, steps, given, stacks, states, slices)
    else:
        twin.inputs[:] = [*states, *slices]
        axes = [s.outputs[i - count] for i in arriving]
        ways = [(0, True)] * count + turned + [(axis, not back) for axis, back in axes]
        operands = [tape.operand(x) for x in (*given, *stacks)]
        back = scan_node(tape, twin, operands, ways, [turned[i] for i in scanned])
    whole = [*(s.starts[i] for i in floats), *around, *(s.xs[i] for i in scanned)]
    parts = [shaped(adopt(g), adopt(x)) for g, x in zip(back.outputs, whole, strict=True)]
    reverse.add(cotangents, active, zip(whole, parts, strict=True))


def _loop_back(
    tape: Tape,
    twin: ir.Graph,
    steps: Tensor,
    given: Sequence[Tensor],
    stacks: Sequence[Tensor],
    states: Sequence[ir.Value],
    slices: Sequence[ir.Value],
) -> ir.Node:
    """A Loop over the stacks from their ends. A Scan would fail if there is no step."""
    number, go = (ir.Value(type=ir.TensorType(t)) for t in (ir.DataType.INT64, ir.DataType.BOOL))
    number.shape, go.shape = ir.Shape(()), ir.Shape(())
    with recording(context=tape.context) as inner:
        inner.share(tape)
        at = steps - 1 - Value(number)
        for stack, part in zip(stacks, slices, strict=True):
            one = inner.operand(shaped(ops.gather(stack, at), adopt(part)))
            part.replace_all_uses_with(one, replace_graph_outputs=True)
        goes = inner.operand(ops.identity(Value(go)))
        nodes = list(twin)
        twin.remove(nodes)
        twin.extend([*inner.nodes, *nodes])
        inner.kept = True
    twin.inputs[:] = [number, go, *states]
    twin.outputs.insert(0, goes)
    yes = tape.constant(np.array(True))
    return loop_node(tape, twin, [tape.operand(steps), yes, *map(tape.operand, given)])
