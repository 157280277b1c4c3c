"""Attention by locality-sensitive hashing."""

from collections.abc import Sequence

from graphgen import ops
from graphgen.errors import GraphgenError
from graphgen.nn.linear import Dropout, Linear
from graphgen.nn.module import Module
from graphgen.nn.sizes import positive
from graphgen.op import Operand


class HashedAttention(Module):
    """Self-attention to the keys of the same hash (Reformer, arXiv 2001.04451), (B, T, features).

    One projection is queries and keys. A bool `mask`, (B, T), is for padding. Sizes are those of
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
                "heads must divide the features, and share no keys"
            )
        self.num_heads, self.causal, self.seed = num_heads, causal, seed
        self.buckets, self.chunk, self.rounds = buckets, chunk, rounds
        self.query = Linear(features, features, bias=bias)
        self.value = Linear(features, features, bias=bias)
        self.output = Linear(features, features, bias=bias)
        self.dropout = Dropout(dropout)

    def __call__(self, x: Operand, *, mask: Operand = None) -> Operand:
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
