"""Two identities of attention, to the last digits of float64, and what breaks them.

- Without feed-forward, stacked attentions are one: A₂ (A₁ X W₁) W₂ = (A₂ A₁) X (W₁ W₂), where A are
  the weights of attention and W the maps of values and outputs. The measure is the part of a
  stack's output that no (A_L ... A₁) X W gives, whatever W; with a feed-forward in between, too.
- Without positions, attention does not know the order: f(P x) = P f(x) for every permutation P of
  the tokens. The measure is |f(P x) - P f(x)| / |f(x)| for each kind of position.

Nothing is trained; weights and inputs are random, and all is calculated in float64.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from command import command, figure

from graphgen import nn, ops
from graphgen.nn.module import initialize

LENGTH, FEATURES, HEADS = 96, 16, 4


class Stack(nn.Module):
    """Attentions of one head, each alone or with a feed-forward behind it; no residuals."""

    def __init__(self, layers: int, *, feed_forward: bool):
        self.attentions = [nn.Attention(FEATURES, num_heads=1, bias=False) for _ in range(layers)]
        self.between = [
            nn.FeedForward(FEATURES, 4 * FEATURES) for _ in range(layers if feed_forward else 0)
        ]

    def __call__(self, x: Any) -> Any:
        for number, attention in enumerate(self.attentions):
            x = attention(x)
            x = self.between[number](x) if self.between else x
        return x


class Placed(nn.Module):
    """Two layers of an encoder on tokens with one kind of position."""

    def __init__(self, kind: str):
        self.kind, self.encoder = kind, nn.Encoder(FEATURES, layers=2, num_heads=HEADS)
        self.sinusoidal, self.learned = (
            nn.SinusoidalPositions(FEATURES),
            nn.LearnedPositions(LENGTH, FEATURES),
        )
        self.rotary = nn.Rotary(nn.rotary_frequencies(FEATURES // HEADS))
        self.biases: dict[str, Any] = {"ALiBi": nn.AlibiBias(HEADS), "T5": nn.RelativeBias(HEADS)}

    def __call__(self, x: Any) -> Any:
        places = np.arange(LENGTH)
        if self.kind in ("sinusoidal", "learned"):
            return self.encoder(getattr(self, self.kind)(x))
        if self.kind == "rotary":
            return self.encoder(x, rotary=self.rotary(places[None], x))
        if self.kind in self.biases:
            bias = ops.cast_like(self.biases[self.kind](places, places), x)
            return self.encoder(x, mask=bias)
        return self.encoder(x)


def exactly(module: Any, seed: int) -> Any:
    """The module with random weights in float64, a position's large enough to be seen."""
    for name, parameter in initialize(module, seed=seed).items():
        scale = 25.0 if "learned" in name or "biases" in name else 1.0
        scale *= (
            8.0 if name.endswith("query.weight") else 1.0
        )  # else tokens become their mean at once
        parameter.array = parameter.array.astype(np.float64) * scale
    return module


def beyond_one(layers: int, seed: int, *, feed_forward: bool) -> float:
    """The relative part of a stack's output that no single attention of its weights gives."""
    stack: Any = exactly(Stack(layers, feed_forward=feed_forward), seed)
    x = np.random.default_rng(seed).standard_normal((1, LENGTH, FEATURES))
    kept: list[Any] = []
    for attention in stack.attentions:
        attention.weights = kept
    y = stack(x)[0]
    together = np.linalg.multi_dot([w[0, 0] for w in kept[::-1]]) if layers > 1 else kept[0][0, 0]
    seen = together @ x[0]  # (T, D): the output is this times W, or it is not
    left = y - seen @ np.linalg.lstsq(seen, y, rcond=None)[0]
    return float(np.linalg.norm(left) / np.linalg.norm(y))


def unequal(kind: str, seed: int) -> float:
    """|f(P x) - P f(x)| / |f(x)|."""
    f: Any = exactly(Placed(kind), seed)
    rng = np.random.default_rng(seed)
    x, p = rng.standard_normal((1, LENGTH, FEATURES)), rng.permutation(LENGTH)
    y = f(x)
    return float(np.linalg.norm(f(x[:, p]) - y[:, p]) / np.linalg.norm(y))


def plot(collapse: dict[str, Any], order: dict[str, float], path: Path) -> None:
    """Both on logarithmic scales."""
    with figure(path, panels=2, size=(12, 4.5)) as (left, right):
        for name, (depths, values) in collapse.items():
            left.plot(depths, values, "o-", markersize=4, label=name)
        left.set(
            xticks=depths,
            xlabel="layers",
            ylabel="part that one attention does not give",
            yscale="log",
        )
        right.bar([*order], [max(value, 1e-17) for value in order.values()])
        right.set(ylabel="|f(P x) - P f(x)| / |f(x)|", yscale="log", ylim=(1e-17, 10))
        left.legend()
        for axes in (left, right):
            axes.grid(alpha=0.3)


def run(options: Namespace) -> tuple[float, str]:
    """Measure and plot both."""
    options.output.mkdir(parents=True, exist_ok=True)
    depths, draws = ([1, 2], 1) if options.quick else ([1, 2, 3, 4], 9)
    seeds = range(options.seed, options.seed + draws)
    collapse = {}
    for name, between in (("attention alone", False), ("with feed-forward", True)):
        values = [
            np.median([beyond_one(n, seed, feed_forward=between) for seed in seeds]) for n in depths
        ]
        collapse[name] = depths, values
        print(f"{name:20}" + "".join(f"{value:10.1e}" for value in values))
    order = {}
    for kind in ("none", "sinusoidal", "learned", "rotary", "ALiBi", "T5"):
        order[kind] = float(np.median([unequal(kind, seed) for seed in seeds]))
        print(f"{kind:20}{order[kind]:8.1e}")
    plot(collapse, order, options.output / "identities.png")
    # Deeper ones without residual connections lose all rank, with or without (arXiv 2103.03404).
    alone, apart = max(collapse["attention alone"][1]), collapse["with feed-forward"][1][0]
    told = min(value for kind, value in order.items() if kind != "none")
    exact = max(alone, order["none"]) < 1e-10 and min(apart, told) > 1e-3
    return float(exact), (
        f"stacked attentions are one to {alone:.0e}, with feed-forward {apart:.0%} is something "
        f"else; order is not seen to {order['none']:.0e}, with positions {told:.0%} depends on it"
    )


if __name__ == "__main__":
    command(run, about=str(__doc__).splitlines()[0], steps=1, wanted=1.0)
