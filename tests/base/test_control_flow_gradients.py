"""Gradients through If, Loop and Scan, against central differences and in the runtime."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from small_models import run_plain
from test_autodiff import check, normal, total

import graphgen as gg
from graphgen import ops
from graphgen.autodiff import grad
from graphgen.errors import GraphgenError
from graphgen.graph import constant, parameters
from graphgen.measure.reference import evaluate
from graphgen.operands import Array


def model_of(text: str, path: Path) -> ir.Model:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 22]> {text}')
    (path / "m.onnx").write_bytes(proto.SerializeToString())
    return gg.load(path / "m.onnx")


def check_both(model: ir.Model, feeds: dict[str, Array], wrt: list[str]) -> None:
    """Against differences in float64, and in the runtime against that."""
    result = check(model, feeds, wrt)
    narrow = {n: x.astype(np.float32) if x.dtype == np.float64 else x for n, x in feeds.items()}
    for got, want in zip(run_plain(result, narrow), evaluate(result, feeds), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


BRANCHES = """
graph (float[n, 3] x, float[3] w, float[3] v, bool c) => (float loss) {
    scaled = Mul (x, w)
    y, same = If (c) <
        then_branch = one () => (float[n, 3] p, float[n, 3] q) {
            t = Mul (scaled, x)
            p = Sin (t)
            q = Identity (p)
        },
        else_branch = other () => (float[n, 3] r, float[k, 3] s) {
            r = Mul (scaled, v)
            s = Identity (x)
        }
    >
    z = Mul (y, same)
    loss = ReduceSum <keepdims: int = 0> (z)
}"""


@pytest.mark.parametrize("chosen", [True, False])
def test_only_what_the_branch_that_ran_reads_has_a_gradient(chosen: bool, tmp_path: Path) -> None:
    model = model_of(BRANCHES, tmp_path)
    feeds = {"x": normal(2, 3), "w": normal(3), "v": normal(3), "c": np.array(chosen)}
    check_both(model, feeds, ["x", "w", "v"])
    assert np.any(evaluate(grad(model, wrt=["v"]), feeds)[1]) != chosen


def test_a_condition_that_is_computed_from_what_is_trained() -> None:
    def function(x: Any, w: Any) -> Any:
        y = x * w
        (z,) = ops.cond(total(y) > 0.0, lambda: [ops.exp(y)], lambda: [y * y * w])
        return total(z)

    model = gg.build(function, x=gg.float32["n", 3], w=gg.float32[3])
    for sign in (1, -1):
        check_both(model, {"x": np.abs(normal(2, 3)), "w": sign * np.abs(normal(3))}, ["x", "w"])


STEPS = """
graph (float[m, 3] x, float[3] w, float[3] s, int64 n, float limit) => (float loss) {
    yes = Constant <value = bool {1}> ()
    last, ys = Loop (n, yes, s) <
        body = step (int64 i, bool go, float[3] h) => (bool on, float[3] after, float[3] y) {
            part = Gather <axis: int = 0> (x, i)
            gated = Mul (h, w)
            sum = Add (gated, part)
            after = Tanh (sum)
            y = Mul (after, h)
            size = ReduceL1 <keepdims: int = 0> (after)
            on = Less (size, limit)
        }
    >
    squares = Mul (last, last)
    all = ReduceSum <keepdims: int = 0> (ys)
    rest = ReduceSum <keepdims: int = 0> (squares)
    loss = Add (all, rest)
}"""


@pytest.mark.parametrize(("n", "limit"), [(4, 100.0), (1, 100.0), (4, 0.0), (0, 100.0)])
def test_a_loop_of_so_many_steps_or_until_a_condition(n: int, limit: float, tmp_path: Path) -> None:
    feeds = {"x": normal(4, 3), "w": normal(3), "s": normal(3)}
    feeds |= {"n": np.array(n), "limit": np.array(limit)}
    model = model_of(STEPS, tmp_path)
    check_both(model, feeds, ["x", "w", "s"])
    if n == 0:
        _, dx, _, ds = evaluate(grad(model, wrt=["x", "w", "s"]), feeds)
        assert not dx.any()
        np.testing.assert_allclose(ds, 2 * feeds["s"])


def test_a_branch_in_a_loop_in_a_branch(tmp_path: Path) -> None:
    text = """
    graph (float[3] x, float[3] w, bool c, int64 n) => (float loss) {
        y = If (c) <
            then_branch = one () => (float[3] last) {
                yes = Constant <value = bool {1}> ()
                two = Constant <value = int64 {2}> ()
                last = Loop (n, yes, x) <
                    body = step (int64 i, bool go, float[3] h) => (bool on, float[3] after) {
                        early = Less (i, two)
                        after = If (early) <
                            then_branch = a () => (float[3] p) { q = Mul (h, w) p = Sin (q) },
                            else_branch = b () => (float[3] r) { r = Mul (h, x) }
                        >
                        on = Identity (go)
                    }
                >
            },
            else_branch = other () => (float[3] r) { r = Exp (w) }
        >
        loss = ReduceSum <keepdims: int = 0> (y)
    }"""
    model = model_of(text, tmp_path)
    for chosen in (True, False):
        feeds = {"x": normal(3), "w": normal(3), "c": np.array(chosen), "n": np.array(4)}
        check_both(model, feeds, ["x", "w"])


def test_steps_that_also_read_what_is_scanned_from_outside() -> None:
    """Both ways count: as the step's part of it, and as a whole."""

    def function(x: Any, s: Any) -> Any:
        def step(h: Any, part: Any) -> Any:
            after = (h + part) * ops.reduce_mean(x, [0], keepdims=0) * s
            return [after], [h * part]

        [last], [ys] = ops.scan(step, [s], [x])
        return total(last * last) + total(ys)

    model = gg.build(function, x=gg.float32["n", 3], s=gg.float32[3])
    check_both(model, {"x": normal(4, 3), "s": normal(3)}, ["x", "s"])


