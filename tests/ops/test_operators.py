"""Every operator of the table: its meaning, its types, its gradient, its attributes.

ONNX Runtime runs one-node models with its optimizations off, in float64 where it has kernels.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import inliner
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state
from samples import SAMPLES, Sample
from small_models import ROUNDING, as_in_a_file, is_cut_off

from graphgen import ops
from graphgen.autodiff import grad
from graphgen.edit import register_constants
from graphgen.errors import GraphgenError
from graphgen.export.write import to_bytes
from graphgen.infer import DOMAIN, OPSET
from graphgen.measure.reference import evaluate
from graphgen.nn.module import DType, build
from graphgen.op import TABLE, Op
from graphgen.operands import Array
from graphgen.ops.attention import on_heads
from graphgen.ops.layout import numpy_dtype
from graphgen.passes import optimize
from graphgen.record import recording
from graphgen.targets import newest_opset, target
from graphgen.traits import NONE, TRAITS, Trait
from graphgen.value import adopt

BOUND = {np.float64: 1e-13, np.float32: ROUNDING}
"""The largest error in units of the largest finite element, with itself as the least unit."""

FLOAT32_ONLY = {"GRU", "GroupNormalization", "HardSwish", "LSTM", "Mish"}
"""What the types of kernels do not show: GRU and LSTM say they take float64 and do not
(`graphgen.targets.kernels.REFUSED`), the others have no kernel, but a function of ONNX in which
some kernel takes float32 only."""

WITHOUT_FLOAT64 = set(
    "DequantizeLinear DynamicQuantizeLinear DynamicQuantizeMatMul GroupQueryAttention QLinearAdd "
    "QLinearMatMul QLinearMul QLinearSoftmax QuantizeLinear RotaryEmbedding SkipLayerNormalization "
    "SkipSimplifiedLayerNormalization".split()
)
"""No schema admits float64 there, or in a body: what is recorded in float32 is evaluated in
float64."""

WITHOUT_FLOAT16 = set(
    "DynamicQuantizeLinear DynamicQuantizeMatMul QLinearAdd QLinearMul QLinearSoftmax Range".split()
)

FLOAT32_BODIES = set(
    "Attention Elu Gelu GroupNormalization HardSigmoid HardSwish LayerNormalization LeakyRelu Mish "
    "ReduceL2 RMSNormalization Selu".split()
)
"""ONNX's function bodies compute in float32, or hold constants in it, whatever the input."""

OVERFLOWING_BODIES = {"ReduceLogSumExp", "Softplus"}
"""ONNX's function bodies take exp of large values."""


def is_quantized(op: Op) -> bool:
    return Trait.QUANTIZED in TRAITS.get((op.domain, op.name), NONE)


NOT_DIFFERENTIABLE = set(
    "And ArgMax BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor ConstantOfShape Equal Greater "
    "GreaterOrEqual IsNaN Less LessOrEqual NonZero Not Or Range Shape Size Xor".split()
) | {op.name for op in TABLE.values() if is_quantized(op)}
"""Primitives without a rule give no floats that depend on floats; quantized numbers are rounded."""

FLAT = {"Ceil", "Floor", "Round", "Sign", "StopGradient"}
"""The derivative is zero wherever it exists, or is meant to be."""

CONSTANTS = {"CastLike": {1}, "Dropout": {1}}
"""Float inputs that are settings: their gradient is not defined."""

DATA_DEPENDENT = {"Compress", "ConstantOfShape", "NonZero", "Range", "RelativePositionBias"}
"""Operators whose sizes are known only when they have run."""

Case = tuple[Op, Sample]


def cases(wanted: Callable[[Op, Sample], bool] = lambda op, sample: True, *, share: int = 1) -> Any:
    """All samples that are wanted; `make test` takes each operator's first and every `share`th."""
    found = []
    for (domain, name), samples in SAMPLES.items():
        op = TABLE[domain, name]
        kept = [(number, sample) for number, sample in enumerate(samples) if wanted(op, sample)]
        for position, (number, sample) in enumerate(kept):
            marks = [pytest.mark.exhaustive] if position % share else []
            found.append(pytest.param(op, sample, id=f"{name}-{number}", marks=marks))
    return pytest.mark.parametrize("op, sample", found)


