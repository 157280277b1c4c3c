"""Weights in four bits, MXFP4 of the OCP's Microscaling Formats, as integers of eight."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphgen.bits import Blocks
from graphgen.errors import GraphgenError
from graphgen.models.published.few_bits import FewBits
from graphgen.models.published.integers import in_blocks
from graphgen.operands import Array
from graphgen.safetensors import Weight

BLOCKS, SCALES = "_blocks", "_scales"
_BLOCK = 32  # numbers that share a scale
_BIAS, _NAN = 127, 255  # of the scales' exponents
_NUMBERS = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_NUMBERS = np.concatenate([_NUMBERS, -_NUMBERS])  # e2m1 by its four bits
TWICE: Array = (_NUMBERS * 2 + 128).astype(np.uint8)
"""Twice as large, they are integers; 128 more, these are bytes."""


def twice(pairs: Array) -> Array:
    """Numbers of four bits, two in a byte along the last axis, as integers: 2 e2m1(q) + 128."""
    return np.stack([TWICE[pairs & 15], TWICE[pairs >> 4]], -1).reshape(*pairs.shape[:-1], -1)


@dataclass(frozen=True)
class Packed(FewBits):
    """A weight (E, D, N) of which rows (E, N, D) are stored as blocks of 32 numbers.

    The blocks are uint8 (E, N, D / 32, 16), two numbers in a byte, the first in its low bits; each
    number is multiplied by 2 to its block's power, uint8 (E, N, D / 32), minus 127. As integers of
    eight bits, these are the rows of all experts, one after the other.
    """

    scales: Weight
    again = True

    def _blocks(self) -> Blocks:
        count, features, rows = self.shape
        powers = self.scales.read()
        if (powers == _NAN).any():
            raise GraphgenError(f"{self.path}: {self.scales.name} has a scale of 255, which is NaN")
        shape = (count, rows, features // _BLOCK, _BLOCK // 2)
        pairs = Weight(self.path, self.name + BLOCKS, ir.DataType.UINT8, shape, self.offset).read()
        q = twice(pairs).reshape(count * rows, features)
        scales = np.ldexp(np.float32(0.5), powers.astype(np.int32) - _BIAS).reshape(len(q), -1)
        return in_blocks(q, np.full(scales.shape, 128, np.uint8), scales, 8, _BLOCK)

    def read(self) -> Array:
        """The array, float32: each number is exactly one of bfloat16."""
        count, features, rows = self.shape
        return np.swapaxes(super().read().reshape(count, rows, features), 1, 2)


def unpacked(stored: Mapping[str, Weight]) -> dict[str, Weight]:
    """The weights, where blocks and scales of the same name that fit together are one."""
    found = dict(stored)
    for name, blocks in stored.items():
        whole = name.removesuffix(BLOCKS)
        scales = stored.get(whole + SCALES)
        if whole == name or whole in stored or scales is None or len(blocks.shape) != 4:
            continue
        count, rows, pieces, width = blocks.shape
        kinds = {blocks.dtype, scales.dtype}
        if kinds == {ir.DataType.UINT8} and (width, scales.shape) == (16, blocks.shape[:3]):
            shape = (count, pieces * _BLOCK, rows)
            del found[name], found[scales.name]
            kind = ir.DataType.BFLOAT16
            found[whole] = Packed(blocks.path, whole, kind, shape, blocks.offset, scales)
    return found
