"""Reading any ONNX file, writing only legal ones, and never half a file."""

import errno
import hashlib
import mmap
import os
import resource
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper, parser
from small_models import ROUNDING

import graphgen as gg
from graphgen import nn
from graphgen.errors import GraphgenError, GraphgenWarning
from graphgen.export.artifact_files import parse_artifact
from graphgen.export.functions import _describe_call
from graphgen.export.opset import keeps_meaning
from graphgen.export.read import load
from graphgen.export.write import export, to_bytes
from graphgen.graph import count_operators
from graphgen.infer import describe
from graphgen.laboratory.text import short_text
from graphgen.measure.reference import evaluate
from graphgen.runtime import Session
from graphgen.targets import newest_opset

RUNTIME = tuple(int(part) for part in version("onnxruntime").split(".")[:2])


class Model(nn.Module):
    """A decoder with the loss inside: composites, dropout, and both of our own operators."""

    def __init__(self, n=17, d=8):
        self.embedding = nn.Embedding(n, d)
        self.stack = nn.Encoder(d, layers=1, num_heads=2, causal=True, dropout=0.1)

    def __call__(self, ids, labels):
        logits = self.embedding.logits(self.stack(self.embedding(ids)))
        return {"loss": gg.ops.cross_entropy(logits, labels), "logits": logits}


def build(**options):
    spec = gg.int64["batch", "seq"]
    return gg.build(Model(), ids=spec, labels=spec, seed=0, **options)


def feeds(model):
    ids = np.random.default_rng(0).integers(0, 17, (2, 5))
    labels = np.where(ids > 13, -100, ids)
    all_ = {"ids": ids, "labels": labels, "seed": np.array(3), "step": np.array(4)}
    return {value.name: all_[value.name] for value in model.graph.inputs}


def linear(size=64):
    return gg.build(nn.Linear(size, size), x=gg.float32["batch", size])


def write(path, text):
    proto = parser.parse_model(text)
    onnx.save(proto, path)
    return path


HEADER = '<ir_version: 10, opset_import: ["": 23]>'


def relative_rms(x, reference):
    return np.sqrt(np.mean((x - reference) ** 2) / np.mean(reference**2))


@pytest.mark.skipif(RUNTIME < (1, 23), reason="has no Attention, nor Mul of uint32 for dropout")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("primitives", [False, True])
def test_runs_as_the_reference_says_and_reads_back_equal(tmp_path, primitives, training):
    model = build(primitives=primitives, training=training)
    path = export(model, tmp_path / "m.onnx")
    again = load(path)
    assert short_text(again) == short_text(model)
    assert again.metadata_props == model.metadata_props
    assert [v.name for v in again.graph.inputs] == [v.name for v in model.graph.inputs]
    results = Session(path, optimize=False)(**feeds(model))
    for result, reference in zip(results, evaluate(model, feeds(model)), strict=True):
        assert relative_rms(result, reference) < ROUNDING
    assert export(again, tmp_path / "again.onnx").read_bytes() == path.read_bytes()


def test_own_operators_travel_as_functions(tmp_path):
    names = [f.name for f in onnx.load(export(build(training=True), tmp_path / "m")).functions]
    assert names == ["Dropout", "CrossEntropy"]  # all dropouts share a body


def test_a_function_for_each_body():
    def twice(x, y, labels):
        losses = [gg.ops.cross_entropy(x, labels), gg.ops.cross_entropy(x, labels, ignore_index=0)]
        return (*losses, gg.ops.cross_entropy(x, labels, ignore_index=0) + y)

    spec = gg.float32["n", 4]
    model = gg.build(twice, x=spec, y=gg.float32[()], labels=gg.int64["n"])
    data = to_bytes(model)
    assert [f.name for f in onnx.load_from_string(data).functions] == [
        "CrossEntropy",
        "CrossEntropy_2",
    ]
    x, labels = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32), np.array([0, 1, 2])
    given = {"x": x, "y": np.float32(1), "labels": labels}
    results = Session(data, optimize=False)(**given)
    assert np.allclose(results, evaluate(model, given), rtol=1e-6)
    assert results[0] != results[1]


def test_bodies_differ_by_which_sizes_are_equal():
    def call(*shapes):
        values = [
            ir.Value(type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(s)) for s in shapes
        ]
        return _describe_call(ir.Node("graphgen", "MeanSquaredError", values))

    assert call(["a", "b"], ["a", 4]) == call(["m", "n"], ["m", 4])
    assert call(["a", "b"], ["a", 4]) != call(["a", "b"], ["b", 4])
    assert call(["a", "b"], ["a", 4]) != call(["a", "b"], ["a", 5])


def test_the_operator_keeps_its_name_when_read(tmp_path):
    again = load(export(build(training=True), tmp_path / "m.onnx"))
    assert not again.functions
    assert count_operators(again)["graphgen::CrossEntropy"] == 1


@pytest.mark.parametrize(
    ("body", "opset", "ir_version"),
    [
        ("y = Add(x, x)", 13, 7),
        ("y = ReduceMean <keepdims = 1> (x)", 13, 7),
        ("a = Constant <value_ints = [-1]> ()\n y = ReduceMean(x, a)", 18, 8),
        ("y = Reshape <allowzero = 1> (x, s)", 14, 7),
        ("y = Gelu(x)", 20, 9),
        ("y = RMSNormalization(x, x)", 23, 11),
        ('y = If(c) <then_branch = t() => (float[4] a) { a = Gelu(x) }, else_branch = e() => '
         "(float[4] b) { b = Relu(x) }>", 20, 9),
    ],
)  # fmt: skip
def test_stamps_the_lowest_versions(tmp_path, body, opset, ir_version):
    text = HEADER + "g (float[4] x, int64[1] s, bool c) => (float[] y) {" + body + "}"
    text = text.replace("x, x)", "x, w)").replace("y) {", "y) <float[4] w = {1, 2, 3, 4}> {")
    proto = onnx.load(export(load(write(tmp_path / "a.onnx", text)), tmp_path / "b.onnx"))
    assert (proto.opset_import[0].version, proto.ir_version) == (opset, ir_version)


def test_stamps_by_dtype(tmp_path):
    text = HEADER + "g (bfloat16[4] x) => (bfloat16[4] y) { y = Sin(x) }"
    proto = onnx.load(export(load(write(tmp_path / "a.onnx", text)), tmp_path / "b.onnx"))
    assert proto.opset_import[0].version == 22  # Sin has bfloat16 since then


