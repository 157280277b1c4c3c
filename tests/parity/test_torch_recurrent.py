"""Recurrent layers, scans and encoder-decoders against torch's own, from the same weights."""

from typing import Any, get_args

import numpy as np
import pytest
from torch_twins import Weights, check

import graphgen as gg
from graphgen import nn, ops
from graphgen.models.recurrent import RecurrentSeq2Seq, Score
from graphgen.models.transformer import inputs
from graphgen.nn.module import ones

torch = pytest.importorskip("torch", reason="needs torch: make parity")
pytestmark = pytest.mark.parity

D, H, B = 5, 7, 3
RNG = np.random.default_rng(13)
GATES = {"rnn": [0], "lstm": [0, 2, 3, 1], "gru": [1, 0, 2]}
"""Where torch's gates are in ours: i f g o in i o f g, and r z n in z r n."""


def normal(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


class Layer(nn.Module):
    """A recurrent layer from given states, and its last ones.

    With `before` it is the GRU of torch, whose gate multiplies the product with the state.
    """

    def __init__(self, kind: str, *, bidirectional: bool, before: bool = False):
        self.layer = nn.Recurrent(D, H, kind=kind, bidirectional=bidirectional)
        self.before = before

    def __call__(self, x: Any, lengths: Any = None, **states: Any) -> dict[str, Any]:
        if self.before:
            layer, turn = self.layer, [1, 0, 2]
            given = (layer.weight, layer.recurrent, layer.bias, lengths, *states.values())
            options = {"direction": layer.direction, "hidden_size": H, "linear_before_reset": 1}
            y, last = ops.gru(ops.transpose(x, perm=turn), *given, **options)
            y = ops.reshape(ops.transpose(y, perm=[2, 0, 1, 3]), [0, 0, -1])
            return {"y": y, "last0": last}
        y, lasts = self.layer(x, *states.values(), lengths=lengths)
        return {"y": y, **{f"last{i}": last for i, last in enumerate(lasts)}}


def torch_layer(kind: str, *, bidirectional: bool) -> Any:
    """torch.nn.RNN, LSTM or GRU on our weights, with lengths."""
    options = {"batch_first": True, "bidirectional": bidirectional, "dtype": torch.float64}
    module = getattr(torch.nn, kind.upper())(D, H, **options)

    def in_order(weight: Any) -> Any:
        parts = weight.chunk(len(GATES[kind]))
        return torch.cat([parts[i] for i in GATES[kind]])

    def run(w: Weights, x: Any, lengths: Any = None, **states: Any) -> list[Any]:
        theirs = {}
        for d in range(1 + bidirectional):
            biases = w["layer.bias"][d].chunk(2)
            ours = (w["layer.weight"][d], w["layer.recurrent"][d], *biases)
            names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
            for name, weight in zip(names, ours, strict=True):
                theirs[name + "_reverse" * d] = in_order(weight)
        utils, length = torch.nn.utils.rnn, x.shape[1]
        if lengths is not None:
            options = {"batch_first": True, "enforce_sorted": False}
            x = utils.pack_padded_sequence(x, lengths.to(torch.int64), **options)
        first = tuple(states.values())
        given = (x, first if kind == "lstm" else first[0])
        y, last = torch.func.functional_call(module, theirs, given)
        if lengths is not None:
            y, _ = utils.pad_packed_sequence(y, batch_first=True, total_length=length)
        return [y, *(last if kind == "lstm" else [last])]

    return run


def cell(kind: str, x: Any, w: Any, r: Any, b: Any, h: Any, c: Any = None) -> list[Any]:
    """One step; of the GRU that of arXiv 1406.1078, whose gate multiplies the state."""
    p, (own, carried) = x @ w.T, b.chunk(2)
    if kind == "rnn":
        return [torch.tanh(p + own + h @ r.T + carried)]
    if kind == "lstm":
        i, o, f, g = (p + own + h @ r.T + carried).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return [o.sigmoid() * c.tanh(), c]
    (wz, wr, wn), (rz, rr, rn) = (p + own).chunk(3, -1), r.chunk(3)
    bz, br, bn = carried.chunk(3)
    z, reset = (wz + h @ rz.T + bz).sigmoid(), (wr + h @ rr.T + br).sigmoid()
    n = (wn + (reset * h) @ rn.T + bn).tanh()
    return [(1 - z) * n + z * h]


def layer(
    kind: str, w: Weights, name: str, x: Any, lengths: Any = None, *first: Any
) -> tuple[Any, list[Any]]:
    """All h of each direction side by side, 0 behind a row's length, and the last states."""
    ys, lasts = [], []
    for d, weight in enumerate(w[f"{name}.weight"]):
        own = weight, w[f"{name}.recurrent"][d], w[f"{name}.bias"][d]
        size = own[1].shape[1]
        zeros = [x.new_zeros(1 + d, len(x), size)] * (1 + (kind == "lstm"))
        states = [state[d] for state in first or zeros]
        rows: list[Any] = [None] * x.shape[1]
        for t in range(x.shape[1])[:: -1 if d else 1]:
            keep = torch.ones(len(x), 1) > 0 if lengths is None else (t < lengths)[:, None]
            new = cell(kind, x[:, t], *own, *states)
            states = [torch.where(keep, a, b) for a, b in zip(new, states, strict=True)]
            rows[t] = torch.where(keep, new[0], 0.0)
        ys.append(torch.stack(rows, 1))
        lasts.append(states)
    return torch.cat(ys, -1), [torch.stack(each) for each in zip(*lasts, strict=True)]


@pytest.mark.parametrize(("length", "padded"), [(1, False), (13, False), (13, True)])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", ["rnn", "lstm", "gru", "gru of torch"])
def test_layers(kind: str, bidirectional: bool, length: int, padded: bool) -> None:
    kind, before = kind.split()[0], kind.endswith("torch")
    states = {f"state{i}": normal(1 + bidirectional, B, H) for i in range(1 + (kind == "lstm"))}
    feeds = {"x": normal(B, length, D), **states}
    specs: dict[str, Any] = {"x": gg.float32["b", "t", D]}
    specs |= dict.fromkeys(states, gg.float32[1 + bidirectional, "b", H])
    if padded:
        feeds["lengths"] = np.array([length, 1, max(1, length - 2)], np.int32)
        specs["lengths"] = gg.int32["b"]
    twin = torch_layer(kind, bidirectional=bidirectional)
    if kind == "gru" and not before:

        def twin(w: Weights, x: Any, lengths: Any = None, **states: Any) -> list[Any]:
            y, last = layer(kind, w, "layer", x, lengths, *states.values())
            return [y, *last]

    check(Layer(kind, bidirectional=bidirectional, before=before), twin, specs, feeds)


class Scanned(nn.Module):
    """Two states over two inputs, a parameter in the step and a scan in it."""

    def __init__(self, *, reverse: bool):
        self.reverse = reverse
        self.weight = nn.Parameter((D, D), initialize=ones)

    def __call__(self, x: Any, z: Any, h: Any) -> dict[str, Any]:
        weight = self.weight * 0.5  # outside of the step, and read in it

        def step(h: Any, total: Any, x: Any, z: Any) -> Any:
            def inner(h: Any, row: Any) -> Any:
                h = ops.sigmoid(ops.matmul(h, weight) + row)
                return [h], []

            [h], _ = ops.scan(inner, [ops.tanh(h) * z], [x], axis=1)
            return [h, total + h * z], [h - total, total * z]

        first = [h, h * 0.5]
        (last, total), (ys, zs) = ops.scan(step, first, [x, z], axis=1, reverse=self.reverse)
        return {"last": last, "total": total, "ys": ys, "zs": zs}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 9])
