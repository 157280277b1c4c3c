"""Attention in the layouts that exporters and hands write; each against itself unfused."""

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from small_models import ROUNDING, as_in_a_file, relative_rms, run_plain

import graphgen as gg
from graphgen import ops
from graphgen.edit import tidy
from graphgen.export.write import to_bytes
from graphgen.graph import count_operators
from graphgen.infer import infer
from graphgen.measure.reference import evaluate
from graphgen.nn.module import build
from graphgen.op import TABLE
from graphgen.passes import optimize
from graphgen.record import current_tape
from graphgen.value import adopt

H, D = 4, 8
Q = gg.float32["b", "t", H * D]
K = gg.float32["b", "s", H * D]
LOWEST = float(np.finfo(np.float32).min)


def heads(x: Any, perm: tuple[int, ...] = (0, 2, 1, 3)) -> Any:
    return ops.transpose(ops.reshape(x, [ops.dim(x, 0), ops.dim(x, 1), H, D]), perm=list(perm))


def merge(y: Any) -> Any:
    return ops.merge_heads(y)


def scale_on_scores(q: Any, k: Any, v: Any) -> Any:
    s = heads(q) @ heads(k, (0, 2, 3, 1)) / math.sqrt(D)
    return merge(ops.softmax(s) @ heads(v))


def scale_on_query(q: Any, k: Any, v: Any) -> Any:
    s = (heads(q) * (1 / math.sqrt(D))) @ ops.swap_last(heads(k))
    return merge(ops.softmax(s) @ heads(v))


def scale_on_both(q: Any, k: Any, v: Any) -> Any:
    c = D**-0.25
    s = (heads(q) * c) @ (ops.swap_last(heads(k)) * c)
    return merge(ops.softmax(s) @ heads(v))


def other_scale(q: Any, k: Any, v: Any) -> Any:
    return merge(ops.softmax(heads(q) @ heads(k, (0, 2, 3, 1)) * 0.5) @ heads(v))


def exp_over_sum(q: Any, k: Any, v: Any) -> Any:
    s = heads(q) @ heads(k, (0, 2, 3, 1)) / math.sqrt(D)
    e = ops.exp(s - ops.reduce_max(s, [3]))
    return merge((e / ops.reduce_sum(e, [3])) @ heads(v))


def split_batch_first(q: Any, k: Any, v: Any) -> Any:
    """Keys transposed as a batch of B·H matrices, as torch's exporter does."""
    kk = heads(k)
    flat = ops.reshape(kk, [-1, ops.dim(kk, 2), D])
    turned = ops.transpose(flat, perm=[0, 2, 1])
    kt = ops.reshape(turned, [ops.dim(kk, 0), H, D, ops.dim(kk, 2)])
    return merge(ops.softmax(heads(q) @ kt / math.sqrt(D)) @ heads(v))


def nan_guard(q: Any, k: Any, v: Any) -> Any:
    w = ops.softmax(heads(q) @ heads(k, (0, 2, 3, 1)) / math.sqrt(D))
    return merge(ops.where(ops.is_nan(w), 0.0, w) @ heads(v))


def saved_by_the_runtime(q: Any, k: Any, v: Any) -> Any:
    """The layouts of both operands and the scale in the product."""
    s = ops.fused_matmul(heads(q), heads(k), transB=1, alpha=D**-0.5)
    return merge(ops.fused_matmul(ops.softmax(s), heads(v), alpha=3.0))


def turned_batches(q: Any, k: Any, v: Any) -> Any:
    """Operands as (rows, heads, features), one batch; the weights are turned for the product."""
    q, k, v = (ops.reshape(x, [-1, H, D]) for x in (q, k, v))
    s = ops.fused_matmul(k, q, transBatchA=1, transBatchB=1, transB=1, alpha=0.2)
    y = ops.fused_matmul(ops.softmax(s, axis=-2), v, transA=1, transBatchB=1)
    return ops.reshape(ops.transpose(y, perm=[1, 0, 2]), [-1, H * D])


def filled_mask(q: Any, k: Any, v: Any) -> Any:
    """In the shape of the scores, which has to be read from Q and K."""
    s = heads(q) @ heads(k, (0, 2, 3, 1)) / math.sqrt(D)
    keep = ops.expand(np.array(True), TABLE["", "Shape"](s))
    return merge(ops.softmax(ops.where(keep, s, LOWEST)) @ heads(v))


def zero_bias(q: Any, k: Any, v: Any) -> Any:
    return merge(ops.softmax(plain_scores(q, k) + 0.0) @ heads(v))


@pytest.mark.parametrize(
    "body",
    [scale_on_scores, scale_on_query, scale_on_both, other_scale, exp_over_sum, split_batch_first,
     nan_guard, filled_mask, zero_bias],
)  # fmt: skip
def test_layouts(body: Any) -> None:
    model = build(body, primitives=True, q=Q, k=K, v=K)
    best = optimize(model, verify=True)
    assert count_operators(best.model) == {"Attention": 1}
    compare(model, best.model)


@pytest.mark.parametrize(("batch", "tokens"), [(2, 20), (1, 50)])
def test_verify_tells_no_rounding_of_large_scores_from_an_error(batch: int, tokens: int) -> None:
    """As in Whisper's encoder: the scale on the query, before the heads are split."""

    def body(q: Any, k: Any, v: Any) -> Any:
        return ops.softmax(heads(q * D**-0.5) @ heads(k, (0, 2, 3, 1))) @ heads(v)

    x = gg.float32[batch, tokens, H * D]
    best = optimize(build(body, primitives=True, q=x, k=x, v=x), verify=True)
    assert count_operators(best.model)["Attention"] == 1, best.report


def test_verify_computes_a_causal_mask_that_also_hides_the_rest() -> None:
    """One mask, read as causal and as any: with any other content both would differ."""

    def body(q: Any, k: Any, v: Any) -> Any:
        at = ops.arange(ops.dim(q, 1))
        keep = ops.greater_or_equal(ops.unsqueeze(at, [1]), ops.unsqueeze(at, [0]))
        scores = ops.where(keep, ops.where(keep, LOWEST, plain_scores(q, k)), LOWEST)
        return merge(ops.softmax(scores) @ heads(v))

    best = optimize(build(body, primitives=True, q=Q, k=Q, v=Q), verify=True)
    assert count_operators(best.model)["Attention"] == 1, best.report


def compare(model: ir.Model, fused: ir.Model, **extra: Any) -> None:
    rng = np.random.default_rng(0)
    for t, s in ((5, 5), (1, 9), (7, 3)):
        if extra and t != s:
            continue
        given = {
            name: (rng.standard_normal((2, n, H * D)) * 2).astype(np.float32)
            for name, n in (("q", t), ("k", s), ("v", s))
        }
        given.update(extra)
        wanted, got = run_plain(model, given)[0], run_plain(fused, given)[0]
        assert relative_rms(wanted, got) < ROUNDING


def masked(body: Any, mask: Any) -> ir.Model:
    return build(body, primitives=True, q=Q, k=gg.float32["b", "t", H * D], v=K, mask=mask)


def added_mask(q: Any, k: Any, v: Any, mask: Any) -> Any:
    bias = ops.where(mask, 0.0, LOWEST)
    s = heads(q) @ heads(k, (0, 2, 3, 1)) / math.sqrt(D) + bias
    return merge(ops.softmax(s) @ heads(v))


def added_minus_10000(q: Any, k: Any, v: Any, mask: Any) -> Any:
    bias = (1.0 - ops.cast(mask, to=ir.DataType.FLOAT)) * -10000.0
    s = heads(q) @ heads(k, (0, 2, 3, 1)) / math.sqrt(D) + bias
    return merge(ops.softmax(s) @ heads(v))


def chosen_mask(q: Any, k: Any, v: Any, mask: Any) -> Any:
    s = heads(q) @ heads(k, (0, 2, 3, 1)) / math.sqrt(D)
    return merge(ops.softmax(ops.where(~mask, LOWEST, s)) @ heads(v))


def mask_before_scale(q: Any, k: Any, v: Any, mask: Any) -> Any:
    bias = ops.cast(mask, to=ir.DataType.FLOAT)
    s = (heads(q) @ heads(k, (0, 2, 3, 1)) + bias) / math.sqrt(D)
    return merge(ops.softmax(s) @ heads(v))


@pytest.mark.parametrize("body", [added_mask, added_minus_10000, chosen_mask, mask_before_scale])
@pytest.mark.parametrize("shape", [("b", 1, "t", "t"), ("b", 1, 1, "t"), ("t", "t")])
def test_masks(body: Any, shape: Any) -> None:
    model = build(
        body, primitives=True, q=Q, k=gg.float32["b", "t", H * D], v=gg.float32["b", "t", H * D],
        mask=gg.bool_[shape],
    )  # fmt: skip
    best = optimize(model, verify=True)
    assert count_operators(best.model)["Attention"] == 1
    mask = np.random.default_rng(3).random([{"b": 2, "t": 5}.get(d, d) for d in shape]) < 0.6
    mask[..., 0] = True  # no row without a key: those are undefined in a foreign graph
    compare(model, best.model, mask=mask)


def minus_infinity(q: Any, k: Any, v: Any, mask: Any) -> Any:
    s = heads(q) @ heads(k, (0, 2, 3, 1)) / math.sqrt(D)
    return merge(ops.softmax(ops.where(mask, s, -np.inf)) @ heads(v))


