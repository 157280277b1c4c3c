"""The code blocks of a page in docs/, one after the other, are a program that runs."""

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import graphgen
from graphgen.commands import main
from graphgen.passes import PIPELINE

DOCS = Path(__file__).resolve().parent.parent / "docs"
KEYS = {"graphgen.int8", "graphgen.loss"}  # of the metadata of files
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ["adding-an-operator.md", "adding-a-fusion.md", "training-artifacts.md", "not-fused.md"]


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


def test_the_program_of_the_page_of_values_means_the_same_on_both() -> None:
    [block] = BLOCK.findall((DOCS / "values.md").read_text())
    names: dict[str, Any] = {}
    exec(block, names)
    random = np.random.default_rng(0)
    x, mask = random.standard_normal((2, 5, 8), np.float32), random.random((2, 5)) < 0.5
    [got] = graphgen.Session(names["model"])(x=x, mask=mask)
    np.testing.assert_allclose(got, names["last"](x, mask), rtol=1e-6, atol=1e-7)


def test_the_commands_of_the_training_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DOCS / "training.md").read_text()
    monkeypatch.chdir(tmp_path)
    parts = re.findall(BLOCK.pattern + r"|^\$ graphgen (.*?)$", text, re.MULTILINE | re.DOTALL)
    for block, command in parts:
        if block:
            subprocess.run([sys.executable, "-c", block], check=True)
        else:
            assert main(command.split()) == 0, command
    assert sum(1 for _, command in parts if command) == 7
    assert Path("best.onnx").exists() and Path("trained.onnx").exists()


PROGRAM_AND_COMMANDS = """
import runpy, sys
import graphgen
from graphgen.commands import main
runpy.run_path("program.py")
for command in sys.argv[1:]:
    print("$ graphgen")
    assert main(command.split()) == 0, command
"""


def test_the_package_of_a_pass_installs_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `pip install .` leaves it: the module, and the entry points next to it."""
    text = (DOCS / "writing-a-pass.md").read_text()
    module, *program = BLOCK.findall(text)
    [project] = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    [console] = re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "fuse_clip.py").write_text(module)
    (tmp_path / "program.py").write_text("".join(program))
    described = tomllib.loads(project)["project"]
    folder = tmp_path / "fuse_clip-1.0.dist-info"
    folder.mkdir()
    name = f"Name: {described['name']}\nVersion: {described['version']}\n"
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\n{name}")
    [(group, offered)] = described["entry-points"].items()
    lines = "".join(f"{name} = {value}\n" for name, value in offered.items())
    (folder / "entry_points.txt").write_text(f"[{group}]\n{lines}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(DOCS.parent)]))

    first, second = console.split("$ graphgen ")[1:]
    command, _, told = second.partition("\n")
    line = [sys.executable, "-c", PROGRAM_AND_COMMANDS, first, command]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, optimized, explained = done.stdout.split("$ graphgen\n")
    assert "fuse_clip" in optimized
    version = r"onnxruntime [\d.]+"
    assert re.sub(version, "", explained) == re.sub(version, "", told)


@pytest.mark.exhaustive
def test_the_commands_of_other_optimizers_have_these_counterparts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DOCS / "coming-from.md").read_text()
    export = DOCS.parent / "tests" / "fixtures" / "bert_torchscript_eager_14.onnx"
    (tmp_path / "bert.onnx").symlink_to(export)
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^\$ graphgen (.*?) *(?:#.*)?$", text, re.MULTILINE)
    assert len(commands) == 7
    for command in commands:
        assert main(command.split()) == 0, command
    program = "".join(BLOCK.findall(text))
    made: dict[str, Any] = {}
    exec(program, made)
    assert made["best"].report.fused()["attention"] == 2
    assert made["simple"].model and made["quiet"].model
    passes = set(re.findall(r"`(fuse_\w+)`", text))
    assert passes <= set(PIPELINE)


def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / "command-line.md").read_text()
    monkeypatch.chdir(tmp_path)
    [save] = re.findall(r'^\$ python -c "(.*)"$', text, re.MULTILINE)
    exec(save, {})
    commands = re.findall(r"^\$ graphgen (.*?)(?: +#.*)?$", text, re.MULTILINE)
    commands = [each for each in commands if " > " not in each]  # into files of a shell
    assert len(commands) == 7
    for command in commands:
        assert main(command.split()) == 0, command
    assert (tmp_path / "report.json").exists()


def test_checkpoints_print_what_stands_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for the tokens per second, which are those of a machine."""
    (tmp_path / "tests").symlink_to(DOCS.parent / "tests")
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "checkpoints.md").read_text().partition("## An example")[2]
    [console] = re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    rows, *commands = console.split("$ graphgen ")
    subprocess.run(rows.removeprefix("$ "), shell=True, check=True)
    assert [words.partition(" ")[0] for words in commands] == ["build", "generate", "map"]
    for words in commands:
        command, _, told = words.partition("\n")
        assert main(command.split()) == 0
        found = (re.sub(r" +[\d,.]+ tokens/s", "", s) for s in (told, capsys.readouterr().out))
        assert next(found) == next(found)
    assert main([*command.split(), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    jsonschema.validate(rows, json.loads((DOCS / "map.schema.json").read_text()))
    assert rows["rows"] == 2


TEXTS = {path: path.read_text() for top in (DOCS.parent, DOCS) for path in top.glob("*.md")}
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(<?([^)\s>]+)>?\)|(?:src|href)=\"([^\"]+)\"")


