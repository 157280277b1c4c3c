"""Formats of GGUF's blocks that have tables, or scales and integers in many places: bit by bit.

Each weight is found alone in the bytes of its block, as the format places it, and summed in
float64.
"""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf_files import ODD_KINDS, gguf

from graphgen.errors import GraphgenError
from graphgen.models.published.gguf import open_gguf

_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def q2_k(block: bytes, i: int) -> float:
    side, within = divmod(i, 128)
    q = block[16 + 32 * side + within % 32] >> 2 * (within // 32) & 3
    own = block[i // 16]
    return half(block, 80) * (own & 15) * q - half(block, 82) * (own >> 4)


def q3_k(block: bytes, i: int) -> float:
    side, within = divmod(i, 128)
    q = block[32 + 32 * side + within % 32] >> 2 * (within // 32) & 3
    q -= 0 if block[i % 32] >> i // 32 & 1 else 4
    j = i // 16
    low = block[96 + j % 8] >> 4 * (j // 8) & 15
    high = block[104 + j % 4] >> 2 * (j // 4) & 3
    return half(block, 108) * (low + 16 * high - 32) * q


def iq4_nl(block: bytes, i: int) -> float:
    return half(block, 0) * _TABLE[block[2 + i % 16] >> 4 * (i // 16) & 15]


def iq4_xs(block: bytes, i: int) -> float:
    j, within = divmod(i, 32)
    low, high = block[4 + j // 2] >> 4 * (j % 2) & 15, block[2 + j // 4] >> 2 * (j % 4) & 3
    code = block[8 + 16 * j + within % 16] >> 4 * (within // 16) & 15
    return half(block, 0) * (low + 16 * high - 32) * _TABLE[code]


def tq1_0(block: bytes, i: int) -> float:
    start, size, i = (0, 32, i) if i < 160 else (32, 16, i - 160) if i < 240 else (48, 4, i - 240)
    byte = block[start + i % size]
    return half(block, 52) * ((byte * 3 ** (i // size) % 256) * 3 // 256 - 1)


def tq2_0(block: bytes, i: int) -> float:
    side, within = divmod(i, 128)
    return half(block, 64) * ((block[32 * side + within % 32] >> 2 * (within // 32) & 3) - 1)


def mxfp4(block: bytes, i: int) -> float:
    code = block[1 + i % 16] >> 4 * (i // 16) & 15
    return 2.0 ** (block[0] - 127) * _FP4[code & 7] * (-1 if code > 7 else 1)


FORMATS: dict[str, tuple[int, int, tuple[int, ...], Callable[[bytes, int], float]]] = {
    "Q2_K": (256, 84, (80, 82), q2_k),
    "Q3_K": (256, 110, (108,), q3_k),
    "IQ4_NL": (32, 18, (0,), iq4_nl),
    "IQ4_XS": (256, 136, (0,), iq4_xs),
    "TQ1_0": (256, 54, (52,), tq1_0),
    "TQ2_0": (256, 66, (64,), tq2_0),
    "MXFP4": (32, 17, (), mxfp4),
}


def random_bytes(kind: str, count: int) -> bytes:
    """Blocks of random bytes, the numbers in half precision of which are of ordinary size."""
    size, halves = FORMATS[kind][1:3]
    rng = np.random.default_rng(ODD_KINDS[kind])
    raw = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for at in halves:
        raw[:, at : at + 2] = rng.uniform(-2, 2, (count, 1)).astype("<f2").view(np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = rng.integers(0, 140, count)  # from the smallest on
    if kind == "TQ2_0":  # no digit is 3
        raw[:, :64] &= ~(raw[:, :64] & raw[:, :64] << 1 & 0xAA)
    return raw.tobytes()


@pytest.mark.parametrize("kind", ODD_KINDS)
def test_a_tensor_means_what_the_format_says_of_each_bit(kind: str, tmp_path: Path) -> None:
    each, size, _, of = FORMATS[kind]
    columns = 2 * each
    data = random_bytes(kind, 6)
    meant = [of(data[b * size : b * size + size], i) for b in range(6) for i in range(each)]
    gguf(tmp_path / "a.gguf", {}, {"w": (kind, (3, columns), data)})
    found = open_gguf(tmp_path / "a.gguf").tensors["w"].read()
    wanted = np.array(meant).reshape(found.shape)
    assert found.dtype == np.float32 and np.isfinite(wanted).all()
    # One rounding of a scale, and of a shift.
    assert np.abs(found - wanted).max() <= 2e-7 * np.abs(wanted).max()
    small = np.abs(wanted) < 1e-3 * np.abs(wanted).max()
    assert kind in ("Q2_K",) or np.allclose(found[small], wanted[small], rtol=2e-7, atol=1e-44)


def test_the_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    gguf(tmp_path / "a.gguf", {}, {"w": ("MXFP4", (1, 32), b"\xff" * 17)})
    with pytest.raises(GraphgenError, match="scales that are no finite numbers"):
        open_gguf(tmp_path / "a.gguf").tensors["w"].read()
