"""The decoder of the GPT family: a causal language model with pre-norm (GPT-2, 2019)."""

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from graphgen import nn, ops
from graphgen.errors import one_of, positive
from graphgen.nn.blocks import Norm
from graphgen.nn.feed_forward import Activation
from graphgen.nn.module import int64
from graphgen.value import Tensor

Positions: TypeAlias = Literal["learned", "sinusoidal", "rotary", "alibi", "t5", "none"]


class DecoderLM(nn.Module):
    """The logits of each next token, (B, T) to (B, T, vocabulary).

    Tokens plus positions, layers of causal self-attention and feed-forward with the norm before
    each, a last norm, and the token table again as the output layer.

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
        positions: Added to the tokens: learned, or sinusoidal, added to √D times the token (arXiv
            1706.03762, 3.4). In each layer: rotary (arXiv 2104.09864), alibi (arXiv 2108.12409) or
            t5 (arXiv 1910.10683). Or none: only the causal mask tells positions apart. All but
            learned run at any length.
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
        activation: Activation = "gelu",
        gated: bool = False,
        norm: Norm = "layer",
        dropout: float = 0.0,
        positions: Positions = "learned",
    ):
        who = type(self).__name__
        positive(who, vocabulary=vocabulary, features=features, layers=layers, length=length)
        positive(who, num_heads=num_heads, kv_heads=kv_heads, hidden=hidden)
        one_of(who, Positions, positions=positions)
        self.embedding = nn.Embedding(vocabulary, features)
        kinds: dict[Positions, Callable[[], nn.Module | None]] = {
            "learned": lambda: nn.LearnedPositions(length, features),
            "sinusoidal": lambda: nn.SinusoidalPositions(features),
            "rotary": lambda: nn.Rotary(nn.rotary_frequencies(features // num_heads)),
            "alibi": lambda: nn.AlibiBias(num_heads),
            "t5": lambda: nn.RelativeBias(num_heads, one_sided=True),
            "none": lambda: None,
        }
        self.kind, self.positions = positions, kinds[positions]()
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

    def __call__(self, input_ids: Tensor) -> dict[str, Tensor]:  # (B, T)
        x = self.embedding(input_ids)  # (B, T, D)
        positions: Any = self.positions
        relative: dict[str, Any] = {}
        if self.kind == "learned":
            x = positions(x)
        elif self.kind == "sinusoidal":  # its vectors have the length √(D/2)
            x = positions(x * math.sqrt(self.embedding.features))
        elif positions is not None:
            rows = ops.arange(ops.dim(input_ids, 1))  # (T)
            if self.kind == "rotary":
                relative["rotary"] = positions(ops.unsqueeze(rows, [0]), x)
            else:
                relative["mask"] = positions(rows, rows)  # (1, H, T, T)
        x = self.decoder(self.dropout(x), **relative)
        return {"logits": self.embedding.logits(x)}  # (B, T, vocabulary)


def inputs() -> dict[str, Any]:
    """What `build` needs to know about the arguments."""
    return {"input_ids": int64["batch", "seq"]}
