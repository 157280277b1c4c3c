"""What README shows is so: its programs run, and what its commands print is what they print.

python tests/test_readme.py --remake    # write anew what its commands print, and its picture
"""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
from readme_picture import picture

import graphgen as gg
from graphgen.commands import main

TESTS = Path(__file__).resolve().parent
README = TESTS.parent / "README.md"
PICTURE = TESTS.parent / "docs" / "fusing.svg"
LAYER = TESTS / "fixtures" / "layer_dynamo_20.onnx"  # what the first program exports
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"(?<=<!-- printed -->\n```console\n)(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    return re.findall(r"^\$ graphgen (.*?)(?: +#.*)?$", text, re.MULTILINE)


def run(command: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(command.split()) == 0, command
    return re.sub(r" +$", "", out.getvalue(), flags=re.MULTILINE)


def with_output(block: re.Match[str]) -> str:
    """A block of commands, each with what it prints now, in this folder.

    Several passes in turn that had no candidate become one line of dots.
    """
    text = "".join(f"$ graphgen {each}\n{run(each)}" for each in commands(block[1])) + "```"
    return re.sub(r"(^\w+ +0 +0 +0 .*\n){2,}", "...\n", text, flags=re.MULTILINE)


def without_machine(text: str) -> str:
    """Without milliseconds, at the end of a row, and the version of the runtime."""
    text = re.sub(r" +[\d.]+$|(?<=onnxruntime )[\d.]+", "", text, flags=re.MULTILINE)
    return re.sub(" +", " ", text)  # as wide as the longest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("readme")
    shutil.copy(LAYER, made / "layer.onnx")
    return made


def test_commands_print_what_stands_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    text = README.read_text()
    fresh = PRINTED.sub(with_output, text)
    assert without_machine(fresh) == without_machine(text), "make goldens writes it anew"
    drawn = picture(gg.load("layer.onnx"), gg.load("fused.onnx"))
    assert drawn == PICTURE.read_text(), "make goldens draws it anew"


def test_the_other_commands_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    told = "".join(CONSOLE.findall(PRINTED.sub("", README.read_text())))
    assert len(commands(told)) == 4
    for command in commands(told):
        run(command)
    assert (folder / "report.html").exists()


def test_the_programs_run_one_after_the_other(folder: Path) -> None:
    of_torch, *programs = BLOCK.findall(README.read_text())
    assert "torch.onnx.export" in of_torch  # `make parity-smoke` runs it
    checks = 'assert history[-1]["loss"] < history[0]["loss"] / 4 and y.shape == (2, 10, 32)\n'
    command = [sys.executable, "-c", "".join(programs) + checks]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (folder / "trained.onnx").exists() and (folder / "block.onnx").exists()


def test_it_is_short() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 157
    assert all(len(block.splitlines()) <= 18 for block in BLOCK.findall(text))


def remake() -> None:
    text = README.read_text()
    with tempfile.TemporaryDirectory() as there:
        os.chdir(there)
        shutil.copy(LAYER, "layer.onnx")
        # As in tests: what pays is that of one processor.
        with patch("graphgen.targets.instructions", lambda: "avx512"):
            fresh = PRINTED.sub(with_output, text)
        PICTURE.write_text(picture(gg.load("layer.onnx"), gg.load("fused.onnx")))
    if without_machine(fresh) != without_machine(text):
        README.write_text(fresh)
        print(f"{README.name} is written anew")


if __name__ == "__main__" and sys.argv[1:] == ["--remake"]:
    remake()
