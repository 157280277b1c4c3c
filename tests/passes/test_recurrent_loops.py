"""Loops as TorchScript, TensorFlow and JAX export them, over cells of LSTM and GRU."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from small_models import run_plain

from graphgen.export.read import load
from graphgen.graph import count_operators
from graphgen.passes import optimize

D, H = 3, 4
SIZES = ((2, 5), (3, 1), (1, 7))


def drawn(rng: Any, *shape: int) -> Any:
    return rng.normal(0, 1.5, shape).astype(np.float32)


def model_of(graph: str, path: Any) -> tuple[bytes, Any]:
    """A file of the graph with those of the weights that it reads, and the model in it."""
    text = f'<ir_version: 8, opset_import: ["" : 17]>\n{graph}'
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(7)
    weights: dict[str, Any] = {
        "w4": drawn(rng, 4 * H, D), "r4": drawn(rng, 4 * H, H), "b4": drawn(rng, 4 * H),
        "w3": drawn(rng, 3 * H, D), "r3": drawn(rng, 3 * H, H), "b3": drawn(rng, 3 * H),
        "v3": drawn(rng, H, 3 * H), "u3": drawn(rng, H, 3 * H), "none": np.float32(0),
        "pre": drawn(rng, D, D), "head": drawn(rng, H, 5), "b5": drawn(rng, 5),
        "yes": np.array(True), "far": np.array([2**63 - 1]), "i1": np.int32(1),
    }  # fmt: skip
    weights |= {f"n{i}": np.array(i) for i in (0, 1, -1)} | {"zero32": np.int32(0)}
    weights |= {f"s{i}": np.array([i]) for i in (0, 1, 4, 8, 12, 16)} | {"s44": np.array([4] * 3)}
    read = {name for node in nodes_of(model.graph) for name in node.input}
    kept = {name: x for name, x in weights.items() if name in read}
    model.graph.initializer.extend(numpy_helper.from_array(x, name) for name, x in kept.items())
    onnx.save(model, path)
    return path.read_bytes(), load(path)


def nodes_of(graph: Any) -> list[Any]:
    inner = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return [*graph.node, *(node for body in inner for node in nodes_of(body))]


ONE_STEP = """
main (float[b, t, 3] x, float[b, 4] h, float[b, 4] c) => (float[] y, float[] last, float[] kept) {
  empty = SequenceEmpty <dtype: int = 1> ()
  sizes = Shape (x)
  n = Gather (sizes, n1)
  last, kept, all = Loop (n, yes, h, c, empty) <body: graph = step
    (int64 i, bool go, float[?, 4] h0, float[?, 4] c0, seq(float) ys)
    => (bool on, float[?, 4] h1, float[?, 4] c1, seq(float) zs) {
      on = Identity (go)
      whole = Slice (x, s0, far, s0, s1)
      row = Gather <axis: int = 1> (whole, i)
      wi = Slice (w4, s0, s4, s0)
      wo = Slice (w4, s12, s16, s0)
      wf = Slice (w4, s4, s12, s0)
      w = Concat <axis: int = 0> (wi, wo, wf)
      w1 = Unsqueeze (w, s0)
      r1 = Unsqueeze (r4, s0)
      both = Concat <axis: int = 0> (b4, b4)
      b1 = Unsqueeze (both, s0)
      x1 = Unsqueeze (row, s0)
      hh = Unsqueeze (h0, s0)
      cc = Unsqueeze (c0, s0)
      unused, h2, c2 = LSTM <hidden_size: int = 4> (x1, w1, r1, b1, , hh, cc)
      h1 = Squeeze (h2, s0)
      c1 = Squeeze (c2, s0)
      zs = SequenceInsert (ys, h1)
    }>
  y = ConcatFromSequence <axis: int = 1, new_axis: int = 1> (all)
}"""

UNBOUND = """
main (float[t, b, 3] x, float[b, 4] h) => (float[] y, float[] first) {
  rows = SplitToSequence <axis: int = 0, keepdims: int = 0> (x, n1)
  n = SequenceLength (rows)
  empty = SequenceEmpty <dtype: int = 1> ()
  last, all = Loop (n, yes, h, empty) <body: graph = step
    (int64 i, bool go, float[?, 4] h0, seq(float) ys)
    => (bool on, float[?, 4] h1, seq(float) zs) {
      on = Identity (go)
      row = SequenceAt (rows, i)
      p = Gemm <transB: int = 1> (row, w3, b3)
      q = Gemm <transB: int = 1> (h0, r3, b3)
      pr, pz, pn = Split <axis: int = 1> (p, s44)
      qr, qz, qn = Split <axis: int = 1> (q, s44)
      ar = Add (pr, qr)
      r = Sigmoid (ar)
      az = Add (pz, qz)
      z = Sigmoid (az)
      rn = Mul (r, qn)
      an = Add (pn, rn)
      new = Tanh (an)
      old = Sub (h0, new)
      part = Mul (z, old)
      h1 = Add (part, new)
      single = Unsqueeze (h1, s0)
      zs = SequenceInsert (ys, single)
    }>
  y = ConcatFromSequence <axis: int = 0> (all)
  first = SequenceAt (all, n0)
}"""

TURNED = """
main (float[b, t, 3] x) => (float[] y) {
  sizes = Shape (x)
  b = Gather (sizes, s0)
  shape = Concat <axis: int = 0> (b, s4)
  zeros = ConstantOfShape (shape)
  rows = Transpose <perm: ints = [1, 0, 2]> (x)
  n = Gather (sizes, n1)
  w, r, last, all, ys = Loop (n, yes, w3, r3, zeros, rows) <body: graph = step
    (int64 i, bool go, float[12, 3] w0, float[12, 4] r0, float[?, 4] h0, float[?, ?, 3] xs0)
    => (bool on, float[12, 3] w1, float[12, 4] r1, float[?, 4] h1, float[?, ?, 3] xs1,
        float[?, 4] h2) {
      on = Identity (go)
      w1 = Identity (w0)
      r1 = Identity (r0)
      xs1 = Identity (xs0)
      row = Gather (xs0, i)
      xt = Transpose <perm: ints = [1, 0]> (row)
      pt = Gemm <beta: float = 0.0> (w0, xt, none)
      pb = Transpose <perm: ints = [1, 0]> (pt)
      p = Add (pb, b3)
      pr, pz, pn = Split <axis: int = 1> (p, s44)
      ht = Transpose <perm: ints = [1, 0]> (h0)
      q = Gemm <beta: float = 0.0> (r0, ht, none)
      tr, tz, tn = Split <axis: int = 0> (q, s44)
      qr = Transpose <perm: ints = [1, 0]> (tr)
      qz = Transpose <perm: ints = [1, 0]> (tz)
      qn = Transpose <perm: ints = [1, 0]> (tn)
      ar = Add (pr, qr)
      r2 = Sigmoid (ar)
      az = Add (pz, qz)
      z = Sigmoid (az)
      rn = Mul (r2, qn)
      an = Add (pn, rn)
      new = Tanh (an)
      old = Sub (h0, new)
      part = Mul (z, old)
      h1 = Add (part, new)
      h2 = Identity (h1)
    }>
  y = Transpose <perm: ints = [1, 0, 2]> (ys)
}"""

FLOATS = """
main (float[t, b, 3] x, float[b, 4] h, float[b, 4] c) => (float[] y, float[] last) {
  sizes = Shape (x)
  n64 = Gather (sizes, n0)
  n = Cast <to: int = 6> (n64)
  f = Cast <to: int = 1> (n)
  begins = Less (none, f)
  k, m, w, last, kept, y = Loop (, begins, zero32, n, w4, h, c) <body: graph = step
    (int64 i, bool go, int32 k0, int32 m0, float[16, 3] w0, float[?, 4] h0, float[?, 4] c0)
    => (bool on, int32 k1, int32 m1, float[16, 3] w1, float[?, 4] h1, float[?, 4] c1,
        float[?, 4] h2) {
      k1 = Add (k0, i1)
      m1 = Identity (m0)
      w1 = Identity (w0)
      row = Gather (x, k0)
      wt = Transpose <perm: ints = [1, 0]> (w0)
      rt = Transpose <perm: ints = [1, 0]> (r4)
      p = MatMul (row, wt)
      q = MatMul (h0, rt)
      pq = Add (p, q)
      a = Add (pq, b4)
      ai, af, ag, ao = Split <axis: int = 1> (a)
      si = Sigmoid (ai)
      sf = Sigmoid (af)
      tg = Tanh (ag)
      so = Sigmoid (ao)
      fc = Mul (sf, c0)
      ig = Mul (si, tg)
      c1 = Add (fc, ig)
      tc = Tanh (c1)
      h1 = Mul (so, tc)
      h2 = Identity (h1)
      fk = Cast <to: int = 1> (k1)
      fm = Cast <to: int = 1> (m0)
      on = Less (fk, fm)
    }>
}"""

GRU = """
      {p}z, {p}r, {p}n = Split <axis: int = 1> ({p}p, s44)
      {p}qz, {p}qr, {p}qn = Split <axis: int = 1> ({p}q, s44)
      {p}az = Add ({p}z, {p}qz)
      {p}sz = Sigmoid ({p}az)
      {p}ar = Add ({p}r, {p}qr)
      {p}sr = Sigmoid ({p}ar)
      {p}rn = Mul ({p}sr, {p}qn)
      {p}an = Add ({p}n, {p}rn)
      {p}t = Tanh ({p}an)
      {p}d = Sub ({p}h, {p}t)
      {p}zd = Mul ({p}sz, {p}d)
      {p}new = Add ({p}zd, {p}t)
