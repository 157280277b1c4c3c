"""A masked language model, frozen, learns to tell languages from two examples of each.

The texts are real dates, `onsdag den 4. marts 1987`, in 38 languages of the Latin alphabet, from
CLDR by the package babel. An encoder of the BERT family (arXiv 1810.04805) is first trained to fill
in hidden characters, which needs no labels: to know what follows `ma` it must know the language.
Then it is frozen, and a new head on the mean of its vectors learns to name the language. The
baseline is the same encoder and head, all trained from scratch on the same two labeled dates of
each language. Every tenth day is held out from all of them.
"""

import datetime
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from babel.dates import format_date
from command import command

import graphgen as gg
from graphgen import nn, ops
from graphgen.models.encoder import EncoderModel

LANGUAGES = (
    "af az ca cs cy da de en es et eu fi fil fr ga gl hr hu id "
    "is it lt lv mt nb nl pl pt ro sk sl sq sv sw tr uz vi zu"
).split()
DECADES = [datetime.date(year, 1, 1).toordinal() // 10 for year in (1600, 2200)]  # of days
LENGTH = 40
PAD, MASK = 0, 1


def written(day: int, language: str) -> str:
    """A day since the year 1 as `Wednesday, March 4, 1987` is written in a language."""
    return format_date(datetime.date.fromordinal(day), "full", language).lower()[:LENGTH]


# The first days of twelve months show the names of all months and all days of the week.
MONTHS = [datetime.date(2000, month, 1).toordinal() for month in range(1, 13)]
SAMPLES = "".join(written(day, language) for day in MONTHS for language in LANGUAGES)
IDS = {token: n for n, token in enumerate(["<pad>", "<mask>", *sorted({*SAMPLES, *"0123456789"})])}
SPEC = dict.fromkeys(("input_ids", "attention_mask"), gg.int64["batch", "seq"])


class LanguageModel(nn.Module):
    """The logits of the languages, from the mean of the encoder's vectors: (B, T) to (B, 38)."""

    def __init__(self, encoder: EncoderModel, features: int):
        self.encoder, self.head = encoder, nn.Linear(features, len(LANGUAGES))

    def __call__(self, input_ids: Any, attention_mask: Any) -> dict[str, Any]:
        x = self.encoder(input_ids, attention_mask)["last_hidden_state"]  # (B, T, D)
        kept = ops.unsqueeze(ops.cast_like(attention_mask, x), [-1])  # (B, T, 1)
        mean = ops.reduce_sum(x * kept, [1], keepdims=0) / ops.reduce_sum(kept, [1], keepdims=0)
        return {"logits": self.head(mean)}


def dates(rng: np.random.Generator, languages: Any, *, held_out: bool) -> Any:
    """The tokens of one random date for each of the languages, (N, 40)."""
    count = len(languages)
    days = rng.integers(*DECADES, count) * 10 + (0 if held_out else rng.integers(1, 10, count))
    texts = (written(int(d), LANGUAGES[n]) for d, n in zip(days, languages, strict=True))
    found = [[IDS[character] for character in text] for text in texts]
    return np.array([ids + [PAD] * (LENGTH - len(ids)) for ids in found], np.int64)


def feeds(ids: Any) -> dict[str, Any]:
    """The inputs of the encoder."""
    return {"input_ids": ids, "attention_mask": (ids != PAD).astype(np.int64)}


def hidden_characters(seed: int, size: int) -> Iterator[dict[str, Any]]:
    """Batches for ever with a fifth of the characters hidden; the labels are the hidden ones."""
    rng = np.random.default_rng(seed)
    while True:
        ids = dates(rng, rng.integers(len(LANGUAGES), size=size), held_out=False)
        hidden = (ids != PAD) & (rng.random(ids.shape) < 0.2)
        yield {**feeds(np.where(hidden, MASK, ids)), "labels": np.where(hidden, ids, -100)}


def labeled(ids: Any, languages: Any, seed: int, size: int) -> Iterator[dict[str, Any]]:
    """Batches for ever of the labeled dates."""
    rng = np.random.default_rng(seed)
    while True:
        chosen = rng.integers(len(ids), size=size)
        yield {**feeds(ids[chosen]), "labels": languages[chosen]}


def train(
    model: nn.Module,
    folder: Path,
    batches: Callable[[], Iterator[dict[str, Any]]],
    options: Namespace,
    *,
    steps: int,
    rate: float,
    pretrained: dict[str, Any] | None = None,
    trainable: str | None = None,
) -> gg.Trainer:
    """Train a model; what its encoder shares with a pretrained one starts from those weights."""
    weights = {
        path: (pretrained or {}).get(path.removeprefix("encoder."), parameter.array)
        for path, parameter in nn.initialize(model, seed=options.seed).items()
    }
    gg.artifacts(
        gg.build(model, training=True, weights=weights, **SPEC),
        folder,
        output="logits",
        trainable=trainable,
        optimizer=gg.AdamW(weight_decay=0.05, clip_norm=1.0),
    )
    schedule = gg.schedule.cosine(rate, warmup=steps // 10, steps=steps)
    trainer = gg.Trainer(folder, schedule=schedule, seed=options.seed, threads=options.threads)
    trainer.fit(batches, steps=steps)
    return trainer


def run(options: Namespace) -> tuple[float, str]:
    """Train the masked language model, then a head on it, then everything without it."""
    features, layers, size, count = (16, 1, 8, 50) if options.quick else (64, 3, 64, 2000)
    seed, steps = options.seed, min(options.steps, 200)

    def encoder(*, logits: bool) -> EncoderModel:
        sizes: dict[str, Any] = {"layers": layers, "num_heads": 4, "length": LENGTH}
        return EncoderModel(len(IDS), features, **sizes, token_types=1, logits=logits)

    masked = train(
        encoder(logits=True),
        options.output / "masked",
        lambda: hidden_characters(seed, size),
        options,
        steps=options.steps,
        rate=3e-3,
    )
    rng = np.random.default_rng(seed)
    languages = np.repeat(np.arange(len(LANGUAGES)), 2)
    examples = dates(rng, languages, held_out=False)
    wanted = rng.integers(len(LANGUAGES), size=count)
    test = dates(rng, wanted, held_out=True)

    def share_right(name: str, rate: float, **how: Any) -> float:
        model = LanguageModel(encoder(logits=False), features)
        folder, batches = options.output / name, lambda: labeled(examples, languages, seed, size)
        trainer = train(model, folder, batches, options, steps=steps, rate=rate, **how)
        unfused = trainer.export(gg.build(model, **SPEC), options.output / f"{name}.onnx")
        session = gg.Session(gg.optimize(gg.load(unfused)), threads=options.threads)
        return float(np.mean(session(feeds(test))[0].argmax(axis=-1) == wanted))

    frozen = share_right("frozen", 3e-2, pretrained=masked.parameters, trainable="^head")
    scratch = share_right("scratch", 1e-3)
    return frozen - scratch, (
        f"{frozen:.1%} of {count:,} held-out dates with the frozen encoder, {scratch:.1%} from "
        "scratch"
    )


if __name__ == "__main__":
    command(run, about=str(__doc__).splitlines()[0], steps=1500, wanted=0.05)
