"""Normalization modules."""

from graphgen import ops
from graphgen.errors import positive
from graphgen.nn.module import Module, Parameter, ones, zeros
from graphgen.value import Tensor


class LayerNorm(Module):
    """(x - mean) / √(variance + ε) · weight + bias over the last axis (arXiv 1607.06450).

    With `unit_offset`, times 1 + weight, which starts at 0, as in `RMSNorm`.
    """

    def __init__(
        self,
        features: int,
        *,
        epsilon: float = 1e-5,
        gain: bool = True,
        bias: bool = True,
        unit_offset: bool = False,
    ):
        positive("LayerNorm", features=features)
        self.features, self.epsilon, self.unit_offset = features, epsilon, unit_offset
        first = zeros if unit_offset else ones
        self.weight = Parameter((features,), initialize=first) if gain else None
        self.bias = Parameter((features,), initialize=zeros) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        self.expect_last(x, self.features)
        gain: Tensor | None = self.weight
        if gain is not None and self.unit_offset:
            gain = gain + 1.0
        return ops.layer_norm(x, gain, self.bias, epsilon=self.epsilon)


class RMSNorm(Module):
    """x / √(mean(x²) + ε) · weight over the last axis (arXiv 1910.07467).

    With `unit_offset`, times 1 + weight, which starts at 0, so that weight decay pulls the gain to
    1 (Gemma, arXiv 2403.08295).
    """

    def __init__(
        self,
        features: int,
        *,
        epsilon: float = 1e-5,
        gain: bool = True,
        unit_offset: bool = False,
    ):
        positive("RMSNorm", features=features)
        self.features, self.epsilon, self.unit_offset = features, epsilon, unit_offset
        first = zeros if unit_offset else ones
        self.weight = Parameter((features,), initialize=first) if gain else None

    def __call__(self, x: Tensor) -> Tensor:
        self.expect_last(x, self.features)
        gain: Tensor | None = self.weight
        if gain is not None and self.unit_offset:
            gain = gain + 1.0
        return ops.rms_norm(x, gain, epsilon=self.epsilon)