@pytest.mark.parametrize("body", [added_mask, chosen_mask, minus_infinity])
def test_rows_that_a_foreign_mask_hides_stay_what_they_were_if_they_were_numbers(body: Any) -> None:
    """The lowest number hides like any other: the mean of V. Minus infinity gives NaN, or zeros."""
    model = build(
        body, primitives=True, q=Q, k=gg.float32["b", "t", H * D],
        v=gg.float32["b", "t", H * D], mask=gg.bool_["b", 1, 1, "t"],
    )  # fmt: skip
    x = np.random.default_rng(0).standard_normal((2, 4, H * D)).astype(np.float32)
    mask = np.ones((2, 1, 1, 4), bool)
    mask[0] = False
    feeds = {"q": x, "k": x, "v": x, "mask": mask}
    wanted, got = run_plain(model, feeds)[0], run_plain(optimize(model).model, feeds)[0]
    assert relative_rms(wanted[1], got[1]) < ROUNDING
    strict = optimize(model, strict_masked_rows=True)
    if body is not minus_infinity:
        assert relative_rms(wanted, got) < ROUNDING
        assert count_operators(strict.model)["Attention"] == 1
        return
    assert np.all(np.isnan(wanted[0]))
    assert np.all(got[0] == 0)
    assert "Attention" not in count_operators(strict.model)
    [site] = next(p for p in strict.report.passes if p.name == "fuse_attention").sites
    assert (site.status, "masked entirely" in site.reason) == ("refused", True)


@pytest.mark.parametrize("is_added", [True, False])
def test_a_bias_that_is_hidden_counts_where_the_mask_is_added(is_added: bool) -> None:
    """x + NaN + low is NaN; low in the place of x + NaN is not. A row may be hidden entirely."""

    def body(q: Any, k: Any, v: Any, mask: Any, bias: Any) -> Any:
        s = plain_scores(q, k) + bias
        s = s + ops.where(mask, 0.0, LOWEST) if is_added else ops.where(mask, s, LOWEST)
        return merge(ops.softmax(s) @ heads(v))

    x, bias = gg.float32["b", "t", H * D], gg.float32["b", H, 1, "t"]
    mask = gg.bool_["b", 1, 1, "t"]
    model = build(body, primitives=True, q=x, k=x, v=x, mask=mask, bias=bias)
    best = optimize(model, verify=True).model
    assert count_operators(best)["Attention"] == 1
    draw = np.random.default_rng(0)
    feeds = {n: draw.standard_normal((3, 4, H * D)).astype(np.float32) for n in "qkv"}
    feeds["mask"] = np.array([[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]], bool)[:, None, None]
    feeds["bias"] = draw.standard_normal((3, H, 1, 4)).astype(np.float32)
    feeds["bias"][2, 1, 0, 3] = np.nan
    wanted, got = run_plain(model, feeds)[0], run_plain(best, feeds)[0]
    assert np.isnan(wanted).any() == is_added
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    assert relative_rms(np.nan_to_num(wanted), np.nan_to_num(got)) < ROUNDING


def weights_too(q: Any, k: Any, v: Any) -> Any:
    w = ops.softmax(heads(q) @ heads(k, (0, 2, 3, 1)) / math.sqrt(D))
    return merge(w @ heads(v)), w


def weights_turned(q: Any, k: Any, v: Any) -> Any:
    w = ops.softmax(heads(q) @ heads(k, (0, 2, 3, 1)) / math.sqrt(D))
    turned = ops.swap_last(w)
    return merge(ops.swap_last(heads(v, (0, 2, 3, 1)) @ turned)), turned


def talking_heads(q: Any, k: Any, v: Any) -> Any:
    s = heads(q) @ heads(k, (0, 2, 3, 1)) / math.sqrt(D)
    s = ops.transpose(s, perm=[0, 2, 3, 1]) @ np.tri(H, dtype=np.float32)
    return merge(ops.softmax(ops.transpose(s, perm=[0, 3, 1, 2])) @ heads(v))


def other_axis(q: Any, k: Any, v: Any) -> Any:
    w = ops.softmax(heads(q) @ heads(k, (0, 2, 3, 1)) / math.sqrt(D), axis=2)
    return merge(w @ heads(v))


def gate_between(q: Any, k: Any, v: Any) -> Any:
    w = ops.softmax(ops.exp(heads(q) @ heads(k, (0, 2, 3, 1))))
    return merge(w @ heads(v))


def weights_times(q: Any, k: Any, v: Any) -> Any:
    w = ops.softmax(plain_scores(q, k))
    return merge((w * ops.exp(w)) @ heads(v))


def weights_read(q: Any, k: Any, v: Any) -> Any:
    w = ops.softmax(plain_scores(q, k))
    return merge(w @ heads(v)), ops.reduce_sum(ops.neg(w))


def negative_factor(q: Any, k: Any, v: Any) -> Any:
    s = ops.fused_matmul(heads(q), heads(k), transB=1, alpha=-0.5)
    return merge(ops.softmax(s) @ heads(v))


def with_a_sink(q: Any, k: Any, v: Any) -> Any:
    """The last column takes weight and gives nothing."""
    s = plain_scores(q, k)
    w = ops.softmax(ops.concat(s, ops.reduce_max(s, [3]), axis=3))
    return merge(ops.slice_(w, [0], [-1], [3]) @ heads(v))


CHANGES = "changes the weights between their softmax and the product, wanted layouts alone there"


def test_a_gate_is_no_candidate() -> None:
    def body(x: Any) -> Any:
        return (ops.softmax(x) * x) @ np.eye(H * D, dtype=np.float32)

    best = optimize(build(body, x=Q))
    assert next(p for p in best.report.passes if p.name == "fuse_attention").sites == []


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (weights_times, f"Mul {CHANGES}"),
        (with_a_sink, "a softmax over joined scores, float[b, 4, t, 1]; wanted sinks"),
        (weights_too, "the result of Softmax is used elsewhere, by a graph output"),
        (weights_turned, "the result of Softmax is used elsewhere, by a graph output"),
        (weights_read, "the result of Softmax is used elsewhere, by node_Neg_20"),
        (
            talking_heads,
            "the scores are mixed among heads by a constant matrix, as talking heads do; "
            "the operator mixes none",
        ),
        (
            other_axis,
            "the softmax is along t keys, the sum with V along s queries, wanted the same",
        ),
        (gate_between, "the scores come from Exp, not a product"),
        (negative_factor, "the product of Q and K has alpha=-0.5, wanted a number above 0"),
    ],
)
def test_misses_say_why(body: Any, reason: str) -> None:
    best = optimize(build(body, primitives=False, q=Q, k=K, v=K))
    [site] = next(p for p in best.report.passes if p.name == "fuse_attention").sites
    assert (site.status, site.reason) == ("missed", reason)


