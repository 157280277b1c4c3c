"""On a device: `make test-webgpu` sets up the plugin and an adapter, a software one if need be.

`make test-cuda` runs the same tests on CUDA.
"""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from devices_here import CPU, CUDA, WEBGPU, There
from random_checkpoints import CAUSAL, ENCODERS, SEQ2SEQ, random_checkpoint
from small_models import relative_rms, vary

import graphgen as gg
from graphgen import nn
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.generation import decoder as decoding
from graphgen.generation.decoder import EncoderDecoder, Growing, InPlace, open_decoder
from graphgen.match import Miss
from graphgen.measure.reference import evaluate
from graphgen.runtime import Resident, on_host

X = np.random.default_rng(0).standard_normal((2, 5, 32), np.float32)


class Block(nn.Module):
    """x + feed_forward(norm(x))."""

    def __init__(self) -> None:
        self.norm, self.feed_forward = vary(nn.LayerNorm(32)), vary(nn.FeedForward(32, 64))

    def __call__(self, x: Any) -> Any:
        return x + self.feed_forward(self.norm(x))


@pytest.fixture(scope="module")
def path(tmp_path_factory: Any) -> Path:
    """A feed-forward network with a norm, fused."""
    model = gg.build(Block(), x=gg.float32["batch", "seq", 32])
    gg.export(gg.optimize(model), at := tmp_path_factory.mktemp("device") / "m.onnx")
    return Path(at)


def test_it_runs_there_and_the_plan_says_so(there: There, path: Path) -> None:
    session = gg.Session(path, provider=there.name, strict=True)
    plan = session.plan
    assert plan.device == there.name and plan.providers[0] == there.own and not plan.note
    assert plan.placement[there.own] >= 5 and set(plan.placement) <= {there.own, CPU}
    [wanted] = evaluate(gg.load(path), {"x": X})
    assert relative_rms(wanted, session(x=X)[0]) < 1e-6
    out = np.empty_like(X)
    run = session.bind({"x": X}, {next(iter(session.outputs)): out})
    assert run()[0] is out and relative_rms(wanted, out) < 1e-6


def test_nodes_on_the_cpu_read_buffers_as_they_are_at_each_run(there: There) -> None:
    """Det has no kernel there; a buffer of the device is copied to it for each run."""
    model = gg.build(lambda x, w: x * gg.ops.det(w), x=gg.float32[2, 5, 32], w=gg.float32[2, 2])
    with pytest.warns(gg.GraphgenWarning, match=f"for lack of a kernel of {there.name}: 1 Det"):
        session = gg.Session(model, provider=there.name)
    matrices = [n * np.eye(2, dtype=np.float32) for n in (1, 2)]
    run = session.bind({"x": X, "w": (buffer := session.place(matrices[0]))})
    assert isinstance(buffer, Resident)
    for w in matrices:
        buffer.write(w)
        assert relative_rms(X * w[0, 0] ** 2, run()[0]) < 1e-6


def test_the_command_runs_there(there: There, path: Path, tmp_path: Path, capsys: Any) -> None:
    np.save(tmp_path / "x.npy", X)
    given = ["run", str(path), "--input", f"x={tmp_path / 'x.npy'}", "--provider", there.name]
    assert main([*given, "--strict"]) == 0
    assert f" on {there.own}" in capsys.readouterr().out
    assert main(["providers"]) == 0
    assert f"\n{there.name} " in capsys.readouterr().out


@WEBGPU.alone
def test_a_node_of_floats_that_it_leaves_out_is_told(tmp_path: Path) -> None:
    def attend(q: Any) -> Any:
        return gg.ops.attention(q, q, q, q_num_heads=2, kv_num_heads=2)

    gg.export(gg.build(attend, q=gg.float32[1, 4, 8]), path := tmp_path / "attention.onnx")
    with pytest.warns(gg.GraphgenWarning, match="for lack of a kernel of webgpu: 1 Attention"):
        session = gg.Session(path, provider="webgpu")
    assert "1 Attention" in session.plan.note
    with pytest.raises(GraphgenError, match="strict"):
        gg.Session(path, provider="webgpu", strict=True)


