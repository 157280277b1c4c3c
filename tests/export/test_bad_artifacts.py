"""Bad input to artifacts and to what reads them: exit code 2, one line, no half-written folder."""

import resource
import shutil
import subprocess

import numpy as np
import onnx
import pytest

import graphgen as gg
from graphgen import nn, ops
from graphgen.commands import main
from graphgen.export.checkpoint import Checkpoint

X = gg.float32["n", 8]


class Model(nn.Module):
    """A linear map, and an output that no weight has a part in."""

    def __init__(self, features=4):
        self.linear = nn.Linear(8, features)

    def __call__(self, x):
        return {"y": self.linear(x), "plain": ops.exp(x)}


INTEGERS = """
    <ir_version: 8, opset_import: ["" : 18]>
    graph (float[n, 8] x) => (float[n, 8] y) <int64[8] w = {1, 2, 3, 4, 5, 6, 7, 8}> {
        scale = Cast <to = 1> (w)
        y = Mul (x, scale)
    }"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Models, artifacts of one of them, and data."""
    folder = tmp_path_factory.mktemp("made")
    gg.export(gg.build(Model(), x=X), folder / "m.onnx")
    gg.export(gg.build(Model(4000), x=X), folder / "wide.onnx")
    weights = {"weight": np.ones((8, 4), np.float16), "bias": np.ones(4, np.float16)}
    half = gg.build(nn.Linear(8, 4), weights=weights, x=gg.float16["n", 8])
    gg.export(half, folder / "half.onnx")
    onnx.save(onnx.parser.parse_model(INTEGERS), folder / "integers.onnx")
    gg.artifacts(folder / "m.onnx", folder / "art", loss="mse", output="y")
    x = np.ones((4, 8), np.float32)
    np.savez(folder / "data.npz", x=x, labels=x[:, :4])
    return folder


