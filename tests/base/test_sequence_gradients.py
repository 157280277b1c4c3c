"""Gradients where an exporter wrote sequences: parts of a tensor, and what a loop collects."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from small_models import run_plain
from test_autodiff import normal
from test_control_flow_gradients import model_of

from graphgen.autodiff import grad
from graphgen.graph import count_operators
from graphgen.measure.reference import evaluate
from graphgen.operands import Array


def check(model: ir.Model, feeds: dict[str, Array]) -> None:
    """Against a difference of the loss that stands beside the gradient, and that of the file."""
    names = [name for name in feeds if feeds[name].dtype == np.float64]
    result = grad(model, wrt=names)
    narrow = {n: x.astype(np.float32) if n in names else x for n, x in feeds.items()}
    loss, *gradients = evaluate(result, feeds)
    assert run_plain(model, narrow)[0] == pytest.approx(loss, rel=1e-5)
    for got, want in zip(run_plain(result, narrow), (loss, *gradients), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    for name, gradient in zip(names, gradients, strict=True):
        way = normal(*feeds[name].shape)
        up, down = (
            evaluate(result, {**feeds, name: feeds[name] + s * way})[0] for s in (1e-6, -1e-6)
        )
        assert (gradient * way).sum() == pytest.approx((up - down) / 2e-6, rel=1e-6, abs=1e-8)


PARTS = {
    "equal": "many = SplitToSequence <axis: int = 1> (x, two) y = SequenceAt (many, last)",
    "uneven": "many = SplitToSequence <axis: int = 1> (x, both) y = SequenceAt (many, last)",
    "single": "many = SplitToSequence <axis: int = 0> (x) y = SequenceAt (many, one)",
    "dropped": "many = SplitToSequence <keepdims: int = 0> (x) y = SequenceAt (many, one)",
    "made": "z = Exp (x) many = SequenceConstruct (x, z) y = SequenceAt (many, last)",
    "joined": "z = Exp (x) many = SequenceConstruct (x, z) "
    "y = ConcatFromSequence <axis: int = 1, new_axis: int = 1> (many)",
}


@pytest.mark.parametrize("nodes", PARTS.values(), ids=PARTS)
def test_parts_of_a_sequence(nodes: str, tmp_path: Path) -> None:
    text = f"""
    graph (float[2, 3] x) => (float loss)
    <int64 one = {{1}}, int64 two = {{2}}, int64 last = {{-1}}, int64[2] both = {{1, 2}}> {{
        {nodes}
        s = Sin (y)
        loss = ReduceSum <keepdims: int = 0> (s)
    }}"""
    check(model_of(text, tmp_path), {"x": normal(2, 3)})


@pytest.mark.parametrize("join", ["axis: int = 1", "axis: int = 1, new_axis: int = 1", ""])
def test_what_a_loop_collects(join: str, tmp_path: Path) -> None:
    read = f"ConcatFromSequence <{join}> (many)" if join else "SequenceAt (many, one)"
    text = f"""
    graph (float[2, 3] x, float[3] w, int64 n) => (float loss) <int64 one = {{1}}> {{
        yes = Constant <value = bool {{1}}> ()
        none = SequenceEmpty ()
        last, many = Loop (n, yes, x, none) <
            body = step (int64 i, bool go, float[2, 3] h, seq(float[2, 3]) s)
                => (bool on, float[2, 3] after, seq(float[2, 3]) t) {{
                after = Mul (h, w)
                y = Sin (after)
                t = SequenceInsert (s, y)
                on = Identity (go)
            }}
        >
        all = {read}
        e = Exp (all)
        a = ReduceSum <keepdims: int = 0> (e)
        b = ReduceSum <keepdims: int = 0> (last)
        loss = Add (a, b)
    }}"""
    model = model_of(text, tmp_path)
    check(model, {"x": normal(2, 3), "w": normal(3), "n": np.array(3)})
    assert "SequenceEmpty" not in count_operators(grad(model, wrt=["x"]))
