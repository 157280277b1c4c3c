"""Changing graphs: recordings become models, nodes are replaced, pruned and put in order."""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common
from onnx_shape_inference import infer_symbolic_shapes

from graphgen.errors import GraphgenError, user_line
from graphgen.garbage import uncollected
from graphgen.graph import (
    SCALARS,
    all_values,
    is_constant_name,
    present_inputs,
    uses_outputs_beyond,
)
from graphgen.infer import DOMAIN, OPSET, new_context
from graphgen.model import Model
from graphgen.op import Op, find_op
from graphgen.places import where_is
from graphgen.record import Tape, recording
from graphgen.rounded import SHOWN, FileSizes
from graphgen.subgraphs import detach, infer_graph, nodes_of, subgraphs_of
from graphgen.traits import Trait, has
from graphgen.value import Tensor, Value, graph_value

_NAME = re.compile("[^\0\ud800-\udfff]+")
_NEXT = "graphgen.constants"  # in a graph's meta: the number of its next constant


def to_model(tape: Tape, outputs: Mapping[str, ir.Value | Value]) -> ir.Model:
    """The recording as a model; nodes that no output needs are dropped."""
    results, made = [], {name: graph_value(value) for name, value in outputs.items()}
    for output_name, value in made.items():
        if value.producer() is None or value in results:
            raise GraphgenError(
                f"output {output_name} is an input, a constant or another output: return a new "
                "value for each output"
            )
        results.append(value)
    _check_names(tape, outputs)
    graph = ir.Graph(
        list(tape.inputs.values()),
        results,
        nodes=tape.nodes,
        name="main",
        opset_imports={"": OPSET},
    )
    for output_name, value in made.items():
        value.name = output_name
    for path, value in tape.initializers.items():
        value.name = path
        graph.register_initializer(value)
    if scalars := sorted(
        p for p, v in tape.initializers.items() if v.shape is not None and not len(v.shape)
    ):
        graph.metadata_props[SCALARS] = json.dumps(scalars)
    tape.kept = True
    model = Model(graph, ir_version=10, producer_name="graphgen")
    register_constants(graph, tape.constants.values())
    _check_sources(graph, set())
    tidy(model)
    return model


def _check_sources(graph: ir.Graph, outside: Collection[ir.Graph]) -> None:
    """Raise GraphgenError for values that a function kept from another call, or another body."""
    known = {graph, *outside}
    for node in graph:
        for value in present_inputs(node):
            if value.graph not in known:
                made = value.producer()
                what = f"an input {value.name}" if made is None else f"a result of {made.op_type}"
                raise GraphgenError(
                    f"{where_is(node)} reads {what} of another graph: a function or module has "
                    f"kept it from another call, or from another body; make it anew{user_line()}"
                )
        for body in subgraphs_of(node):
            _check_sources(body, known)


def _check_names(tape: Tape, outputs: Iterable[str]) -> None:
    """Inputs, weights and outputs keep their names: no two have one, and files can hold each."""
    owners: dict[str, str] = dict.fromkeys(tape.initializers, "a weight")
    for kind, names in (("an input", [*tape.inputs]), ("an output", [*outputs])):
        for name in names:
            if not _NAME.fullmatch(name):
                raise GraphgenError(f"{kind} is called {name!a}; give it a name that is a text")
            if name in owners:
                raise GraphgenError(
                    f"{kind} and {owners[name]} are both called {name}; rename one (outputs have "
                    "the keys of the dictionary that is returned)"
                )
            owners[name] = kind


def register_constants(graph: ir.Graph, constants: Iterable[ir.Value]) -> None:
    """Turn the used constants into initializers of the graph, with fresh names."""
    for value in constants:
        if not value.uses() or value.name in graph.initializers:
            continue
        if _NEXT not in graph.meta:  # a file may use such names too
            names = [v.name for v in all_values(graph) if is_constant_name(v.name)]
            taken = [int(str(name).removeprefix("constant_")) for name in names]
            graph.meta[_NEXT] = max([len(graph.initializers) - 1, *taken]) + 1
        value.name = f"constant_{graph.meta[_NEXT]}"
        graph.meta[_NEXT] += 1
        graph.register_initializer(value)


def lift_constants(model: ir.Model) -> None:
    """Turn all constants into initializers of the main graph, where our passes look for them."""
    nodes = list(nodes_of(model.graph))
    if any(has(node, Trait.CONSTANT) for node in nodes):
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    if any(map(subgraphs_of, nodes)):
        common.LiftSubgraphInitializersToMainGraphPass()(model)
    for node in nodes:
        # From outside of a body, inference does not see that an operand is empty.
        for i, value in enumerate(node.inputs if has(node, Trait.OMITS_EMPTY) else ()):
            content = None if value is None else value.const_value
            if content is not None and not content.size:
                node.replace_input_with(i, None)


