"""Nodes that another provider computes otherwise, with the CPU in its place and a fault planted."""

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

import graphgen as gg
from graphgen import nn, ops
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.export import session as sessions
from graphgen.laboratory import across as room, sides
from graphgen.passes.repros import script_against, write

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
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
    monkeypatch.setattr(sides, "Session", Faulty)
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


def test_a_provider_that_runs_nothing_is_no_all_clear(path: Path, monkeypatch: Any) -> None:
    """As onnxruntime-ggml, which runs all of a graph or none of it."""

    class Elsewhere(Faulty):
        def __init__(self, model: Any, *, provider: Any = None, **given: Any) -> None:
            super().__init__(model, provider=provider, **given)
            self.plan = replace(self.plan, placement={"CPUExecutionProvider": 4})

    monkeypatch.setattr(sides, "Session", Elsewhere)
    with pytest.raises(GraphgenError, match="ggml runs no node of this model, and the CPU ran all"):
        room.across(path, "ggml", dims={"n": 3})


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


CHILD = '''#!{python}
"""A Python whose onnxruntime is wrong, crashes or hangs."""
import os, sys, time
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
run = ort.InferenceSession.run
def other(self, names, feeds, *rest):
    results = run(self, names, feeds, *rest)
    made = [y.name for y in self.get_outputs()]
    {fault}
    return results
ort.InferenceSession.run = other
code, sys.argv = sys.argv[3], ["-c", *sys.argv[4:]]
exec(code)
'''


@pytest.fixture
def child(path: Path, tmp_path: Path) -> Any:
    """Makes an interpreter with a fault; `MADE` is the name of the product's result."""
    [made] = [node.outputs[0].name for node in gg.load(path).graph if node.op_type == "Mul"]

    def make(fault: str) -> Path:
        script = tmp_path / "python"
        text = CHILD.format(python=sys.executable, fault=fault.replace("MADE", repr(made)))
        script.write_text(text)
        script.chmod(0o755)
        return script

    return make


UNIX = pytest.mark.skipif(sys.platform == "win32", reason="the other Python is a Unix script here")


@UNIX
def test_another_runtime_is_asked_in_its_own_python(
    path: Path, tmp_path: Path, child: Any, monkeypatch: Any, capsys: Any
) -> None:
    python = child("results = [y * 1.01 if n == MADE else y for n, y in zip(made, results)]")
    found = room.across(path, python=python, dims={"n": 3}, output=tmp_path / "found")
    [one] = found.differing
    assert one.operator == "Mul" and 0.9e-2 < one.error < 1.1e-2 and not one.instead
    assert found.against == f"onnxruntime {ort.__version__} of {python}"
    assert found.nodes == 5 and found.whole == 0  # the fault is in the piece alone
    script = Path(str(found.folder), "run.py")
    script.write_text(script.read_text().replace(str(python), sys.executable))
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script))
    assert "relative RMS difference 0.00e+00" in capsys.readouterr().out


@pytest.mark.exhaustive
@UNIX
def test_what_ends_the_other_python_is_found_by_halving(child: Any) -> None:
    model = gg.build(lambda x: ops.tanh(x * 3.0), x=gg.float32[2])
    [made, _] = [node.outputs[0].name for node in model.graph]
    found = room.across(model, python=child(f"if {made!r} in made: os.abort()"))
    assert [one.operator for one in found.differing] == ["Mul"]
    assert "it crashed with signal 6" in found.differing[0].problem


@UNIX
def test_a_python_that_is_no_use_is_one_line(
    path: Path, tmp_path: Path, child: Any, monkeypatch: Any, capsys: Any
) -> None:
    given = ["bisect", str(path), "--dim", "n=2", "--against-python"]
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    for python, problem in {
        str(tmp_path / "none"): "does not run: No such file",
        str(bare): "ModuleNotFoundError: No module named 'numpy'",
        "false": "it ended with 1",
    }.items():
        assert main([*given, python]) == 2
        assert problem in capsys.readouterr().err
    assert main([*given, "false", "--against", "webgpu"]) == 2
    assert "two searches" in capsys.readouterr().err
    monkeypatch.setattr(sides, "_SECONDS", 0.2)
    with pytest.raises(GraphgenError, match=r"did not end within 0\.2 s"):
        room.across(path, python=child("").rename(tmp_path / "slow"), dims={"n": 2})


@pytest.fixture(scope="module")
def layer() -> ir.Model:
    model = gg.build(nn.EncoderLayer(16, num_heads=2), x=gg.float32["batch", "seq", 16], seed=0)
    return gg.optimize(model).model


