"""One specification of an encoder of an image's patches, and the modules that it declares."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from graphgen import nn, ops
from graphgen.models.published.config import ACTIVATIONS, Config
from graphgen.nn.module import Parameter, TensorSpec, float32, normal, ones, zeros
from graphgen.ops.resizing import resize
from graphgen.value import Tensor


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a layer is made of: y = x + s1 · attention(norm1(x)), y + s2 · feed_forward(norm2(y)).

    `norm` makes a norm of `features`; s1 and s2 are learned vectors (arXiv 2103.17239) if `scaled`.
    """

    features: int
    norm: Callable[[int], nn.Module]
    attention: Callable[[], nn.Attention]
    feed_forward: Callable[[], nn.Module]
    scaled: bool = False


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An image as patches: C, H and W of it, the size of a patch, and what stands beside them.

    Args:
        image: C, H, W.
        patch: The rows and columns of a patch.
        tokens: How many learned vectors stand before those of the patches.
        bias: Whether the patches' products have a bias.
        flat: Whether learned vectors and positions are stored without an axis for the batch.
        resized: Whether images may have any size, for which the positions are interpolated.
        smoothed: Whether fewer positions are weighted sums of all, as when an image is shrunk.
        registers: How many further vectors stand behind the first, without positions (2309.16588).
        first_norm: Whether a norm precedes the layers.
        last_norm: Whether one follows them.
    """

    image: tuple[int, int, int]
    patch: list[int]
    tokens: int = 1
    bias: bool = True
    flat: bool = False
    resized: bool = False
    smoothed: bool = False
    registers: int = 0
    first_norm: bool = False
    last_norm: bool = True


class Patches(nn.Module):
    """W p + b of each patch p: (B, C, H, W) to (B, D, rows, columns)."""

    def __init__(self, features: int, picture: Picture):
        self.patch = picture.patch
        shape = (features, picture.image[0], *picture.patch)
        self.weight = Parameter(shape, initialize=normal(0.02))
        self.bias = Parameter((features,), initialize=zeros) if picture.bias else None

    def __call__(self, image: Tensor) -> Tensor:
        return ops.conv(image, self.weight, self.bias, strides=self.patch)


class Layer(nn.Module):
    """Attention and feed-forward, with the norm before each."""

    def __init__(self, parts: Parts):
        scale = (parts.features,) if parts.scaled else None
        self.norm1 = parts.norm(parts.features)
        self.attention = parts.attention()
        self.scale1 = None if scale is None else Parameter(scale, initialize=ones)
        self.norm2 = parts.norm(parts.features)
        self.feed_forward = parts.feed_forward()
        self.scale2 = None if scale is None else Parameter(scale, initialize=ones)

    def __call__(self, x: Tensor, mask: Tensor | None = None, **how: Any) -> Tensor:  # (B, T, D)
        y = self.attention(self.norm1(x), mask=mask, **how)
        x = x + (y if self.scale1 is None else y * self.scale1)
        y = self.feed_forward(self.norm2(x))
        return x + (y if self.scale2 is None else y * self.scale2)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """The learned vectors and then one for each patch, by rows: (B, C, H, W) to (B, T, D)."""

    def __init__(self, picture: Picture, parts: Parts, layers: int):
        self.picture, self.features = picture, parts.features
        self.grid = [
            size // step for size, step in zip(picture.image[1:], picture.patch, strict=True)
        ]
        batch = () if picture.flat else (1,)
        self.patches = Patches(parts.features, picture)
        token = (parts.features,) if picture.flat else (1, 1, parts.features)
        self.whole, self.distilled = (
            Parameter(token, initialize=normal(0.02)) if picture.tokens > n else None
            for n in range(2)
        )
        count = picture.tokens + self.grid[0] * self.grid[1]
        self.positions = Parameter((*batch, count, parts.features), initialize=normal(0.02))
        self.registers = None
        if picture.registers:
            shape = (1, picture.registers, parts.features)
            self.registers = Parameter(shape, initialize=normal(0.02))
        self.first_norm = parts.norm(parts.features) if picture.first_norm else None
        self.layers = [Layer(parts) for _ in range(layers)]
        self.norm = parts.norm(parts.features) if picture.last_norm else None

    def __call__(self, pixel_values: Tensor) -> Tensor:
        y = self.patches(ops.cast_like(pixel_values, self.positions))  # (B, D, rows, columns)
        size = [ops.dim(y, 2), ops.dim(y, 3)]
        x = ops.swap_last(ops.reshape(y, [0, self.features, -1]))  # (B, patches, D)
        shape = [ops.dim(x, 0), 1, self.features]
        learned = [ops.expand(p, shape) for p in (self.whole, self.distilled) if p is not None]
        x = ops.concat(*learned, x, axis=1) if learned else x
        x = x + (self._resized(size) if self.picture.resized else self.positions)
        if self.registers is not None:
            tokens = self.picture.tokens
            first, rest = (
                ops.slice_(x, [a], [b], [1]) for a, b in ((0, tokens), (tokens, 1 << 31))
            )
            own = ops.expand(self.registers, [ops.dim(x, 0), 1, 1])
            x = ops.concat(first, own, rest, axis=1)
        x = x if self.first_norm is None else self.first_norm(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.norm is None else self.norm(x)

    def _resized(self, size: list[Any]) -> Tensor:
        """The positions, those of patches by cubic interpolation for so many."""
        tokens = self.picture.tokens
        own, table = (
            ops.slice_(self.positions, [begin], [end], [1])
            for begin, end in ((0, tokens), (tokens, tokens + self.grid[0] * self.grid[1]))
        )
        grid = ops.reshape(ops.swap_last(table), [1, self.features, *self.grid])
        how: dict[str, Any] = {"mode": "cubic"}  # a is -0.75, or as in PIL
        if self.picture.smoothed:
            how |= {"antialias": 1, "cubic_coeff_a": -0.5, "exclude_outside": 1}
        grid = resize(grid, sizes=[1, self.features, *size], **how)
        return ops.concat(own, ops.swap_last(ops.reshape(grid, [1, self.features, -1])), axis=1)

    def inputs(self) -> dict[str, TensorSpec]:
        """Images of the only size that has positions, or of any if these are interpolated."""
        channels, *size = self.picture.image
        dims = ["height", "width"] if self.picture.resized else size
        return {"pixel_values": float32["batch_size", channels, *dims]}


def parts(config: Config, *, epsilon: float, activation: str = "gelu", **own: Any) -> Parts:
    """The parts that the usual fields describe; `own` replaces some."""
    features, heads = config.take("hidden_size", int), config.take("num_attention_heads", int)
    epsilon = config.take("layer_norm_eps", float, epsilon)
    if "feed_forward" not in own:
        hidden = config.take("intermediate_size", int)
        kind = config.choose("hidden_act", ACTIVATIONS, activation)
        own["feed_forward"] = lambda: nn.FeedForward(features, hidden, activation=kind)
    if "attention" not in own:
        own["attention"] = lambda: nn.Attention(features, num_heads=heads)
    return Parts(features=features, norm=lambda n: nn.LayerNorm(n, epsilon=epsilon), **own)


def picture(config: Config, patch: int, **own: Any) -> Picture:
    """The image that the usual fields describe."""
    image, step = pair(config, "image_size", 224), pair(config, "patch_size", patch)
    if image[0] < step[0] or image[1] < step[1]:
        config.refuse("image_size", image, f"at least one patch of {step}")
    return Picture(
        image=(config.take("num_channels", int, 3), image[0], image[1]), patch=step, **own
    )


def pair(config: Config, name: str, default: int) -> list[int]:
    """The sizes of rows and columns, given as one or two numbers."""
    given: Any = config.raw(name, default)
    sizes = given if isinstance(given, list) else [given, given]
    if len(sizes) != 2 or not all(type(s) is int and 0 < s < 1 << 16 for s in sizes):
        config.refuse(name, given, "one or two sizes from 1 to 65535")
    return sizes
