"""The short text form of a graph, for reading and diffing, and a test that compares it."""

import difflib
import os
import re
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from graphgen.arguments import checked
from graphgen.errors import GraphgenError
from graphgen.export.session import model_of
from graphgen.graph import ModelLike, constant, count_operators, operator_name
from graphgen.infer import describe
from graphgen.passes import Optimized
from graphgen.passes.words import count_words, words_of
from graphgen.places import block_of

SHOWN = 4  # the most elements of a constant to write out
_NESTED = 88  # the most columns of an expression written where it is used


def short_text(model: ir.Model, *, nested: bool = False) -> str:
    """A graph to read and diff: a line for each node, values numbered, small constants in place.

    `nested` writes a short expression where it is used, if one node of the same module uses it.
    """
    written: dict[ir.Value, str] = {v: f"%{v.name}" for v in model.graph.outputs}
    lines = [f"input {value.name}: {describe(value)}" for value in model.graph.inputs]
    number, path = 0, ""
    for node in model.graph:
        text = _expression(node, written)
        place = block_of(node)
        if nested and len(text) <= _NESTED and _used_once(node, place):
            written[node.outputs[0]] = text
            continue
        for output in node.outputs:
            if output not in written:
                written[output] = f"%{number}"
                number += 1
        if place != path:
            path = place
            lines.append(f"# {path}")
        left = ", ".join(written[v] for v in node.outputs)
        lines.append(f"{left} = {text}: {', '.join(map(describe, node.outputs))}")
    lines.append("return " + ", ".join(written[v] for v in model.graph.outputs))
    return "\n".join(lines) + "\n"


def _expression(node: ir.Node, written: Mapping[ir.Value, str]) -> str:
    operands = []
    for value in node.inputs:
        named = "-" if value is None else written.get(value, str(value.name))
        operands.append(literal(value) or named)
    attributes = "".join(f", {n}={_plain(a)}" for n, a in sorted(node.attributes.items()))
    return f"{operator_name(node)}({', '.join(operands)}{attributes})"


def literal(value: ir.Value | None) -> str:
    """The content of a constant of at most `SHOWN` elements, "" for other values."""
    array = constant(value)
    if array is None or array.size > SHOWN:
        return ""
    return np.array2string(array, precision=6, separator=", ").replace("\n", "")


def _used_once(node: ir.Node, path: str) -> bool:
    users = [use.node for value in node.outputs for use in value.uses()]
    if len(users) != 1 or any(value.is_graph_output() for value in node.outputs):
        return False
    return block_of(users[0]) == path


def _plain(attr: ir.Attr) -> str:
    value = attr.value
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(list(value) if isinstance(value, tuple) else value)


@checked
def assert_graph(
    model: str | os.PathLike[str] | ModelLike, wanted: str | None = None, /, **counts: int
) -> None:
    """Fail, with a readable difference, unless a graph is as `wanted`, or has these counts.

    `assert_graph(best, attention=12, layer_norm=25, softmax=0)` counts as `expect` of `optimize`
    does: an operator with its variants, nodes of subgraphs included; but the counts
    must be equal, not only reached.

    The text names inputs, outputs and weights; all other values are numbered, so their names do not
    matter. Nor do blank lines and the width of white space. A line `...` stands for any number of
    lines, and module paths (`# layers.0`) are compared only if `wanted` has some.

    Args:
        model: A model, what `optimize` returned, or the path of an ONNX file.
        wanted: What `graphgen.laboratory.text.short_text(model, nested=True)` gives, or a part.
        counts: How many there are of an operator, by its word: attention, norm, gelu, ...

    Raises AssertionError if the graph is another one; after `optimize` it says why candidates were
    not fused. Raises GraphgenError for what is not a model, an unknown word, and nothing to check.
    """
    __tracebackhide__ = True
    if wanted is None and not counts:
        problem = "there is nothing to check; give the wanted text, or counts such as attention=12"
        raise GraphgenError(f"assert_graph: {problem}")
    given, model = model, model_of(model, "assert_graph")
    if wrong := _miscounted(given, model, counts):
        raise AssertionError("\n".join(["the graph has other operators", *wrong]))
    if wanted is None:
        return
    lines = _lines(wanted)
    paths = any(line.startswith("#") for line in lines)
    found = [x for x in _lines(short_text(model, nested=True)) if paths or not x.startswith("#")]
    pattern = "".join("(?:.*\n)*" if x == "..." else re.escape(x + "\n") for x in lines)
    if not re.fullmatch(pattern, "".join(f"{line}\n" for line in found)):
        diff = difflib.unified_diff(lines, found, "wanted", "found", n=len(lines), lineterm="")
        raise AssertionError("the graph is not the wanted one\n" + "\n".join(diff))


def _miscounted(given: object, model: ir.Model, counts: Mapping[str, int]) -> list[str]:
    """A line for each operator that is there more or less often."""
    there, wrong = count_words(count_operators(model)), []
    for word, wanted in counts.items():
        words = words_of(word, "assert_graph")
        if (found := sum(there[w] for w in words)) != wanted:
            reasons = given.report.reasons(words) if isinstance(given, Optimized) else []
            why = f" ({'; '.join(reasons)})" if found < wanted and reasons else ""
            wrong.append(f"{word}: found {found}, wanted {wanted}{why}")
    return wrong


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]
