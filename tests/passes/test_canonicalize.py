"""The canonical form: every rule by structure and value, and what it must leave alone."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from small_models import as_in_a_file, relative_rms, run_plain

import graphgen as gg
from graphgen import ops
from graphgen.edit import infer_model
from graphgen.export.write import to_bytes
from graphgen.graph import constant, count_operators
from graphgen.match import Engine
from graphgen.nn.module import build
from graphgen.op import TABLE
from graphgen.passes import optimize
from graphgen.passes.canonicalize import canonicalize

X = gg.float32["b", "s", 8]
T = (1, 0, 2)

FLOAT = ir.DataType.FLOAT


def behind(x: Any, other: Any) -> Any:
    """A transpose behind a product, next to that of x."""
    return ops.transpose(x * other, perm=T) + ops.exp(ops.transpose(x, perm=T))


def mixed(x: Any, m: Any) -> Any:
    return ops.exp(x) * m + -1e9 * (1.0 - m)


def opposed(m: Any, x: Any, y: Any, other: Any = ops.logical_not) -> Any:
    return ops.cast(other(m), to=FLOAT) * y + ops.cast(m, to=FLOAT) * x


CASES: dict[str, tuple[Any, dict[str, int]]] = {
    "times one, minus zero": (lambda x: ops.exp(x * 1.0 + -0.0) / 1.0 - 0.0, {"Exp": 1}),
    "zero that is added to minus zero stays": (
        lambda x: ops.cast(1.0 / (x * 0.0 + 0.0) > 0.0, to=FLOAT),
        {"Mul": 1, "Add": 1, "Div": 1, "Greater": 1, "Cast": 1},
    ),
    "minus zero that is subtracted stays": (lambda x: ops.exp(x - -0.0), {"Sub": 1, "Exp": 1}),
    "zero that broadcasts stays": (lambda x: ops.exp(x) - np.zeros((3, 1, 1, 1), np.float32),
                                   {"Exp": 1, "Sub": 1}),
    "identity": (lambda x: ops.exp(ops.identity(x)), {"Exp": 1}),
    "cast to the same": (lambda x: ops.exp(ops.cast(x, to=ir.DataType.FLOAT)), {"Exp": 1}),
    "cast to another stays": (lambda x: ops.cast(x, to=ir.DataType.DOUBLE), {"Cast": 1}),
    "two transposes cancel": (
        lambda x: ops.exp(ops.transpose(ops.transpose(x, perm=[1, 0, 2]), perm=[1, 0, 2])),
        {"Exp": 1},
    ),
    "two transposes are one": (
        lambda x: ops.transpose(ops.transpose(x, perm=[1, 0, 2]), perm=[0, 2, 1]),
        {"Transpose": 1},
    ),
    "a transpose of operands that are there": (
        lambda x: behind(x, ops.transpose(ops.tanh(ops.transpose(x, perm=T)), perm=T)),
        {"Add": 1, "Exp": 1, "Mul": 1, "Tanh": 1, "Transpose": 3},
    ),
    "a transpose of operands that are not stays": (
        lambda x: behind(x, ops.tanh(x)), {"Add": 1, "Exp": 1, "Mul": 1, "Tanh": 1, "Transpose": 2},
    ),
    "two reshapes are one": (
        lambda x: ops.reshape(ops.reshape(x, [0, 0, 2, 4]), [0, 0, 4, 2]), {"Reshape": 1},
    ),
    "reshape and back": (
        lambda x: ops.exp(ops.reshape(ops.reshape(x, [0, 0, 2, 4]), [0, 0, 8])), {"Exp": 1},
    ),
    "expand to the same": (lambda x: ops.exp(ops.expand(x, ops.shape(x))), {"Exp": 1}),
    "and with true": (
        lambda x: ops.where((x > 0.0) & np.array(True), x, 0.0), {"Greater": 1, "Where": 1},
    ),
    "choice by products": (
        lambda x: mixed(x, ops.cast(x > 0.0, to=FLOAT)), {"Greater": 1, "Exp": 1, "Where": 1},
    ),
    "choice by a product with not": (lambda x: opposed(x > 0.0, ops.exp(x), 3.0),
                                     {"Greater": 1, "Exp": 1, "Where": 1}),
    "products with one condition stay": (
        lambda x: opposed(x > 0.0, ops.exp(x), 3.0, ops.identity),
        {"Greater": 1, "Exp": 1, "Cast": 2, "Mul": 2, "Add": 1},
    ),
    "products with other numbers stay": (
        lambda x: mixed(x, ops.tanh(x)), {"Tanh": 1, "Sub": 1, "Exp": 1, "Mul": 2, "Add": 1},
    ),
}  # fmt: skip


def canonical(model: ir.Model) -> None:
    canonicalize(model, Engine(context=infer_model(model)))


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    body, wanted = CASES[name]
    model = build(body, primitives=True, x=X)
    form = build(body, primitives=True, x=X)
    canonical(form)
    assert count_operators(form) == dict(sorted(wanted.items()))
    x = np.random.default_rng(0).standard_normal((3, 5, 8)).astype(np.float32)
    assert relative_rms(run_plain(model, {"x": x})[0], run_plain(form, {"x": x})[0]) < 1e-6
    again = count_operators(form)
    canonical(form)
    assert count_operators(form) == again


def only(model: ir.Model) -> ir.Node:
    [node] = model.graph
    return node


def test_norms_count_axes_from_the_end_reductions_and_layout_from_the_front() -> None:
    reduction = build(lambda x: ops.reduce_sum(x, [-1, 0]), x=X)
    canonical(reduction)
    assert list(constant(only(reduction).inputs[1])) == [0, 2]  # type: ignore[arg-type]
    softmax = build(lambda x: ops.softmax(x, axis=1), x=X)
    canonical(softmax)
    assert only(softmax).attributes["axis"].as_int() == -2
    joined = build(lambda x: ops.concat(x, ops.exp(x), axis=-1), x=X)
    canonical(joined)
    assert list(joined.graph)[-1].attributes["axis"].as_int() == 2


@pytest.mark.parametrize("keepdims", [0, 1])
def test_a_reduction_of_nothing_keeps_its_shape(keepdims: int) -> None:
    model = build(lambda x: ops.reduce_sum(x, [1], keepdims=keepdims), x=gg.float32["n", "m", 3])
    x = np.ones((2, 0, 3), np.float32)
    wanted, got = (run_plain(m, {"x": x})[0] for m in (model, optimize(model).model))
    assert got.shape == wanted.shape == x.sum(1, keepdims=bool(keepdims)).shape
    assert not np.any(got)


def test_constants_stand_on_the_right_and_operands_in_order() -> None:
    model = build(lambda x: ops.exp(x) * (2.0 + ops.exp(x)), x=X)
    canonical(model)
    for node in model.graph:
        if node.op_type in ("Add", "Mul") and constant(node.inputs[1]) is None:
            names = [str(v.name) for v in node.inputs if v is not None]
            assert names == sorted(names)
        if node.op_type == "Add":
            assert constant(node.inputs[1]) is not None


def test_a_shape_computed_at_run_time_becomes_a_constant() -> None:
    def body(x: Any) -> Any:
        return TABLE["", "Reshape"](x, [ops.dim(x, 0), ops.dim(x, 1), 2, 4])

    model = build(body, x=X)
    canonical(model)
    assert list(constant(only(model).inputs[1])) == [0, 0, 2, 4]  # type: ignore[arg-type]


def test_what_is_left_is_not_written_beside_a_size_that_may_be_0() -> None:
    """The runtime cannot tell -1 there; where the graph says so, it may be a constant."""
    wide = gg.float32["b", "t", 2, 4]

    def body(x: Any, rest: Any) -> Any:
        return TABLE["", "Reshape"](x, [ops.dim(x, 0), 4, rest or ops.dim(x, 1), 2])

    model = build(lambda x: body(x, None), x=wide)
    canonical(model)
    assert constant(next(n for n in model.graph if n.op_type == "Reshape").inputs[1]) is None
    model = build(lambda x: body(x, -1), x=wide)
    canonical(model)
    assert list(constant(only(model).inputs[1])) == [0, 4, -1, 2]  # type: ignore[arg-type]


def test_an_einsum_of_rows_takes_an_empty_batch_as_a_product_too() -> None:
    x = gg.float32["b", "n"]
    best = optimize(build(lambda x: ops.einsum(x, x, equation="ab,ab->a"), x=x)).model
    assert "Einsum" not in count_operators(best)
    for sizes in ((0, 3), (0, 0), (2, 0), (2, 3)):
        [y] = run_plain(best, {"x": np.ones(sizes, np.float32)})
        assert y.tolist() == [sizes[1]] * sizes[0]


@pytest.mark.parametrize(
    "equation", ["bhts,bshd,hde->bte", "bhts,bshd,hde", "...hts,...shd,hde->...te"]
)
def test_an_einsum_of_three_operands_is_two_products(equation: str) -> None:
    specs = {"x": gg.float32["b", 2, "t", "s"], "y": gg.float32["b", "s", 2, 4]}
    specs["w"] = gg.float32[2, 4, 3]
    model = build(lambda x, y, w: ops.einsum(x, y, w, equation=equation), **specs)
    best = optimize(model).model
    assert "Einsum" not in count_operators(best)
    rng = np.random.default_rng(0)
    for b, t, s in ((2, 5, 3), (1, 1, 1)):
        shapes = {"x": (b, 2, t, s), "y": (b, s, 2, 4), "w": (2, 4, 3)}
        feeds = {key: rng.standard_normal(n).astype(np.float32) for key, n in shapes.items()}
        (wanted,), (given,) = run_plain(model, feeds), run_plain(best, feeds)
        assert wanted.shape == given.shape and relative_rms(wanted, given) < 1e-6


@pytest.mark.parametrize(("b", "t", "s"), [("b", "t", "s"), (2, 3, 5)])
def test_sizes_of_a_product_are_read_from_its_operands(b: Any, t: Any, s: Any) -> None:
    def body(q: Any, k: Any) -> Any:
        y, shape = q @ ops.exp(ops.swap_last(k)), TABLE["", "Shape"]
        rows = TABLE["", "Slice"](shape(y), [-2], [2**62], [0])
        row = ops.gather(shape(y, start=1), np.int64(0))
        return y * 2.0, shape(y * 2.0), rows, row, ops.gather(shape(y), [2, 0])

    model = build(body, q=gg.float32[b, t, 8], k=gg.float32[b, s, 8])
    form = model.clone()
    canonical(form)
    [product] = [node for node in form.graph if node.op_type == "MatMul"]
    assert s == 5 or [use.node.op_type for use in product.outputs[0].uses()] == ["Mul"]
    feeds = {"q": np.ones((2, 3, 8), np.float32), "k": np.ones((2, 5, 8), np.float32)}
    for wanted, got in zip(run_plain(model, feeds), run_plain(form, feeds), strict=True):
        np.testing.assert_array_equal(wanted, got)


def test_sizes_without_a_name_are_read_from_operands_too() -> None:
    """What is cut by numbers of the run has sizes that inference makes up."""
    shape = TABLE["", "Shape"]

    def body(x: Any, n: Any) -> Any:
        x = ops.exp(ops.slice_(x, [0, 0], n, [0, 1]))
        q = ops.transpose(ops.reshape(x, [ops.dim(x, 0), ops.dim(x, 1), 2, 4]), perm=[0, 2, 1, 3])
        scores = q @ ops.swap_last(q)
        merged = ops.reshape(ops.softmax(scores * 0.5), [-1, ops.dim(x, 1), ops.dim(x, 1)])
        turned = ops.fused_matmul(q, q, transB=1, transBatchA=1, transBatchB=1)
        return (
            *(shape(y) for y in (scores, ops.tanh(scores * 0.5), turned)),
            shape(ops.swap_last(q), start=2, end=3),
            shape(merged, end=1),
        )

    model = build(body, x=gg.float32["b", "t", 8], n=gg.int64[2])
    form = model.clone()
    canonical(form)
    left = {"Shape", "Concat", "Mul", "Slice", "Exp", "Reshape", "Transpose"}
    assert not {*count_operators(form)} - left
    feeds = {"x": np.ones((3, 5, 8), np.float32), "n": np.array([2, 3])}
    for wanted, got in zip(run_plain(model, feeds), run_plain(form, feeds), strict=True):
        np.testing.assert_array_equal(wanted, got)


def test_a_size_is_read_at_once_where_it_is_made() -> None:
    """However many products lie between; each round of rules went back by one."""

    def body(x: Any) -> Any:
        y = ops.concat([x, x], axis=0)
        for _ in range(24):
            y = y @ np.eye(8, dtype=np.float32)
        return y, TABLE["", "Shape"](y, end=1)

    model = build(body, x=gg.float32["t", 8])
    canonical(model)
    [shape] = [node for node in model.graph if node.op_type == "Shape"]
    [read] = [value for value in shape.inputs if value is not None]
    made = read.producer()
    assert made is not None and made.op_type == "Concat"


def test_the_shape_of_a_product_that_may_broadcast_stays() -> None:
    def body(q: Any, k: Any) -> Any:
        return TABLE["", "Shape"](q @ ops.swap_last(k))

    model = as_in_a_file(body, q=gg.float32["a", 3, 8], k=gg.float32["b", 5, 8])
    canonical(model)
    for a, b in ((1, 4), (4, 1), (4, 4)):
        feeds = {"q": np.ones((a, 3, 8), np.float32), "k": np.ones((b, 5, 8), np.float32)}
        assert run_plain(model, feeds)[0].tolist() == [4, 3, 5]


def test_batches_that_are_cut_lend_theirs_to_a_product_that_may_repeat_them() -> None:
    """So that nothing but the softmax reads the scores of an attention."""
    shape = TABLE["", "Shape"]

    def body(q: Any, k: Any, n: Any, m: Any) -> Any:
        q, k = ops.exp(ops.slice_(q, [0], n, [0])), ops.exp(ops.slice_(k, [0], m, [0]))
        scores = q @ ops.swap_last(k)
        y = ops.softmax(scores) @ k
        return y, shape(scores, start=0, end=1), shape(y, start=0, end=2)

    inputs = {"q": gg.float32["a", 2, 3, 8], "k": gg.float32["b", 2, 5, 8]}
    model = as_in_a_file(body, **inputs, n=gg.int64[1], m=gg.int64[1])
    best = gg.optimize(model, target="cpu")
    assert best.report.fused()["attention"] == 1
    for n, m in ((1, 4), (4, 1), (3, 3)):
        feeds = {"q": np.ones((4, 2, 3, 8), "f"), "k": np.ones((5, 2, 5, 8), "f")}
        feeds |= {"n": np.array([n]), "m": np.array([m])}
        for wanted, got in zip(run_plain(model, feeds), run_plain(best.model, feeds), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_an_expansion_that_may_repeat_stays() -> None:
    model = as_in_a_file(
        lambda x, y: ops.exp(ops.expand(x, ops.shape(y))),
        x=gg.float32["a", 3],
        y=gg.float32["b", 3],
    )
    canonical(model)
    given = {"x": np.ones((1, 3), np.float32), "y": np.ones((4, 3), np.float32)}
    assert run_plain(model, given)[0].shape == (4, 3)


def test_what_a_slice_leaves_keeps_the_size_that_it_is_given() -> None:
    """As "what is left" it would have no name, and nothing behind it would fuse."""

    def attend(x: Any) -> Any:
        y = ops.window_attention(x, x, x, window=4, q_num_heads=2, kv_num_heads=2)
        return x + ops.exp(y)

    model = build(attend, primitives=True, x=X)
    canonical(model)
    infer_model(model)
    node = model.graph.outputs[0].producer()
    assert node is not None and node.op_type == "Add"
    for x in node.inputs:
        assert x is not None and [str(d) for d in x.shape or ()] == ["b", "s", "8"]


def test_sizes_that_a_converter_named_are_not_the_same() -> None:
    """Merged files hold such names twice."""
    model = build(lambda x, a: (ops.exp(x), TABLE["", "Shape"](ops.exp(a))),
                  x=gg.float32["unk__0", 8], a=gg.float32["unk__0", 8])  # fmt: skip
    canonical(model)
    given = {"x": np.ones((3, 8), np.float32), "a": np.ones((5, 8), np.float32)}
    assert run_plain(model, given)[1].tolist() == [5, 8]


@pytest.mark.parametrize(("sizes", "kept"), [([0, 5], True), ([-1, 5], False), ([3, 5], False)])
def test_allowzero_goes_where_no_size_is_zero(sizes: list[int], kept: bool) -> None:
    """A size of 0 means none with it, and the same as before without it."""
    rows = 0 if kept else 3
    spec = gg.float32[rows, 5, 1]
    model = build(lambda x: TABLE["", "Reshape"](x, np.array(sizes), allowzero=1), x=spec)
    canonical(model)
    [node] = [n for n in model.graph if n.op_type != "Identity"]
    assert ("allowzero" in node.attributes) == kept


@pytest.mark.parametrize("reduce", [ops.reduce_sum_square, ops.reduce_l1, ops.reduce_prod])
def test_a_folded_reduction_keeps_its_dtype(reduce: Any) -> None:
    """onnx's reference makes int64 of int32."""
    model = gg.build(lambda x: reduce(ops.zeros_like(x) + 3), x=gg.int32[2])
    best = gg.optimize(model).model
    assert best.graph.outputs[0].dtype == ir.DataType.INT32
    x = np.zeros(2, np.int32)
    assert gg.Session(best)(x=x) == gg.Session(model)(x=x)


