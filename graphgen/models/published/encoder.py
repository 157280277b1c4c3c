"""One specification of an encoder of tokens, and the module that it declares."""

from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen import nn, ops
from graphgen.models.published.cache import near_mask
from graphgen.models.published.layer import Layer
from graphgen.models.published.specification import EncoderSpecification
from graphgen.nn.module import TensorSpec, int64
from graphgen.ops.layout import lowest_of
from graphgen.value import Tensor

TOKENS = int64["batch_size", "sequence_length"]


class Encoder(nn.Module):
    """A vector for each token, (B, T) to (B, T, D), which has seen the tokens on both sides."""

    def __init__(self, spec: EncoderSpecification):
        width = spec.embedding_features or spec.features
        self.spec, self.features = spec, spec.features
        self.embedding = nn.Embedding(spec.vocabulary, width)
        self.positions = None
        if spec.positions is not None:
            self.positions = nn.LearnedPositions(spec.positions, width)
        self.types = nn.Embedding(spec.types, width) if spec.types else None
        self.norm = None
        if spec.embedding_norm:
            self.norm = spec.norm(spec.features if spec.embedded else width)
        self.projection = None
        if spec.projected or width != spec.features:
            self.projection = nn.Linear(width, spec.features, bias=not spec.embedded)
        self.rotary = [*dict.fromkeys(sight.rotary for sight in spec.layers if sight.rotary)]
        self.relative, self.distances = spec.relative, spec.distances
        self.order = range(len(spec.layers)) if spec.order is None else spec.order
        self.layers = [Layer(spec, self.order.index(one)) for one in sorted({*self.order})]
        self.convolution = spec.convolution
        self.last_norm = spec.norm(spec.features) if spec.last_norm else None

    def tokens(self, input_ids: Tensor, mask: Tensor | None) -> Tensor:
        """The vectors of tokens alone, (B, T, D)."""
        x: Tensor = self.embedding(input_ids)
        return x

    def embedded(
        self, input_ids: Tensor, token_type_ids: Tensor | None, mask: Tensor | None = None
    ) -> Tensor:
        """The vectors of tokens, positions and types, (B, T, D)."""
        x = self.tokens(input_ids, mask)
        if self.types is not None:
            types = np.zeros((1, 1), np.int64) if token_type_ids is None else token_type_ids
            x = x + self.types(types)
        padding = self.spec.padding
        if self.positions is not None and padding is None:
            x = self.positions(x)
        elif self.positions is not None and padding is not None:
            kept = ops.cast(ops.logical_not(ops.equal(input_ids, padding)), to=ir.DataType.INT64)
            places = ops.cumsum(kept, 1) * kept + padding  # (B, T)
            x = x + ops.embedding(self.positions.weight, places)
        steps = [self.projection, self.norm] if self.spec.embedded else [self.norm, self.projection]
        for step in steps:
            x = x if step is None else step(x)
        return x

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        x = self.embedded(input_ids, token_type_ids, attention_mask)
        kept = ops.cast(attention_mask, to=ir.DataType.BOOL)  # (B, T)
        places = ops.arange(ops.dim(input_ids, 1))
        masks = {sight.window: self._mask(kept, sight.window) for sight in self.spec.layers}
        how: dict[str, Any] = {}
        if self.distances is not None:
            how["distances"] = self.distances(places)
        turns = {id(rotary): rotary(ops.unsqueeze(places, [0]), x) for rotary in self.rotary}
        first = x
        for number, sight in enumerate(self.spec.layers):
            turn = turns.get(id(sight.rotary))
            x = self.layers[self.order[number]](x, mask=masks[sight.window], rotary=turn, **how)
            if number == 0 and self.convolution is not None:
                x = self.convolution(first, x, kept)
        return x if self.last_norm is None else self.last_norm(x)

    def _mask(self, kept: Tensor, window: int | None) -> Tensor:
        """What the queries of a layer see: bool, or scores to add if there is a bias."""
        if self.relative is None:
            return kept if window is None else near_mask(kept, window=window)
        places = ops.arange(ops.dim(kept, 1))
        bias = self.relative(places, places)
        return ops.where(near_mask(kept, window=window), bias, lowest_of(bias))  # (B, H, T, T)

    def inputs(self) -> dict[str, TensorSpec]:
        """Tokens, the mask of those that are not padding, and types if there is more than one."""
        types = ["token_type_ids"] if self.spec.types > 1 else []
        return dict.fromkeys(["input_ids", "attention_mask", *types], TOKENS)
