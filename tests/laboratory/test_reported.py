"""Faults of kernels that users have reported, in versions that have them.

`make test-reported` installs those versions. The other side of each is the onnxruntime of now.
"""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from graphgen.laboratory.across import across

VARIABLE = "GRAPHGEN_ONNXRUNTIMES"

Q, K, V = np.random.default_rng(0).standard_normal((3, 1, 2, 3, 4), np.float32)
ATTEND = """<ir_version: 10, opset_import: ["": 23]>
g (float[1,2,3,4] q, float[1,2,3,4] k, float[1,2,3,4] v, {mask}[3,3] mask) => (float[1,2,3,4] y) {{
  s = Tanh(q)
  a = Attention <{attributes}> (s, k, v, mask)
  y = Tanh(a)
}}"""
SOFTCAP = ATTEND.format(mask="float", attributes="softcap: float = 2.0")
HIDDEN = ATTEND.format(mask="bool", attributes="q_num_heads: int = 2, kv_num_heads: int = 2")
EMPTY = """<ir_version: 8, opset_import: ["": 13]>
g (float[n,4] x) => (float[1,4] y) {
  a = Abs(x)
  sum = ReduceSum <keepdims: int = 1> (a)
  shape = Constant <value_ints: ints = [1, 4]> ()
  y = Expand(sum, shape)
}"""
SKIP = """<ir_version: 9, opset_import: ["": 17, "com.microsoft": 1]>
g (float[2,3,8] x, float[2,3,8] skip, float[8] gamma, float[8] bias) => (float[2,3,8] y) {
  s = Tanh(x)
  n = com.microsoft.SkipSimplifiedLayerNormalization <epsilon: float = 1e-5> (s, skip, gamma, bias)
  y = Tanh(n)
}"""
IMAGE = """<ir_version: 9, opset_import: ["": 17]>
g (float[1,9,8,8] x, float[4,9,3,3] w) => (float[1,4,8,8] y) {
  s = Tanh(x)
  c = Conv <pads: ints = [1, 1, 1, 1]> (s, w)
  y = Relu(c)
}"""
EARLIER = np.triu(np.full((3, 3), -np.inf, np.float32), 1)
NONE_FIRST = np.tri(3, dtype=bool) & (np.arange(3) > 0)[:, None]


@pytest.mark.parametrize(
    ("version", "text", "feeds", "operator", "error"),
    [
        # onnx #7865: hidden keys get the weight of -softcap
        ("1.23.2", SOFTCAP, {"q": Q, "k": K, "v": V, "mask": EARLIER}, "Attention", 0.34),
        # onnxruntime #28904: a row whose mask hides every key is NaN
        ("1.23.2", HIDDEN, {"q": Q, "k": K, "v": V, "mask": NONE_FIRST}, "Attention", np.inf),
        # onnxruntime #8146: the sum has no element
        ("1.16.3", EMPTY, {"x": np.zeros((0, 4), np.float32)}, "ReduceSum", np.inf),
    ],
    ids=["softcap", "hidden row", "empty sum"],
)
def test_the_guilty_operator_is_named(
    version: str,
    text: str,
    feeds: dict[str, Any],
    operator: str,
    error: float,
    tmp_path: Path,
    monkeypatch: Any,
    capsys: Any,
) -> None:
    python = Path(os.environ.get(VARIABLE, ""), f".venv-onnxruntime-{version}", "bin", "python")
    if not python.is_file():
        pytest.skip(f"{VARIABLE} has no {python.parts[-3]}: run `make test-reported`")
    onnx.save(onnx.parser.parse_model(text), path := tmp_path / "reported.onnx")
    found = across(path, python=python, feeds=feeds, output=tmp_path / "found")
    [one] = found.differing
    assert one.operator == operator and one.error == pytest.approx(error, rel=0.02)
    assert found.whole is not None and found.whole > 0.1
    assert found.against.startswith(f"onnxruntime {version} of ")
    monkeypatch.setattr("sys.argv", ["run.py"])
    with np.errstate(all="ignore"):
        runpy.run_path(str(Path(str(found.folder), "run.py")))
    assert re.search(rf"^{re.escape(version)}$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "operator"),
    [
        # onnxruntime #28424: the bias is read as the beta of the other norm
        (SKIP, "SkipSimplifiedLayerNormalization"),
        # onnxruntime #29651: of 9 channels, the wrong ones are read
        (IMAGE, "Conv"),
    ],
    ids=["norm with a bias", "channels of an image"],
)
def test_a_guilty_operator_of_webgpu_is_named(text: str, operator: str, tmp_path: Path) -> None:
    """The old runtime takes the place of the installed one, and has WebGPU built in."""
    folder = Path(os.environ.get(VARIABLE, ""), ".venv-onnxruntime-webgpu-1.25.1").absolute()
    if not (folder / "onnxruntime").is_dir():
        pytest.skip(f"{VARIABLE} has no {folder.name}: run `make test-reported`")
    onnx.save(onnx.parser.parse_model(text), tmp_path / "reported.onnx")
    command = [sys.executable, "-m", "graphgen", "bisect", "reported.onnx", "--against", "webgpu"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "No supported adapters" in done.stderr:
        pytest.skip("WebGPU finds no adapter: install chromium and libvulkan1")
    assert done.returncode == 3, done.stderr
    [found] = (tmp_path / "bisect").iterdir()
    assert found.name == f"1-{operator}"
    line = rf"^graphgen: {operator} \S+ differs by [\d.]+$"
    assert re.search(line, done.stderr, re.MULTILINE)
