"""The twin of graphgen/models/dit.py in PyTorch."""

import math

import torch
from torch import Tensor, nn


def sinusoids(positions: Tensor, features: int) -> Tensor:
    rates = torch.exp(torch.arange(0, features, 2) * (-math.log(10000.0) / features))
    angles = positions[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


class Block(nn.Module):
    def __init__(self, features: int, num_heads: int):
        super().__init__()
        self.norm = nn.LayerNorm(features, eps=1e-6, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(features, num_heads, batch_first=True)
        self.feed_forward = nn.Sequential(
            nn.Linear(features, 4 * features),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * features, features),
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(features, 6 * features))
        nn.init.zeros_(self.modulation[1].weight)
        nn.init.zeros_(self.modulation[1].bias)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:  # (B, T, D), (B, D)
        parts = self.modulation(c).unsqueeze(1).chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts  # (B, 1, D) each
        y = self.norm(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attention(y, y, y, need_weights=False)[0]
        return x + gate2 * self.feed_forward(self.norm(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    def __init__(
        self,
        classes: int = 1000,
        features: int = 256,
        layers: int = 4,
        num_heads: int = 4,
        channels: int = 4,
        image_size: int = 32,
        patch_size: int = 2,
    ):
        super().__init__()
        self.channels, self.patch_size = channels, patch_size
        self.side = image_size // patch_size
        self.patches = nn.Conv2d(channels, features, patch_size, stride=patch_size)
        self.time = nn.Sequential(
            nn.Linear(256, features), nn.SiLU(), nn.Linear(features, features)
        )
        self.classes = nn.Embedding(classes + 1, features)
        self.blocks = nn.ModuleList(Block(features, num_heads) for _ in range(layers))
        self.norm = nn.LayerNorm(features, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(features, 2 * features))
        nn.init.zeros_(self.modulation[1].weight)
        nn.init.zeros_(self.modulation[1].bias)
        self.output = nn.Linear(features, patch_size * patch_size * channels)
        places = torch.arange(self.side, dtype=torch.float32)
        rows, columns = torch.meshgrid(places, places, indexing="ij")
        both = [sinusoids(p.flatten(), features // 2) for p in (rows, columns)]
        self.register_buffer("positions", torch.cat(both, dim=-1))

    def forward(self, image: Tensor, time: Tensor, class_ids: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).mT + self.positions  # (B, T, D)
        c = self.time(sinusoids(time, 256)) + self.classes(class_ids)  # (B, D)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.modulation(c).unsqueeze(1).chunk(2, dim=-1)
        x = self.output(self.norm(x) * (1 + scale) + shift)  # (B, T, p · p · C)
        side, p = self.side, self.patch_size
        x = x.reshape(-1, side, side, p, p, self.channels).permute(0, 5, 1, 3, 2, 4)
        return x.reshape(-1, self.channels, side * p, side * p)
