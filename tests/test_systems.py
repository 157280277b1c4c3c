"""The systems the project stands on, a test each; numbers are those of docs/systems.md."""

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import block, relative_rms, run_plain, vary

import graphgen as gg
from graphgen import nn, ops
from graphgen.graph import count_operators
from graphgen.models import create, find
from graphgen.models.word_vectors import negative_sampling
from graphgen.nn.module import build, initialise
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


CONVOLUTIONAL: dict[str, dict[str, Any]] = {
    "bytenet": {"layers": 1},
    "convs2s": {"layers": 1, "length": 6},
    "neural-gpu": {"layers": 1, "length": 6, "width": 2},
}


@functools.cache
def translators(name: str) -> list[Any]:
    """Sessions of a small model, as it was declared and optimised, the runtime's passes off."""
    module = vary(create(name, vocabulary=11, features=8, **CONVOLUTIONAL[name]))
    model = gg.build(module, primitives=True, **find(name).inputs())
    best = optimize(model, verify=True)
    assert best.report.shortfalls() == []
    return [gg.Session(one, optimize=False, threads=1) for one in (model, best.model)]


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_system_14_no_future_target_and_no_padded_source_changes_a_result(name: str) -> None:
    source, target = RNG.integers(0, 11, (2, 5)), RNG.integers(0, 11, (2, 6))
    kept = np.array([5, 3])[:, None]
    mask = np.arange(5) < kept
    feeds = {"source_ids": source, "source_mask": mask * 1, "target_ids": target}
    future = {"target_ids": np.where(np.arange(6) < 3, target, (target + 3) % 11)}
    padding = {"source_ids": np.where(mask, source, (source + 3) % 11)}
    last = {"source_ids": np.where(np.arange(5) == kept - 1, (source + 3) % 11, source)}
    longer = {n: np.pad(feeds[n], ((0, 0), (0, 1))) for n in ("source_ids", "source_mask")}
    for run in translators(name):
        y, *changed = (run(feeds | c)[0] for c in ({}, future, padding, last, longer))
        assert np.array_equal(y[:, :3], changed[0][:, :3])
        assert not np.isclose(y[:, 3:], changed[0][:, 3:]).all((1, 2)).any()
        assert np.array_equal(y, changed[1])
        assert not np.isclose(y, changed[2]).all((1, 2)).any()
        assert relative_rms(y, changed[3]) < 5e-6


@pytest.mark.parametrize("name", CONVOLUTIONAL)
@pytest.mark.parametrize(("source", "target"), [(1, 1), (1, 5), (5, 1)])
def test_system_14_sequences_shorter_than_the_kernel(name: str, source: int, target: int) -> None:
    """As the same sequences are at the beginning of longer ones, the source's rest masked."""
    ids, targets = RNG.integers(0, 11, (2, 6)), RNG.integers(0, 11, (2, 6))
    mask = (np.arange(6)[None] < np.array([[source], [source]])) * 1
    for run in translators(name):
        long, short = (
            run(source_ids=ids[:, :s], source_mask=mask[:, :s], target_ids=targets[:, :t])[0]
            for s, t in ((6, 6), (source, target))
        )
        assert relative_rms(long[:, :target], short) < 5e-6


def test_system_15_what_is_no_word_and_no_sentence_changes_no_answer() -> None:
    module = vary(create("memory-network", vocabulary=11, features=8, hops=2, length=6))
    model = gg.build(module, primitives=True, **find("memory-network").inputs())
    best = optimize(model, verify=True)
    assert best.report.fused()["attention"] == 2
    story, question = RNG.integers(1, 11, (2, 4, 3)), RNG.integers(1, 11, (2, 3))
    feeds = {"story_ids": story, "question_ids": question}
    more = {
        "story_ids": np.pad(story, ((0, 0), (0, 2), (0, 1))),
        "question_ids": np.pad(question, ((0, 0), (0, 2))),
    }
    empty = {"story_ids": story * 0}
    others = [{"story_ids": story[:, ::-1]}, {"story_ids": story[:, :, ::-1]}]
    others += [{"question_ids": question[:, ::-1]}, {"story_ids": story[:, :1]}]
    for graph in (model, best.model):
        y, same, silent, *changed = (
            run_plain(graph, feeds | given)[0] for given in ({}, more, empty, *others)
        )
        assert relative_rms(y, same) < 5e-6
        assert np.isfinite(silent).all()  # no sentence at all: the question alone answers
        # The order counts, of sentences, of words in them and in the question; and what was told.
        assert not any(np.isclose(y, other).all() for other in changed)


def test_system_16_word_vectors_are_the_embedding_of_another_model(tmp_path: Path) -> None:
    """Words 0 to 4 occur beside each other, and so do 5 to 9: their vectors come to tell."""
    ids = RNG.integers(0, 5, (64, 32, 5)) + 5 * RNG.integers(0, 2, (64, 32, 1))
    ids[:, :, 2:] = RNG.integers(0, 10, (64, 32, 3))  # noise
    batches = [{"word_ids": part[:, 0], "context_ids": part[:, 1:]} for part in ids]
    module = create("word-vectors", vocabulary=10, features=4)
    gg.artifacts(
        gg.build(module, training=True, **find("word-vectors").inputs()),
        tmp_path,
        loss=negative_sampling,
        optimizer=gg.AdamW(weight_decay=0.0),
    )
    trainer = gg.Trainer(tmp_path, schedule=gg.schedule.constant(5e-2), threads=1)
    trainer.fit(batches, steps=64, progress=False)
    table = trainer.parameters["embedding.weight"]

    class Similarity(nn.Module):
        def __init__(self) -> None:
            self.words = nn.Embedding(10, 4)

        def __call__(self, ids: Any) -> Any:
            return self.words.logits(self.words(ids))

    other = gg.build(Similarity(), weights={"words.weight": table}, ids=gg.int64["batch"])
    scores = run_plain(other, {"ids": np.arange(10)})[0]
    assert relative_rms(table @ table.T, scores) < 5e-6
    lengths, group = np.linalg.norm(table, axis=1), np.arange(10) < 5
    cosines, together = scores / lengths / lengths[:, None], group[:, None] == group
    assert cosines[together].min() > cosines[~together].max() + 0.5
