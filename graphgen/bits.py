"""Weights as small integers, in numpy: with a scale per row (int8), or one per block."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from graphgen.operands import Array

BlockSize: TypeAlias = Literal[16, 32, 64, 128, 256]
"""How many weights of a row share a scale and a zero point in blocks."""

Bits: TypeAlias = Literal[4, 8]
"""Of each integer in a block."""

KEPT = "graphgen.blocks"
"""Metadata of a tensor that was stored in few bits: a function that makes its `Blocks`, and whether
it is (N, K), as they are."""

STACKED = "graphgen.stacked"
"""Metadata of a tensor of several matrices that were stored in few bits: a function that makes the
`Blocks` of each, or None where matrices were joined that have blocks of several forms."""

_RATIOS = np.linspace(0.6, 1.1, 12, dtype=np.float32)
"""The shares of a block's range to try: below 1, its largest weights are clipped."""

_FINE = np.linspace(0.99, 1.15, 32, dtype=np.float32)
"""The same with eight bits, where clipping hardly pays."""

_LARGEST = np.array([127, 113, 101, 90, 80, 71, 64], np.float32)
"""The largest integers to try for a row of int8, until no neighbors are too large."""

_LEAST = np.finfo(np.float32).smallest_subnormal
"""The scale of a row that is so small that no scale as small as wanted is a float."""

_PAIR = np.float32(128)  # 255 · 128 < 2¹⁵, the sum of two neighbors that 16 bits can hold

_CHUNK, _LARGER = 1 << 15, 1 << 19  # weights at a time; the latter if columns wait for each other


@dataclass(frozen=True)
class Rows:
    """int8 (N, K) and a scale for each of N rows: w ≈ scale · q."""

    integers: Array
    scales: Array

    def dequantized(self, rows: slice = slice(None)) -> Array:
        """The weights that the integers stand for, (N, K), or some rows of them."""
        return self.integers[rows] * self.scales[rows, None]


