"""Reverse mode: un-broadcasting, sharing, what has no gradient, and how that is told.

The rule of every operator is checked in tests/ops/test_operators.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from small_models import as_in_a_file, run_plain

import graphgen as gg
from graphgen import nn, ops
from graphgen.autodiff import grad
from graphgen.edit import infer_model, register_constants
from graphgen.errors import GraphgenError
from graphgen.export.write import to_bytes
from graphgen.graph import count_operators, is_float, parameters
from graphgen.infer import infer
from graphgen.measure.reference import evaluate
from graphgen.op import TABLE
from graphgen.operands import Array
from graphgen.record import PATH, current_tape, recording
from graphgen.value import Value, adopt

RANDOM = np.random.default_rng(2)


def total(x: Any) -> Any:
    return ops.reduce_sum(x, None, keepdims=0)


def build_loss(function: Callable[..., Any], **inputs: Any) -> ir.Model:
    return gg.build(lambda **values: total(ops.sin(function(**values))), **inputs)


def loss_of_a_file(function: Callable[..., Any], **inputs: Any) -> ir.Model:
    return as_in_a_file(lambda **values: total(ops.sin(function(**values))), **inputs)


def check(model: ir.Model, feeds: dict[str, Array], wrt: list[str] | None = None) -> ir.Model:
    """The gradient against a central difference, one element at a time; returns its model."""
    result = grad(model, wrt=wrt)
    names = [str(v.name).removesuffix("_grad") for v in result.graph.outputs[1:]]
    for name, gradient in zip(names, evaluate(result, feeds)[1:], strict=True):
        assert gradient.shape == feeds[name].shape
        want = np.zeros(gradient.shape)
        for index in np.ndindex(gradient.shape):
            step = np.zeros(gradient.shape)
            step[index] = 1e-6
            up, down = (
                evaluate(model, {**feeds, name: feeds[name] + s * step})[0] for s in (1, -1)
            )
            want[index] = (up - down) / 2e-6
        np.testing.assert_allclose(gradient, want, rtol=1e-6, atol=1e-8, err_msg=name)
    return result


def decisions(model: ir.Model) -> int:
    """How many sums choose their axes at run time."""
    return count_operators(model).get("NonZero", 0)


def normal(*shape: int) -> Array:
    return np.asarray(RANDOM.normal(size=shape))


# Un-broadcasting


def test_equal_symbols_need_no_decision_at_run_time() -> None:
    n = gg.float32["n", 3]
    model = build_loss(lambda a, b: a * b, a=n, b=n)
    result = check(model, {"a": normal(2, 3), "b": normal(2, 3)})
    assert decisions(result) == 0
    assert "ReduceSum" not in [v.op_type for v in list(result.graph)[3:]]


def test_sizes_known_as_one_need_no_decision_at_run_time() -> None:
    inputs = {"a": gg.float32["n", 1, 3], "b": gg.float32["m", 1], "c": gg.float32[3]}
    model = build_loss(lambda a, b, c: (a + c) * b, **inputs)
    result = check(model, {"a": normal(2, 1, 3), "b": normal(4, 1), "c": normal(3)})
    assert decisions(result) == 0


@pytest.mark.parametrize("n, m", [(1, 1), (1, 4), (4, 1), (4, 4)])
def test_different_symbols_are_decided_at_run_time(n: int, m: int) -> None:
    model = loss_of_a_file(lambda a, b: a * b, a=gg.float32["n", 3], b=gg.float32["m", 3])
    result = check(model, {"a": normal(n, 3), "b": normal(m, 3)})
    assert decisions(result) == 2


@pytest.mark.parametrize("n", [1, 4])
def test_symbol_against_a_number_is_decided_at_run_time(n: int) -> None:
    model = loss_of_a_file(lambda a, b: a * b, a=gg.float32["n", 3], b=gg.float32[4, 3])
    result = check(model, {"a": normal(n, 3), "b": normal(4, 3)})
    assert decisions(result) == 1


@pytest.mark.parametrize("n, m", [(1, 3), (3, 1), (3, 3)])
def test_batches_of_a_product_are_decided_at_run_time(n: int, m: int) -> None:
    model = loss_of_a_file(lambda a, b: a @ b, a=gg.float32["n", 2, 4], b=gg.float32["m", 4, 2])
    check(model, {"a": normal(n, 2, 4), "b": normal(m, 4, 2)})


def test_a_value_whose_sizes_were_decided_can_be_broadcast_again() -> None:
    def function(a: Any, b: Any, c: Any) -> Any:
        return ops.exp(ops.exp(a) * b) * c

    one = {name: gg.float32[name, 2] for name in "abc"}
    for sizes in ((1, 3, 1), (3, 1, 1), (1, 1, 3)):
        feeds = {name: normal(size, 2) / 4 for name, size in zip("abc", sizes, strict=True)}
        check(loss_of_a_file(function, **one), feeds)


# Sharing


def test_repeated_inputs_add_up() -> None:
    x = gg.float32["n", 3]
    check(build_loss(lambda x: x * x, x=x), {"x": normal(2, 3)})
    check(build_loss(lambda x: x @ ops.swap_last(x), x=x), {"x": normal(2, 3)})
    check(build_loss(lambda x: ops.concat(x, x, ops.exp(x), axis=0), x=x), {"x": normal(2, 3)})
    check(build_loss(lambda x: ops.maximum(x, x) - x / 3.0, x=x), {"x": normal(2, 3)})


def test_output_that_is_not_used_counts_as_zeros() -> None:
    def second(x: Any) -> Any:
        _, part, _ = ops.split(x, axis=1, num_outputs=3)
        return ops.exp(part)

    result = check(build_loss(second, x=gg.float32["n", 6]), {"x": normal(2, 6)})
    (gradient,) = evaluate(result, {"x": normal(2, 6)})[1:]
    assert not gradient[:, [0, 1, 4, 5]].any() and gradient[:, [2, 3]].all()

    def uneven(x: Any) -> Any:
        first, rest = ops.split(x, [1, 5], axis=1, num_outputs=2)
        return first * rest

    check(build_loss(uneven, x=gg.float32["n", 6]), {"x": normal(2, 6)})


def test_gather_counts_repeated_rows_and_leaves_indices_alone() -> None:
    inputs = {"x": gg.float32["n", 2], "ids": gg.int64["b", "t"]}
    model = build_loss(lambda x, ids: ops.gather(x, ids), **inputs)
    ids = np.array([[1, 1], [0, -1]])
    result = check(model, {"x": normal(4, 2), "ids": ids})
    assert [v.name for v in result.graph.outputs[1:]] == ["x_grad"]


def test_integer_path_carries_no_gradient() -> None:
    def function(x: Any) -> Any:
        whole = ops.cast(ops.cast(x, to=ir.DataType.INT64), to=ir.DataType.FLOAT)
        return x * whole

    check(build_loss(function, x=gg.float32[3]), {"x": np.array([1.5, 2.5, -3.5])})


def test_condition_is_not_differentiated() -> None:
    model = build_loss(lambda x: ops.where(x > 0.0, ops.exp(x), x), x=gg.float32["n"])
    check(model, {"x": np.array([1.5, -2.5])})


# Parameters


class Two(nn.Module):
    def __init__(self) -> None:
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def __call__(self, x: Any) -> Any:
        return total(self.second(ops.tanh(self.first(x))))


def test_frozen_parameters_get_no_gradient_and_cost_nothing() -> None:
    model = gg.build(Two(), x=gg.float32["n", 3])
    names = ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert set(names) <= set(model.graph.initializers)
    feeds = {"x": normal(2, 3)}
    every = grad(model, wrt=names)
    last = grad(model, wrt=["second.weight"])
    assert [v.name for v in last.graph.outputs[1:]] == ["second.weight_grad"]
    assert len(last.graph) < len(every.graph)
    np.testing.assert_array_equal(evaluate(last, feeds)[1], evaluate(every, feeds)[3])
    assert len(model.graph.outputs) == 1  # the model itself is left as it was


def test_loss_is_the_same_and_the_backward_pass_keeps_module_paths() -> None:
    model = gg.build(Two(), x=gg.float32["n", 3])
    feeds = {"x": normal(2, 3)}
    result = grad(model, wrt=["first.weight"])
    np.testing.assert_array_equal(evaluate(model, feeds)[0], evaluate(result, feeds)[0])
    added = list(result.graph)[len(model.graph) :]
    assert {n.metadata_props.get(PATH, "") for n in added} == {"", "first", "second"}


def test_a_gradient_that_is_an_output_already_is_refused() -> None:
    model = gg.build(lambda x: {"loss": total(ops.exp(x) * x)}, x=gg.float32[3])
    with pytest.raises(GraphgenError, match="the model already has an output x_grad; rename"):
        grad(grad(model), of="loss")


def test_an_input_is_named_once() -> None:
    model = gg.build(lambda x: total(ops.exp(x)), x=gg.float32[3])
    with pytest.raises(GraphgenError, match="wrt= names x twice; name it once"):
        grad(model, wrt=["x", "x"])


def test_label_smoothing_over_a_number_of_classes_that_is_known_at_run_time() -> None:
    model = gg.build(
        lambda x, y: ops.cross_entropy(x, y, label_smoothing=0.1),
        x=gg.float32["batch", "classes"],
        y=gg.int64["batch"],
    )
    check(model, {"x": normal(3, 4), "y": np.array([1, -100, 2])})


@pytest.mark.parametrize("reduction", ["mul", "max", "min"])
def test_elements_that_are_scattered_into_one_place(reduction: Any) -> None:
    index = np.array([[0, 2, 0], [0, 2, 1]])
    x, u = normal(3, 3), normal(2, 3)
    u[0, 1] = x[0, 2] = 0.0
    model = gg.build(
        lambda x, u: total(ops.sin(ops.scatter_elements(x, index, u, reduction=reduction))),
        x=gg.float32[3, 3],
        u=gg.float32[2, 3],
    )
    check(model, {"x": x, "u": u})
    rows = gg.build(
        lambda x, u: total(ops.sin(ops.scatter_nd(x, index[:, :1], u, reduction=reduction))),
        x=gg.float32["n", 3],
        u=gg.float32[2, 3],
    )
    check(rows, {"x": x, "u": u})


@pytest.mark.parametrize(("reduction", "n"), [("max", 4), ("min", 4), ("mul", 3)])
def test_equal_elements_share_a_maximum_and_two_zeros_a_product(reduction: Any, n: int) -> None:
    """As torch's scatter_reduce has it."""
    values = [0.0] if reduction == "mul" else [2.0]
    model = gg.build(
        lambda x, u: total(
            ops.scatter_elements(x, np.zeros(3, np.int64), u, reduction=reduction) * [5.0, 1.0]
        ),
        x=gg.float32[2],
        u=gg.float32[3],
    )
    x, u = np.array([*values, 3.0]), np.array(values * 3)
    _, dx, du = evaluate(grad(model), {"x": x, "u": u})
    share = 0.0 if reduction == "mul" else 5 / n
    np.testing.assert_array_equal(dx, [share, 1.0])
    np.testing.assert_array_equal(du, [share] * 3)