@pytest.mark.parametrize(
    ("node", "old", "new", "kept"),
    [
        (("Softmax", 1, {}), 13, 23, True),
        (("DFT", 1, {}), 20, 17, False),  # the axis was an attribute with another default
        (("GridSample", 2, {}), 20, 16, False),  # "linear" was called "bilinear"
        (("GridSample", 2, {"mode": "cubic"}), 20, 16, False),
        (("GridSample", 2, {"mode": "nearest"}), 20, 16, True),
        (("Split", 1, {}), 13, 18, False),
        (("Split", 2, {}), 13, 18, True),
        (("ScatterND", 3, {"reduction": "max"}), 18, 16, False),
        (("ScatterND", 3, {"reduction": "add"}), 18, 16, True),
        (("GroupNormalization", 3, {"num_groups": 2}), 18, 21, False),
        # The older kernel says "padding values must be non-negative".
        (
            ("AveragePool", 1, {"kernel_shape": [3], "strides": [4], "auto_pad": "SAME_LOWER"}),
            22,
            18,
            False,
        ),
        (
            ("AveragePool", 1, {"kernel_shape": [4], "strides": [4], "auto_pad": "SAME_UPPER"}),
            22,
            18,
            True,
        ),
        (("Reshape", 2, {}), 23, 13, True),
        (("Reshape", 2, {"allowzero": 1}), 23, 13, False),
        (("SimplifiedLayerNormalization", 2, {}), 23, 13, True),
        (("Mod", 2, {}), 28, 27, False),  # of floats, only fmod was allowed
        (("Mod", 2, {"fmod": 1}), 28, 13, True),
    ],
)
def test_meaning_across_versions(node, old, new, kept):
    if old > (newest := onnx.defs.onnx_opset_version()):
        pytest.skip(f"onnx {onnx.__version__} has no opset {old}: its newest is {newest}")
    op_type, count, attributes = node
    values = [ir.Value(type=ir.TensorType(ir.DataType.FLOAT)) for _ in range(count)]
    if op_type in ("Split", "ScatterND", "Reshape") and count > 1:
        values[1].type = ir.TensorType(ir.DataType.INT64)
    made = ir.node(op_type, values, attributes)
    made.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    assert keeps_meaning(made, old, new) is kept


def test_what_a_file_declares_of_its_outputs_is_kept_but_nothing_follows_from_it(tmp_path):
    """The runtime only warns of other sizes. It infers from them what reads such an output."""
    text = """<ir_version: 8, opset_import: ["": 17]>
        g (float[n,2] x, int64[2] s) => (float[4,1] y, float[4,1] r, float[b,w] z, float[n,7] c)
        { q = Reshape (x, s)  k = Shape (q)  y = Neg (q)  r = Identity (q)
        e = Exp (q)  z = Reshape (e, k)  c = Neg (x) }"""
    path = write(tmp_path / "a.onnx", text)
    again = export(gg.optimize(load(path)), tmp_path / "b.onnx")
    old, new = (ort.InferenceSession(file) for file in (path, again))
    assert [y.shape for y in new.get_outputs()] == [[4, 1], [None, None], ["b", "w"], ["n", 2]]
    for sizes in ([4, 1], [1, 4], [2, -1]):
        feeds = {"x": np.ones((2, 2), np.float32), "s": np.array(sizes)}
        for a, b in zip(old.run(None, feeds), new.run(None, feeds), strict=True):
            assert np.array_equal(a, b)


def test_a_file_without_the_standard_domain_s_version_is_of_the_newest(tmp_path):
    """So the runtime reads it; the attribute axes of Unsqueeze became an operand in opset 13."""
    text = "g (float[n] x, int64[1] axis) => (float[m, k] y) { y = Unsqueeze(x, axis) }"
    proto = parser.parse_model(HEADER + text)
    proto.opset_import[0].domain = "mine"
    onnx.save(proto, tmp_path / "none.onnx")
    out = export(gg.optimize(load(tmp_path / "none.onnx")), tmp_path / "out.onnx")
    (y,) = Session(out)(x=np.ones(2, "f4"), axis=np.array([0]))
    assert y.shape == (1, 2)


def test_an_input_that_is_an_output_too_is_what_the_input_declares(tmp_path):
    """onnx_ir would give it the output's type, and the file would take other arrays."""
    text = "g (float[n] x, int64[m] ids) => (float[n] y) { y = Abs(x) }"
    path = write(tmp_path / "both.onnx", HEADER + text)
    proto = onnx.load(path)
    proto.graph.output.append(helper.make_tensor_value_info("ids", TensorProto.FLOAT, ["k", 2]))
    onnx.save(proto, path)
    out = export(gg.optimize(load(path)), tmp_path / "out.onnx")
    ids = np.arange(3)
    assert Session(out).inputs["ids"].dtype == np.int64
    np.testing.assert_array_equal(Session(out)(x=np.ones(2, "f4"), ids=ids)[1], ids)


