"""Random calculations with sizes: what is inferred and folded holds for every binding.

GRAPHS=2000 (`make fuzz`) draws new ones instead of the same.
"""

import os
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import onnx_ir as ir
from hypothesis import HealthCheck, Phase, given, note, settings, strategies
from random_sizes import Drawn, drawn, feeds_of
from test_sizes import run, wrong

import graphgen as gg
from graphgen.edit import infer_model
from graphgen.export.write import to_bytes

GRAPHS = int(os.environ.get("GRAPHS", "60"))


def test_sizes_that_are_calculated_hold(tmp_path: Path) -> None:
    told: Counter[str] = Counter()

    @settings(
        max_examples=GRAPHS,
        deadline=None,
        database=None,
        derandomize="GRAPHS" not in os.environ,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, *([Phase.shrink] if "GRAPHS" in os.environ else [])],
    )
    @given(strategies.integers(0, 2**32))
    def draw(seed: int) -> None:
        graph = drawn(Random(seed), run)
        note("\n".join(graph.nodes))
        check(graph, tmp_path / "graph.onnx", told)

    draw()
    print(", ".join(f"{n} {what}" for what, n in told.most_common()))
    assert told["nodes"] > 8 * told["graphs"] and told["nodes after"] < 0.9 * told["nodes"]


def check(graph: Drawn, path: Path, told: Counter[str]) -> None:
    """Compare what is inferred with what is, and the optimized graph with the graph."""
    proto = graph.parsed(graph.nodes, alone=False)
    model = ir.from_proto(proto)
    context = infer_model(model)
    for sizes, values in zip(graph.bindings, graph.values, strict=True):
        found = list(wrong(model, context, values, sizes))
        assert not found, f"{sizes}: {found}"
    read = {name for node in proto.graph.node for name in node.input}
    last = [y for y in proto.graph.output if y.name not in read]
    del proto.graph.output[:]
    proto.graph.output.extend(last)
    path.write_bytes(proto.SerializeToString())
    best = gg.optimize(gg.load(path))
    data = to_bytes(best)
    for sizes, values in zip(graph.bindings, graph.values, strict=True):
        for name, y in run(data, feeds_of(sizes)).items():
            was = values[name]
            assert y.dtype == was.dtype and y.shape == was.shape, (sizes, name, y.shape, was.shape)
            assert np.array_equal(y, was), (sizes, name)
    told.update(
        {"graphs": 1, "nodes": len(graph.nodes), "nodes after": best.model.graph.num_nodes()}
    )
