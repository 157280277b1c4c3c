"""Scan over a step of the DSL, recurrent layers, and encoder-decoders made of them."""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from small_models import ROUNDING, relative_rms, run_plain, vary

import graphgen as gg
from graphgen import nn, ops
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.graph import count_operators
from graphgen.measure.reference import evaluate
from graphgen.models.recurrent import RecurrentSeq2Seq, Score
from graphgen.models.transformer import inputs

RNG = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return RNG.standard_normal(shape)


def decay(x: Any, h: Any, w: Any, *, reverse: bool = False) -> Any:
    """h[t] = tanh(x[t] + h[t - 1] w), and twice that as what each step gives."""

    def step(h: Any, x: Any) -> Any:
        h = ops.tanh(x + h @ w)
        return [h], [h * 2.0]

    [last], [ys] = ops.scan(step, [h], [x], axis=1, reverse=reverse)
    return {"last": last, "ys": ys}


ARRAYS = {"x": normal(2, 5, 3), "h": normal(2, 3), "w": normal(3, 3)}
SPECS = {"x": gg.float32["b", "t", 3], "h": gg.float32["b", 3], "w": gg.float32[3, 3]}


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_is_a_loop(reverse: bool) -> None:
    h, ys, order = ARRAYS["h"], [], range(5)[:: -1 if reverse else 1]
    for t in order:
        h = np.tanh(ARRAYS["x"][:, t] + h @ ARRAYS["w"])
        ys.append(2 * h)
    wanted = [h, np.stack(ys[:: -1 if reverse else 1], 1)]
    found = decay(**ARRAYS, reverse=reverse)
    model = gg.build(lambda **given: decay(**given, reverse=reverse), **SPECS)
    assert count_operators(model)["Scan"] == 1
    feeds = {name: x.astype(np.float32) for name, x in ARRAYS.items()}
    exact = evaluate(model, ARRAYS)
    for a, b, c, d in zip(wanted, found.values(), exact, run_plain(model, feeds), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-13)
        np.testing.assert_allclose(c, a, rtol=1e-13)
        assert relative_rms(a, d) < ROUNDING


def slope(function: Any, arrays: dict[str, Any], name: str, along: Any) -> float:
    """The central difference of a function of arrays, in float64."""
    step = 1e-6
    ends = (function(**{**arrays, name: arrays[name] + s * along}) for s in (step, -step))
    up, down = (float(np.asarray(y).reshape(())) for y in ends)
    return (up - down) / (2 * step)


def check_gradient(function: Any, arrays: dict[str, Any], specs: dict[str, Any]) -> None:
    """Of a scalar in every float input, in float64 and as the runtime computes it."""
    model = gg.grad(gg.build(function, **specs))
    names = [value.name for value in model.graph.outputs]
    exact = dict(zip(names, evaluate(model, arrays), strict=True))
    feeds = {n: x.astype(np.float32) if x.dtype == np.float64 else x for n, x in arrays.items()}
    found = dict(zip(names, run_plain(model, feeds), strict=True))
    for name in (n for n in arrays if f"{n}_grad" in names):
        along, gradient = normal(*arrays[name].shape), exact[f"{name}_grad"]
        wanted = slope(function, arrays, name, along)
        assert float((gradient * along).sum()) == pytest.approx(wanted, rel=1e-6, abs=1e-8)
        assert relative_rms(gradient, found[f"{name}_grad"]) < 2e-5


@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_go_through_time(reverse: bool) -> None:
    def loss(**given: Any) -> Any:
        found = decay(**given, reverse=reverse)
        weights = ops.cast_like(np.arange(5.0).reshape(1, 5, 1), found["ys"])
        return ops.reduce_sum(found["ys"] * found["ys"] * weights) + ops.reduce_sum(found["last"])

    check_gradient(loss, ARRAYS, {**SPECS, "x": gg.float32["b", 5, 3]})


def test_gradients_go_through_a_scan_in_a_scan_and_what_both_read() -> None:
    def loss(x: Any, w: Any) -> Any:  # (T, S, D), (D)
        def outer(total: Any, rows: Any) -> Any:
            def inner(h: Any, row: Any) -> Any:
                h = ops.sigmoid(h * w + row)
                return [h], [h]

            [last], [hs] = ops.scan(inner, [total], [rows])
            return [last * w], [ops.reduce_sum(hs, [0], keepdims=0)]

        first = ops.reduce_sum(x, [0, 1], keepdims=0) * 0.1
        [last], [ys] = ops.scan(outer, [first], [x])
        return ops.reduce_sum(ys * ys) + ops.reduce_sum(last)

    arrays = {"x": normal(3, 2, 4), "w": normal(4)}
    check_gradient(loss, arrays, {"x": gg.float32["t", "s", 4], "w": gg.float32[4]})