def test_an_input_of_a_body_that_is_an_output_too_is_what_the_loop_gives(tmp_path):
    """With the output's sizes the loop gave int64[3, 1], with its dtype it was refused."""
    path = write(
        tmp_path / "both.onnx",
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[n] x, int64 t, bool c) => (float[n] y, int64[t] counts) {
            y, counts = Loop <body = b (int64 i, bool go, float[n] s) => (bool go, float[n] s2,
                float[4] i) { s2 = Abs (s) }> (t, c, x)
        }""",
    )
    model = gg.optimize(load(path))
    feeds = {"x": np.ones(2, "f4"), "t": np.array(3), "c": np.array(True)}
    wanted = ort.InferenceSession(path).run(None, feeds)
    for a, b in zip(Session(export(model, tmp_path / "out.onnx"))(**feeds), wanted, strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b) and a.shape == b.shape


def test_an_input_of_an_artifact_that_is_an_output_too_is_what_the_input_declares(tmp_path):
    text = HEADER + "g (int64[m] ids) => (float[k, 2] ids) { y = Abs(ids) }"
    data = parser.parse_model(text).SerializeToString()
    [ids] = parse_artifact(tmp_path / "model.onnx", data).graph.outputs
    assert describe(ids) == "int64[m]"


def test_what_a_file_declares_of_a_rank_that_inference_does_not_know_is_kept(tmp_path):
    """Of trees, and of a reshape to a given shape: the checker refuses outputs without a rank."""
    text = """<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 1]>
        g (float[n,2] x, int64[s] sizes) => (float[n,3] y, float[a,b] z) {
        y = ai.onnx.ml.LinearRegressor <coefficients: floats = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            targets: int = 3> (x)
        z = Reshape (x, sizes) }"""
    path = export(gg.optimize(load(write(tmp_path / "a.onnx", text))), tmp_path / "b.onnx")
    onnx.checker.check_model(path)
    session = ort.InferenceSession(path)
    assert [y.shape for y in session.get_outputs()] == [["n", 3], ["a", "b"]]
    feeds = {"x": np.ones((2, 2), np.float32), "sizes": np.array([4])}  # another rank is given
    y, z = session.run(None, feeds)
    assert y.tolist() == [[3, 7, 11]] * 2 and z.tolist() == [1, 1, 1, 1]


def test_the_spectrum_of_one_side_stays_one_for_the_inference_of_onnx(tmp_path):
    """The default of onesided is 1. Inference in onnx takes it to be 0 where it is not written."""
    text = """<ir_version: 8, opset_import: ["": 18]> g (float[n,32,1] x) => (float[n,4,3] y) {
        step = Constant <value = int64 {8}> ()
        window = Constant <value = float[8] {1, 1, 1, 1, 1, 1, 1, 1}> ()
        size = Constant <value = int64 {8}> ()
        bands = Constant <value = float[5,3] {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}> ()
        axes = Constant <value = int64[1] {3}> ()
        f = STFT <onesided: int = 1> (x, step, window, size)
        p = ReduceL2 <keepdims: int = 0> (f, axes)  y = MatMul (p, bands) }"""
    path = write(tmp_path / "a.onnx", text)
    again = export(gg.optimize(load(path)), tmp_path / "b.onnx")
    feeds = {"x": np.random.default_rng(0).normal(size=(2, 32, 1)).astype(np.float32)}
    [old], [new] = (ort.InferenceSession(file).run(None, feeds) for file in (path, again))
    assert np.allclose(old, new, rtol=1e-6)


def test_what_a_file_declares_against_the_inference_of_onnx_is_left_out(tmp_path):
    """ONNX's gives a size of 8 there, ours none: the runtime gives less for some kernels."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[1,1,4] x) => (float[1,1,9] y) {
        w = Constant <value = float[1,1,2] {1, 2}> ()
        y = ConvTranspose <strides = [2], auto_pad = "SAME_UPPER"> (x, w) }"""
    path = export(load(write(tmp_path / "a.onnx", text)), tmp_path / "b.onnx")
    assert ort.InferenceSession(path).get_outputs()[0].shape != [1, 1, 9]


def test_a_size_that_onnx_infers_unlike_the_runtime_is_not_written(tmp_path):
    """Of the slice x[0:far:-1] the runtime gives one element, and ONNX's inference none."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[3] x) => (float[] y)
        <int64[1] start = {0}, int64[1] end = {9223372036854775807}, int64[1] step = {-1}>
        { y = Slice (x, start, end, start, step) }"""
    path = write(tmp_path / "a.onnx", text)
    x = np.arange(3, dtype=np.float32)
    files = [path, export(load(path), tmp_path / "b.onnx")]
    assert onnx.load(files[1]).opset_import[0].version == 13  # for which old runtimes are enough
    runs = [ort.InferenceSession(file).run(None, {"x": x})[0] for file in files]
    assert np.array_equal(*runs)


def test_what_is_empty_in_a_body_is_left_out(tmp_path):
    """There, ONNX does not see that a constant from outside is empty: scales and sizes clash."""
    text = """<ir_version: 8, opset_import: ["": 11]> g (int64 k, float[1,1,2,n] x) => (float[] y) {
        c = Constant <value = bool {1}> ()
        y = Loop (k, c) <body = b (int64 i, bool d) => (bool e, float[] z)
            <float[0] none = {}, int64[4] sizes = {1, 1, 4, 3}> {
            e = Identity (d) z = Resize <mode = "nearest"> (x, none, none, sizes) }> }"""
    path = write(tmp_path / "a.onnx", text)
    feeds = {"k": np.array(2), "x": np.arange(6, dtype=np.float32).reshape(1, 1, 2, 3)}
    files = [path, export(load(path), tmp_path / "b.onnx")]
    runs = [ort.InferenceSession(file).run(None, feeds)[0] for file in files]
    assert np.array_equal(*runs)


@pytest.mark.skipif(newest_opset() < 22, reason="the runtime reads opsets up to 21")
def test_sizes_of_unknown_number_in_a_body_are_no_reason_to_refuse_it(tmp_path):
    """ONNX takes how many sizes there are for 0 where it cannot infer it, as in Mask R-CNN."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (int64 k, float[1,1,2,n] x) => (float[] y) {
        c = Constant <value = bool {1}> ()
        y = Loop (k, c) <body = b (int64 i, bool d) => (bool e, float[] z) {
            e = Identity (d) zero = Constant <value = int64[1] {0}> ()
            i1 = Unsqueeze (i, zero) one = Constant <value = int64[3] {1, 1, 4}> ()
            three = Constant <value_ints = [3]> () w = Add (i1, three)
            sizes = Concat <axis = 0> (one, w) z = Resize <mode = "nearest"> (x, , , sizes) }> }"""
    path = write(tmp_path / "a.onnx", text)
    feeds = {"k": np.array(1), "x": np.arange(6, dtype=np.float32).reshape(1, 1, 2, 3)}
    files = [path, export(gg.optimize(load(path)).model, tmp_path / "b.onnx")]
    runs = [ort.InferenceSession(file).run(None, feeds)[0] for file in files]
    assert runs[0].shape == (1, 1, 1, 4, 3) and np.array_equal(*runs)


@pytest.mark.skipif(newest_opset() < 22, reason="the runtime reads opsets up to 21")
def test_a_pool_whose_sizes_an_older_opset_infers_otherwise_keeps_its_opset(tmp_path):
    """The last window of three would begin behind the image: there are two, at every opset."""
    text = '<ir_version: 8, opset_import: ["": {}]> g (float[1,1,{}] x) => (y) {{'
    text += "y = MaxPool <kernel_shape = [1], strides = [2], ceil_mode = 1> (x) }}"
    for opset, size, stamped in ((22, "4", 22), (13, "4", 22), (22, "n", 13)):
        path = write(tmp_path / "a.onnx", text.format(opset, size))
        proto = onnx.load(export(load(path), tmp_path / "b.onnx"))
        assert proto.opset_import[0].version == stamped
        session = ort.InferenceSession(proto.SerializeToString())
        x = np.arange(4, dtype=np.float32).reshape(1, 1, 4)
        assert np.array_equal(session.run(None, {"x": x})[0], [[[0, 2]]])


OLD = {
    9: """<ir_version: 3, opset_import: ["": 9]> g (float[2,3] x, float[3,4] w) => (float[] y)
          <float[3,4] w = {1,2,3,4,5,6,7,8,9,1,2,3}> {
          h = MatMul(x, w)  u = Unsqueeze <axes = [0]> (h)  p = Softmax <axis = 1> (u)
          m = ReduceSum <axes = [2], keepdims = 0> (u)  s = Squeeze <axes = [0]> (p)
          y = Add(s, m_t)  m_t = Transpose <perm = [1, 0]> (m) }""",
    13: """<ir_version: 7, opset_import: ["": 13]> g (float[2,4] x) => (float[] y) {
          a, b = Split <axis = 1> (x)  c = ReduceMean <axes = [-1]> (a)  y = Mul(b, c) }""",
    17: """<ir_version: 8, opset_import: ["": 17, "ai.onnx": 17]> g (float[2,4] x) => (float[] y) {
          c = ReduceMax <axes = [1], keepdims = 0> (x)  y = ai.onnx.Abs(c) }""",
    19: """<ir_version: 9, opset_import: ["": 19]> g (float[1,2,3,3] x, float[1,2,2,2] grid) =>
          (float[] y) { y = GridSample <mode = "bilinear"> (x, grid) }""",
}


@pytest.mark.parametrize("opset", OLD)
def test_old_files_are_raised_and_mean_the_same(tmp_path, opset):
    path = write(tmp_path / "old.onnx", OLD[opset])
    if opset == 9:  # the runtime wants nodes in order, we do not
        proto = onnx.load(path)
        proto.graph.node.insert(5, proto.graph.node.pop(6))
        onnx.save(proto, tmp_path / "sorted.onnx")
    model = load(path)
    assert model.graph.opset_imports == {"": 23}
    assert "bilinear" not in short_text(model)
    assert "w" not in [value.name for value in model.graph.inputs]
    rng = np.random.default_rng(0)
    given = {
        value.name: rng.uniform(-1, 1, [int(d) for d in value.shape]).astype(np.float32)
        for value in model.graph.inputs
    }
    source = tmp_path / "sorted.onnx" if opset == 9 else path
    (before,) = Session(source, optimize=False)(given)
    (after,) = Session(export(model, tmp_path / "new.onnx"), optimize=False)(given)
    assert np.array_equal(before, after)


SUM = {
    11: "r = ReduceSum <axes = [1], keepdims = 0> (h) u = Unsqueeze <axes = [1]> (r)",
    13: "r = ReduceSum <keepdims = 0> (h, one) u = Unsqueeze (r, one)",
}
STEP = "h = Softmax <axis = 1> (s) {sum} t = Add(u, s)"
OPERATORS = [  # with the opsets at which it is written so; {sum} sums over axis 1 and keeps it
    ("y = Softmax <axis = 1> (x)", "11 12 13"),
    ("y = LogSoftmax (x)", "11 12 13"),
    ("u = Unsqueeze <axes = [0, 2]> (x) y = Squeeze <axes = [0, 2]> (u)", "11 12"),
    ("u = Unsqueeze (x, axes) y = Squeeze (u, axes)", "13"),
    ("h = Identity(x) {sum} y = Identity(u)", "11 12 13"),
    ("a, b = Split <axis = 2, split = [1, 3]> (x) y = Concat <axis = 2> (b, a)", "11 12"),
    ("a = ReduceMax <axes = [-1]> (x) b = ReduceL2 <axes = [-1]> (x) y = Add(a, b)", "11 12 13"),
    ("y, m = Dropout <ratio = 0.5> (x)", "11"),
    ("y = Clip(x, low, high)", "11 12 13"),
    ("y = BatchNormalization(x, s, s, s, s)", "11 12 13"),
    ('f = Unsqueeze <axes = [0]> (x) r = Resize <mode = "nearest"> (f, zeros, scales) '
     "y = Squeeze <axes = [0]> (r)", "11 12"),
    ("y = If(c) <then_branch = t() => (float[a, 3, 4] p) { p = Softmax <axis = 1> (x) }, "
     "else_branch = e() => (float[a, 3, 4] q) { q = LogSoftmax <axis = 1> (x) }>", "11 12 13"),
    ("y = Loop(n, c, x) <body = l(int64 i, bool go, float[a, 3, 4] s) => (bool on, float[a, 3, 4] "
     "t) { on = Identity(go) " + STEP + " }>", "11 12 13"),
    ("y = Loop(n, c, x) <body = l(int64 i, bool go, float[a, 3, 4] s) => (bool on, float[a, 3, 4] "
     "v) { on = Identity(go) v = If(go) <then_branch = b() => (float[a, 3, 4] t) {" + STEP
     + "}, else_branch = e() => (float[a, 3, 4] q) { q = Relu(s) }> }>", "11 12 13"),
    ("last, y = Scan <num_scan_inputs = 1, body = b(float[3, 4] s, float[3, 4] e) => "
     "(float[3, 4] t, float[3, 4] o) { h = Softmax <axis = 0> (e) t = Add(h, s) o = Neg(t) }> "
     "(start, x)", "11 12 13"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("opset", "body"), [(int(n), body) for body, opsets in OPERATORS for n in opsets.split()]
)
def test_operators_of_old_opsets(tmp_path, opset, body):
    """What onnx converts, in subgraphs too, gives the same numbers."""
    body = body.replace("{sum}", SUM[13 if opset == 13 else 11])
    text = f"""<ir_version: 7, opset_import: ["": {opset}]>
        g (float[a, 3, 4] x, int64 n, bool c) => (float[d0, d1, d2] y)
        <int64[1] one = {{1}}, int64[2] axes = {{0, 2}}, float low = {{-0.5}}, float high = {{0.5}},
        float[3] s = {{1, 2, 3}}, float[4] scales = {{1, 1, 2, 2}},
        float[8] zeros = {{0, 0, 0, 0, 0, 0, 0, 0}}, float[3, 4] start =
        {{1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}}> {{ {body} }}"""
    path = write(tmp_path / "old.onnx", text)
    new = export(load(path), tmp_path / "new.onnx")
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    for n, c in ((0, True), (2, False), (3, True)):
        given = {"x": x, "n": np.array(n), "c": np.array(c)}
        (before,), (after,) = (Session(p, optimize=False)(given) for p in (path, new))
        assert np.allclose(before, after, rtol=1e-6, atol=1e-6) and before.shape == after.shape


@pytest.mark.parametrize(
    ("opset", "body"),
    [
        (11, "y = Hardmax (x)"),
        (7, "h = Hardmax <axis = 2> (x) y = Softmax (h)"),
        (18, "y = GroupNormalization <num_groups = 2, epsilon = 0.1> (x, s, t)"),
        (7, "y, m, v, n, w = BatchNormalization <spatial = 1> (x, r, r, m0, v0)"),
        (9, "y, m, v, n, w = BatchNormalization <epsilon = 0.1> (x, r, r, m0, v0)"),
        (7, "y = BatchNormalization (x, r, r, m0, v0)"),
        (8, "y = BatchNormalization <epsilon = 0.1> (x, r, r, m0, v0)"),
    ],
)
def test_what_onnx_would_convert_wrongly_is_written_anew(tmp_path, opset, body):
    text = f"""<ir_version: 8, opset_import: ["": {opset}]> g
        (float[a, 4, 3] x, float[2] s, float[2] t) => (float[a, 4, 3] y)
        <float[4] r = {{1, 2, 3, 4}}, float[4] m0 = {{0, 1, 2, 3}}, float[4] v0 = {{4, 3, 2, 1}}>
        {{ {body} }}"""
    path = write(tmp_path / "old.onnx", text)
    new = export(load(path), tmp_path / "new.onnx")
    for a in (2, 1):
        x = np.random.default_rng(0).standard_normal((a, 4, 3)).astype(np.float32)
        given = {"x": x, "s": np.array([1, 2], "f4"), "t": np.array([3, 4], "f4")}
        (before,), (after,) = (Session(p, optimize=False)(given) for p in (path, new))
        assert np.allclose(before, after, rtol=1e-6, atol=1e-6) and before.shape == after.shape


@pytest.mark.parametrize(
    ("opset", "body"),
    [
        (7, 'y = Upsample <mode = "linear", scales = [1.0, 1.0, 2.0, 1.5]> (x)'),
        (9, 'y = Upsample <mode = "linear"> (x, up)'),
        (9, "y = Upsample (x, up)"),
        (10, 'y = Resize <mode = "linear"> (x, s)'),
        (10, "y = Resize (x, s)"),
    ],
)
def test_images_are_resized_as_before_opset_11(tmp_path, opset, body):
    """From a pixel's corner: onnx's converter would write half pixels, or round elsewhere."""
    text = f"""<ir_version: 8, opset_import: ["": {opset}]>
        g (float[1, 1, 4, 9] x, float[4] s) => (float[1, 1, b, c] y)
        <float[4] up = {{1, 1, 1.7, 2.3}}> {{ {body} }}"""
    path = write(tmp_path / "old.onnx", text)
    new = export(load(path), tmp_path / "new.onnx")
    x = np.random.default_rng(0).standard_normal((1, 1, 4, 9)).astype(np.float32)
    for scales in ([1, 1, 1.7, 0.4], [1, 1, 0.5, 0.75]):
        given = {"x": x, "s": np.array(scales, np.float32)}
        (before,), (after,) = (Session(p, optimize=False)(given) for p in (path, new))
        assert np.allclose(before, after, rtol=1e-6, atol=1e-6) and before.shape == after.shape


def is_mapped(tensor):
    """Whether a tensor's content still lies in its file."""
    owner = tensor.numpy()
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return isinstance(getattr(owner, "obj", owner), mmap.mmap)


