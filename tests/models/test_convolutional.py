"""Convolutions along sequences, and the models made of them, against float64 numpy."""

import math
from typing import Any

import numpy as np
import pytest
from gradients import check_trained_step, checked_gradients
from small_models import ROUNDING, relative_rms, run_plain, vary

import graphgen as gg
from graphgen import nn, ops
from graphgen.models import create, find
from graphgen.models.bytenet import ResidualBlock
from graphgen.models.convs2s import DecoderBlock
from graphgen.models.neural_gpu import ConvolutionalGRU
from graphgen.nn.module import initialize

RNG = np.random.default_rng(14)
SMALL: dict[str, dict[str, Any]] = {
    "bytenet": {"layers": 2, "dilation": 2, "dropout": 0.0},
    "convs2s": {"layers": 2, "length": 9, "dropout": 0.0},
    "neural-gpu": {"layers": 1, "length": 4, "width": 2},
}


def x_of(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def small(name: str, **more: Any) -> Any:
    return create(name, **{"vocabulary": 11, "features": 8} | SMALL[name] | more)


def weights_of(module: Any) -> dict[str, Any]:
    return {name: p.array.astype(np.float64) for name, p in initialize(vary(module)).items()}


# By hand, in float64


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def linear(x: Any, w: dict[str, Any], name: str) -> Any:
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def relu_norm(x: Any, w: dict[str, Any], name: str) -> Any:
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return np.maximum(x * w[f"{name}.weight"] + w[f"{name}.bias"], 0)


def convolution(
    x: Any,
    weight: Any,
    bias: Any,
    *,
    dilation: int = 1,
    causal: bool,
    mask: Any = None,
    stride: int = 1,
    groups: int = 1,
    padding: int | None = None,
) -> Any:
    """One element of the sequence, and of the kernel, at a time."""
    (batch, length, features), (size, _, kernel) = x.shape, weight.shape
    reach = (kernel - 1) * dilation
    before = reach // (1 if causal else 2) if padding is None else padding
    places = length if padding is None else length + 2 * padding - reach
    y = np.zeros((batch, -(-places // stride), size)) + bias
    for n, t, j, group in np.ndindex(*y.shape[:2], kernel, groups):
        at = t * stride - before + j * dilation
        if 0 <= at < length and (mask is None or mask[n, at]):
            rows = slice(size // groups * group, size // groups * (group + 1))
            columns = slice(features // groups * group, features // groups * (group + 1))
            y[n, t, rows] += weight[rows, :, j] @ x[n, at, columns]
    return y


def image_convolution(x: Any, weight: Any, bias: Any) -> Any:
    (batch, _, rows, columns), (size, _, kernel, _) = x.shape, weight.shape
    y = np.zeros((batch, size, rows, columns)) + bias[:, None, None]
    for r, c, i, j in np.ndindex(rows, columns, kernel, kernel):
        a, b = r + i - (kernel - 1) // 2, c + j - (kernel - 1) // 2
        if 0 <= a < rows and 0 <= b < columns:
            y[:, :, r, c] += x[:, :, a, b] @ weight[:, :, i, j].T
    return y


# Layers


@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("kernel", "dilation"), [(1, 1), (2, 1), (2, 3), (3, 1), (3, 4), (9, 1)])
def test_convolution(kernel: int, dilation: int, causal: bool, length: int) -> None:
    module = nn.Convolution(4, 6, kernel=kernel, dilation=dilation, causal=causal)
    w, x = weights_of(module), x_of(2, length, 4)
    mask = np.arange(length) < [[length], [max(1, length - 2)]]
    spec = {"x": gg.float32["batch", "seq", 4], "mask": gg.bool_["batch", "seq"]}
    model = gg.build(module, weights=w_float32(w), **spec)
    y = run_plain(model, {"x": x, "mask": mask})[0]
    options: dict[str, Any] = {"dilation": dilation, "causal": causal, "mask": mask}
    wanted = convolution(x.astype(np.float64), w["weight"], w["bias"], **options)
    assert relative_rms(wanted, y) < ROUNDING
    initialize(module, weights=w_float32(w))
    assert relative_rms(wanted, module(x, mask)) < ROUNDING


class Pair(nn.Module):
    """A convolution behind one of another kind, whose gradient is that of its result in x."""

    def __init__(self, **options: Any):
        self.first = nn.Convolution(4, 4, kernel=2)
        self.second = nn.Convolution(4, 8, kernel=3, **options)

    def __call__(self, x: Any) -> dict[str, Any]:
        return {"y": self.second(self.first(x))}


MOVED: list[dict[str, Any]] = [
    {"stride": 2},
    {"stride": 3, "causal": True, "dilation": 2},
    {"groups": 2},
    {"groups": 4, "stride": 2, "dilation": 3},
    {"padding": 0},
    {"padding": 3, "stride": 2, "groups": 2},
]


def total(y: Any) -> Any:
    """A loss that is not linear in y."""
    return ops.reduce_sum(ops.tanh(y), None, keepdims=0)


@pytest.mark.parametrize("options", MOVED, ids=str)
def test_strides_groups_and_padding(options: dict[str, Any]) -> None:
    """The result and all gradients, for lengths that are known at run time only."""
    module, spec = vary(Pair(**options)), {"x": gg.float32["batch", "seq", 4]}
    w = weights_of(module)
    model = gg.build(module, weights=w_float32(w), **spec)
    rng = np.random.default_rng(3)
    for length in (3, 8, 9):
        x = rng.standard_normal((2, length, 4), np.float32)
        first = convolution(x, w["first.weight"], w["first.bias"], causal=False)
        given = {"causal": False, **options}
        wanted = convolution(first, w["second.weight"], w["second.bias"], **given)
        assert relative_rms(wanted, run_plain(model, {"x": x})[0]) < ROUNDING
        checked_gradients(module, total, spec, {"x": x})


def w_float32(w: dict[str, Any]) -> dict[str, Any]:
    return {name: array.astype(np.float32) for name, array in w.items()}


def test_gated_linear_unit() -> None:
    x = x_of(2, 3, 10) * 30
    y = run_plain(gg.build(nn.GatedLinearUnit(), x=gg.float32["b", "t", 10]), {"x": x})[0]
    assert relative_rms(x[..., :5] * sigmoid(x[..., 5:].astype(np.float64)), y) < ROUNDING
    with pytest.raises(gg.GraphgenError, match="x has 5 features; it needs an even number"):
        gg.build(nn.GatedLinearUnit(), x=gg.float32["b", "t", 5])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"kernel": 0}, "Convolution: kernel is 0; it must be an integer of at least 1"),
        ({"dilation": 0}, "Convolution: dilation is 0; it must be an integer of at least 1"),
        ({"stride": 0}, "Convolution: stride is 0; it must be an integer of at least 1"),
        ({"groups": 3}, "groups=3.*: the groups must divide features_in and features_out"),
        ({"padding": -1}, "padding=-1.*: padding must be an integer of at least 0"),
        ({"padding": 1, "causal": True}, "a causal convolution chooses its own; leave one"),
    ],
)
def test_sizes_of_a_convolution_are_checked(wrong: dict[str, int], told: str) -> None:
    with pytest.raises(gg.GraphgenError, match=told):
        nn.Convolution(4, 4, **{"kernel": 3, **wrong})  # type: ignore[arg-type]
    with pytest.raises(gg.GraphgenError, match=r"Convolution\(.*its last dimension must be 4"):
        gg.build(nn.Convolution(4, 4, kernel=3), x=gg.float32["b", "t", 5])


def test_the_residual_block_of_bytenet() -> None:
    module = ResidualBlock(8, kernel=3, dilation=2, causal=True)
    w, x = weights_of(module), x_of(2, 5, 8)
    y = relu_norm(linear(relu_norm(x.astype(np.float64), w, "norm1"), w, "down"), w, "norm2")
    y = convolution(y, w["convolution.weight"], w["convolution.bias"], dilation=2, causal=True)
    wanted = x + linear(relu_norm(y, w, "norm3"), w, "up")
    model = gg.build(module, weights=w_float32(w), x=gg.float32["batch", "seq", 8])
    assert relative_rms(wanted, run_plain(model, {"x": x})[0]) < ROUNDING


def test_the_decoder_block_of_convs2s() -> None:
    module = DecoderBlock(8, kernel=3, dropout=0.0)
    w, (x, g, keys, values) = weights_of(module), (x_of(2, n, 8) for n in (5, 5, 4, 4))
    mask = np.array([[True] * 4, [True] * 3 + [False]])
    weight, bias = (w[f"block.convolution.{name}"] for name in ("weight", "bias"))
    gates = convolution(x.astype(np.float64), weight, bias, causal=True)
    h = math.sqrt(0.5) * (x + gates[..., :8] * sigmoid(gates[..., 8:]))
    scores = (linear(h, w, "query") + g) @ keys.astype(np.float64).transpose(0, 2, 1)
    a = softmax(np.where(mask[:, None], scores, -np.inf))
    m = mask.sum(-1)[:, None, None]
    wanted = math.sqrt(0.5) * (h + m * np.sqrt(1 / m) * (a @ values))  # as the paper has it
    x_spec, memory = gg.float32["b", "t", 8], gg.float32["b", "s", 8]
    specs = dict.fromkeys(("x", "g"), x_spec) | dict.fromkeys(("keys", "values"), memory)
    masks = {"mask": gg.bool_["b", 1, 1, "s"], "root": gg.float32["b", 1, 1]}
    model = gg.build(module, weights=w_float32(w), **specs, **masks)
    feeds = {"x": x, "g": g, "keys": keys, "values": values}
    feeds |= {"mask": mask[:, None, None], "root": np.sqrt(m).astype(np.float32)}
    assert relative_rms(wanted, run_plain(model, feeds)[0]) < ROUNDING


@pytest.mark.parametrize("tape", [True, False])
def test_the_unit_of_the_neural_gpu(tape: bool) -> None:
    module = ConvolutionalGRU(3, kernel=3, tape=tape)
    w, given = weights_of(module), [x_of(2, 3, 2, 5) for _ in range(1 + tape)]
    s, *p = (image.astype(np.float64) for image in given)
    gates = sigmoid(image_convolution(np.concatenate([s, *p], 1), w["gate_weight"], w["gate_bias"]))
    u, r = gates[:, :3], gates[:, 3:]
    candidate = np.tanh(image_convolution(np.concatenate([r * s, *p], 1), w["weight"], w["bias"]))
    specs = dict.fromkeys("sp"[: 1 + tape], gg.float32["b", 3, 2, 5])
    model = gg.build(module, weights=w_float32(w), **specs)
    y = run_plain(model, dict(zip("sp", given, strict=False)))[0]
    assert relative_rms(u * s + (1 - u) * candidate, y) < ROUNDING


# Models


def feeds_of(source: int, target: int, batch: int = 2) -> dict[str, Any]:
    mask = np.arange(source) < np.array([[source], [max(1, source - 2)]])
    ids = {"source_ids": (batch, source), "target_ids": (batch, target)}
    return {n: RNG.integers(1, 11, s) for n, s in ids.items()} | {"source_mask": mask * 1}


@pytest.mark.share(3)
@pytest.mark.parametrize("name", SMALL)
def test_gradients_are_the_central_difference_and_those_of_a_trained_step(
    name: str, tmp_path: Any
) -> None:
    length = {"length": 3} if name == "neural-gpu" else {}
    module, specs = vary(small(name, **length)), find(name).inputs()
    batch = feeds_of(3, 3) | {"labels": RNG.integers(0, 11, (2, 3))}
    labels = {"labels": gg.int64["batch", "target"]}
    gradients = checked_gradients(module, ops.cross_entropy, specs, batch, **labels)
    check_trained_step(gg.build(module, training=True, **specs), tmp_path, batch, gradients)


@pytest.mark.share(3)
@pytest.mark.parametrize("name", SMALL)
def test_training_lowers_the_loss(name: str, tmp_path: Any) -> None:
    """The task is to write the source backwards; one of each batch has no tokens."""
    ids = np.random.default_rng(0).integers(1, 11, (256, 4))
    labels = ids[:, ::-1]
    late = np.concatenate([np.zeros((256, 1), np.int64), labels[:, :-1]], 1)
    mask = np.where(np.arange(256)[:, None] % 32, 1, ids * 0)
    data = {"source_ids": ids, "source_mask": mask, "target_ids": late, "labels": labels}
    batches = [{n: a[i : i + 32] for n, a in data.items()} for i in range(0, 256, 32)]
    dropout = {} if name == "neural-gpu" else {"dropout": 0.05}
    model = gg.build(small(name, features=16, **dropout), training=True, **find(name).inputs())
    gg.artifacts(model, tmp_path, optimizer=gg.AdamW(weight_decay=0.0, clip_norm=1.0))
    trainer = gg.Trainer(tmp_path, schedule=gg.schedule.constant(1e-2), threads=1)
    history = trainer.fit(batches, steps=64, progress=False)
    assert history[-1]["loss"] < 2.0  # guessing among ten tokens gives log 10 = 2.3


@pytest.mark.parametrize("name", SMALL)
def test_encoder_and_decoder_apart_are_the_whole(name: str) -> None:
    """So that the source is read once, and the decoder runs once for each token."""
    module, feeds = vary(small(name)), feeds_of(4, 3)
    whole = gg.build(module, **find(name).inputs())
    weights = {path: p.array for path, p in initialize(module).items()}
    ids, mask = gg.int64["batch", "seq"], gg.bool_["batch", "source"]
    source = gg.int64["batch", "source"]
    encoder = gg.build(module.encode, weights=weights, source_ids=source, mask=mask)
    kept = feeds["source_mask"] > 0
    memory = run_plain(encoder, {"source_ids": feeds["source_ids"], "mask": kept})[0]
    columns = "source" if name == "convs2s" else "columns"  # of ByteNet's, more than those
    sizes = memory.shape[1:] if name == "neural-gpu" else (columns, *memory.shape[2:])
    spec = gg.float32["batch", *sizes]
    decoder = gg.build(module.decode, weights=weights, target_ids=ids, memory=spec, mask=mask)
    given = {"target_ids": feeds["target_ids"], "memory": memory, "mask": kept}
    assert relative_rms(run_plain(whole, feeds)[0], run_plain(decoder, given)[0]) < ROUNDING


def test_bytenet_has_columns_for_the_length_of_each_source_alone() -> None:
    module = vary(small("bytenet", stretch=1.5))
    model = gg.build(module.encode, source_ids=gg.int64["b", "s"], mask=gg.bool_["b", "s"])
    feeds = feeds_of(5, 1)
    memory = run_plain(model, {"source_ids": feeds["source_ids"], "mask": feeds["source_mask"] > 0})
    there = (memory[0] != 0).any(-1)
    np.testing.assert_array_equal(there, np.arange(8) < [[7.5], [4.5]])
    with pytest.raises(gg.GraphgenError, match=r"stretch is 0\.9; it must be from 1 to 100"):
        small("bytenet", stretch=0.9)
    with pytest.raises(gg.GraphgenError, match="features is 7; it must be even"):
        create("bytenet", features=7)


def test_the_neural_gpu_refuses_what_is_longer_than_its_image() -> None:
    module = small("neural-gpu", length=4)
    specs = find("neural-gpu").inputs()
    with pytest.raises(
        gg.GraphgenError, match="a sequence has 6 tokens, and the image only 4 columns"
    ):
        gg.build(module, **specs | {"target_ids": gg.int64["batch", 6]})
    session = gg.Session(gg.build(module, **specs))
    assert session(feeds_of(4, 4))[0].shape == (2, 4, 11)
    for sizes in ((5, 4), (4, 5)):
        with pytest.raises(gg.GraphgenError, match=r"Gather.* out of data bounds"):
            session(feeds_of(*sizes))
