"""Valid files of any origin: what the runtime runs is optimized, and means the same."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import parser
from small_models import run_plain

import graphgen as gg
from graphgen.targets import target

CPU = ["CPUExecutionProvider"]
X = np.linspace(-3, 3, 12, dtype=np.float32)
OPTIONAL = """
<ir_version: 10, opset_import: ["" : 17]>
main (int32[1] x, bool flag) => (int32[1] y) {
   chosen = If (flag) <else_branch: graph = none () => (optional(int32[1]) empty) {
      empty = Optional <type: type_proto = int32[1]> ()
      other = Optional <type: type_proto = int32[1]> ()
   }, then_branch: graph = one () => (optional(int32[1]) full) {
      full = Optional (x)
   }>
   has = OptionalHasElement (chosen)
   y = If (has) <else_branch: graph = nothing () => (int32[1] zero) {
      zero = Constant <value: tensor = int32[1] {0}> ()
   }, then_branch: graph = something () => (int32[1] get) {
      get = OptionalGetElement (chosen)
   }>
}"""
SEQUENCE = """
<ir_version: 10, opset_import: ["" : 16]>
main (bool flag) => (optional(seq(float[3])) y) {
   y = If (flag) <else_branch: graph = some () => (optional(seq(float[3])) full) {
      x = Constant <value: tensor = float[3] {1, 2, 3}> ()
      list = SequenceConstruct (x)
      full = Optional (list)
   }, then_branch: graph = none () => (optional(seq(float[3])) empty) {
      empty = Optional <type: type_proto = seq(float[3])> ()
   }>
}"""
SPLIT = """
<ir_version: 10, opset_import: ["" : 13]>
main (float[3,4] x, int64 size) => (seq(float[3,n]) y) {
   y = SplitToSequence <axis: int = 1> (x, size)
}"""

NORMS = """
<ir_version: 7, opset_import: ["" : OPSET]>
main (float[n,4] x, float[4] scale, float[4] bias, bool again)
  => (float[n,4] y, float[n,1] mean) {
   normal, mean = LayerNormalization <epsilon: float = 0.01> (x, scale, bias)
   z = Clip (normal)
   simple = SimplifiedLayerNormalization <axis: int = -1> (z, scale)
   chosen = If (again) <else_branch: graph = once () => (float[n,4] same) {
      same = Identity (simple)
   }, then_branch: graph = twice () => (float[n,4] more) {
      more = SimplifiedLayerNormalization <axis: int = -1> (simple, bias)
   }>
   y = Softmax <axis: int = 1> (chosen)
}"""

PREPARED = """
<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 3]>
main (float[n,4] x) => (float[n,4] y) {
   full = ai.onnx.ml.Imputer <imputed_value_floats = [1.0, 2.0, 3.0, 4.0],
      replaced_value_float: float = -3.0> (x)
   high = ai.onnx.ml.Binarizer <threshold: float = -2.0> (full)
   kept = Mul (full, high)
   scaled = ai.onnx.ml.Scaler <offset = [0.5, 0.5, 0.5, 0.5], scale = [2.0, 2.0, 2.0, 2.0]> (kept)
   unit = ai.onnx.ml.Normalizer <norm = "L2"> (scaled)
   mean = ReduceMean <axes = [-1]> (unit)
   centered = Sub (unit, mean)
   squared = Mul (centered, centered)
   variance = ReduceMean <axes = [-1]> (squared)
   epsilon = Constant <value: tensor = float {0.001}> ()
   more = Add (variance, epsilon)
   deviation = Sqrt (more)
   y = Div (centered, deviation)
}"""

QUANTIZED = """
<ir_version: 9, opset_import: ["" : 17, "com.microsoft": 1]>
main (int8[n,c,h,w] x, bool[k,1,1,1] where)
   => (int8[n,c,1,1] mean, int64[4] a, int64[4] b, int64[4] c)
