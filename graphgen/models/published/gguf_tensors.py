"""The tensors of a GGUF file: floats, and blocks of integers with scales.

Blocks have 32 or 256 weights along K with scales of their own, of which some have scales again
(those of the names with K).
"""

import math
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graphgen.bits import Blocks
from graphgen.errors import GraphgenError
from graphgen.models.published.few_bits import FewBits
from graphgen.models.published.gguf_blocks import FEW
from graphgen.operands import Array
from graphgen.safetensors import Weight

FLOATS = {0: ir.DataType.FLOAT, 1: ir.DataType.FLOAT16, 30: ir.DataType.BFLOAT16}


@dataclass(frozen=True)
class FloatTensor(Weight):
    """A tensor of floats."""

    order: Array | None = field(default=None, compare=False)  # of its rows, in the file
    less: float = 0.0  # what is to be subtracted

    @property
    def stored(self) -> int:
        """The bytes in the file."""
        return math.prod(self.shape) * self.dtype.bitwidth // 8

    def read(self) -> Array:
        """The array."""
        array = super().read()
        array = array if self.order is None else array[self.order]
        return array.astype(np.float32) - np.float32(self.less) if self.less else array


@dataclass(frozen=True)
class FewTensor(FewBits):
    """A matrix of integers in blocks of a format of `FEW`, or several of them."""

    kind: int = field(kw_only=True)
    order: Array | None = field(default=None, compare=False, kw_only=True)

    @property
    def stored(self) -> int:
        """The bytes in the file."""
        _, size, each, _ = FEW[self.kind]
        return math.prod(self.shape) // size * each

    def read(self) -> Array:
        """The numbers that the integers stand for, float32."""
        return super().read().reshape(self.shape)

    def _blocks(self) -> Blocks:
        *rows, columns = self.shape
        *_, each, make = FEW[self.kind]
        raw = np.fromfile(self.path, np.uint8, self.stored, offset=self.offset)
        if raw.size != self.stored:
            raise GraphgenError(f"{self.path} has become shorter; build again")
        made = make(raw.reshape(math.prod(rows), -1, each), columns)
        return made if self.order is None else made.part(self.order)


OTHERS = {15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 9: "Q8_1"}
OTHERS |= {21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M", 28: "F64", 40: "NVFP4", 41: "Q1_0"}
OTHERS |= {24: "I8", 25: "I16", 26: "I32", 27: "I64"}
"""What types that are not read are called."""
