"""The twin of graphgen/models/mamba.py in PyTorch."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def selective_scan(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    B, T, E = u.shape
    h = u.new_zeros(B, E, a.shape[1])  # (B, E, N)
    ys = []
    for t in range(T):
        decay = torch.exp(delta[:, t, :, None] * a)
        h = decay * h + (delta[:, t] * u[:, t])[..., None] * b[:, t, None]
        ys.append((h @ c[:, t, :, None]).squeeze(-1))  # (B, E)
    return torch.stack(ys, dim=1) + u * d


class MambaBlock(nn.Module):
    def __init__(self, features: int, expand: int, state: int, kernel: int):
        super().__init__()
        inner, rank = expand * features, math.ceil(features / 16)
        self.sizes = [rank, state, state]
        self.norm = nn.RMSNorm(features, eps=1e-5)
        self.input = nn.Linear(features, 2 * inner, bias=False)
        self.convolution = nn.Conv1d(inner, inner, kernel, groups=inner, padding=kernel - 1)
        self.select = nn.Linear(inner, rank + 2 * state, bias=False)
        self.delta = nn.Linear(rank, inner)
        steps = torch.exp(torch.empty(inner).uniform_(math.log(0.001), math.log(0.1)))
        self.delta.bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))
        rates = torch.arange(1, state + 1, dtype=torch.float32)
        self.log_rates = nn.Parameter(torch.log(rates).repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))
        self.output = nn.Linear(inner, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        u, z = self.input(self.norm(x)).chunk(2, dim=-1)  # (B, T, E)
        u = self.convolution(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        u = F.silu(u)
        delta, b, c = self.select(u).split(self.sizes, dim=-1)  # (B, T, N)
        delta = F.softplus(self.delta(delta))  # (B, T, E)
        y = selective_scan(u, delta, -torch.exp(self.log_rates), b, c, self.skip)
        return x + self.output(y * F.silu(z))


class Mamba(nn.Module):
    def __init__(
        self,
        vocabulary: int = 8192,
        features: int = 256,
        *,
        layers: int = 4,
        expand: int = 2,
        state: int = 16,
        kernel: int = 4,
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features)
        self.layers = nn.ModuleList(
            MambaBlock(features, expand, state, kernel) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(features, eps=1e-5)

    def forward(self, input_ids: Tensor) -> Tensor:  # (B, T)
        x = self.embedding(input_ids)  # (B, T, D)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embedding.weight.T  # (B, T, vocabulary)
