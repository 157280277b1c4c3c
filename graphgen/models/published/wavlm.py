"""The attention of WavLM (arXiv 2110.13900): what a distance adds depends on what is heard."""

from typing import Any

from graphgen import nn, ops
from graphgen.nn.module import Parameter, ones
from graphgen.ops.layout import lowest_of
from graphgen.value import Tensor


class GatedAttention(nn.Attention):
    """Attention with g · bias added to the scores, (1, H, T, T), by the gate g of each query.

    g = a (b c - 1) + 2, with a and b the sigmoids of sums of four products of a head's features,
    and c learned, one of each head.
    """

    def __init__(self, features: int, *, num_heads: int):
        super().__init__(features, num_heads=num_heads)
        self.gate = nn.Linear(self.head_dim, 8)
        self.constant = Parameter((1, num_heads, 1, 1), initialize=ones)

    def __call__(self, x: Tensor, *args: Any, mask: Tensor | None = None, **how: Any) -> Tensor:
        z = self.gate(ops.split_heads(x, self.num_heads))  # (B, H, T, 8)
        size = [ops.dim(z, 0), self.num_heads, ops.dim(z, 2), 2, 4]
        z = ops.sigmoid(ops.reduce_sum(ops.reshape(z, size), axis=4, keepdims=False))
        a, b = ops.split(z, axis=3, num_outputs=2)  # (B, H, T, 1) each
        bias = (a * (b * self.constant - 1.0) + 2.0) * how["bias"]
        if mask is not None:
            bias = ops.where(ops.unsqueeze(mask, [1, 2]), bias, lowest_of(bias))
        return super().__call__(x, mask=bias)
