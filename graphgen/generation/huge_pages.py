"""Large pages for the weights of a session: a product with one row reads all of them once."""

import ctypes
from contextlib import suppress
from pathlib import Path

_SIZE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
_LARGEST = 32 << 20  # what the second can be at most


def side_by_side() -> None:
    """Have what is allocated from now on lie side by side, up to 32 MB each; glibc only.

    By default glibc maps each piece of 128 kB and more by itself, between pages of 4 kB, until it
    frees one as large: then it raises the limit to that size, up to 32 MB, and keeps up to twice as
    much that is free, as is done here. Else arrays of each step are given back and mapped again.
    """
    with suppress(AttributeError, TypeError):  # of other libraries, and where there is none
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGEST)
        ctypes.CDLL(None).mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)


def huge_pages() -> None:
    """Move what this process has allocated into pages of 2 MB, where the system has them.

    The runtime's weights lie in pages of 4 kB, unless the whole system is set to larger ones, and
    reading them in order is then held up by the tables of pages. Copying them into large pages
    takes about 0.6 ms a MB, once. Elsewhere than on Linux 6.1 or newer nothing is done.
    """
    if not (chunks := _chunks()):
        return
    libc = ctypes.CDLL(None)
    for address in chunks:
        # What cannot be (an empty piece, an older kernel, no memory) stays as it is.
        libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(_SIZE), _COLLAPSE)


def _chunks() -> set[int]:
    """The addresses of all aligned 2 MB that are this process's own, to read and write."""
    maps, found = Path("/proc/self/maps"), set[int]()
    for line in maps.read_text().splitlines() if maps.exists() else ():
        span, mode, _, _, inode, *_ = line.split()
        if mode == "rw-p" and inode == "0":
            low, high = (int(address, 16) for address in span.split("-"))
            found.update(range(-(-low // _SIZE) * _SIZE, high - _SIZE + 1, _SIZE))
    return found
