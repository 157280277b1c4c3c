"""What is written in the DSL is what runs: a graph gives what arrays give, or an error at the line.

Numbers meet tensors of every dtype, values are compared, and operators get lists and attributes.
"""

import platform
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from small_models import as_in_a_file, run_plain

import graphgen as gg
from graphgen import nn, ops
from graphgen.errors import GraphgenError
from graphgen.nn.module import DType
from graphgen.value import Value

FLOAT = np.array([[0.0, 1.0], [-2.0, 3.0]], np.float32)
OTHER = np.array([[0.0, 2.0], [-2.0, -3.0]], np.float32)
ARRAYS: dict[str, Any] = {
    "float32": FLOAT,
    "float16": FLOAT.astype(np.float16),
    "int64": FLOAT.astype(np.int64),
    "int32": FLOAT.astype(np.int32),
    "uint8": np.abs(FLOAT).astype(np.uint8),
    "bool": FLOAT > 0,
}


def spec_of(array: Any) -> Any:
    return DType(ir.DataType.from_numpy(array.dtype))["n", 2]


def expect_the_same(function: Callable[..., Any], **arrays: Any) -> None:
    """The graph's result, in the dtype and with the elements that arrays give."""
    model = gg.build(function, **{name: spec_of(array) for name, array in arrays.items()})
    wanted, [got] = np.asarray(function(**arrays)), run_plain(model, arrays)
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted)


def expect_error(
    function: Callable[..., Any], told: str, *, arrays: bool = False, **given: Any
) -> None:
    """An error at the line of the test, in a build, and with `arrays` on arrays too."""
    with pytest.raises(GraphgenError, match=told) as error:
        gg.build(function, **{name: spec_of(array) for name, array in given.items()})
    assert re.search(r"\(test_silent_dsl.py:\d+\)$", str(error.value)), error.value
    if arrays:
        with pytest.raises(GraphgenError, match=told):
            function(**given)


# Comparison and truth


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x == 0,
        lambda x, y: x != 0,
        lambda x, y: 0 == x,  # noqa: SIM300
        lambda x, y: 0.0 != x,  # noqa: SIM300
        lambda x, y: x == y,
        lambda x, y: x != y,
        lambda x, y: x == -y,
        lambda x, y: FLOAT[0] == y,
        lambda x, y: np.float32(1) == x,
        lambda x, y: x == [0, 1],
        lambda x, y: x == x,
        lambda x, y: ops.where(x == 0, 100.0, x),
        lambda x, y: ops.where((x != y) & (x != 1), 100.0, y),
    ],
)
def test_equality_is_of_elements(function: Any) -> None:
    expect_the_same(function, x=FLOAT, y=OTHER)


def test_a_parameter_is_compared_by_elements() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            self.gain = nn.module.Parameter((2,), initialize=nn.module.ones)

        def __call__(self, x: Any) -> Any:
            return ops.where(self.gain == 1, x, 0.0)

    gate = Gate()
    [got] = run_plain(gg.build(gate, x=spec_of(FLOAT)), {"x": FLOAT})
    np.testing.assert_array_equal(got, gate(FLOAT))
    np.testing.assert_array_equal(got, FLOAT)
    with pytest.raises(GraphgenError, match="truth value"):
        bool(gate.gain)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: bool(x),
        lambda x: x if x > 0 else -x,
        lambda x: x and x,
        lambda x: not x,
        lambda x: min(x, x * 2),
        lambda x: x in [x * 2, x],
        lambda x: [x * 2].index(x),
        lambda x: 0 < x < 1,
    ],
)
def test_a_value_has_no_truth(function: Any) -> None:
    expect_error(function, "no truth value before the run; choose with ops.where", x=FLOAT)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (len, "no len.. before the run; its first size is ops.dim"),
        (list, "index it, split it with ops.split, or step through it with ops.scan"),
        (int, "is not a number before the run"),
        (float, "is not a number before the run"),
        (range, "is not a number before the run"),
    ],
)
def test_a_value_is_no_number_and_no_sequence(function: Any, told: str) -> None:
    expect_error(lambda x: function(x), told, x=FLOAT)


@pytest.mark.parametrize(
    "function",
    [
        np.mean,
        np.asarray,
        lambda x: np.where(x > 0, x, 0),
        lambda x: np.concatenate([x, x]),
        lambda x: np.reshape(x, -1),
    ],
)
def test_functions_of_numpy_refuse_a_value(function: Any) -> None:
    expect_error(lambda x: function(x), "has no elements before the run", x=FLOAT)


def test_values_of_a_model_are_those_of_the_library() -> None:
    model = gg.build(lambda x: ops.exp(x) + ops.log(x), x=spec_of(FLOAT))
    a, b = model.graph.node(0).outputs[0], model.graph.node(1).outputs[0]
    assert type(a) is ir.Value and (a == a) is True and (a == b) is False and (a != b) is True
    assert b in [a, b] and [a, b].index(b) == 1 and b in model.graph.node(2).inputs
    with pytest.raises(GraphgenError, match="was called on graph values"):
        ops.exp(Value(a))