def test_a_state_that_is_no_float_and_one_that_nothing_reads() -> None:
    def loss(x: Any) -> Any:
        def step(count: Any, unused: Any, x: Any) -> Any:
            return [count + 1, unused * 2.0], [x * ops.cast_like(count, x)]

        first = [np.zeros((), np.int64), np.ones(2, np.float32)]
        _, [ys] = ops.scan(step, first, [x])
        return ops.reduce_sum(ys * ys)

    model = gg.grad(gg.build(loss, x=gg.float32["t", 2]))
    x = normal(4, 2).astype(np.float32)
    _, gradient = run_plain(model, {"x": x})
    np.testing.assert_allclose(gradient, 2 * x * np.arange(4)[:, None] ** 2, rtol=1e-6)


def test_bad_steps() -> None:
    x = np.ones((3, 2))
    with pytest.raises(GraphgenError, match="Scan: the step takes 1 states and gives 0"):
        ops.scan(lambda h, x: ([], [x]), [x[0]], [x])
    with pytest.raises(GraphgenError, match="Scan: there is nothing to step over"):
        ops.scan(lambda h: ([h], []), [x[0]], [])
    with pytest.raises(GraphgenError, match=r"Scan: the lengths are \[2, 3\]; wanted one"):
        ops.scan(lambda x, y: ([], [x]), [], [x, x[:2]])
    with pytest.raises(GraphgenError, match="the dimensions t and s differ"):
        gg.build(
            lambda x, y: ops.scan(lambda x, y: ([], [x]), [], [x, y])[1][0],
            x=gg.float32["t"],
            y=gg.float32["s"],
        )


class Layer(nn.Module):
    """A recurrent layer on rows of different length, y and its last states; or a scalar of all."""

    def __init__(self, kind: str, *, bidirectional: bool, total: bool = False):
        self.layer, self.total = nn.Recurrent(4, 6, kind=kind, bidirectional=bidirectional), total

    def __call__(self, x: Any, lengths: Any) -> Any:
        y, states = self.layer(x, lengths=lengths)
        if self.total:
            return ops.reduce_sum(y * y) + sum(ops.reduce_sum(state) for state in states)
        return {"y": y, **{f"state_{i}": state for i, state in enumerate(states)}}


LAYER = {"x": gg.float32["b", "t", 4], "lengths": gg.int32["b"]}


