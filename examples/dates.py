"""Real dates of 20 locales into ISO form, by the transformer of "Attention Is All You Need".

`de mittwoch, 4. märz 1987` becomes `1987-03-04`, character by character: the names of months and
days, their order and the signs between them are CLDR's, as the package babel has them. The locale
is the first token, since 4/3/1987 is a day in March or in April; formats with two digits of the
year, which tell no century, are left out. Every tenth day is held out, in all locales.

Training is the paper's (arXiv 1706.03762): norm after each sublayer, sinusoidal positions, one
table of embeddings, Adam with its warm-up, label smoothing, the mean of the last five checkpoints,
and beam search. There is no dropout: no date is seen often enough to be learned by heart.
"""

import datetime
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from babel.dates import format_date, get_date_format
from command import command

import graphgen as gg
from graphgen.models.transformer import Transformer, inputs

LOCALES = "ar cs de el en_GB en_US es fi fr he hi hu it ja ko nl pt_BR ru tr zh".split()
FORMATS = [
    (locale, style)
    for locale in LOCALES
    for style in ("short", "medium", "long", "full")
    if not re.search("(?<!y)yy(?!y)", get_date_format(style, locale).pattern)
]
DECADES = [datetime.date(year, 1, 1).toordinal() // 10 for year in (1600, 2200)]  # of days
PAD, START, END = 0, 1, 2

# Twelve first days of a month show the names of all months and all days of the week.
SAMPLES = [format_date(datetime.date(2000, m, 1), *f[::-1]) for m in range(1, 13) for f in FORMATS]
CHARACTERS = sorted({*"0123456789-", *"".join(SAMPLES).lower()})
TOKENS = ["<pad>", "<start>", "<end>", *LOCALES, *CHARACTERS]
IDS = {token: number for number, token in enumerate(TOKENS)}


def pairs(rng: np.random.Generator, count: int, *, held_out: bool) -> list[tuple[Any, Any]]:
    """Random dates: the tokens of how one is written somewhere, and the 11 of its ISO form."""
    days = rng.integers(*DECADES, count) * 10 + (0 if held_out else rng.integers(1, 10, count))
    found = []
    for day, number in zip(days, rng.integers(len(FORMATS), size=count), strict=True):
        date, (locale, style) = datetime.date.fromordinal(int(day)), FORMATS[number]
        written = format_date(date, style, locale).lower()
        source = [locale, *written]
        found.append(([IDS[t] for t in source], [*map(IDS.get, date.isoformat()), END]))
    return found


def arrays(some: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Sources, padded to (B, S), and targets, (B, 11)."""
    length = -(-max(len(source) for source, _ in some) // 4) * 4  # few shapes: buffers are kept
    padded = [source + [PAD] * (length - len(source)) for source, _ in some]
    return np.array(padded, np.int64), np.array([target for _, target in some], np.int64)


def batches(seed: tuple[int, ...], size: int) -> Iterator[dict[str, Any]]:
    """Batches for ever, each of sources of about one length; the decoder reads one token late."""
    rng = np.random.default_rng(seed)
    while True:
        drawn = sorted(pairs(rng, 16 * size, held_out=False), key=lambda pair: len(pair[0]))
        for number in rng.permutation(16):
            source, labels = arrays(drawn[number * size : (number + 1) * size])
            target = np.concatenate([np.full((size, 1), START), labels[:, :-1]], axis=1)
            mask = (source != PAD).astype(np.int64)
            feeds = {"source_ids": source, "source_mask": mask, "target_ids": target}
            yield {**feeds, "labels": labels}


def beam_search(next_logits: Callable[[Any], Any], *, batch: int, length: int, beams: int) -> Any:
    """The likeliest target of each source that was found, (batch, length).

    `next_logits` gives the logits of the token after each of (batch · beams, t) beginnings. Of the
    beginnings of a source, the `beams` likeliest go on; one that has ended goes on with padding.
    """
    ids = np.full((batch, beams, 1), START)
    scores = np.full((batch, beams), -np.inf)
    scores[:, 0] = 0  # at first all beams are equal: only one of them counts
    for _ in range(length):
        logits = next_logits(ids.reshape(batch * beams, -1)).reshape(batch, beams, -1)
        logp = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        ended = np.isin(ids[:, :, -1], (END, PAD))
        logp[ended] = np.where(np.arange(logp.shape[-1]) == PAD, 0, -np.inf)
        total = (scores[:, :, None] + logp).reshape(batch, -1)
        best = np.argsort(-total, axis=1, kind="stable")[:, :beams]  # (batch, beams)
        scores = np.take_along_axis(total, best, axis=1)
        beam, token = np.divmod(best, logp.shape[-1])
        ids = np.take_along_axis(ids, beam[:, :, None], axis=1)
        ids = np.concatenate([ids, token[:, :, None]], axis=2)
    return ids[:, 0, 1:]


def run(options: Namespace) -> tuple[float, str]:
    """Train, export encoder and decoder apart, and translate held-out dates."""
    features, layers, batch, count = (32, 1, 8, 8) if options.quick else (128, 2, 64, 2000)
    model = Transformer(len(TOKENS), features, layers=layers, num_heads=4, dropout=0.0)
    folder = options.output
    gg.artifacts(
        gg.build(model, training=True, seed=options.seed, **inputs()),
        folder / "artifacts",
        loss="cross_entropy",
        optimizer=gg.AdamW(weight_decay=0.0, betas=(0.9, 0.98), epsilon=1e-9),
        label_smoothing=0.1,
    )
    schedule = gg.schedule.noam(features, warmup=options.steps // 4 + 1)
    trainer = gg.Trainer(
        folder / "artifacts", schedule=schedule, seed=options.seed, threads=options.threads
    )
    # The mean of the last five checkpoints makes far fewer mistakes than any one of them.
    saved = []
    for twentieths in range(16, 21):
        stop = options.steps * twentieths // 20
        trainer.fit(batches((options.seed, stop), batch), steps=stop)
        saved.append(trainer.parameters)
    weights = {name: np.mean([one[name] for one in saved], axis=0) for name in saved[0]}

    # The source is read once, the decoder runs once for each character: two files.
    mask, memory = gg.bool_["batch", "source"], gg.float32["batch", "source", features]
    source_ids, target_ids = gg.int64["batch", "source"], gg.int64["batch", "target"]
    encoder = gg.build(model.encode, weights=weights, source_ids=source_ids, mask=mask)
    decoder = gg.build(
        model.decode, weights=weights, target_ids=target_ids, memory=memory, mask=mask
    )
    gg.export(gg.optimize(encoder), folder / "encoder.onnx")
    gg.export(gg.optimize(decoder), folder / "decoder.onnx")
    encode = gg.Session(folder / "encoder.onnx", threads=options.threads)
    decode = gg.Session(folder / "decoder.onnx", threads=options.threads)

    def translate(source: Any, beams: int = 4) -> Any:
        memory, mask = encode(source_ids=source, mask=source != PAD)[0], source != PAD
        memory, mask = np.repeat(memory, beams, axis=0), np.repeat(mask, beams, axis=0)
        return beam_search(
            lambda ids: decode(target_ids=ids, memory=memory, mask=mask)[0][:, -1],
            batch=len(source),
            length=11,
            beams=beams,
        )

    rng = np.random.default_rng(options.seed)
    source, target = arrays(pairs(rng, count, held_out=True))
    parts = np.array_split(source, max(1, count // 100))
    found = np.concatenate([translate(part) for part in parts])
    for ids, iso in zip(source[:5], found, strict=False):
        locale, *written = (TOKENS[i] for i in ids if i != PAD)
        print(f"{locale:5} {''.join(written)}  ->  {''.join(TOKENS[i] for i in iso if i > END)}")
    exact = float(np.mean((found == target).all(axis=1)))
    return exact, f"{exact:.2%} of {count:,} held-out dates are exact"


if __name__ == "__main__":
    command(run, about=str(__doc__).splitlines()[0], steps=3600, wanted=0.99)
