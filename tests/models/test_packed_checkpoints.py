"""Checkpoints of GPTQ and AWQ: the integers of the file are those of the graph.

The packing below is written from the formats' descriptions, one integer at a time, and knows
nothing of the reader; the reference is a checkpoint of the floats that the integers stand for.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from packed_checkpoints import FIELDS, checkpoints, packed, same_weights
from random_checkpoints import write_weights
from small_models import relative_rms, run_plain

import graphgen as gg
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.measure.reference import evaluate
from graphgen.models.published import from_folder
from graphgen.quantize.effect import feeds_of
from graphgen.quantize.kept import keep_bits
from graphgen.safetensors import read_header
from graphgen.version import minor

TOKENS = np.random.default_rng(5).integers(0, 200, (2, 7))


def gptq(
    rng: Any, rows: int, columns: int, bits: int, group: int, *, act: bool, v2: bool, sym: bool
) -> tuple[dict[str, Any], Any]:
    """The tensors of a layer (N, K), and the floats that they stand for, in float64."""
    group = columns if group == -1 else group
    of = np.arange(columns) // group
    of = rng.permutation(of) if act else of
    groups = -(-columns // group)
    q = rng.integers(0, 2**bits, (columns, rows))
    zeros = rng.integers(1, 2**bits, (groups, rows))
    zeros = np.full_like(zeros, 2 ** (bits - 1)) if sym else zeros
    scales = (rng.random((groups, rows)) / 2**bits).astype(np.float16)
    tensors = {
        "qweight": packed(q.T, bits).T,
        "qzeros": packed(zeros if v2 else zeros - 1, bits),
        "scales": scales,
        "g_idx": of.astype(np.int32),
    }
    return tensors, ((q - zeros[of]) * scales.astype(np.float64)[of]).T


def awq(rng: Any, rows: int, columns: int, group: int) -> tuple[dict[str, Any], Any]:
    of = np.arange(columns) // (columns if group == -1 else group)
    q, zeros = rng.integers(0, 16, (columns, rows)), rng.integers(0, 16, (of[-1] + 1, rows))
    scales = (rng.random(zeros.shape) / 16).astype(np.float16)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": packed(q, 4, order), "qzeros": packed(zeros, 4, order), "scales": scales}
    return tensors, ((q - zeros[of]) * scales.astype(np.float64)[of]).T


CASES = {
    f"gptq {bits} bits, groups of {group}{', act order' * act}{', v2' * v2}{', symmetric' * sym}": (
        {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act, "sym": sym}
        | ({"checkpoint_format": "gptq_v2"} if v2 else {"damp_percent": 0.1}),
        lambda rng, n, k, b=bits, g=group, a=act, v=v2, s=sym: gptq(
            rng, n, k, b, g, act=a, v2=v, sym=s
        ),
    )
    for bits, group, act, v2, sym in (
        (4, 32, False, False, False),
        (4, 64, False, True, False),
        (4, 16, True, False, False),
        (4, 128, False, False, True),
        (4, -1, False, False, False),
        (8, 32, True, False, True),
        (8, -1, False, True, False),
        (3, 32, False, False, False),
        (2, 64, True, True, False),
    )
} | {
    f"awq, groups of {group}": (
        {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"},
        lambda rng, n, k, g=group: awq(rng, n, k, g),
    )
    for group in (32, -1)
}


def meant(node: Any, arrays: dict[str, Any]) -> Any:
    """The weight (N, K) of a MatMulNBits, in float64."""
    given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    bits, size = given.get("bits", 4), given["block_size"]
    q, scales, zeros = (arrays[name] for name in node.input[1:4])
    each = [(x[..., None] >> np.arange(0, 8, bits) & (2**bits - 1)) for x in (q, zeros)]
    w = each[0].reshape(len(q), -1, size).astype(np.float64)
    z = each[1].reshape(len(q), -1)[:, : w.shape[1], None]
    return ((w - z) * scales.astype(np.float64)[..., None]).reshape(len(q), -1)[:, : given["K"]]


@pytest.mark.share(3)
@pytest.mark.parametrize("case", CASES)
def test_the_integers_of_the_file_are_those_of_the_graph(case: str, tmp_path: Path) -> None:
    config, layer = CASES[case]
    few, floats, known = checkpoints(tmp_path, config, layer)
    wanted = gg.optimize(from_folder(floats).model).model
    model, report = keep_bits(gg.optimize(from_folder(few).model).model, method="gptq")
    assert len(report.layers) == len(known) == 7 and not report.kept()
    path = gg.export(model, tmp_path / "few.onnx")
    proto = onnx.load(path)
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    nodes = [node for node in proto.graph.node if node.op_type == "MatMulNBits"]
    found = [meant(node, arrays) for node in nodes]
    by_row = [sorted(np.sort(w, axis=1).tobytes() for w in ws) for ws in (found, known.values())]
    assert by_row[0] == by_row[1]  # bit for bit, the columns of each row in any order
    for node in model.graph:
        if node.op_type == "MatMulNBits" and config["bits"] < 8:
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 1)
    [feed] = feeds_of(model, TOKENS, rows=2)
    a, b = (run_plain(m, dict(feed))[0] for m in (wanted, model))
    assert relative_rms(a, b) < (1e-5 if config["bits"] < 8 else 1e-3)


def test_a_folder_of_few_bits_is_built_and_generates(tmp_path: Path, capsys: Any) -> None:
    few, floats, _ = checkpoints(tmp_path, *CASES["gptq 4 bits, groups of 16, act order"])
    assert main(["build", str(few), "-o", str(tmp_path / "out")]) == 0
    assert "gptq" in (tmp_path / "out" / "quantization.json").read_text()
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
    assert main(["build", str(floats), "-o", str(tmp_path / "plain")]) == 0
    few_bits, plain = (
        run_plain(model, dict(feed))[0]
        for model in (gg.load(tmp_path / name / "onnx" / "model.onnx") for name in ("out", "plain"))
        for feed in feeds_of(model, TOKENS, rows=2)
    )
    assert relative_rms(plain, few_bits) < 0.1  # x is rounded to eight bits
    made = gg.generate(tmp_path / "out", [[5, 6, 7]], max_new_tokens=3)
    assert len(list(made)) == 3
    for more in (["--quantize", "int8"], ["--dtype", "fp16"]):
        assert main(["build", str(few), "-o", str(tmp_path / "no"), *more]) == 2
        assert f"in few bits (gptq): leave out {more[0]}" in capsys.readouterr().err


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"quant_method": "hqq"}, "quant_method is 'hqq'; it must be one of gptq, awq"),
        ({"bits": 5}, "bits is 5; it must be 2, 3, 4 or 8"),
        ({"bits": "4"}, "bits is '4'; it must be an integer"),
        ({"quant_method": "awq", "bits": 8}, "bits is 8; it must be 4"),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'; it must be 'gemm'"),
        ({"checkpoint_format": "marlin"}, "must be 'gptq' or 'gptq_v2'"),
        ({"dynamic": {"-:lm_head": {}, "+:.*up.*": {"bits": 5}}}, "a rule of +:.*up.* with bits"),
        ({"dynamic": ["-:lm_head"]}, "it must be an object of rules"),
        ({"dynamic": {"up": {"group_size": 48}, "down": {"bits": 8}}}, "o_proj fits 2 rules: [(4"),
        ({"quant_method": "auto-round"}, "the field 'packing_format' is missing"),
        ({"quant_method": "auto-round", "packing_format": "auto_round"}, "one of auto_round:auto"),
        ({"packing_format": "auto_round:auto_awq"}, "must be 'auto_round:auto_gptq'"),
        ({"data_type": "mx_fp"}, "data_type is 'mx_fp'; it must be 'int'"),
        ({"act_bits": 8}, "act_bits is 8; it must be 16"),
        ({"extra_config": {"lm_head": {"bits": 8, "act_bits": 8}}}, "a rule of lm_head with bits"),
        ({"extra_config": {"lm_head": 16}}, "a rule of lm_head with bits and group_size"),
        ({"quant_method": "awq", "pack_dtype": "int16"}, "pack_dtype is 'int16'"),
        ({"format": "marlin"}, "must be 'gptq' or 'gptq_v2'"),
        ({"group_size": 0}, "group_size is 0; it must be a size, or -1"),
        ({"group_size": 24}, "has groups of 24, must be multiples of 16"),
        ({"group_size": 64}, "q_proj.scales is [2, 64], must be [1, 64]"),
        ({"rotation": "hadamard"}, "does not have these fields: rotation"),
        (None, "quantization_config is [4]; it must be an object"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_one_line(change: Any, told: str, tmp_path: Path) -> None:
    few, *_ = checkpoints(tmp_path, GPTQ, CASES["gptq 4 bits, groups of 32"][1])
    config = [4] if change is None else GPTQ | change
    (few / "config.json").write_text(json.dumps({**FIELDS, "quantization_config": config}))
    with pytest.raises(GraphgenError) as caught:
        from_folder(few)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_zeros_that_programs_read_differently_are_refused(tmp_path: Path) -> None:
    few, *_ = checkpoints(tmp_path, GPTQ, CASES["gptq 4 bits, groups of 32"][1])
    arrays = {w.name: w.read() for w in read_header(few / "model.safetensors")}
    name = "model.layers.0.mlp.up_proj.qzeros"
    write_weights(few / "model.safetensors", arrays | {name: np.full_like(arrays[name], -1)})
    with pytest.raises(GraphgenError, match=r"up_proj\.weight has zero points that .* as -1"):
        keep_bits(from_folder(few).model)
    name = "model.layers.0.mlp.up_proj.g_idx"
    config = json.loads((few / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (few / "config.json").write_text(json.dumps(config))
    write_weights(few / "model.safetensors", {n: x for n, x in arrays.items() if n != name})
    with pytest.raises(GraphgenError, match=r"up_proj\.g_idx is missing"):
        from_folder(few)
    write_weights(few / "model.safetensors", arrays | {name: 0 * arrays[name]})
    with pytest.raises(GraphgenError, match="g_idx has groups of other sizes than 32"):
        keep_bits(from_folder(few).model)


def test_biases_beside_every_layer_are_left_out_if_they_are_zeros(tmp_path: Path) -> None:
    """GPTQ's first programs wrote them, also for a model that has none."""
    few, floats, _ = checkpoints(tmp_path, GPTQ, CASES["gptq 4 bits, groups of 32"][1])
    arrays = {w.name: w.read() for w in read_header(few / "model.safetensors")}
    layers = [n.removesuffix("scales") for n in arrays if n.endswith("scales")]
    spare = {f"{n}bias": np.zeros(arrays[f"{n}scales"].shape[1], np.float16) for n in layers}
    write_weights(few / "model.safetensors", arrays | spare)
    wanted, found = (from_folder(folder).model for folder in (floats, few))
    [feed] = feeds_of(wanted, TOKENS, rows=2)
    a, b = (run_plain(model, dict(feed))[0] for model in (wanted, found))
    assert relative_rms(a, b) < 1e-5
    spare["model.layers.0.mlp.up_proj.bias"][3] = 1.0
    write_weights(few / "model.safetensors", arrays | spare)
    with pytest.raises(GraphgenError, match=r"do not fit: \S*up_proj\.bias is not in the arch"):
        from_folder(few)


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    few, *_ = checkpoints(tmp_path, GPTQ, CASES["gptq 4 bits, groups of 32"][1])
    arrays = {w.name: w.read() for w in read_header(few / "model.safetensors")}
    for number in ("nan", "inf"):
        arrays["model.layers.0.mlp.up_proj.scales"][1, 2] = float(number)
        write_weights(few / "model.safetensors", arrays)
        with pytest.raises(GraphgenError, match=r"up_proj\.weight has scales that are no finite"):
            keep_bits(from_folder(few).model)


