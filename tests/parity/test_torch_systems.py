"""Convolutional models, the memory network, word vectors and sparse attention against torch.

Each is written again here in torch, one sentence at a time where that is plainer.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from torch_twins import Weights, check

import graphgen as gg
from graphgen import nn, ops
from graphgen.models import create, find
from graphgen.models.sparse import HashedAttention
from graphgen.models.transformer import inputs

torch = pytest.importorskip("torch", reason="needs torch: make parity")
pytestmark = pytest.mark.parity

V, D, HEADS = 11, 8, 2
RNG = np.random.default_rng(17)


def linear(w: Weights, name: str, x: Any) -> Any:
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def convolution(w: Weights, name: str, x: Any, *, dilation: int = 1, causal: bool) -> Any:
    weight, bias = w[f"{name}.weight"], w[f"{name}.bias"]
    reach = (weight.shape[2] - 1) * dilation
    before = reach if causal else reach // 2
    channels = torch.nn.functional.pad(x.mT, (before, reach - before))
    return torch.nn.functional.conv1d(channels, weight, bias, dilation=dilation).mT


def pairs(source: int, target: int, kept: Sequence[int]) -> dict[str, Any]:
    """A batch of ids; of source i the first kept[i] tokens are no padding."""
    mask = (np.arange(source) < np.array(kept)[:, None]).astype(np.int64)
    ids = [RNG.integers(0, V, (len(kept), length)) for length in (source, target)]
    return {"source_ids": ids[0], "source_mask": mask, "target_ids": ids[1]}


def bytenet(dilations: Sequence[int], stretch: float) -> Any:
    def block(w: Weights, name: str, x: Any, **options: Any) -> Any:
        def norm(which: str, x: Any) -> Any:
            norms = w[f"{name}.{which}.weight"], w[f"{name}.{which}.bias"]
            return torch.nn.functional.layer_norm(x, x.shape[-1:], *norms, 1e-5).relu()

        y = norm("norm2", linear(w, f"{name}.down", norm("norm1", x)))
        y = norm("norm3", convolution(w, f"{name}.convolution", y, **options))
        return x + linear(w, f"{name}.up", y)

    def columns(w: Weights, tokens: Any, size: int) -> Any:
        """What is under the target's first tokens, of a source alone."""
        x = w["source.weight"][tokens]
        wide = torch.zeros(1, math.ceil(round(stretch * len(tokens), 6)), D, dtype=x.dtype)
        wide = torch.cat([x[None], wide[:, len(tokens) :]], 1)
        for i, dilation in enumerate(dilations):
            wide = block(w, f"encoder.{i}", wide, dilation=dilation, causal=False)
        return torch.nn.functional.pad(wide[0], (0, 0, 0, size))[:size]

    def run(w: Weights, source_ids: Any, source_mask: Any, target_ids: Any) -> list[Any]:
        both = zip(source_ids, source_mask, strict=True)
        memory = [columns(w, ids[mask > 0], target_ids.shape[1]) for ids, mask in both]
        x = w["target.weight"][target_ids] + torch.stack(memory)
        for i, dilation in enumerate(dilations):
            x = block(w, f"decoder.{i}", x, dilation=dilation, causal=True)
        return [linear(w, "output", linear(w, "hidden", x).relu())]

    return run


@pytest.mark.parametrize("target", [1, 5, 11])
@pytest.mark.parametrize("stretch", [1.0, 1.25, 1.2])
def test_bytenet(stretch: float, target: int) -> None:
    sizes = {"layers": 3, "kernel": 3, "dilation": 2, "stretch": stretch, "dropout": 0.0}
    module: Any = create("bytenet", vocabulary=V, features=D, **sizes)
    # More rows of the target than columns: a token of each, and one source without padding.
    check(module, bytenet([1, 2, 1], stretch), inputs(), pairs(7, target, [7, 4, 1]))


def convs2s(layers: int) -> Any:
    half = math.sqrt(0.5)

    def gated(w: Weights, name: str, x: Any, *, causal: bool) -> Any:
        y = convolution(w, f"{name}.convolution", x, causal=causal)
        return (x + torch.nn.functional.glu(y, -1)) * half

    def embedded(w: Weights, side: str, ids: Any) -> Any:
        return w[f"{side}.weight"][ids] + w[f"{side}_positions.weight"][: len(ids)]

    def one(w: Weights, source: Any, target: Any) -> Any:
        e, g = embedded(w, "source", source), embedded(w, "target", target)
        z = linear(w, "encoder_in", e)
        for i in range(layers):
            z = gated(w, f"encoder.{i}", z, causal=False)
        keys = linear(w, "encoder_out", z)
        values, m = keys + e, len(source)
        x = linear(w, "decoder_in", g)
        for i in range(layers):
            h = gated(w, f"decoder.{i}.block", x, causal=True)
            a = ((linear(w, f"decoder.{i}.query", h) + g) @ keys.T).softmax(-1)
            x = (h + m * math.sqrt(1 / m) * (a @ values)) * half
        return linear(w, "output", linear(w, "decoder_out", x))

    def run(w: Weights, source_ids: Any, source_mask: Any, target_ids: Any) -> list[Any]:
        rows = zip(source_ids, source_mask, target_ids, strict=True)
        return [torch.stack([one(w, ids[mask > 0], target) for ids, mask, target in rows])]

    return run


