"""The towers of CLIP (arXiv 2103.00020) and SigLIP (arXiv 2303.15343): of texts, and of images."""

from typing import Any

import onnx_ir as ir

from graphgen import nn, ops
from graphgen.models.published.config import Config
from graphgen.models.published.poolings import at, first
from graphgen.models.published.vision import Encoder, Layer, Parts, parts, picture
from graphgen.nn.module import Parameter, TensorSpec, int64, normal
from graphgen.value import Tensor

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

ACTIVATIONS = {True: ("quick_gelu", 1e-5), False: ("gelu_pytorch_tanh", 1e-6)}
"""Of CLIP, and of SigLIP: the activation, and what norms add."""


class Text(nn.Module):
    """A vector for each token, (B, T) to (B, T, D), and one for the text, (B, D).

    CLIP's tokens see those before them, and the text has the vector of the first end. SigLIP's see
    all, and the text has the vector of the last one, whatever it is.
    """

    def __init__(self, config: Config, own: Parts, *, end: int | None):
        self.end, self.features = end, own.features
        self.embedding = nn.Embedding(config.take("vocab_size", int), own.features)
        length = config.take("max_position_embeddings", int, 77 if end is not None else 64)
        self.positions = nn.LearnedPositions(length, own.features)
        self.layers = [Layer(own) for _ in range(config.take("num_hidden_layers", int))]
        self.norm = own.norm(own.features)
        size = config.take("projection_size", int, own.features) if end is None else 0
        self.head = nn.Linear(own.features, size) if end is None else None

    def __call__(self, input_ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.positions(self.embedding(input_ids))
        kept = None if mask is None else ops.cast(mask, to=ir.DataType.BOOL)
        for layer in self.layers:
            x = layer(x, kept)
        x = self.norm(x)  # (B, T, D)
        if self.head is not None:
            return x, self.head(ops.squeeze(ops.slice_(x, [-1], [1 << 31], [1]), [1]))
        assert self.end is not None
        found = input_ids if self.end == _HIGHEST else ops.equal(input_ids, self.end)
        return x, at(x, ops.argmax(ops.cast(found, to=ir.DataType.INT32), axis=1))


_HIGHEST = 2
"""An end that older files of CLIP name wrongly: it is the highest token of the text."""


class Pooling(nn.Module):
    """One vector for all, (B, T, D) to (B, D): a learned query's attention, and a feed-forward."""

    def __init__(self, own: Parts):
        self.probe = Parameter((1, 1, own.features), initialize=normal(0.02))
        self.pool = own.attention()
        self.layernorm = own.norm(own.features)
        self.feed_forward = own.feed_forward()

    def __call__(self, x: Tensor) -> Tensor:
        probe = ops.expand(self.probe, [ops.dim(x, 0), 1, 1])
        y = self.pool(probe, x)  # (B, 1, D)
        return first(y + self.feed_forward(self.layernorm(y)))


def vision(config: Config, own: Parts, *, clip: bool) -> Encoder:
    """The encoder of images: CLIP's has a learned vector, and a norm before the layers."""
    how: dict[str, Any] = {"tokens": 0, "flat": True}
    if clip:
        how |= {"tokens": 1, "bias": False, "first_norm": True, "last_norm": False}
    layers = config.take("num_hidden_layers", int)
    return Encoder(picture(config, 32 if clip else 16, **how), own, layers)


def without_effect(config: Config) -> None:
    """Accept what older files note of each tower: the fields of any model."""
    for name in ("is_decoder", "add_cross_attention", "tie_encoder_decoder"):
        config.expect(name, False)
    config.ignore("tf_legacy_loss", "tie_word_embeddings", "initializer_factor")


def tokens(batch: str, *, clip: bool) -> dict[str, TensorSpec]:
    """Texts, which CLIP pads where SigLIP always has as many tokens."""
    found = int64[batch, "sequence_length"]
    return dict.fromkeys(["input_ids", *["attention_mask"] * clip], found)


class TextSide(nn.Module):
    """A text's vector, projected to `size` features if that is given, and its tokens'."""

    def __init__(self, config: Config, clip: bool, size: int | None):
        kind, epsilon = ACTIVATIONS[clip]
        features, heads = config.take("hidden_size", int), config.take("num_attention_heads", int)
        own = parts(
            config,
            epsilon=epsilon,
            activation=kind,
            attention=lambda: nn.Attention(features, num_heads=heads, causal=clip),
        )
        end = config.take("eos_token_id", int, 49407) if clip else None
        self.text_model = Text(config, own, end=end)
        self.text_projection = None if size is None else nn.Linear(features, size, bias=False)

    def vectors(self, input_ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The text's, (B, T) to (B, P), and its tokens', (B, T, D)."""
        x, y = self.text_model(input_ids, mask)
        return y if self.text_projection is None else self.text_projection(y), x


class ImageSide(nn.Module):
    """An image's vector, projected to `size` features if that is given, and its patches'."""

    def __init__(self, config: Config, clip: bool, size: int | None):
        kind, epsilon = ACTIVATIONS[clip]
        own = parts(config, epsilon=epsilon, activation=kind)
        self.vision_model = vision(config, own, clip=clip)
        self.post_norm = own.norm(own.features) if clip else None
        if not clip:
            config.expect("vision_use_head", True)
        self.pooling = None if clip else Pooling(own)
        self.visual_projection = None if size is None else nn.Linear(own.features, size, bias=False)

    def vectors(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """The image's, (B, C, H, W) to (B, P), and its patches', (B, N, D)."""
        x = self.vision_model(pixel_values)
        y = self.pooling(x) if self.pooling else first(x)
        y = self.post_norm(y) if self.post_norm else y
        return y if self.visual_projection is None else self.visual_projection(y), x
