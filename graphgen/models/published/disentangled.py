"""Attention to what tokens are and, apart from that, to how far apart they are (DeBERTa)."""

import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from graphgen import nn, ops
from graphgen.nn.module import Parameter, zeros
from graphgen.operands import Array
from graphgen.ops.layout import lowest_of
from graphgen.value import Tensor

_FURTHEST = 1 << 16


class Distances(nn.Module):
    """A vector for each range of distances, and which one a query and a key have.

    There are 2 span vectors, (2 span, D): number span + d is for a query d tokens behind its key,
    with d from -span to span - 1, and all that are further share the last. With `buckets` (arXiv
    2111.09543), span is that many, and from half of it on, ranges grow up to `furthest`.
    """

    def __init__(
        self,
        features: int,
        *,
        furthest: int,
        buckets: int | None = None,
        norm: Callable[[int], nn.Module] | None = None,
    ):
        span = furthest if buckets is None else buckets
        self.table = nn.Embedding(2 * span, features)
        self.norm = None if norm is None else norm(features)
        steps = np.arange(_FURTHEST)
        ranges = steps if buckets is None else log_buckets(steps, buckets, furthest)
        self.limit = int(np.argmax(ranges >= span)) or _FURTHEST - 1
        ranges = ranges[: self.limit + 1]
        rows = np.concatenate([-ranges[:0:-1], ranges]) + span
        self.rows = np.clip(rows, 0, 2 * span - 1)  # of distances from -limit to limit

    def __call__(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors, (1, 2 span, D), and their numbers, (T, T), of tokens at `places`, (T)."""
        vectors = ops.unsqueeze(self.table.weight, [0])
        apart = ops.unsqueeze(places, [1]) - ops.unsqueeze(places, [0])
        near = ops.minimum(ops.maximum(apart, -self.limit), self.limit) + self.limit
        return vectors if self.norm is None else self.norm(vectors), ops.embedding(self.rows, near)


def log_buckets(steps: Array, count: int, furthest: int) -> Array:
    """The range of each number of steps ≥ 0; in float32, as for the published weights."""
    half = count // 2
    ratio = np.log(np.maximum(steps, 1).astype(np.float32) / np.float32(half))
    scale = np.log(np.float32((furthest - 1) / half))
    far = np.ceil(ratio / scale * np.float32(half - 1)).astype(np.int64) + half
    return np.where(steps <= half, steps, far)


class DisentangledAttention(nn.Attention):
    """softmax((q kᵀ + c2p + p2c) / √(terms · head)) v (arXiv 2006.03654, 3.1).

    c2p are the products of each query with the key of the vector of its distance to each key, and
    p2c those of each key with the query of that vector. The `mask`, (B, T), is bool.

    Args:
        features: D.
        num_heads: H.
        terms: Which of c2p and p2c there are.
        vectors: Whether there are vectors of distances; if not, terms only divide the scores.
        shared: Whether keys and queries of these vectors are made with the weights of tokens.
        separate: Whether biases of queries and values are weights of their own, and keys have none.
    """

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        terms: Collection[str],
        vectors: bool,
        shared: bool,
        separate: bool,
    ):
        self.terms = terms if vectors else ()
        scale = 1.0 / math.sqrt(features // num_heads * (1 + len(terms)))
        super().__init__(
            features, num_heads=num_heads, scale=scale, bias=not separate, output_bias=True
        )
        self.query_bias, self.value_bias = (
            Parameter((features,), initialize=zeros) if separate else None for _ in range(2)
        )
        self.distance_key: nn.Linear | None = None
        self.distance_query: nn.Linear | None = None
        if "c2p" in self.terms:
            own = None if shared else nn.Linear(features, features, bias=not separate)
            self.distance_key = own or self.key
        if "p2c" in self.terms:
            own = None if shared else nn.Linear(features, features)
            self.distance_query = own or self.query

    def __call__(  # type: ignore[override]
        self,
        x: Tensor,
        *,
        mask: Tensor,
        distances: tuple[Tensor, Tensor] | None = None,
        rotary: None = None,
    ) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.query_bias is not None and self.value_bias is not None:
            q, v = q + self.query_bias, v + self.value_bias
        mask = ops.unsqueeze(mask, [1, 2])  # (B, 1, 1, T)
        bias = None if distances is None else self._scores(q, k, *distances)
        if bias is not None:
            mask = ops.where(mask, bias * self.scale, lowest_of(x))  # (B, H, T, T)
        given = (q, k, v, mask)
        options: dict[str, Any] = {"scale": self.scale}
        options |= {"q_num_heads": self.num_heads, "kv_num_heads": self.num_heads}
        if self.weights is None:
            return self.output(ops.attention(*given, **options))
        y, weights = ops.attention_with_weights(*given, **options)
        self.weights.append(weights)
        return self.output(y)

    def _scores(self, q: Tensor, k: Tensor, vectors: Tensor, rows: Tensor) -> Tensor | None:
        """c2p + p2c, (B, H, T, T)."""
        found: list[Tensor] = []
        for x, layer, turned in ((q, self.distance_key, False), (k, self.distance_query, True)):
            if layer is None:
                continue
            own, of_distances = (ops.split_heads(y, self.num_heads) for y in (x, layer(vectors)))
            products = ops.matmul(own, ops.swap_last(of_distances))  # (B, H, T, 2 span)
            numbers = ops.swap_last(rows) if turned else rows
            length = ops.dim(x, 1)
            numbers = ops.expand(numbers, [ops.dim(x, 0), self.num_heads, length, length])
            chosen = ops.gather_elements(products, numbers, axis=3)
            found.append(ops.swap_last(chosen) if turned else chosen)
        return sum(found[1:], found[0]) if found else None