@pytest.mark.parametrize("target", [1, 6])
@pytest.mark.parametrize("kernel", [2, 3, 5])
def test_convs2s(kernel: int, target: int) -> None:
    sizes = {"layers": 2, "kernel": kernel, "length": 7, "dropout": 0.0}
    module: Any = create("convs2s", vocabulary=V, features=D, **sizes)
    check(module, convs2s(2), inputs(), pairs(7, target, [7, 3, 1]), spread=0.4)


def neural_gpu(layers: int, width: int, n: int) -> Any:
    def convolve(x: Any, weight: Any, bias: Any) -> Any:
        return torch.nn.functional.conv2d(x, weight, bias, padding="same")

    def unit(w: Weights, name: str, s: Any, *tape: Any) -> Any:
        gate = convolve(torch.cat([s, *tape], 1), w[f"{name}.gate_weight"], w[f"{name}.gate_bias"])
        u, r = gate.sigmoid().chunk(2, 1)
        new = convolve(torch.cat([r * s, *tape], 1), w[f"{name}.weight"], w[f"{name}.bias"])
        return u * s + (1 - u) * new.tanh()

    def run(w: Weights, source_ids: Any, source_mask: Any, target_ids: Any) -> list[Any]:
        batch, length = target_ids.shape
        image = torch.zeros(batch, D, width, n, dtype=torch.float64)
        x = w["source.weight"][source_ids] * source_mask[..., None]
        image[:, :, 0, : x.shape[1]] = x.mT
        for _ in range(n):
            for i in range(layers):
                image = unit(w, f"encoder.{i}", image)
        tape, outputs = torch.zeros_like(image), []
        for k in range(length):
            if k:  # the token before is written at the column that it was read from
                tape = tape.clone()
                tape[:, :, 0, k - 1] = w["target.weight"][target_ids[:, k]]
            for i in range(layers):
                image = unit(w, f"decoder.{i}", image, tape)
            outputs.append(linear(w, "output", image[:, :, 0, k]))
        return [torch.stack(outputs, 1)]

    return run


@pytest.mark.parametrize(("source", "target"), [(5, 5), (3, 4), (1, 1)])
def test_neural_gpu(source: int, target: int) -> None:
    sizes = {"layers": 2, "width": 3, "length": 5}
    module: Any = create("neural-gpu", vocabulary=V, features=D, **sizes)
    feeds = pairs(source, target, [source, max(1, source - 2)])
    # With larger weights its ten gates, one on another, make torch's own float32 as inexact.
    check(module, neural_gpu(2, 3, 5), inputs(), feeds, spread=0.4)


def memory_network(hops: int, *, linear: bool) -> Any:
    def sentence(table: Any, words: Sequence[int]) -> Any:
        """Σ_j l_j ⊙ x_j, l_kj = (1 - j/J) - (k/d) (1 - 2j/J)."""
        found, count = torch.zeros(D, dtype=torch.float64), len(words)
        k = torch.arange(1, D + 1, dtype=torch.float64)
        for j, word in enumerate(words, 1):
            found = found + ((1 - j / count) - k / D * (1 - 2 * j / count)) * table[word]
        return found

    def one(w: Weights, story: Any, question: Any) -> Any:
        told = [(i, [int(v) for v in s if v]) for i, s in enumerate(story) if s[0]]
        u = sentence(w["tables.0.weight"], [int(v) for v in question if v])
        for hop in range(hops):
            m, c = (
                [sentence(w[f"tables.{at}.weight"], s) + w[f"times.{at}.weight"][i]
                 for i, s in told]
                for at in (hop, hop + 1)
            )  # fmt: skip
            if told:
                p = torch.stack(m) @ u
                u = u + (p if linear else p.softmax(0)) @ torch.stack(c)
        return w[f"tables.{hops}.weight"] @ u

    def run(w: Weights, story_ids: Any, question_ids: Any) -> list[Any]:
        both = zip(story_ids, question_ids, strict=True)
        return [torch.stack([one(w, *each) for each in both])]

    return run


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("hops", [1, 3])
def test_memory_network(hops: int, linear: bool) -> None:
    module: Any = create(
        "memory-network", vocabulary=V, features=D, hops=hops, length=4, linear=linear
    )
    story = RNG.integers(1, V, (3, 4, 5))
    story[0, 1, 3:] = story[1, 2:] = story[2, :, 1:] = story[2, 3] = 0
    question = RNG.integers(1, V, (3, 3))
    question[1, 1:] = 0
    feeds = {"story_ids": story, "question_ids": question}
    twin = memory_network(hops, linear=linear)
    check(module, twin, find("memory-network").inputs(), feeds)


