"""The layers of Swin (arXiv 2103.14030): attention in windows, and patches that are merged."""

import numpy as np

from graphgen import nn, ops
from graphgen.models.published.config import ACTIVATIONS, Config
from graphgen.nn.module import Parameter, normal
from graphgen.operands import Array
from graphgen.value import Tensor

_APART = -100.0
"""What is added to scores of places that only the moving brought together."""


class Windows:
    """Which places of a grid lie in which window, and back; those beyond the grid are empty."""

    def __init__(self, rows: int, columns: int, size: int, shift: int):
        wide = [-(-n // size) * size for n in (rows, columns)]
        grid = np.full(wide, rows * columns)
        grid[:rows, :columns] = np.arange(rows * columns).reshape(rows, columns)
        self.empty = bool((grid == rows * columns).any())
        self.places = _split(np.roll(grid, (-shift, -shift), (0, 1)), size)  # (windows, size²)
        self.back = np.argsort(self.places.reshape(-1), kind="stable")[: rows * columns]
        self.apart: Array | None = None
        if shift:
            edges = [
                sum((np.arange(n) >= n - size, np.arange(n) >= n - shift), np.zeros(n, int))
                for n in wide
            ]
            kinds = _split(edges[0][:, None] * 3 + edges[1], size)
            differ = kinds[:, None, :] != kinds[:, :, None]
            self.apart = (differ * np.float32(_APART))[:, None]  # (windows, 1, size², size²)


def _split(grid: Array, size: int) -> Array:
    """The numbers of each window, (windows, size²)."""
    rows, columns = (n // size for n in grid.shape)
    parts = grid.reshape(rows, size, columns, size).transpose(0, 2, 1, 3)
    return parts.reshape(-1, size * size)


def _and_nothing(x: Tensor, features: int) -> Tensor:
    """The vectors of places, and one of zeros."""
    none = ops.cast_like(np.zeros((1, 1, features), np.float32), x)
    return ops.concat(x, ops.expand(none, [ops.dim(x, 0), 1, 1]), axis=1)


class Layer(nn.Module):
    """Attention in windows and feed-forward, with a norm before each, (B, H·W, C)."""

    def __init__(self, config: Config, features: int, heads: int, grid: tuple[int, int], odd: bool):
        size = config.take("window_size", int, 7)
        moved = size // 2 if odd and min(grid) > size else 0
        if min(grid) < size:
            config.refuse("window_size", size, f"at most {min(grid)}, the smallest grid of patches")
        self.features, self.heads, self.size = features, heads, size
        self.windows = Windows(*grid, size, moved)
        epsilon = config.take("layer_norm_eps", float, 1e-5)
        self.norm1 = nn.LayerNorm(features, epsilon=epsilon)
        bias = config.take("qkv_bias", bool, True)
        self.attention = nn.Attention(features, num_heads=heads, bias=bias, output_bias=True)
        self.table = Parameter(((2 * size - 1) ** 2, heads), initialize=normal(0.02))
        apart = np.arange(size)[:, None] - np.arange(size) + size - 1
        rows, columns = (np.repeat(np.repeat(apart, n, 0), n, 1) for n in (size, 1))
        columns = np.tile(columns, (size, size))
        self.distances = rows * (2 * size - 1) + columns  # (size², size²)
        self.norm2 = nn.LayerNorm(features, epsilon=epsilon)
        hidden = int(features * config.take("mlp_ratio", float, 4.0))
        kind = config.choose("hidden_act", ACTIVATIONS, "gelu")
        self.feed_forward = nn.FeedForward(features, hidden, activation=kind)

    def __call__(self, x: Tensor) -> Tensor:
        y, own = self.norm1(x), self.windows
        if own.empty:
            y = _and_nothing(y, self.features)
        y = ops.gather(y, own.places, axis=1)  # (B, windows, size², C)
        y = ops.reshape(y, [-1, self.size**2, self.features])
        bias = ops.transpose(ops.embedding(self.table, self.distances), perm=[2, 0, 1])
        bias = ops.unsqueeze(bias, [0])  # (1, heads, size², size²)
        if own.apart is not None:
            bias = ops.unsqueeze(bias + ops.cast_like(own.apart, bias), [0])
            bias = ops.expand(bias, [ops.dim(x, 0), 1, 1, 1, 1])
            bias = ops.reshape(bias, [-1, self.heads, self.size**2, self.size**2])
        y = self.attention(y, mask=bias)
        y = ops.reshape(y, [-1, own.places.size, self.features])
        x = x + ops.gather(y, own.back, axis=1)
        return x + self.feed_forward(self.norm2(x))


class Merge(nn.Module):
    """W norm of the features of 2 x 2 places, (B, H·W, C) to (B, H·W / 4, 2 C)."""

    def __init__(self, features: int, grid: tuple[int, int]):
        rows, columns = grid
        self.features, self.count = features, rows * columns
        whole = np.full([n + n % 2 for n in grid], self.count)
        whole[:rows, :columns] = np.arange(self.count).reshape(grid)
        self.empty = bool((whole == self.count).any())
        parts = [whole[a::2, b::2] for a, b in ((0, 0), (1, 0), (0, 1), (1, 1))]
        self.places = np.stack(parts, -1).reshape(-1)
        self.norm = nn.LayerNorm(4 * features)
        self.reduction = nn.Linear(4 * features, 2 * features, bias=False)

    def __call__(self, x: Tensor) -> Tensor:
        if self.empty:
            x = _and_nothing(x, self.features)
        y = ops.reshape(ops.gather(x, self.places, axis=1), [0, -1, 4 * self.features])
        return self.reduction(self.norm(y))


class Stage(nn.Module):
    """Layers of one size, and what makes the next one of it."""

    def __init__(self, layers: list[Layer], merge: Merge | None):
        self.layers, self.merge = layers, merge

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if self.merge is None else self.merge(x)
