"""Sizes at given numbers, without sympy where it need not be asked, and numbers of shape values."""

import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

from graphgen.graph import constant


def size_at(size: int | ir.SymbolicDim, sizes: Mapping[str, int]) -> int | ir.SymbolicDim:
    """The same as `size.evaluate(sizes)`, a hundred times faster where that is a number."""
    if isinstance(size, int):
        return size
    try:
        number = _number(size._expr, sizes)
    except (LookupError, ValueError, ZeroDivisionError):  # what only sympy knows
        return size.evaluate(sizes)
    return int(number) if number.denominator == 1 else ir.SymbolicDim(str(number))


def _number(expression: Any, sizes: Mapping[str, int]) -> int | Fraction:
    if expression is None:
        raise LookupError
    if expression.is_Symbol:
        return sizes[expression.name]
    if expression.is_Rational:
        whole = int(expression.p)
        return whole if expression.q == 1 else Fraction(whole, int(expression.q))
    parts = [_number(part, sizes) for part in expression.args]
    return _EXACT[expression.func.__name__](parts)


def _power(base: int | Fraction, exponent: int | Fraction) -> Fraction:
    whole = int(exponent)
    if whole != exponent or abs(whole) > _HIGHEST:
        raise ValueError
    return Fraction(base) ** whole


_HIGHEST = 64

_EXACT: dict[str, Callable[[list[int | Fraction]], int | Fraction]] = {
    "Add": sum,
    "Mul": math.prod,
    "Max": max,
    "Min": min,
    "Pow": lambda parts: _power(*parts),
    "Mod": lambda parts: operator.mod(*parts),
    "floor": lambda parts: math.floor(*parts),
    "ceiling": lambda parts: math.ceil(*parts),
}
"""What sympy's functions of rational numbers give, by name."""


_MOST = 16  # longer lists are not shapes
_FAR = (1 << 31) - 1


def whole_numbers(value: ir.Value | None, context: ShapeInferenceContext) -> list[Any] | None:
    """A shape value, also one that is written in floats, as TensorFlow compares sizes."""
    known = None if value is None else context.get_symbolic_value(value)
    content = None if known is not None else constant(value)
    if content is None or content.dtype.kind != "f" or not 0 < content.size <= _MOST:
        return None if known is None else [*known]
    found = content.reshape(-1).tolist()  # float16 has no numbers up to _FAR
    whole = content.ndim < 2 and all(abs(x) <= _FAR and x.is_integer() for x in found)
    whole &= not any(x == 0 and math.copysign(1, x) < 0 for x in found)  # -0 is no size
    return [*map(int, found)] if whole else None
