"""Checkpoints of compressed-tensors, which llm-compressor and vLLM use: integers, FP8 and FP4.

w = scale · (q - zero): integers and zero points are signed, and stored 2^(bits - 1) larger where
words of 32 bits hold several, weights along K and zero points along N. The scales are those of
channels, of groups or blocks, or of the whole. FP4 has scales of FP8, and one over all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graphgen.bits import Blocks
from graphgen.errors import GraphgenError
from graphgen.models.published.few_bits import FewBits
from graphgen.models.published.integers import fields, group_order, in_blocks, stream
from graphgen.models.published.scaled import fp4_weight, fp8_weight
from graphgen.operands import Array
from graphgen.safetensors import Weight


@dataclass(frozen=True)
class Compressed:
    """How compressed-tensors stores the weight of a layer; sizes are those of any layers."""

    bits: frozenset[int]
    groups: frozenset[int]
    block: tuple[int, int] | None
    rounds: bool  # what products read, too
    method = "compressed-tensors"
    endings = (
        *("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
        *("weight_global_scale", "weight", "input_scale", "input_zero_point"),
        *("input_global_scale", "output_scale", "output_zero_point"),
    )
    spare = ("q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point")

    def weight(self, layer: str, parts: Mapping[str, Weight]) -> tuple[Weight | None, list[str]]:
        """The weight that the tensors of a layer are, and what is wrong."""
        whole, scale = parts.get("weight_packed", parts.get("weight")), parts.get("weight_scale")
        if scale is None or whole is None:
            return None, []
        if len(whole.shape) != 2 or len(scale.shape) > 2:
            wrong = f"{layer} has a weight of {list(whole.shape)} and scales of {list(scale.shape)}"
            return None, [f"{wrong}, must be matrices"]
        if whole.dtype in (ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2):
            blocks = self.block and tuple(
                -(-n // b) for n, b in zip(whole.shape, self.block, strict=True)
            )
            return fp8_weight(layer, whole, scale, self.block if scale.shape == blocks else None)
        if "weight_packed" in parts and whole.dtype is ir.DataType.UINT8:
            over = parts.get("weight_global_scale")
            return fp4_weight(layer, whole, scale, over, divided=True)
        return self._integers(layer, whole, scale, parts)

    def _integers(
        self, layer: str, whole: Weight, scale: Weight, parts: Mapping[str, Weight]
    ) -> tuple[Weight | None, list[str]]:
        shape, bits = whole.shape, max(self.bits)
        if "weight_packed" in parts:
            if "weight_shape" not in parts:
                return None, [f"{layer}.weight_shape is missing"]
            shape = tuple(map(int, parts["weight_shape"].read()))
            able = [b for b in self.bits if whole.shape[1] in _words(shape[1], b)]
            if (
                len(able) != 1
                or len(whole.shape) != 2
                or whole.shape[0] != shape[0]
                or whole.dtype is not ir.DataType.INT32
            ):
                kind = whole.dtype.name.lower()
                given = f"{layer}.weight_packed is {kind}{list(whole.shape)} for {list(shape)}"
                return None, [f"{given}, which is none of {sorted(self.bits)} bits"]
            bits = able[0]
        elif whole.dtype is not ir.DataType.INT8:
            return None, [f"{layer}.weight is {whole.dtype.name.lower()}, must be int8 or FP8"]
        rows, columns = shape
        count = scale.shape[1] if len(scale.shape) == 2 else 1
        sizes = [g for g in self.groups if count > 1 and -(-columns // g) == count]
        group = columns if count == 1 else sizes[0] if len(sizes) == 1 else 0
        if (
            not group
            or (group % 16 and group < columns)
            or scale.shape not in (*((), (1,), (rows,), (1, 1), (rows, count)),)
        ):
            given = f"{layer}.weight_scale is {list(scale.shape)} for a weight of {list(shape)}"
            return None, [f"{given} and groups of {sorted(self.groups) or 'none'}"]
        words = {(n, count) for n in _words(rows, bits)} if "weight_packed" in parts else set()
        shapes: dict[str, set[tuple[int, ...]]] = {"zero_point": {scale.shape, *words}}
        shapes["g_idx"] = {(columns,)}
        for name, wanted in shapes.items():
            part = parts.get(f"weight_{name}")
            if part is not None and part.shape not in wanted:
                wrong = f"{layer}.weight_{name} is {list(part.shape)} for a weight of {list(shape)}"
                return None, [f"{wrong} and scales of {list(scale.shape)}"]
        made = (whole.path, f"{layer}.weight", ir.DataType.FLOAT, shape, whole.offset)
        return CompressedWeight(*made, parts=parts, bits=bits, group=group), []


@dataclass(frozen=True)
class CompressedWeight(FewBits):
    """A weight of integers."""

    parts: Mapping[str, Weight] = field(kw_only=True)
    bits: int = field(kw_only=True)
    group: int = field(kw_only=True)

    def _blocks(self) -> Blocks:
        rows, columns = self.shape
        half, groups = np.uint8(1 << (self.bits - 1)), -(-columns // self.group)
        scales = self.parts["weight_scale"].read().astype(np.float32)
        scales = np.broadcast_to(scales.reshape(-1, groups), (rows, groups))
        if "weight_packed" in self.parts:
            q = _numbers(self.parts["weight_packed"].read(), columns, self.bits)
        else:
            q = self._unsigned("weight")
        zeros = np.full((rows, groups), half, np.uint8)
        if "weight_zero_point" in self.parts:
            given = self.parts["weight_zero_point"].read()
            if (
                given.dtype == np.int32
                and given.ndim == 2
                and len(given) in _words(rows, self.bits)
            ):
                zeros = _numbers(np.ascontiguousarray(given.T), rows, self.bits).T
            else:
                near = self._unsigned("weight_zero_point")
                zeros = np.broadcast_to(near.reshape(-1, groups), zeros.shape)
        order = None
        if "weight_g_idx" in self.parts:
            own = self.parts["weight_g_idx"].read().astype(np.int64)
            if (own != -1).any():  # -1 alone is no order
                order = group_order(own, self.group, f"{self.path}: {self.name}")
        return in_blocks(q, zeros, scales, self.bits, self.group, order)

    def _unsigned(self, name: str) -> Array:
        """A tensor of signed integers, each 2^(bits - 1) larger."""
        given = self.parts[name].read()
        found = given + np.int16(1 << (self.bits - 1))
        if given.dtype.kind != "i" or (found >> self.bits).any():
            raise GraphgenError(
                f"{self.path}: {self.name} has integers of more than {self.bits} bits; "
                "download it again"
            )
        return found.astype(np.uint8)


def _words(count: int, bits: int) -> tuple[int, int]:
    """How many words so many integers take: one after another, and, before 0.20, whole in each."""
    return -(-count * bits // 32), -(-count // (32 // bits))


def _numbers(words: Array, count: int, bits: int) -> Array:
    """So many integers along the last axis."""
    dense = words.shape[-1] == _words(count, bits)[0]
    return (stream if dense else fields)(words, bits)[..., :count]
