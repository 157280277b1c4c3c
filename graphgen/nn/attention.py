"""Multi-head attention."""

from graphgen import ops
from graphgen.errors import GraphgenError
from graphgen.nn.linear import Dropout, Linear
from graphgen.nn.module import Module
from graphgen.nn.sizes import positive
from graphgen.op import Operand


class Attention(Module):
    """Multi-head attention (arXiv 1706.03762, 3.2.2); grouped (2305.13245) if kv_heads < num_heads.

    Self-attention on x, (B, T, features); cross-attention with `memory`, (B, S, features). A bool
    `mask` keeps what is True: (B, S) for padding of the keys, or anything that broadcasts to
    (B, H, T, S). A query with nothing to look at gives zeros.
    """

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
    ):
        positive("Attention", features=features, num_heads=num_heads)
        positive("Attention", kv_heads=kv_heads, head_dim=head_dim)
        self.features, self.num_heads, self.causal = features, num_heads, causal
        self.kv_heads = num_heads if kv_heads is None else kv_heads
        if head_dim is None and features % num_heads:
            raise GraphgenError(
                f"Attention({features}, num_heads={num_heads}): the heads must divide the features"
            )
        if num_heads % self.kv_heads:
            raise GraphgenError(
                f"Attention(num_heads={num_heads}, kv_heads={kv_heads}): kv_heads must divide "
                "num_heads"
            )
        self.head_dim = features // num_heads if head_dim is None else head_dim
        self.query = Linear(features, num_heads * self.head_dim, bias=bias)
        self.key = Linear(features, self.kv_heads * self.head_dim, bias=bias)
        self.value = Linear(features, self.kv_heads * self.head_dim, bias=bias)
        self.output = Linear(num_heads * self.head_dim, features, bias=bias)
        self.dropout = Dropout(dropout)

    def __call__(self, x: Operand, memory: Operand = None, *, mask: Operand = None) -> Operand:
        memory = x if memory is None else memory  # (B, S, features)
        if mask is not None and ops.rank(mask) == 2:
            mask = ops.unsqueeze(mask, [1, 2])  # (B, 1, 1, S)
        y = ops.attention(
            self.query(x),  # (B, T, H·D)
            self.key(memory),  # (B, S, G·D)
            self.value(memory),  # (B, S, G·D)
            mask,
            is_causal=int(self.causal),
            q_num_heads=self.num_heads,
            kv_num_heads=self.kv_heads,
        )
        return self.dropout(self.output(y))  # (B, T, features)