@pytest.mark.parametrize("kind", ["rnn", "lstm", "gru"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_layer_is_the_operator_and_a_scan(kind: str, bidirectional: bool) -> None:
    """And both are ONNX's reference, and one step after the other."""
    module = vary(Layer(kind, bidirectional=bidirectional))
    feeds = {
        "x": normal(3, 5, 4).astype(np.float32),
        "lengths": np.array([5, 1, 3], np.int32),
    }

    model, body = (gg.build(module, primitives=p, **LAYER) for p in (False, True))
    assert count_operators(model)[kind.upper()] == 1
    assert count_operators(body)["Scan"] == 1 + bidirectional
    wanted = evaluate(model, feeds)
    for found in (run_plain(model, feeds), run_plain(body, feeds), evaluate(body, feeds)):
        for a, b in zip(wanted, found, strict=True):
            assert relative_rms(a, b) < ROUNDING
    assert not wanted[0][1, 1:].any() and not wanted[0][2, 3:].any()
    if bidirectional:
        return
    states = [np.zeros((3, 6)) for _ in wanted[1:]]
    for t in range(5):
        states = module.layer.step(feeds["x"][:, t].astype(float), *states)
        np.testing.assert_allclose(states[0][0], wanted[0][0, t], rtol=1e-6)


def test_onnx_says_the_same_of_gru() -> None:
    names = {"x": (5, 3, 4), "w": (1, 18, 4), "r": (1, 18, 6), "b": (1, 36)}
    feeds = {name: normal(*shape).astype(np.float32) for name, shape in names.items()}
    for before in (0, 1):
        options = {"hidden_size": 6, "linear_before_reset": before}
        node = onnx.helper.make_node("GRU", list(names), ["y", "h"], **options)
        values = [onnx.helper.make_tensor_value_info(n, 1, s) for n, s in names.items()]
        outputs = [onnx.helper.make_tensor_value_info("h", 1, None)]
        graph = onnx.helper.make_graph([node], "one", values, outputs)
        [wanted] = ReferenceEvaluator(onnx.helper.make_model(graph)).run(None, feeds)
        found = ops.gru(*(x.astype(float) for x in feeds.values()), **options)[1]
        assert relative_rms(wanted, found) < ROUNDING


@pytest.mark.parametrize("kind", ["rnn", "lstm", "gru"])
def test_gradients_of_a_layer(kind: str) -> None:
    module = vary(Layer(kind, bidirectional=True, total=True))
    arrays = {"x": normal(2, 4, 4), "lengths": np.array([4, 2], np.int32)}
    check_gradient(module, arrays, LAYER)


SOURCE = np.array([[3, 4, 5, 6, 7], [5, 3, 4, 0, 0], [9, 0, 0, 0, 0]])
FEEDS = {
    "source_ids": SOURCE,
    "source_mask": (SOURCE > 0).astype(np.int64),
    "target_ids": np.array([[1, 2, 3, 4], [4, 3, 2, 1], [7, 8, 9, 1]]),
}


@pytest.mark.parametrize("score", get_args(Score))
def test_system_13_sees_no_future_and_no_padding(score: str) -> None:
    model = gg.optimize(gg.build(vary(RecurrentSeq2Seq(11, 8, score=score)), **inputs())).model
    [wanted] = run_plain(model, FEEDS)
    assert relative_rms(evaluate(model, FEEDS)[0], wanted) < ROUNDING
    padding = np.where(SOURCE > 0, SOURCE, 10)
    [found] = run_plain(model, {**FEEDS, "source_ids": padding})
    np.testing.assert_array_equal(found, wanted)
    later = FEEDS["target_ids"].copy()
    later[:, 2:] = 10
    [found] = run_plain(model, {**FEEDS, "target_ids": later})
    np.testing.assert_array_equal(found[:, :2], wanted[:, :2])
    assert np.abs(found[:, 2:] - wanted[:, 2:]).max() > 1e-3
    [found] = run_plain(model, {**FEEDS, "source_ids": SOURCE[:, ::-1].copy()})
    assert np.abs(found - wanted).max() > 1e-3


@pytest.mark.share(3)
@pytest.mark.parametrize("score", get_args(Score))
def test_system_13_trains(score: str, tmp_path: Path) -> None:
    model = gg.build(RecurrentSeq2Seq(11, 16, score=score), training=True, **inputs())
    gg.artifacts(model, tmp_path, loss="cross_entropy", optimizer=gg.AdamW(weight_decay=0.0))
    trainer = gg.Trainer(tmp_path, schedule=gg.schedule.constant(0.02))
    following = np.roll(FEEDS["target_ids"], -1, axis=1)
    following[:, -1] = -100
    batch = {**FEEDS, "labels": following}
    history = trainer.fit([batch] * 40, progress=False)
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]


def test_system_13_is_built_by_name(tmp_path: Path) -> None:
    for name in ("recurrent", "recurrent-additive", "recurrent-multiplicative"):
        file = tmp_path / f"{name}.onnx"
        sizes = ["--vocabulary", "11", "--features", "8", "--kind", "lstm"]
        assert main(["build", name, "-o", str(file), *sizes]) == 0
        assert gg.Session(file)(**FEEDS)[0].shape == (3, 4, 11)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: nn.Recurrent(4, 4, kind="elman"), "kind is 'elman'; choose 'rnn', 'lstm'"),
        (lambda: RecurrentSeq2Seq(9, 4, score="dot"), "score is 'dot'; choose 'none', 'add"),
        (lambda: nn.Recurrent(4, 0), "hidden"),
        (
            lambda: nn.Recurrent(4, 4, bidirectional=True).step(np.ones((1, 4)), np.ones((1, 4))),
            "two directions have no single order",
        ),
    ],
)
def test_bad_sizes(make: Any, told: str) -> None:
    with pytest.raises(GraphgenError, match=told):
        make()
