"""How close the results of a module and its model have to be."""

import numpy as np
import pytest

from graphgen.export.torch_results import _apart

EPSILON = float(np.finfo(np.float32).eps)
R = np.random.default_rng(0).standard_normal(1000).astype(np.float32)


def changed(x, at, to):
    x = x.copy()
    x[at] = to
    return x


@pytest.mark.parametrize(
    ("r", "x"),
    [
        (R, R * np.float32(1 + 1e-5)),
        (changed(R, 3, np.nan), changed(R, 3, np.nan)),
        (changed(R, 3, -np.inf), changed(R * np.float32(1 + 1e-6), 3, -np.inf)),
        (np.float32([0.0]), np.float32([1e-7])),  # what cancels leaves the rounding
        (np.arange(1000), changed(np.arange(1000), 3, 4)),  # a tie
    ],
)
def test_rounding_is_no_difference(r, x):
    assert _apart(r, x, EPSILON) is None


@pytest.mark.parametrize(
    ("r", "x"),
    [
        (R, R * np.float32(1.001)),
        (R, changed(R, 3, 0)),
        (R, changed(R, 3, np.nan)),
        (changed(R, 3, np.inf), changed(R, 3, -np.inf)),
        (changed(R, slice(500), -1e9), changed(R * np.float32(1.01), slice(500), -1e9)),  # a mask
        (np.arange(10), np.arange(10)[::-1]),
    ],
)
def test_another_result_is_one(r, x):
    assert _apart(r, x, EPSILON) is not None
