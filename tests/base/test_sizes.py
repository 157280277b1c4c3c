"""Every inferred size holds, whatever the symbols stand for.

Each small graph of sizes.py runs in ONNX Runtime, its own optimizations off, at several bindings of
its symbols: the sizes and contents that inference found are evaluated and compared with the actual
ones. A symbol that inference made up has to stand for one number within a run. The optimized graph
runs at the same bindings: what was folded holds for all of them.
"""

import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from sizes import CASES, REPEATED, Case

import graphgen as gg
from graphgen.edit import infer_model
from graphgen.export.write import to_bytes
from graphgen.graph import all_values
from graphgen.infer import is_named
from graphgen.ops.shape_values import _where_empty

Arrays = Mapping[str, Any]

FUNCTIONS = {"floor": math.floor, "Max": max, "Min": min}
"""Those of sizes."""


def parsed(case: Case) -> onnx.ModelProto:
    """The graph, whose outputs are all results of its nodes."""
    constants: dict[str, str] = {}

    def named(found: re.Match[str]) -> str:
        [text] = found.groups()
        numbers = text.strip("[]").split(",")
        dtype = "float" if "." in text else "int64"
        size = f"[{len(numbers)}]" if text.startswith("[") else ""
        value = f"Constant <value = {dtype}{size} {{{', '.join(numbers)}}}> ()"
        return constants.setdefault(value, f"constant_{len(constants)}")

    nodes = re.sub(r"#(\[.*?\]|-?[\d.]+)", named, case.nodes)
    made = " ".join(f"{name} = {value}" for value, name in constants.items())
    head = f'<ir_version: 10, opset_import: ["": 23]> g ({case.inputs}) => ()'
    model = ir.from_proto(onnx.parser.parse_model(f"{head} {{ {made} {nodes} }}"))
    model.graph.sort()
    proto = ir.to_proto(model)
    for node in proto.graph.node:
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output if name)
    return proto


