"""A graph compared with what a test says of it."""

import difflib
import os
import re
from typing import Any

import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.export.files import load
from graphgen.graph import short_text


def assert_graph(model: ir.Model | str | os.PathLike[str] | Any, wanted: str) -> None:
    """Fail with a readable difference unless a model's short text form is `wanted`.

    The text names inputs, outputs and weights; all other values are numbered, so their names say
    nothing. Blank lines and the width of white space say nothing either, a line `...` stands for
    any number of lines, and module paths (`# layers.0`) are compared only where `wanted` has some.

    Args:
        model: A model, what `optimize` returned, or the path of an ONNX file.
        wanted: What `graphgen.graph.short_text(model, nested=True)` gives, or parts of it.
    """
    __tracebackhide__ = True
    model = load(model) if isinstance(model, str | os.PathLike) else getattr(model, "model", model)
    if not isinstance(model, ir.Model):
        raise GraphgenError(f"assert_graph: {model!r} is no model; give one, or the path of a file")
    lines = _lines(wanted)
    paths = any(line.startswith("#") for line in lines)
    found = [x for x in _lines(short_text(model, nested=True)) if paths or not x.startswith("#")]
    pattern = "".join("(?:.*\n)*" if x == "..." else re.escape(x + "\n") for x in lines)
    if not re.fullmatch(pattern, "".join(f"{line}\n" for line in found)):
        told = difflib.unified_diff(lines, found, "wanted", "found", n=len(lines), lineterm="")
        raise AssertionError("the graph is not the one that is wanted\n" + "\n".join(told))


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]
