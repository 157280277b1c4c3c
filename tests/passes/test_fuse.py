"""Every fusion: structure, value, refusal."""

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from small_models import ROUNDING, as_in_a_file, block, relative_rms, run_plain, vary

import graphgen as gg
from graphgen import nn, ops
from graphgen.export.write import to_bytes
from graphgen.graph import count_operators, parameters
from graphgen.laboratory.text import short_text
from graphgen.measure.reference import evaluate
from graphgen.nn.module import build
from graphgen.passes import optimize

FIXTURES = Path(__file__).parents[1] / "fixtures"

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "padded": {"mask": True},
    "causal and padded": {"causal": True, "mask": True},
    "grouped": {"kv_heads": 2, "causal": True},
    "multi-query": {"kv_heads": 1, "mask": True},
    "wide heads": {"head_dim": 8},
    "rms, tanh": {"norm": "rms", "activation": "gelu_tanh"},
    "silu": {"activation": "silu"},
}


def feeds(model: ir.Model, *, batch: int = 3, seq: int = 7) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((batch, seq, 16)) * 3).astype(np.float32)
    given: dict[str, Any] = {"x": x}
    if len(model.graph.inputs) > 1:
        mask = rng.random((batch, seq)) < 0.6
        mask[0] = False  # a row with nothing to look at
        mask[1, 0] = True
        given["mask"] = mask
    return given


@pytest.mark.share(3)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_block_of_primitives_fuses_whole(name: str) -> None:
    model = block(**VARIANTS[name])
    best = optimize(model, verify=True)
    counts = count_operators(best.model)
    assert best.report.shortfalls() == []
    assert counts["Attention"] == 1
    assert counts.get("LayerNormalization", 0) + counts.get("RMSNormalization", 0) == 2
    assert counts.get("Gelu", 0) + counts.get("com.microsoft::QuickGelu", 0) == 1
    assert not {"Softmax", "Erf", "Tanh", "ReduceMean", "Transpose"} & set(counts)
    for seq in (1, 7):
        given = feeds(model, seq=seq)
        wanted, got = run_plain(model, given)[0], run_plain(best.model, given)[0]
        assert not np.isnan(got).any()
        assert relative_rms(wanted, got) < ROUNDING
        exact = evaluate(model, given)[0]
        assert relative_rms(exact, got) < 2 * relative_rms(exact, wanted) + 1e-6


@pytest.mark.parametrize("name", VARIANTS)
def test_declared_and_found_give_the_same_graph(name: str) -> None:
    found = optimize(block(**VARIANTS[name])).model
    declared = optimize(block(**VARIANTS[name], primitives=False)).model
    assert count_operators(found) == count_operators(declared)


def function(body: Any, **inputs: Any) -> ir.Model:
    return build(body, primitives=True, **inputs)


X = gg.float32["b", "s", 8]


def erf_gelu(x: Any) -> Any:
    return x * 0.5 * (ops.erf(x / np.float32(np.sqrt(2.0))) + 1.0)


ONES = np.linspace(0.5, 2, 8, dtype=np.float32)


def two_outputs(x: Any) -> Any:
    d = x - ops.reduce_mean(x, [-1])
    variance = ops.reduce_mean(d * d, [-1])
    return d / ops.sqrt(variance + 1e-5) * ONES, variance


def scale_by_row(x: Any) -> Any:
    d = x - ops.reduce_mean(x, [-1])
    return d / ops.sqrt(ops.reduce_mean(d * d, [-1]) + 1e-5) * np.ones((3, 1, 8), np.float32)


def bias_by_token(x: Any) -> Any:
    d = x - ops.reduce_mean(x, [-1])
    return d / ops.sqrt(ops.reduce_mean(d * d, [-1]) + 1e-5) * ONES + ops.exp(x)


def test_what_differs_by_token_is_no_gain_and_no_bias() -> None:
    best = optimize(function(bias_by_token, x=X), verify=True)
    assert count_operators(best.model) == {"Add": 1, "Exp": 1, "LayerNormalization": 1}
    best = optimize(as_in_a_file(scale_by_row, primitives=True, x=X), verify=True)
    assert count_operators(best.model) == {"Mul": 1, "LayerNormalization": 1}