# Numbers and tensors


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        *((dtype, number) for dtype in ("float32", "float16") for number in (0.5, 2, -1, True)),
        *((dtype, number) for dtype in ("int64", "int32") for number in (2, -1, True)),
        ("uint8", 255),
        ("float32", 2**70),
        ("float16", 65504),
        ("float16", 65519.0),  # rounds to the largest
        ("float32", -3.4028235e38),
        ("float32", np.float32(0.5)),
        ("int64", np.int64(2)),
    ],
)
@pytest.mark.parametrize(
    "operator", [lambda x, c: x + c, lambda x, c: c - x, lambda x, c: x * c, lambda x, c: x > c]
)
def test_a_number_takes_the_dtype_of_the_tensor(operator: Any, dtype: str, number: Any) -> None:
    with np.errstate(all="ignore"):
        expect_the_same(lambda x: operator(x, number), x=ARRAYS[dtype])


NO_FRACTIONS = "which holds no fractions"


@pytest.mark.parametrize(
    ("dtype", "number", "told"),
    [
        ("int64", 0.5, NO_FRACTIONS),
        ("int64", 2.0, NO_FRACTIONS),  # numpy would make floats of the tensor
        ("int32", [1.0, 0.5], NO_FRACTIONS),
        ("int64", float("inf"), NO_FRACTIONS),
        ("int64", np.float64(0.5), NO_FRACTIONS),
        ("uint8", 256, "ends at 0 and 255"),
        ("uint8", -1, "ends at 0 and 255"),
        ("int32", 2**40, "ends at -2147483648 and 2147483647"),
        ("int32", [1, 2**31], "ends at -2147483648"),
        ("int64", 2**63, "ends at"),
        ("int64", 2**70, "ends at"),
        ("float16", 70000, "ends at -65504.0 and 65504.0"),
        ("float16", -1e30, "ends at"),
        ("float32", 1e39, "ends at"),
        ("float32", 1j, "is not an operand"),
        ("int64", 1j, "is not an operand"),
        ("bool", 1, "holds no numbers"),
        ("bool", 2.0, "holds no numbers"),
        ("float32", "0.5", "is not an operand"),
        ("float32", [[1.0], [1.0, 2.0]], "is not an operand"),
        ("float32", {}, "is not an operand"),
    ],
)
@pytest.mark.parametrize(
    "operator",
    [
        ops.maximum,
        ops.equal,
        lambda x, c: ops.where(x == x, x, c),
        lambda x, c: ops.equal(c, x),
    ],
)
def test_a_number_that_does_not_fit_is_an_error(
    operator: Any, dtype: str, number: Any, told: str
) -> None:
    expect_error(lambda x: operator(x, number), told, arrays=True, x=ARRAYS[dtype])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 0.5,
        lambda x: 0.5 - x,
        lambda x: x > 0.5,
        lambda x: x == 0.5,
        lambda x: ops.div(x, 2.0),
        lambda x: ops.clip(x, 0.5, 2.5),
        lambda x: ops.clip(x, None, 2.5),
        lambda x: ops.mod(x, 0.5),
        lambda x: ops.pad(x, [0, 1, 0, 1], 0.5),
    ],
)
def test_integers_meet_no_fractions(function: Any) -> None:
    expect_error(function, NO_FRACTIONS, x=ARRAYS["int64"])


@pytest.mark.parametrize("operand", [2, ARRAYS["int64"]], ids=["number", "array"])
def test_a_quotient_of_integers_is_written_div(operand: Any) -> None:
    for function in (lambda x: x / operand, lambda x: operand / x):
        expect_error(function, "fraction on arrays; write ops.div", x=ARRAYS["int32"])
    expect_the_same(lambda x: ops.div(x, 2), x=ARRAYS["int64"])


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize(
    "function", [lambda x, y: x // y, lambda x, y: x % y, lambda x, y: (x // -1) + (x % -1) + y]
)
def test_the_smallest_integer_is_divided_by_minus_1(function: Any, dtype: str) -> None:
    """Arrays wrap around; the runtime would end the process."""
    info = np.iinfo(dtype)
    x = np.array([[info.min, info.max], [7, -7], [info.min, 0]], dtype)
    y = np.array([[-1, -1], [-1, 2], [2, -1]], dtype)
    with np.errstate(over="ignore"):
        expect_the_same(function, x=x, y=y)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ops.reduce_sum(x, [0, 0]),
        lambda x: ops.reduce_max(x, [-1, 0, 1], keepdims=0),
        lambda x: ops.reduce_l2(x, [1, -1]),
        lambda x: ops.slice_(x, [0, 1], [2, 2], [1, -1]),
        lambda x: ops.squeeze(x[:, :1], [1, -1]),
    ],
)
def test_an_axis_is_named_once(function: Any) -> None:
    expect_error(function, "name one twice|duplicates", arrays=True, x=FLOAT)