<float scale = {0.1}, int8 zero = {3}> {
   mean = com.microsoft.QLinearGlobalAveragePool (x, scale, zero, scale, zero)
   pool = com.microsoft.QLinearAveragePool <kernel_shape = [2, 2], strides = [2, 2], ceil_mode = 1>
      (x, scale, zero, scale, zero)
   chosen = com.microsoft.QLinearWhere (where, mean, scale, zero, x, scale, zero, scale, zero)
   a = Shape (mean)
   b = Shape (pool)
   c = Shape (chosen)
}"""
EMBEDDED = """
<ir_version: 9, opset_import: ["" : 17, "com.microsoft": 1]>
main (int32[n,t] ids) => (float[n,t,2] y, int32[n] lengths)
<int8[3,2] table = {9, 7, 8, 5, 4, 6}, int8[2] weight = {9, 4}, float s = {0.1}, int8 z = {3}> {
   y, lengths = com.microsoft.QEmbedLayerNormalization (
      ids, , table, table, , weight, weight, , s, s, , s, s, z, z, , z, z)
}"""
WHOLE = """
<ir_version: 9, opset_import: ["" : 13]>
main (float[n] x) => (float[n] y) <float[1] scale = {0.5}, int8[1] zero = {3}> {
   q = QuantizeLinear <axis: int = 1> (x, scale, zero)
   y = DequantizeLinear <axis: int = 3> (q, scale, zero)
}"""
MEAN = """
<ir_version: 9, opset_import: ["" : 17]>
main (float[1,3,2,2] x) => (float[1,3,2,2] y) {
   y = MeanVarianceNormalization (x)
}"""
SATURATED = """
<ir_version: 9, opset_import: ["" : 19]>
main (float[n] x, float8e5m2[1] like) => (float[n] y) {
   small = CastLike <saturate: int = 0> (x, like)
   y = Cast <to: int = 1> (small)
}"""
OMITTED = """
<ir_version: 9, opset_import: ["" : 17]>
main (float[n] x) => (float[k] y, int64[k] count) {
   y, , , count = Unique (x)
}"""

EMPTY = """
<ir_version: 8, opset_import: ["" : 13]>
main (float[n,4] x, bool flag) => (float[m,4] y) {
   y = If (flag) <then_branch: graph = yes () => (float[k,4] joined) {
      none = Constant <value: tensor = float[0,4] {}> ()
      joined = Concat <axis: int = 0> (none, x)
   }, else_branch: graph = no () => (float[k,4] larger) {
      region = Constant <value: tensor = float[0] {}> ()
      scales = Constant <value: tensor = float[2] {2, 1}> ()
      larger = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric">
         (x, region, scales)
   }>
}"""


FEATURES = """
<ir_version: 9, opset_import: ["" : 17, "ai.onnx.ml" : 1]>
main (float[n,2] x) => (int64[n] y, int64[2] row, int64[3] rows)
<int64[2] classes = {7, 9}, int64[1] whole = {-1}, int64[2,1] columns = {1, 0}> {
   best = ArgMax <axis: int = 1> (x)
   found = ai.onnx.ml.ArrayFeatureExtractor (classes, best)
   y = Reshape (found, whole)
   row = Shape (found)
   some = ai.onnx.ml.ArrayFeatureExtractor (x, columns)
   flat = Unsqueeze (some, whole)
   rows = Shape (flat)
}"""


def optimized(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """The file that `optimize` makes of another."""
    onnx.save(model, path)
    return onnx.load(gg.export(gg.optimize(gg.load(path)), path))


def run(model: onnx.ModelProto, feeds: dict[str, Any], *, optimize: bool) -> list[Any]:
    options = ort.SessionOptions()
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    results: list[Any] = ort.InferenceSession(model.SerializeToString(), options, CPU).run(
        None, feeds
    )
    return results


def check(text: str | onnx.ModelProto, path: Path, **feeds: Any) -> onnx.ModelProto:
    """The optimized model, which gives what the given one gives."""
    model = parser.parse_model(text) if isinstance(text, str) else text
    made = optimized(model, path / "model.onnx")
    wanted = run(model, feeds, optimize=False)
    for optimize in (False, True):
        for y, expected in zip(run(made, feeds, optimize=optimize), wanted, strict=True):
            np.testing.assert_equal(y, expected)
    return made


@pytest.mark.parametrize("flag", [True, False])
def test_attributes_may_be_types(tmp_path: Path, flag: bool) -> None:
    check(OPTIONAL, tmp_path, x=np.array([7], np.int32), flag=np.array(flag))
    made = check(SEQUENCE, tmp_path, flag=np.array(flag))
    assert made.opset_import[0].version == 16, "an If gives optional values from there on"


def test_a_sequence_may_be_split_at_run_time(tmp_path: Path) -> None:
    check(SPLIT, tmp_path, x=X.reshape(3, 4), size=np.array(3))


@pytest.mark.parametrize("opset", [12, 16])
def test_the_runtime_has_norms_before_onnx(tmp_path: Path, opset: int) -> None:
    """They stand in files that it has optimized; ONNX has LayerNormalization from 17 on."""
    feeds = {"x": X.reshape(3, 4), "scale": X[:4], "bias": X[4:8], "again": np.array(opset > 12)}
    made = check(NORMS.replace("OPSET", str(opset)), tmp_path, **feeds)
    assert made.opset_import[0].version == 17
    assert [n.op_type for n in made.graph.node][:1] == ["LayerNormalization"]


def test_quantized_operators_of_the_runtime_have_their_sizes(tmp_path: Path) -> None:
    x, where = (X * 20).astype(np.int8).reshape(1, 1, 3, 4), np.array([True, False])
    check(QUANTIZED, tmp_path, x=x, where=where.reshape(2, 1, 1, 1))
    check(EMBEDDED, tmp_path, ids=np.array([[1, 2], [0, 1]], np.int32))


def test_the_axis_of_one_scale_has_no_meaning(tmp_path: Path) -> None:
    check(WHOLE, tmp_path, x=X)


def test_outputs_that_are_omitted_stay_so(tmp_path: Path) -> None:
    made = check(OMITTED, tmp_path, x=X.round())
    [node] = made.graph.node
    assert [*node.output] == ["y", "", "", "count"]


def test_a_file_is_written_at_an_opset_that_onnx_can_check(tmp_path: Path) -> None:
    """Its checker takes no defaults over into the body of an operator."""
    x = X.reshape(1, 3, 2, 2)
    made = check(MEAN, tmp_path, x=x)
    assert made.opset_import[0].version == 13


def test_a_cast_to_a_dtype_of_another_value_need_not_saturate(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    made = optimized(parser.parse_model(SATURATED), path)
    given = {attr.name: attr.i for node in made.graph.node for attr in node.attribute}
    assert given["saturate"] == 0 and made.graph.node[0].op_type == "Cast"


@pytest.mark.parametrize("flag", [True, False])
def test_bodies_may_hold_tensors_without_elements(tmp_path: Path, flag: bool) -> None:
    check(EMPTY, tmp_path, x=X.reshape(3, 4), flag=np.array(flag))


def test_features_of_a_vector_are_a_row(tmp_path: Path) -> None:
    """As skl2onnx writes the classes of KNeighborsClassifier and MLPClassifier."""
    check(FEATURES, tmp_path, x=X.reshape(6, 2))


def test_a_part_without_elements_may_have_other_sizes(tmp_path: Any) -> None:
    """As torchaudio's Emformer joins an empty memory: the runtime does not look at it."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
    main (float[0, 3] none, float[n, 4] x, float[1, 4] z) => (float[m, 4] y) {
      y = Concat <axis: int = 0> (none, x, z)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "empty.onnx")
    model = gg.load(tmp_path / "empty.onnx")
    assert model.graph.outputs[0].shape[1] == 4
    best = gg.optimize(model).model
    rng = np.random.default_rng(0)
    x, z = (rng.normal(size=(n, 4)).astype(np.float32) for n in (3, 1))
    [y] = run_plain(best, {"none": np.zeros((0, 3), np.float32), "x": x, "z": z})
    np.testing.assert_array_equal(y, np.concatenate([x, z]))