def run(data: bytes, feeds: Arrays) -> Arrays:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    names = [y.name for y in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def feeds_of(proto: onnx.ModelProto, sizes: dict[str, int], given: Arrays) -> Arrays:
    feeds, rng = {}, np.random.default_rng(0)
    for value in proto.graph.input:
        tensor = value.type.tensor_type
        shape = [sizes[d.dim_param] if d.dim_param else d.dim_value for d in tensor.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        feeds[value.name] = given.get(value.name, rng.integers(0, 3, shape).astype(dtype))
    return feeds


def wrong(model: ir.Model, context: Any, actual: Arrays, sizes: dict[str, int]) -> Iterator[str]:
    """What was inferred otherwise than it is."""
    known = dict(sizes)

    def differs(claim: Any, size: int) -> bool:
        if isinstance(claim, int):
            return claim != size
        if claim.free_symbols() == {str(claim)}:
            return known.setdefault(str(claim), size) != size
        if not claim.free_symbols() <= known.keys():
            return False
        numbers = {symbol: Fraction(number) for symbol, number in known.items()}
        return bool(eval(str(claim), dict(FUNCTIONS), numbers) != size)

    for value in all_values(model.graph):
        array = actual.get(str(value.name))
        if value.producer() is None or not isinstance(array, np.ndarray):
            continue
        assert value.dtype is not None and value.dtype.numpy() == array.dtype, value
        if value.shape is not None and (
            len(value.shape) != array.ndim or any(map(differs, value.shape, array.shape))
        ):
            yield f"{value.name} is {value.shape}, not {array.shape}"
        held = context.get_symbolic_value(value)
        numbers = array.ravel().tolist()
        if held is not None and (len(held) != array.size or any(map(differs, held, numbers))):
            yield f"{value.name} holds {held}, not {numbers}"
        constant = value.const_value
        if constant is not None and not np.array_equal(constant.numpy(), array):
            yield f"{value.name} holds {constant.numpy()}, not {array}"


def bindings_of(case: Case) -> list[dict[str, int]]:
    given = [dict(pair.split("=") for pair in text.split()) for text in case.bindings.split(";")]
    return [{name: int(size) for name, size in binding.items()} for binding in given]


@pytest.mark.share(3)
@pytest.mark.parametrize("family", CASES)
def test_sizes_hold_for_every_binding(family: str, tmp_path: Path) -> None:
    for case in CASES[family]:
        proto = parsed(case)
        data, model = proto.SerializeToString(), ir.from_proto(proto)
        context = infer_model(model)
        trials = []
        for sizes in bindings_of(case):
            feeds = feeds_of(proto, sizes, case.given)
            try:
                actual = run(data, feeds)
            except Exception as error:
                if 0 in sizes.values():
                    continue
                raise AssertionError(f"{case} with {sizes}: {error}") from error
            found = list(wrong(model, context, actual, sizes))
            assert not found, f"{case} with {sizes}: {found}"
            trials.append((sizes, feeds, actual))
        check_optimized(case, proto, trials, tmp_path / "graph.onnx")


def check_optimized(case: Case, proto: onnx.ModelProto, trials: list[Any], path: Path) -> None:
    """Optimize the graph, of which only the last results are outputs, and compare."""
    read = {name for node in proto.graph.node for name in node.input}
    last = [y for y in proto.graph.output if y.name not in read]
    kinds = {name: type(y) for name, y in trials[0][2].items()}
    del proto.graph.output[:]
    proto.graph.output.extend(y for y in last if kinds[y.name] is np.ndarray)
    path.write_bytes(proto.SerializeToString())
    data = to_bytes(gg.optimize(gg.load(path)))
    for sizes, feeds, actual in trials:
        try:
            found = run(data, feeds)
        except Exception as error:
            raise AssertionError(f"{case} with {sizes}, optimized: {error}") from error
        for name, y in found.items():
            assert y.dtype == actual[name].dtype and y.shape == actual[name].shape, (case, sizes)
            assert np.allclose(y, actual[name], 1e-5, 1e-5, equal_nan=True), (case, sizes, name)


@pytest.mark.parametrize(
    ("inputs", "nodes", "want"),
    [
        ("float[n, 4] x", "s = Shape (x) y = ConstantOfShape (s)", "n 4"),
        (
            "float[n, 4] x",
            "c = Concat <axis = 0> (x, x, x) s = Shape (x) k = Gather (s, #[0]) t = Add (k, k) "
            "y = Slice (c, k, t, #[0])",
            "n 4",
        ),
        (
            "float[n, 4] x, float[m, 4] z",
            "c = Concat <axis = 0> (x, z) s = Shape <end = 1> (x) "
            "y = Slice (c, s, #[9223372036854775807], #[0])",
            "m 4",
        ),
        (
            "float[n, 4] x, float[32, 4] z",
            "c = Concat <axis = 0> (x, z) s = Shape <end = 1> (x) "
            "y = Slice (c, s, #[9223372036854775807], #[0])",
            "32 4",
        ),
        ("float[n, 4] x, int64[1] k", "y = Slice (x, k, #[3], #[0])", "? 4"),
        (
            "float[n, 4] x",
            "s = Shape <end = 1> (x) k = Neg (s) y = Slice (x, k, #[9223372036854775807], #[0])",
            "n 4",
        ),
        (
            "float[n, 4] x, float[m, 4] z",
            "s = Shape <end = 1> (z) k = Neg (s) y = Slice (x, k, #[9223372036854775807], #[0])",
            "? 4",
        ),
        ("float[n, 4] x, float[m, 4] z", "c = Concat <axis = 0> (x, x) y = Add (z, c)", "2*n 4"),
        (
            "float[n, n] x",
            "s = Shape <start = 1> (x) t = Constant <value = float[3] {1, 2, 3}> () "
            "a = Slice (t, #[0], s) b = Slice (a, #[0], s) y = Add (x, b)",
            "n n",
        ),
        (
            "float[n, n] x",
            "s = Shape <start = 1> (x) t = Constant <value = float[3] {1, 2, 3}> () "
            "a = Slice (t, #[0], s) k = Neg (s) b = Slice (a, k, #[9223372036854775807]) "
            "y = Add (x, b)",
            "n n",
        ),
        (
            "float[n, 4] x",
            "s = Shape (x) k = Gather (s, #[0]) d = Sub (#[8], k) "
            "p = Concat <axis = 0> (#[0, 0], d, #[0]) y = Pad (x, p)",
            "8 4",
        ),
        (
            "float[n, 6] x",
            "s = Shape (x) k = Gather (s, #[0, 0]) c = Concat <axis = 0> (x, x) "
            "y, z = Split (c, k)",
            "n 6",
        ),
        ("float[n, m] x", "y = Unique <axis = 0> (x)", "? m"),
        *(  # u has an unknown rank
            (f"float[n, 4] x, int64[m] t{more}", f"u = Reshape (x, t) {nodes}", want)
            for more, nodes, want in (
                ("", "y = Shape (u)", "?"),
                ("", "s = Shape (u) y = Gather (s, t)", "m"),
                (
                    "",
                    "s = Shape (u) k = Gather (s, #0) e = Unsqueeze (k, #[0]) "
                    "r = Concat <axis = 0> (e, #[2, -1]) y = Reshape (u, r)",
                    "? 2 ?",
                ),
                ("", "y = Transpose <perm = [1, 0]> (u)", "? ?"),
                (", float[6, k] w", "y = Gemm <transB = 1> (u, w)", "? 6"),
                (", float[6, k] w", "y = Gemm <transA = 1> (w, u)", "k ?"),
                (", float[4] w", "y = Gemm (u, w)", "? ?"),  # which the runtime refuses
            )
        ),
        (
            "float[n, 4, m] x",
            "s = Shape (x) k = Gather (s, #[0]) d = Sub (k, #[1]) a = Slice (x, #[1], #[9], #[0]) "
            "t = Concat <axis = 0> (d, #[2, 2, -1]) y = Reshape (a, t)",
            "? 2 2 ?",
        ),
        *(  # repeated heads, 0 of them where m is 0: 4 do not broadcast with that, 1 does
            (f"float[n, 2, 2, m, 8] x, float[n, {heads}, 5, 8] q", f"{REPEATED} {nodes}", want)
            for heads, nodes, want in (
                (4, "t = Transpose <perm = [0, 1, 3, 2]> (y) p = MatMul (q, t)", "n 4 m 8"),
                (1, "t = Transpose <perm = [0, 1, 3, 2]> (y) p = MatMul (q, t)", "n ? ? 8"),
                (4, "u = Slice (q, #[4], #[5], #[2]) p = Add (u, y)", "n 4 m 8"),
                (1, "u = Slice (q, #[4], #[5], #[2]) p = Add (u, y)", "n ? ? 8"),
            )
        ),
        (
            "float[1, 2, n] x",
            "y = MaxPool <kernel_shape = [3], strides = [2], pads = [1, 1]> (x)",
            "1 2 floor(n/2 + 1/2)",
        ),
        (
            "float[1, 2, n] x",
            "y = AveragePool <kernel_shape = [2], strides = [2]> (x)",
            "1 2 Max(1, floor(n/2))",
        ),
        (
            "float[n, 4] x",
            "s = Shape (x) c = Constant <value = bool[2] {0, 1}> () t = Where (c, #[7, 7], s) "
            "y = ConstantOfShape (t)",
            "n 7",
        ),
        *(  # 1.5 is not 1
            (
                "float[1, 2] x",
                f"s = Shape (x) f = Cast <to = 1> (s) c = Constant <value = float[2] {{{c}}}> () "
                "e = Equal (c, f) t = Where (e, #[7, 7], s) y = ConstantOfShape (t)",
                want,
            )
            for c, want in (("1.5, 2", "? ?"), ("inf, 2", "? ?"))
        ),
        (  # not maxima in each other, of which each takes three times as long as the one before
            "float[b, 2, n] x",
            " ".join(
                f"{y} = MaxPool <kernel_shape = [{k}], strides = [2]> ({x})"
                for x, y, k in ("xp2", "pq1", "qr2", "rt2", "tu2", "uv2", "vw2", "wy2")
            ),
            "b 2 Max(1, floor(n/256 + 1/128))",
        ),
        ("float[1, 2, n] x", "y = LpPool <kernel_shape = [3], strides = [2]> (x)", "1 2 ?"),
        (  # of no row, an image without a column has one window
            "float[n, 2, m] x",
            "p = Pad (x, #[-1, 0, -1, 0, 0, -1]) "
            "y = LpPool <kernel_shape = [1], strides = [3]> (p)",
            "n - 1 2 Max(1, floor(m/3))",
        ),
        (
            "float[1, 2, n] x",
            "y = MaxPool <kernel_shape = [2], strides = [2], ceil_mode = 1> (x)",
            "1 2 ?",
        ),
        (
            "float[1, 2, n] x",
            "p = AveragePool <kernel_shape = [2], strides = [2]> (x) "
            "s = Shape (x) k = Gather (s, #[2]) h = Div (k, #[2]) "
            "t = Concat <axis = 0> (#[1, 2], h) e = Expand (#0.5, t) y = Add (p, e)",
            "1 2 floor(n/2)",
        ),
        (
            "float[n, 2] x",
            "s = Shape (x) k = Gather (s, #0) h = Div (k, #4) a = Pow (h, #2) b = Add (a, #1) "
            "c = Reshape (b, #[1]) t = Concat <axis = 0> (c, #[2]) y = Expand (#0.5, t)",
            "floor(n/4)**2 + 1 2",
        ),
        (
            "float[n, m] x",
            "s = Shape (x) k = Gather (s, #0) l = Gather (s, #1) a = Min (k, l) b = Max (l, #3) "
            "c = Min (a, k, #7) d = Unsqueeze (b, #[0]) e = Unsqueeze (c, #[0]) "
            "t = Concat <axis = 0> (d, e) y = ConstantOfShape (t)",
            "Max(3, m) Min(7, m, n)",
        ),
        ("float[n, 4] x", "s = Shape (x) t = Max (s, s) y = ConstantOfShape (t)", "n 4"),
    ],
)
def test_sizes_are_known(inputs: str, nodes: str, want: str) -> None:
    model = ir.from_proto(parsed(Case(inputs, "", nodes)))
    infer_model(model)
    [y] = [value for value in all_values(model.graph) if value.name == "y"]
    assert y.shape is not None
    assert " ".join(str(d) if is_named(d) else "?" for d in y.shape) == want


def test_a_size_that_is_divided_by_0_where_another_is_0_is_no_error() -> None:
    """⌊k / n⌋ - 1, at least 0, for n rows, as TorchScript computes Parakeet's positions."""
    n, m = ir.SymbolicDim("n"), ir.SymbolicDim("Max(0, floor(m/n) - 1)")
    found = _where_empty((m, n), (n, m), (n, m), (), 1)
    assert ("n", True, set(), set(), set()) in found  # nothing is known there


def test_the_length_of_a_convolution_is_not_tried_below_1() -> None:
    """At samples = 1 it would be -1, which a reshape takes for what is left."""
    nodes = (
        "c = Conv <strides = [20]> (x, w) s = Shape (c) l = Gather (s, #[2]) "
        "t = Concat <axis = 0> (#[2], l, #[32]) y = Reshape (v, t)"
    )
    inputs = "float[2, 1, samples] x, float[8, 1, 40] w, float[2, rows, 4, 8] v"
    model = ir.from_proto(parsed(Case(inputs, "", nodes)))
    infer_model(model)
    [y] = [value for value in all_values(model.graph) if value.name == "y"]
    assert [*map(str, y.shape or ())] == ["2", "floor(samples/20) - 1", "32"]


def test_images_in_blocks_have_the_sizes_of_images(tmp_path: Path) -> None:
    """As the runtime saves convolutions at its level all, where the processor has such kernels."""
    nodes = (
        "a = Conv <kernel_shape = [3, 3], strides = [2, 1], pads = [1, 1, 1, 0]> (x, w) "
        "r = Relu (a) "
        "b = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (r) "
        "c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], group = 32> (b, v) s = Add (b, c) "
        "p = AveragePool <kernel_shape = [2, 2]> (s) g = GlobalAveragePool (p) "
        "h = GlobalMaxPool (p) t = Mul (g, h) y = Mul (p, t)"
    )
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> '
        f"g (float[n, 3, h, m] x) => (float[a, b, c, d] y) {{ {nodes} }}"
    )
    rng = np.random.default_rng(0)
    for name, shape in (("w", (32, 3, 3, 3)), ("v", (32, 1, 3, 3))):
        weight = rng.standard_normal(shape).astype("f4")
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / "saved.onnx")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    saved = onnx.load(tmp_path / "saved.onnx")
    blocked = {node.op_type for node in saved.graph.node if node.domain.endswith("nchwc")}
    if not blocked:
        pytest.skip("onnxruntime has no convolutions in blocks for this processor")
    assert {"Conv", "MaxPool", "ReorderOutput"} <= blocked
    del saved.graph.value_info[:]
    model = ir.from_proto(saved)
    context = infer_model(model)
    last = model.graph.outputs[0].shape
    assert last is not None and last[1] == 32 and "floor" in str(last[2])
    del saved.graph.output[:]
    for node in saved.graph.node:
        saved.graph.output.extend(onnx.helper.make_empty_tensor_value_info(y) for y in node.output)
    for sizes in ({"n": 2, "h": 17, "m": 9}, {"n": 1, "h": 8, "m": 8}):
        x = rng.standard_normal((sizes["n"], 3, sizes["h"], sizes["m"])).astype("f4")
        assert not [*wrong(model, context, run(saved.SerializeToString(), {"x": x}), sizes)]
