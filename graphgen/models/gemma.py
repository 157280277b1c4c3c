"""A decoder like Gemma 2 (arXiv 2408.00118): local and global layers in turn, and softcaps."""

import math
from functools import partial
from typing import Any

from graphgen import nn, ops
from graphgen.errors import positive
from graphgen.nn.module import int64
from graphgen.value import Tensor

OffsetNorm = partial(nn.RMSNorm, epsilon=1e-6, unit_offset=True)


class GemmaLayer(nn.Module):
    """Causal self-attention and a GeGLU, each with a norm before and after it."""

    def __init__(self, features: int, hidden: int, *, window: int | None, **heads: Any):
        pattern = None if window is None else partial(ops.window_attention, window=window)
        self.attention = nn.Attention(
            features, causal=True, bias=False, softcap=50.0, pattern=pattern, **heads
        )
        self.feed_forward = nn.FeedForward(
            features, hidden, activation="gelu_tanh", gated=True, bias=False
        )
        self.norms = [OffsetNorm(features) for _ in range(4)]

    def __call__(self, x: Tensor, rotary: tuple[Tensor, ...]) -> Tensor:  # (B, T, D)
        norm1, norm2, norm3, norm4 = self.norms
        x = x + norm2(self.attention(norm1(x), rotary=rotary))
        return x + norm4(self.feed_forward(norm3(x)))


class Gemma(nn.Module):
    """The logits of each next token, (B, T) to (B, T, vocabulary).

    Even layers see the last `window` tokens, odd ones all. The token table, times √D, is also the
    output layer; scores of attention are capped at 50 and logits at 30.

    Args:
        vocabulary: The number of tokens.
        features: D, the size of each token's vector.
        layers: The number of layers.
        num_heads: Heads of queries.
        kv_heads: Heads of keys and values (arXiv 2305.13245); they divide num_heads.
        head_dim: The size of a head; even, for rotary positions.
        hidden: The feed-forward's inner size, 4 D by default.
        window: How many tokens a local layer sees, itself included.
    """

    def __init__(
        self,
        vocabulary: int = 8192,
        features: int = 256,
        *,
        layers: int = 4,
        num_heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 64,
        hidden: int | None = None,
        window: int = 128,
    ):
        positive("Gemma", vocabulary=vocabulary, features=features, layers=layers, window=window)
        positive("Gemma", hidden=hidden)
        hidden = 4 * features if hidden is None else hidden
        sizes = {"num_heads": num_heads, "kv_heads": kv_heads, "head_dim": head_dim}
        self.embedding = nn.Embedding(vocabulary, features)
        self.positions = nn.Rotary(nn.rotary_frequencies(head_dim))
        self.layers = [
            GemmaLayer(features, hidden, window=None if i % 2 else window, **sizes)
            for i in range(layers)
        ]
        self.norm = OffsetNorm(features)

    def __call__(self, input_ids: Tensor) -> dict[str, Tensor]:  # (B, T)
        x: Tensor = self.embedding(input_ids) * math.sqrt(self.embedding.features)  # (B, T, D)
        rows = ops.unsqueeze(ops.arange(ops.dim(input_ids, 1)), [0])  # (1, T)
        rotary = self.positions(rows, x)  # cosines and sines, (1, T, head_dim / 2)
        for layer in self.layers:
            x = layer(x, rotary)
        logits = self.embedding.logits(self.norm(x))  # (B, T, vocabulary)
        return {"logits": ops.softcap(logits, 30.0)}


def inputs() -> dict[str, Any]:
    """What `build` needs to know about the arguments."""
    return {"input_ids": int64["batch", "seq"]}
