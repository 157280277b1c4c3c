"""README's examples run as they stand there, and its commands exist."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from graphgen.commands import main

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def section(title: str) -> str:
    found = re.search(rf"^## {title}$(.*?)^## ", README, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def example(title: str) -> str:
    (code,) = re.findall(r"^```python\n(.*?)^```$", section(title), re.MULTILINE | re.DOTALL)
    return str(code)


def run(code: str, folder: Path) -> None:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_inference(tmp_path: Path) -> None:
    kernels = {"Attention": 1, "Gelu": 1, "LayerNormalization": 2}
    run(
        example("Inference")
        + "assert y.shape == (2, 10, 256) and np.isfinite(y).all()\n"
        + f"assert best.report.declared == {kernels}, best.report.declared\n",
        tmp_path,
    )
    assert (tmp_path / "block.onnx").exists()


def test_training(tmp_path: Path) -> None:
    run(
        example("Training") + "assert trainer.step == 200\n",
        tmp_path,
    )
    rows = (tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(row)["loss"] for row in rows]
    assert len(losses) == 200 and losses[-1] < losses[0] / 4


@pytest.mark.parametrize("title", ["Inference", "Training"])
def test_an_example_is_short(title: str) -> None:
    lines = [line for line in example(title).splitlines() if line.strip()]
    assert len(lines) <= 18


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = section("Command line") + section("The pass laboratory")
    [save] = re.findall(r'^\$ python -c "(.*)"$', told, re.MULTILINE)
    run(save, tmp_path)
    commands = re.findall(r"^\$ graphgen (.*?)(?: +#.*)?$", told, re.MULTILINE)
    assert len(commands) == 11
    for command in commands:
        assert main(command.split()) == 0, command
    assert (tmp_path / "report.json").exists()


def test_checkpoints_print_what_stands_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for the tokens per second, which are those of a machine."""
    (tmp_path / "tests").symlink_to(Path(__file__).resolve().parent)
    monkeypatch.chdir(tmp_path)
    (console,) = re.findall(r"^```console\n(.*?)^```$", section("Checkpoints"), re.M | re.DOTALL)
    rows, *commands = console.split("$ graphgen ")
    subprocess.run(rows.removeprefix("$ "), shell=True, check=True)
    assert [words.partition(" ")[0] for words in commands] == ["build", "generate", "map"]
    for words in commands:
        command, _, told = words.partition("\n")
        assert main(command.split()) == 0
        found = (
            re.sub(r" +[\d,.]+ tokens/s", "", text) for text in (told, capsys.readouterr().out)
        )
        assert next(found) == next(found)
