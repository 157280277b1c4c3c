"""What is written next to its place until it is whole: one writer each, gone when the writer is."""

import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from graphgen.errors import GraphgenError

try:
    import fcntl
except ImportError:  # on Windows; then what a killed process leaves stays
    fcntl = None  # type: ignore[assignment]

_SUFFIX = ".partial"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux


@contextmanager
def beside(target: Path, *, folder: bool = False) -> Iterator[Path]:
    """A new file or folder `.<name>.<random>.partial` next to `target`, to be renamed to it.

    It is locked as long as the context lasts, and removed at its end if it is still there. What a
    killed process has left there has no lock, and is removed first. Raises OSError.
    """
    _remove_stale(target)
    lock = None
    while lock is None:  # until no other process has taken it for a stale one before it was locked
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}{_SUFFIX}")
        if folder:
            partial.mkdir()
        else:
            partial.touch(exist_ok=False)
        with suppress(FileNotFoundError):
            lock = lock_of(partial, wait=True)
        if lock is not None and not partial.exists():
            os.close(lock)
            lock = None
    try:
        yield partial
    finally:
        try:
            _remove(partial)
        finally:
            os.close(lock)


def reserve(stream: IO[bytes], size: int) -> None:
    """Let a new file have so many bytes. Raises OSError if its disk, or a limit, has no room.

    Where the system has no such call, or the disk knows none, it does nothing.
    """
    if size and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(stream.fileno(), 0, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise


@contextmanager
def in_place_of(out: Path) -> Iterator[Path]:
    """A folder to fill next to `out`, which takes its place if all goes well. Raises OSError.

    An error of ours that names a file in it names it by its final place.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with beside(out, folder=True) as partial:
        try:
            yield partial
        except GraphgenError as error:
            raise GraphgenError(str(error).replace(str(partial), str(out))) from error
        with in_turn(out.parent), beside(out, folder=True) as aside:
            if _exchange(partial, out):
                return
            if out.exists():
                out.rename(aside / out.name)
            try:
                partial.rename(out)
            finally:
                if (aside / out.name).exists() and not out.exists():
                    (aside / out.name).rename(out)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change places at once, so that no kill leaves neither of them there.

    False if one of them is missing, or the system cannot do it.
    """
    try:
        libc = ctypes.CDLL(None)
        here, both = _AT_FDCWD, _RENAME_EXCHANGE
        return not libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), both)
    except (OSError, TypeError, AttributeError):  # not on Linux
        return False


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Let one process at a time rename files in a folder: what belongs together stays together.

    A folder that is not whole yet has one writer, who holds its lock already.
    """
    if folder.suffix == _SUFFIX:
        yield
        return
    lock = lock_of(folder, wait=True)
    try:
        yield
    finally:
        os.close(lock)


def lock_of(path: Path, *, wait: bool = False) -> int:
    """An open descriptor that holds the lock of a file or folder, where there are locks.

    Raises BlockingIOError if another one holds it, unless `wait`.
    """
    descriptor = os.open(os.devnull if fcntl is None else path, os.O_RDONLY)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # some file systems have no locks
        pass
    return descriptor


def _remove_stale(target: Path) -> None:
    if fcntl is None or not target.parent.is_dir():
        return
    mine = re.compile(rf"\.{re.escape(target.name)}\.\w+{re.escape(_SUFFIX)}")
    for left in target.parent.iterdir():
        if mine.fullmatch(left.name):
            with suppress(OSError):  # a BlockingIOError where its writer is alive
                lock = lock_of(left)
                _remove(left)
                os.close(lock)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
