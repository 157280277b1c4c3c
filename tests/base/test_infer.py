"""Symbolic shapes and shape values, our own equality checks, and how they are told.

That inference agrees with evaluation on every operator: tests/ops/test_operators.py.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from small_models import as_in_a_file

import graphgen as gg
from graphgen import ops
from graphgen.edit import infer_model
from graphgen.errors import GraphgenError
from graphgen.forms import dim_of
from graphgen.graph import constant
from graphgen.infer import describe, infer, is_named, is_rounded, new_context, same_size
from graphgen.op import TABLE
from graphgen.ops.shapes import broadcast


def output(function: Callable[..., Any], **inputs: Any) -> ir.Value:
    return gg.build(function, **inputs).graph.outputs[0]


def inferred(function: Callable[..., Any], **inputs: Any) -> str:
    return describe(output(function, **inputs))


X = gg.float32["batch", "seq", 256]


# Shapes


@pytest.mark.parametrize(
    "function, inputs, want",
    [
        (lambda x: x + 1.0, {"x": X}, "float[batch, seq, 256]"),
        (lambda x: ops.transpose(x), {"x": X}, "float[256, seq, batch]"),
        (lambda x, y: x @ y, {"x": X, "y": gg.float32[256, "k"]}, "float[batch, seq, k]"),
        (lambda x: ops.split_heads(x, 8), {"x": X}, "float[batch, 8, seq, 32]"),
        (
            lambda x: ops.merge_heads(ops.split_heads(x, 8)),
            {"x": X},
            "float[batch, seq, 256]",
        ),
        (lambda x: ops.reduce_mean(x, [1], keepdims=0), {"x": X}, "float[batch, 256]"),
        (lambda x: ops.reduce_sum(x, None), {"x": X}, "float[1, 1, 1]"),
        (lambda x: ops.softmax(x), {"x": X}, "float[batch, seq, 256]"),
        (lambda x: ops.concat(x, x, axis=-1), {"x": X}, "float[batch, seq, 512]"),
        (lambda x: x > 0.0, {"x": X}, "bool[batch, seq, 256]"),
        (lambda x: ops.exp(x), {"x": gg.float32["(seq//20)"]}, "float[floor(seq/20)]"),
        (
            lambda x: ops.slice_(x, [1], [2**31], [1]),
            {"x": X},
            "float[batch, Max(0, seq - 1), 256]",
        ),
        (
            lambda x: ops.slice_(x, [0], [2**40], [1], [2]),
            {"x": X},
            "float[batch, -floor(-seq/2), 256]",
        ),
        (lambda x: ops.causal_mask(ops.dim(x, 1), ops.dim(x, 1)), {"x": X}, "bool[seq, seq]"),
        (
            lambda q, k: ops.attention(q, k, k),
            {"q": gg.float32["b", 4, "t", 8], "k": gg.float32["b", 2, "s", 8]},
            "float[b, 4, t, 8]",
        ),
        (
            lambda x, y: ops.cross_entropy(x, y),
            {"x": gg.float32["b", "t", 50], "y": gg.int64["b", "t"]},
            "float[]",
        ),
    ],
)
def test_symbols_pass_through(function: Any, inputs: dict[str, Any], want: str) -> None:
    assert inferred(function, **inputs) == want


@pytest.mark.parametrize(
    "function, rank",
    [
        (lambda x, s: ops.expand(x, s), 3),
        (lambda x, s: ops.tile(x, s), 2),
        (lambda x, s: ops.constant_of_shape(s), 3),
        (lambda x, s: ops.reduce_sum(x, s), 2),
    ],
)
def test_computed_sizes_still_have_a_rank(function: Any, rank: int) -> None:
    value = output(function, x=gg.float32["n", 3], s=gg.int64[3])
    assert value.shape is not None and len(value.shape) == rank
    assert len({str(d) for d in value.shape}) == rank  # a new symbol each


@pytest.mark.parametrize("shape", [ir.Shape(["batch", "seq", 256]), None])
@pytest.mark.parametrize(
    ("opset", "attributes", "scalar"),
    [
        (18, "keepdims = 0", True),
        (18, "keepdims = 0, noop_with_empty_axes = 0", True),  # as torch writes it
        (18, "keepdims = 0, noop_with_empty_axes = 1", False),
        (11, "keepdims = 0, axes = [1]", False),
    ],
)
def test_a_sum_over_all_axes_is_a_scalar(
    opset: int, attributes: str, scalar: bool, shape: ir.Shape | None
) -> None:
    text = f'<ir_version: 9, opset_import: ["": {opset}]> g (float[n, m, 256] x) => (float y)'
    text += f"{{ y = ReduceSum <{attributes}> (x) }}"
    model = ir.from_proto(onnx.parser.parse_model(text))
    model.graph.inputs[0].shape = shape
    infer_model(model)
    [y] = model.graph.outputs
    assert (y.shape is not None and len(y.shape) == 0) is scalar


@pytest.mark.parametrize(
    "a, b, want",
    [
        ((2, 3), (3,), [2, 3]),
        ((2, 1), (1, 3), [2, 3]),
        (("n", 1), (3,), ["n", 3]),
        (("n",), ("n",), ["n"]),
        (("n",), (1,), ["n"]),
        (("n",), (5,), [5]),
        ((0,), (1,), [0]),
        ((), ("n",), ["n"]),
    ],
)
def test_broadcast(a: tuple[Any, ...], b: tuple[Any, ...], want: list[Any]) -> None:
    for pair in ([a, b], [b, a]):
        shape = broadcast([ir.Shape(s) for s in pair], new_context())
        assert shape == ir.Shape(want)


@pytest.mark.parametrize(
    ("size", "named"),
    [(3, True), ("n", True), ("4*n", True), ("_d0", False), ("4*_d0", False), ("unk__3", True)],
)
def test_what_is_computed_of_a_made_up_size_is_made_up(size: Any, named: bool) -> None:
    assert is_named(ir.Shape([size])[0]) == named


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("n", "n", True),
        ("2*n + n", "3*n", True),
        ("n", "m", False),
        ("4*n", 4, False),
        ("n", "n + 1", False),
        ("Min(4, n)", "n", None),
        ("Max(0, n - 4)", "n", None),
        ("floor(n/2)", "n", None),
        ("floor(Min(63, n)**2/n)", "n", None),
        ("_d0", "n", None),
    ],
)
def test_a_size_that_is_cut_or_rounded_may_be_another(a: Any, b: Any, same: Any) -> None:
    assert same_size(*ir.Shape([a, b])) is same_size(*ir.Shape([b, a])) is same


@pytest.mark.parametrize(
    ("size", "rounded"),
    [
        (3, False),
        ("4*(n + m)", False),
        ("Min(4, n)", False),
        ("Min(4, floor(n/2))", True),
        ("Max(0, n - 4)", True),
        ("n/2", True),
        ("n**2", True),
    ],
)
def test_what_rounds_or_is_cut_below(size: Any, rounded: bool) -> None:
    assert is_rounded(ir.Shape([size])[0]) == rounded


@pytest.mark.parametrize(
    ("text", "number"), [("-n**2", -9), ("-floor(-n**2/2)", 5), ("m - n**2", -7), ("(-n)**2", 9)]
)
def test_expressions_are_read_as_they_are_written(text: str, number: int) -> None:
    assert dim_of(text).evaluate({"n": 3, "m": 2}) == number
    assert dim_of(str(dim_of(text))).evaluate({"n": 3, "m": 2}) == number


def test_different_symbols_of_a_file_broadcast_to_a_new_one() -> None:
    n, m = gg.float32["n", 4], gg.float32["m", 4]
    for function in (ops.add, ops.greater, ops.minimum):
        value = as_in_a_file(lambda a, b, f=function: f(a, b), a=n, b=m).graph.outputs[0]
        assert value.shape is not None and value.shape[1] == 4
        assert str(value.shape[0]) not in ("n", "m", "None")
    batches = {"a": gg.float32["n", 2, 4], "b": gg.float32["m", 4, 5]}
    value = as_in_a_file(ops.matmul, **batches).graph.outputs[0]
    assert value.shape is not None and str(value.shape[0]) not in ("n", "m", "None")
    assert list(value.shape[1:]) == [2, 5]


def test_shape_values_are_followed() -> None:
    def rows(x: Any) -> Any:
        return ops.reshape(x, [ops.dim(x, 0) * ops.dim(x, 1), 256])

    assert inferred(rows, x=X) == "float[batch*seq, 256]"

    def twice(x: Any) -> Any:
        return ops.expand(ops.reduce_sum(x, [0]), [2 * ops.dim(x, 0), 1, 1])

    assert inferred(twice, x=X) == "float[2*batch, seq, 256]"

    def flat(x: Any) -> Any:
        return TABLE["", "Reshape"](x, [ops.dim(x, 1), -1])

    value = output(flat, x=X)
    assert value.shape is not None and str(value.shape[0]) == "seq"

    def merged(x: Any, **attributes: Any) -> Any:
        sizes = ops.reduce_prod([ops.dim(x, 0), ops.dim(x, 1)], **attributes)
        return TABLE["", "Reshape"](x, ops.concat(sizes, [-1], axis=0))

    assert inferred(merged, x=X) == "float[batch*seq, 256]"
    value = output(lambda x: merged(x, noop_with_empty_axes=1), x=X)
    assert value.shape is not None and str(value.shape[0]) != "batch*seq"

    def halves(x: Any, count: int) -> Any:
        return ops.expand(ops.reduce_sum(x, [0]), [ops.div(count * ops.dim(x, 0), 2), 1, 1])

    assert inferred(lambda x: halves(x, 2), x=X) == "float[batch, seq, 256]"
    assert inferred(lambda x: halves(x, 3), x=X) == "float[floor(3*batch/2), seq, 256]"
    value = output(lambda x: halves(x, -3), x=X)
    assert value.shape is not None and not is_named(value.shape[0])


def test_sizes_known_before_the_run_are_not_computed() -> None:
    model = gg.build(lambda x: ops.expand(x, ops.shape(x)) + 1.0, x=gg.float32[2, 3])
    assert [node.op_type for node in model.graph] == ["Expand", "Add"]
    assert constant(model.graph.node(0).inputs[1]) is not None


def test_what_is_expanded_may_have_any_rank() -> None:
    x = ir.Value(type=ir.TensorType(ir.DataType.FLOAT))
    sizes = ir.Value(const_value=ir.tensor([2, 3]), shape=ir.Shape([2]))
    sizes.type = ir.TensorType(ir.DataType.INT64)
    node = ir.node("Expand", [x, sizes])
    infer(node, new_context())
    assert describe(node.outputs[0]) == "float[...]"


# Errors


def wide_norm(x: Any) -> Any:
    ones = np.ones(512, np.float32)
    return TABLE["", "LayerNormalization"](x, ones)


HEADS = {"q_num_heads": 3, "kv_num_heads": 3}
BAD: list[tuple[str, Any, dict[str, Any], str]] = [
    ("LayerNormalization", wide_norm, {"x": X}, r"scale is float\[512\].*\[256\]"),
    (
        "LayerNormalization",
        lambda x, s, b: TABLE["", "LayerNormalization"](x, s, b),
        {"x": X, "s": gg.float32[256], "b": gg.float32[2, 3, 1, 256]},
        "bias is .* must match",
    ),
    (
        "RMSNormalization",
        lambda x: TABLE["", "RMSNormalization"](x, np.ones(255, np.float32)),
        {"x": X},
        r"scale is float\[255\]",
    ),
    (
        "Concat",
        lambda x, y: ops.concat(x, y, axis=1),
        {"x": X, "y": gg.float32["batch", 4, 255]},
        r"dimension 2 differs: \[255, 256\]",
    ),
    ("Concat", lambda x: ops.concat(x, x, axis=3), {"x": X}, "axis 3 does not exist"),
    (
        "Concat",
        lambda x, y: ops.concat(x, y, axis=0),
        {"x": X, "y": gg.float32[256]},
        "the same rank",
    ),
    (
        "Attention",
        lambda x: ops.scaled_dot_product_attention(x, x, x, **HEADS),
        {"x": X},
        "num_heads=3 does not divide",
    ),
    (
        "MatMul",
        lambda x, y: x @ y,
        {"x": X, "y": gg.float32[255, 4]},
        "256.*255|255.*256|[Ii]ncompatible",
    ),
    (
        "Add",
        lambda x, y: x + y,
        {"x": gg.float32[2, 3], "y": gg.float32[4]},
        "dimensions [34] and [34] do not broadcast",
    ),
    (
        "Mul",
        lambda x, y: x * y,
        {"x": gg.float32[2], "y": gg.float16[2]},
        "float16, but the other operands are float; cast one of them",
    ),
    (
        "Gather",
        lambda x, y: ops.gather(x, y),
        {"x": gg.float32[2], "y": gg.float32[2]},
        "indices is float; it must be one of int32, int64",
    ),
    ("Transpose", lambda x: ops.transpose(x, perm=[1, 0]), {"x": X}, r"perm \[1, 0\] .* 3 axes"),
    ("Transpose", lambda x: ops.transpose(x, perm=[0, 0, 1]), {"x": X}, "name each of 3 axes once"),
    (
        "Clip",
        lambda x: ops.clip(x, np.zeros(256, np.float32), 1.0),
        {"x": X},
        r"min is float\[256\]; it must be a scalar",
    ),
    ("Softmax", lambda x: ops.softmax(x, axis=3), {"x": X}, "axis 3 does not exist in 3 dim"),
    ("Softmax", lambda x: ops.softmax(x, axis=-4), {"x": X}, "axis -4 does not exist"),
    ("Flatten", lambda x: ops.flatten(x, axis=4), {"x": X}, "axis 4 does not exist in 3 dim"),
    ("Flatten", lambda x: ops.flatten(x, axis=-4), {"x": X}, "axis -4 does not exist in 3 dim"),
    ("Pad", lambda x: ops.pad(x, [1, 1], None, [3]), {"x": X}, "axis 3 does not exist in 3 dim"),
    ("Pad", lambda x: ops.pad(x, [1, 1]), {"x": X}, "pads has 2 numbers; 3 axes need two each"),
    (
        "Reshape",
        lambda x: ops.reshape(x, [5, 5]),
        {"x": gg.float32[4, 6]},
        "24 elements cannot become 25",
    ),
    (
        "Reshape",
        lambda x: TABLE["", "Reshape"](x, [ops.dim(x, 0), 5]),
        {"x": gg.float32["n", 6]},
        "6 elements cannot become 5",
    ),
]


@pytest.mark.parametrize("name, function, inputs, message", BAD)
def test_wrong_types_are_told(
    name: str, function: Any, inputs: dict[str, Any], message: str
) -> None:
    with pytest.raises(GraphgenError, match=message) as caught:
        gg.build(function, **inputs)
    told = str(caught.value)
    assert told.startswith(f"{name}(") and "test_infer.py:" in told
    assert "\n" not in told
    assert describe(gg.build(lambda x: x + 0, x=inputs["x"]).graph.inputs[0]) in told


def test_a_limit_may_be_of_one_element() -> None:
    assert inferred(lambda x: ops.clip(x, np.zeros(1, np.float32)), x=X) == "float[batch, seq, 256]"


def test_error_names_the_line_of_the_call() -> None:
    def function(x: Any) -> Any:
        y = ops.exp(x)
        return y + np.zeros(7, np.float32)  # this line

    line = function.__code__.co_firstlineno + 2
    with pytest.raises(GraphgenError, match=rf"\(test_infer.py:{line}\)$"):
        gg.build(function, x=X)


def test_unknown_attribute_and_missing_input_are_told() -> None:
    with pytest.raises(GraphgenError, match=r"Softmax: .*axes.*its attributes axis.*test_infer"):
        gg.build(lambda x: ops.softmax(x, axes=1), x=X)
    with pytest.raises(GraphgenError, match=r"MatMul: .*'b'; its inputs are a, b"):
        gg.build(lambda x: ops.matmul(x), x=X)


def test_operators_of_the_runtime_are_typed_where_their_bodies_end() -> None:
    """Operands that are packed, or left out, as the runtime's own optimizer leaves them."""
    text = """<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        g (float[b, t, 2, 3, 8] packed, float[b, t, 48] qkv, float[b, 1, c, 8] past,
           int32[b] lengths, int32 total, float[b, 2, t, 8] x, int64[b, t] places,
           float[16, 4] cosines) => (y0, y1, p, r) {
        y0 = com.microsoft.MultiHeadAttention <num_heads = 2> (packed)
        y1, p, v = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 1>
            (qkv, , , past, past, lengths, total)
        r = com.microsoft.RotaryEmbedding (x, places, cosines, cosines)
    }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    infer_model(model)
    assert [describe(y) for y in model.graph.outputs] == [
        "float[b, t, 16]",
        "float[b, t, 32]",
        "float[b, 1, c + t, 8]",
        "float[b, 2, t, 8]",
    ]


@pytest.mark.parametrize(
    "x, angles, want",
    [
        ("b, 2, t, 8", ("2, t, 4", "2, t, 4"), "float[2, 2, t, 8]"),
        ("b, 2, t, 8", ("b, 3, 4", "b, 3, 4"), "float[b, 2, 3, 8]"),
        ("b, t, 16", ("9, 4", "9, 4", "2, t"), "float[2, t, 16]"),
    ],
)
def test_angles_of_a_fixed_size_tell_that_of_what_they_turn(x, angles, want, tmp_path) -> None:
    """The kernel takes no others; otherwise a training graph would change a shape."""
    types = zip(("float", "float", "int64"), angles, "csp", strict=False)
    inputs = ", ".join(f"{kind}[{sizes}] {name}" for kind, sizes, name in types)
    text = f"""<ir_version: 10, opset_import: ["" : 23]>
        g (float[{x}] x, {inputs}) => (float[{x}] y) <float[1] w = {{2}}> {{
        scaled = Mul (x, w)
        y = RotaryEmbedding <num_heads = 2> (scaled, {", ".join("csp"[: len(angles)])})
    }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    model.graph.outputs[0].shape = None
    infer_model(model)
    assert describe(model.graph.outputs[0]) == want
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    gg.artifacts(gg.load(path), tmp_path / "artifacts", loss="mse", optimizer=gg.SGD())


def test_too_few_operands_of_an_operator_of_the_runtime_are_told() -> None:
    for operands, message in (("s", "missing a required argument: 'b'"), ("s, , s", None)):
        text = f"""<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
            g (float[m, k] s) => (y) {{ y = com.microsoft.DynamicQuantizeMatMul ({operands}) }}"""
        model = ir.from_proto(onnx.parser.parse_model(text))
        if message is None:
            infer_model(model)
            assert describe(model.graph.outputs[0]) == "unknown[...]"
        else:
            with pytest.raises(GraphgenError, match=message):
                infer_model(model)


def test_what_is_cast_to_8_bits_is_no_list_of_sizes() -> None:
    """Which the library makes a tensor of, where numpy cannot."""
    head = '<ir_version: 10, opset_import: ["": 21]> g () => (float8e5m2[2] y)'
    nodes = "<uint64[2] x = {18446744073709551615, 7}> { y = Cast <to = 19> (x) }"
    model = ir.from_proto(onnx.parser.parse_model(f"{head} {nodes}"))
    infer_model(model)
    assert describe(model.graph.outputs[0]) == "float8e5m2[2]"


def test_equal_parts_of_a_multiple_of_a_size_have_that_size() -> None:
    """As heads that are stacked in the batch, which TensorFlow's code takes apart again."""
    x = ir.val("x", ir.DataType.FLOAT, ["4*n + 8", "t"])
    node = ir.node("Split", [x], {"axis": 0, "num_outputs": 4}, num_outputs=4)
    infer(node, new_context())
    assert [describe(y) for y in node.outputs] == ["float[n + 2, t]"] * 4
