"""A decoder with a mixture of experts in each layer, like Mixtral (arXiv 2401.04088)."""

from typing import Any

from graphgen import nn, ops
from graphgen.errors import positive
from graphgen.nn.module import int64
from graphgen.value import Tensor


class MoELayer(nn.Module):
    """Causal self-attention, then the experts that each token chooses, with a norm before each."""

    def __init__(self, features: int, hidden: int, *, experts: int, k: int, **heads: Any):
        self.norm1, self.norm2 = nn.RMSNorm(features), nn.RMSNorm(features)
        self.attention = nn.Attention(features, causal=True, bias=False, **heads)
        self.experts = nn.MixtureOfExperts(
            features, hidden, experts=experts, k=k, activation="silu", gated=True, bias=False
        )

    def __call__(self, x: Tensor, rotary: tuple[Tensor, ...]) -> Tensor:  # (B, T, D)
        x = x + self.attention(self.norm1(x), rotary=rotary)
        return x + self.experts(self.norm2(x))


class MoEDecoder(nn.Module):
    """The logits of each next token, (B, T) to (B, T, vocabulary).

    Args:
        vocabulary: The number of tokens.
        features: D, the size of each token's vector.
        layers: The number of layers.
        num_heads: Heads of queries; they divide D into parts of an even size.
        kv_heads: Heads of keys and values (arXiv 2305.13245); they divide num_heads.
        hidden: The inner size of each expert, 2 D by default.
        experts: How many there are in each layer.
        k: How many of them each token uses.
    """

    def __init__(
        self,
        vocabulary: int = 8192,
        features: int = 256,
        *,
        layers: int = 4,
        num_heads: int = 4,
        kv_heads: int = 2,
        hidden: int | None = None,
        experts: int = 8,
        k: int = 2,
    ):
        positive("MoEDecoder", vocabulary=vocabulary, features=features, layers=layers)
        positive("MoEDecoder", num_heads=num_heads, hidden=hidden)
        sizes = {"num_heads": num_heads, "kv_heads": kv_heads, "experts": experts, "k": k}
        hidden = 2 * features if hidden is None else hidden
        self.embedding = nn.Embedding(vocabulary, features)
        self.positions = nn.Rotary(nn.rotary_frequencies(features // num_heads))
        self.layers = [MoELayer(features, hidden, **sizes) for _ in range(layers)]
        self.norm = nn.RMSNorm(features)
        self.output = nn.Linear(features, vocabulary, bias=False)

    def __call__(self, input_ids: Tensor) -> dict[str, Tensor]:  # (B, T)
        x = self.embedding(input_ids)  # (B, T, D)
        rows = ops.unsqueeze(ops.arange(ops.dim(input_ids, 1)), [0])  # (1, T)
        rotary = self.positions(rows, x)  # cosines and sines, (1, T, head_dim / 2)
        for layer in self.layers:
            x = layer(x, rotary)
        return {"logits": self.output(self.norm(x))}  # (B, T, vocabulary)


def inputs() -> dict[str, Any]:
    """What `build` needs to know about the arguments."""
    return {"input_ids": int64["batch", "seq"]}
