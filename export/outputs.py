"""Outputs of a graph, written so that the runtime reads them as intended."""

import onnx_ir as ir

from graphgen import ops
from graphgen.edit import identity_of
from graphgen.op import is_a


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