def test_in_a_file_an_axis_may_be_named_twice() -> None:
    text = """<ir_version: 9, opset_import: ["": 18]> g (float[n, 3] x) => (float[] y)
        <int64[2] axes = {1, -1}> { y = ReduceSum <keepdims = 0> (x, axes) }"""
    best = gg.optimize(ir.from_onnx_text(text))
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(run_plain(best.model, {"x": x})[0], [3, 12])


def test_powers_of_integers() -> None:
    for exponent in (-1, 0.5, True, np.int64(2)):
        for function in (lambda x, p=exponent: x**p, lambda x, p=exponent: ops.pow(x, p)):
            expect_error(function, "at least 0, known before the run", x=ARRAYS["int64"])
    expect_error(lambda x, y: x**y, "whose dtype arrays would promote", x=ARRAYS["int64"], y=FLOAT)
    for exponent in (0, 1, 2, 3, 39):  # 3³⁹ has more bits than a float64
        expect_the_same(lambda x, p=exponent: x**p, x=np.array([[1, -3], [3, 7]]))
    expect_the_same(lambda x: x**2, x=FLOAT)
    expect_error(lambda x: ops.cast(x, to="int8") ** 300, "ends at -128", x=ARRAYS["int64"])


INFINITE = np.array([[-np.inf, np.inf], [-np.inf, 2.0]], np.float32)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # 1/0, and the root of -inf
@pytest.mark.parametrize("exponent", [-1, 0, 0.5, np.float32(0.5), 1, 2, 3.0, -0.5])
def test_powers_of_infinities(exponent: Any) -> None:
    for function in (lambda x: x**exponent, lambda x: ops.pow(x, exponent)):
        expect_the_same(function, x=INFINITE)
        expect_the_same(function, x=-FLOAT)  # with a -0


def test_powers_by_a_tensor_of_one_half_are_no_roots() -> None:
    """Of a node, the exponent is a tensor; NumPy takes the root, which is NaN for -inf."""
    half = np.array(0.5, np.float32)
    for x in (INFINITE, -FLOAT * np.abs(FLOAT)):
        expect_the_same(lambda x: ops.pow(x, half), x=x)
    assert np.signbit(ops.pow(np.array([-0.0], np.float32), half)) == [False]


@pytest.mark.parametrize(
    ("function", "dtype", "inside", "beyond"),
    [
        (ops.reduce_sum, np.int32, [2**31 - 2, 1], [2**31 - 1, 1]),
        (ops.reduce_sum, np.int64, [2**53 - 2, -1], [2**53 - 1, -1]),
        (ops.reduce_prod, np.int32, [2**31 - 1, 1], [1 << 16, 1 << 15]),
        (ops.reduce_prod, np.int64, [1 << 26, 1 << 26], [1 << 27, 1 << 26]),
        (ops.reduce_sum_square, np.int32, [46340, 1], [1 << 16, 0]),
        (ops.reduce_sum_square, np.int64, [-(1 << 26), 5], [1 << 32, 0]),
        (ops.reduce_l1, np.int32, [-(2**31) + 1, 0], [-(2**31), 0]),
        (ops.reduce_l1, np.int64, [-(2**53) + 2, 1], [-(2**53) + 1, 1]),
        (ops.reduce_mean, np.int32, [2**31 - 1, 2**31 - 1], None),
        (ops.reduce_mean, np.int32, [-4, 1], None),
        (ops.reduce_mean, np.int64, [2**53 - 3, 1], [2**53 - 1, 1]),
    ],
)
def test_integers_are_reduced_as_the_runtime_does_or_not(
    function: Any, dtype: Any, inside: list[int], beyond: list[int] | None
) -> None:
    """Its kernels calculate in float64 and stop at the ends of the dtype; NumPy wraps around."""
    expect_the_same(lambda x: function(x, [1]), x=np.array([inside, [2, 3]], dtype))
    if beyond is not None:
        with pytest.raises(GraphgenError, match="where the runtime rounds or cuts off"):
            function(np.array([beyond], dtype), [1])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.int32, np.uint8])
def test_of_nothing(dtype: Any) -> None:
    floats = [ops.reduce_l2, ops.reduce_log_sum, ops.reduce_log_sum_exp]
    numbers = [ops.reduce_sum, ops.reduce_mean, ops.reduce_prod, ops.reduce_l1]
    given = np.dtype(dtype)
    functions = [*numbers, *(floats if given.kind == "f" else ())] if given != np.uint8 else []
    for reduce in (ops.reduce_max, ops.reduce_min, *functions):
        for axis in ([0], [1], None):
            expect_the_same(lambda x, f=reduce, a=axis: f(x, a), x=np.zeros((0, 2), dtype))
    for function in (ops.softmax, ops.log_softmax) if given == np.float32 else ():
        expect_the_same(lambda x, f=function: f(x, axis=0), x=np.zeros((0, 2), dtype))


@pytest.mark.parametrize("limits", [(np.nan, 1.0), (-1.0, np.nan), (np.nan, np.nan), (2.0, -2.0)])
def test_nan_is_no_limit(limits: tuple[float, float]) -> None:
    if np.isnan(limits).any() and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("onnxruntime on Arm gives NaN where a limit is, as docs/values.md says")
    for x in (FLOAT, INFINITE, np.full((3, 2), np.nan, np.float32)):
        expect_the_same(lambda x: ops.clip(x, *map(float, limits)), x=x)


