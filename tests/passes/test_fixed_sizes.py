"""Sizes that a trace made constants: a bias for 12 tokens proves that there are 12, or does not."""

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from small_models import ROUNDING, relative_rms, run_plain

import graphgen as gg
from graphgen.graph import count_operators

PLACES = "column = Reshape (p, tall) row = Reshape (p, wide)"
BRANCH = """
   column = If (c) <then_branch = yes () => (float[12, 1] a) { a = Reshape (p, tall) },
      else_branch = no () => (float[12, 1] b) { b = Identity (given) }>
   row = Transpose (column)"""
PRODUCT, EINSUM = "y = MatMul (w, v)", 'y = Einsum <equation = "bhij,bhjd->bhid"> (w, v)'
CASES = {
    "by a product": ("n", PLACES, PRODUCT, True),
    "by an einsum": ("n", PLACES, EINSUM, True),
    "of other rows": ("t", PLACES, PRODUCT, False),
    "of other places": ("n", PLACES.replace("(p", "(given"), EINSUM, False),
    "in a branch": ("n", BRANCH, EINSUM, False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_reshape_to_numbers_tells_the_size_of_what_it_reshapes(name: str, tmp_path: Path) -> None:
    rows, places, product, fused = CASES[name]
    proto = onnx.parser.parse_model(f"""
<ir_version: 9, opset_import: ["" : 18]>
main (float[b, 2, {rows}, 8] q, float[b, 2, n, 8] k, float[b, 2, n, 8] v, float[n] p,
      float[12, 1] given, bool c, int64[k] sizes) => (float[b, 2, m, 8] y, float[r, s] z)
<int64[2] tall = {{12, 1}}, int64[2] wide = {{1, 12}}, float[2, 1, 1] slopes = {{0.5, -0.2}}> {{
   {places}
   distance = Sub (column, row)
   bias = Mul (slopes, distance)
   turned = Transpose <perm = [0, 1, 3, 2]> (k)
   scores = MatMul (q, turned)
   biased = Add (scores, bias)
   w = Softmax (biased)
   {product}
   z = Reshape (p, sizes)
}}""")
    onnx.save(proto, tmp_path / "graph.onnx")
    model = gg.load(tmp_path / "graph.onnx")
    best = gg.optimize(model, target="cpu").model
    assert count_operators(best).get("Attention", 0) == fused
    random, sizes = np.random.default_rng(0), [(12, 12)]
    sizes += [(1, 12)] if rows == "t" else [(1, 1)] if not fused else []
    for t, n in sizes:
        shapes = {"q": (3, 2, t, 8), "k": (3, 2, n, 8), "v": (3, 2, n, 8), "p": (n,)}
        feeds = {key: random.standard_normal(dims, np.float32) for key, dims in shapes.items()}
        feeds |= {"given": random.standard_normal((12, 1), np.float32), "c": np.array(n == 12)}
        feeds["sizes"] = np.array([1, n])
        (wanted, _), (got, _) = run_plain(model, feeds), run_plain(best, feeds)
        assert wanted.shape == got.shape and relative_rms(wanted, got) < ROUNDING


SUM = "s = Add (bias, scores) w = Softmax (s) y = MatMul (w, v)"
BRANCH_OF_SUM = """
   scored = Identity (scores)
   w = If (c) <then_branch = yes () => (float[b, 2, i, j] p) {
         a = Add (bias, scored) p = Softmax (a) },
      else_branch = no () => (float[b, 2, i, j] o) { o = Softmax (scored) }>
   y = MatMul (w, v)"""


@pytest.mark.parametrize(
    ("limit", "nodes", "fused"), [(16, SUM, True), (1, SUM, False), (16, BRANCH_OF_SUM, False)]
)
def test_a_sum_tells_that_a_table_is_long_enough(
    limit: int, nodes: str, fused: bool, tmp_path: Path
) -> None:
    """Of n rows, Min(16, n) are cut, as dynamo names ImageGPT's, and then have a bias of n."""
    proto = onnx.parser.parse_model(f"""
<ir_version: 9, opset_import: ["" : 18]>
main (float[b, 2, n, 8] x, float[b, 1, n, n] bias, bool c) => (float[b, 2, m, 8] y)
<int64[1] zero = {{0}}, int64[1] end = {{{limit}}}, int64[1] two = {{2}}> {{
   v = Slice (x, zero, end, two)
   turned = Transpose <perm = [0, 1, 3, 2]> (v)
   scores = MatMul (v, turned)
   {nodes}
}}""")
    onnx.save(proto, tmp_path / "graph.onnx")
    model = gg.load(tmp_path / "graph.onnx")
    best = gg.optimize(model, target="cpu").model
    assert count_operators(best).get("Attention", 0) == fused
    random = np.random.default_rng(0)
    for n in (1, 5, 16) if limit > 1 else (1, 5):
        feeds = {
            "x": random.standard_normal((3, 2, n, 8), np.float32),
            "bias": random.standard_normal((3, 1, n, n), np.float32),
            "c": np.array(True),
        }
        if limit == 1 and n > 1:  # the only row of scores is repeated, and V has one row
            with pytest.raises(Exception, match="dimension"):
                run_plain(model, feeds)
            continue
        [wanted], [got] = run_plain(model, feeds), run_plain(best, feeds)
        assert wanted.shape == got.shape and relative_rms(wanted, got) < ROUNDING
