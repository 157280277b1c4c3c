"""The code blocks of a page in docs/, one after the other, are a program that runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from graphgen.cli import main

DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ["adding-an-operator.md", "adding-a-fusion.md", "training-artifacts.md"]


@pytest.mark.parametrize("page", PAGES)
def test_page_runs(page: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((DOCS / page).read_text())
    assert len(blocks) >= 4
    program = tmp_path / f"{page.removesuffix('.md')}.py"
    program.write_text("".join(blocks))
    # A process of its own: an operator that a page declares would join the table of this one.
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_commands_of_the_training_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DOCS / "training.md").read_text()
    monkeypatch.chdir(tmp_path)
    for block in BLOCK.findall(text):
        subprocess.run([sys.executable, "-c", block], check=True)
    commands = re.findall(r"^\$ graphgen (.*)$", text, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        assert main(command.split()) == 0, command
    assert Path("best.onnx").exists()


@pytest.mark.parametrize(
    "page",
    [*PAGES, *"training.md batch-inference.md checkpoints.md clients.md comparing.md".split()]
    + ["../README.md"],
)
def test_links_lead_somewhere(page: str) -> None:
    path = DOCS / page
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert "://" in link or (path.parent / link).exists(), link
