"""Files to read: of a regular kind, and as large as they are when they are opened."""

import errno
import os
import stat
from pathlib import Path

from graphgen.errors import GraphgenError


def regular(path: str | os.PathLike[str]) -> Path:
    """The path itself, if it is a regular file.

    Otherwise raises an OSError that says so. Reading a pipe waits for its other end, and a device
    may have no end.
    """
    mode = Path(path).stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Not a regular file", os.fspath(path))
    return Path(path)


def present(path: Path) -> bool:
    """Whether there is a file at an optional place.

    Raises GraphgenError for anything else there, which would otherwise count as absent: a pipe, a
    folder, or a link to nothing.
    """
    if not os.path.lexists(path):
        return False
    try:
        regular(path)
    except OSError as error:
        raise GraphgenError(f"{path} cannot be read: {error.strerror}; give a file") from error
    return True


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a regular file, without what is written to it meanwhile. Raises OSError."""
    with regular(path).open("rb") as stream:
        return stream.read(os.fstat(stream.fileno()).st_size)
