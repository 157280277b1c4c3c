"""Figures of nodes, for a report's page to colour them by."""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress

import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.export.page import Overlay
from graphgen.export.placement import errors_by_node, profile
from graphgen.op import Array

_OFF = {"graph_optimization_level": "DISABLE_ALL"}  # what runs has the nodes of the graph


def overlays(
    graphs: Sequence[tuple[str, ir.Model]],
    feeds: Mapping[str, Array],
    *,
    provider: str | None = None,
    runs: int = 3,
    exact: bool = True,
) -> dict[str, Overlay]:
    """The time of each node of each graph, and its error in the first and the last.

    All run with the runtime's optimisations off. Errors are against float64, in which the whole
    graph is calculated, if `exact`. A graph that no session loads has no times, and one with
    operators outside of the table no errors.
    """
    times: dict[Hashable, dict[str, float]] = {}
    errors: list[dict[str, float]] = [{} for _ in graphs]
    keys = [tuple((n.name, n.op_type) for n in model.graph) for _, model in graphs]
    for key, (_, model) in zip(keys, graphs, strict=True):
        if key not in times:  # most passes leave most graphs as they are
            times[key] = {}
            with suppress(GraphgenError):
                kernels = profile(model, feeds, runs=runs, options=_OFF, provider=provider)
                times[key] = {name: x.microseconds / 1e3 for name, x in kernels.items()}
    for i in {0, len(graphs) - 1} if exact and graphs else ():
        with suppress(GraphgenError):
            errors[i] = errors_by_node(graphs[i][1], feeds)
    return {
        "time": Overlay("ms", [times[key] for key in keys]),
        "error": Overlay("relative RMS", errors, "max"),
    }