def is_code(x: Any) -> bool:
    """Whether it is an array of 4 bits or of floats of 8, which no session takes from numpy."""
    dtype = ir.DataType.from_numpy(x.dtype) if isinstance(x, np.ndarray) else ir.DataType.FLOAT
    return dtype.bitwidth < 8 or (dtype.bitwidth == 8 and dtype.is_floating_point())


def is_float(x: Any) -> bool:
    """Whether it is an array of floats that a dtype is chosen for."""
    array = isinstance(x, np.ndarray) and not is_code(x)
    return array and ir.DataType.from_numpy(x.dtype).is_floating_point()


def arrays_of(sample: Sample, dtype: Any) -> list[Any]:
    with np.errstate(over="ignore"):  # float16
        return [x.astype(dtype) if is_float(x) else x for x in sample.inputs]


def feeds_of(arrays: Sequence[Any]) -> dict[str, Array]:
    given = {f"x{i}": x for i, x in enumerate(arrays) if isinstance(x, np.ndarray)}
    return {name: x for name, x in given.items() if not is_code(x)}


def compute(op: Op, arrays: Sequence[Any], sample: Sample) -> tuple[Array, ...]:
    result = op(*arrays, **sample.attributes)
    return result if isinstance(result, tuple) else (result,)


def meaning(op: Op, sample: Sample) -> tuple[Array, ...]:
    """The operator in float64; its attributes as a file holds them, in float32."""
    attributes = {
        name: float(np.float32(value)) if isinstance(value, float) else value
        for name, value in {**op.attributes, **sample.attributes}.items()
    }
    return compute(op, arrays_of(sample, np.float64), sample._replace(attributes=attributes))


def model_of(
    op: Callable[..., Any],
    sample: Sample,
    dtype: Any,
    *,
    primitives: bool = False,
    symbols: bool = False,
    finish: Callable[..., Any] = lambda *ys: ys if len(ys) > 1 else ys[0],
) -> ir.Model:
    """One call of the operator as a model; with `symbols` each leading size n is called `size_n`.

    Those are sizes as in a file, where 4 and size_4 may meet. `finish` makes the model's output
    from those of the operator.
    """
    if getattr(op, "name", "") in WITHOUT_FLOAT64 and dtype is np.float64:
        dtype = np.float32
    arrays = arrays_of(sample, dtype)

    def call(**values: Any) -> Any:
        operands = [values.get(f"x{i}", x) for i, x in enumerate(arrays)]
        result = op(*operands, **sample.attributes)
        return finish(*(result if isinstance(result, tuple) else (result,)))

    specs = {}
    for name, x in feeds_of(arrays).items():
        shape: list[Any] = list(x.shape)
        if symbols and shape and shape[0] != 1:
            shape[0] = f"size_{shape[0]}"
        specs[name] = DType(ir.DataType.from_numpy(x.dtype))[tuple(shape)]
    return (as_in_a_file if symbols else build)(call, primitives=primitives, **specs)


def run(model: onnx.ModelProto, feeds: dict[str, Array]) -> list[Array]:
    for y in model.graph.output:  # of a code Python has no array
        dtype = ir.DataType(y.type.tensor_type.elem_type)
        if dtype.bitwidth < 8 or (dtype.is_floating_point() and dtype.bitwidth == 8):
            to = int(ir.DataType.FLOAT)
            node = onnx.helper.make_node("Cast", [y.name], [y.name + "_cast"], to=to)
            model.graph.node.append(node)
            y.name, y.type.tensor_type.elem_type = y.name + "_cast", to
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    results: list[Array] = session.run(None, feeds)
    return results


@cache
def kernel_types(domain: str, op_type: str) -> set[str]:
    """Every type that some input or output of the operator's newest CPU kernels may have."""
    rows = target("cpu").kernels.get(domain, {}).get(op_type, ())
    newest = [types for _, last, types in rows if last is None or last >= OPSET]
    return {type_ for types in newest for names in types.values() for type_ in names}


def run_widest(
    make: Callable[[Any], onnx.ModelProto], sample: Sample
) -> tuple[Any, Sample, list[Array]]:
    """(dtype, sample, outputs) by ONNX Runtime, in float64 if all its kernels have that."""
    model = make(np.float64)
    narrow = any(x.type.tensor_type.elem_type == ir.DataType.FLOAT for x in model.graph.input)
    dtype: Any = np.float32 if narrow else np.float64
    for node in model.graph.node:
        types = kernel_types(node.domain, node.op_type)
        narrowed = {"float", "double"} & types == {"float"} or node.op_type in FLOAT32_ONLY
        if narrowed and any(map(is_float, sample.inputs)):
            dtype = np.float32
    arrays = arrays_of(sample, dtype)
    outputs = run(model if dtype is np.float64 else make(dtype), feeds_of(arrays))
    return dtype, sample._replace(inputs=tuple(arrays)), outputs


