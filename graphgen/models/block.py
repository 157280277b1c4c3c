"""The minimal self-attention block: from tokens to probabilities in one file.

tokens → embeddings + positions → masked self-attention → feed-forward → linear → softmax
"""

import math
from typing import Any

from graphgen import nn, ops
from graphgen.errors import GraphgenError, positive, user_line
from graphgen.nn.module import int64
from graphgen.value import Tensor


class SelfAttention(nn.Module):
    """softmax(Q Kᵀ / √d) V in each of H heads of d = D / H, where position t sees 0 ... t.

    It is written out in full; `optimize` finds the formula and turns it into one node.
    `nn.Attention` is the module to use.
    """

    def __init__(self, features: int, num_heads: int):
        self.num_heads, self.head_dim = num_heads, features // num_heads
        self.query = nn.Linear(features, features)
        self.key = nn.Linear(features, features)
        self.value = nn.Linear(features, features)
        self.output = nn.Linear(features, features)

    def __call__(self, x: Tensor) -> Tensor:  # (B, T, D)
        projections = self.query(x), self.key(x), self.value(x)
        q, k, v = (ops.split_heads(y, self.num_heads) for y in projections)  # (B, H, T, d)
        scores = ops.matmul(q, ops.swap_last(k)) / math.sqrt(self.head_dim)  # (B, H, T, T)
        length = ops.dim(x, 1)
        seen = ops.where(ops.causal_mask(length, length), scores, -math.inf)
        y = ops.matmul(ops.softmax(seen, axis=-1), v)  # (B, H, T, d)
        return self.output(ops.merge_heads(y))  # (B, T, D)


class Block(nn.Module):
    """The next token's probabilities from one block of self-attention and feed-forward.

    Each of the two has a residual connection and a norm after it (arXiv 1706.03762, 3.1 to 3.4).

    Args:
        vocabulary: The number of tokens.
        features: D, the size of each token's vector.
        num_heads: H, the heads of attention; they divide D.
        length: The number of positions that have a learned vector: the longest sequence.
    """

    def __init__(
        self, vocabulary: int = 2048, features: int = 64, *, num_heads: int = 4, length: int = 128
    ):
        positive("Block", vocabulary=vocabulary, features=features, length=length)
        positive("Block", num_heads=num_heads)
        if features % num_heads:
            raise GraphgenError(
                f"Block(features={features}, num_heads={num_heads}): the heads must divide the "
                f"features{user_line()}"
            )
        self.embedding = nn.Embedding(vocabulary, features)
        self.positions = nn.LearnedPositions(length, features)
        self.attention = SelfAttention(features, num_heads)
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.feed_forward = nn.FeedForward(features, 4 * features, activation="relu")
        self.linear = nn.Linear(features, vocabulary)

    def __call__(self, input_ids: Tensor) -> dict[str, Tensor]:  # (B, T)
        x = self.positions(self.embedding(input_ids))  # (B, T, D)
        x = self.norm1(x + self.attention(x))
        x = self.norm2(x + self.feed_forward(x))
        logits = self.linear(x)  # (B, T, vocabulary)
        return {"logits": logits, "probabilities": ops.softmax(logits, axis=-1)}


def inputs() -> dict[str, Any]:
    """What `build` needs to know about the arguments."""
    return {"input_ids": int64["batch", "seq"]}
