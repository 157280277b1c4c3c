"""A pipe, a device or a growing file where a file is read: one line at once, never a wait."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

import graphgen as gg
from graphgen.batch.images import Image, _open
from graphgen.commands import main
from graphgen.export.artifact_files import read_artifact
from graphgen.export.checkpoint import Checkpoint
from graphgen.export.rows import scan
from graphgen.files import read_bytes, read_json
from graphgen.models.published.windows import windows


@pytest.fixture(autouse=True)
def limit():
    """Whoever waits is killed."""
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe.npy")
    return tmp_path / "pipe.npy"


READERS = {
    "Session": gg.Session,
    "load": gg.load,
    "checkpoint": Checkpoint.load,
    "artifact": read_artifact,
    "JSON": read_json,
    "rows": lambda path: scan(path, 16, print),
    "image": lambda path: _open(Image("row 1", path, None)),
    "text": lambda path: windows(Path(), path),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("path", [None, Path("/dev/zero"), Path("/")])
def test_a_reader_refuses_what_is_no_file(pipe, read, path):
    with pytest.raises(gg.GraphgenError, match=r"Not a regular file|Is a directory"):
        read(path or pipe)


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "PIPE"),
        ("run", "PIPE"),
        ("run", "m.onnx", "--input", "x=PIPE"),
        ("diff", "m.onnx", "PIPE"),
        ("map", "PIPE", "--data", "PIPE", "-o", "out.parquet"),
    ],
)
def test_a_command_refuses_a_pipe(pipe, arguments, capsys, monkeypatch):
    monkeypatch.chdir(pipe.parent)
    gg.export(gg.build(gg.ops.exp, x=gg.float32["n"]), "m.onnx")
    assert main([word.replace("PIPE", str(pipe)) for word in arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_growing_file_is_read_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n' * 40)

    def grow(row, where):
        with path.open("a") as file:
            file.write('{"a": 1}\n')

    assert sum(span["size"] for span in scan(path, 16, grow).spans) == 9 * 40
    assert read_bytes(path).count(b"\n") == 80


def test_the_weights_of_a_model_are_in_a_file(tmp_path, capsys):
    weights = {"weight": np.ones((64, 64), np.float32), "bias": np.ones(64, np.float32)}
    model = gg.build(gg.nn.Linear(64, 64), weights=weights, x=gg.float32["n", 64])
    gg.export(model, tmp_path / "m.onnx", external_data=True)
    (tmp_path / "m.onnx_data").unlink()
    os.mkfifo(tmp_path / "m.onnx_data")
    for read in (gg.load, gg.Session):
        with pytest.raises(gg.GraphgenError, match=r"m\.onnx"):
            read(tmp_path / "m.onnx")