@pytest.fixture
def refused(made, tmp_path, monkeypatch, capsys):
    """Runs a command that must be refused in a copy of that folder, and returns its one line."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)

    def contents():
        return {p: p.read_bytes() if p.is_file() else None for p in sorted(tmp_path.rglob("*"))}

    def run(command):
        before = contents()
        assert main(command.split()) == 2
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1), captured.err
        assert contents() == before
        return captured.err

    return run


@pytest.mark.parametrize("place", ["art", "deep/new"])
@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("m.onnx", "output is not given; choose the one to train from the float outputs y, plain"),
        ("m.onnx --loss y", "y is float[n, 4]; a loss must be one float: take its mean"),
        ("m.onnx --loss mse --output plain", "depends on none of the 2 float parameters"),
        ("m.onnx --output y --trainable nothing", "matches no parameter; there are linear.weight"),
        ("m.onnx --output y --trainable [", "is not a regular expression"),
        (
            "m.onnx --loss mse --output plain --trainable weight",
            "does not depend on parameter linear.weight; leave it out",
        ),
        ("m.onnx --output y --no-decay none --profile stock", "no_decay matches no trainable"),
        ("integers.onnx --loss mse", "the loss loss depends on none of the 0 float parameters"),
        ("integers.onnx --loss mse --trainable w", "w is int64[8]; only float32 is trained"),
        ("half.onnx --loss mse", "weight is float16[8, 4]; only float32 is trained: convert it"),
        ("art/checkpoint", "art/checkpoint is not an ONNX model"),
        ("m.onnx --output y --z-loss -1", "z_loss is -1.0; it must be at least 0"),
        ("m.onnx --output y --accumulate 0", "accumulate is 0; it must be an int"),
    ],
)
def test_what_cannot_be_trained(refused, command, told, place):
    assert told in refused(f"artifacts {command} -o {place}")


@pytest.mark.parametrize("place", ["m.onnx", "m.onnx/art", "."])
def test_a_place_that_cannot_be_written(refused, place):
    line = refused(f"artifacts m.onnx --output y -o {place}")
    told = ("choose a folder of its own", "cannot be written: ", "are both m.onnx")
    assert any(reason in line for reason in told)


@pytest.mark.parametrize("target", ["art", "new"])
def test_a_file_that_may_not_grow(refused, target):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        line = refused(f"artifacts wide.onnx --output y -o {target}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"{target}/checkpoint cannot be written: File too large; choose another place" in line


def test_a_full_disk(made, tmp_path, capsys):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", disk]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this process may not mount a small tmpfs")
    try:
        for model, code in (("m", 0), ("wide", 2)):
            options = ["--loss", "mse", "--output", "y", "-o", str(disk / "art")]
            assert main(["artifacts", str(made / f"{model}.onnx"), *options]) == code
        line = capsys.readouterr().err
        assert "disk/art/checkpoint cannot be written: No space left on device; choose" in line
        assert [p.name for p in disk.iterdir()] == ["art"]
        for file in (made / "art").iterdir():
            assert (disk / "art" / file.name).read_bytes() == file.read_bytes()
        with (disk / "rest").open("wb") as file, pytest.raises(OSError, match="No space"):
            file.write(bytes(200_000))
        saved = (disk / "art" / "checkpoint").read_bytes()
        with pytest.raises(gg.GraphgenError, match="cannot be written: No space left on device"):
            Checkpoint.load(made / "art" / "checkpoint").save(disk / "art" / "checkpoint")
        assert (disk / "art" / "checkpoint").read_bytes() == saved
        assert {p.name for p in disk.iterdir()} == {"art", "rest"}
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_checkpoint_of_another_model(refused):
    shutil.copytree("art", "other")
    weights = Checkpoint.load("art/checkpoint")
    for name, told in (("linear.weight", "float32[8, 4]"), ("linear.gain", "is only in one of")):
        changed = dict(weights.trainable)
        changed[name] = np.ones((3, 3), np.float32)
        Checkpoint(changed).save("other/checkpoint")
        line = refused("train other --data data.npz --batch 4 --steps 2")
        assert told in line, line


def test_a_truncated_checkpoint(refused, tmp_path):
    data = (tmp_path / "art/checkpoint").read_bytes()
    for part in range(8):
        (tmp_path / "art/checkpoint").write_bytes(data[: len(data) * part // 8])
        line = refused("train art --data data.npz --batch 4 --steps 1")
        assert "checkpoint" in line and ("cut short" in line or "not an ONNX Runtime" in line)


@pytest.mark.parametrize("file", ["training_model", "eval_model", "optimizer_model"])
def test_a_truncated_model(refused, tmp_path, file):
    path = tmp_path / f"art/{file}.onnx"
    data = path.read_bytes()
    for part in range(1, 8):
        path.write_bytes(data[: len(data) * part // 8])
        assert f"{file}.onnx" in refused("train art --data data.npz --batch 4 --steps 1")


@pytest.mark.parametrize(
    "text",
    ["", "3", '{"accumulate": "2"}', '{"accumulate": null}', '{"classes": 1.5}', '{"dtype": 1}',
     '{"labels": {"y": 3}}', '{"labels": {"y": [1, "a"]}}', '{"labels": [1]}', "[" * 10**5],
)  # fmt: skip
def test_what_the_artifacts_say_of_their_loss_is_damaged(refused, text):
    proto = onnx.load("art/training_model.onnx")
    [entry] = [e for e in proto.metadata_props if e.key == "graphgen.loss"]
    entry.value = text
    onnx.save(proto, "art/training_model.onnx")
    for command in ("train art --data data.npz", "bisect art --tolerance 1 --dim n=2"):
        assert "training_model.onnx: its metadata 'graphgen.loss' is damaged" in refused(command)


def test_an_accumulator_has_other_operands(refused):
    proto = onnx.load("art/training_model.onnx")
    node = next(n for n in proto.graph.node if n.op_type == "InPlaceAccumulatorV2")
    node.input.append(node.input[0])
    onnx.save(proto, "art/training_model.onnx")
    for command in ("train art --data data.npz", "bisect art --tolerance 1 --dim n=2"):
        assert "InPlaceAccumulatorV2 has 4 operands; it must have a buffer" in refused(command)


@pytest.mark.parametrize("name", ["labels", "loss", "lazy_reset_grad", "w_grad"])
def test_weights_have_no_name_that_training_needs(tmp_path, name):
    text = f"""
        <ir_version: 8, opset_import: ["" : 18]>
        graph (float[n, 1] x) => (float[n, 1] y) <float[1] w = {{1}}, float[1] {name} = {{2}}> {{
            wide = Mul (x, w)
            y = Add (wide, {name})
        }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    with pytest.raises(gg.GraphgenError, match=f"the model has an? .*weight '{name}'.*rename it"):
        gg.artifacts(tmp_path / "m.onnx", tmp_path / "art", loss="mse")
    assert not (tmp_path / "art").exists()


def test_what_is_calculated_may_have_a_name_that_training_needs(tmp_path):
    text = """
        <ir_version: 8, opset_import: ["" : 18]>
        graph (float[n, 2] x) => (float[n, 2] y) <float[2] w = {1, 3}> {
            lazy_reset_grad = Mul (x, w)
            loss = Neg (lazy_reset_grad)
            w_grad = Neg (loss)
            y = Neg (w_grad)
        }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    gg.artifacts(tmp_path / "m.onnx", tmp_path / "art", loss="mse")
    session = gg.TrainingSession(tmp_path / "art")
    session.train_step(np.ones((1, 2), np.float32), np.zeros((1, 2), np.float32))
    np.testing.assert_allclose(session.gradients["w"], [1, 3])
