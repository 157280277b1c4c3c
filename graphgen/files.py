"""Files to read: of a regular kind, and as large as they are when they are opened."""

import contextlib
import errno
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from graphgen.errors import GraphgenError, user_line

_MOST = 1 << 24  # bytes of a JSON file


def path_of(path: str | os.PathLike[str], who: str) -> Path:
    """The path that a user gave. Raises GraphgenError for anything else."""
    try:
        found = Path(path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            found.lstat()
    except (TypeError, ValueError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        shown = str(path) if isinstance(path, Path) else path
        raise GraphgenError(
            f"{who}: got {shown!r:.60}, which is not a path: {reason}{user_line()}"
        ) from error
    return found


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


def parse_json(text: str | bytes) -> Any:
    """The value in a text of JSON. Raises ValueError, also for an object with a name twice.

    `json.loads` takes the last of its values, without a word, and infinity for 1e400, which is
    refused, too.
    """
    return json.loads(text, object_pairs_hook=_once, parse_float=_finite)


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text:.40} is beyond the largest number")
    return number


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found, names = dict(pairs), [name for name, _ in pairs]
    if len(found) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two values of an object are called {twice!r}")
    return found


def read_json(path: Path, kind: type | tuple[type, ...] = dict) -> Any:
    """The object, or list, or either, in a JSON file of at most 16 MiB."""
    try:
        if (size := regular(path).stat().st_size) > _MOST:
            raise GraphgenError(
                f"{path} has {size:,} bytes; it must be a JSON file of at most 16 MiB"
            )
        found = parse_json(text := read_bytes(path).decode("utf-8-sig"))
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()  # half a character is no text
    except OSError as error:
        raise GraphgenError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise GraphgenError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        wanted = " or ".join("object" if one is dict else "list" for one in kinds)
        raise GraphgenError(f"{path} holds a {type(found).__name__}; it must hold a JSON {wanted}")
    return found
