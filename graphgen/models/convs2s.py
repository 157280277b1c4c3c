"""ConvS2S: convolutions with gates, and attention in every layer of the decoder (1705.03122)."""

import math
from typing import Any

import onnx_ir as ir

from graphgen import nn, ops
from graphgen.errors import positive
from graphgen.nn.module import normal
from graphgen.value import Tensor

HALF = math.sqrt(0.5)
"""The sum of two terms of equal variance, scaled by it, has that variance again (3.4)."""


class GatedBlock(nn.Module):
    """√½ (x + glu(convolution(x))), (B, T, D) to (B, T, D) (3.2)."""

    def __init__(self, features: int, *, kernel: int, causal: bool, dropout: float):
        self.dropout = nn.Dropout(dropout)
        gain = 2.0 * math.sqrt(1.0 - dropout)  # the gate halves, dropout enlarges (3.5)
        self.convolution = nn.Convolution(
            features, 2 * features, kernel=kernel, causal=causal, gain=gain
        )
        self.gate = nn.GatedLinearUnit()

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return (x + self.gate(self.convolution(self.dropout(x), mask))) * HALF


class DecoderBlock(nn.Module):
    """A causal block h, then √½ (h + c): c = √m Σ_j a_j v_j, a = softmax(k · (W h + b + g)) (3.3).

    g is the embedding of the target, v_j is k_j plus the embedding of source token j, and m is the
    number of source tokens.
    """

    def __init__(self, features: int, *, kernel: int, dropout: float):
        self.block = GatedBlock(features, kernel=kernel, causal=True, dropout=dropout)
        self.query = nn.Linear(features, features)

    def __call__(
        self, x: Tensor, g: Tensor, keys: Tensor, values: Tensor, mask: Tensor, root: Tensor
    ) -> Tensor:  # (B, T, D) twice, (B, S, D) twice, (B, 1, 1, S), (B, 1, 1)
        h = self.block(x)
        heads = {"q_num_heads": 1, "kv_num_heads": 1}
        c = ops.attention(self.query(h) + g, keys, values, mask, scale=1.0, **heads)
        return (h + c * root) * HALF


class ConvS2S(nn.Module):
    """The logits of each next target token, (B, S) and (B, T) to (B, T, vocabulary).

    It is simpler than the paper: embeddings and layers have one size, weights are not normalized
    (arXiv 1602.07868), and the encoder's gradients are not divided by the number of attentions.

    Args:
        vocabulary: The number of tokens of both languages together.
        features: D, the size of each token's vector.
        layers: The number of blocks of the encoder, and of the decoder; up to 20 in the paper.
        kernel: How many elements each convolution reads.
        length: The number of positions that have a learned vector: the longest sequence.
        dropout: The ratio of zeros in embeddings, before convolutions and in the last layer, in
            training only.
    """

    def __init__(
        self,
        vocabulary: int = 8192,
        features: int = 256,
        *,
        layers: int = 4,
        kernel: int = 3,
        length: int = 512,
        dropout: float = 0.1,
    ):
        positive("ConvS2S", vocabulary=vocabulary, features=features, layers=layers)
        positive("ConvS2S", kernel=kernel, length=length)
        self.dropout = nn.Dropout(dropout)
        self.source, self.target = (nn.Embedding(vocabulary, features) for _ in range(2))
        self.source_positions, self.target_positions = (
            nn.LearnedPositions(length, features) for _ in range(2)
        )
        for table in (self.source, self.target, self.source_positions, self.target_positions):
            table.weight.initialize = normal(0.1)
        sizes: dict[str, Any] = {"kernel": kernel, "dropout": dropout}
        self.encoder_in, self.encoder_out = (nn.Linear(features, features) for _ in range(2))
        self.encoder = [GatedBlock(features, causal=False, **sizes) for _ in range(layers)]
        self.decoder_in, self.decoder_out = (nn.Linear(features, features) for _ in range(2))
        self.decoder = [DecoderBlock(features, **sizes) for _ in range(layers)]
        self.output = nn.Linear(features, vocabulary)

    def encode(self, source_ids: Tensor, mask: Tensor) -> Tensor:
        """Keys and values of the source side by side, (B, S) and bool (B, S) to (B, S, 2 D)."""
        e = self.dropout(self.source_positions(self.source(source_ids)))  # (B, S, D)
        x = self.encoder_in(e)
        for block in self.encoder:
            x = block(x, mask)
        z = self.encoder_out(x)
        return ops.concat(z, z + e, axis=-1)

    def decode(self, target_ids: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """The logits, from (B, T), (B, S, 2 D) and bool (B, S) to (B, T, vocabulary)."""
        keys, values = ops.split(memory, axis=-1, num_outputs=2)
        root = ops.sqrt(ops.reduce_sum(ops.cast_like(mask, keys), [1]))  # (B, 1)
        rest = ops.unsqueeze(mask, [1, 2]), ops.unsqueeze(root, [-1])
        g = self.dropout(self.target_positions(self.target(target_ids)))  # (B, T, D)
        x = self.decoder_in(g)
        for block in self.decoder:
            x = block(x, g, keys, values, *rest)
        return self.output(self.dropout(self.decoder_out(x)))

    def __call__(
        self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor
    ) -> dict[str, Tensor]:  # (B, S), (B, S) with 0 for padding, (B, T)
        mask = ops.cast(source_mask, to=ir.DataType.BOOL)
        memory = self.encode(source_ids, mask)  # (B, S, 2 D)
        return {"logits": self.decode(target_ids, memory, mask)}  # (B, T, vocabulary)
