"""What a trainer makes of the files, for the stock runtime."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphgen as gg
from graphgen import nn
from graphgen.edit import infer_model
from graphgen.errors import GraphgenError
from graphgen.export.artifacts import artifacts
from graphgen.match import Engine, Pass, run_passes
from graphgen.measure.feeds import feeds_of_kind
from graphgen.models.decoder import DecoderLM
from graphgen.nn.feed_forward import Activation
from graphgen.passes.training.accumulate import _transpose_once, results
from graphgen.passes.training.activations import share_factors
from graphgen.passes.training.blocks import _count, in_blocks
from graphgen.train import engine
from graphgen.train.lower import SESSION_OPTIONS, lower


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = DecoderLM(50, 32, layers=2, num_heads=4, length=64)
    path = tmp_path_factory.mktemp("lower") / "art"
    artifacts(gg.build(module, input_ids=gg.int64["batch", "seq"]), path)
    return path


def test_gradients_are_outputs_and_nothing_official_is_left(folder: Path) -> None:
    program = lower(folder)
    model = onnx.load_from_string(program.training)
    names = [value.name for value in model.graph.output]
    count = len(program.trainable)
    assert names[1 : 1 + count] == [f"{name}_grad" for name in program.trainable]
    assert names[1 + count :] == ["embedding.weight_grad.0"]  # of the head, then of the tokens too
    assert {*program.gradients} == {*names[1:]}
    assert not [x.name for x in model.graph.input if "accumulation" in x.name or "lazy" in x.name]
    assert not model.functions
    assert "InPlaceAccumulatorV2" not in {node.op_type for node in model.graph.node}


def test_an_accumulator_that_is_no_output_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, other := tmp_path / "art")
    model = onnx.load(other / "training_model.onnx")
    [last] = model.graph.output[-1:]
    [maker] = [n for n in model.graph.node if last.name in n.output]
    assert maker.op_type == "InPlaceAccumulatorV2"
    model.graph.output.remove(last)
    onnx.save(model, other / "training_model.onnx")
    with pytest.raises(GraphgenError, match="not an output of the graph: write the artifacts"):
        lower(other)


def test_what_accumulates_starts_from_its_buffer(folder: Path) -> None:
    """Each buffer has one reader: a product with it as C, or an Add."""
    program = lower(folder, accumulate=3)
    nodes = onnx.load_from_string(program.training).graph.node
    buffers = {f"{name}_grad.accumulation.buffer": name for name in program.trainable}
    assert (program.accumulate, lower(folder).accumulate) == (3, 1)
    assert buffers.items() <= program.gradients.items()
    found = []
    for node in nodes:
        for i, name in enumerate(node.input):
            if name in buffers:
                assert program.gradients[node.output[0]] == buffers[name]  # the same memory
                found.append((node.op_type, i))
    products = 1 + 6 * 2  # of the head, and in each layer
    rest = len(buffers) - products  # biases, norms, and a table so small that its zeros are folded
    assert sorted(found) == [("Add", 1)] * rest + [("Gemm", 2)] * products


def test_only_narrow_operands_of_products_are_transposed(folder: Path) -> None:
    """Aᵀ of the few features of a head, which the kernel would turn again for each 128 columns."""
    nodes = onnx.load_from_string(lower(folder).training).graph.node
    made, narrow = {node.output[0]: node for node in nodes}, 0
    for node in nodes:
        for i, name in enumerate(node.input if "MatMul" in node.op_type else ()):
            if name in made and made[name].op_type == "Transpose":
                [perm] = made[name].attribute
                heads = list(perm.ints)[-1] == len(perm.ints) - 1  # rows stay rows
                assert heads or (i, list(perm.ints)) == (0, [0, 1, 3, 2])
                narrow += not heads
    fused = [node for node in nodes if node.op_type == "FusedMatMul"]
    # In each layer Q Kᵀ, and behind it G Vᵀ; x Eᵀ once. Gᵀ P and Qᵀ dS read copies.
    assert (len(fused), narrow) == (2 * 2 + 1, 2 * 2)


def test_a_gelu_that_is_calculated_again_shares_its_gradients_factor(tmp_path: Path) -> None:
    """Of both kinds; the erf or tanh stands once, and all gradients are those of the file."""
    kinds: dict[Activation, str] = {"gelu": "Erf", "gelu_tanh": "Tanh"}
    for kind, name in kinds.items():
        module = DecoderLM(50, 16, layers=1, num_heads=2, length=8, activation=kind)
        model = gg.build(module, training=True, seed=0, input_ids=gg.int64["batch", "seq"])
        artifacts(model, tmp_path / kind)
        proto = onnx.load(tmp_path / kind / "training_model.onnx")
        model, wanted = ir.from_proto(proto), results(ir.from_proto(proto))
        [report] = run_passes(model, [Pass("share_factors", share_factors, "whole")], Engine())
        assert report.count("fired") == 2
        found = [node.op_type for node in model.graph]
        assert (found.count("Gelu"), found.count(name)) == (1, 1)
        feeds = feeds_of_kind(wanted, {"batch": 2, "seq": 8}, "small")
        for one, other in zip(
            *(gg.Session(m, optimize=False)(feeds) for m in (results(model), wanted)), strict=True
        ):
            np.testing.assert_allclose(one, other, 1e-5, 1e-6 * np.abs(other).max(initial=0.0))


class Largest(gg.nn.Module):
    """The largest of each feature, after a Gelu."""

    def __init__(self) -> None:
        self.up, self.head = gg.nn.Linear(6, 16), gg.nn.Linear(16, 3)

    def __call__(self, x: Any) -> Any:
        h = gg.ops.gelu(self.up(x)) * 0.7
        return {"logits": self.head(gg.ops.reduce_max(h, axis=1))}


def test_a_gelu_is_calculated_as_before_where_it_is_compared(tmp_path: Path) -> None:
    """A maximum has its gradient where x equals it: rounded otherwise, nothing would."""
    artifacts(gg.build(Largest(), x=gg.float32["n", 40, 6]), tmp_path / "art")
    model = ir.from_proto(onnx.load(tmp_path / "art/training_model.onnx"))
    assert [node.op_type for node in model.graph].count("Gelu") == 2
    [report] = run_passes(model, [Pass("share_factors", share_factors, "whole")], Engine())
    assert not report.count("fired")


def test_columns_are_copied_once_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two gradients share the copy of x; a wide h is left, and the copy is of g; logits stay."""
    text = """<ir_version: 8, opset_import: ["": 18]> g (float[n, 512] x, float[n, 1024] h,
        float[n, 8192] p, float[n, 512] g, float[512, 512] c) => (float[512, 512] q,
        float[512, 512] k, float[1024, 512] down, float[8192, 512] head, float[512, 512] small) {
        q = Gemm <transA = 1, alpha = 0.5> (x, g)  k = Gemm <transA = 1> (x, g, c)
        down = Gemm <transA = 1> (h, g)  head = Gemm <transA = 1> (p, g)
        small = Gemm (c, c)
    }"""
    proto = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    sizes = {"x": (9, 512), "h": (9, 1024), "p": (9, 8192), "g": (9, 512), "c": (512, 512)}
    feeds = {name: rng.standard_normal(size, np.float32) for name, size in sizes.items()}
    wanted = gg.Session(ir.from_proto(proto))(**feeds)
    for processor, fired in (("avx2", 3), ("avx512", 3), ("without figures", 0)):
        monkeypatch.setattr("graphgen.targets.instructions", lambda name=processor: name)
        model = ir.from_proto(proto)
        report = _transpose_once(model, Engine())
        assert report.count("fired") == fired
        found = [node.op_type for node in model.graph]
        assert found.count("Transpose") == (3 if fired else 0)  # x, g and the result with h
        for y, array in zip(gg.Session(model)(**feeds), wanted, strict=True):
            np.testing.assert_allclose(y, array, rtol=1e-4, atol=1e-4)
        refused = [site.reason for site in report.sites if site.status == "refused"]
        assert len(refused) == (1 if fired else 0) and all("8,192 columns" in r for r in refused)