class Sampled(nn.Module):
    """Word vectors with the loss of negative sampling."""

    def __init__(self) -> None:
        self.vectors: Any = create("word-vectors", vocabulary=V, features=D)

    def __call__(self, word_ids: Any, context_ids: Any) -> dict[str, Any]:
        from graphgen.models.word_vectors import negative_sampling

        [scores] = self.vectors(word_ids, context_ids).values()
        return {"scores": scores, "sampled": negative_sampling(scores)}


@pytest.mark.parametrize("negatives", [0, 5])
def test_word_vectors(negatives: int) -> None:
    def twin(w: Weights, word_ids: Any, context_ids: Any) -> list[Any]:
        v, c = w["vectors.embedding.weight"][word_ids], w["vectors.context.weight"][context_ids]
        scores = torch.einsum("bd,bnd->bn", v, c)
        log_sigmoid = torch.nn.functional.logsigmoid
        losses = log_sigmoid(scores[:, 0]) + log_sigmoid(-scores[:, 1:]).sum(1)
        return [scores, -losses.mean()]

    feeds = {
        "word_ids": RNG.integers(0, V, 6),
        "context_ids": RNG.integers(0, V, (6, 1 + negatives)),
    }
    check(Sampled(), twin, find("word-vectors").inputs(), feeds)


def multi_head(w: Weights, x: Any, keep: Any, causal: bool) -> Any:
    """Full attention with a mask; what sees nothing gives zeros before the last product."""
    count = x.shape[1]
    keep = keep & torch.ones(count, count, dtype=torch.bool).tril() if causal else keep
    q, k, v = (
        linear(w, name, x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for name in ("query", "key", "value")
    )
    some = keep.any(-1, keepdim=True)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep | ~some) * some
    return linear(w, "output", y.transpose(1, 2).flatten(2))


LAYOUT = np.array([[1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]], bool)
PATTERNS: dict[str, tuple[Any, Any]] = {
    "window": (partial(ops.window_attention, window=4), lambda d: abs(d) < 4),
    "strided": (
        partial(ops.strided_attention, stride=3), lambda d: (abs(d) < 3) | (d % 3 == 0)
    ),
    "blocks": (
        partial(ops.block_sparse_attention, layout=LAYOUT, block=4),
        lambda d: torch.tensor(np.kron(LAYOUT, np.ones((4, 4)))[: len(d), : len(d)] > 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 13])
@pytest.mark.parametrize("name", PATTERNS)
def test_attention_in_a_pattern(name: str, length: int, causal: bool) -> None:
    pattern, keeps = PATTERNS[name]
    module = nn.Attention(D, num_heads=HEADS, causal=causal, pattern=pattern)

    def twin(w: Weights, x: Any, mask: Any) -> list[Any]:
        places = torch.arange(length)
        keep = keeps(places[:, None] - places) & mask[:, None, None]
        return [multi_head(w, x, keep, causal)]

    mask = np.arange(length) < np.array([[length], [max(1, length - 4)]])
    x = RNG.standard_normal((2, length, D)).astype(np.float32)
    specs = {"x": gg.float32["b", "t", D], "mask": gg.bool_["b", "t"]}
    check(module, twin, specs, {"x": x, "mask": mask})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rounds", [1, 3])
def test_attention_by_hashing(rounds: int, causal: bool) -> None:
    buckets, length, size = 4, 13, D // HEADS
    rotations = torch.tensor(
        np.array([r[0] for r in ops.hash_rotations(size, buckets=[buckets], rounds=rounds, seed=0)])
    ).double()
    # A chunk holds all: the keys of a bucket are all that hash into it.
    module = HashedAttention(
        D, num_heads=HEADS, buckets=buckets, chunk=16, rounds=rounds, causal=causal
    )

    def twin(w: Weights, x: Any) -> list[Any]:
        q, v = (
            linear(w, name, x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for name in ("query", "value")
        )
        places = torch.arange(length)
        keep = torch.zeros(len(x), HEADS, length, length, dtype=torch.bool)
        for rotation in rotations:
            turned = q @ rotation
            bucket = torch.cat([turned, -turned], -1).argmax(-1)
            keep |= bucket[..., :, None] == bucket[..., None, :]
        keep &= places[:, None] > places if causal else places[:, None] != places
        keep |= ~keep.any(-1, keepdim=True) & torch.eye(length, dtype=torch.bool)
        k = torch.nn.functional.normalize(q, dim=-1)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return [linear(w, "output", y.transpose(1, 2).flatten(2))]

    x = RNG.standard_normal((2, length, D)).astype(np.float32)
    check(module, twin, {"x": gg.float32["b", "t", D]}, {"x": x})
