"""The site of `make docs`, without building it: its navigation, and its reference."""

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import graphgen as gg
from graphgen import nn, ops
from graphgen.commands import COMMANDS

DOCS = Path(__file__).resolve().parent.parent / "docs"
MARKED = [p for p in DOCS.rglob("*.md") if "<!-- reference:" in p.read_text()]


@pytest.fixture(scope="module")
def reference() -> Any:
    sys.path.insert(0, str(DOCS / "site"))
    try:
        yield import_module("reference")
    finally:
        sys.path.remove(str(DOCS / "site"))


def test_every_page_is_in_the_navigation_once() -> None:
    trees = re.findall(
        r"```\{toctree\}\n(?::[^\n]*\n)*\n(.*?)```", (DOCS / "index.md").read_text(), re.S
    )
    listed = [page for tree in trees for page in tree.split()]
    pages = {p.relative_to(DOCS).with_suffix("") for p in DOCS.rglob("*.*") if is_page(p)}
    assert sorted(listed) == sorted({p.as_posix() for p in pages} - {"index"})


def is_page(path: Path) -> bool:
    return path.suffix in {".md", ".ipynb"} and ".ipynb_checkpoints" not in path.parts


def test_the_reference_has_every_public_name(reference: Any) -> None:
    """Each once, with its signature; of an operator and a module, also its source."""
    text = "\n".join(reference.expand(page.read_text()) for page in MARKED)
    found = re.findall(r"^:+\{py:\w+\} (\w+).*\n:module: ([\w.]+)$", text, re.MULTILINE)
    names = [f"{room}.{name}" for name, room in found]
    assert len(names) == len(set(names))
    dtypes = set(re.findall(r"`gg\.(\w+)`", text)) & {*gg.__all__}
    for room, public in (("", {*gg.__all__} - dtypes), (".nn", nn.__all__), (".ops", ops.__all__)):
        missing = {f"graphgen{room}.{name}" for name in public} - {*names}
        assert missing <= {"graphgen.nn", "graphgen.ops", "graphgen.schedule"}
    assert "softmax(x: Tensor, *, axis: int=-1) -> Tensor" in text
    assert "[Softmax](https://onnx.ai/onnx/operators/onnx__Softmax.html), as of opset 13" in text
    assert text.count("<details>") >= len(ops.__all__) / 2
    assert text.count("\n## graphgen ") == len(COMMANDS) == text.count("usage: graphgen ") - 1


def test_docstrings_become_lists_and_links(reference: Any) -> None:
    told = "f(x) for x < 1 (arXiv 1706.03762).\n\n"
    told += "Args:\n    x, y: Two\n        numbers.\n    z: `<b>`."
    assert reference.markdown(told) == (
        "f(x) for x \\< 1 ([arXiv 1706.03762](https://arxiv.org/abs/1706.03762)).\n\n"
        "**Args**\n\n- `x, y`: Two\n  numbers.\n- `z`: `<b>`."
    )
