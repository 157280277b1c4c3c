"""Reverse mode: un-broadcasting, sharing, what has no gradient, and how that is told.

The rule of every operator is checked in tests/ops/test_operators.py.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import graphgen as gg
from graphgen import nn, ops
from graphgen.autodiff import grad
from graphgen.errors import GraphgenError
from graphgen.graph import count_operators, evaluate
from graphgen.op import PATH, TABLE, Array

RANDOM = np.random.default_rng(2)


def total(x: Any) -> Any:
    return ops.reduce_sum(x, None, keepdims=0)


def build_loss(function: Callable[..., Any], **inputs: Any) -> ir.Model:
    return gg.build(lambda **values: total(ops.sin(function(**values))), **inputs)


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
    model = build_loss(lambda a, b: a * b, a=gg.float32["n", 3], b=gg.float32["m", 3])
    result = check(model, {"a": normal(n, 3), "b": normal(m, 3)})
    assert decisions(result) == 2


@pytest.mark.parametrize("n", [1, 4])
def test_symbol_against_a_number_is_decided_at_run_time(n: int) -> None:
    model = build_loss(lambda a, b: a * b, a=gg.float32["n", 3], b=gg.float32[4, 3])
    result = check(model, {"a": normal(n, 3), "b": normal(4, 3)})
    assert decisions(result) == 1


@pytest.mark.parametrize("n, m", [(1, 3), (3, 1), (3, 3)])
def test_batches_of_a_product_are_decided_at_run_time(n: int, m: int) -> None:
    model = build_loss(lambda a, b: a @ b, a=gg.float32["n", 2, 4], b=gg.float32["m", 4, 2])
    check(model, {"a": normal(n, 2, 4), "b": normal(m, 4, 2)})


def test_a_value_whose_sizes_were_decided_can_be_broadcast_again() -> None:
    def function(a: Any, b: Any, c: Any) -> Any:
        return ops.exp(ops.exp(a) * b) * c

    one = {name: gg.float32[name, 2] for name in "abc"}
    for sizes in ((1, 3, 1), (3, 1, 1), (1, 1, 3)):
        feeds = {name: normal(size, 2) / 4 for name, size in zip("abc", sizes, strict=True)}
        check(build_loss(function, **one), feeds)


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
    with pytest.raises(GraphgenError, match="the model has an output x_grad already; rename"):
        grad(grad(model), of="loss")


def test_label_smoothing_over_a_number_of_classes_that_is_known_at_run_time() -> None:
    model = gg.build(
        lambda x, y: ops.cross_entropy(x, y, label_smoothing=0.1),
        x=gg.float32["batch", "classes"],
        y=gg.int64["batch"],
    )
    check(model, {"x": normal(3, 4), "y": np.array([1, -100, 2])})


@pytest.mark.parametrize("reduction", ["mul", "max", "min"])
def test_other_reductions_are_refused_in_meaning_and_gradient(reduction: str) -> None:
    x, index = gg.float32[3, 4], np.zeros((3, 4), np.int64)
    elements = gg.build(
        lambda x: total(ops.scatter_elements(x, index, x * 2.0, reduction=reduction)), x=x
    )
    slices = gg.build(lambda x: total(ops.scatter_nd(x, index[:, :1], x, reduction=reduction)), x=x)
    for model in (elements, slices):
        for act in (grad, lambda model: evaluate(model, {"x": normal(3, 4)})):
            with pytest.raises(GraphgenError, match=f"Scatter.* reduction is '{reduction}'"):
                act(model)


def test_gather_nd_in_batches_is_refused_in_meaning_and_gradient() -> None:
    index = np.zeros((3, 1), np.int64)
    model = gg.build(lambda x: total(ops.gather_nd(x, index, batch_dims=1)), x=gg.float32[3, 4])
    for act in (grad, lambda model: evaluate(model, {"x": normal(3, 4)})):
        with pytest.raises(GraphgenError, match="GatherND: batch_dims is 1"):
            act(model)


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


def test_operator_outside_the_table_is_told() -> None:
    model = build_loss(ops.exp, x=gg.float32[3])
    node = next(n for n in model.graph if n.op_type == "Exp")
    node.op_type = "Det"
    with pytest.raises(GraphgenError, match=r"Det .*has no rule"):
        grad(model)


X = gg.float32["n", 3]


@pytest.mark.parametrize(
    "function, options, message",
    [
        (ops.exp, {}, r"output is float\[n, 3\]; a loss must be one float: take its mean"),
        (lambda x: ops.size(ops.exp(x)), {}, r"int64\[\]; a loss must be one float"),
        (lambda x: total(x), {"wrt": ["y"]}, "wrt=y is no input or initializer"),
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


def test_subgraph_is_refused() -> None:
    model = build_loss(ops.exp, x=gg.float32[3])
    inner = ir.node("Identity", [model.graph.inputs[0]])
    branch = ir.Graph([], inner.outputs, nodes=[inner], name="branch")
    condition = ir.Value(name="c", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    model.graph.inputs.append(condition)
    attributes = [ir.AttrGraph("then_branch", branch)]
    model.graph.append(ir.Node("", "If", [condition], attributes))
    with pytest.raises(GraphgenError, match=r"subgraphs \(If, Loop, Scan\) has no gradient"):
        grad(model)
