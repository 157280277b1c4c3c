"""Types and shapes of whole graphs, and what their nodes and those nodes' subgraphs read."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

from graphgen.infer import infer, is_known
from graphgen.traits import Trait, has


def infer_graph(graph: ir.Graph, context: ShapeInferenceContext) -> None:
    """Infer the types and shapes of every value that nodes make, in subgraphs too.

    The runtime does not enforce what a file declares about them. So declared types are kept only if
    inference finds none, and the rank only for results of an operator that nobody knows.
    """
    for node in graph:
        declared = [(value.type, value.shape) for value in node.outputs]
        for value in node.outputs:
            value.type = value.shape = None
            if not has(node, Trait.CONSTANT):  # inference found it for another size
                value.const_value = None
                context._symbolic_values.pop(value, None)
        if not has(node, Trait.CONTROL_FLOW):
            for inner in subgraphs_of(node):  # nothing is known about their inputs
                for given in inner.inputs:
                    given.shape = numbers_of(given.shape, context)
                infer_graph(inner, context)
        infer(node, context)
        for value, (type_, shape) in zip(node.outputs, declared, strict=True):
            value.type = value.type or type_
            if value.shape is None and shape is not None and not is_known(node, context):
                value.shape = ir.Shape([context.new_symbolic_dim() for _ in shape])


def numbers_of(shape: ir.Shape | None, context: ShapeInferenceContext) -> ir.Shape | None:
    """The shape with new symbols instead of its own."""
    if shape is None:
        return None
    return ir.Shape([d if isinstance(d, int) else context.new_symbolic_dim() for d in shape])


def subgraphs_of(node: ir.Node) -> list[ir.Graph]:
    """The graphs that a node has as attributes, in the order of their names."""
    if not node.attributes.data:
        return []
    return [graph for _, graph in sorted(_held(node), key=lambda held: held[0])]


def nodes_of(graph: ir.Graph) -> Iterator[ir.Node]:
    """Every node, with those of its subgraphs behind it: as `graph.all_nodes()`, but faster."""
    for node in graph:
        yield node
        if node.attributes.data:
            for _, inner in _held(node):
                yield from nodes_of(inner)


def _held(node: ir.Node) -> Iterator[tuple[str, ir.Graph]]:
    """The graphs that a node has as attributes, each with the attribute's name."""
    for name, attribute in node.attributes.data.items():  # without the slow checks around it
        if attribute.type is ir.AttributeType.GRAPH:
            yield name, attribute.as_graph()
        elif attribute.type is ir.AttributeType.GRAPHS:
            yield from ((name, graph) for graph in attribute.as_graphs())


def content(model: ir.Model) -> list[object]:
    """All that a model computes with, to compare with what it was before a pass on it."""
    found: list[object] = [*model.functions.values(), *model.graph.opset_imports.items()]
    found += [(name, value.const_value) for name, value in model.graph.initializers.items()]
    for graph in model.graphs():
        found += [value.name for value in graph.outputs]
        for node in graph:
            inputs = [value and value.name for value in node.inputs]
            outputs = [value.name for value in node.outputs]
            found += [node.op_identifier(), inputs, outputs, *node.attributes.data.values()]
    return found


def read_by(node: ir.Node) -> Iterator[ir.Value]:
    """What a node reads; the bodies of an If, Loop or Scan also read values from outside."""
    inside = [g for top in subgraphs_of(node) for g in (top, *top.subgraphs())]
    nodes = [node, *(inner for graph in inside for inner in graph)]
    return (v for n in nodes for v in n.inputs if v is not None and v.graph not in inside)


def reads(graph: ir.Graph) -> dict[ir.Node, set[ir.Value]]:
    """What each node reads."""
    return {node: set(read_by(node)) for node in graph}


def ancestors(
    value: ir.Value,
    read: Mapping[ir.Node, Iterable[ir.Value]],
    follow: Callable[[ir.Value], bool] = lambda _: True,
) -> set[ir.Node]:
    """The node that makes `value`, and the makers of what they `read`, if `follow` accepts it."""
    found: set[ir.Node] = set()
    pending = [value]
    while pending:
        node = pending.pop().producer()
        if node is not None and node not in found:
            found.add(node)
            pending += filter(follow, read[node])
    return found


def detach(nodes: Sequence[ir.Node]) -> None:
    """Clear the inputs of dropped nodes, which would otherwise count as uses forever."""
    for node in reversed(nodes):
        for body in subgraphs_of(node):
            detach(list(body))
        for i in range(len(node.inputs)):
            node.replace_input_with(i, None)
