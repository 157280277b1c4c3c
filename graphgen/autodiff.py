"""Reverse mode: one walk from the loss to the parameters, one dictionary of cotangents.

A node's operator gives the rule; a composite without one is replaced by its body first, so that
forward and backward pass share the intermediate values.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.edit import (
    identity_of,
    infer_model,
    lift_constants,
    register_constants,
    replace_composites,
    splice,
    tidy,
)
from graphgen.errors import GraphgenError
from graphgen.graph import (
    ModelLike,
    bodies,
    is_float,
    model_in,
    operator_name,
    present_inputs,
    produced_by,
    scalar,
)
from graphgen.infer import describe, same_dim, same_shape
from graphgen.op import Op, find_op, read_attributes
from graphgen.ops.control_flow import is_scan, scan_node, ways_of
from graphgen.ops.elementwise import equal
from graphgen.ops.layout import non_zero, numpy_dtype, scatter_elements, shape, squeeze
from graphgen.ops.padding import shaped
from graphgen.ops.reduce import reduce_sum
from graphgen.places import where_is
from graphgen.record import PATH, Tape, current_tape, recording
from graphgen.schema_functions import has_function, record_function
from graphgen.subgraphs import read_by, reads, subgraphs_of
from graphgen.traits import Trait, has
from graphgen.value import Tensor, Value, adopt, sizes_of

_SMALL = 1024  # the most bytes to fold


def grad(model: ModelLike, *, of: str | None = None, wrt: Iterable[str] | None = None) -> ir.Model:
    """A copy of `model` with the gradient of one output as further outputs, named `<name>_grad`.

    Args:
        model: A model with a scalar float output.
        of: The name of that output; the only output by default.
        wrt: Names of float inputs or initializers; all float inputs by default.

    Raises GraphgenError for an output that is not scalar, an unknown name, a value that the
    output does not depend on, an output that has the gradient's name already, and an operator
    without a gradient rule.
    """
    result = model_in(model, "grad").clone()
    graph = result.graph
    outputs = {str(v.name): v for v in graph.outputs}
    if of is None and len(outputs) > 1:
        raise GraphgenError(f"grad: of= must name one of the outputs {', '.join(outputs)}")
    if of is not None and of not in outputs:
        raise GraphgenError(f"grad: there is no output {of}; there are {', '.join(outputs)}")
    loss = outputs[of] if of is not None else graph.outputs[0]
    known = {str(v.name): v for v in (*graph.inputs, *graph.initializers.values())}
    if wrt is None:
        wrt = [str(v.name) for v in graph.inputs if v.dtype and v.dtype.is_floating_point()]
    names = list(wrt)
    if not names:
        raise GraphgenError(
            "grad: wrt= names nothing, and there is no float input; name parameters"
        )
    for name in names:
        if name not in known:
            raise GraphgenError(f"grad: wrt={name} is not an input or initializer of the model")
        if f"{name}_grad" in outputs:
            raise GraphgenError(
                f"grad: the model already has an output {name}_grad; rename that, or leave {name} "
                "out of wrt="
            )
    for name, value in zip(names, backward(result, loss, [known[n] for n in names]), strict=True):
        value.name = f"{name}_grad"
        graph.outputs.append(value)
    tidy(result)
    return result


def backward(model: ir.Model, loss: ir.Value, wrt: Sequence[ir.Value]) -> list[ir.Value]:
    """Append the backward pass to the model's graph; return the gradients in `wrt`'s order."""
    graph = model.graph
    place = list(graph.outputs).index(loss) if loss.is_graph_output() else None
    context = infer_model(model)
    unknown = any(value.shape is None for node in graph for value in node.outputs)
    if unknown or any(True for _ in graph.subgraphs()):
        context = _folded(model, wrt)
    loss = loss if place is None else graph.outputs[place]  # it may have been a branch's
    if loss.shape is None or any(d != 1 for d in loss.shape) or not is_float(loss):
        raise GraphgenError(
            f"gradient: {loss.name} is {describe(loss)}; a loss must be one float: take its mean"
        )
    for value in wrt:
        if not is_float(value):
            raise GraphgenError(
                f"gradient: {value.name} is {describe(value)}; only floats have a gradient"
            )
    active = _prepared(
        graph, wrt, lambda: [loss if place is None else graph.outputs[place]], context
    )
    loss = loss if place is None else graph.outputs[place]  # or a composite's
    if loss not in active:
        raise GraphgenError(
            f"gradient: {loss.name} depends on none of {', '.join(str(v.name) for v in wrt)}"
        )
    cotangents: dict[ir.Value, Tensor] = {}
    with recording(context=context) as tape:
        scalar_loss = adopt(loss)
        one = np.ones((), numpy_dtype(scalar_loss))
        cotangents[loss] = ops.expand(one, ops.shape(scalar_loss))
        _walk(graph, active, cotangents, tape)
        unused = [str(v.name) for v in wrt if v not in cotangents]
        if unused:
            raise GraphgenError(f"gradient: {loss.name} does not depend on {', '.join(unused)}")
        made = set(tape.nodes)
        results = [_owned(cotangents[value], made, tape) for value in wrt]
        graph.extend(tape.nodes)
        tape.kept = True
    register_constants(graph, tape.constants.values())
    return results


def _folded(model: ir.Model, wrt: Sequence[ir.Value]) -> Any:
    """Fold what constants decide, sizes and branches of an If, but nothing that reads `wrt`."""
    from graphgen.folding import fold_constants  # as in passes/clean.py

    fixed = set(wrt)
    fold_constants(model, _SMALL, lambda node: None if fixed.isdisjoint(node.inputs) else False)
    lift_constants(model)
    return infer_model(model)


def _prepared(
    graph: ir.Graph,
    wrt: Sequence[ir.Value],
    results: Callable[[], Sequence[ir.Value]],
    context: Any,
) -> set[ir.Value]:
    """Prepare a graph so that its active values go through operators with rules; return them."""
    _expand_functions(graph, _active(graph, wrt, results()), context)
    _expand_composites(graph, _active(graph, wrt, results()), context)
    active = _active(graph, wrt, results())
    scans = [n for n in graph if is_scan(n) and not active.isdisjoint(n.outputs)]
    for node in scans:
        _keep_states(node, context)
    return _active(graph, wrt, results()) if scans else active


def _active(graph: ir.Graph, wrt: Sequence[ir.Value], results: Iterable[ir.Value]) -> set[ir.Value]:
    """The float values that depend on `wrt` and that the results depend on, and `wrt`."""
    read, active, needed = reads(graph), set(wrt), set(results)
    for node in graph:
        if not active.isdisjoint(read[node]):
            active.update(v for v in node.outputs if v.dtype is None or is_float(v))
    for node in reversed(graph):
        if not needed.isdisjoint(node.outputs):
            needed.update(read[node])
    return (active & needed).union(wrt)


def _expand_functions(graph: ir.Graph, active: set[ir.Value], context: Any) -> None:
    """Replace active operators that are not ours by the functions that define them in ONNX."""
    pending = [node for node in graph if not active.isdisjoint(node.outputs)]
    while pending:
        node = pending.pop()
        if has_function(node) and not has(node, Trait.RANDOM):
            with recording(context=context) as tape:
                splice(node, tape, record_function(node, tape))
                pending += tape.nodes


def _expand_composites(graph: ir.Graph, active: set[ir.Value], context: Any) -> None:
    """Replace active composites by their bodies, unless a rule, for the first output only, does."""

    def body(op: Op, node: ir.Node) -> list[Tensor | None] | None:
        further = not active.isdisjoint(node.outputs[1:])
        if has(node, Trait.QUANTIZED) and (further or node.outputs[0] in active):
            raise GraphgenError(
                f"gradient: {operator_name(node)} ({where_is(node)}) uses quantized numbers, which "
                "have no gradient; train the float model, and quantize the result"
            )
        if not further and (op.rule is not None or node.outputs[0] not in active):
            return None
        results = bodies(op, node)
        tape = current_tape()
        assert tape is not None
        active.update(value for new in tape.nodes for value in new.outputs)
        return results

    replace_composites(graph, context, body)


def _walk(
    graph: ir.Graph, active: set[ir.Value], cotangents: dict[ir.Value, Tensor], tape: Tape
) -> None:
    """Add the cotangents of all active values, starting from those of the results."""
    for node in reversed(list(graph)):
        if any(output in active for output in node.outputs):
            _pull_back(node, active, cotangents, tape)


def _pull_back(
    node: ir.Node, active: set[ir.Value], cotangents: dict[ir.Value, Tensor], tape: Tape
) -> None:
    """Add the cotangents of a node's inputs, from those of its outputs."""
    received = [cotangents.get(output) for output in node.outputs]
    if all(g is None for g in received):
        return
    tape.path = node.metadata_props.get(PATH, "")
    if is_scan(node):
        _through_steps(node, active, cotangents, tape)
        return
    op = find_op(node)
    if subgraphs_of(node):
        raise GraphgenError(
            f"gradient: {node.op_type} ({where_is(node)}) is on the way from the parameters to the "
            "loss, where only a Scan, or an If with a constant condition, may be; export without "
            "other control flow"
        )
    if op is None or op.rule is None:
        raise GraphgenError(
            f"gradient: {operator_name(node)} ({where_is(node)}) has no rule; declare "
            f"{'the operator and its rule' if op is None else 'one under the operator'} in ops/ "
            "with @<operator>.vjp, see docs/adding-an-operator.md"
        )
    outputs = [adopt(output) for output in node.outputs[: 1 if op.composite else None]]
    gs = [ops.zeros_like(y) if g is None else g for g, y in zip(received, outputs, strict=False)]
    inputs = [adopt(value) for value in node.inputs]
    several = not op.composite and op.outputs != 1
    result = op.rule(
        tuple(gs) if several else gs[0],
        tuple(outputs) if several else outputs[0],
        *inputs,
        **read_attributes(op, node),
    )
    parts = result if isinstance(result, tuple) else (result,)
    _add(cotangents, active, zip(node.inputs, parts, strict=False))


