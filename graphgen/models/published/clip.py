"""CLIP (arXiv 2103.00020) and SigLIP (arXiv 2303.15343): how well texts and images match."""

from collections.abc import Callable
from typing import Any

from graphgen import nn, ops
from graphgen.models.published.config import Config
from graphgen.models.published.family import Family
from graphgen.models.published.heads import labels
from graphgen.models.published.towers import ABSENT, ImageSide, TextSide, tokens, without_effect
from graphgen.nn.module import Parameter, TensorSpec, zeros
from graphgen.parts import Part
from graphgen.value import Tensor

TEXT, IMAGE = "text_model.onnx", "vision_model.onnx"
"""What clients call the graphs of the two towers."""


class Towers(nn.Module):
    """A text's and an image's vector of length 1, and their products."""

    def __init__(self, config: Config):
        self.clip = config.model_type == "clip"
        text, image = (
            config.part(
                f"{name}_config",
                f"{config.model_type}_{name}_model",
                **ABSENT[config.model_type][name],
            )
            for name in ("text", "vision")
        )
        for side in (text, image):
            side.raw("projection_dim")  # the whole configuration's counts
            without_effect(side)
        config.ignore("logit_scale_init_value", "initializer_factor")
        size = config.take("projection_dim", int, 512) if self.clip else None
        read, seen = TextSide(text, self.clip, size), ImageSide(image, self.clip, size)
        self.text_model, self.text_projection = read.text_model, read.text_projection
        self.vision_model, self.visual_projection = seen.vision_model, seen.visual_projection
        self.post_norm, self.pooling = seen.post_norm, seen.pooling
        self.read, self.see = read.vectors, seen.vectors
        shape = () if self.clip else (1,)
        self.logit_scale = Parameter(shape, initialize=zeros)
        self.logit_bias = None if self.clip else Parameter(shape, initialize=zeros)

    def text(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        """The text's vector, (B, T) to (B, P), and its tokens'."""
        y, x = self.read(input_ids, attention_mask)
        return {"text_embeds": y, "last_hidden_state": x}

    def image(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """The image's vector, (B, C, H, W) to (B, P), and its patches'."""
        y, x = self.see(pixel_values)
        return {"image_embeds": y, "last_hidden_state": x}

    def inputs(self) -> dict[str, TensorSpec]:
        """Texts, which CLIP pads where SigLIP always has as many tokens, and images."""
        texts = tokens("text_batch_size", clip=self.clip)
        pixels = self.vision_model.inputs()["pixel_values"]
        image = TensorSpec(pixels.dtype, ("image_batch_size", *pixels.shape[1:]))
        return {"input_ids": texts.pop("input_ids"), "pixel_values": image, **texts}


class Match(Towers):
    """The logits of each pair of an image and a text."""

    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]:
        image = self.image(inputs.pop("pixel_values"))["image_embeds"]
        text = self.text(**inputs)["text_embeds"]
        text, image = (x / ops.reduce_l2(x, axis=1) for x in (text, image))
        logits = ops.matmul(text, ops.swap_last(image)) * ops.exp(self.logit_scale)
        logits = logits if self.logit_bias is None else logits + self.logit_bias
        return {
            "logits_per_image": ops.swap_last(logits),
            "logits_per_text": logits,
            "text_embeds": text,
            "image_embeds": image,
        }


class Vectors(Towers):
    """The towers, each in its file; their vectors have any length."""

    def graphs(self) -> dict[str, tuple[Any, dict[str, TensorSpec]]]:
        """What `build` records for each file, and its inputs."""
        every = self.inputs()
        image = {"pixel_values": every.pop("pixel_values")}
        return {TEXT: (self.text, every), IMAGE: (self.image, image)}


class Classifier(nn.Module):
    """The logits of an image's labels, (B, labels): linear, of the mean of its patches."""

    def __init__(self, config: Config):
        towers = Towers(config)
        self.vision_model = towers.vision_model
        self.post_norm = None
        self.skipped = self.vision_model.picture.tokens
        self.classifier = nn.Linear(self.vision_model.features, labels(config))

    def __call__(self, pixel_values: Tensor) -> dict[str, Tensor]:
        x = self.vision_model(pixel_values)
        x = ops.slice_(x, [self.skipped], [1 << 31], [1]) if self.skipped else x
        return {"logits": self.classifier(ops.reduce_mean(x, axis=1, keepdims=False))}

    def inputs(self) -> dict[str, TensorSpec]:
        """Images."""
        return self.vision_model.inputs()


TASKS: dict[str, Callable[[Config], Any]] = {
    "zero-shot-image-classification": Match,
    "feature-extraction": Vectors,
    "image-classification": Classifier,
}
NAMES: dict[str, Any] = {
    "embedding": "embeddings.token_embedding",
    "text_model.positions": "embeddings.position_embedding",
    "layers": "encoder.layers",
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "attention": "self_attn",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "out_proj",
    "feed_forward": "mlp",
    "up": "fc1",
    "down": "fc2",
    "text_model.norm": "final_layer_norm",
    "patches": "embeddings.patch_embedding",
    "whole": "embeddings.class_embedding",
    "vision_model.positions": "embeddings.position_embedding.weight",
    "first_norm": "pre_layrnorm",
    "post_norm": "vision_model.post_layernorm",
    "vision_model.norm": "post_layernorm",
    "pooling": "vision_model.head",
    "pool": "attention",
    **{f"pool.{name}": Part("in_proj_", n, 3) for n, name in enumerate(("query", "key", "value"))},
}
UNUSED = r".*\.position_ids|classifier\..*|vision_model\.(post_layernorm|head)\..*"

FAMILIES = {
    kind: Family(
        tasks=TASKS,
        names=NAMES,
        renamed={  # as PEFT has them, for which torch's attention is one module
            r"(.*\.head\.attention)\.in_proj_weight": r"\1",
            r"(.*\.head\.attention)\.out_proj": r"\1.base_layer.out_proj",
        },
        unused=UNUSED,
    )
    for kind in ("clip", "siglip")
}