def test_equal_operands_share_a_maximum() -> None:
    model = gg.build(lambda a, b: total(ops.maximum(a, b)), a=gg.float32[3], b=gg.float32[3])
    _, da, db = evaluate(grad(model), {"a": np.array([1.0, 2, 3]), "b": np.array([2.0, 2, 2])})
    np.testing.assert_array_equal([da, db], [[0, 0.5, 1], [1, 0.5, 0]])


def test_slices_that_a_condition_chooses() -> None:
    model = loss_of_a_file(lambda x, c: ops.compress(x, c, axis=1), x=gg.float32["n", 3],
                           c=gg.bool_[3])  # fmt: skip
    check(model, {"x": normal(2, 3), "c": np.array([True, False, True])}, ["x"])


RESIZED = {
    "sizes": '<mode = "linear", axes = [2, 3]> (x, none, none, sizes)',
    "aspect": '<mode = "linear", axes = [3, 2], keep_aspect_ratio_policy = "not_larger"> '
    "(x, none, none, sizes)",
    "scales": '<mode = "cubic"> (x, none, scales)',
    "nearest": '<coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"> '
    "(x, none, scales)",
}


@pytest.mark.parametrize("call", RESIZED.values(), ids=RESIZED)
def test_resizing_by_what_the_run_says(call: str, tmp_path: Path) -> None:
    text = f"""
        <ir_version: 10, opset_import: ["" : 22]>
        graph (float[n, 2, h, w] x, int64[2] sizes, float[4] scales) => (float loss) {{
            none = Constant <value = float[0] {{}}> ()
            y = Resize {call}
            z = Sin (y)
            loss = ReduceSum <keepdims: int = 0> (z)
        }}"""
    (tmp_path / "m.onnx").write_bytes(onnx.parser.parse_model(text).SerializeToString())
    model = gg.load(tmp_path / "m.onnx")
    scales = np.array([1, 1, 2, 0.5], np.float32)
    check(model, {"x": normal(1, 2, 3, 4), "sizes": np.array([2, 7]), "scales": scales}, ["x"])


