"""Operators that ONNX Runtime makes of several when it optimizes, and so writes when it saves.

Their bodies give them gradients, and runtimes that lack a kernel what it was made of.
"""

from collections.abc import Sequence
from typing import Any

from graphgen.errors import GraphgenError
from graphgen.op import composite
from graphgen.ops.activation import elu, gelu, hard_sigmoid, leaky_relu, relu, softplus
from graphgen.ops.convolution import AutoPad, Ints, conv
from graphgen.ops.elementwise import clip, reciprocal, sigmoid, tanh
from graphgen.ops.linalg import gemm
from graphgen.ops.norm import rms_normalization, root_mean_square
from graphgen.traits import Trait
from graphgen.value import Tensor

_CONTRIB = "com.microsoft"


@composite("Gelu", domain=_CONTRIB)
def exact_gelu(x: Tensor) -> Tensor:
    """x Φ(x), Φ the normal distribution function."""
    return gelu(x)


@composite("FastGelu", domain=_CONTRIB)
def fast_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Gelu by tanh of x + bias, (..., D) and (D,)."""
    return gelu(x if bias is None else x + bias, approximate="tanh")


@composite("SimplifiedLayerNormalization", traits=Trait.BY_ROWS | Trait.NORMALIZES)
def simplified_layer_normalization(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    """x / √(mean(x²) + ε) · scale over the axes from `axis` on: the old RMSNormalization."""
    return rms_normalization(x, scale, axis=axis, epsilon=epsilon, stash_type=stash_type)


@simplified_layer_normalization.output(1)
def _(x: Tensor, axis: int, epsilon: float) -> Tensor:
    """1 / √(mean(x²) + ε), in float32 if x is narrower."""
    return reciprocal(root_mean_square(x, axis, epsilon))


_ACTIVATIONS: dict[str, Any] = {
    "Relu": lambda x: relu(x),
    "Sigmoid": lambda x: sigmoid(x),
    "Tanh": lambda x: tanh(x),
    "Softplus": lambda x: softplus(x),
    "LeakyRelu": lambda x, alpha: leaky_relu(x, alpha=alpha),
    "Elu": lambda x, alpha: elu(x, alpha=alpha),
    "HardSigmoid": lambda x, alpha, beta: hard_sigmoid(x, alpha=alpha, beta=beta),
    "Clip": lambda x, low, high: clip(x, low, high),
}
"""By name, with parameters in the order in which FusedConv has them."""


def _activated(who: str, y: Tensor, activation: str | None, parameters: Sequence[float]) -> Tensor:
    if not activation:
        return y
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise GraphgenError(f"{who}: the activation {activation!r} has no body; {known} have")
    result: Tensor = _ACTIVATIONS[activation](y, *parameters)
    return result


@composite("FusedGemm", domain=_CONTRIB, traits=Trait.PRODUCT)
def fused_gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    activation: str | None = None,
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """The activation of α op(A) op(B) + β C, as Gemm; alpha and beta of the activation are its own.

    Raises GraphgenError for an activation without a body.
    """
    y = gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    given = [p for p in (activation_alpha, activation_beta) if p is not None]
    return _activated("FusedGemm", y, activation, given)


@composite("FusedConv", domain=_CONTRIB, traits=Trait.PRODUCT)
def fused_conv(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    z: Tensor | None = None,
    *,
    activation: str | None = None,
    activation_params: Sequence[float] | None = None,
    auto_pad: AutoPad = "NOTSET",
    dilations: Ints = None,
    group: int = 1,
    kernel_shape: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> Tensor:
    """The activation of conv(x, w, b) + z; `activation_params` are those of the activation.

    Raises GraphgenError for an activation without a body.
    """
    y = conv(
        x,
        w,
        b,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    y = y if z is None else y + z
    return _activated("FusedConv", y, activation, activation_params or ())
