"""Targets: the runtime's own answer, the committed table, and what each makes of our operators."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from small_models import Block, block, vary

import graphgen as gg
from graphgen import nn, ops
from graphgen.graph import count_operators
from graphgen.nn.module import DType, build
from graphgen.passes import optimize
from graphgen.passes.legalise import respell
from graphgen.targets import Target, target

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "padded": {"mask": True},
    "grouped": {"kv_heads": 2, "causal": True, "mask": True},
    "rms, tanh": {"norm": "rms", "activation": "gelu_tanh"},
    "silu": {"activation": "silu"},
    "relu": {"activation": "relu"},
}


def half(model: ir.Model) -> ir.Model:
    """The same block in float16: inputs and weights."""
    for value in [*model.graph.inputs, *model.graph.initializers.values()]:
        if value.dtype == ir.DataType.FLOAT:
            value.type = ir.TensorType(ir.DataType.FLOAT16)
            if value.const_value is not None:
                array = np.clip(value.const_value.numpy(), -65504, 65504).astype(np.float16)
                value.const_value = ir.tensor(array, name=value.name)
    for node in model.graph:
        for value in node.outputs:
            value.type = None
    return model


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("primitives", [True, False])
def test_every_operator_emitted_for_cuda_has_a_kernel(
    name: str, dtype: str, primitives: bool
) -> None:
    model = block(primitives=primitives, **VARIANTS[name])
    model = half(model) if dtype == "float16" else model
    best = optimize(model, target="cuda")
    cuda = target("cuda")
    missing = {node.op_type: cuda.missing(node) for node in best.model.graph}
    assert {op: why for op, why in missing.items() if why} == {}
    if dtype == "float32":
        assert best.report.shortfalls() == []


def test_training_operators_of_the_table_fall_back_to_their_bodies() -> None:
    def loss(x: Any, labels: Any, draw: Any) -> Any:
        return ops.cross_entropy(ops.dropout(x, 0.5, draw, 1, 2), labels)

    model = build(loss, x=gg.float32["b", 7], labels=gg.int64["b"], draw=gg.int64[()])
    best = optimize(model, target="cpu")
    assert not [op for op in count_operators(best.model) if op.startswith("graphgen::")]
    [site] = [s for s in best.report.passes[-2].sites if "CrossEntropy" in s.reason]
    assert site.reason.endswith("has no CrossEntropy: its body instead")


def test_the_cpu_profile_is_what_the_installed_runtime_says() -> None:
    import onnxruntime as ort

    cpu = target("cpu")
    assert cpu.runtime == ort.__version__
    node = next(iter(build(ops.softmax, x=gg.float32["n"]).graph))
    assert cpu.runs(node)
    assert cpu.missing(next(iter(build(ops.softmax, x=gg.bfloat16["n"]).graph))) is not None


def without(name: str) -> Target:
    """The CPU without one operator."""
    cpu = target("cpu")
    kernels = {
        d: {op: r for op, r in rows.items() if op != name} for d, rows in cpu.kernels.items()
    }
    return Target("cpu", cpu.runtime, kernels)


def test_an_older_runtime_gets_attention_in_its_own_spelling(monkeypatch: Any) -> None:
    monkeypatch.setattr("graphgen.passes.find_target", lambda name: without("Attention"))
    for options, wanted in (
        ({}, {"com.microsoft::MultiHeadAttention": 1}),
        ({"causal": True}, {"com.microsoft::MultiHeadAttention": 1}),
        ({"mask": True}, {"Softmax": 1}),  # a row that keeps nothing would not give zeros
        ({"kv_heads": 2}, {"Softmax": 1}),
    ):
        best = optimize(block(**options))
        counts = count_operators(best.model)
        assert {k: counts.get(k, 0) for k in wanted} == wanted
        assert "Attention" not in counts


def test_respell_gives_nothing_where_nothing_fits() -> None:
    model = gg.build(vary(Block(16, num_heads=4)), x=gg.float32["b", "s", 16])
    norm = next(node for node in model.graph if node.op_type == "LayerNormalization")
    assert respell(norm, target("cpu")) is None


def test_half_precision_models_keep_their_dtype() -> None:
    best = optimize(half(block(primitives=True)), target="cuda").model
    assert best.graph.outputs[0].dtype == ir.DataType.FLOAT16


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"mask": True}, {"causal": True, "mask": True}]
)
def test_attention_is_found_in_half_precision(options: dict[str, Any]) -> None:
    counts = count_operators(optimize(half(block(**options)), target="cuda").model)
    assert (counts["Attention"], counts["LayerNormalization"]) == (1, 2)


def test_dtypes_are_specifications() -> None:
    assert isinstance(gg.float16, DType)
    with pytest.raises(gg.GraphgenError, match="is no size"):
        gg.float32["batch", 1.5]  # type: ignore[index]
    assert isinstance(nn.Linear(2, 3), nn.Module)
