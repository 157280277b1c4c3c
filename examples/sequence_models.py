"""All sequence models on one task: recurrent, convolutional, attentional, of equal size.

Recurrent encoder-decoders without attention, with additive and with multiplicative attention,
ByteNet, ConvS2S and the transformer learn to turn the dates of `dates.py` into ISO form. They have
equally many parameters, within 5 %, and learn from the same batches: all from one part of them,
then all from the next, so that other work on the machine slows them equally. After each part they
write held-out dates, greedily, character by character.
"""

import time
from argparse import Namespace
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from command import command, figure, greedy
from dates import DECADES, PAD, START, TOKENS, arrays, batches, pairs

import graphgen as gg
from graphgen import nn
from graphgen.models.bytenet import ByteNet
from graphgen.models.convs2s import ConvS2S
from graphgen.models.recurrent import RecurrentSeq2Seq
from graphgen.models.transformer import Transformer, inputs
from graphgen.nn import count_parameters
from graphgen.nn.module import normal

PARTS, BATCH = 8, 32
EPOCH = 9 * (DECADES[1] - DECADES[0])  # pairs, as many as there are days to train on: 197,226

# Each with its sizes and its highest learning rate, found by short trials.
MODELS: dict[str, tuple[Any, dict[str, Any], float]] = {
    "recurrent": (RecurrentSeq2Seq, {"features": 202, "score": "none"}, 3e-3),
    "additive": (RecurrentSeq2Seq, {"features": 130, "score": "additive"}, 3e-3),
    "multiplicative": (RecurrentSeq2Seq, {"features": 148, "score": "multiplicative"}, 3e-3),
    "bytenet": (ByteNet, {"features": 112, "layers": 10, "dropout": 0.0}, 3e-3),
    "convs2s": (ConvS2S, {"features": 103, "layers": 3, "length": 64, "dropout": 0.0}, 3e-3),
    "transformer": (
        Transformer,
        {"features": 96, "layers": 2, "num_heads": 4, "dropout": 0.0},
        1e-3,
    ),
}
WITH_ATTENTION = ("additive", "multiplicative", "convs2s", "transformer")


@dataclass
class Learner:
    """A model in training; for each part its seconds, and behind it the share of exact dates."""

    name: str
    module: nn.Module
    trainer: gg.Trainer
    seconds: list[float] = field(default_factory=list)
    exact: list[float] = field(default_factory=list)


def start(name: str, options: Namespace) -> Learner:
    """A model that has learned nothing."""
    make, sizes, rate = MODELS[name]
    if options.quick:
        sizes = sizes | {
            size: tiny for size, tiny in {"features": 8, "layers": 1}.items() if size in sizes
        }
    module = make(len(TOKENS), **sizes)
    if isinstance(module, RecurrentSeq2Seq):
        # About the transformer's 0.02 √D: additive attention learns nothing in the first 300
        # updates from 0.02, almost all from 0.2.
        module.embedding.weight.initialize = normal(0.2)
    gg.artifacts(
        gg.build(module, training=True, seed=options.seed, **inputs()),
        options.output / name,
        loss="cross_entropy",
        optimizer=gg.AdamW(weight_decay=0.0, clip_norm=1.0),
    )
    trainer = gg.Trainer(
        options.output / name,
        schedule=gg.schedule.cosine(rate, warmup=options.steps // 10, steps=options.steps),
        seed=options.seed,
        threads=options.threads,
    )
    return Learner(name, module, trainer)


def share_exact(learner: Learner, held_out: Any, options: Namespace) -> float:
    """The share of held-out dates that a model writes without a fault, greedily."""
    weights, path = learner.trainer.parameters, options.output / f"{learner.name}.onnx"
    best = gg.optimize(gg.build(learner.module, weights=weights, **inputs()))
    session, right = gg.Session(gg.export(best, path), threads=options.threads), []
    for source, target in held_out:
        given = {"source_ids": source, "source_mask": (source != PAD).astype(np.int64)}
        said = greedy(session, given, start=START, length=target.shape[1])
        right += [*(said == target).all(axis=1)]
    return float(np.mean(right))


def train(learners: list[Learner], options: Namespace) -> list[int]:
    """Train all, part by part; how many tokens each part has, without padding."""
    size, count, parts = (4, 4, 1) if options.quick else (BATCH, 1000, min(PARTS, options.steps))
    drawn, rng = batches((options.seed, 0), size), np.random.default_rng([options.seed, 1])
    new = pairs(rng, count, held_out=True)
    tokens = []
    for part in range(1, parts + 1):
        stop, some = options.steps * part // parts, new if part == parts else new[: count // 10]
        held_out = [arrays(some[first : first + 100]) for first in range(0, len(some), 100)]
        given = list(islice(drawn, stop - options.steps * (part - 1) // parts))
        tokens.append(sum(int(b["source_mask"].sum()) + b["labels"].size for b in given))
        for learner in learners:
            begin = time.perf_counter()
            learner.trainer.fit(given, steps=stop, progress=False)
            learner.seconds.append(time.perf_counter() - begin)
            learner.exact.append(share_exact(learner, held_out, options))
            print(f"{stop:6} updates {learner.name:16}{learner.exact[-1]:7.1%}", flush=True)
    return tokens


def plot(learners: list[Learner], rates: list[float], path: Path) -> None:
    """Exact dates against seconds of training, and the tokens of a second."""
    with figure(path, panels=2, size=(12, 4.5)) as (left, right):
        for learner, rate in zip(learners, rates, strict=True):
            exact = 100 * np.array([0.0, *learner.exact])
            seconds = np.cumsum([0.0, *learner.seconds])
            left.plot(seconds, exact, "o-", markersize=3, label=learner.name)
            right.barh(learner.name, rate)
        left.set(xlabel="seconds of training", ylabel="held-out dates exact, %", ylim=(-3, 103))
        left.legend()
        left.grid(alpha=0.3)
        right.set(xlabel="tokens of a second in training")
        right.invert_yaxis()


def run(options: Namespace) -> tuple[float, str]:
    """Train all, and tell what each has cost and reached."""
    options.output.mkdir(parents=True, exist_ok=True)
    learners = [start(name, options) for name in MODELS]
    sizes = [count_parameters(learner.module) for learner in learners]
    if max(sizes) > 1.05 * min(sizes) and not options.quick:
        raise gg.GateError(f"the models have {min(sizes):,} to {max(sizes):,} parameters")
    tokens, rates = train(learners, options), []
    print(f"{'model':16}{'parameters':>12}{'exact':>9}{'tokens/s':>11}{'s/epoch':>9}")
    for learner, size in zip(learners, sizes, strict=True):
        # The median of the parts: other work on the machine slows some.
        rate = float(np.median(np.array(tokens) / learner.seconds))
        epoch = EPOCH / BATCH / options.steps * sum(tokens) / rate
        print(f"{learner.name:16}{size:12,}{learner.exact[-1]:9.1%}{rate:11,.0f}{epoch:9,.0f}")
        rates.append(rate)
    plot(learners, rates, options.output / "sequence_models.png")
    best = max(learner.exact[-1] for learner in learners if learner.name in WITH_ATTENTION)
    told = ", ".join(f"{learner.name} {learner.exact[-1]:.1%}" for learner in learners)
    return best, f"held-out dates that are exact: {told}"


if __name__ == "__main__":
    command(run, about=str(__doc__).splitlines()[0], steps=1200, wanted=0.9)
