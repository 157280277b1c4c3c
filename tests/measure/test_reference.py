"""Operators against torch's float64 results and gradients (tests/fixtures/make_reference.py)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphgen import ops
from graphgen.autodiff import grad
from graphgen.measure.reference import evaluate
from graphgen.nn.module import DType, build

FIXTURE = np.load(Path(__file__).parents[1] / "fixtures" / "torch_reference.npz")
CASES: list[dict[str, Any]] = json.loads(str(FIXTURE["cases"]))

OURS: dict[str, Callable[..., Any]] = {
    "softmax": lambda x, *, dim: ops.softmax(x, axis=dim),
    "log_softmax": lambda x, *, dim: ops.log_softmax(x, axis=dim),
    "layer_norm": lambda x, weight=None, bias=None, *, normalized_shape, eps: ops.layer_norm(
        x, weight, bias, epsilon=eps
    ),
    "rms_norm": lambda x, weight=None, *, normalized_shape, eps: ops.rms_norm(
        x, weight, epsilon=eps
    ),
    "gelu": ops.gelu,
    "silu": ops.silu,
    "relu": ops.relu,
    "scaled_dot_product_attention": lambda q, k, v, mask=None, *, enable_gqa=False, **attributes: (
        ops.attention(q, k, v, mask, **attributes)
    ),
    "cross_entropy": ops.cross_entropy,
    "embedding": lambda ids, table: ops.embedding(table, ids),
}


def test_every_function_is_compared() -> None:
    assert {case["function"] for case in CASES} == set(OURS)


@pytest.mark.parametrize("primitives", [False, True], ids=["operators", "primitives"])
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_value_and_gradients_are_those_of_torch(case: dict[str, Any], primitives: bool) -> None:
    arrays = {name: FIXTURE[f"{case['name']}/{name}"] for name in case["inputs"]}
    cotangent = FIXTURE[f"{case['name']}/g"]

    def call(**values: Any) -> dict[str, Any]:
        y = OURS[case["function"]](*values.values(), **case["attributes"])
        return {"y": y, "loss": ops.reduce_sum(y * cotangent, None, keepdims=0)}

    specs = {
        name: DType(ir.DataType.from_numpy(x.dtype))[tuple(x.shape)] for name, x in arrays.items()
    }
    model = build(call, primitives=primitives, **specs)
    y, _, *gradients = evaluate(grad(model, of="loss", wrt=case["gradients"]), arrays)
    np.testing.assert_allclose(y, FIXTURE[f"{case['name']}/y"], rtol=1e-10, atol=1e-12)
    assert len(gradients) == len(case["gradients"])
    for name, gradient in zip(case["gradients"], gradients, strict=True):
        want = FIXTURE[f"{case['name']}/d{name}"]
        np.testing.assert_allclose(gradient, want, rtol=1e-9, atol=1e-11, err_msg=name)