def test_a_weight_is_not_read_to_raise_the_opset(tmp_path):
    weight = numpy_helper.from_array(np.zeros((64, 64), np.float32), "w")
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["b", 64]) for n in "xy")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Softmax", ["h"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "g", [x], [y], [weight])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=6)
    onnx.save(
        proto, tmp_path / "m.onnx", save_as_external_data=True, location="w", size_threshold=0
    )
    onnx.save(proto, tmp_path / "inside.onnx")
    for name in ("m.onnx", "inside.onnx"):
        model = load(tmp_path / name)
        assert is_mapped(model.graph.initializers["w"].const_value)
        assert [v.name for v in model.graph.inputs] == ["x"]


def test_constants_are_initializers_and_overridable_ones_inputs(tmp_path):
    text = (
        HEADER
        + """g (float[2] x, float[2] w) => (float[2] y, float[2] z, float[2] x)
        <float[2] w = {1, 2}> { z = Constant <value_floats = [3.0, 4.0]> ()
        h = Mul(x, z)  y = Add(h, w) }"""
    )
    model = load(write(tmp_path / "a.onnx", text))
    assert count_operators(model) == {"Add": 1, "Identity": 1, "Mul": 1}
    assert [v.name for v in model.graph.inputs] == ["x", "w"]
    assert [v.name for v in model.graph.outputs] == ["y", "z", "x"]
    session = Session(export(model, tmp_path / "b.onnx"))
    x = np.ones(2, np.float32)
    assert session(x=x)[0].tolist() == [4, 6] and session(x=x, w=x)[0].tolist() == [4, 5]


