"""One specification of an encoder-decoder of tokens, and the modules that it declares."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from graphgen import nn, ops
from graphgen.models.published.config import Config
from graphgen.models.published.seq2seq import CrossAttention, Memory, Seq2Seq, causal
from graphgen.nn.module import Parameter, zeros
from graphgen.ops.layout import lowest_of
from graphgen.value import Tensor


@dataclass(frozen=True, kw_only=True)
class Side:
    """An encoder or a decoder.

    A layer is y = x + attention(norm1(x)), in a decoder z = y + cross_attention(norm2(y)), and then
    z + feed_forward(norm3(z)). If it is `post`, the norms are taken of these sums, as in
    arXiv 1706.03762.

    Args:
        vocabulary: The number of tokens in its table.
        features: D, the size of the vectors between layers.
        layers: The number of layers.
        norm: Makes a norm of so many features.
        attention: Makes an attention of a layer, of the class that it is given.
        feed_forward: Makes the feed-forward of a layer.
        post: Whether the norms are taken of the sums.
        last_norm: Whether a norm follows the last layer.
        embedding_scale: The factor of the tokens' vectors.
        embedding_norm: Whether a norm follows their sum with the positions.
        positions: What turns the positions (T) or (B, T) into vectors, or None.
        offset: The row of position 0.
        padding: The token that no position is counted for, and which has row `offset` - 1; None if
            all are counted.
        relative: Makes a bias of scores that depends on distances, or None.
        relative_each: Whether each layer has its own, or all have one.
    """

    vocabulary: int
    features: int
    layers: int
    norm: Callable[[int], nn.Module]
    attention: Callable[[type[nn.Attention]], nn.Attention]
    feed_forward: Callable[[], nn.Module]
    post: bool = False
    last_norm: bool = True
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    positions: Any = None
    offset: int = 0
    padding: int | None = None
    relative: Callable[[], nn.RelativeBias] | None = None
    relative_each: bool = False


@dataclass(frozen=True, kw_only=True)
class Specification:
    """Both sides, and what makes logits of the decoder's vectors.

    Args:
        encoder: Reads the source.
        decoder: Reads the tokens so far.
        own_tables: The sides that have a table of tokens of their own; all others share one.
        tied: Whether the decoder's table is the output layer.
        logits_bias: Whether the logits have a bias.
        last_scale: The factor of the decoder's vectors before the output layer.
    """

    encoder: Side
    decoder: Side
    own_tables: tuple[str, ...] = ()
    tied: bool = True
    logits_bias: bool = False
    last_scale: float = 1.0


class Layer(nn.Module):
    """Self-attention, attention to the encoder if a decoder, and feed-forward."""

    def __init__(self, side: Side, *, decoder: bool):
        self.post = side.post
        self.attention = side.attention(nn.Attention)
        self.norm1 = side.norm(side.features)
        self.cross_attention = side.attention(CrossAttention) if decoder else None
        self.norm2 = side.norm(side.features) if decoder else None
        self.feed_forward = side.feed_forward()
        self.norm3 = side.norm(side.features)
        self.relative = side.relative() if side.relative and side.relative_each else None

    def __call__(self, x: Tensor, mask: Tensor | None, memory: Memory | None = None) -> Tensor:
        x = self._joined(x, self.attention, self.norm1, mask=mask, cache=memory)  # (B, T, D)
        if self.cross_attention is not None:
            x = self._joined(x, self.cross_attention, self.norm2, memory)
        return self._joined(x, self.feed_forward, self.norm3)

    def _joined(self, x: Tensor, part: Any, norm: Any, *args: Any, **how: Any) -> Tensor:
        if self.post:
            return norm(x + part(x, *args, **how))  # type: ignore[no-any-return]
        return x + part(norm(x), *args, **how)  # type: ignore[no-any-return]


class Stack(nn.Module):
    """The embeddings and the layers of one side, (B, T) to (B, T, D)."""

    def __init__(self, side: Side, embedding: nn.Embedding, *, decoder: bool):
        self.side, self.decoder, self.embedding = side, decoder, embedding
        self.positions = side.positions
        self.embedding_norm = side.norm(side.features) if side.embedding_norm else None
        self.relative = side.relative() if side.relative and not side.relative_each else None
        self.layers = [Layer(side, decoder=decoder) for _ in range(side.layers)]
        self.last_norm = side.norm(side.features) if side.last_norm else None

    def __call__(self, input_ids: Tensor, given: Any) -> Tensor:
        """`given` is the decoder's memory, or the mask of the encoder's tokens, (B, S)."""
        if self.decoder:
            rows, columns = given.positions()
            keep = ops.unsqueeze(causal(rows, columns), [0, 1])  # (1, 1, T, S)
        else:
            rows = columns = ops.arange(ops.dim(input_ids, 1))
            keep = ops.unsqueeze(given, [1, 2])  # (B, 1, 1, S)
        x = self._embedded(input_ids, rows)

        def mask(relative: Any) -> Tensor:
            if relative is None:
                return keep
            bias = relative(rows, columns)
            return ops.where(keep, bias, lowest_of(bias))  # (B or 1, H, T, S)

        shared = mask(self.relative)
        for layer in self.layers:
            own = shared if layer.relative is None else mask(layer.relative)
            x = layer(x, own, given if self.decoder else None)
        return x if self.last_norm is None else self.last_norm(x)

    def _embedded(self, input_ids: Tensor, rows: Tensor) -> Tensor:
        side = self.side
        x = self.embedding(input_ids)
        x = x * side.embedding_scale if side.embedding_scale != 1.0 else x
        if self.positions is not None:
            places = rows
            if side.padding is not None:
                places = counted(input_ids, rows, side.padding)
            places = places + side.offset if side.offset else places
            x = x + ops.cast_like(self.positions(places), x)
        return x if self.embedding_norm is None else self.embedding_norm(x)


def counted(input_ids: Tensor, rows: Tensor, padding: int) -> Tensor:
    """The place of each token among those of this call that are no padding; -1 for padding."""
    real = ops.cast(ops.logical_not(ops.equal(input_ids, padding)), to=ir.DataType.INT64)
    past = rows - ops.arange(ops.dim(input_ids, 1))
    return (ops.cumsum(real, 1) + past) * real - 1


class EncoderDecoder(Seq2Seq):
    """The encoder-decoder of a specification; by default one table embeds and gives the logits."""

    def __init__(self, spec: Specification):
        self.spec = spec
        sides: Mapping[str, Side] = {"encoder": spec.encoder, "decoder": spec.decoder}
        features, vocabulary = spec.decoder.features, spec.decoder.vocabulary
        every = len(spec.own_tables) == len(sides)
        self.shared = None if every else nn.Embedding(spec.encoder.vocabulary, features)
        tables: dict[str, Any] = dict.fromkeys(sides, self.shared)
        for name in spec.own_tables:
            tables[name] = nn.Embedding(sides[name].vocabulary, features)
        self.encoder = Stack(spec.encoder, tables["encoder"], decoder=False)
        self.decoder = Stack(spec.decoder, tables["decoder"], decoder=True)
        attention = self.decoder.layers[0].attention
        self.cached(spec.decoder.layers, attention.kv_heads, attention.head_dim, features)
        self.head = None if spec.tied else nn.Linear(features, vocabulary, bias=False)
        biased = spec.logits_bias
        self.final_logits_bias = Parameter((1, vocabulary), initialize=zeros) if biased else None

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, T, vocabulary)."""
        x = x * self.spec.last_scale if self.spec.last_scale != 1.0 else x
        y = self.decoder.embedding.logits(x) if self.head is None else self.head(x)
        return y if self.final_logits_bias is None else y + self.final_logits_bias


def tasks(specify: Callable[[Config], Specification]) -> Mapping[str, Callable[[Config], Any]]:
    """The tasks of a family whose configurations `specify` reads."""
    return {"text2text-generation": lambda config: EncoderDecoder(specify(config))}