def test_an_inner_value_that_is_used_elsewhere_keeps_its_nodes() -> None:
    model = function(two_outputs, x=X)
    best = optimize(model)
    [site] = next(p for p in best.report.passes if p.name == "fuse_norm").sites
    assert site.status == "missed"
    assert "used elsewhere, by a graph output" in site.reason
    assert "LayerNormalization" not in count_operators(best.model)


def test_no_kernel_is_a_refusal_with_its_reason() -> None:
    model = function(erf_gelu_double, x=gg.float64["b", "s", 8])
    best = optimize(model)
    [site] = next(p for p in best.report.passes if p.name == "fuse_activation").sites
    assert site.status == "refused"
    assert "has no Gelu for T=double" in site.reason


def test_a_norm_shared_by_two_gains_is_two_norms() -> None:
    def shared(x: Any) -> Any:
        unit = x / ops.sqrt(ops.reduce_mean(x * x, [-1]) + 1e-6)
        return unit * ONES, unit * (ONES + 1.0)

    best = optimize(function(shared, x=X), verify=True)
    assert count_operators(best.model) == {"RMSNormalization": 2}


def erf_gelu_double(x: Any) -> Any:
    return 0.5 * (x * (1.0 + ops.erf(x / math.sqrt(2.0))))


def bare_session_runs(model: ir.Model, folder: Path) -> dict[str, int]:
    """The operators that are left when a session without options has optimized a model."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(folder / "runs.onnx")
    ort.InferenceSession(to_bytes(model), options, providers=["CPUExecutionProvider"])
    return count_operators(ir.load(folder / "runs.onnx"))


def stack(shape: Any = ("batch", "seq", 16), **options: Any) -> ir.Model:
    module = vary(nn.Encoder(16, layers=2, num_heads=4, **options))
    return gg.build(module, primitives=True, x=gg.float32[shape])


def embedded() -> ir.Model:
    def embed(ids: Any) -> Any:
        words, positions = (np.full((n, 16), 0.1 * n, np.float32) for n in (50, 8))
        return ops.layer_norm(ops.embedding(words, ids) + positions)

    return gg.build(embed, ids=gg.int32["batch", 8])


BARE: dict[str, Callable[[], ir.Model]] = {
    "post-norm": partial(stack, placement="post"),
    "pre-norm": stack,
    "causal, of known sizes": partial(stack, (2, 64, 16), causal=True),
    "sandwich": partial(stack, placement="sandwich"),
    "post-norm of a rank of 4": lambda: function(
        lambda x: ops.layer_norm(x + ops.exp(x)), x=gg.float32["b", 3, 5, 8]
    ),
    "feed-forward": lambda: gg.build(vary(nn.FeedForward(16, 32)), primitives=True, x=X16),
    "embedding": embedded,
    "bert": lambda: gg.load(FIXTURES / "bert_torchscript_eager_14.onnx"),
    "vit": lambda: gg.load(FIXTURES / "vit_torchscript_sdpa_18.onnx"),
}
SLOWER = re.compile("Skip|Bias|Embed")


@pytest.mark.share(3)
@pytest.mark.parametrize("target", ["cpu", "official"])
@pytest.mark.parametrize("name", BARE)
def test_the_runtime_makes_nothing_slower_of_what_we_wrote(
    name: str, target: str, tmp_path: Path
) -> None:
    best = optimize(BARE[name](), target=target)
    assert best.session_options == {}
    runs = bare_session_runs(best.model, tmp_path)
    assert not [operator for operator in runs if SLOWER.search(operator)]
    wanted = {k: v for k, v in count_operators(best.model).items() if "Norm" in k or k == "Gelu"}
    assert {k: runs.get(k, 0) for k in wanted} == wanted


def test_without_the_reshapes_the_runtime_would(tmp_path: Path) -> None:
    best = optimize(BARE["post-norm"](), target="cuda")
    runs = bare_session_runs(best.model, tmp_path)
    assert (runs["com.microsoft::SkipLayerNormalization"], "Gelu" in runs) == (4, False)


def test_sums_are_kept_apart_only_where_the_runtime_would_make_them_slower() -> None:
    def reshapes(body: Callable[..., Any], target: str = "cpu", dtype: Any = gg.float32) -> int:
        counts = count_operators(
            optimize(function(body, x=dtype["b", "s", 8]), target=target).model
        )
        return counts.get("Reshape", 0)

    def used_twice(x: Any) -> Any:
        total = x + ops.exp(x)
        return total * ops.layer_norm(total)

    assert reshapes(lambda x: ops.layer_norm(x + ops.exp(x))) == 1
    assert reshapes(lambda x: ops.gelu(x + ONES)) == 1
    assert reshapes(lambda x: ops.layer_norm(x + ops.exp(x)), "cuda") == 0
    assert reshapes(lambda x: ops.layer_norm(x + ops.exp(x)), dtype=gg.float64) == 0
    assert reshapes(used_twice) == 0
    assert reshapes(lambda x: (lambda t: {"t": t, "y": ops.layer_norm(t)})(x + ops.exp(x))) == 0
    assert reshapes(lambda x: ops.layer_norm(x + ONES)) == 0
    assert reshapes(lambda x: ops.gelu(x + ops.exp(x))) == 0
    assert reshapes(lambda x: ops.gelu(x + ONES, approximate="tanh")) == 0
    assert reshapes(lambda x: ops.rms_norm(x + ops.exp(x))) == 0


@pytest.mark.parametrize("shape", [("batch", "seq", 16), (2, 5, 16)])
def test_a_second_time_changes_nothing(shape: Any) -> None:
    best = optimize(stack(shape, placement="post"), verify=True)
    again = optimize(best.model, verify=True)
    assert count_operators(again.model) == count_operators(best.model)
    assert "Reshape" not in count_operators(optimize(best.model, target="cuda").model)
    x = np.random.default_rng(0).standard_normal((2, 5, 16), np.float32)
    (a,), (b,) = run_plain(best.model, {"x": x}), run_plain(again.model, {"x": x})
    assert np.array_equal(a, b)


X16 = gg.float32["batch", "seq", 16]


def test_optimize_leaves_its_input_alone_and_shares_the_weights() -> None:
    model = block(causal=True)
    before = short_text(model)
    best = optimize(model)
    assert short_text(model) == before
    name = "feed_forward.up.weight"
    ours, theirs = model.graph.initializers[name], best.model.graph.initializers[name]
    assert ours.const_value is theirs.const_value


def test_weights_that_are_equal_by_chance_stay_apart() -> None:
    module = nn.Encoder(16, layers=2, num_heads=4)  # zero biases, unit gains
    model = gg.build(module, primitives=True, x=X16)
    best = optimize(model)
    assert {n for n in model.graph.initializers if not n.startswith("constant_")} <= set(
        best.model.graph.initializers
    )


def test_a_tied_weight_is_not_folded_into_a_second_copy() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            self.embedding = nn.Embedding(50, 16)

        def __call__(self, ids: Any) -> Any:
            return self.embedding.logits(self.embedding(ids))

    best = optimize(gg.build(Tied(), ids=gg.int64["batch", "seq"]))
    sizes = [v.const_value.size for v in best.model.graph.initializers.values() if v.const_value]
    assert sum(sizes) < 50 * 16 + 10
    assert count_operators(best.model)["Transpose"] == 1


def test_declared_parameters_are_not_folded() -> None:
    """Not into the rows read of a table, whose copies would be trained apart; nor into 1 + w."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            self.bias, self.norm = nn.RelativeBias(4), nn.RMSNorm(16, unit_offset=True)

        def __call__(self, x: Any) -> Any:
            places = ops.arange(ops.dim(x, 1))
            scores = ops.matmul(self.norm(x), ops.transpose(x, perm=[0, 2, 1]))
            return ops.unsqueeze(scores, [1]) + self.bias(places, places)

    model = gg.build(Biased(), seed=1, x=X16)
    best = optimize(model)
    assert [*parameters(best.model.graph)] == [*parameters(model.graph)]
    assert best.model.graph.initializers["bias.weight"].shape == (32, 4)
    model.producer_name = "another"  # which does not say what is a parameter
    assert "bias.weight" not in parameters(optimize(model).model.graph)