AUTO_ROUND = {
    "quant_method": "auto-round",
    "iters": 200,
    "autoround_version": "0.12.3",
    "data_type": "int",
    "sym": False,
    "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}, ".*up.*": {"bits": 4}},
}


@pytest.mark.parametrize(
    ("case", "notes"),
    [
        ("gptq 4", {"act_group_aware": True, "hyb_act": False, "format": "gptq", "meta": {}}),
        ("gptq 4", {"dynamic": {"-:lm_head": {}}, "pack_dtype": "int32"}),
        ("gptq 4", AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"}),
        ("gptq 4", AUTO_ROUND | {"quant_method": "gptq", "scale_dtype": "torch.float16"}),
        ("awq", {"pack_dtype": "int32", "checkpoint_format": "gemm", "desc_act": False}),
        ("awq", AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}),
    ],
)
def test_notes_of_newer_programs_are_accepted(case: str, notes: Any, tmp_path: Path) -> None:
    """Also those of AutoRound, which stores integers as GPTQ or AWQ does."""
    config, layer = next(x for name, x in CASES.items() if name.startswith(case))
    few, floats, _ = checkpoints(tmp_path, config | notes, layer)
    found = from_folder(few)
    assert found.few_bits == case.split()[0]
    wanted = from_folder(floats).model
    [feed] = feeds_of(wanted, TOKENS, rows=2)
    a, b = (run_plain(model, dict(feed))[0] for model in (wanted, found.model))
    assert relative_rms(a, b) < 1e-5