SIZES = {"batch": 2, "seq": 3}


@pytest.mark.parametrize(("precision", "largest"), [("float16", 1e-3), ("bfloat16", 1e-2)])
def test_half_precision_rounds_what_nodes_read_and_give(
    layer: ir.Model, precision: str, largest: float, tmp_path: Path, capsys: Any
) -> None:
    found = room.across(layer, precision, dims=SIZES, tolerance=0, output=tmp_path)
    errors = [one.error for one in found.differing]
    assert len(errors) >= found.nodes - 1 and largest / 10 < max(errors) < largest
    assert not room.across(layer, precision, dims=SIZES).differing
    runpy.run_path(str(Path(str(found.folder), "run.py")))
    shown = re.findall("difference (.*)", capsys.readouterr().out)
    assert float(shown[0]) == pytest.approx(errors[0], rel=0.01)


def test_a_number_that_float16_cannot_hold_is_found() -> None:
    def large(x: Any) -> Any:
        return ops.tanh(x * 1e6) + ops.tanh(x)

    found = room.across(gg.build(large, x=gg.float32[3]), "float16")
    assert [one.operator for one in found.differing] == ["Mul"]
    assert found.differing[0].error == np.inf
    assert not room.across(gg.build(large, x=gg.float32[3]), "bfloat16").differing


def test_a_mask_of_the_lowest_number_hides_in_half_precision_too() -> None:
    low = float(np.finfo(np.float32).min)

    def attend(scores: Any, keep: Any) -> Any:
        return ops.softmax(scores + ops.where(keep, 0.0, low))

    model = gg.build(attend, scores=gg.float32[2, 4], keep=gg.bool_[2, 4])
    keep = np.array([[1, 1, 0, 0], [1, 1, 1, 0]], bool)
    assert not room.across(model, "float16", feeds={"keep": keep}).differing
    keep[0] = False  # of a row that hides everything, half precision makes NaN
    found = room.across(model, "float16", feeds={"keep": keep})
    assert [one.operator for one in found.differing] == ["Softmax"]


def test_layers_lose_by_integers_what_they_lose_alone(
    files: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    given = ["bisect", str(files["fused"]), "--against", "int8", "--dim", "batch=2", "--dim"]
    assert main([*given, "seq=3"]) == 0
    assert "fused.onnx on int8" in capsys.readouterr().out
    assert main([*given, "seq=3", "--tolerance", "0", "--json", "-o", str(tmp_path)]) == 3
    found = json.loads(capsys.readouterr().out)
    instead = [x for x in found["differing"] if "MatMulIntegerToFloat" in x["instead"]]
    assert len(instead) == 6 and all(1e-3 < one["error"] < 0.05 for one in instead)
    runpy.run_path(str(Path(found["folder"], "run.py")))
    assert "relative RMS difference" in capsys.readouterr().out


@pytest.fixture(scope="module")
def files(tmp_path_factory: Any, layer: ir.Model) -> dict[str, Path]:
    """A layer, fused, with another epsilon, and one with more inputs."""
    folder = tmp_path_factory.mktemp("files")
    model = gg.build(nn.EncoderLayer(16, num_heads=2), x=gg.float32["batch", "seq", 16], seed=0)
    wrong = layer.clone()
    norm = [node for node in wrong.graph if node.op_type == "LayerNormalization"][1]
    norm.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.5)
    other = gg.build(lambda x, y: x + y, x=gg.float32["n"], y=gg.float32["n"])
    models = {"plain": model, "fused": layer, "wrong": wrong, "other": other}
    return {name: Path(gg.export(m, folder / f"{name}.onnx")) for name, m in models.items()}