def test_a_small_sigmoid_keeps_its_digits() -> None:
    for dtype, x in ((np.float16, -6.0), (np.float32, -15.0), (np.float64, -80.0)):
        y = ops.sigmoid(np.array([x], dtype))
        np.testing.assert_allclose(y, np.exp([x]) / (1 + np.exp([x])), 2 * np.finfo(dtype).eps)


@pytest.mark.parametrize("largest", [0, 1])
def test_nan_is_the_largest_of_the_k_largest(largest: int) -> None:
    x = np.array([[1, 7], [np.nan, 5], [np.inf, np.nan], [np.nan, -np.inf], [3, 2]], np.float32)
    for k in (1, 3, 5):
        for i in (0, 1):
            expect_the_same(lambda x, k=k, i=i: ops.top_k(x, k, axis=0, largest=largest)[i], x=x)


@pytest.mark.parametrize("axis", [[0], [1], [0, 1], None])
def test_the_logarithm_of_sums_of_infinities(axis: Any) -> None:
    for x in (INFINITE, -INFINITE, np.full((2, 2), -np.inf, np.float32)):
        expect_the_same(lambda x: ops.reduce_log_sum_exp(x, axis), x=x)


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (np.float64(0.5), "write float"),
        (np.sqrt(2.0), "write float"),
        (np.asarray(0.5), "cast one of them"),
        (np.int64(2), "cast one of them"),
        (np.float16(2), "cast one of them"),
        (np.ones(2), "cast one of them"),
        (np.bool_(True), "B is bool; it must be one of"),
    ],
)
def test_what_numpy_would_promote_is_an_error(number: Any, told: str) -> None:
    assert (FLOAT * number).dtype != np.float32 or number.dtype in (np.float16, np.bool_)
    expect_error(lambda x: x * number, told, x=FLOAT)


def test_mixed_dtypes_are_an_error_on_arrays_too() -> None:
    x, y = ARRAYS["int64"], ARRAYS["int32"]
    for function in (ops.add, ops.greater, lambda x, y: ops.where(x > 0, x, y), ops.maximum):
        expect_error(lambda x, y, f=function: f(x, y), "cast one of them", arrays=True, x=x, y=y)
    expect_error(lambda x: ops.reshape(x, [2.0, 2.0]), "must be one of int64", arrays=True, x=FLOAT)
    expect_error(lambda x: ops.reduce_sum(x, [0.5]), "must be one of int64", arrays=True, x=FLOAT)
    expect_error(lambda x: ops.where(x, 1.0, 0.0), "must be one of bool", arrays=True, x=FLOAT)


def test_nothing_is_changed_in_place() -> None:
    def add(x: Any) -> Any:
        x += 1.0
        return x

    def add_to_array(x: Any) -> Any:
        total = np.zeros(2, np.float32)
        total += x
        return total

    expect_error(add, "write x = x . y", x=FLOAT)
    expect_error(add_to_array, r"add: float32\[2\] cannot be changed in place", x=FLOAT)
    expect_error(lambda x: np.add(x, 1.0, dtype=np.float16), "add: dtype", x=FLOAT)
    expect_error(lambda x: np.add(x, 1.0, where=FLOAT > 0), "add: where", x=FLOAT)


def test_sizes_are_counted_up_as_ints_are() -> None:
    def function(x: Any) -> Any:
        n = kept = x.shape[0]
        n += 5
        n -= 1
        n *= n
        n //= 3
        n %= 7
        steps = 1
        steps += x.shape[0]
        kept += x[0, 0]
        return ops.concat([ops.reshape(kept, [1]), x[:, 0] + n + steps + x.shape[0]], axis=0)

    expect_the_same(function, x=ARRAYS["int64"])

    def halve(x: Any) -> Any:
        n = x.shape[0]
        n /= 2
        return x * n

    expect_error(halve, "n, 2: a size is a whole number", x=FLOAT)


