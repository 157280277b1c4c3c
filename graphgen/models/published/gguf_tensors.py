"""The tensors of a GGUF file: floats, and blocks of integers with scales.

Blocks have 32 or 256 weights along K with scales of their own, of which some have scales again
(those of the names with K).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graphgen.bits import Bits, Blocks, packed as to_bytes
from graphgen.errors import GraphgenError
from graphgen.models.published.few_bits import FewBits
from graphgen.operands import Array
from graphgen.safetensors import Weight

FLOATS = {0: ir.DataType.FLOAT, 1: ir.DataType.FLOAT16, 30: ir.DataType.BFLOAT16}


@dataclass(frozen=True)
class FloatTensor(Weight):
    """A tensor of floats."""

    order: Array | None = field(default=None, compare=False)  # of its rows, in the file
    less: float = 0.0  # what is to be subtracted

    def read(self) -> Array:
        """The array."""
        array = super().read()
        array = array if self.order is None else array[self.order]
        return array.astype(np.float32) - np.float32(self.less) if self.less else array


@dataclass(frozen=True)
class FewTensor(FewBits):
    """A matrix of integers in blocks of a format of `FEW`."""

    kind: int = field(kw_only=True)
    order: Array | None = field(default=None, compare=False, kw_only=True)

    def _blocks(self) -> Blocks:
        (rows, columns), (_, size, each, make) = self.shape, FEW[self.kind]
        count = rows * columns // size * each
        raw = np.fromfile(self.path, np.uint8, count, offset=self.offset)
        if raw.size != count:
            raise GraphgenError(f"{self.path} has become shorter; build again")
        made = make(raw.reshape(rows, -1, each), columns)
        return made if self.order is None else made.part(self.order)


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
    high = high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    q = _fours(raw[..., :128], 64).reshape(high.shape) | high << 4
    scales = _half(raw, 208) * np.ascontiguousarray(raw[..., 192:208]).view(np.int8)
    return _made(q.reshape(rows, -1, 16), scales.reshape(rows, -1), 32, columns, 8)


FEW: dict[int, tuple[str, int, int, Callable[[Array, int], Blocks]]] = {
    2: ("Q4_0", 32, 18, _q4_0),
    3: ("Q4_1", 32, 20, _q4_1),
    6: ("Q5_0", 32, 22, _q5_0),
    7: ("Q5_1", 32, 24, _q5_1),
    8: ("Q8_0", 32, 34, _q8_0),
    12: ("Q4_K", 256, 144, _q4_k),
    13: ("Q5_K", 256, 176, _q5_k),
    14: ("Q6_K", 256, 210, _q6_k),
}
"""By number: the name, how many weights a block has, how many bytes, and what makes `Blocks`."""

OTHERS = {10: "Q2_K", 11: "Q3_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"}
OTHERS |= {20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 28: "F64"}
OTHERS |= {24: "I8", 25: "I16", 26: "I32", 27: "I64", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}
"""What types that are not read are called."""