@contextmanager
def without_defaults(model: ir.Model) -> Iterator[None]:
    """Treat inputs with a default as plain inputs: a caller may give another value."""
    with_default = [value for value in model.graph.inputs if value.is_initializer()]
    defaults = {value.name: value.const_value for value in with_default}
    for value in with_default:
        del model.graph.initializers[str(value.name)]
        value.const_value = None
    try:
        yield
    finally:
        for value in model.graph.inputs:
            if value.name in defaults:
                value.const_value = defaults[value.name]
                model.graph.register_initializer(value)


def prune(values: Iterable[ir.Value]) -> None:
    """Remove the producers of values that are no longer used, and in turn their producers."""
    pending = list(values)
    while pending:
        node = pending.pop().producer()
        if node is None or node.graph is None:
            continue
        if any(value.uses() or value.is_graph_output() for value in node.outputs):
            continue
        for graph in [g for top in subgraphs_of(node) for g in (top, *top.subgraphs())]:
            for inner in reversed(list(graph)):
                pending += present_inputs(inner)  # from outside, too
                detach([inner])
                graph.remove(inner)
        pending += present_inputs(node)
        node.graph.remove(node, safe=True)


def tidy(model: ir.Model) -> None:
    """Drop what nothing uses, import the domains that nodes use, and add missing names."""
    nodes = list(nodes_of(model.graph))
    nested = any(map(subgraphs_of, nodes))
    if nested:
        common.LiftSubgraphInitializersToMainGraphPass()(model)
    if nested or model.functions or any(map(_is_unused, nodes)):
        prune(value for node in reversed(nodes) for value in node.outputs)
        common.RemoveUnusedNodesPass()(model)
        nodes = list(nodes_of(model.graph))
    for name, value in list(model.graph.initializers.items()):
        if not (value.uses() or value.is_graph_output() or value.is_graph_input()):
            del model.graph.initializers[name]
    domains = {node.domain for node in nodes}
    for function in model.functions.values():
        domains.update(node.domain for node in function.all_nodes())
    imports = model.graph.opset_imports
    for domain in sorted(domains - set(imports)):
        imports[domain] = 1
    for domain in set(imports) - domains - {""}:
        del imports[domain]
    for number, node in enumerate((node for node in nodes if not node.name), 1):
        node.name = f"{node.op_type}_{number}"
    if nested:
        _name_apart(model)


def _is_unused(node: ir.Node) -> bool:
    """Whether a node has something to remove: an output without users, or no last input."""
    ends = bool(node.inputs) and node.inputs[-1] is None
    return ends or any(not (y.uses() or y.is_graph_output()) for y in node.outputs)


def _name_apart(model: ir.Model) -> None:
    """Rename values of subgraphs that are named like one outside, even one after their node."""
    for graph in model.graphs():
        inner = [value for part in graph.subgraphs() for value in all_values(part)]
        names = {value.name for value in all_values(graph)} if inner else set()
        taken = names.union(value.name for value in inner)
        for value in (value for value in inner if value.name and value.name in names):
            fresh = (f"{value.name}.{i}" for i in count(1))
            value.name = next(name for name in fresh if name not in taken)
            taken.add(value.name)


LENGTHS = "graphgen.lengths"
"""In a graph's `meta`, the names of sizes that are 1 or more whenever it runs."""


@uncollected
def infer_model(model: ir.Model) -> Any:
    """Infer types and shapes of every value; return the context with shape values."""
    least = dict.fromkeys(model.graph.meta.get(LENGTHS, ()), 1)
    context = _inferred(model, least, model.graph.meta.setdefault(SHOWN, {}))
    for _ in range(_MOST_AGAIN):  # a size is computed above what shows how small or which it is
        least = {s: n for s, n in context.least.items() if not context.is_made_up(s)}
        asked = any(least.get(size, bound - 1) >= bound for size, bound in context.asked.items())
        if not asked and context.names.keys().isdisjoint(context.shown):
            break
        context = _inferred(model, least, context.shown)
    return context


_MOST_AGAIN = 3
"""What one inference shows, the next may build on: how short a signal is, then half of it."""


def _inferred(
    model: ir.Model, least: dict[str, int], shown: dict[frozenset[str], frozenset[str]]
) -> FileSizes:
    context = new_context({DOMAIN: 1, "com.microsoft": 1, **model.graph.opset_imports})
    assert isinstance(context, FileSizes)
    context.graph, context.least, context.shown = model.graph, least, shown
    context.reserve_symbol_names(
        str(dim)
        for graph in model.graphs()
        for value in all_values(graph)
        for dim in value.shape or ()
    )
    if model.functions:
        infer_symbolic_shapes(model, warn_on_missing=False)
    _name_sizes(model.graph.inputs, context)
    infer_graph(model.graph, context)
    return context


