"""CLIP (arXiv 2103.00020) and SigLIP (arXiv 2303.15343): how well texts and images match."""

from collections.abc import Callable
from typing import Any

from graphgen import nn, ops
from graphgen.models.published.config import Config
from graphgen.models.published.family import Family
from graphgen.models.published.heads import labels
from graphgen.models.published.poolings import first
from graphgen.models.published.towers import Pooling, Text, token, vision, without_effect
from graphgen.models.published.vision import parts
from graphgen.nn.module import Parameter, TensorSpec, int64, zeros
from graphgen.parts import Part
from graphgen.value import Tensor

TEXT, IMAGE = "text_model.onnx", "vision_model.onnx"
"""What clients call the graphs of the two towers."""


ABSENT: dict[str, dict[str, dict[str, Any]]] = {
    "clip": {
        "text": {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
        | {"num_hidden_layers": 12, "vocab_size": 49408},
        "vision": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
        | {"num_hidden_layers": 12},
    },
}
ABSENT["siglip"] = dict.fromkeys(("text", "vision"), ABSENT["clip"]["vision"])
ABSENT["siglip"]["text"] = {**ABSENT["siglip"]["text"], "vocab_size": 32000}
"""What the classes of transformers use if the configuration of a tower lacks the field."""


class Towers(nn.Module):
    """A text's and an image's vector of length 1, and their products."""

    def __init__(self, config: Config):
        self.clip = config.model_type == "clip"
        kind, epsilon = ("quick_gelu", 1e-5) if self.clip else ("gelu_pytorch_tanh", 1e-6)
        text, image = (
            config.part(
                f"{name}_config",
                f"{config.model_type}_{name}_model",
                **ABSENT[config.model_type][name],
            )
            for name in ("text", "vision")
        )
        for side in (text, image):
            without_effect(side)
        config.ignore("logit_scale_init_value", "initializer_factor")
        features, heads = text.take("hidden_size", int), text.take("num_attention_heads", int)
        own = parts(
            text,
            epsilon=epsilon,
            activation=kind,
            attention=lambda: nn.Attention(features, num_heads=heads, causal=self.clip),
        )
        end = token(text, "eos_token_id", 49407) if self.clip else None
        self.text_model = Text(text, own, end=end)
        own = parts(image, epsilon=epsilon, activation=kind)
        self.vision_model = vision(image, own, clip=self.clip)
        self.post_norm = own.norm(own.features) if self.clip else None
        self.pooling = None
        if not self.clip:
            image.expect("vision_use_head", True)
            self.pooling = Pooling(own)
        size = config.take("projection_dim", int, 512) if self.clip else 0
        self.text_projection, self.visual_projection = (
            nn.Linear(n, size, bias=False) if self.clip else None for n in (features, own.features)
        )
        shape = () if self.clip else (1,)
        self.logit_scale = Parameter(shape, initialize=zeros)
        self.logit_bias = None if self.clip else Parameter(shape, initialize=zeros)

    def text(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        """The text's vector, (B, T) to (B, P), and its tokens'."""
        x, y = self.text_model(input_ids, attention_mask)
        y = y if self.text_projection is None else self.text_projection(y)
        return {"text_embeds": y, "last_hidden_state": x}

    def image(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """The image's vector, (B, C, H, W) to (B, P), and its patches'."""
        x = self.vision_model(pixel_values)
        if self.pooling is not None:
            return {"image_embeds": self.pooling(x), "last_hidden_state": x}
        assert self.post_norm is not None and self.visual_projection is not None
        y = self.visual_projection(self.post_norm(first(x)))
        return {"image_embeds": y, "last_hidden_state": x}

    def inputs(self) -> dict[str, TensorSpec]:
        """Texts, which CLIP pads where SigLIP always has as many tokens, and images."""
        tokens = int64["text_batch_size", "sequence_length"]
        pixels = self.vision_model.inputs()["pixel_values"]
        image = TensorSpec(pixels.dtype, ("image_batch_size", *pixels.shape[1:]))
        mask = ["attention_mask"] if self.clip else []
        return {"input_ids": tokens, "pixel_values": image, **dict.fromkeys(mask, tokens)}


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
    **{f"pool.{name}": Part("in_proj", n, 3) for n, name in enumerate(("query", "key", "value"))},
}
UNUSED = r".*\.position_ids|classifier\..*|vision_model\.(post_layernorm|head)\..*"

FAMILIES = {
    kind: Family(
        tasks=TASKS,
        names=NAMES,
        older={r"(.*\.attention\.in_proj)_(weight|bias)": r"\1.\2"},
        unused=UNUSED,
    )
    for kind in ("clip", "siglip")
}