@pytest.mark.parametrize(
    ("limits", "dropped"),
    [
        ("starts = {0, 0}, ends = {9223372036854775807, 8}, axes = {1, 2}, steps = {1, 1}", True),
        ("starts = {0, 0}, ends = {2147483647, 8}, axes = {0, -1}, steps = {1, 1}", True),
        ("starts = {0, 0}, ends = {2147483647, 8}, axes = {0, -1}, steps = {1, 2}", False),
        ("starts = {0, 0}, ends = {2147483647, 7}, axes = {0, -1}, steps = {1, 1}", False),
        ("starts = {0, 0}, ends = {100, 8}, axes = {0, -1}, steps = {1, 1}", False),
        ("starts = {0, 0}, ends = {2147483647, -1}, axes = {0, -1}, steps = {1, 1}", False),
        ("starts = {0, 1}, ends = {2147483647, 8}, axes = {0, -1}, steps = {1, 1}", False),
    ],
)
def test_a_slice_of_all_elements_goes_and_no_other(limits: str, dropped: bool) -> None:
    constants = ", ".join(f"int64[2] {one}" for one in re.split(r", (?=[a-z])", limits))
    text = f"""<ir_version: 10, opset_import: ["": 21]>
      g (float[b, s, 8] x) => (float[b, t, d] y) <{constants}> {{
        part = Slice(x, starts, ends, axes, steps) y = Exp(part) }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    x = np.random.default_rng(0).standard_normal((101, 3, 8), np.float32)
    wanted = run_plain(model, {"x": x})[0]
    canonical(model)
    assert count_operators(model).get("Slice", 0) == (not dropped)
    assert np.array_equal(run_plain(model, {"x": x})[0], wanted)


def assigned(x: Any, *, start: int = 0, read: int = 0, step: int = 1, turned: int = 0) -> Any:
    """x[:, start:, start:] gets exp(x)[:, read:, read:] plus twice that, as exporters write it."""
    whole = ops.exp(x)
    part = ops.slice_(whole, [read, read], [read + 4 - start] * 2, [1, 2])
    sizes = ops.shape(part)
    counts = [ops.range_(0, ops.dim(x, 0), 1), *[np.arange(start, 4)[::step]] * 2]
    if turned:
        counts[1:] = [np.arange(start, 4), np.arange(start, 4)[::-1].copy()]
    shaped = [ops.reshape(n, [-1, *[1] * (2 - i)]) for i, n in enumerate(counts)]
    places = [ops.unsqueeze(ops.expand(n, sizes), [-1]) for n in shaped]
    return ops.scatter_nd(whole, ops.concat(*places, axis=-1), part + ops.tanh(part))


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ({}, 0),
        ({"start": 1, "read": 1}, 0),
        ({"start": 1}, 1),
        ({"turned": 1}, 1),
        ({"step": -1}, 1),
        ({"start": 1, "read": 1, "step": -1}, 1),
    ],
)
def test_a_store_to_all_places_of_a_slice_in_order_is_no_scatter(how: Any, left: int) -> None:
    x = np.random.default_rng(0).standard_normal((3, 4, 4)).astype("f4")
    model = build(lambda x: assigned(x, **how), x=gg.float32["b", 4, 4])
    best = optimize(model, verify=True).model
    assert count_operators(best).get("ScatterND", 0) == left
    assert relative_rms(run_plain(best, {"x": x})[0], assigned(x, **how)) < 1e-6


TENSORFLOW_SLICE = """<ir_version: 9, opset_import: ["" : 18]>
    g (float[b, t, 8] x) => (float[?, ?, ?] y)
    <int32[2] zero = {0, 0}, int32[2] axes = {0, 1}, int32[2] one = {1, 1},
     int32 all = {1000000000}, int32 low = {-1000000000},
     float[2] most = {-1000000000.0, 1000000000.0}> {
      shape = Shape <end = 2> (x)
      whole = Cast <to = 6> (shape)
      floats = Cast <to = 1> (whole)
      large = Max (floats, most)
      ends = Cast <to = 6> (large)
      is_all = Equal (ends, all)
      goes_back = Less (one, zero)
      reversed = And (is_all, goes_back)
      end = Where (reversed, low, ends)
      cut = Slice (x, zero, end, axes, one)
      y = Relu (cut)
    }"""


def test_a_slice_of_all_as_tensorflow_writes_it_goes() -> None:
    """Its ends are compared as floats, and no element of it goes back."""
    model = ir.from_proto(onnx.parser.parse_model(TENSORFLOW_SLICE))
    best = optimize(model, passes=["canonicalize", "clean", "canonicalize", "clean"])
    assert count_operators(best.model) == {"Relu": 1}


@pytest.mark.parametrize("count", [0, 1])
def test_a_store_to_no_place_is_no_scatter(count: int) -> None:
    """As tracers write x[4:] = y, of a window that needs no shift."""

    def stores(x: Any, y: Any) -> Any:
        return ops.abs(ops.scatter_nd(x, np.zeros((count, 2, 2), "i8"), y))

    given = {"x": np.ones((3, 4), "f4"), "y": np.full((count, 2), 5, "f4")}
    model = build(stores, x=gg.float32["b", 4], y=gg.float32[count, 2])
    best = optimize(model, verify=True).model
    assert count_operators(best).get("ScatterND", 0) == count
    assert np.array_equal(run_plain(best, given)[0], stores(**given))


STAGE = """w{i} = Shape <start = 2> (x{i}) {more}
    all{i} = Concat <axis = 0> (zero, more{i}, zeros)
    pairs{i} = Reshape (all{i}, two) turned{i} = Slice (pairs{i}, minus, least, zero, minus)
    across{i} = Transpose (turned{i}) pads{i} = Reshape (across{i}, minus)
    wide{i} = Pad (x{i}, pads{i}) x{j} = Tanh (wide{i})
