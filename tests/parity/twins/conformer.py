"""The twin of graphgen/models/conformer.py in PyTorch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, features: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(features, features)
        self.key = nn.Linear(features, features)
        self.value = nn.Linear(features, features)
        self.output = nn.Linear(features, features)

    def forward(
        self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:  # (B, T, D), (B, T), (T, D / H / 2) twice
        projections = self.query(x), self.key(x), self.value(x)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in projections)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        return self.output(y.transpose(1, 2).flatten(2))


class ConvolutionModule(nn.Module):
    def __init__(self, features: int, kernel: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(features)
        self.pointwise1 = nn.Linear(features, 2 * features)
        self.depthwise = nn.Conv1d(features, features, kernel, padding=kernel // 2, groups=features)
        self.norm2 = nn.LayerNorm(features)
        self.pointwise2 = nn.Linear(features, features)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # (B, T, D), (B, T)
        y = F.glu(self.pointwise1(self.norm1(x)))
        y = y.masked_fill(~mask.unsqueeze(-1), 0.0)
        y = self.norm2(self.depthwise(y.mT).mT)
        return self.pointwise2(F.silu(y))


class FeedForward(nn.Sequential):
    def __init__(self, features: int, hidden: int):
        super().__init__(nn.Linear(features, hidden), nn.SiLU(), nn.Linear(hidden, features))


class Block(nn.Module):
    def __init__(self, features: int, num_heads: int, kernel: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.norm3, self.norm4 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.feed_forward1 = FeedForward(features, 4 * features)
        self.feed_forward2 = FeedForward(features, 4 * features)
        self.attention = Attention(features, num_heads)
        self.convolution = ConvolutionModule(features, kernel)

    def forward(
        self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:  # (B, T, D), (B, T)
        x = x + 0.5 * self.feed_forward1(self.norm1(x))
        x = x + self.attention(self.norm2(x), mask, cos, sin)
        x = x + self.convolution(x, mask)
        x = x + 0.5 * self.feed_forward2(self.norm3(x))
        return self.norm4(x)


class Conformer(nn.Module):
    def __init__(
        self,
        vocabulary: int = 1024,
        features: int = 256,
        layers: int = 4,
        num_heads: int = 4,
        kernel: int = 31,
        mels: int = 80,
    ):
        super().__init__()
        self.subsampling = nn.ModuleList(
            nn.Conv1d(size, features, 3, stride=2, padding=1) for size in (mels, features)
        )
        pairs = torch.arange(0, features // num_heads, 2) / (features // num_heads)
        self.register_buffer("frequencies", 10000.0**-pairs)
        self.blocks = nn.ModuleList(Block(features, num_heads, kernel) for _ in range(layers))
        self.output = nn.Linear(features, vocabulary)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:  # (B, T, mels), (B)
        x = frames
        for convolution in self.subsampling:
            mask = torch.arange(x.shape[1]) < lengths.unsqueeze(1)
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
            x = F.relu(convolution(x.mT).mT)
            lengths = (lengths + 1) // 2
        places = torch.arange(x.shape[1])
        angles = places[:, None] * self.frequencies
        mask = places < lengths.unsqueeze(1)  # (B, T / 4)
        for block in self.blocks:
            x = block(x, mask, angles.cos(), angles.sin())  # (B, T / 4, D)
        return self.output(x)