GATES: dict[str, list[Any]] = {
    "of queries": ["b", 1, "t", 1],
    "of heads": [H, 1, 1],
    "of a batch": ["b", 1, 1, 1],
    "of all": [],
    "of queries, tiled": ["b", 1, "t", 1],
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", GATES)
def test_a_factor_of_each_query_or_head_follows_the_operator(name: str, turned: bool) -> None:
    """As SASRec's mask of queries and transformers' head_mask, between softmax and product."""

    def body(q: Any, k: Any, v: Any, gate: Any) -> Any:
        gate = ops.tile(gate, [1, 1, 1, ops.dim(k, 1)]) if "tiled" in name else gate
        w = gate * ops.softmax(plain_scores(q, k))
        if turned:
            return ops.swap_last(heads(v)) @ ops.swap_last(w)
        return merge(w @ heads(v))

    gate = gg.float32[tuple(GATES[name])]
    model = build(body, primitives=True, q=Q, k=K, v=K, gate=gate)
    best = optimize(model, verify=True)
    assert count_operators(best.model)["Attention"] == 1
    sizes, rng = {"b": 2, "t": 5}, np.random.default_rng(3)
    given = rng.normal(size=[sizes.get(d, d) for d in GATES[name]]).astype(np.float32)
    compare(model, best.model, gate=given)


def by_key(w: Any, gate: Any) -> Any:
    return w * ops.transpose(gate, perm=[0, 1, 3, 2])


def by_part_of_a_key(w: Any, gate: Any) -> Any:
    pairs = ops.reshape(w, [0, 0, 0, -1, 2])
    return ops.reshape(pairs * np.array([1.0, 2.0], np.float32), [0, 0, 0, -1]) * gate


def where_it_is_a_number(w: Any, gate: Any) -> Any:
    return ops.where(ops.is_nan(w * gate), 0.0, w * gate)


@pytest.mark.parametrize("gated", [by_key, by_part_of_a_key, where_it_is_a_number])
def test_other_factors_of_the_weights_are_left_alone(gated: Any) -> None:
    """Those of keys, and one that may be NaN where a choice gives 0."""

    def body(q: Any, k: Any, v: Any, gate: Any) -> Any:
        return merge(gated(ops.softmax(plain_scores(q, k)), gate) @ heads(v))

    x = gg.float32["b", 6, H * D]
    model = build(body, primitives=True, q=x, k=x, v=x, gate=gg.float32["b", 1, 6, 1])
    assert "Attention" not in count_operators(optimize(model).model)


def plain_scores(q: Any, k: Any) -> Any:
    return heads(q) @ heads(k, (0, 2, 3, 1)) / math.sqrt(D)


def guard_alone(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return merge(ops.where(mask, ops.softmax(plain_scores(q, k)), 0.0) @ heads(v))


def guard_of_another(q: Any, k: Any, v: Any, mask: Any) -> Any:
    s = ops.where(mask, plain_scores(q, k), LOWEST)
    return merge(ops.where(ops.transpose(mask, perm=[1, 0]), ops.softmax(s), 0.0) @ heads(v))


def guard_the_other_way(q: Any, k: Any, v: Any, mask: Any) -> Any:
    s = ops.where(mask, plain_scores(q, k), LOWEST)
    return merge(ops.where(mask, 0.0, ops.softmax(s)) @ heads(v))


def nan_guard_of_another(q: Any, k: Any, v: Any, mask: Any) -> Any:
    w = ops.softmax(plain_scores(q, k))
    other = ops.log(ops.cast(mask, to=ir.DataType.FLOAT) - 0.5)
    return merge(ops.where(ops.is_nan(other), 0.0, w) @ heads(v))


def negative_scale(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return merge(ops.softmax(ops.where(mask, plain_scores(q, k), LOWEST) * -1.0) @ heads(v))


def scaled_away(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return merge(ops.softmax(ops.where(mask, plain_scores(q, k), -2e30) * 1e-30) @ heads(v))


@pytest.mark.parametrize(
    "body",
    [guard_alone, guard_of_another, guard_the_other_way, nan_guard_of_another, negative_scale,
     scaled_away],
)  # fmt: skip
def test_what_is_no_attention_is_left_alone(body: Any) -> None:
    model = build(
        body, primitives=True, q=Q, k=gg.float32["b", "t", H * D], v=gg.float32["b", "t", H * D],
        mask=gg.bool_["t", "t"],
    )  # fmt: skip
    best = optimize(model)
    assert "Attention" not in count_operators(best.model)
    mask = np.random.default_rng(3).random((5, 5)) < 0.6
    mask[:, 0] = True
    compare(model, best.model, mask=mask)


def test_a_mask_may_say_what_it_hides_before_and_after_the_softmax() -> None:
    """As DeBERTa's softmax: rows that are hidden entirely are zeros in both."""

    def body(q: Any, k: Any, v: Any, hide: Any) -> Any:
        w = ops.softmax(ops.where(hide, LOWEST, plain_scores(q, k)))
        return merge(ops.where(hide, 0.0, w) @ heads(v))

    k = gg.float32["b", "t", H * D]
    model = build(body, primitives=True, q=Q, k=k, v=k, hide=gg.bool_["t", "t"])
    best = optimize(model, verify=True)
    assert count_operators(best.model)["Attention"] == 1
    [site] = next(p for p in best.report.passes if p.name == "fuse_attention").sites
    assert site.reason == "4 heads, mask"
    hide = np.random.default_rng(3).random((5, 5)) < 0.4
    hide[2] = True
    compare(model, best.model, hide=hide)


@pytest.mark.parametrize("same", [True, False])
def test_masks_before_and_after_the_softmax_may_be_two_equal_constants(same: bool) -> None:
    """As TorchScript folds SEW-D's for a fixed length."""
    hide = np.arange(25).reshape(5, 5) % 3 == 1
    other = hide if same else hide.T

    def body(q: Any, k: Any, v: Any) -> Any:
        w = ops.softmax(ops.where(hide, LOWEST, plain_scores(q, k)))
        return merge(ops.where(other[None], 0.0, w) @ heads(v))

    x = gg.float32["b", 5, H * D]
    model = build(body, primitives=True, q=x, k=x, v=x)
    best = optimize(model, verify=True)
    assert count_operators(best.model).get("Attention", 0) == same


def test_a_query_that_a_bias_reads_too_keeps_its_factor() -> None:
    """As in SpeechT5, whose positions are a product with the query that the factor scaled."""

    def body(q: Any, k: Any, v: Any, r: Any) -> Any:
        scaled = heads(q * D**-0.5)
        by_row = ops.transpose(scaled, perm=[2, 0, 1, 3]) @ ops.swap_last(r)
        bias = ops.transpose(by_row, perm=[1, 2, 0, 3])
        return merge(ops.softmax(scaled @ heads(k, (0, 2, 3, 1)) + bias) @ heads(v))

    x = gg.float32["b", 5, H * D]
    model = build(body, primitives=True, q=x, k=x, v=x, r=gg.float32[5, 1, 5, D])
    best = optimize(model, verify=True)
    assert count_operators(best.model)["Attention"] == 1
    compare(model, best.model, r=np.random.default_rng(1).random((5, 1, 5, D), np.float32))


MAXIMA: dict[str, Any] = {
    "kept": lambda s: ops.reduce_max(s, [3]),
    "unsqueezed": lambda s: ops.unsqueeze(ops.reduce_max(s, [-1], keepdims=False), [-1]),
    "of heads, too": lambda s: ops.reduce_max(s, [1, 3]),
    "of queries": lambda s: ops.reduce_max(s, [2]),
    "of other queries": lambda s: ops.unsqueeze(ops.reduce_max(s, [3], keepdims=False), [2]),
}


@pytest.mark.parametrize("name", MAXIMA)
def test_a_softmax_from_which_the_maximum_is_subtracted_first(name: str) -> None:
    """As CogView and LayoutLMv3 do, divided before and multiplied after."""

    def body(q: Any, k: Any, v: Any) -> Any:
        s = plain_scores(q, k) / 32.0
        return merge(ops.softmax((s - MAXIMA[name](s)) * 32.0) @ heads(v))

    x = gg.float32["b", "t", H * D]
    best = optimize(build(body, primitives=True, q=x, k=x, v=x), verify=True)
    found = count_operators(best.model).get("Attention", 0)
    assert found == (name in ("kept", "unsqueezed", "of heads, too"))


def test_a_maximum_that_is_subtracted_before_a_softcap_stays() -> None:
    def body(q: Any, k: Any, v: Any) -> Any:
        s = plain_scores(q, k)
        return merge(ops.softmax(ops.tanh(s - ops.reduce_max(s, [3])) * 30.0) @ heads(v))

    best = optimize(build(body, primitives=True, q=Q, k=K, v=K))
    assert "Attention" not in count_operators(best.model)


CONSTANT_MASKS = {
    "one": np.ones((1, 1), bool),
    "column": np.ones((5, 1), bool),
    "row": np.array([[True, False, False, False, False]]),
    "triangle": np.tril(np.ones((5, 5), bool)),
}


@pytest.mark.parametrize("name", CONSTANT_MASKS)
def test_only_a_whole_triangle_is_causal(name: str) -> None:
    def body(q: Any, k: Any, v: Any) -> Any:
        s = ops.where(CONSTANT_MASKS[name], plain_scores(q, k), LOWEST)
        return merge(ops.softmax(s) @ heads(v))

    spec = gg.float32["b", 5, H * D]
    model = build(body, primitives=True, q=spec, k=spec, v=spec)
    best = optimize(model)
    [fused] = [node for node in best.model.graph if node.op_type == "Attention"]
    assert ("is_causal" in fused.attributes) == (name == "triangle")
    x = np.random.default_rng(0).standard_normal((2, 5, H * D)).astype(np.float32)
    feeds = {"q": x, "k": x, "v": x}
    assert relative_rms(run_plain(model, feeds)[0], run_plain(best.model, feeds)[0]) < ROUNDING


def einsum(equation: str, *operands: Any) -> Any:
    """The node that hand-written models have; the operator table has none."""
    tape = current_tape()
    assert tape is not None
    values = [tape.operand(x) for x in operands]
    node = ir.node("Einsum", values, {"equation": equation})
    tape.nodes.append(node)
    infer(node, tape.context)
    return adopt(node.outputs[0])


def apart(x: Any) -> Any:
    return ops.reshape(x, [0, 0, H, D])


def by_einsum(q: Any, k: Any, v: Any) -> Any:
    s = einsum("bthd,bshd->bhts", apart(q), apart(k)) / math.sqrt(D)
    return ops.reshape(einsum("bhts,bshd->bthd", ops.softmax(s), apart(v)), [0, 0, H * D])


def values_first(q: Any, k: Any, v: Any) -> Any:
    """Vᵀ Pᵀ with P transposed, as image models write it."""
    p = ops.softmax(heads(k) @ heads(q, (0, 2, 3, 1)) * D**-0.5, axis=2)
    y = heads(v, (0, 2, 3, 1)) @ p
    return ops.reshape(ops.transpose(y, perm=[0, 3, 1, 2]), [0, 0, H * D])


def one_batch_of_heads(q: Any, k: Any, v: Any) -> Any:
    """Batch and heads merged, as older exporters need for a product of three-dimensional arrays."""
    sizes = [[ops.dim(x, 0) * H, ops.dim(x, 1), D] for x in (q, k, v)]
    q3, k3, v3 = (ops.reshape(heads(x), s) for x, s in zip((q, k, v), sizes, strict=True))
    y = ops.softmax(q3 @ ops.swap_last(k3) / math.sqrt(D)) @ v3
    return merge(ops.reshape(y, [ops.dim(q, 0), H, ops.dim(q, 1), D]))


def five_axes(q: Any, k: Any, v: Any) -> Any:
    """Heads in two axes, as grouped ones are before they are merged."""
    q5, k5, v5 = (
        ops.transpose(ops.reshape(x, [0, 0, 2, 2, D]), perm=[0, 2, 3, 1, 4]) for x in (q, k, v)
    )
    y = ops.softmax(q5 @ ops.swap_last(k5) / math.sqrt(D)) @ v5
    return ops.reshape(ops.transpose(y, perm=[0, 3, 1, 2, 4]), [0, 0, H * D])


def rows_in_one(q: Any, k: Any, v: Any) -> Any:
    """As TensorFlow multiplies: batch and rows are one size, told apart by a vector of sizes."""

    def projected(x: Any) -> Any:
        sizes = ops.gather(TABLE["", "Shape"](x), np.array([0, 1]))
        rows = ops.concat(ops.reduce_prod(sizes, [0]), np.array([H * D]), axis=0)
        y = ops.exp(TABLE["", "Reshape"](x, rows))
        split = TABLE["", "Reshape"](y, ops.concat(sizes, np.array([H, D]), axis=0))
        return ops.transpose(split, perm=[0, 2, 1, 3])

    return merge(ops.softmax(projected(q) @ ops.swap_last(projected(k))) @ projected(v))


def softcap(q: Any, k: Any, v: Any) -> Any:
    s = ops.tanh(heads(q) @ heads(k, (0, 2, 3, 1)) / math.sqrt(D) / 5.0) * 5.0
    return merge(ops.softmax(s) @ heads(v))


@pytest.fixture
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is recognized is fused, also with a softcap, which the kernel is slow at."""
    monkeypatch.setattr("graphgen.targets.kernels.measured", dict)


def test_a_bias_whose_size_is_rounded_may_fit() -> None:
    """As ProphetNet cuts it from a table: floor(Min(63, t)**2/t) is t, or nothing runs."""
    table = np.random.default_rng(4).standard_normal((63, 63)).astype(np.float32)

    def body(q: Any) -> Any:
        length = ops.slice_(TABLE["", "Shape"](q), [1], [2])
        cut = ops.slice_(table, [0, 0], ops.concat(length, length, axis=0), [0, 1])
        bias = TABLE["", "Reshape"](cut, ops.concat(length, np.array([-1]), axis=0))
        return merge(ops.softmax(plain_scores(q, q) + bias) @ heads(q))

    model = as_in_a_file(body, q=gg.float32["b", "t", H * D])
    best = optimize(model, verify=True)
    assert count_operators(best.model)["Attention"] == 1
    feeds = {"q": np.random.default_rng(0).standard_normal((2, 7, H * D)).astype(np.float32)}
    (wanted,), (given,) = run_plain(model, feeds), run_plain(best.model, feeds)
    assert relative_rms(wanted, given) < ROUNDING


def test_an_einsum_of_weights_with_a_bias_of_another_batch_is_a_product() -> None:
    def body(q: Any, bias: Any) -> Any:
        return merge(einsum("bhij,bhjd->bhid", ops.softmax(plain_scores(q, q) + bias), heads(q)))

    model = as_in_a_file(body, q=gg.float32["b", "t", H * D], bias=gg.float32["n", 1, 1, "s"])
    best = optimize(model, verify=True)
    assert count_operators(best.model)["Attention"] == 1
    rng = np.random.default_rng(0)
    for b, t, n, s in ((2, 7, 2, 7), (1, 7, 3, 7), (3, 1, 1, 5), (2, 5, 1, 1)):
        shapes = {"q": (b, t, H * D), "bias": (n, 1, 1, s)}
        feeds = {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}
        (wanted,), (given,) = run_plain(model, feeds), run_plain(best.model, feeds)
        assert wanted.shape == given.shape and relative_rms(wanted, given) < ROUNDING


@pytest.mark.parametrize("kept", [9, 1])
def test_a_bias_of_the_example_that_is_cut_to_its_last_rows(kept: int) -> None:
    """As TorchScript writes x-transformers' ALiBi, kept from the trace; 1 row may be repeated."""
    table = np.random.default_rng(1).standard_normal((H, kept, kept)).astype(np.float32) * 3

    def body(q: Any) -> Any:
        length = ops.gather(TABLE["", "Shape"](q), np.array(1))
        first = ops.unsqueeze(-length, [0])
        rows = ops.slice_(table, first, np.array([2**63 - 1]), [1])
        bias = TABLE["", "Pad"](
            ops.slice_(rows, first, np.array([2**63 - 1]), [2]), np.zeros(6, int)
        )
        weights = ops.softmax(plain_scores(q, q) + bias)
        return merge(einsum("bhij,bhjd->bhid", weights, heads(q)))

    model = as_in_a_file(body, q=gg.float32["b", "t", H * D])
    best = optimize(model, verify=True)
    assert count_operators(best.model)["Attention"] == 1
    rng = np.random.default_rng(0)
    for t in (9, 7, 1):
        feeds = {"q": rng.standard_normal((2, t, H * D)).astype(np.float32)}
        (wanted,), (given,) = run_plain(model, feeds), run_plain(best.model, feeds)
        assert relative_rms(wanted, given) < ROUNDING


@pytest.mark.parametrize("cut", [True, False])
def test_an_einsum_of_weights_with_a_bias_that_is_cut_to_the_keys_is_a_product(cut: bool) -> None:
    """As the runtime saves XLNet; a bias that is not cut may be longer than one key."""

    def body(q: Any, bias: Any) -> Any:
        length = ops.slice_(TABLE["", "Shape"](q), [1], [2])
        bias = ops.slice_(bias, [0], length, [1]) if cut else bias
        weights = ops.softmax(plain_scores(q, q) + bias)
        return merge(einsum("bhij,bhjd->bhid", weights, heads(q)))

    model = as_in_a_file(body, q=gg.float32["b", "t", H * D], bias=gg.float32[1, "u"])
    best = optimize(model, verify=True)
    assert count_operators(best.model)["Attention"] == 1
    rng = np.random.default_rng(0)
    for t, n in ((7, 9), (1, 9)) if cut else ((7, 7), (7, 1), (1, 1), (1, 9)):
        shapes = {"q": (2, t, H * D), "bias": (1, n)}
        feeds = {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}
        (wanted,), (given,) = run_plain(model, feeds), run_plain(best.model, feeds)
        assert relative_rms(wanted, given) < ROUNDING


def test_places_of_rows_are_cut_to_those_of_an_image_and_merged_with_its_columns() -> None:
    """As in BoTNet: 3 · Min(9, h) places are all 3 · h, or the sum with the scores fails."""
    table = np.random.default_rng(1).standard_normal((1, H, 9, 3, D)).astype(np.float32)

    def body(x: Any) -> Any:
        q = ops.reshape(x, [0, -1, H * D])
        rows = ops.slice_(table, [0], ops.slice_(TABLE["", "Shape"](x), [1], [2]), [2])
        places = ops.reshape(rows, [1, H, -1, D]) @ ops.swap_last(heads(q))
        return merge(ops.softmax(plain_scores(q, q) + places) @ heads(q))

    model = as_in_a_file(body, primitives=True, x=gg.float32["b", "h", 3, H * D])
    best = optimize(model, verify=True)
    assert count_operators(best.model)["Attention"] == 1
    rng = np.random.default_rng(0)
    for h in (9, 4, 1):
        feeds = {"x": rng.standard_normal((2, h, 3, H * D)).astype(np.float32)}
        (wanted,), (given,) = run_plain(model, feeds), run_plain(best.model, feeds)
        assert relative_rms(wanted, given) < ROUNDING


@pytest.mark.parametrize("other", [False, True])
def test_a_bias_padded_to_the_number_of_keys_has_their_size(other: bool) -> None:
    """As in Funnel, which hides the first token: ones of n - 1 rows, and a row of zeros."""

    def body(q: Any, r: Any) -> Any:
        less = TABLE["", "Shape"](r if other else q, start=1, end=2) - np.array([1])
        ones = ops.constant_of_shape(ops.concat(less, less, axis=0)) + 1.0
        shown = ops.pad(ones, np.array([1, 1, 0, 0]))
        weights = ops.softmax(
            plain_scores(q, q) + ops.reduce_max(ops.unsqueeze(r, [1]), [2, 3]) * shown
        )
        return merge(einsum("bhij,bhjd->bhid", weights, heads(q)))

    model = as_in_a_file(body, q=gg.float32["b", "t", H * D], r=gg.float32["b", "u", 3])
    best = optimize(model, verify=True)
    assert count_operators(best.model).get("Attention", 0) == (not other)
    rng = np.random.default_rng(0)
    for t in (7, 1):
        shapes = {"q": (2, t, H * D), "r": (2, t, 3)}
        feeds = {name: rng.standard_normal(s).astype(np.float32) * 3 for name, s in shapes.items()}
        (wanted,), (given,) = run_plain(model, feeds), run_plain(best.model, feeds)
        assert relative_rms(wanted, given) < ROUNDING


def test_heads_repeated_by_a_reshape_that_counts_them() -> None:
    """As torch exports repeat_interleave: where there are no keys, no heads are left, either."""

    def repeated(x: Any) -> Any:
        few = ops.transpose(ops.reshape(x, [0, 0, 2, D]), perm=[0, 2, 1, 3])
        copies = TABLE["", "Tile"](ops.unsqueeze(few, [2]), np.array([1, 1, H // 2, 1, 1]))
        sizes = TABLE["", "Shape"](copies)
        batch, rest = ops.gather(sizes, np.array([0])), ops.gather(sizes, np.array([3, 4]))
        return TABLE["", "Reshape"](copies, ops.concat(batch, np.array([-1]), rest, axis=0))

    def attend(q: Any, k: Any, v: Any) -> Any:
        s = heads(q) @ ops.swap_last(repeated(k)) / math.sqrt(D)
        return merge(ops.softmax(s) @ repeated(v))

    few = gg.float32["b", "s", 2 * D]
    model = as_in_a_file(attend, primitives=True, q=Q, k=few, v=few)
    best = optimize(model, verify=True)
    assert count_operators(best.model)["Attention"] == 1
    rng = np.random.default_rng(7)
    for b, t, s in ((2, 5, 3), (1, 1, 1), (3, 2, 9)):
        shapes = {"q": (b, t, H * D), "k": (b, s, 2 * D), "v": (b, s, 2 * D)}
        feeds = {name: rng.standard_normal(n).astype(np.float32) for name, n in shapes.items()}
        (wanted,), (given,) = run_plain(model, feeds), run_plain(best.model, feeds)
        assert relative_rms(wanted, given) < ROUNDING


def test_sizes_of_inputs_tell_batch_and_rows_apart() -> None:
    model = build(rows_in_one, primitives=True, q=Q, k=K, v=K)
    best = optimize(model, verify=True)
    assert count_operators(best.model)["Attention"] == 1
    compare(model, best.model)


@pytest.mark.usefixtures("nothing_measured")
@pytest.mark.parametrize(
    "body",
    [by_einsum, values_first, one_batch_of_heads, five_axes, softcap, saved_by_the_runtime,
     turned_batches],
)  # fmt: skip
def test_layouts_of_others(body: Any) -> None:
    model = build(body, q=Q, k=K, v=K)
    best = optimize(model, verify=True)
    counts = count_operators(best.model)
    assert counts.pop("Attention") == 1
    assert set(counts) <= {
        "Transpose",
        "Reshape",
        *(["Mul"] if body is saved_by_the_runtime else []),
    }
    compare(model, best.model)


def rows_and_columns(n: Any) -> tuple[Any, Any]:
    return ops.unsqueeze(ops.arange(n), [1]), ops.unsqueeze(ops.arange(n), [0])


MEANINGS = {
    "causal": lambda i, j: j <= i,
    "causal, counted from one": lambda i, j: i + 1 >= j + 1,
    "causal by a strict comparison": lambda i, j: ops.less(j - 1, i),
    "window of 3 and causal": lambda i, j: ops.logical_and(j > i - 3, j <= i),
    "mask": lambda i, j: j <= i + 1,
    "no mask": lambda i, j: ops.logical_and(i >= 0, j > -1),
    "mask of something else": lambda i, j: ops.equal(j, i),
}


@pytest.mark.parametrize("told", MEANINGS)
def test_masks_are_told_by_what_they_keep(told: str) -> None:
    def body(q: Any, k: Any, v: Any) -> Any:
        keep = MEANINGS[told](*rows_and_columns(ops.dim(q, 1)))
        return merge(ops.softmax(ops.where(keep, plain_scores(q, k), LOWEST)) @ heads(v))

    spec = gg.float32["b", "t", H * D]
    model = build(body, primitives=True, q=spec, k=spec, v=spec)
    best = optimize(model, verify=True)
    [site] = next(p for p in best.report.passes if p.name == "fuse_attention").sites
    told = {"mask of something else": "mask"}.get(told, told.partition(",")[0].partition(" by")[0])
    assert site.reason.startswith(f"{H} heads, {told}")
    fused = "com.microsoft::GroupQueryAttention" if told == "causal" else "Attention"
    if "window" not in told:
        assert count_operators(best.model)[fused] == 1
    x = np.random.default_rng(0).standard_normal((2, 7, H * D)).astype(np.float32)
    feeds = {"q": x, "k": x[::-1].copy(), "v": x}
    assert relative_rms(run_plain(model, feeds)[0], run_plain(best.model, feeds)[0]) < ROUNDING


def test_causal_attention_is_grouped_only_where_that_was_measured_to_be_faster() -> None:
    def body(q: Any, k: Any, v: Any) -> Any:
        return ops.attention(heads(q), heads(k), heads(v), is_causal=1)

    def fused(length: int | str) -> set[str]:
        spec = gg.float32["b", length, H * D]
        return set(count_operators(optimize(build(body, q=spec, k=spec, v=spec)).model))

    assert "com.microsoft::GroupQueryAttention" in fused(2048) & fused("t")
    assert "Attention" in fused(128)


def test_a_row_of_padding_before_the_first_token_stays_zero() -> None:
    """It sees keys that the mask hides and keys to come; GroupQueryAttention gives a mean there."""

    def body(q: Any, mask: Any) -> Any:
        return ops.attention(heads(q), heads(q), heads(q), mask, is_causal=1)

    model = build(body, q=gg.float32["b", "t", H * D], mask=gg.bool_["b", 1, 1, "t"])
    best = optimize(model)
    mask = np.array([[1, 1, 1], [0, 0, 1]], bool)[:, None, None]
    q = np.random.default_rng(0).standard_normal((2, 3, H * D)).astype(np.float32)
    [got], [want] = (run_plain(m, {"q": q, "mask": mask}) for m in (best.model, model))
    assert not got[1, :, :2].any() and got[1, :, 2].all() and relative_rms(want, got) < ROUNDING
    assert count_operators(best.model)["Attention"] == 1


def four(*shape: Any) -> Any:
    return gg.float32[shape]


SHAPES: dict[str, tuple[Any, Any, Any]] = {
    "K and V of one batch": (four("b", 4, "t", 8), four(1, 4, "t", 8), four(1, 4, "t", 8)),
    "batches of other names": (four("a", 4, "t", 8), four("b", 4, "t", 8), four("b", 4, "t", 8)),
    "V of one head": (four("b", 4, "t", 8), four("b", 4, "t", 8), four("b", 1, "t", 8)),
    "K of one head": (four("b", 4, "t", 8), four("b", 1, "t", 8), four("b", 4, "t", 8)),
    "merged batches of other names": (
        four("4*a", "t", 8),
        four("4*b", "t", 8),
        four("4*b", "t", 8),
    ),
    "both of one head": (four("b", 4, "t", 8), four("b", 1, "t", 8), four("b", 1, "t", 8)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_broadcasts_are_written_out_where_the_operator_does_not_do_them(name: str) -> None:
    def body(q: Any, k: Any, v: Any) -> Any:
        return ops.softmax(q @ ops.swap_last(k)) @ v

    specs = dict(zip("qkv", SHAPES[name], strict=True))
    model = as_in_a_file(body, primitives=True, **specs)
    best = optimize(model)
    assert count_operators(best.model)["Attention"] == 1
    rng = np.random.default_rng(0)
    feeds = {
        key: rng.standard_normal(
            [{"b": 2, "a": 2, "t": 5, "4*a": 8, "4*b": 8}.get(d, d) for d in spec.shape]
        ).astype("f")
        for key, spec in specs.items()
    }
    assert relative_rms(run_plain(model, feeds)[0], run_plain(best.model, feeds)[0]) < ROUNDING


@pytest.mark.parametrize("limit", [ops.maximum, ops.clip])
def test_a_maximum_with_the_lowest_number_beside_a_mask(limit: Any) -> None:
    def body(q: Any, k: Any, v: Any, mask: Any) -> Any:
        s = limit(ops.where(mask, plain_scores(q, k), LOWEST), LOWEST)
        return merge(ops.softmax(s) @ heads(v))

    spec = gg.float32["b", "t", H * D]
    model = build(body, primitives=True, q=spec, k=spec, v=spec, mask=gg.bool_["b", 1, 1, "t"])
    best = optimize(model, verify=True)
    assert count_operators(best.model)["Attention"] == 1
    compare(model, best.model, mask=np.arange(10).reshape(2, 1, 1, 5) % 3 > 0)


def test_numbers_that_are_made_of_ones_are_constants() -> None:
    """As TorchScript writes torch.full([], s) and ones_like(scores) * (1 - 2**32)."""

    def body(q: Any, k: Any, v: Any, mask: Any) -> Any:
        scores = heads(q) @ ops.swap_last(heads(k))
        scores = scores / (ops.constant_of_shape(np.zeros(0, np.int64)) + np.float32(2.8))
        ones = ops.constant_of_shape(TABLE["", "Shape"](scores), value=ir.tensor([-1.0]))
        return merge(ops.softmax(ops.where(mask, scores, ones * (2.0**32 - 1))) @ heads(v))

    spec = gg.float32["b", "t", H * D]
    model = as_in_a_file(
        body, primitives=True, q=spec, k=spec, v=spec, mask=gg.bool_["b", 1, 1, "t"]
    )
    best = optimize(model, verify=True)
    assert count_operators(best.model)["Attention"] == 1
    compare(model, best.model, mask=np.arange(10).reshape(2, 1, 1, 5) % 3 > 0)


@pytest.mark.parametrize("limits", [(-5.0,), (LOWEST, 5.0), (None, LOWEST)])
def test_scores_with_another_limit_are_no_attention(limits: Any) -> None:
    model = build(
        lambda q, k, v: merge(ops.softmax(ops.clip(plain_scores(q, k), *limits)) @ heads(v)),
        primitives=True, q=Q, k=K, v=K,
    )  # fmt: skip
    assert "Attention" not in count_operators(optimize(model).model)


@pytest.mark.parametrize("shape", [(), ("t",), ("b", 1, "x", "t"), ("c", 1, 1, "t")])
def test_biases_of_any_rank(shape: Any) -> None:
    def body(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return merge(ops.softmax(plain_scores(q, k) + bias) @ heads(v))

    spec = gg.float32["b", "t", H * D]
    model = as_in_a_file(body, primitives=True, q=spec, k=spec, v=spec, bias=gg.float32[shape])
    best = optimize(model)
    rng = np.random.default_rng(0)
    sizes = {"b": 2, "t": 5, "x": 1, "c": 1}
    feeds = {k: rng.standard_normal((2, 5, H * D)).astype("f") for k in "qkv"}
    feeds["bias"] = np.asarray(rng.standard_normal([sizes.get(d, d) for d in shape]), "f")
    assert relative_rms(run_plain(model, feeds)[0], run_plain(best.model, feeds)[0]) < ROUNDING


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (("s", "t"), {"t": 1, "s": 4}),
        (("n", "s"), {"t": 1, "n": 4}),
        (("n", 1, "t", "s"), {"b": 1, "n": 2}),
        (("t", "n"), {"n": 1}),
        (("n",), {"n": 4}),
        (("n",), {"n": 4, "r": 4}),
        (("n",), {"n": 4, "r": 4, "s": 1}),
    ],
)
def test_what_a_mask_may_lengthen_is_as_long_before(shape: Any, sizes: Any) -> None:
    """Sizes of two names may differ where one is 1; as many keys as V has rows there must be."""

    def body(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return ops.softmax(q @ ops.swap_last(k) + mask) @ v

    rows = "r" if "r" in sizes else "s"
    specs = {"q": ("b", 2, "t", 4), "k": ("b", 2, "s", 4), "v": ("b", 2, rows, 4), "mask": shape}
    model = as_in_a_file(body, primitives=True, **{n: gg.float32[s] for n, s in specs.items()})
    best = optimize(model)
    counts = count_operators(best.model)
    more = (len(shape) == 2 and shape[0] != "t") + (rows == "r")  # Q or K, beside the mask
    assert counts["Attention"] == 1
    assert counts["Expand"] == (3 if len(shape) == 4 else 1 + more)  # Q, K and V
    sizes, rng = {"b": 2, "t": 3, "s": 4, **sizes}, np.random.default_rng(0)
    feeds = {
        name: rng.standard_normal([sizes.get(d, d) for d in dims]).astype(np.float32)
        for name, dims in specs.items()
    }
    wanted, got = run_plain(model, feeds)[0], run_plain(best.model, feeds)[0]
    assert wanted.shape == got.shape and relative_rms(wanted, got) < ROUNDING


@pytest.mark.parametrize("once", [True, False])
def test_shapes_of_weights_are_those_of_inputs_that_tf2onnx_named(once: bool) -> None:
    """As it writes an einsum of weights; a name that two inputs have may be two sizes."""

    def body(x: Any, y: Any = None) -> Any:
        weights = ops.softmax(x @ ops.swap_last(x if y is None else y) * 0.25)
        sizes = TABLE["", "Shape"](weights)
        if y is None:
            flat = ops.concat(ops.reduce_prod(sizes[:2], [0]), sizes[2:], axis=0)
            values = TABLE["", "Reshape"](x, ops.concat(flat[:2], np.array([D]), axis=0))
            return TABLE["", "Reshape"](weights, flat) @ values
        return TABLE["", "Reshape"](weights @ y, ops.concat(sizes[:3], np.array([D]), axis=0))

    spec = gg.float32["unk__0", 2, 5, D]
    model = as_in_a_file(body, primitives=True, **({"x": spec} if once else {"x": spec, "y": spec}))
    best = optimize(model, verify=True)
    counts = count_operators(best.model)
    assert counts["Attention"] == 1 and (counts.get("Expand", 0) > 0) == (not once)
    rng = np.random.default_rng(0)
    for x, y in ((3, 3), (1, 1)) if once else ((3, 3), (3, 1), (1, 1)):
        given = [rng.standard_normal((n, 2, 5, D)).astype(np.float32) for n in (x, y)]
        feeds = dict(zip("x" if once else "xy", given, strict=False))
        wanted, got = run_plain(model, feeds)[0], run_plain(best.model, feeds)[0]
        assert relative_rms(wanted, got) < ROUNDING


TWICE = {
    "bias on a mask": lambda s, m, b, table: ops.where(m, s, LOWEST) + b,
    "mask on a bias": lambda s, m, b, table: ops.where(m, s + b, LOWEST),
    "table": lambda s, m, b, table: ops.where(m, s, LOWEST) + ops.gather(table, np.arange(4)),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_bias_that_hides_what_a_mask_hides_has_a_caveat(name: str) -> None:
    """What is hidden by the lowest number once is all that is left beside -infinity."""
    table = np.random.default_rng(1).standard_normal((9, 4)).astype(np.float32)

    def body(q: Any, k: Any, v: Any, mask: Any, bias: Any) -> Any:
        return merge(ops.softmax(TWICE[name](plain_scores(q, k), mask, bias, table)) @ heads(v))

    spec, square = gg.float32["b", 4, H * D], gg.float32[4, 4]
    model = build(body, primitives=True, q=spec, k=spec, v=spec, mask=gg.bool_[4, 4], bias=square)
    best, strict = optimize(model), optimize(model, strict_masked_rows=True)
    [site] = next(p for p in best.report.passes if p.name == "fuse_attention").sites
    unsafe = name != "table"
    assert ("masked entirely" in site.reason) == unsafe
    assert ("Attention" in count_operators(strict.model)) == (not unsafe)
    mask = np.tril(np.ones((4, 4), bool))
    bias = np.where(np.eye(4), -np.inf, 0).astype(np.float32)
    bias[1, :3] = -np.inf  # with the mask, nothing is left of rows 0 and 1
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal((2, 4, H * D)).astype(np.float32) for n in "qkv"}
    feeds.update(mask=mask, bias=bias)
    wanted, got = run_plain(model, feeds)[0], run_plain(best.model, feeds)[0]
    rows = slice(2 if unsafe else 0, None)
    assert relative_rms(wanted[:, rows], got[:, rows]) < ROUNDING
    assert not unsafe or relative_rms(wanted[:, :2], got[:, :2]) > 0.1


@pytest.mark.parametrize("low", [LOWEST, -math.inf, 3.0])
@pytest.mark.parametrize("given", [True, False], ids=["input", "constant"])
def test_a_bias_for_whole_rows_may_hide_them(low: float, given: bool) -> None:
    """It cancels in the softmax, but where it is so low that no score is left next to it."""
    rows = np.array([0.0, low, 0.0], np.float32).reshape(3, 1)

    def body(q: Any, k: Any, v: Any, bias: Any = rows) -> Any:
        e = ops.exp(plain_scores(q, k) + bias)
        return merge(e / ops.reduce_sum(e, [3]) @ heads(v))

    spec = gg.float32["b", 3, H * D]
    bias = {"bias": gg.float32[3, 1]} if given else {}
    model = build(body, primitives=True, q=spec, k=spec, v=spec, **bias)
    best, strict = optimize(model), optimize(model, strict_masked_rows=True)
    assert count_operators(best.model)["Attention"] == 1
    [site] = next(p for p in best.report.passes if p.name == "fuse_attention").sites
    unsafe = given or low < -1e30
    assert ("masked entirely" in site.reason) == unsafe
    assert ("Attention" in count_operators(strict.model)) == (not unsafe)
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal((2, 3, H * D)).astype(np.float32) for n in "qkv"}
    feeds.update({"bias": rows} if given else {})
    wanted, got = run_plain(model, feeds)[0], run_plain(best.model, feeds)[0]
    seen = rows[:, 0] > -1e30
    assert relative_rms(wanted[:, seen], got[:, seen]) < ROUNDING


def test_a_long_chain_of_sums_is_followed_once() -> None:
    def body(scores: Any, v: Any) -> Any:
        for _ in range(40):
            scores = scores + scores
        return ops.softmax(scores) @ v

    spec = gg.float32["b", 4, "t", "t"]
    best = optimize(build(body, primitives=True, scores=spec, v=gg.float32["b", 4, "t", 8]))
    [site] = next(p for p in best.report.passes if p.name == "fuse_attention").sites
    assert site.reason == "the scores come from an input, not a product"


@pytest.mark.usefixtures("nothing_measured")
@pytest.mark.parametrize("first", [True, False], ids=["mask first", "softcap first"])
def test_a_mask_stands_behind_the_softcap(first: bool) -> None:
    """The operator caps Q Kᵀ and then adds the mask; before the cap, -infinity hides nothing."""

    def capped(q: Any, k: Any, v: Any, mask: Any) -> Any:
        scores = ops.matmul(q, ops.swap_last(k)) / math.sqrt(4)
        scores = ops.tanh((scores + mask if first else scores) / 3.0) * 3.0
        return ops.matmul(ops.softmax(scores if first else scores + mask), v)

    heads = dict.fromkeys("qkv", gg.float32["b", 2, "t", 4])
    model = gg.build(capped, primitives=True, **heads, mask=gg.float32["t", "t"])
    best = optimize(model, verify=True)
    assert count_operators(best.model).get("Attention", 0) == (not first)
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal((2, 2, 5, 4)).astype(np.float32) * 2 for n in "qkv"}
    feeds["mask"] = rng.standard_normal((5, 5)).astype(np.float32) * 2
    wanted, got = run_plain(model, feeds)[0], run_plain(best.model, feeds)[0]
    assert relative_rms(wanted, got) < ROUNDING
    if first:
        told = [s.reason for p in best.report.passes for s in p.sites if s.status == "missed"]
        assert "a bias is added before the softcap, wanted after" in told


@pytest.mark.parametrize("inside", [ir.DataType.FLOAT, ir.DataType.INT32], ids=str)
def test_scores_between_casts_are_those_of_wider_operands(inside: ir.DataType) -> None:
    """Q, K and a bias have 16 bits, V 32: all is computed in 32. Whole scores are no attention."""

    def body(q: Any, k: Any, v: Any, bias: Any) -> Any:
        s = q @ ops.swap_last(k) * D**-0.5 + bias
        s = ops.cast(ops.cast(s, to=inside), to=ir.DataType.FLOAT)
        return ops.cast(ops.softmax(s) @ ops.cast(v, to=ir.DataType.FLOAT), to=v.dtype)

    shape = ("b", H, "t", D)
    specs = dict.fromkeys("qkv", gg.float16[shape])
    model = build(body, primitives=True, **specs, bias=gg.float16["t", "t"])
    best = optimize(model, verify=True)
    found = inside == ir.DataType.FLOAT
    assert count_operators(best.model).get("Attention", 0) == found
    sites = next(p for p in best.report.passes if p.name == "fuse_attention").sites
    assert found or [site.reason for site in sites] == [
        "the scores are cast to int32[b, 4, t, t], wanted floats"
    ]
    if found:
        [fused] = [node for node in best.model.graph if node.op_type == "Attention"]
        assert {str(x.dtype) for x in fused.inputs if x is not None} == {"FLOAT"}
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, H, 5, D)).astype(np.float16) for name in "qkv"}
    feeds["bias"] = rng.standard_normal((5, 5)).astype(np.float16)
    wanted, got = run_plain(model, feeds)[0], run_plain(best.model, feeds)[0]
    assert relative_rms(wanted, got) < 1e-3


HEADS = np.array([0.5, 2.0, -1.0, 0.1], np.float32)


def scale_a_head(q: Any, k: Any, v: Any) -> Any:
    return ops.softmax(q @ ops.swap_last(k) * HEADS[:, None, None]) @ v


def scale_a_query(q: Any, k: Any, v: Any) -> Any:
    return ops.softmax((q @ ops.swap_last(k)) * ops.reduce_max(q, [3])) @ v


def scale_a_key(q: Any, k: Any, v: Any) -> Any:
    return ops.softmax((q @ ops.swap_last(k)) * ops.swap_last(ops.reduce_max(k, [3]))) @ v


def scale_a_score(q: Any, k: Any, v: Any) -> Any:
    scores = q @ ops.swap_last(k)
    return ops.softmax(scores * (ops.reduce_max(q, [3]) + ops.reduce_max(scores, [2]))) @ v


def scale_a_query_behind_a_bias(q: Any, k: Any, v: Any) -> Any:
    return ops.softmax((q @ ops.swap_last(k) + k @ ops.swap_last(k)) * ops.reduce_max(q, [3])) @ v


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (scale_a_head, 1),
        (scale_a_query, 1),
        (scale_a_key, 1),
        (scale_a_score, 0),
        (scale_a_query_behind_a_bias, 0),
    ],
)
def test_a_number_a_row_is_a_factor_of_the_queries_or_keys(body: Any, found: int) -> None:
    model = build(body, primitives=True, **dict.fromkeys("qkv", gg.float32["b", H, "t", D]))
    best = optimize(model, verify=True)
    assert count_operators(best.model).get("Attention", 0) == found
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, H, 5, D)).astype("f") for name in "qkv"}
    assert relative_rms(run_plain(model, feeds)[0], run_plain(best.model, feeds)[0]) < ROUNDING


