"""Convolutions along sequences, and the gates that go with them."""

import math
from typing import Any

from graphgen import ops
from graphgen.errors import GraphgenError, positive, user_line
from graphgen.infer import describe
from graphgen.nn.module import Module, Parameter, in_line, normal, zeros
from graphgen.value import Tensor


class Convolution(Module):
    """y_t = b + Σ_j W_j x_(stride · t - before + j · dilation), (B, T, C) to (B, T', features_out).

    C is features_in, and j counts the kernel's elements. Elements outside the sequence are zero.
    There are (kernel - 1) · dilation of them: half, rounded down, `before` the sequence, the rest
    after it; so T' is T / stride, rounded up. A causal convolution has all of them before it
    (arXiv 1609.03499), so no y_t depends on what follows x_(stride · t).

    A bool `mask`, (B, T), sets the elements that are not kept to zero, like those outside.

    Args:
        features_in: The size of each element of the sequence.
        features_out: The size of each element of the result.
        kernel: How many elements of x make one of y.
        stride: How far the kernel moves from one y_t to the next.
        dilation: The distance between the elements of a kernel (arXiv 1511.07122).
        groups: Features are in that many groups, and those of y depend on their own group of x
            only; features_in groups make a depthwise convolution (arXiv 1610.02357).
        padding: How many elements outside the sequence there are on each side, if not as above; T'
            is then (T + 2 · padding - (kernel - 1) · dilation - 1) / stride + 1, rounded down.
        causal: Whether the last element of a kernel is x_(stride · t).
        bias: Whether there is b.
        gain: The initial weights have standard deviation gain / √(kernel · features_in / groups).
    """

    def __init__(
        self,
        features_in: int,
        features_out: int,
        *,
        kernel: int,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        padding: int | None = None,
        causal: bool = False,
        bias: bool = True,
        gain: float = 1.0,
    ):
        positive("Convolution", features_in=features_in, features_out=features_out)
        positive("Convolution", kernel=kernel, stride=stride, dilation=dilation, groups=groups)
        self.features_in, self.features_out, self.kernel = features_in, features_out, kernel
        self.stride, self.dilation, self.groups = stride, dilation, groups
        self.padding, self.causal = padding, causal
        if features_in % groups or features_out % groups:
            raise GraphgenError(
                f"{in_line(self)}: the groups must divide features_in and features_out{user_line()}"
            )
        if padding is not None and (causal or not isinstance(padding, int) or padding < 0):
            raise GraphgenError(
                f"{in_line(self)}: padding must be an integer of at least 0, for both sides, and a "
                f"causal convolution chooses its own; leave one of them out{user_line()}"
            )
        inner = features_in // groups
        std = gain / math.sqrt(kernel * inner)
        self.weight = Parameter((features_out, inner, kernel), initialize=normal(std))
        self.bias = Parameter((features_out,), initialize=zeros) if bias else None

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.expect_last(x, self.features_in, rank=3)
        if mask is not None:
            x = ops.where(ops.unsqueeze(mask, [-1]), x, 0.0)
        reach = (self.kernel - 1) * self.dilation
        before = reach if self.causal else reach // 2
        after = reach - before
        if self.padding is not None:
            before = after = self.padding
        options: dict[str, Any] = {"dilations": [self.dilation], "strides": [self.stride]}
        options |= {"pads": [before, after], "group": self.groups}
        channels = ops.swap_last(x)  # (B, features_in, T)
        return ops.swap_last(ops.conv(channels, self.weight, self.bias, **options))


class GatedLinearUnit(Module):
    """a ⊙ σ(b), a and b the halves of the last axis (arXiv 1612.08083): (..., 2D) to (..., D)."""

    def __call__(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        if not isinstance(size, int) or size % 2:
            raise GraphgenError(
                f"{in_line(self)}: x is {describe(x)}: x has {size} features; it needs an even "
                f"number, for two halves{user_line()}"
            )
        a, b = ops.split(x, axis=-1, num_outputs=2)
        return a * ops.sigmoid(b)
