"""Experts: who computes what, the weights of the sum, and gradients."""

from typing import Any

import numpy as np
import pytest
from small_models import ROUNDING, relative_rms, run_plain, vary

import graphgen as gg
from graphgen import nn, ops
from graphgen.measure.reference import evaluate
from graphgen.nn.module import initialize

RNG = np.random.default_rng(31)
X = gg.float32["b", "t", 6]


def experts(count: int = 4, k: int = 2) -> Any:
    return vary(nn.MixtureOfExperts(6, 5, experts=count, k=k, activation="silu", gated=True))


def normal(*shape: int) -> Any:
    return RNG.standard_normal(shape, np.float32)


def by_hand(x: Any, w: dict[str, Any], k: int) -> tuple[Any, set[int]]:
    """One row and one of its experts at a time, in float64; and all that were chosen."""
    rows, used = x.reshape(-1, 6).astype(np.float64), set()
    y = np.zeros_like(rows)
    for i, row in enumerate(rows):
        p = np.exp(row @ w["router.weight"])
        p /= p.sum()
        chosen = np.argsort(-p)[:k]
        for e in chosen:
            up, gate, down = (f"experts.{e}.{name}" for name in ("up", "gate", "down"))
            u, g = (row @ w[f"{n}.weight"] + w[f"{n}.bias"] for n in (up, gate))
            h = g / (1 + np.exp(-g)) * u
            y[i] += p[e] / p[chosen].sum() * (h @ w[f"{down}.weight"] + w[f"{down}.bias"])
            used.add(int(e))
    return y.reshape(x.shape), used


@pytest.mark.parametrize(("count", "k"), [(4, 2), (3, 1), (2, 2)])
def test_each_row_is_a_weighted_sum_of_the_experts_that_it_chose(count: int, k: int) -> None:
    module = experts(count, k)
    w = {name: p.array.astype(np.float64) for name, p in initialize(module).items()}
    model = gg.build(module, x=X)
    best = gg.optimize(model)
    assert best.report.shortfalls() == []
    assert [str(d) for d in model.graph.outputs[0].shape or ()] == ["b", "t", "6"]
    for shape in ((1, 1, 6), (3, 5, 6)):
        x = normal(*shape)
        wanted, _ = by_hand(x, w, k)
        for y in (module(x), run_plain(model, {"x": x})[0], gg.Session(best)(x=x)[0]):
            assert relative_rms(wanted, y) < ROUNDING


def test_experts_of_a_known_number_of_rows() -> None:
    """How many rows each expert has is computed, though their sum is known."""
    module, x = experts(3, 1), normal(2, 1, 6)
    best = gg.optimize(gg.build(module, x=gg.float32[2, 1, 6]))
    assert relative_rms(module(x), gg.Session(best)(x=x)[0]) < ROUNDING


def test_experts_that_no_row_chose_compute_nothing() -> None:
    """Nor do they get a gradient: what is not a number would show."""
    module, x = experts(), normal(1, 2, 6)
    w = {name: p.array.astype(np.float64) for name, p in initialize(module).items()}
    wanted, used = by_hand(x, w, 2)
    assert len(used) < 4
    spoiled = {
        name: np.float32(array if int(name.split(".")[1]) in used else np.nan)
        if name.startswith("experts")
        else array.astype(np.float32)
        for name, array in w.items()
    }
    weights = {name: np.broadcast_to(a, w[name].shape).copy() for name, a in spoiled.items()}
    model = gg.build(module, weights=weights, x=X)
    assert relative_rms(wanted, run_plain(model, {"x": x})[0]) < ROUNDING
    weights = {f"module.{name}": array for name, array in weights.items()}
    loss = gg.build(Loss(module), weights=weights, x=X)
    assert all(np.isfinite(g).all() for g in run_plain(gg.grad(loss, wrt=["x"]), {"x": x}))


class Loss(nn.Module):
    def __init__(self, module: Any):
        self.module = module

    def __call__(self, x: Any) -> Any:
        return ops.reduce_sum(ops.tanh(self.module(x)), None, keepdims=0)


