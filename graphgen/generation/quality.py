"""How much a decoder with fewer bits says something else than the one it was made of."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.generation.decoder import open_decoder
from graphgen.graph import ModelLike
from graphgen.measure.accuracy import divergence
from graphgen.models.published.windows import windows
from graphgen.operands import Array

Source: TypeAlias = "str | os.PathLike[str] | ModelLike"

_ROWS, _MOST = 8, 48  # windows at a time, and of a text


@dataclass(frozen=True)
class Quality:
    """Two decoders on the same tokens; of random ones, only divergence and agreement mean much."""

    before: float  # perplexity: exp(-mean log p(token))
    after: float
    divergence: float  # mean Σ p log(p / q) of the next token, in nats
    same: float  # share of tokens with the same most likely next one
    tokens: int  # predictions
    random: bool = False

    def __str__(self) -> str:
        return (
            f"perplexity {self.before:.4f} before, {self.after:.4f} after, divergence "
            f"{self.divergence:.2e} nats a token, the same next token in {self.same:.1%} "
            f"({self.tokens:,}{', random inputs' * self.random})"
        )


def quality(
    before: Source,
    after: Source,
    tokens: Array,
    *,
    threads: int | None = None,
    random: bool = False,
    prompts: ModelLike | None = None,
) -> Quality:
    """Read windows (N, T) token by token with two decoders on the CPU, the first quarter at once.

    Each keeps keys and values as it does when it generates; `prompts` reads the second's quarters.
    Raises GraphgenError for what is not a decoder, and decoders with other vocabularies.
    """
    how: dict[str, Any] = {"provider": "cpu", "threads": threads}
    decoders = [open_decoder(before, **how), open_decoder(after, **how, prompts=prompts)]
    length, found = tokens.shape[1], list[Array]()
    prompt = max(length // 4, 1)
    for at in range(0, len(tokens), _ROWS):
        rows = tokens[at : at + _ROWS]
        logits = [d.start(rows[:, :prompt].tolist(), length - prompt) for d in decoders]
        for step in range(prompt, length):
            a, b = (np.array(one, np.float64) for one in logits)
            if a.shape != b.shape:
                words = f"{a.shape[-1]} and {b.shape[-1]}"
                raise GraphgenError(f"compare: the decoders have {words} tokens; give two of one")
            found.append(_scores(a, b, rows[:, step]))
            logits = [d.step(rows[:, step]) for d in decoders]
    every = np.concatenate(found, axis=1)
    first, second = np.exp(every[:2].mean(axis=1))
    apart, same = every[2:].mean(axis=1)
    shares = float(apart), float(same)
    return Quality(float(first), float(second), *shares, tokens=every.shape[1], random=random)


def _scores(a: Array, b: Array, wanted: Array) -> Array:
    """For each row: -log p(wanted) of both, the divergence, and whether both choose the same."""
    lost = []
    for logits in (a, b):
        top = logits.max(axis=-1)
        total = top + np.log(np.exp(logits - top[:, None]).sum(axis=-1))
        lost.append(total - logits[np.arange(len(logits)), wanted])
    return np.stack([*lost, divergence(a, b), a.argmax(-1) == b.argmax(-1)])


def of_text(folder: Path, other: Path, text: Path, *, threads: int | None = None) -> Quality:
    """Two folders of decoders on at most 48 windows of a text, as the first's tokenizer splits it.

    Raises GraphgenError for a text that is too short, or a folder without a tokenizer.
    """
    tokens = windows(folder, text, "compare")[:_MOST]
    return quality(folder, other, tokens, threads=threads)
