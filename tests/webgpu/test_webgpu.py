"""On WebGPU: `make test-webgpu` sets up the plugin and an adapter, a software one if need be."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import relative_rms, vary

import graphgen as gg
from graphgen import nn
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.measure.reference import evaluate
from graphgen.providers import devices_of
from graphgen.runtime import import_runtime

try:
    devices_of("test", import_runtime(), "webgpu")
    LACKS = ""
except GraphgenError as error:
    LACKS = str(error)

pytestmark = [pytest.mark.webgpu, pytest.mark.skipif(bool(LACKS), reason=LACKS)]
OWN, CPU = "WebGpuExecutionProvider", "CPUExecutionProvider"
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
    gg.export(gg.optimize(model), at := tmp_path_factory.mktemp("webgpu") / "m.onnx")
    return Path(at)


def test_it_runs_there_and_the_plan_says_so(path: Path) -> None:
    session = gg.Session(path, provider="webgpu", strict=True)
    plan = session.plan
    assert plan.device == "webgpu" and plan.providers[0] == OWN and not plan.note
    assert plan.placement[OWN] >= 5 and set(plan.placement) <= {OWN, CPU}
    [wanted] = evaluate(gg.load(path), {"x": X})
    assert relative_rms(wanted, session(x=X)[0]) < 1e-6
    out = np.empty_like(X)
    run = session.bind({"x": X}, {next(iter(session.outputs)): out})
    assert run()[0] is out and relative_rms(wanted, out) < 1e-6


def test_the_command_runs_there(path: Path, tmp_path: Path, capsys: Any) -> None:
    np.save(tmp_path / "x.npy", X)
    given = ["run", str(path), "--input", f"x={tmp_path / 'x.npy'}", "--provider", "webgpu"]
    assert main([*given, "--strict"]) == 0
    assert f" on {OWN}" in capsys.readouterr().out
    assert main(["providers"]) == 0
    assert "onnxruntime-ep-webgpu" in capsys.readouterr().out


def test_a_node_of_floats_that_it_leaves_out_is_told(tmp_path: Path) -> None:
    def attend(q: Any) -> Any:
        return gg.ops.attention(q, q, q, q_num_heads=2, kv_num_heads=2)

    gg.export(gg.build(attend, q=gg.float32[1, 4, 8]), path := tmp_path / "attention.onnx")
    with pytest.warns(gg.GraphgenWarning, match="for lack of a kernel of webgpu: 1 Attention"):
        session = gg.Session(path, provider="webgpu")
    assert "1 Attention" in session.plan.note
    with pytest.raises(GraphgenError, match="strict"):
        gg.Session(path, provider="webgpu", strict=True)


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
