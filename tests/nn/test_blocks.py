"""Blocks that read more than their tokens: a memory of another size, and a condition."""

from typing import Any

import numpy as np
import pytest
from gradients import checked_gradients
from small_models import ROUNDING, relative_rms, run_plain, vary

import graphgen as gg
from graphgen import nn, ops
from graphgen.nn.module import initialize

RNG = np.random.default_rng(8)


def x_of(*shape: int) -> Any:
    return RNG.standard_normal(shape, np.float32)


def weights_of(module: Any) -> dict[str, Any]:
    return {name: p.array.astype(np.float64) for name, p in initialize(vary(module)).items()}


def linear(w: dict[str, Any], name: str, x: Any) -> Any:
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def normed(w: dict[str, Any], name: str, x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def cross_attention(w: dict[str, Any], name: str, x: Any, memory: Any, mask: Any) -> Any:
    """Heads of two features, one sequence and head at a time."""
    q = linear(w, f"{name}.query", x)
    k, v = (linear(w, f"{name}.{part}", memory) for part in ("key", "value"))
    y = np.zeros_like(q)
    for n, head in np.ndindex(len(x), q.shape[-1] // 2):
        at = slice(2 * head, 2 * head + 2)
        e = np.exp(q[n, :, at] @ k[n, mask[n], at].T / np.sqrt(2))
        y[n, :, at] = e / e.sum(-1, keepdims=True) @ v[n, mask[n], at]
    return linear(w, f"{name}.output", y)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_attention_to_a_memory_of_another_size(placement: str) -> None:
    module = nn.CrossAttentionLayer(
        8, num_heads=4, memory_features=6, placement=placement, activation="relu", hidden=5
    )
    w, x, memory = weights_of(module), x_of(2, 3, 8), x_of(2, 5, 6)
    mask = np.arange(5) < [[5], [2]]

    def residual(name: str, x: Any, f: Any) -> Any:
        if placement == "pre":
            return x + f(normed(w, f"{name}.norm", x))
        return normed(w, f"{name}.norm", x + f(x))

    def feed_forward(h: Any) -> Any:
        return linear(w, "feed_forward.down", np.maximum(linear(w, "feed_forward.up", h), 0))

    wanted = residual("residual1", x, lambda h: cross_attention(w, "attention", h, memory, mask))
    wanted = residual("residual2", wanted, feed_forward)
    assert relative_rms(wanted, module(x, memory, memory_mask=mask)) < ROUNDING
    specs = {"x": gg.float32["b", "t", 8], "memory": gg.float32["b", "s", 6]}
    specs["memory_mask"] = gg.bool_["b", "s"]
    weights = {name: array.astype(np.float32) for name, array in w.items()}
    model = gg.build(module, weights=weights, primitives=True, **specs)
    best = gg.optimize(model, verify=True)
    assert best.report.fused()["attention"] == 1 and best.report.shortfalls() == []
    for graph in (model, best.model):
        found = run_plain(graph, {"x": x, "memory": memory, "memory_mask": mask})[0]
        assert relative_rms(wanted, found) < ROUNDING


def test_a_decoder_reads_a_memory_of_another_size() -> None:
    specs = {"x": gg.float32["b", "t", 8], "memory": gg.float32["b", "s", 6]}
    decoder = nn.Decoder(8, layers=1, num_heads=2, memory_features=6)
    feeds = {"x": x_of(1, 3, 8), "memory": x_of(1, 4, 6)}
    found = run_plain(gg.build(decoder, **specs), feeds)[0]
    assert relative_rms(decoder(**feeds), found) < ROUNDING
    with pytest.raises(
        gg.GraphgenError, match=r"Attention\(8, memory_features=6\): it was given no"
    ):
        gg.build(nn.Attention(8, num_heads=2, memory_features=6), x=specs["x"])
    with pytest.raises(gg.GraphgenError, match="its last dimension must be 6"):
        gg.build(decoder, x=specs["x"], memory=specs["x"])


@pytest.mark.parametrize(
    "module",
    [
        nn.Attention(4, num_heads=2),
        nn.EncoderLayer(4, num_heads=1),
        nn.Convolution(4, 4, kernel=2),
        nn.Recurrent(4, 3),
        nn.LearnedPositions(5, 4),
        nn.SinusoidalPositions(4),
    ],
)
def test_a_sequence_has_three_dimensions(module: Any) -> None:
    """Of two, positions made three, and attention took the four of a head for those of heads."""
    nn.initialize(module)
    for shape in ((2, 4), (1, 2, 3, 4)):
        with pytest.raises(gg.GraphgenError, match=r"it must have 3 dimensions"):
            module(np.ones(shape, np.float32))
        with pytest.raises(gg.GraphgenError, match=r"it must have 3 dimensions"):
            gg.build(module, x=gg.float32[shape])


@pytest.mark.parametrize("heads", [(4, 3, 3), (2, 4, 4), (2, 2, 1), (4, 2, 1)])
def test_heads_that_do_not_fit_are_refused(heads: tuple[int, int, int]) -> None:
    """The runtime would say so, when it runs; on arrays one head of V would be all of them."""
    arrays = [np.ones((1, number, 3, 8), np.float32) for number in heads]
    told = "Q has {} heads, K {} and V {}; K and V must have".format(*heads)
    with pytest.raises(gg.GraphgenError, match=told):
        gg.ops.attention(*arrays)
    q, k, v = (gg.float32[array.shape] for array in arrays)
    with pytest.raises(gg.GraphgenError, match=told):
        gg.build(lambda q, k, v: gg.ops.attention(q, k, v), q=q, k=k, v=v)


def test_numbers_of_heads_that_do_not_fit_are_refused() -> None:
    x, heads = np.ones((1, 3, 12), np.float32), {"q_num_heads": 4, "kv_num_heads": 3}
    with pytest.raises(gg.GraphgenError, match="Q has 4 heads, K 3"):
        gg.ops.attention(x, x[..., :9], x[..., :9], **heads)
    kinds = {"q": gg.float32[x.shape], "k": gg.float32[1, 3, 9], "v": gg.float32[1, 3, 9]}
    with pytest.raises(gg.GraphgenError, match="Q has 4 heads, K 3"):
        gg.build(lambda q, k, v: gg.ops.attention(q, k, v, **heads), **kinds)


def test_attention_has_one_batch() -> None:
    """On arrays one of 1 was broadcast; the runtime refuses it."""
    layer = nn.CrossAttentionLayer(4, memory_features=4, num_heads=1)
    nn.initialize(layer)
    x, memory = np.ones((1, 3, 4), np.float32), np.ones((2, 5, 4), np.float32)
    with pytest.raises(gg.GraphgenError, match="batches of 1 and 2; make them equal"):
        layer(x, memory)
    with pytest.raises(gg.GraphgenError, match="batches of 1 and 2; make them equal"):
        gg.build(layer, x=gg.float32[1, 3, 4], memory=gg.float32[2, 5, 4])


class Conditioned(nn.Module):
    """x + gate · f(norm(x) · (1 + scale) + shift)."""

    def __init__(self) -> None:
        self.norm = nn.LayerNorm(4, gain=False, bias=False)
        self.linear = nn.Linear(4, 4)
        self.modulation = nn.Modulation(6, 4)

    def __call__(self, x: Any, c: Any) -> dict[str, Any]:
        shift, scale, gate = self.modulation(c)
        return {"y": x + gate * self.linear(self.norm(x) * (scale + 1.0) + shift)}


def test_a_condition_shifts_scales_and_gates() -> None:
    module, x, c = Conditioned(), x_of(2, 3, 4), x_of(2, 6) * 2
    initialize(module)
    np.testing.assert_array_equal(module(x, c)["y"], x)  # before it is trained
    w, tokens = weights_of(module), []
    parts = linear(w, "modulation", c / (1 + np.exp(-c.astype(np.float64))))
    for n, t in np.ndindex(2, 3):
        shift, scale, gate = parts[n, :4], parts[n, 4:8], parts[n, 8:]
        normal = (x[n, t] - x[n, t].mean()) / np.sqrt(x[n, t].astype(np.float64).var() + 1e-5)
        tokens.append(x[n, t] + gate * linear(w, "linear", normal * (1 + scale) + shift))
    specs = {"x": gg.float32["b", "t", 4], "c": gg.float32["b", 6]}
    weights = {name: array.astype(np.float32) for name, array in w.items()}
    [found] = run_plain(gg.build(module, weights=weights, **specs), {"x": x, "c": c})
    assert relative_rms(np.reshape(tokens, (2, 3, 4)), found) < ROUNDING
    total = lambda y: ops.reduce_sum(ops.tanh(y), None, keepdims=0)  # noqa: E731
    checked_gradients(module, total, specs, {"x": x, "c": c})
    with pytest.raises(gg.GraphgenError, match=r"Modulation\(condition=6.*dimension must be 6"):
        gg.build(nn.Modulation(6, 4), c=gg.float32["b", 5])
    with pytest.raises(gg.GraphgenError, match="count is 0; it must be an integer of at least 1"):
        nn.Modulation(6, 4, count=0)
