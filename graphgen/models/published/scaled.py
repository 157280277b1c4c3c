"""Weights of eight or four bits that are floats themselves, with scales: FP8 and FP4.

No kernel of the runtime multiplies FP8 on the CPU: it is read as float32, which holds each product
of a number and its scale to a last place. FP4 becomes integers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import onnx_ir as ir

from graphgen.bits import Blocks
from graphgen.models.published.config import Config
from graphgen.models.published.few_bits import FewBits, Restored
from graphgen.models.published.integers import in_blocks
from graphgen.models.published.mxfp4 import twice
from graphgen.operands import Array
from graphgen.safetensors import Weight

_FP8 = (ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2)
_POWERS = (ir.DataType.UINT8, ir.DataType.FLOAT8E8M0)
_NOTES = (
    "activation_scheme modules_to_not_convert scale_fmt dequantize activation_scale_ub ignore "
    "producer kv_cache_scheme kv_cache_quant_algo exclude_modules group_size "
    "config_groups quant_method"
)


def fp8_weight(
    layer: str, whole: Weight, scale: Weight, block: tuple[int, int] | None
) -> tuple[Weight | None, list[str]]:
    """A weight (N, K) of FP8, times a scale for all, each row, each group of K, or each block."""
    given, shape = scale.shape, whole.shape
    counts = (*given, 1, 1)[:2] if len(given) < 2 else given  # one for each row, or for all
    sizes = [
        _size(n, count, b) for n, count, b in zip(shape, counts, block or (0, 0), strict=False)
    ]
    if len(counts) != 2 or len(shape) != 2 or not all(sizes) or whole.dtype not in _FP8:
        what = f"{whole.dtype.name.lower()}{list(shape)} with scales of {list(given)}"
        return None, [f"{layer}.weight is {what}, which do not fit"]
    made = (whole.path, f"{layer}.weight", ir.DataType.FLOAT, shape, whole.offset)
    return Restored(*made, make=partial(_fp8, whole, scale, counts, sizes)), []


def _size(length: int, count: int, block: int) -> int:
    """How many neighbors share one of so many scales; 0 if that is not known."""
    if block:
        return block if -(-length // block) == count else 0
    return length // count if count and length % count == 0 else 0


def _fp8(whole: Weight, scale: Weight, counts: tuple[int, ...], sizes: list[int]) -> Array:
    spread = _factors(scale).reshape(counts)
    for axis, size in enumerate(sizes):
        if counts[axis] > 1:
            places = np.arange(whole.shape[axis]) // size
            spread = np.take(spread, places, axis=axis)
    found: Array = whole.read().astype(np.float32) * spread
    return found


def fp4_weight(
    layer: str, whole: Weight, scale: Weight, over: Weight | None, *, divided: bool | None
) -> tuple[Weight | None, list[str]]:
    """A weight (N, K) of FP4, (N, K / 2) bytes whose low bits come first.

    Times a scale for each block along K: FP8, divided or multiplied by one `over` all, unless that
    is None, or a power of 2 as a byte, as MXFP4 has it.
    """
    rows, columns = whole.shape[0], 2 * whole.shape[-1]
    powers = scale.dtype in _POWERS
    fits = len(whole.shape) == len(scale.shape) == 2 and scale.shape[0] == rows
    size = columns // scale.shape[1] if fits and scale.shape[1] else 0
    one = over is not None and over.shape in ((), (1,))
    fits &= divided is None or powers != one
    if not fits or size != (32 if powers else 16) or columns != size * scale.shape[1]:
        what = f"{list(whole.shape)} with scales of {scale.dtype.name.lower()}{list(scale.shape)}"
        return None, [f"{layer} has a weight of four bits, {what}, which do not fit"]
    made = (whole.path, f"{layer}.weight", ir.DataType.FLOAT, (rows, columns), whole.offset)
    return SmallFloats(*made, parts=(whole, scale, over), divided=bool(divided)), []


@dataclass(frozen=True)
class SmallFloats(FewBits):
    """A weight of FP4: twice as large, its numbers are integers of eight bits."""

    parts: tuple[Weight, Weight, Weight | None] = field(kw_only=True)
    divided: bool = field(kw_only=True)
    again = True

    def _blocks(self) -> Blocks:
        whole, scale, over = self.parts
        codes, factors = whole.read(), _factors(scale)
        if over is not None:
            common = over.read().astype(np.float32).reshape(())
            factors = factors / common if self.divided else factors * common
        zeros = np.full(factors.shape, 128, np.uint8)
        group = self.shape[1] // factors.shape[1]
        return in_blocks(twice(codes), zeros, factors.astype(np.float32) / 2, 8, group)


def _factors(scale: Weight) -> Array:
    """The scales, which may be powers of 2 as bytes, 127 larger."""
    given = scale.read()
    if scale.dtype not in _POWERS:
        return given.astype(np.float32)
    found: Array = np.ldexp(np.float32(1), given.view(np.uint8).astype(np.int32) - 127)
    return found


@dataclass(frozen=True)
class Scaled:
    """How transformers' fp8 and fbgemm_fp8, and NVIDIA's modelopt, store the weight of a layer."""

    method: str
    block: tuple[int, int] | None
    rounds = True  # what products read, too
    endings = (
        *("weight", "weight_scale_inv", "weight_scale", "weight_scale_2"),
        *("input_scale", "activation_scale", "input_scale_ub"),
    )
    spare = ("q_scale", "k_scale", "v_scale")

    def weight(self, layer: str, parts: Mapping[str, Weight]) -> tuple[Weight | None, list[str]]:
        """The weight that the tensors of a layer are, and what is wrong."""
        whole, scale = parts.get("weight"), parts.get("weight_scale_inv", parts.get("weight_scale"))
        if whole is None or scale is None:
            return None, []
        if whole.dtype is ir.DataType.UINT8:
            return fp4_weight(layer, whole, scale, parts.get("weight_scale_2"), divided=False)
        return fp8_weight(layer, whole, scale, self.block)


def scaled(own: Config, method: str) -> Scaled:
    """What a quantization_config of one of these methods says.

    Raises GraphgenError for one whose weights cannot be read.
    """
    block = own.raw("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        own.refuse("weight_block_size", block, "two sizes")
    own.expect("fmt", "e4m3", "e5m2")
    own.expect("quant_algo", "FP8", "NVFP4", "FP8_PER_CHANNEL_PER_TOKEN")
    for note in _NOTES.split():
        own.raw(note)
    return Scaled(method, None if block is None else (block[0], block[1]))
