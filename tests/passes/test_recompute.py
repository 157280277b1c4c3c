"""Forward values calculated again: the same gradients in less memory, and no pass undoes it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import graphgen as gg
from graphgen.errors import GraphgenError
from graphgen.export.artifacts import artifacts
from graphgen.export.checkpoint import Checkpoint
from graphgen.models.decoder import DecoderLM
from graphgen.models.transformer import Transformer
from graphgen.passes.training import MARK
from graphgen.passes.training.recompute import peak_bytes
from graphgen.train.lower import lower

DIMS = {"batch": 4, "seq": 32}
IDS = gg.int64["batch", "seq"]
RNG = np.random.default_rng(0)


def decoder(layers: int = 2, **options: Any) -> ir.Model:
    module = DecoderLM(50, 32, layers=layers, num_heads=4, length=64, dropout=0.1, **options)
    return gg.build(module, training=True, input_ids=IDS)


def encoder_decoder() -> ir.Model:
    module = Transformer(50, 32, layers=2, num_heads=4, dropout=0.0)
    mask = gg.int64["batch", "seq"]
    return gg.build(module, training=True, source_ids=IDS, source_mask=mask, target_ids=IDS)


def training_model(folder: Path) -> ir.Model:
    return ir.from_proto(onnx.load_from_string(lower(folder).training))


def copies(model: ir.Model) -> list[ir.Node]:
    return [n for n in model.graph if n.metadata_props.get(MARK) == "copy"]


def gradients(folder: Path) -> list[Any]:
    """The loss and the gradients, in a session without the runtime's optimizations."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(lower(folder).training, options)
    start = Checkpoint.load(folder / "checkpoint")
    rng = np.random.default_rng(1)
    names = ("input_ids", "source_ids", "target_ids", "labels")
    feeds = {name: rng.integers(0, 50, (4, 32)) for name in names}
    feeds["source_mask"] = np.repeat([[1] * 20 + [0] * 12], 4, axis=0)
    feeds |= {"seed": np.int64(3), "step": np.int64(5), **start.trainable}
    wanted = {x.name for x in session.get_inputs()}
    return list(session.run(None, {n: np.asarray(x) for n, x in feeds.items() if n in wanted}))


def both(model: ir.Model, folder: Path) -> Path:
    """Artifacts without recomputation in folder/none, and with it in folder/full."""
    for mode in ("none", "full"):
        artifacts(model, folder / mode, recompute=mode, dims=DIMS)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return both(decoder(), tmp_path_factory.mktemp("decoder"))


@pytest.mark.share(2)
@pytest.mark.parametrize("build", [decoder, encoder_decoder])
def test_the_gradients_are_the_same_bits(build: Any, made: Path, tmp_path: Path) -> None:
    folder = made if build is decoder else both(build(), tmp_path)
    results, peaks = [], []
    for mode in ("none", "full"):
        results.append(gradients(folder / mode))
        peaks.append(peak_bytes(training_model(folder / mode), DIMS))
    assert len(results[0]) > 10
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
    assert peaks[1] < 0.7 * peaks[0]


def test_between_sublayers_the_residual_stream_is_kept(made: Path) -> None:
    """Two checkpoints a layer; all products but those behind them are calculated again."""
    model = training_model(made / "full")
    products = [n for n in copies(model) if n.op_type in ("MatMul", "FusedMatMul")]
    # query, key, value, scores, weights times values; up. Not: output and down.
    assert len(products) == 2 * 6
    kept = [n.outputs[0] for n in model.graph if n.metadata_props.get(MARK) == "start"]
    streams = [v for v in kept if v.shape == ir.Shape(["batch", "seq", 32])]
    assert len(streams) == 1 + 2 * 2  # the embedding, and behind each residual connection


def test_without_it_only_activations_and_norms_are(made: Path) -> None:
    found = {n.op_type for n in copies(ir.load(made / "none/training_model.onnx"))}
    assert {"Gelu", "LayerNormalization"} <= found
    assert not found & {"MatMul", "FusedMatMul", "Gemm", "Softmax"}


def test_the_runtimes_own_passes_do_not_undo_it(made: Path, tmp_path: Path) -> None:
    data = lower(made / "full").training
    counts = []
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        options = ort.SessionOptions()
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
        options.optimized_model_filepath = str(tmp_path / f"{level}.onnx")
        options.log_severity_level = 4
        ort.InferenceSession(data, options)
        nodes = onnx.load(tmp_path / f"{level}.onnx").graph.node
        counts.append(sum(n.op_type in ("MatMul", "FusedMatMul", "Gemm") for n in nodes))
    recomputed = copies(ir.from_proto(onnx.load_from_string(data)))
    products = [n for n in recomputed if "MatMul" in n.op_type]
    assert counts[0] == counts[1] and len(products) == 12


