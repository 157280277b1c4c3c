"""Attention by locality-sensitive hashing: each query looks only at keys of the same hash."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphgen.errors import GraphgenError, positive, user_line
from graphgen.operands import Array
from graphgen.ops.attention import merge_heads, split_heads
from graphgen.ops.attention_blocks import join, pad_to, padding_mask, partial_attention, trimmed
from graphgen.ops.elementwise import (
    div,
    equal,
    logical_and,
    logical_not,
    logical_or,
    neg,
    sqrt,
    where,
)
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
from graphgen.value import Tensor


def hashed_attention(
    q: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    num_heads: int,
    buckets: int | Sequence[int],
    chunk: int,
    rounds: int = 1,
    seed: int = 0,
    is_causal: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Attention of each query to the keys in its bucket (Reformer, arXiv 2001.04451).

    Q and V are (B, n, H·D); the keys are Q / ‖Q‖ (shared QK). A round hashes x to the largest of
    [x R; -x R], with R of `hash_rotations`, sorts the positions by bucket, cuts them into chunks,
    and lets each query attend to the keys of its bucket in its chunk and the one before; if causal,
    to those before it. Rounds are joined by their sums, and each leaves out what an earlier one has
    seen, so a key counts once: Q attends to the union of what its rounds see. A position sees
    itself only if it sees nothing else. The cost is n · 2 chunk · rounds products, and n · Σ
    buckets / 2 for the hashes: with several numbers of buckets, each gets its own hash, and
    together they distinguish their product.

    `mask`, bool (B, n), is for padding: a position that is False sees nothing and is not seen.
    """
    who = "hashed_attention"
    factors: list[Any] = [*buckets] if isinstance(buckets, (list, tuple)) else [buckets]
    positive(who, num_heads=num_heads, chunk=chunk, rounds=rounds)
    for factor in factors or [0]:
        positive(who, buckets=factor)
        if factor % 2:
            raise GraphgenError(
                f"{who}: buckets is {buckets}; it must be even: half of them are the negatives of "
                f"the other half{user_line()}"
            )
    keep, b, given = padding_mask(who, q, q, mask), dim(q, 0), q
    q, v = (split_heads(pad_to(x, chunk), num_heads) for x in (q, v))  # (B, H, n, D)
    n = dim(q, 2)
    q, v = (reshape(x, [-1, n, x.shape[3]]) for x in (q, v))  # (G, n, D), a group for each head
    k = q / sqrt(reduce_sum(q * q, [-1]) + _TINY)
    keep = expand(unsqueeze(pad_to(keep, chunk), [1]), [1, num_heads, 1])
    keep = reshape(keep, [-1, n])
    base = unsqueeze(arange(dim(q, 0)) * n, [1, 2])  # where each group begins in the rows of all

    def at(x: Tensor, places: Tensor) -> Tensor:
        """(G, n, F) at these places of its group, (G, C, c)."""
        return gather(reshape(x, [-1, x.shape[2]]), places + base)

    def chunked(x: Tensor) -> Tensor:
        """(G, n) to (G, C, c)."""
        return reshape(x, [-1, div(n, chunk), chunk])

    slots = np.arange(2 * chunk) - chunk - np.arange(chunk)[:, None]  # by bucket and place
    near = slots < 0 if is_causal else slots != 0
    parts, cells = list[Any](), list[Any]()
    for rotation in hash_rotations(q.shape[2], buckets=factors, rounds=rounds, seed=seed):
        bucket: Any = 0
        for factor, r in zip(factors, rotation, strict=True):
            x = matmul(q, r.astype(numpy_dtype(q)))
            bucket = argmax(concat(x, neg(x), axis=-1), axis=-1, keepdims=0) + bucket * factor
        bucket = where(keep, bucket + 1, 0)  # (G, n)
        size = np.array([n]) if isinstance(n, int) else n
        code, order = top_k(bucket * n + arange(n), size, largest=0)
        place = scatter_elements(order, order, expand(arange(n), shape(order)), axis=1)
        there, here = chunked(div(code, n)), chunked(order)  # (G, C, c)
        see = _equal(where(there > 0, there, -1), _looking_back(there))
        see = logical_and(see, near)  # (G, C, c, 2c)
        for cell in cells:
            own = chunked(gather_elements(cell, order, axis=1))
            back = _looking_back(own)
            see = logical_and(
                see, logical_not(logical_or(_equal(own, back), _equal(own, back + 1)))
            )
        back = _looking_back(here)
        part = partial_attention(at(q, here), at(k, back), at(v, back), see, scale)
        parts.append([at(reshape(x, [-1, n, x.shape[3]]), unsqueeze(place, [2])) for x in part])
        # A bucket has fewer chunks than that: cells of two are never next to each other.
        cells.append(bucket * (div(n, chunk) + 2) + div(place, chunk))
    y, some = join(parts)  # (G, n, 1, D)
    y, some, alone = reshape(y, [-1, n, v.shape[2]]), reshape(some, [-1, n, 1]), v
    if mask is not None:
        alone = where(unsqueeze(keep, [2]), v, 0.0)
    y = reshape(where(some, y, alone), [b, num_heads, n, v.shape[2]])
    return trimmed(merge_heads(y), given)


_TINY = 1e-12


def hash_rotations(
    features: int, *, buckets: Sequence[int], rounds: int, seed: int
) -> list[list[Array]]:
    """R of each round and number of buckets, (D, buckets / 2), normal; all heads share them."""
    return [
        [
            np.random.default_rng([seed, r, i]).standard_normal((features, m // 2), np.float32)
            for i, m in enumerate(buckets)
        ]
        for r in range(rounds)
    ]


def _looking_back(x: Tensor) -> Tensor:
    """(G, C, c) to (G, C, 2c): each chunk after the one before it, zeros before the first."""
    before = slice_(pad(x, [1, 0], None, [1]), [0], [-1], [1])
    return concat(before, x, axis=2)


def _equal(rows: Tensor, columns: Tensor) -> Tensor:
    """(G, C, c) and (G, C, 2c) to bool (G, C, c, 2c)."""
    return equal(unsqueeze(rows, [3]), unsqueeze(columns, [2]))