def test_foreign_functions_are_inlined_and_unknown_operators_stay(tmp_path):
    text = """<ir_version: 9, opset_import: ["": 18, "mine": 1, "theirs": 2]>
        g (float[N, 4] x) => (float[N, 4] y) { h = mine.Double(x)  a, b = theirs.Odd <k = 1> (h)
        s = Softmax <axis = 1> (a)  c = Concat <axis = 0> (a, s)
        n = LayerNormalization(b, x)  y = Add(c, n) }
        <domain: "mine", opset_import: ["": 18]> Double (x) => (y) { y = Add(x, x) }"""
    model = load(write(tmp_path / "a.onnx", text))
    assert count_operators(model)["theirs::Odd"] == 1 and "mine::Double" not in count_operators(
        model
    )
    again = load(export(model, tmp_path / "b.onnx"))
    assert short_text(again) == short_text(model)
    assert "theirs" in again.graph.opset_imports


def test_functions_that_nothing_calls_are_left_out(tmp_path):
    file = onnx.parser.parse_model(HEADER + "g (float[n] x) => (float[n] y) { y = Relu(x) }")
    for name in ("Other", ""):  # no checker takes the second
        node = onnx.helper.make_node("Neg", ["a"], ["b"])
        function = onnx.helper.make_function("mine", name, ["a"], ["b"], [node], file.opset_import)
        file.functions.append(function)
    path = tmp_path / "a.onnx"
    path.write_bytes(file.SerializeToString())
    assert not load(path).functions and again(path, tmp_path).exists()


@pytest.mark.parametrize(
    "call, domain, named",
    [
        ("Relu(x)", "", "Relu"),
        ("Relu(x)", "ai.onnx", "Relu"),
        ("Normalizer(x)", "ai.onnx.ml", "Normalizer"),
        ("QuickGelu(x)", "com.microsoft", "QuickGelu"),
        ("Trilu(x)", "com.microsoft", "Trilu"),  # has a kernel and no operator in the table
        ("Relu(x)", "com.microsoft", "Relu"),  # is only the name of one in another domain
        ("Adam(x)", "ai.onnx.preview.training", "Adam"),  # an operator of ONNX, not of the runtime
        ("Outer(x)", "mine", "Relu"),
    ],
)
def test_a_function_is_run_only_where_the_runtime_has_no_operator_of_its_name(
    tmp_path, call, domain, named
):
    of = {"mine": ""}.get(domain, domain)
    text = f"""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1, "mine": 1,
            "ai.onnx.ml": 5, "ai.onnx.preview.training": 1]>
        g (float[n, 4] x) => (float[n, 4] y) {{ y = {f"{domain}." if domain else ""}{call} }}
        <domain: "{of}", opset_import: ["": 21]> {named} (a) => (b) {{ c = Neg(a) b = Exp(c) }}
        <domain: "mine", opset_import: ["": 21]> Outer (a) => (b) {{ b = Relu(a) }}"""
    path = write(tmp_path / "a.onnx", text)
    x = np.array([[1, 2, -3, 0.5], [4, -1, 2, 3]], np.float32)
    [wanted], [given] = (Session(p, optimize=False)(x=x) for p in (path, again(path, tmp_path)))
    np.testing.assert_allclose(given, wanted, rtol=1e-6)


def test_a_function_that_is_left_out_is_told(tmp_path):
    text = HEADER + "g (float[n] x) => (float[n] y) { y = Relu(x) }"
    text += '<domain: "", opset_import: ["": 22]> Relu (a) => (b) { b = Exp(a) }'
    with pytest.warns(GraphgenWarning, match="function Relu has the name of an operator, which"):
        load(write(tmp_path / "a.onnx", text))


def again(path, folder):
    """The file as it is written after reading and optimizing."""
    return export(gg.optimize(load(path)), folder / "again.onnx")


