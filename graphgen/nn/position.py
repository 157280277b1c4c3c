"""Positions: added to embeddings, to attention's scores, or turning queries and keys."""

import math

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.errors import GraphgenError, positive, user_line
from graphgen.nn.module import Module, Parameter, in_line, normal
from graphgen.operands import Array
from graphgen.value import Tensor


class SinusoidalPositions(Module):
    """x + PE (arXiv 1706.03762, 3.5), (B, T, features); any length, even beyond the trained one."""

    def __init__(self, features: int):
        positive("SinusoidalPositions", features=features)
        if features % 2:
            given = f"SinusoidalPositions(features={features})"
            raise GraphgenError(f"{given}: features must be even{user_line()}")
        self.features = features

    def __call__(self, x: Tensor) -> Tensor:
        self.expect_last(x, self.features, rank=3)
        positions = ops.cast_like(ops.arange(ops.dim(x, 1)), x)
        return x + ops.sinusoidal_positions(positions, features=self.features)


class LearnedPositions(Module):
    """x + table[0 ... T-1], (B, T, features).

    The table has `length` rows, so a position from `length` on was never learned and has no
    vector: build refuses a known length beyond it, and Gather an unknown one at run time.
    """

    def __init__(self, length: int, features: int):
        positive("LearnedPositions", length=length, features=features)
        self.length, self.features = length, features
        self.weight = Parameter((length, features), initialize=normal(0.02))

    def __call__(self, x: Tensor) -> Tensor:
        self.expect_last(x, self.features, rank=3)
        count = ops.dim(x, 1)
        if isinstance(count, int) and count > self.length:
            raise GraphgenError(
                f"{in_line(self)}: the sequence has {count} positions; position {self.length} was "
                "never learned, so it has no vector: use a longer table, or positions without one "
                f"(SinusoidalPositions, Rotary, AlibiBias, RelativeBias){user_line()}"
            )
        # ONNX Runtime turns a Gather by a plain Range into a Slice, and a Slice refuses nothing.
        rows = ops.unsqueeze(ops.arange(count), [0])  # (1, T)
        return x + ops.embedding(self.weight, rows)


class Rotary(Module):
    """factor · cos and factor · sin of position · frequency, (B, T) to (B, T, R/2) each.

    `Attention` turns pair i of a query's and a key's features by these angles, so that their
    product depends on the distance alone (RoFormer, arXiv 2104.09864, 3.2.2). A pair is i and
    i + R/2; the paper's neighbors are the same with the features in another order.

    Args:
        frequencies: float32 (R/2,), for the first R features of each head: `rotary_frequencies`.
        factor: What cosines and sines are multiplied by.
    """

    def __init__(self, frequencies: Array, *, factor: float = 1.0):
        self.frequencies, self.factor = frequencies, factor

    def __call__(self, position_ids: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """In the dtype of x; angles in float32: half precision cannot tell positions apart."""
        positions = ops.unsqueeze(ops.cast(position_ids, to=ir.DataType.FLOAT), [2])  # (B, T, 1)
        angles = positions * self.at(position_ids)  # (B, T, R/2)
        cos, sin = ops.cos(angles), ops.sin(angles)
        if self.factor != 1.0:
            cos, sin = cos * self.factor, sin * self.factor
        return ops.cast_like(cos, x), ops.cast_like(sin, x)

    def at(self, position_ids: Tensor) -> Tensor:
        """The frequencies for these positions, float32 (R/2,); subclasses may change them."""
        return self.frequencies


def rotary_frequencies(features: int, *, theta: float = 10000.0) -> Array:
    """θ^(-2i/R) for i from 0 to R/2 - 1 (arXiv 2104.09864, 3.2.2), float32; R features, even."""
    positive("Rotary", features=features)
    if features % 2:
        raise GraphgenError(
            f"Rotary: a head has {features} features; there must be an even number{user_line()}"
        )
    pairs = np.arange(0, features, 2, dtype=np.float32)
    return np.asarray(theta ** -(pairs / np.float32(features)), np.float32)


class AlibiBias(Module):
    """-m |i - j|, added to the scores of the query at i and the key at j (arXiv 2108.12409).

    Nothing is learned: head h of H, from 1 on, has the slope m = 2^(-8h/H), as in the paper's
    section 3. The code published with it has other slopes if H is not a power of two.
    """

    def __init__(self, num_heads: int):
        positive("AlibiBias", num_heads=num_heads)
        self.num_heads = num_heads
        heads = np.arange(1, num_heads + 1).reshape(1, -1, 1, 1)
        self.slopes = (2.0 ** (-8.0 * heads / num_heads)).astype(np.float32)

    def __call__(self, rows: Tensor, columns: Tensor) -> Tensor:
        """(1, H, T, S), float32, for queries at `rows`, (T), and keys at `columns`, (S)."""
        apart = ops.abs(_distances(rows, columns))
        return ops.unsqueeze(ops.cast(apart, to=ir.DataType.FLOAT), [0, 1]) * -self.slopes


class RelativeBias(Module):
    """A learned number for each head and range of distances, added to the scores (1910.10683, 2.1).

    Half of the buckets are for one distance each, and half for ranges that grow up to `furthest`;
    all distances beyond it share one. If keys may lie on both sides, each side has half of them.

    Args:
        num_heads: H, the heads of queries.
        count: How many buckets there are.
        furthest: All distances from here on are in one bucket.
        one_sided: Whether keys never lie ahead of their query, as in a decoder.
    """

    def __init__(
        self, num_heads: int, *, count: int = 32, furthest: int = 128, one_sided: bool = False
    ):
        positive("RelativeBias", num_heads=num_heads, count=count, furthest=furthest)
        side = count if one_sided else count // 2
        if not 0 < side // 2 < furthest:
            raise GraphgenError(
                f"RelativeBias(count={count}, furthest={furthest}): half of the {side} buckets of "
                f"a side, at least 1, must be fewer than the furthest distance{user_line()}"
            )
        self.num_heads, self.count, self.one_sided = num_heads, count, one_sided
        self.weight = Parameter((count, num_heads), initialize=normal(0.02))
        back = buckets(np.arange(furthest + 1), side, furthest)
        ahead = np.zeros(furthest, np.int64) if one_sided else side + back[1:]
        self.furthest, self.buckets = furthest, np.concatenate([back[::-1], ahead])

    def __call__(self, rows: Tensor, columns: Tensor) -> Tensor:
        """(1, H, T, S) for tokens at `rows`, (T), and `columns`, (S)."""
        distances = _distances(rows, columns)
        near = ops.minimum(ops.maximum(distances, -self.furthest), self.furthest)
        table = ops.embedding(self.weight, self.buckets)  # (2 F + 1, H)
        bias = ops.embedding(table, near + self.furthest)  # (T, S, H)
        return ops.unsqueeze(ops.transpose(bias, perm=[2, 0, 1]), [0])


def buckets(distances: Array, count: int, furthest: int) -> Array:
    """The bucket, of `count`, of each distance ≥ 0; in float32, as for the published weights."""
    exact = count // 2
    ratio = np.log(np.maximum(distances, 1).astype(np.float32) / np.float32(exact))
    steps = ratio / np.float32(math.log(furthest / exact)) * np.float32(count - exact)
    far = np.minimum(exact + steps.astype(np.int64), count - 1)
    return np.where(distances < exact, distances, far).astype(np.int64)


def _distances(rows: Tensor, columns: Tensor) -> Tensor:
    """Column minus row, (T, S)."""
    return ops.unsqueeze(columns, [0]) - ops.unsqueeze(rows, [1])
