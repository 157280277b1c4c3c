"""How many heads: 1 to 32 of them share the same features, at the same parameters and products.

An encoder-decoder learns to write dates of 20 locales in ISO form (examples/dates.py), once with
each number of heads, heads · head_dim = D, from the same batches: row A of table 3 of arXiv
1706.03762, small. Parameters and operations are counted on the graphs, and runs are timed in turn.
"""

import time
from argparse import Namespace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from command import command, figure
from dates import TOKENS, arrays, batches, feeds, pairs

import graphgen as gg
from graphgen.laboratory.inspection import inspect
from graphgen.models.transformer import Transformer, inputs

HEADS = (1, 2, 4, 8, 16, 32)
MANY = 8  # heads that are compared with one
BATCH, SEEDS, ROUNDS = 32, 3, 101  # timed runs of each


def model(heads: int) -> Transformer:
    """A transformer of one layer with so many heads."""
    return Transformer(len(TOKENS), 64, layers=1, num_heads=heads, dropout=0.0)


def held_out(seed: int, count: int) -> dict[str, Any]:
    """Dates of days not trained on, as one batch."""
    source, labels = arrays(pairs(np.random.default_rng([seed, 1]), count, held_out=True))
    return {**feeds(source, labels), "labels": labels}


def counted(heads: int, given: dict[str, Any]) -> tuple[int, int, int]:
    """Parameters, FLOPs of matrix products, and all FLOPs of a run on a batch."""
    (batch, source), (_, target) = given["source_ids"].shape, given["target_ids"].shape
    sizes = {"batch": batch, "source": source, "target": target}
    found = inspect(gg.build(model(heads), **inputs()), sizes)
    if found.flops is None or found.product_flops is None or found.uncounted:
        raise gg.GraphgenError(f"not all FLOPs are known: {', '.join(found.uncounted)}")
    return found.parameters, found.product_flops, found.flops


def trained(
    heads: int, given: list[Any], held: dict[str, Any], seed: int, options: Namespace
) -> tuple[gg.Session, float, float]:
    """The model behind all batches, its loss held out, and the share of dates without a fault.

    Each character is the likeliest behind the right ones before it.
    """
    module, steps = model(heads), len(given)
    folder = options.output / "artifacts"
    gg.artifacts(
        gg.build(module, training=True, seed=seed, **inputs()),
        folder,
        optimizer=gg.AdamW(weight_decay=0.0, betas=(0.9, 0.98), epsilon=1e-9),
    )
    schedule = gg.schedule.cosine(5e-3, warmup=steps // 4, steps=steps)
    trainer = gg.Trainer(folder, schedule=schedule, threads=options.threads)
    trainer.fit(given, steps=steps, progress=False)
    best = gg.optimize(gg.build(module, weights=trainer.parameters, **inputs()))
    path = gg.export(best, options.output / f"heads-{heads}-{seed}.onnx")
    session = gg.Session(path, threads=1)
    [logits] = session(**{name: held[name] for name in inputs()})
    exact = (logits.argmax(-1) == held["labels"]).all(axis=1).mean()
    return session, trainer.evaluate([held]), float(exact)


def milliseconds(sessions: dict[int, gg.Session], given: dict[str, Any]) -> dict[int, float]:
    """The median processor time of a run of each, in turns, on one thread."""
    feeds = {name: given[name] for name in inputs()}
    times: dict[int, list[int]] = {heads: [] for heads in sessions}
    for _ in range(ROUNDS):
        for heads, session in sessions.items():
            start = time.thread_time_ns()  # what else runs here counts little
            session(**feeds)
            times[heads].append(time.thread_time_ns() - start)
    return {heads: float(np.median(taken)) / 1e6 for heads, taken in times.items()}


def plot(exact: dict[int, Any], costs: dict[str, dict[int, float]], path: Path) -> None:
    """The share without a fault of each seed and their mean, and costs over those of one head."""
    with figure(path, panels=2, size=(11, 4.5)) as (first, second):
        for heads, shares in exact.items():
            first.plot([heads] * len(shares), 100 * np.array(shares), "C1.")
        means = [100 * np.mean(shares) for shares in exact.values()]
        first.plot(list(exact), means, "o-", label="mean of the seeds")
        first.set(ylabel="dates without a fault, held out, %")
        for name, values in costs.items():
            relative = [value / values[HEADS[0]] for value in values.values()]
            second.plot(list(values), relative, "o-", markersize=4, label=name)
        second.set(ylabel="over that of one head", ylim=(0, None))
        for axes in (first, second):
            axes.set_xscale("log", base=2)
            axes.set_xticks(HEADS, map(str, HEADS))
            axes.set(xlabel="heads")
            axes.grid(alpha=0.3)
            axes.legend()


def run(options: Namespace) -> tuple[float, str]:
    """Train, count and time each number of heads, print and plot them."""
    options.output.mkdir(parents=True, exist_ok=True)
    seeds = range(options.seed, options.seed + (1 if options.quick else SEEDS))
    given = list(islice(batches((options.seed,), BATCH), options.steps))
    held = held_out(options.seed, BATCH if options.quick else 2000)
    timed = {name: array[:BATCH] for name, array in held.items()}
    sessions: dict[int, gg.Session] = {}
    counts, losses, exact = {}, {}, {}
    for heads in (HEADS[0], MANY) if options.quick else HEADS:
        counts[heads] = counted(heads, timed)
        found = [trained(heads, given, held, seed, options) for seed in seeds]
        sessions[heads] = found[0][0]
        losses[heads], exact[heads] = [f[1] for f in found], [f[2] for f in found]
    times = milliseconds(sessions, timed)
    print(
        "heads  parameters   MFLOPs of products      all       ms     loss    exact   of each seed"
    )
    for heads, (parameters, products, flops) in counts.items():
        loss, share = np.mean(losses[heads]), np.mean(exact[heads])
        each = " ".join(f"{one:.1%}" for one in exact[heads])
        print(
            f"{heads:5}{parameters:12,}{products / 1e6:21.2f}{flops / 1e6:9.2f}"
            f"{times[heads]:9.2f}{loss:9.4f}{share:9.1%}   {each}"
        )
    all_flops = {heads: float(count[2]) for heads, count in counts.items()}
    plot(exact, {"operations": all_flops, "time": times}, options.output / "heads.png")
    if len({count[:2] for count in counts.values()}) > 1:
        raise gg.GateError(f"parameters or products are not the same for all: {counts}")
    one, many = (float(np.mean(exact[heads])) for heads in (HEADS[0], MANY))
    return many - one, (
        f"dates held out without a fault: {one:.1%} with one head, {many:.1%} with {MANY}, at the "
        "same parameters and products"
    )


if __name__ == "__main__":
    command(run, about=str(__doc__).splitlines()[0], steps=1000, wanted=0.05)