def test_the_gradient_of_rows_is_the_central_difference() -> None:
    """Those of the weights are tested with the model, moe."""
    module, x = experts(3), normal(2, 7, 6)
    loss = gg.build(Loss(module), x=X)
    x, h = x.astype(np.float64), 1e-6
    d = RNG.standard_normal(x.shape)
    slope = evaluate(gg.grad(loss, wrt=["x"]), {"x": x})[1]
    up, down = (float(evaluate(loss, {"x": x + s * h * d})[0]) for s in (1, -1))
    assert abs((slope * d).sum() - (up - down) / (2 * h)) < 1e-6 * np.abs(slope * d).sum()


def balance_by_hand(x: Any, router: Any, k: int) -> float:
    """The formula of the paper, in float64, one row at a time."""
    count, chosen, sums = router.shape[1], np.zeros(router.shape[1]), np.zeros(router.shape[1])
    rows = x.reshape(-1, 6).astype(np.float64)
    for row in rows:
        p = np.exp(row @ router)
        sums += p / p.sum()
        chosen[np.argsort(-p)[:k]] += 1
    return float(count * (chosen / (len(rows) * k) * (sums / len(rows))).sum())


@pytest.mark.parametrize(("count", "k"), [(4, 1), (4, 2), (3, 3)])
def test_the_balance_is_that_of_the_paper(count: int, k: int) -> None:
    module = experts(count, k)
    router = initialize(module)["router.weight"].array.astype(np.float64)
    model, x = gg.build(module.balance, x=X), normal(3, 5, 6)
    best = gg.Session(gg.optimize(model))
    wanted = balance_by_hand(x, router, k)
    for y in (module.balance(x), run_plain(model, {"x": x})[0], best(x=x)[0]):
        assert abs(float(y) - wanted) < 2e-6 and y.shape == ()
    for shape in ((0, 3, 6), (3, 0, 6), (0, 0, 6)):
        none = np.zeros(shape, np.float32)
        for y in (module.balance(none), run_plain(model, {"x": none})[0], best(x=none)[0]):
            assert y == 0.0
    module.router.weight.array *= 0.0
    assert abs(float(module.balance(x)) - 1.0) < 1e-6


def test_the_gradient_of_the_balance_is_the_central_difference() -> None:
    module, x, h = experts(3, 1), normal(2, 7, 6), 1e-6  # the choices of 14 are never even
    model = gg.build(module.balance, x=X)
    x = x.astype(np.float64)
    slopes = evaluate(gg.grad(model, wrt=["x", "router.weight"]), {"x": x})[1:]
    router = initialize(module)["router.weight"].array.astype(np.float64)
    for slope, turn in zip(slopes, (x, router), strict=True):
        d = RNG.standard_normal(turn.shape)
        given = [(x + s * h * d, router) if turn is x else (x, router + s * h * d) for s in (1, -1)]
        up, down = (balance_by_hand(*pair, k=1) for pair in given)
        wanted = (up - down) / (2 * h)
        assert abs((slope * d).sum() - wanted) < 1e-6 * np.abs(slope * d).sum()


def test_no_rows_have_no_results() -> None:
    """Each size of 0 stays where it is, in the gradient of the rows, too."""
    module = experts()
    model, slopes = gg.build(module, x=X), gg.grad(gg.build(Loss(module), x=X), wrt=["x"])
    best = gg.Session(gg.optimize(model)), gg.Session(gg.optimize(slopes))
    for shape in ((0, 3, 6), (3, 0, 6), (0, 0, 6)):
        x = np.zeros(shape, np.float32)
        plain = [run_plain(made, {"x": x})[-1] for made in (model, slopes)]
        found = [module(x), *plain, *(run(x=x)[-1] for run in best)]
        assert [y.shape for y in found] == [shape] * 5


def test_more_experts_than_there_are_are_refused() -> None:
    with pytest.raises(
        gg.GraphgenError, match=r"MixtureOfExperts\(experts=2, k=3\): k must be at most 2"
    ):
        nn.MixtureOfExperts(6, 5, experts=2, k=3)