def test_what_does_not_fit_there_is_one_error_and_the_session_goes_on(
    there: There, tmp_path: Path
) -> None:
    """300,000 x 300,000 numbers are more than any device gives to one buffer."""

    def largest(a: Any, b: Any) -> Any:
        return gg.ops.reduce_max(a + b, axis=-1)

    model = gg.build(largest, a=gg.float32["n", 1], b=gg.float32[1, "m"])
    gg.export(model, path := tmp_path / "outer.onnx")
    session = gg.Session(path, provider=there.name)
    a = np.arange(300_000, dtype=np.float32)
    with pytest.raises(GraphgenError, match="the run failed") as refused:
        session(a=a[:, None], b=a[None])
    assert "\n" not in str(refused.value)
    np.testing.assert_array_equal(session(a=a[:3, None], b=a[None, :3])[0].ravel(), [2, 3, 4])


@WEBGPU.alone
def test_bisect_finds_the_sines_that_are_coarse_there(tmp_path: Path) -> None:
    def angles(x: Any) -> Any:
        return gg.ops.tanh(gg.ops.sin(x) * 2.0 + x)

    gg.export(gg.build(angles, x=gg.float32["n", 64]), path := tmp_path / "angles.onnx")
    given = ["bisect", str(path), "--against", "webgpu", "--dim", "n=8", "--tolerance"]
    assert main([*given, "1e-9", "-o", str(tmp_path / "found")]) == 3
    [folder] = (tmp_path / "found").iterdir()
    assert folder.name == "1-Sin"
    done = subprocess.run([sys.executable, folder / "run.py"], capture_output=True, text=True)
    assert "relative RMS difference" in done.stdout, done.stderr
    assert main([*given, "0.1"]) == 0


def test_compare_counts_nodes_copies_and_errors_there(there: There, path: Path) -> None:
    sizes = {"batch": 2, "seq": 5}
    found = gg.compare(path, dims=sizes, kinds=[], seconds=0.0, providers=[there.name])
    column = found["baseline"].elsewhere[there.name]
    assert column.problem is None and column.nodes >= 5
    assert column.error is not None and 0 < column.error < 1e-6


def test_an_exported_layer_trains_there_with_no_float_on_the_cpu(
    there: There, tmp_path: Path
) -> None:
    layer = Path(__file__).parents[1] / "fixtures/layer_dynamo_20.onnx"
    gg.artifacts(layer, tmp_path / "art", loss="mse")
    rows = np.random.default_rng(1).standard_normal((4, 2, 6, 32), np.float32)
    batches, losses = [{"x": x, "labels": np.sin(x)} for x in rows], []
    for provider in ("cpu", there.name):
        trainer = gg.Trainer(
            tmp_path / "art", provider=provider, strict=provider != "cpu", accumulate=2,
            schedule=gg.schedule.constant(0.01),
        )  # fmt: skip
        losses.append([done["loss"] for done in trainer.fit(batches * 2, steps=4)])
    assert np.allclose(*losses, rtol=1e-5, atol=0)


def test_twenty_steps_of_training_have_the_losses_of_the_cpu(there: There, tmp_path: Path) -> None:
    model = gg.build(nn.EncoderLayer(16, num_heads=2), x=gg.float32["batch", "seq", 16], seed=0)
    gg.export(model, tmp_path / "layer.onnx")
    optimizer = gg.AdamW()
    gg.artifacts(
        tmp_path / "layer.onnx", tmp_path / "art", loss="mse", optimizer=optimizer, profile="stock"
    )
    x = np.random.default_rng(0).standard_normal((4, 4, 6, 16), np.float32)
    batches = [{"x": rows, "labels": np.sin(rows)} for rows in x]
    losses: list[list[float]] = []
    for provider in ("cpu", there.name):
        constant = gg.schedule.constant(1e-2)
        with warnings.catch_warnings(action="ignore", category=gg.GraphgenWarning):
            trainer = gg.Trainer(tmp_path / "art", schedule=constant, provider=provider)
            history = trainer.fit(batches, steps=20, progress=False)
            losses.append([line["loss"] for line in history])
            losses[-1].append(trainer.evaluate(batches))
        engine, kind = trainer._engine, np.ndarray if provider == "cpu" else Resident
        kept = [*engine._open._placed.values(), *engine._train._outputs.values()]
        assert {type(buffer) for buffer in kept} == {kind}, "gradients stay there, too"
    assert losses[0][-1] < 0.5 * losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


