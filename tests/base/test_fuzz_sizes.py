"""Random calculations with sizes: what is inferred and folded holds for every binding.

GRAPHS=2000 (`make fuzz`) draws new ones instead of the same.
"""

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx_ir as ir
from fuzzing import NEW, count, examples
from hypothesis import given, note, strategies
from random_sizes import BINDINGS, EMPTY, Drawn, drawn, feeds_of
from sizes import Case
from test_sizes import feeds_of as feeds_of_case, parsed, run, wrong

import graphgen as gg
from graphgen.edit import infer_model
from graphgen.export.write import to_bytes

GRAPHS = count(20)


def test_sizes_that_are_calculated_hold(tmp_path: Path) -> None:
    told: Counter[str] = Counter()

    @examples(GRAPHS)
    @given(strategies.integers(0, 2**32))
    def draw(seed: int) -> None:
        graph = drawn(Random(seed), run)
        note("\n".join(graph.nodes))
        check(graph, tmp_path / "graph.onnx", told)

    draw()
    print(", ".join(f"{n} {what}" for what, n in told.most_common()))
    assert told["nodes"] > 8 * told["graphs"] and told["nodes after"] < 0.9 * told["nodes"]


def test_a_reshape_holds_where_a_size_is_0(tmp_path: Path) -> None:
    """A size of 0 that is computed keeps that of x there: (n, 4) as (-1, n) is (0, 4)."""
    random, graphs, runs = Random(None if NEW else 0), 0, 0
    sizes = ("N", "M", "NM", "#[-1]", "#[0]", "#[1]", "#[2]", "#[4]")
    while graphs < GRAPHS:
        x = ", ".join(random.choices("nm41", k=random.randint(1, 3)))
        t = ", ".join(random.choices(sizes, k=random.randint(1, 3)))
        nodes = "s = Shape (z) N = Gather (s, #[0]) M = Gather (s, #[1]) NM = Mul (N, M)"
        nodes += f"t = Concat <axis = 0> ({t}) r = Reshape (x, t) y = Shape (r)"
        proto = parsed(Case(f"float[{x}] x, float[n, m] z", "", nodes))
        data = proto.SerializeToString()
        found = [_shapes_of(data, proto, b) for b in (*BINDINGS, *EMPTY)]
        if None in found[: len(BINDINGS)] or {"n", "m"}.isdisjoint(x.split(", ")):
            continue
        model, graphs = ir.from_proto(proto), graphs + 1
        context = infer_model(model)
        del proto.graph.output[:-1]
        (tmp_path / "graph.onnx").write_bytes(proto.SerializeToString())
        best = to_bytes(gg.optimize(gg.load(tmp_path / "graph.onnx")))
        for binding, values in zip((*BINDINGS, *EMPTY), found, strict=True):
            if values is not None:
                assert not (bad := list(wrong(model, context, values, binding))), (x, t, bad)
                [y] = run(best, feeds_of_case(proto, binding, {})).values()
                assert np.array_equal(y, values["y"]), (x, t, binding, y, values["y"])
                runs += 0 in binding.values()
    assert runs > graphs / 4


def _shapes_of(data: bytes, proto: Any, sizes: dict[str, int]) -> Any:
    try:
        return run(data, feeds_of_case(proto, sizes, {}))
    except Exception:  # the runtime's: a reshape to another number of elements
        return None


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
