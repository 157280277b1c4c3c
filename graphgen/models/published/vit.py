"""ViT (arXiv 2010.11929), MSN (2204.07141), DeiT (2012.12877) and DINOv2 (2304.07193)."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from graphgen import nn, ops
from graphgen.models.published.config import ACTIVATIONS, Config
from graphgen.models.published.family import Family
from graphgen.models.published.heads import labels
from graphgen.models.published.poolings import first
from graphgen.models.published.vision import Encoder, pair, parts, picture
from graphgen.nn.module import TensorSpec
from graphgen.parts import Part
from graphgen.value import Tensor

_DINO = ("dinov2", "dinov2_with_registers")


class Images(nn.Module):
    """The vectors of an image, or the logits of its labels, (B, labels)."""

    def __init__(self, config: Config, encoder: Encoder, *, classify: bool):
        self.encoder = encoder
        self.mean = config.model_type in _DINO
        taught = "distillation_classifier.weight"  # there is a classifier for each learned vector
        self.taught = config.model_type == "deit" and config.has(taught)
        self.classifier = self.distillation_classifier = None
        if classify:
            features = encoder.features * (1 + self.mean)
            self.classifier = nn.Linear(features, labels(config))
            if self.taught:
                self.distillation_classifier = nn.Linear(features, labels(config))

    def __call__(self, pixel_values: Tensor) -> dict[str, Tensor]:
        x = self.encoder(pixel_values)  # (B, T, D)
        if self.classifier is None:
            return {"last_hidden_state": x}
        y = first(x)
        if self.mean:  # of the patches
            rest = ops.slice_(x, [1 + self.encoder.picture.registers], [1 << 31], [1])
            y = ops.concat(y, ops.reduce_mean(rest, axis=1, keepdims=False), axis=1)
        logits = self.classifier(y)
        if self.distillation_classifier is not None:
            second = ops.squeeze(ops.slice_(x, [1], [2], [1]), [1])
            logits = (logits + self.distillation_classifier(second)) / 2
        return {"logits": logits}

    def inputs(self) -> dict[str, TensorSpec]:
        """The encoder's."""
        return self.encoder.inputs()