KINDS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")


@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize("axes", ["axes = [1, -1], keepdims = 0", "axes = [0]", "keepdims = 1"])
def test_reductions_are_raised_without_converting_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opset: int, axes: str
) -> None:
    """onnx's converter takes longer than all else, and drops what nodes carry."""
    made = [f"y{kind} = Reduce{kind} <{axes}> (x)" for kind in KINDS]
    outputs = [f"float[] y{kind}" for kind in KINDS]
    text = f"""<ir_version: 8, opset_import: ["" : {opset}]>
    main (float[n,4,2] x, bool flag) => (float[n,2,2] first, float[a] inside, {", ".join(outputs)})
    {{
      first, second = Split <axis = 1> (x)
      inside = If (flag) <then_branch: graph = yes () => (float[b] mean) {{
         mean = ReduceMean <axes = [0, 1], keepdims = 0> (second)
      }}, else_branch: graph = no () => (float[c] least) {{
         least = ReduceMin <axes = [0, 1], keepdims = 0> (second)
      }}>
      {chr(10).join(made)}
    }}"""
    monkeypatch.setattr(onnx.version_converter, "convert_version", None)
    x = np.random.default_rng(0).uniform(0.5, 2, (3, 4, 2)).astype(np.float32)
    for flag in (True, False):
        check(text, tmp_path, x=x, flag=np.array(flag))