def test_parameters_that_are_set_are_those_of_the_next_step(there: There, tmp_path: Path) -> None:
    model = gg.build(nn.Linear(4, 2), x=gg.float32["batch", 4], seed=0)
    gg.export(model, tmp_path / "linear.onnx")
    gg.artifacts(tmp_path / "linear.onnx", tmp_path / "art", loss="mse", profile="stock")
    batch = {"x": np.ones((3, 4), np.float32), "labels": np.zeros((3, 2), np.float32)}
    session = gg.TrainingSession(tmp_path / "art", provider=there.name)
    session.copy_buffer_to_parameters(np.zeros(session.get_parameters_size(), np.float32))
    assert session(batch) == 0.0


OPTIMIZERS = [
    gg.AdamW(clip_norm=0.5, no_decay="bias", weight_decay=0.1),
    gg.SGD(momentum=0.9, nesterov=True, weight_decay=0.1),
    gg.SGD(groups=(gg.Group("bias", rate=3.0),)),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adamw", "nesterov", "sgd"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_state_that_stays_there_is_that_of_the_cpu(
    there: There, optimizer: Any, accumulate: int, tmp_path: Path
) -> None:
    """Averages, clipping, decay and groups, and a run that goes on from a kept state."""
    model = gg.build(nn.FeedForward(4, 8), x=gg.float32["batch", 4], seed=0)
    gg.export(model, path := tmp_path / "model.onnx")
    given: dict[str, Any] = {"loss": "mse", "optimizer": optimizer, "accumulate": accumulate}
    gg.artifacts(path, tmp_path / "art", profile="stock", **given)
    x = np.random.default_rng(0).standard_normal((6, 5, 4), np.float32)
    batches = [{"x": rows, "labels": np.cos(rows)} for rows in x]
    found = []
    for provider in ("cpu", there.name):
        how: dict[str, Any] = {"schedule": gg.schedule.constant(0.05), "provider": provider}
        for steps in (2, 4):
            trainer = gg.Trainer(tmp_path / "art", ema=0.9, **how)
            kept: dict[str, Any] = {"checkpoint": tmp_path / provider, "resume": steps > 2}
            trainer.fit(batches, steps=steps, progress=False, **kept)
        saved = trainer._engine.checkpoint(0.0, {})
        assert saved.optimizer is not None and saved.optimizer.step == 4
        moments = [saved.optimizer.momentum0, saved.optimizer.momentum1, saved.optimizer.average]
        found.append([saved.trainable, *moments])
        found[-1].append({"loss": np.float32(trainer.evaluate(batches))})
    for cpu, device in zip(*found, strict=True):
        assert cpu.keys() == device.keys()
        for name, wanted in cpu.items():
            np.testing.assert_allclose(device[name], wanted, rtol=1e-4, atol=1e-6, err_msg=name)


