"""Six kinds of position past the length they were trained at: perplexity by position.

One small decoder for each kind of position learns the English prose of CPython's help topics on
windows of 64 tokens, with the same initial weights (except the positions' own) and the same
batches. Then it reads held-out windows of 256 tokens. Learned positions have no vector past their
table, and say so; the others run on, which does not mean that they do it well.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from command import command, figure
from demo import batches, prose, train_tokenizer

import graphgen as gg
from graphgen.models.decoder import DecoderLM, inputs

KINDS = ("sinusoidal", "learned", "rotary", "alibi", "t5", "none")
LENGTH, TIMES, BATCH = 64, 4, 16
GROUP = 16  # positions that a point of the plot is the mean of


def perplexities(session: gg.Session, windows: Any) -> Any:
    """exp of the mean -log p of the next token, for each group of positions of the windows."""
    nats = []
    for some in np.array_split(windows, -(-len(windows) // BATCH)):
        [logits] = session(input_ids=some[:, :-1].copy())
        rows = logits.astype(np.float64)
        right = np.take_along_axis(rows, some[:, 1:, None], axis=-1)[..., 0]
        nats.append(np.logaddexp.reduce(rows, axis=-1) - right)
    by_position = np.concatenate(nats).mean(0)
    return np.exp(by_position.reshape(-1, GROUP).mean(1))


def trained(kind: str, ids: Any, vocabulary: int, options: Namespace) -> gg.Session:
    """A decoder with this kind of position, as a session of its fused file."""
    sizes: dict[str, Any] = {"features": 128, "layers": 2, "num_heads": 4}
    if options.quick:
        sizes = {"features": 16, "layers": 1, "num_heads": 2}
    module = DecoderLM(vocabulary, length=LENGTH, positions=kind, **sizes)
    folder = options.output / kind
    gg.artifacts(
        gg.build(module, training=True, seed=options.seed, **inputs()),
        folder,
        optimizer=gg.AdamW(weight_decay=0.1, betas=(0.9, 0.95), clip_norm=1.0),
    )
    steps = options.steps
    schedule = gg.schedule.cosine(6e-3, warmup=steps // 10, steps=steps)
    trainer = gg.Trainer(folder, schedule=schedule, threads=options.threads)
    given = {"length": LENGTH, "batch": BATCH}
    trainer.fit(lambda: batches(ids, options.seed, **given), steps=steps)
    best = gg.optimize(
        gg.build(module, weights=trainer.parameters, primitives=True, **inputs()),
        expect={"attention": sizes["layers"]},
    )
    path = gg.export(best, options.output / f"{kind}.onnx")
    return gg.Session(path, threads=options.threads)


def plot(found: dict[str, Any], path: Path) -> None:
    """Perplexity against position, with the trained length marked."""
    with figure(path) as axes:
        for kind, values in found.items():
            axes.plot(
                (np.arange(len(values)) + 0.5) * GROUP, values, "o-", markersize=3, label=kind
            )
        axes.axvline(LENGTH, color="gray", linestyle="--", label="trained length")
        axes.set(xlabel="position", ylabel="perplexity, held out", yscale="log")
        axes.grid(alpha=0.3, which="both")
        axes.legend()


def run(options: Namespace) -> tuple[float, str]:
    """Train and measure all six, and plot them."""
    options.output.mkdir(parents=True, exist_ok=True)
    train_text, held_out = prose()
    tokenizer = train_tokenizer(train_text)
    ids, held = (np.array(tokenizer.encode(t).ids, np.int64) for t in (train_text, held_out))
    longest = TIMES * LENGTH
    starts = range(0, len(held) - longest, LENGTH * (40 if options.quick else 1))
    windows = np.stack([held[s : s + longest + 1] for s in starts])
    found: dict[str, Any] = {}
    for kind in KINDS[1:4] if options.quick else KINDS:
        session = trained(kind, ids, tokenizer.get_vocab_size(), options)
        most = LENGTH if kind == "learned" else longest
        found[kind] = perplexities(session, windows[:, : most + 1])
    try:
        gg.build(DecoderLM(9, 8, num_heads=1, length=LENGTH), input_ids=gg.int64[1, longest])
    except gg.GraphgenError as error:
        print(error)
    print(f"{'perplexity':12}" + "".join(f"{n * LENGTH:>8}" for n in range(1, TIMES + 1)))
    rows = {}
    for kind, values in found.items():
        rows[kind] = np.exp(np.log(values).reshape(-1, LENGTH // GROUP).mean(1))
        print(f"{kind:12}" + "".join(f"{value:8.1f}" for value in rows[kind]))
    plot(found, options.output / "extrapolation.png")
    kept = float(rows["alibi"][0] / rows["alibi"][-1])
    last = sorted((row[-1], kind) for kind, row in rows.items() if len(row) == TIMES)
    told = ", ".join(f"{kind} {value:.1f}" for value, kind in last)
    return kept, (
        f"in the last quarter of {longest} tokens, with positions trained at {LENGTH}, the "
        f"perplexity is {told}; ALiBi's is {1 / kept:.0%} of its own at the trained length"
    )


if __name__ == "__main__":
    command(run, about=str(__doc__).splitlines()[0], steps=600, wanted=1 / 1.05)
