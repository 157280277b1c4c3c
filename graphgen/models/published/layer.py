"""A layer of a decoder or an encoder, as its specification declares it."""

from typing import Any

from graphgen import nn
from graphgen.models.published.specification import Blocks
from graphgen.value import Tensor


class Layer(nn.Module):
    """Attention and feed-forward, with the norms of the specification around them."""

    def __init__(self, spec: Blocks, number: int):
        self.spec, self.window = spec, spec.layers[number].window
        self.attention = spec.attention(number)
        self.feed_forward = spec.feed_forward(number)
        has = {*spec.norms} - ({"norm1"} if spec.bare_first and number == 0 else set())
        self.norm1, self.after1, self.norm2, self.after2 = (
            spec.norm(spec.features) if name in has else None
            for name in ("norm1", "after1", "norm2", "after2")
        )

    def __call__(self, x: Tensor, **how: Any) -> Tensor:  # (B, T, D)
        normed = x if self.norm1 is None else self.norm1(x)
        y = self.attention(normed, **how)
        if self.spec.parallel:
            z = self.feed_forward(normed if self.norm2 is None else self.norm2(x))
            return x + self._scaled(y) + self._scaled(z)
        x = self._joined(x, y, self.after1)
        y = self.feed_forward(x if self.norm2 is None else self.norm2(x))
        return self._joined(x, y, self.after2)

    def _joined(self, x: Tensor, y: Tensor, after: nn.Module | None) -> Tensor:
        if after is None:
            return x + self._scaled(y)
        joined: Tensor = after(x + y) if self.spec.post else x + self._scaled(after(y))
        return joined

    def _scaled(self, y: Tensor) -> Tensor:
        return y if self.spec.residual_scale == 1.0 else y * self.spec.residual_scale
