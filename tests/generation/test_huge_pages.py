"""Memory in large pages: what was allocated moves there and keeps its content."""

import ctypes
import mmap
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from graphgen.generation import huge_pages as module
from graphgen.generation.huge_pages import huge_pages

SIZE = 16 << 20


def in_huge_pages() -> int:
    """Bytes of this process in huge pages, or -1 where that is not told."""
    rollup = Path("/proc/self/smaps_rollup")
    lines = rollup.read_text().splitlines() if rollup.exists() else []
    return next((int(x.split()[1]) << 10 for x in lines if x.startswith("AnonHuge")), -1)


def allocate() -> np.ndarray:
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, np.uint64)
    array[:] = 7  # without an array next to it, which would count
    return array


@pytest.mark.skipif(in_huge_pages() < 0, reason="the system tells nothing of huge pages")
def test_what_is_allocated_moves_into_huge_pages_and_keeps_its_content() -> None:
    array, before = allocate(), in_huge_pages()
    huge_pages()
    gained = in_huge_pages() - before
    place = ctypes.c_void_p(array.ctypes.data + (4 << 20) & -(2 << 20))
    if ctypes.CDLL(None).madvise(place, ctypes.c_size_t(2 << 20), 25):
        pytest.skip("this kernel has no MADV_COLLAPSE, or no huge page to give")
    assert gained >= SIZE - (4 << 20)
    assert (array == 7).all()


def test_a_system_without_them_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Path", lambda path: Path("/nowhere"))
    before = in_huge_pages()
    array = allocate()
    huge_pages()
    assert in_huge_pages() <= max(before, 0)
    assert (array == 7).all()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has such a limit")
def test_large_pieces_lie_side_by_side() -> None:
    """In a process of its own: the limit stays, and a large piece that was freed moves it, too."""
    code = (
        "import ctypes; from graphgen.generation.huge_pages import side_by_side;"
        "libc = ctypes.CDLL(None); libc.malloc.restype = ctypes.c_void_p; size = 4 << 20;"
        "apart = abs(libc.malloc(size) - libc.sbrk(0)) > size; side_by_side();"
        "libc.sbrk.restype = ctypes.c_void_p; first, then = libc.malloc(size), libc.malloc(size);"
        "print(apart, then - first < size + 4096, libc.sbrk(0) - then < 2 * size)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 3
