"""Trigonometric and hyperbolic functions, and their inverses; angles are in radians."""

import numpy as np

from graphgen.op import primitive
from graphgen.ops.elementwise import neg, sqrt
from graphgen.value import Tensor


@primitive("Sin", ufunc=np.sin)
def sin(x: Tensor) -> Tensor:
    """sin x, x in radians."""
    return np.sin(x)


@sin.vjp
def _(g: Tensor, x: Tensor) -> Tensor:
    """dx = g cos x."""
    return g * cos(x)


@primitive("Cos", ufunc=np.cos)
def cos(x: Tensor) -> Tensor:
    """cos x, x in radians."""
    return np.cos(x)


@cos.vjp
def _(g: Tensor, x: Tensor) -> Tensor:
    """dx = -g sin x."""
    return neg(g * sin(x))


@primitive("Tan", ufunc=np.tan)
def tan(x: Tensor) -> Tensor:
    """tan x, x in radians."""
    return np.tan(x)


@tan.vjp
def _(g: Tensor, y: Tensor) -> Tensor:
    """dx = g (1 + y²)."""
    return g * (1.0 + y * y)


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
