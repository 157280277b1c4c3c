"""Large pages for the weights of a session: a product with one row reads all of them once."""

import ctypes
from contextlib import suppress
from pathlib import Path

_SIZE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1
_MMAP_THRESHOLD, _LARGEST = -3, 32 << 20  # M_MMAP_THRESHOLD of glibc, and the most it can be


def side_by_side() -> None:
    """Have what is allocated from now on lie side by side, up to 32 MB each; glibc only.

    By default glibc maps each piece of 128 kB and more by itself, between pages of 4 kB, until it
    frees one as large: then it raises the limit to that size, up to 32 MB, as is done here.
    """
    with suppress(AttributeError, TypeError):  # of other libraries, and where there is none
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGEST)


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
