"""The towers of CLIP (arXiv 2103.00020) and SigLIP (arXiv 2303.15343): of texts, and of images."""

from typing import Any

import onnx_ir as ir

from graphgen import nn, ops
from graphgen.models.published.config import Config
from graphgen.models.published.poolings import at, first
from graphgen.models.published.vision import Encoder, Layer, Parts, picture
from graphgen.nn.module import Parameter, normal
from graphgen.value import Tensor


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


def token(config: Config, name: str, default: int) -> int:
    """A token that the configuration names."""
    found = config.raw(name, default)
    if type(found) is not int or found < 0:
        config.refuse(name, found, "a token")
    return found  # type: ignore[no-any-return]


def without_effect(config: Config) -> None:
    """Accept what older files note of each tower: the fields of any model."""
    config.raw("projection_dim")  # the whole configuration's counts
    for name in ("is_decoder", "add_cross_attention", "tie_encoder_decoder"):
        config.expect(name, False)
    config.ignore("tf_legacy_loss", "tie_word_embeddings", "initializer_factor")