def _add(
    cotangents: dict[ir.Value, Tensor],
    active: set[ir.Value],
    parts: Iterable[tuple[ir.Value | None, Tensor | None]],
) -> None:
    for value, part in parts:
        if value is None or part is None or value not in active:
            continue
        part = sum_to(part, value)
        cotangents[value] = accumulate(cotangents[value], part) if value in cotangents else part


def _keep_states(node: ir.Node, context: Any) -> None:
    """Add outputs at the end of a Scan: its states before each step, stacked."""
    body, inputs = node.attributes["body"].as_graph(), ways_of(node, "input")
    states = body.inputs[: len(node.inputs) - len(inputs)]
    outputs = [*ways_of(node, "output"), *[(0, False)] * len(states)]
    for state in states:
        body.append(identity_of(state))
        body.outputs.append(body[-1].outputs[0])
    with recording(context=context) as tape:
        new = scan_node(tape, body, present_inputs(node), inputs, outputs)
        splice(node, tape, new.outputs[: len(node.outputs)])


def _through_steps(
    node: ir.Node, active: set[ir.Value], cotangents: dict[ir.Value, Tensor], tape: Tape
) -> None:
    """Go back through a Scan, from its last step to its first: a Scan whose states are cotangents.

    Each step computes the original step again, from the states that were kept, and goes back. It
    carries the cotangents of the states and of all values that the steps read from outside.
    """
    body, inputs = node.attributes["body"].as_graph(), ways_of(node, "input")
    count = len(node.inputs) - len(inputs)
    first, kept = len(node.outputs) - count, node.outputs[len(node.outputs) - count :]
    outputs = ways_of(node, "output")[: first - count]
    around = [v for v in dict.fromkeys(read_by(node)) if v in active and v not in node.inputs]
    twin = body.clone(allow_outer_scope_values=True)
    del twin.outputs[first:]
    states, xs = twin.inputs[:count], twin.inputs[count:]
    floats = [i for i, state in enumerate(states) if is_float(state)]
    scanned = [i for i, x in enumerate(node.inputs[count:]) if x in active]
    wrt = [*(states[i] for i in floats), *(xs[i] for i in scanned), *around]
    within = _prepared(twin, wrt, lambda: list(twin.outputs), tape.context)

    def like(value: ir.Value) -> ir.Value:
        return ir.Value(type=value.type, shape=value.shape)

    carried = {i: like(states[i]) for i in floats}
    sums = [like(value) for value in around]
    arriving = {
        i: like(twin.outputs[i]) for i in range(count, first) if node.outputs[i] in cotangents
    }
    own: dict[ir.Value, Tensor] = {}
    seeds = [(twin.outputs[i], Value(g)) for i, g in (carried | arriving).items()]
    with recording(context=tape.context) as inner:
        inner.share(tape)
        _add(own, within, seeds)
        _walk(twin, within, own, inner)

        def gradient(value: ir.Value) -> Tensor:
            return own[value] if value in own else ops.zeros_like(adopt(value))

        results = [gradient(states[i]) for i in floats]
        results += [
            Value(g) + own[v] if v in own else Value(g) for v, g in zip(around, sums, strict=True)
        ]
        results += [gradient(xs[i]) for i in scanned]
        made = set(inner.nodes)
        outputs_of_steps = [_owned(g, made, inner) for g in results]
        twin.extend(inner.nodes)
        inner.kept = True
    twin.inputs[:] = [*carried.values(), *sums, *states, *xs, *arriving.values()]
    twin.outputs[:] = outputs_of_steps
    last = [node.outputs[i] for i in floats]
    given = [
        *(cotangents[y] if y in cotangents else ops.zeros_like(adopt(y)) for y in last),
        *(ops.zeros_like(adopt(value)) for value in around),
        *kept,
        *node.inputs[count:],
        *(cotangents[node.outputs[i]] for i in arriving),
    ]
    turned = [(axis, not back) for axis, back in inputs]
    ways = (
        [(0, True)] * count
        + turned
        + [(axis, not back) for i in arriving for axis, back in [outputs[i - count]]]
    )
    operands = [tape.operand(x) for x in given]
    back = scan_node(tape, twin, operands, ways, [turned[i] for i in scanned])
    whole = [node.inputs[i] for i in (*floats, *(count + i for i in scanned))]
    whole[len(floats) : len(floats)] = around
    _add(cotangents, active, zip(whole, map(adopt, back.outputs), strict=True))