def _name_sizes(inputs: Sequence[ir.Value], context: FileSizes) -> None:
    """Give each size of an input a name of its own, unless the file names it.

    `unk__0` is a name that a converter made up: tf2onnx and onnx's inference count them in each
    file, so that in a merged file two sizes may have one. These lose it.
    """
    names = [str(d) for x in inputs for d in x.shape or ()]
    twice = {name for name, n in Counter(names).items() if n > 1 and name.startswith("unk__")}
    for x in inputs:
        if x.shape is not None and not twice.isdisjoint(map(str, x.shape)):
            x.shape = ir.Shape([None if str(d) in twice else d for d in x.shape])
        context.name_anonymous_dims(x)


def splice(
    node: ir.Node,
    tape: Tape,
    results: Sequence[ir.Value | None],
    also: Sequence[ir.Value] = (),
) -> None:
    """Put a recording in place of a node; its results take over uses and names.

    There is one result for each used output, and None for an unused one; then those of values in
    `also`, which nodes before this one make. Their users are moved behind the recording.
    """
    graph = node.graph
    assert graph is not None and (also or not uses_outputs_beyond(node, len(results)))
    olds = [*node.outputs, *also]
    pairs = [(old, new) for old, new in zip(olds, results, strict=False) if new is not None]
    given = [new for _, new in pairs]
    for i, (old, new) in enumerate(pairs):
        producer = new.producer()
        outside = producer is None or producer.graph not in (None, graph)
        taken = outside or new.is_graph_output() or new in given[:i]
        if old.is_graph_output() and taken:
            # An output needs its own value: not an input, weight, outer value or other output.
            identity = identity_of(new)
            tape.nodes.append(identity)
            given[i] = identity.outputs[0]
    for new_node in tape.nodes:
        new_node.metadata_props.update(
            {k: v for k, v in node.metadata_props.items() if k not in new_node.metadata_props}
        )
    for heir in [n for n in tape.nodes if n.op_type == node.op_type and not n.name][-1:]:
        heir.name = node.name
    graph.insert_before(node, tape.nodes)
    register_constants(graph, tape.constants.values())
    tape.kept = True
    for (old, _), new in zip(pairs, given, strict=True):
        if new.type is None or new.shape is None:
            new.type, new.shape = new.type or old.type, new.shape or old.shape
        keep_name = old.is_graph_output() or new.producer() in tape.nodes
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        if keep_name:
            name, old.name = old.name, None
            new.name = name
    graph.remove(node, safe=True)
    if also:
        graph.sort()


def identity_of(value: ir.Value) -> ir.Node:
    """A node that gives a value a second name, in no graph yet."""
    node = ir.node("Identity", [value])
    node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
    return node


def rewire(node: ir.Node, tape: Tape, operands: Mapping[int, Any]) -> None:
    """Let a node read what was recorded in the place of some of its operands."""
    given = {i: tape.operand(x) for i, x in operands.items()}
    graph, old = node.graph, [node.inputs[i] for i in given]
    assert graph is not None
    graph.insert_before(node, tape.nodes)
    register_constants(graph, tape.constants.values())
    tape.kept = True
    for i, value in given.items():
        node.replace_input_with(i, value)
    prune(value for value in old if value is not None)


def constant_node(value: ir.Value) -> ir.Node:
    """A node that gives what a constant holds, in no graph yet."""
    node = ir.node("Constant", [], {"value": value.const_value})
    node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
    return node


def replace_composites(
    graph: ir.Graph, context: Any, replacement: Callable[[Op, ir.Node], list[Tensor | None] | None]
) -> None:
    """Put what `replacement` records in place of composites, and in turn of those inside it.

    It is called inside a recording with the operator and the node, and returns what `bodies` does,
    or None to keep the node.
    """
    pending = list(graph.all_nodes())
    while pending:
        node = pending.pop()
        op = find_op(node)
        if op is None or not op.composite:
            continue
        with recording(context=context) as tape:
            results = replacement(op, node)
            if results is not None:
                made = [None if y is None else tape.operand(y) for y in results]
                tape.trim([value for value in made if value is not None])
                splice(node, tape, made)
                pending += tape.nodes


def claim(graph: ir.Graph, named: Mapping[str, ir.Value]) -> None:
    """Give values their names; another value that a node calculates and names so is renamed.

    Raises GraphgenError for an input or a weight with such a name, by which users know it.
    """
    for other in all_values(graph):
        name = str(other.name)
        if named.get(name, other) is not other:
            if other.producer() is None:
                raise GraphgenError(
                    f"the model has an input or a weight {name!r}; training needs that name for "
                    "what it adds: rename it"
                )
            other.name = f"{name}_before"
    for name, value in named.items():
        value.name = name
