"""Checkpoints of AQLM: sums of vectors of codebooks (arXiv 2401.06118), read as floats.

Each vector of `in_group` weights of `out_group` rows is the sum of one vector of each codebook, by
the number of its code, times a scale of the rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from graphgen.models.published.config import Config
from graphgen.models.published.few_bits import Restored
from graphgen.operands import Array
from graphgen.safetensors import Weight


@dataclass(frozen=True)
class Aqlm:
    """How AQLM stores the weight of a layer; sizes are those of the configuration."""

    sizes: tuple[int, ...]  # codebooks, vectors in each, rows and columns of a vector
    method, rounds = "aqlm", False
    endings = ("codes", "codebooks", "scales")
    spare = ()

    def weight(self, layer: str, parts: Mapping[str, Weight]) -> tuple[Weight | None, list[str]]:
        """The weight that the tensors of a layer are, and what is wrong."""
        if missing := [name for name in self.endings if name not in parts]:
            return None, [f"{layer}.{missing[0]} is missing"]
        codes, books, scales = (parts[name] for name in self.endings)
        *counts, several = (*codes.shape, 0, 0, 0)[:3]
        if (
            len(codes.shape) != 3
            or codes.dtype not in (ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32)
            or books.shape != self.sizes
            or several != self.sizes[0]
            or scales.shape != (counts[0], 1, 1, 1)
        ):
            given = ", ".join(f"{name} {list(parts[name].shape)}" for name in self.endings)
            return None, [f"{layer} has {given}, which do not fit {list(self.sizes)}"]
        shape = counts[0] * self.sizes[2], counts[1] * self.sizes[3]
        made = (codes.path, f"{layer}.weight", ir.DataType.FLOAT, shape, codes.offset)
        return Restored(*made, make=partial(_sums, codes, books, scales)), []


def _sums(codes: Weight, books: Weight, scales: Weight) -> Array:
    table = books.read().astype(np.float32)
    numbers = codes.read().astype(np.int64) % table.shape[1]
    found = sum(table[i, numbers[..., i]] for i in range(len(table)))  # (N', K', rows, columns)
    found = found * scales.read().astype(np.float32)
    rows, columns = (a * b for a, b in zip(found.shape[:2], found.shape[2:], strict=True))
    whole: Array = found.swapaxes(1, 2).reshape(rows, columns)
    return whole


def aqlm(own: Config) -> Aqlm:
    """What a quantization_config of AQLM says."""
    bits = own.take("nbits_per_codebook", int, 16)
    if bits > 16:
        own.refuse("nbits_per_codebook", bits, "at most 16")
    count = own.take("num_codebooks", int, 1)
    size = own.take("out_group_size", int, 1), own.take("in_group_size", int, 8)
    own.raw("linear_weights_not_to_quantize")
    return Aqlm((count, 1 << bits, *size))