def _owned(g: Tensor, made: set[ir.Node], tape: Tape) -> ir.Value:
    """A value made by this recording, so that it can be a separate output."""
    value = tape.operand(g)
    return value if value.producer() in made else tape.operand(ops.identity(Value(value)))


def accumulate(a: Tensor, b: Tensor) -> Tensor:
    """a + b; a scatter into zeros, as for an embedding, becomes a scatter into the other."""
    for total, part in ((a, b), (b, a)):
        node = produced_by(part, ops.scatter_elements)
        if node is None:
            continue
        zeros, indices, updates = map(Value, present_inputs(node))
        made, axis = produced_by(zeros, ops.expand), node.attributes.get_int("axis", 0)
        added = node.attributes.get_string("reduction", "none") == "add"
        if added and made is not None and scalar(made.inputs[0]) == 0:
            return scatter_elements(total, indices, updates, axis=axis, reduction="add")
    return a + b


def sum_to(g: Tensor, x: ir.Value) -> Tensor:
    """Sum g over the dimensions along which x was broadcast.

    Known ones are summed by their places; where two symbols differ, those that are 1 at run time.
    """
    sizes = sizes_of(g)
    dims = None if sizes is None else ir.Shape(sizes)
    if same_shape(dims, x.shape):
        return g
    if dims is None or x.shape is None:
        raise GraphgenError(
            f"gradient: the rank of {x.name} is unknown before the run; export with fixed ranks"
        )
    extra = len(dims) - len(x.shape)
    pairs = list(zip(dims[extra:], x.shape, strict=True))
    known = [extra + i for i, (a, b) in enumerate(pairs) if b == 1 and not same_dim(a, b)]
    undecided = any(b != 1 and not same_dim(a, b) and not isinstance(b, int) for a, b in pairs)
    if known:
        g = reduce_sum(g, known, keepdims=1)
    if extra:
        g = reduce_sum(g, list(range(extra)), keepdims=0)
    if undecided:
        ones = squeeze(non_zero(equal(shape(adopt(x)), 1)), [0])
        g = reduce_sum(g, ones, keepdims=1, noop_with_empty_axes=1)
        g = shaped(g, adopt(x))
    return g