DEFINED = {
    "Celu": "<alpha: float = 0.7> (x)",
    "MeanVarianceNormalization": "<axes: ints = [0, 2]> (x)",
    "Shrink": "<bias: float = 0.1, lambd: float = 0.3> (x)",
    "Softsign": "(x)",
    "ThresholdedRelu": "<alpha: float = 0.2> (x)",
    "CenterCropPad": "<axes: ints = [1, 2]> (x, size)",
}


@pytest.mark.parametrize(("name", "call"), DEFINED.items())
def test_what_onnx_defines_by_a_function_has_its_gradient(
    name: str, call: str, tmp_path: Path
) -> None:
    text = f"""
        <ir_version: 10, opset_import: ["" : 22]>
        graph (float[n, 3, 4] given) => (float loss)
        <int64[2] size = {{2, 5}}, int64[4] grid = {{2, 1, 3, 2}}, int64[3] parts = {{-1, 2, 3}}> {{
            x = {"Reshape (given, parts)" if name == "AffineGrid" else "Identity (given)"}
            y = {name} {call}
            z = Sin (y)
            loss = ReduceSum <keepdims: int = 0> (z)
        }}"""
    (tmp_path / "m.onnx").write_bytes(onnx.parser.parse_model(text).SerializeToString())
    model = gg.load(tmp_path / "m.onnx")
    x, d = (normal(1, 3, 4) if name == "AffineGrid" else normal(2, 3, 4) for _ in range(2))
    result = grad(model)  # in which the function stands
    loss, slope = evaluate(result, {"given": x})
    (plain,) = run_plain(model, {"given": x.astype(np.float32)})
    assert plain == pytest.approx(loss, rel=1e-5)
    up, down = (evaluate(result, {"given": x + s * d})[0] for s in (1e-6, -1e-6))
    assert (slope * d).sum() == pytest.approx((up - down) / 2e-6, rel=1e-6)


@pytest.mark.parametrize("tuples", [False, True])
def test_rows_taken_often_get_every_cotangent_in_two_threads(tuples: bool) -> None:
    """Whole numbers, whose sum is exact: one that two threads add to at once shows."""
    indices = RANDOM.integers(-1, 1, (64, 64, 2))

    def function(x: Any, g: Any) -> Any:
        taken = ops.gather_nd(x, indices) if tuples else ops.gather(x, indices[..., 0])
        return total(taken * g)

    shapes = ([2, 2, 64], [64, 64, 64]) if tuples else ([2, 64], [64, 64, 64])
    x, g = (RANDOM.integers(0, 8, shape).astype(np.float32) for shape in shapes)
    feeds = {"x": x, "g": g}
    model = gg.build(function, x=gg.float32[tuple(shapes[0])], g=gg.float32[64, 64, 64])
    model = grad(model, wrt=["x"])
    assert "ScatterND" not in count_operators(model)  # the runtime's loses some, now and then
    session = gg.Session(to_bytes(model), threads=2)
    want = evaluate(model, feeds)[1]
    for _ in range(40):
        np.testing.assert_array_equal(session(feeds)[1], want)


