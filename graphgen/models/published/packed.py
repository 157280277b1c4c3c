"""Checkpoints whose weights are few bits already: GPTQ's and AWQ's, read without a loss.

A linear layer's weight (N, K) is stored as qweight, qzeros and scales, w = scale · (q - zero), with
a scale and a zero for each group of neighbors along K. Words of 32 bits hold several integers:
GPTQ's along K (arXiv 2210.17323, as AutoGPTQ and GPTQModel write it), AWQ's along N in an order of
its own (arXiv 2306.00978, the `gemm` layout of AutoAWQ).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graphgen.bits import Blocks
from graphgen.errors import GraphgenError
from graphgen.models.published.few_bits import FewBits
from graphgen.models.published.integers import SIZES, group_order, in_blocks, stream
from graphgen.models.published.packing import Packing
from graphgen.operands import Array
from graphgen.safetensors import Weight

_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns is in the i-th four bits of a word


@dataclass(frozen=True)
class PackedWeight(FewBits):
    """A weight of GPTQ or AWQ."""

    packing: Packing = field(kw_only=True)
    parts: Mapping[str, Weight] = field(kw_only=True)

    def _blocks(self) -> Blocks:
        bits, group = self.packing.bits, self.packing.group
        group = self.shape[1] if group == -1 else group
        q, zeros = self._integers("qweight"), self._integers("qzeros")
        if self.packing.one_less:
            if (zeros == 2**bits - 1).any():
                raise GraphgenError(
                    f"{self.path}: {self.name} has zero points that the format gptq stores as -1, "
                    "which programs read differently; convert the checkpoint to gptq_v2"
                )
            zeros = zeros + np.uint8(1)
        scales, order = self.parts["scales"].read().T, None
        if "g_idx" in self.parts:
            groups = self.parts["g_idx"].read().astype(np.int64)
            order = group_order(groups, group, f"{self.path}: {self.name}")
        return in_blocks(q.T, zeros.T, scales, bits, group, order)

    def _integers(self, name: str) -> Array:
        """The integers of qweight, (K, N), or of qzeros, (groups, N), as uint8."""
        words = self.parts[name].read().view(np.uint32)
        if not self.packing.awq:
            along = words.T if name == "qweight" else words
            each = stream(along, self.packing.bits)
            return each.T if name == "qweight" else each
        each = stream(words[..., None], self.packing.bits)[..., np.argsort(_AWQ)]
        return each.reshape(len(each), -1)


@dataclass(frozen=True)
class Packed:
    """How GPTQ or AWQ stores the weight of a layer."""

    packing: Packing
    endings = ("qweight", "qzeros", "scales", "g_idx")
    spare, rounds = (), False

    @property
    def method(self) -> str:
        """What the configuration calls it."""
        return self.packing.method

    def weight(self, layer: str, parts: Mapping[str, Weight]) -> tuple[Weight | None, list[str]]:
        """The weight that the tensors of a layer are, and what is wrong."""
        if "qweight" not in parts:
            return None, []
        ways = [self.packing]
        ways += [self.packing._replace(bits=b, group=g) for b, g in self.packing.others]
        found = [(packing, *_shape(layer, parts, packing)) for packing in ways]
        fitting = [one for one in found if not one[2]] or found[:1]
        packing, shape, wrong = fitting[0]
        columns = shape[1]
        sizes = {(p.bits, columns if p.group == -1 else min(p.group, columns)) for p, *_ in fitting}
        if len(sizes) > 1:
            wrong = [f"{layer} fits {len(sizes)} rules: {sorted(sizes)} of bits and groups"]
        first, kind = parts["qweight"], ir.DataType.FLOAT
        where = (first.path, f"{layer}.weight", kind, shape, first.offset)
        return PackedWeight(*where, packing=packing, parts=parts), wrong


def _shape(
    layer: str, parts: Mapping[str, Weight], packing: Packing
) -> tuple[tuple[int, int], list[str]]:
    """(N, K), and what is wrong with a layer's tensors."""
    bits, stored = packing.bits, parts["qweight"].shape
    if len(stored) != 2:
        return (0, 0), [f"{layer}.qweight is {list(stored)}, must have two dimensions"]
    if packing.awq:
        rows, columns = stored[1] * 32 // bits, stored[0]
    else:
        rows, columns = stored[1], stored[0] * 32 // bits
    groups = 1 if packing.group == -1 else -(-columns // packing.group)
    wanted = {
        "qweight": stored,
        "qzeros": (groups, rows * bits // 32),
        "scales": (groups, rows),
        "g_idx": (columns,),
    }
    problems = []
    if packing.group != -1 and packing.group % SIZES[-1] and packing.group < columns:
        problems.append(f"{layer} has groups of {packing.group}, must be multiples of 16")
    for name, shape in wanted.items():
        weight = parts.get(name)
        if weight is None:
            if name != "g_idx" or packing.ordered:
                problems.append(f"{layer}.{name} is missing")
            continue
        kind, real = weight.dtype.name.lower(), weight.dtype.is_floating_point()
        if (kind != "int32") if name != "scales" else not real:
            what = "real numbers" if name == "scales" else "int32"
            problems.append(f"{layer}.{name} is {kind}, must be {what}")
        if weight.shape != shape:
            problems.append(f"{layer}.{name} is {list(weight.shape)}, must be {list(shape)}")
    return (rows, columns), problems