def test_the_node_of_another_file_that_differs(
    files: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    right = room.across(files["plain"], files["fused"], dims=SIZES)
    assert not right.differing and right.whole is not None and right.whole < 1e-6
    assert right.matched["structure"] > 5 and right.unmatched["against"]
    for one in ("plain", "fused"):
        given = ["bisect", str(files[one]), "--against", str(files["wrong"]), "--json"]
        given += ["--dim", "batch=2", "--dim", "seq=3", "-o", str(tmp_path / one)]
        assert main(given) == 3
        found = json.loads(capsys.readouterr().out)
        jsonschema.validate(found, json.loads((DOCS / "bisect-against.schema.json").read_text()))
        [differing] = found["differing"]
        assert 1e-2 < differing["error"] < 1
        runpy.run_path(str(Path(found["folder"], "run.py")))
        assert f"{differing['error']:.2e}" in capsys.readouterr().out
    assert differing["operator"] == "LayerNormalization" and found["unmatched"]["model"] == []
    with pytest.raises(
        GraphgenError, match=r"other\.onnx has the input 'y', which the model lacks"
    ):
        room.across(files["plain"], files["other"], dims=SIZES)


def test_a_file_in_half_precision_is_compared_at_its_own_bound(tmp_path: Path, capsys: Any) -> None:
    def twice(x: Any) -> Any:
        return ops.tanh(x * 3.0) * 2.0

    def in_half(x: Any) -> Any:
        y = ops.tanh(ops.cast(x, to=ir.DataType.FLOAT16) * 3.0) * 2.0
        return ops.cast(y, to=ir.DataType.FLOAT)

    models = [gg.build(f, x=gg.float32[64]) for f in (twice, in_half)]
    for model, names in zip(models, (["a", "b"], ["cast", "a", "b", "c"]), strict=True):
        for node, name in zip(model.graph, names, strict=False):
            node.outputs[0].name = name
    paths = [Path(gg.export(m, tmp_path / f"{i}.onnx")) for i, m in enumerate(models)]
    found = room.across(*paths)
    assert found.tolerance == 5e-3 and found.matched["name"] == 3 and not found.differing
    fine = room.across(*paths, tolerance=1e-6, output=tmp_path)
    assert [one.operator for one in fine.differing] == ["Mul", "Tanh"]  # times 2 is exact
    runpy.run_path(str(Path(str(fine.folder), "run.py")))
    assert f"{fine.differing[0].error:.2e}" in capsys.readouterr().out


def test_an_output_that_is_an_input_is_not_computed(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 18]>
        g (float[4] x, float[4] z) => (float[4] y, float[4] z) { y = Tanh(x) }"""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        onnx.save(onnx.parser.parse_model(text), tmp_path / folder / "same.onnx")
    paths = [tmp_path / folder / "same.onnx" for folder in ("a", "b")]
    for against in (paths[1], "float16"):
        found = room.across(paths[0], against)
        assert found.nodes == 1 and found.whole is not None and not found.differing
    assert room.across(*paths).unmatched == {"model": [], "against": []}


def test_an_input_in_half_precision_takes_the_models_floats(tmp_path: Path) -> None:
    def twice(x: Any) -> Any:
        return ops.tanh(x) * 2.0

    paths = {
        name: Path(gg.export(gg.build(twice, x=kind[8]), tmp_path / f"{name}.onnx"))
        for name, kind in {"f": gg.float32, "h": gg.float16}.items()
    }
    found = room.across(paths["f"], paths["h"])
    assert found.whole is not None and 1e-5 < found.whole < 1e-3 and not found.differing
    flat = gg.build(lambda x: ops.cast(x, to=ir.DataType.FLOAT) * 2.0, x=gg.int32[8])
    gg.export(flat, tmp_path / "i.onnx")
    with pytest.raises(GraphgenError, match=r"i\.onnx takes INT32 as 'x', and the model FLOAT"):
        room.across(paths["f"], tmp_path / "i.onnx")


def test_sizes_that_only_one_file_has_are_not_mixed_up(tmp_path: Path) -> None:
    """The exporter's sizes and masks are spelled otherwise in the fused file."""
    model = gg.load(FIXTURES / "bert_dynamo_eager_18.onnx")
    norm = [node for node in model.graph if node.op_type == "LayerNormalization"][1]
    norm.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.5)
    gg.export(gg.optimize(model), wrong := tmp_path / "wrong.onnx")
    sizes = {"batch": 2, "sequence": 5}
    found = room.across(FIXTURES / "bert_dynamo_eager_18.onnx", wrong, dims=sizes)
    [one] = found.differing
    assert one.operator == "LayerNormalization" and one.instead[-1] == "LayerNormalization"


def test_a_word_that_names_nothing_is_refused(path: Path, capsys: Any) -> None:
    assert main(["bisect", str(path), "--against", "float17"]) == 2
    assert "against='float17' is none of cpu, cuda, webgpu" in capsys.readouterr().err


def test_a_provider_that_is_not_there_is_one_line(path: Path, capsys: Any) -> None:
    assert main(["bisect", str(path), "--against", "openvino", "--dim", "n=2"]) == 2
    assert "provider='openvino'" in capsys.readouterr().err
