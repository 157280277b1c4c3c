"""The second file of a checkpoint: tensors one after another, at places that the first one names.

It is what a flatbuffer of 2 GiB cannot hold, or what no step of a run changes.
"""

import os
import shutil
import zlib
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_SMALL = 64  # bytes of a tensor that stays in the first file in any case
_ALIGNED = 8  # bytes
_APART = 64 << 20  # bytes that are worth a file of their own


def data_of(path: Path) -> Path:
    """The second file of a checkpoint."""
    return path.with_name(path.name + ".data")


class Data:
    """What a second file has: the place of each array that stands in it, and a checksum of all."""

    def __init__(self, arrays: Iterable[Array]) -> None:
        self.arrays = [array for array in arrays if array.nbytes > _SMALL]
        self.places: dict[int, int] = {}
        self.checksum = 0

    def write(self, file: Path | None) -> None:
        """Write the arrays, each at a multiple of 8 bytes. Without a file, only see where."""
        at, self.checksum = 0, 0
        with ExitStack() as stack:
            stream = None if file is None else stack.enter_context(file.open("wb"))
            for array in self.arrays:
                raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                for piece in (np.zeros(-at % _ALIGNED, np.uint8), raw):
                    self.places[id(array)], at = at, at + piece.size
                    self.checksum = zlib.crc32(piece.data, self.checksum)
                    if stream is not None:
                        stream.write(piece.data)


class Unchanged(Data):
    """Arrays that no step of a run changes: written once, for all checkpoints of the run.

    The second files of these are hard links of the first one, where the disk has those. With less
    than 64 MiB, `pays` is false: then one file is simpler.
    """

    def __init__(self, arrays: Iterable[Array]) -> None:
        super().__init__(arrays)
        self.pays = sum(array.nbytes for array in self.arrays) > _APART
        self._at: Path | None = None

    def stands_at(self, target: Path) -> bool:
        """Whether `target` has the arrays already; so it has where a run is resumed."""
        if self._at is None and target.is_file():
            self.write(None)
            data = np.memmap(target, np.uint8, "r").data if target.stat().st_size else b""
            self._at = target if zlib.crc32(data) == self.checksum else None
        return self._at is not None and same(self._at, target)

    def put(self, file: Path, target: Path) -> None:
        """Let `file` hold the arrays; it will be renamed to `target`."""
        if self._at is not None and self._at.is_file():
            link(self._at, file)
        else:
            self.write(file)
        self._at = target


def same(one: Path, other: Path) -> bool:
    """Whether both are the same file."""
    return one.is_file() and other.is_file() and one.samefile(other)


def link(source: Path, file: Path) -> None:
    """Let `file`, which is there, have the contents of `source`, and where it can, its bytes."""
    file.unlink()
    with suppress(OSError):  # some disks have no links, or no more of this file
        os.link(source, file)
        return
    shutil.copyfile(source, file)
