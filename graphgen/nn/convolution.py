"""Convolutions along sequences, and the gates that go with them."""

import math
from typing import Any

from graphgen import ops
from graphgen.errors import GraphgenError, positive
from graphgen.nn.module import Module, Parameter, normal, zeros
from graphgen.record import Tensor


class Convolution(Module):
    """y_t = b + Σ_j W_j x_(t - before + j · dilation), (B, T, features_in) to (B, T, features_out).

    j counts the kernel's elements. Elements outside the sequence are zero, so the result is as long
    as x. `before` is half of (kernel - 1) · dilation, rounded down; a causal convolution has all of
    it before t (arXiv 1609.03499), and no y_t depends on what follows.

    A bool `mask`, (B, T), sets the elements that are not kept to zero, like those outside.

    Args:
        features_in: The size of each element of the sequence.
        features_out: The size of each element of the result.
        kernel: How many elements of x make one of y.
        dilation: The distance between those (arXiv 1511.07122).
        causal: Whether the last of them is x_t.
        bias: Whether there is b.
        gain: The initial weights have standard deviation gain / √(kernel · features_in).
    """

    def __init__(
        self,
        features_in: int,
        features_out: int,
        *,
        kernel: int,
        dilation: int = 1,
        causal: bool = False,
        bias: bool = True,
        gain: float = 1.0,
    ):
        positive("Convolution", features_in=features_in, features_out=features_out)
        positive("Convolution", kernel=kernel, dilation=dilation)
        self.features_in, self.features_out = features_in, features_out
        self.kernel, self.dilation, self.causal = kernel, dilation, causal
        std = gain / math.sqrt(kernel * features_in)
        self.weight = Parameter((features_out, features_in, kernel), initialize=normal(std))
        self.bias = Parameter((features_out,), initialize=zeros) if bias else None

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.expect_last(x, self.features_in)
        if mask is not None:
            x = ops.where(ops.unsqueeze(mask, [-1]), x, 0.0)
        reach = (self.kernel - 1) * self.dilation
        before = reach if self.causal else reach // 2
        channels = ops.swap_last(x)  # (B, features_in, T)
        options: dict[str, Any] = {"dilations": [self.dilation], "pads": [before, reach - before]}
        return ops.swap_last(ops.conv(channels, self.weight, self.bias, **options))


class GatedLinearUnit(Module):
    """a ⊙ σ(b), a and b the halves of the last axis (arXiv 1612.08083): (..., 2D) to (..., D)."""

    def __call__(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        if not isinstance(size, int) or size % 2:
            raise GraphgenError(
                f"{self!r}: x has {size} features; it needs an even number, for two halves"
            )
        a, b = ops.split(x, axis=-1, num_outputs=2)
        return a * ops.sigmoid(b)
