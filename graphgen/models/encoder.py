"""The encoder of the BERT family: post-norm, with a masked-language-model head (1810.04805)."""

from typing import Any

import onnx_ir as ir

from graphgen import nn, ops
from graphgen.errors import positive
from graphgen.nn.feed_forward import Activation
from graphgen.nn.module import int64
from graphgen.value import Tensor


class MaskedLMHead(nn.Module):
    """Logits of the token at each position: linear, GELU and norm, then the token table."""

    def __init__(self, features: int):
        self.linear = nn.Linear(features, features)
        self.norm = nn.LayerNorm(features)

    def __call__(self, x: Tensor, embedding: nn.Embedding) -> Tensor:  # (B, T, D)
        return embedding.logits(self.norm(ops.gelu(self.linear(x))))  # (B, T, vocabulary)


class EncoderModel(nn.Module):
    """A vector for each token that looks both ways, (B, T) to (B, T, D).

    Tokens, learned positions and the token's type are added and normalized; layers of
    self-attention and feed-forward follow, with the norm after each.

    Args:
        vocabulary: The number of tokens.
        features: D, the size of each token's vector.
        layers: The number of layers.
        num_heads: Heads of attention; they divide D.
        hidden: The feed-forward's inner size, 4 D by default.
        length: The number of positions that have a learned vector: the longest sequence.
        token_types: How many types of token there are (BERT: first and second sentence).
        activation: relu, gelu, gelu_tanh or silu.
        logits: Whether to add the masked-language-model head and its output.
        dropout: The ratio of zeros, in training only.
    """

    def __init__(
        self,
        vocabulary: int = 8192,
        features: int = 256,
        *,
        layers: int = 4,
        num_heads: int = 4,
        hidden: int | None = None,
        length: int = 512,
        token_types: int = 2,
        activation: Activation = "gelu",
        logits: bool = False,
        dropout: float = 0.0,
    ):
        positive("EncoderModel", vocabulary=vocabulary, features=features, layers=layers)
        positive("EncoderModel", num_heads=num_heads, hidden=hidden, length=length)
        positive("EncoderModel", token_types=token_types)
        self.embedding = nn.Embedding(vocabulary, features)
        self.positions = nn.LearnedPositions(length, features)
        self.types = nn.Embedding(token_types, features)
        self.norm = nn.LayerNorm(features)
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.Encoder(
            features,
            layers=layers,
            num_heads=num_heads,
            hidden=hidden,
            activation=activation,
            placement="post",
            dropout=dropout,
        )
        self.head = MaskedLMHead(features) if logits else None

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:  # (B, T) each; in the mask, 1 is a token and 0 padding
        x = self.positions(self.embedding(input_ids))  # (B, T, D)
        if token_type_ids is not None:
            x = x + self.types(token_type_ids)
        mask = ops.cast(attention_mask, to=ir.DataType.BOOL)
        x = self.encoder(self.dropout(self.norm(x)), mask=mask)
        outputs = {"last_hidden_state": x}
        if self.head is not None:
            outputs["logits"] = self.head(x, self.embedding)  # (B, T, vocabulary)
        return outputs


def inputs() -> dict[str, Any]:
    """What `build` needs to know about the arguments."""
    names = ("input_ids", "attention_mask", "token_type_ids")
    return dict.fromkeys(names, int64["batch", "seq"])