def vit(config: Config) -> Encoder:
    """ViT, MSN, and DeiT with a second learned vector."""
    features, heads = config.take("hidden_size", int), config.take("num_attention_heads", int)
    kind = config.model_type
    tokens = 2 if kind == "deit" else 1
    if kind != "vit":
        config.expect("head_dim", features // heads)
    how: dict[str, Any] = {
        "head_dim": config.take("head_dim", int, features // heads) if kind == "vit" else None,
        "bias": config.take("qkv_bias", bool, True),
        "output_bias": True,
    }
    own = parts(
        config,
        epsilon=1e-6 if kind == "vit_msn" else 1e-12,
        attention=lambda: nn.Attention(features, num_heads=heads, **how),
    )
    layers = config.take("num_hidden_layers", int)
    return Encoder(picture(config, 16, tokens=tokens), own, layers)


def dinov2(config: Config) -> Encoder:
    """Scaled parts, a gated feed-forward for the largest, and images of any size."""
    features, heads = config.take("hidden_size", int), config.take("num_attention_heads", int)
    ratio = config.take("mlp_ratio", int, 4)
    image = pair(config, "image_size", 224)
    if image[0] != image[1]:  # transformers interpolates as if their table were square
        config.refuse("image_size", image, "square")
    config.ignore("layerscale_value", "drop_path_rate", "use_mask_token")
    config.ignore("apply_layernorm", "reshape_hidden_states", "out_features", "out_indices")
    config.ignore("stage_names")
    bias = config.take("qkv_bias", bool, True)
    gated, hidden = config.take("use_swiglu_ffn", bool, False), features * ratio
    kind = config.choose("hidden_act", ACTIVATIONS, "gelu")
    if gated:
        kind, hidden = "silu", (int(hidden * 2 / 3) + 7) // 8 * 8
    own = parts(
        config,
        epsilon=1e-6,
        attention=lambda: nn.Attention(features, num_heads=heads, bias=bias, output_bias=True),
        feed_forward=lambda: nn.FeedForward(features, hidden, activation=kind, gated=gated),
        scaled=True,
    )
    layers = config.take("num_hidden_layers", int)
    if config.model_type == "dinov2":
        return Encoder(picture(config, 14, resized=True), own, layers)
    count = config.take("num_register_tokens", int, 4)
    return Encoder(picture(config, 16, resized=True, smoothed=True, registers=count), own, layers)


def tasks(encoder: Callable[[Config], Encoder]) -> dict[str, Callable[[Config], Images]]:
    """Classification and vectors."""
    return {
        "image-classification": lambda config: Images(config, encoder(config), classify=True),
        "feature-extraction": lambda config: Images(config, encoder(config), classify=False),
    }


NAMES: dict[str, Any] = {
    "patches": "embeddings.patch_embeddings.projection",
    "whole": "embeddings.cls_token",
    "distilled": "embeddings.distillation_token",
    "positions": "embeddings.position_embeddings",
    "layers": "encoder.layer",
    "query": "attention.query",
    "key": "attention.key",
    "value": "attention.value",
    "output": "output.dense",
    "norm": "layernorm",
}
VIT = {
    **NAMES,
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "feed_forward": "",
    "up": "intermediate.dense",
    "down": "output.dense",
}
_LAYER = r"(.*\.)?encoder\.layer\.(\d+)\."
_ATTENTION = {"attention.query": "q_proj", "attention.key": "k_proj", "attention.value": "v_proj"}
_ATTENTION |= {"output.dense": "o_proj"}


def _renamed(layer: str) -> dict[str, str]:
    return {
        rf"{_LAYER}attention\.{re.escape(old)}": rf"{layer}attention.{new}"
        for old, new in _ATTENTION.items()
    }


RENAMED = {
    **_renamed(r"\1layers.\2."),
    rf"{_LAYER}intermediate\.dense": r"\1layers.\2.mlp.fc1",
    rf"{_LAYER}output\.dense": r"\1layers.\2.mlp.fc2",
}
"""What transformers 5.23 calls the modules of ViT and DeiT."""

UNUSED = r"(\w+\.)?(pooler\..*|embeddings\.mask_token)|(distillation_|cls_)?classifier\..*"

_VIT = Family(
    tasks=tasks(vit),
    names={**VIT, "encoder": "vit"},
    unused=UNUSED,
    prefix="vit.",
    renamed=RENAMED,
)
_DINOS = {
    kind: Family(
        tasks=tasks(dinov2),
        names={
            **NAMES,
            "encoder": kind,
            "registers": "embeddings.register_tokens",
            "scale1": "layer_scale1.lambda1",
            "scale2": "layer_scale2.lambda1",
            "feed_forward": "mlp",
            "gate": Part("weights_in", 0, 2),
            "up": lambda block: Part("fc1") if block.gate is None else Part("weights_in", 1, 2),
            "down": lambda block: Part("fc2" if block.gate is None else "weights_out"),
        },
        unused=UNUSED,
        prefix=f"{kind}.",
        renamed=_renamed(r"\1encoder.layer.\2."),
    )
    for kind in _DINO
}
# transformers writes some of MSN's names without the first part.
_BARE = {r"(encoder|embeddings|layernorm)\.(.*)": r"vit.\1.\2"}
FAMILIES = {
    "vit": _VIT,
    "vit_msn": replace(_VIT, older=_BARE),
    "deit": Family(
        tasks=tasks(vit),
        names={
            **VIT,
            "encoder": "deit",
            "classifier": lambda images: Part(f"{'cls_' * images.taught}classifier"),
        },
        unused=UNUSED,
        prefix="deit.",
        renamed=RENAMED,
    ),
    **_DINOS,
}
