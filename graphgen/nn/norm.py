"""Normalization modules."""

from graphgen import ops
from graphgen.errors import positive
from graphgen.nn.module import Module, Parameter, ones, zeros
from graphgen.record import Tensor


class LayerNorm(Module):
    """(x - mean) / √(variance + ε) · weight + bias over the last axis (arXiv 1607.06450)."""

    def __init__(
        self, features: int, *, epsilon: float = 1e-5, gain: bool = True, bias: bool = True
    ):
        positive("LayerNorm", features=features)
        self.features, self.epsilon = features, epsilon
        self.weight = Parameter((features,), initialize=ones) if gain else None
        self.bias = Parameter((features,), initialize=zeros) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        self.expect_last(x, self.features)
        return ops.layer_norm(x, self.weight, self.bias, epsilon=self.epsilon)


class RMSNorm(Module):
    """x / √(mean(x²) + ε) · weight over the last axis (arXiv 1910.07467)."""

    def __init__(self, features: int, *, epsilon: float = 1e-5, gain: bool = True):
        positive("RMSNorm", features=features)
        self.features, self.epsilon = features, epsilon
        self.weight = Parameter((features,), initialize=ones) if gain else None

    def __call__(self, x: Tensor) -> Tensor:
        self.expect_last(x, self.features)
        return ops.rms_norm(x, self.weight, epsilon=self.epsilon)