def check(got: Sequence[Array], want: Sequence[Array], bound: float) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        b = b.astype(np.float32) if is_code(b) else b
        if not is_float(b):
            np.testing.assert_array_equal(a, b)
            continue
        finite = np.abs(b[np.isfinite(b)]).ravel()
        unit = max(finite, default=0.0) + 1e-30
        np.testing.assert_allclose(a.astype(np.float64), b, rtol=bound, atol=bound * unit)


def test_every_operator_has_samples() -> None:
    assert set(SAMPLES) == set(TABLE)
    assert all(SAMPLES.values())


OPSETS = {"RoiAlign": 21, "TensorScatter": 24, "CumProd": 26}
"""From 22 on, the kernel of the first is not found; the others came with these."""


def has_kernel(op: Op, sample: Sample) -> bool:
    """Not ours, nor one of the runtime's for a GPU, nor newer than the runtime."""
    if OPSETS.get(op.name, 0) > newest_opset():
        return False
    return op.domain != DOMAIN and (not op.domain or bool(kernel_types(op.domain, op.name)))


@cases(has_kernel)
def test_meaning_is_that_of_onnxruntime(op: Op, sample: Sample) -> None:
    if is_cut_off(op.name, [x for x in sample.inputs[1:] if x is not None]):
        pytest.skip("this processor cuts off two neighboring products of bytes at 16 bits")

    def model(dtype: Any) -> onnx.ModelProto:
        made = ir.to_proto(model_of(op, sample, dtype))
        made.opset_import[0].version = OPSETS.get(op.name, made.opset_import[0].version)
        return made

    dtype, fed, got = run_widest(model, sample)
    check(got, meaning(op, fed), BOUND[dtype])


@cases(lambda op, sample: op.composite)
def test_body_is_the_meaning(op: Op, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "whole", False)
    dtype, fed, got = run_widest(
        lambda d: ir.to_proto(model_of(op, sample, d, primitives=True)), sample
    )
    check(got, compute(op, arrays_of(fed, np.float64), fed), BOUND[dtype])


def has_onnx_body(op: Op, sample: Sample) -> bool:
    # onnx's inliner fails on an absent input before a present one, and on an attribute's default.
    if op.schema is None or any(x is None for x in sample.inputs):
        return False
    if op.name == "DynamicQuantizeLinear" and not sample.inputs[0].any():
        return False  # it divides 0 by 0, where the kernel has the scale 1
    plain = op.schema.has_function and {*op.attributes} <= {*sample.attributes}
    return bool(plain or op.schema.has_context_dependent_function)


@cases(has_onnx_body)
def test_meaning_is_that_of_the_function_body_of_onnx(op: Op, sample: Sample) -> None:
    def inlined(dtype: Any) -> onnx.ModelProto:
        dtype = np.float32 if op.name in FLOAT32_BODIES else dtype
        proto = inliner.inline_selected_functions(
            ir.to_proto(model_of(op, sample, dtype)),
            [(op.domain, op.name)],
            inline_schema_functions=True,
        )
        assert op.name not in [node.op_type for node in proto.graph.node]
        return proto

    dtype, fed, got = run_widest(inlined, sample)
    want = meaning(op, fed)
    if op.name == "Attention":
        # ONNX's body gives NaN, or a mean of V, for a row of which nothing is kept; ours zeros.
        kept = want[0].any(-1)
        got, want = [got[0][kept]], (want[0][kept],)
    if op.name in OVERFLOWING_BODIES:
        got, want = [got[0][finite := np.isfinite(got[0])]], (want[0][finite],)
    check(got, want, BOUND[dtype])


FITTED = {"Sin", "Cos", "Tan"}
"""Whose variants are polynomials of float32 with coefficients of float32."""


