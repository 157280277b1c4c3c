"""BatchNormalization that trains: the CPU's kernel writes into its operands; nothing reaches it."""

import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from small_models import relative_rms

import graphgen as gg
from graphgen.errors import GraphgenWarning
from graphgen.export.write import to_bytes

X = np.random.default_rng(0).standard_normal((2, 4, 3)).astype(np.float32)
MEAN, VARIANCE = X.mean((0, 2)), X.var((0, 2))
SCALED = (X - MEAN[:, None]) / np.sqrt(VARIANCE[:, None] + 1e-5)
MOVED = [np.float32(0.1) * MEAN, np.float32(0.9) + np.float32(0.1) * VARIANCE]
CONSTANTS = ", float[4] mean = {0, 0, 0, 0}, float[4] variance = {1, 1, 1, 1}"


def trained(path: Path, *, results: str = "", after: str = "", constants: str = CONSTANTS) -> Path:
    """y = norm(x) by the batch, with statistics that are constants or inputs."""
    inputs = "" if constants else ", float[4] mean, float[4] variance"
    outputs = "".join(f", float[4] {name}" for name in results.split())
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[b, 4, 3] x{inputs}) => (float[b, 4, 3] y{outputs})
        <float[4] scale = {{1, 1, 1, 1}}, float[4] bias = {{0, 0, 0, 0}}{constants}> {{
            y, m, v = BatchNormalization <training_mode = 1> (x, scale, bias, mean, variance)
            {after} }}""")
    onnx.save(model, path)
    return path


CASES = {
    "none is used": ("", "", [SCALED]),
    "one is given out": ("m", "", [SCALED, MOVED[0]]),
    "one is used": ("r", "r = Add (m, scale)", [SCALED, MOVED[0] + 1]),
    "both are used": ("r", "r = Add (m, v)", [SCALED, MOVED[0] + MOVED[1]]),
    "others read the constants": ("r", "r = Add (mean, variance)", [SCALED, np.ones(4)]),
    "both are given out": ("m v", "", [SCALED, *MOVED]),
}


@pytest.mark.parametrize("case", CASES)
def test_an_optimized_norm_is_right_at_each_run(case: str, tmp_path: Path) -> None:
    results, after, wanted = CASES[case]
    path = trained(tmp_path / "m.onnx", results=results, after=after)
    best = gg.optimize(gg.load(path), verify=True)
    session = ort.InferenceSession(to_bytes(best.model), providers=["CPUExecutionProvider"])
    kernels = [n.op_type for n in best.model.graph if n.op_type.startswith("Batch")]
    assert len(kernels) == (case == "both are given out")
    for _ in range(3):
        for want, found in zip(wanted, session.run(None, {"x": X}), strict=True):
            assert relative_rms(want, found) < 1e-6


def test_what_is_fed_is_not_overwritten(tmp_path: Path) -> None:
    path = trained(tmp_path / "m.onnx", constants="")
    feeds = {"x": X, "mean": np.zeros(4, np.float32), "variance": np.ones(4, np.float32)}
    [y] = gg.Session(gg.optimize(gg.load(path)))(feeds)
    assert relative_rms(SCALED, y) < 1e-6
    assert (feeds["mean"] == 0).all()
    assert (feeds["variance"] == 1).all()


def test_a_session_on_the_file_itself_tells_of_it(tmp_path: Path) -> None:
    told = "CPU gets 1 BatchNormalization in training mode .* wrong, without an error; optimize"
    with pytest.warns(GraphgenWarning, match=told):
        session = gg.Session(trained(tmp_path / "m.onnx"), provider="cpu")
    # Where these fail, the runtime was mended: then the line of targets/cpu.py needs a version.
    assert relative_rms(SCALED, session(x=X)[0]) > 0.01
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gg.Session(trained(tmp_path / "m.onnx", results="m v"), provider="cpu")
