"""Checkpoints whose weights are few bits already: GPTQ's and AWQ's, read without a loss.

A linear layer's weight (N, K) is stored as qweight, qzeros and scales, w = scale · (q - zero), with
a scale and a zero for each group of neighbors along K. Words of 32 bits hold several integers:
GPTQ's along K (arXiv 2210.17323, as AutoGPTQ and GPTQModel write it), AWQ's along N in an order of
its own (arXiv 2306.00978, the `gemm` layout of AutoAWQ).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import onnx_ir as ir

from graphgen.bits import KEPT, Blocks, packed as to_bytes
from graphgen.errors import GraphgenError
from graphgen.models.published.packing import Packing
from graphgen.operands import Array
from graphgen.parts import Part
from graphgen.safetensors import Weight

_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns is in the i-th four bits of a word
_SIZES = (128, 64, 32, 16)  # of blocks, the largest first


@dataclass(frozen=True)
class FewBits(Weight, ABC):
    """A weight (N, K) of integers: `read` gives what they mean, `blocks` the integers."""

    def blocks(self) -> Blocks:
        """The same integers as the runtime's operator reads them. Refuses scales of NaN."""
        made = self._blocks()
        if all(np.isfinite(x).all() for x in (made.scales, made.shift) if x is not None):
            return made
        raise GraphgenError(
            f"{self.path}: {self.name} has scales that are no finite numbers; download it again"
        )

    @abstractmethod
    def _blocks(self) -> Blocks: ...

    def read(self) -> Array:
        """The numbers that the integers stand for, float32."""
        return self.blocks().dequantized()

    def equals(self, other: Weight) -> bool:
        return self.shape == other.shape and np.array_equal(self.read(), other.read())


@dataclass(frozen=True)
class PackedWeight(FewBits):
    """A weight of GPTQ or AWQ."""

    packing: Packing = field(kw_only=True)
    parts: Mapping[str, Weight] = field(kw_only=True)

    def _blocks(self) -> Blocks:
        bits, group = self.packing.bits, self.packing.group
        rows, columns = self.shape
        group = columns if group == -1 else group
        q, zeros = self._integers("qweight"), self._integers("qzeros")
        scales = self.parts["scales"].read().astype(np.float32).T  # (N, groups)
        if self.packing.one_less:
            if (zeros == 2**bits - 1).any():
                raise GraphgenError(
                    f"{self.path}: {self.name} has zero points that the format gptq stores as -1, "
                    "which programs read differently; convert the checkpoint to gptq_v2"
                )
            zeros = zeros + np.uint8(1)
        order = self._order(group)
        size = next((s for s in _SIZES if group % s == 0), _SIZES[-1])
        count = -(-columns // size)
        of = np.arange(count) * size // group  # the group of each block
        zeros, scales = zeros.T[:, of], np.ascontiguousarray(scales[:, of])
        q = q.T if order is None else q.T[:, order]
        whole = np.repeat(zeros, size, axis=1)  # beyond K: the zero point
        whole[:, :columns] = q
        integers = to_bytes(whole.reshape(rows, count, size), bits)
        padded = np.pad(zeros, ((0, 0), (0, count % 2 if bits == 4 else 0)))
        return Blocks(integers, scales, to_bytes(padded, bits), columns, bits, order)

    def _integers(self, name: str) -> Array:
        """The integers of qweight, (K, N), or of qzeros, (groups, N), as uint8."""
        bits, words = self.packing.bits, self.parts[name].read().view(np.uint32)
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        each: Array = (words[..., None] >> shifts & (2**bits - 1)).astype(np.uint8)
        if self.packing.awq:
            each = each[..., np.argsort(_AWQ)]
        elif name == "qweight":
            each = each.transpose(0, 2, 1)
            return each.reshape(-1, each.shape[-1])
        return each.reshape(len(each), -1)

    def _order(self, group: int) -> Array | None:
        """The columns by their groups, if these are not neighbors."""
        if "g_idx" not in self.parts:
            return None
        groups = self.parts["g_idx"].read().astype(np.int64)
        order = np.argsort(groups, kind="stable")
        if not np.array_equal(groups[order], np.arange(len(groups)) // group):
            raise GraphgenError(
                f"{self.path}: {self.name}: g_idx has groups of other sizes than {group}, in which "
                "its bits cannot be kept; give the checkpoint of floats"
            )
        return None if np.array_equal(order, np.arange(len(order))) else order


def unpacked_names(stored: Mapping[str, Weight], packing: Packing, where: str) -> dict[str, Weight]:
    """The weights by the names that they have as floats, those of few bits as `PackedWeight`.

    Raises an error that names all tensors that do not fit.
    """
    found, problems = dict(stored), list[str]()
    for name in stored:
        layer, _, last = name.rpartition(".")
        if last == "qweight":
            parts = {
                n: found.pop(f"{layer}.{n}")
                for n in ("qweight", "qzeros", "scales", "g_idx")
                if f"{layer}.{n}" in found
            }
            shape, wrong = _shape(layer, parts, packing)
            problems += wrong
            own = f"{layer}.weight"
            first = replace(parts["qweight"], name=own, dtype=ir.DataType.FLOAT, shape=shape)
            found[own] = PackedWeight(**vars(first), packing=packing, parts=parts)
    if problems:
        raise GraphgenError(f"{where}: the weights do not fit: {'; '.join(problems)}")
    if len(found) == len(stored):
        raise GraphgenError(
            f"{where}: quantization_config says {packing.method}, but no weight is called "
            "*.qweight; remove the field if the weights are floats"
        )
    return found


def _shape(
    layer: str, parts: Mapping[str, Weight], packing: Packing
) -> tuple[tuple[int, int], list[str]]:
    """(N, K), and what is wrong with a layer's tensors."""
    each, stored = 32 // packing.bits, parts["qweight"].shape
    if len(stored) != 2:
        return (0, 0), [f"{layer}.qweight is {list(stored)}, must have two dimensions"]
    columns = stored[0] * (1 if packing.awq else each)
    rows = stored[1] * (each if packing.awq else 1)
    groups = 1 if packing.group == -1 else -(-columns // packing.group)
    wanted = {
        "qweight": stored,
        "qzeros": (groups, rows // each),
        "scales": (groups, rows),
        "g_idx": (columns,),
    }
    problems = []
    if packing.group != -1 and packing.group % _SIZES[-1] and packing.group < columns:
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


def is_spare(name: str, stored: Mapping[str, Weight]) -> bool:
    """Whether a weight is a bias of zeros, which GPTQ's first programs wrote beside every layer."""
    layer, _, last = name.rpartition(".")
    few = isinstance(stored.get(f"{layer}.weight"), FewBits)
    return last == "bias" and few and not stored[name].read().any()


def few_bits(name: str, weights: Sequence[Weight]) -> list[str]:
    """What is wrong with the weights of a stack of experts if they are of few bits."""
    few = any(isinstance(weight, FewBits) for weight in weights)
    return [f"{name} is one of several experts, whose few bits cannot be kept"] * few


def keep(tensor: ir.LazyTensor, weight: Weight, part: Part, turned: bool) -> None:
    """Note on a tensor made of a part of a weight what its blocks are, if that is of few bits.

    The tensor is (K, N) if the weight was turned, else (N, K), as of a table.
    """
    if isinstance(weight, FewBits):
        tensor.meta[KEPT] = (partial(_of_part, weight, part), not turned)


def _of_part(weight: FewBits, part: Part) -> Blocks:
    blocks = weight.blocks()
    if part.of == part.width:
        return blocks
    return blocks.part(part.outputs(len(blocks.integers)))
