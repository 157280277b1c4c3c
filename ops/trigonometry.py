"""Trigonometric and hyperbolic functions, and their inverses; angles are in radians."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from numpy.polynomial import Chebyshev, Polynomial

from graphgen.op import primitive
from graphgen.operands import Array
from graphgen.ops.elementwise import floor, neg, sqrt
from graphgen.ops.layout import cast, cast_like
from graphgen.value import Tensor

_TURN = (6.25, 0.03271484375, 0.000469207763671875, 1.2516975402832031e-06, 3.968374517882012e-09)
"""2π as a sum. All but the last have at most 7 bits, so a float32 holds 2¹⁷ times each exactly."""
_DEGREE = 8


def _fitted(values: Callable[[Array], Array]) -> list[float]:
    """Coefficients of a polynomial of z close to `values` of √z for z from 0 to π², the last first.

    Chebyshev's interpolation: within 1e-12 for the two functions below.
    """
    found = Chebyshev.interpolate(lambda z: values(np.sqrt(z)), _DEGREE, domain=[0.0, np.pi**2])
    return [float(c) for c in found.convert(kind=Polynomial).coef[::-1]]


_COSINE, _SINE = _fitted(np.cos), _fitted(lambda r: np.sinc(r / np.pi))


def _reduced(x: Tensor) -> tuple[Tensor, Tensor]:
    """r in [-π, π], x less whole turns, without loss in float32 up to 2¹⁷ turns; and r²."""
    r = cast(x, to=ir.DataType.FLOAT)
    turns = floor(r * (0.5 / np.pi) + 0.5)
    for part in _TURN:
        r = r - turns * part
    return r, r * r


def _polynomial(z: Tensor, coefficients: list[float]) -> Tensor:
    """By Horner's rule."""
    first, *others = coefficients
    result = z * first
    for coefficient in others[:-1]:
        result = (result + coefficient) * z
    return result + others[-1]


def _sine(x: Tensor) -> Tensor:
    """sin x of products and sums, within 6e-7, for devices whose own is only near."""
    r, z = _reduced(x)
    return cast_like(r * _polynomial(z, _SINE), x)


def _cosine(x: Tensor) -> Tensor:
    """cos x in the same way."""
    _, z = _reduced(x)
    return cast_like(_polynomial(z, _COSINE), x)


@primitive("Sin", ufunc=np.sin)
def sin(x: Tensor) -> Tensor:
    """sin x, x in radians."""
    return np.sin(x)


@sin.vjp
def _(g: Tensor, x: Tensor) -> Tensor:
    """dx = g cos x."""
    return g * cos(x)


sin.variant(_sine)


@primitive("Cos", ufunc=np.cos)
def cos(x: Tensor) -> Tensor:
    """cos x, x in radians."""
    return np.cos(x)


@cos.vjp
def _(g: Tensor, x: Tensor) -> Tensor:
    """dx = -g sin x."""
    return neg(g * sin(x))


cos.variant(_cosine)


@primitive("Tan", ufunc=np.tan)
def tan(x: Tensor) -> Tensor:
    """tan x, x in radians."""
    return np.tan(x)


@tan.vjp
def _(g: Tensor, y: Tensor) -> Tensor:
    """dx = g (1 + y²)."""
    return g * (1.0 + y * y)


tan.variant(lambda x: _sine(x) / _cosine(x))


@primitive("Asin", ufunc=np.arcsin)
def asin(x: Tensor) -> Tensor:
    """The angle in [-π/2, π/2] with the sine x, NaN beyond [-1, 1]."""
    return np.arcsin(x)


@asin.vjp
def _(g: Tensor, x: Tensor) -> Tensor:
    """dx = g / √(1 - x²)."""
    return g / sqrt(1.0 - x * x)


@primitive("Acos", ufunc=np.arccos)
def acos(x: Tensor) -> Tensor:
    """The angle in [0, π] with the cosine x, NaN beyond [-1, 1]."""
    return np.arccos(x)


@acos.vjp
def _(g: Tensor, x: Tensor) -> Tensor:
    """dx = -g / √(1 - x²)."""
    return neg(g / sqrt(1.0 - x * x))


@primitive("Atan", ufunc=np.arctan)
def atan(x: Tensor) -> Tensor:
    """The angle in [-π/2, π/2] with the tangent x."""
    return np.arctan(x)


@atan.vjp
def _(g: Tensor, x: Tensor) -> Tensor:
    """dx = g / (1 + x²)."""
    return g / (1.0 + x * x)


@primitive("Sinh", ufunc=np.sinh)
def sinh(x: Tensor) -> Tensor:
    """(eˣ - e⁻ˣ) / 2."""
    return np.sinh(x)


@sinh.vjp
def _(g: Tensor, x: Tensor) -> Tensor:
    """dx = g cosh x."""
    return g * cosh(x)


@primitive("Cosh", ufunc=np.cosh)
def cosh(x: Tensor) -> Tensor:
    """(eˣ + e⁻ˣ) / 2."""
    return np.cosh(x)


@cosh.vjp
def _(g: Tensor, x: Tensor) -> Tensor:
    """dx = g sinh x."""
    return g * sinh(x)


@primitive("Asinh", ufunc=np.arcsinh)
def asinh(x: Tensor) -> Tensor:
    """The number with the hyperbolic sine x."""
    return np.arcsinh(x)


@asinh.vjp
def _(g: Tensor, x: Tensor) -> Tensor:
    """dx = g / √(x² + 1)."""
    return g / sqrt(x * x + 1.0)


@primitive("Acosh", ufunc=np.arccosh)
def acosh(x: Tensor) -> Tensor:
    """The number from 0 with the hyperbolic cosine x, NaN below 1."""
    return np.arccosh(x)


@acosh.vjp
def _(g: Tensor, x: Tensor) -> Tensor:
    """dx = g / √(x² - 1)."""
    return g / sqrt(x * x - 1.0)


@primitive("Atanh", ufunc=np.arctanh)
def atanh(x: Tensor) -> Tensor:
    """The number with the hyperbolic tangent x, NaN beyond [-1, 1]."""
    return np.arctanh(x)


@atanh.vjp
def _(g: Tensor, x: Tensor) -> Tensor:
    """dx = g / (1 - x²)."""
    return g / (1.0 - x * x)