@dataclass(frozen=True)
class Blocks:
    """(N, blocks, size · bits / 8) bytes, and for each block a scale and a zero point.

    As MatMulNBits reads them: of two neighbors of four bits, the first is in the low ones; the same
    is true of the zero points, (N, ⌈blocks · bits / 8⌉) bytes. w ≈ scale · (q - zero point), q from
    0 to 2^bits - 1. Beyond K, the last block is filled with its zero point.
    """

    integers: Array
    scales: Array
    zero_points: Array
    columns: int  # K
    bits: Bits = 4
    order: Array | None = None  # which column of w each of K is, if not the same
    shift: Array | None = None  # (N, blocks), added to each weight of a block
    rest: Array | None = None  # (N, blocks, size / 2) bytes: four more bits of each weight

    def dequantized(self, rows: slice = slice(None)) -> Array:
        """The weights that the integers stand for, (N, K), or some rows of them."""
        q, scales = unpacked(self.integers[rows], self.bits), self.scales[rows, :, None]
        zeros = unpacked(self.zero_points[rows], self.bits)[:, : scales.shape[1], None]
        steps = q.astype(np.float32) - zeros
        if self.rest is not None:
            steps += unpacked(self.rest[rows]) / np.float32(16) - np.float32(0.5)
        w = steps * scales
        w = w if self.shift is None else w + self.shift[rows, :, None]
        whole: Array = w.reshape(len(w), -1)[:, : self.columns]
        return whole if self.order is None else whole[:, np.argsort(self.order)]

    def part(self, rows: Any) -> "Blocks":
        """Some rows of w: of an index or a slice."""
        arrays = (self.integers[rows], self.scales[rows], self.zero_points[rows])
        shift, rest = (None if x is None else x[rows] for x in (self.shift, self.rest))
        return Blocks(*arrays, self.columns, self.bits, self.order, shift, rest)

    def divided(self, size: int, bits: Bits) -> "Blocks":
        """The same weights in blocks of `size`, a divisor of theirs and of K, with these bits."""
        q = unpacked(self.integers, self.bits).reshape(len(self.integers), -1)
        more, count = q.shape[1] // self.scales.shape[1] // size, self.columns // size
        zeros = unpacked(self.zero_points, self.bits)[:, : self.scales.shape[1]]
        scales, zeros = (np.repeat(x, more, axis=1)[:, :count] for x in (self.scales, zeros))
        integers = packed(q[:, : self.columns].reshape(len(q), count, size), bits)
        return Blocks(integers, scales, packed(zeros, bits), self.columns, bits)

    def finer(self, w: Array) -> "Blocks":
        """With four more bits of each weight of w, e from 0 to 15: q + (e - 8) / 16."""
        rest = np.empty((*self.integers.shape[:2], self.integers.shape[2] * 4 // self.bits), "u1")
        for part in chunks(w.shape):
            left = np.zeros((len(w[part]), rest[0].size * 2), np.float32)
            left[:, : self.columns] = w[part] - self.dequantized(part)
            scales = _not_zero(self.scales[part])[..., None]
            steps = np.rint(left.reshape(*scales.shape[:2], -1) / scales * np.float32(16)) + 8
            rest[part] = packed(np.clip(steps, 0, 15).astype(np.uint8), 4)
        return replace(self, rest=rest)


def layout_of(integers: Rows | Blocks, shared: bool) -> dict[str, Array]:
    """The arrays of the file, as the operators read them: (N, K) if a table is shared."""
    if isinstance(integers, Rows):
        q = integers.integers if shared else np.ascontiguousarray(integers.integers.T)
        return {"int8": q, "scale": integers.scales}
    zeros = integers.zero_points
    role = "int4" if integers.bits == 4 else "uint8"
    arrays = {role: integers.integers, "scale": integers.scales, "zero_point": zeros}
    further = {"shift": integers.shift, "rest": integers.rest}
    return arrays | {role: array for role, array in further.items() if array is not None}


def joined(parts: Sequence[Blocks], *, alternate: bool, minima: bool = False) -> Blocks | None:
    """The rows of several, one after the other, or one of each in turn.

    None if their blocks have several forms, columns in another order, or minima, unless these may
    be joined, too.
    """
    forms = {(p.columns, p.bits, p.integers.shape[1:], p.zero_points.shape[1:]) for p in parts}
    plain = all(p.order is p.rest is None for p in parts)
    shifted = {p.shift is not None for p in parts}
    if len(forms) != 1 or not plain or shifted not in ([{False}, {True}] if minima else [{False}]):
        return None

    def join(arrays: Sequence[Array]) -> Array:
        rows: Array = np.concatenate(arrays)
        if alternate:
            rows = np.stack(arrays, 1).reshape(rows.shape)
        return rows

    integers, scales, zeros = (
        join([getattr(p, name) for p in parts]) for name in ("integers", "scales", "zero_points")
    )
    shifts = [p.shift for p in parts if p.shift is not None]
    shift = join(shifts) if shifts else None
    return Blocks(integers, scales, zeros, parts[0].columns, parts[0].bits, shift=shift)


def to_rows(w: Array, squares: Array | None = None, *, full_range: bool = False) -> Rows:
    """w (N, K) as int8, q = round(w / scale), such that every processor sums the products right.

    Without an instruction for int8, x64 processors multiply the neighbors 2i and 2i + 1 along K by
    unsigned bytes and add the two products in 16 bits, where 32,767 is the most. So two neighbors
    that sum to more than ±128 (255 · 128 = 32,640) move toward 0, by a and b: together the excess,
    with the least h₁ a² + h₂ b². h is `squares` (K,), the mean squares of what w is multiplied by.
    The scale of a row is the one that leaves the least Σ h (w - scale q)², from max |w| / 127 to
    max |w| / 64, with which no two neighbors are too large.

    With `full_range`, neighbors do not move and the scale is max |w| / 127: closer to w, but wrong
    on those processors unless the runtime is set to use its slower, exact kernels.
    """
    integers, scales = np.empty(w.shape, np.int8), np.empty(len(w), np.float32)
    h = np.ones(w.shape[1], np.float32)
    if squares is not None and np.isfinite(squares).all() and squares.any():
        h = (squares / squares.max()).astype(np.float32)
    for part in chunks(w.shape):
        rows, q, s = w[part], integers[part], scales[part]
        widest = _not_zero(np.abs(rows).max(axis=1, initial=0))
        least, rest = np.full(len(rows), np.inf), np.arange(len(rows))
        for largest in _LARGEST:
            scale = np.maximum(widest[rest] / largest, _LEAST)
            exact = rows[rest] / scale[:, None]
            rounded = np.rint(exact)
            moved = np.zeros(len(rest), bool) if full_range else _fit_pairs(rounded, h)
            error = (np.square(exact - rounded) @ h) / largest**2
            better = error < least[rest]
            found = rest[better]
            q[found], s[found], least[found] = rounded[better], scale[better], error[better]
            rest = rest[moved]
    return Rows(integers, scales)


def _fit_pairs(q: Array, h: Array) -> Array:
    """Move neighbors of q (N, K) toward 0, in place, until they sum to ±128; say in which rows.

    Two that sum to more have the same sign, and each is larger than the excess.
    """
    first, second = q[:, :-1:2], q[:, 1::2]
    share = h[1::2] / _not_zero(h[:-1:2] + h[1::2])
    total = first + second
    row, pair = np.nonzero(np.abs(total) > _PAIR)
    excess = total[row, pair] - np.copysign(_PAIR, total[row, pair])
    less = np.rint(excess * share[pair])
    first[row, pair] -= less
    second[row, pair] -= excess - less
    return np.bincount(row, minlength=len(q)) > 0


def chunks(shape: tuple[int, ...], size: int = _CHUNK) -> Iterator[slice]:
    """All rows of a matrix, a few at a time, so that results stay in the cache."""
    step = max(1, size // max(shape[1], 1))
    return (slice(start, start + step) for start in range(0, shape[0], step))


def to_blocks(
    w: Array,
    moments: Array | None = None,
    *,
    bits: Bits = 4,
    block_size: int = 32,
    symmetric: bool = False,
    search: bool = True,
) -> Blocks:
    """w (N, K) in blocks of integers, whose scales and zero points have the least squared error.

    That is Σ (w - s (q - z))² over a block. For given q and z the best scale is s = Σ w u / Σ u²,
    u = q - z, and the sum it leaves is Σ w² - (Σ w u)² / Σ u²: the candidate with the largest
    second term is kept. Candidates are ranges from 0.6 to 1.1 of the block's own, so that a few
    large weights may be clipped, and the neighbors of the best one; with eight bits, from 0.99 to
    1.15, of which one or the other is close to all weights of a small block.
    With `moments`, Σ x xᵀ (K, K) of what w is multiplied by, later columns make up for what
    rounding a column loses, as in GPTQ (arXiv 2210.17323): that minimizes the error of x Wᵀ.
    With `symmetric`, all zero points are 2^(bits - 1), the operator's default, and scales may be
    negative. With `search=False`, only the block's own range is used, rounded to nearest.
    """
    rows, columns = w.shape
    blocks = -(-columns // block_size)
    integers = np.empty((rows, blocks, block_size * bits // 8), np.uint8)
    scales = np.empty((rows, blocks), np.float32)
    zeros = np.empty((rows, blocks), np.uint8)
    whole, top = blocks * block_size, 2**bits - 1
    factor = None if moments is None else _factor(moments, whole)

    def grid(block: Array, h: Array) -> tuple[Array, Array]:
        return _searched(block, h, symmetric, top) if search else _by_range(*_range(block), top)

    for chunk in chunks((rows, whole), _CHUNK if factor is None else _LARGER):
        part = np.zeros((len(w[chunk]), whole), np.float32)
        part[:, :columns] = w[chunk]
        if factor is None:
            part = part.reshape(-1, block_size)
            scale, zero = grid(part, np.ones(block_size, np.float32))
            q = _nearest(part, scale[:, None], zero[:, None], top)
        else:
            q, scale, zero = _compensated(part, factor, block_size, grid, top)
        integers[chunk] = packed(q.astype(np.uint8), bits).reshape(integers[chunk].shape)
        scales[chunk], zeros[chunk] = scale.reshape(-1, blocks), zero.reshape(-1, blocks)
    return Blocks(integers, scales, packed(zeros, bits), columns, bits)


def _nearest(w: Array, scale: Array, zero: Array, top: int) -> Array:
    q: Array = np.clip(np.rint(w / _not_zero(scale)) + zero, 0, top)
    return q


def _factor(moments: Array, columns: int) -> Array:
    """The upper factor U of (Σ x xᵀ + λ)⁻¹ = Uᵀ U, with columns of zeros at the end.

    λ is a hundredth of the mean of the diagonal: a channel that was 0 so far may be used later.
    """
    extra = columns - len(moments)
    h = np.pad(moments.astype(np.float64), ((0, extra), (0, extra)))
    mean = np.trace(h) / len(moments)
    h[np.diag_indices(columns)] += 0.01 * mean if mean > 0 else 1.0
    upper: Array = np.linalg.cholesky(np.linalg.inv(h)).T.astype(np.float32)
    return upper


def _compensated(
    w: Array,
    factor: Array,
    block_size: int,
    grid: Callable[[Array, Array], tuple[Array, Array]],
    top: int,
) -> tuple[Array, Array, Array]:
    """Integers (n, K), scales and zero points (n, blocks) of w (n, K), which is overwritten."""
    q = np.empty_like(w)
    found = []
    for start in range(0, w.shape[1], block_size):
        block = slice(start, start + block_size)
        turned, own = np.ascontiguousarray(w[:, block].T), factor[block, block]
        cost = 1 / np.square(own.diagonal())  # of an error of 1 in each column
        scale, zero = grid(turned.T, cost / cost.mean())
        for j, column in enumerate(turned):
            q[:, start + j] = integer = _nearest(column, scale, zero, top)
            column -= (integer - zero) * scale
            column /= own[j, j]
            turned[j + 1 :] -= np.outer(own[j, j + 1 :], column)
        w[:, block.stop :] -= turned.T @ factor[block, block.stop :]
        found.append((scale, zero))
    scales, zeros = zip(*found, strict=True)
    return q, np.stack(scales, axis=1), np.stack(zeros, axis=1)


def _range(w: Array) -> tuple[Array, Array]:
    """The least and the largest of each row, or 0 if that is beyond."""
    return np.minimum(w.min(axis=-1), 0), np.maximum(w.max(axis=-1), 0)


def _by_range(low: Array, high: Array, top: int) -> tuple[Array, Array]:
    """Scale and zero point with which 0 to `top` represent low to high."""
    scale = (high - low) / np.float32(top)
    return scale, np.clip(np.rint(-low / _not_zero(scale)), 0, top)


def _searched(w: Array, h: Array, symmetric: bool, top: int) -> tuple[Array, Array]:
    """The best scale and zero point of each row of w (n, size); h (size,) weights the columns."""
    largest = _not_zero(np.abs(w).max(axis=-1))
    w = w / largest[:, None]  # its squares are finite
    hw, gain = w * h, np.full(len(w), -1, np.float32)
    scale, zero = np.zeros_like(gain), np.zeros_like(gain)

    def attempt(s: Array, z: Array) -> None:
        u = np.multiply(w, (1 / _not_zero(s))[:, None])
        np.clip(np.rint(u, out=u), -z[:, None], top - z[:, None], out=u)
        along, size = np.einsum("nk,nk->n", hw, u), _not_zero(np.square(u, out=u) @ h)
        found = along * along / size
        better = found > gain
        gain[better], zero[better] = found[better], z[better]
        scale[better] = (along / size)[better]

    low, high = _range(w)
    # where clipping pays, low and high may need different ones
    ratios, shifts = (_RATIOS, (-1, 1, -1, 1)) if top < 255 else (_FINE, ())
    if symmetric:
        middle = np.float32((top + 1) // 2)
        extreme, half = np.where(-low > high, low, high), np.full_like(zero, middle)
        for ratio in ratios:
            attempt(extreme * ratio / -middle, half)
    else:
        for ratio in ratios:
            attempt(*_by_range(low * ratio, high * ratio, top))
        for shift in shifts:
            z, s = np.clip(zero + shift, 0, top), scale.copy()
            for factor in np.array([1, 0.95, 1.05], np.float32):
                attempt(s * factor, z)
    for _ in range(2):  # the best scale rounds some weights to other integers
        attempt(scale.copy(), zero.copy())
    return scale * largest, zero


def _not_zero(scale: Array) -> Array:
    return np.where(scale == 0, np.float32(1), scale)


def packed(q: Array, bits: Bits) -> Array:
    """Numbers along the last axis as bytes: of two of four bits, the first is in the low bits.

    Beside a last one without another, these are 0.
    """
    if bits == 8:
        return q
    if q.shape[-1] % 2:
        q = np.concatenate([q, np.zeros_like(q[..., :1])], axis=-1)
    found: Array = (q[..., 0::2] | q[..., 1::2] << 4).astype(np.uint8)
    return found


def unpacked(bytes_: Array, bits: Bits = 4) -> Array:
    """The numbers of bytes along the last axis, as uint8."""
    if bits == 8:
        return bytes_
    return np.stack([bytes_ & 15, bytes_ >> 4], axis=-1).reshape(*bytes_.shape[:-1], -1)
