"""Checkpoints of bitsandbytes: int8 by rows, and NF4 or FP4, which are read as floats.

int8 (arXiv 2208.07339): w = SCB q / 127 of each row. Four bits (arXiv 2305.14314): each byte has
two numbers, the first in its high bits, which are places in a table of 16; every `blocksize` of
them share a factor, absmax. With double quantization, factors are places in a table of 256 and
have factors again, plus one offset.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.bits import Blocks
from graphgen.files import parse_json
from graphgen.models.published.config import Config
from graphgen.models.published.few_bits import FewBits, Restored
from graphgen.models.published.integers import in_blocks
from graphgen.operands import Array
from graphgen.safetensors import Weight

_STATE = "weight.quant_state.bitsandbytes__"
_NOTES = (
    "load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit bnb_4bit_compute_dtype "
    "bnb_4bit_quant_type bnb_4bit_use_double_quant bnb_4bit_quant_storage "
    "llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_skip_modules "
    "llm_int8_threshold"
)


@dataclass(frozen=True)
class RowsOfBytes(FewBits):
    """A weight (N, K) of signed bytes, and a factor for each row."""

    parts: Mapping[str, Weight] = field(kw_only=True)

    def _blocks(self) -> Blocks:
        rows, columns = self.shape
        q = self.parts["weight"].read().view(np.uint8) ^ np.uint8(128)
        scales = self.parts["SCB"].read().astype(np.float32).reshape(rows, 1) / np.float32(127)
        return in_blocks(q, np.full((rows, 1), 128, np.uint8), scales, 8, columns)


@dataclass(frozen=True)
class BitsAndBytes:
    """How bitsandbytes stores the weight of a layer."""

    rounds: bool
    method = "bitsandbytes"
    endings = (
        *(f"{_STATE}{kind}" for kind in ("nf4", "fp4")),
        *("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
        *("weight", "SCB", "weight_format"),
    )
    spare = ()

    def weight(self, layer: str, parts: Mapping[str, Weight]) -> tuple[Weight | None, list[str]]:
        """The weight that the tensors of a layer are, and what is wrong."""
        whole = parts.get("weight")
        if whole is None or len(parts) == 1:
            return None, []
        name, kind = f"{layer}.weight", ir.DataType.FLOAT
        if "SCB" in parts:
            fits = len(whole.shape) == 2 and prod(parts["SCB"].shape) == whole.shape[0]
            if whole.dtype is not ir.DataType.INT8 or not fits:
                return None, [f"{layer}.weight and {layer}.SCB do not fit"]
            if "weight_format" in parts and parts["weight_format"].read().any():
                return None, [f"{layer}.weight_format is another than 0, rows"]
            return RowsOfBytes(whole.path, name, kind, whole.shape, whole.offset, parts=parts), []
        try:
            state = _state(parts)
            shape = tuple(int(n) for n in state["shape"])
            size = int(state["blocksize"])
            count = -(-prod(shape) // size)
            nested = "weight.nested_absmax" in parts
            fits = prod(whole.shape) == -(-prod(shape) // 2) and size > 0
            fits &= whole.dtype is ir.DataType.UINT8 and parts["weight.quant_map"].shape == (16,)
            fits &= prod(parts["weight.absmax"].shape) == count
            if nested:
                again = -(-count // int(state["nested_blocksize"]))
                float(state["nested_offset"])
                fits &= prod(parts["weight.nested_absmax"].shape) == again
                fits &= parts["weight.nested_quant_map"].shape == (256,)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            return None, [f"{layer}: its quant_state, or a part of it, is missing ({error})"]
        if not fits:
            return None, [f"{layer}: the sizes of its parts do not fit its quant_state"]
        make = partial(_fours, parts, state)
        return Restored(whole.path, name, kind, shape, whole.offset, make=make), []


def _state(parts: Mapping[str, Weight]) -> dict[str, Any]:
    [name] = [name for name in parts if name.startswith(_STATE)]
    found: dict[str, Any] = parse_json(parts[name].read().tobytes())
    return found


def _fours(parts: Mapping[str, Weight], state: Mapping[str, Any]) -> Array:
    shape, size = [int(n) for n in state["shape"]], int(state["blocksize"])
    codes, factors = parts["weight"].read().reshape(-1), parts["weight.absmax"].read().reshape(-1)
    if "weight.nested_absmax" in parts:
        own = parts["weight.nested_absmax"].read().astype(np.float32).reshape(-1)
        spread = _spread(own, int(state["nested_blocksize"]), len(factors))
        factors = parts["weight.nested_quant_map"].read()[factors] * spread
        factors = factors + np.float32(state["nested_offset"])
    table = parts["weight.quant_map"].read().astype(np.float32)
    numbers = np.stack([table[codes >> 4], table[codes & 15]], -1).reshape(-1)[: prod(shape)]
    found: Array = numbers * _spread(factors.astype(np.float32), size, len(numbers))
    return found.reshape(shape)


def _spread(factors: Array, size: int, count: int) -> Array:
    """The factor of each of so many numbers, of which `size` share one; a file may say any size."""
    return np.repeat(factors, min(size, count))[:count]


def bitsandbytes(own: Config) -> BitsAndBytes:
    """What a quantization_config of bitsandbytes says; the tensors say the rest."""
    for note in _NOTES.split():
        own.raw(note)
    return BitsAndBytes(rounds=bool(own.given("load_in_8bit")))
