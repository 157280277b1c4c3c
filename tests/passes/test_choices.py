"""Sums of products with a mask and with what is left of 1, as TensorFlow's GPT-2 hides tokens."""

from typing import Any

import numpy as np
import pytest
from small_models import ROUNDING, as_in_a_file, relative_rms, run_plain

import graphgen as gg
from graphgen import ops
from graphgen.graph import count_operators
from graphgen.op import TABLE
from graphgen.passes import optimize

N = 6
PAST = np.tril(np.ones((N, N), np.float32))
PART = np.where(PAST > 0, 0.0, (np.arange(N, dtype=np.float32) + 1) * 1e9)


def ahead(m: Any) -> Any:
    return (1.0 - m) * np.float32(1e9)


def numbers(keep: Any) -> Any:
    return ops.cast(keep, to=np.float32)


def moved(keep: Any) -> Any:
    """The numbers in another shape, which both products read."""
    return TABLE["", "Reshape"](numbers(keep), np.array([1, N, N]))


CHOICES = {
    "difference": lambda s, keep: s * numbers(keep) - ahead(numbers(keep)),
    "sum": lambda s, keep: s * numbers(keep) + (1.0 - numbers(keep)) * np.float32(-1e9),
    "the rest first": lambda s, keep: s * (1.0 - numbers(keep)) - numbers(keep) * np.float32(1e9),
    "in another shape": lambda s, keep: (lambda m: s * m - ahead(m))(moved(keep)),
    "times ones": lambda s, keep: (lambda m: s * m - ahead(m))(
        numbers(keep) * ops.expand(np.ones(1, np.float32), [N, N])
    ),
    "constant": lambda s, keep: s * PAST - (1 - PAST) * np.float32(1e9),
    "scaled constant": lambda s, keep: s * (PAST * 0.5) + (PAST - 1) * np.float32(1e9),
}
OTHERS = {
    "two masks": lambda s, keep: s * numbers(keep) - ahead(PAST),
    "the same mask": lambda s, keep: s * numbers(keep) - numbers(keep) * np.float32(1e9),
    "numbers": lambda s, keep: s * (m := ops.sigmoid(s)) - ahead(m),
    "constants of three values": lambda s, keep: s * (PAST + np.eye(N, dtype="f")) - ahead(PAST),
    "several lows": lambda s, keep: s * PAST - PART,
    "a rest that stays": lambda s, keep: s * PAST - PAST,
}


def attended(form: Any) -> Any:
    def body(x: Any, keep: Any) -> Any:
        y = x + ops.cast(keep[:1, :1], to=np.float32)
        return ops.softmax(form(x @ ops.swap_last(y), keep)) @ x

    return as_in_a_file(body, x=gg.float32["b", N, 8], keep=gg.bool_[N, N])


@pytest.mark.parametrize("name", [*CHOICES, *OTHERS])
def test_exclusive_products_are_a_choice(name: str) -> None:
    model = attended((CHOICES | OTHERS)[name])
    best = optimize(model, verify=True)
    assert (count_operators(best.model).get("Attention", 0) == 1) == (name in CHOICES)
    rng = np.random.default_rng(0)
    for factor in (1.0, 30.0):
        x = rng.standard_normal((2, N, 8)).astype(np.float32) * factor
        keep = rng.integers(0, 2, (N, N)) > 0
        keep[:, 0], keep[:, 1] = True, False
        [wanted], [got] = (run_plain(m, {"x": x, "keep": keep}) for m in (model, best.model))
        assert relative_rms(wanted, got) < ROUNDING
