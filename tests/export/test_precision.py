"""Mixed precision: which nodes are in half, what that costs in exactness, how the loss is scaled.

No test here runs on CUDA. Kernels are looked up in its committed table; the numbers come from the
operators' meanings with half-precision operands and results, products summed in float32.
"""

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphgen as gg
from graphgen import nn
from graphgen.edit import infer_model
from graphgen.errors import GraphgenError
from graphgen.export.checkpoint import Checkpoint
from graphgen.export.precision import LossScale
from graphgen.graph import constant
from graphgen.measure.reference import evaluate
from graphgen.op import find_op, read_attributes
from graphgen.targets import newest_opset, target
from graphgen.train import engine
from graphgen.train.lower import lower

pytestmark = pytest.mark.skipif(
    newest_opset() < 23, reason="files for CUDA are those of its newest runtime: IR version 11"
)

HALF = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
RNG = np.random.default_rng(0)
IDS, LABELS = RNG.integers(0, 11, (2, 3, 6))
BATCH = {"ids": IDS, "labels": LABELS}


class Decoder(nn.Module):
    def __init__(self):
        self.embedding = nn.Embedding(11, 8)
        self.stack = nn.Encoder(8, layers=2, num_heads=2, causal=True, hidden=12, norm="rms")

    def __call__(self, ids):
        return self.embedding.logits(self.stack(self.embedding(ids)))


def write(folder, dtype, **options):
    model = gg.build(Decoder(), ids=gg.int64["batch", "seq"])
    gg.artifacts(model, folder, dtype=dtype, profile="stock", **options)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    top = tmp_path_factory.mktemp("precision")
    return {dtype: write(top / dtype, dtype) for dtype in ("fp32", "fp16", "bf16")}


def training(folder):
    model = ir.from_proto(onnx.load_from_string(lower(folder).training))
    infer_model(model)
    return model


def feeds(folder, scale=1.0):
    weights = Checkpoint.load(folder / "checkpoint").trainable
    return {**BATCH, **weights, "loss_scale": np.float32(scale)}


@pytest.mark.parametrize("dtype", HALF)
def test_products_are_in_half_and_all_else_in_float32(folders, dtype):
    cuda = target("cuda")
    for file in ("training_model", "eval_model"):
        model = ir.load(folders[dtype] / f"{file}.onnx")
        model.functions.clear()
        infer_model(model)
        nodes = [node for node in model.graph if node.op_type != "InPlaceAccumulatorV2"]
        assert [reason for node in nodes if (reason := cuda.lacks(node))] == []
        products = [node for node in nodes if node.op_type in ("MatMul", "Gemm")]
        assert len(products) > 10 and {n.outputs[0].dtype for n in products} == {HALF[dtype]}
        halves = Counter(n.op_type for n in nodes if n.outputs[0].dtype is HALF[dtype])
        assert halves.keys() <= {"MatMul", "Gemm", "Cast"}
        for value in model.graph.inputs:
            assert value.dtype in (ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.BOOL)
    weights = Checkpoint.load(folders[dtype] / "checkpoint").trainable
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}


def test_a_weight_is_cast_once_and_what_was_just_cast_is_not_cast_back(folders):
    model = training(folders["fp16"])
    for value in [*model.graph.inputs, *(y for node in model.graph for y in node.outputs)]:
        casts = [use.node for use in value.uses() if use.node.op_type == "Cast"]
        assert len({n.attributes["to"].as_int() for n in casts}) == len(casts)
        for node in casts:
            before = node.inputs[0].producer()
            pair = before is not None and before.op_type == "Cast"
            assert not pair or before.inputs[0].dtype is not node.outputs[0].dtype


@pytest.mark.parametrize("dtype", HALF)
def test_without_rounding_the_gradients_are_those_of_float32(folders, dtype):
    scale = 256.0 if dtype == "fp16" else 1.0
    exact = evaluate(training(folders["fp32"]), feeds(folders["fp32"]))
    found = evaluate(training(folders[dtype]), feeds(folders[dtype], scale))
    np.testing.assert_allclose(found[0], exact[0], rtol=1e-12)
    for a, b in zip(found[1:], exact[1:], strict=True):
        np.testing.assert_allclose(a / scale, b, rtol=1e-9, atol=1e-12)


def rounded(model, feeds):
    """The outputs in the dtypes of the graph; products sum in float32 and round once."""
    known = {value: feeds[value.name] for value in model.graph.inputs}
    for node in model.graph:
        arrays = [None if x is None else known.get(x, constant(x)) for x in node.inputs]
        op, attributes = find_op(node), read_attributes(find_op(node), node)
        if node.op_type in ("MatMul", "Gemm"):
            wide = [None if x is None else x.astype(np.float32) for x in arrays]
            result = op(*wide, **attributes).astype(arrays[0].dtype)
        else:
            result = op(*arrays, **attributes)
        results = result if isinstance(result, tuple) else (result,)
        known.update(zip(node.outputs, results, strict=False))
    return [known[value] for value in model.graph.outputs]


