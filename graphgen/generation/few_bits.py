"""Keys and values as int8: their scales, measured on tokens, and what that costs."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.export.write import export
from graphgen.generation.caches import MASK, PAST, PRESENT, sized
from graphgen.generation.decoder import open_decoder
from graphgen.graph import ModelLike, model_in
from graphgen.match import Miss
from graphgen.measure.accuracy import divergence
from graphgen.operands import Array
from graphgen.passes.decoding import in_place, lacks
from graphgen.plan import TensorType
from graphgen.runtime import Session
from graphgen.targets import target as find_target

_ROOM = 1.1  # times the largest that was seen fits into int8
_ROWS = 8  # windows at a time


def int8_cache(model: ModelLike, tokens: Array, *, longest: int | None = None) -> ir.Model:
    """A copy of a decoder whose cache is in place and holds int8, for the CPU.

    A key or value x becomes round(x / s), at most ±127. s is 1.1 / 127 of the largest |x| that its
    head and feature have for `tokens`, windows (N, T), which are read at places up to `longest`:
    rotary positions mix two features by the place. It does not depend on what else is in a batch.

    Raises GraphgenError for a model that has no cache, or none that can be in place, and a runtime
    without the kernel.
    """
    model = model_in(model, "int8_cache")
    who = "build --kv int8"
    if not any(str(value.name).startswith(PAST) for value in model.graph.inputs):
        raise GraphgenError(f"{who}: the model has no cache; give a decoder")
    largest = dict[str, Array]()
    with _opened(model) as session:
        for feed in _feeds(session, tokens, longest or tokens.shape[1]):
            for name, y in zip(session.outputs, session(feed), strict=True):
                if name.startswith(PRESENT):
                    own = name.replace(PRESENT, PAST)
                    found: Array = np.abs(y).max(axis=(0, 2))
                    before: Array = largest.get(own, found)
                    largest[own] = np.maximum(before, found)
    floors = {name: np.float32(1e-6) * (x.max() or 1.0) for name, x in largest.items()}
    scales = {
        name: (np.maximum(x, floors[name]) * np.float32(_ROOM / 127)).astype(np.float32)
        for name, x in largest.items()
    }
    placed = in_place(model, scales=scales)
    if isinstance(placed, Miss):
        raise GraphgenError(f"{who}: the cache cannot be in place: {placed.reason}; leave it out")
    if reason := lacks(placed, find_target("cpu")):
        raise GraphgenError(f"{who}: {reason}; upgrade onnxruntime, or leave it out")
    return placed


def _feeds(session: Session, tokens: Array, longest: int) -> Iterator[dict[str, Array]]:
    """Windows without a past, each at places of its own from 0 to `longest`."""

    def empty(kind: TensorType, rows: int) -> Array:
        return np.zeros(sized(kind, rows, 0), kind.dtype)

    last = max(longest - tokens.shape[1], 0)
    starts = np.linspace(0, last, len(tokens)).astype(np.int64)
    for at in range(0, len(tokens), _ROWS):
        rows = tokens[at : at + _ROWS]
        places = starts[at : at + _ROWS, None] + np.arange(rows.shape[1])
        known = {"input_ids": rows, MASK: np.ones_like(rows), "position_ids": places}
        feed = {
            n: x.astype(session.inputs[n].dtype) for n, x in known.items() if n in session.inputs
        }
        feed |= {n: empty(x, len(rows)) for n, x in session.inputs.items() if n.startswith(PAST)}
        yield feed


@contextmanager
def _opened(model: ir.Model) -> Iterator[Session]:
    with tempfile.TemporaryDirectory() as folder:
        yield Session(export(model, Path(folder) / "model.onnx"), provider="cpu")


@dataclass(frozen=True)
class CacheEffect:
    """What a cache of few bits changes, over tokens that are read one after another."""

    divergence: float  # mean Σ p log(p / q) of the next token, in nats, to the float cache
    same: float  # share of tokens with the same most likely next one
    tokens: int
    random: bool = False  # whether they were random

    def __str__(self) -> str:
        return (
            f"int8 cache: divergence {self.divergence:.2e} nats a token, the same next token in "
            f"{self.same:.1%} ({self.tokens:,}{', random inputs' * self.random})"
        )


def cache_effect(
    before: ModelLike, after: ModelLike, tokens: Array, *, random: bool = False
) -> CacheEffect:
    """Read windows (N, T) token by token with both caches, the first quarter at once."""
    found, same = list[Array](), list[Array]()
    prompt = max(tokens.shape[1] // 4, 1)
    for at in range(0, len(tokens), _ROWS):
        rows = tokens[at : at + _ROWS]
        decoders = [open_decoder(model, provider="cpu") for model in (before, after)]
        more = rows.shape[1] - prompt
        logits = [d.start(rows[:, :prompt].tolist(), more) for d in decoders]
        for step in range(prompt, rows.shape[1] + 1):
            found.append(divergence(*logits))
            same.append(logits[0].argmax(-1) == logits[1].argmax(-1))
            if step < rows.shape[1]:
                logits = [d.step(rows[:, step]) for d in decoders]
    every = np.concatenate(found)
    return CacheEffect(float(every.mean()), float(np.concatenate(same).mean()), every.size, random)
