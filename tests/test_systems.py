"""The systems the project stands on, a test each; numbers are those of docs/systems.md."""

import importlib
import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from small_models import ROUNDING, block, relative_rms, run_plain, vary

import graphgen as gg
from graphgen import nn, ops
from graphgen.autodiff import grad
from graphgen.graph import count_operators, parameters
from graphgen.laboratory.paths import path_lengths, sequential_products
from graphgen.measure.cost import of_model
from graphgen.measure.reference import evaluate
from graphgen.models import create, find
from graphgen.models.decoder import DecoderLM, inputs
from graphgen.models.sparse import HashedAttention
from graphgen.models.word_vectors import negative_sampling
from graphgen.nn.module import build, initialize
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
        assert relative_rms(exact, run_plain(graph, feeds)[0]) < ROUNDING


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
    [wanted], [given] = (run_plain(m, {"x": x}) for m in (model, best.model))
    assert relative_rms(wanted, given) < ROUNDING


def test_system_03_heads_must_divide() -> None:
    with pytest.raises(gg.GraphgenError, match="the heads must divide the features"):
        nn.Attention(16, num_heads=3)
    with pytest.raises(gg.GraphgenError, match="kv_heads must divide num_heads"):
        nn.Attention(16, num_heads=4, kv_heads=3)


KINDS = ("learned", "sinusoidal", "rotary", "alibi", "t5", "none")


def rotary_by_hand(q: Any, k: Any) -> Any:
    """Re[q_m k_n* e^{i(m-n)θ}], pairs of features as complex numbers (arXiv 2104.09864, 12)."""
    half = q.shape[-1] // 2
    q, k = (y[..., :half] + 1j * y[..., half:] for y in (q, k))
    apart = np.subtract.outer(np.arange(q.shape[2]), np.arange(k.shape[2]))
    turns = np.exp(1j * apart[..., None] * 10000.0 ** (-np.arange(half) / half))
    return np.einsum("bhmi,bhni,mni->bhmn", q, k.conj(), turns).real / math.sqrt(2 * half)


def alibi_by_hand(heads: int, length: int) -> Any:
    """-m |i - j|; of 8 heads, the slopes m are 1/2, 1/4 ... 1/256 (arXiv 2108.12409, 3)."""
    slopes = [0.5 ** ((h + 1) * 8 / heads) for h in range(heads)]
    return [[[-m * abs(i - j) for j in range(length)] for i in range(length)] for m in slopes]


def t5_by_hand(table: Any, length: int, causal: bool) -> Any:
    """Of 32 buckets up to distance 128, half on each side unless causal (arXiv 1910.10683, 2.1)."""
    side = 32 if causal else 16

    def bucket(ahead: int) -> int:
        apart, exact = abs(ahead), side // 2
        if apart >= exact:
            step = math.log(apart / exact) / math.log(128 / exact) * (side - exact)
            apart = min(exact + math.floor(step), side - 1)
        return apart + side * (ahead > 0 and not causal)

    rows = [[bucket(j - i) if j <= i or not causal else 0 for j in range(length)]
            for i in range(length)]  # fmt: skip
    return np.transpose(table[rows], (2, 0, 1))


class Positioned(nn.Module):
    """Attention of four heads that sees relative positions."""

    def __init__(self, kind: str, causal: bool):
        self.attention = nn.Attention(16, num_heads=4, causal=causal, bias=False)
        self.positions: Any = {
            "rotary": lambda: nn.Rotary(nn.rotary_frequencies(4)),
            "alibi": lambda: nn.AlibiBias(4),
            "t5": lambda: nn.RelativeBias(4, one_sided=causal),
        }[kind]()

    def __call__(self, x: Any) -> Any:
        rows = ops.arange(ops.dim(x, 1))
        if isinstance(self.positions, nn.Rotary):
            return self.attention(x, rotary=self.positions(ops.unsqueeze(rows, [0]), x))
        return self.attention(x, mask=self.positions(rows, rows))


@pytest.mark.share(3)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["rotary", "alibi", "t5"])
def test_system_04_relative_positions_equal_the_formulas_of_their_papers(
    kind: str, causal: bool
) -> None:
    module = vary(Positioned(kind, causal))
    model = build(module, primitives=True, x=X)
    best = optimize(model, verify=True, expect={"attention": 1}).model
    if kind == "rotary":
        assert count_operators(best)["RotaryEmbedding"] == 2
    weights = {n: p.array.astype(np.float64) for n, p in initialize(module).items()}
    for length in (1, 7, 150):  # 150 is beyond the largest distance of T5
        x = RNG.standard_normal((2, length, 16)).astype(np.float32)
        q, k, v = (
            (x @ weights[f"attention.{name}.weight"]).reshape(2, length, 4, 4).swapaxes(1, 2)
            for name in ("query", "key", "value")
        )
        if kind == "rotary":
            scores = rotary_by_hand(q, k)
        else:
            table = weights.get("positions.weight")
            bias = (
                alibi_by_hand(4, length) if kind == "alibi" else t5_by_hand(table, length, causal)
            )
            scores = np.einsum("bhtd,bhsd->bhts", q, k) / 2 + np.asarray(bias)
        if causal:
            scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        y = np.einsum("bhts,bhsd->bhtd", e / e.sum(-1, keepdims=True), v)
        exact = y.swapaxes(1, 2).reshape(2, length, 16) @ weights["attention.output.weight"]
        assert relative_rms(exact, evaluate(model, {"x": x})[0]) < 1e-5  # angles are float32
        for graph in (model, best):
            assert relative_rms(exact, run_plain(graph, {"x": x})[0]) < 1e-5