SIZES = {
    "slice to a far end": (
        "(float[n, t] x) => (int64[] y) <int64[1] e = {1000000000}, int64[1] o = {0}>"
        "{ s = Slice(x, o, e, o)  y = Shape(s) }",
        [{"x": (2, 3)}, {"x": (1, 7)}],
    ),
    "slice to an end that may be inside": (
        "(float[n, t] x) => (int64[] y) <int64[2] e = {9, 4}, int64[2] o = {0, 0}>"
        "{ s = Slice(x, o, e)  y = Shape(s) }",
        [{"x": (2, 3)}, {"x": (2, 6)}],
    ),
    "slice of one row of none": (
        "(float[n, t] x) => (int64[] y) <int64[1] e = {1}, int64[1] o = {0}>"
        "{ s = Slice(x, o, e, e)  y = Shape(s) }",
        [{"x": (2, 0)}, {"x": (2, 6)}],
    ),
    "slice from a start that may be behind the end": (
        "(float[n, t] x) => (int64[] y) <int64[1] e = {6}, int64[1] o = {2}, int64[1] a = {1}>"
        "{ s = Slice(x, o, e, a)  y = Shape(s) }",
        [{"x": (2, 5)}, {"x": (2, 9)}],
    ),
    "slice along a computed axis": (
        "(float[4, 4] x, int64[1] a) => (int64[] y) <int64[1] e = {2}, int64[1] o = {0}>"
        "{ s = Slice(x, o, e, a)  y = Shape(s) }",
        [{"x": (4, 4), "a": [0]}, {"x": (4, 4), "a": [1]}],
    ),
    "squeeze of every axis of size 1": (
        "(float[n, 1, t] x) => (float[] y) { s = Squeeze(x)  k = Shape(s)  y = Reshape(x, k) }",
        [{"x": (2, 1, 3)}, {"x": (1, 1, 3)}, {"x": (1, 1, 1)}],
    ),
    "squeeze of a computed axis": (
        "(float[1, 1, t] x, int64[1] a) => (float[] y)"
        "{ s = Squeeze(x, a)  k = Shape(s)  y = Reshape(x, k) }",
        [{"x": (1, 1, 3), "a": [0]}],
    ),
    "pad of a computed axis": (
        "(float[2, 3] x, int64[1] a) => (int64[] y) <int64[2] p = {1, 1}, float v = {0.0}>"
        "{ s = Pad(x, p, v, a)  y = Shape(s) }",
        [{"x": (2, 3), "a": [0]}, {"x": (2, 3), "a": [1]}],
    ),
    "pooling, rounded up": (
        "(float[1, 1, t] x) => (float[] y) {"
        "s = MaxPool <kernel_shape = [2], strides = [3], pads = [1, 1], ceil_mode = 1> (x)"
        "k = Shape(s)  y = Reshape(s, k) }",
        [{"x": (1, 1, t)} for t in range(2, 9)],
    ),
    "transposed convolution by a short kernel": (
        "(float[1, 1, 3] x) => (int64[] y) <float[1, 1, 1] w = {1.0}> {"
        'c = ConvTranspose <auto_pad = "SAME_UPPER", strides = [2]> (x, w)  y = Shape(c) }',
        [{"x": (1, 1, 3)}],
    ),
    "resize, in float32": (
        "(float[1, 1, 10] x) => (int64[] y) <float[0] r = {}, float[3] s = {1.0, 1.0, 0.7}>"
        "{ z = Resize(x, r, s)  y = Shape(z) }",
        [{"x": (1, 1, 10)}],
    ),
    "resize that keeps the aspect": (
        "(float[1, 1, h, w] x) => (int64[] y) <float[0] r = {}, int64[2] s = {7, 8}> {"
        'z = Resize <axes = [2, 3], keep_aspect_ratio_policy = "not_larger"> (x, r, r, s)'
        "y = Shape(z) }",
        [{"x": (1, 1, 2, 2)}, {"x": (1, 1, 2, 3)}],
    ),
    "weights of mel": (
        "() => (int64[] y) <int64 m = {8}, int64 d = {16}, int64 r = {8192}, float a = {0.0}, "
        "float b = {4000.0}> { w = MelWeightMatrix(m, d, r, a, b)  y = Shape(w) }",
        [{}],
    ),
    "truth of a size": (
        "(float[n] x, float[1] z) => (int64[] y) <int64[1] p = {2}, int64[1] q = {3}> {"
        "n = Shape(x)  c = Cast <to = 9> (n)  w = Where(c, p, q)  e = Expand(z, w)"
        "y = Shape(e) }",
        [{"x": (0,), "z": (1,)}, {"x": (2,), "z": (1,)}],
    ),
    "quotient in float": (
        "(float[n, 7] x, float[1] z) => (int64[] y) <int64[1] two = {2}, int64[1] one = {1}> {"
        "k = Shape(x)  s = Gather(k, one)  f = Cast <to = 1> (s)  t = Cast <to = 1> (two)"
        "h = Div(f, t)  c = Ceil(h)  w = Cast <to = 7> (c)  e = Expand(z, w)  y = Shape(e) }",
        [{"x": (2, 7), "z": (1,)}],
    ),
    "elements of a table of sizes": (
        "(float[2, 3] x) => (int64[] y) <int64 i = {0}, int64[1] o = {0}>"
        "{ k = Shape(x)  u = Unsqueeze(k, o)  y = Gather(u, i) }",
        [{"x": (2, 3)}],
    ),
    "an element that may be -1": (
        "(float[2] x, float[m] z, int64[1] e) => (float[] y) <int64[2] m = {-1, -1}, "
        "int64[2] o = {1, 1}, int64[1] two = {2}> {"
        "k = Concat <axis = 0> (two, e)  c = Equal(k, m)  w = Where(c, o, k)"
        "a = Reshape(x, w)  b = Reshape(z, k)  l = Shape(b)  y = Expand(a, l) }",
        [{"x": (2,), "z": (6,), "e": [-1]}, {"x": (2,), "z": (2,), "e": [1]}],
    ),
    "two reshapes to -1": (
        "(float[n] x, float[m] z, int64[1] e) => (float[] y) <int64[1] o = {1}>"
        "{ k = Concat <axis = 0> (e, o)  a = Reshape(x, k)  b = Reshape(z, k)"
        "l = Shape(a)  y = Expand(b, l) }",
        [{"x": (4,), "z": (1,), "e": [-1]}, {"x": (2,), "z": (2,), "e": [2]}],
    ),
    "a declared output": (
        "(float[n] x, int64[2] k) => (float[4, 1] y) { y = Reshape(x, k) }",
        [{"x": (4,), "k": [4, 1]}, {"x": (4,), "k": [2, 2]}, {"x": (6,), "k": [2, 3]}],
    ),
    "a declared value": (
        "(float[n] x, int64[2] k) => (float[] y) <float[2, 2] r, int64[2] l>"
        "{ r = Reshape(x, k)  l = Shape(r)  y = Reshape(x, l) }",
        [{"x": (4,), "k": [2, 2]}, {"x": (4,), "k": [4, 1]}],
    ),
    "a declared rank": (
        "(float[n] x, int64[r] k) => (float[] y) <float[p, q] s>"
        "{ s = Reshape(x, k)  y = Softmax <axis = 1> (s) }",
        [{"x": (8,), "k": [2, 4]}, {"x": (8,), "k": [2, 2, 2]}],
    ),
    "a declared name": (
        "(float[n, 4] x, int64[2] k) => (float[] y) <float[n, 4] r>"
        "{ r = Reshape(x, k)  l = Shape(x)  y = Expand(r, l) }",
        [{"x": (3, 4), "k": [3, 4]}, {"x": (1, 4), "k": [4, 1]}],
    ),
}  # what is made of inputs, and the sizes or the content of these, run after run


@pytest.mark.parametrize("case", SIZES)
def test_only_what_holds_at_every_size_is_known_before_the_run(tmp_path, case):
    text, runs = SIZES[case]
    path = write(tmp_path / "a.onnx", f"{HEADER.replace('23', '18')} g {text}")
    before, after = (Session(p, optimize=False) for p in (path, again(path, tmp_path)))
    for i, given in enumerate(runs):
        rng = np.random.default_rng(i)
        feeds = {
            name: np.array(v) if isinstance(v, list) else rng.standard_normal(v, np.float32)
            for name, v in given.items()
        }
        for old, new in zip(before(feeds), after(feeds), strict=True):
            np.testing.assert_allclose(new, old, rtol=1e-6)
            assert new.shape == old.shape


@pytest.mark.parametrize(
    "call",
    [
        "LogSoftmax (c)",
        "ReduceLogSumExp <keepdims = 0> (c)",
        'Resize <mode = "linear", coordinate_transformation_mode = "align_corners"> (e, r, s)',
        "Bernoulli (c)",
    ],
)
def test_what_the_runtime_computes_otherwise_is_not_folded(tmp_path, call):
    text = f"""g (float[n] x) => (float[] y, float[n] z) <float[0] r = {{}},
        float[2] c = {{0.0, 0.5}}, float[1, 1, 4] e = {{1.0, 2.0, 3.0, 4.0}},
        float[3] s = {{1.0, 1.0, 0.6}}>
        {{ y = {call}  z = Neg(x) }}"""
    path = again(write(tmp_path / "a.onnx", HEADER.replace("23", "18") + text), tmp_path)
    assert call.split()[0] in {node.op_type for node in onnx.load(path).graph.node}


