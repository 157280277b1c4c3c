"""Experts in few bits, against the same experts in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from published_decoders import fields
from random_checkpoints import random_checkpoint
from small_models import relative_rms, run_plain

import graphgen as gg
from graphgen.errors import GraphgenError
from graphgen.measure.reference import evaluate
from graphgen.models.published import from_folder
from graphgen.quantize import quantize
from graphgen.quantize.effect import feeds_of
from graphgen.version import minor

needed = pytest.mark.skipif(
    minor(ort.__version__) < (1, 32), reason="experts stay in float before onnxruntime 1.32"
)
TOKENS = np.random.default_rng(5).integers(0, 40, (2, 7))


def decoder(which: str, folder: Path, **more: Any) -> ir.Model:
    """A small decoder with experts, with rows of whole blocks."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    random_checkpoint(folder, fields(which) | sizes | more)
    return gg.optimize(from_folder(folder).model).model


def named(model: ir.Model, operator: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == operator]


@needed
@pytest.mark.parametrize(
    ("scheme", "bits", "rounds"),
    [("int4", 4, 5e-6), ("int8", 8, 0.03)],  # whose kernel rounds what it reads
)
@pytest.mark.parametrize(
    ("which", "more"),
    [
        ("mixtral", {}),
        ("qwen2_moe", {"moe_intermediate_size": 32}),  # shares that do not sum to 1
        ("gpt_oss", {}),  # biases, a limit
        # scores behind a sigmoid, of which some groups count
        ("glm4_moe, groups", {"moe_intermediate_size": 32, "hidden_size": 64}),
    ],
)
def test_experts_compute_what_their_integers_mean(
    which: str, more: dict[str, Any], scheme: Any, bits: int, rounds: float, tmp_path: Path
) -> None:
    plain = decoder(which, tmp_path, **more)
    how: Any = {"accuracy_level": 0} if bits == 4 else {}
    model, report = quantize(plain, scheme, **how)
    [node] = named(model, "QMoE")
    assert not named(model, "MoE")
    # Of 64 and 96, or 32, features: blocks of 32.
    assert node.attributes.get_int("block_size") == 32
    assert node.attributes.get_int("expert_weight_bits") == bits
    own = [layer for layer in report.layers if layer.operator == "MoE"]
    assert [layer.scheme for layer in own] == [scheme] * 2
    assert all(
        0.8 / 2**bits < layer.error < 1.6 / 2**bits
        and layer.bytes_after < layer.bytes_before / 20 * bits
        for layer in own
    )
    [router] = [x for x in report.sites.sites if "chooses experts" in x.reason]
    assert router.status == "refused"
    [feed] = feeds_of(model, TOKENS, rows=2)
    wanted = evaluate(model, dict(feed))[0]
    assert relative_rms(wanted, run_plain(model, dict(feed))[0]) < rounds
    assert relative_rms(wanted, run_plain(plain, dict(feed))[0]) > 0.01


def reasons(model: ir.Model, scheme: Any, **how: Any) -> list[str]:
    """Why experts stay in float."""
    changed, report = quantize(model, scheme, calibration=(), **how)
    assert named(changed, "MoE") and not named(changed, "QMoE")
    own = [layer for layer in report.layers if layer.operator == "MoE"]
    assert all(x.scheme == "float" and x.bytes_after == x.bytes_before > 0 for x in own)
    return [layer.reason for layer in own]


def test_experts_that_stay_in_float_are_told(tmp_path: Path) -> None:
    model = decoder("mixtral", tmp_path)
    if not named(model, "MoE"):
        pytest.skip("this onnxruntime has no kernel of MoE")
    assert all("rounds what they read" in reason for reason in reasons(model, "weights8"))
    if minor(ort.__version__) < (1, 32):
        assert all("has no kernel of QMoE" in reason for reason in reasons(model, "int4"))
        return
    assert all("above 0.05" in reason for reason in reasons(model, "int4", threshold=0.05))
    odd = decoder("mixtral", tmp_path / "odd", intermediate_size=72)
    assert all("not whole blocks of 16" in reason for reason in reasons(odd, "int4"))
    [node] = named(model, "MoE")
    weight = node.inputs[4]
    assert weight is not None and weight.const_value is not None
    array = np.array(weight.const_value.numpy())
    array[1, 2, 3] = np.inf
    weight.const_value = ir.tensor(array, name=weight.name)
    with pytest.raises(GraphgenError, match="is not finite; train it again"):
        quantize(model, "int4")
