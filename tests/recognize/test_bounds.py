"""Scores that norms bound: a low number hides beside them, as -infinity does."""

from typing import Any

import numpy as np
import pytest
from small_models import ROUNDING, relative_rms, run_plain

import graphgen as gg
from graphgen import ops
from graphgen.graph import count_operators

H, D, F = 2, 4, 8
RANDOM = np.random.default_rng(0)
GAIN, SHIFT, WQ, WK = (RANDOM.standard_normal(s, np.float32) for s in ((F,), (F,), (F, F), (F, F)))
INPUTS = {
    "x": gg.float32["b", "t", F],
    "y": gg.float32["b", "t", F],
    "one": gg.bool_["t", "t"],
    "other": gg.bool_["b", 1, 1, "t"],
}


def heads(x: Any) -> Any:
    return ops.transpose(ops.reshape(x, [0, 0, H, D]), perm=[0, 2, 1, 3])


def scores(x: Any, y: Any, gain: Any = GAIN) -> Any:
    x, y = (ops.layer_normalization(v, gain, SHIFT) for v in (x, y))
    return heads(x @ WQ) @ ops.swap_last(heads(ops.concat(y, axis=-1) @ WK + SHIFT)) * 0.5


def attended(s: Any, y: Any) -> Any:
    return ops.softmax(s) @ heads(y)


def once(x: Any, y: Any, one: Any, other: Any) -> Any:
    return attended(ops.where(one, scores(x, y), -1e8), y)


def twice(x: Any, y: Any, one: Any, other: Any) -> Any:
    """As Emformer hides what is beyond its segment, and what is padding."""
    return attended(ops.where(other, ops.where(one, scores(x, y), -1e8), -1e8), y)


def few(x: Any, y: Any, one: Any, other: Any) -> Any:
    return attended(ops.where(one, scores(x, y), -1e4), y)


def of_an_input(x: Any, y: Any, one: Any, other: Any) -> Any:
    s = heads(ops.layer_normalization(x, GAIN, SHIFT) @ WQ) @ ops.swap_last(heads(y))
    return attended(ops.where(one, s, -1e8), y)


def of_large_gain(x: Any, y: Any, one: Any, other: Any) -> Any:
    return attended(ops.where(one, scores(x, y, GAIN * 300.0), -1e4), y)


def shifted(x: Any, y: Any, one: Any, other: Any) -> Any:
    s = ops.where(one, scores(x, y), -1e8)
    return attended(s + ops.unsqueeze(ops.reduce_sum(y, [-1], keepdims=0), [1, 2]), y)


def apart(x: Any, y: Any, one: Any, other: Any) -> Any:
    """A row that is hidden in part by each has the mean of what -1e8 hides."""
    return attended(ops.where(other, ops.where(one, scores(x, y), -1e8), -2e8), y)


CASES = [(once, True), (twice, True), (few, True)]
CASES += [(case, False) for case in (of_an_input, of_large_gain, shifted, apart)]


@pytest.mark.parametrize(("attention", "fused"), CASES, ids=lambda c: getattr(c, "__name__", ""))
def test_a_low_number_hides_beside_scores_of_norms(attention: Any, fused: bool) -> None:
    """Rows that are masked entirely have the mean of V, as in the graph, and inputs are large."""
    model = gg.build(attention, primitives=True, **INPUTS)
    best = gg.optimize(model, target="cpu").model
    assert count_operators(best).get("Attention", 0) == fused
    random = np.random.default_rng(1)
    for scale in (1.0, 1e6):
        feeds: dict[str, Any] = {
            name: random.standard_normal((3, 5, F), np.float32) * np.float32(scale)
            for name in ("x", "y")
        }
        feeds |= {"one": random.random((5, 5)) < 0.6, "other": random.random((3, 1, 1, 5)) < 0.6}
        feeds["one"][2], feeds["other"][1] = False, False
        [wanted], [got] = run_plain(model, feeds), run_plain(best, feeds)
        assert relative_rms(wanted, got) < ROUNDING
