"""The errors a user can cause, each told in one sentence and pointed at the user's own line."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_PACKAGE = Path(__file__).resolve().parent
OURS = (str(_PACKAGE), str(_PACKAGE.parent / "ops"), str(_PACKAGE.parent / "export"))


class GraphgenError(Exception):
    """Bad input: who, what arrived, what was wanted, what to do. Exit code 2."""


class GateError(GraphgenError):
    """A gate the caller set (a tolerance, an expected count) was not met. Exit code 3."""


class GraphgenWarning(UserWarning):
    """What was given and has no effect."""


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raise a GraphgenError that another library has put into an error of its own."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, GraphgenError):
            cause = cause.__cause__
        if cause is None or cause is error:
            raise
        raise cause from None


def positive(who: str, **sizes: int | None) -> None:
    """Raise GraphgenError unless every size is an int of at least 1, or None for its default."""
    for name, size in sizes.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise GraphgenError(f"{who}: {name} is {size!r}; it must be an integer of at least 1")


def user_line() -> str:
    """` (file.py:12)` of the innermost caller outside graphgen, or '' when there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*OURS, "<")) and not re.search("(site|dist)-packages", name):
            return f" ({Path(name).name}:{frame.f_lineno})"
        frame = frame.f_back
    return ""
