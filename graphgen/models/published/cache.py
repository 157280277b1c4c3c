"""Keys and values of earlier calls, as inputs and outputs of a decoder."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from graphgen import nn, ops
from graphgen.nn.module import TensorSpec, float32, int64
from graphgen.operands import Array
from graphgen.value import Tensor

PAST, PRESENT = "past_key_values", "present"

LAST, SUMMED, SPACE = "conv", "recurrent", "ssm"
"""What a layer without keys keeps: the last tokens, or a sum over all, by either name.

Of weights with few digits, too, the sum is in float32.
"""


class Cache:
    """The cache of a decoder: what each layer keeps of the tokens before.

    `past` holds the inputs past_key_values.N.key and .value, (B, G, P, D) each, of the layers N
    with attention, and past_conv.N and such, of a fixed size, of others; `present` then holds the
    outputs present.N.key and .value, (B, G, P + T, D), and present_conv.N.
    """

    def __init__(self, past: Mapping[str, Tensor]):
        self._past = past
        self.present: dict[str, Tensor] = {}

    def of(self, layer: int) -> "LayerCache":
        """The part of a layer."""
        return LayerCache(self._past, self.present, layer)


class LayerCache(NamedTuple):
    """The cache of one layer."""

    past: Mapping[str, Tensor]
    present: dict[str, Tensor]
    layer: int

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, G, T, D) to those of earlier tokens: (B, G, P + T, D)."""
        names = [f"{self.layer}.{kind}" for kind in ("key", "value")]
        for name, new in zip(names, (key, value), strict=True):
            joined = ops.concat(self.past[f"{PAST}.{name}"], new, axis=2)
            self.present[f"{PRESENT}.{name}"] = joined
        first, second = (self.present[f"{PRESENT}.{name}"] for name in names)
        return first, second

    def state(self, kind: str) -> Tensor:
        """A state after the tokens before, `LAST` or another."""
        return self.past[f"past_{kind}.{self.layer}"]

    def keep(self, kind: str, state: Tensor) -> None:
        """Hand a state to the tokens behind."""
        self.present[f"{PRESENT}_{kind}.{self.layer}"] = state


class Stateful(nn.Module):
    """What stands in the place of an attention, and keeps states of a fixed size instead of keys.

    `states` has the shape of each, without the rows. It is called as an attention is; its mask is
    (B, T, 1), 0 for padding, and its cache a `LayerCache`.
    """

    states: Mapping[str, tuple[int, ...]]


def token_inputs(*more: str) -> dict[str, TensorSpec]:
    """input_ids and further integers for each token, and the mask of all tokens so far."""
    tokens = int64["batch_size", "sequence_length"]
    mask = int64["batch_size", "past_sequence_length + sequence_length"]
    return {"input_ids": tokens, "attention_mask": mask, **dict.fromkeys(more, tokens)}


def cache_inputs(attentions: Iterable["nn.Attention | Stateful"]) -> dict[str, TensorSpec]:
    """The inputs of a cache, in the order of its outputs."""
    found = dict[str, TensorSpec]()
    for layer, of in enumerate(attentions):
        if isinstance(of, Stateful):
            found |= {
                f"past_{kind}.{layer}": float32["batch_size", *shape]
                for kind, shape in of.states.items()
            }
            continue
        shape = float32["batch_size", of.kv_heads, "past_sequence_length", of.head_dim]
        found |= {f"{PAST}.{layer}.{kind}": shape for kind in ("key", "value")}
    return found


def in_dtype(inputs: Mapping[str, TensorSpec], dtype: ir.DataType) -> dict[str, Any]:
    """The inputs; keys, values and states from an earlier call have the dtype of the weights.

    So does what an encoder gives; sums over all tokens stay in float32.
    """
    given = (PAST, f"past_{LAST}", "encoder_hidden_states")
    return {n: TensorSpec(dtype, s.shape) if n.startswith(given) else s for n, s in inputs.items()}


def own_mask(attention_mask: Tensor, length: Tensor | int) -> Tensor:
    """The mask of the last `length` tokens alone, (B, T, 1), of that of all so far, (B, S)."""
    places = ops.arange(length) + (ops.dim(attention_mask, 1) - length)
    return ops.unsqueeze(ops.gather(attention_mask, places, axis=1), [2])


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
