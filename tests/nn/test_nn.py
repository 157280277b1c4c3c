"""Modules: parameters by path, seeds, shared weights, positions, dropout, eager calls."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from small_models import Block, relative_rms, run_plain, vary

import graphgen as gg
from graphgen import nn, ops
from graphgen.errors import GraphgenError
from graphgen.graph import count_operators, parameters
from graphgen.laboratory.text import short_text
from graphgen.measure.reference import evaluate
from graphgen.nn.module import in_line, initialize, members, ones

X = gg.float32["batch", "seq", 16]
RNG = np.random.default_rng(5)


def x_of(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def test_parameters_are_named_by_path() -> None:
    model = gg.build(nn.Encoder(16, layers=2, num_heads=4), x=X)
    names = set(parameters(model.graph))
    assert "layers.1.attention.query.weight" in names
    assert "layers.0.residual2.norm.bias" in names
    assert "norm.weight" in names
    assert len(names) == 2 * 16 + 2
    paths = {node.metadata_props.get("graphgen.path") for node in model.graph}
    assert "layers.0.attention" in paths


def test_initial_weights_depend_on_seed_and_path_alone() -> None:
    class Wider(nn.Module):
        def __init__(self) -> None:
            self.extra = nn.Linear(16, 16)
            self.block = Block(16, num_heads=4)

        def __call__(self, x: Any) -> Any:
            return self.block(self.extra(x))

    class Plain(nn.Module):
        def __init__(self) -> None:
            self.block = Block(16, num_heads=4)

        def __call__(self, x: Any) -> Any:
            return self.block(x)

    name = "block.feed_forward.up.weight"
    a, b, c = (
        parameters(gg.build(module, seed=seed, x=X).graph)[name].const_value.numpy()  # type: ignore[union-attr]
        for module, seed in ((Wider(), 3), (Plain(), 3), (Plain(), 4))
    )
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)


def test_a_module_called_twice_shares_its_weights() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            self.linear = nn.Linear(16, 16)
            self.same = self.linear

        def __call__(self, x: Any) -> Any:
            return self.same(self.linear(x))

    model = gg.build(vary(Twice()), x=X)
    assert set(parameters(model.graph)) == {"linear.weight", "linear.bias"}
    x = x_of(2, 3, 16)
    w, b = (
        parameters(model.graph)[n].const_value.numpy() for n in ("linear.weight", "linear.bias")
    )  # type: ignore[union-attr]
    assert relative_rms((x @ w + b) @ w + b, run_plain(model, {"x": x})[0]) < 1e-6


@pytest.mark.parametrize("options", [{}, {"causal": True, "kv_heads": 2}, {"norm": "rms"}])
def test_a_module_on_arrays_computes_what_its_graph_does(options: dict[str, Any]) -> None:
    block = vary(Block(16, num_heads=4, **options))
    model = gg.build(block, x=X)
    x = x_of(2, 5, 16)
    assert relative_rms(run_plain(model, {"x": x})[0], block(x)) < 2e-6


def test_attention_with_a_softcap_is_its_formula() -> None:
    """c tanh(s / c) before the mask: behind it, the mask itself would be capped."""
    module = vary(nn.Attention(16, num_heads=2, kv_heads=1, causal=True, bias=False, softcap=1.5))
    w = {n: p.array.astype(np.float64) for n, p in initialize(module).items()}
    x = x_of(2, 5, 16)
    q, k, v = (x @ w[f"{name}.weight"] for name in ("query", "key", "value"))
    heads = q.reshape(2, 5, 2, 8).swapaxes(1, 2)
    scores = 1.5 * np.tanh(heads @ k[:, None].swapaxes(2, 3) / np.sqrt(8) / 1.5)
    e = np.where(np.tri(5) > 0, np.exp(scores), 0)
    y = (e / e.sum(-1, keepdims=True)) @ v[:, None]
    wanted = y.swapaxes(1, 2).reshape(2, 5, 16) @ w["output.weight"]
    assert relative_rms(wanted, module(x)) < 2e-6
    assert relative_rms(wanted, run_plain(gg.build(module, x=X), {"x": x})[0]) < 2e-6
    with pytest.raises(gg.GraphgenError, match=r"Attention\(softcap=-1.0\): it must be above 0"):
        nn.Attention(16, num_heads=2, softcap=-1.0)


def test_a_norm_with_a_unit_offset_starts_as_one_without_a_gain() -> None:
    x, plain = x_of(2, 5, 16), nn.RMSNorm(16, gain=False)
    norm = nn.RMSNorm(16, unit_offset=True)
    assert not initialize(norm)["weight"].array.any()
    assert relative_rms(plain(x), norm(x)) < 1e-7
    weight = x_of(16)
    model = gg.build(norm, weights={"weight": weight}, x=X)
    assert relative_rms(plain(x) * (1 + weight), run_plain(model, {"x": x})[0]) < 1e-6


def test_calling_before_initialize_says_what_to_do() -> None:
    with pytest.raises(gg.GraphgenError, match=r"call nn\.initialize"):
        nn.Linear(16, 4)(x_of(2, 16))


def test_a_module_tells_itself_and_its_sizes() -> None:
    assert in_line(nn.LayerNorm(512)) == "LayerNorm(features=512)"
    assert in_line(nn.LayerNorm(512, epsilon=1e-6)) == "LayerNorm(features=512, epsilon=1e-06)"
    with pytest.raises(
        gg.GraphgenError,
        match=r"LayerNorm\(features=512\): x is float\[batch, seq, 16\]; its last dimension must "
        r"be 512 \(test_nn.py:\d+\)",
    ):
        gg.build(nn.LayerNorm(512), x=X)


def test_weights_by_name() -> None:
    module = vary(Block(16, num_heads=4))
    weights = {n: p.array for n, p in initialize(module, seed=1).items()}
    model = gg.build(Block(16, num_heads=4), weights=weights, x=X)
    assert short_text(model) == short_text(gg.build(module, seed=1, x=X))
    short = dict(weights)
    del short["norm1.bias"]
    short["norm9.bias"] = short["norm2.bias"]
    short["norm2.weight"] = np.zeros(3, np.float32)
    with pytest.raises(gg.GraphgenError) as told:
        gg.build(Block(16, num_heads=4), weights=short, x=X)
    for part in ("missing: norm1.bias", "not in the module: norm9.bias", "(3,), must be (16,)"):
        assert part in str(told.value)


def test_learned_positions_say_why_they_end() -> None:
    positions = nn.LearnedPositions(8, 16)
    with pytest.raises(gg.GraphgenError, match="position 8 was never learned, so it has no vector"):
        gg.build(positions, x=gg.float32["batch", 9, 16])
    for length, optimize in product((1, 8), (False, True)):
        session = gg.Session(gg.build(nn.LearnedPositions(length, 16), x=X), optimize=optimize)
        assert session(x=x_of(1, length, 16))[0].shape == (1, length, 16)
        with pytest.raises(gg.GraphgenError, match=r"Gather.* out of data bounds"):
            session(x=x_of(1, length + 1, 16))


def test_sinusoidal_positions_equal_the_formula_at_any_length() -> None:
    model = gg.build(nn.SinusoidalPositions(6), x=gg.float32["batch", "seq", 6])
    y = run_plain(model, {"x": np.zeros((1, 300, 6), np.float32)})[0][0]
    p, i = np.arange(300)[:, None], np.arange(3)[None]
    angles = p / 10000 ** (2 * i / 6)
    assert np.allclose(y[:, 0::2], np.sin(angles), atol=2e-5)  # float32 angles up to 299
    assert np.allclose(y[:, 1::2], np.cos(angles), atol=2e-5)
    with pytest.raises(gg.GraphgenError, match="must be even"):
        nn.SinusoidalPositions(5)
    for shape, features in (((4,), 3), ((4,), 0), ((2, 4), 2)):
        with pytest.raises(gg.GraphgenError, match=r"positions are .*; give one axis of positions"):
            ops.sinusoidal_positions(np.zeros(shape, np.float32), features=features)


@pytest.mark.parametrize("sizes", [{"count": 1}, {"count": 2, "one_sided": False}, {"furthest": 8}])
def test_buckets_that_no_distance_fits_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(gg.GraphgenError, match=r"RelativeBias.*fewer than the furthest distance"):
        nn.RelativeBias(4, **sizes)


def test_dropout_is_nothing_in_inference_and_a_function_of_its_inputs_in_training() -> None:
    block = nn.EncoderLayer(16, num_heads=4, dropout=0.5)
    plain = gg.build(block, x=X)
    assert "graphgen::Dropout" not in count_operators(plain)
    assert [v.name for v in plain.graph.inputs] == ["x"]
    model = gg.build(block, training=True, x=X)
    assert [v.name for v in model.graph.inputs] == ["x", "seed", "step"]
    assert count_operators(model)["graphgen::Dropout"] == 2
    x = x_of(2, 5, 16)
    draws = [
        evaluate(model, {"x": x, "seed": np.int64(seed), "step": np.int64(step)})[0]
        for seed, step in ((0, 1), (0, 1), (0, 2), (1, 1))
    ]
    assert np.array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[0], draws[2])
    assert not np.array_equal(draws[0], draws[3])
    with pytest.raises(gg.GraphgenError, match="at least 0 and below 1"):
        nn.Dropout(1.0)


def test_members_are_found_in_lists_and_dictionaries_once() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            self.stack = [nn.Linear(2, 2), nn.Linear(2, 2)]
            self.named = {"a": nn.Linear(2, 2), "again": self.stack[0]}
            self.itself: list[Any] = []
            self.itself += [self.itself, self.named]

    assert repr(Many()).endswith("\n18 parameters")
    paths = [path for path, item in members(Many()) if isinstance(item, nn.Parameter)]
    assert paths == [
        f"{m}.{p}" for m in ("stack.0", "stack.1", "named.a") for p in ("weight", "bias")
    ]


def test_what_build_is_given_is_checked() -> None:
    linear = nn.Linear(16, 4)
    with pytest.raises(gg.GraphgenError, match="give a dtype with sizes"):
        gg.build(linear, x=np.zeros(3))
    with pytest.raises(gg.GraphgenError, match="missing a required argument: 'x'"):
        gg.build(linear, y=X)
    with pytest.raises(gg.GraphgenError, match="returned NoneType, not values"):
        gg.build(lambda x: None, x=X)
    with pytest.raises(gg.GraphgenError, match="return a new value for each output"):
        gg.build(lambda x: x, x=X)


def test_parameters_without_dimensions_and_with_odd_names_are_parameters(tmp_path: Any) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            self.a = nn.Parameter((), initialize=ones)
            self.b = nn.Parameter((), initialize=ones)
            self.constant_gain = nn.Linear(16, 16)

        def __call__(self, x: Any) -> Any:
            return self.constant_gain(x * self.a) * self.b

    model = gg.build(Gate(), x=X)
    names = {"a", "b", "constant_gain.weight", "constant_gain.bias"}
    assert set(parameters(model.graph)) == names
    gg.export(model, tmp_path / "gate.onnx")
    gg.artifacts(tmp_path / "gate.onnx", tmp_path / "art", loss="mse")
    trainer = gg.Trainer(tmp_path / "art")
    batch = {"x": x_of(2, 3, 16), "labels": x_of(2, 3, 16)}
    trainer.fit([batch], steps=3, progress=False)
    assert set(trainer.parameters) == names
    assert trainer.parameters["a"] != trainer.parameters["b"]


def test_python_operators_record_with_an_array_on_either_side() -> None:
    row = np.array([1.0, 2.0, 4.0], np.float32)

    def function(x: Any) -> tuple[Any, Any]:
        y = row - x
        y = y + row @ gg.ops.reshape(x, [3, 1])
        y = 2 / (row * y)
        y = y + (2**x + x // 2 + np.exp(x)) * 0
        for refused in (lambda: {x: 1}, lambda: {x}):
            with pytest.raises(TypeError, match="unhashable"):
                refused()
        for unknown in (lambda: np.cbrt(x), lambda: np.add.reduce(x), lambda: x.sum()):
            with pytest.raises(GraphgenError, match=r"graphgen.ops.* \(test_nn.py:"):
                unknown()
        return y, (y > 1) & ~(row >= y) | (y <= row)

    x = np.array([0.5, 3.0, -1.0], np.float32)
    y, z = evaluate(gg.build(function, x=gg.float32[3]), {"x": x})
    wanted = 2 / (row * (row - x + row @ x))
    np.testing.assert_allclose(y, wanted)
    np.testing.assert_array_equal(z, (wanted > 1) & (row < wanted) | (wanted <= row))


def test_a_module_without_a_call_is_refused_at_its_line():
    class Empty(nn.Module):
        def __init__(self):
            self.linear = nn.Linear(4, 4)

    with pytest.raises(gg.GraphgenError, match=r"Empty\(\).* has no __call__.*test_nn.py:\d+"):
        gg.build(Empty(), x=X)
    with pytest.raises(gg.GraphgenError, match=r"has no __call__"):
        Empty()(np.ones((2, 4), np.float32))


def test_the_room_shows_its_public_names():
    assert dir(nn) == nn.__all__ and "blocks" not in dir(nn)
    assert all(hasattr(nn, name) for name in nn.__all__)


@pytest.mark.parametrize(
    ("shape", "initialize", "message"),
    [
        ((3,), 1.0, r"Parameter\(\(3,\), initialize=1.0\): give a tuple of sizes, and a function"),
        (3, ones, r"Parameter\(3, "),
        (("n",), ones, r"Parameter\(\('n',\), "),
        ((-1,), ones, r"Parameter\(\(-1,\), "),
        ((3,), lambda *_: np.ones(2, np.float32), r"p is \(3,\), and its initializer made \(2,\)"),
        ((3,), lambda *_: None, r"p is \(3,\), and its initializer made \(\)"),
    ],
)
def test_a_parameter_is_what_its_initializer_makes_of_its_sizes(shape, initialize, message):
    class Gain(nn.Module):
        def __init__(self):
            self.p = nn.Parameter(shape, initialize=initialize)

        def __call__(self, x):
            return x * self.p

    with pytest.raises(GraphgenError, match=message):
        nn.initialize(Gain())
