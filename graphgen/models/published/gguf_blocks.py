"""How blocks of a GGUF file hold weights: integers, scales, and for some formats minima."""

from collections.abc import Callable

import numpy as np

from graphgen.bits import Bits, Blocks, packed as to_bytes
from graphgen.models.published.mxfp4 import TWICE
from graphgen.operands import Array

_UNEVEN: Array = np.array(  # of IQ4_NL and IQ4_XS, 128 larger
    [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], np.uint8
)
_EVEN = np.arange(0, 8, 2, dtype=np.uint8)[:, None]


def _half(raw: Array, at: int) -> Array:
    found: Array = np.ascontiguousarray(raw[..., at : at + 2]).view("<f2").astype(np.float32)
    return found


def _made(
    q: Array, scales: Array, zero: int, columns: int, bits: Bits, least: Array | None = None
) -> Blocks:
    """w = scale (q - zero), or scale q + least: integers (N, blocks, size) of one zero point.

    With `least`, too, products are of q - zero, which is smaller; the difference is the shift.
    """
    zeros = np.full((len(q), q.shape[1] + (bits == 4 and q.shape[1] % 2)), zero, np.uint8)
    shift = None if least is None else zero * scales + least
    return Blocks(to_bytes(q, bits), scales, to_bytes(zeros, bits), columns, bits, shift=shift)


def _fours(raw: Array, size: int) -> Array:
    """Of each `size` bytes all the low four bits, then all the high ones."""
    each = raw.reshape(*raw.shape[:-1], -1, 1, size)
    both = np.concatenate([each & 15, each >> 4], axis=-2)
    return both.reshape(*raw.shape[:-1], -1)


def _q4_0(raw: Array, columns: int) -> Blocks:
    """w = d (q - 8): d in half precision, sixteen bytes with q[i] and, above it, q[i + 16]."""
    return _made(_fours(raw[..., 2:], 16), _half(raw, 0)[..., 0], 8, columns, 4)


def _q4_1(raw: Array, columns: int) -> Blocks:
    """w = d q + m, d and m in half precision."""
    d, m = (_half(raw, at)[..., 0] for at in (0, 2))
    return _made(_fours(raw[..., 4:], 16), d, 8, columns, 4, m)


def _fifth(raw: Array, at: int) -> Array:
    """Integers of five bits: the highest, of 32 weights, in four bytes, the others after them."""
    high = np.unpackbits(raw[..., at : at + 4], axis=-1, bitorder="little")
    found: Array = _fours(raw[..., at + 4 :], 16) | high << 4
    return found


def _q5_0(raw: Array, columns: int) -> Blocks:
    """w = d (q - 16), d in half precision."""
    return _made(_fifth(raw, 2), _half(raw, 0)[..., 0], 16, columns, 8)


def _q5_1(raw: Array, columns: int) -> Blocks:
    """w = d q + m, d and m in half precision."""
    d, m = (_half(raw, at)[..., 0] for at in (0, 2))
    return _made(_fifth(raw, 4), d, 16, columns, 8, m)


def _q8_0(raw: Array, columns: int) -> Blocks:
    """w = d q: d in half precision, 32 signed bytes."""
    return _made(raw[..., 2:] ^ 128, _half(raw, 0)[..., 0], 128, columns, 8)


def _scaled_twice(raw: Array) -> tuple[Array, Array]:
    """d s and -e m of eight blocks: d, e in half precision, s and m of six bits."""
    rows, a, b, c = len(raw), raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    s = np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], axis=-1)
    m = np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], axis=-1)
    scales, least = ((_half(raw, at) * x).reshape(rows, -1) for at, x in ((0, s), (2, m)))
    return scales, -least


def _q4_k(raw: Array, columns: int) -> Blocks:
    """w = d s q - e m for eight blocks of 32."""
    scales, least = _scaled_twice(raw)
    q = _fours(raw[..., 16:], 32).reshape(len(raw), -1, 32)
    return _made(q, scales, 8, columns, 4, least)


