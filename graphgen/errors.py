"""The errors that a user can cause: each is one sentence and points at the user's own line."""

import difflib
import importlib
import inspect
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, NoneType
from typing import Any, get_args

_PACKAGE = Path(__file__).resolve().parent
OURS = tuple(
    f"{folder}{os.sep}"
    for folder in (_PACKAGE, _PACKAGE.parent / "ops", _PACKAGE.parent / "export")
)
_STANDARD = f"{Path(inspect.__file__).parent}{os.sep}"
"""The folders of graphgen and of Python's own library: their lines are not the user's."""


class GraphgenError(Exception):
    """Bad input: who, what arrived, what was wanted, what to do. Exit code 2."""


class GateError(GraphgenError):
    """A gate the caller set (a tolerance, an expected count) was not met. Exit code 3."""


class MissingNameError(GraphgenError, AttributeError):
    """A name that does not exist: for hasattr an AttributeError, for users one of ours."""


class GraphgenWarning(UserWarning):
    """Something to know that stops nothing: one line, which commands print on stderr."""


class Opened:
    """What the runtime has opened, which no other process can have: pickling it is an error."""

    def __reduce__(self) -> str | tuple[Any, ...]:
        name = type(self).__name__
        raise GraphgenError(
            f"{name}: what the runtime has opened cannot be pickled or copied; give the path, and "
            f"open a {name} from it where it is needed{user_line()}"
        )


_TYPED = 1200  # characters of options that an error of a command has room for
_EXTRAS = {"ray": "ray", "jinja2": "chat", "llguidance": "grammar"}
"""Modules, and the extra that installs them; [map] installs the others."""


def needed(name: str) -> Any:
    """A module of an extra. Raises GraphgenError if it does not import."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        top = name.partition(".")[0]
        raise GraphgenError(
            f"{top} does not import ({error}); run "
            f'`pip install "graphgen-onnx[{_EXTRAS.get(top, "map")}]"`'
        ) from error


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raise the GraphgenError that another library has wrapped in an error of its own."""
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
            problem = f"{name} is {size!r}; it must be an integer of at least 1"
            raise GraphgenError(f"{who}: {problem}{user_line()}")


def refuse(who: str, problems: Mapping[str, bool]) -> None:
    """Raise GraphgenError with the first problem that there is."""
    for problem, is_there in problems.items():
        if is_there:
            raise GraphgenError(f"{who}: {problem}{user_line()}")


def check_seed(who: str, seed: int) -> None:
    """Raise GraphgenError unless a seed is one for every generator of random numbers."""
    if not 0 <= seed < 1 << 63:
        raise GraphgenError(f"{who}: seed is {seed}; it must be from 0, below 2^63{user_line()}")


def one_of(who: str, words: Any, **given: object) -> None:
    """Raise GraphgenError unless every option is one of the words of a Literal, or None.

    None counts only if `words` is `Literal[...] | None`, as where the option is declared.
    """
    known = choices_of(words)
    *first, last = map(repr, known)
    for name, word in given.items():
        if word not in known:
            choices = f"{', '.join(first)} or {last}" if first else last
            problem = f"{name} is {word!r}; choose {choices}{near(word, known)}"
            raise GraphgenError(f"{who}: {problem}{user_line()}")


def choices_of(literal: Any) -> tuple[Any, ...]:
    """The words of a Literal, in its order, and None if it is `Literal[...] | None`."""
    nested = (get_args(part) or (part,) for part in get_args(literal))
    return tuple(None if word is NoneType else word for words in nested for word in words)


def near(word: object, known: Iterable[object]) -> str:
    """`; did you mean 'gelu'?`, or '' if no known word is like it."""
    words = {str(each).lower(): each for each in known}
    found = difflib.get_close_matches(str(word).lower(), words, 1)
    return f"; did you mean {words[found[0]]!r}?" if found else ""


def missing(who: str, name: str, hint: Callable[[str], str]) -> AttributeError:
    """The error for a name that a module does not have, with a hint for it."""
    if name.startswith("_"):  # Python asks for such names, often: no hint is looked for
        return AttributeError(f"module {who!r} has no attribute {name!r}")
    message = f"{who} has no {name}{hint(name)}{user_line()}"
    return MissingNameError(message, name=name, obj=sys.modules[who])


def misspelled(given: Iterable[str], known: Sequence[str]) -> str:
    """`; did you mean 'bias'?` for the first keyword that is not known, or ''."""
    return next((near(name, known) for name in given if name not in known), "")


def warn(message: str) -> None:
    """Issue a GraphgenWarning that points at the user's own line."""
    frame = _user_frame()
    file, line = (frame.f_code.co_filename, frame.f_lineno) if frame else ("graphgen", 0)
    warnings.warn_explicit(message, GraphgenWarning, file, line)


def user_line() -> str:
    """` (file.py:12)`, the innermost caller outside graphgen, or '' if a command was typed."""
    frame = _user_frame()
    return f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})" if frame else ""


def spelled(option: str, values: str | Sequence[str] | None = None) -> str:
    """`frozen=['a', 'b']`, or, if a command was typed, what it takes: `--frozen a --frozen b`.

    Without values, only how the option is called.
    """
    if not _is_typed():
        return f"{option}=" + ("" if values is None else repr(values))
    words = [values] if isinstance(values, str) else values or ()
    option = option.replace("_", "-")
    text = " ".join(f"--{option} {shlex.quote(word)}" for word in words) or f"--{option}"
    if len(text) > _TYPED:  # the error of a command would be cut in the middle of a name
        text = f"--{option} for each of {len(words)} names, which the same call in Python lists"
    return text


def _is_typed() -> bool:
    """Whether a command has called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_command(frame):
        frame = frame.f_back
    return frame is not None


def _is_command(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("graphgen.commands")


def _user_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if _is_command(frame):
            return None
        others = (*OURS, _STANDARD, "<")
        if not name.startswith(others) and not re.search("(site|dist)-packages", name):
            return frame
        frame = frame.f_back
    return None
