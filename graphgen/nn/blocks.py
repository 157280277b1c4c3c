"""Layers and stacks of encoders and decoders, with the norm placed post, pre or sandwich."""

from collections.abc import Callable
from functools import partial
from typing import Any

from graphgen.errors import GraphgenError, positive
from graphgen.nn.attention import Attention
from graphgen.nn.feed_forward import FeedForward
from graphgen.nn.module import Module
from graphgen.nn.norm import LayerNorm, RMSNorm
from graphgen.record import Tensor

NORMS: dict[str, Callable[[int], Module]] = {"layer": LayerNorm, "rms": RMSNorm}
PLACEMENTS = ("pre", "post", "sandwich")


class Residual(Module):
    """A residual connection around a sublayer f, with its norm.

    pre: x + f(norm(x)); post: norm(x + f(x)), as in arXiv 1706.03762; sandwich:
    x + norm_after(f(norm(x))), as in arXiv 2105.13290.
    """

    def __init__(self, features: int, *, placement: str, norm: str):
        if placement not in PLACEMENTS or norm not in NORMS:
            raise GraphgenError(
                f"norm placement {placement!r} with norm {norm!r}: placements are "
                f"{', '.join(PLACEMENTS)}, norms are {', '.join(NORMS)}"
            )
        self.placement = placement
        self.norm: Any = NORMS[norm](features)
        self.norm_after: Any = NORMS[norm](features) if placement == "sandwich" else None

    def __call__(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.placement == "post":
            normed: Tensor = self.norm(x + sublayer(x))
            return normed
        y = sublayer(self.norm(x))
        return x + (y if self.norm_after is None else self.norm_after(y))


class EncoderLayer(Module):
    """Self-attention and feed-forward, each in a residual connection.

    `attention` makes the self-attention: `nn.Attention`, or anything with its parameters, such as
    `partial(models.sparse.HashedAttention, buckets=64, chunk=64)`.
    """

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
        attention: Callable[..., Any] = Attention,
    ):
        self.attention = attention(
            features, num_heads=num_heads, kv_heads=kv_heads, causal=causal, dropout=dropout
        )
        self.feed_forward = FeedForward(
            features,
            4 * features if hidden is None else hidden,
            activation=activation,
            gated=gated,
            dropout=dropout,
        )
        self.residual1 = Residual(features, placement=placement, norm=norm)
        self.residual2 = Residual(features, placement=placement, norm=norm)

    def __call__(
        self, x: Tensor, *, mask: Tensor | None = None, rotary: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:  # (B, T, D)
        x = self.residual1(x, lambda h: self.attention(h, mask=mask, rotary=rotary))
        return self.residual2(x, self.feed_forward)


class CrossAttentionLayer(EncoderLayer):
    """Attention to `memory` and feed-forward, each in a residual connection.

    It is a decoder layer without self-attention: tokens or latents read an image or a text
    (arXiv 2103.03206), (B, T, features) and (B, S, memory_features) to (B, T, features).
    """

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        kv_heads: int | None = None,
        memory_features: int | None = None,
        hidden: int | None = None,
        activation: str = "gelu",
        gated: bool = False,
        placement: str = "pre",
        norm: str = "layer",
        dropout: float = 0.0,
    ):
        super().__init__(
            features,
            num_heads=num_heads,
            kv_heads=kv_heads,
            hidden=hidden,
            activation=activation,
            gated=gated,
            placement=placement,
            norm=norm,
            dropout=dropout,
            attention=partial(Attention, memory_features=memory_features),
        )

    def __call__(  # type: ignore[override]
        self, x: Tensor, memory: Tensor, *, memory_mask: Tensor | None = None
    ) -> Tensor:  # (B, T, D), (B, S, memory_features)
        x = self.residual1(x, lambda h: self.attention(h, memory, mask=memory_mask))
        return self.residual2(x, self.feed_forward)


class DecoderLayer(EncoderLayer):
    """Causal self-attention, attention to the encoder's `memory`, feed-forward."""

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        kv_heads: int | None = None,
        memory_features: int | None = None,
        placement: str = "pre",
        norm: str = "layer",
        dropout: float = 0.0,
        **feed_forward: Any,
    ):
        heads: dict[str, Any] = {"num_heads": num_heads, "kv_heads": kv_heads, "dropout": dropout}
        norms: dict[str, Any] = {"placement": placement, "norm": norm}
        super().__init__(features, causal=True, **heads, **norms, **feed_forward)
        self.cross_attention = Attention(features, memory_features=memory_features, **heads)
        self.residual3 = Residual(features, **norms)

    def __call__(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Tensor,
        *,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:  # (B, T, D), (B, S, memory_features)
        x = self.residual1(x, lambda h: self.attention(h, mask=mask))
        x = self.residual2(x, lambda h: self.cross_attention(h, memory, mask=memory_mask))
        return self.residual3(x, self.feed_forward)


class Encoder(Module):
    """A stack of encoder layers, with a last norm unless it is post. A decoder if causal."""

    layer: type[EncoderLayer] = EncoderLayer

    def __init__(
        self,
        features: int,
        *,
        layers: int,
        placement: str = "pre",
        norm: str = "layer",
        **options: Any,
    ):
        positive(type(self).__name__, layers=layers)
        self.layers = [
            self.layer(features, placement=placement, norm=norm, **options) for _ in range(layers)
        ]
        self.norm: Any = None if placement == "post" else NORMS[norm](features)

    def __call__(
        self, x: Tensor, *, mask: Tensor | None = None, rotary: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:  # (B, T, D)
        return self._through(x, mask=mask, rotary=rotary)

    def _through(self, x: Tensor, *memory: Tensor, **given: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, *memory, **given)
        return x if self.norm is None else self.norm(x)


class Decoder(Encoder):
    """A stack of decoder layers that attend to `memory`, with a last norm unless it is post."""

    layer = DecoderLayer

    def __call__(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Tensor,
        *,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:  # (B, T, D), (B, S, memory_features)
        return self._through(x, memory, mask=mask, memory_mask=memory_mask)