def anchors(text: str) -> set[str]:
    """What a link may have behind its #: the headings, as code hosts spell them."""
    found: dict[str, None] = {}
    for title in re.findall(r"^#+ +(.*?) *$", FENCED.sub("", text), re.MULTILINE):
        shown = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title).lower()
        name = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        same = (f"{name}-{i}" for i in range(1, len(found) + 1))
        found[name if name not in found else next(each for each in same if each not in found)] = (
            None
        )
    return set(found)


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in ("".join(pair) for pair in LINK.findall(FENCED.sub("", TEXTS[page]))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(TEXTS[target]), link


def test_every_page_is_reached_from_the_readme() -> None:
    """Along links between pages; the first page of the site is the README itself."""
    reached, new = {DOCS / "index.md"}, {DOCS.parent / "README.md"}
    while new:
        page = new.pop()
        reached.add(page)
        links = (page.parent / pair[0].partition("#")[0] for pair in LINK.findall(TEXTS[page]))
        new |= ({link.resolve() for link in links} & set(TEXTS)) - reached
    assert reached == set(TEXTS)


@pytest.mark.parametrize(
    "page", [*DOCS.glob("*.md"), DOCS.parent / "README.md"], ids=lambda p: p.name
)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    for path in re.findall(r"`((?:graphgen|ops|export|tests|bench|examples)/[\w/]+\.\w+)`", text):
        assert (DOCS.parent / path).exists(), path
    shared = (DOCS.parent / "examples" / "command.py").read_text()
    for script, given in re.findall(r"python ((?:bench|examples|tests)/\w+\.py)([^`\n]*)", text):
        source = (DOCS.parent / script).read_text() + shared * script.startswith("examples")
        for option in re.findall(r"(?<=\s)--[a-z-]+", given):
            assert f'"{option}"' in source, f"{script} has no {option}"
    for module, names in re.findall(
        r"^from (graphgen[\w.]*) import ([\w, ]+)$", text, re.MULTILINE
    ):
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name) or importlib.import_module(
                f"{module}.{name}"
            )
    for dotted in {*re.findall(r"`(graphgen(?:\.\w+)+)", text)} - KEYS:
        found: Any = graphgen
        name = "graphgen"
        for part in dotted.split(".")[1:]:
            name = f"{name}.{part}"
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
            found = sys.modules.get(name) or getattr(found, part)
