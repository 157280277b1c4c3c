"""Where gradients go: through time, through a softmax, through depth. Nothing is trained.

- Time: how much the last output of a layer depends on the input d steps before it, for recurrent
  layers with small and large recurrent weights, an LSTM, a GRU, and attention.
- Softmax: how much of a gradient reaches the queries of scaled dot-product attention, with and
  without 1/√d_k, as d_k grows (arXiv 1706.03762, 3.2.1).
- Depth: how much of a gradient reaches the input of a stack of feed-forward layers, with and
  without residual connections.

`gg.grad` derives the gradients, ONNX Runtime computes them; weights and inputs are random, and the
median of several draws is shown.
"""

import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from command import command, figure

import graphgen as gg
from graphgen import nn, ops
from graphgen.nn.module import initialize

Curve = tuple[Any, Any]  # x and y
RESIDUAL = (True, False)


class Projected(nn.Module):
    """Σ direction · y of the last row of y = f(x), (1, T, D) to a scalar."""

    def __init__(self, f: Any):
        self.f = f

    def __call__(self, x: Any, direction: Any) -> Any:
        y = self.f(x)
        y = y[0] if isinstance(y, tuple) else y  # a recurrent layer gives its states, too
        return ops.reduce_sum(ops.slice_(y, [-1], [2**31], [1]) * direction)


class Stack(nn.Module):
    """Feed-forward layers, x + f(x) each or f(x) alone."""

    def __init__(self, features: int, *, layers: int, residual: bool):
        self.layers = [nn.FeedForward(features, 4 * features) for _ in range(layers)]
        self.residual = residual

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + layer(x) if self.residual else layer(x)
        return x


def gradients(f: Any, length: int, features: int, options: Namespace, gain: float = 1.0) -> Any:
    """The norm of the gradient in each row of x, (T,): the median of several draws."""
    found, module = [], Projected(f)
    specs = {"x": gg.float32[1, length, features], "direction": gg.float32[features]}
    for seed in range(options.seed, options.seed + (1 if options.quick else 5)):
        rng = np.random.default_rng(seed)
        weights = {name: p.array for name, p in initialize(module, seed=seed).items()}
        weights |= {n: w * np.float32(gain) for n, w in weights.items() if n.endswith("recurrent")}
        model = gg.grad(gg.build(module, weights=weights, **specs), wrt=["x"])
        feeds = {n: rng.standard_normal(s.shape).astype(np.float32) for n, s in specs.items()}
        [_, g] = gg.Session(gg.optimize(model), threads=options.threads)(**feeds)
        found.append(np.linalg.norm(g[0].astype(np.float64), axis=-1))
    return np.median(found, axis=0)


def through_time(options: Namespace) -> dict[str, Curve]:
    """The gradient in the input d steps before the last, over that of the last."""
    length, size = (6, 8) if options.quick else (64, 64)
    layers: dict[str, tuple[Any, float]] = {
        "RNN, small weights": (nn.Recurrent(size, size, kind="rnn"), 0.5),
        "RNN, large weights": (nn.Recurrent(size, size, kind="rnn"), 2.0),
        "LSTM": (nn.Recurrent(size, size, kind="lstm"), 1.0),
        "GRU": (nn.Recurrent(size, size, kind="gru"), 1.0),
        "attention": (nn.Attention(size, num_heads=4, causal=True), 1.0),
    }
    found = {}
    for name, (layer, gain) in layers.items():
        norms = gradients(layer, length, size, options, gain)[::-1]
        found[name] = np.arange(length), norms / norms[0]
    return found


def through_softmax(options: Namespace) -> dict[str, Curve]:
    """The gradient in a query of 64 random keys, over that in the value of a query alike.

    The upstream gradient is random and of one size; so are all elements of q, k and v.
    """
    sizes = [4, 8] if options.quick else [2**n for n in range(2, 11)]
    found = {}
    for name in ("with 1/√d_k", "without"):
        norms = []
        for size in sizes:
            scale = 1 / math.sqrt(size) if name.startswith("with ") else 1.0
            model = gg.grad(
                gg.build(
                    lambda q, k, v, g, scale=scale: ops.reduce_sum(
                        ops.scaled_dot_product_attention(q, k, v, scale=scale) * g
                    ),
                    **dict.fromkeys("qkvg", gg.float32[1, 1, 64, size]),
                ),
                wrt=["q"],
            )
            rng = np.random.default_rng([options.seed, size])
            feeds = {n: rng.standard_normal((1, 1, 64, size)).astype(np.float32) for n in "qkvg"}
            [_, g] = gg.Session(gg.optimize(model), threads=options.threads)(**feeds)
            # ∂/∂q = scale · Jacobian of the softmax · k: what the scale takes is no loss of signal.
            rows = np.linalg.norm(g[0, 0].astype(np.float64), axis=-1) / scale / size
            norms.append(np.median(rows))
        found[name] = np.array(sizes), np.array(norms)
    return found


def through_depth(options: Namespace) -> dict[str, Curve]:
    """The gradient in the input of a stack of layers."""
    depths, size = ([1, 2], 8) if options.quick else ([1, 2, 4, 8, 16, 32, 64], 64)
    found = {}
    for residual in RESIDUAL:
        norms = [
            gradients(Stack(size, layers=n, residual=residual), 1, size, options)[0] for n in depths
        ]
        found["with residual connections" if residual else "without"] = np.array(depths), norms
    return found


def plot(panels: dict[str, dict[str, Curve]], path: Path) -> None:
    """One panel for each question, norms on a logarithmic scale."""
    with figure(path, panels=len(panels), size=(15, 4.5)) as all_axes:
        for axes, (told, curves) in zip(all_axes, panels.items(), strict=True):
            for name, (x, y) in curves.items():
                axes.plot(x, y, "o-", markersize=3, label=name)
            axes.set(xlabel=told, ylabel="norm of the gradient", yscale="log")
            if not told.startswith("steps"):
                axes.set_xscale("log", base=2)
            axes.grid(alpha=0.3)
            axes.legend()


def run(options: Namespace) -> tuple[float, str]:
    """Measure and plot all three."""
    options.output.mkdir(parents=True, exist_ok=True)
    panels = {
        "steps back in time": through_time(options),
        "d_k": through_softmax(options),
        "layers": through_depth(options),
    }
    for told, curves in panels.items():
        for name, (x, y) in curves.items():
            print(f"{told:20}{name:28}{x[-1]:5}: {y[-1]:9.2e} of {y[0]:9.2e}")
    plot(panels, options.output / "gradients.png")
    time, softmax, depth = panels.values()
    small, attended = (time[n][1][-1] for n in ("RNN, small weights", "attention"))
    kept = softmax["with 1/√d_k"][1][-1] / softmax["without"][1][-1]
    deep = depth["with residual connections"][1][-1] / depth["without"][1][-1]
    return 1.0 if min(attended / small, kept, deep) > 10 else 0.0, (
        f"at the far end the gradient is {attended / small:.1e} times as large by attention as by "
        f"an RNN of small weights, {kept:.1e} times with 1/√d_k, {deep:.1e} times with residuals"
    )


if __name__ == "__main__":
    command(run, about=str(__doc__).splitlines()[0], steps=1, wanted=1.0)
