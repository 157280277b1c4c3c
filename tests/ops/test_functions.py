"""Functions that are written in operators: stack, one_hot, softcap."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from small_models import run_plain

import graphgen as gg
from graphgen import ops

RNG = np.random.default_rng(20)


def normal(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_stack_is_that_of_numpy(axis: int) -> None:
    x, y = normal(2, 3), normal(2, 3)
    wanted = np.stack([x, y, x], axis)
    model = gg.build(lambda x, y: ops.stack([x, y, x], axis=axis), **dict.fromkeys("xy", X))
    for found in (ops.stack(x, y, x, axis=axis), run_plain(model, {"x": x, "y": y})[0]):
        np.testing.assert_array_equal(found, wanted)


X = gg.float32["b", "t"]
ROWS = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda x: ops.stack(),
            "stack: the operands are none; give one tensor or more, of one shape",
        ),
        (lambda x: ops.stack([x, 1.0]), r"stack: the operands are float.*\], 1\.0; give"),
        (
            lambda x: ops.stack(x, ROWS[0]),
            r"\], float32\[3\]; give one tensor or more, of one shape",
        ),
        (lambda x: ops.stack(ROWS, ROWS[:1]), r"are float32\[2, 3\], float32\[1, 3\]; give"),
        (lambda x: ops.one_hot(x, 3), r"one_hot: ids are float.*\[.*\]; ids must be integers"),
    ],
)
def test_what_does_not_fit_is_refused_at_its_line(call: Any, told: str) -> None:
    for run in (lambda: call(ROWS), lambda: gg.build(call, x=X)):
        with pytest.raises(gg.GraphgenError, match=told + r".*\(test_functions.py:\d+\)"):
            run()


def test_sizes_of_other_names_do_not_stack() -> None:
    with pytest.raises(gg.GraphgenError, match=r"t.*s.*test_functions.py"):
        gg.build(lambda x, y: ops.stack(x, y), x=X, y=gg.float32["b", "s"])


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_one_hot(dtype: Any) -> None:
    ids = np.array([[0, 2], [-1, 3], [1, 1]], dtype)  # two of them are none of the three
    wanted = (ids[..., None] == np.arange(3)).astype(np.float32)
    assert wanted.sum() == 4
    spec = gg.int64 if dtype == np.int64 else gg.int32
    model = gg.build(lambda ids: ops.one_hot(ids, 3), ids=spec["b", 2])
    assert [str(d) for d in model.graph.outputs[0].shape or ()] == ["b", "2", "3"]
    for found in (ops.one_hot(ids, 3), run_plain(model, {"ids": ids})[0]):
        np.testing.assert_array_equal(found, wanted)
        assert found.dtype == np.float32
    assert ops.one_hot(ids, 3, dtype=ir.DataType.INT64).dtype == np.int64


def test_one_hot_of_as_many_as_the_run_says() -> None:
    def call(ids: Any, x: Any) -> Any:
        return ops.one_hot(ids, ops.dim(x, 1)) @ ops.transpose(x, perm=[1, 0])

    model = gg.build(call, ids=gg.int64["n"], x=X)
    x, ids = normal(2, 5), np.array([4, 0, 2])
    np.testing.assert_array_equal(run_plain(model, {"ids": ids, "x": x})[0], x.T[ids])


def test_a_softcap_bounds_what_is_large_and_leaves_what_is_small() -> None:
    x = np.array([-1e9, -1e-3, 0.0, 1e-3, 1e9], np.float32)
    np.testing.assert_allclose(ops.softcap(x, 30.0), [-30, -1e-3, 0, 1e-3, 30], rtol=1e-6)
