"""Attention by locality-sensitive hashing: keys are looked for among those of the same hash."""

from typing import Any

import numpy as np

from graphgen.errors import GraphgenError, positive
from graphgen.op import Array, Operand
from graphgen.ops.attention import merge_heads, split_heads
from graphgen.ops.attention_layout import lowest_of
from graphgen.ops.blocks import join, pad_to, padding_mask, partial_attention, trimmed
from graphgen.ops.elementwise import abs, div, equal, logical_and, neg, sqrt, where
from graphgen.ops.layout import (
    arange,
    concat,
    dim,
    expand,
    gather,
    gather_elements,
    numpy_dtype,
    reshape,
    scatter_elements,
    shape,
    slice_,
    unsqueeze,
)
from graphgen.ops.linalg import matmul
from graphgen.ops.padding import pad
from graphgen.ops.reduce import argmax, reduce_sum, top_k


def hashed_attention(
    q: Any,
    v: Any,
    mask: Any = None,
    *,
    num_heads: int,
    buckets: int,
    chunk: int,
    rounds: int = 1,
    seed: int = 0,
    is_causal: int = 0,
    scale: float | None = None,
) -> Operand:
    """Attention of each query to the keys in its bucket (Reformer, arXiv 2001.04451).

    Q and V are (B, n, H·D); the keys are Q / ‖Q‖ (shared QK). A round hashes x to the largest of
    [x R; -x R], with R of `hash_rotations`, sorts the positions by bucket, cuts them into chunks,
    and lets each query attend to the keys of its bucket in its chunk and the one before; if causal,
    to those before it. Rounds are joined by their sums, and each leaves out what an earlier one has
    seen, so that a key counts once: Q attends to the union of what its rounds see. A position sees
    itself only where it sees nothing else. The cost is n · 2 chunk · rounds products.

    `mask`, bool (B, n), is for padding: what is False sees nothing, and nothing sees it.
    """
    who = "hashed_attention"
    positive(who, num_heads=num_heads, buckets=buckets, chunk=chunk, rounds=rounds)
    if buckets % 2:
        raise GraphgenError(
            f"{who}: buckets is {buckets}; it must be even: half of them are the negatives of the "
            "other half"
        )
    keep, b, given = padding_mask(who, q, q, mask), dim(q, 0), q
    q, v = (split_heads(pad_to(x, chunk), num_heads) for x in (q, v))  # (B, H, n, D)
    n = dim(q, 2)
    keep = expand(unsqueeze(pad_to(keep, chunk), [1]), [1, num_heads, 1])
    keep = reshape(keep, [-1, n])  # (G, n), each head of each row a group
    q, v = (reshape(x, [-1, n, x.shape[3]]) for x in (q, v))  # (G, n, D)
    base = unsqueeze(arange(dim(q, 0)) * n, [1])  # where each group begins in the rows of all

    def at(x: Operand, places: Operand) -> Operand:
        """(G, n, F) at these places, (G, n), of its group."""
        return gather(reshape(x, [-1, x.shape[2]]), places + base)

    def chunked(x: Operand) -> Operand:
        """(G, n, ...) to (G, C, c, ...)."""
        return reshape(x, [dim(x, 0), -1, chunk, *x.shape[2:]])

    slots = np.arange(2 * chunk) - chunk - np.arange(chunk)[:, None]  # sorted by bucket and place
    near = slots < 0 if is_causal else slots != 0
    parts, cells = list[Any](), list[Any]()
    for rotation in hash_rotations(q.shape[2], buckets=buckets, rounds=rounds, seed=seed):
        x = matmul(q, rotation.astype(numpy_dtype(q)))
        bucket = argmax(concat(x, neg(x), axis=-1), axis=-1, keepdims=0) + 1
        bucket = where(keep, bucket, 0)  # (G, n)
        size = np.array([n]) if isinstance(n, int) else n
        code, order = top_k(bucket * n + arange(n), size, largest=0)
        place = scatter_elements(order, order, expand(arange(n), shape(order)), axis=1)
        queries, values = (chunked(at(x, order)) for x in (q, v))
        keys = queries / sqrt(reduce_sum(queries * queries, [-1]) + _TINY)
        there = chunked(div(code, n))  # the buckets, in order
        here = where(there > 0, there, -1)
        see = equal(unsqueeze(here, [3]), unsqueeze(_looking_back(there), [2]))
        see = logical_and(see, near)  # (G, C, c, 2c)
        for cell in cells:
            there = chunked(gather_elements(cell, order, axis=1))
            see = logical_and(see, _apart(there, _looking_back(there)))
        back = [_looking_back(x) for x in (keys, values)]
        y, total = partial_attention(queries, *back, see, scale)
        parts.append([at(reshape(x, [dim(q, 0), n, x.shape[3]]), place) for x in (y, total)])
        # Chunks are as many as n / chunk, so cells of two buckets are never beside each other.
        cells.append(bucket * (div(n, chunk) + 2) + div(place, chunk))
    y, total = join(parts)
    alone = where(unsqueeze(keep, [2]), v, 0.0)
    y = where(total > lowest_of(y) / 2, y, alone)  # (G, n, D)
    y = merge_heads(reshape(y, [b, num_heads, n, y.shape[2]]))
    return trimmed(y, given)


_TINY = 1e-30


def hash_rotations(features: int, *, buckets: int, rounds: int, seed: int) -> Array:
    """R of each round, (rounds, D, buckets / 2), normal numbers; all heads share them."""
    shape = (rounds, features, buckets // 2)
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _looking_back(x: Operand) -> Operand:
    """(G, C, c, ...) to (G, C, 2c, ...): each chunk behind the one before it, zeros at first."""
    before = slice_(pad(x, [1, 0], None, [1]), [0], [-1], [1])
    return concat(before, x, axis=2)


def _apart(there: Operand, back: Operand) -> Operand:
    """Whether a pair did not meet: of cells of one bucket, the key's is not this nor the last."""
    difference = unsqueeze(there, [3]) - unsqueeze(back, [2])
    return abs(difference * 2 - 1) > 1