# Composites


def test_composite_without_a_rule_is_replaced_by_its_body() -> None:
    model = build_loss(ops.mean_squared_error, x=gg.float32["n", 3], target=gg.float32["n", 3])
    result = check(model, {"x": normal(2, 3), "target": normal(2, 3)})
    name = "graphgen::MeanSquaredError"
    assert name in count_operators(model) and name not in count_operators(result)


def test_composite_inside_a_body_is_replaced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Attention", "Softmax"):
        monkeypatch.setattr(TABLE["", name], "rule", None)
    shape = gg.float32[1, 2, 3, 4]
    model = build_loss(ops.scaled_dot_product_attention, q=shape, k=shape, v=shape)
    result = check(model, {name: normal(1, 2, 3, 4) for name in "qkv"})
    assert not {"Attention", "Softmax"} & set(count_operators(result))


def test_composite_with_a_rule_stays_whole() -> None:
    model = build_loss(ops.softmax, x=gg.float32[2, 3])
    result = check(model, {"x": normal(2, 3)})
    assert count_operators(result)["Softmax"] == 1


def test_composite_that_carries_no_gradient_stays_whole() -> None:
    def function(x: Any, y: Any) -> Any:
        return x * ops.gemm(y, y)

    model = build_loss(function, x=gg.float32[2, 2], y=gg.float32[2, 2])
    result = check(model, {"x": normal(2, 2), "y": normal(2, 2)}, wrt=["x"])
    assert count_operators(result)["Gemm"] == 1


def test_third_derivative() -> None:
    model = gg.build(lambda x: total(ops.exp(x) * ops.sin(x)), x=gg.float32["n"])
    x = normal(3)
    for _ in range(2):
        model = grad(model)
        model.graph.outputs[:] = [_summed(model, model.graph.outputs[1])]
    np.testing.assert_allclose(
        evaluate(grad(model), {"x": x})[1], 2 * np.exp(x) * (np.cos(x) - np.sin(x)), rtol=1e-12
    )


def _summed(model: ir.Model, value: ir.Value) -> ir.Value:
    """Σ value as an output of the model."""
    node = ir.node("ReduceSum", [value], attributes={"keepdims": 0})
    model.graph.append(node)
    node.outputs[0].name = "loss"
    node.outputs[0].type, node.outputs[0].shape = value.type, ir.Shape([])
    value.name = None
    return node.outputs[0]


# What is refused


def test_missing_rule_is_told_with_the_place_and_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gg.build(Two(), x=gg.float32["n", 3])
    monkeypatch.setattr(TABLE["", "Tanh"], "rule", None)
    want = r"gradient: Tanh \(\w*Tanh_\d+\) has no rule; declare one .*vjp, see docs/adding-an-op"
    with pytest.raises(GraphgenError, match=want):
        grad(model, wrt=["first.weight"])
    grad(model, wrt=["second.weight"])  # needs no rule of it


def test_missing_rule_names_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TABLE["", "MatMul"], "rule", None)
    with pytest.raises(GraphgenError, match=r"MatMul \(second\) has no rule"):
        grad(gg.build(Two(), x=gg.float32["n", 3]), wrt=["first.weight"])


@pytest.mark.parametrize("rule", [lambda g, z: g, lambda g, *x: g, lambda g, z=1: g])
@pytest.mark.parametrize("declare", ["vjp", "variant", "output"])
def test_a_rule_names_what_its_operator_has(declare: str, rule: Callable[..., Any]) -> None:
    softmax = ops.softmax
    decorator = softmax.output(1) if declare == "output" else getattr(softmax, declare)
    has = "g, y, x, axis" if declare == "vjp" else "x, axis"
    with pytest.raises(RuntimeError, match=rf"Softmax>: a rule names (z|\*x|z=1|g); .*has {has}$"):
        decorator(rule)


def test_a_rule_is_given_what_it_names_in_any_order() -> None:
    clip, concat, attention = ops.clip, ops.concat, ops.scaled_dot_product_attention
    assert clip.by_name(lambda highest, g, x: (highest, g, x), "g")(1, 2, 3, 4) == (4, 1, 2)
    assert clip.by_name(lambda lowest: lowest)(2) is None  # left out of the call
    assert concat.by_name(lambda axis, y, xs: (axis, y, xs), "y")(1, 2, 3, axis=0) == (0, 1, (2, 3))
    rest = attention.by_name(lambda q, scale, **more: (q, scale, more))(1, 2, 3, scale=0.5)
    assert rest[:2] == (1, 0.5) and rest[2].keys() == attention.attributes.keys() - {"scale"}
    own = ops.where.by_name(lambda g, y: (g, y), "g", "y")
    assert own(1, 2, 3, 4, 5) == (1, 5)  # an input before the result of the same name
    with pytest.raises(GraphgenError, match=r"Clip: too many positional arguments; its inputs"):
        clip.by_name(lambda x: x)(1, 2, 3, 4)


