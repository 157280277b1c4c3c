"""Nodes that another provider computes otherwise, with the CPU in its place and a fault planted."""

import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import onnxruntime as ort
import pytest

import graphgen as gg
from graphgen import ops
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.export import session as sessions
from graphgen.laboratory import across as room
from graphgen.passes.repros import script_against, write

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def path(tmp_path_factory: Any) -> Path:
    """Two hyperbolic tangents, each of the values that the other's product leads to."""

    def twice(x: Any) -> Any:
        y = ops.tanh(x) * 3.0
        return {"y": ops.tanh(y + x), "size": ops.reshape(x, [-1])}

    model = gg.build(twice, x=gg.float32["n", 4])
    gg.export(model, at := tmp_path_factory.mktemp("across") / "twice.onnx")
    return Path(at)


class Faulty(sessions.Session):
    """The CPU's session, but for a provider that gets one operator wrong, or refuses it."""

    wrong, refuses = "", ""

    def __init__(self, model: Any, *, provider: Any = None, **given: Any) -> None:
        self.told = getattr(model, "graph", ()) if provider == "webgpu" else ()
        if any(node.op_type == self.refuses for node in self.told):
            raise GraphgenError("Session(m): the run failed: no such shader")
        super().__init__(model, provider="cpu", **given)

    def __call__(self, *feeds: Any, **named: Any) -> list[Any]:
        results = super().__call__(*feeds, **named)
        made = {v.name: node.op_type for node in self.told for v in node.outputs}
        pairs = zip(self.outputs, results, strict=True)
        return [x * 1.001 if made.get(name) == self.wrong else x for name, x in pairs]


@pytest.fixture
def faulty(monkeypatch: Any) -> Iterator[type[Faulty]]:
    monkeypatch.setattr(room, "Session", Faulty)
    monkeypatch.setattr(Faulty, "wrong", "")
    monkeypatch.setattr(Faulty, "refuses", "")
    yield Faulty


def test_a_provider_that_computes_the_same_is_not_blamed(path: Path, faulty: Any) -> None:
    found = room.across(path, "webgpu", dims={"n": 3})
    assert found.whole == 0 and not found.differing and found.nodes >= 4
    assert "no node alone differs by more than 1e-05" in str(found)


def test_each_node_is_judged_on_the_cpus_values(path: Path, faulty: Any, tmp_path: Path) -> None:
    faulty.wrong = "Mul"
    found = room.across(path, "webgpu", dims={"n": 3}, output=tmp_path)
    [one] = found.differing  # not the sum and the tangent that follow, which are right
    assert (one.operator, one.problem) == ("Mul", "") and 0.9e-3 < one.error < 1.1e-3
    assert found.whole == 0  # it is the piece that is wrong here, not the whole
    assert not room.across(path, "webgpu", dims={"n": 3}, tolerance=2e-3).differing
    model = gg.load(Path(str(found.folder), "node.onnx"))
    assert [node.op_type for node in model.graph if node.op_type != "Constant"] == ["Mul"]
    script = Path(str(found.folder), "run.py").read_text()
    assert "onnxruntime_ep_webgpu" in script and "WebGpuExecutionProvider" in script
    compile(script, "run.py", "exec")


def test_a_node_that_fails_there_is_found_by_halving(path: Path, faulty: Any) -> None:
    faulty.refuses = "Tanh"
    found = room.across(path, "webgpu", dims={"n": 3})
    assert [(d.operator, d.error) for d in found.differing] == [("Tanh", np.inf)] * 2
    assert found.whole is None and "no such shader" in found.problem
    assert "it does not run (Session(m): the run failed: no such shader)" in str(found)


def test_the_script_runs_with_plain_onnxruntime(path: Path, tmp_path: Path, faulty: Any) -> None:
    faulty.wrong = "Add"
    found = room.across(path, "webgpu", dims={"n": 3}, output=tmp_path)
    script = Path(str(found.folder), "run.py")
    same = script.read_text().replace("'WebGpuExecutionProvider'", "'CPUExecutionProvider'")
    script.write_text(same)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert "relative RMS difference 0.00e+00" in done.stdout, done.stderr


