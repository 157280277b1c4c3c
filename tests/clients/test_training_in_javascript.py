"""Training by onnxruntime-web in Chromium and onnxruntime-node: make test-javascript.

GRAPHGEN_NODE_FOLDER names the folder of node_modules. The losses are those of `gg.Trainer`.
"""

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_programs import told
from test_client_javascript import in_browser

import graphgen as gg
from graphgen.train.web import read_web

FOLDER = os.environ.get("GRAPHGEN_NODE_FOLDER", "")
pytestmark = pytest.mark.skipif(
    not FOLDER, reason="GRAPHGEN_NODE_FOLDER names no folder with @huggingface/transformers 4.3"
)
PAGE = Path(__file__).parents[2] / "docs" / "web" / "make.py"

NODE = """
import { readFileSync } from 'node:fs';
import * as ort from 'onnxruntime-node';
const { folder, name } = JSON.parse(readFileSync(0));
const { Trainer, tensor, writeState } = await import(`${folder}/train.mjs`);

const read = async (file) => new Uint8Array(readFileSync(`${folder}/${name}/${file}`)).buffer;
const trainer = await Trainer.open(ort, read);
const { rate, types, batches } = JSON.parse(readFileSync(`${folder}/${name}.json`));
const losses = [];
let given;
for (const batch of batches) {
  given = Object.fromEntries(
    Object.entries(batch).map(([key, rows]) => [key, tensor(ort, rows, types[key])]));
  losses.push(await trainer.train(given, rate));
}
losses.push(await trainer.evaluate(given));
console.log(JSON.stringify({ losses, state: Array.from(writeState(trainer.state)) }));
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: Any) -> Path:
    spec = importlib.util.spec_from_file_location("make_page", PAGE)
    assert spec is not None and spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    folder: Path = tmp_path_factory.mktemp("site")
    page.main(folder)
    return folder


def check(site: Path, name: str, found: Any, place: Path) -> None:
    """Losses to 1e-4, and the trainer goes on from what came back."""
    assert isinstance(found, dict), found
    wanted = json.loads((site / "losses.json").read_text())[name]
    np.testing.assert_allclose(found["losses"], wanted, rtol=0, atol=1e-4)
    assert wanted[0] - wanted[-1] > 1
    shutil.copytree(site / "artifacts" / name, place / name)
    (place / "state.safetensors").write_bytes(bytes(found["state"]))
    read_web(place / "state.safetensors", place / name, len(wanted) - 1)
    given = json.loads((site / f"{name}.json").read_text())
    batch = {n: np.array(x, given["types"][n]) for n, x in given["batches"][-1].items()}
    loss = gg.Trainer(place / name, threads=1).evaluate([batch])
    assert loss == pytest.approx(wanted[-1], abs=1e-4)


@pytest.mark.parametrize("name", ["digits", "adapters"])
def test_in_node(name: str, site: Path, tmp_path: Path) -> None:
    command = ["node", "--input-type=module", "-e", NODE]
    last = told(command, {"folder": str(site), "name": name}, Path(FOLDER))
    check(site, name, json.loads(last), tmp_path)


@pytest.mark.skipif(not shutil.which("chromium"), reason="there is no chromium on the PATH")
def test_in_a_browser(site: Path, tmp_path: Path) -> None:
    (site / "dist").symlink_to(Path(FOLDER).resolve() / "node_modules/onnxruntime-web/dist")
    found = in_browser(site, tmp_path / "user", "#report")
    for name in ("digits", "adapters"):
        check(site, name, found[name], tmp_path)