# Lists and attributes


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: ops.concat([x, y], axis=-1),
        lambda x, y: ops.concat((x, y), axis=0),
        lambda x, y: ops.concat(x, y, axis=-1),
        lambda x, y: ops.concat([x], axis=0),
        lambda x, y: ops.maximum([x, y]),
        lambda x, y: ops.minimum([x, 0.5, y]),
        lambda x, y: ops.maximum(x, [0.0, 1.0]),
        lambda x, y: ops.total([x, y]),
        lambda x, y: ops.average([x, y]),
        lambda x, y: ops.einsum([x, y], equation="ij,kj->ik"),
        lambda x, y: ops.reshape(x, [ops.dim(x, 1), -1]),
        lambda x, y: ops.slice_(x, 0, 1, 1),
        lambda x, y: ops.softmax(x, axis=np.int64(0)),
        lambda x, y: ops.reduce_sum(x, -1, keepdims=False),
    ],
)
def test_a_list_of_operands_is_as_good_as_several(function: Any) -> None:
    model = gg.build(function, x=spec_of(FLOAT), y=spec_of(FLOAT))
    [got] = run_plain(model, {"x": FLOAT, "y": OTHER})
    np.testing.assert_allclose(got, function(FLOAT, OTHER), rtol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * [x, x],
        lambda x: ops.concat(x, [x, x], axis=0),
        lambda x: ops.maximum(x, [x, 1.0]),
        lambda x: ops.exp([x]),
        lambda x: ops.tile(x, [ops.dim(x, 0), ops.cast(ops.dim(x, 0), to=ir.DataType.INT32)]),
        lambda x: ops.expand(x, [ops.dim(x, 0), 2.0]),
    ],
)
def test_tensors_in_a_list_are_not_joined_unasked(function: Any) -> None:
    expect_error(function, "such a list holds sizes", x=FLOAT)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda x: ops.concat(x, None, axis=0), "inputs is None"),
        (lambda x: ops.maximum(x, None), "data_0 is None"),
        (lambda x: ops.concat(x, x, axis=None), "axis is None: it must have a value"),
        (lambda x: ops.concat(x, x, 1), "missing a required argument: 'axis'"),
        (lambda x: ops.concat(x, x, dim=1), "axis"),
        (lambda x: ops.softmax(x, 0), "too many positional arguments"),
        (lambda x: ops.softmax(x, axis=None), "axis is None: it must have a value"),
        (lambda x: ops.softmax(x, axis=0.5), "axis is 0.5"),
        (lambda x: ops.softmax(x, dim=0), "unexpected keyword argument 'dim'"),
        (lambda x: ops.transpose(x, perm=[1.0, 0]), "perm is"),
        (lambda x: ops.transpose(x, perm=[1.7, 0]), "perm is"),
        (lambda x: ops.leaky_relu(x, alpha="0.5"), "it must be a number"),
        (lambda x: ops.leaky_relu(x, alpha=1e39), "ends at"),
        (lambda x: ops.leaky_relu(x, alpha=x), "alpha is"),
        (lambda x: ops.gelu(x, approximate="Tanh"), "it must be one of none, tanh"),
        (lambda x: ops.pad(x, [0, 1, 0, 1], mode="edges"), "it must be one of constant, edge"),
        (lambda x: ops.cast(x, to="int63"), "to is 'int63': it must be a dtype"),
        (lambda x: ops.cast(x, to=True), "to is True: it must be a dtype"),
        (lambda x: ops.split(x, [1, 1], axis=1, num_outputs=3)[0], "2 sizes"),
        (lambda x: ops.einsum("ij,kj->ik", x, x), "missing a required argument: 'equation'"),
        (lambda x: ops.clip(x, min=0.0), "unexpected keyword argument 'min'"),
    ],
)
def test_no_argument_is_swallowed(function: Any, told: str) -> None:
    expect_error(function, told, arrays=True, x=FLOAT)


# Names of sizes

F = gg.float32


@pytest.mark.parametrize(
    ("function", "shapes", "told"),
    [
        (lambda x, y: x * y, (("batch", "seq", 8), ("batch", 8)), "seq and batch"),
        (lambda x, y: x + y, (("n",), (8,)), "n and 8"),
        (lambda x, y: x > y, (("n", "m"), ("m", "n")), "n and m"),
        (lambda x, y: x + y, (("seq + past",), ("total",)), "past \\+ seq and total|seq \\+ past"),
        (lambda x, y: x + y, (("2*n",), ("n",)), r"2\*n and n"),
        (lambda x, y: x + y, (("4*n",), ("4*m",)), r"4\*n and 4\*m"),
        (lambda x, y: ops.where(x > 0, x, y), (("n", 3), ("m", 3)), "n and m"),
        (lambda x, y: ops.total(x, 1.0, y), (("n",), ("m",)), "n and m"),
        (lambda x, y: ops.concat(x, y, axis=-1), (("n", 3), ("m", 3)), "n and m"),
        (lambda x, y: ops.concat([x, y], axis=0), (("a", 3), ("b", "k")), "3 and k"),
        (lambda x, y: x @ y, (("b", "n", "k"), ("m", 8)), "k and m"),
        (lambda x, y: x @ y, (("k",), ("m",)), "k and m"),
        (lambda x, y: x @ y, (("a", 3, 4), ("b", 4, 3)), "a and b"),
        (lambda x, y: ops.gemm(x, y), (("b", "n"), ("m", "c")), "n and m"),
        (lambda x, y: ops.gemm(x, y, transB=1), (("b", "n"), ("c", "m")), "n and m"),
        (lambda x, y: ops.einsum(x, y, equation="ij,jk->ik"), (("b", "n"), ("m", "c")), "n and m"),
        (lambda x, y: ops.expand(x, ops.shape(y)), (("n",), ("m",)), "n and m"),
        (lambda x, y: ops.layer_norm(x, y), (("b", "n"), ("m",)), "n and m"),
        (lambda x, y: ops.mean_squared_error(x, y), (("b", "n"), ("c", "n")), "b and c"),
        (lambda x, y: ops.attention(x, y, y), (("b", 4, "t", 8), ("c", 4, "s", 8)), "b and c"),
        (lambda x, y: ops.attention(y, y, x), (("b", 4, "t", 8), ("b", 4, "s", 8)), "s and t"),
        (
            lambda x, y: ops.attention(y, y, y, x > 0),
            (("b", 1, "t", "u"), ("b", 4, "t", 8)),
            "u and t",
        ),
        (lambda x, y: ops.rotary_embedding(x, y, y), (("b", 2, "s", 8), ("b", "t", 4)), "s and t"),
        (lambda x, y: ops.reshape(x, [ops.dim(y, 0), 6]), ((4, 6), ("n",)), "n and 4"),
        (lambda x, y: ops.reshape(x, [ops.dim(y, 0), 6]), (("m", 6), ("n",)), "n and m"),
        (lambda x, y: ops.squeeze(x) + y, (("n", 1, 3), (3,)), "1 and n"),
        (lambda x, y: ops.squeeze(x, [0]) + y, (("n", 3), (3,)), "1 and n"),
        (lambda x, y: ops.split(x, [2, 3], axis=0, num_outputs=2)[0] + y, ((6,), (2,)), "5 and 6"),
    ],
)
def test_sizes_of_different_names_do_not_meet(function: Any, shapes: Any, told: str) -> None:
    with pytest.raises(GraphgenError, match=f"the dimensions ({told}).* differ") as error:
        gg.build(function, x=F[shapes[0]], y=F[shapes[1]])
    assert error.match(r"\(test_silent_dsl.py:\d+\)$")
    assert error.match(r"\(\w+\[")  # the shapes


