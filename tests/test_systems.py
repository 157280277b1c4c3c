"""The systems the project stands on, a test each; numbers are those of docs/systems.md."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from small_models import block, relative_rms, run_plain, vary

import graphgen as gg
from graphgen import nn, ops
from graphgen.graph import count_operators
from graphgen.nn.module import build, initialise
from graphgen.ops.cost import of_model
from graphgen.ops.reference import evaluate
from graphgen.passes import optimize

RNG = np.random.default_rng(7)
X = gg.float32["batch", "seq", 16]


def attention_by_hand(q: Any, k: Any, v: Any) -> Any:
    """softmax(QKᵀ/√d) V, written here again so that the test has a second opinion."""
    scores = np.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(q.shape[-1])
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhts,bhsd->bhtd", e / e.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("primitives", [True, False])
@pytest.mark.parametrize("large", [1.0, 30.0])
def test_system_01_scaled_dot_product_attention(primitives: bool, large: float) -> None:
    spec = gg.float32["b", 4, "t", 8]
    model = build(ops.attention, primitives=primitives, q=spec, k=spec, v=spec)
    best = optimize(model, verify=True).model
    assert count_operators(best) == {"Attention": 1}
    q, k, v = ((RNG.standard_normal((2, 4, 9, 8)) * large).astype(np.float32) for _ in range(3))
    exact = attention_by_hand(*(x.astype(np.float64) for x in (q, k, v)))
    feeds = {"q": q, "k": k, "v": v}
    assert relative_rms(exact, evaluate(model, feeds)[0]) < 1e-6  # the scale is a float32
    for graph in (model, best):
        assert relative_rms(exact, run_plain(graph, feeds)[0]) < 5e-6


class MinimalBlock(nn.Module):
    """Tokens, embeddings, positions, masked self-attention, feed-forward, linear, softmax."""

    def __init__(self, vocabulary: int, features: int):
        self.embedding = nn.Embedding(vocabulary, features)
        self.positions = nn.SinusoidalPositions(features)
        self.attention = nn.Attention(features, num_heads=1, causal=True)
        self.feed_forward = nn.FeedForward(features, 4 * features, activation="relu")
        self.linear = nn.Linear(features, vocabulary)

    def __call__(self, ids: Any) -> Any:
        x = self.positions(self.embedding(ids))
        x = x + self.attention(x)
        return ops.softmax(self.linear(x + self.feed_forward(x)))


def test_system_02_minimal_self_attention_block() -> None:
    model = gg.build(vary(MinimalBlock(11, 16)), primitives=True, ids=gg.int64["batch", "seq"])
    best = optimize(model, verify=True)
    assert best.report.shortfalls() == []
    ids = RNG.integers(0, 11, (2, 6))
    p = run_plain(best.model, {"ids": ids})[0]
    assert p.shape == (2, 6, 11)
    assert np.allclose(p.sum(-1), 1, atol=1e-6)
    assert relative_rms(evaluate(model, {"ids": ids})[0], p) < 1e-5
    # Positions matter: with the first two tokens swapped, the last row is another one.
    gentle = gg.build(MinimalBlock(11, 16), ids=gg.int64["batch", "seq"])
    a, b = (evaluate(gentle, {"ids": np.array([v])})[0] for v in ([3, 5, 2, 2], [5, 3, 2, 2]))
    assert 1e-9 < np.abs(a[0, -1] - b[0, -1]).max() < 1e-2


@pytest.mark.parametrize("num_heads", [1, 2, 4, 8, 16])
def test_system_03_any_number_of_heads_that_divides(num_heads: int) -> None:
    model = block(num_heads=num_heads, kv_heads=max(1, num_heads // 2))
    best = optimize(model, verify=True)
    assert best.report.shortfalls() == []
    x = RNG.standard_normal((2, 5, 16)).astype(np.float32)
    assert relative_rms(run_plain(model, {"x": x})[0], run_plain(best.model, {"x": x})[0]) < 5e-6


def test_system_03_heads_must_divide() -> None:
    with pytest.raises(gg.GraphgenError, match="the heads must divide the features"):
        nn.Attention(16, num_heads=3)
    with pytest.raises(gg.GraphgenError, match="kv_heads must divide num_heads"):
        nn.Attention(16, num_heads=4, kv_heads=3)


@pytest.mark.parametrize("fused", [True, False])
def test_system_05_no_future_token_changes_a_result(fused: bool) -> None:
    model = block(causal=True)
    model = optimize(model).model if fused else model
    x = RNG.standard_normal((2, 8, 16)).astype(np.float32)
    changed = x.copy()
    changed[:, 5:] = RNG.standard_normal((2, 3, 16)) * 1e3
    a, b = (run_plain(model, {"x": v})[0] for v in (x, changed))
    assert np.array_equal(a[:, :5], b[:, :5])
    assert not np.allclose(a[:, 5:], b[:, 5:])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_system_05_no_padded_token_changes_a_result(fused: bool, causal: bool) -> None:
    model = block(causal=causal, mask=True)
    model = optimize(model).model if fused else model
    x = RNG.standard_normal((3, 8, 16)).astype(np.float32)
    mask = np.ones((3, 8), bool)
    mask[0, 5:] = mask[1, :3] = False
    changed = x.copy()
    changed[~mask] = RNG.standard_normal((int((~mask).sum()), 16)) * 1e3
    a, b = (run_plain(model, {"x": v, "mask": mask})[0] for v in (x, changed))
    assert np.array_equal(a[mask], b[mask])


@pytest.mark.parametrize("fused", [True, False])
def test_system_05_a_row_without_keys_gives_zeros(fused: bool) -> None:
    module = vary(nn.Attention(16, num_heads=4, bias=False))
    model = gg.build(module, primitives=True, x=X, mask=gg.bool_["batch", "seq"])
    model = optimize(model).model if fused else model
    x = RNG.standard_normal((2, 5, 16)).astype(np.float32)
    mask = np.array([[False] * 5, [True] * 5])
    y = run_plain(model, {"x": x, "mask": mask})[0]
    assert np.all(y[0] == 0)
    assert np.all(np.abs(y[1]).sum(-1) > 0)


def test_system_05_encoder_decoder_mask() -> None:
    layer = vary(nn.DecoderLayer(16, num_heads=4))
    model = gg.build(
        layer, primitives=True, x=X, memory=gg.float32["batch", "source", 16],
        memory_mask=gg.bool_["batch", "source"],
    )  # fmt: skip
    best = optimize(model, verify=True)
    assert best.report.shortfalls() == []
    x, memory = (RNG.standard_normal((2, n, 16)).astype(np.float32) for n in (4, 6))
    mask = np.array([[True] * 4 + [False] * 2, [True] * 6])
    changed = memory.copy()
    changed[~mask] = 1e3
    feeds = {"x": x, "memory": memory, "memory_mask": mask}
    for graph in (model, best.model):
        a, b = run_plain(graph, feeds)[0], run_plain(graph, {**feeds, "memory": changed})[0]
        assert np.array_equal(a, b)


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_system_06_norm_placements(placement: str, norm: str) -> None:
    stack = nn.Encoder(16, layers=2, num_heads=4, placement=placement, norm=norm)
    model = gg.build(stack, primitives=True, x=X)
    best = optimize(model, verify=True)
    assert best.report.shortfalls() == []
    norms = {"pre": 5, "post": 4, "sandwich": 9}[placement]
    counts = count_operators(best.model)
    assert counts.get("LayerNormalization", 0) + counts.get("RMSNormalization", 0) == norms


def test_system_07_without_feed_forward_two_attentions_collapse_into_one() -> None:
    """V₂ = A₁V₁W: A₂(A₁ V₁ W) = (A₂A₁)(V₁ W), one attention with the weights A₂A₁."""

    def weights() -> Any:
        return ops.softmax(RNG.standard_normal((6, 6)))

    first, second, v, w = (
        weights(),
        weights(),
        RNG.standard_normal((6, 4)),
        RNG.standard_normal((4, 4)),
    )
    stacked = ops.matmul(second, ops.matmul(ops.matmul(first, v), w))
    single = ops.matmul(ops.matmul(second, first), ops.matmul(v, w))
    assert np.allclose(stacked, single, rtol=0, atol=1e-12)
    assert np.allclose(ops.matmul(second, first).sum(-1), 1)  # again weights of one attention
    feed_forward = nn.FeedForward(4, 16, activation="relu")
    initialise(vary(feed_forward))
    between = ops.matmul(second, feed_forward(ops.matmul(first, v).astype(np.float32)))
    swapped = ops.matmul(ops.matmul(second, first), feed_forward(v.astype(np.float32)))
    assert not np.allclose(between, swapped, atol=1e-2)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("gated", [True, False])
def test_system_07_feed_forward(activation: str, gated: bool) -> None:
    module = vary(nn.FeedForward(16, 48, activation=activation, gated=gated))
    model = gg.build(module, primitives=True, x=X)
    best = optimize(model, verify=True)
    x = RNG.standard_normal((2, 5, 16)).astype(np.float32)
    exact = evaluate(model, {"x": x})[0]
    assert relative_rms(exact, run_plain(best.model, {"x": x})[0]) < 5e-6
    # Position-wise: each row depends on its own input only.
    alone = run_plain(best.model, {"x": x[:, 2:3]})[0]
    assert relative_rms(exact[:, 2:3], alone) < 5e-6


def _pattern(function: Any, **sizes: Any) -> Any:
    return partial(nn.Attention, pattern=partial(function, **sizes))


SPARSE = {
    "window": _pattern(ops.window_attention, window=4),
    "strided": _pattern(ops.strided_attention, stride=3),
    "blocks": _pattern(ops.block_sparse_attention, layout=ops.big_bird_layout(4), block=3),
    "hashed": partial(nn.HashedAttention, buckets=4, chunk=4, rounds=2),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "full",
    [
        _pattern(ops.window_attention, window=9),
        _pattern(ops.strided_attention, stride=1),
        _pattern(ops.strided_attention, stride=9),
        _pattern(ops.block_sparse_attention, layout=np.ones((3, 3), bool), block=3),
    ],
    ids=["window", "stride-1", "stride-n", "blocks"],
)
def test_system_18_a_full_pattern_is_full_attention(full: Any, causal: bool) -> None:
    sparse, dense = (
        vary(make(16, num_heads=4, kv_heads=2, causal=causal)) for make in (full, nn.Attention)
    )
    initialise(sparse)
    initialise(dense)
    x = RNG.standard_normal((2, 9, 16)).astype(np.float32)
    mask = np.arange(9) < np.array([[9], [6]])
    assert relative_rms(dense(x, mask=mask), sparse(x, mask=mask)) < 5e-6


@pytest.mark.parametrize("name", SPARSE)
def test_system_18_costs_less_than_quadratic(name: str) -> None:
    """With 4 times the length, 4 times the operations of a fixed pattern, 8 with stride √n."""

    def cost(n: int) -> float:
        sizes = {
            "window": lambda: _pattern(ops.window_attention, window=64),
            "strided": lambda: _pattern(ops.strided_attention, stride=math.isqrt(n)),
            "blocks": lambda: _pattern(
                ops.block_sparse_attention, layout=ops.big_bird_layout(n // 32), block=32
            ),
            "hashed": lambda: partial(nn.HashedAttention, buckets=32, chunk=32),
        }
        module = sizes[name]()(16, num_heads=2, causal=True)
        flops, _ = of_model(gg.build(module, primitives=True, x=gg.float32[1, n, 16]))
        assert flops is not None
        return flops

    assert cost(4096) / cost(1024) < {"strided": 8.1, "blocks": 4.6}.get(name, 4.1)


def test_system_18_sparse_attention_trains(tmp_path: Any) -> None:
    """One layer of each pattern learns to count, through training artifacts."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            self.embedding = nn.Embedding(11, 8)
            self.layers = [
                nn.EncoderLayer(8, num_heads=2, causal=True, attention=each)
                for each in SPARSE.values()
            ]

        def __call__(self, ids: Any) -> Any:
            x = self.embedding(ids)
            for layer in self.layers:
                x = layer(x)
            return self.embedding.logits(x)

    model = gg.build(Counter(), ids=gg.int64[4, 9])
    gg.artifacts(model, tmp_path / "art", loss="cross_entropy", optimizer=gg.AdamW())
    ids = (RNG.integers(0, 11, (8, 4, 1)) + np.arange(10)) % 11
    data = [{"ids": row[:, :-1], "labels": row[:, 1:]} for row in ids]
    trainer = gg.Trainer(tmp_path / "art", schedule=gg.schedule.constant(1e-2))
    losses = [row["loss"] for row in trainer.fit(data, steps=24, progress=False)]
    assert np.mean(losses[-4:]) < 0.7 * losses[0]