@pytest.mark.share(3)
@pytest.mark.parametrize("kind", KINDS)
def test_system_04_a_decoder_with_each_kind_of_position(kind: str) -> None:
    sizes: dict[str, Any] = {"layers": 2, "num_heads": 4, "length": 6}
    model = build(vary(DecoderLM(11, 16, positions=kind, **sizes)), primitives=True, **inputs())
    best = optimize(model, expect={"attention": 2}).model
    assert count_operators(best).get("RotaryEmbedding", 0) == (4 if kind == "rotary" else 0)
    for length in (1, 6) if kind == "learned" else (1, 6, 37):
        feeds = {"input_ids": RNG.integers(0, 11, (2, length))}
        exact = evaluate(model, feeds)[0]
        for graph in (model, best):
            assert relative_rms(exact, run_plain(graph, feeds)[0]) < ROUNDING
    # Of the same tokens in another order, the last sees a difference.
    ids = np.array([[3, 5, 2, 2]]), np.array([[5, 3, 2, 2]])
    a, b = (evaluate(model, {"input_ids": each})[0][0, -1] for each in ids)
    assert np.abs(a - b).max() > 1e-3


class LossOf(nn.Module):
    """The mean cross-entropy of a decoder on labels that are given, here or in each call."""

    def __init__(self, decoder: DecoderLM, labels: Any = None):
        self.decoder, self.labels = decoder, labels

    def __call__(self, input_ids: Any, labels: Any = None) -> Any:
        labels = self.labels if labels is None else labels
        return ops.cross_entropy(self.decoder(input_ids)["logits"], labels)


@pytest.mark.share(3)
@pytest.mark.parametrize("kind", KINDS)
def test_system_04_gradients_through_each_kind_of_position(kind: str, tmp_path: Path) -> None:
    decoder = DecoderLM(11, 8, layers=1, num_heads=2, length=6, hidden=8, positions=kind)
    ids, labels = RNG.integers(0, 11, (2, 2, 6))
    model = build(vary(LossOf(decoder, labels)), input_ids=gg.int64[2, 6])
    names = list(parameters(model.graph))
    assert ("decoder.positions.weight" in names) == (kind in ("learned", "t5"))
    given = {n: model.graph.initializers[n].const_value.numpy() for n in names}  # type: ignore[union-attr]
    exact = evaluate(grad(model, wrt=names), {"input_ids": ids})[1:]
    towards = {n: RNG.standard_normal(w.shape) for n, w in given.items()}

    def moved(step: float) -> float:
        for n, w in given.items():
            model.graph.initializers[n].const_value = ir.tensor(w + step * towards[n])
        return float(evaluate(model, {"input_ids": ids})[0])

    slope = sum((g * towards[n]).sum() for n, g in zip(names, exact, strict=True))
    assert slope == pytest.approx((moved(1e-6) - moved(-1e-6)) / 2e-6, rel=1e-6)

    # One step of p - g, by the artifacts on the stock runtime.
    weights = {n.removeprefix("decoder."): w for n, w in given.items()}
    trained = build(decoder, weights=weights, training=True, **inputs())
    gg.artifacts(trained, tmp_path, optimizer=gg.SGD())
    trainer = gg.Trainer(tmp_path, schedule=gg.schedule.constant(1.0))
    trainer.fit([{"input_ids": ids, "labels": labels}], steps=1, progress=False)
    for n, g in zip(weights, exact, strict=True):
        change = weights[n] - trainer.parameters[n]
        assert np.abs(change - g).max() < 1e-5 * max(1.0, np.abs(weights[n]).max()), n


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


@pytest.mark.share(3)
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
    initialize(vary(feed_forward))
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
    assert relative_rms(exact, run_plain(best.model, {"x": x})[0]) < ROUNDING
    # Position-wise: each row depends on its own input only.
    alone = run_plain(best.model, {"x": x[:, 2:3]})[0]
    assert relative_rms(exact[:, 2:3], alone) < ROUNDING


CONVOLUTIONAL: dict[str, dict[str, Any]] = {
    "bytenet": {"layers": 1},
    "convs2s": {"layers": 1, "length": 6},
    "neural-gpu": {"layers": 1, "length": 6, "width": 2},
}


@cache
def translators(name: str) -> list[Any]:
    """Sessions of a small model, as it was declared and optimized, the runtime's passes off."""
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
        assert relative_rms(y, changed[3]) < ROUNDING


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
        assert relative_rms(long[:, :target], short) < ROUNDING


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
        assert relative_rms(y, same) < ROUNDING
        assert np.isfinite(silent).all()  # no sentence at all: the question alone answers
        # The order counts, of sentences, of words in them and in the question; and what was told.
        assert not any(np.isclose(y, other).all() for other in changed)


