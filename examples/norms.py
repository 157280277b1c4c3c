"""Where the norm stands: post, pre and sandwich, shallow and deep, with warm-up and without.

Causal decoders of 4, 12 and 24 layers read bytes of English prose. First come the gradients of each
layer's feed-forward at initialization, as in figure 3 of arXiv 2002.04745; then the held-out loss
after equally many updates, with the learning rate warmed up, or full from the first update on.
"""

from argparse import Namespace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from command import command, figure
from demo import batches, prose

import graphgen as gg
from graphgen import nn, ops

PLACEMENTS = ("post", "pre", "sandwich")
WARMUPS = {"without": 0.0, "with": 0.25}  # as a share of the updates
SHAPE: dict[str, Any] = {"length": 32, "batch": 16}
HELD_OUT = 32  # batches
DEPTHS = [4, 12, 24]  # layers
WANTED = 0.5  # nats a byte that warm-up is worth when shallow, and pre-norm when deep


class LanguageModel(nn.Module):
    """The logits of each next byte, (B, T) to (B, T, 256)."""

    def __init__(self, features: int, *, layers: int, placement: str):
        self.embedding = nn.Embedding(256, features)
        self.positions = nn.SinusoidalPositions(features)
        self.decoder = nn.Encoder(
            features, layers=layers, num_heads=2, placement=placement, causal=True
        )
        self.output = nn.Linear(features, 256)

    def __call__(self, input_ids: Any) -> Any:  # (B, T)
        x = self.embedding(input_ids) * 50.0  # to a variance of 1, as what a norm gives
        return self.output(self.decoder(self.positions(x)))

    def loss(self, input_ids: Any, labels: Any) -> Any:
        """The mean cross-entropy of labels (B, T), in nats a byte."""
        rows = ops.reshape(self(input_ids), [-1, 256])
        return ops.cross_entropy(rows, ops.reshape(labels, [-1]))


def gradients(module: LanguageModel, batch: dict[str, Any], options: Namespace) -> Any:
    """The norm of the gradient in each W₂ at initialization, (layers,): the median of draws."""
    count, found = len(module.decoder.layers), []
    names = [f"decoder.layers.{i}.feed_forward.down.weight" for i in range(count)]
    for seed in range(options.seed, options.seed + (1 if options.quick else 5)):
        specs = dict.fromkeys(batch, gg.int64[batch["labels"].shape])
        model = gg.grad(gg.build(module.loss, seed=seed, **specs), wrt=names)
        _, *arrays = gg.Session(model, threads=options.threads)(**batch)
        found.append([np.linalg.norm(array.astype(np.float64)) for array in arrays])
    return np.median(found, axis=0)


def trained(folder: Path, share: float, ids: Any, held: Any, options: Namespace) -> Any:
    """The loss held out, infinite where it diverged, and that of each update."""
    steps = options.steps
    schedule = gg.schedule.cosine(options.rate, warmup=round(share * steps), steps=steps)
    trainer = gg.Trainer(folder, schedule=schedule, threads=options.threads)
    try:
        history = trainer.fit(
            lambda: batches(ids, options.seed, **SHAPE), steps=steps, progress=False
        )
    except gg.GraphgenError as error:
        if "finite" not in str(error):
            raise
        return np.inf, []
    return trainer.evaluate(held), [step["loss"] for step in history]


def plot(norms: dict[Any, Any], losses: dict[Any, Any], depths: list[int], path: Path) -> None:
    """Gradients by layer of the deepest, and losses of the shallowest and the deepest."""
    with figure(path, panels=3, size=(15, 4.5)) as (first, *others):
        for placement in PLACEMENTS:
            values = norms[placement, depths[-1]]
            first.plot(np.arange(len(values)) + 1, values, "o-", markersize=3, label=placement)
        first.set(xlabel=f"layer of {depths[-1]}", ylabel="norm of the gradient in W₂")
        first.set(yscale="log")
        for axes, layers in zip(others, (depths[0], depths[-1]), strict=True):
            for color, placement in enumerate(PLACEMENTS):
                for warmup, style in (("without", "-"), ("with", "--")):
                    _, curve = losses[placement, layers, warmup]
                    wide = min(len(curve), 10) or 1
                    smooth = np.convolve(curve or [np.nan], np.full(wide, 1 / wide), mode="valid")
                    label = f"{placement}, {warmup} warm-up"
                    axes.plot(smooth, style, color=f"C{color}", label=label)
            axes.set(xlabel=f"updates of {layers} layers", ylabel="loss, nats a byte")
        for axes in (first, *others):
            axes.grid(alpha=0.3, which="both")
            axes.legend()


def run(options: Namespace) -> tuple[float, str]:
    """Measure the gradients, train every cell, print and plot them."""
    options.output.mkdir(parents=True, exist_ok=True)
    features, depths = (8, [1]) if options.quick else (32, DEPTHS)
    ids, held_ids = (np.frombuffer(t.encode(), np.uint8).astype(np.int64) for t in prose())
    batch = next(batches(ids, options.seed, **SHAPE))
    held = list(islice(batches(held_ids, options.seed, **SHAPE), HELD_OUT))
    norms: dict[Any, Any] = {}
    losses: dict[Any, Any] = {}
    print(f"{'':>19}{'gradient in W₂ of layer':>26}{'loss held out':>26}")
    print(f"{'placement':9}{'layers':>10}{'1':>13}{'last':>13}{'no warm-up':>13}{'warm-up':>13}")
    for layers in depths:
        for placement in PLACEMENTS:
            module = LanguageModel(features, layers=layers, placement=placement)
            norms[placement, layers] = found = gradients(module, batch, options)
            folder = options.output / f"{placement}-{layers}"
            gg.artifacts(
                gg.build(module, seed=options.seed, input_ids=gg.int64["batch", "seq"]),
                folder,
                optimizer=gg.AdamW(weight_decay=0.0, betas=(0.9, 0.98), epsilon=1e-9),
            )
            for warmup, share in WARMUPS.items():
                losses[placement, layers, warmup] = trained(folder, share, ids, held, options)
            reached = [losses[placement, layers, warmup][0] for warmup in WARMUPS]
            row = [found[0], found[-1], *reached]
            print(f"{placement:9}{layers:10}" + "".join(f"{value:13.3f}" for value in row))
    plot(norms, losses, depths, options.output / "norms.png")
    first, last = depths[0], depths[-1]
    shallow, warmed = (losses["post", first, warmup][0] for warmup in WARMUPS)
    deep, pre = (losses[placement, last, "without"][0] for placement in ("post", "pre"))
    told = (
        f"without warm-up post-norm ends at {shallow:.2f} nats a byte with {first} layers, where "
        f"warm-up makes {warmed:.2f}, and at {deep:.2f} with {last}, where pre-norm is at {pre:.2f}"
    )
    gap = min(shallow - warmed, deep - pre)
    if not (gap >= WANTED or options.quick):
        raise gg.GateError(f"{told}; each is wanted to be {WANTED} less")
    return gap, told


if __name__ == "__main__":
    further = {"--rate": {"type": float, "default": 1e-2, "help": "the highest (0.01)"}}
    command(run, about=str(__doc__).splitlines()[0], steps=300, further=further)
