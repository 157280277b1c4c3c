"""Activation functions."""

import math
from typing import Any

from graphgen.op import Operand, composite
from graphgen.ops.elementwise import erf, exp, greater, maximum, sigmoid, tanh, where

_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


@composite("Relu")
def relu(x: Any) -> Operand:
    """max(x, 0)."""
    return maximum(x, 0.0)


@relu.vjp
def _(g: Any, y: Any, x: Any) -> Operand:
    """dx = g where x > 0."""
    return where(greater(x, 0.0), g, 0.0)


@composite("Gelu")
def gelu(x: Any, *, approximate: str = "none") -> Operand:
    """x Φ(x), Φ the normal distribution function (Hendrycks & Gimpel, arXiv 1606.08415).

    "none": Φ(x) = (1 + erf(x/√2)) / 2; "tanh": Φ(x) ≈ (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2.
    """
    if approximate == "tanh":
        return 0.5 * (x * (1.0 + tanh(_SQRT_2_OVER_PI * (x + 0.044715 * (x * x * x)))))
    return 0.5 * (x * (1.0 + erf(x / math.sqrt(2.0))))


@gelu.vjp
def _(g: Any, y: Any, x: Any, *, approximate: str = "none") -> Operand:
    """dx = g (Φ(x) + x φ(x)), with φ = Φ'."""
    if approximate == "tanh":
        t = tanh(_SQRT_2_OVER_PI * (x + 0.044715 * (x * x * x)))
        slope = _SQRT_2_OVER_PI * (1.0 + (3 * 0.044715) * (x * x))
        return g * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope)
    density = exp(x * x * -0.5) * (1.0 / math.sqrt(2.0 * math.pi))
    return g * (0.5 * (1.0 + erf(x / math.sqrt(2.0))) + x * density)


@composite("QuickGelu", domain="com.microsoft")
def quick_gelu(x: Any, *, alpha: float = 1.702) -> Operand:
    """x σ(α x)."""
    return x * sigmoid(x if alpha == 1.0 else alpha * x)


@quick_gelu.vjp
def _(g: Any, y: Any, x: Any, *, alpha: float = 1.702) -> Operand:
    """dx = g s (1 + α x (1 - s)), s = σ(α x)."""
    scaled = x if alpha == 1.0 else alpha * x
    s = sigmoid(scaled)
    return g * (s * (1.0 + scaled * (1.0 - s)))


def silu(x: Operand) -> Operand:
    """x σ(x), also called swish (Elfwing et al., arXiv 1702.03118)."""
    return quick_gelu(x, alpha=1.0)
