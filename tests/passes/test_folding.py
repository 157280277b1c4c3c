"""What is computed ahead of the run is what the runtime computes in it."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper
from small_models import run_plain

import graphgen as gg

FLOATS = np.array([0, np.inf, 1, 2.5, -np.inf, np.nan, -1], np.float32)
WHOLE = np.array([3, -1, 2**62, 7, -(2**63), 2**53 + 1], np.int64)
LOW = np.array([-(2**63) + 1], np.int64)

KEPT = {
    "a power that overflows": ("Pow", [LOW, np.array([2])]),
    "a power of 54 bits": ("Pow", [np.array([94906267]), np.array(2.0, np.float32)]),
    "a sum of 63 bits": ("ReduceSum", [WHOLE]),
    "squares that overflow": ("ReduceSumSquare", [WHOLE]),
    "the mean of none": ("ReduceMean", [FLOATS[:0]]),
    "the largest next to NaN": ("ReduceMax", [FLOATS]),
    "the place of the largest next to NaN": ("ArgMax", [FLOATS]),
    "the largest of infinities": ("Hardmax", [FLOATS]),
    "infinity times a slope": ("PRelu", [FLOATS, FLOATS[::-1]]),
    "infinity without a limit below": ("Clip", [FLOATS, None, np.float32(1)]),
    "the place of a scalar": ("NonZero", [np.float32(3)]),
    "no place of a scalar": ("NonZero", [np.float32(0)]),
    "the larger of NaN and a number, written": (
        "ScatterElements",
        [FLOATS, np.array([5, 5]), FLOATS[2:4]],
        {"reduction": "max"},
    ),
    "the less of NaN and a number, written": (
        "ScatterND",
        [FLOATS, np.array([[5], [1]]), FLOATS[2:4]],
        {"reduction": "min"},
    ),
    "one hot of a fraction": ("OneHot", [FLOATS, np.float32(3), FLOATS[2:4]]),
}
FOLDED = {
    "a power": ("Pow", [np.array([-3, 1 << 26]), np.array(2)]),
    "a power of floats": ("Pow", [FLOATS, np.float32(2)]),
    "sizes": ("ReduceProd", [np.array([16, 1 << 20])]),
    "infinity that moves": ("Tile", [FLOATS, np.array([2])]),
    "infinity that is chosen": ("Where", [FLOATS > 1, FLOATS, FLOATS[:1]]),
    "a sum with infinity": ("Add", [FLOATS, FLOATS[::-1]]),
    "a mean": ("ReduceMean", [FLOATS[2:4]]),
}


@pytest.mark.parametrize("name", [*KEPT, *FOLDED])
def test_what_is_folded_is_what_the_runtime_gives(name: str, tmp_path: Path) -> None:
    operator, given, *attributes = (KEPT | FOLDED)[name]
    names = ["" if x is None else f"x{i}" for i, x in enumerate(given)]
    held = [numpy_helper.from_array(x, n) for x, n in zip(given, names, strict=True) if n]
    nodes = [
        helper.make_node(operator, names, ["t"], **dict(*attributes)),
        helper.make_node("Expand", ["t", "n"], ["y"]),
    ]
    sizes = helper.make_tensor_value_info("n", onnx.TensorProto.INT64, [1])
    graph = helper.make_graph(nodes, "g", [sizes], [onnx.ValueInfoProto(name="y")], held)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(proto, tmp_path / "graph.onnx")
    model, feeds = gg.load(tmp_path / "graph.onnx"), {"n": np.array([1])}
    [wanted] = run_plain(model, feeds)
    best = gg.optimize(model).model
    [got] = run_plain(best, feeds)
    assert np.array_equal(wanted, got, equal_nan=wanted.dtype.kind == "f")
    assert [node.op_type for node in best.graph] == [operator] * (name in KEPT) + ["Expand"]


def test_constants_of_the_same_bytes_in_another_dtype_stay_apart() -> None:
    """Zero points of int4 and uint4 say how to round."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    main (float[4] x) => (float[4] y, float[4] z)
      <float scale = {0.5}, int4 signed = {0}, uint4 unsigned = {0}, uint4 same = {0}> {
      p = QuantizeLinear (x, scale, signed) y = DequantizeLinear (p, scale, signed)
      q = QuantizeLinear (x, scale, unsigned) z = DequantizeLinear (q, scale, same) }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    best = gg.optimize(model).model
    assert len(best.graph.initializers) == 3
    x = np.array([-1, 1, 2, 3], np.float32)
    assert np.array_equal(run_plain(best, {"x": x}), [x, [0, 1, 2, 3]])


def test_floats_become_integers_of_four_bits_in_the_run() -> None:
    """The runtime rounds them; onnx's reference, which folds, cuts their fractions off."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    main () => (float[4] y) <float[4] x = {0.5, 1.5, -2.5, 300.7}>
    { p = Cast <to = 22> (x) y = Cast <to = 1> (p) }"""
    best = gg.optimize(ir.from_proto(onnx.parser.parse_model(text))).model
    assert [node.op_type for node in best.graph] == ["Cast", "Cast"]


@pytest.mark.parametrize("operator", ["Softplus", "ReduceLogSumExp"])
def test_no_opset_is_written_at_which_float16_overflows(operator: str) -> None:
    """At opset 18, the runtime computes them by their bodies."""
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    main (float16[2] x, int64[1] a) => (float16[k] y, float16[m] z)
    {{ y = {operator} (x) z = ReduceMax (x, a) }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    feeds = {"x": np.array([100, 65504], np.float16), "a": np.array([0])}
    [wanted, _] = run_plain(model, feeds)
    [got, _] = run_plain(gg.optimize(model).model, feeds)
    assert np.isfinite(wanted).all() and np.array_equal(wanted, got)


@pytest.mark.parametrize(
    ("dtype", "a", "b"),
    [("int8", 100, 2), ("uint8", 100, 3), ("int32", 1 << 30, 4), ("int64", 1 << 62, 4)],
)
def test_integers_that_wrap_around_are_no_sizes(dtype: str, a: int, b: int) -> None:
    """What a tensor of sizes holds was calculated without end, and compared: uint8 ended so."""
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    main () => ({dtype}[1] y) <{dtype}[1] a = {{{a}}}, {dtype}[1] b = {{{b}}}>
    {{ p = Mul (a, b) y = Min (a, p) }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    wanted = np.minimum(np.array([a], dtype), np.array([a], dtype) * np.array([b], dtype))
    assert np.array_equal(run_plain(gg.optimize(model).model, {}), [wanted])


def test_the_least_of_negative_zeros_is_negative() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    main () => (float[1] y) <float[1] z = {-0.0}, float[1] one = {1}>
    { m = Min (z, z) y = Div (one, m) }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    assert run_plain(gg.optimize(model).model, {}) == [[-np.inf]]
