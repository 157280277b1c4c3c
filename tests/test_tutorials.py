"""The blocks of a tutorial, one after the other, run as they stand there."""

import ast
import importlib
import json
import operator
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import graphgen as gg
from graphgen import nn, ops
from graphgen.commands import main

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```(python|python torch|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TUTORIALS = [
    "first-model.md",
    "build-and-train.md",
    "optimize-an-export.md",
    "compare-passes.md",
    "deploy-a-checkpoint.md",
    "fine-tuning.md",
    "training-in-a-browser.md",
]
EXPORTED = {"bert.onnx": "bert_torchscript_eager_14.onnx"}
"""What blocks that need torch write, and the files that stand in for it."""


def quick(text: str) -> str:
    """Half a minute of measuring is too long for a test."""
    return re.sub(r"(?<=\bseconds[= ])\d+\b", "0.1", text)


def run(page: str, *, torch: bool) -> dict[str, Any]:
    """What the page defines."""
    names: dict[str, Any] = {}
    for kind, block in FENCE.findall(quick((ROOT / "docs" / page).read_text())):
        if kind == "console":
            for line in re.findall(r"^\$ graphgen (.*)$", block, re.MULTILINE):
                assert main(shlex.split(line, comments=True)) == 0, line
        elif kind == "python" or torch:
            exec(compile(block, page, "exec"), names)
    return names


def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("page", TUTORIALS)
def test_tutorial_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_folder(tmp_path, monkeypatch)
    for name, fixture in EXPORTED.items():
        Path(name).symlink_to(ROOT / "tests" / "fixtures" / fixture)
    made = run(page, torch=False)
    if page == "first-model.md":
        assert made["right"].mean() > 0.98
    if page == "fine-tuning.md":
        found = pq.read_table("new.parquet").to_pylist()
        assert [row["label"] for row in found] == ["positive", "negative"]
    if "history" in made:
        assert made["history"][-1]["loss"] < made["history"][0]["loss"]


def test_the_notebook_runs_and_holds_no_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As plain code: a kernel of its own would take longer than all cells."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    shown = []
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        assert cell["outputs"] == [] and cell["execution_count"] is None
        tree = ast.parse(quick("".join(cell["source"])))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "tour.ipynb", "exec"), names)
        if isinstance(last, ast.Expr):
            found = eval(compile(ast.Expression(last.value), "tour.ipynb", "eval"), names)
            shown += [found._repr_html_()] if hasattr(found, "_repr_html_") else []
    assert len(shown) == 3 and all("<iframe" in html for html in shown)
    assert names["logits"][0].argmax(axis=-1).tolist() == [42, 43, 44, 45, 46, 47]


@pytest.mark.parity
def test_tutorial_runs_with_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_folder(tmp_path, monkeypatch)
    made = run("optimize-an-export.md", torch=True)
    assert made["best"].report.fused()["attention"] == 2
    trained = [
        weight.name for weight in run("fine-tuning.md", torch=True)["weights"] if weight.trained
    ]
    assert trained == ["2.weight", "2.bias"]


def test_names_for_users_of_torch_exist() -> None:
    text = (ROOT / "docs" / "from-torch.md").read_text()
    rooms: dict[str, Any] = {"nn": nn, "ops": ops, "gg": gg}
    names = set(re.findall(r"(?<![\w.])(nn|ops|gg)\.(\w+)", text))
    assert len(names) >= 50
    for room, name in names:
        assert hasattr(rooms[room], name), f"{room}.{name}"


@pytest.mark.parity
def test_names_of_torch_exist() -> None:
    torch = importlib.import_module("torch")
    text = (ROOT / "docs" / "from-torch.md").read_text()
    names = re.findall(r"`torch((?:\.\w+)+)", text)
    assert len(names) >= 15
    for name in names:
        operator.attrgetter(name[1:])(torch)
