"""Norms, activations and softmax are found by what they compute: spelling by spelling."""

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from formulas import ALIKE, BFLOAT16, FOUND, Formula, misaligned, repeated_sum, two_axes, unit
from small_models import ROUNDING, relative_rms, run_plain

import graphgen as gg
from graphgen import ops
from graphgen.graph import constant, count_operators
from graphgen.measure.reference import evaluate
from graphgen.nn.module import build
from graphgen.passes import Optimized, optimize
from graphgen.passes.verify import BOUNDS
from graphgen.recognize.algebra import Atom, difference, freeze, function, literal, plus
from graphgen.recognize.formula import Expression
from graphgen.recognize.pattern import upstream

PASSES = ("fuse_softmax", "fuse_norm", "fuse_activation")


def model_of(formula: Formula) -> ir.Model:
    return build(formula.body, primitives=True, x=getattr(gg, formula.dtype)[formula.shape])


def remarks(best: Optimized) -> list[tuple[str, str]]:
    passes = [p for p in best.report.passes if p.name in PASSES]
    return [(site.status, site.reason) for p in passes for site in p.sites]


def sample(formula: Formula) -> Any:
    shape = [{"b": 2, "s": 5}.get(d, d) for d in formula.shape]
    return (np.random.default_rng(1).standard_normal(shape) * 4).astype(formula.dtype)


@pytest.mark.share(2)
@pytest.mark.parametrize("name", FOUND)
def test_every_spelling_becomes_one_operator(name: str) -> None:
    model = model_of(FOUND[name])
    best = optimize(model, verify=True)
    assert count_operators(best.model) == dict(sorted(FOUND[name].wanted.items()))
    assert [status for status, _ in remarks(best)] == ["fired"]
    feeds = {"x": sample(FOUND[name])}
    wanted, got = run_plain(model, feeds)[0], run_plain(best.model, feeds)[0]
    assert relative_rms(wanted, got) < BOUNDS[FOUND[name].dtype]
    exact = evaluate(model, feeds)[0]
    assert relative_rms(exact, got) < 2 * relative_rms(exact, wanted) + 1e-6


@pytest.mark.parametrize("name", FOUND)
def test_the_form_has_the_value_of_the_graph(name: str) -> None:
    """The proof of the algebra: a form, calculated with numbers, is what the nodes compute."""
    model = model_of(FOUND[name])
    y = model.graph.outputs[0]
    expression = Expression(model.graph.inputs[0], upstream(y, casts=True), any_cast=True)
    form = freeze(expression.of(y))
    x = sample(FOUND[name]).astype(np.float64)
    if any(constant(leaf) is None for leaf in expression.leaves if leaf is not expression.x):
        pytest.skip("a part that has no form")
    wanted = evaluate(model, {"x": x})[0]
    assert relative_rms(wanted, value(form, x)) < 1e-7


def value(form: Any, x: Any) -> Any:
    """A form calculated in float64."""
    with np.errstate(divide="ignore"):
        return sum(c * math.prod(factor(a, x) ** e for a, e in m) for m, c in form) + 0 * x


def factor(atom: Atom | ir.Value, x: Any) -> Any:
    if isinstance(atom, ir.Value):
        return np.asarray(constant(atom), np.float64)
    parts = [np.broadcast_to(value(part, x), x.shape) for part in atom.parts]
    functions: Mapping[str, Any] = {
        "x": lambda: x,
        "sum": lambda p: p,
        "size": lambda: math.prod(x.shape[a] for a in atom.axes),
        "Σ": lambda p: p.sum(atom.axes, keepdims=True),
        "ReduceMax": lambda p: p.max(atom.axes, keepdims=True),
        "Exp": np.exp,
        "Log": np.log,
        "Max": np.maximum,
        "Erf": np.vectorize(math.erf),
    }
    return functions[atom.kind](*parts)


@pytest.mark.parametrize("name", ALIKE)
def test_what_only_looks_alike_is_left_alone_and_told(name: str) -> None:
    body, told = ALIKE[name]
    model = model_of(Formula(body, {}))
    best = optimize(model)
    assert not set(count_operators(best.model)) & {*"Gelu Softmax Relu".split()}
    assert not any("Norm" in op or "Quick" in op for op in count_operators(best.model))
    sites = remarks(best)
    assert [status for status, _ in sites] == (["missed"] if told else [])
    assert all(told in reason for _, reason in sites), sites


