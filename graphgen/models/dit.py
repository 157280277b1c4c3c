"""DiT: a transformer that takes the noise out of images (Peebles & Xie, arXiv 2212.09748)."""

from typing import Any

import numpy as np

from graphgen import nn, ops
from graphgen.errors import GraphgenError, positive, user_line
from graphgen.nn.module import float32, int64
from graphgen.value import Tensor

WAVES = 256  # sines and cosines that tell a time step


class Block(nn.Module):
    """x + gate · f(norm(x) · (1 + scale) + shift), f attention, then feed-forward (3.2)."""

    def __init__(self, features: int, *, num_heads: int):
        self.norm = nn.LayerNorm(features, epsilon=1e-6, gain=False, bias=False)
        self.attention = nn.Attention(features, num_heads=num_heads)
        self.feed_forward = nn.FeedForward(features, 4 * features, activation="gelu_tanh")
        self.modulation = nn.Modulation(features, features, count=6)

    def __call__(self, x: Tensor, c: Tensor) -> Tensor:  # (B, T, D), (B, D)
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)  # (B, 1, D) each
        x = x + gate1 * self.attention(self.norm(x) * (scale1 + 1.0) + shift1)
        return x + gate2 * self.feed_forward(self.norm(x) * (scale2 + 1.0) + shift2)


class DiT(nn.Module):
    """The noise in an image at a time step, given its class, (B, C, H, W) to (B, C, H, W).

    Tokens are patches, with sinusoidal positions of their rows and columns. Time step and class
    shift, scale and gate each part of each block. The paper's model predicts variances, too.

    Args:
        classes: The number of classes; one more stands for none (arXiv 2207.12598).
        features: D, the size of each token's vector; a multiple of 4.
        layers: The number of blocks.
        num_heads: Heads of attention; they divide D.
        channels: C, those of an image, or of what an autoencoder makes of it.
        image_size: H and W, a multiple of `patch_size`.
        patch_size: The height and width of each patch.
    """

    def __init__(
        self,
        classes: int = 1000,
        features: int = 256,
        *,
        layers: int = 4,
        num_heads: int = 4,
        channels: int = 4,
        image_size: int = 32,
        patch_size: int = 2,
    ):
        positive("DiT", classes=classes, features=features, layers=layers, channels=channels)
        positive("DiT", num_heads=num_heads, image_size=image_size, patch_size=patch_size)
        if features % 4 or image_size % patch_size:
            rule = "4 must divide features, and patch_size image_size" + user_line()
            raise GraphgenError(f"DiT({features=}, {image_size=}, {patch_size=}): {rule}")
        self.features, self.channels, self.patch_size = features, channels, patch_size
        self.side = image_size // patch_size
        patch = patch_size * patch_size * channels
        self.patches = nn.Linear(patch, features)
        self.time1, self.time2 = nn.Linear(WAVES, features), nn.Linear(features, features)
        self.classes = nn.Embedding(classes + 1, features)
        self.blocks = [Block(features, num_heads=num_heads) for _ in range(layers)]
        self.norm = nn.LayerNorm(features, epsilon=1e-6, gain=False, bias=False)
        self.modulation = nn.Modulation(features, features, count=2)
        self.output = nn.Linear(features, patch)

    def __call__(self, image: Tensor, time: Tensor, class_ids: Tensor) -> dict[str, Tensor]:
        side, p = self.side, self.patch_size
        x = ops.reshape(image, [0, self.channels, side, p, side, p])  # (B, C, H/p, p, W/p, p)
        x = ops.transpose(x, perm=[0, 2, 4, 3, 5, 1])  # (B, H/p, W/p, p, p, C)
        x = self.patches(ops.reshape(x, [0, side * side, -1])) + self.positions()  # (B, T, D)
        c = self.time1(ops.sinusoidal_positions(time, features=WAVES))  # (B, D)
        c = self.time2(ops.silu(c)) + self.classes(class_ids)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.modulation(c)
        x = self.output(self.norm(x) * (scale + 1.0) + shift)  # (B, T, p · p · C)
        x = ops.reshape(x, [0, side, side, p, p, self.channels])
        x = ops.transpose(x, perm=[0, 5, 1, 3, 2, 4])  # (B, C, H/p, p, W/p, p)
        return {"noise": ops.reshape(x, [0, self.channels, side * p, side * p])}

    def positions(self) -> Tensor:
        """(T, D): half of the features for the row of each patch, and half for its column."""
        places = np.indices((self.side, self.side), np.float32).reshape(2, -1)
        rows, columns = (ops.sinusoidal_positions(p, features=self.features // 2) for p in places)
        return ops.concat(rows, columns, axis=-1)


def inputs(channels: int = 4, image_size: int = 32) -> dict[str, Any]:
    """What `build` needs to know about the arguments."""
    image = float32["batch", channels, image_size, image_size]
    return {"image": image, "time": float32["batch"], "class_ids": int64["batch"]}