def test_norms_of_prepared_features_are_found(tmp_path: Path) -> None:
    """Behind operators of ai.onnx.ml, of which onnx infers no shape."""
    file = parser.parse_model(PREPARED)
    onnx.save(file, tmp_path / "m.onnx")
    x = X.reshape(3, 4)
    best = gg.optimize(gg.load(tmp_path / "m.onnx"))
    assert best.report.fused()["layer_norm"] == 1
    [wanted] = ort.InferenceSession(file.SerializeToString(), providers=CPU).run(None, {"x": x})
    [got] = run_plain(best.model, {"x": x})
    assert np.abs(wanted - got).max() < 1e-6


@pytest.mark.parametrize("axis", [1, 2])
def test_an_old_softmax_along_the_last_axis_is_one_of_rows(tmp_path: Path, axis: int) -> None:
    """onnx raises it with a Flatten and the Shape of its operand, where it cannot tell the rank.

    That Shape would be another user of the scores of an attention.
    """
    text = f"""<ir_version: 7, opset_import: ["" : 11]>
    main (float[n,4,t] x) => (float[a,b,t] y)
      <int64[1] minus = {{-1}}, int64[1] two = {{2}}, int64[1] three = {{3}}> {{
      s = Shape (x)
      last = Slice (s, two, three)
      sizes = Concat <axis = 0> (minus, two, last)
      rows = Reshape (x, sizes)
      y = Softmax <axis = {axis}> (rows)
    }}"""
    onnx.save(parser.parse_model(text), tmp_path / "m.onnx")
    best = gg.optimize(gg.load(tmp_path / "m.onnx")).model
    kinds = [node.op_type for node in best.graph]
    assert ("Flatten" in kinds, kinds.count("Reshape")) == ((False, 1) if axis == 2 else (True, 2))
    for n, t in ((2, 5), (1, 1)):
        x = np.random.default_rng(0).standard_normal((n, 4, t)).astype(np.float32)
        check(text, tmp_path, x=x)


