"""How the next token is chosen from logits: penalties, draws, and the best of many."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.generation.options import Options
from graphgen.operands import Array


def processed(
    scores: Array,
    rows: Iterable[Sequence[int]],
    options: Options,
    *,
    step: int,
    free: int = 0,
    forced: Sequence[int] = (),
    allowed: Sequence[Array] | None = None,
    marks: Callable[[int, Array], None] | None = None,
) -> Array:
    """The scores (R, vocabulary) of what may come after these tokens, `step` of them new.

    The first token that is not forced is that of step `free`. Of each row, only those tokens may
    come that are True in `allowed`; those beyond it may not. In the end, `marks` changes the scores
    of each row, given its number. The rows are read only if penalties or least lengths need them.

    Raises GraphgenError if no token may come next.
    """
    read = bool(options.no_repeat_ngram_size or options.min_new_tokens or options.min_length)
    read = read or options.repetition_penalty != 1.0
    read = read or bool(options.bad_words or options.logits_processors)
    never = [*options.suppress_tokens, *(options.begin_suppress_tokens if step == free else ())]
    if forced or read or never or allowed or marks:
        scores = scores.copy()
    whole = [*rows] if read else []
    for row, tokens in () if forced else zip(scores, whole, strict=False):
        if (penalty := options.repetition_penalty) != 1.0:
            seen = np.unique(tokens)
            row[seen] = np.where(row[seen] < 0, row[seen] * penalty, row[seen] / penalty)
        if n := options.no_repeat_ngram_size:
            last = tokens[len(tokens) - n + 1 :]
            for i in range(len(tokens) - n + 1):
                if tokens[i : i + n - 1] == last:
                    row[tokens[i + n - 1]] = -np.inf
        for word in options.bad_words:
            first = word[:-1]
            if not first or tokens[-len(first) :] == first:
                row[word[-1]] = -np.inf
        if step < options.min_new_tokens or len(tokens) < options.min_length:
            row[list(options.ends)] = -np.inf
    if forced:
        scores[:], scores[:, forced] = -np.inf, 0
    if never:
        scores[:, never] = -np.inf
    for row, tokens in zip(scores, whole, strict=False):
        for processor in options.logits_processors:
            row[:] = _as_logits(processor(tokens, row.copy()), row, processor)
    for row, may in () if forced or not allowed else zip(scores, allowed, strict=True):
        row[: len(may)][~may[: len(row)]] = -np.inf
        row[len(may) :] = -np.inf
    if marks is not None:
        for number, row in enumerate(scores):
            marks(number, row)
    highest = zip(scores, scores.argmax(axis=-1).tolist(), strict=True)  # the first NaN, if any
    if not all(math.isfinite(row[token]) for row, token in highest):
        raise GraphgenError(
            "generate: no token may come next, or the logits are not finite; suppress fewer tokens"
            f"{' or change the grammar' * bool(allowed)}"
        )
    return log_softmax(scores) if options.renormalize_logits else scores


def _as_logits(found: Any, row: Array, processor: Any) -> Array:
    """What a processor returned. Raises GraphgenError unless it is as many logits."""
    given = np.asarray(found)
    if given.shape != row.shape or given.dtype.kind not in "fiu" or np.isnan(given).any():
        name = getattr(processor, "__name__", type(processor).__name__)
        what = f"{given.dtype} of shape {given.shape}"
        what = f"{what}, with NaN" if given.dtype.kind == "f" and np.isnan(given).any() else what
        raise GraphgenError(
            f"generate: the logits processor {name} returned {what}; return {row.shape[0]} logits, "
            "-inf for a token that may not come next"
        )
    return given


def draw(scores: Array, options: Options, random: np.random.Generator) -> int:
    """A token from the softmax of scores / temperature, without those that are too unlikely."""
    scores = scores.astype(np.float64) - scores.max()
    scores /= max(options.temperature, 1e-200)
    if 0 < options.top_k < len(scores):
        scores[scores < np.partition(scores, -options.top_k)[-options.top_k]] = -np.inf
    order = np.argsort(-scores, kind="stable")
    chances = np.exp(scores[order] - scores[order[0]])
    chances /= chances.sum()
    if options.top_p < 1:
        chances[np.cumsum(chances) - chances >= options.top_p] = 0
    chances[chances < options.min_p * chances[0]] = 0
    until = np.cumsum(chances)
    return int(order[np.searchsorted(until, random.random() * until[-1], side="right")])


def log_softmax(x: Array) -> Array:
    """log softmax(x) along the last axis."""
    x = x - x.max(-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))


def largest(x: Array, count: int) -> Array:
    """The indices of the largest elements, the largest first."""
    count = min(count, len(x))
    some = np.sort(np.argpartition(-x, count - 1)[:count])
    return np.asarray(some[np.argsort(-x[some], kind="stable")])
