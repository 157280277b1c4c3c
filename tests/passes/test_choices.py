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


def counted(keep: Any) -> Any:
    """A truth value that was made of integers."""
    return ops.cast(ops.cast(keep, to=np.int64) * 2, to=bool)


CHOICES = {
    "difference": lambda s, keep: s * numbers(keep) - ahead(numbers(keep)),
    "sum": lambda s, keep: s * numbers(keep) + (1.0 - numbers(keep)) * np.float32(-1e9),
    "the rest first": lambda s, keep: s * (1.0 - numbers(keep)) - numbers(keep) * np.float32(1e9),
    "in another shape": lambda s, keep: (lambda m: s * m - ahead(m))(moved(keep)),
    "times ones": lambda s, keep: (lambda m: s * m - ahead(m))(
        numbers(keep) * ops.expand(np.ones(1, np.float32), [N, N])
    ),
    "constant": lambda s, keep: s * PAST - (1 - PAST) * np.float32(1e9),
    "of integers": lambda s, keep: (lambda c: s * numbers(c) - ahead(numbers(c)))(counted(keep)),
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


@pytest.mark.parametrize("longest", [PAST, PAST * 0.5])
def test_a_part_of_a_triangle_is_a_choice(longest: Any) -> None:
    """As the first GPT cuts it for texts of any length; one of other numbers is none."""

    def body(x: Any) -> Any:
        t = TABLE["", "Shape"](x, start=1, end=2)
        m = ops.slice_(ops.slice_(longest, [0], t, [0], [1]), [0], t, [1], [1])
        return ops.softmax(x @ ops.swap_last(x) * m - ahead(m)) @ x

    model = as_in_a_file(body, x=gg.float32["b", "t", 8])
    best = optimize(model, verify=True)
    assert count_operators(best.model).get("Attention", 0) == int(longest.max())
    for sizes in ((2, N, 8), (3, 1, 8)):
        x = np.random.default_rng(0).standard_normal(sizes, np.float32)
        [wanted], [got] = (run_plain(m, {"x": x}) for m in (model, best.model))
        assert relative_rms(wanted, got) < ROUNDING


@pytest.mark.parametrize(
    "form",
    [
        lambda s, keep: ops.where(keep, s, s - np.float32(1e9)),
        lambda s, keep: ops.where(ops.logical_not(keep), s + np.float32(-1e9), s),
    ],
)
def test_what_is_added_to_hidden_scores_alone_is_a_bias(form: Any) -> None:
    """Also in a row that is hidden entirely, whose scores it makes -1e9."""
    model = attended(form)
    best = optimize(model)
    assert count_operators(best.model).get("Attention") == 1
    x = np.random.default_rng(0).standard_normal((2, N, 8)).astype(np.float32)
    keep = np.eye(N, dtype=bool)
    keep[1], keep[2] = False, True
    [wanted], [got] = (run_plain(m, {"x": x, "keep": keep}) for m in (model, best.model))
    assert np.isclose(wanted[:, 1], x.mean(1)).all()
    assert relative_rms(wanted, got) < ROUNDING


def test_another_choice_between_sums_stays() -> None:
    model = attended(lambda s, keep: ops.where(keep, s, s * 0.5 - np.float32(1e9)))
    assert count_operators(optimize(model).model).get("Attention") is None
