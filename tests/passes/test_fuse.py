"""Every fusion: structure, value, refusal."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from small_models import block, relative_rms, run_plain, vary

import graphgen as gg
from graphgen import nn, ops
from graphgen.graph import count_operators, evaluate, short_text
from graphgen.nn.module import build
from graphgen.passes import optimize

BOUND = 5e-6  # float32, fused against unfused, both with the runtime's own optimisations off

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
        assert relative_rms(wanted, got) < BOUND
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
    best = optimize(function(scale_by_row, x=X), verify=True)
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
    return 0.5 * (x * (1.0 + ops.erf(x / np.sqrt(2.0))))


def test_what_the_session_runs_is_what_we_wrote(tmp_path: Any) -> None:
    """With the options beside the model, the runtime's own passes leave the fused graph alone."""
    import onnxruntime as ort

    best = optimize(gg.build(vary(nn.Encoder(16, layers=2, num_heads=4)), primitives=True, x=X16))
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / "runs.onnx")
    for key, value in best.session_options.items():
        options.add_session_config_entry(key, value)
    from graphgen.export.files import to_bytes

    ort.InferenceSession(to_bytes(best.model), options, providers=["CPUExecutionProvider"])
    runs = count_operators(ir.load(tmp_path / "runs.onnx"))
    assert {
        k: v for k, v in runs.items() if k not in ("Add", "MatMul", "com.microsoft::FusedGemm")
    } == {k: v for k, v in count_operators(best.model).items() if k not in ("Add", "MatMul")}


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
