"""What fits into one state: reversing sequences, without attention and with it.

Three recurrent encoder-decoders learn to write a sequence of tokens backwards, of lengths up to 20,
from the same batches. Without attention the whole source has to fit into one state of the encoder;
with additive or multiplicative attention each step reads the source again. Then each model reverses
new sequences of every length up to 24, greedily, token by token.
"""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
from command import command, figure, greedy

import graphgen as gg
from graphgen.models.recurrent import RecurrentSeq2Seq, Score
from graphgen.models.transformer import inputs

START, FIRST, TOKENS = 1, 2, 34  # 32 tokens in addition to padding and the start
TRAINED, LONGEST, BATCH = 20, 24, 64


def sequences(rng: np.random.Generator, count: int, length: int) -> dict[str, Any]:
    """Random sources (count, length), what the decoder reads, and what it shall say."""
    source = rng.integers(FIRST, TOKENS, (count, length))
    labels = source[:, ::-1].copy()
    target = np.concatenate([np.full((count, 1), START), labels[:, :-1]], axis=1)
    mask = np.ones_like(source)
    return {"source_ids": source, "source_mask": mask, "target_ids": target, "labels": labels}


def batches(seed: int) -> Iterator[dict[str, Any]]:
    """Batches for ever, each of one length."""
    rng = np.random.default_rng(seed)
    while True:
        yield sequences(rng, BATCH, int(rng.integers(1, TRAINED + 1)))


def exact(score: str, options: Namespace) -> Any:
    """The share of new sequences of each length that a trained model reverses without a fault."""
    features, count = (16, 4) if options.quick else (128, 200)
    module, folder = RecurrentSeq2Seq(TOKENS, features, score=score), options.output / score
    gg.artifacts(
        gg.build(module, training=True, seed=options.seed, **inputs()),
        folder,
        loss="cross_entropy",
        optimizer=gg.AdamW(weight_decay=0.0, clip_norm=1.0),
    )
    schedule = gg.schedule.cosine(3e-3, warmup=options.steps // 20 + 1, steps=options.steps)
    trainer = gg.Trainer(folder, schedule=schedule, seed=options.seed, threads=options.threads)
    trainer.fit(lambda: batches(options.seed), steps=options.steps)
    best = gg.optimize(gg.build(module, weights=trainer.parameters, **inputs()))
    path = gg.export(best, options.output / f"{score}.onnx")
    session, rng = gg.Session(path, threads=options.threads), np.random.default_rng([options.seed])
    shares = []
    for length in range(1, (3 if options.quick else LONGEST) + 1):
        given = sequences(rng, count, length)
        said = greedy(session, given, start=START, length=length)
        shares.append((said == given["labels"]).all(axis=1).mean())
    return np.array(shares)


def plot(found: dict[str, Any], path: Path) -> None:
    """The share against the length, with the longest trained one marked."""
    with figure(path) as axes:
        for score, shares in found.items():
            label = "no attention" if score == "none" else f"{score} attention"
            axes.plot(np.arange(len(shares)) + 1, 100 * shares, "o-", markersize=3, label=label)
        axes.axvline(TRAINED, color="gray", linestyle="--", label="longest trained")
        axes.set(xlabel="length", ylabel="reversed without a fault, %", ylim=(-3, 103))
        axes.grid(alpha=0.3)
        axes.legend()


def run(options: Namespace) -> tuple[float, str]:
    """Train and measure all three, and plot them."""
    options.output.mkdir(parents=True, exist_ok=True)
    found = {score: exact(score, options) for score in get_args(Score)}
    print(f"{'length':16}" + "".join(f"{n + 1:>5}" for n in range(len(found["none"]))))
    for score, shares in found.items():
        print(f"{score:16}" + "".join(f"{100 * share:5.0f}" for share in shares))
    plot(found, options.output / "bottleneck.png")
    last = {score: float(shares[:TRAINED][-5:].mean()) for score, shares in found.items()}
    told = ", ".join(f"{score} {share:.0%}" for score, share in last.items())
    best = max(last["additive"], last["multiplicative"])
    return best - last["none"], (
        f"of the five longest trained lengths, sequences reversed without a fault: {told}"
    )


if __name__ == "__main__":
    command(run, about=str(__doc__).splitlines()[0], steps=1500, wanted=0.3)
