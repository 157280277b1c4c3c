"""What is true of every model, before and after every pass."""

import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.graph import all_values
from graphgen.maps import MAPS
from graphgen.subgraphs import subgraphs_of


def verify(model: ir.Model, after: str = "") -> None:
    """Raise GraphgenError unless the graph is in order.

    Nodes come after what they use; every result of a node has its own name; no value is used by
    a node that is in no graph; outputs are made and have a type; every domain that is used is
    imported. A subgraph may use what comes before its node, but not return it.
    """
    _verify(model.graph, set(), model.graph.opset_imports, f" after {after}" if after else "")


def _verify(graph: ir.Graph, outside: set[ir.Value], imports: dict[str, int], when: str) -> None:
    inside = {*graph.inputs, *graph.initializers.values()}
    names = {value.name for value in inside}
    known = outside | inside
    for node in graph:
        for value in node.inputs:
            if value is not None and value not in known:
                raise GraphgenError(f"{node.name}{when}: its input {value.name} is not made yet")
        for value in node.outputs:
            if value.name == "" and not value.uses():
                continue  # an output that is left out
            if not value.name or value.name in names:
                raise GraphgenError(f"{node.name}{when}: two values are called {value.name!r}")
            names.add(value.name)
        for subgraph in subgraphs_of(node):
            _verify(subgraph, known, imports, when)
        known.update(node.outputs)
        if node.domain not in imports:
            raise GraphgenError(f"{node.name}{when}: the domain {node.domain!r} is not imported")
    for value in all_values(graph):
        stray = [use.node for use in value.uses() if use.node.graph is None]
        if stray:
            raise GraphgenError(
                f"{value.name}{when}: used by {stray[0].op_type}, which is in no graph"
            )
    made, maps = known - outside, graph.meta.get(MAPS, {})
    for value in graph.outputs:
        typed = value.type is not None or value.name in maps
        if value not in made or not (typed or outside):
            raise GraphgenError(f"output {value.name}{when}: it is not made, or has no type")
