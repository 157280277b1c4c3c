"""The position-wise feed-forward block."""

from collections.abc import Callable
from typing import Literal, TypeAlias

from graphgen import ops
from graphgen.errors import one_of, positive
from graphgen.nn.linear import Dropout, Linear
from graphgen.nn.module import Module
from graphgen.value import Tensor

Activation: TypeAlias = Literal["relu", "gelu", "gelu_tanh", "quick_gelu", "silu", "relu2"]

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": ops.relu,
    "gelu": ops.gelu,
    "gelu_tanh": lambda x: ops.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * ops.sigmoid(x * 1.702),
    "silu": ops.silu,
    "relu2": lambda x: ops.relu(x) * ops.relu(x),
}


class FeedForward(Module):
    """W₂ f(W₁ x); gated: W₂ (f(W₁ x) ⊙ W₃ x), SwiGLU with silu, GeGLU with gelu (2002.05202).

    "relu2" is the square of ReLU (arXiv 2109.08668).
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        activation: Activation = "gelu",
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
    ):
        positive("FeedForward", features=features, hidden=hidden)
        one_of("FeedForward", Activation, activation=activation)
        self.features, self.hidden = features, hidden
        self.activation: Activation = activation
        self.up = Linear(features, hidden, bias=bias)
        self.gate = Linear(features, hidden, bias=bias) if gated else None
        self.down = Linear(hidden, features, bias=bias)
        self.dropout = Dropout(dropout)

    def __call__(self, x: Tensor) -> Tensor:  # (..., features)
        activate = ACTIVATIONS[self.activation]
        h = activate(self.up(x) if self.gate is None else self.gate(x))  # (..., hidden)
        h = h if self.gate is None else h * self.up(x)
        return self.down(self.dropout(h))
