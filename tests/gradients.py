"""Gradients of whole models: against central differences, and as a trainer's step has them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from small_models import relative_rms

import graphgen as gg
from graphgen import nn
from graphgen.graph import parameters
from graphgen.measure.reference import evaluate
from graphgen.nn.module import initialize


class WithLoss(nn.Module):
    """A module and a function of what it gives and of the inputs that are not its own."""

    def __init__(self, module: nn.Module, loss: Callable[..., Any], own: Any):
        self.module, self.loss, self.own = module, loss, own

    def __call__(self, **given: Any) -> Any:
        outputs = self.module(**{name: given.pop(name) for name in self.own})  # type: ignore[operator]
        return self.loss(*outputs.values(), **given)


def checked_gradients(
    module: nn.Module, loss: Callable[..., Any], specs: Any, feeds: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """The gradient of each parameter in float64, once it is right along a direction of all.

    gradient · d against (f(w + h d) - f(w - h d)) / 2h; `more` are the inputs of the loss.
    """
    rng, h = np.random.default_rng(6), 1e-6
    weights = {f"module.{n}": p.array for n, p in initialize(module).items()}
    model = gg.build(WithLoss(module, loss, list(specs)), weights=weights, **specs, **more)
    values = parameters(model.graph)
    assert set(values) == set(weights)
    at = {name: weights[name].astype(np.float64) for name in values}
    d = {name: rng.standard_normal(array.shape) for name, array in at.items()}
    _, *found = evaluate(gg.grad(model, wrt=[*values]), feeds)
    gradients = dict(zip(values, found, strict=True))
    assert all(np.isfinite(g).all() and g.any() for g in found)
    ends = []
    for side in (h, -h):
        for name, value in values.items():
            value.const_value = ir.tensor(at[name] + side * d[name])
        ends.append(float(evaluate(model, feeds)[0]))
    got = sum((gradients[name] * d[name]).sum() for name in values)
    wanted = (ends[0] - ends[1]) / (2 * h)
    size = sum(np.abs(gradients[name] * d[name]).sum() for name in values)
    assert abs(got - wanted) <= 1e-6 * size, f"{got} is not {wanted}"
    return {name.removeprefix("module."): g for name, g in gradients.items()}


def check_trained_step(
    model: ir.Model, folder: Path, batch: dict[str, Any], gradients: dict[str, Any], **options: Any
) -> None:
    """One step of a trainer, by SGD at a rate of 1, takes these gradients away."""
    gg.artifacts(model, folder, optimizer=gg.SGD(), **options)
    trainer = gg.Trainer(folder, schedule=gg.schedule.constant(1.0), threads=1)
    before = trainer.parameters
    trainer.fit([batch], steps=1, progress=False)
    assert set(before) == set(gradients)
    flat = [
        np.concatenate([np.ravel(step[name]) for name in gradients])
        for step in (gradients, {n: before[n] - a for n, a in trainer.parameters.items()})
    ]
    assert relative_rms(*flat) < 1e-4