@pytest.mark.exhaustive
def test_a_budget_is_kept_with_as_little_as_does(made: Path, tmp_path: Path) -> None:
    known = {mode: lower(made / mode).loss["peak_bytes"] for mode in ("none", "full")}
    middle, model = (known["none"] + known["full"]) // 2, decoder()
    artifacts(model, tmp_path / "auto", recompute="auto", memory=middle, dims=DIMS)
    assert known["full"] < lower(tmp_path / "auto").loss["peak_bytes"] <= middle
    folders = (made / "none", tmp_path / "auto", made / "full")
    least, some, most = (len(copies(training_model(folder))) for folder in folders)
    assert least < some < most
    artifacts(model, tmp_path / "all", recompute="auto", memory=known["none"], dims=DIMS)
    assert lower(tmp_path / "all").loss["peak_bytes"] == known["none"]


@pytest.mark.exhaustive
def test_attention_weights_come_before_sublayers(tmp_path: Path) -> None:
    """Of all products, queries times keys are the least work for the memory they free."""
    module = DecoderLM(50, 256, layers=2, num_heads=4, length=128)
    model = gg.build(module, training=True, input_ids=IDS)
    sizes, memory, losses = {"batch": 2, "seq": 128}, None, []
    batch = {name: RNG.integers(0, 50, (2, 128)) for name in ("input_ids", "labels")}
    for mode in ("none", "auto"):
        artifacts(model, tmp_path / mode, recompute=mode, memory=memory, dims=sizes)
        memory = lower(tmp_path / mode).loss["peak_bytes"] - 1
        steps = gg.Trainer(tmp_path / mode).fit([batch] * 2, progress=False)
        losses.append(steps[-1]["loss"])
    found = [n.op_type for n in copies(training_model(tmp_path / "auto"))]
    assert found.count("Softmax") == found.count("FusedMatMul") == 2 and "MatMul" not in found
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute": "some"}, "recompute is 'some'; choose 'none', 'full' or 'auto'"),
        ({"memory": 1000, "dims": DIMS}, r"'auto', \d+ bytes are needed at batch=4, seq=32; give"),
        (
            {"memory": 1000, "recompute": "none"},
            "at typical sizes; .*; recompute='auto' needs less",
        ),
        ({"dims": {"sequence": 3}}, "dimension 'sequence' is in no input; .* are batch, seq"),
    ],
)
def test_bad_input(options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(GraphgenError, match=message):
        artifacts(decoder(1), tmp_path / "art", **{"recompute": "auto", **options})
    assert not (tmp_path / "art").exists()


def test_a_wrong_mode_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    mode: Any = "some"
    with pytest.raises(GraphgenError, match="recompute is 'some'; choose 'none', 'full' or 'auto'"):
        artifacts(tmp_path / "missing.onnx", tmp_path / "art", recompute=mode)


MEASURE = """
import sys, numpy as np, graphgen as gg
def resident(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))
trainer = gg.Trainer(sys.argv[1], threads=1)
before = resident("VmRSS") - sum(p.nbytes for p in trainer.parameters.values())
rng = np.random.default_rng(0)
batch = {name: rng.integers(0, 50, (16, 128)) for name in ("input_ids", "labels")}
trainer.fit([batch] * 2, progress=False)
print(resident("VmHWM") - before)
"""


@pytest.mark.share(2)
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_peak_is_what_was_planned(mode: str, tmp_path: Path) -> None:
    module = DecoderLM(50, 192, layers=3, num_heads=6, length=128)
    model = gg.build(module, training=True, input_ids=IDS)
    artifacts(model, tmp_path / "art", recompute=mode, dims={"batch": 16, "seq": 128})
    planned = lower(tmp_path / "art").loss["peak_bytes"]
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "art")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) == pytest.approx(planned, rel=0.15)


BRANCHES = """<ir_version: 8, opset_import: ["" : 18]>
graph (float[n, 4] x, bool c) => (float[n, 4] y)
<float[4, 4] w = {1,2,3,4,1,2,3,4,1,2,3,4,1,2,3,4}> {
  s = Exp(x)
  z = If (c) <then_branch = a () => (float[n, 4] p) { p = Mul(s, s) },
              else_branch = b () => (float[n, 4] q) { q = Identity(s) }>
  h = MatMul(z, w)
  k = Tanh(h)
  y = MatMul(k, w)
}"""


def test_a_node_with_branches_is_never_copied(tmp_path: Path) -> None:
    """Its copy's branches would have the names of the first one's, which no file may hold."""
    onnx.save(onnx.parser.parse_model(BRANCHES), tmp_path / "m.onnx")
    x = np.full((3, 4), 0.1, np.float32)
    batch = {"x": x, "c": np.array(True), "labels": x}
    losses = {}
    for mode in ("none", "auto", "full"):
        artifacts(tmp_path / "m.onnx", tmp_path / mode, loss="mse", recompute=mode)
        copied = {node.op_type for node in copies(training_model(tmp_path / mode))}
        assert "If" not in copied
        steps = gg.Trainer(tmp_path / mode).fit([batch] * 2, progress=False)
        losses[mode] = [step["loss"] for step in steps]
    assert losses["none"] == losses["auto"] == losses["full"]
