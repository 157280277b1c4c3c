"""The twin of graphgen/models/gemma.py in PyTorch."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    def __init__(self, features: int, epsilon: float = 1e-6):
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return x * (1.0 + self.weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, H, T, head_dim)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Attention(nn.Module):
    def __init__(
        self, features: int, num_heads: int, kv_heads: int, head_dim: int, window: int | None
    ):
        super().__init__()
        self.num_heads, self.kv_heads, self.head_dim = num_heads, kv_heads, head_dim
        self.window = window
        self.query = nn.Linear(features, num_heads * head_dim, bias=False)
        self.key = nn.Linear(features, kv_heads * head_dim, bias=False)
        self.value = nn.Linear(features, kv_heads * head_dim, bias=False)
        self.output = nn.Linear(num_heads * head_dim, features, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, T, D)
        B, T, _ = x.shape
        q = self.query(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.key(x).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.value(x).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k = k.repeat_interleave(self.num_heads // self.kv_heads, dim=1)  # (B, H, T, head_dim)
        v = v.repeat_interleave(self.num_heads // self.kv_heads, dim=1)
        scores = q @ k.transpose(2, 3) / math.sqrt(self.head_dim)  # (B, H, T, T)
        scores = 50.0 * torch.tanh(scores / 50.0)
        keep = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        if self.window is not None:
            keep = keep.triu(1 - self.window)
        weights = scores.masked_fill(~keep, float("-inf")).softmax(dim=-1)
        y = (weights @ v).transpose(1, 2).reshape(B, T, self.num_heads * self.head_dim)
        return self.output(y)


class FeedForward(nn.Module):
    def __init__(self, features: int, hidden: int):
        super().__init__()
        self.up = nn.Linear(features, hidden, bias=False)
        self.gate = nn.Linear(features, hidden, bias=False)
        self.down = nn.Linear(hidden, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))


class GemmaLayer(nn.Module):
    def __init__(self, features: int, hidden: int, window: int | None, **heads: int):
        super().__init__()
        self.attention = Attention(features, window=window, **heads)
        self.feed_forward = FeedForward(features, hidden)
        self.norms = nn.ModuleList(RMSNorm(features) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, T, D)
        norm1, norm2, norm3, norm4 = self.norms
        x = x + norm2(self.attention(norm1(x), cos, sin))
        return x + norm4(self.feed_forward(norm3(x)))


class Gemma(nn.Module):
    def __init__(
        self,
        vocabulary: int = 8192,
        features: int = 256,
        *,
        layers: int = 4,
        num_heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 64,
        hidden: int | None = None,
        window: int = 128,
    ):
        super().__init__()
        heads = {"num_heads": num_heads, "kv_heads": kv_heads, "head_dim": head_dim}
        hidden = 4 * features if hidden is None else hidden
        self.embedding = nn.Embedding(vocabulary, features)
        frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.layers = nn.ModuleList(
            GemmaLayer(features, hidden, window=None if i % 2 else window, **heads)
            for i in range(layers)
        )
        self.norm = RMSNorm(features)

    def forward(self, input_ids: Tensor) -> Tensor:  # (B, T)
        x = self.embedding(input_ids) * math.sqrt(self.embedding.embedding_dim)  # (B, T, D)
        angles = torch.outer(torch.arange(x.shape[1], device=x.device), self.frequencies)
        cos, sin = angles.cos(), angles.sin()  # (T, head_dim / 2)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.norm(x) @ self.embedding.weight.T  # (B, T, vocabulary)
        return 30.0 * torch.tanh(logits / 30.0)
