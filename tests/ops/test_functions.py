"""Functions that are written in operators: stack, one_hot, softcap, selective_scan."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from small_models import ROUNDING, relative_rms, run_plain

import graphgen as gg
from graphgen import nn, ops
from graphgen.errors import GraphgenError
from graphgen.measure.reference import evaluate
from graphgen.op import TABLE
from graphgen.targets import newest_opset

RNG = np.random.default_rng(20)


def normal(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_stack_is_that_of_numpy(axis: int) -> None:
    x, y = normal(2, 3), normal(2, 3)
    wanted = np.stack([x, y, x], axis)
    model = gg.build(lambda x, y: ops.stack([x, y, x], axis=axis), **dict.fromkeys("xy", X))
    for found in (ops.stack(x, y, x, axis=axis), run_plain(model, {"x": x, "y": y})[0]):
        np.testing.assert_array_equal(found, wanted)


X = gg.float32["b", "t"]
ROWS = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda x: ops.stack(),
            "stack: the operands are none; give one tensor or more, of one shape",
        ),
        (lambda x: ops.stack([x, 1.0]), r"stack: the operands are float.*\], 1\.0; give"),
        (
            lambda x: ops.stack(x, ROWS[0]),
            r"\], float32\[3\]; give one tensor or more, of one shape",
        ),
        (lambda x: ops.stack(ROWS, ROWS[:1]), r"are float32\[2, 3\], float32\[1, 3\]; give"),
        (lambda x: ops.one_hot(x, 3), r"one_hot: ids are float.*\[.*\]; ids must be integers"),
    ],
)
def test_what_does_not_fit_is_refused_at_its_line(call: Any, told: str) -> None:
    for run in (lambda: call(ROWS), lambda: gg.build(call, x=X)):
        with pytest.raises(gg.GraphgenError, match=told + r".*\(test_functions.py:\d+\)"):
            run()


def test_sizes_of_other_names_do_not_stack() -> None:
    with pytest.raises(gg.GraphgenError, match=r"t.*s.*test_functions.py"):
        gg.build(lambda x, y: ops.stack(x, y), x=X, y=gg.float32["b", "s"])


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_one_hot(dtype: Any) -> None:
    ids = np.array([[0, 2], [-1, 3], [1, 1]], dtype)  # two of them are none of the three
    wanted = (ids[..., None] == np.arange(3)).astype(np.float32)
    assert wanted.sum() == 4
    spec = gg.int64 if dtype == np.int64 else gg.int32
    model = gg.build(lambda ids: ops.one_hot(ids, 3), ids=spec["b", 2])
    assert [str(d) for d in model.graph.outputs[0].shape or ()] == ["b", "2", "3"]
    for found in (ops.one_hot(ids, 3), run_plain(model, {"ids": ids})[0]):
        np.testing.assert_array_equal(found, wanted)
        assert found.dtype == np.float32
    assert ops.one_hot(ids, 3, dtype=ir.DataType.INT64).dtype == np.int64


def test_one_hot_of_as_many_as_the_run_says() -> None:
    def call(ids: Any, x: Any) -> Any:
        return ops.one_hot(ids, ops.dim(x, 1)) @ ops.transpose(x, perm=[1, 0])

    model = gg.build(call, ids=gg.int64["n"], x=X)
    x, ids = normal(2, 5), np.array([4, 0, 2])
    np.testing.assert_array_equal(run_plain(model, {"ids": ids, "x": x})[0], x.T[ids])


def test_a_softcap_bounds_what_is_large_and_leaves_what_is_small() -> None:
    x = np.array([-1e9, -1e-3, 0.0, 1e-3, 1e9], np.float32)
    np.testing.assert_allclose(ops.softcap(x, 30.0), [-30, -1e-3, 0, 1e-3, 30], rtol=1e-6)


F, N = 4, 3
SCANNED = {
    "x": gg.float32["b", "t", F],
    "delta": gg.float32["b", "t", F],
    "a": gg.float32[F, N],
    "b": gg.float32["b", "t", N],
    "c": gg.float32["b", "t", N],
    "d": gg.float32[F],
}


def scanned(length: int, *, scale: float = 1.0) -> dict[str, Any]:
    feeds = {
        name: normal(*(2 if n == "b" else length if n == "t" else n for n in spec.shape))
        for name, spec in SCANNED.items()
    }
    return feeds | {"delta": np.abs(feeds["delta"]) * scale, "a": -np.abs(feeds["a"])}


@pytest.mark.parametrize(("length", "scale"), [(1, 1.0), (9, 1.0), (9, 1e3)])
def test_a_selective_scan_is_its_recurrence(length: int, scale: float) -> None:
    feeds = scanned(length, scale=scale)
    x, delta, a, b, c, d = (feeds[name].astype(np.float64) for name in SCANNED)
    wanted = np.zeros_like(x)
    for row, f in np.ndindex(2, F):
        h = np.zeros(N)
        for t in range(length):
            h = np.exp(delta[row, t, f] * a[f]) * h + delta[row, t, f] * b[row, t] * x[row, t, f]
            wanted[row, t, f] = c[row, t] @ h + d[f] * x[row, t, f]
    model = gg.build(ops.selective_scan, **SCANNED)
    assert [str(n) for n in model.graph.outputs[0].shape or ()] == ["b", "t", str(F)]
    best = gg.optimize(model, verify=True).model
    for y in (
        ops.selective_scan(*feeds.values()),
        *(run_plain(m, feeds)[0] for m in (model, best)),
    ):
        assert relative_rms(wanted, y) < ROUNDING


def test_gradients_of_a_selective_scan() -> None:
    """Along a random direction of each operand: the central difference."""

    def loss(**given: Any) -> Any:
        return ops.reduce_sum(ops.tanh(ops.selective_scan(**given)), None, keepdims=0)

    model, h = gg.build(loss, **SCANNED), 1e-6
    feeds = {name: x.astype(np.float64) for name, x in scanned(5).items()}
    _, *slopes = evaluate(gg.grad(model, wrt=[*SCANNED]), feeds)
    for (name, x), slope in zip(feeds.items(), slopes, strict=True):
        d = RNG.standard_normal(x.shape)
        up, down = (float(evaluate(model, feeds | {name: x + s * h * d})[0]) for s in (1, -1))
        size = np.abs(slope * d).sum()
        assert size and abs((slope * d).sum() - (up - down) / (2 * h)) < 1e-6 * size, name


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"a": gg.float32[N]}, r"selective_scan: a is float\[3\]; it must be \(F, N\)"),
        ({"b": gg.float32["b", "t", F]}, r"b is float\[b, t, 4\]; it must be \(B, T, 3\)"),
        ({"x": gg.float32["b", F]}, r"x is float\[b, 4\]; it must be \(B, T, 4\), since a is"),
        ({"d": gg.float32[1, 1, F]}, r"d is float\[1, 1, 4\]; it must be \(4\)"),
        ({"c": gg.float32["b", "s", N]}, "the dimensions t and s differ"),
        ({"delta": gg.float32["b", 1, F]}, "the dimensions 1 and t differ"),
    ],
)
def test_what_a_selective_scan_refuses(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(gg.GraphgenError, match=told):
        gg.build(ops.selective_scan, **SCANNED | wrong)


def test_ids_of_few_bits_are_hot_at_their_place_alone() -> None:
    ids = np.array([0, 255], np.uint8)
    wanted = np.zeros((2, 600), np.float32)
    wanted[[0, 1], ids] = 1
    np.testing.assert_array_equal(ops.one_hot(ids, 600), wanted)
    model = gg.build(lambda x: ops.one_hot(x.astype("uint8"), 600), x=gg.int64["n"])
    np.testing.assert_array_equal(run_plain(model, {"x": ids.astype(np.int64)})[0], wanted)


def test_a_scan_counts_its_axis_from_the_end_too() -> None:
    def running(x: Any) -> Any:
        _, [y] = ops.scan(lambda h, part: ([h + part], [h + part]), [x[:, 0] * 0], [x], axis=-1)
        return y

    x = np.random.default_rng(0).standard_normal((3, 5), np.float32)
    [got] = run_plain(gg.build(running, x=gg.float32["b", 5]), {"x": x})
    np.testing.assert_allclose(got, np.cumsum(x, -1), rtol=1e-6)
    np.testing.assert_array_equal(got, running(x))
    with pytest.raises(GraphgenError, match=r"Scan: axis 2 does not exist in 2.*test_functions.py"):
        gg.build(
            lambda x: ops.scan(lambda h, p: ([h], [p]), [x], [x], axis=2)[1][0], x=gg.float32[3, 5]
        )


def test_running_sums_of_nothing_and_errors_of_several_outputs() -> None:
    none = np.zeros((2, 0), np.float32)
    assert ops.cumsum(none, 1, exclusive=1).shape == (2, 0)
    with pytest.raises(GraphgenError, match=r"TopK\(float\[3\], int64\[1\]\): index 3 is out of"):
        ops.top_k(np.float32([3, 1, 2]), [5])


@pytest.mark.parametrize("size", [2, 3])
def test_a_scale_over_two_axes_is_compared_from_the_last(size: int) -> None:
    norm = TABLE["", "LayerNormalization"]
    scale = np.ones(size, np.float32)
    if size == 2:
        assert gg.build(lambda x: norm(x, scale, axis=-2), x=gg.float32[4, 3, 2])
    else:
        with pytest.raises(GraphgenError, match="must match the normalized dimensions"):
            gg.build(lambda x: norm(x, scale, axis=-2), x=gg.float32[4, 3, 2])


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda x: ops.attention(x, x, x, causal=1), "did you mean"),
        (lambda x: ops.reshape(x, size=[1]), "did you mean 'sizes'"),
        (lambda x: ops.rotate(x, x, x, heads=1), "num_heads"),
        (lambda x: ops.stack(x, dim=0), "its arguments are xs, axis"),
        (lambda x: nn.CrossAttentionLayer(8, num_heads=2, causal=True), "argument 'causal'"),
        (lambda x: nn.DecoderLayer(8, num_heads=2, causal=True), "argument 'causal'"),
        (lambda x: nn.Encoder(8, layers=1, num_head=2), "did you mean 'num_heads'"),
    ],
)
def test_arguments_that_do_not_fit_are_named(call: Any, told: str) -> None:
    with pytest.raises(GraphgenError, match=f"{told}.*test_functions.py"):
        call(np.ones((1, 2, 2, 8), np.float32))


@pytest.mark.skipif(newest_opset() < 26, reason="the runtime has no CumProd")
def test_an_operator_newer_than_the_opset_raises_that_of_its_file(tmp_path: Path) -> None:
    """Where there is no kernel, as in the official runtime, its body stands there."""
    x = np.array([[2.0, -1.0, 0.0, 3.0]], np.float32)
    model = gg.build(lambda x: ops.cumprod(x, 1), x=gg.float32["n", 4])
    file = onnx.load(gg.export(model, tmp_path / "m.onnx"))
    assert file.opset_import[0].version == 26
    for target in ("cpu", "official"):
        best = gg.optimize(model, target=target)
        assert ("CumProd" in best.report.ops_after) == (target == "cpu")
        np.testing.assert_array_equal(gg.Session(best, threads=1)(x=x)[0], [[2, -2, 0, 0]])
    with pytest.raises(GraphgenError, match="CumProd: axis must be known before the run"):
        gg.build(ops.cumprod, x=gg.float32["n", 4], axis=gg.int64[()])

    class Model(nn.Module):
        def __init__(self) -> None:
            self.linear = nn.Linear(4, 4)

        def __call__(self, x: Any) -> Any:
            return {"logits": ops.tensor_scatter(x, ops.cumprod(self.linear(x), 2), axis=1)}

    trained = gg.build(Model(), seed=0, x=gg.float32["n", 3, 4])
    batch = {"x": np.ones((2, 3, 4), np.float32), "labels": np.array([[0, 1, 2], [3, 0, 1]])}
    losses = []
    for profile in ("stock", "official"):
        gg.artifacts(trained, tmp_path / profile, profile=profile)
        trainer = gg.Trainer(tmp_path / profile, threads=1)
        losses.append([one["loss"] for one in trainer.fit([batch] * 3, progress=False)])
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert losses[0][0] > losses[0][-1]


@pytest.mark.parametrize(("size", "told"), [(2, "2 x 3 has no inverse"), ("n", "n and 3 differ")])
def test_a_matrix_that_is_not_square_has_no_inverse(size: int | str, told: str) -> None:
    """The runtime ends the process where it gets one."""
    with pytest.raises(GraphgenError, match=told):
        gg.build(ops.inverse, x=gg.float32["b", size, 3])


def test_sites_with_matrices_of_an_open_side_are_verified_where_they_are_square(
    tmp_path: Path,
) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
    main (float[b, 4, k] x) => (float[b, 4, 4] y) {
      turned = com.microsoft.Inverse (x)
      scores = MatMul (turned, x)
      weights = Softmax (scores)
      y = MatMul (weights, turned)
    }"""
    onnx.save(onnx.parser.parse_model(text), path := tmp_path / "model.onnx")
    best = gg.optimize(gg.load(path), target="cpu", verify=True)
    assert best.report.ops_after["Attention"] == 1


def test_a_singular_matrix_has_no_inverse_and_the_others_have() -> None:
    x = np.stack([np.zeros((2, 2)), np.diag([2.0, 4.0])]).astype(np.float32)
    y = ops.inverse(x)
    assert not np.isfinite(y[0]).any() and np.array_equal(y[1], np.diag([0.5, 0.25]))