def test_operator_outside_the_table_is_told() -> None:
    model = build_loss(ops.exp, x=gg.float32[2, 3, 3])
    node = next(n for n in model.graph if n.op_type == "Exp")
    node.op_type = "Hardmax"
    with pytest.raises(GraphgenError, match=r"Hardmax .*has no rule"):
        grad(model)


def test_a_way_through_a_value_of_unknown_dtype_is_not_left_out() -> None:
    model = build_loss(lambda x: ops.exp(x) + x, x=gg.float32[3])
    node = next(n for n in model.graph if n.op_type == "Exp")
    node.domain, node.op_type, node.outputs[0].type = "elsewhere", "Unheard", None
    with pytest.raises(GraphgenError, match=r"elsewhere::Unheard .*has no rule"):
        grad(model)


X = gg.float32["n", 3]


@pytest.mark.parametrize(
    "function, options, message",
    [
        (ops.exp, {}, r"output is float\[n, 3\]; a loss must be one float: take its mean"),
        (lambda x: ops.size(ops.exp(x)), {}, r"int64\[\]; a loss must be one float"),
        (lambda x: total(x), {"wrt": ["y"]}, "wrt=y is not an input or initializer"),
        (lambda x: total(x), {"wrt": []}, "wrt= names nothing"),
        (lambda x: total(x), {"of": "loss"}, "there is no output loss; there are output"),
        (lambda x: (total(x), total(x)), {}, r"of= must name one of .*output_0, output_1"),
        (lambda x: total(ops.floor(x)), {}, "does not depend on x"),
        (
            lambda x: total(ops.cast(ops.size(x), to=ir.DataType.FLOAT)),
            {},
            "depends on none of x",
        ),
        (lambda x: total(ops.cast(x, to=ir.DataType.INT64)), {}, "a loss must be one float"),
    ],
)
def test_what_has_no_gradient_is_told(function: Any, options: Any, message: str) -> None:
    with pytest.raises(GraphgenError, match=message) as caught:
        grad(gg.build(function, x=X), **options)
    assert str(caught.value).startswith("grad")


def test_value_on_no_path_to_the_loss_is_told() -> None:
    model = gg.build(lambda x, y: (total(x), total(y)), x=X, y=X)
    with pytest.raises(GraphgenError, match="output_0 does not depend on y"):
        grad(model, of="output_0", wrt=["x", "y"])
    with pytest.raises(GraphgenError, match="output_0 depends on none of y"):
        grad(model, of="output_0", wrt=["y"])


