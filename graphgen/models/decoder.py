"""The decoder of the GPT family: a causal language model with pre-norm (GPT-2, 2019)."""

from typing import Any

from graphgen import nn
from graphgen.nn.module import int64
from graphgen.nn.sizes import positive
from graphgen.op import Operand


class DecoderLM(nn.Module):
    """The logits of each next token, (B, T) to (B, T, vocabulary).

    Tokens and learned positions, layers of causal self-attention and feed-forward with the norm
    before each, a last norm, and the token table once more as the output layer.

    Args:
        vocabulary: The number of tokens.
        features: D, the size of each token's vector.
        layers: The number of layers.
        num_heads: Heads of queries; they divide D.
        kv_heads: Heads of keys and values (arXiv 2305.13245); they divide num_heads, the default.
        hidden: The feed-forward's inner size, 4 D by default.
        length: The number of positions that have a learned vector: the longest sequence.
        activation: relu, gelu, gelu_tanh or silu.
        gated: Whether the feed-forward is gated (arXiv 2002.05202).
        norm: layer or rms.
        dropout: The ratio of zeros, in training only.
    """

    def __init__(
        self,
        vocabulary: int = 8192,
        features: int = 256,
        *,
        layers: int = 4,
        num_heads: int = 4,
        kv_heads: int | None = None,
        hidden: int | None = None,
        length: int = 512,
        activation: str = "gelu",
        gated: bool = False,
        norm: str = "layer",
        dropout: float = 0.0,
    ):
        positive("DecoderLM", vocabulary=vocabulary, features=features, layers=layers)
        positive("DecoderLM", num_heads=num_heads, kv_heads=kv_heads, hidden=hidden, length=length)
        self.embedding = nn.Embedding(vocabulary, features)
        self.positions = nn.LearnedPositions(length, features)
        self.dropout = nn.Dropout(dropout)
        self.decoder = nn.Encoder(
            features,
            layers=layers,
            num_heads=num_heads,
            kv_heads=kv_heads,
            hidden=hidden,
            activation=activation,
            gated=gated,
            placement="pre",
            norm=norm,
            dropout=dropout,
            causal=True,
        )

    def __call__(self, input_ids: Operand) -> dict[str, Operand]:  # (B, T)
        x = self.dropout(self.positions(self.embedding(input_ids)))  # (B, T, D)
        return {"logits": self.embedding.logits(self.decoder(x))}  # (B, T, vocabulary)


def inputs() -> dict[str, Any]:
    """What `build` needs to know of the arguments."""
    return {"input_ids": int64["batch", "seq"]}