@pytest.mark.parametrize(
    ("function", "shapes", "wanted"),
    [
        (lambda x, y: x * y, (("batch", "seq", 8), ("batch", 1, 8)), "[batch,seq,8]"),
        (lambda x, y: x * y, (("batch", "seq", 8), ("seq", 1)), "[batch,seq,8]"),
        (lambda x, y: x + y, (("seq + past",), ("past+seq",)), "[seq + past]"),
        (lambda x, y: x + y, (("2*(a + b)",), ("2*b + 2*a",)), "[2*(a + b)]"),
        (lambda x, y: ops.concat(x, y, axis=0), (("a", "k"), ("b", "k")), "[a + b,k]"),
        (lambda x, y: x @ y, (("b", 1, "n", "k"), ("h", "k", "m")), "[b,h,n,m]"),
        (
            lambda x, y: ops.concat(x, y, axis=0) + ops.concat(y, x, axis=0),
            (("a", 2), ("b", 2)),
            "[a + b,2]",
        ),
    ],
)
def test_equal_sizes_and_ones_broadcast(function: Any, shapes: Any, wanted: str) -> None:
    model = gg.build(function, x=F[shapes[0]], y=F[shapes[1]])
    assert str(model.graph.outputs[0].shape) == wanted


def test_two_names_of_one_size_are_said_to_be() -> None:
    def function(x: Any, y: Any) -> Any:
        ops.promise_same_size(x, 0, y, 0)
        return x * y

    model = gg.build(function, x=F["n"], y=F["m"])
    [got] = run_plain(model, {"x": FLOAT[0], "y": OTHER[0]})
    np.testing.assert_array_equal(got, function(FLOAT[0], OTHER[0]))
    with pytest.raises(GraphgenError, match="differ"):
        gg.build(lambda x, y: x * y, x=F["n"], y=F["m"])


def test_in_a_file_two_names_may_be_one_size() -> None:
    model = as_in_a_file(lambda x, y: ops.relu(x * y), x=F["n", 2], y=F["m", 2])
    best = gg.optimize(model).model
    for x, y in ((FLOAT, OTHER[:1]), (FLOAT, OTHER)):
        [got] = run_plain(best, {"x": x, "y": y})
        np.testing.assert_array_equal(got, np.maximum(x * y, 0))
    assert gg.grad(as_in_a_file(lambda x, y: ops.reduce_sum(x * y), x=F["n"], y=F["m"]))


# What else a graph and arrays had apart


@pytest.mark.parametrize("size", [2, 2000])
def test_a_constant_is_what_the_array_held_when_it_was_used(size: int) -> None:
    def function(x: Any) -> Any:
        buffer = np.zeros(size, np.float32)
        for i in range(3):
            buffer[:] = i
            x = x + buffer
        return x

    x = np.ones(size, np.float32)
    model = gg.build(function, x=F[size])
    np.testing.assert_array_equal(run_plain(model, {"x": x})[0], x * 4)
    assert [v.const_value.nbytes for v in model.graph.initializers.values()] == [size * 4] * 3  # type: ignore[union-attr]


def test_equal_constants_of_different_dtypes_are_apart() -> None:
    def function(x: Any) -> Any:
        eights = [np.zeros(1, ir.DataType[n].numpy()) for n in ("FLOAT8E4M3FN", "FLOAT8E5M2")]
        return tuple(ops.reshape(eight, x) for eight in eights)

    model = gg.build(function, x=gg.int64[1])
    assert len({value.dtype for value in model.graph.outputs}) == 2


