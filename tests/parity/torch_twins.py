"""What a module computes next to a torch function of the same weights, and both gradients."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from small_models import relative_rms, run_plain

import graphgen as gg
from graphgen import nn, ops
from graphgen.nn.module import initialize

torch = pytest.importorskip("torch", reason="needs torch: make parity")

Weights = Mapping[str, Any]


class Weighed(nn.Module):
    """The outputs of a module, and Σ c y over them, each c an input."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self, **given: Any) -> dict[str, Any]:
        factors = [given.pop(name) for name in list(given) if name.startswith("factor_")]
        found = self.module(**given)  # type: ignore[operator]
        found = found if isinstance(found, dict) else {"y": found}
        parts = list(zip(found.values(), factors, strict=True))
        for y, factor in parts:  # which has the sizes of one run
            for axis in range(ops.rank(y)):
                ops.promise_same_size(y, axis, factor, axis)
        return {**found, "loss": sum(ops.reduce_sum(y * factor) for y, factor in parts)}


def of_module(twin: Any, names: Mapping[str, str]) -> Callable[..., Any]:
    """A torch module as a function of our weights, for `check`.

    `names` has, by patterns of the paths of its parameters, what our paths have instead. Linear
    layers hold the transposed matrix, and `nn.MultiheadAttention` the three of them as one.
    """
    twin = twin.double().eval()
    linear = {n for n, part in twin.named_modules() if isinstance(part, torch.nn.Linear)}

    def take(w: Weights, path: str) -> Any:
        ours = path
        for pattern, ours_is in names.items():
            ours = re.sub(pattern, ours_is, ours)
        if match := re.fullmatch(r"(.*)\.in_proj_(weight|bias)", ours):
            parts = [w[f"{match[1]}.{part}.{match[2]}"] for part in ("query", "key", "value")]
            return torch.cat([turned(part) for part in parts])
        return turned(w[ours]) if path.rpartition(".")[0] in linear else w[ours]

    def turned(weight: Any) -> Any:
        return weight.mT if weight.ndim == 2 else weight

    def run(w: Weights, **feeds: Any) -> list[Any]:
        state = {path: take(w, path) for path, _ in twin.named_parameters()}
        return [torch.func.functional_call(twin, state, kwargs=feeds)]

    return run


def check(
    module: nn.Module,
    twin: Callable[..., Any],
    specs: Mapping[str, Any],
    feeds: Mapping[str, Any],
    *,
    spread: float = 0.7,
) -> None:
    """Compare outputs, to 1e-5, and gradients, to 1e-4, with torch's in float64.

    `twin(weights, **feeds)` gives the outputs in order; gradients are those of Σ c y, c random, in
    all weights and float inputs. Once as it is built, and once optimized. Weights have a standard
    deviation of `spread`.
    """
    rng = np.random.default_rng(4)
    drawn = {name: rng.standard_normal(p.shape) for name, p in initialize(module).items()}
    weights = {name: (w * spread).astype(np.float32) for name, w in drawn.items()}
    leaves = {
        n: torch.tensor(w, dtype=torch.float64, requires_grad=True) for n, w in weights.items()
    }
    given: dict[str, Any] = {}
    for name, array in feeds.items():
        floats = array.dtype == np.float32
        given[name] = torch.tensor(array, dtype=torch.float64 if floats else None)
        given[name].requires_grad_(floats)
    wanted = twin(leaves, **given)
    factors = {
        f"factor_{i}": rng.standard_normal(tuple(y.shape)).astype(np.float32)
        for i, y in enumerate(wanted)
    }
    parts = zip(wanted, factors.values(), strict=True)
    sum((y * torch.tensor(c)).sum() for y, c in parts).backward()  # type: ignore[union-attr]
    own = {f"module.{n}": leaf for n, leaf in leaves.items()}
    own |= {n: x for n, x in given.items() if x.requires_grad}
    slopes = {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in own.items()}

    more = {name: gg.float32[factor.shape] for name, factor in factors.items()}
    named = {f"module.{name}": w for name, w in weights.items()}
    built = gg.build(Weighed(module), weights=named, **specs, **more)
    model = gg.grad(built, of="loss", wrt=[*slopes])
    largest = max(float(slope.norm()) for slope in slopes.values())
    for graph in (model, gg.optimize(model).model):
        found = run_plain(graph, {**feeds, **factors})
        for y, exact in zip(found, wanted, strict=False):
            assert relative_rms(exact.detach().numpy(), y) < 1e-5
        for (name, slope), g in zip(slopes.items(), found[len(wanted) + 1 :], strict=True):
            error = np.linalg.norm(g - slope.numpy())
            # Of a bias that changes nothing the gradient is nothing but rounding.
            assert error <= 1e-4 * float(slope.norm()) + 1e-6 * largest, name
