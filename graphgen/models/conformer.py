"""Conformer: an encoder of speech with attention and convolutions (Gulati et al., 2005.08100)."""

from typing import Any

from graphgen import nn, ops
from graphgen.errors import positive
from graphgen.nn.module import float32, int64
from graphgen.value import Tensor


class ConvolutionModule(nn.Module):
    """What is near: (B, T, D) to (B, T, D) (2.2), with layer norm in the place of batch norm."""

    def __init__(self, features: int, *, kernel: int):
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.pointwise1 = nn.Linear(features, 2 * features)
        self.gate = nn.GatedLinearUnit()
        self.depthwise = nn.Convolution(features, features, kernel=kernel, groups=features)
        self.pointwise2 = nn.Linear(features, features)

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:  # (B, T, D), (B, T)
        y = self.gate(self.pointwise1(self.norm1(x)))
        y = self.norm2(self.depthwise(y, mask))
        return self.pointwise2(ops.silu(y))


class Block(nn.Module):
    """Attention and convolution between two half-steps of feed-forward (2.4)."""

    def __init__(self, features: int, *, num_heads: int, kernel: int):
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.norm3, self.norm4 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.feed_forward1, self.feed_forward2 = (
            nn.FeedForward(features, 4 * features, activation="silu") for _ in range(2)
        )
        self.attention = nn.Attention(features, num_heads=num_heads)
        self.convolution = ConvolutionModule(features, kernel=kernel)

    def __call__(self, x: Tensor, mask: Tensor, rotary: tuple[Tensor, ...]) -> Tensor:
        x = x + 0.5 * self.feed_forward1(self.norm1(x))  # (B, T, D)
        x = x + self.attention(self.norm2(x), mask=mask, rotary=rotary)
        x = x + self.convolution(x, mask)
        x = x + 0.5 * self.feed_forward2(self.norm3(x))
        return self.norm4(x)


class Conformer(nn.Module):
    """The logits of what is said, (B, T, mels) to (B, ⌈⌈T/2⌉/2⌉, vocabulary).

    Two convolutions with strides make one frame of four; positions are rotary (arXiv 2104.09864).

    Args:
        vocabulary: The number of tokens, a blank one for CTC among them.
        features: D, the size of each frame's vector.
        layers: The number of blocks.
        num_heads: Heads of attention; they divide D.
        kernel: How many frames each depthwise convolution reads.
        mels: The bands of each frame's spectrum.
    """

    def __init__(
        self,
        vocabulary: int = 1024,
        features: int = 256,
        *,
        layers: int = 4,
        num_heads: int = 4,
        kernel: int = 31,
        mels: int = 80,
    ):
        positive("Conformer", vocabulary=vocabulary, features=features, layers=layers)
        positive("Conformer", num_heads=num_heads, kernel=kernel, mels=mels)
        self.subsampling = [
            nn.Convolution(size, features, kernel=3, stride=2) for size in (mels, features)
        ]
        self.rotary = nn.Rotary(nn.rotary_frequencies(features // num_heads))
        self.blocks = [Block(features, num_heads=num_heads, kernel=kernel) for _ in range(layers)]
        self.output = nn.Linear(features, vocabulary)

    def __call__(self, frames: Tensor, lengths: Tensor) -> dict[str, Tensor]:  # (B, T, mels), (B)
        x = frames
        for convolution in self.subsampling:
            x = ops.relu(convolution(x, within(lengths, x)))
            lengths = ops.div(lengths + 1, 2)
        mask = within(lengths, x)  # (B, T/4)
        rotary = self.rotary(ops.unsqueeze(ops.arange(ops.dim(x, 1)), [0]), x)
        for block in self.blocks:
            x = block(x, mask, rotary)  # (B, T/4, D)
        return {"logits": self.output(x)}


def within(lengths: Tensor, x: Tensor) -> Tensor:
    """Which frames of x, (B, T, D), are no padding, (B, T)."""
    return ops.arange(ops.dim(x, 1)) < ops.unsqueeze(lengths, [1])


def inputs(mels: int = 80) -> dict[str, Any]:
    """What `build` needs to know about the arguments."""
    return {"frames": float32["batch", "frames", mels], "lengths": int64["batch"]}
