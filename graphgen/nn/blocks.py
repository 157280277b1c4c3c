"""Layers and stacks of encoder and decoder, with the norm placed post, pre or sandwich."""

from collections.abc import Callable
from typing import Any

from graphgen.errors import GraphgenError
from graphgen.nn.attention import Attention
from graphgen.nn.feed_forward import FeedForward
from graphgen.nn.module import Module
from graphgen.nn.norm import LayerNorm, RMSNorm
from graphgen.op import Operand

NORMS: dict[str, Callable[[int], Module]] = {"layer": LayerNorm, "rms": RMSNorm}
PLACEMENTS = ("pre", "post", "sandwich")


class Residual(Module):
    """A sublayer f with its residual connection and norm.

    pre: x + f(norm(x)); post: norm(x + f(x)), as in arXiv 1706.03762; sandwich:
    x + norm₂(f(norm(x))), as in arXiv 2105.13290.
    """

    def __init__(self, features: int, sublayer: Any, *, placement: str, norm: str):
        if placement not in PLACEMENTS or norm not in NORMS:
            raise GraphgenError(
                f"norm placement {placement!r} with norm {norm!r}: placements are "
                f"{', '.join(PLACEMENTS)}, norms are {', '.join(NORMS)}"
            )
        self.placement, self.sublayer = placement, sublayer
        self.norm = NORMS[norm](features)
        self.norm_after = NORMS[norm](features) if placement == "sandwich" else None

    def __call__(self, x: Operand, *args: Operand, **kwargs: Operand) -> Operand:
        norm: Any = self.norm
        if self.placement == "post":
            return norm(x + self.sublayer(x, *args, **kwargs))
        y = self.sublayer(norm(x), *args, **kwargs)
        after: Any = self.norm_after
        return x + (y if after is None else after(y))


class EncoderLayer(Module):
    """Self-attention and feed-forward."""

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        kv_heads: int | None = None,
        hidden: int | None = None,
        activation: str = "gelu",
        gated: bool = False,
        placement: str = "pre",
        norm: str = "layer",
        dropout: float = 0.0,
        causal: bool = False,
    ):
        attention = Attention(
            features, num_heads=num_heads, kv_heads=kv_heads, causal=causal, dropout=dropout
        )
        feed_forward = FeedForward(
            features, hidden or 4 * features, activation=activation, gated=gated, dropout=dropout
        )
        self.attention = Residual(features, attention, placement=placement, norm=norm)
        self.feed_forward = Residual(features, feed_forward, placement=placement, norm=norm)

    def __call__(self, x: Operand, *, mask: Operand = None) -> Operand:  # (B, T, D)
        return self.feed_forward(self.attention(x, mask=mask))


class DecoderLayer(Module):
    """Causal self-attention, attention to the encoder's `memory`, feed-forward."""

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        kv_heads: int | None = None,
        hidden: int | None = None,
        activation: str = "gelu",
        gated: bool = False,
        placement: str = "pre",
        norm: str = "layer",
        dropout: float = 0.0,
    ):
        heads: dict[str, Any] = {"num_heads": num_heads, "kv_heads": kv_heads, "dropout": dropout}
        feed_forward = FeedForward(
            features, hidden or 4 * features, activation=activation, gated=gated, dropout=dropout
        )
        wrap: dict[str, str] = {"placement": placement, "norm": norm}
        self.attention = Residual(features, Attention(features, causal=True, **heads), **wrap)
        self.cross_attention = Residual(features, Attention(features, **heads), **wrap)
        self.feed_forward = Residual(features, feed_forward, **wrap)

    def __call__(
        self,
        x: Operand,
        memory: Operand,
        *,
        mask: Operand = None,
        memory_mask: Operand = None,
    ) -> Operand:  # (B, T, D), (B, S, D)
        x = self.attention(x, mask=mask)
        return self.feed_forward(self.cross_attention(x, memory, mask=memory_mask))


class Encoder(Module):
    """A stack of encoder layers; unless the norm is post, a last norm. A decoder if causal."""

    def __init__(
        self,
        features: int,
        *,
        layers: int,
        placement: str = "pre",
        norm: str = "layer",
        **layer: Any,
    ):
        self.layers = [
            EncoderLayer(features, placement=placement, norm=norm, **layer) for _ in range(layers)
        ]
        self.norm = None if placement == "post" else NORMS[norm](features)

    def __call__(self, x: Operand, *, mask: Operand = None) -> Operand:  # (B, T, D)
        for layer in self.layers:
            x = layer(x, mask=mask)
        norm: Any = self.norm
        return x if norm is None else norm(x)


class Decoder(Module):
    """A stack of decoder layers that attend to `memory`; unless the norm is post, a last norm."""

    def __init__(
        self,
        features: int,
        *,
        layers: int,
        placement: str = "pre",
        norm: str = "layer",
        **layer: Any,
    ):
        self.layers = [
            DecoderLayer(features, placement=placement, norm=norm, **layer) for _ in range(layers)
        ]
        self.norm = None if placement == "post" else NORMS[norm](features)

    def __call__(
        self,
        x: Operand,
        memory: Operand,
        *,
        mask: Operand = None,
        memory_mask: Operand = None,
    ) -> Operand:  # (B, T, D), (B, S, D)
        for layer in self.layers:
            x = layer(x, memory, mask=mask, memory_mask=memory_mask)
        norm: Any = self.norm
        return x if norm is None else norm(x)