def _q5_k(raw: Array, columns: int) -> Blocks:
    """As Q4_K, and bit i of 32 bytes is the fifth of the i-th block."""
    scales, least = _scaled_twice(raw)
    high = raw[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    q = _fours(raw[..., 48:], 32).reshape(high.shape) | high << 4
    return _made(q.reshape(len(raw), -1, 32), scales, 16, columns, 8, least)


def _q6_k(raw: Array, columns: int) -> Blocks:
    """w = d s (q - 32) for 16 blocks: four low and two high bits of q, s a signed byte."""
    rows = len(raw)
    high = raw[..., 128:192].reshape(rows, -1, 2, 1, 32)  # 32 bytes for each half
    high = high >> _EVEN & 3
    q = _fours(raw[..., :128], 64).reshape(high.shape) | high << 4
    scales = _half(raw, 208) * np.ascontiguousarray(raw[..., 192:208]).view(np.int8)
    return _made(q.reshape(rows, -1, 16), scales.reshape(rows, -1), 32, columns, 8)


def _pairs(raw: Array) -> Array:
    """Of each 32 bytes all the lowest two bits, then the next ones, and so on."""
    each = raw.reshape(*raw.shape[:-1], -1, 1, 32)
    return each >> _EVEN & 3


def _q2_k(raw: Array, columns: int) -> Blocks:
    """w = d s q - e m for 16 blocks of 16: s in the low four bits of a byte, m in the high ones."""
    rows, own = len(raw), raw[..., :16]
    scales, least = (_half(raw, at) * x for at, x in ((80, own & 15), (82, own >> 4)))
    q = _pairs(raw[..., 16:80]).reshape(rows, -1, 16)
    return _made(q, scales.reshape(rows, -1), 2, columns, 4, -least.reshape(rows, -1))


def _q3_k(raw: Array, columns: int) -> Blocks:
    """w = d (s - 32) (q - 4) for 16 blocks of 16: bit i of 32 bytes is the third of the i-th 32."""
    rows = len(raw)
    high = raw[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    q = _pairs(raw[..., 32:96]).reshape(high.shape) | high << 2
    four, two = raw[..., 96:104], raw[..., None, 104:108] >> _EVEN & 3
    s = np.concatenate([four & 15, four >> 4], axis=-1) | two.reshape(*raw.shape[:-1], 16) << 4
    scales = _half(raw, 108) * (s.astype(np.float32) - 32)
    return _made(q.reshape(rows, -1, 16), scales.reshape(rows, -1), 4, columns, 4)


def _iq4_nl(raw: Array, columns: int) -> Blocks:
    """w = d t[q], t a table of 16 signed bytes."""
    return _made(_UNEVEN[_fours(raw[..., 2:], 16)], _half(raw, 0)[..., 0], 128, columns, 8)


def _iq4_xs(raw: Array, columns: int) -> Blocks:
    """As IQ4_NL for eight blocks of 32 with scales d (s - 32): four low bits, and two high ones."""
    rows = len(raw)
    low = np.stack([raw[..., 4:8] & 15, raw[..., 4:8] >> 4], axis=-1).reshape(*raw.shape[:-1], 8)
    high = raw[..., 2:4, None] >> _EVEN[:, 0] & 3
    s = low | high.reshape(low.shape) << 4
    scales = _half(raw, 0) * (s.astype(np.float32) - 32)
    q = _UNEVEN[_fours(raw[..., 8:], 16)].reshape(rows, -1, 32)
    return _made(q, scales.reshape(rows, -1), 128, columns, 8)


def _tq1_0(raw: Array, columns: int) -> Blocks:
    """w = d (q - 1): bytes hold five digits, the last four of them four, b = ⌈256 Σ q 3⁻ⁿ⌉."""
    threes = np.array([1, 3, 9, 27, 81], np.uint8)
    parts = [(0, 32, 5), (32, 48, 5), (48, 52, 4)]
    digits = [raw[..., None, a:b] * threes[:n, None] for a, b, n in parts]
    each = [(x.astype(np.uint16) * 3 >> 8).reshape(*raw.shape[:-1], -1) for x in digits]
    return _ternary(np.concatenate(each, axis=-1).astype(np.uint8), _half(raw, 52), columns)


def _tq2_0(raw: Array, columns: int) -> Blocks:
    """w = d (q - 1): two bits each."""
    q = _pairs(raw[..., :64]).reshape(*raw.shape[:-1], 256)
    return _ternary(q, _half(raw, 64), columns)


def _ternary(q: Array, d: Array, columns: int) -> Blocks:
    """The runtime's blocks are half as large."""
    scales = np.repeat(d, 2, axis=-1).reshape(len(q), -1)
    return _made(q.reshape(len(q), -1, 128), scales, 1, columns, 4)


def _mxfp4(raw: Array, columns: int) -> Blocks:
    """w = 2ᵉ⁻¹²⁷ t[q], t the numbers of FP4; twice as large they are integers."""
    power = raw[..., 0].astype(np.int32)
    scales = np.ldexp(np.where(power == 255, np.float32(np.nan), np.float32(1)), power - 128)
    return _made(TWICE[_fours(raw[..., 1:], 16)], scales, 128, columns, 8)


FEW: dict[int, tuple[str, int, int, Callable[[Array, int], Blocks]]] = {
    2: ("Q4_0", 32, 18, _q4_0),
    3: ("Q4_1", 32, 20, _q4_1),
    6: ("Q5_0", 32, 22, _q5_0),
    7: ("Q5_1", 32, 24, _q5_1),
    8: ("Q8_0", 32, 34, _q8_0),
    10: ("Q2_K", 256, 84, _q2_k),
    11: ("Q3_K", 256, 110, _q3_k),
    12: ("Q4_K", 256, 144, _q4_k),
    13: ("Q5_K", 256, 176, _q5_k),
    14: ("Q6_K", 256, 210, _q6_k),
    20: ("IQ4_NL", 32, 18, _iq4_nl),
    23: ("IQ4_XS", 256, 136, _iq4_xs),
    34: ("TQ1_0", 256, 54, _tq1_0),
    35: ("TQ2_0", 256, 66, _tq2_0),
    39: ("MXFP4", 32, 17, _mxfp4),
}
"""By number: the name, how many weights a block has, how many bytes, and what makes `Blocks`."""
