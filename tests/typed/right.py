# pyright: strict
"""A user's program: type checkers report nothing in it, and it runs."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import assert_type

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

import graphgen as gg
from graphgen import nn, ops
from graphgen.export.session import Session
from graphgen.nn import Linear
from graphgen.ops.norm import layer_norm


class Gate(nn.Module):
    """A module of one's own, with parameters of other modules and one of its own."""

    def __init__(self, features: int, *, activation: nn.Activation = "gelu") -> None:
        self.linear = Linear(features, features, bias=False)
        self.norm = nn.LayerNorm(features)
        self.feed_forward = nn.FeedForward(features, 2 * features, activation=activation)
        self.layers: list[nn.Module] = [nn.Linear(features, features), nn.RMSNorm(features)]

    def __call__(self, x: gg.Tensor, mask: gg.Tensor | None = None) -> gg.Tensor:
        y = self.norm(x) * ops.sigmoid(self.linear(x))
        assert_type(self.linear(x), gg.Tensor)
        assert_type(ops.softmax(x, axis=-1), gg.Tensor)
        if mask is not None:
            y = ops.where(ops.unsqueeze(mask, [-1]), y, 0.0)
        for layer in self.layers:
            y = layer(y)
        return y + self.feed_forward(y) / math.sqrt(2.0)


class Model(nn.Module):
    """Two outputs by name, of whole layers."""

    def __init__(self) -> None:
        self.embedding = nn.Embedding(16, 8)
        self.encoder = nn.Encoder(
            8, layers=2, num_heads=2, kv_heads=1, activation="silu", gated=True, norm="rms"
        )
        self.gate = Gate(8, activation="relu")
        self.recurrent = nn.Recurrent(8, 8, kind="lstm")

    def __call__(self, tokens: gg.Tensor) -> dict[str, gg.Tensor]:
        x = self.gate(self.encoder(self.embedding(tokens)))
        h, (last, _) = self.recurrent(x)
        return {"logits": self.embedding.logits(h), "last": ops.squeeze(last, [0])}


def arithmetic(x: gg.Tensor, ids: gg.Tensor) -> tuple[gg.Tensor, ...]:
    """Numbers beside tensors, shapes, dtypes, lists and arguments."""
    y = 2 * x + 1 - x / 3.0
    y = x @ ops.swap_last(y) if x.shape[-1] == 8 else y
    count = ops.dim(x, 0)
    z = ops.reshape(x, [count, -1])
    whole = ops.cast(ids, to=gg.float32) + ops.cast(ids, to="float32")
    whole = whole + ops.cast(ids, to=np.float32) + ids.astype(gg.float32)
    joined = ops.concat([x, x, x], axis=-1)
    same = ops.concat(x, x, axis=0)
    largest, index = ops.top_k(x, 2, axis=-1)
    a, b = ops.split(x, axis=-1, num_outputs=2)
    kept = (x > 0.5) & ~(x < 0.1) | (x == 0.0)
    mean = ops.reduce_mean(x, -1, keepdims=0)
    assert_type(mean, gg.Tensor)
    chosen = ops.where(kept, x, -math.inf)
    constant = x * np.ones(8, np.float32)
    stacked = ops.einsum(x, x, equation="bij,bkj->bik")
    padded = ops.pad(x, [0, 0, 0, 0, 0, 1], mode="edge")
    normed = layer_norm(x, np.ones(8, np.float32), epsilon=1e-6)
    results = [whole, joined, same, largest, index, a, b, mean, chosen, constant, stacked]
    return (y, z, padded, normed, *results)


def indexed(x: gg.Tensor, lengths: gg.Tensor) -> gg.Tensor:
    """NumPy's indexing, shapes and dtypes."""
    last = x[:, -1]
    every_second = x[..., ::2]
    batch, length, features = x.shape
    again = ops.reshape(x, [batch * length, features])
    scaled = last.astype(np.float32) * 0.5 + every_second[:, 0, :1]
    scaled = ops.relu(scaled) / length
    chosen = x[ops.arange(batch), lengths - 1]
    return scaled[None, ...] + lengths.astype(x.dtype)[:, None] + again[0] + chosen


