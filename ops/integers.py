"""Bits of integers, and division that rounds down, as Python's // and %."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from graphgen.op import primitive
from graphgen.operands import UFUNCS, dtype_of
from graphgen.ops.elementwise import (
    add,
    div,
    equal,
    floor,
    less,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    mod,
    neg,
    not_equal,
    sub,
    where,
)
from graphgen.ops.layout import cast, cast_like, numpy_dtype
from graphgen.record import TensorLike
from graphgen.traits import Trait
from graphgen.value import Size, Tensor


@primitive("BitwiseAnd", traits=Trait.BROADCASTS | Trait.COMMUTATIVE)
def bitwise_and(a: TensorLike, b: TensorLike) -> Tensor:
    """The bits that both integers have."""
    return np.bitwise_and(a, b)


@primitive("BitwiseOr", traits=Trait.BROADCASTS | Trait.COMMUTATIVE)
def bitwise_or(a: TensorLike, b: TensorLike) -> Tensor:
    """The bits that either integer has."""
    return np.bitwise_or(a, b)


@primitive("BitwiseXor", traits=Trait.BROADCASTS | Trait.COMMUTATIVE)
def bitwise_xor(a: TensorLike, b: TensorLike) -> Tensor:
    """The bits that one of the integers has, but not the other."""
    return np.bitwise_xor(a, b)


@primitive("BitwiseNot")
def bitwise_not(x: Tensor) -> Tensor:
    """The bits that an integer does not have."""
    return np.bitwise_not(x)


def _on_bits(of_bools: Callable[..., Tensor], of_integers: Callable[..., Tensor]) -> Any:
    """What & | ^ ~ mean: logic on bools, bits of integers."""

    def choose(*xs: Any) -> Tensor:
        bools = all(isinstance(x, bool) or getattr(x, "dtype", None) == np.bool_ for x in xs)
        return (of_bools if bools else of_integers)(*xs)

    return choose


UFUNCS[np.bitwise_and] = _on_bits(logical_and, bitwise_and)
UFUNCS[np.bitwise_or] = _on_bits(logical_or, bitwise_or)
UFUNCS[np.bitwise_xor] = _on_bits(logical_xor, bitwise_xor)
UFUNCS[np.invert] = _on_bits(logical_not, bitwise_not)


@primitive("BitShift", traits=Trait.BROADCASTS)
def bit_shift(x: Tensor, count: TensorLike, *, direction: Literal["LEFT", "RIGHT"]) -> Tensor:
    """Unsigned x shifted by count bits to the "LEFT" or "RIGHT"."""
    return np.left_shift(x, count) if direction == "LEFT" else np.right_shift(x, count)


def floor_divide(a: TensorLike, b: TensorLike) -> Tensor:
    """⌊a / b⌋, as Python's // and NumPy's.

    A quotient of floats may round up to a whole number that it does not reach; so a - a mod b is
    divided instead, and the result rounded to the nearest. Where a whole number is divided by 0,
    the run ends in an error.
    """
    kind = _common_kind(a, b)
    if kind == "u":
        return div(a, b)
    if kind == "i":
        divisor = _without_overflow(a, b)
        quotient = div(a, divisor)
        rest = sub(a, quotient * divisor)
        down = rest < 0 if isinstance(b, int) and b > 0 else _apart(rest, divisor)
        quotient = quotient - cast_like(down, quotient)
        return quotient if divisor is b else where(equal(b, -1), neg(quotient), quotient)
    rest = mod(a, b, fmod=1)
    quotient = div(sub(a, rest), b)
    quotient = where(_apart(rest, b), quotient - 1.0, quotient)
    down = floor(quotient)
    nearest = where(quotient - down > 0.5, down + 1.0, down)
    return where(equal(b, 0.0), div(a, b), nearest)


def remainder(a: TensorLike, b: TensorLike) -> Tensor:
    """a - b ⌊a / b⌋, as Python's % and numpy's: it has the sign of b."""
    kind = _common_kind(a, b)
    if kind in "iu":
        return mod(a, b if kind == "u" else _without_overflow(a, b))
    rest = mod(a, b, fmod=1)
    return where(_apart(rest, b), add(rest, b), rest)


def _without_overflow(a: TensorLike, b: TensorLike) -> TensorLike:
    """b, with 1 for -1: by -1, a processor cannot divide the smallest integer, and ends the run."""
    if isinstance(b, Size):
        if not b.signed:
            return b
        b = cast(b, to=dtype_of(a) or np.int64)
    if isinstance(b, int):
        return 1 if b == -1 else b
    known = isinstance(b, (np.ndarray, np.generic)) and not np.any(b == -1)
    return b if known else where(equal(b, -1), 1, b)


def _common_kind(*operands: Any) -> str:
    """The kind of dtype, as NumPy's letter, of the first tensor, else of the numbers."""
    tensor = next((x for x in operands if hasattr(x, "dtype")), None)
    return np.result_type(*operands).kind if tensor is None else numpy_dtype(tensor).kind


def _apart(rest: Tensor, b: TensorLike) -> Tensor:
    """Where a remainder has another sign than the divisor."""
    return logical_and(not_equal(rest, 0), logical_xor(less(rest, 0), less(b, 0)))


UFUNCS[np.floor_divide], UFUNCS[np.remainder] = floor_divide, remainder
