"""Sizes as text, in short form: worked out once for all that differ in made-up names alone.

Where inference has to make names up, each layer of a model has other ones in the same sizes, and
sympy takes milliseconds for each form.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

import onnx_ir as ir

from graphgen.repeats import ELEMENT
from graphgen.rounded import flattened

TEXTS = 1 << 12
"""How many sizes a process remembers what it found out about, in each of several caches."""

MADE_UP = re.compile(r"\b(_d|unk__)\d+\b")
"""Names of sizes that the libraries make up."""

_ANY_MADE_UP = re.compile(rf"\b(_d|unk__|{ELEMENT})\d+\b")


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
    return own(short) if isinstance(short, str) else short


@lru_cache(TEXTS)
def _simplified(text: str) -> str | None:
    if cut := re.fullmatch(r"(\d+) - Max\(0, \1 - (\w+)\)", text):
        text = f"Min({cut[1]}, {cut[2]})"
    try:
        short = flattened(_short(text))
    except ValueError:
        return None
    return short if short.isidentifier() or "//" in text or "floor(" in text else text


@lru_cache(TEXTS)
def dim_of(text: str) -> ir.SymbolicDim:
    """The dimension that an expression stands for, in short form unless that is a number."""
    [form], own = common_form([text])
    short = _short(form)
    return ir.SymbolicDim(own(short) if ir.SymbolicDim(short).free_symbols() else text)


@lru_cache(TEXTS)
def _short(text: str) -> str:
    """Its form; sympy cannot simplify one term of names, but to try it would import units."""
    size = ir.SymbolicDim(text)
    form = str(size._expr)
    return form if _TERM.fullmatch(form) else str(size.simplify())