@pytest.mark.parametrize(
    "op, variant", [(op, rule) for op in TABLE.values() for rule in op.variants]
)
def test_variant_has_the_meaning_of_the_operator(op: Op, variant: Callable[..., Any]) -> None:
    spelt = []

    def call(*inputs: Any, **attributes: Any) -> Any:
        y = variant(*inputs, **{**op.attributes, **attributes})
        spelt.append(y is not None)
        return op(*inputs, **attributes) if y is None else y

    call.name = op.name  # type: ignore[attr-defined]
    for sample in SAMPLES[op.domain, op.name]:
        model = model_of(call, sample, np.float64)
        arrays = arrays_of(sample, np.float64)
        bound = 3e-7 if op.name in FITTED else BOUND[np.float64]
        check(evaluate(model, feeds_of(arrays)), compute(op, arrays, sample), bound)
    assert any(spelt)


@cases(share=2)
def test_inferred_types_are_those_computed(op: Op, sample: Sample) -> None:
    """In float32, also where sizes are symbols, and in float16."""
    for dtype, symbols in (np.float32, False), (np.float32, True), (np.float16, False):
        # The rank is the length of an input, or a table has a known size.
        if symbols and op.name in ("ConstantOfShape", "RelativePositionBias"):
            continue
        if dtype is np.float16 and op.name in WITHOUT_FLOAT16:
            continue
        arrays = arrays_of(sample, dtype)
        model = model_of(op, sample, dtype, symbols=symbols)
        for y, value in zip(compute(op, arrays, sample), model.graph.outputs, strict=True):
            assert y.dtype == value.dtype.numpy(), dtype
            assert not (is_float(y) and any(map(is_float, sample.inputs))) or y.dtype == dtype
            assert value.shape is not None and len(value.shape) == y.ndim, (dtype, symbols)
            for dim, size in zip(value.shape, y.shape, strict=True):
                name = None if isinstance(dim, int) else dim.value
                if name is None or not name.startswith("size_") or not name[5:].isdigit():
                    assert dim == size or symbols or op.name in DATA_DEPENDENT
                else:
                    assert name == f"size_{size}"


@cache
def runtime_schemas() -> dict[tuple[str, str], Any]:
    return {(s.domain, s.name): s for s in ort_state.get_all_operator_schema()}


def schema_defaults(op: Op) -> dict[str, Any]:
    """The default of every attribute, `empty` where it is required, None where there is none."""
    schema = op.schema or runtime_schemas()[op.domain, op.name]
    found: dict[str, Any] = {}
    for name, attribute in schema.attributes.items():
        found[name] = inspect.Parameter.empty if attribute.required else None
        proto = onnx.AttributeProto()
        proto.ParseFromString(attribute._default_value)
        if proto.type:
            value = onnx.helper.get_attribute_value(proto)
            value = tuple(v.decode() for v in value) if name == "activations" else value
            found[name] = value.decode() if isinstance(value, bytes) else value
    return found


@pytest.mark.parametrize("op", [op for op in TABLE.values() if op.domain != DOMAIN], ids=repr)
def test_defaults_are_those_of_the_schema(op: Op) -> None:
    wanted = schema_defaults(op)
    for name, default in op.attributes.items():
        assert name in wanted, f"ONNX knows no attribute {name}"
        want = wanted[name]
        assert default == (pytest.approx(want, rel=1e-7) if isinstance(want, float) else want)


# Gradients


def test_operators_without_a_gradient_are_known() -> None:
    ruleless = {op for op in TABLE.values() if op.rule is None}
    missing = {op.name for op in ruleless if not op.composite or is_quantized(op)}
    assert missing == NOT_DIFFERENTIABLE


def wrt_of(op: Op, sample: Sample) -> list[str]:
    settings = CONSTANTS.get(op.name, set())
    if sample.attributes.get("training_mode"):
        settings = settings | {3, 4}  # moved by x, but not read
    return [f"x{i}" for i, x in enumerate(sample.inputs) if is_float(x) and i not in settings]


def has_gradient(op: Op, sample: Sample) -> bool:
    if op.name in NOT_DIFFERENTIABLE | FLAT | DATA_DEPENDENT or sample.kink:
        return False
    if not wrt_of(op, sample):
        return False
    return all(map(is_float, compute(op, arrays_of(sample, np.float64), sample)))


DIFFERENTIABLE = {
    id(sample)
    for key, samples in SAMPLES.items()
    for sample in samples
    if has_gradient(TABLE[key], sample)
}


