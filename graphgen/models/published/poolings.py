"""From the vectors of tokens, (B, T, D), and their mask, (B, T), to one of the text, (B, D)."""

import math
from collections.abc import Callable

import onnx_ir as ir

from graphgen import ops
from graphgen.value import Tensor


def first(x: Tensor) -> Tensor:
    """The vector of the first place, a token or not."""
    return ops.squeeze(ops.slice_(x, [0], [1], [1]), [1])


def mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean of the vectors of tokens."""
    return _sum(x, _shares(ops.cast_like(mask, x)))


def _sqrt(x: Tensor, mask: Tensor) -> Tensor:
    """Their sum, divided by the root of their number."""
    kept = ops.cast_like(mask, x)
    return _sum(x, kept / ops.sqrt(ops.maximum(ops.reduce_sum(kept, axis=1), 1.0)))


def _weighted(x: Tensor, mask: Tensor) -> Tensor:
    """Their mean, where the n-th place from the first token on counts n times (2202.08904, 3)."""
    # Counted in float32: half precision has no large integers.
    ranks = _places(mask) - _first(mask) + 1
    weights = ops.cast(ranks * mask, to=ir.DataType.FLOAT)
    return _sum(x, ops.cast_like(_shares(weights), x))


def _max(x: Tensor, mask: Tensor) -> Tensor:
    kept = ops.unsqueeze(ops.cast(mask, to=ir.DataType.BOOL), [2])  # (B, T, 1)
    return ops.reduce_max(ops.where(kept, x, -math.inf), axis=1, keepdims=False)


def _shares(weights: Tensor) -> Tensor:
    # Divided before they are added up, for half precision.
    return weights / ops.maximum(ops.reduce_sum(weights, axis=1), 1.0)


def _sum(x: Tensor, weights: Tensor) -> Tensor:
    return ops.squeeze(ops.matmul(ops.unsqueeze(weights, [1]), x), [1])


def _places(mask: Tensor) -> Tensor:
    return ops.unsqueeze(ops.arange(ops.dim(mask, 1)), [0])  # (1, T)


def _first(mask: Tensor) -> Tensor:
    """The place of the first token, (B, 1)."""
    length = ops.dim(mask, 1)
    return length - ops.reduce_max((length - _places(mask)) * mask, axis=1)


def _last(mask: Tensor) -> Tensor:
    """The place of the last token, (B, 1)."""
    return ops.reduce_max(_places(mask) * mask, axis=1)


def at(x: Tensor, place: Tensor) -> Tensor:
    """The vectors at a place of each row, (B, 1)."""
    place = ops.expand(ops.unsqueeze(place, [2]), [1, 1, ops.dim(x, 2)])  # (B, 1, D)
    return ops.squeeze(ops.gather_elements(x, place, axis=1), [1])


def last(x: Tensor, mask: Tensor) -> Tensor:
    """The vector of the last token."""
    return at(x, _last(mask))


POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": lambda x, mask: at(x, _first(mask)),
    "max": _max,
    "mean": mean,
    "mean_sqrt_len_tokens": _sqrt,
    "weightedmean": _weighted,
    "lasttoken": last,
}
"""The ways by the names of sentence-transformers."""
