"""How the next token is chosen from logits: penalties, draws, and the best of many."""

import itertools
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
    sources: Sequence[Sequence[int]] = (),
) -> Array:
    """The scores (R, vocabulary) of what may come after these tokens, `step` of them new.

    The first token that is not forced is that of step `free`. Of each row, only those tokens may
    come that are True in `allowed`; those beyond it may not. In the end, `marks` changes the scores
    of each row, given its number. The rows are read only if penalties or least lengths need them.
    `sources` are what an encoder read, or the prompts.

    Raises GraphgenError if no token may come next.
    """
    read = _reads_tokens(options)
    never = [*options.suppress_tokens, *(options.begin_suppress_tokens if step == free else ())]
    if forced or read or never or allowed or marks:
        scores = scores.copy()
    whole = [*rows] if read else []
    rows_of: Iterable[Any] = itertools.zip_longest(scores, whole, sources, fillvalue=[])
    for row, tokens, source in () if forced or not read else rows_of:
        _weigh(row, tokens, source, options, step)
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


def _reads_tokens(options: Options) -> bool:
    """Whether the scores depend on the tokens before."""
    return bool(
        options.no_repeat_ngram_size
        or options.encoder_no_repeat_ngram_size
        or options.min_new_tokens
        or options.min_length
        or options.repetition_penalty != 1.0
        or options.encoder_repetition_penalty != 1.0
        or options.exponential_decay_length_penalty is not None
        or options.bad_words
        or options.sequence_bias
        or options.remove_invalid_values
        or options.logits_processors
    )


def _weigh(
    row: Array, tokens: Sequence[int], source: Sequence[int], options: Options, step: int
) -> None:
    """Change the scores of one row by what was read and written, in the order of transformers."""
    for text, bias in {tuple(word): bias for word, bias in options.sequence_bias}.items():
        if _ends(tokens, text[:-1]):
            row[text[-1]] += bias
    _penalize(row, source, 1 / options.encoder_repetition_penalty)
    _penalize(row, tokens, options.repetition_penalty)
    _forbid(row, tokens, tokens, options.no_repeat_ngram_size)
    _forbid(row, source, tokens, options.encoder_no_repeat_ngram_size)
    for word in options.bad_words:
        if _ends(tokens, word[:-1]):
            row[word[-1]] = -np.inf
    if step < options.min_new_tokens or len(tokens) < options.min_length:
        row[list(options.ends)] = -np.inf
    if options.remove_invalid_values:
        np.nan_to_num(row, copy=False)
    decay = options.exponential_decay_length_penalty
    if decay is not None and step > decay[0]:
        ends = row[list(options.eos)]
        usual = abs(ends) < np.finfo(row.dtype).max  # that is what stands for infinity above
        more = np.where(usual, abs(ends), 0) * (decay[1] ** (step - decay[0]) - 1)
        row[list(options.eos)] = ends + more


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


def _ends(tokens: Sequence[int], last: Sequence[int]) -> bool:
    return not last or [*tokens[-len(last) :]] == [*last]


def _penalize(row: Array, tokens: Sequence[int], penalty: float) -> None:
    """Make these tokens less likely, by a penalty above 1."""
    if penalty != 1.0 and len(tokens):
        seen = np.unique(tokens)
        row[seen] = np.where(row[seen] < 0, row[seen] * penalty, row[seen] / penalty)


def _forbid(row: Array, source: Sequence[int], tokens: Sequence[int], n: int) -> None:
    """Forbid what would end n tokens that stand in the source."""
    if n:
        last = [*tokens[len(tokens) - n + 1 :]]
        for i in range(len(source) - n + 1):
            if [*source[i : i + n - 1]] == last:
                row[source[i + n - 1]] = -np.inf


def draw(scores: Array, options: Options, random: np.random.Generator) -> int:
    """A token from the softmax of scores / temperature, without those that are too unlikely."""
    order = np.argsort(-scores, kind="stable")
    until = np.cumsum(chances(scores[order], options))
    return int(order[np.searchsorted(until, random.random() * until[-1], side="right")])


def chances(scores: Array, options: Options) -> Array:
    """How likely each of the tokens is drawn, up to a factor; the first one has the largest score.

    What is left out, and in which order, is as in transformers: top-h (arXiv 2509.02510), top-k,
    top-p (arXiv 1904.09751), min-p, typical (arXiv 2202.00666), and epsilon and eta (arXiv
    2210.15191).
    """
    temperature = min(max(options.temperature, 1e-200), 1e200)  # -inf / inf would be NaN
    scores = (scores.astype(np.float64) - scores[0]) / temperature
    found = np.exp(scores)
    if options.top_h is not None:
        first = found[:100] / found[:100].sum()
        entropy = np.cumsum(_surprise(first) * first)
        found[:100][entropy > options.top_h * entropy[-1]] = 0
        found[100:] = 0
        found[0] = 1
    if 0 < options.top_k < len(scores):
        found[scores < scores[options.top_k - 1]] = 0
    found /= found.sum()
    if options.top_p < 1:
        found[np.cumsum(found) - found >= options.top_p] = 0
    found[found < options.min_p * found[0]] = 0
    if options.typical_p < 1:
        found /= found.sum()
        surprise = _surprise(found)
        far = np.where(found > 0, abs(surprise - (surprise * found).sum()), np.inf)
        near = np.argsort(far, kind="stable")
        last = (np.cumsum(found[near]) < options.typical_p).sum()
        found[far > far[near[min(last, len(near) - 1)]]] = 0
    for cutoff, by_entropy in ((options.epsilon_cutoff, False), (options.eta_cutoff, True)):
        if 0 < cutoff < 1:
            found /= found.sum()
            entropy = (_surprise(found) * found).sum()
            least = min(cutoff, math.sqrt(cutoff) * math.exp(-entropy)) if by_entropy else cutoff
            found[(found < least) & (found < found.max())] = 0
    return found


def _surprise(chances: Array) -> Array:
    """-log(p); 0 where p is 0."""
    return np.asarray(-np.log(np.where(chances > 0, chances, 1)))


def log_softmax(x: Array) -> Array:
    """log softmax(x) along the last axis."""
    x = x - x.max(-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))


def largest(x: Array, count: int) -> Array:
    """The indices of the largest elements, the largest first."""
    count = min(count, len(x))
    some = np.sort(np.argpartition(-x, count - 1)[:count])
    return np.asarray(some[np.argsort(-x[some], kind="stable")])