def test_gradients_of_batches_are_added_up_there(there: There, tmp_path: Path) -> None:
    model = gg.build(nn.Linear(4, 2), x=gg.float32["batch", 4], seed=0)
    gg.export(model, tmp_path / "linear.onnx")
    gg.artifacts(tmp_path / "linear.onnx", tmp_path / "art", loss="mse", profile="stock")
    x = np.random.default_rng(0).standard_normal((4, 3, 4), np.float32)
    found = []
    for provider in ("cpu", there.name):
        session = gg.TrainingSession(tmp_path / "art", provider=provider)
        labels = np.ones((3, 2), np.float32)
        for i, rows in enumerate(x):  # one batch, then two
            session(rows, labels)
            if i in (0, 2):
                found.append(session.gradients)
                session.optimizer_step()
                session.lazy_reset_grad()
        found += [session.gradients, session.parameters]
    for cpu, device in zip(found[:4], found[4:], strict=True):
        for name, wanted in cpu.items():
            np.testing.assert_allclose(device[name], wanted, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("quantize", [[], ["--quantize", "weights8"]], ids=["fp32", "weights8"])
def test_generation_gives_the_tokens_of_the_cpu(
    there: There, quantize: list[str], tmp_path: Path, capsys: Any
) -> None:
    """All that calculates floats is there, the angles and the rounding, too."""
    checkpoint = Path(__file__).resolve().parents[1] / "fixtures" / "gpt2_checkpoint"
    assert main(["build", str(checkpoint), "-o", str(tmp_path / "out"), *quantize]) == 0
    tokens = []
    for provider in ("cpu", there.name):
        given = ["--ids", "5,9,2", "--max-new-tokens", "8", "--provider", provider, "--strict"]
        capsys.readouterr()
        with warnings.catch_warnings(action="ignore", category=gg.GraphgenWarning):
            assert main(["generate", str(tmp_path / "out"), *given]) == 0
        tokens.append(capsys.readouterr().out.split()[0])
    assert tokens[0] == tokens[1] and tokens[0].count(",") == 7


@pytest.mark.filterwarnings("ignore::graphgen.GraphgenWarning")
@pytest.mark.parametrize("kind", [*CAUSAL, *SEQ2SEQ, *ENCODERS])
def test_every_kind_of_checkpoint_gives_there_what_it_gives_on_the_cpu(
    there: There, kind: str, tmp_path: Path
) -> None:
    source = random_checkpoint(tmp_path / "in", {**CAUSAL, **SEQ2SEQ, **ENCODERS}[kind])
    assert main(["build", str(source), "-o", str(tmp_path / "out")]) == 0
    found = []
    for provider in ("cpu", there.name):
        if kind in ENCODERS:
            session = gg.Session(tmp_path / "out" / "onnx" / "model.onnx", provider=provider)
            ids = np.array([[5, 9, 2], [7, 3, 4]])
            mask = {name: np.ones_like(ids) for name in session.inputs}
            found.append(session(mask | {"input_ids": ids})[0])
        else:
            prompts = [[5, 9, 2], [7, 3, 4, 5, 6]]
            texts = gg.generate(tmp_path / "out", prompts, max_new_tokens=8, provider=provider)
            list(texts)
            found.append(texts.tokens)
    if kind in ENCODERS:
        assert relative_rms(*found) < 1e-5
    else:
        assert found[0] == found[1]


def test_a_buffer_stays_there_from_run_to_run(there: There, path: Path) -> None:
    session = gg.Session(path, provider=there.name)
    buffer = session.place(X)
    assert isinstance(buffer, Resident) and buffer.shape == X.shape
    [name], other = session.outputs, session.place(np.zeros_like(X))
    forth, back = (
        session.bind({"x": buffer}, {name: other}),
        session.bind({"x": other}, {name: buffer}),
    )
    wanted = X
    for run, made in ((forth, other), (back, buffer)):  # each reads what the one before wrote
        [wanted] = evaluate(gg.load(path), {"x": wanted.astype(np.float32)})
        assert run()[0] is made
    with on_host(buffer) as array:
        assert relative_rms(wanted, array) < 1e-6
        array[...] = X
    [wanted] = evaluate(gg.load(path), {"x": X})
    assert relative_rms(wanted, session(x=buffer)[0]) < 1e-6
    told = f"'x' is on {there.name}, and the session on cpu; place it"
    with pytest.raises(GraphgenError, match=told):
        gg.Session(path, provider="cpu").bind({"x": buffer})
    with pytest.raises(GraphgenError, match=r"'x' is float32\[2, 32\].*its rank must be 3"):
        session.bind({"x": session.place(X[:, 0])})


@pytest.mark.parametrize("kind", [InPlace, Growing, EncoderDecoder])
def test_caches_stay_there(
    there: There, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "t5_checkpoint" if kind is EncoderDecoder else "gpt2_checkpoint"
    checkpoint = Path(__file__).resolve().parents[1] / "fixtures" / name
    assert main(["build", str(checkpoint), "-o", str(tmp_path / "out")]) == 0
    if kind is Growing:
        monkeypatch.setattr(decoding, "in_place", lambda model: Miss("it was asked not to be"))
    found = []
    for provider in ("cpu", there.name):
        with warnings.catch_warnings(action="ignore", category=gg.GraphgenWarning):
            decoder = open_decoder(tmp_path / "out", provider=provider)
        in_place = kind is not InPlace or there.name != "cuda" or provider == "cpu"
        assert type(decoder) is (kind if in_place else Growing), "in float32 CUDA has no kernel"
        assert provider == "cpu" or "Attention" not in decoder.session.plan.note
        decoder.begin = [[0]]
        logits = [decoder.start([[5, 9, 2], [7, 3, 4, 5, 6]], 4, beams=2)]
        logits.append(decoder.step(np.array([1, 2, 3, 4])).copy())
        decoder.reorder(np.array([1, 0, 3, 3]))
        logits.append(decoder.step(np.array([5, 6, 7, 8])).copy())
        decoder.keep(np.array([1, 3]))
        logits.append(decoder.step(np.array([9, 1])).copy())
        buffers = {type(buffer) for buffer in decoder.past.values()}
        assert buffers == {np.ndarray if provider == "cpu" else Resident}
        found.append(logits)
    for cpu, device in zip(*found, strict=True):
        assert relative_rms(cpu, device) < 1e-5


@CUDA.alone
@pytest.mark.parametrize(("dtype", "bound"), [("fp16", 5e-3), ("bf16", 4e-2)])
def test_products_in_half_train_to_about_the_losses_of_float32(
    dtype: Any, bound: float, tmp_path: Path
) -> None:
    model = gg.build(nn.EncoderLayer(16, num_heads=2), x=gg.float32["batch", "seq", 16], seed=0)
    gg.export(model, path := tmp_path / "layer.onnx")
    x = np.random.default_rng(0).standard_normal((4, 4, 6, 16), np.float32)
    batches, losses = [{"x": rows, "labels": np.sin(rows)} for rows in x], []
    for provider, of in (("cpu", "fp32"), ("cuda", dtype)):
        folder = tmp_path / of
        gg.artifacts(path, folder, loss="mse", dtype=of, profile="stock")
        trainer = gg.Trainer(folder, schedule=gg.schedule.constant(1e-2), provider=provider)
        losses.append([line["loss"] for line in trainer.fit(batches, steps=20, progress=False)])
    assert losses[0] != losses[1]
    np.testing.assert_allclose(losses[1], losses[0], rtol=bound)


@CUDA.alone
@pytest.mark.filterwarnings("ignore::graphgen.GraphgenWarning")
@pytest.mark.parametrize(
    ("given", "bound"),
    [("", 1e-5), ("--dtype fp16", 5e-3), ("--dtype bf16", 4e-2), ("--quantize int4", 1e-5)],
)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_folders_made_for_it_give_there_the_logits_of_the_cpu(
    kind: str, given: str, bound: float, tmp_path: Path
) -> None:
    source, found = str(random_checkpoint(tmp_path / "in", CAUSAL[kind])), []
    cuda = [*given.split(), "--target", "cuda"]
    for provider, own in (("cpu", [] if "dtype" in given else cuda), ("cuda", cuda)):
        assert main(["build", source, "-o", str(tmp_path / provider), *own]) == 0
        graph = gg.load(tmp_path / provider / "onnx" / "model.onnx")
        for node in graph.graph:  # the CPU rounds x at the file's level 4, and CUDA does not
            if node.op_type == "MatMulNBits":
                node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 1)
        decoder = open_decoder(graph, provider=provider)
        logits = [decoder.start([[5, 9, 2], [7, 3, 4, 5, 6]], 4)]
        logits.append(decoder.step(np.array([1, 2])).copy())
        found.append(logits)
    for cpu, device in zip(*found, strict=True):
        assert relative_rms(cpu.astype(np.float32), device.astype(np.float32)) < bound