def loss_of(op: Op, sample: Sample, *, square: bool = False, dtype: Any = np.float64) -> ir.Model:
    """Σ c y, or Σ c y², over all outputs, with random c."""
    random = np.random.default_rng(3)

    def loss(*ys: Any) -> Any:
        total: Any = 0.0
        for y in ys:
            c = random.uniform(0.5, 1.5, [int(d) for d in y.shape]).astype(numpy_dtype(y))
            total = ops.reduce_sum((y * y if square else y) * c, None, keepdims=0) + total
        return total

    return model_of(op, sample, dtype, finish=loss)


def check_directional(
    f: Callable[[dict[str, Array]], float], gradients: dict[str, Array], at: dict[str, Array]
) -> None:
    """gradient · d against (f(x + h d) - f(x - h d)) / 2h, d random."""
    random, h = np.random.default_rng(4), 1e-5
    d = {name: random.normal(size=at[name].shape) for name in gradients}
    up, down = (f({**at, **{k: at[k] + s * h * d[k] for k in d}}) for s in (1, -1))
    products = [gradients[k] * d[k] for k in d]
    assert all(np.isfinite(p).all() for p in products)
    size = sum(np.abs(p).sum() for p in products)
    got, want = sum(p.sum() for p in products), (up - down) / (2 * h)
    assert abs(got - want) <= 1e-6 * size + 1e-10 * max(abs(up), 1.0), f"{got} is not {want}"


@cases(lambda op, sample: id(sample) in DIFFERENTIABLE, share=2)
def test_gradient_is_the_central_difference_and_runs(op: Op, sample: Sample) -> None:
    """Recorded in float32, for ONNX Runtime; what is recorded is evaluated in float64."""
    model, wrt = loss_of(op, sample, dtype=np.float32), wrt_of(op, sample)
    slope, at = grad(model, wrt=wrt), feeds_of(arrays_of(sample, np.float32))
    want = evaluate(slope, at)
    gradients = dict(zip(wrt, want[1:], strict=True))
    for name in wrt:
        assert gradients[name].shape == at[name].shape
    check_directional(lambda x: float(evaluate(model, x)[0]), gradients, at)
    got = run(onnx.load_model_from_string(to_bytes(slope)), at)
    for a, b in zip(got, want, strict=True):  # some are the difference of two nearly equal numbers
        np.testing.assert_allclose(a, b, 1e-4, 1e-8 + 1e-5 * np.abs(b).max(initial=0.0))


@cases(lambda op, sample: id(sample) in DIFFERENTIABLE, share=24)
def test_gradient_of_the_gradient_is_the_central_difference(op: Op, sample: Sample) -> None:
    wrt = wrt_of(op, sample)
    at = feeds_of(arrays_of(sample, np.float64))
    random = np.random.default_rng(5)
    slope = grad(loss_of(op, sample, square=True), wrt=wrt)
    first = dict(zip(wrt, slope.graph.outputs[1:], strict=True))
    with recording() as tape:
        total: Any = 0.0
        for name, g in first.items():
            c = random.normal(size=at[name].shape).astype(numpy_dtype(g))
            total = ops.reduce_sum(adopt(g) * c, None, keepdims=0) + total
        slope.graph.extend(tape.nodes)
        tape.kept = True
    register_constants(slope.graph, tape.constants.values())
    slope.graph.outputs[:] = [total.value]
    total.value.name = "slope"
    _, *found = evaluate(grad(slope, wrt=wrt), at)
    gradients = dict(zip(wrt, found, strict=True))
    check_directional(lambda x: float(evaluate(slope, x)[0]), gradients, at)


