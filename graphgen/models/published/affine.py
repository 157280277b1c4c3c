"""Integers with scales and minima, as MLX and BitNet store them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.bits import Blocks
from graphgen.models.published.config import Config
from graphgen.models.published.few_bits import FewBits
from graphgen.models.published.integers import SIZES, in_blocks, stream
from graphgen.models.published.scaled import fp4_weight, fp8_weight
from graphgen.operands import Array
from graphgen.safetensors import Weight

_MODES = {"affine": 0, "mxfp4": 4, "nvfp4": 4, "mxfp8": 8}  # the bits of those of floats
_BITS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class Integers(FewBits):
    """A weight whose blocks are made when they are needed."""

    make: Callable[[], Blocks] = field(kw_only=True, compare=False)

    def _blocks(self) -> Blocks:
        return self.make()


@dataclass(frozen=True)
class Mlx:
    """How MLX stores the weight of a layer: w = scale q + bias, or FP4 and FP8 with scales.

    Words of 32 bits hold integers along K, one after another, the first in the lowest bits.
    Layers may have a rule of their own, or stay floats, for which `rules` have none.
    """

    method: str
    rules: Mapping[str, tuple[int, int, str]]  # bits, group and mode, "" of all others
    endings = ("weight", "scales", "biases", "qbiases")
    spare, rounds = (), False

    def weight(self, layer: str, parts: Mapping[str, Weight]) -> tuple[Weight | None, list[str]]:
        """The weight that the tensors of a layer are, and what is wrong."""
        words, scales = parts.get("weight"), parts.get("scales")
        if words is None or scales is None:
            return None, []
        bits, group, mode = self.rules.get(layer, self.rules[""])
        least = parts.get("biases", parts.get("qbiases"))
        rows, count = (*words.shape, 0)[0], (*scales.shape, 0, 0)[1]
        columns = count * group
        shape = rows, columns
        if (
            words.dtype is not ir.DataType.UINT32
            or words.shape != (rows, columns * bits // 32)
            or scales.shape != (rows, count)
            or (mode == "affine") != (least is not None and least.shape == scales.shape)
        ):
            given = f"{words.dtype.name.lower()}{list(words.shape)} and {list(scales.shape)} scales"
            return None, [f"{layer} has {given}, not {mode} of {bits} bits in groups of {group}"]
        if mode == "affine" and least is not None:
            make = partial(_with_minima, words, scales, least, bits, group)
            made = (words.path, f"{layer}.weight", ir.DataType.FLOAT, shape, words.offset)
            return Integers(*made, make=make), []
        floats = ir.DataType.FLOAT8E4M3FN
        scales = replace(scales, dtype=floats) if mode == "nvfp4" else scales
        if bits == 8:
            whole = replace(words, dtype=floats, shape=shape)
            return fp8_weight(layer, whole, scales, None)
        whole = replace(words, dtype=ir.DataType.UINT8, shape=(shape[0], columns // 2))
        return fp4_weight(layer, whole, scales, None, divided=None)


def _with_minima(words: Weight, scales: Weight, least: Weight, bits: int, group: int) -> Blocks:
    half, spread = 1 << (bits - 1), scales.read().astype(np.float32)
    zeros = np.full(spread.shape, half, np.uint8)
    made = in_blocks(stream(words.read(), bits), zeros, spread, bits, group)
    return replace(made, shift=half * spread + least.read().astype(np.float32))


def mlx(own: Config, method: str) -> Mlx:
    """What the fields `quantization` of MLX say, or a quantization_config of transformers' metal.

    Raises GraphgenError for a mode, or sizes, whose weights cannot be read.
    """
    own.expect("quant_method", method)
    bits, group, mode = (own.raw(n) for n in ("bits", "group_size", "mode"))
    own.raw("modules_to_not_convert")
    own.expect("dequantize", False)
    whole = {"bits": bits, "group_size": group, "mode": mode or "affine"}
    rules = {"": _rule(own, "bits and group_size", whole)}
    for layer, rule in own.fields.items():
        if isinstance(rule, bool) and "." in layer:
            own.raw(layer)  # whether it has the rule of all, which its tensors say, too
        elif isinstance(rule, dict):
            own.raw(layer)
            rules[layer] = _rule(own, layer, whole | rule)
    return Mlx(method, rules)


def _rule(own: Config, name: str, rule: Mapping[str, Any]) -> tuple[int, int, str]:
    bits, group, mode = (rule[n] for n in ("bits", "group_size", "mode"))
    known = isinstance(mode, str) and mode in _MODES
    known = known and bits in ((_MODES[mode],) if _MODES.get(mode) else _BITS)
    if not known or type(bits) is not int or group not in SIZES or type(group) is not int:
        own.refuse(name, dict(rule), f"2 to 6 or 8 bits, groups of {SIZES}, mode {[*_MODES]}")
    return bits, group, mode


@dataclass(frozen=True)
class BitNet:
    """How BitNet's layers store -1, 0 and 1 (arXiv 2402.17764): w = (q - 1) / weight_scale.

    A byte has the q of four rows, each N / 4 below the one before, the first in the low bits.
    """

    method, rounds = "bitnet", True
    endings = ("weight", "weight_scale")
    spare = ()

    def weight(self, layer: str, parts: Mapping[str, Weight]) -> tuple[Weight | None, list[str]]:
        """The weight that the tensors of a layer are, and what is wrong."""
        whole, scale = parts.get("weight"), parts.get("weight_scale")
        if whole is None or scale is None:
            return None, []
        if whole.dtype is not ir.DataType.UINT8 or len(whole.shape) != 2 or scale.shape != (1,):
            given = f"{whole.dtype.name.lower()}{list(whole.shape)} and {list(scale.shape)}"
            return None, [f"{layer} has a weight and a scale of {given}, must be bytes and one"]
        shape = (4 * whole.shape[0], whole.shape[1])
        made = (whole.path, f"{layer}.weight", ir.DataType.FLOAT, shape, whole.offset)
        return Integers(*made, make=partial(_ternary, whole, scale)), []


def _ternary(whole: Weight, scale: Weight) -> Blocks:
    q = np.concatenate([whole.read() >> at & np.uint8(3) for at in (0, 2, 4, 6)])
    with np.errstate(divide="ignore"):
        one: Array = np.float32(1) / scale.read().astype(np.float32).reshape(1, 1)
    rows, columns = q.shape
    zeros = np.ones((rows, 1), np.uint8)
    return in_blocks(q, zeros, np.broadcast_to(one, (rows, 1)), 2, columns)


def bitnet(own: Config) -> BitNet:
    """What a quantization_config of bitnet says. Raises GraphgenError for other layers."""
    own.expect("linear_class", "bitlinear")
    own.expect("quantization_mode", "offline")
    own.expect("use_rms_norm", False)
    for note in ("modules_to_not_convert", "rms_norm_eps"):
        own.raw(note)
    return BitNet()
