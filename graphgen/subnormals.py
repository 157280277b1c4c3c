"""Numbers below the smallest normal one, 2⁻¹²⁶, that a thread may count as 0.

exp of a number that a mask hides is such a number before it is 0. Where the runtime calculates with
AVX-512, Intel's processors take far longer for it: a softmax of 4 million numbers, half of them
hidden, took 14 ms instead of 1.8 (docs/deploy-a-checkpoint.md).
"""

import ctypes
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

FLUSH = "session.set_denormal_as_zero"
"""The session option that lets all threads of a session count them as 0, but not the one that runs
it: this one does what the first session of the process asked for, and so does numpy in it."""

_ENVIRONMENT, _MXCSR = 32, 28
"""The bytes of glibc's fenv_t on x86-64, and where in it the 32 bits of the register MXCSR are."""

_AS_ZERO = 1 << 15 | 1 << 6
"""FTZ and DAZ: results and operands (Intel 64 and IA-32 Architectures Software Developer's Manual,
volume 1, 10.2.3)."""


@cache
def _library() -> Any:
    """The C library that reads and sets the register, if it is one that is known here."""
    if platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        return None
    return ctypes.CDLL("libm.so.6")


def can_flush() -> bool:
    """Whether `flushing` can set this thread, and set it back."""
    return _library() is not None


@contextmanager
def flushing(wanted: bool) -> Iterator[None]:
    """Count subnormal numbers as 0 in this thread for as long as the block runs, where it can.

    What the block does to the thread's floating-point environment ends with it.
    """
    library = _library() if wanted else None
    if library is None:
        yield
        return
    before = ctypes.create_string_buffer(_ENVIRONMENT)
    library.fegetenv(before)
    within = ctypes.create_string_buffer(before.raw, _ENVIRONMENT)
    (register,) = struct.unpack_from("<I", within, _MXCSR)
    struct.pack_into("<I", within, _MXCSR, register | _AS_ZERO)
    library.fesetenv(within)
    try:
        yield
    finally:
        library.fesetenv(before)