@pytest.mark.parametrize("batch", [2, "b"])
def test_a_factor_may_have_more_dimensions_than_the_scores(batch: Any) -> None:
    """It puts a 1 before them, also where a bias has the batch that they have."""

    def body(q: Any, k: Any, v: Any, bias: Any) -> Any:
        q = q * np.full([1] * 5, 0.5, np.float32)
        return ops.softmax(q @ ops.swap_last(k) + bias) @ v

    own = dict.fromkeys("qkv", gg.float32[batch, H, 3, D])
    model = as_in_a_file(body, **own, bias=gg.float32[batch, 1, 3, 3])
    best = optimize(model, verify=True)
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, H, 3, D)).astype("f") for name in "qkv"}
    feeds["bias"] = rng.standard_normal((2, 1, 3, 3)).astype("f")
    assert relative_rms(run_plain(model, feeds)[0], run_plain(best.model, feeds)[0]) < ROUNDING


@pytest.mark.parametrize("scores", [False, True])
def test_axes_behind_a_factor_that_has_more_of_them_are_its_own(scores: bool) -> None:
    half = np.full([1] * 3, 0.5, np.float32)

    def body(q: Any, k: Any, v: Any) -> Any:
        if not scores:
            return ops.softmax(q @ ops.transpose(k * half, perm=[0, 2, 1])) @ v
        return ops.softmax(ops.transpose((q @ ops.swap_last(k)) / half, perm=[0, 2, 1])) @ v

    model = as_in_a_file(body, **dict.fromkeys("qkv", gg.float32[3, D]))
    best = optimize(model, verify=True)
    assert count_operators(best.model)["Attention"] == 1
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((3, D)).astype("f") for name in "qkv"}
    assert relative_rms(run_plain(model, feeds)[0], run_plain(best.model, feeds)[0]) < ROUNDING


