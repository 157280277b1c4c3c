"""Encoder-decoders as two graphs: an encoder, and a decoder that keeps what it has computed."""

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from graphgen import nn, ops
from graphgen.models.published.cache import PAST, PRESENT
from graphgen.nn.module import TensorSpec, bool_, float32, int64
from graphgen.value import Tensor

ENCODER, DECODER = "encoder_model.onnx", "decoder_model_merged.onnx"
"""What clients call the graphs of an encoder-decoder; merged: one file serves every call."""


class Memory:
    """What a decoder attends to: the encoder's states, and the keys and values of earlier calls.

    The first call has no past, and computes the keys and values of the encoder's `states`,
    (B, S, D), once: they are the outputs present.N.encoder.key and .value. If `use_cache` is True,
    they come in as past_key_values.N.encoder.key and .value, and those outputs are empty, so
    nothing is copied. present.N.decoder.key and .value grow with every call.
    """

    def __init__(
        self,
        tokens: Tensor,
        states: Tensor,
        mask: Tensor | None,
        use_cache: Tensor,
        past: Mapping[str, Tensor],
    ):
        self.states, self.use_cache = states, use_cache
        self._length = ops.dim(tokens, 1)
        self.mask = None
        if mask is not None:
            padding = ops.unsqueeze(ops.cast(mask, to=ir.DataType.BOOL), [1, 2])
            self.mask = ops.expand(padding, [1, 1, self._length, 1])  # (B, 1, T, S)
        self._past = past
        self._layer = 0
        self.present: dict[str, Tensor] = {}

    def positions(self) -> tuple[Tensor, Tensor]:
        """The positions of the new tokens, (T), and of all tokens, (P + T)."""
        past = ops.dim(self._past[f"{PAST}.0.decoder.key"], 2)
        return ops.arange(self._length) + past, ops.arange(past + self._length)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the decoder's keys and values, (B, G, T, D), to earlier ones: (B, G, P + T, D)."""
        grown = [
            ops.concat(old, new, axis=2)
            for old, new in zip(self._of("decoder"), (key, value), strict=True)
        ]
        self._give("decoder", grown)
        return grown[0], grown[1]

    def attend(self, attention: nn.Attention, q: Tensor) -> Tensor:
        """Attend from the queries (B, H, T, D) of the next layer to the encoder's states."""
        past = self._of("encoder")

        def result(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            given = (q, k, v, self.mask)
            if attention.weights is None:
                return (ops.scaled_dot_product_attention(*given, scale=attention.scale),)
            return ops.attention_with_weights(*given, scale=attention.scale)

        def first() -> tuple[Tensor, ...]:
            new = (attention.key(self.states), attention.value(self.states))
            k, v = (ops.split_heads(x, attention.kv_heads) for x in new)
            return k, v, *result(k, v)

        def later() -> tuple[Tensor, ...]:
            if self.mask is not None:
                ops.promise_same_size(past[0], 2, self.mask, 3)
            return *(ops.slice_(x, [0], [0], [2]) for x in past), *result(*past)

        k, v, y, *weights = ops.cond(self.use_cache, later, first)
        self._give("encoder", [k, v])
        if attention.weights is not None:
            attention.weights += weights
        self._layer += 1
        context: Tensor = y
        return context

    def _of(self, side: str) -> list[Tensor]:
        return [self._past[f"{PAST}.{self._layer}.{side}.{kind}"] for kind in ("key", "value")]

    def _give(self, side: str, both: list[Tensor]) -> None:
        for kind, value in zip(("key", "value"), both, strict=True):
            self.present[f"{PRESENT}.{self._layer}.{side}.{kind}"] = value


class CrossAttention(nn.Attention):
    """Attention to the encoder's output, (B, T, D) to (B, T, D)."""

    def __call__(self, x: Tensor, memory: Memory) -> Tensor:  # type: ignore[override]
        q = ops.split_heads(self.query(x), self.num_heads)
        return self.output(ops.merge_heads(memory.attend(self, q)))


def causal(rows: Tensor, columns: Tensor) -> Tensor:
    """The bool mask (T, S) of new tokens at `rows`, (T): each sees `columns`, (S), up to itself."""
    return ops.unsqueeze(columns, [0]) <= ops.unsqueeze(rows, [1])


class Seq2Seq(nn.Module):
    """The encoder and the decoder of a family, as the graphs of two files.

    `encoder(input_ids, mask)` gives (B, S, D) from tokens and a bool (B, S) that is False for
    padding. `decoder(input_ids, memory)` gives (B, T, D), and `logits` of that (B, T, vocabulary).
    """

    encoder: Any
    decoder: Any

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, T, vocabulary)."""
        raise NotImplementedError

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """The states of the source, (B, S) and its mask to (B, S, D)."""
        mask = ops.cast(attention_mask, to=ir.DataType.BOOL)
        return {"last_hidden_state": self.encoder(input_ids, mask)}

    def decode(
        self,
        input_ids: Tensor,
        encoder_hidden_states: Tensor,
        use_cache_branch: Tensor,
        encoder_attention_mask: Tensor | None = None,
        **past: Tensor,
    ) -> dict[str, Tensor]:
        """The logits of each next token, and all keys and values: see `Memory`."""
        states, mask = encoder_hidden_states, encoder_attention_mask
        memory = Memory(input_ids, states, mask, use_cache_branch, past)
        return {"logits": self.logits(self.decoder(input_ids, memory)), **memory.present}

    def cached(
        self, layers: int, heads: int, head_dim: int, features: int, length: int | None = None
    ) -> None:
        """Declare what the decoder's layers keep: (B, heads, S, head_dim) each, from features D.

        Sources may be padded, unless all have the same `length`.
        """
        source = int64["batch_size", "encoder_sequence_length"]
        # Sizes of the past have their own names: clients first give 0 for each of those names.
        cache = {
            f"{PAST}.{layer}.{side}.{kind}": float32[
                "batch_size", heads, f"past_{side}_sequence_length", head_dim
            ]
            for layer in range(layers)
            for side in ("decoder", "encoder")
            for kind in ("key", "value")
        }
        states = float32["batch_size", length or "encoder_sequence_length", features]
        decoder = {
            **({} if length else {"encoder_attention_mask": source}),
            "input_ids": int64["batch_size", "decoder_sequence_length"],
            "encoder_hidden_states": states,
            **cache,
            "use_cache_branch": bool_[1],
        }
        encoder = {"input_ids": source, "attention_mask": source}
        self._inputs = {ENCODER: encoder, DECODER: decoder}

    def graphs(self) -> dict[str, tuple[Any, dict[str, TensorSpec]]]:
        """What `build` records for each file, and its inputs."""
        parts = {ENCODER: self.encode, DECODER: self.decode}
        return {name: (part, self._inputs[name]) for name, part in parts.items()}
