"""Real dates of 20 locales into ISO form, by the transformer of "Attention Is All You Need".

`de mittwoch, 4. märz 1987` becomes `1987-03-04`, character by character. The names of months and
days, their order and the signs between them come from CLDR, by the package babel. The locale is the
first token, since 4/3/1987 is a day in March or in April; formats with two digits for the year,
which leave the century open, are left out. Every tenth day is held out, in all locales.

Training is the paper's (arXiv 1706.03762): norm after each sublayer, sinusoidal positions, one
table of embeddings, Adam with its warm-up, label smoothing, the mean of the last five checkpoints,
and beam search. There is no dropout: no date is seen often enough to be learned by heart.

At the end, the weights of the last attention to the source are plotted for one date, and summed for
all held-out ones: how much of the weight of a field in ISO form lies on that field of the source.
"""

import datetime
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from babel.dates import DateTimeFormat, format_date, get_date_format
from command import command, figure

import graphgen as gg
from graphgen.models.published import with_attentions
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
SHOWN = datetime.date(1987, 9, 16), "en_US", "full"  # held out

# Twelve first days of a month show the names of all months and all days of the week.
SAMPLES = [format_date(datetime.date(2000, m, 1), *f[::-1]) for m in range(1, 13) for f in FORMATS]
FIELDS = {"y": "year", "M": "month", "d": "day", "Ec": "weekday", "@": "locale", "-": "signs"}
CHARACTERS = sorted({*"0123456789-", *"".join(SAMPLES).lower()})
TOKENS = ["<pad>", "<start>", "<end>", *LOCALES, *CHARACTERS]
IDS = {token: number for number, token in enumerate(TOKENS)}


def dates(rng: np.random.Generator, count: int, *, held_out: bool) -> list[tuple[Any, str, str]]:
    """Random dates, each with a locale and a style."""
    days = rng.integers(*DECADES, count) * 10 + (0 if held_out else rng.integers(1, 10, count))
    formats = rng.integers(len(FORMATS), size=count)
    return [
        (datetime.date.fromordinal(int(day)), *FORMATS[n])
        for day, n in zip(days, formats, strict=True)
    ]


def tokens(date: datetime.date, locale: str, style: str) -> tuple[Any, Any]:
    """The tokens of how a date is written somewhere, and the 11 of its ISO form."""
    source = [locale, *format_date(date, style, locale).lower()]
    return [IDS[t] for t in source], [*map(IDS.get, date.isoformat()), END]


def fields(date: datetime.date, locale: str, style: str) -> str:
    """The field of each token of a written date: y, M, d, E or c of the week, @ the locale."""
    values, found = DateTimeFormat(date, locale), "@"
    for n, part in enumerate(re.split(r"%\((\w+)\)s", get_date_format(style, locale).format)):
        text = values[part].lower() if n % 2 else part
        found += (part[0] if n % 2 else "-") * len(text)
    return found


def pairs(rng: np.random.Generator, count: int, *, held_out: bool) -> list[tuple[Any, Any]]:
    """The tokens of random dates."""
    return [tokens(*date) for date in dates(rng, count, held_out=held_out)]