@pytest.mark.parametrize("name", ["a", "zz"])
def test_a_factor_of_each_query_is_found_whatever_its_name(name: str) -> None:
    """The canonical form sorts operands by name."""

    def body(q: Any, k: Any, v: Any, **factor: Any) -> Any:
        s = (heads(q) @ heads(k, (0, 2, 3, 1))) * factor[name]
        return merge(ops.softmax(s) @ heads(v))

    model = build(body, primitives=True, q=Q, k=K, v=K, **{name: gg.float32[1, H, 1, 1]})
    assert count_operators(optimize(model).model)["Attention"] == 1


def test_a_bias_in_double_is_cast() -> None:
    def body(q: Any, k: Any, v: Any, bias: Any) -> Any:
        s = ops.cast(plain_scores(q, k), to=ir.DataType.DOUBLE) + bias
        return merge(ops.cast(ops.softmax(s), to=ir.DataType.FLOAT) @ heads(v))

    model = build(body, primitives=True, q=Q, k=K, v=K, bias=gg.float64["b", H, "t", "s"])
    best = optimize(model, verify=True)
    assert count_operators(best.model)["Attention"] == 1
    compare(model, best.model, bias=np.random.default_rng(0).normal(size=(2, H, 5, 5)))


def test_biases_of_rows_and_columns_of_an_image_of_any_size() -> None:
    """As in SAM and MViT: one of each is added in six dimensions, which are four in the softmax."""

    def body(x: Any, rows: Any, columns: Any) -> Any:
        b, h, w = (ops.dim(x, i) for i in (0, 2, 3))
        q = ops.transpose(ops.reshape(x, [b, H, D, h * w]), perm=[0, 1, 3, 2])
        s = ops.reshape(q @ ops.swap_last(q) / math.sqrt(D), [b, H, h, w, h, w])
        s = s + ops.unsqueeze(rows, [5]) + ops.unsqueeze(columns, [4])
        s = ops.reshape(s, [b, H, h * w, h * w])
        return ops.softmax(s) @ q

    model = build(
        body, primitives=True, x=gg.float32["b", H * D, "h", "w"],
        rows=gg.float32["b", H, "h", "w", "h"], columns=gg.float32["b", H, "h", "w", "w"],
    )  # fmt: skip
    best = optimize(model, verify=True)
    found = count_operators(best.model)
    assert (found["Attention"], found.get("Expand", 0)) == (1, 0)
    rng = np.random.default_rng(0)
    for b, h, w in ((2, 3, 4), (1, 1, 1), (3, 5, 1)):
        shapes = {"x": (H * D, h, w), "rows": (H, h, w, h), "columns": (H, h, w, w)}
        feeds = {n: rng.normal(size=(b, *size)).astype(np.float32) for n, size in shapes.items()}
        wanted, got = run_plain(model, feeds)[0], run_plain(best.model, feeds)[0]
        assert relative_rms(wanted, got) < ROUNDING