LARGE = np.array([[3, 0, -5, 7, -(2**63)]])
PLACES = np.array([[0, 0], [0, 1]])
LINE = np.array([[[3, 1, -4, 1, 5, -9, 2]]], np.float32)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: ops.top_k(x, 2)[0], ARRAYS["uint8"]),
        (lambda x: ops.top_k(x, 3)[1], LARGE),
        (lambda x: ops.top_k(x, 3, largest=0)[0], LARGE),
        (lambda x: ops.div(x, 2), LARGE),
        (lambda x: ops.div(x, -3), ARRAYS["int32"]),
        (lambda x: ops.div(7, x), np.array([[-3, 2], [5, -7]], np.int32)),
        (lambda x: ops.cumsum(x, 1, exclusive=1), np.array([[1, 1e20, np.inf]], np.float32)),
        (lambda x: ops.cumsum(x, 0, exclusive=1, reverse=1), np.array([[2], [1e20]], np.float32)),
        (ops.relu, ARRAYS["int32"]),
        (lambda x: ops.relu(x), ARRAYS["float16"]),
        *(
            (lambda x, r=r: ops.scatter_elements(x, PLACES, -x, reduction=r), FLOAT)
            for r in ("add", "mul", "max", "min")
        ),
        (lambda x: ops.scatter_nd(x, PLACES, -x[0], reduction="max"), FLOAT),
        *(
            (lambda x, o=o: ops.max_pool(x, kernel_shape=[2], dilations=[2], **o), LINE)
            for o in ({"auto_pad": "SAME_UPPER"}, {"auto_pad": "SAME_LOWER", "strides": [2]})
        ),
        (
            lambda x: ops.average_pool(
                x, kernel_shape=[3], dilations=[2], strides=[2], auto_pad="SAME_UPPER"
            ),
            LINE,
        ),
    ],
)
def test_arrays_compute_what_the_runtime_does(function: Any, x: Any) -> None:
    model = gg.build(lambda x: function(x), x=DType(ir.DataType.from_numpy(x.dtype))[x.shape])
    wanted, [got] = np.asarray(function(x)), run_plain(model, {"x": x})
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted)


def test_a_cast_to_8_bits_saturates() -> None:
    x = np.array([0.4, 1000.0, -1e9, np.inf, np.nan], np.float32)

    def function(x: Any, saturate: int = 1) -> Any:
        narrow = ops.cast(x, to=ir.DataType.FLOAT8E4M3FN, saturate=saturate)
        return ops.cast(narrow, to=ir.DataType.FLOAT)

    for saturate in (0, 1):
        model = gg.build(lambda x, s=saturate: function(x, s), x=F[5])
        [got] = run_plain(model, {"x": x})
        np.testing.assert_array_equal(got, function(x, saturate))


def test_parts_have_the_size_of_the_whole() -> None:
    with pytest.raises(GraphgenError, match=r"Split: \[2, 3\] of 6"):
        ops.split(np.zeros((1, 6)), [2, 3], axis=1, num_outputs=2)


def test_epsilon_is_no_gain() -> None:
    expect_error(lambda x: ops.layer_norm(x, 1e-5), "give epsilon by its name", x=FLOAT)
    expect_error(lambda x: ops.rms_norm(x, 1e-5), "give epsilon by its name", x=FLOAT)


@pytest.mark.parametrize("size", ["", "batch size", True, -1, 2.0, None])
def test_a_size_is_a_number_or_an_expression_of_names(size: Any) -> None:
    with pytest.raises(GraphgenError, match="is not a size; use a number") as error:
        F[size, 2]
    assert error.match(r"\(test_silent_dsl.py:\d+\)$")


def test_a_hyphen_in_a_name_is_not_a_difference() -> None:
    with pytest.raises(GraphgenError, match='write "batch_size" or "batch - size"'):
        F["batch-size", 2]
    assert str(gg.build(lambda x: x * 2, x=F["n - 1"]).graph.outputs[0].shape) == "[n - 1]"
    assert F["n-1"]


def test_what_was_refused_is_refused_again() -> None:
    """A body is checked once for operands of the same types, but only where it passes."""

    def twice(q: Any, k: Any) -> Any:
        for _ in range(2):
            with pytest.raises(GraphgenError, match="the dimensions b and c differ"):
                ops.scaled_dot_product_attention(q, k, k)
        return q + 1.0

    gg.build(twice, q=gg.float32["b", 2, "t", 8], k=gg.float32["c", 2, "s", 8])


