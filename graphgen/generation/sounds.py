"""Sounds in files: what WAV files hold, at the rate that a model hears."""

import math
import struct
from pathlib import Path

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.files import regular
from graphgen.operands import Array

_WHOLE, _FLOATS, _A_LAW, _MU_LAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
_BITS = {_WHOLE: (8, 16, 24, 32), _FLOATS: (32, 64), _A_LAW: (8,), _MU_LAW: (8,)}
"""What WAV files call their kinds of samples, and the bits that these have."""

_STREAMED = 0xFFFFFFFF
"""The size of samples that were written before their number was known."""

_ZEROS, _BELOW = 6, 0.99
"""Zeros of the sinc that are kept on each side, and what is kept of the lower rate's band."""

_MOST = 1 << 24
"""The largest number of weights to resample with."""


def samples(path: Path, rate: int) -> Array:
    """The samples of a WAV file at this rate, between -1 and 1, float64.

    They are whole numbers of 8 to 32 bits, floats, or of 8 bits by the A-law or μ-law (ITU-T
    G.711). Two channels become their mean. Raises GraphgenError.
    """
    try:
        data = memoryview(regular(path).read_bytes())
    except OSError as error:
        raise GraphgenError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        kind, channels, given, bits, data = _parts(data)
        if bits not in _BITS.get(kind, ()):
            raise ValueError(f"samples of kind {kind} with {bits} bits")
        if not 1 <= channels <= 2 or given < 1:
            raise ValueError(f"{channels} channels at {given:,} Hz")
        frame = channels * bits // 8
        if len(data) % frame:
            raise ValueError(f"it ends inside a sample, after {len(data) // frame}")
    except (ValueError, struct.error) as error:
        reason = "it ends too early" if isinstance(error, struct.error) else error
        raise GraphgenError(
            f"{path} is not a WAV file that is read here: {reason}; convert it to one of whole "
            "numbers or floats, of one or two channels"
        ) from error
    x = _numbers(np.frombuffer(data, np.uint8), kind, bits).reshape(-1, channels).mean(1)
    if not np.isfinite(x).all():
        raise GraphgenError(f"{path} has samples that are not finite; convert it")
    if given != rate and math.prod(_weights(given, rate)) > _MOST:
        raise GraphgenError(
            f"{path} is at {given:,} Hz, of which {rate:,} Hz is no simple part; convert it"
        )
    return x if given == rate else resampled(x, given, rate)


def _parts(data: memoryview) -> tuple[int, int, int, int, memoryview]:
    """The kind of samples, channels, rate and bits of a WAV file, and the samples."""
    begin = bytes(data[:12])
    if begin[:4] != b"RIFF" or begin[8:] != b"WAVE":
        raise ValueError(f"it begins with {begin[:4]!r}")
    at, found = 12, None
    while True:
        if at + 8 > len(data):
            raise ValueError("it ends too early")
        name, size = struct.unpack_from("<4sI", data, at)
        part = data[at + 8 : at + 8 + size]
        if name == b"fmt ":
            kind, channels, rate, bits = struct.unpack_from("<HHI6xH", part)
            if kind == _EXTENSIBLE:
                [kind] = struct.unpack_from("<H", part, 24)
            found = kind, channels, rate, bits
        elif name == b"data":
            if found is None:
                raise ValueError("its samples come before what they are")
            if len(part) < size != _STREAMED:
                raise ValueError(f"it ends after {len(part):,} of {size:,} bytes")
            return *found, part
        at += 8 + size + size % 2


def _numbers(data: Array, kind: int, bits: int) -> Array:
    """Samples between -1 and 1 from their bytes."""
    if kind == _FLOATS:
        return data.view(f"<f{bits // 8}").astype(np.float64)
    if kind in (_A_LAW, _MU_LAW):
        byte = data.astype(np.int32) ^ (0x55 if kind == _A_LAW else 0xFF)
        part, step = (byte >> 4) & 7, byte & 15
        if kind == _MU_LAW:
            size = ((2 * step + 33) << part) - 33  # of 2^13
        else:
            size = np.where(part == 0, 2 * step + 1, (2 * step + 33) << np.maximum(part - 1, 0))
            size = size * 2  # of 2^12
        positive = (byte & 0x80 != 0) == (kind == _A_LAW)
        return np.where(positive, size, -size) / 2.0**13
    if bits == 8:
        return (data - 128.0) / 128.0
    whole = np.zeros((len(data) * 8 // bits, 4), np.uint8)  # the lowest bytes of a sample are 0
    whole[:, 4 - bits // 8 :] = data.reshape(len(whole), bits // 8)
    return np.asarray(whole.view("<i4")[:, 0] / 2.0**31)


def _weights(given: int, rate: int) -> tuple[int, int]:
    """How many samples are made at once, and of how many each is a sum."""
    common = math.gcd(given, rate)
    step, made = given // common, rate // common
    return made, 2 * _reach(step, made) + step


def _reach(step: int, made: int) -> int:
    return math.ceil(_ZEROS * step / (min(step, made) * _BELOW))


def resampled(x: Array, given: int, rate: int) -> Array:
    """Samples at another rate, as torchaudio's `resample` makes them by default.

    Each is a sum of samples near it, weighted by a sinc that lets pass what both rates hold,
    under a Hann window (https://ccrma.stanford.edu/~jos/resample).
    """
    common = math.gcd(given, rate)
    step, made = given // common, rate // common
    reach, band = _reach(step, made), min(step, made) * _BELOW
    places = np.arange(-reach, reach + step) / step - np.arange(made)[:, None] / made
    t = np.clip(places * band, -_ZEROS, _ZEROS)
    weights = np.sinc(t) * np.cos(np.pi * t / _ZEROS / 2) ** 2 * band / step  # (made, size)
    padded = np.pad(x, (reach, reach + step))
    frames = np.lib.stride_tricks.sliding_window_view(padded, weights.shape[1])[::step]
    y = np.empty((len(frames), made))
    for at in range(0, len(frames), 1 << 14):  # a frame is copied, with what others have of it
        y[at : at + (1 << 14)] = frames[at : at + (1 << 14)] @ weights.T
    return y.reshape(-1)[: math.ceil(made * len(x) / step)]