def branching(
    condition: Any, function: Callable[[Any], Any], otherwise: Callable[[Any], Any] = ops.neg
) -> ir.Model:
    """Σ sin If(condition, function(x w), otherwise(x w)) of parameters w; None is an input."""
    model = build_loss(lambda x, w: ops.identity(x * w), x=gg.float32["n", 3], w=gg.float32[3])
    graph = model.graph
    w = graph.inputs.pop()
    w.const_value = ir.tensor(np.array([0.5, -1.0, 2.0], np.float32))
    graph.register_initializer(w)
    scaled = next(n for n in graph if n.op_type == "Identity")
    branches = []
    for name, rule in (("then_branch", function), ("else_branch", otherwise)):
        with recording() as tape:
            result = rule(adopt(scaled.inputs[0])).value
            inner = ir.Graph([], [result], nodes=tape.nodes, name=name)
            register_constants(inner, tape.constants.values())
            tape.kept = True
        result.name = name
        branches.append(ir.AttrGraph(name, inner))
    given = ir.Value(name="condition", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    if condition is None:
        graph.inputs.append(given)
    else:
        given.const_value = ir.tensor(np.array(condition))
        graph.register_initializer(given)
    choice = ir.Node("", "If", [given], branches, name="choice")
    graph.insert_after(scaled, choice)
    scaled.outputs[0].replace_all_uses_with(choice.outputs[0])
    choice.outputs[0].name = "chosen"
    infer_model(model)
    return model


@pytest.mark.parametrize("condition", [True, False])
def test_an_if_that_always_takes_one_branch_trains(condition: bool) -> None:
    model = branching(condition, lambda y: ops.exp(y) * 0.5)
    result = grad(model, wrt=["w"])
    assert "If" not in count_operators(result)
    x, w = normal(2, 3), np.array([0.5, -1.0, 2.0])
    y, slope = (np.exp(x * w) / 2,) * 2 if condition else (-x * w, -1.0)
    np.testing.assert_allclose(evaluate(result, {"x": x})[1], (np.cos(y) * slope * x).sum(0))


def test_an_if_beside_the_way_to_the_loss_stays() -> None:
    model = branching(None, ops.exp)
    (loss,) = model.graph.outputs
    chosen = next(n for n in model.graph if n.op_type == "If")
    sine = next(n for n in model.graph if n.op_type == "Sin")
    sine.replace_input_with(0, next(n for n in model.graph if n.op_type == "Identity").outputs[0])
    model.graph.outputs.append(chosen.outputs[0])
    result = grad(model, of=str(loss.name), wrt=["w"])
    assert count_operators(result)["If"] == 1
    x, w = normal(2, 3).astype(np.float32), np.array([0.5, -1.0, 2.0], np.float32)
    *_, slope = gg.Session(result)(x=x, condition=np.array(True))
    np.testing.assert_allclose(slope, (np.cos(x * w) * x).sum(0), rtol=1e-5)


def test_integers_have_no_gradient() -> None:
    inputs = {"x": gg.float32["n", 2], "ids": gg.int64["b"]}
    model = build_loss(lambda x, ids: ops.gather(x, ids), **inputs)
    with pytest.raises(GraphgenError, match=r"ids is int64\[b\]; only floats have a gradient"):
        grad(model, wrt=["x", "ids"])


# What other graphs have


def test_slices_are_undone_by_padding() -> None:
    def count(x: Any, *sizes: Any) -> ir.Model:
        return check(build_loss(lambda x: ops.exp(ops.slice_(x, *sizes)), x=x), feeds)

    feeds = {"x": normal(4, 5)}
    for shape in (gg.float32[4, 5], gg.float32["n", 5], gg.float32["n", "m"]):
        for sizes in (([1], [3]), ([-3, 0], [99, -1], [0, -1]), ([2], [2]), ([3], [-9], [0], [-1])):
            scattered = len(sizes) == 4
            counts = count_operators(count(shape, *sizes))
            assert ("ScatterElements" in counts) == scattered and ("Pad" in counts) != scattered


def test_slices_between_places_known_at_run_time() -> None:
    inputs = {"x": gg.float32["n", 3], "start": gg.int64[1], "end": gg.int64[1]}
    model = build_loss(lambda x, start, end: ops.slice_(x, start, end), **inputs)
    for start, end in ((1, 3), (-2, 99), (0, -1), (3, 1), (-9, 2)):
        feeds = {"x": normal(4, 3), "start": np.array([start]), "end": np.array([end])}
        check(model, feeds)


def test_sizes_known_at_run_time() -> None:
    pads, repeats = np.array([1, -1, 0, 2]), np.array([2, 1])
    inputs = {"x": gg.float32["n", 3], "sizes": gg.int64[4]}
    check(
        build_loss(lambda x, sizes: ops.pad(x, sizes), **inputs), {"x": normal(2, 3), "sizes": pads}
    )
    edge = build_loss(lambda x, sizes: ops.pad(x, sizes, mode="edge"), **inputs)
    check(edge, {"x": normal(2, 3), "sizes": np.abs(pads)})
    inputs["sizes"] = gg.int64[2]
    check(
        build_loss(lambda x, sizes: ops.tile(x, sizes), **inputs),
        {"x": normal(2, 3), "sizes": repeats},
    )
    inputs["sizes"] = gg.int64[1]
    top = build_loss(lambda x, sizes: ops.top_k(x, sizes)[0], **inputs)
    check(top, {"x": normal(2, 3), "sizes": np.array([2])})


@pytest.mark.parametrize("strides", [[1, 1], [2, 3]])
def test_convolution_of_sizes_known_at_run_time(strides: list[int]) -> None:
    inputs = {"x": gg.float32["n", 4, "h", "w"], "w": gg.float32[6, 2, 3, 2]}
    model = build_loss(
        lambda x, w: ops.conv(x, w, group=2, strides=strides, pads=[1, 0, 1, 0]), **inputs
    )
    check(model, {"x": normal(1, 4, 5, 4), "w": normal(6, 2, 3, 2)})


def test_what_a_convolution_cannot_know_is_told() -> None:
    x, w = gg.float32["n", 4, "h"], gg.float32[6, 4, 3]
    same = build_loss(lambda x, w: ops.conv(x, w, auto_pad="SAME_UPPER"), x=x, w=w)
    with pytest.raises(GraphgenError, match="auto_pad=SAME_UPPER needs sizes known before the run"):
        grad(same)


def test_random_masks_are_refused() -> None:
    masked = build_loss(lambda x: TABLE["", "Dropout"](x, 0.5, True), x=gg.float32["n", 3])
    with pytest.raises(GraphgenError, match=r"training_mode is or may be set.*in evaluation mode"):
        grad(masked)


def test_statistics_of_a_norm_are_no_parameters() -> None:
    names = ["scale", "bias", "mean", "variance"]
    inputs = dict.fromkeys(names, gg.float32[3])
    norm = TABLE["", "BatchNormalization"]
    model = build_loss(norm, x=gg.float32["n", 3], **inputs)
    for value in [v for v in model.graph.inputs if v.name in names]:
        model.graph.inputs.remove(value)
        value.const_value = ir.tensor(np.ones(3, np.float32))
        model.graph.register_initializer(value)
    assert [*parameters(model.graph)] == ["scale", "bias"]


def test_rows_that_a_guard_against_nan_makes_zero_have_gradient_zero() -> None:
    def guarded(x: Any, mask: Any) -> Any:
        weights = ops.softmax(x + ops.where(mask, 0.0, np.float32(-np.inf)))
        return ops.where(ops.is_nan(weights), 0.0, weights)

    model = build_loss(guarded, x=gg.float32["n", 3], mask=gg.bool_["n", 3])
    mask = np.array([[True, False, True], [False, False, False]])
    check(model, {"x": normal(2, 3), "mask": mask})


def test_the_norm_of_nothing_has_gradient_zero() -> None:
    norm = TABLE["", "ReduceL2"]
    model = build_loss(lambda x: x / ops.maximum(norm(x, [1]), 1e-3), x=gg.float32["n", 2])
    slope = evaluate(grad(model), {"x": np.array([[0.0, 0.0], [3.0, 4.0]])})[1]
    np.testing.assert_allclose(slope[0], 1e3)
    assert np.isfinite(slope).all()


@pytest.mark.parametrize(
    ("name", "options", "x", "slope"),
    [
        ("LeakyRelu", {"alpha": 0.25}, 0.0, 0.25),
        ("Elu", {"alpha": 2.0}, 0.0, 2.0),
        ("Selu", {"alpha": 2.0, "gamma": 3.0}, 0.0, 6.0),
        ("HardSigmoid", {"alpha": 0.25}, 2.0, 0.0),
        ("HardSigmoid", {"alpha": 0.25}, -2.0, 0.0),
    ],
)
def test_at_a_kink_the_slope_is_that_of_torch(
    name: str, options: dict[str, float], x: float, slope: float
) -> None:
    """Layers that begin with zeros give nothing but such numbers."""
    op = TABLE["", name]
    model = gg.build(lambda x: total(op(x, **options)), x=gg.float32[1])
    assert evaluate(grad(model), {"x": np.array([x])})[1] == slope


def test_the_slope_of_a_parametric_relu_at_0_is_its_own() -> None:
    op = TABLE["", "PRelu"]
    model = gg.build(lambda x, s: total(op(x, s)), x=gg.float32[2], s=gg.float32[1])
    _, dx, ds = evaluate(grad(model), {"x": np.array([0.0, -2]), "s": np.array([0.25])})
    np.testing.assert_array_equal([*dx, *ds], [0.25, 0.25, -2])


# Further outputs


def with_outputs(name: str, domain: str, count: int, *shapes: Any) -> ir.Model:
    """Σ sin of all `count` outputs of an operator that is called on floats of these shapes."""

    def function(**values: Any) -> Any:
        tape = current_tape()
        assert tape is not None
        outputs = [ir.Value() for _ in range(count)]
        given = [x.value for x in values.values()]
        tape.nodes.append(ir.Node(domain, name, given, outputs=outputs))
        infer(tape.nodes[-1], tape.context)
        used = [Value(v) for v in outputs if v.shape is not None and is_float(v)]
        return sum((total(ops.sin(v)) for v in used[1:]), total(ops.exp(used[0])))

    return build_loss(function, **{f"x{i}": gg.float32[shape] for i, shape in enumerate(shapes)})


@pytest.mark.parametrize(
    "name, domain, count, shapes",
    [
        ("LayerNormalization", "", 3, [("n", 4), (4,), (4,)]),
        ("LayerNormalization", "", 2, [("n", 4), (4,)]),
        ("SkipLayerNormalization", "com.microsoft", 4, [("n", 2, 4), ("n", 2, 4), (4,), (4,)]),
        ("SkipSimplifiedLayerNormalization", "com.microsoft", 4, [("n", 2, 4), ("n", 2, 4), (4,)]),
        ("Dropout", "", 2, [("n", 3)]),
    ],
)
def test_further_outputs_have_bodies(name: str, domain: str, count: int, shapes: Any) -> None:
    model = with_outputs(name, domain, count, *shapes)
    feeds = {
        f"x{i}": normal(*(3 if d == "n" else d for d in shape)) for i, shape in enumerate(shapes)
    }
    check(model, feeds)
    if name != "Dropout":  # its own last output is a mask, which nothing uses
        assert count > 1 and name not in count_operators(grad(model))


def test_a_rule_is_for_a_node_whose_further_outputs_nothing_uses() -> None:
    model = build_loss(ops.layer_normalization, x=gg.float32["n", 4], scale=gg.float32[4])
    node = next(n for n in model.graph if n.op_type == "LayerNormalization")
    whole = ir.Node("", node.op_type, node.inputs, outputs=[ir.Value() for _ in range(3)])
    model.graph.insert_before(node, whole)
    node.outputs[0].replace_all_uses_with(whole.outputs[0])
    model.graph.remove(node, safe=True)
    result = check(model, {"x": normal(2, 4), "scale": normal(4)})
    assert count_operators(result)["LayerNormalization"] == 1


def test_an_output_without_a_body_is_told() -> None:
    q = ("n", 2, 4)
    model = build_loss(
        lambda q: TABLE["com.microsoft", "MultiHeadAttention"](q, q, q, num_heads=2),
        q=gg.float32[q],
    )
    node = next(n for n in model.graph if n.op_type == "MultiHeadAttention")
    whole = ir.Node(
        node.domain,
        node.op_type,
        node.inputs,
        node.attributes.values(),
        num_outputs=4,
        name="heads",
    )
    model.graph.insert_before(node, whole)
    heads = ("n", 2, 2, 2)
    for value, shape in zip(whole.outputs, (q, heads, heads, heads), strict=True):
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
    node.outputs[0].replace_all_uses_with(whole.outputs[0])
    model.graph.remove(node, safe=True)
    assert grad(model)  # as long as nothing uses it
    sine = next(n for n in model.graph if n.op_type == "Sin")
    key = ir.node("ReduceSum", [whole.outputs[3]], attributes={"keepdims": 0})
    model.graph.append(key)
    both = ir.node("Add", [key.outputs[0], sine.outputs[0]])
    model.graph.append(both)
    loss = ir.node("ReduceSum", [both.outputs[0]], attributes={"keepdims": 0})
    model.graph.append(loss)
    model.graph.outputs[:] = loss.outputs
    loss.outputs[0].name = "loss"
    with pytest.raises(GraphgenError, match=r"heads: output 3 of MultiHeadAttention .* no body"):
        grad(model)


# Graphs as files have them


def from_text(path: Path, text: str) -> ir.Model:
    onnx.save(onnx.parser.parse_model(text), path)
    return gg.load(path)


@pytest.mark.parametrize("opset", [11, 13, 17, 18])
def test_reductions_of_all_opsets(opset: int, tmp_path: Path) -> None:
    axes = "axes" if opset >= 18 else ""
    given = "" if axes else "<axes = [-1, 0], keepdims = 0>"
    initial = "<int64[2] axes = {-1, 0}>" if axes else ""
    keep = "<keepdims = 0>" if axes else given
    operands = "x, axes" if axes else "x"
    model = from_text(
        tmp_path / "model.onnx",
        f"""<ir_version: 8, opset_import: ["": {opset}]>
        g (float[n, 3, 2] x) => (float loss) {initial} {{
            a = ReduceMean {keep} ({operands})
            b = ReduceMax {keep} ({operands})
            c = ReduceL2 {keep} ({operands})
            d = ReduceLogSumExp {keep} ({operands})
            s = Sum (a, b, c, d)
            t = Tanh (s)
            loss = ReduceSum <keepdims = 0> (t)
        }}""",
    )
    check(model, {"x": normal(4, 3, 2)})


def test_indices_of_any_kind(tmp_path: Path) -> None:
    model = from_text(
        tmp_path / "model.onnx",
        """<ir_version: 8, opset_import: ["": 18]>
        g (float[n, 3] x, int32[b] i) => (float loss)
        <int32[2] rows = {-1, 0}, int64[1, 2] pair = {-1, -2}, int64[1] one = {1}> {
            a = Gather <axis = 1> (x, rows)
            b = Gather (x, i)
            like = Shape (b)
            ones = Expand (one, like)
            c = GatherElements <axis = 1> (b, ones)
            d = GatherND (x, pair)
            p = Mul (a, a)
            q = Concat <axis = 1> (b, b, c)
            r, unused = Split <axis = 1, num_outputs = 2> (q)
            u = ReduceSum <keepdims = 0> (p)
            v = ReduceSumSquare <keepdims = 0> (r)
            w = Sin (d)
            s = Sum (u, v, w)
            loss = ReduceSum <keepdims = 0> (s)
        }""",
    )
    feeds = {"x": normal(4, 3), "i": np.array([1, -1, 1], np.int32)}
    result = check(model, feeds)
    narrow = {name: x.astype(np.float32) if x.dtype.kind == "f" else x for name, x in feeds.items()}
    got = gg.Session(result)(narrow)
    for a, b in zip(got, evaluate(result, narrow), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_sizes_that_only_constants_tell_are_folded(tmp_path: Path) -> None:
    model = from_text(
        tmp_path / "model.onnx",
        """<ir_version: 8, opset_import: ["": 18]>
        g (float[n, 6] x) => (float loss)
        <float[6] bias = {1, 2, 3, 4, 5, 6}, int64[1] two = {2}, int64[1] three = {3},
         int64[1] zero = {0}> {
            shift = Exp (bias)
            y = Add (x, shift)
            whole = Shape (y)
            at = Sign (three)
            first = Slice (whole, zero, at)
            sizes = Concat <axis = 0> (first, two, three)
            z = Reshape (y, sizes)
            t = Tanh (z)
            loss = ReduceSum <keepdims = 0> (t)
        }""",
    )
    moved = next(n for n in model.graph if n.op_type == "Reshape").outputs[0]
    assert moved.shape is None and is_float(moved)
    check(model, {"x": normal(2, 6)})
    _, bias, x = evaluate(grad(model, wrt=["bias", "x"]), {"x": normal(2, 6)})
    np.testing.assert_allclose(bias, x.sum(0) * np.exp(np.arange(1.0, 7.0)))


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0)])
def test_sizes_of_0_stay_where_they_are(sizes: tuple[int, int]) -> None:
    """In a gradient's shape a 0 is a size, not that of the cotangent at this place."""

    def loss(x: Any, w: Any) -> Any:
        rows = ops.reshape(ops.dropout(x @ w, 0.5, 1, 0, 0), [-1, 3])
        return ops.reduce_sum(rows * rows, None, keepdims=0)

    spec = {"x": gg.float32["b", "t", 4], "w": gg.float32[4, 3]}
    x, w = np.zeros((*sizes, 4), np.float32), np.ones((4, 3), np.float32)
    slopes = gg.grad(gg.build(loss, training=True, **spec), wrt=["x", "w"])
    for run in (lambda feeds: run_plain(slopes, feeds), gg.Session(gg.optimize(slopes))):
        _, dx, dw = run({"x": x, "w": w})
        assert dx.shape == x.shape and dw.shape == w.shape and not dw.any()
