"""Norms over axes of any size, as instance norm and group norm written by hand."""

from typing import Any

import numpy as np
import pytest
from small_models import ROUNDING, as_in_a_file, relative_rms

import graphgen as gg
from graphgen import ops
from graphgen.export.write import to_bytes
from graphgen.graph import count_operators
from graphgen.passes import optimize
from graphgen.runtime import Session

C = 6
GAIN, BIAS = np.random.default_rng(1).standard_normal((2, 1, C, 1, 1)).astype(np.float32)


def normalized(x: Any, axes: list[int], epsilon: float = 1e-5) -> Any:
    d = x - ops.reduce_mean(x, axes)
    return d / ops.sqrt(ops.reduce_mean(d * d, axes) + epsilon)


def at_once(x: Any, gain: Any, bias: Any) -> Any:
    """x · (g / deviation) + (b - mean · g / deviation), as TensorFlow writes it."""
    mean = ops.reduce_mean(x, [2, 3])
    factor = gain / ops.sqrt(ops.reduce_mean(x * x, [2, 3]) - mean * mean + 1e-3)
    return x * factor + (bias - mean * factor)


FORMS = {
    "images": lambda x: normalized(x, [2, 3]) * GAIN + BIAS,
    "at once": lambda x: at_once(x, GAIN, BIAS),
    "whole": lambda x: normalized(x, [1, 2, 3]) * GAIN,
    "groups": lambda x: normalized(ops.reshape(x, [0, 2, -1]), [2]),
}
IMAGES = gg.float32["n", C, "h", "w"]


@pytest.mark.parametrize("name", FORMS)
def test_norms_over_axes_of_any_size_are_instance_norms(name: str) -> None:
    model = as_in_a_file(FORMS[name], primitives=True, x=IMAGES)
    best = optimize(model, verify=True)
    counts = count_operators(best.model)
    assert counts["InstanceNormalization"] == 1 and "ReduceMean" not in counts, counts
    before, after = (Session(to_bytes(m), optimize=False) for m in (model, best.model))
    rng = np.random.default_rng(0)
    for shape in ((2, C, 5, 7), (1, C, 1, 9), (3, C, 8, 2), (0, C, 3, 4)):
        if name == "groups" and not shape[0]:
            continue  # the reshape of the file cannot tell what is left
        x = rng.standard_normal(shape).astype(np.float32)
        for feed in (x, 100 * x + 3, np.where(np.arange(x.size).reshape(shape) == 5, np.nan, x)):
            [wanted], [got] = (f({"x": feed.astype(np.float32)}) for f in (before, after))
            assert wanted.shape == got.shape
            assert np.array_equal(np.isnan(wanted), np.isnan(got))
            if (finite := np.isfinite(wanted)).any():
                assert relative_rms(wanted[finite], got[finite]) < ROUNDING


@pytest.mark.parametrize(
    ("body", "spec"),
    [
        (lambda x: normalized(x, [0, 2, 3]), IMAGES),  # of a batch
        (lambda x: normalized(x, [2, 3]), gg.float32["n", "c", "h", "w"]),
        (lambda x: normalized(x, [2, 3]), gg.float16["n", C, "h", "w"]),
        (lambda x: normalized(x, [2]), IMAGES),  # it would be slower between transposes
        (lambda x: normalized(x, [1, 2]), gg.float32["n", "h", "w", C]),
    ],
)
def test_other_norms_over_axes_of_any_size_stay(body: Any, spec: Any) -> None:
    best = optimize(as_in_a_file(body, primitives=True, x=spec))
    assert "InstanceNormalization" not in count_operators(best.model)
