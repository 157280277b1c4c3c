"""A causal language model for long texts, with attention that costs less than n²."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

from graphgen import nn, ops
from graphgen.errors import GraphgenError, one_of, positive, user_line
from graphgen.models.decoder import DecoderLM
from graphgen.value import Tensor

Pattern: TypeAlias = Literal["window", "strided", "blocks", "hashed"]

PATTERNS: dict[Pattern, str] = {
    "window": "attention to a sliding window (arXiv 2004.05150)",
    "strided": "attention to the last and to every stride-th token (arXiv 1904.10509)",
    "blocks": "attention to blocks: near, first and random ones (arXiv 2007.14062)",
    "hashed": "attention by locality-sensitive hashing (arXiv 2001.04451)",
}
"""The patterns of `SparseDecoder`, and what they are."""


class HashedAttention(nn.Module):
    """Self-attention to the keys of the same hash (Reformer, arXiv 2001.04451), (B, T, features).

    One projection gives queries and keys. A bool `mask`, (B, T), is for padding. Sizes are those of
    `ops.hashed_attention`.
    """

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        kv_heads: int | None = None,
        buckets: int | Sequence[int],
        chunk: int,
        rounds: int = 2,
        seed: int = 0,
        causal: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
    ):
        positive("HashedAttention", features=features, num_heads=num_heads)
        if features % num_heads or kv_heads not in (None, num_heads):
            raise GraphgenError(
                f"HashedAttention({features}, num_heads={num_heads}, kv_heads={kv_heads}): the "
                f"heads must divide the features, and share no keys{user_line()}"
            )
        self.num_heads, self.causal, self.seed = num_heads, causal, seed
        self.buckets, self.chunk, self.rounds = buckets, chunk, rounds
        self.query = nn.Linear(features, features, bias=bias)
        self.value = nn.Linear(features, features, bias=bias)
        self.output = nn.Linear(features, features, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def __call__(self, x: Tensor, *, mask: Tensor | None = None, rotary: Any = None) -> Tensor:
        if rotary is not None:
            raise GraphgenError(
                f"HashedAttention: it takes no rotary positions; use other ones{user_line()}"
            )
        y = ops.hashed_attention(
            self.query(x),
            self.value(x),
            mask,
            num_heads=self.num_heads,
            buckets=self.buckets,
            chunk=self.chunk,
            rounds=self.rounds,
            seed=self.seed,
            is_causal=int(self.causal),
        )
        return self.dropout(self.output(y))


class SparseDecoder(DecoderLM):
    """The logits of each next token, (B, T) to (B, T, vocabulary).

    `DecoderLM` with sinusoidal positions, and self-attention in a pattern.

    Args:
        vocabulary: The number of tokens.
        features: D, the size of each token's vector; even.
        layers: The number of layers.
        num_heads: Heads of attention; they divide D.
        hidden: The feed-forward's inner size, 4 D by default.
        pattern: window, strided, blocks or hashed.
        window: How many tokens each token sees with `window`, itself included.
        stride: The stride of `strided`; cheapest near the root of the length.
        block: The tokens in a block of `blocks`, or in a chunk of `hashed`.
        length: The longest sequence of `blocks`; `hashed` has two buckets for each block of it.
        rounds: The number of hashes of `hashed`.
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
        pattern: Pattern = "window",
        window: int = 256,
        stride: int = 64,
        block: int = 64,
        length: int = 8192,
        rounds: int = 2,
        dropout: float = 0.0,
    ):
        sizes: dict[str, Any] = {"layers": layers, "num_heads": num_heads, "hidden": hidden}
        sizes["dropout"] = dropout
        super().__init__(vocabulary, features, length=length, positions="sinusoidal", **sizes)
        one_of("SparseDecoder", Pattern, pattern=pattern)
        positive("SparseDecoder", block=block, window=window, stride=stride, rounds=rounds)
        blocks = -(-length // block)
        buckets = 2 * math.ceil(math.sqrt(blocks / 2))  # squared, two for each block
        attention: dict[str, Any] = {
            "window": partial(ops.window_attention, window=window),
            "strided": partial(ops.strided_attention, stride=stride),
            "blocks": partial(
                ops.block_sparse_attention, layout=ops.big_bird_layout(blocks), block=block
            ),
            "hashed": partial(
                HashedAttention, buckets=(buckets, buckets), chunk=block, rounds=rounds
            ),
        }
        made = attention[pattern]
        self.decoder = nn.Encoder(
            features,
            causal=True,
            attention=made if pattern == "hashed" else partial(nn.Attention, pattern=made),
            **sizes,
        )
