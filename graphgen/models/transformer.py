"""The encoder-decoder of "Attention Is All You Need" (Vaswani et al., arXiv 1706.03762)."""

import math
from typing import Any

import onnx_ir as ir

from graphgen import nn, ops
from graphgen.errors import positive
from graphgen.nn.module import int64
from graphgen.value import Tensor


class Transformer(nn.Module):
    """The logits of each next target token, (B, S) and (B, T) to (B, T, vocabulary).

    It has post-norm and sinusoidal positions. One table serves the source, the target and the
    output layer; embeddings are scaled by √D (section 3.4).

    Args:
        vocabulary: The number of tokens of both languages together.
        features: D, the size of each token's vector; even.
        layers: The number of layers of the encoder, and of the decoder.
        num_heads: Heads of attention; they divide D.
        hidden: The feed-forward's inner size, 4 D by default.
        dropout: The ratio of zeros, in training only.
    """

    def __init__(
        self,
        vocabulary: int = 37000,
        features: int = 512,
        *,
        layers: int = 6,
        num_heads: int = 8,
        hidden: int | None = None,
        dropout: float = 0.1,
    ):
        positive("Transformer", vocabulary=vocabulary, features=features, layers=layers)
        positive("Transformer", num_heads=num_heads, hidden=hidden)
        self.scale = math.sqrt(features)
        self.embedding = nn.Embedding(vocabulary, features)
        self.positions = nn.SinusoidalPositions(features)
        self.dropout = nn.Dropout(dropout)
        options: dict[str, Any] = {"layers": layers, "num_heads": num_heads, "hidden": hidden}
        options |= {"activation": "relu", "placement": "post", "dropout": dropout}
        self.encoder = nn.Encoder(features, **options)
        self.decoder = nn.Decoder(features, **options)

    def embed(self, ids: Tensor) -> Tensor:
        """√D · table[ids] + positions, (B, T) to (B, T, D)."""
        return self.dropout(self.positions(self.embedding(ids) * self.scale))

    def encode(self, source_ids: Tensor, mask: Tensor) -> Tensor:
        """The memory of the source, (B, S) and bool (B, S) to (B, S, D)."""
        return self.encoder(self.embed(source_ids), mask=mask)

    def decode(self, target_ids: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """The logits, from (B, T), (B, S, D) and bool (B, S) to (B, T, vocabulary)."""
        x = self.decoder(self.embed(target_ids), memory, memory_mask=mask)  # (B, T, D)
        return self.embedding.logits(x)

    def __call__(
        self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor
    ) -> dict[str, Tensor]:  # (B, S), (B, S) with 0 for padding, (B, T)
        mask = ops.cast(source_mask, to=ir.DataType.BOOL)
        memory = self.encode(source_ids, mask)  # (B, S, D)
        return {"logits": self.decode(target_ids, memory, mask)}  # (B, T, vocabulary)


def inputs() -> dict[str, Any]:
    """What `build` needs to know about the arguments."""
    return {
        "source_ids": int64["batch", "source"],
        "source_mask": int64["batch", "source"],
        "target_ids": int64["batch", "target"],
    }
