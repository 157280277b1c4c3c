"""Large pages for a session's weights, since a product with one row reads all of them once."""

import ctypes
from contextlib import suppress
from pathlib import Path

_SIZE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
_LARGEST = 32 << 20  # the most that the second can be


def side_by_side() -> None:
    """Let later allocations, up to 32 MB each, lie side by side; glibc only.

    By default glibc maps each piece of 128 kB or more on its own, in pages of 4 kB, until a piece
    is freed. Then it raises the limit to that piece's size, up to 32 MB, and keeps up to twice that
    much free memory. This sets both at once; otherwise each step's arrays are unmapped and mapped.
    """
    with suppress(AttributeError, TypeError):  # with another C library, or none
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGEST)
        ctypes.CDLL(None).mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)


def huge_pages() -> None:
    """Move what this process has allocated into pages of 2 MB, if the system has them.

    The runtime's weights lie in pages of 4 kB, unless the whole system is set to larger ones, and
    looking up the pages slows down reading them in order. Copying them into large pages takes
    about 0.6 ms a MB, once. On anything but Linux 6.1 or newer this does nothing.
    """
    if not (chunks := _chunks()):
        return
    libc = ctypes.CDLL(None)
    for address in chunks:
        # Where this fails (an empty piece, an older kernel, no memory), nothing changes.
        libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(_SIZE), _COLLAPSE)


def _chunks() -> set[int]:
    """The addresses of all aligned 2 MB pieces of this process's own read-write memory."""
    maps, found = Path("/proc/self/maps"), set[int]()
    for line in maps.read_text().splitlines() if maps.exists() else ():
        span, mode, _, _, inode, *_ = line.split()
        if mode == "rw-p" and inode == "0":
            low, high = (int(address, 16) for address in span.split("-"))
            found.update(range(-(-low // _SIZE) * _SIZE, high - _SIZE + 1, _SIZE))
    return found
