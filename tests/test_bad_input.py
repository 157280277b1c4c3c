"""Bad input of every kind: one line that says what to do, exit code 2, and nothing left behind."""

import resource
import subprocess
import sys

import numpy as np
import pytest

import graphgen as gg
from graphgen.cli import main
from graphgen.targets import target


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a model and inputs, in which commands run."""
    x = gg.float32["batch", "seq", 64]
    model = gg.build(gg.nn.EncoderLayer(64, num_heads=4, causal=True), x=x)
    gg.export(model, tmp_path / "m.onnx")
    gg.export(model, tmp_path / "large.onnx", external_data=True)
    np.save(tmp_path / "x.npy", np.zeros((1, 3, 64), np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def refused(folder, capsys):
    """Runs a command that must be refused, and returns its one line."""

    def run(*arguments, code=2):
        before = contents(folder)
        assert main([str(a) for a in arguments]) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("graphgen: ")
        assert captured.err.count("\n") == 1
        assert contents(folder) == before
        return captured.err

    return run


def test_wrong_shape_at_build():
    with pytest.raises(gg.GraphgenError) as caught:
        gg.build(gg.nn.LayerNorm(512), x=gg.float32["batch", "seq", 256])
    assert str(caught.value) == (
        "LayerNorm(features=512): x is float[batch, seq, 256]; its last dimension must be 512 "
        f"(test_bad_input.py:{caught.traceback[0].lineno + 1})"
    )


def test_unknown_attribute():
    with pytest.raises(gg.GraphgenError, match=r"Softmax: .*'axes'.* its attributes axis") as e:
        gg.build(lambda x: gg.ops.softmax(x, axes=1), x=gg.float32["n"])
    assert "test_bad_input.py:" in str(e.value)


def test_missing_checkpoint_key():
    weights = {"weight": np.ones((4, 3), np.float32), "gain": np.ones(3, np.float32)}
    with pytest.raises(gg.GraphgenError, match="missing: bias; not in the module: gain"):
        gg.build(gg.nn.Linear(4, 3), weights=weights, x=gg.float32["n", 4])


LINEAR = gg.nn.Linear(4, 4)
X = gg.float32["n", 4]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: gg.build(lambda x: LINEAR(gg.ops.exp(x)), x=X), "pass its module itself to build"),
        (lambda: gg.nn.Linear(0, 4), "Linear: features_in is 0; it must be an integer"),
        (lambda: gg.nn.Linear(4.0, 4), "Linear: features_in is 4.0"),
        (lambda: gg.nn.Embedding(4, -1), "Embedding: features is -1"),
        (lambda: gg.nn.LayerNorm(-4), "LayerNorm: features is -4"),
        (lambda: gg.nn.RMSNorm(0), "RMSNorm: features is 0"),
        (lambda: gg.nn.FeedForward(4, 0), "FeedForward: hidden is 0"),
        (lambda: gg.nn.Attention(8, num_heads=0), "Attention: num_heads is 0"),
        (lambda: gg.nn.Attention(8, num_heads=4, kv_heads=0), "Attention: kv_heads is 0"),
        (lambda: gg.nn.EncoderLayer(8, num_heads=4, hidden=0), "FeedForward: hidden is 0"),
        (lambda: gg.nn.Encoder(8, layers=0, num_heads=4), "Encoder: layers is 0"),
        (lambda: gg.nn.LearnedPositions(0, 8), "LearnedPositions: length is 0"),
        (lambda: gg.nn.SinusoidalPositions(0), "SinusoidalPositions: features is 0"),
        (lambda: gg.build(lambda x: (gg.ops.exp(x), 3), x=X), "'output_1': 3; an output is a"),
        (lambda: gg.build(lambda x: {1: gg.ops.exp(x)}, x=X), "its name a string"),
        (lambda: gg.build(lambda x: x + "a", x=X), "Add: 'a' is no operand"),
        (lambda: gg.build(lambda x: gg.ops.softmax(x, axis="last"), x=X), "axis is 'last'"),
        (lambda: gg.build(lambda x: x if x > 0 else -x, x=X), "no truth value"),
        (lambda: gg.build(LINEAR, weights={"weight": "a", "bias": 0}, x=X), "weight is no array"),
        (lambda: gg.schedule.constant(float("nan")), "constant(rate=nan)"),
        (lambda: gg.schedule.linear(-1.0, warmup=0, steps=1), "linear(rate=-1.0)"),
    ],
)
def test_what_is_built_is_checked(make, told):
    with pytest.raises(gg.GraphgenError) as caught:
        make()
    assert told in str(caught.value)


def test_weights_may_be_lists():
    weights = {"weight": [[1, 2], [3, 4]], "bias": [0.5, 0]}
    model = gg.build(gg.nn.Linear(2, 2), weights=weights, x=gg.float32["n", 2])
    assert gg.Session(model)(x=np.ones((1, 2), np.float32))[0].tolist() == [[4.5, 6]]


COMMANDS = [
    ("inspect", "bad.onnx"),
    ("optimize", "bad.onnx", "-o", "out.onnx"),
    ("run", "bad.onnx", "--input", "x=x.npy"),
    ("artifacts", "bad.onnx", "-o", "art"),
]
every_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[0])


@every_command
def test_truncated_onnx_file(folder, refused, command):
    data = (folder / "m.onnx").read_bytes()
    (folder / "bad.onnx").write_bytes(data[: len(data) // 2])
    assert f"cut short at {len(data) // 2} bytes" in refused(*command)


@every_command
def test_text_file(folder, refused, command):
    (folder / "bad.onnx").write_text("not a model\n" * 20)
    assert "bad.onnx" in (line := refused(*command))
    assert "not an ONNX model" in line


@every_command
def test_missing_external_data(folder, refused, command):
    (folder / "large.onnx").rename("bad.onnx")
    (folder / "large.onnx_data").unlink()
    assert "beside the model" in refused(*command)


@every_command
def test_missing_file(refused, command):
    assert "No such file" in refused(*command)


@pytest.mark.parametrize(
    ("name", "array", "wanted"),
    [
        ("x", np.zeros((1, 3, 64)), "float64[1, 3, 64], not float32[batch, seq, 64]"),
        ("x", np.zeros((3, 64), np.float32), "its rank must be 3, not 2"),
        ("x", np.zeros((1, 3, 65), np.float32), "its dimension 2 must be 64, not 65"),
        ("y", np.zeros((1, 3, 64), np.float32), "there is no input 'y', only x"),
    ],
    ids=["dtype", "rank", "size", "name"],
)
def test_input_at_run_time(folder, refused, name, array, wanted):
    np.save(folder / "bad.npy", array)
    assert wanted in refused("run", "m.onnx", "--input", f"{name}=bad.npy", "-o", "out.npz")


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("bad.npy", b"text"),
        ("bad.npz", b"text"),
        ("bad.npz", b"PK\3\4 cut short"),
        ("no.npy", None),
    ],
)
def test_arrays_that_are_none(folder, refused, path, content):
    if content is not None:
        (folder / path).write_bytes(content)
    item = f"x={path}" if path.endswith("npy") else path
    assert path in refused("run", "m.onnx", "--input", item)


def test_unknown_target(refused):
    line = refused("optimize", "m.onnx", "-o", "out.onnx", "--target", "tpu")
    assert "'tpu' is not known: choose cpu or cuda" in line


def test_target_that_is_not_installed(refused, monkeypatch):
    target.cache_clear()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    line = refused("optimize", "m.onnx", "-o", "out.onnx", "--target", "cpu")
    assert "pip install graphgen-onnx[cpu]" in line


def test_provider_that_is_not_installed(refused, monkeypatch):
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    line = refused("run", "m.onnx", "--input", "x=x.npy", "--provider", "cuda")
    assert "graphgen-onnx[gpu]" in line


@pytest.mark.parametrize("output", ["missing/out.onnx", "m.onnx/out.onnx", "."])
@pytest.mark.parametrize("command", ["build", "optimize", "report", "run"])
def test_unwritable_output(refused, command, output):
    arguments = {
        "build": ("build", "block", "-o", output),
        "optimize": ("optimize", "m.onnx", "-o", output),
        "report": ("optimize", "m.onnx", "-o", "out.onnx", "--report", output),
        "run": ("run", "m.onnx", "--input", "x=x.npy", "-o", output),
    }
    line = refused(*arguments[command])
    assert output in line
    assert "choose another place" in line or "give the path of a file" in line


@pytest.mark.parametrize("command", ["build", "optimize"])
def test_full_disk(refused, command):
    arguments = {
        "build": ("build", "block", "-o", "m.onnx"),
        "optimize": ("optimize", "m.onnx", "-o", "m.onnx", "--report", "r.json"),
    }
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        line = refused(*arguments[command])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "m.onnx cannot be written: File too large" in line


INTERRUPT = """
import os, signal, sys
import graphgen.export.files
from graphgen import cli
from graphgen.match import Engine

def interrupt(*arguments, **more):
    os.kill(os.getpid(), signal.SIGINT)

def write_half(*arguments):
    yield b"half"
    interrupt()

if sys.argv[1] == "passes":
    Engine.run = interrupt
else:
    sys.modules["graphgen.export.files"]._serialise = write_half
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("moment", ["passes", "writing"])
def test_interrupt_in_optimize(folder, moment):
    before = contents(folder)
    arguments = ["optimize", "m.onnx", "-o", "m.onnx", "--report", "report.json"]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT, moment, *arguments], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "graphgen: interrupted\n")
    assert contents(folder) == before
