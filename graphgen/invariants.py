"""What holds for every model, before and after every pass."""

import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.graph import all_values


def verify(model: ir.Model, after: str = "") -> None:
    """Raise GraphgenError unless the graph is in order.

    Nodes stand after what they use; what a node makes has a name of its own; no value is used by
    a node outside of all graphs; outputs are made and have a type; every domain that is used is
    imported. Subgraphs are not looked into.
    """
    graph = model.graph
    told = f" after {after}" if after else ""
    known = {*graph.inputs, *graph.initializers.values()}
    names = {value.name for value in known}
    for node in graph:
        for value in node.inputs:
            if value is not None and value not in known:
                raise GraphgenError(f"{node.name}{told}: its input {value.name} is not made yet")
        for value in node.outputs:
            if not value.name or value.name in names:
                raise GraphgenError(f"{node.name}{told}: two values are called {value.name!r}")
            names.add(value.name)
        known.update(node.outputs)
        if node.domain not in graph.opset_imports:
            raise GraphgenError(f"{node.name}{told}: the domain {node.domain!r} is not imported")
    for value in all_values(graph):
        stray = [use.node for use in value.uses() if use.node.graph is None]
        if stray:
            raise GraphgenError(
                f"{value.name}{told}: used by {stray[0].op_type}, which is in no graph"
            )
    for value in graph.outputs:
        if value not in known or value.type is None:
            raise GraphgenError(f"output {value.name}{told}: it is not made, or has no type")