@pytest.mark.parametrize("low", [LOWEST, -math.inf])
@pytest.mark.parametrize("asked", [-math.inf, LOWEST])
@pytest.mark.parametrize("counted", [True, False])
def test_a_guard_of_rows_without_scores_is_what_attention_does(
    low: float, asked: float, counted: bool
) -> None:
    """As softmax(s).masked_fill((s == -inf).all(-1, keepdim=True), 0) in torch."""

    def body(q: Any, k: Any, v: Any, mask: Any) -> Any:
        s = ops.where(mask, plain_scores(q, k), low)
        hidden = ops.cast(ops.equal(s, asked), to=ir.DataType.INT64)
        none = ops.cast(ops.reduce_min(hidden, [3]), to=ir.DataType.BOOL)
        some = ops.greater(ops.reduce_sum(1 - hidden, [3]), np.array(0, np.int64))
        w = ops.softmax(s)
        return merge((ops.where(some, w, 0.0) if counted else ops.where(none, 0.0, w)) @ heads(v))

    model = build(body, primitives=True, q=Q, k=K, v=K, mask=gg.bool_["t", "s"])
    best = optimize(model, verify=True, strict_masked_rows=True)
    assert ("Attention" in count_operators(best.model)) == (asked == -math.inf)
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal((2, 4, H * D)).astype(np.float32) for n in "qkv"}
    feeds["mask"] = np.tril(np.ones((4, 4), bool), -1)  # nothing is left of row 0
    wanted, got = run_plain(model, feeds)[0], run_plain(best.model, feeds)[0]
    assert np.array_equal(np.isnan(wanted), np.isnan(got))
    assert relative_rms(*map(np.nan_to_num, (wanted, got))) < ROUNDING
    assert np.all(wanted[:, 0] == 0) == (low == asked)


