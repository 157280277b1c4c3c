"""Axes through layouts: what is regrouped is the same index, what is arranged the same numbers."""

from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from small_models import run_plain

import graphgen as gg
from graphgen import ops
from graphgen.graph import count_operators
from graphgen.nn.module import build
from graphgen.recognize.axes import Axis, View, leaves, regroup, unify

B, T = (ir.SymbolicDim(name) for name in "bt")


def sizes(dims: Any) -> list[list[str]]:
    return [[str(axis.size) for axis in leaves(d)] for d in dims]


@pytest.mark.parametrize(
    ("given", "shape", "wanted"),
    [
        ([B, T, 32], [B, T, 4, 8], [["b"], ["t"], ["4"], ["8"]]),
        ([B, T, 4, 8], [B, T, 32], [["b"], ["t"], ["4", "8"]]),
        ([B, 4, T, 8], ["x", T, 8], [["b", "4"], ["t"], ["8"]]),
        (["x", T, 8], [B, 4, T, 8], [["b"], ["4"], ["t"], ["8"]]),
        ([6, 4], [4, 6], None),
        ([B, T], [T, B], None),
        ([B, 12], [B, 1, 3, 4], [["b"], [], ["3"], ["4"]]),
        ([2, 12], [24], [["2", "12"]]),
    ],
)
def test_regroup(given: Any, shape: Any, wanted: Any) -> None:
    dims = [[Axis(d)] for d in ir.Shape(given)]
    found = regroup(dims, ir.Shape(shape))
    assert (found if found is None else sizes(found)) == wanted


def test_unify_splits_the_larger_axis() -> None:
    heads, groups = [Axis(8)], [Axis(2), Axis(4)]
    assert unify(heads, groups)
    assert leaves(heads) == leaves(groups)
    assert not unify([Axis(6)], [Axis(4)])
    assert not unify([Axis(B)], [Axis(T)])
    assert unify([Axis(B)], [Axis(T)], equal=True)


ARRANGEMENTS = {
    "split and turned": lambda x: ops.transpose(ops.reshape(x, [0, 0, 4, 8]), perm=[0, 2, 1, 3]),
    "merged with the batch": lambda x: ops.reshape(
        ops.transpose(ops.reshape(x, [0, 0, 4, 8]), perm=[0, 2, 1, 3]), [-1, 5, 8]
    ),
    "turned twice": lambda x: ops.transpose(ops.transpose(x, perm=[2, 0, 1]), perm=[1, 2, 0]),
    "two ways back": lambda x: ops.reshape(ops.reshape(x, [0, 5, 4, 8]), [0, 5, 32]),
    "squeezed": lambda x: ops.squeeze(ops.unsqueeze(ops.transpose(x, perm=[0, 2, 1]), [1]), [1]),
}


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_chains_of_layouts_become_short_and_keep_every_number(name: str) -> None:
    model = build(lambda x: ops.exp(ARRANGEMENTS[name](x)), x=gg.float32["b", 5, 32])
    best = gg.optimize(model).model
    x = np.arange(3 * 5 * 32, dtype=np.float32).reshape(3, 5, 32) / 480
    np.testing.assert_array_equal(run_plain(model, {"x": x})[0], run_plain(best, {"x": x})[0])
    assert best.graph.num_nodes() <= min(model.graph.num_nodes(), 4)


def test_what_is_repeated_is_not_in_the_source() -> None:
    def body(x: Any) -> Any:
        wide = ops.expand(ops.unsqueeze(x, [2]), [1, 1, 3, 1, 1])
        return ops.reshape(wide, [0, 6, 5, 8])

    [value] = build(body, x=gg.float32["b", 2, 5, 8]).graph.outputs
    view = View.of(value)
    assert view is not None
    assert sizes(view.dims) == [["b"], ["2", "3"], ["5"], ["8"]]
    assert [view.has(axis) for axis in leaves(view.dims[1])] == [True, False]


EQUATIONS = {
    "bthd,bshd->bhts": ((2, 5, 4, 8), (2, 3, 4, 8)),
    "bhts,bshd->bthd": ((2, 4, 5, 3), (2, 3, 4, 8)),
    "...qd,...kd->...qk": ((2, 4, 5, 8), (2, 4, 3, 8)),
    "btd,dhk->bthk": ((2, 5, 8), (8, 4, 3)),
    "bij,bjk->bki": ((2, 5, 3), (2, 3, 4)),
    "ab,cb->ac": ((5, 3), (4, 3)),
    "bhtd, bhsd -> bhts": ((2, 4, 5, 8), (2, 4, 3, 8)),
}


@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum_becomes_a_product_of_matrices(equation: str) -> None:
    shapes = EQUATIONS[equation]
    values = [
        ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
        for name, shape in zip("ab", shapes, strict=True)
    ]
    node = ir.node("Einsum", values, {"equation": equation})
    node.outputs[0].name = "y"
    model = ir.Model(
        ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 23}, name="g"),
        ir_version=10,
    )
    best = gg.optimize(model).model
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    wanted = np.einsum(equation.replace(" ", ""), a, b)
    np.testing.assert_allclose(run_plain(best, {"a": a, "b": b})[0], wanted, rtol=1e-5, atol=1e-5)
    assert {"MatMul"} <= set(count_operators(best)) <= {"MatMul", "Transpose", "Reshape"}


@pytest.mark.parametrize("sizes, product", [(("n", 3), False), (("n", "m"), False), ("nn", True)])
def test_an_einsum_that_may_repeat_a_size_of_one_stays(sizes: Any, product: bool) -> None:
    first, second = sizes
    text = f"(float[2,{first}] a, float[{second},4] b) => (float[2,4] y)"
    text += '{ y = Einsum <equation = "ij,jk->ik"> (a, b) }'
    model = ir.from_proto(
        onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}')
    )
    best = gg.optimize(model).model
    assert count_operators(best) == {"MatMul" if product else "Einsum": 1}
    if not product:
        feeds = {"a": np.ones((2, 1), np.float32), "b": np.ones((3, 4), np.float32)}
        np.testing.assert_array_equal(run_plain(best, feeds)[0], np.full((2, 4), 3.0))
