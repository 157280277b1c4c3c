"""The room as users see it: dir(ops) has the operators, and each says what it is."""

import inspect
from typing import Any

import pytest

from graphgen import ops
from graphgen.op import Op

HELPERS = {"lowest_of", "numpy_dtype", "with_rank"}
"""For bodies: they compute no tensor from tensors."""

INSIDE = {"dropout_in_inference", "quantized_experts"}
"""Operators of files, of which programs have another spelling."""


def test_the_room_shows_operators_only() -> None:
    assert dir(ops) == ops.__all__ == sorted(set(ops.__all__))
    assert all(isinstance(getattr(ops, name), (Op, type(inspect.cleandoc))) for name in dir(ops))
    assert not HELPERS & {*dir(ops)}


def test_every_public_operator_of_a_file_is_shown() -> None:
    """Unless its name begins with an underscore, or nothing in its file is for programs."""
    modules = {inspect.getmodule(function(name)) for name in dir(ops)}
    found = {
        name
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, Op) and value.function.__module__ == module.__name__
    }
    assert {name for name in found if not name.startswith("_")} - INSIDE <= {*dir(ops)}


def function(name: str) -> Any:
    return getattr(getattr(ops, name), "function", getattr(ops, name))


@pytest.mark.parametrize("name", dir(ops))
def test_an_operator_is_documented_and_typed(name: str) -> None:
    signature = inspect.signature(function(name))
    assert signature.return_annotation is not signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation not in (parameter.empty, Any), parameter
    assert inspect.getdoc(getattr(ops, name))