@pytest.mark.parametrize("limited", [False, True])
def test_weights_of_nan_that_become_0_are_zeros_where_a_mask_hides_a_row(limited: bool) -> None:
    """As torch 2.9 and later write scaled_dot_product_attention; NaN of other scores is told."""

    def body(q: Any, k: Any, v: Any, mask: Any) -> Any:
        s = ops.where(mask, plain_scores(q, k), -math.inf)
        w = ops.softmax(ops.maximum(s, LOWEST) if limited else s)
        return merge(ops.where(ops.is_nan(w), 0.0, w) @ heads(v))

    model = build(body, primitives=True, q=Q, k=K, v=K, mask=gg.bool_["t", "s"])
    best, strict = optimize(model, verify=True), optimize(model, strict_masked_rows=True)
    [site] = [s for p in best.report.passes if p.name == "fuse_attention" for s in p.sites]
    assert "a score that is NaN would make NaN of its row, not 0" in site.reason
    assert ("masked entirely" in site.reason) == limited
    assert ("Attention" in count_operators(strict.model)) == (not limited)
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal((2, 4, H * D)).astype(np.float32) for n in "qkv"}
    feeds["mask"] = np.tril(np.ones((4, 4), bool), -1)  # nothing is left of row 0
    wanted, got = run_plain(model, feeds)[0], run_plain(best.model, feeds)[0]
    assert relative_rms(wanted[:, limited:], got[:, limited:]) < ROUNDING
    assert np.any(wanted[:, 0]) == limited and not np.any(got[:, 0])


