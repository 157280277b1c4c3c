"""Sizes as text, in short form: worked out once for all that differ in made-up names alone.

Where inference has to make names up, each layer of a model has other ones in the same sizes, and
sympy takes milliseconds for each form.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, partialmethod
from importlib import import_module
from typing import Any

import onnx_ir as ir

from graphgen.repeats import ELEMENT
from graphgen.rounded import flattened

TEXTS = 1 << 12
"""How many sizes a process remembers what it found out about, in each of several caches."""

MADE_UP = re.compile(r"\b_d\d+\b")
"""Names of sizes that the library makes up."""

_ANY_MADE_UP = re.compile(rf"\b(_d|{ELEMENT})\d+\b")


_BOUND, _DEPTH = re.compile("Max|Min"), 2

_TERM = re.compile(r"\w+(\*\w+)*|(Max|Min)\(\w+(, \w+)+\)")


def common_form(texts: Sequence[str]) -> tuple[list[str], Callable[[str], str]]:
    """Texts in which made-up names count from 0, and what gives such texts their own names.

    The names keep their order, by which sympy sorts, so that equal sizes still have one form.
    """
    found = {m[0]: m[1] for text in texts for m in _ANY_MADE_UP.finditer(text)}
    new = {name: f"{found[name]}{i:03}" for i, name in enumerate(sorted(found))}
    old = {number: name for name, number in new.items()}
    given = [_ANY_MADE_UP.sub(lambda m: new[m[0]], text) for text in texts]
    return given, lambda text: _ANY_MADE_UP.sub(lambda m: old[m[0]], text)


def readable(shape: ir.Shape | None) -> ir.Shape | None:
    """A shape in short form, without what is not an expression: exporters write code there."""
    if shape is None:
        return None
    return ir.Shape([d if isinstance(d, int) else _dim_of(str(d)) for d in shape])


@lru_cache(TEXTS)  # one object for each text, as each works out its expression once
def _dim_of(text: str) -> int | ir.SymbolicDim:
    short = simplified(text)
    return short if isinstance(short, int) else ir.SymbolicDim(short)


@lru_cache(TEXTS)
def simplified(text: str) -> int | str | None:
    """A dimension in one form: (a·b)//b is a, a//2 is floor(a/2); None if not an expression."""
    if text.isidentifier() or text == "None":
        return None if text == "None" else text
    if text.isdigit():
        return int(text)
    [form], own = common_form([text])
    short = _simplified(form)
    if isinstance(short, str):
        short = own(short)
        return int(short) if short.isdigit() else short
    return short


@lru_cache(TEXTS)
def _simplified(text: str) -> str | None:
    if cut := re.fullmatch(r"(\d+) - Max\(0, \1 - (\w+)\)", text):
        text = f"Min({cut[1]}, {cut[2]})"
    try:
        short = flattened(_short(text))
    except ValueError:
        return None
    whole = short.isidentifier() or short.isdigit()
    return short if whole or "//" in text or "floor(" in text else text


@lru_cache(TEXTS)
def dim_of(text: str) -> ir.SymbolicDim | int:
    """The dimension that an expression stands for, in short form."""
    [form], own = common_form([text])
    short = _short(form)
    if short.isdigit():
        return int(short)
    return ir.SymbolicDim(own(short) if ir.SymbolicDim(short).free_symbols() else text)


@lru_cache(TEXTS)
def _short(text: str) -> str:
    """Its form; sympy cannot simplify one term of names, but to try it would import units.

    Nor can it simplify pools of pools, for each of which it would take twice as long.
    """
    size = ir.SymbolicDim(text)
    form = str(size._expr)
    whole = _TERM.fullmatch(form) or _depth(size._expr) > _DEPTH
    return form if whole else str(size.simplify())


def _depth(expression: Any) -> int:
    """How many maxima and minima are inside each other."""
    here = _BOUND.fullmatch(expression.func.__name__) is not None
    return here + max(map(_depth, expression.args), default=0)


def _mend_parsers() -> None:
    """Let the libraries read -n**2 as they write it, not as the square of -n, and n as at least 0.

    They take each symbol to be at least 1, so they would read Max(0, n - 1) as n - 1. And let them
    read a text once: layers repeat it, and a Max inside of a Min takes milliseconds.
    """

    def parse_unary(self: Any) -> Any:
        if self.current_token is not None and self.current_token[:2] == ("OP", "-"):
            self._advance()
            return -self._parse_power()
        return self._parse_primary()

    def parse_primary(self: Any, old: Any) -> Any:
        return _may_be_zero(old(self))

    def parse_all(text: str, old: Any) -> Any:
        return _may_be_zero(old(text))

    for name in ("onnx_ir", "onnx_shape_inference"):
        module: Any = import_module(f"{name}._symbolic_shapes")
        parser, whole = module._ExpressionParser, module.parse_symbolic_expression
        parser._parse_unary = parse_unary
        parser._parse_primary = partialmethod(parse_primary, old=parser._parse_primary)
        module.parse_symbolic_expression = lru_cache(TEXTS)(partial(parse_all, old=whole))


def _mend_windows() -> None:
    """Let the library work out once how far a window slides: hundreds of layers share a size."""
    module: Any = import_module("onnx_shape_inference._ops._conv")
    module._compute_conv_output_dim = lru_cache(TEXTS)(module._compute_conv_output_dim)


def _may_be_zero(expression: Any) -> Any:
    if not expression.is_Symbol:
        return expression
    return type(expression)(expression.name, integer=True, nonnegative=True)


_mend_parsers()
_mend_windows()
