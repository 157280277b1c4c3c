"""Sequences in blocks, and softmaxes over parts of the keys: what sparse attention is made of."""

import math
from collections.abc import Iterator, Sequence
from functools import reduce

import numpy as np

from graphgen.errors import GraphgenError, user_line
from graphgen.infer import describe
from graphgen.ops.activation import softcap as capped
from graphgen.ops.elementwise import add, exp, log, logical_and, maximum, minimum, where
from graphgen.ops.layout import (
    _reshape,
    arange,
    dim,
    expand,
    gather,
    lowest_of,
    numpy_dtype,
    rank,
    reshape,
    slice_,
    squeeze,
    swap_last,
    transpose,
    unsqueeze,
)
from graphgen.ops.linalg import matmul
from graphgen.ops.padding import pad
from graphgen.ops.reduce import reduce_max, reduce_sum
from graphgen.record import current_tape
from graphgen.value import Tensor, Value, sizes_of


def padding_mask(who: str, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """Which positions are keys, bool (B, n). Raises GraphgenError unless it is self-attention."""
    for x in (q, k):
        if rank(x) != 3:
            raise GraphgenError(
                f"{who}: an operand is {describe(x)}; it must be (B, n, heads·D){user_line()}"
            )
    sizes = [dim(x, 1) for x in (q, k)]
    if all(isinstance(n, int) for n in sizes) and sizes[0] != sizes[1]:
        raise GraphgenError(
            f"{who}: {sizes[0]} queries and {sizes[1]} keys; a pattern is for self-attention, "
            f"where they are as many: use ops.attention for others{user_line()}"
        )
    whole = [dim(q, 0), dim(q, 1)]
    if mask is None:
        return expand(as_value(np.array(True)), whole)
    if rank(mask) == 4 and (sizes_of(mask) or ())[1:3] == (1, 1):
        mask = squeeze(mask, [1, 2])
    if rank(mask) != 2 or numpy_dtype(mask) != np.bool_:
        raise GraphgenError(
            f"{who}: mask is {describe(mask)}; with a pattern it is for padding, bool (B, n)"
            f"{user_line()}"
        )
    return expand(mask, whole)


def as_value(x: Tensor) -> Tensor:
    """A constant inside a recording, so that results are computed at run time."""
    tape = current_tape()
    return x if tape is None else Value(tape.operand(x))


def pad_to(x: Tensor, block: int) -> Tensor:
    """(B, n, ...) padded with zeros at the end to a whole number of blocks, at least one."""
    n = dim(x, 1)
    number = np.maximum((n + (block - 1)) // block, 1)
    whole = number * block
    if isinstance(n, int) and whole == n:
        return x
    padded = pad(x, [0, whole - n], None, [1])
    # All sizes are given: after a Pad by numbers of the run, inference knows none.
    return _reshape(padded, [dim(x, 0), whole, *x.shape[2:]])


def to_blocks(x: Tensor, block: int) -> Tensor:
    """(B, n, ...) to (B, N, b, ...), with zeros at the end."""
    x = pad_to(x, block)
    return reshape(x, [dim(x, 0), -1, block, *x.shape[2:]])


def from_blocks(y: Tensor, q: Tensor, *, checked: bool = False) -> Tensor:
    """(B, N, b, F) to Q's (B, n, F); if checked, it fails if there are fewer."""
    return trimmed(reshape(y, [dim(q, 0), -1, y.shape[3]]), q, checked=checked)


def trimmed(y: Tensor, q: Tensor, *, checked: bool = False) -> Tensor:
    """The first n of (B, ..., F), with n from Q, (B, n, ·); if checked, fewer are an error."""
    b, n = dim(q, 0), dim(q, 1)
    if isinstance(n, int):
        return y if (sizes_of(y) or ())[1] == n else slice_(y, [0], [n], [1])
    features = y.shape[2]
    # A Slice refuses nothing, and the runtime turns a Gather by a plain Range into one.
    rows = unsqueeze(arange(n), [0])
    y = gather(y, rows, axis=1) if checked else slice_(y, [0], n, [1])
    # All sizes given: Q's, not what a Slice leaves; they may be 0, which is not one to keep.
    return _reshape(y, [b, n, features], allowzero=1)


def rows_of(x: Tensor) -> Tensor:
    """(B, N, b, F) to (B·N, b, F)."""
    return reshape(x, [-1, dim(x, 2), x.shape[3]])


def swap_axes(x: Tensor) -> Tensor:
    """Axes 1 and 2 exchanged."""
    return transpose(x, perm=[0, 2, 1, *range(3, rank(x))])


def keys_of(
    k: Tensor, v: Tensor, keep: Tensor, index: Tensor, near: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The keys and values in the blocks at index, (B·N, m·b, F), and their mask, (B·N, 1, b, m·b).

    Args:
        k: Blocks of keys, (B, N, b, F).
        v: Blocks of values.
        keep: Which of them are keys, bool (B, N, b).
        index: Blocks that each block of queries sees, (N, m); below 0 or from N on there is none.
        near: Which of their keys, bool, broadcast to (N, b, m·b).
    """
    count, size = dim(k, 1), dim(k, 2) * index.shape[1]
    inside = minimum(maximum(index, 0), count - 1)
    k, v = (reshape(gather(x, inside, axis=1), [-1, size, x.shape[3]]) for x in (k, v))
    beside = minimum(maximum(index + 1, 0), count + 1)  # an empty block at each end
    keep = gather(pad(keep, [1, 1], None, [1]), beside, axis=1)  # (B, N, m, b)
    keep = reshape(keep, [dim(keep, 0), dim(keep, 1), 1, size])
    mask = logical_and(keep, near)  # (B, N, 1 or b, m·b)
    return k, v, reshape(mask, [-1, 1, dim(mask, 2), size])


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float | None, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """softmax(Q Kᵀ · scale) V over some of the keys, and log Σ exp of their scores for `join`.

    Q is (G, H, t, D), K and V (G, H, s, D); `keep` broadcasts to (G, H, t, s). A query with no key
    has a mean of V, and a sum below half of the lowest number.
    """
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = matmul(q * scale, swap_last(k))
    scores = capped(scores, softcap) if softcap else scores
    scores = where(keep, scores, lowest_of(scores))
    most = reduce_max(scores, [-1])
    weights = exp(scores - most)  # one pass for both results: ReduceLogSumExp costs four of Exp
    total = reduce_sum(weights, [-1])
    return matmul(weights, v) / total, most + log(total)


def join(parts: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention to all keys from results and log Σ exp over parts of them that share none.

    The second result is whether there was a key at all.
    """
    most = reduce(maximum, (total for _, total in parts))
    some = most > lowest_of(most) / 2
    if len(parts) == 1:
        return parts[0][0], some
    weights = [exp(total - most) for _, total in parts]
    weighted: Iterator[Tensor] = (y * w for (y, _), w in zip(parts, weights, strict=True))
    return reduce(add, weighted) / reduce(add, weights), some
