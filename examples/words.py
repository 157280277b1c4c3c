"""Vectors of words from English prose, by skip-gram with negative sampling.

A word learns to tell the words next to it from words drawn at random (Mikolov et al., arXiv
1310.4546), so words with the same neighbors get vectors of the same direction. The text is that of
CPython's help topics, with a tenth held out. Frequent words are dropped at random, and the noise is
the words' frequency to the power of 3/4, both as in the paper.

The table then becomes the embedding of another model, which finds the words nearest to a word.
"""

import re
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from command import command
from demo import prose

import graphgen as gg
from graphgen import nn, ops
from graphgen.models.word_vectors import SkipGram, inputs, negative_sampling

LEAST = 5  # a word that occurs less often is left out
WINDOW, NOISE = 5, 8  # words to either side at most, words drawn by chance for each
FREQUENT = 1e-3  # of all words; the paper has 1e-5, for a text ten thousand times as long
STEPS, RATE = 3000, 5e-3
SHOWN = "class string list integer exception module called returns if three".split()


class Nearest(nn.Module):
    """The cosine of the angle between a word's vector and those of all words, (B,) to (B, N)."""

    def __init__(self, count: int, features: int):
        self.embedding = nn.Embedding(count, features)

    def __call__(self, word_ids: Any) -> Any:
        table = self.embedding.weight
        lengths = ops.sqrt(ops.reduce_sum(table * table, [-1], keepdims=0))  # (N,)
        v = self.embedding(word_ids) / ops.unsqueeze(ops.gather(lengths, word_ids), [-1])
        return self.embedding.logits(v) / lengths


def read(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return re.findall("[a-z]+", text.lower())


class Pairs:
    """Pairs of words that stand next to each other, and noise, from the ids of a text."""

    def __init__(self, counts: Any):
        share = counts / counts.sum()
        self.kept = np.minimum(1.0, np.sqrt(FREQUENT / share))  # 1 less (5) of the paper
        noise = counts**0.75
        self.noise = np.cumsum(noise / noise.sum())

    def draw(self, rng: np.random.Generator, ids: Any) -> tuple[Any, Any]:
        """Every pair of what is kept of a text, in windows of random size, in random order."""
        ids = ids[rng.random(len(ids)) < self.kept[ids]]
        window = rng.integers(1, WINDOW + 1, len(ids))
        words, contexts = [], []
        for distance in range(1, WINDOW + 1):
            near = window >= distance
            words += [ids[:-distance][near[:-distance]], ids[distance:][near[distance:]]]
            contexts += [ids[distance:][near[:-distance]], ids[:-distance][near[distance:]]]
        order = rng.permutation(sum(map(len, words)))
        return np.concatenate(words)[order], np.concatenate(contexts)[order]

    def by_chance(self, rng: np.random.Generator, *shape: int) -> Any:
        """Words drawn from the noise."""
        found = np.searchsorted(self.noise, rng.random(shape))
        return np.minimum(found, len(self.noise) - 1).astype(np.int64)

    def batches(self, ids: Any, *, seed: int, size: int) -> Iterator[dict[str, Any]]:
        """Batches for ever; each pass over the text leaves out other words."""
        rng = np.random.default_rng(seed)
        while True:
            words, contexts = self.draw(rng, ids)
            for first in range(0, len(words) - size + 1, size):
                part = slice(first, first + size)
                noise = self.by_chance(rng, size, NOISE)
                given = np.concatenate([contexts[part, None], noise], axis=1)
                yield {"word_ids": words[part], "context_ids": given}


def run(options: Namespace) -> tuple[float, str]:
    """Train, tell held-out neighbors from noise, and look at the vectors by another model."""
    features, size = (8, 64) if options.quick else (64, 256)
    train, held_out = map(read, prose())
    counts = {word: n for word, n in Counter(train).most_common() if n >= LEAST}
    known = {word: number for number, word in enumerate(counts)}
    train_ids, held_ids = (
        np.array([known[word] for word in text if word in known], np.int64)
        for text in (train, held_out)
    )
    pairs = Pairs(np.array([*counts.values()], np.float64))
    print(f"{len(train_ids):,} words to train on, {len(known):,} of them different")

    folder, model = options.output, SkipGram(len(known), features)
    gg.artifacts(
        gg.build(model, training=True, seed=options.seed, **inputs()),
        folder / "artifacts",
        loss=negative_sampling,
        optimizer=gg.AdamW(weight_decay=0.0),
    )
    schedule = gg.schedule.linear(RATE, warmup=options.steps // 20, steps=options.steps)
    trainer = gg.Trainer(folder / "artifacts", schedule=schedule, threads=options.threads)
    trainer.fit(lambda: pairs.batches(train_ids, seed=options.seed, size=size), steps=options.steps)

    rng = np.random.default_rng(options.seed)
    words, contexts = pairs.draw(rng, held_ids)
    given = np.stack([contexts, pairs.by_chance(rng, len(words))], axis=1)
    path = trainer.export(gg.build(model, **inputs()), folder / "words.onnx")
    [scores] = gg.Session(path, threads=options.threads)(word_ids=words, context_ids=given)
    right = float(np.mean(scores[:, 0] > scores[:, 1]))

    weights = {"embedding.weight": trainer.parameters["embedding.weight"]}
    nearest = gg.build(Nearest(len(known), features), weights=weights, word_ids=gg.int64["batch"])
    path = gg.export(gg.optimize(nearest), folder / "nearest.onnx")
    shown, names = [word for word in SHOWN if word in known], [*known]
    [cosines] = gg.Session(path)(word_ids=np.array([known[word] for word in shown]))
    for word, row in zip(shown, cosines, strict=True):
        found = np.argsort(-row, kind="stable")[1:7]
        print(f"{word:10} {', '.join(f'{names[i]} {row[i]:.2f}' for i in found)}")
    more = float(np.mean(given[:, 0] < given[:, 1]))  # of two words, the one with the smaller id
    told = f"{right:.1%} of {len(words):,} held-out neighbors score above noise"
    return right, f"{told}, {more:.1%} are more frequent"


if __name__ == "__main__":
    command(run, about=str(__doc__).splitlines()[0], steps=STEPS, wanted=0.6)