# What random programs found: tests/test_fuzz_dsl.py


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ops.split(x, axis=0, num_outputs=1)[0] * 2,
        lambda x: ops.stack([x[x[:, 0] > -9], x]),
        lambda x: ops.clip(x[0, 0], np.zeros(1, np.float32)),
        lambda x: ops.rms_norm(ops.transpose(x)),
        lambda x: ops.layer_norm(ops.transpose(x)),
    ],
)
def test_random_programs_mean_what_arrays_mean(function: Any) -> None:
    model = gg.build(lambda x: function(x), x=F["n", 2])
    wanted, [got] = np.asarray(function(FLOAT)), run_plain(model, {"x": FLOAT})
    assert got.dtype == wanted.dtype
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_a_size_of_0_is_that_of_an_axis() -> None:
    empty = np.zeros((2, 0), np.float32)
    for function in (lambda x: ops.reshape(x, [2, 1, 0]), lambda x: ops.reshape(x, [4, 1, 0])):
        with pytest.raises(GraphgenError, match="size 2 is 0, which keeps that of axis 2 of 2"):
            gg.build(function, x=F[2, 0])
        with pytest.raises(GraphgenError, match="size 2 is 0, which keeps that of axis 2 of 2"):
            function(empty)
    assert gg.build(lambda x: ops.reshape(x, [2, 0, 1]), x=F[2, "n"])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ops.conv(x, np.ones((1, 1, 4), np.float32), dilations=[3]),
        lambda x: ops.conv_transpose(x, np.ones((1, 1, 1), np.float32), pads=[4, 3]),
        lambda x: ops.max_pool(x, kernel_shape=[8]),
        lambda x: ops.average_pool(x, kernel_shape=[10], pads=[1, 1]),
    ],
)
def test_a_window_fits_in_what_it_moves_over(function: Any) -> None:
    for run in (lambda: function(LINE), lambda: gg.build(function, x=F[1, 1, 7])):
        with pytest.raises(GraphgenError, match=r"axis 2 .* would have (0|-\d) el.*silent_dsl.py"):
            run()


def test_a_limit_is_one_number() -> None:
    expect_error(
        lambda x: ops.clip(x, np.zeros(2, np.float32)), "must be a scalar", arrays=True, x=FLOAT
    )


def test_a_narrow_dtype_may_not_hold_a_size() -> None:
    expect_error(lambda x: x + x.shape[0], "which may not hold it", x=ARRAYS["uint8"])
    expect_the_same(lambda x: x + x.shape[0], x=ARRAYS["int32"])


class Shared(nn.Module):
    """A linear map whose result has the name that is given."""

    def __init__(self, result: str = "y") -> None:
        self.linear, self.result = nn.Linear(2, 2), result

    def __call__(self, **given: Any) -> Any:
        return {self.result: self.linear(*given.values())}


@pytest.mark.parametrize(
    ("result", "given", "told"),
    [
        ("x", "x", "an output and an input are both called x;"),
        ("linear.bias", "x", "an output and a weight are both called linear.bias;"),
        ("y", "linear.bias", "an input and a weight are both called linear.bias;"),
        ("", "x", "an output is called '';"),
        ("y", "", "an input is called '';"),
        ("a\ud800", "x", r"an output is called 'a\\ud800';"),
    ],
)
def test_no_name_is_changed(result: str, given: str, told: str) -> None:
    """A file has one value of a name, so that one of two was renamed, a weight as well."""
    with pytest.raises(GraphgenError, match=told):
        gg.build(Shared(result), **{given: gg.float32["n", 2]})


def test_parameters_have_different_paths() -> None:
    module: Any = Shared()
    module.parts = {"0": nn.Linear(2, 2), 0: nn.Linear(2, 2)}
    with pytest.raises(GraphgenError, match=r"two parameters of the path parts\.0\.weight: rename"):
        nn.initialize(module)


def test_an_input_is_not_the_step_of_dropout() -> None:
    """A build for training adds `seed` and `step`, and took the program's `step` for its own."""
    with pytest.raises(GraphgenError, match=r"the input step is float\[\], .* has to be int64\[\]"):
        gg.build(
            lambda x, step: nn.Dropout(0.5)(x) * step,
            training=True,
            x=gg.float32["n"],
            step=gg.float32[()],
        )


@pytest.mark.parametrize("inside", [False, True])
def test_a_value_that_a_function_has_kept_is_of_its_own_graph(inside: bool) -> None:
    """Names begin anew in each: the value of this graph with its name would be read instead."""
    kept: list[Any] = []

    def keeping(x: Any) -> Any:
        kept.append(ops.exp(x))
        return kept[-1]

    def body(x: Any) -> Any:
        if inside:
            ops.cond(ops.reduce_sum(x, None, keepdims=0) > 0, lambda: [keeping(x)], lambda: [x])
        return ops.tanh(x) + kept[-1]

    gg.build(keeping, x=gg.float32[2])
    with pytest.raises(gg.GraphgenError, match="a result of Exp of another graph: a function or"):
        gg.build(body, x=gg.float32[2])


@pytest.mark.parametrize("dtype", [">f4", "datetime64[s]"])
def test_a_dtype_that_onnx_lacks_is_told(dtype: str) -> None:
    x = np.ones(2, dtype)
    for call in (lambda: ops.exp(x), lambda: gg.build(lambda y: y + x, y=gg.float32[2])):
        with pytest.raises(gg.GraphgenError, match=r"ONNX has no dtype .*; convert the array"):
            call()