"""

SEVERAL = (
    """
main (float[t, b, 3] x, float[b, 3] context, float[b, 4] h, float[b, 4] k)
=> (float[] y, float[] before, float[] last) {
  sizes = Shape (x)
  n = Gather (sizes, n0)
  last, other, y, before = Loop (n, yes, h, k) <body: graph = step
    (int64 i, bool go, float[?, 4] ah, float[?, 4] bh)
    => (bool on, float[?, 4] anew, float[?, 4] bnew, float[?, 5] out, float[?, 4] old) {
      on = Identity (go)
      row = Gather (x, i)
      z = MatMul (row, pre)
      positive = Relu (z)
      joined = Add (positive, context)
      ap = Gemm <transB: int = 1> (joined, w3, b3)
      aq = Gemm <transB: int = 1> (ah, r3)
"""
    + GRU.format(p="a")
    + """
      bp = MatMul (anew, v3)
      bq = MatMul (bh, u3)
"""
    + GRU.format(p="b")
    + """
      out = Gemm (bnew, head, b5)
      old = Identity (ah)
    }>
}"""
)


def feeds_of(model: Any, b: int, t: int) -> dict[str, Any]:
    rng, sizes = np.random.default_rng(b + t), {"b": b, "t": t}
    return {
        value.name: drawn(rng, *(d if isinstance(d, int) else sizes[str(d)] for d in value.shape))
        for value in model.graph.inputs
    }


@pytest.mark.parametrize(
    ("graph", "wanted"),
    [
        (ONE_STEP, {"LSTM": 1}),
        (UNBOUND, {"GRU": 1}),
        (TURNED, {"GRU": 1}),
        (FLOATS, {"LSTM": 1}),
        (SEVERAL, {"GRU": 2}),
    ],
)
def test_the_loop_is_gone(graph: str, wanted: dict[str, int], tmp_path: Any) -> None:
    file, model = model_of(graph, tmp_path / "loop.onnx")
    best = optimize(model, verify=True)
    found = count_operators(best.model)
    assert {k: found.get(k, 0) for k in wanted} == wanted and "Loop" not in found, best.report
    assert not [name for name in found if "Sequence" in name]
    for b, t in SIZES:
        feeds = feeds_of(model, b, t)
        for old, new in zip(run_plain(file, feeds), run_plain(best.model, feeds), strict=True):
            assert old.shape == new.shape
            np.testing.assert_allclose(new, old, rtol=1e-5, atol=2e-6)
    for new in run_plain(best.model, feeds_of(model, 2, 0)) if graph is not UNBOUND else ():
        assert new.size == 0 or new.shape == (2, 4)  # all of no steps, or what they begin with


def test_sizes_with_other_names_broadcast_as_in_the_loop(tmp_path: Any) -> None:
    graph = UNBOUND.replace("float[b, 4] h", "float[one, 4] h").replace(", float[] first", "")
    graph = graph.replace("first = SequenceAt (all, n0)", "")
    file, model = model_of(graph, tmp_path / "loop.onnx")
    best = optimize(model).model
    assert count_operators(best)["GRU"] == 1
    rng = np.random.default_rng(0)
    for one in (3, 1):
        feeds = {"x": drawn(rng, 5, 3, D), "h": drawn(rng, one, H)}
        for old, new in zip(run_plain(file, feeds), run_plain(best, feeds), strict=True):
            np.testing.assert_allclose(new, old, rtol=1e-5, atol=2e-6)


ALL_C = FLOATS.replace("h2 = Identity (h1)", "h2 = Identity (c1)")
RNN = UNBOUND.replace(
    "h1 = Add (part, new)", "aq = Add (p, q)\n cut = Slice (aq, s0, s4, s1)\n h1 = Tanh (cut)"
)
POSITION = (
    UNBOUND.replace("pn = Split", "pm = Split")
    .replace("pr, pz, pm", "pr, pz, p2")
    .replace("      qr,", "      f = Cast <to: int = 1> (i)\n      pn = Add (p2, f)\n      qr,")
)
MASKED = UNBOUND.replace(
    "h1 = Add (part, new)",
    "next = Add (part, new)\n keep = Greater (row, none)\n one = Slice (keep, s0, s1, s1)\n"
    " h1 = Where (one, next, h0)",
)
OTHER = UNBOUND.replace("z = Sigmoid (az)", "z = Tanh (az)")
DATA = FLOATS.replace("(, begins", "(n64, begins").replace(
    "on = Less (fk, fm)", "most = ReduceMax <keepdims: int = 0> (h1)\n on = Less (most, fm)"
)


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (ALL_C, "all c are used, and LSTM gives the last one only"),
        (RNN, "onnxruntime's RNN has an absolute error of 6e-8"),
        (MASKED, "keeps its state by a mask"),
        (OTHER, "is neither LSTM's nor GRU's formula"),
        (POSITION, "is neither LSTM's nor GRU's formula"),
        (DATA, "not known to be those over all rows"),
    ],
)
def test_a_loop_that_stays_says_why(graph: str, reason: str, tmp_path: Any) -> None:
    file, model = model_of(graph, tmp_path / "loop.onnx")
    best = optimize(model)
    assert count_operators(best.model)["Loop"] == 1
    [sites] = [p.sites for p in best.report.passes if p.name == "fuse_recurrent"]
    assert [reason in site.reason for site in sites] == [True], sites
    feeds = feeds_of(model, 2, 5)
    for old, new in zip(run_plain(file, feeds), run_plain(best.model, feeds), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=2e-6)


GROWING = """
main (float[n, 3] x) => (float[] y) {
  empty = SequenceEmpty <dtype: int = 1> ()
  sizes = Shape (x)
  n = Gather (sizes, n0)
  all = Loop (n, yes, empty) <body: graph = step
    (int64 i, bool go, seq(float) ys) => (bool on, seq(float) zs) {
      on = Identity (go)
      i0 = Unsqueeze (i, s0)
      end = Add (i0, s1)
      part = Slice (x, s0, end, s0)
      zs = SequenceInsert (ys, part)
    }>
  y = ConcatFromSequence <axis: int = 0> (all)
}"""


def test_parts_of_several_lengths_are_not_stacked(tmp_path: Any) -> None:
    file, model = model_of(GROWING, tmp_path / "loop.onnx")
    best = optimize(model, verify=True).model
    assert count_operators(best)["ConcatFromSequence"] == 1
    x = {"x": drawn(np.random.default_rng(1), 4, 3)}
    [old], [new] = run_plain(file, x), run_plain(best, x)
    np.testing.assert_array_equal(new, old)


def test_a_state_that_no_step_changes_may_be_stacked(tmp_path: Any) -> None:
    """Then it stays a state: what is stacked has to be a value of the body."""
    graph = FLOATS.replace("float[?, 4] h2)", "float[16, 3] w0)").replace("h2 = Identity (h1)", "")
    file, model = model_of(graph, tmp_path / "loop.onnx")
    best = optimize(model, verify=True).model
    feeds = feeds_of(model, 2, 5)
    for old, new in zip(run_plain(file, feeds), run_plain(best, feeds), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=2e-6)
