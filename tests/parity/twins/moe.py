"""The twin of graphgen/models/moe.py in PyTorch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, H, T, head_dim)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Attention(nn.Module):
    def __init__(self, features: int, num_heads: int, kv_heads: int):
        super().__init__()
        self.head_dim = features // num_heads
        self.query = nn.Linear(features, features, bias=False)
        self.key = nn.Linear(features, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(features, kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(features, features, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, T, D)
        B, T, D = x.shape
        q = self.query(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H, T, head_dim)
        k = self.key(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        v = self.value(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.output(y.transpose(1, 2).reshape(B, T, D))


class Expert(nn.Module):
    def __init__(self, features: int, hidden: int):
        super().__init__()
        self.up = nn.Linear(features, hidden, bias=False)
        self.gate = nn.Linear(features, hidden, bias=False)
        self.down = nn.Linear(hidden, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MixtureOfExperts(nn.Module):
    def __init__(self, features: int, hidden: int, experts: int, k: int):
        super().__init__()
        self.k = k
        self.router = nn.Linear(features, experts, bias=False)
        self.experts = nn.ModuleList(Expert(features, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        rows = x.flatten(0, 1)  # (N, D)
        scores, chosen = self.router(rows).topk(self.k)  # (N, k)
        weights = scores.softmax(dim=-1)
        y = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            row, place = torch.where(chosen == i)
            y = y.index_add(0, row, expert(rows[row]) * weights[row, place, None])
        return y.view_as(x)


class MoELayer(nn.Module):
    def __init__(
        self, features: int, hidden: int, num_heads: int, kv_heads: int, experts: int, k: int
    ):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(features, 1e-5), nn.RMSNorm(features, 1e-5)
        self.attention = Attention(features, num_heads, kv_heads)
        self.experts = MixtureOfExperts(features, hidden, experts, k)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, T, D)
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.experts(self.norm2(x))


class MoEDecoder(nn.Module):
    def __init__(
        self,
        vocabulary: int = 8192,
        features: int = 256,
        *,
        layers: int = 4,
        num_heads: int = 4,
        kv_heads: int = 2,
        hidden: int | None = None,
        experts: int = 8,
        k: int = 2,
    ):
        super().__init__()
        head_dim = features // num_heads
        hidden = 2 * features if hidden is None else hidden
        self.embedding = nn.Embedding(vocabulary, features)
        frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.layers = nn.ModuleList(
            MoELayer(features, hidden, num_heads, kv_heads, experts, k) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(features, 1e-5)
        self.output = nn.Linear(features, vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:  # (B, T)
        x = self.embedding(input_ids)  # (B, T, D)
        angles = torch.outer(torch.arange(x.shape[1], device=x.device), self.frequencies)
        cos, sin = angles.cos(), angles.sin()  # (T, head_dim / 2)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))  # (B, T, vocabulary)