@cases(lambda op, sample: op.composite and op.rule is not None and id(sample) in DIFFERENTIABLE)
def test_written_rule_is_the_derived_one(
    op: Op, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wrt = loss_of(op, sample), wrt_of(op, sample)
    at = feeds_of(arrays_of(sample, np.float64))
    written = evaluate(grad(model, wrt=wrt), at)
    monkeypatch.setattr(op, "rule", None)
    derived = evaluate(grad(model, wrt=wrt), at)
    check(written, derived, 1e-10)


@pytest.mark.parametrize("name", sorted(FLAT))
def test_flat_operator_has_no_gradient(name: str) -> None:
    domain = DOMAIN if name == "StopGradient" else ""
    with pytest.raises(GraphgenError, match="does not depend on x0"):
        grad(loss_of(TABLE[domain, name], SAMPLES[domain, name][0]))


@pytest.mark.parametrize(
    ("q", "k"),
    [
        (("b", "h", 3, 4), ("b", "h", 3, 4)),
        (("b", 4, 3, 4), ("b", "g", 3, 4)),
        (("b", 2, 3, "d"), ("b", 2, 3, "d")),
        (("b", 3, "w"), ("b", 3, "w")),
    ],
)
def test_the_body_of_attention_has_to_know_heads_and_features(q: Any, k: Any) -> None:
    dtype, heads = DType(ir.DataType.FLOAT), {"q_num_heads": 2, "kv_num_heads": 2}

    def call(q: Any, k: Any) -> Any:
        return ops.attention(q, k, k, **(heads if len(q.shape) == 3 else {}))

    specs = {"q": dtype[q], "k": dtype[k]}
    message = "Attention: an operand is float.*; its heads and features must be known"
    with pytest.raises(GraphgenError, match=message):
        build(call, primitives=True, **specs)
    whole = build(call, **specs)
    assert optimize(whole).report.ops_after == {"Attention": 1}
    optimize(whole, target="official")  # has no kernel for it, and needs no body to go on
    loss = build(lambda q, k: ops.reduce_sum(call(q, k), None, keepdims=0), **specs)
    with pytest.raises(GraphgenError, match=message):
        grad(loss)


def test_the_body_of_attention_has_to_know_a_rank() -> None:
    """As behind an operator that nobody knows, in a file."""
    x = adopt(ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT)))
    with pytest.raises(GraphgenError, match="its heads and features must be known"):
        on_heads(x, x, x, 2, 2)


# Dropout: a mask that is a function of (seed, step, site, index)


def mask_of(key: Sequence[int], ratio: float = 0.3, count: int = 10_000) -> Array:
    x = np.ones(count, np.float32)
    result: Array = ops.dropout(x, np.float32(ratio), *(np.int64(k) for k in key))
    assert set(np.unique(result)) <= {np.float32(0), x[0] / (x[0] - np.float32(ratio))}
    return result != 0


def test_dropout_mask_is_a_function_of_seed_step_and_site() -> None:
    keys = [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3), (3, 2, 1)]
    masks = [mask_of(key) for key in keys]
    np.testing.assert_array_equal(masks[0], mask_of(keys[0]))
    for i, mask in enumerate(masks):
        for other in masks[:i]:  # independent masks agree with probability 0.7² + 0.3² = 0.58
            assert abs(np.mean(mask == other) - 0.58) < 4 * (0.58 * 0.42 / mask.size) ** 0.5


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("key", [(0, 0, 0), (7, 1, 2), (7, 2, 1), (-1, 2**40, 5)])
def test_dropout_keeps_its_share(ratio: float, key: tuple[int, int, int]) -> None:
    mask = mask_of(key, ratio)
    assert abs(mask.mean() - (1 - ratio)) <= 4 * (ratio * (1 - ratio) / mask.size) ** 0.5


def test_dropout_mask_is_the_same_in_onnxruntime_and_after_a_rebuild() -> None:
    key = {"first": np.array(5), "second": np.array(6)}

    def call(x: Any, first: Any, second: Any) -> Any:
        return ops.dropout(x, np.float32(0.4), first, second, np.int64(7))

    def built() -> onnx.ModelProto:
        scalar = DType(ir.DataType.INT64)[()]
        x = DType(ir.DataType.FLOAT)["batch", 3]
        model = build(call, x=x, first=scalar, second=scalar)
        return onnx.load_model_from_string(to_bytes(model))

    assert built().SerializeToString() == built().SerializeToString()
    x = np.random.default_rng(0).normal(size=(500, 3)).astype(np.float32)
    (got,) = run(built(), {"x": x, **key})
    np.testing.assert_array_equal(got, call(x, **key))
    np.testing.assert_array_equal(got.ravel() != 0, mask_of((5, 6, 7), 0.4, x.size))


def test_axes_that_do_not_exist_are_refused_on_arrays() -> None:
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(GraphgenError, match=r"Flatten.*: axis 3 does not exist in 2 dimensions"):
        ops.flatten(x, axis=3)
    with pytest.raises(GraphgenError, match="Pad: axis 3 does not exist in 2 dimensions"):
        ops.pad(x, [1, 1], None, [3])
