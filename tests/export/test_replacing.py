"""Files and folders are whole or absent, also after a killed writer and between two writers."""

import json
import os
import subprocess
import sys
import threading

import numpy as np
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


KILLED_AT = """
import json, os, signal, sys
from pathlib import Path
import numpy as np
import graphgen as gg

folder, x = Path(sys.argv[1]), np.ones((1, 64), np.float32)
weight = np.full((64, 64), 1, np.float32)
old = gg.build(lambda x: -(x @ weight), x=gg.float32["n", 64])
new = gg.build(lambda x: x @ (2 * weight), x=gg.float32["n", 64])
path, sums, status = gg.export(old, folder / "m.onnx", external_data=True), [], signal.SIGKILL

def export_until(last):
    seen = 0
    def kill(event, arguments):
        nonlocal seen
        if any(isinstance(a, str | Path) and str(a).startswith(str(folder)) for a in arguments):
            if seen == last:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1
    sys.addaudithook(kill)
    gg.export(new, path, external_data=True)

while status == signal.SIGKILL:
    gg.export(old, path, external_data=True)
    child = os.fork()
    if not child:
        export_until(len(sums))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    sums.append(float(gg.Session(path)(x=x)[0][0, 0]) if path.exists() else None)
print(json.dumps([status, sums]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the killed processes are forks of one")
def test_no_kill_leaves_a_model_beside_the_weights_of_another(tmp_path):
    """Before each call that opens, renames or removes a file: all have the same sizes."""
    given = [sys.executable, "-c", KILLED_AT, tmp_path]
    done = subprocess.run(given, capture_output=True, text=True, check=True)
    status, sums = json.loads(done.stdout)
    assert status == 0 and len(sums) > 10 and sums[0] == -64 and sums[-1] == 128
    assert {*sums} == {-64, None, 128} and sums.count(None) == 2


def test_two_files_never_have_one_file_of_weights(tmp_path):
    made = {
        name: gg.build(gg.nn.Linear(64, n), x=gg.float32["n", 64])
        for name, n in (("m.fp32", 64), ("m.int8", 32), ("m.onnx", 16), ("m", 8))
    }
    for name, model in made.items():
        gg.export(model, tmp_path / name, external_data=True)
    assert {path.name for path in tmp_path.iterdir()} == {*made, *(f"{n}_data" for n in made)}
    for name, model in made.items():
        for value in gg.load(tmp_path / name).graph.initializers.values():
            twin = model.graph.initializers[value.name].const_value
            assert np.array_equal(value.const_value.numpy(), twin.numpy())


def test_there_may_be_nothing_to_write():
    with replacing("test") as files:
        assert files == []