@pytest.mark.parametrize("name", ["dynamic", "extra_config"])
def test_rules_give_some_layers_other_bits_and_groups(name: str, tmp_path: Path) -> None:
    def layer(rng: Any, rows: int, columns: int) -> Any:
        bits, group = (8, 32) if rows == 96 else (2, -1) if columns == 96 else (4, 16)
        return gptq(rng, rows, columns, bits, group, act=bits == 4, v2=True, sym=False)

    config = {"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "gptq_v2"}
    rules = {"+:.*(up|gate).*": {"bits": 8, "group_size": 32}, "+:.*down.*": {"bits": 2}}
    rules["+:.*down.*"]["group_size"] = -1
    few, floats, _ = checkpoints(tmp_path, config | {name: {**rules, "-:lm_head": {}}}, layer)
    same_weights(from_folder(floats).model, from_folder(few).model)


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_experts_of_four_bits_keep_them(kind: str, tmp_path: Path) -> None:
    """Each has the checkpoint's blocks, with the rows as the graph has them."""
    own = {
        "mixtral": {"num_local_experts": 3},
        "qwen2_moe": {
            "num_experts": 3,
            "moe_intermediate_size": 96,
            "qkv_bias": False,
            "shared_expert_intermediate_size": 64,
        },
    }
    fields = FIELDS | {"model_type": kind, "num_experts_per_tok": 2} | own[kind]
    case = CASES["gptq 4 bits, groups of 32"]
    few, floats, _ = checkpoints(tmp_path, *case, fields)
    found = from_folder(few)
    assert found.few_bits == "gptq" and not found.remarks
    same_weights(from_folder(floats).model, found.model)
    wanted = gg.optimize(from_folder(floats).model).model
    model, report = keep_bits(gg.optimize(found.model).model, method="gptq")
    if minor(ort.__version__) < (1, 32):
        assert all("has no kernel of QMoE" in line for line in report.kept())
        return
    assert not report.kept()
    for node in model.graph:
        if "accuracy_level" in node.attributes:  # round nothing that products read
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)
    assert [node.op_type for node in model.graph].count("QMoE") == 1
    [feed] = feeds_of(model, TOKENS, rows=2)
    a, b = (run_plain(m, dict(feed))[0] for m in (wanted, model))
    assert relative_rms(a, b) < 1e-5


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (
            "gptq 8 bits, groups of 32, act order, symmetric",
            "has 8 bits: no kernel of experts reads the minima, the order",
        ),
        ("gptq 8 bits, groups of -1, v2", ""),
    ],
)
def test_experts_of_eight_bits_have_them(case: str, why: str, tmp_path: Path) -> None:
    """In an order of their own, they are rounded again, and told."""
    fields = FIELDS | {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
    few, floats, _ = checkpoints(tmp_path, *CASES[case], fields)
    found = from_folder(few)
    assert found.few_bits == "gptq"
    same_weights(from_folder(floats).model, found.model)
    model, report = keep_bits(gg.optimize(found.model).model, method="gptq")
    if minor(ort.__version__) < (1, 32):
        assert all("has no kernel of QMoE" in line for line in report.kept())
        return
    assert {"QMoE", "MatMulNBits"} <= {node.op_type for node in model.graph}
    assert [why in line for line in report.kept()] == [True] * bool(why) * 2
    [feed] = feeds_of(model, TOKENS, rows=2)
    wanted = evaluate(from_folder(floats).model, dict(feed))[0]
    assert relative_rms(wanted, evaluate(model, dict(feed))[0]) < (0.02 if why else 1e-5)
    assert relative_rms(wanted, run_plain(model, dict(feed))[0]) < 0.03
