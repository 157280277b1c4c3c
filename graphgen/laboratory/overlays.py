"""Figures of nodes, by which a report's page colors them."""

import math
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress

import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.laboratory.page import Overlay
from graphgen.laboratory.placement import errors_by_node, profile
from graphgen.operands import Array
from graphgen.runtime import Provider
from graphgen.subgraphs import subgraphs_of

_OFF = {"graph_optimization_level": "DISABLE_ALL"}  # so the nodes that run are the graph's
_HOW = "medians of {} runs with the runtime's own optimizations off"


def overlays(
    graphs: Sequence[tuple[str, ir.Model]],
    feeds: Mapping[str, Array],
    *,
    provider: Provider | None = None,
    options: Mapping[str, str] | None = None,
    runs: int = 3,
    exact: bool = True,
    seconds: float = math.inf,
) -> dict[str, Overlay]:
    """The time of each node of each graph, and its error in the first and the last.

    All run with the runtime's optimizations off. The time of an If, Loop or Scan is without that of
    the nodes inside, so that times add up. Errors, if `exact`, are against the whole graph
    calculated in float64. A graph that no session loads has no times, and one with operators
    outside the table no errors. After `seconds`, only the first and the last graph are still timed.
    """
    times: dict[Hashable, dict[str, float]] = {}
    errors: list[dict[str, float]] = [{} for _ in graphs]
    keys = [tuple((n.name, n.op_type) for n in model.graph) for _, model in graphs]
    ends, end = {0, len(graphs) - 1} if graphs else set(), time.perf_counter() + seconds
    for i in (*ends, *range(len(graphs))):
        if keys[i] in times or (i not in ends and time.perf_counter() > end):
            continue  # most passes leave most graphs unchanged
        times[keys[i]], model = {}, graphs[i][1]
        with suppress(GraphgenError):
            settings = {**(options or {}), **_OFF}
            kernels = profile(model, feeds, runs=runs, options=settings, provider=provider)
            whole = {name: x.microseconds / 1e3 for name, x in kernels.items()}
            times[keys[i]] = whole | _own(model, whole)
    for i in ends if exact else ():
        with suppress(GraphgenError):
            errors[i] = errors_by_node(graphs[i][1], feeds)
    return {
        "time": Overlay("ms", [times.get(key, {}) for key in keys], note=_HOW.format(runs)),
        "error": Overlay("relative RMS", errors, "max"),
    }


def _own(model: ir.Model, times: Mapping[str, float]) -> dict[str, float]:
    """The time of each node with subgraphs, without that of their nodes."""
    own = {}
    for node in model.graph.all_nodes():
        inner = {str(x.name) for graph in subgraphs_of(node) for x in graph}
        if inner and (name := str(node.name)) in times:
            own[name] = max(0.0, times[name] - sum(times.get(x, 0.0) for x in inner))
    return own