"""
MORE = {
    "whole": """over{i} = Mod (w{i}, m{i}) left{i} = Sub (m{i}, over{i})
        more{i} = Mod (left{i}, m{i})""",
    "floats": """f{i} = Cast <to = 1> (w{i}) fm{i} = Cast <to = 1> (m{i}) q{i} = Div (f{i}, fm{i})
        c{i} = Ceil (q{i}) n{i} = Cast <to = 7> (c{i}) all{i}s = Mul (n{i}, m{i})
        more{i} = Sub (all{i}s, w{i})""",
}


@pytest.mark.parametrize("how", MORE)
def test_widths_that_depend_on_padded_sizes_are_folded_one_after_the_other(how: str) -> None:
    """As TorchScript writes F.pad: the pairs of widths are turned around."""
    multiples = (4, 3, 5, 7)
    stages = "".join(
        STAGE.format(i=i, j=i + 1, more=MORE[how].format(i=i)) for i in range(len(multiples))
    )
    numbers = ", ".join(f"int64[1] m{i} = {{{m}}}" for i, m in enumerate(multiples))
    text = f"""<ir_version: 9, opset_import: ["": 18]> g (float[b, 3, 7] x0) => (float[b, 3, n] x4)
        <{numbers}, int64[1] zero = {{0}}, int64[4] zeros = {{0, 0, 0, 0}}, int64[2] two
         = {{-1, 2}}, int64[1] minus = {{-1}}, int64[1] least = {{-9}}> {{ {stages} }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    infer_model(model)
    if how == "whole":
        assert model.graph.node(-1).outputs[0].shape == ["b", 3, 14], "nothing has to be folded"
    x = np.random.default_rng(0).standard_normal((2, 3, 7)).astype("f4")
    best = optimize(model).model
    assert count_operators(best) == {"Pad": 4, "Tanh": 4}
    assert best.graph.outputs[0].shape == ["b", 3, 14]
    assert np.array_equal(run_plain(best, {"x0": x})[0], run_plain(model, {"x0": x})[0])


@pytest.mark.parametrize("shape", [(), (3,), ("a", 3)])
def test_a_one_that_adds_dimensions_adds_them_in_the_runtime_too(shape: Any) -> None:
    """It makes y / x of y · (1 / x), and drops the shape of the 1."""
    one = np.ones((1,) * (len(shape) + 2), np.float32)
    model = gg.build(lambda x, y: (one / x) * y, x=gg.float32[shape], y=gg.float32[()])
    best = optimize(model, target="cpu")
    x = np.arange(1, 1 + 3 ** len(shape), dtype=np.float32).reshape((3,) * len(shape))
    [result] = gg.Session(to_bytes(best))(x=x, y=np.float32(2))
    np.testing.assert_array_equal(result, one * 2 / x)


@pytest.mark.parametrize(
    ("shape", "axis", "turned"),
    [((), 0, False), ((4,), 1, False), ((4,), 0, True), ((4,), -1, True)],
)
def test_rows_of_a_vector_are_one_row_or_single_numbers(
    shape: tuple[int, ...], axis: int, turned: bool
) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    main (float{[*shape] or ""} x) => (float{[*shape] or ""} y) {{
      rows = Flatten <axis = {axis}> (x) weights = Softmax (rows) sizes = Shape (x)
      y = Reshape (weights, sizes) }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    x = np.ones(shape, np.float32) * np.arange(math.prod(shape), dtype=np.float32)
    best = optimize(model).model
    assert ("Flatten" not in count_operators(best)) == turned
    wanted, y = (run_plain(each, {"x": x})[0] for each in (model, best))
    assert np.array_equal(y.ravel(), wanted.ravel())  # the runtime gives that of a scalar an axis


@pytest.mark.parametrize(
    ("scores", "kept"), [("weights = Softmax (x)", False), ("weights = Exp (x)", True)]
)
def test_infinity_is_not_looked_for_where_there_is_none(
    tmp_path: Path, scores: str, kept: bool
) -> None:
    """As torch.nan_to_num writes it behind the softmax of attention."""
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    main (float[n,4] x) => (float[n,4] y) <float none = {{0}}, float most = {{3e38}}> {{
      {scores}
      nan = IsNaN (weights)
      known = Where (nan, none, weights)
      wide = Cast <to = 11> (known)
      infinite = IsInf (wide)
      positive = Greater (known, none)
      asked = And (infinite, positive)
      y = Where (asked, most, known)
    }}"""
    onnx.save(onnx.parser.parse_model(text), path := tmp_path / "model.onnx")
    model = optimize(gg.load(path)).model
    assert count_operators(model).get("IsInf", 0) == kept
    x = np.array([[1, 2, np.nan, 4], [1, 2, np.inf, 4], [-np.inf] * 4, [1e30, 0, -9, 200]], "f4")
    [y] = run_plain(model, {"x": x})
    with np.errstate(all="ignore"):
        e = np.exp(x - (0 if kept else x.max(1, keepdims=True)))
        e = e if kept else e / e.sum(1, keepdims=True)
    np.testing.assert_allclose(y, np.nan_to_num(e, posinf=3e38), rtol=1e-6)
