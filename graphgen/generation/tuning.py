"""Which cache is faster on this machine, and from how many tokens on a graph for prompts."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from graphgen.generation.caches import Decoder, InPlace
from graphgen.generation.decoder import open_decoder
from graphgen.graph import ModelLike
from graphgen.measure.choices import Choice, choose

_MOST = 64  # tokens that are read one by one
_GAIN = 1.1  # what a pick that costs memory or accuracy has to bring
_LENGTHS = (4, 8, 16, 32, 64, 128, 256)


def tune_cache(
    model: ModelLike, int8: ModelLike, prompt: int, batch: int, *, threads: int | None = None
) -> Choice:
    """Measure a token after `prompt` others with a cache of float32 and with one of int8.

    int8 is picked if it is 1.1 times as fast.
    """
    ways = [
        (name, partial(_step, _started(one, prompt, batch, threads)), None)
        for name, one in (("float32", model), ("int8", int8))
    ]
    what = f"a token after {prompt:,}, by keys and values in"
    return choose(what, batch, ways, worth=_GAIN)


def _started(model: ModelLike, prompt: int, batch: int, threads: int | None) -> tuple[Any, Any]:
    decoder = open_decoder(model, provider="cpu", threads=threads)
    rows = _rows(decoder, prompt, batch)
    decoder.start(rows, _MOST)
    return decoder, np.array([row[0] for row in rows])


def _step(started: tuple[Decoder, Any]) -> None:
    decoder, tokens = started
    decoder.step(tokens)
    if isinstance(decoder, InPlace):  # so that all are measured at the same length
        for row in range(len(tokens)):
            decoder.forget(row, 1)


def _rows(decoder: Decoder, length: int, batch: int) -> list[list[int]]:
    words = decoder.vocabulary or 2
    rows: list[list[int]] = np.random.default_rng(0).integers(0, words, (batch, length)).tolist()
    return rows


def tune_prompts(
    model: ModelLike, prompts: ModelLike, prompt: int, batch: int, *, threads: int | None = None
) -> tuple[list[Choice], int | None]:
    """Measure prompts of several lengths with the model and with the graph that reads them in int8.

    Returns what was measured, the longest last, and from how many tokens on, of all rows, int8 is
    faster; None if it is not picked, because it is not 1.1 times as fast for `prompt` tokens.
    """
    four = open_decoder(model, provider="cpu", threads=threads)
    eight = open_decoder(model, provider="cpu", threads=threads, prompts=prompts)
    assert isinstance(eight, InPlace) and eight.reader is not None
    eight.reader.least = 1
    found, least = list[Choice](), None
    lengths = [*(n for n in _LENGTHS if n < prompt), prompt]
    for length in reversed(lengths):
        rows = np.array(_rows(four, length, batch))
        others = (rows + 1) % (four.vocabulary or 2)
        ways = [
            (name, partial(_read, decoder, itertools.cycle([rows.tolist(), others.tolist()])), None)
            for name, decoder in (("int4", four), ("int8", eight))
        ]
        what, worth = f"a prompt of {length:,}, read in", _GAIN if length == prompt else 1.0
        found.append(choose(what, batch * length, ways, worth=worth))
        if found[-1].picked != "int8":
            break
        least = batch * length
    return found[::-1], least


def _read(decoder: Decoder, prompts: Iterator[Sequence[Sequence[int]]]) -> None:
    """The next prompts: of the same ones as before, the cache would have all but the end."""
    decoder.start(next(prompts), 1)
