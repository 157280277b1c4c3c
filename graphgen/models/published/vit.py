"""ViT (arXiv 2010.11929): an encoder of an image's patches, with the norm before each part."""

from typing import Any

from graphgen import nn, ops
from graphgen.models.published.config import Config
from graphgen.models.published.family import ACTIVATIONS, Family
from graphgen.models.published.heads import first, labels
from graphgen.nn.module import Parameter, TensorSpec, float32, normal, zeros
from graphgen.value import Tensor


class Patches(nn.Module):
    """W p + b of each patch p, in rows from the top left: (B, C, H, W) to (B, patches, D)."""

    def __init__(self, features: int, channels: int, patch: list[int]):
        self.features, self.patch = features, patch
        self.weight = Parameter((features, channels, *patch), initialize=normal(0.02))
        self.bias = Parameter((features,), initialize=zeros)

    def __call__(self, image: Tensor) -> Tensor:
        y = ops.conv(image, self.weight, self.bias, strides=self.patch)  # (B, D, rows, columns)
        return ops.swap_last(ops.reshape(y, [0, self.features, -1]))


class Layer(nn.Module):
    """Attention and feed-forward, with the norm before each."""

    def __init__(self, config: Config):
        features = config.take("hidden_size", int)
        heads = config.take("num_attention_heads", int)
        epsilon = config.take("layer_norm_eps", float, 1e-12)
        self.norm1 = nn.LayerNorm(features, epsilon=epsilon)
        self.attention = nn.Attention(
            features,
            num_heads=heads,
            head_dim=config.take("head_dim", int, features // heads),
            bias=config.take("qkv_bias", bool, True),
            output_bias=True,
        )
        self.norm2 = nn.LayerNorm(features, epsilon=epsilon)
        self.feed_forward = nn.FeedForward(
            features,
            config.take("intermediate_size", int),
            activation=config.choose("hidden_act", ACTIVATIONS, "gelu"),
        )

    def __call__(self, x: Tensor) -> Tensor:  # (B, T, D)
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Encoder(nn.Module):
    """A vector for the whole image and one for each patch, (B, C, H, W) to (B, 1 + patches, D)."""

    def __init__(self, config: Config):
        features = config.take("hidden_size", int)
        image, patch = pair(config, "image_size", 224), pair(config, "patch_size", 16)
        if image[0] < patch[0] or image[1] < patch[1]:
            config.refuse("image_size", image, f"at least one patch of {patch}")
        self.features, self.image = features, (config.take("num_channels", int, 3), *image)
        self.patches = Patches(features, self.image[0], patch)
        count = 1 + (image[0] // patch[0]) * (image[1] // patch[1])
        self.whole = Parameter((1, 1, features), initialize=normal(0.02))
        self.positions = Parameter((1, count, features), initialize=normal(0.02))
        self.layers = [Layer(config) for _ in range(config.take("num_hidden_layers", int))]
        epsilon = config.take("layer_norm_eps", float, 1e-12)
        self.norm = nn.LayerNorm(features, epsilon=epsilon)

    def __call__(self, pixel_values: Tensor) -> Tensor:
        x = self.patches(ops.cast_like(pixel_values, self.whole))  # (B, patches, D)
        whole = ops.expand(self.whole, [ops.dim(x, 0), 1, self.features])
        x = ops.concat(whole, x, axis=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Images(nn.Module):
    """The vectors of an image, or the logits of its labels, (B, labels)."""

    def __init__(self, config: Config, *, classify: bool):
        self.encoder = Encoder(config)
        self.classifier = nn.Linear(self.encoder.features, labels(config)) if classify else None

    def __call__(self, pixel_values: Tensor) -> dict[str, Tensor]:
        x = self.encoder(pixel_values)  # (B, 1 + patches, D)
        if self.classifier is None:
            return {"last_hidden_state": x}
        return {"logits": self.classifier(first(x))}

    def inputs(self) -> dict[str, TensorSpec]:
        """Images of the only size that has positions."""
        return {"pixel_values": float32["batch_size", *self.encoder.image]}


def pair(config: Config, name: str, default: int) -> list[int]:
    """The sizes of rows and columns, given as one or two numbers."""
    given: Any = config.raw(name, default)
    sizes = given if isinstance(given, list) else [given, given]
    if len(sizes) != 2 or not all(type(s) is int and 0 < s < 1 << 16 for s in sizes):
        config.refuse(name, given, "one or two sizes from 1 to 65535")
    return sizes


FAMILY = Family(
    tasks={
        "image-classification": lambda config: Images(config, classify=True),
        "feature-extraction": lambda config: Images(config, classify=False),
    },
    names={
        "encoder": "vit",
        "patches": "embeddings.patch_embeddings.projection",
        "whole": "embeddings.cls_token",
        "positions": "embeddings.position_embeddings",
        "layers": "encoder.layer",
        "norm1": "layernorm_before",
        "query": "attention.query",
        "key": "attention.key",
        "value": "attention.value",
        "output": "output.dense",
        "norm2": "layernorm_after",
        "feed_forward": "",
        "up": "intermediate.dense",
        "down": "output.dense",
        "norm": "layernorm",
    },
    unused=r"(vit\.)?(pooler\..*|embeddings\.mask_token)|classifier\..*",
    prefix="vit.",
)