def test_the_order_of_the_file_is_kept(folder: Path) -> None:
    written = [node.name for node in onnx.load(folder / "training_model.onnx").graph.node]
    lowered = [node.name for node in onnx.load_from_string(lower(folder).training).graph.node]
    both = {*written} & {*lowered}
    assert len(both) > 200
    assert [n for n in written if n in both] == [n for n in lowered if n in both]
    assert SESSION_OPTIONS["execution_order"] == "PRIORITY_BASED"


def test_the_same_files_are_lowered_once(folder: Path, tmp_path: Path) -> None:
    first = lower(folder)
    assert lower(folder) is first
    shutil.copytree(folder, tmp_path / "art")
    other = lower(tmp_path / "art")
    assert (other is not first, other.training) == (True, first.training)
    path = tmp_path / "art/training_model.onnx"
    model = onnx.load(path)
    [told] = [entry for entry in model.metadata_props if entry.key == "graphgen.loss"]
    told.value = json.dumps(json.loads(told.value) | {"classes": 7})
    path.write_bytes(model.SerializeToString())
    assert lower(tmp_path / "art").loss["classes"] == 7
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(
        GraphgenError, match=r"training_model\.onnx is not an ONNX model, or one cut"
    ):
        lower(tmp_path / "art")
    path.unlink()
    with pytest.raises(GraphgenError, match=r"training_model\.onnx cannot be read: No such file"):
        lower(tmp_path / "art")


