"""docs/architectures.md: six architectures next to their twins in PyTorch, and the lines of both.

python tests/models/test_architecture_page.py             # print the table
python tests/models/test_architecture_page.py --remake    # write the page anew
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

import pytest

from graphgen.models import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architectures.md"
NAMES = ("gemma", "moe", "mamba", "dit", "conformer", "whisper")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
INTRODUCTION = """\
# Six architectures, next to PyTorch

`graphgen build NAME -o F.onnx` writes each of these with fresh weights; `graphgen build --list`
names their sizes. Each is one file of `graphgen/models/`, shown on the left. On the right is its
twin: the same model written for PyTorch, a file of `tests/parity/twins/`. `make parity` gives both
the same weights, and compares outputs, and the gradients of all weights, with PyTorch's in float64.
`graphgen optimize` turns every attention and norm of each file into one operator, except gemma's
attention with a softcap, which several operators compute faster on a CPU.
"""
COUNTED = """\
The table counts lines of code: not blank lines, comments or docstrings, but imports and, on the
left, the checks of sizes and the function that names the inputs of the file. Both sides are
formatted by `ruff format` at 100 columns. `python tests/models/test_architecture_page.py --remake`
writes this page, and a test fails if it is stale, or if the left side is the longer one.

On the left, graphgen has blocks that a PyTorch program has to write out: attention with grouped
heads, rotary positions, a softcap or a window; routing to experts; the selective scan; shifts,
scales and gates from a condition. If PyTorch has such a block, the twin uses it: RMSNorm,
MultiheadAttention, and whole layers of encoders and decoders.
"""


def sides(name: str) -> tuple[str, str]:
    """The source of an architecture and of its twin."""
    files = ROOT / "graphgen/models", ROOT / "tests/parity/twins"
    ours, theirs = (folder / f"{name}.py" for folder in files)
    return ours.read_text(encoding="utf-8"), theirs.read_text(encoding="utf-8")


def count_lines(source: str) -> int:
    """Lines that hold code: not blank, not only a comment, not of a docstring.

    >>> count_lines('def f():\\n    "Of no use."\\n\\n    # why\\n    return (\\n        1)  # one')
    3
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            text = node.body[0]
            lines.difference_update(range(text.lineno, (text.end_lineno or 0) + 1))
    return len(lines)


def table() -> str:
    """The lines of both sides of each."""
    rows = "| name | what it is | graphgen | PyTorch |\n|---|---|---:|---:|\n"
    for name in NAMES:
        ours, theirs = map(count_lines, sides(name))
        rows += f"| [{name}](#{name}) | {ARCHITECTURES[name].description} | {ours} | {theirs} |\n"
    return rows


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, table(), COUNTED]
    for name in NAMES:
        told, twin = sides(name)
        [title, *_] = (ast.get_docstring(ast.parse(told)) or "").splitlines()
        columns = "</td>\n<td>\n\n".join(f"```python\n{side}```\n\n" for side in (told, twin))
        heads = f"<tr><th>graphgen/models/{name}.py</th><th>tests/parity/twins/{name}.py</th></tr>"
        parts.append(
            f"## {name}\n\n{title}\n\n<details><summary>Side by side</summary>\n<table>\n{heads}\n"
            f'<tr valign="top"><td>\n\n{columns}</td></tr>\n</table>\n</details>\n'
        )
    return "\n".join(parts)


def test_the_page_shows_the_files_as_they_are() -> None:
    again = "python tests/models/test_architecture_page.py --remake"
    assert PAGE.read_text(encoding="utf-8") == page(), again


@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_needs_no_more_lines_than_in_torch(name: str) -> None:
    ours, theirs = sides(name)
    assert count_lines(ours) <= count_lines(theirs)
    assert len(ours.splitlines()) < 100


def test_what_counts_as_a_line() -> None:
    code = 'x = """a\n\nb"""\n\n\nclass A:\n    """Text\n\n    text."""\n\n    # why\n'
    assert count_lines(code + "    y = [  # what\n        1,\n    ]\n") == 7


if __name__ == "__main__":
    if sys.argv[1:] == ["--remake"]:
        PAGE.write_text(page(), encoding="utf-8")
    print(table(), end="")
