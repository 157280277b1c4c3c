"""What sessions run, against the graph that they save; errors of nodes, against numpy."""

import time
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from small_models import ROUNDING, relative_rms, vary

import graphgen as gg
from graphgen.laboratory.placement import Kernel, Placement, errors_by_node, placement, profile
from graphgen.measure.reference import evaluate

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
RNG = np.random.default_rng(0)
LEVELS = ("DISABLE_ALL", "ENABLE_BASIC", "ENABLE_ALL")
CPU = "CPUExecutionProvider"


@pytest.mark.parametrize("level", LEVELS)
def test_nodes_are_those_of_the_graph_that_the_session_saves(level, tmp_path):
    path, feeds = FIXTURES / "bert_torchscript_eager_14.onnx", np.load(FIXTURES / "bert.npz")
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{level}")
    options.optimized_model_filepath = str(tmp_path / "runs.onnx")
    options.log_severity_level = 4
    session = ort.InferenceSession(path, options, providers=[CPU])
    saved = [n for n in onnx.load(tmp_path / "runs.onnx").graph.node if n.op_type != "Constant"]

    given = {value.name: feeds[value.name] for value in session.get_inputs()}
    found = profile(
        path, given, runs=2, options={"graph_optimization_level": level}, provider="cpu"
    )
    assert Counter(kernel.op_type for kernel in found.values()) == Counter(n.op_type for n in saved)
    assert {n.name for n in saved if n.name} <= set(found)
    assert placement(found.values()) == Placement({CPU: len(saved)}, 0)
    assert all(kernel.microseconds >= 0 for kernel in found.values())


def test_one_run_that_was_disturbed_does_not_count(monkeypatch):
    """The median of runs; what a node takes in a loop is a sum. The first run warms up."""
    told = {"cat": "Node", "name": "a_kernel_time", "args": {"op_name": "Add", "provider": CPU}}
    taken = [(9, 9), (1, 2), (2, 2), (700, 1), (1, 1), (2, 3)]
    events = [{"cat": "Session", "name": "model_run", "ts": 1e3 * i, "dur": 999} for i in range(6)]
    events += [
        {**told, "ts": 1e3 * i + j, "dur": dur}
        for i, run in enumerate(taken)
        for j, dur in enumerate(run)
    ]

    class Fake:
        def __init__(self, *_, **__):
            self.end_profiling = lambda: events

        def __call__(self, feeds):
            return []

    monkeypatch.setitem(profile.__globals__, "Session", Fake)
    assert profile(b"", {}, runs=5) == {"a": Kernel("Add", CPU, 4)}


def test_times_are_those_of_one_run():
    """A product of 1 GFLOP takes most of a run, and not more than the run."""
    weight = RNG.standard_normal((1024, 1024), np.float32)
    model = gg.build(lambda x: gg.ops.exp(x) @ weight, x=gg.float32[512, 1024])
    x = np.zeros((512, 1024), np.float32)
    found = profile(model, {"x": x}, runs=5, provider="cpu")
    assert [kernel.op_type for kernel in found.values()] == ["Exp", "MatMul"]
    session = gg.Session(model, provider="cpu")
    times = []
    for _ in range(7):
        start = time.perf_counter()
        session(x=x)
        times.append((time.perf_counter() - start) * 1e6)
    exp, product = (kernel.microseconds for kernel in found.values())
    assert product > exp and min(times) / 4 < exp + product < 4 * max(times)


def test_copies_between_devices_are_counted():
    kernels = [
        Kernel("MemcpyFromHost", "CUDAExecutionProvider", 3.0),
        Kernel("MatMul", "CUDAExecutionProvider", 9.0),
        Kernel("Shape", CPU, 1.0),
    ]
    assert placement(kernels) == Placement({"CUDAExecutionProvider": 2, CPU: 1}, 1)


def test_a_branch_not_taken_is_missing_and_a_loop_is_summed():
    text = """<ir_version: 10, opset_import: ["" : 20]> graph (float[3] x, bool c) => (float[3] y)
    <int64 n = {7}> {
      [cond] e = If (c) <then_branch = a () => (float[3] p) { [yes] p = Abs(x) },
                         else_branch = b () => (float[3] q) { [no] q = Neg(x) }>
      [loop] y = Loop (n, c, e) <body = d (int64 i, bool k, float[3] s) => (bool l, float[3] t)
                         { [keep] l = Identity(k) [grow] t = Exp(s) }>
    }"""
    data = onnx.parser.parse_model(text).SerializeToString()
    feeds = {"x": np.zeros(3, np.float32), "c": np.array(True)}
    plain = {"graph_optimization_level": "DISABLE_ALL"}
    found = profile(data, feeds, options=plain, provider="cpu")
    assert {name: kernel.op_type for name, kernel in found.items() if name != "keep"} == {
        "cond": "If", "yes": "Abs", "loop": "Loop", "grow": "Exp"
    }  # fmt: skip


def test_errors_grow_where_digits_are_lost():
    x = RNG.standard_normal((40, 30)).astype(np.float32)

    def function(x):
        return gg.ops.exp((x + 1e4) - 1e4)

    model = gg.build(function, x=gg.float32[40, 30])
    lost = (x + np.float32(1e4)) - np.float32(1e4)
    narrow, exact = [x + np.float32(1e4), lost, np.exp(lost)], x.astype(np.float64)
    wide = [exact + 1e4, exact, np.exp(exact)]
    found = errors_by_node(model, {"x": x})
    assert [*found] == [node.name for node in model.graph]
    wanted = [relative_rms(w, n) for w, n in zip(wide, narrow, strict=True)]
    np.testing.assert_allclose([*found.values()], wanted, rtol=1e-3)
    added, subtracted, _ = found.values()
    assert subtracted > 1e3 * added


def test_errors_of_a_model_end_with_that_of_its_output():
    encoder = vary(gg.nn.Encoder(32, layers=1, num_heads=4))
    model = gg.build(encoder, primitives=True, x=gg.float32["batch", "seq", 32])
    feeds = {"x": RNG.standard_normal((2, 5, 32)).astype(np.float32)}
    found = errors_by_node(model, feeds)
    (exact,), (got,) = evaluate(model, feeds), gg.Session(model, optimize=False)(feeds)
    assert set(found) == {node.name for node in model.graph}
    assert found[model.graph.outputs[0].producer().name] == pytest.approx(relative_rms(exact, got))
    assert all(error < ROUNDING for error in found.values())


def test_an_imprecise_kernel_shows_at_its_node():
    """The variance of numbers near 1e6 has no digits in float32."""
    model = gg.build(lambda x: gg.ops.layer_norm(x, np.ones(8, np.float32)), x=gg.float32[4, 8])
    x = (1e6 + RNG.standard_normal((4, 8))).astype(np.float32)
    (error,) = errors_by_node(model, {"x": x}).values()
    assert error > 1e-3


def test_an_operator_without_meaning_is_named():
    model = gg.build(lambda x: x + 1.0, x=gg.float32[3])
    other = ir.node("Unheard", [model.graph[0].outputs[0]], domain="elsewhere", name="last")
    other.outputs[0].type, other.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([3])
    model.graph.append(other)
    model.graph.outputs[0] = other.outputs[0]
    with pytest.raises(gg.GraphgenError, match="last: Unheard is not in the operator table"):
        errors_by_node(model, {"x": np.ones(3, np.float32)})