def test_many_rows_are_multiplied_in_blocks() -> None:
    """Batches of one weight, to the same bits; a small weight and one with sums stay."""
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]>
        g (float[b, t, 256] x, float[256, 256] w, float[256, 8] small, float[256, 256] c) =>
        (float[b, t, 256] y, float[n, 256] z, float[b, t, 8] few, float[256, 256] sum) {
        y = MatMul (x, w)  turned = com.microsoft.FusedMatMul <transB = 1, alpha = 0.5> (y, w)
        sizes = Constant <value = int64[2] {-1, 256}> ()  rows = Reshape (turned, sizes)
        z = Gemm <transB = 1> (rows, w)  few = MatMul (x, small)  sum = Gemm (w, w, c)
    }""")
    model = ir.from_proto(proto)
    report = in_blocks(model, Engine(context=infer_model(model)))
    assert report.count("fired") == 3
    found = [node.op_type for node in model.graph]
    products = found.count("FusedMatMul"), found.count("MatMul"), found.count("Gemm")
    assert products == (3, 1, 1) and found.count("ReduceMax") == 2
    rng = np.random.default_rng(0)
    widths = {"w": 256, "small": 8, "c": 256}
    weights = {name: rng.standard_normal((256, n), np.float32) for name, n in widths.items()}
    one, other = gg.Session(ir.from_proto(proto)), gg.Session(model)
    for batch, length, blocks in ((2, 3, 1), (0, 5, 1), (4, 512, 4), (3, 513, 3), (1, 1537, 1)):
        x = rng.standard_normal((batch, length, 256), np.float32)
        assert _count(np.array([batch * length])) == blocks
        for wanted, given in zip(one(x=x, **weights), other(x=x, **weights), strict=True):
            np.testing.assert_array_equal(given, wanted)


@pytest.mark.parametrize("provider", [None, "auto", "cpu", "webgpu"])
def test_products_are_cut_for_the_cpu_only(
    provider: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gg.artifacts(gg.build(nn.Linear(4, 2), x=gg.float32["batch", 4]), tmp_path / "art", loss="mse")
    asked, own = [], engine.lower
    monkeypatch.setattr(engine, "lower", lambda *given, cpu: asked.append(cpu) or own(*given))
    with contextlib.suppress(GraphgenError):  # without the plugin
        gg.Trainer(tmp_path / "art", provider=provider)
    assert asked == [provider != "webgpu"]
