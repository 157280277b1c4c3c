"""ConvNeXt (arXiv 2201.03545) and ConvNeXt V2 (2301.00808): convolutions of each feature alone."""

from functools import partial
from typing import Any

from graphgen import nn, ops
from graphgen.models.published.config import ACTIVATIONS, Config
from graphgen.models.published.family import Family
from graphgen.models.published.heads import labels
from graphgen.models.published.vision import Patches, Picture, pair
from graphgen.nn.feed_forward import ACTIVATIONS as FUNCTIONS, Activation
from graphgen.nn.module import Parameter, TensorSpec, float32, normal, ones, zeros
from graphgen.value import Tensor

_EPSILON = 1e-6


class Block(nn.Module):
    """x + s · W₂ f(W₁ norm(c(x))), (B, C, H, W); c reads 7 x 7 places of each feature."""

    def __init__(self, features: int, activation: Activation, *, scaled: bool, responds: bool):
        self.features = features
        self.activation: Activation = activation
        self.kernel = Parameter((features, 1, 7, 7), initialize=normal(0.02))
        self.shift = Parameter((features,), initialize=zeros)
        self.norm = nn.LayerNorm(features, epsilon=_EPSILON)
        self.up, self.down = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)
        wide = (1, 1, 1, 4 * features)
        self.gain, self.offset = (
            Parameter(wide, initialize=zeros) if responds else None for _ in range(2)
        )
        self.scale = Parameter((features,), initialize=ones) if scaled else None

    def __call__(self, x: Tensor) -> Tensor:
        y = ops.conv(x, self.kernel, self.shift, pads=[3] * 4, group=self.features)
        y = self.up(self.norm(ops.transpose(y, perm=[0, 2, 3, 1])))  # (B, H, W, 4 C)
        y = FUNCTIONS[self.activation](y)
        if self.gain is not None and self.offset is not None:  # by how much each responds
            size = ops.sqrt(ops.reduce_sum(y * y, axis=(1, 2)))
            share = size / (ops.reduce_mean(size, axis=3) + _EPSILON)
            y = self.gain * (y * share) + self.offset + y
        y = self.down(y)
        y = y if self.scale is None else y * self.scale
        return x + ops.transpose(y, perm=[0, 3, 1, 2])


class Shrink(nn.Module):
    """A norm of each place's features, and a convolution of 2 x 2 places."""

    def __init__(self, features: int, made: int):
        self.norm = nn.LayerNorm(features, epsilon=_EPSILON)
        self.patches = Patches(made, Picture(image=(features, 2, 2), patch=[2, 2]))

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.patches(_normed(x, self.norm))
        return y


class Stage(nn.Module):
    """Blocks of one size, behind what makes that size of the last one."""

    def __init__(self, before: int, features: int, blocks: list[Block]):
        self.shrink = Shrink(before, features) if before else None
        self.blocks = blocks

    def __call__(self, x: Tensor) -> Tensor:
        x = x if self.shrink is None else self.shrink(x)
        for block in self.blocks:
            x = block(x)
        return x


class Images(nn.Module):
    """The features of an image's places, (B, C, H, W), their mean, or the logits of its labels."""

    def __init__(self, config: Config, *, classify: bool):
        sizes, depths = (
            sizes_of(config, name, default)
            for name, default in (("hidden_sizes", [96, 192, 384, 768]), ("depths", [3, 3, 9, 3]))
        )
        config.expect("num_stages", len(sizes))
        if len(depths) != len(sizes):
            config.refuse("depths", depths, f"{len(sizes)} sizes, as hidden_sizes has")
        config.ignore("image_size", "drop_path_rate", "stage_names", "out_features", "out_indices")
        kind: Activation = config.choose("hidden_act", ACTIVATIONS, "gelu")
        second = config.model_type == "convnextv2"
        scaled = not second and config.take("layer_scale_init_value", float, 1e-6) > 0
        patch = pair(config, "patch_size", 4)
        self.channels = config.take("num_channels", int, 3)
        self.patches = Patches(
            sizes[0], Picture(image=(self.channels, patch[0], patch[1]), patch=patch)
        )
        self.first_norm = nn.LayerNorm(sizes[0], epsilon=_EPSILON)
        how: dict[str, Any] = {"scaled": scaled, "responds": second}
        self.stages = [
            Stage(before, size, [Block(size, kind, **how) for _ in range(depth)])
            for before, size, depth in zip([0, *sizes], sizes, depths, strict=False)
        ]
        self.last_norm = nn.LayerNorm(
            sizes[-1], epsilon=config.take("layer_norm_eps", float, 1e-12)
        )
        self.classifier = nn.Linear(sizes[-1], labels(config)) if classify else None

    def __call__(self, pixel_values: Tensor) -> dict[str, Tensor]:
        x = self.patches(ops.cast_like(pixel_values, self.patches.weight))
        x = _normed(x, self.first_norm)
        for stage in self.stages:
            x = stage(x)
        y = self.last_norm(ops.reduce_mean(x, axis=(2, 3), keepdims=False))
        if self.classifier is not None:
            return {"logits": self.classifier(y)}
        return {"pooler_output": y, "last_hidden_state": x}

    def inputs(self) -> dict[str, TensorSpec]:
        """Images of any size."""
        return {"pixel_values": float32["batch_size", self.channels, "height", "width"]}


def sizes_of(config: Config, name: str, default: list[int]) -> list[int]:
    """A field that has a size for each stage."""
    found = config.raw(name, default)
    fits = isinstance(found, list) and 0 < len(found) < 100
    if not fits or not all(type(n) is int and 0 < n < 1 << 16 for n in found):
        config.refuse(name, found, "a list of sizes")
    return list(found)


def _normed(x: Tensor, norm: nn.Module) -> Tensor:
    """A norm of the features of each place, (B, C, H, W)."""
    return ops.transpose(norm(ops.transpose(x, perm=[0, 2, 3, 1])), perm=[0, 3, 1, 2])


FAMILIES = {
    kind: Family(
        tasks={
            "image-classification": partial(Images, classify=True),
            "feature-extraction": partial(Images, classify=False),
        },
        names={
            "patches": f"{kind}.embeddings.patch_embeddings",
            "first_norm": f"{kind}.embeddings.layernorm",
            "stages": f"{kind}.encoder.stages",
            "last_norm": f"{kind}.layernorm",
            "norm": "layernorm",
            "shrink": "downsampling_layer",
            "shrink.norm": "0",
            "shrink.patches": "1",
            "blocks": "layers",
            "kernel": "dwconv.weight",
            "shift": "dwconv.bias",
            "up": "pwconv1",
            "down": "pwconv2",
            "gain": "grn.weight",
            "offset": "grn.bias",
            "scale": "layer_scale_parameter",
        },
        unused=r"classifier\..*",
        prefix=f"{kind}.",
    )
    for kind in ("convnext", "convnextv2")
}