def test_system_16_word_vectors_are_the_embedding_of_another_model(tmp_path: Path) -> None:
    """Words 0 to 4 occur next to each other, and so do 5 to 9: their vectors come to tell."""
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
    assert relative_rms(table @ table.T, scores) < ROUNDING
    lengths, group = np.linalg.norm(table, axis=1), np.arange(10) < 5
    cosines, together = scores / lengths / lengths[:, None], group[:, None] == group
    assert cosines[together].min() > cosines[~together].max() + 0.5


BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.mark.parametrize(
    ("name", "terms", "products", "paths"),
    [
        ("self-attention", {"n²d": 4, "nd²": 8}, [4, 4, 4], [3, 3, 3]),
        ("recurrent", {"nd²": 4, "d²": -2}, [4, 8, 12], [4, 8, 12]),
        ("convolutional", {"wnd²": 2}, [1, 1, 1], [2, 1, 4, 2, 6, 3]),
        ("convolutional, dilated", {"wnd²": 2}, [1, 1, 1], [2, 1, 2, 2, 3, 2]),
        ("self-attention, restricted", {"wnd": 4, "nd²": 8}, [4, 4, 4], [9, 6, 21, 12, 33, 18]),
    ],
)
def test_system_17_work_waiting_and_paths_are_those_of_the_paper(
    name: str, terms: Any, products: Any, paths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """arXiv 1706.03762, table 1, at n = 4, 8, 12 and, where there is a width, k or r = 3 and 5."""
    monkeypatch.syspath_prepend(BENCH)
    cost_table: Any = importlib.import_module("cost_table")

    layer, lengths = cost_table.LAYERS[name], (4, 8, 12)
    widths = (3, 5) if layer.wide else (1,)
    assert cost_table.fitted_terms(layer, (4, 8), (2, 4), widths) == terms
    built = [cost_table.built(layer, n, 2, widths[-1]) for n in lengths]
    assert [sequential_products(model) for model in built] == products
    points = [(n, w) for n in lengths for w in widths]
    found = [cost_table.longest_path(layer, *at) for at in points]
    assert found == paths
    assert cost_table.growth(points, found) == layer.grows


def test_system_17_paths_are_seen_element_by_element() -> None:
    w = np.ones((2, 2), np.float32)

    def function(x: Any) -> Any:
        first, second = ops.split(x, axis=1, num_outputs=2)  # (1, 1, 2) each
        there = ops.matmul(ops.tanh(ops.matmul(first, w)), w * 0)  # a weight of zero joins
        hidden = ops.where(np.array([True, False]), first, second)  # one feature of each
        return ops.concat(hidden, there, second, axis=1)

    model = build(function, primitives=True, x=gg.float32[1, 2, 2])
    lengths = path_lengths(model, {"x": RNG.standard_normal((1, 2, 2))})
    np.testing.assert_array_equal(lengths, [[0, 2, np.inf], [0, np.inf, 0]])
    assert sequential_products(model) == 2


def _pattern(function: Any, **sizes: Any) -> Any:
    return partial(nn.Attention, pattern=partial(function, **sizes))


SPARSE = {
    "window": _pattern(ops.window_attention, window=4),
    "strided": _pattern(ops.strided_attention, stride=3),
    "blocks": _pattern(ops.block_sparse_attention, layout=ops.big_bird_layout(4), block=3),
    "hashed": partial(HashedAttention, buckets=4, chunk=4, rounds=2),
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
    initialize(sparse)
    initialize(dense)
    x = RNG.standard_normal((2, 9, 16)).astype(np.float32)
    mask = np.arange(9) < np.array([[9], [6]])
    assert relative_rms(dense(x, mask=mask), sparse(x, mask=mask)) < ROUNDING


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
            "hashed": lambda: partial(HashedAttention, buckets=32, chunk=32),
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


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_system_19_training_at_once_is_training_one_by_one(positions: str) -> None:
    """Loss and gradients of all positions are the means of those of the last of each prefix."""
    decoder = DecoderLM(11, 8, layers=2, num_heads=2, length=6, hidden=8, positions=positions)
    tokens = gg.int64["batch", "seq"]
    model = build(vary(LossOf(decoder)), input_ids=tokens, labels=tokens)
    model = grad(model, wrt=parameters(model.graph))
    ids, labels = RNG.integers(0, 11, (2, 3, 6))
    each = []
    for end in range(1, 7):
        last = np.where(np.arange(end) == end - 1, labels[:, :end], -100)
        each.append(evaluate(model, {"input_ids": ids[:, :end], "labels": last}))
    feeds = {"input_ids": ids, "labels": labels}
    for wanted, found in zip(zip(*each, strict=True), evaluate(model, feeds), strict=True):
        assert np.abs(np.mean(wanted, 0) - found).max() < 1e-12 * max(1, np.abs(found).max())
