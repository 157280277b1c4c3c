"""Sums in one operator with what follows: where they pay, where not, and what looks alike."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from small_models import ROUNDING, relative_rms, run_plain, vary

import graphgen as gg
from graphgen import nn, ops
from graphgen.graph import count_operators
from graphgen.match import Site
from graphgen.measure.reference import evaluate
from graphgen.passes import Optimized, optimize
from graphgen.targets.kernels import measured

X = gg.float32["batch", "seq", 16]
GAIN, SHIFT = np.linspace(0.5, 2, 16, dtype=np.float32), np.linspace(-1, 1, 16, dtype=np.float32)
MATRIX = np.random.default_rng(1).standard_normal((16, 16), np.float32)
SUMS = ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "BiasGelu")
FUSED = (*SUMS, "Gemm", "EmbedLayerNormalization")


def sums(best: Optimized) -> list[Site]:
    return next(p for p in best.report.passes if p.name == "fuse_sums").sites


@pytest.fixture
def winning(monkeypatch: Any) -> None:
    """Figures by which they pay; of all else, the committed ones (conftest.py says of which)."""
    ratios = measured()["avx512"]["float"]["ratios"]
    row = {"instead_of": "its body", "128": 0.5}
    table = {"avx512": {"float": {"ratios": ratios | dict.fromkeys(FUSED, row)}}}
    monkeypatch.setattr("graphgen.targets.kernels.measured", lambda: table)


# Not exp: where it is nearly 1, the variance that the fused kernel computes as a difference of two
# means has so few digits that verification leaves the site as it was.
BODIES: dict[str, Callable[[Any], Any]] = {
    "SkipLayerNormalization": lambda x: ops.layer_norm(x + ops.tanh(x), GAIN, SHIFT, epsilon=1e-6),
    "SkipSimplifiedLayerNormalization": lambda x: ops.rms_norm(x + ops.tanh(x), GAIN, epsilon=1e-3),
    "BiasGelu": lambda x: ops.gelu(SHIFT + ops.tanh(x)),
}


@pytest.mark.parametrize("primitives", [True, False])
@pytest.mark.parametrize("name", BODIES)
def test_where_it_pays_it_is_emitted(name: str, primitives: bool, winning: None) -> None:
    model = gg.build(BODIES[name], primitives=primitives, x=X)
    best = optimize(model, verify=True)
    assert count_operators(best.model) == {"Tanh": 1, f"com.microsoft::{name}": 1}
    assert [(s.status, s.reason) for s in sums(best)] == [("fired", name)]
    x = np.random.default_rng(0).standard_normal((3, 5, 16), np.float32)
    (wanted,), (given,) = run_plain(model, {"x": x}), run_plain(best.model, {"x": x})
    assert relative_rms(wanted, given) < ROUNDING
    assert relative_rms(evaluate(model, {"x": x})[0], given) < ROUNDING
    assert relative_rms(wanted, evaluate(best.model, {"x": x})[0]) < ROUNDING


@pytest.mark.parametrize("name", BODIES)
def test_where_it_does_not_it_is_refused_with_the_figures(name: str) -> None:
    model = gg.build(BODIES[name], x=X)
    best = optimize(model)
    body = {"Gelu": "Gelu", "Skip": "LayerNormalization"}.get(name[-4:], "LayerNormalization")
    body = "RMSNormalization" if "Simplified" in name else body
    [site] = sums(best)
    assert (site.status, site.reason.partition(":")[0]) == (
        "refused",
        f"{name} takes longer than Add + {body}",
    )
    assert "x at 2,048 rows, measured by bench/pays.py on avx" in site.reason
    [site] = sums(optimize(model, target="cuda"))
    assert (site.status, site.reason) == ("fired", name)


def test_without_a_kernel_it_is_refused(winning: None) -> None:
    wide = SHIFT.astype(np.float64)
    [site] = sums(optimize(gg.build(lambda x: ops.gelu(x + wide), x=gg.float64["b", "s", 16])))
    assert (site.status, "has no BiasGelu for T=double" in site.reason) == ("refused", True)


NORMS = [
    lambda x: ops.layer_norm(x, GAIN, SHIFT, epsilon=1e-3),
    lambda x: ops.layer_norm(x, GAIN, epsilon=1e-3),
    lambda x: ops.rms_norm(x, GAIN, epsilon=1e-3),
]


@pytest.mark.parametrize("norm", NORMS)
def test_a_sum_that_others_read_is_an_output_of_the_operator(
    norm: Callable[[Any], Any], winning: None
) -> None:
    def pre_norm(x: Any) -> Any:
        total = x + ops.tanh(x)
        again = total + ops.sin(norm(total))
        return again, again * norm(again), norm(total + 1)

    model = gg.build(pre_norm, x=X)
    best = optimize(model, verify=True)
    found = [s.reason for s in sums(best) if s.status == "fired"]
    name = "SkipSimplifiedLayerNormalization" if norm is NORMS[2] else "SkipLayerNormalization"
    assert found == [f"{name} with its sum", f"{name}, its norm"] * 2
    left = count_operators(best.model)
    assert left[f"com.microsoft::{name}"] == 2
    assert (
        left["Add"] == left["RMSNormalization" if norm is NORMS[2] else "LayerNormalization"] == 1
    )
    x = 4 * np.random.default_rng(0).standard_normal((3, 5, 16), np.float32)
    for wanted, given, exact in zip(
        run_plain(model, {"x": x}),
        run_plain(best.model, {"x": x}),
        evaluate(model, {"x": x}),
        strict=True,
    ):
        assert relative_rms(wanted, given) < ROUNDING
        assert relative_rms(exact, given) < ROUNDING


@pytest.mark.parametrize(
    "other",
    [
        lambda x: ops.layer_norm(x, GAIN + 1, SHIFT, epsilon=1e-3),
        lambda x: ops.layer_norm(x, GAIN, SHIFT + 1, epsilon=1e-3),
        lambda x: ops.layer_norm(x, GAIN, SHIFT, epsilon=1e-2),
        lambda x: ops.rms_norm(x, GAIN, epsilon=1e-3),
    ],
)
def test_of_two_norms_of_one_sum_one_stays(other: Callable[[Any], Any], winning: None) -> None:
    def parallel(x: Any) -> Any:
        total = x + ops.tanh(x)
        return NORMS[0](total), other(total)

    model = gg.build(parallel, x=X)
    best = optimize(model)
    left = count_operators(best.model)
    assert sum(n for name, n in left.items() if "Skip" in name) == 1
    assert sum(left.get(name, 0) for name in ("LayerNormalization", "RMSNormalization")) == 1
    x = np.random.default_rng(0).standard_normal((3, 5, 16), np.float32)
    for wanted, given in zip(
        run_plain(model, {"x": x}), run_plain(best.model, {"x": x}), strict=True
    ):
        assert relative_rms(wanted, given) < ROUNDING


def test_a_decoder_of_norms_before_its_blocks_has_them_with_their_sums(winning: None) -> None:
    module = vary(nn.Encoder(16, layers=3, num_heads=4, placement="pre"))
    model = gg.build(module, x=X)
    best = optimize(model, verify=True)
    left = count_operators(best.model)
    # Of the six norms of its layers and the last, the first has no sum before it.
    assert (left["com.microsoft::SkipLayerNormalization"], left["LayerNormalization"]) == (6, 1)
    x = np.random.default_rng(0).standard_normal((2, 5, 16), np.float32)
    (wanted,), (given,) = run_plain(model, {"x": x}), run_plain(best.model, {"x": x})
    assert relative_rms(wanted, given) < 2 * ROUNDING


def test_a_sum_that_others_read_stays_where_that_does_not_pay() -> None:
    module = vary(nn.Encoder(16, layers=1, num_heads=4, placement="pre"))
    best = optimize(gg.build(module, x=X))
    reasons = [s.reason for s in sums(best) if "SkipLayer" in s.reason]
    assert len(reasons) == 2
    assert all(r.startswith("SkipLayerNormalization takes longer than Add + ") for r in reasons)


@pytest.mark.parametrize(
    "body",
    [
        lambda x, t: (t, ops.layer_norm(t, ops.reduce_mean(t, [0, 1]), SHIFT)),  # a gain made later
        lambda x, t: (t, ops.layer_norm(ops.tanh(t), GAIN, SHIFT)),
        lambda x, t: (t, ops.layer_norm(t[:, :1] + x, GAIN, SHIFT)),
    ],
)
def test_another_sum_that_others_read_stays(body: Callable[..., Any], winning: None) -> None:
    best = optimize(gg.build(lambda x: body(x, x + ops.tanh(x)), x=gg.float32["batch", 5, 16]))
    assert not [name for name in count_operators(best.model) if "Skip" in name]


@pytest.mark.parametrize(
    "body",
    [
        lambda x: ops.layer_norm(x + SHIFT, GAIN, SHIFT),
        lambda x: ops.layer_norm(ops.exp(x), GAIN, SHIFT),
        lambda x: ops.layer_norm(ops.reshape(x + ops.exp(x), [0, 0, 4, 4]), GAIN[:4], SHIFT[:4]),
        lambda x: ops.layer_norm(ops.unsqueeze(x + ops.exp(x), [0]), GAIN, SHIFT),
        lambda x: ops.gelu(x + ops.exp(x)),
        lambda x: ops.gelu(x + np.ones(1, np.float32)),
        lambda x: ops.gelu(x + SHIFT, approximate="tanh"),
        lambda x: ops.silu(x + SHIFT),
        lambda x: ops.gelu(x - ops.exp(x)),
    ],
)
def test_look_alikes_are_left_alone(body: Callable[[Any], Any], winning: None) -> None:
    best = optimize(gg.build(body, x=X))
    assert sums(best) == []
    assert not {f"com.microsoft::{name}" for name in SUMS} & set(count_operators(best.model))


@pytest.mark.parametrize("primitives", [True, False])
@pytest.mark.parametrize(
    ("shape", "body"),
    [
        (("batch", "seq", 16), lambda x: x @ MATRIX + SHIFT),
        (("rows", 16), lambda x: SHIFT + x @ MATRIX),
        ((2, 3, 5, 16), lambda x: x @ MATRIX + SHIFT),
    ],
)
def test_a_product_and_its_bias(
    shape: Any, body: Callable[[Any], Any], primitives: bool, winning: None
) -> None:
    model = gg.build(body, primitives=primitives, x=gg.float32[shape])
    best = optimize(model, verify=True)
    assert [(s.status, s.reason) for s in sums(best)] == [("fired", "Gemm")]
    assert "MatMul" not in count_operators(best.model)
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 16), np.float32)
    x = x.reshape(-1, 5, 16) if len(shape) == 3 else x.reshape(-1, 16) if len(shape) == 2 else x
    (wanted,), (given,) = run_plain(model, {"x": x}), run_plain(best.model, {"x": x})
    assert relative_rms(wanted, given) < ROUNDING
    for axis in (i for i, size in enumerate(shape[:-1]) if isinstance(size, str)):
        empty = {"x": np.take(x, [], axis)}
        assert run_plain(best.model, empty)[0].shape == empty["x"].shape


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x @ MATRIX + np.ones((5, 16), np.float32),
        lambda x: x @ MATRIX + np.float32(1),
        lambda x: x @ np.ones((2, 16, 16), np.float32) + SHIFT,
        lambda x: x @ SHIFT + SHIFT[:5],
        lambda x: x @ MATRIX - SHIFT,
    ],
)
def test_other_products_and_sums_stay(body: Callable[[Any], Any], winning: None) -> None:
    best = optimize(gg.build(body, x=gg.float32[2, 5, 16]))
    assert (sums(best), "Gemm" in count_operators(best.model)) == ([], False)


WORDS, PLACES, KINDS = (MATRIX * n for n in (1, 2, 3))
EMBEDDINGS: dict[str, Callable[..., Any]] = {
    "one row for each": lambda w, at, kind: w + PLACES[:5],
    "positions first": lambda w, at, kind: ops.unsqueeze(PLACES[:5], [0]) + w,
    "positions looked up": lambda w, at, kind: w + at,
    "with kinds": lambda w, at, kind: w + kind + PLACES[:5],
    "kinds last": lambda w, at, kind: PLACES[:5] + w + kind,
    "everything looked up": lambda w, at, kind: kind + (at + w),
    "computed positions": lambda w, at, kind: (
        w + ops.sinusoidal_positions(np.arange(5, dtype=np.float32), features=16)
    ),
}


def embedded(total: Callable[..., Any]) -> ir.Model:
    def body(ids: Any, at: Any) -> Any:
        looked_up = [ops.embedding(t, i) for t, i in ((WORDS, ids), (PLACES, at), (KINDS, ids))]
        return ops.layer_norm(total(*looked_up), GAIN, SHIFT, epsilon=1e-6)

    return gg.build(body, primitives=True, ids=gg.int64["batch", 5], at=gg.int64["batch", 5])


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings_and_their_norm(name: str, winning: None) -> None:
    model = embedded(EMBEDDINGS[name])
    best = optimize(model, verify=True)
    assert [(s.status, s.reason) for s in sums(best)] == [("fired", "EmbedLayerNormalization")]
    rng = np.random.default_rng(0)
    feeds = {name: rng.integers(0, 16, (3, 5)) for name in ("ids", "at")}
    (wanted,), (given,) = run_plain(model, feeds), run_plain(best.model, feeds)
    assert relative_rms(wanted, given) < ROUNDING
    assert relative_rms(wanted, evaluate(best.model, feeds)[0]) < ROUNDING


@pytest.mark.parametrize(
    "total",
    [
        lambda w, at, kind: w,
        lambda w, at, kind: w + at + kind + PLACES[:5],
        lambda w, at, kind: w + SHIFT,
        lambda w, at, kind: w + ops.tanh(at) + PLACES[:5],
        lambda w, at, kind: w - PLACES[:5],
    ],
)
def test_other_sums_of_embeddings_stay(total: Callable[..., Any], winning: None) -> None:
    counts = count_operators(optimize(embedded(total)).model)
    assert "com.microsoft::EmbedLayerNormalization" not in counts


def test_an_encoder_where_everything_pays(winning: None) -> None:
    module = vary(nn.Encoder(16, layers=2, num_heads=4, placement="post"))
    model = gg.build(module, primitives=True, x=X)
    best = optimize(model, verify=True, expect={"attention": 2, "layer_norm": 4, "gelu": 2})
    counts = count_operators(best.model)
    assert (counts["com.microsoft::SkipLayerNormalization"], counts["com.microsoft::BiasGelu"]) == (
        4,
        2,
    )
    x = np.random.default_rng(0).standard_normal((2, 5, 16), np.float32)
    (wanted,), (given,) = run_plain(model, {"x": x}), run_plain(best.model, {"x": x})
    assert relative_rms(wanted, given) < ROUNDING


@pytest.mark.parametrize("verify", [False, True])
def test_a_foreign_sum_and_norm_come_apart_where_that_is_faster(verify: bool) -> None:
    """With the sum as well: it is computed once."""
    model = gg.build(
        lambda x, z: ops.contrib.skip_layer_normalization(x, z, GAIN, SHIFT, GAIN), x=X, z=X
    )
    whole = model.clone()
    [node] = model.graph
    node.resize_outputs(4)
    total = node.outputs[3]
    total.name, total.type, total.shape = "total", node.outputs[0].type, node.outputs[0].shape
    model.graph.outputs.append(total)
    best = optimize(model, verify=verify)
    assert count_operators(best.model) == {"Add": 2, "LayerNormalization": 1}
    x = np.random.default_rng(0).standard_normal((2, 5, 16), np.float32)
    feeds = {"x": x, "z": x[::-1]}
    for wanted, given in zip(run_plain(model, feeds), run_plain(best.model, feeds), strict=True):
        assert relative_rms(wanted, given) < ROUNDING
    alone = count_operators(optimize(whole, verify=verify).model)
    assert alone == {"Add": 2, "LayerNormalization": 1, "Reshape": 1}  # kept apart


def test_a_foreign_sum_and_norm_stay_together_where_that_pays(winning: None) -> None:
    model = gg.build(lambda x, z: ops.contrib.skip_layer_normalization(x, z, GAIN, SHIFT), x=X, z=X)
    assert count_operators(optimize(model).model) == {"com.microsoft::SkipLayerNormalization": 1}


def test_remarks_of_one_reason_are_one_line() -> None:
    module = vary(nn.Encoder(16, layers=3, num_heads=4, placement="post"))
    report = optimize(gg.build(module, x=X)).report
    lines = [line for line in report.remarks() if "fuse_sums" in line]
    assert [line.partition(":")[0] for line in lines] == [
        "refused fuse_sums at layers.0.attention.query and 17 more",
        "refused fuse_sums at layers.0.residual1.norm and 5 more",
        "refused fuse_sums at layers.0.feed_forward and 2 more",
    ]


def test_a_norm_of_a_foreign_sum_and_norm_is_no_sum_of_it() -> None:
    def body(x: Any, z: Any) -> Any:
        y = ops.contrib.skip_layer_normalization(x, z, GAIN, SHIFT)
        return ops.layer_norm(y, GAIN, SHIFT, epsilon=1e-12)

    model = gg.build(body, x=X, z=X)
    [both, _] = model.graph
    both.resize_outputs(1)
    assert count_operators(optimize(model).model)["LayerNormalization"] == 2
