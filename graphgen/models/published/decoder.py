"""One specification of a decoder of tokens, and the modules that it declares."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from graphgen import nn, ops
from graphgen.models.published.cache import (
    Cache,
    cache_inputs,
    near_mask,
    own_mask,
    places_bias,
    places_of,
    token_inputs,
)
from graphgen.models.published.classifier import CausalClassifier, CausalVectors
from graphgen.models.published.config import Config
from graphgen.models.published.layer import Layer
from graphgen.models.published.specification import Sight, Specification
from graphgen.nn.module import TensorSpec
from graphgen.ops.attention import cached_mask
from graphgen.ops.layout import lowest_of
from graphgen.value import Tensor


class Decoder(nn.Module):
    """A vector for each token, (B, T) to (B, T, D), which has seen the tokens before it."""

    def __init__(self, spec: Specification):
        width = spec.embedding_features or spec.features
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocabulary, width)
        self.embedding_norm = spec.norm(width) if spec.embedding_norm else None
        self.positions = None
        if spec.positions is not None:
            self.positions = nn.Embedding(spec.positions + spec.offset, spec.features)
        self.inward = self.outward = None
        if width != spec.features:
            self.inward = nn.Linear(width, spec.features, bias=False)
            self.outward = nn.Linear(spec.features, width, bias=False)
        self.rotary = [*dict.fromkeys(sight.rotary for sight in spec.layers if sight.rotary)]
        self.layers = [Layer(spec, number) for number in range(len(spec.layers))]
        self.norm = spec.norm(spec.features) if spec.last_norm else None

    def states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Any,
        cache: Cache | None = None,
    ) -> Tensor:
        """The vectors of tokens at these positions, after those in the cache."""
        spec = self.spec
        x: Tensor = self.embedding(input_ids)  # (B, T, D)
        if spec.embedding_scale != 1.0:
            x = x * spec.embedding_scale
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if self.inward is not None:
            x = self.inward(x)
        if self.positions is not None:
            x = x + self.positions(position_ids + spec.offset if spec.offset else position_ids)
        kinds = [sight._replace(rotary=None) for sight in spec.layers]
        length = ops.dim(input_ids, 1)
        masks = {kind: self._mask(kind, attention_mask, length, x) for kind in dict.fromkeys(kinds)}
        turns: dict[int, Any] = {id(rotary): rotary(position_ids, x) for rotary in self.rotary}
        for number, (layer, kind) in enumerate(zip(self.layers, kinds, strict=True)):
            turn = turns.get(id(spec.layers[number].rotary))
            own = None if cache is None else cache.of(number)
            x = layer(x, mask=masks[kind], rotary=turn, cache=own)
        x = x if self.norm is None else self.norm(x)
        return x if self.outward is None else self.outward(x)

    def _mask(self, sight: Sight, attention_mask: Tensor, length: Any, x: Tensor) -> Tensor:
        """Which tokens the last `length` see, or what is added to their scores, in x's dtype."""
        spec = self.spec
        if sight.stateful:
            return ops.cast_like(own_mask(attention_mask, length), x)
        if spec.both_sides:
            return near_mask(attention_mask, window=sight.window)
        mask = cached_mask(attention_mask, length, window=sight.window)
        if spec.slopes is None:
            return mask
        bias = places_bias(attention_mask, spec.slopes, rounded=spec.rounded)
        return ops.where(mask, ops.cast_like(bias * spec.slopes_scale, x), lowest_of(x))

    def whole(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The vectors of whole texts, whose positions count from the row's start.

        Where the specification says so, they count without the padding.
        """
        places: Tensor = ops.unsqueeze(ops.arange(ops.dim(input_ids, 1)), [0])  # (1, T)
        if self.spec.counted:
            places = places_of(attention_mask, ir.DataType.INT64)
        return self.states(input_ids, attention_mask, places)

    def token_inputs(self) -> dict[str, TensorSpec]:
        """The inputs for tokens; without positions if nothing depends on them."""
        placed = self.positions is not None or self.rotary
        return token_inputs(*["position_ids"] if placed else [])


class CausalLM(Decoder):
    """The logits of each next token, (B, T) to (B, T, vocabulary), and the cache after them."""

    def __init__(self, spec: Specification):
        super().__init__(spec)
        self.head: Any = None  # nn.Linear, or what has `logits`
        table = self.embedding
        if spec.head_rows and not spec.tied:
            self.head = nn.Embedding(table.count, table.features)
        elif not spec.tied:
            self.head = nn.Linear(table.features, table.count, bias=spec.head_bias)

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        **past: Tensor,
    ) -> dict[str, Tensor]:
        cache, spec = Cache(past), self.spec
        x = self.states(input_ids, attention_mask, position_ids, cache)
        head = self.embedding if self.head is None else self.head
        logits = head(x) if isinstance(head, nn.Linear) else head.logits(x)
        if spec.logits_scale != 1.0:
            logits = logits * spec.logits_scale
        if spec.logits_softcap:
            logits = ops.softcap(logits, spec.logits_softcap)
        return {"logits": logits, **cache.present}

    def inputs(self) -> dict[str, TensorSpec]:
        """Tokens, their positions, and what the cache holds of earlier tokens."""
        return {**self.token_inputs(), **cache_inputs(layer.attention for layer in self.layers)}


_BOTH_SIDES = "use_bidirectional_attention"


def tasks(specify: Callable[[Config], Specification]) -> Mapping[str, Callable[[Config], Any]]:
    """The tasks of a family whose configurations `specify` reads."""

    def specified(config: Config) -> Specification:
        spec = specify(config)
        if config.take("is_causal", bool, True):
            return spec
        if spec.slopes is not None or any(sight.window or sight.stateful for sight in spec.layers):
            config.refuse("is_causal", False, "true with windows, slopes of distances or states")
        return replace(spec, both_sides=True)

    def generating(config: Config) -> CausalLM:
        spec = specified(config)
        if spec.both_sides:
            name, wanted = _BOTH_SIDES, "false"
            if config.given("is_causal") is False:
                name, wanted = "is_causal", "true"
            wanted += " to continue texts: give --task feature-extraction to embed them"
            config.refuse(name, config.given(name), wanted)
        return CausalLM(spec)

    return {
        "text-generation": generating,
        "text-classification": lambda config: CausalClassifier(config, Decoder(specified(config))),
        "feature-extraction": lambda config: CausalVectors(Decoder(specified(config))),
    }
