"""Outputs of a graph, written so that the runtime reads them as intended."""

import onnx_ir as ir

from graphgen import ops
from graphgen.edit import identity_of
from graphgen.infer import is_named
from graphgen.op import is_a

SIGNATURE = "graphgen.signature"
"""In a graph's meta: the shapes that its file declares for its outputs, by name."""


def behind_identity(graph: ir.Graph, index: int) -> None:
    """Let an Identity make an output of the graph and take over its name."""
    value = graph.outputs[index]
    graph.append(identity_of(value))
    [output] = graph[-1].outputs
    output.name = value.name
    value.name = f"{value.name}_value"
    graph.outputs[index] = output


def shield_outputs(graph: ir.Graph) -> None:
    """Keep the runtime's own passes from removing an output.

    They merge a Gemm and the transposes of its operands into one operator, even if an operand is
    also an output of the graph, and then cannot find that output.
    """
    for i, value in enumerate(graph.outputs):
        node, users = value.producer(), {use.node for use in value.uses()}
        if node is not None and is_a(node, ops.transpose) and any(is_a(n, ops.gemm) for n in users):
            behind_identity(graph, i)


def omitted_outputs(model: ir.Model) -> list[ir.Value]:
    """The outputs of nodes that a file omits: with a name, the runtime would compute them."""
    made = (value for node in model.graph.all_nodes() for value in node.outputs)
    return [value for value in made if value.name == "" and not value.uses()]


def declared_shapes(graph: ir.Graph) -> dict[ir.Value, ir.Shape]:
    """The shapes of outputs with the sizes that the file declared, where inference shows none.

    Clients read them. The runtime does not enforce them, so nothing is folded by them; as it infers
    others from them, a result that the graph itself reads keeps only what is shown.
    """
    given, result = graph.meta.get(SIGNATURE, {}), {}
    for value in graph.outputs:
        declared, shape = given.get(value.name), value.shape
        if declared is None or value.uses():
            continue
        if shape is None:  # an operator of no inference: of trees, of a domain of the user's
            result[value] = declared
        elif len(declared) == len(shape):
            dims = [d if is_named(d) else old for d, old in zip(shape, declared, strict=True)]
            if dims != list(shape):
                result[value] = ir.Shape(dims)
    return result
