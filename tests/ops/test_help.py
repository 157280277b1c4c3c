"""help() of an operator: its call, its docstring, and where its definition stands."""

import inspect
import pydoc
import re

import numpy as np
import pytest

import graphgen as gg
from graphgen import ops
from graphgen.op import Op

SOURCE = re.compile(r"arXiv|ONNX|graphgen::|\(\w+ \d{4}|\d{4}\.\d{5}")


def shown(name: str) -> str:
    return pydoc.plain(pydoc.render_doc(getattr(ops, name)))


def test_help_shows_the_call_the_formula_and_the_source() -> None:
    title, _, call, formula, *_ = shown("softmax").splitlines()
    assert title.endswith(" in module graphgen.ops.softmax")
    assert re.fullmatch(r"softmax\(x: \S+Tensor, \*, axis: int = -1\) -> \S+Tensor", call)
    assert formula == "    exp(x) / Σ exp(x) along `axis`, with the shape of x."
    source = "ONNX: Softmax, as of opset 13, https://onnx.ai/onnx/operators/onnx__Softmax.html"
    assert source in shown("softmax")
    assert "Operands broadcast as in NumPy." in shown("add")
    assert "Operands broadcast" not in shown("abs")
    assert "ONNX Runtime: com.microsoft::QuickGelu, https://" in shown("quick_gelu")
    assert "graphgen::CrossEntropy" in shown("cross_entropy")


def test_the_room_lists_its_operators() -> None:
    text = pydoc.plain(pydoc.render_doc(ops))
    assert text.count("\n    softmax(x: ") == 1
    assert re.search(r"\n    reshape\(\s*x: ", text)  # Python 3.13 breaks long signatures


def test_an_operator_is_a_function_for_inspect() -> None:
    op = ops.softmax
    assert inspect.isroutine(op) and op.__qualname__ == "softmax"
    assert inspect.getsource(op).startswith('@composite("Softmax"')
    assert str(inspect.signature(op)).startswith("(x: ")

    class Holder:
        activation = ops.relu

    assert Holder().activation is ops.relu


@pytest.mark.parametrize("name", [n for n in dir(ops) if isinstance(getattr(ops, n), Op)])
def test_every_operator_names_its_source(name: str) -> None:
    assert SOURCE.search(shown(name)), shown(name)


def test_shapes_that_do_not_fit_on_arrays_are_an_error_of_ours() -> None:
    a, b = np.ones((2, 4), np.float32), np.ones((3, 3), np.float32)
    told = r"^MatMul\(float\[2, 4\], float\[3, 3\]\): .*\(test_help.py:\d+\)$"
    with pytest.raises(gg.GraphgenError, match=told):
        ops.matmul(a, b)
    with pytest.raises(gg.GraphgenError, match=r"^Gather\(.*test_help.py"):
        ops.gather(a, 7)