def test_sums_along_other_axes_are_not_those_of_the_formula() -> None:
    best = optimize(model_of(Formula(two_axes, {}, shape=("b", 8, 8))))
    assert "LayerNormalization" not in count_operators(best.model)
    best = optimize(model_of(Formula(misaligned, {}, shape=(8, 8))))
    assert "LayerNormalization" not in count_operators(best.model)
    best = optimize(model_of(Formula(repeated_sum, {})))
    assert "Softmax" not in count_operators(best.model)


LOW = np.float32(np.finfo(np.float32).min)


@pytest.mark.parametrize("shift", [LOW, -np.inf, np.array([[0], [LOW], [np.inf]]), None])
@pytest.mark.parametrize("body", [ops.softmax, ops.log_softmax])
def test_what_cancels_in_a_row_is_not_lost(body: Any, shift: Any) -> None:
    """Beside the lowest number x is lost, and infinity does not cancel."""
    shift = None if shift is None else np.asarray(shift, np.float32)
    specs = {"x": gg.float32[3, 4], **({"row": gg.float32[3, 1]} if shift is None else {})}
    model = build(
        lambda x, row=shift: body(x + row),
        primitives=True,
        **specs,  # type: ignore[misc]
    )
    best = optimize(model)
    assert [status for status, _ in remarks(best)] == ["fired"]
    feeds = {"x": np.arange(12, dtype=np.float32).reshape(3, 4)}
    if shift is None:
        feeds["row"] = np.array([[LOW], [1], [-np.inf]], np.float32)
    wanted, got = run_plain(model, feeds)[0], run_plain(best.model, feeds)[0]
    assert np.allclose(wanted, got, rtol=ROUNDING, atol=0, equal_nan=True)


def test_bfloat16_is_fused_whole_where_there_is_a_kernel() -> None:
    assert count_operators(optimize(model_of(BFLOAT16), target="cuda").model) == BFLOAT16.wanted


def test_the_gate_of_a_product_is_told() -> None:
    best = optimize(model_of(FOUND["swiglu, packed"]))
    assert remarks(best) == [("fired", "QuickGelu alpha=1, the gate of a SwiGLU")]


def test_what_is_exactly_a_multiple_keeps_its_factor() -> None:
    model = model_of(Formula(lambda x: -0.25 * ops.softmax(x), {}))
    best = optimize(model, verify=True)
    assert count_operators(best.model) == {"Mul": 1, "Softmax": 1}


def test_a_size_that_is_not_known_needs_its_own_gain() -> None:
    model = model_of(Formula(unit, {}, shape=("b", "s", "d")))
    [(status, reason)] = remarks(optimize(model))
    assert status == "missed" and "of known size" in reason


def test_who_asks_for_an_overflow_sees_it() -> None:
    """exp(x) / Σ exp(x) is NaN where x is large; Softmax is not."""

    def body(x: Any) -> Any:
        e = ops.exp(x)
        w = e / ops.reduce_sum(e, [-1])
        return ops.where(ops.is_nan(w), 0.0, w)

    model = build(body, primitives=True, x=gg.float32["b", 8])
    best = optimize(model)
    assert "Softmax" not in count_operators(best.model)
    x = np.linspace(0.0, 400.0, 8, dtype=np.float32)[None]
    assert np.array_equal(run_plain(best.model, {"x": x})[0], run_plain(model, {"x": x})[0])


def test_a_logarithm_that_is_lost_in_rows_that_are_masked_has_a_caveat() -> None:
    """-3.4e38 + log n is -3.4e38 in float32, so that each weight is 1; it is 1/n in Softmax."""

    def body(x: Any) -> Any:
        return ops.exp(x - ops.reduce_log_sum_exp(x, [-1]))

    model = build(body, x=gg.float32["b", 8])
    [(status, reason)] = remarks(optimize(model))
    assert status == "fired" and "masked entirely" in reason
    assert "Softmax" not in count_operators(optimize(model, strict_masked_rows=True).model)


def test_a_maximum_with_the_lowest_number_is_a_part_of_what_a_softmax_gets() -> None:
    """It makes a row of -infinity a row of equal numbers, as some masks of transformers do."""

    def body(x: Any) -> Any:
        x = ops.maximum(x, np.float32(np.finfo(np.float32).min))
        e = ops.exp(x - ops.reduce_max(x, [-1]))
        return e / ops.reduce_sum(e, [-1])

    model = build(body, primitives=True, x=gg.float32["b", 4])
    best = optimize(model).model
    assert count_operators(best) == {"Max": 1, "Softmax": 1}
    x = np.array([[-np.inf] * 4, [-np.inf, 0, 1, 2]], np.float32)
    [wanted], [got] = run_plain(model, {"x": x}), run_plain(best, {"x": x})
    assert np.all(wanted[0] == 0.25) and relative_rms(wanted, got) < ROUNDING


