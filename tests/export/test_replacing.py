"""Files and folders are whole or absent, also after a killed writer and between two writers."""

import subprocess
import sys
import threading

import pytest

import graphgen as gg
from graphgen.export.folders import replacing_folder
from graphgen.export.write import replacing

KILLED = """
import os, signal, sys
from pathlib import Path
import graphgen.export
from graphgen.export.folders import replacing_folder
from graphgen.export.write import replacing

out = Path(sys.argv[1])
with replacing_folder("test", out) if sys.argv[2] == "folder" else replacing("test", out) as found:
    (found / "m.onnx" if sys.argv[2] == "folder" else found[0]).write_text("half")
    print("half", flush=True)
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[3] == "killed" else sys.stdin.read()
"""


def writer(out, kind, end):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, out, kind, end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    return process


def write(out, kind, text):
    if kind == "folder":
        with replacing_folder("test", out) as folder:
            (folder / "m.onnx").write_text(text)
    else:
        with replacing("test", out) as [file]:
            file.write_text(text)


def written(out):
    return (out / "m.onnx" if out.is_dir() else out).read_text()


@pytest.mark.share(2)
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_killed_writer_leaves_is_removed_by_the_next(tmp_path, kind):
    out, other = tmp_path / "out", tmp_path / "out.other"
    for path in (out, other):
        writer(path, kind, "killed").communicate()
    assert len([*tmp_path.iterdir()]) == 2
    write(out, kind, "whole")
    assert written(out) == "whole"
    left = [path.name for path in tmp_path.iterdir() if path != out]
    assert len(left) == 1 and left[0].startswith(".out.other.")  # of another output


@pytest.mark.share(2)
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_of_two_writers_the_last_one_stays(tmp_path, kind):
    out = tmp_path / "out"
    first = writer(out, kind, "waits")
    write(out, kind, "whole")
    assert written(out) == "whole"
    first.communicate("")
    assert first.returncode == 0
    assert written(out) == "half"
    assert [*tmp_path.iterdir()] == [out]


def test_a_model_and_its_data_come_from_one_writer(tmp_path):
    models = [gg.build(gg.nn.Linear(64, n), x=gg.float32["n", 64]) for n in (32, 48)]
    paths = [tmp_path / "m.onnx"] * 8
    threads = [
        threading.Thread(
            target=gg.export, args=(models[i % 2], path), kwargs={"external_data": True}
        )
        for i, path in enumerate(paths)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gg.Session(tmp_path / "m.onnx")
    assert gg.load(tmp_path / "m.onnx").graph.outputs[0].shape[-1] in (32, 48)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "m.onnx_data"]
    size = (tmp_path / "m.onnx_data").stat().st_size
    assert size == 64 * 4 * gg.load(tmp_path / "m.onnx").graph.outputs[0].shape[-1]


def test_there_may_be_nothing_to_write():
    with replacing("test") as files:
        assert files == []