def test_an_output_that_a_fusion_of_the_runtime_would_remove_stays(tmp_path):
    text = """<ir_version: 10, opset_import: ["": 21]>
        g (float[m, k] a, float[n, k] b) => (float[p, q] y, float[k, m] z) {
        t = Transpose(a)  u = Transpose(b)  y = Gemm <transA = 1> (t, u)  z = Identity(t) }"""
    path = write(tmp_path / "a.onnx", text)
    feeds = dict.fromkeys("ab", np.arange(4, dtype=np.float32).reshape(2, 2))
    wanted = Session(path)(feeds)
    first = again(path, tmp_path)
    for given, other in zip(wanted, Session(first)(feeds), strict=True):
        np.testing.assert_array_equal(given, other)
    assert export(load(first), tmp_path / "b.onnx").read_bytes() == first.read_bytes()


def test_outputs_that_are_left_out_stay_so(tmp_path):
    text = """<ir_version: 10, opset_import: ["": 17, "com.microsoft": 1]>
        g (bool c, float[1, 2, 4] x, float[4] w) => (float[] y, float[1, 2, 4] z) {
        y = If (c) <then_branch = t () => (float[] o) {
                o, "", "", s = com.microsoft.SkipLayerNormalization(x, x, w) },
            else_branch = e () => (float[] p) { p = Identity(x) }>
        n, "", "", z = com.microsoft.SkipLayerNormalization(x, x, w) }"""
    path = export(load(write(tmp_path / "a.onnx", text)), tmp_path / "b.onnx")
    outer, branch = (n for n in nodes_of(onnx.load(path).graph) if n.op_type.startswith("Skip"))
    assert list(outer.output[1:]) == ["", "", "z"] and list(branch.output[1:3]) == ["", ""]


def nodes_of(graph):
    """The nodes of a graph, and then those of its subgraphs."""
    parts = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return [*graph.node, *(node for part in parts for node in nodes_of(part))]


def test_unnamed_sizes_stay_unnamed(tmp_path):
    text = HEADER + "g (float[?, 4] x, float[n, 4] w) => (float[?, 4] y) { y = Mul(x, w) }"
    text = text.replace("?", "")
    text = text.replace("[, 4]", "[unnamed, 4]")
    path = write(tmp_path / "a.onnx", text)
    proto = onnx.load(path)
    for value in (*proto.graph.input, *proto.graph.output):
        if value.type.tensor_type.shape.dim[0].dim_param == "unnamed":
            value.type.tensor_type.shape.dim[0].ClearField("dim_param")
    onnx.save(proto, path)
    written = onnx.load(export(load(path), tmp_path / "b.onnx"))
    x, w = (value.type.tensor_type.shape.dim[0] for value in written.graph.input)
    assert (x.WhichOneof("value"), w.dim_param) == (None, "n")
    assert "_d" not in str(written.graph)


SCRIPT = """
import sys; sys.path[:0] = {paths}
from test_files import build, export
for training in (False, True):
    export(build(training=training), f"{{sys.argv[1]}}/m{{training}}.onnx", external_data=True)
"""


def test_same_input_same_bytes(tmp_path):
    digests = []
    for seed in "12":
        folder = tmp_path / seed
        folder.mkdir()
        script = SCRIPT.format(paths=[str(p) for p in Path(__file__).parents[:2]])
        subprocess.run(
            [sys.executable, "-c", script, folder],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
        )
        files = sorted(folder.iterdir())
        digests.append([(f.name, hashlib.sha256(f.read_bytes()).hexdigest()) for f in files])
    assert digests[0] == digests[1] and len(digests[0]) == 4


def test_session_options_go_along(tmp_path):
    class Optimized:
        model, session_options = linear(), {"enable_mem_pattern": "0", "execution_order": "DEFAULT"}

    path = export(Optimized, tmp_path / "m.onnx")
    assert Session(path).plan.enable_mem_pattern is False
    assert "graphgen.session_options" not in Optimized.model.metadata_props


def test_external_data(tmp_path):
    model = linear()
    path = export(model, tmp_path / "m.onnx", external_data=True)
    data = tmp_path / "m.onnx_data"
    assert sorted(tmp_path.iterdir()) == [path, data] and data.stat().st_size == 64 * 64 * 4
    x = np.ones((1, 64), np.float32)
    (y,) = Session(path)(x=x)
    assert relative_rms(y, evaluate(model, {"x": x})[0]) < ROUNDING
    again = load(path)
    assert is_mapped(again.graph.initializers["weight"].const_value)
    export(linear(16), path, external_data=True)  # what was read outlives its file
    assert np.array_equal(Session(export(again, tmp_path / "n.onnx"))(x=x)[0], y)


@pytest.mark.parametrize("dtype", ["FLOAT", "FLOAT16", "INT8", "BFLOAT16", "INT4"])
def test_weights_inside_a_file_of_any_dtype(tmp_path, dtype):
    """Large ones are mapped, except those of which two share a byte; the bytes stay the same."""
    kind = ir.DataType[dtype]
    array = np.random.default_rng(0).integers(-7, 7, (100, 100)).astype(kind.numpy())
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [100, 100])
    node = helper.make_node("Cast", ["w"], ["y"], to=TensorProto.FLOAT)
    graph = helper.make_graph([node], "g", [], [y], [numpy_helper.from_array(array, "w")])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.save(proto, tmp_path / "o.onnx")
    first = export(load(tmp_path / "o.onnx"), tmp_path / "a.onnx")
    model = load(first)
    tensor = model.graph.initializers["w"].const_value
    assert is_mapped(tensor) == (dtype != "INT4") and np.array_equal(tensor.numpy(), array)
    assert export(model, tmp_path / "b.onnx").read_bytes() == first.read_bytes()
    read = numpy_helper.to_array(onnx.load(first).graph.initializer[0])
    assert np.array_equal(read, array)


def test_written_over_the_file_it_was_read_from(tmp_path):
    path = export(linear(), tmp_path / "m.onnx", external_data=True)
    model, data = load(path), (tmp_path / "m.onnx_data").read_bytes()
    export(model, path, external_data=True)
    assert (tmp_path / "m.onnx_data").read_bytes() == data
    inside = export(model, tmp_path / "inside.onnx", external_data=False)
    assert data in inside.read_bytes()


@pytest.mark.parametrize("external_data", [False, True])
def test_weights_in_any_order_of_memory(tmp_path, external_data):
    model, drawn = linear(), np.random.default_rng(0).standard_normal((64, 2, 64), np.float32)
    weights = [drawn[:, 0].T, drawn[:, 1], np.asfortranarray(drawn[:, 0])]
    [weight] = [v for v in model.graph.initializers.values() if v.shape == (64, 64)]
    for array in weights:
        weight.const_value = ir.tensor(array, name=weight.name)
        path = export(model, tmp_path / "m.onnx", external_data=external_data)
        proto = {t.name: t for t in onnx.load(path).graph.initializer}[str(weight.name)]
        assert np.array_equal(numpy_helper.to_array(proto), array)