@pytest.mark.parametrize("tested", [False, True])
@pytest.mark.parametrize(("largest", "summed"), [(3, 0), (0, 3), (3, 3)])
def test_a_maximum_that_varies_along_the_sum_does_not_cancel(
    largest: int, summed: int, tested: bool
) -> None:
    """exp(x - m) / Σ exp(x - m) is a softmax of x only where m is one number in each sum."""
    text = f"""<ir_version: 10, opset_import: ["": 21]>
      g (float[2, 2, t, t] x) => (float[2, 2, t, t] y)
      <int64[1] first = {{{largest}}}, int64[1] other = {{{summed}}}> {{
        m = ReduceMax(x, first) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, other) z = Div(e, s)
        {"n = IsNaN(z) y = Where(n, x, z)" if tested else "y = Identity(z)"} }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    best = optimize(model)
    x = np.random.default_rng(0).standard_normal((2, 2, 5, 5), np.float32)
    if tested:
        x[:, 0, 0, 1], x[0, :, 2, 0] = np.finfo(np.float32).min, -np.inf
    wanted, given = (run_plain(m, {"x": x})[0] for m in (model, best.model))
    finite = (np.nan_to_num(y, posinf=9.0, neginf=-9.0) for y in (wanted, given))
    assert relative_rms(*finite) < ROUNDING
    assert ("ReduceMax" in count_operators(best.model)) == (largest != summed)


def test_a_norm_of_channels_is_fused_where_that_pays() -> None:
    """Few channels, or the batch, are normalized as fast where they are."""

    def of(axis: int, shape: Any) -> list[tuple[str, str]]:
        return remarks(
            optimize(model_of(Formula(lambda x: unit(x, axes=(axis,)), {}, shape=shape)))
        )

    assert of(1, ("b", 64, "h", "w")) == [("fired", "LayerNormalization epsilon=1e-06 of channels")]
    [(status, reason)] = of(1, ("b", 3, "h", "w"))
    assert status == "refused" and "at 3 channels, measured by bench/pays.py" in reason
    [(status, reason)] = of(0, (64, 32))
    assert status == "missed" and reason.startswith(
        "LayerNormalization: (-2,) are the axes of sums"
    )


def test_a_norm_without_epsilon_says_what_becomes_of_equal_numbers() -> None:
    """Their mean is rounded, and so their deviation is, unless the kernel finds it to be 0."""
    model = model_of(Formula(lambda x: unit(x, 0.0), {}, shape=("b", 8)))
    assert remarks(optimize(model)) == [
        ("fired", "LayerNormalization; a row of equal numbers would be NaN")
    ]
    [(status, reason)] = remarks(optimize(model, strict_masked_rows=True))
    assert (status, reason) == ("refused", "a row of equal numbers would be NaN")


def test_a_gain_along_another_axis_is_not_that_of_the_channels() -> None:
    """Height, width and channels are as many, so that only the axis tells them apart."""
    gain = np.linspace(0.5, 2.0, 64, dtype=np.float32)
    body = lambda x: unit(x, axes=(1,)) * gain + gain[:, None]  # noqa: E731
    model = model_of(Formula(body, {}, shape=("b", 64, 64, 64)))
    best = optimize(model, verify=True)
    assert count_operators(best.model)["LayerNormalization"] == 1
    x = sample(Formula(body, {}, shape=(2, 64, 64, 64)))
    assert relative_rms(run_plain(model, {"x": x})[0], run_plain(best.model, {"x": x})[0]) < 1e-6


def test_what_differs_in_many_layers_is_written_once() -> None:
    """The text of each layer took four times as long as that of the one inside it."""

    def layers(bias: float) -> Any:
        form = literal(1.0)
        for _ in range(8):
            form = function("Sin", plus(form, function("Cos", form)), literal(bias))
        return freeze(form)

    start = time.process_time()
    depth, text = difference(layers(2.0), layers(3.0), 1e-6)
    assert time.process_time() - start < 2
    assert depth > 0 and "3 where 2 is wanted" in text and len(text) < 1000