def signs(x: gg.Tensor, mask: gg.Tensor) -> gg.Tensor:
    """Unary operators, and numbers and arrays on the left."""
    y = -x + 2**x - 7 % (abs(x) + 1.0)
    bent = ops.where(~mask & (x > 0.0) | False ^ mask, -y, 8 // (abs(y) + 1.0))
    return np.ones((2, 3), np.float32) @ bent + np.exp(-x)[:2]


def chosen(x: gg.Tensor, state: gg.Tensor) -> tuple[gg.Tensor, ...]:
    """A choice of two computations, and recurrent operators."""
    w, r = np.ones((1, 12, 3), np.float32), np.ones((1, 12, 3), np.float32)
    [near] = ops.cond(ops.reduce_sum(x, keepdims=0) > 0.0, lambda: [x + 1.0], lambda: [-x])
    a, b = ops.cond(len(x.shape) > 1, lambda: (x, x), lambda: (x, near))
    y, h, c = ops.lstm(near, w, r, None, None, state, hidden_size=3)
    steps, last = ops.gru(a + b, w[:, :9], r[:, :9], hidden_size=3)
    assert_type(ops.rnn(x, w[:, :3], r[:, :3], hidden_size=3), tuple[gg.Tensor, gg.Tensor])
    return y, h, c, steps, last


def loss(logits: gg.Tensor, labels: gg.Tensor, weights: gg.Tensor) -> gg.Tensor:
    """A loss of one's own, with an input of its own."""
    mean = ops.cross_entropy(logits, labels, label_smoothing=0.1)
    return mean * ops.reduce_mean(weights, keepdims=0)


def batches() -> Iterator[dict[str, npt.NDArray[np.generic]]]:
    """Random tokens, and the tokens after them."""
    rng = np.random.default_rng(0)
    for _ in range(2):
        ids = rng.integers(0, 16, (2, 5))
        yield {"tokens": ids[:, :4], "labels": ids[:, 1:], "weights": np.ones((2, 4), np.float32)}


def look(folder: Path) -> None:
    """Why a graph is as it is, in which ways two differ, and which rewrite breaks it."""
    module = nn.EncoderLayer(8, num_heads=2)
    model = gg.build(module, primitives=True, x=gg.float32["batch", "seq", 8])
    best = gg.optimize(model)
    gg.assert_graph(best, attention=1, norm=2)
    gg.assert_graph(gg.export(best, folder / "layer.onnx"), "...\nreturn %output", softmax=0)
    found = gg.explain(model, "fuse_attention", target="cuda", strict_masked_rows=True)
    print(found.sites[0].reason, found.text(every=True))
    print(gg.diff(model, folder / "layer.onnx", canonical=True).changes[:1], gg.diff(best, best))
    sizes = {"batch": 1, "seq": 3}
    step = gg.bisect(model, dims=sizes, tolerance=1e-5, passes=["clean", "fuse_attention"])
    print(step.complete, step.whole.figures)
    rows = gg.compare(best, dims=sizes, kinds=[], seconds=0.0, passes=["clean"])
    print(rows["pipeline"].nodes, rows.result())


def main(folder: Path) -> None:
    """Build, optimize, export, run, compare, and train two steps."""
    look(folder)
    module = Model()
    model = gg.build(module, tokens=gg.int64["batch", 4], seed=1)
    assert_type(model, ir.Model)
    best = gg.optimize(model, target="cpu", verify=True, expect={"attention": 2})
    print(best.report.fused()["attention"], best.report.remarks()[:1])
    file = gg.export(best, folder / "model.onnx")
    session: Session = gg.Session(file, provider="cpu", threads=1)
    tokens = np.zeros((3, 4), np.int64)
    logits, last = session(tokens=tokens)
    logits, last = session({"tokens": [[1, 2, 3, 4]]})
    print(logits.shape, last.dtype, session.inputs["tokens"].dims)

    x = np.ones((2, 3, 8), np.float32)
    shown = gg.build(arithmetic, x=gg.float32["b", 3, 8], ids=gg.int64[1])
    print(len(gg.Session(shown)(x=x, ids=[2])), len(arithmetic(x, np.array([2]))))
    some = gg.build(indexed, x=gg.float32["b", "t", 8], lengths=gg.int64["b"])
    print(gg.Session(some)(x=x, lengths=[1, 2])[0].shape, indexed(x, np.array([1, 2])).shape)
    wide, mask = np.ones((3, 3), np.float32), np.eye(3) > 0.0
    spec = gg.float32[3, 3]
    print(gg.Session(gg.build(signs, x=spec, mask=gg.bool_[3, 3]))(x=wide, mask=mask)[0].shape)
    print(signs(wide, mask).shape, ops.relu(-wide).shape, ops.where(mask, wide, -wide).shape)
    recurrent = gg.build(chosen, x=gg.float32[2, 3, 3], state=gg.float32[1, 3, 3])
    print(len(gg.Session(recurrent)(x=wide[None].repeat(2, 0), state=wide[None])))
    part = gg.build(module.gate, x=gg.float32["b", "t", 8], mask=gg.bool_["b", "t"])
    print(gg.load(gg.export(part, folder / "gate.onnx")).graph.num_nodes())
    pattern = partial(ops.window_attention, window=2)
    nn.initialize(attention := nn.Attention(8, num_heads=2, pattern=pattern), seed=0)
    print(attention(x).shape)

    table = gg.artifacts(
        gg.build(module, tokens=gg.int64["batch", 4], training=True),
        folder / "artifacts",
        loss=loss,
        output=None,
        optimizer=gg.AdamW(weight_decay=0.0, clip_norm=1.0),
        profile="stock",
        recompute="full",
        weights=gg.float32["batch", 4],
        labels=gg.int64["batch", 4],
    )
    print(next(weight.name for weight in table if weight.trained))
    trainer = gg.Trainer(folder / "artifacts", schedule=gg.schedule.constant(1e-3), seed=0)
    history = trainer.fit(list(batches()), steps=2, progress=False)
    print(history[-1]["loss"], trainer.step)
