"""A device that is lost in the middle: a driver before the software one loses it on request."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices_here import WEBGPU

import graphgen as gg

SOURCE = Path(__file__).with_name("lost_device.c")
DRIVERS = os.environ.get("VK_ICD_FILENAMES", "")
pytestmark = [
    *WEBGPU.marks,
    pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler"),
    pytest.mark.skipif(not DRIVERS.endswith("swiftshader_icd.json"), reason="it needs SwiftShader"),
    pytest.mark.filterwarnings("ignore::graphgen.GraphgenWarning"),
]
PROGRAM = """
import os, sys, warnings
import numpy as np
import graphgen as gg
from graphgen.generation.decoder import open_decoder

warnings.simplefilter("ignore")
kind, folder = sys.argv[1:]
lose = lambda: open(os.environ["LOST"], "w").close()
try:
    if kind == "session":
        session = gg.Session(f"{folder}/model.onnx", provider="webgpu")
        session(x=np.ones((2, 4), np.float32))
        lose()
        session(x=np.ones((2, 4), np.float32))
    elif kind == "decoder":
        decoder = open_decoder(f"{folder}/decoder", provider="webgpu")
        decoder.start([[5, 9, 2]], 4)
        lose()
        decoder.step(np.array([1]))
    else:
        def batches():
            for step, x in enumerate(np.load(f"{folder}/x.npy")):
                if step == 5:
                    lose()
                yield {"x": x, "labels": np.sin(x)}

        trainer = gg.Trainer(f"{folder}/art", provider="webgpu")
        how = {"checkpoint": f"{folder}/run", "save_every": 2, "progress": False}
        trainer.fit(batches, steps=8, **how)
except gg.GraphgenError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def lost(tmp_path_factory: Any) -> Any:
    """What a program says that loses its device."""
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "liblost.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    icd = json.loads(Path(DRIVERS).read_text())
    own = {"library_path": str(library), "api_version": icd["ICD"]["api_version"]}
    (folder / "icd.json").write_text(json.dumps({**icd, "ICD": own}))
    driver = Path(DRIVERS).parent / icd["ICD"]["library_path"]
    names = {"VK_ICD_FILENAMES": folder / "icd.json", "DRIVER": driver}

    def say(kind: str, at: Path) -> str:
        given = {**os.environ, **{name: str(path) for name, path in names.items()}}
        given["LOST"] = str(at / "lost")
        command = [sys.executable, "-c", PROGRAM, kind, str(at)]
        done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert (at / "lost").exists()
        return done.stdout.strip()

    return say


@pytest.mark.parametrize("kind", ["session", "decoder"])
def test_a_run_says_so_in_one_line(kind: str, lost: Any, tmp_path: Path) -> None:
    if kind == "session":
        model = gg.build(gg.ops.tanh, x=gg.float32["n", 4])
        gg.export(model, tmp_path / "model.onnx")
    else:
        source = SOURCE.parents[1] / "fixtures" / "gpt2_checkpoint"
        command = [sys.executable, "-m", "graphgen", "build", source, "-o", tmp_path / "decoder"]
        subprocess.run(command, check=True, capture_output=True)
    told = lost(kind, tmp_path)
    assert "the run failed: " in told and "is lost" in told and "\n" not in told
    assert told.endswith("; start the program again: this process gets no other device")


def test_training_goes_on_from_the_last_checkpoint(lost: Any, tmp_path: Path) -> None:
    model = gg.build(gg.nn.FeedForward(4, 8), x=gg.float32["batch", 4], seed=0)
    path = gg.export(model, tmp_path / "model.onnx")
    gg.artifacts(path, tmp_path / "art", loss="mse", profile="stock")
    x = np.random.default_rng(0).standard_normal((8, 5, 4), np.float32)
    np.save(tmp_path / "x.npy", x)
    told = lost("training", tmp_path)
    assert "is lost" in told and "\n" not in told
    assert (tmp_path / "run" / "checkpoint").exists()
    batches = [{"x": rows, "labels": np.sin(rows)} for rows in x]
    kept: dict[str, Any] = {"checkpoint": tmp_path / "run", "save_every": 2, "progress": False}
    trainer = gg.Trainer(tmp_path / "art", provider="webgpu")
    history = trainer.fit(lambda: batches, steps=8, resume=True, **kept)
    whole = gg.Trainer(tmp_path / "art", provider="cpu")
    wanted = whole.fit(lambda: batches, steps=8, progress=False)
    losses = [line["loss"] for line in wanted]
    np.testing.assert_allclose([line["loss"] for line in history], losses, rtol=1e-4)
