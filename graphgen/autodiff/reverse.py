"""The walk: each node's cotangents go to its inputs, by the rule of its operator."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx_ir as ir

from graphgen import ops
from graphgen.autodiff import control_flow
from graphgen.edit import replace_composites, splice
from graphgen.errors import GraphgenError
from graphgen.graph import bodies, is_float, operator_name, present_inputs, produced_by, scalar
from graphgen.infer import same_dim, same_shape
from graphgen.op import Op, find_op, read_attributes
from graphgen.ops.control_flow import is_loop, is_scan
from graphgen.ops.elementwise import equal
from graphgen.ops.layout import non_zero, scatter_elements, shape, squeeze
from graphgen.ops.padding import shaped
from graphgen.ops.reduce import reduce_sum
from graphgen.places import where_is
from graphgen.record import PATH, Tape, current_tape, recording
from graphgen.schema_functions import has_function, record_function
from graphgen.subgraphs import reads, subgraphs_of
from graphgen.traits import Trait, has
from graphgen.value import Tensor, Value, adopt, sizes_of


def prepared(
    graph: ir.Graph,
    wrt: Sequence[ir.Value],
    results: Callable[[], Sequence[ir.Value]],
    context: Any,
) -> set[ir.Value]:
    """Prepare a graph so that its active values go through operators with rules; return them."""
    _expand_functions(graph, _active(graph, wrt, results()), context)
    _expand_composites(graph, _active(graph, wrt, results()), context)
    active = _active(graph, wrt, results())
    steps = [n for n in graph if is_loop(n) or is_scan(n)]
    steps = [n for n in steps if not active.isdisjoint(n.outputs)]
    for node in steps:
        control_flow.keep_states(node, context)
    return _active(graph, wrt, results()) if steps else active


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


def walk(
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
    if control_flow.through(node, active, cotangents, tape):
        return
    op = find_op(node)
    if subgraphs_of(node):
        raise GraphgenError(
            f"gradient: {node.op_type} ({where_is(node)}) is on the way from the parameters to the "
            "loss, where of nodes with subgraphs only If, Loop and Scan may be"
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
    add(cotangents, active, zip(node.inputs, parts, strict=False))


def add(
    cotangents: dict[ir.Value, Tensor],
    active: set[ir.Value],
    parts: Iterable[tuple[ir.Value | None, Tensor | None]],
) -> None:
    """Add the parts of cotangents to those of active values, summed to their shapes."""
    for value, part in parts:
        if value is None or part is None or value not in active:
            continue
        part = sum_to(part, value)
        cotangents[value] = accumulate(cotangents[value], part) if value in cotangents else part


def owned(g: Tensor, made: set[ir.Node], tape: Tape) -> ir.Value:
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
