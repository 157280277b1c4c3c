"""What a function may be called with: arguments that it has, of the kinds that it declares."""

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    Optional,
    ParamSpec,
    TypeVar,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import numpy as np

from graphgen.errors import GraphgenError, misspelled, user_line

Given = ParamSpec("Given")
Made = TypeVar("Made")
Public = TypeVar("Public", bound=Callable[..., Any])


def fitting(call: Callable[Given, Made]) -> Callable[Given, Made]:
    """A function that raises GraphgenError if it is called with arguments that do not fit."""

    @wraps(call)
    def wrapper(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        known, further = _arguments(call)
        unknown = [] if further else [name for name in kwargs if name not in known]
        try:
            if not unknown:
                return call(*args, **kwargs)
            problem = f"got an unexpected keyword argument {unknown[0]!r}"
        except TypeError:
            try:
                inspect.signature(call).bind(*args, **kwargs)
            except TypeError as error:
                problem = str(error)
            else:
                raise
        raise GraphgenError(
            f"{_name(call)}: {problem}; its arguments are "
            f"{', '.join(known)}{misspelled(kwargs, known)}{user_line()}"
        )

    return wrapper


@cache
def _arguments(call: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names of a function's arguments, and whether it takes any keyword besides.

    Further keywords of a TypedDict are arguments like the others.
    """
    parameters = inspect.signature(call).parameters.values()
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]
    for p in parameters:
        if get_origin(p.annotation) is Unpack:
            names += get_args(p.annotation)[0].__annotations__
        elif p.kind is p.VAR_KEYWORD:
            return [*names, p.name], True
    return names, False


def _name(call: Callable[..., Any]) -> str:
    """Who complains: `optimize`, `Trainer` or `Trainer.fit`."""
    return call.__qualname__.removesuffix(".__init__")


def checked(public: Public) -> Public:
    """A public function or class that refuses arguments of other kinds than its annotations name.

    A text is no list of texts, and "no" is not False. Numbers of numpy become those of Python.
    What it raises names the user's line.
    """
    made: Any = public
    if isinstance(public, type):
        setattr(public, "__init__", checked(vars(public)["__init__"]))  # noqa: B010
    else:
        made = _checking(public)
    return made  # type: ignore[no-any-return]


def _checking(public: Callable[..., Any]) -> Callable[..., Any]:
    call, signature = fitting(public), inspect.signature(public)
    parameters = signature.parameters.values()
    further = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), "")

    @wraps(public)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return call(*args, **kwargs)  # `fitting` says what is wrong
        for given in (bound.arguments, bound.arguments.get(further, {})):
            for name, value in given.items():
                kind = _kinds(public).get(name, Any)
                if _fits(value, kind):
                    continue
                if not isinstance(value, np.generic) or not _fits(value.item(), kind):
                    problem = _problem(name, value, kind)
                    raise GraphgenError(f"{_name(public)}: {problem}{user_line()}")
                given[name] = value.item()
        try:
            return call(*bound.args, **bound.kwargs)
        except GraphgenError as error:
            if (line := user_line()) and not re.search(r"\(\S+:\d+\)", str(error)):
                error.args = (f"{error}{line}",)
            raise

    return wrapper


@cache
def _kinds(call: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function's arguments, but for those that only type checkers resolve."""
    found = dict[str, Any]()
    for name, p in inspect.signature(call).parameters.items():
        kind = p.annotation
        if get_origin(kind) is Unpack:
            further = get_type_hints(get_args(kind)[0])
            found |= {each: Optional[further[each]] for each in further}  # noqa: UP045  # not given
        if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) or kind is p.empty:
            continue
        if isinstance(kind, str):
            try:
                kind = eval(kind, vars(sys.modules[call.__module__]))
            except NameError:
                continue
        found[name] = kind
    return found


_PLAIN: dict[Any, tuple[Any, str, str]] = {
    bool: (bool | np.bool_, "True or False", "bools"),
    int: (int, "an int", "ints"),
    float: (int | float, "a float", "floats"),
    str: (str, "a text", "texts"),
    NoneType: (NoneType, "None", "None"),
}
"""The class that counts, what one is called in an error, and what several are."""


def _fits(value: object, kind: Any) -> bool:
    """Whether a value is of the kind of an annotation; yes for kinds that are not known here."""
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return any(_fits(value, type(word)) for word in parts)
    if origin in _PLAIN:
        plain = isinstance(value, _PLAIN[origin][0])
        return plain and (kind is bool or not isinstance(value, bool))
    if is_typeddict(origin):
        return isinstance(value, Mapping)
    anything = origin in (Any, np.ndarray)  # lists of numbers are arrays: functions say which
    if anything or not isinstance(origin, type) or getattr(origin, "_is_protocol", False):
        return True
    if isinstance(value, Mapping) and issubclass(origin, Mapping) and parts:
        names, kinds = parts  # options of the runtime, which are texts, may be given as numbers
        return all(_fits(k, names) and (kinds is str or _fits(x, kinds)) for k, x in value.items())
    if not parts or issubclass(origin, Callable | Mapping):  # type: ignore[arg-type]
        return isinstance(value, origin)
    if issubclass(origin, Iterable) and isinstance(value, str | bytes):
        return False
    if isinstance(value, Mapping):  # a list of its keys, where the order does not matter
        return isinstance(value, origin) and all(_fits(key, parts[0]) for key in value)
    if isinstance(value, list | tuple) and issubclass(origin, Iterable):
        return parts[1:] not in ((), (...,)) or all(_fits(x, parts[0]) for x in value)
    return isinstance(value, origin)


def _problem(name: str, value: object, kind: Any) -> str:
    """What is wrong with an argument, or with the first of its elements that is."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    inner, parts = list[Any](), dict[Any, Any]()
    if isinstance(value, list | tuple):
        inner, parts = [get_args(k)[0] for k in kinds if _is_list(k)], dict(enumerate(value))
    elif isinstance(value, Mapping):
        inner = [get_args(k)[1] for k in kinds if _is_of(k, Mapping)]
        parts = {repr(key): x for key, x in value.items() if isinstance(key, str)}
    for i, x in parts.items():
        if inner and not any(_fits(x, k) for k in inner):
            return _problem(f"{name}[{i}]", x, Union[tuple(inner)])  # noqa: UP007  # of variables
    shown = f"{value!r:.60}".partition("\n")[0]
    return f"{name} is {shown}; it must be {_in_words(kind)}"


def _is_list(kind: Any) -> bool:
    """Whether a kind is a list of others, or something like it."""
    return _is_of(kind, Iterable) and not (_is_of(kind, Mapping) or _is_of(kind, np.ndarray))


def _is_of(kind: Any, of: Any) -> bool:
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, of)


def _in_words(kind: Any) -> str:
    """What a kind is called in an error: `a list of texts or None`."""
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        paths = any(get_origin(part) is os.PathLike for part in parts)
        words = [_in_words(part) for part in parts if not (paths and part is str)]
        return _either(words).replace(", a list", ", a list of these")
    if origin is Literal:
        return _either(map(repr, parts))
    if origin in _PLAIN:
        return _PLAIN[origin][1]
    if origin is os.PathLike:
        return "a path"
    if origin is Callable:
        return "a function"
    if not isinstance(origin, type):
        return str(kind)
    several = f" of {_PLAIN[parts[-1]][2]}" if parts and parts[-1] in _PLAIN else ""
    if is_typeddict(origin) or issubclass(origin, Mapping):
        return f"a dictionary{several}"
    return f"a list{several}" if _is_list(kind) else f"{origin.__name__}(...)"


def searched(who: str, pattern: str) -> re.Pattern[str]:
    """A pattern that is searched in names. Raises GraphgenError, which begins with `who`."""
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise GraphgenError(
            f"{who} is not a regular expression: {error}; it is searched in names, so that a part "
            "of one is enough, and any characters are '.*'"
        ) from None


def _either(words: Iterable[str]) -> str:
    """`a number, a text or None`."""
    *first, last = ", ".join(dict.fromkeys(words)).replace(" or ", ", ").split(", ")
    return f"{', '.join(first)} or {last}" if first else last