@pytest.mark.parametrize("shape", [(1,), (H, 1, 1), ("t", 1)], ids=str)
def test_scores_are_divided_by_a_number_that_is_computed(shape: Any) -> None:
    """A learned temperature, of all heads, of each, or of each query; not of each key."""

    def body(q: Any, k: Any, v: Any, by: Any) -> Any:
        return merge(ops.softmax(heads(q) @ heads(k, (0, 2, 3, 1)) / ops.abs(by)) @ heads(v))

    model = build(body, primitives=True, q=Q, k=K, v=K, by=gg.float32[shape])
    best = optimize(model, verify=True)
    assert count_operators(best.model).get("Attention") == 1
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal((2, 4, H * D)).astype(np.float32) for n in "qkv"}
    size = [4 if n == "t" else n for n in shape]
    feeds["by"] = rng.uniform(-3.0, -0.5, size).astype(np.float32)
    wanted, got = run_plain(model, feeds)[0], run_plain(best.model, feeds)[0]
    assert relative_rms(wanted, got) < ROUNDING


def test_a_guard_of_another_mask_is_told_by_name() -> None:
    def body(q: Any, k: Any, v: Any, mask: Any, other: Any) -> Any:
        s = ops.where(mask, plain_scores(q, k), LOWEST)
        return merge(ops.where(other, ops.softmax(s), 0.0) @ heads(v))

    masks = dict.fromkeys(("mask", "other"), gg.bool_["t", "s"])
    best = optimize(build(body, primitives=True, q=Q, k=K, v=K, **masks))
    [site] = next(p for p in best.report.passes if p.name == "fuse_attention").sites
    assert site.reason == (
        "the weights are masked by other: bool[t, s], the scores by mask: bool[t, s]; "
        "wanted the same mask"
    )


@pytest.mark.parametrize("runtime", [None, "1.22.1"])
def test_a_mask_that_is_nan_is_seen(runtime):
    """In the row it is in, on arrays, in the runtime's kernel and in older spellings alike."""
    model = gg.build(
        lambda q, k, v, mask: ops.attention(q, k, v, mask),
        q=gg.float32[2, 2, 3, 4],
        k=gg.float32[2, 2, 5, 4],
        v=gg.float32[2, 2, 5, 4],
        mask=gg.float32[2, 2, 3, 5],
    )
    rng = np.random.default_rng(0)
    sizes = {"q": (3, 4), "k": (5, 4), "v": (5, 4), "mask": (3, 5)}
    feeds = {name: rng.standard_normal((2, 2, *n), np.float32) for name, n in sizes.items()}
    feeds["mask"][0, 1, 2, 3] = np.nan
    best = optimize(model, target="cpu", runtime=runtime)
    for given in (evaluate(model, feeds)[0], run_plain(best.model, feeds)[0]):
        assert np.isnan(given[0, 1, 2]).all() and np.isnan(given).sum() == 4


def test_a_causal_attention_to_keys_of_another_length_gets_no_remark_of_its_own() -> None:
    def body(q: Any, k: Any) -> Any:
        return ops.attention(q, k, k, is_causal=1)

    model = build(body, q=four("b", 4, "t", 64), k=four("b", 4, "s", 64))
    report = optimize(model).report
    assert "truth value" not in " ".join(site.reason for p in report.passes for site in p.sites)


@pytest.mark.parametrize("runtime", [None, "1.22"])
def test_a_batch_or_a_sequence_of_size_0(runtime: str | None) -> None:
    """onnxruntime's Attention refuses them; its MultiHeadAttention gives what the nodes gave.

    Its GroupQueryAttention would end the process, so something else has to refuse before it.
    """

    def body(x: Any, mask: Any) -> tuple[Any, ...]:
        later = ops.causal_mask(ops.dim(x, 1), ops.dim(x, 1))
        masked = (lambda s: s, lambda s: s + mask, lambda s: ops.where(later, s, LOWEST))
        q, k = heads(x), heads(x, (0, 2, 3, 1))
        return tuple(merge(ops.softmax(f(q / n @ k)) @ q) for n, f in enumerate(masked, 2))

    model = build(body, x=Q, mask=gg.float32["b", 1, 1, "t"])
    best = optimize(model, runtime=runtime)
    kinds = {name for name in count_operators(best.model) if "Attention" in name}
    left = {"Attention", "com.microsoft::GroupQueryAttention"}  # the latter, if causal
    assert kinds == (left if runtime is None else {"com.microsoft::MultiHeadAttention"})
    for b, t in ((0, 3), (2, 0), (0, 0)):
        feeds = {"x": np.ones((b, t, H * D), "f4"), "mask": np.zeros((b, 1, 1, t), "f4")}
        sizes = [y.shape for y in run_plain(model, feeds)]
        if runtime is not None:
            assert [y.shape for y in run_plain(best.model, feeds)] == sizes
            continue
        for i in range(3):
            one = best.model.clone()
            del one.graph.outputs[i + 1 :], one.graph.outputs[:i]
            tidy(one)
            with pytest.raises(gg.GraphgenError, match=r"of size 0, optimize with runtime='1\.22'"):
                gg.Session(to_bytes(one))({v.name: feeds[str(v.name)] for v in one.graph.inputs})


@pytest.mark.parametrize(
    ("count", "shape", "axis", "repeated"),
    [
        (1, ("t", "t"), 2, 0),
        (1, ("t", "t"), 3, 0),
        (2, ("t", "t"), 2, 0),  # of which a sum takes one or as many as there are
        (1, ("m", "t"), 2, 1),
        (1, ("t", "m"), 3, 0),  # there are as many keys as V has rows
    ],
)
def test_a_mask_of_the_first_row_of_as_many_is_one_for_all_rows(
    count: int, shape: Any, axis: int, repeated: int
) -> None:
    """There is none only where there are no scores; of other rows there may be none, as of q."""

    def attend(q: Any, keep: Any) -> Any:
        rows = ops.slice_(keep, [0], [count], [axis])  # min(count, t) of them
        scores = heads(q) @ heads(q, (0, 2, 3, 1)) / math.sqrt(D)
        return merge(ops.softmax(scores + ops.where(rows, 0.0, LOWEST)) @ heads(q))

    keep = gg.bool_[("b", 1, *shape)]
    model = as_in_a_file(attend, primitives=True, q=Q, keep=keep)
    best = optimize(model).model
    counts = count_operators(best)
    assert counts["Attention"] == 1 and counts["Expand"] == 1 + repeated
    rng = np.random.default_rng(0)
    for t in (1, 7):
        q = rng.standard_normal((3, t, H * D)).astype("f4") * 2
        mask = rng.random((3, 1, t, t)) > 0.4
        mask[0] = False  # no key of one sequence
        if count in (1, t + 1):
            (y,), (want,) = (run_plain(m, {"q": q, "keep": mask}) for m in (best, model))
            assert relative_rms(y, want) < ROUNDING


def test_a_mask_of_at_most_one_row_is_one_for_several_of_known_number() -> None:
    """None beside seven rows would end the run."""

    def attend(q: Any, k: Any, keep: Any) -> Any:
        rows = ops.slice_(keep, [0], [1], [2])
        scores = heads(q) @ heads(k, (0, 2, 3, 1)) / math.sqrt(D)
        return merge(ops.softmax(scores + ops.where(rows, 0.0, LOWEST)) @ heads(k))

    keep = gg.bool_["b", 1, "s", "s"]
    model = as_in_a_file(attend, primitives=True, q=gg.float32["b", 7, H * D], k=K, keep=keep)
    best = optimize(model).model
    assert count_operators(best)["Attention"] == 1
    rng = np.random.default_rng(0)
    for s in (1, 5):
        q, k = (rng.standard_normal((2, n, H * D)).astype("f4") * 2 for n in (7, s))
        feeds = {"q": q, "k": k, "keep": rng.random((2, 1, s, s)) > 0.4}
        (y,), (want,) = (run_plain(m, feeds) for m in (best, model))
        assert relative_rms(y, want) < ROUNDING
    alone = as_in_a_file(attend, primitives=True, q=gg.float32["b", 1, H * D], k=K, keep=keep)
    assert count_operators(optimize(alone).model).get("Attention", 0) == 0


def over_channels(x: Any) -> Any:
    """Of XCiT and Restormer: channels attend to each other, and all pixels are their features."""
    b, n = ops.dim(x, 0), ops.dim(x, 2)
    q, k, v = ops.split(ops.reshape(x, [b, 3, H, D, n]), num_outputs=3, axis=1)
    q, k, v = (ops.squeeze(y, [1]) for y in (q, k, v))
    q, k = (y / ops.reduce_l2(y, [-1]) for y in (q, k))
    y = ops.softmax(q @ ops.swap_last(k) * 1.3) @ v
    return ops.reshape(y, [b, H * D, n])


def over_the_root_of_pixels(q: Any, k: Any, v: Any) -> Any:
    root = ops.sqrt(ops.cast(ops.dim(q, 3), to=np.float32))
    return ops.softmax(q @ ops.swap_last(k) / root) @ v


def test_the_number_of_features_may_be_that_of_pixels() -> None:
    """The usual scale is 1 / √D, so that one that is not known is always given."""
    pixels = gg.float32["b", H, D, "n"]
    for body, inputs in (
        (over_channels, {"x": gg.float32["b", 3 * H * D, "n"]}),
        (over_the_root_of_pixels, {"q": pixels, "k": pixels, "v": pixels}),
        (lambda q, k, v: ops.softmax(q @ ops.swap_last(k)) @ v, dict.fromkeys("qkv", pixels)),
    ):
        model = build(body, primitives=True, **inputs)
        fused = optimize(model, verify=True).model
        assert count_operators(fused)["Attention"] == 1
        for b, n in ((2, 5), (1, 1), (1, 300)):
            sizes = {"b": b, "n": n}
            rng = np.random.default_rng(n)
            feeds = {
                str(x.name): 5 * rng.standard_normal([sizes.get(str(d), d) for d in x.shape])
                for x in model.graph.inputs
            }
            feeds = {name: x.astype(np.float32) for name, x in feeds.items()}
            [wanted], [found] = (run_plain(one, feeds) for one in (model, fused))
            exact = evaluate(model, feeds)[0]
            assert relative_rms(found, exact) <= 2 * relative_rms(wanted, exact) + ROUNDING
