"""Keys and values of earlier calls, as inputs and outputs of a decoder."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.nn.module import TensorSpec, float32, int64
from graphgen.operands import Array
from graphgen.value import Tensor

PAST, PRESENT = "past_key_values", "present"


class Cache:
    """The cache of a decoder: each layer in turn appends its keys and values to those it has.

    `past` holds the inputs past_key_values.N.key and .value, (B, G, P, D) each, for N = 0, 1 ...;
    `present` then holds the outputs present.N.key and .value, (B, G, P + T, D).
    """

    def __init__(self, past: Mapping[str, Tensor]):
        self._past = past
        self._layers = iter(range(len(past)))
        self.present: dict[str, Tensor] = {}

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, G, T, D) to the past of the next layer: (B, G, P + T, D)."""
        layer = next(self._layers)
        both = {f"{layer}.key": key, f"{layer}.value": value}
        for name, new in both.items():
            self.present[f"{PRESENT}.{name}"] = ops.concat(
                self._past[f"{PAST}.{name}"], new, axis=2
            )
        first, second = (self.present[f"{PRESENT}.{name}"] for name in both)
        return first, second


def token_inputs(*more: str) -> dict[str, TensorSpec]:
    """input_ids and further integers for each token, and the mask of all tokens so far."""
    tokens = int64["batch_size", "sequence_length"]
    mask = int64["batch_size", "past_sequence_length + sequence_length"]
    return {"input_ids": tokens, "attention_mask": mask, **dict.fromkeys(more, tokens)}


def cache_inputs(layers: int, kv_heads: int, head_dim: int) -> dict[str, TensorSpec]:
    """The inputs of a cache, in the order of its outputs."""
    shape = float32["batch_size", kv_heads, "past_sequence_length", head_dim]
    return {f"{PAST}.{layer}.{kind}": shape for layer in range(layers) for kind in ("key", "value")}


def in_dtype(inputs: Mapping[str, TensorSpec], dtype: ir.DataType) -> dict[str, Any]:
    """The inputs; keys, values and states from an earlier call have the dtype of the weights."""
    given = (PAST, "encoder_hidden_states")
    return {n: TensorSpec(dtype, s.shape) if n.startswith(given) else s for n, s in inputs.items()}


def near_mask(attention_mask: Tensor, *, window: int | None) -> Tensor:
    """The bool mask of tokens that see those on both sides, at most `window` away if it is given.

    It is (B, 1, 1, S), or (B, 1, S, S) with a window; 0 in `attention_mask`, (B, S), is padding.
    """
    kept = ops.unsqueeze(ops.cast(attention_mask, to=ir.DataType.BOOL), [1, 2])
    if window is None:
        return kept
    places = ops.arange(ops.dim(attention_mask, 1))
    apart = ops.abs(ops.unsqueeze(places, [1]) - ops.unsqueeze(places, [0]))
    return ops.logical_and(kept, ops.unsqueeze(apart <= window, [0, 1]))


def places_bias(attention_mask: Tensor, slopes: Array, *, rounded: bool) -> Tensor:
    """Slope times the place of each key among those that are no padding, float32 (B, H, 1, S).

    Scores need only the differences of places: adding m · s instead of -m · (t - s) changes all
    scores of a row by the same. `rounded` slopes and products are those of bfloat16.
    """
    places = ops.unsqueeze(places_of(attention_mask, ir.DataType.FLOAT), [1, 2])  # (B, 1, 1, S)
    rates = slopes.reshape(1, -1, 1, 1)
    if not rounded:
        return places * rates
    half = ir.DataType.BFLOAT16
    rates = rates.astype(half.numpy()).astype(np.float32)
    return ops.cast(ops.cast(places * rates, to=half), to=ir.DataType.FLOAT)


def places_of(attention_mask: Tensor, dtype: ir.DataType) -> Tensor:
    """The place of each token among those that are no padding, (B, S); 0 for padding."""
    mask = ops.cast(attention_mask, to=dtype)
    return (ops.cumsum(mask, 1) - 1) * mask