def arrays(some: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Sources, padded to (B, S), and targets, (B, 11)."""
    length = -(-max(len(source) for source, _ in some) // 4) * 4  # few shapes: buffers are kept
    padded = [source + [PAD] * (length - len(source)) for source, _ in some]
    return np.array(padded, np.int64), np.array([target for _, target in some], np.int64)


def feeds(source: Any, target: Any) -> dict[str, Any]:
    """What the model reads of sources and targets; the decoder is one token late."""
    before = np.concatenate([np.full((len(target), 1), START), target[:, :-1]], axis=1)
    mask = (source != PAD).astype(np.int64)
    return {"source_ids": source, "source_mask": mask, "target_ids": before}


def batches(seed: tuple[int, ...], size: int) -> Iterator[dict[str, Any]]:
    """Batches for ever, each of sources of about one length."""
    rng = np.random.default_rng(seed)
    while True:
        drawn = sorted(pairs(rng, 16 * size, held_out=False), key=lambda pair: len(pair[0]))
        for number in rng.permutation(16):
            source, labels = arrays(drawn[number * size : (number + 1) * size])
            yield {**feeds(source, labels), "labels": labels}


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


def shares(weights: Any, held_out: list[tuple[Any, str, str]]) -> Any:
    """How much of the attention of year, month and day lies on each field of what was written.

    From (B, H, 11, S), the mean of dates, heads and tokens, (3, 6).
    """
    length, mean = weights.shape[-1], weights.mean(axis=1)  # (B, 11, S)
    written = np.array([[*fields(*date).ljust(length)] for date in held_out])  # (B, S)
    iso = np.array([*"yyyy-MM-dd."])
    return np.array(
        [
            [
                (mean[:, iso == row] * np.isin(written, [*column])[:, None]).sum(axis=-1).mean()
                for column in FIELDS
            ]
            for row in "yMd"
        ]
    )


def plot(weights: Any, source: list[int], target: list[int], path: Path) -> None:
    """The weights of one date, (11, S), with its characters on the axes."""
    with figure(path, size=(9, 3.8)) as axes:
        drawn = axes.imshow(weights, cmap="Blues", vmin=0, vmax=1)
        axes.figure.colorbar(drawn, label="weight, mean of the heads", shrink=0.7)
        written = ["\n" + TOKENS[source[0]], *(TOKENS[i].replace(" ", "␣") for i in source[1:])]
        axes.set_xticks(range(len(source)), written)
        axes.set_yticks(range(len(target)), [TOKENS[i] for i in target])
        axes.set(xlabel="written", ylabel="ISO form")


def where_it_looks(
    model: Transformer, weights: Any, held_out: list[tuple[Any, str, str]], options: Namespace
) -> None:
    """Print the shares of the last attention to the source, and draw it for one date.

    Row t of the weights is the one with which token t of the ISO form is predicted.
    """
    whole = gg.build(with_attentions(model, "attentions"), weights=weights, **inputs())
    path = gg.export(gg.optimize(whole), options.output / "attentions.onnx")
    session = gg.Session(path, threads=options.threads)

    def attend(source: Any, target: Any) -> Any:
        return session(**feeds(source, target))[-1]

    source, target = arrays([tokens(*date) for date in held_out])
    parts = (np.array_split(x, -(-len(held_out) // 100)) for x in (source, target))
    looked = np.concatenate([attend(*both) for both in zip(*parts, strict=True)])  # (B, H, 11, S)
    real = (source != PAD)[:, None, None]
    even = np.broadcast_to(real / real.sum(axis=-1, keepdims=True), looked.shape)
    rows = [*shares(looked, held_out), shares(even, held_out)[0]]
    print("attention on" + "".join(f"{name:>9}" for name in FIELDS.values()))
    for name, row in zip(("of year", "of month", "of day", "if even"), rows, strict=True):
        print(f"  {name:10}" + "".join(f"{share:9.1%}" for share in row))
    one = tokens(*SHOWN)
    drawn = attend(*arrays([one]))[0].mean(axis=0)[:, : len(one[0])]
    plot(drawn, *one, options.output / "attention.png")


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
    held_out = dates(rng, count, held_out=True)
    source, target = arrays([tokens(*date) for date in held_out])
    parts = np.array_split(source, max(1, count // 100))
    found = np.concatenate([translate(part) for part in parts])
    for ids, iso in zip(source[:5], found, strict=False):
        locale, *written = (TOKENS[i] for i in ids if i != PAD)
        print(f"{locale:5} {''.join(written)}  ->  {''.join(TOKENS[i] for i in iso if i > END)}")
    where_it_looks(model, weights, held_out, options)
    exact = float(np.mean((found == target).all(axis=1)))
    return exact, f"{exact:.2%} of {count:,} held-out dates are exact"


if __name__ == "__main__":
    command(run, about=str(__doc__).splitlines()[0], steps=3600, wanted=0.99)