@pytest.mark.parametrize("dtype", [gg.float32, gg.float16])
@pytest.mark.parametrize("measured", [True, False])
def test_a_norm_of_groups_is_one_of_instances_where_that_was_measured(
    dtype: Any, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU has no kernel for it; where there is no figure, it is its body."""
    if not measured:
        monkeypatch.setattr("graphgen.targets.kernels.measured", dict)

    def grouped(x: Any, scale: Any, bias: Any) -> Any:
        return ops.group_normalization(x, scale, bias, num_groups=4, epsilon=1e-3)

    model = build(grouped, x=dtype["b", 8, "h", "w"], scale=dtype[8], bias=dtype[8])
    best = optimize(model, verify=True).model
    counts = count_operators(best)
    assert counts.get("InstanceNormalization", 0) == measured
    assert counts.get("ReduceMean", 0) == 2 * (not measured)
    rng = np.random.default_rng(0)
    sizes = {"x": (3, 8, 5, 7), "scale": (8,), "bias": (8,)}
    half = dtype is gg.float16
    given = {
        name: rng.normal(2.0, 3.0, size).astype("f2" if half else "f4")
        for name, size in sizes.items()
    }
    wanted = grouped(*(x.astype(np.float64) for x in given.values()))
    assert relative_rms(run_plain(best, given)[0], wanted) < (1e-3 if half else 1e-6)


def by_groups(x: Any, gain: float = 1.0, groups: int = 4) -> Any:
    """As torch exports a group norm."""
    b, c, h, w = (ops.dim(x, i) for i in range(4))
    ones, zeros = np.full(groups, gain, np.float32), np.zeros(groups, np.float32)
    y = ops.instance_normalization(ops.reshape(x, [b, groups, -1]), ones, zeros, epsilon=1e-3)
    return ops.reshape(y, [b, c, h, w]) * np.arange(8, dtype=np.float32).reshape(8, 1, 1)


@pytest.mark.parametrize("gain", [1.0, 2.0])
def test_norms_of_groups_are_told_where_no_kernel_is_better(gain: float, monkeypatch: Any) -> None:
    """A target that had one would get it; groups with gains of their own are something else."""
    model = build(lambda x: by_groups(x, gain), x=gg.float32["b", 8, "h", "w"])
    best = optimize(model)
    told = [s.reason for p in best.report.passes if p.name == "fuse_norm" for s in p.sites]
    assert [reason.partition(") ")[2] for reason in told] == ["has no GroupNormalization"] * (
        gain == 1.0
    )
    assert count_operators(best.model)["InstanceNormalization"] == 1
    monkeypatch.setattr("graphgen.targets.Target.missing", lambda self, node: None)
    fused = optimize(model)
    assert ("GroupNormalization" in count_operators(fused.model)) == (gain == 1.0)
    x = np.random.default_rng(1).normal(2.0, 30.0, [3, 8, 5, 7]).astype(np.float32)
    (wanted,), (given,) = run_plain(model, {"x": x}), run_plain(fused.model, {"x": x})
    assert relative_rms(wanted, given) < 1e-6


def test_attention_in_float16_is_computed_in_float32() -> None:
    """As the runtime computes its parts on the CPU: scores beyond 65,504 were NaN in the kernel."""

    def body(q: Any, k: Any, v: Any) -> Any:
        return ops.softmax(q @ ops.swap_last(k) * np.float16(0.25)) @ v

    spec = gg.float16["b", 2, "t", 16]
    model = as_in_a_file(body, primitives=True, q=spec, k=spec, v=spec)
    best = optimize(model, verify=True)
    counts = count_operators(best.model)
    assert counts["Attention"] == 1 and counts["Cast"] == 4, counts
    remarks = [s.reason for p in best.report.passes if p.name == "legalize" for s in p.sites]
    assert remarks == ["in float32 between casts, in which no score overflows"]
    cuda = optimize(model, target="cuda").model
    assert count_operators(cuda)["Attention"] == 1 and "Cast" not in count_operators(cuda)
    rng = np.random.default_rng(0)
    for scale in (1, 200):
        feeds = {n: (rng.standard_normal((2, 2, 5, 16)) * scale).astype(np.float16) for n in "qkv"}
        [wanted], [got] = run_plain(model, feeds), run_plain(best.model, feeds)
        assert np.isfinite(wanted).all() and relative_rms(wanted, got) < 1e-3

    def cached(q: Any, k: Any, v: Any, past: Any) -> Any:
        return body(q, ops.concat([past, k], axis=2), ops.concat([past, v], axis=2))

    past = gg.float16["b", 2, "p", 16]
    best = optimize(as_in_a_file(cached, primitives=True, q=spec, k=spec, v=spec, past=past))
    assert count_operators(best.model) == {"Concat": 2, "Attention": 1}
    [site] = [s for p in best.report.passes if p.name == "legalize" for s in p.sites]
    assert site.status == "refused" and "a score beyond 65,504 would make NaN" in site.reason