def test_gradients_of_a_gradient_through_a_loop(tmp_path: Path) -> None:
    text = """
    graph (float[3] x, int64 n) => (float loss) {
        yes = Constant <value = bool {1}> ()
        last = Loop (n, yes, x) <
            body = step (int64 i, bool go, float[3] h) => (bool on, float[3] after) {
                after = Mul (h, h)
                on = Identity (go)
            }
        >
        loss = ReduceSum <keepdims: int = 0> (last)
    }"""
    first = grad(model_of(text, tmp_path))
    node = ir.node("ReduceSum", [first.graph.outputs[1]], attributes={"keepdims": 0})
    first.graph.append(node)
    node.outputs[0].name, node.outputs[0].shape = "slope", ir.Shape([])
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    first.graph.outputs[:] = node.outputs
    x = np.abs(normal(3))
    got = run_plain(grad(first), {"x": x.astype(np.float32), "n": np.array(2)})[1]
    np.testing.assert_allclose(got, 12 * x**2, rtol=1e-5)  # (x⁴)″


def test_training_through_a_branch_and_a_loop(tmp_path: Path) -> None:
    class Model(gg.nn.Module):
        def __init__(self) -> None:
            self.a, self.b = gg.nn.Linear(3, 3), gg.nn.Linear(3, 3)

        def __call__(self, x: Any) -> Any:
            return ops.cond(total(x) > 0.0, lambda: [self.a(x)], lambda: [self.b(x)])[0]

    model = gg.build(Model(), x=gg.float32["n", 3])
    before = {name: constant(value) for name, value in parameters(model.graph).items()}
    gg.artifacts(model, tmp_path / "art", loss="mse", optimizer=gg.SGD())
    trainer = gg.Trainer(tmp_path / "art", schedule=gg.schedule.constant(0.1))
    batch = {"x": np.ones((2, 3), np.float32), "labels": np.ones((2, 3), np.float32)}
    losses = [entry["loss"] for entry in trainer.fit([batch] * 5, progress=False)]
    assert losses[-1] < losses[0] / 2
    changed = {n for n, old in before.items() if np.any(trainer.parameters[n] != old)}
    assert changed == {"a.weight", "a.bias"}


REFUSED = {
    "grows": (
        """last = Loop (n, yes, x) <
            body = step (int64 i, bool go, float[k] h) => (bool on, float[j] after) {
                after = Concat <axis: int = 0> (h, w)
                on = Identity (go)
            }
        >""",
        r"gradient: Loop \(.*\) changes its state h from float\[(.*)\] to float\[\1 \+ 3\]; a",
    ),
    "sequence": (
        """none = SequenceConstruct (x)
        many = Loop (n, yes, none) <
            body = step (int64 i, bool go, seq(float[3]) h) => (bool on, seq(float[3]) after) {
                y = Mul (x, w)
                after = SequenceInsert (h, y)
                on = Identity (go)
            }
        >
        last = ConcatFromSequence <axis: int = 0> (many)""",
        "gradient: ",
    ),
    "random": (
        """last = If (yes2) <
            then_branch = one () => (float[3] p) {
                u = RandomUniformLike (x)
                p = Mul (x, u)
            },
            else_branch = other () => (float[3] r) { r = Mul (x, w) }
        >""",
        r"gradient: RandomUniformLike \(.*\) draws random numbers in If \(.*\), which the way back",
    ),
}


@pytest.mark.parametrize(("nodes", "told"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_wrong_is_refused(nodes: str, told: str, tmp_path: Path) -> None:
    text = f"""
    graph (float[3] x, float[3] w, int64 n, bool yes2) => (float loss) {{
        yes = Constant <value = bool {{1}}> ()
        {nodes}
        loss = ReduceSum <keepdims: int = 0> (last)
    }}"""
    with pytest.raises(GraphgenError, match=told):
        grad(model_of(text, tmp_path), wrt=["x"])
