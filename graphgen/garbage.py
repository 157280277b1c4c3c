"""When the interpreter looks for garbage."""

import gc
from collections.abc import Callable
from functools import wraps

from typing_extensions import ParamSpec, TypeVar

Given = ParamSpec("Given")
Made = TypeVar("Made")


def uncollected(call: Callable[Given, Made]) -> Callable[Given, Made]:
    """A function during which nobody looks for garbage: a search visits all that lives.

    For what makes little garbage, and keeps most of what it makes, such as a graph.
    """

    @wraps(call)  # no context manager of the library: its frame would be taken for a user's line
    def wrapper(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        on = gc.isenabled()
        gc.disable()
        try:
            return call(*args, **kwargs)
        finally:
            if on:
                gc.enable()

    return wrapper
