"""Node by node: what a session runs, where and for how long, and how far off each result is."""

import warnings
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import onnx_ir as ir

from graphgen.errors import GraphgenWarning
from graphgen.export.session import Session
from graphgen.graph import is_float
from graphgen.measure.accuracy import differ
from graphgen.measure.cost import used_outputs
from graphgen.measure.reference import evaluate
from graphgen.operands import Array
from graphgen.runtime import QUIET, Provider

_TIME = "_kernel_time"


class Kernel(NamedTuple):
    """A node as the runtime runs it; microseconds are of the median run, on CUDA of the launch."""

    op_type: str
    provider: str
    microseconds: float


class Placement(NamedTuple):
    """How many nodes run on each provider, and how many of them copy between devices."""

    providers: dict[str, int]
    memcpy: int


def profile(
    model: ir.Model | Path | bytes,
    feeds: Mapping[str, Array],
    *,
    runs: int = 5,
    options: Mapping[str, str] | None = None,
    provider: Provider | None = None,
) -> dict[str, Kernel]:
    """The nodes that run, by name, in the order in which they begin.

    They belong to the graph that the session makes of the model. A branch not taken is missing, and
    nodes with the same name, which subgraphs may have, are one. The first run is a warm-up. Timing
    itself takes time, so sums say less than differences between nodes.
    """
    with TemporaryDirectory() as folder:
        session = Session(model, provider=provider, options=options, profile=f"{folder}/run")
        for _ in range(runs + 1):
            session(feeds)
        return _kernels(session.end_profiling(), runs)


def tried(
    path: Path, feeds: Sequence[Mapping[str, Array]], outputs: Sequence[str], provider: Provider
) -> tuple[list[list[Array]], str, Placement]:
    """The results of a file for each of `feeds`, the provider's name there, and the placement."""
    with TemporaryDirectory() as folder:
        with warnings.catch_warnings(action="ignore", category=GraphgenWarning):  # it is told
            session = Session(
                path, provider=provider, options=QUIET, outputs=outputs, profile=f"{folder}/run"
            )
        results = [session(arrays) for arrays in feeds]
        kernels = _kernels(session.end_profiling(), len(feeds) - 1)
    return results, session.plan.providers[0], placement(kernels.values())


def _kernels(events: Sequence[Mapping[str, Any]], runs: int) -> dict[str, Kernel]:
    ends = sorted(e["ts"] + e["dur"] for e in events if e["name"] == "model_run")
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0] * (runs + 1))
    found: dict[str, dict[str, Any]] = {}
    for event in sorted(events, key=lambda e: float(e["ts"])):
        if event["cat"] == "Node" and event["name"].endswith(_TIME):
            name = event["name"].removesuffix(_TIME)
            spent[name][bisect_right(ends, event["ts"])] += event["dur"]
            found.setdefault(name, event["args"])
    return {
        name: Kernel(fields["op_name"], fields["provider"], median(spent[name][1:] or [0.0]))
        for name, fields in found.items()
    }


def placement(kernels: Iterable[Kernel]) -> Placement:
    """Where the nodes run that `profile` returned."""
    kernels = list(kernels)
    memcpy = sum(kernel.op_type.startswith("Memcpy") for kernel in kernels)
    return Placement(dict(Counter(kernel.provider for kernel in kernels)), memcpy)


def errors_by_node(model: ir.Model, feeds: Mapping[str, Array]) -> dict[str, float]:
    """The relative RMS error of each node's floats against float64, by the node's name.

    It runs on the CPU with the runtime's optimizations off and all values as outputs: all are held
    at once, in float64 too. Errors include everything up to the node, and are the largest of its
    outputs. Raises GraphgenError for an operator that has no meaning in the table.
    """
    model = model.clone()
    made = [(n, v) for n in model.graph for v in used_outputs(n) if is_float(v)]
    model.graph.outputs[:] = [value for _, value in made]
    exact = evaluate(model, feeds, values=model.graph.outputs)
    got = Session(model, provider="cpu", optimize=False)(feeds)
    errors: dict[str, float] = {}
    for (node, _), wanted, given in zip(made, exact, got, strict=True):
        error = differ([wanted], [given]).rel_rms
        errors[str(node.name)] = max(error, errors.get(str(node.name), 0.0))
    return errors
