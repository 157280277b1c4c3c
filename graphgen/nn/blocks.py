"""Layers and stacks of encoders and decoders, with the norm placed post, pre or sandwich."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Required, TypeAlias, TypedDict, Unpack

from graphgen.errors import one_of, positive
from graphgen.nn.attention import Attention
from graphgen.nn.feed_forward import Activation, FeedForward
from graphgen.nn.module import Module
from graphgen.nn.norm import LayerNorm, RMSNorm
from graphgen.value import Tensor

Norm: TypeAlias = Literal["layer", "rms"]
Placement: TypeAlias = Literal["pre", "post", "sandwich"]

NORMS: dict[Norm, Callable[[int], Module]] = {"layer": LayerNorm, "rms": RMSNorm}


class LayerOptions(TypedDict, total=False):
    """The options of all layers, which stacks pass on to theirs."""

    num_heads: Required[int]
    kv_heads: int | None
    hidden: int | None
    activation: Activation
    gated: bool
    dropout: float


class EncoderOptions(LayerOptions, total=False):
    """The options of an encoder's layers: those of `EncoderLayer`."""

    causal: bool
    attention: Callable[..., Any]


class DecoderOptions(LayerOptions, total=False):
    """The options of a decoder's layers: those of `DecoderLayer`."""

    memory_features: int | None
    attention: Callable[..., Any]


class Residual(Module):
    """A residual connection around a sublayer f, with its norm.

    pre: x + f(norm(x)); post: norm(x + f(x)), as in arXiv 1706.03762; sandwich:
    x + norm_after(f(norm(x))), as in arXiv 2105.13290.
    """

    def __init__(self, features: int, *, placement: Placement, norm: Norm):
        self.placement: Placement = placement
        self.norm = NORMS[norm](features)
        self.norm_after = NORMS[norm](features) if placement == "sandwich" else None

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
        activation: Activation = "gelu",
        gated: bool = False,
        placement: Placement = "pre",
        norm: Norm = "layer",
        dropout: float = 0.0,
        causal: bool = False,
        attention: Callable[..., Any] = Attention,
    ):
        one_of(type(self).__name__, Placement, placement=placement)
        one_of(type(self).__name__, Norm, norm=norm)
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
    (arXiv 2103.03206), (B, T, features) and (B, S, memory_features) to (B, T, features). The other
    options are those of `EncoderLayer` that all layers have, from num_heads to dropout.
    """

    def __init__(
        self,
        features: int,
        *,
        memory_features: int | None = None,
        placement: Placement = "pre",
        norm: Norm = "layer",
        **options: Unpack[LayerOptions],
    ):
        attention = partial(Attention, memory_features=memory_features)
        super().__init__(features, placement=placement, norm=norm, attention=attention, **options)

    def __call__(  # type: ignore[override]
        self, x: Tensor, memory: Tensor, *, memory_mask: Tensor | None = None
    ) -> Tensor:  # (B, T, D), (B, S, memory_features)
        x = self.residual1(x, lambda h: self.attention(h, memory, mask=memory_mask))
        return self.residual2(x, self.feed_forward)


class DecoderLayer(EncoderLayer):
    """Causal self-attention, attention to the encoder's `memory`, feed-forward.

    The other options are those of `EncoderLayer` that all layers have, from num_heads to dropout;
    both attentions have the same heads.
    """

    def __init__(
        self,
        features: int,
        *,
        memory_features: int | None = None,
        placement: Placement = "pre",
        norm: Norm = "layer",
        attention: Callable[..., Any] = Attention,
        **options: Unpack[LayerOptions],
    ):
        super().__init__(
            features,
            placement=placement,
            norm=norm,
            causal=True,
            attention=attention,
            **options,
        )
        self.cross_attention = Attention(
            features,
            num_heads=options["num_heads"],
            kv_heads=options.get("kv_heads"),
            dropout=options.get("dropout", 0.0),
            memory_features=memory_features,
        )
        self.residual3 = Residual(features, placement=placement, norm=norm)

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


class Stack(Module):
    """Layers one after the other, with a last norm unless it is post."""

    def __init__(
        self,
        layer: Callable[[], EncoderLayer],
        features: int,
        *,
        layers: int,
        placement: Placement,
        norm: Norm,
    ):
        positive(type(self).__name__, layers=layers)
        self.layers = [layer() for _ in range(layers)]
        self.norm = None if placement == "post" else NORMS[norm](features)

    def _through(self, x: Tensor, *memory: Tensor, **given: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, *memory, **given)
        return x if self.norm is None else self.norm(x)


class Encoder(Stack):
    """A stack of encoder layers, with a last norm unless it is post. A decoder if causal.

    The options are those of `EncoderLayer`.
    """

    def __init__(
        self,
        features: int,
        *,
        layers: int,
        placement: Placement = "pre",
        norm: Norm = "layer",
        **options: Unpack[EncoderOptions],
    ):
        layer = partial(EncoderLayer, features, placement=placement, norm=norm, **options)
        super().__init__(layer, features, layers=layers, placement=placement, norm=norm)

    def __call__(
        self, x: Tensor, *, mask: Tensor | None = None, rotary: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:  # (B, T, D)
        return self._through(x, mask=mask, rotary=rotary)


class Decoder(Stack):
    """A stack of decoder layers that attend to `memory`, with a last norm unless it is post.

    The options are those of `DecoderLayer`.
    """

    def __init__(
        self,
        features: int,
        *,
        layers: int,
        placement: Placement = "pre",
        norm: Norm = "layer",
        **options: Unpack[DecoderOptions],
    ):
        layer = partial(DecoderLayer, features, placement=placement, norm=norm, **options)
        super().__init__(layer, features, layers=layers, placement=placement, norm=norm)

    def __call__(
        self,
        x: Tensor,
        memory: Tensor,
        *,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:  # (B, T, D), (B, S, memory_features)
        return self._through(x, memory, mask=mask, memory_mask=memory_mask)