def test_attention_is_found_behind_products_with_weights_of_four_bits(tmp_path: Path) -> None:
    """Of MatMulBnb4, whose sizes neither onnx nor the inference library knows."""
    text = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
    main (float[b,t,16] x) => (float[b,2,t,8] y, int64[3] s) <int64[4] sizes = {0, 0, 2, 8}> {
      p = com.microsoft.MatMulBnb4 <K = 16, N = 16, block_size = 16, quant_type = 1> (x, w, most)
      s = Shape (p)
      apart = Reshape (p, sizes)
      q = Transpose <perm = [0, 2, 1, 3]> (apart)
      k = Transpose <perm = [0, 2, 3, 1]> (apart)
      scores = MatMul (q, k)
      weights = Softmax (scores)
      y = MatMul (weights, q)
    }"""
    random, source = np.random.default_rng(0), parser.parse_model(text)
    table = {"w": random.integers(0, 256, 128, np.uint8), "most": random.random(16, np.float32)}
    for name, x in table.items():
        source.graph.initializer.append(onnx.numpy_helper.from_array(x, name))
    made = optimized(source, tmp_path / "m.onnx")
    assert [node.op_type for node in made.graph.node].count("Attention") == 1
    for b, t in ((2, 5), (1, 1)):
        feeds = {"x": random.standard_normal((b, t, 16), np.float32)}
        (wanted, sizes), (got, shape) = (run(m, feeds, optimize=False) for m in (source, made))
        assert np.abs(wanted - got).max() < 1e-5 and np.array_equal(sizes, shape)


OLDER: dict[str, tuple[str, list[Any]]] = {
    "QuantizeLinear(x, s, z)": ("float s = {0.1}, uint16 z = {100}", ["n", 3, "h", 4]),
    "GridSample(x, grid)": ("", ["n", 3, 2, 5]),
    "Pad(x, p)": ("int64[8] p = {0, 0, 1, 0, 0, 0, 2, 3}", ["n", 3, "h + 3", 7]),
    "GatherND(x, at)": ("int64[2, 1] at = {0, 0}", [2, 3, "h", 4]),
    "Trilu(x)": ("", ["n", 3, "h", 4]),
    "SampleOp(x)": ("", ["n", 3, "h", 4]),
    "ExpandDims(x, k)": ("int32 k = {-2}", ["n", 3, "h", 1, 4]),
    "UnfoldTensor<dim = 2, size = 2, step = 2>(x)": ("", ["n", 3, "floor(h/2)", 4, 2]),
    "CropAndResize(x, boxes, of, k)": (
        "float[1,4] boxes = {0.0, 0.0, 1.0, 1.0}, int32[1] of = {0}, int32[2] k = {2, 3}",
        [1, 3, 2, 3],
    ),
    "CDist(rows, rows)": ("float[2, 2] rows = {1.0, 2.0, 3.0, 4.0}", [2, 2]),
    "MurmurHash3(x)": ("", ["n", 3, "h", 4]),
    "NhwcMaxPool<kernel_shape = [2, 2], pads = [0, 1, 0, 1]>(image)": ("", ["n", 2, "h + 1", 4]),
    "Range(a, b, c)": ("int64 a = {2}, int64 b = {9}, int64 c = {3}", [3]),
    "WordConvEmbedding<embedding_size = 2, conv_window_size = 3>(letters, w, b, c)": (
        "int32[2,5] letters, float[2,1,3,4] w, float[2] b, float[9,4] c",
        [2, 2],
    ),
    "ConvTransposeWithDynamicPads<strides = [2, 2]>(x, w, p)": (
        "float[3,5,2,3] w, int64[4] p = {0, 1, 2, 0}",
        ["n", 5, "2*h - 2", 8],
    ),
    "MoEGroupRouter<n_group = 2, topk_group = 1, group_topk = 2, top_k = 1>(rows, b)": (
        "float[1,4] rows, float[4] b",
        [1, 4],
    ),
    "MatMulFpQ4<blk_quant_type = 0>(wide, w, s)": (
        "float[2,3,64] wide, uint8[320] w, int64[2] s = {64, 8}",
        [2, 3, 8],
    ),
    "GatherPacked<packed_type = 2, K = 32, output_dtype = 1>(w, at)": (
        "uint8[9,18] w, int64[2,3] at",
        [2, 3, 32],
    ),
}


@pytest.mark.parametrize("call", OLDER)
def test_operators_that_the_runtime_had_before_onnx_have_sizes(call: str, tmp_path: Path) -> None:
    constants, sizes = OLDER[call]
    if re.split(r"\W", call)[0] not in target("cpu").kernels["com.microsoft"]:
        pytest.skip("this onnxruntime lacks the operator")
    text = f"""<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>
    main (float[n,3,h,4] x, float[n,2,5,2] grid, uint8[n,3,h,4] image) => (int64[k] y)
      <{constants}> {{
      made = com.microsoft.{call}
      y = Shape (made)
    }}"""
    source = parser.parse_model(text)
    for value in source.graph.value_info:  # those without numbers
        dims = [d.dim_value for d in value.type.tensor_type.shape.dim]
        ones = np.ones(dims, onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        source.graph.initializer.append(onnx.numpy_helper.from_array(ones, value.name))
    onnx.save(source, tmp_path / "m.onnx")
    model = gg.load(tmp_path / "m.onnx")
    feeds = {"x": np.ones((2, 3, 6, 4), "f"), "grid": np.zeros((2, 2, 5, 2), "f")}
    feeds["image"] = np.ones((2, 3, 6, 4), np.uint8)
    found = model.graph.node(0).outputs[0].shape
    assert found is not None and [str(d) for d in found] == [str(d) for d in sizes]
    known = [int(ir.SymbolicDim(str(d)).evaluate({"n": 2, "h": 6})) for d in sizes]
    assert run(source, feeds, optimize=False)[0].tolist() == known
    check(source, tmp_path, **feeds)


def test_operators_that_count_what_they_find_have_as_many_axes_as_that(tmp_path: Path) -> None:
    """And the sizes that they share with their inputs."""
    text = """<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>
    main (float[n] x, float[n,m] costs, int64[t] ids, int64[u] more)
      => (float[k] y, int64[n] i, int64[k] c, int32[a,b] path, int64[f] both, int64[1] at)
      <int64[1] zero = {0}> {
      y, i, c = com.microsoft.Unique (x)
      path = com.microsoft.DynamicTimeWarping (costs)
      both, at = com.microsoft.BifurcationDetector (ids, ids, zero, more)
    }"""
    onnx.save(parser.parse_model(text), tmp_path / "m.onnx")
    y, i, c, path, both, at = (v.shape for v in gg.load(tmp_path / "m.onnx").graph.outputs)
    assert (y, i, path and path[0], at) == (c, ["n"], 2, [1])
    assert y is not None and both is not None and len(y) == len(both) == 1
    feeds = {"x": np.float32([2, 1, 2, 3]), "costs": np.ones((4, 3), "f")}
    check(text, tmp_path, **feeds, ids=np.arange(3), more=np.arange(4))


@pytest.mark.parametrize("given", ["K = 16", "K = 16, N = 1.5", "K = 16, N = -4"])
@pytest.mark.parametrize("inputs", ["x, w, most", ", w, most", ""])
def test_a_damaged_product_with_weights_of_four_bits_has_no_size(
    tmp_path: Path, given: str, inputs: str
) -> None:
    """No schema says what it must have; the runtime refuses it."""
    text = f"""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
    main (float[b,t,16] x, uint8[128] w, float[16] most) => (float[b,t,size] y) {{
      p = com.microsoft.MatMulBnb4 <{given}> ({inputs})
      y = Relu (p)
    }}"""
    onnx.save(parser.parse_model(text), tmp_path / "m.onnx")
    product, _ = gg.load(tmp_path / "m.onnx").graph
    assert product.outputs[0].shape is None


@pytest.mark.parametrize(
    "power", ["e = Exp (l) w = Reshape (e, s)", "e = Reshape (l, s) w = Exp (e)"]
)
def test_the_power_of_an_old_log_softmax_is_the_softmax_of_an_attention(
    tmp_path: Path, power: str
) -> None:
    """On rows of sizes without names, which only the shape of the scores tells."""
    text = f"""<ir_version: 7, opset_import: ["" : 11]>
    main (float[?,2,?,4] q, float[?,2,?,4] k) => (float[?,2,?,4] y) {{
      turned = Transpose <perm = [0, 1, 3, 2]> (k)
      scores = MatMul (q, turned)
      s = Shape (scores)
      rows = Flatten <axis = 3> (scores)
      l = LogSoftmax <axis = 1> (rows)
      {power}
      y = MatMul (w, k)
    }}"""
    source, random = parser.parse_model(text), np.random.default_rng(0)
    made = optimized(source, tmp_path / "m.onnx")
    kinds = {node.op_type for node in made.graph.node}
    assert "Attention" in kinds and "Softmax" not in kinds
    for b, t, n in ((2, 3, 5), (1, 1, 1)):
        sizes = {"q": (b, 2, t, 4), "k": (b, 2, n, 4)}
        feeds = {name: random.standard_normal(dims, np.float32) for name, dims in sizes.items()}
        [wanted], [got] = (run(m, feeds, optimize=False) for m in (source, made))
        assert np.abs(wanted - got).max() < 1e-6


def test_a_product_with_one_number_has_the_shape_of_its_operand(tmp_path: Path) -> None:
    """Also of a size that nobody named, and of a number in brackets, unless these add an axis."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
    main (float[n,4] x, bool[n] keep) => (float[m,4] y, int64[2] s, float[1,m,4] z, int64[3] t)
      <float[1] half = {0.5}, float[1,1,1] third = {0.3}> {
      kept = Compress <axis = 0> (x, keep)
      y = Mul (kept, half)
      s = Shape (y)
      z = Mul (kept, third)
      t = Shape (z)
    }"""
    x = X.reshape(3, 4)
    made = check(text, tmp_path, x=x, keep=np.array([True, False, True]))
    shapes = {node.output[0]: node.input[0] for node in made.graph.node if node.op_type == "Shape"}
    assert shapes == {"s": "kept", "t": "z"}
