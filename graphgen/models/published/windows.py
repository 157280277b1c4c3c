"""Windows of a text, as the tokens that a folder's tokenizer makes of it."""

from pathlib import Path

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.files import regular
from graphgen.models.published.folder import context
from graphgen.models.published.tokenizer import encoded, tokenizer
from graphgen.operands import Array

_LENGTH, _WINDOWS = 128, 384
"""The tokens of a window of text, and the most windows that are read."""


def windows(folder: Path, text: Path | None, who: str = "build") -> Array:
    """The tokens of a text, in windows (N, T); no windows if `text` is None.

    Raises GraphgenError for a file that is not text or is too short, or a folder without tokenizer.
    """
    if text is None:
        return np.zeros((0, _LENGTH), np.int64)
    try:
        content = regular(text).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise GraphgenError(f"{who}: {text} is not UTF-8: {error}; give a text file") from error
    except OSError as error:
        raise GraphgenError(f"{who}: {text} cannot be read: {error.strerror}") from error
    reader = tokenizer(folder)
    if reader is None:
        raise GraphgenError(f"{who}: {folder} has no tokenizer.json, which --text needs")
    ids = np.array(encoded(who, reader, content, special=False).ids, np.int64)
    length = min(_LENGTH, context(folder) or _LENGTH)
    if len(ids) < 2 * length:
        raise GraphgenError(f"{who}: {text} has {len(ids)} tokens; give {2 * length} or more")
    count = min(len(ids) // length, _WINDOWS)
    return ids[: count * length].reshape(count, length)