@pytest.mark.parametrize(("dtype", "bound"), [("fp16", 5e-3), ("bf16", 4e-2)])
def test_rounding_changes_gradients_by_a_few_units_of_the_dtype(folders, dtype, bound):
    scale = 1024.0 if dtype == "fp16" else 1.0
    exact = evaluate(training(folders["fp32"]), feeds(folders["fp32"]))
    found = rounded(training(folders[dtype]), feeds(folders[dtype], scale))
    assert found[0] == pytest.approx(exact[0], rel=1e-3)
    errors = [np.linalg.norm(a / scale - b) for a, b in zip(found[1:], exact[1:], strict=True)]
    size = np.linalg.norm(np.concatenate([b.ravel() for b in exact[1:]]))
    assert 1e-5 < np.linalg.norm(errors) / size < bound


def test_a_scaled_loss_keeps_gradients_that_fp16_would_lose(folders):
    model, exact = training(folders["fp16"]), training(folders["fp32"])
    wanted = evaluate(exact, feeds(folders["fp32"]))[1:]
    errors = []
    for scale in (2.0**-20, 2.0**10):  # as of a loss a million times smaller, and that one scaled
        found = rounded(model, feeds(folders["fp16"], scale))[1:]
        errors.append(sum(np.abs(a / scale - b).sum() for a, b in zip(found, wanted, strict=True)))
    assert errors[0] > 0.5 * sum(np.abs(b).sum() for b in wanted) and errors[1] < 0.01 * errors[0]


@pytest.mark.parametrize("dtype", HALF)
def test_the_cpu_is_refused_in_one_line(folders, dtype):
    with pytest.raises(GraphgenError, match=f"are in {dtype}, for training on CUDA; .*'fp32'"):
        gg.Trainer(folders[dtype], provider="cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp8"}, "dtype is 'fp8'; choose 'fp32', 'fp16' or 'bf16'"),
        (
            {"dtype": "bf16"},
            "which was never tried with the official runtime; choose profile='stock'",
        ),
    ],
)
def test_a_precision_that_makes_no_sense_is_one_error(tmp_path, options, message):
    model = gg.build(nn.Linear(3, 2), x=gg.float32["n", 3])
    with pytest.raises(GraphgenError, match=message):
        gg.artifacts(model, tmp_path / "art", loss="mse", **options)
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def on_cpu(monkeypatch):
    """Trains fp16 artifacts on the CPU, where the runtime calculates them in float32."""
    monkeypatch.setattr(engine, "check_device", lambda *_: None)

    def trainer(folder):
        return gg.Trainer(folder, threads=1, provider="cpu", schedule=gg.schedule.constant(1e-2))

    return trainer


def test_the_trainer_scales_the_loss_and_takes_the_factor_out_again(folders, on_cpu):
    one, other = on_cpu(folders["fp16"]), on_cpu(folders["fp32"])
    assert one._engine.scale.value == 2.0**16
    for a, b in zip(*(t.fit([BATCH] * 10, progress=False) for t in (one, other)), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-4)


def test_a_gradient_that_overflows_halves_the_factor_and_the_step_is_made_again(
    folders, on_cpu, tmp_path
):
    one, other = on_cpu(folders["fp16"]), on_cpu(folders["fp32"])
    one._engine.scale.value = 2.0**127
    found, wanted = (t.fit([BATCH] * 6, progress=False) for t in (one, other))
    assert 2.0**40 < one._engine.scale.value < 2.0**127 and one.step == 6
    np.testing.assert_allclose(
        [line["loss"] for line in found], [line["loss"] for line in wanted], rtol=1e-5
    )


def test_a_resumed_run_keeps_the_factor(folders, on_cpu, tmp_path):
    straight, first = on_cpu(folders["fp16"]), on_cpu(folders["fp16"])
    data = [BATCH] * 8
    for one in (straight, first):
        one._engine.scale.value = 2.0**127
    straight.fit(data, steps=8, checkpoint=tmp_path / "a", progress=False)
    first.fit(data, steps=4, checkpoint=tmp_path / "b", progress=False)
    again = on_cpu(folders["fp16"])
    again.fit(data, steps=8, checkpoint=tmp_path / "b", resume=True, progress=False)
    assert again._engine.scale == straight._engine.scale and again._engine.scale.good > 0
    for name, array in straight.parameters.items():
        np.testing.assert_array_equal(again.parameters[name], array)


def test_an_update_after_which_the_factor_grows_is_whole(folders, on_cpu):
    one, other = on_cpu(folders["fp16"]), on_cpu(folders["fp32"])
    one._engine.scale.good = 1997
    for trainer in (one, other):
        trainer.fit([BATCH] * 6, progress=False)
    assert one._engine.scale == LossScale(True, 2.0**17, 3)
    for name, array in other.parameters.items():
        np.testing.assert_allclose(one.parameters[name], array, rtol=1e-4, atol=1e-6)


def many(scale, steps):
    for _ in range(steps):
        assert scale.made(1.0)
        scale.count()


def test_the_factor_grows_after_many_good_steps_and_ends_at_one():
    scale = LossScale.of({"dtype": "fp16"})
    many(scale, 2000)
    assert scale.value == 2.0**17
    assert [scale.made(float("nan")) for _ in range(17)] == [False] * 17
    assert scale.value == 1.0 and scale.made(float("inf"))  # the trainer tells what is wrong
    many(scale, 2000)
    assert scale.value == 2.0
    plain = LossScale.of({})
    many(plain, 3000)
    assert plain.value == 1.0 and plain.made(float("nan")) and plain.properties() == {}