def test_the_command_names_the_node_and_exits_with_3(
    path: Path, faulty: Any, tmp_path: Path, capsys: Any
) -> None:
    given = ["bisect", str(path), "--against", "webgpu", "--dim", "n=2", "-o", str(tmp_path / "b")]
    assert main(given) == 0
    faulty.wrong = "Mul"
    assert main([*given, "--json"]) == 3
    out, err = capsys.readouterr()
    found = json.loads(out[out.index("{") :])
    jsonschema.validate(found, json.loads((DOCS / "bisect-against.schema.json").read_text()))
    assert found["differing"][0]["operator"] == "Mul" and "Mul" in err


@pytest.mark.parametrize(
    "option",
    [
        "--slower-than 3%",
        "--quantize int8",
        "--passes clean",
        "--with plug:rules",
        "--target cuda",
        "--runtime 1.20",
        "--seconds 2",
    ],
)
def test_options_of_rewrites_are_refused(path: Path, option: str, capsys: Any) -> None:
    assert main(["bisect", str(path), "--against", "webgpu", *option.split()]) == 2
    problem = f"--against compares nodes, not rewrites; leave out {option.split()[0]}"
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("tolerance", ["nan", "inf", "-1"])
def test_a_tolerance_is_a_number_of_at_least_0(path: Path, tolerance: str, capsys: Any) -> None:
    given = ["bisect", str(path), "--against", "webgpu", "--dim", "n=2", "--tolerance", tolerance]
    assert main(given) == 2
    assert f"bisect: tolerance is {float(tolerance)}" in capsys.readouterr().err


def runtime_with_plugin(library: Path) -> Any:
    """An onnxruntime whose only plugin is a device with the CPU's session."""
    registered: list[tuple[str, str]] = []

    def session(path: Path, options: Any, providers: Any) -> Any:
        assert providers in (["CPUExecutionProvider"], None)
        return ort.InferenceSession(path, providers=["CPUExecutionProvider"])

    return SimpleNamespace(
        SessionOptions=ort.SessionOptions,
        GraphOptimizationLevel=ort.GraphOptimizationLevel,
        InferenceSession=session,
        get_available_providers=ort.get_available_providers,
        get_ep_devices=lambda: [SimpleNamespace(ep_metadata={"library_path": str(library)})],
        register_execution_provider_library=lambda *given: registered.append(given),
        registered=registered,
    )


@pytest.mark.parametrize("by", ["get_library_path", "library_path", "path"])
def test_the_script_finds_the_library(
    path: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, by: str
) -> None:
    library = tmp_path / "it's" / "libmine.so"
    plugin = runtime_with_plugin(library)
    monkeypatch.setattr(
        ort.SessionOptions, "add_provider_for_devices", lambda self, devices, options: None
    )
    monkeypatch.setitem(sys.modules, "onnxruntime", plugin)
    if by != "path":
        module = SimpleNamespace(**{by: lambda: str(library)})
        monkeypatch.setitem(sys.modules, "onnxruntime_ggml", module)  # type: ignore[arg-type]
    script = script_against(library if by == "path" else "ggml")
    alone, feeds = gg.load(path), {"x": np.ones((2, 4), np.float32)}
    folder = write(tmp_path, "Tanh", {"node": alone}, feeds, script)
    assert sorted(x.name for x in folder.iterdir()) == ["node.onnx", "run.py", "x.npy"]
    runpy.run_path(str(folder / "run.py"))
    assert plugin.registered == [("libmine" if by == "path" else "ggml", str(library))]
    assert "relative RMS difference 0.00e+00" in capsys.readouterr().out


def test_a_provider_that_is_not_there_is_one_line(path: Path, capsys: Any) -> None:
    assert main(["bisect", str(path), "--against", "openvino", "--dim", "n=2"]) == 2
    assert "provider='openvino'" in capsys.readouterr().err