def test_a_scan_in_a_scan(length: int, reverse: bool) -> None:
    def twin(w: Weights, x: Any, z: Any, h: Any) -> list[Any]:
        weight, total = w["weight"] * 0.5, h * 0.5
        ys, zs = [None] * length, [None] * length
        for t in range(length)[:: -1 if reverse else 1]:
            h = torch.tanh(h) * z[:, t]
            for s in range(x.shape[2]):
                h = torch.sigmoid(h @ weight + x[:, t, s])
            ys[t], zs[t], total = h - total, total * z[:, t], total + h * z[:, t]
        return [h, total, torch.stack(ys, 1), torch.stack(zs, 1)]

    specs = {
        "x": gg.float32["b", "t", "s", D], "z": gg.float32["b", "t", D], "h": gg.float32["b", D],
    }  # fmt: skip
    feeds = {"x": normal(B, length, 4, D), "z": normal(B, length, D), "h": normal(B, D)}
    check(Scanned(reverse=reverse), twin, specs, feeds)


def seq2seq(kind: str, score: str) -> Any:
    """The recurrent encoder-decoder, step by step."""

    def run(w: Weights, source_ids: Any, source_mask: Any, target_ids: Any) -> list[Any]:
        table, lengths = w["embedding.weight"], source_mask.sum(1)
        memory, last = layer(kind, w, "encoder", table[source_ids], lengths)
        states, x, rows = [state[-1] for state in last], table[target_ids], []
        own = [w[f"decoder.{name}"][0] for name in ("weight", "recurrent", "bias")]
        for t in range(x.shape[1]):
            now, query = x[:, t], states[0]
            if score == "additive":
                both = (query @ w["query.weight"])[:, None] + memory @ w["key.weight"]
                context = read(memory, (both.tanh() @ w["energy.weight"])[..., 0], source_mask)
                now = torch.cat([now, context], -1)
            states = cell(kind, now, *own, *states)
            y = states[0]
            if score == "multiplicative":
                scores = ((y @ w["query.weight"])[:, None] * memory).sum(-1)
                context = read(memory, scores, source_mask)
            if score != "none":
                y = torch.cat([y, context], -1) @ w["output.weight"] + w["output.bias"]
                y = y.tanh()
            rows.append(y @ table.T)
        return [torch.stack(rows, 1)]

    return run


def read(memory: Any, scores: Any, mask: Any) -> Any:
    """What attention with these scores (B, S) reads of the memory (B, S, D)."""
    weights = scores.masked_fill(mask == 0, -torch.inf).softmax(-1)
    return (weights[..., None] * memory).sum(1)


@pytest.mark.parametrize("score", get_args(Score))
@pytest.mark.parametrize("kind", ["rnn", "lstm", "gru"])
def test_encoder_decoders(kind: str, score: str) -> None:
    mask = np.ones((2, 6), np.int64)
    mask[1, 3:] = 0
    feeds = {
        "source_ids": RNG.integers(0, 11, (2, 6)),
        "source_mask": mask,
        "target_ids": RNG.integers(0, 11, (2, 5)),
    }
    module = RecurrentSeq2Seq(11, 8, kind=kind, score=score)
    check(module, seq2seq(kind, score), inputs(), feeds)
