"""Activation functions."""

import math
from typing import Literal

from graphgen.op import composite
from graphgen.ops.elementwise import (
    abs,
    erf,
    exp,
    greater,
    less,
    log,
    logical_and,
    maximum,
    minimum,
    neg,
    sigmoid,
    tanh,
    where,
)
from graphgen.traits import Trait
from graphgen.value import Tensor

_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


@composite("Relu")
def relu(x: Tensor) -> Tensor:
    """max(x, 0), elementwise."""
    return maximum(x, 0)  # of integers, too


@relu.vjp
def _(g: Tensor, x: Tensor) -> Tensor:
    """dx = g where x > 0."""
    return where(greater(x, 0.0), g, 0.0)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap): about x where it is small, and never beyond ±cap (arXiv 2408.00118)."""
    return tanh(x / cap) * cap


@composite("Gelu")
def gelu(x: Tensor, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """x Φ(x), Φ the normal distribution function (Hendrycks & Gimpel, arXiv 1606.08415).

    "none": Φ(x) = (1 + erf(x/√2)) / 2; "tanh": Φ(x) ≈ (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2.
    """
    if approximate == "tanh":
        return 0.5 * (x * (1.0 + tanh(_SQRT_2_OVER_PI * (x + 0.044715 * (x * x * x)))))
    return 0.5 * (x * (1.0 + erf(x / math.sqrt(2.0))))


@gelu.vjp
def _(g: Tensor, x: Tensor, approximate: str) -> Tensor:
    """dx = g (Φ + x φ), φ = Φ'."""
    return g * gelu_slope(x, approximate)[0]


def gelu_slope(x: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """Φ + x φ and Φ of `gelu`, x Φ(x), with φ = Φ'."""
    if approximate == "tanh":  # of z. Not a sigmoid: kernels leave 1e-8 of that at -∞
        square = x * x
        z = ((0.044715 * _SQRT_2_OVER_PI) * square + _SQRT_2_OVER_PI) * x
        twice = (6 * 0.044715 * _SQRT_2_OVER_PI) * square + 2.0 * _SQRT_2_OVER_PI  # 2 z'
        phi = hard_sigmoid(tanh(z), alpha=0.5)  # (1 + tanh z) / 2; Φ' = 2 Φ (1 - Φ) z'
        return phi + (1.0 - phi) * (x * phi) * twice, phi
    s = x * math.sqrt(0.5)
    density = s * exp(-0.5 * math.log(math.pi) - s * s)  # first: then less is alive at a time
    phi = hard_sigmoid(erf(s), alpha=0.5)  # (1 + erf s) / 2, in one pass
    return density + phi, phi


@composite("QuickGelu", domain="com.microsoft")
def quick_gelu(x: Tensor, *, alpha: float = 1.702) -> Tensor:
    """x σ(α x), which is close to Gelu for α = 1.702 and is SiLU for α = 1 (arXiv 1606.08415)."""
    return x * sigmoid(x if alpha == 1.0 else alpha * x)


@quick_gelu.vjp
def _(g: Tensor, x: Tensor, alpha: float) -> Tensor:
    """dx = g s (1 + α x (1 - s)), s = σ(α x)."""
    scaled = x if alpha == 1.0 else alpha * x
    s = sigmoid(scaled)
    return g * (s * (1.0 + scaled * (1.0 - s)))


def silu(x: Tensor) -> Tensor:
    """x σ(x), also called swish (Elfwing et al., arXiv 1702.03118)."""
    return quick_gelu(x, alpha=1.0)


@composite("LeakyRelu")
def leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    """x, and α x where x < 0, elementwise; at 0 the slope is α, as in torch."""
    return where(greater(x, 0.0), x, alpha * x)


@composite("PRelu", traits=Trait.BROADCASTS)
def prelu(x: Tensor, slope: Tensor) -> Tensor:
    """x, and slope · x where x < 0 (arXiv 1502.01852); at 0 it rises by the slope, as in torch."""
    return where(greater(x, 0), x, slope * x)


@composite("Elu")
def elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """x, and α (eˣ - 1) where x < 0, elementwise (arXiv 1511.07289)."""
    return maximum(x, 0.0) + alpha * (exp(minimum(x, 0.0)) - 1.0)


@elu.vjp
def _(g: Tensor, x: Tensor, alpha: float) -> Tensor:
    """dx = g, and g α eˣ where x ≤ 0, as in torch."""
    return g * where(greater(x, 0.0), 1.0, alpha * exp(minimum(x, 0.0)))


@composite("Selu")
def selu(
    x: Tensor, *, alpha: float = 1.6732631921768188, gamma: float = 1.0507010221481323
) -> Tensor:
    """γ Elu(x), which keeps mean 0 and variance 1 (arXiv 1706.02515)."""
    return gamma * elu(x, alpha=alpha)


@composite("Softplus")
def softplus(x: Tensor) -> Tensor:
    """log(1 + eˣ), written as max(x, 0) + log(1 + exp(-|x|)) so that exp cannot overflow."""
    return maximum(x, 0.0) + log(1.0 + exp(neg(abs(x))))


@softplus.vjp
def _(g: Tensor, x: Tensor) -> Tensor:
    """dx = g σ(x)."""
    return g * sigmoid(x)


@composite("Mish")
def mish(x: Tensor) -> Tensor:
    """x tanh(softplus(x)) (arXiv 1908.08681)."""
    return x * tanh(softplus(x))


@composite("HardSigmoid")
def hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    """α x + β, limited to [0, 1], elementwise."""
    return maximum(minimum(alpha * x + beta, 1.0), 0.0)


@hard_sigmoid.vjp
def _(g: Tensor, y: Tensor, alpha: float) -> Tensor:
    """dx = α g between the limits, and 0 at them, as in torch."""
    return where(logical_and(greater(y, 0.0), less(y, 1.0)), g * alpha, 0.0)


@composite("HardSwish")
def hard_swish(x: Tensor) -> Tensor:
    """x (x/6 + 1/2), the second factor limited to [0, 1], elementwise (arXiv 1905.02244)."""
    return x * hard_sigmoid(x, alpha=1.0 / 6.0)
