"""The processor of this machine, how the runtime multiplies int8 on it, and the memory."""

import importlib
import os
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx.parser
from numpy.typing import NDArray

Array = NDArray[Any]

Instructions: TypeAlias = Literal["avx2", "avx512"]
"""The vectors that the runtime's products and rows are calculated with, where that was measured."""

SATURATES = "pairs that saturate in 16 bits"
"""What `Processor.int8` is without an instruction that adds products of int8 in 32 bits."""

INT8_KEY = "graphgen.int8"
"""Model metadata: what the file's int8 products need of a processor: `FITS`, or in words."""

FITS = "exact on every processor"
NEEDS = (
    "sums of int8 in 32 bits, as VNNI, AMX and the dot products of Arm compute them; elsewhere the "
    "session option session.x64quantprecision=1"
)

_INSTRUCTIONS = {
    "amx_int8": "AMX",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX-VNNI",
    "i8mm": "matrix products of Arm (I8MM)",
    "asimddp": "dot products of Arm",
}
"""Flags of processors, the fastest first, and what they stand for."""

_PAIR = """<ir_version: 8, opset_import: ["": 13]>
pair (uint8[1, 2] a) => (int32[1, 1] y) <int8[2, 1] b = {127, 127}> { y = MatMulInteger(a, b) }
"""


@dataclass(frozen=True)
class Processor:
    """Its brand, and what the runtime's products of unsigned and signed bytes are made of."""

    name: str
    int8: str

    @property
    def saturates(self) -> bool:
        """Whether the products of two neighbors are added in 16 bits and cut off there."""
        return self.int8 == SATURATES

    def __str__(self) -> str:
        return f"{self.name}, int8 by {self.int8}"


@cache
def processor() -> Processor:
    """The processor of this machine.

    Whether sums saturate comes from one product on the installed runtime: flags know nothing about
    the runtime's build or an emulator.
    """
    name, flags = described()
    if _saturates():
        return Processor(name, SATURATES)
    known = (kernels for flag, kernels in _INSTRUCTIONS.items() if flag in flags)
    return Processor(name, next(known, "sums of 32 bits"))


def described() -> tuple[str, frozenset[str]]:
    """The name of this machine's processor and its flags, as the archspec package finds them."""
    from archspec.cpu import brand_string, host
    from archspec.cpu.detect import detected_info

    name = " ".join((brand_string() or host().name).split())
    return name, frozenset(host().features | detected_info().features)


def memory() -> int | None:
    """The bytes of memory of this machine, if the system says."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


@cache
def instructions() -> Instructions:
    """Those of this machine; `avx2` stands for all that have no AVX-512."""
    from archspec.cpu import host

    return "avx512" if "avx512f" in host().features else "avx2"


def _saturates() -> bool:
    """Whether the runtime computes 255 · 127 + 255 · 127 as anything but 64,770."""
    ort = importlib.import_module("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    model = onnx.parser.parse_model(_PAIR).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    [found] = session.run(None, {"a": np.full((1, 2), 255, np.uint8)})
    return bool(found.item() != 2 * 255 * 127)


def saturating_product(a: Array, b: Array) -> Array:
    """a (M, K) uint8 times b (K, N) int8, int32 (M, N), as a processor that saturates computes it.

    Σᵢ clip(a[2i] b[2i] + a[2i+1] b[2i+1], -2¹⁵, 2¹⁵ - 1): the x64 instruction VPMADDUBSW, then sums
    in 32 bits (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2).
    """
    total = np.zeros((len(a), b.shape[1]), np.int32)
    for i in range(0, len(b), 2):
        pair = a[:, i : i + 2].astype(np.int32) @ b[i : i + 2].astype(np.int32)
        total += np.clip(pair, -(2**15), 2**15 - 1)
    return total
