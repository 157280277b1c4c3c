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
    "by a product": ("n", PLACES, PRODUCT, 0),
    "by an einsum": ("n", PLACES, EINSUM, 0),
    "of other rows": ("t", PLACES, PRODUCT, 1),
    "of other places": ("n", PLACES.replace("(p", "(given"), EINSUM, 3),
    "in a branch": ("n", BRANCH, EINSUM, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_a_reshape_to_numbers_tells_the_size_of_what_it_reshapes(name: str, tmp_path: Path) -> None:
    """Where none does, Q, K and V are made as long as a bias may be."""
    rows, places, product, lengthened = CASES[name]
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
    counts = count_operators(best)
    assert counts["Attention"] == 1 and counts.get("Expand", 0) == lengthened
    random, sizes = np.random.default_rng(0), [(12, 12)]
    sizes += [(1, 12)] if rows == "t" else [(1, 1)] if lengthened else []
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
    ("limit", "nodes", "fused"), [(16, SUM, True), (1, SUM, True), (16, BRANCH_OF_SUM, False)]
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


@pytest.mark.parametrize(("rows", "lengthened"), [("2", 0), ("3*m", 0), ("m", 2)])
def test_a_product_tells_that_two_batches_are_one(
    rows: str, lengthened: int, tmp_path: Path
) -> None:
    """Q takes its batch from K; if that is 0, a reshape keeps Q's own, which has to be 1 for V."""
    proto = onnx.parser.parse_model("""
<ir_version: 9, opset_import: ["" : 18]>
main (float[r, t, 16] x, float[b, s, 16] k) => (float[p, 2, u, 8] y)
<int64[3] heads = {-1, 2, 8}, int64[4] apart = {0, 0, 2, 8}> {
   batch = Shape <start = 0, end = 1> (k)
   sizes = Concat <axis = 0> (batch, heads)
   q = Reshape (x, sizes)
   v = Reshape (k, apart)
   left = Transpose <perm = [0, 2, 1, 3]> (q)
   right = Transpose <perm = [0, 2, 3, 1]> (v)
   values = Transpose <perm = [0, 2, 1, 3]> (v)
   scores = MatMul (left, right)
   w = Softmax (scores)
   y = MatMul (w, values)
}""")
    size = proto.graph.input[0].type.tensor_type.shape.dim[0]
    size.dim_param = rows
    if rows.isdigit():
        size.dim_value = int(rows)
    onnx.save(proto, tmp_path / "graph.onnx")
    model = gg.load(tmp_path / "graph.onnx")
    best = gg.optimize(model, target="cpu").model
    counts = count_operators(best)
    assert counts["Attention"] == 1 and counts.get("Expand", 0) == lengthened
    random, sizes = np.random.default_rng(0), {"2": [(2, 2), (2, 1)], "3*m": [(6, 6), (3, 1)]}
    for r, b in sizes.get(rows, [(2, 2), (1, 1)]):
        shapes = {"x": (r, 5, 16), "k": (b, 4, 16)}
        feeds = {key: random.standard_normal(dims, np.float32) for key, dims in shapes.items()}
        [wanted], [got] = run_plain(model, feeds), run_plain(best, feeds)
        assert wanted.shape == got.shape and (not b or relative_rms(wanted, got) < ROUNDING)


OF_INPUT = "a = Add (scores, m)"
TRIANGLE = """
   end = Size (m)
   places = Range (start, end, step)
   column = Unsqueeze (places, first)
   row = Unsqueeze (places, last)
   keep = LessOrEqual (column, row)
   a = Where (keep, scores, low)"""
SOME = "c = Greater (m, zero) a = Where (c, scores, low)"
MASKS: dict[str, tuple[str, str, list[tuple[int, tuple[int, ...]]], bool]] = {
    "a bias": ("b, 1, t, n", OF_INPUT, [(3, (2, 1, 3, 12)), (3, (2, 1, 3, 1))], True),
    "of a key": ("n", SOME, [(3, (12,)), (3, (1,))], True),
    "of heads": ("b, n, t, 12", OF_INPUT, [(3, (2, 2, 3, 12)), (3, (2, 1, 3, 12))], True),
    "a triangle": ("t", TRIANGLE, [(12, (12,)), (1, (1,))], True),
    "of more rows": ("b, 1, 12, n", OF_INPUT, [(12, (2, 1, 12, 1)), (1, (2, 1, 12, 12))], True),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_has_one_or_all_where_the_scores_have_a_number(name: str, tmp_path: Path) -> None:
    """A trace has made 12 keys of t: beside them a mask of n has 12, or 1, which is repeated."""
    dims, nodes, runs, fused = MASKS[name]
    proto = onnx.parser.parse_model(f"""
<ir_version: 9, opset_import: ["" : 18]>
main (float[b, 2, t, 8] q, float[b, 2, 12, 8] k, float[b, 2, 12, 8] v, float[{dims}] m)
   => (float[b, 2, u, 8] y)
<float zero = {{-0.5}}, float low = {{-3e38}}, int64 start = {{0}}, int64 step = {{1}},
   int64[1] first = {{0}}, int64[1] last = {{1}}> {{
   turned = Transpose <perm = [0, 1, 3, 2]> (k)
   scores = MatMul (q, turned)
   {nodes}
   w = Softmax (a)
   y = MatMul (w, v)
}}""")
    onnx.save(proto, tmp_path / "graph.onnx")
    model = gg.load(tmp_path / "graph.onnx")
    best = gg.optimize(model, target="cpu").model
    assert count_operators(best).get("Attention", 0) == fused
    random = np.random.default_rng(0)
    for rows, shape in runs:
        given = {"q": (2, 2, rows, 8), "k": (2, 2, 12, 8), "v": (2, 2, 12, 8), "m": shape}
        feeds = {key: random.standard_normal(d, np.float32) for key, d in given.items()}
        [wanted], [got] = run_plain(model, feeds), run_plain(best, feeds)
        assert wanted.shape == got.shape and relative_rms(wanted, got) < ROUNDING


@pytest.mark.parametrize("dims", ["6, 6", "1, 2, 6, 6", "6, 1", "3, 1, 1, 6"])
def test_a_bias_of_a_trace_repeats_sizes_without_names(dims: str, tmp_path: Path) -> None:
    """A batch or queries of 1 are repeated for its six; the operator wants them as many."""
    proto = onnx.parser.parse_model("""
<ir_version: 8, opset_import: ["" : 17]>
main (float[b, t, 8] q, float[b, s, 8] k, float[b, s, 8] v) => (float[b, t, 8] y)
<int64[4] apart = {0, 0, 2, 4}, int64[3] merged = {0, 0, 8}> {
   q4 = Reshape (q, apart)
   k4 = Reshape (k, apart)
   v4 = Reshape (v, apart)
   qh = Transpose <perm = [0, 2, 1, 3]> (q4)
   kh = Transpose <perm = [0, 2, 3, 1]> (k4)
   vh = Transpose <perm = [0, 2, 1, 3]> (v4)
   scores = MatMul (qh, kh)
   biased = Add (scores, bias)
   w = Softmax (biased)
   o = MatMul (w, vh)
   back = Transpose <perm = [0, 2, 1, 3]> (o)
   y = Reshape (back, merged)
}""")
    for value in (*proto.graph.input, *proto.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            dim.ClearField("dim_param")
    shape, random = [int(d) for d in dims.split(",")], np.random.default_rng(0)
    bias = random.standard_normal(shape, np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(bias, "bias"))
    onnx.save(proto, tmp_path / "graph.onnx")
    model = gg.load(tmp_path / "graph.onnx")
    best = gg.optimize(model, target="cpu").model
    assert count_operators(best)["Attention"] == 1
    batches = (1, 3) if shape[0] == 3 else (1, 2)
    for b, t in [(b, t) for b in batches for t in (1, 6)]:
        sizes = {"q": (b, t, 8), "k": (b, 6, 8), "v": (b, 6, 8)}
        feeds = {key: random.standard_normal(size, np.float32) for key, size in sizes.items()}
        [wanted], [got] = run_plain(model, feeds), run_plain(best, feeds)
        assert wanted.shape == got.shape and relative_rms(wanted, got) < ROUNDING


@pytest.mark.parametrize(("heads", "known"), [(4, True), (1, False)])
def test_a_sum_tells_that_a_reshape_kept_nothing(heads: int, known: bool, tmp_path: Path) -> None:
    """Heads of a batch, as DeBERTa and BLOOM have them: of length 0 they would keep 4, not 0."""
    proto = onnx.parser.parse_model(f"""
<ir_version: 9, opset_import: ["" : 18]>
main (float[b, {heads}, t, 8] q, float[b, {heads}, t, 8] k, float[b, {heads}, t, 8] v,
      float[1, t, t] bias, float[b, 1, 1, t] m) => (float[p, {heads}, u, 8] y)
<int64[1] rest = {{-1}}, int64[1] one = {{1}}, int64[1] size = {{8}}, int64[1] h = {{{heads}}}> {{
   length = Shape <start = 2, end = 3> (q)
   batch = Shape <start = 0, end = 1> (q)
   sizes = Concat <axis = 0> (rest, length, size)
   left = Reshape (q, sizes)
   keys = Reshape (k, sizes)
   right = Transpose <perm = [0, 2, 1]> (keys)
   values = Reshape (v, sizes)
   scores = MatMul (left, right)
   rows = Mul (batch, h)
   square = Concat <axis = 0> (rows, length, length)
   every = Expand (bias, square)
   sum = Add (scores, every)
   own = Shape <start = 1, end = 2> (sum)
   apart = Concat <axis = 0> (rest, h, own, own)
   of_heads = Reshape (sum, apart)
   masked = Add (of_heads, m)
   w = Softmax (masked)
   together = Concat <axis = 0> (rest, own, own)
   weights = Reshape (w, together)
   z = MatMul (weights, values)
   whole = Concat <axis = 0> (rest, h, own, size)
   y = Reshape (z, whole)
}}""")
    onnx.save(proto, tmp_path / "graph.onnx")
    model = gg.load(tmp_path / "graph.onnx")
    best = gg.optimize(model, target="cpu").model
    assert count_operators(best).get("Attention", 0) == known
    random = np.random.default_rng(0)
    for b, t in ((2, 5), (1, 1), (3, 2)):
        feeds = {n: random.standard_normal((b, heads, t, 8), np.float32) for n in "qkv"}
        feeds["bias"] = random.standard_normal((1, t, t), np.float32)
        feeds["m"] = random.standard_normal((b, 1, 1, t), np.float32)
        [wanted], [got] = run_plain(model, feeds), run_plain(best, feeds)
        assert wanted.shape == got.shape and relative_rms(wanted, got) < ROUNDING
