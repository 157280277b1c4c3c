"""The main job in one go: train a small decoder on English prose, export, fuse, generate."""

import math
from argparse import Namespace
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import graphgen as gg
from graphgen.export.write import replacing
from graphgen.models.decoder import DecoderLM, inputs
from graphgen.train.run import plot

VOCABULARY, LENGTH, BATCH = 2000, 128, 8
SIZES: dict[str, Any] = {"features": 128, "layers": 3, "num_heads": 4, "length": LENGTH}
TINY: dict[str, Any] = {"features": 16, "layers": 1, "num_heads": 2, "length": LENGTH}
STEPS = 600
WANTED = 2.3  # bits per byte held out, at most
PROMPT = "The statement is used to"

console = Console()


def run(
    output: Path,
    *,
    seed: int = 0,
    steps: int | None = None,
    prompt: str = PROMPT,
    verify: bool = False,
    threads: int | None = None,
    quick: bool = False,
) -> tuple[float, str]:
    """Train, plot, export, optimize, measure and generate; everything lands in `output`.

    Returns the held-out bits per byte. Raises GateError if a whole run is not good enough.
    """
    for package in ("tokenizers", "matplotlib"):  # asked now, not after the training
        if find_spec(package) is None:
            raise gg.GraphgenError(
                f'the demo needs {package}; install the extra: pip install "graphgen-onnx[demo]"'
            )
    output.mkdir(parents=True, exist_ok=True)
    steps = STEPS if steps is None else steps
    train_text, held_out = prose()
    tokenizer = train_tokenizer(train_text)
    with replacing("demo", output / "tokenizer.json") as [
        file
    ]:  # `save` leaves half on a full disk
        file.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    train_ids, held_ids = (
        np.array(tokenizer.encode(text).ids, np.int64) for text in (train_text, held_out)
    )
    console.print(
        f"{len(train_ids):,} tokens to train on, {len(held_ids):,} held out "
        f"({len(held_out.encode()):,} bytes), {tokenizer.get_vocab_size()} in the vocabulary"
    )
    module = DecoderLM(tokenizer.get_vocab_size(), **(TINY if quick else SIZES))
    gg.artifacts(
        gg.build(module, training=True, seed=seed, **inputs()),
        output / "artifacts",
        optimizer=gg.AdamW(weight_decay=0.1, betas=(0.9, 0.95), clip_norm=1.0),
    )
    schedule = gg.schedule.cosine(6e-3, warmup=steps // 10, steps=steps)
    trainer = gg.Trainer(output / "artifacts", schedule=schedule, threads=threads)
    (output / "run" / "checkpoint").unlink(missing_ok=True)  # of an earlier demo
    history = trainer.fit(
        lambda: batches(train_ids, seed), steps=steps, checkpoint=output / "run", save_every=200
    )
    plot(history, output / "loss.png")
    # Written as primitives, so that there is something to fuse.
    unfused = trainer.export(
        gg.build(module, primitives=True, seed=seed, **inputs()), output / "decoder.onnx"
    )
    best = gg.optimize(gg.load(unfused), verify=verify)
    fused = gg.export(best, output / "decoder.fused.onnx")
    sizes, seconds = {"batch": 1, "seq": LENGTH}, 0.1 if quick else 2.0
    kinds = ["cumulative"]
    print(gg.compare(unfused, dims=sizes, kinds=kinds, seconds=seconds, threads=threads))
    for shortfall in best.report.shortfalls():
        console.print(f"not whole: {shortfall}")
    session = gg.Session(fused, threads=threads)
    print(session.plan)
    bits = bits_per_byte(session, held_ids, len(held_out.encode()))
    text = generate(session, tokenizer, prompt, seed=seed)
    console.print(f"\n{prompt}[bold]{text}[/bold]\n", highlight=False)
    console.print(f"in {output}: {', '.join(sorted(p.name for p in output.iterdir()))}")
    told = f"{bits:.2f} bits per byte held out"
    if steps >= STEPS and bits > WANTED:
        raise gg.GateError(f"{told}; at most {WANTED} are wanted")
    return bits, told


def prose() -> tuple[str, str]:
    """The English prose of CPython's help topics: all but the last tenth, and that tenth.

    Lines of the last tenth that occur in the rest as well are left out of it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as e:
        raise gg.GraphgenError("this Python has no pydoc_data; install python3's pydoc") from e
    text = "\n".join(topics.values())
    cut = len(text) * 9 // 10
    known = set(text[:cut].splitlines())
    return text[:cut], "\n".join(line for line in text[cut:].splitlines() if line not in known)


def train_tokenizer(text: str) -> Any:
    """A byte-level BPE tokenizer of about 2,000 tokens."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as e:
        raise gg.GraphgenError('install the extra: pip install "graphgen-onnx[demo]"') from e
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def batches(
    ids: Any, seed: int, *, length: int = LENGTH, batch: int = BATCH
) -> Iterator[dict[str, Any]]:
    """Random windows for ever: `input_ids` and, one token on, `labels`, (batch, length) each."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(ids) - length, batch)
        windows = np.stack([ids[s : s + length + 1] for s in starts])
        yield {"input_ids": windows[:, :-1].copy(), "labels": windows[:, 1:].copy()}


def bits_per_byte(session: gg.Session, ids: Any, count: int) -> float:
    """Σ -log₂ p(token) / bytes; windows overlap by half, so that each token has some context."""
    step, nats = LENGTH // 2, 0.0
    for first in range(0, len(ids) - 1, step):
        window = ids[max(0, first - step) : first + step + 1]
        [logits] = session(input_ids=window[None, :-1])
        new = window[1:][-(min(first + step, len(ids) - 1) - first) :]
        rows = logits[0, -len(new) :].astype(np.float64)
        top = rows.max(-1)
        log_sum = top + np.log(np.exp(rows - top[:, None]).sum(-1))
        nats += float((log_sum - rows[np.arange(len(new)), new]).sum())
    return nats / math.log(2) / count


def generate(
    session: gg.Session,
    tokenizer: Any,
    prompt: str,
    *,
    seed: int,
    tokens: int = 80,
    top_k: int = 40,
) -> str:
    """Sample from the `top_k` likeliest next tokens, the whole context again for each."""
    ids: list[int] = tokenizer.encode(prompt).ids
    rng, length = np.random.default_rng(seed), len(ids)
    for _ in range(tokens):
        [logits] = session(input_ids=np.array([ids[-LENGTH:]], np.int64))
        likely = np.argsort(logits[0, -1])[-top_k:]
        weights = np.exp((logits[0, -1, likely] - logits[0, -1].max()) / 0.8)
        ids.append(int(rng.choice(likely, p=weights / weights.sum())))
    text: str = tokenizer.decode(ids[length:])
    return text


def main(options: Namespace) -> tuple[float, str]:
    """Run with the options of the command line."""
    return run(options.output, **{n: v for n, v in vars(options).items() if n != "output"})


if __name__ == "__main__":
    from command import command  # a wheel has this file alone, for `graphgen demo`

    further = {"--prompt": {"default": PROMPT, "help": "the text to continue"}}
    checked = {"--verify": {"action": "store_true", "help": "check every rewrite"}}
    command(main, about=str(__doc__), steps=STEPS, further=further | checked)