def test_large_models_get_external_data_by_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["graphgen.export.write"], "_LARGE", 1000)  # gg.export hides it
    export(linear(), tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx_data").exists()


# Bad input


def refusal(*args, function=load, **kwargs):
    with pytest.raises(GraphgenError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def test_damaged_names(tmp_path):
    data = to_bytes(build(training=True))
    for old, new in (
        (b"Softmax", b"\xff\xfeftmax"),
        (b"Squeeze", b"Squee\xb3e"),
        (b"ids", b"\xb3ds"),
    ):
        (tmp_path / "m.onnx").write_bytes(data.replace(old, new))
        assert "load(m.onnx)" in refusal(tmp_path / "m.onnx")


def test_no_onnx_file(tmp_path):
    path = tmp_path / "m.onnx"
    assert "cannot be read: No such file" in refusal(path)
    assert "cannot be read: Is a directory" in refusal(tmp_path)
    for content in (b"", b"Dear reader, this is text.\n" * 9, b"\x00" * 100, b"\x08\x07"):
        path.write_bytes(content)
        assert "is not an ONNX model, or one cut short" in refusal(path)


def test_truncated_file(tmp_path):
    data = to_bytes(build())
    for size in range(1, len(data), len(data) // 40):
        (tmp_path / "m.onnx").write_bytes(data[:size])
        assert "load(m.onnx)" in refusal(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "'m.onnx_data', which is missing; put that file next to"),
        ("short", "has 100 bytes where 16384 are needed"),
        ("length", "whose length is 77 bytes by the model, but its elements take 16384"),
        ("../m.onnx_data", "outside the model's folder"),
        ("/etc/passwd", "outside the model's folder"),
        ("link", "outside the model's folder"),
    ],
)
def test_external_data_that_is_not_there(tmp_path, change, message):
    folder = tmp_path / "folder"
    folder.mkdir()
    path, data = export(linear(), folder / "m.onnx", external_data=True), folder / "m.onnx_data"
    if change == "short":
        data.write_bytes(b"1" * 100)
    elif change == "link":
        data.rename(tmp_path / "elsewhere")
        data.symlink_to(tmp_path / "elsewhere")
    elif change == "length":
        proto = onnx.load(path, load_external_data=False)
        for entry in proto.graph.initializer[0].external_data:
            entry.value = "77" if entry.key == "length" else entry.value
        onnx.save(proto, path)
    else:
        data.rename(tmp_path / "m.onnx_data")
        proto = onnx.load(path, load_external_data=False)
        if change != "missing":
            proto.graph.initializer[0].external_data[0].value = change
            for tensor in proto.graph.initializer:
                for entry in tensor.external_data:
                    entry.value = change if entry.key == "location" else entry.value
        onnx.save(proto, path)
    assert message in refusal(path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("h = Abs(x) h = Neg(x) y = Abs(h)", "'h' is assigned 2 times"),
        ("x = Abs(x) y = Abs(x)", "'x' is assigned 2 times"),
        ("y = Abs(nothing)", "reads 'nothing', which nothing makes"),
        ("h = Abs(x)", "the output 'y' is not made by anything"),
        ("a = Add(x, b) b = Abs(a) y = Abs(b)", "cycle"),
        ("y = Add(x)", "takes 2 to 2 inputs, not 1"),
        ("y, z = Add(x, x)", "gives 1 to 1 outputs, not 2"),
        ("h = Cast <to = 7> (x) y = Erf(s) z = Add(h, x)", "other operands are"),
    ],
)
def test_malformed_graphs(tmp_path, body, message):
    text = HEADER + "g (float[2] x, float[2] s) => (float[2] y) {" + body + "}"
    text = text.replace("y) {", "y, float z) {") if "z =" in body else text
    assert message in refusal(write(tmp_path / "m.onnx", text))


def test_an_operator_that_cannot_be_raised(tmp_path):
    nodes = "g (float[2] x) => (float[3] y) { y = Pad <paddings = [0, 1]> (x) }"
    text = f'<ir_version: 4, opset_import: ["": 1]> {nodes}'
    assert "Pad cannot be raised from opset 1" in refusal(write(tmp_path / "m.onnx", text))


def test_a_result_of_unknown_rank_is_raised(tmp_path):
    nodes = "g (float[4] x) => (float[] y, float[] z) { y, z = Split (x) }"
    path = write(tmp_path / "m.onnx", f'<ir_version: 6, opset_import: ["": 11]> {nodes}')
    assert [value.shape for value in load(path).graph.outputs] == [(2,), (2,)]


def test_what_export_refuses(tmp_path):
    assert "'m' is not a model; give what" in refusal("m", tmp_path / "m.onnx", function=export)
    model = linear()
    model.graph.node("Gemm_1" if "Gemm_1" in [n.name for n in model.graph] else 0).op_type = "Gem"
    assert "not valid ONNX: No Op registered for Gem" in refusal(
        model, tmp_path / "m.onnx", function=export
    )
    assert not list(tmp_path.iterdir())


def listing(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_unwritable_output(tmp_path):
    model = linear()
    message = refusal(model, tmp_path / "no" / "m.onnx", function=export)
    assert "cannot be written: No such file or directory; choose another place" in message
    (tmp_path / "taken").mkdir()
    assert "cannot be written" in refusal(model, tmp_path / "taken", function=export)
    assert not listing(tmp_path)
    assert "cannot be written" in refusal(model, "/proc/m.onnx", function=export)


def test_a_link_stays_and_what_is_no_regular_file_is_refused(tmp_path):
    (tmp_path / "link.onnx").symlink_to("real.onnx")
    export(linear(), tmp_path / "link.onnx")
    assert (tmp_path / "link.onnx").is_symlink()
    assert load(tmp_path / "real.onnx").graph.outputs
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "m.onnx_data").symlink_to("pipe")
    message = refusal(linear(), tmp_path / "pipe", function=export)
    assert "pipe cannot be written: it is not a regular file; choose another place" in message
    message = refusal(linear(), tmp_path / "m.onnx", function=export, external_data=True)
    assert "m.onnx_data cannot be written: it is not a regular file" in message
    assert (tmp_path / "pipe").is_fifo()
    assert not (tmp_path / "m.onnx").exists()


@pytest.mark.parametrize("external_data", [True, False])
def test_full_disk(tmp_path, external_data):
    path = export(linear(16), tmp_path / "m.onnx", external_data=external_data)
    before = listing(tmp_path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
    try:
        message = refusal(linear(), path, function=export, external_data=external_data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "m.onnx cannot be written: File too large" in message
    assert listing(tmp_path) == before


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_interrupted_with_both_files_complete(tmp_path, monkeypatch, error):
    path = export(linear(16), tmp_path / "m.onnx", external_data=True)
    before = listing(tmp_path)

    def fail(file):
        assert len(listing(tmp_path)) == 4
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(
        KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else GraphgenError
    ):
        export(linear(), path, external_data=True)
    assert listing(tmp_path) == before


def test_an_initializer_needs_a_value(tmp_path: Path) -> None:
    """A model of onnx_ir may have one that nobody filled yet."""
    model = gg.build(nn.Linear(2, 3, bias=False), x=gg.float32["batch", 2], seed=0)
    [(name, weight)] = model.graph.initializers.items()
    weight.const_value = None
    for write in (lambda: export(model, tmp_path / "model.onnx"), lambda: to_bytes(model)):
        with pytest.raises(GraphgenError, match=f"the initializer '{name}' has no value; give"):
            write()
    assert not [*tmp_path.iterdir()]
