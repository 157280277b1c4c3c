"""BERT (arXiv 1810.04805): an encoder with the norm after each residual connection."""

from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen import nn, ops
from graphgen.models.published.config import Config
from graphgen.models.published.family import ACTIVATIONS, Family
from graphgen.models.published.heads import tasks
from graphgen.nn.feed_forward import Activation
from graphgen.nn.module import TensorSpec, int64
from graphgen.value import Tensor

TOKENS = int64["batch_size", "sequence_length"]


class Layer(nn.Module):
    """Attention and feed-forward, each in a residual connection with the norm after it."""

    def __init__(
        self, features: int, *, num_heads: int, hidden: int, activation: Activation, epsilon: float
    ):
        self.attention = nn.Attention(features, num_heads=num_heads)
        self.norm1 = nn.LayerNorm(features, epsilon=epsilon)
        self.feed_forward = nn.FeedForward(features, hidden, activation=activation)
        self.norm2 = nn.LayerNorm(features, epsilon=epsilon)

    def __call__(self, x: Tensor, *, mask: Tensor) -> Tensor:  # (B, T, D)
        x = self.norm1(x + self.attention(x, mask=mask))
        return self.norm2(x + self.feed_forward(x))


class Encoder(nn.Module):
    """A vector for each token, (B, T) to (B, T, D), from its embedding, position and type."""

    def __init__(self, config: Config):
        config.expect("is_decoder", False)
        config.expect("add_cross_attention", False)
        config.expect("position_embedding_type", "absolute")
        config.expect("directionality", "bidi")
        self.features = config.take("hidden_size", int)
        self.epsilon = config.take("layer_norm_eps", float, 1e-12)
        self.activation = config.choose("hidden_act", ACTIVATIONS, "gelu")
        self.tied = config.take("tie_word_embeddings", bool, True)
        self.embedding = nn.Embedding(config.take("vocab_size", int), self.features)
        length = config.take("max_position_embeddings", int, 512)
        self.positions = nn.LearnedPositions(length, self.features)
        self.types = nn.Embedding(config.take("type_vocab_size", int, 2), self.features)
        self.norm = nn.LayerNorm(self.features, epsilon=self.epsilon)
        self.layers = [
            Layer(
                self.features,
                num_heads=config.take("num_attention_heads", int),
                hidden=config.take("intermediate_size", int),
                activation=self.activation,
                epsilon=self.epsilon,
            )
            for _ in range(config.take("num_hidden_layers", int))
        ]

    def place(self, x: Tensor, input_ids: Tensor) -> Tensor:
        """The vectors (B, T, D) with their positions."""
        return self.positions(x)

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        types = np.zeros((1, 1), np.int64) if token_type_ids is None else token_type_ids
        x = self.place(self.embedding(input_ids) + self.types(types), input_ids)
        return encode(self.layers, self.norm(x), attention_mask)

    def inputs(self) -> dict[str, TensorSpec]:
        """Tokens, the mask of those that are not padding, and types if there is more than one."""
        types = ["token_type_ids"] if self.types.count > 1 else []
        return dict.fromkeys(["input_ids", "attention_mask", *types], TOKENS)


def encode(layers: list[Layer], x: Tensor, attention_mask: Tensor) -> Tensor:
    """The vectors after all layers, (B, T, D), where the mask (B, T) is not 0."""
    mask = ops.cast(attention_mask, to=ir.DataType.BOOL)
    for layer in layers:
        x = layer(x, mask=mask)
    return x


NAMES: dict[str, Any] = {
    "head": "",
    "embedding": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "layers": "encoder.layer",
    "query": "self.query",
    "key": "self.key",
    "value": "self.value",
    "output": "output.dense",
    "norm1": "attention.output.LayerNorm",
    "feed_forward": "",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm2": "output.LayerNorm",
    "labels": "classifier",
    "span": "qa_outputs",
}

FAMILY = Family(
    tasks=tasks(Encoder),
    names={
        **NAMES,
        "encoder": "bert",
        "transform": "cls.predictions.transform.dense",
        "transform_norm": "cls.predictions.transform.LayerNorm",
        "decoder": "cls.predictions.decoder",
        "decoder_bias": "cls.predictions.decoder.bias",
        "pooler": "bert.pooler.dense",
        "classifier": "classifier",
    },
    older={
        r"(.*LayerNorm\.)gamma": r"\1weight",
        r"(.*LayerNorm\.)beta": r"\1bias",
        r"cls\.predictions\.bias": "cls.predictions.decoder.bias",
    },
    tied={"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"},
    unused=r"(bert\.)?(embeddings\.position_ids|pooler\..*)|cls\..*|classifier\..*|qa_outputs\..*",
    prefix="bert.",
)
