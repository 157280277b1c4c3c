"""How far positions of a sequence are from each other in a graph, and what cannot run at once.

Both are counted in matrix products, convolutions included: the sequential operations and the path
lengths of arXiv 1706.03762, section 4. A composite counts as one product, so build with
`primitives=True`.
"""

from collections.abc import Mapping
from typing import Any

import networkx as nx
import numpy as np
import onnx_ir as ir

from graphgen.edit import infer_model
from graphgen.graph import constant, is_float
from graphgen.laboratory.inspection import dependencies
from graphgen.measure.cost import flops
from graphgen.measure.reference import evaluate, evaluate_node
from graphgen.operands import Array


def sequential_products(model: ir.Model) -> int:
    """The length of the longest chain of matrix products that wait for each other."""
    return int(nx.dag_longest_path_length(dependencies(model.graph, _products(model))))


def path_lengths(model: ir.Model, feeds: Mapping[str, Array], *, axis: int = 1) -> Array:
    """The fewest matrix products between position i of the input and j of the output, float (n, m).

    The positions are those along `axis` of the only input and output; inf if there is no path.
    """
    graph, [x], [y] = by_element(model, feeds), model.graph.inputs, model.graph.outputs
    result = []
    for sources in _places(x, axis):
        graph.add_nodes_from(sources)  # some may reach nothing
        reached = nx.multi_source_dijkstra_path_length(graph, {*sources})
        result.append([min(reached.get(e, np.inf) for e in at) for at in _places(y, axis)])
    return np.array(result)


def by_element(model: ir.Model, feeds: Mapping[str, Array]) -> Any:
    """The graph by elements: an edge from every element of a value to each that depends on it.

    Dependence is not declared but observed: an element is set to NaN, and the node evaluated. So a
    weight of zero connects, and what a Where leaves out does not. Elements are (value, number); an
    edge weighs 1 through a matrix product, else 0. Values that do not depend on the float inputs
    (weights, masks, indices) have no edges. Each node runs once for each element that it reads.
    """
    values = [v for node in model.graph for v in node.outputs]
    known = dict(zip(values, evaluate(model, feeds, values=values), strict=True))
    known |= {v: np.asarray(feeds[str(v.name)]) for v in model.graph.inputs}
    result = nx.DiGraph()
    reached = {v for v in model.graph.inputs if is_float(v)}
    for node, weight in _products(model).items():
        arrays = [None if v is None else known.get(v, constant(v)) for v in node.inputs]
        for i, value in enumerate(node.inputs):
            if value is None or value not in reached:
                continue
            for place in range(known[value].size):
                probe = np.array(known[value], np.float64, order="C")
                probe.reshape(-1)[place] = np.nan
                given = [*arrays[:i], probe, *arrays[i + 1 :]]
                for to, y in zip(node.outputs, evaluate_node(node, given), strict=False):
                    seen = np.flatnonzero(np.isnan(y)).tolist() if is_float(to) else []
                    edges = [((value, place), (to, element)) for element in seen]
                    result.add_edges_from(edges, weight=weight)
                    reached.update([to] if seen else [])
    return result


def _products(model: ir.Model) -> dict[ir.Node, int]:
    """Which nodes are matrix products: 1, else 0."""
    context = infer_model(model)
    return {node: int(flops(node, context).products > 0) for node in list(model.graph)}


def _places(value: ir.Value, axis: int) -> list[list[tuple[ir.Value, int]]]:
    """The elements at each position."""
    assert value.shape is not None
    shape = value.shape.numpy()
    numbers = np.moveaxis(np.arange(np.prod(shape)).reshape(shape), axis, 0)
    return [[(value, int(e)) for e in at.ravel()] for at in numbers]
