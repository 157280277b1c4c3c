"""The command `doctor`: what it shows, and what it says of installations that do not work."""

import importlib.metadata
import json
import re
import sys
import tomllib
from pathlib import Path

import jsonschema
import numpy as np
import onnxruntime
import pytest

import graphgen as gg
from graphgen.commands import doctor, main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(capsys):
    """Runs the command as text and as JSON: the exit code, both, and the line on stderr."""

    def run():
        code = main(["doctor"])
        text, told = capsys.readouterr()
        assert main(["doctor", "--json"]) == code
        printed, again = capsys.readouterr()
        assert again == told and told.count("\n") == (code != 0)
        found = json.loads(printed)
        jsonschema.validate(found, json.loads((ROOT / "docs/doctor.schema.json").read_text()))
        assert bool(found["problem"]) == (code == 2)
        assert ("all is well" in text) == (code == 0)
        assert found["problem"] in told
        return code, text, found, told

    return run


def test_one_screen_says_that_all_is_well(run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a secret")
    code, text, found, _ = run()
    assert code == 0 and found["check"]["fused"] == 1 and found["check"]["rel_rms"] < 1e-6
    assert found["tables"]["kernels_cpu.json"]["fits"]
    figures = {name: one["fits"] for name, one in found["tables"].items() if "pays" in name}
    assert sum(figures.values()) <= 1
    lines = text.splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 100 and lines[-1] == "all is well"
    for name in (f"onnxruntime {onnxruntime.__version__}", f"numpy {np.__version__}"):
        assert name in " ".join(text.split())
    assert "a secret" not in text and str(Path.home()) not in text and str(ROOT) not in text


def test_without_a_runtime(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    code, text, found, told = run()
    assert code == 2 and 'pip install "graphgen-onnx[cpu]"' in told
    assert (found["providers"], found["tables"], found["check"]) == ([], {}, None)
    assert found["memory_bytes"] and "numpy" in text


def test_two_runtimes(run, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [name])
    code, _, _, told = run()
    assert code == 2 and "both installed" in told and "pip uninstall -y" in told


@pytest.mark.parametrize(
    ("results", "told"),
    [
        (np.zeros((2, 8, 32), np.float32), "has a relative RMS error of 1.0e+00, at most 1e-05"),
        (np.full((2, 8, 32), np.nan, np.float32), "has a relative RMS error of inf"),
        (None, "one small attention ends with ZeroDivisionError"),
    ],
)
def test_a_runtime_that_is_wrong(run, monkeypatch, results, told):
    def session(*_, **__):
        return lambda feeds: 1 // 0 if results is None else [results]

    monkeypatch.setattr(gg, "Session", session)
    code, _, found, line = run()
    assert code == 2 and told in line and "pip install --force-reinstall" in line
    assert found["providers"] and found["check"] is None


def test_a_library_that_is_not_installed(run, monkeypatch):
    monkeypatch.setattr(doctor, "LIBRARIES", ["numpy", "no-such-library"])
    code, _, found, told = run()
    assert code == 2 and "no-such-library must be installed; run `pip install" in told
    assert found["libraries"]["no-such-library"] is None


def test_a_session_on_cuda_says_whether_it_works():
    """Of a runtime for the CPU, which has none."""
    assert "no CUDAExecutionProvider" in doctor._check(cuda=True)["cuda"]


def test_packages_are_those_of_the_project():
    """Those of the extras that users install, under the first extra that names each."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = re.compile(r"[\w-]+")
    assert sorted(doctor.LIBRARIES) == sorted(name.match(d)[0] for d in project["dependencies"])
    extras = project["optional-dependencies"]
    for package, extra in doctor.OPTIONAL.items():
        assert package in [name.match(d)[0] for d in extras[extra]]
    known = {*doctor.OPTIONAL, *doctor.RUNTIMES, "graphgen-onnx", "mpich"}
    for extra in extras.keys() - {"test", "dev", "docs", "parity", "bench"}:
        assert {name.match(d)[0] for d in extras[extra]} <= known
