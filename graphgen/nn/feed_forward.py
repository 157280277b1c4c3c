"""The position-wise feed-forward block."""

from collections.abc import Callable

from graphgen import ops
from graphgen.errors import GraphgenError, positive
from graphgen.nn.linear import Dropout, Linear
from graphgen.nn.module import Module
from graphgen.record import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": ops.relu,
    "gelu": ops.gelu,
    "gelu_tanh": lambda x: ops.gelu(x, approximate="tanh"),
    "silu": ops.silu,
}


class FeedForward(Module):
    """W₂ f(W₁ x); gated: W₂ (f(W₁ x) ⊙ W₃ x), SwiGLU with silu, GeGLU with gelu (2002.05202)."""

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        activation: str = "gelu",
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
    ):
        positive("FeedForward", features=features, hidden=hidden)
        if activation not in ACTIVATIONS:
            raise GraphgenError(
                f"FeedForward(activation={activation!r}): known are {', '.join(ACTIVATIONS)}"
            )
        self.features, self.hidden, self.activation = features, hidden, activation
        self.up = Linear(features, hidden, bias=bias)
        self.gate = Linear(features, hidden, bias=bias) if gated else None
        self.down = Linear(hidden, features, bias=bias)
        self.dropout = Dropout(dropout)

    def __call__(self, x: Tensor) -> Tensor:  # (..., features)
        activate = ACTIVATIONS[self.activation]
        h = activate(self.up(x) if self.gate is None else self.gate(x))  # (..., hidden)
        h = h if self.gate is None else h * self.up(x)
        return self.down(self.dropout(h))
