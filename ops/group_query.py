"""Grouped causal attention: without the scores that are masked, and with a cache in place."""

from typing import Any

import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.op import composite
from graphgen.ops.attention import merge_heads, scaled_dot_product_attention, split_heads
from graphgen.ops.elementwise import equal, logical_and, where
from graphgen.ops.layout import arange, cast, dim, expand, gather_elements, unsqueeze
from graphgen.value import Tensor


@composite(
    "GroupQueryAttention",
    domain="com.microsoft",
    outputs=lambda inputs, attributes: 3 if inputs[3:] and inputs[3] is not None else 1,
)
def group_query_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    total_sequence_length: Tensor | None = None,
    cos_cache: Tensor | None = None,
    sin_cache: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_bias: Tensor | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    scale: float | None = None,
    local_window_size: int = -1,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention on (B, T, H·D) and (B, T, G·D), a float mask added (arXiv 2305.13245).

    `seqlens_k` is int32[B], the number of keys minus one; `total_sequence_length` is the largest
    number of keys, int32. Without a past that is T for all rows. A past is a buffer (B, G,
    capacity, D); its row b holds seqlens_k[b] + 1 - T tokens, or none if total_sequence_length is
    T. The new ones go after those, as outputs 1 and 2. Each query keeps the last
    `local_window_size` keys.
    """
    if any(x is not None for x in (cos_cache, sin_cache, position_ids)):
        raise GraphgenError("GroupQueryAttention: rotary positions have no body")
    options: dict[str, Any] = {"scale": scale, "softcap": softcap or 0.0}
    if past_key is None and local_window_size < 0:
        options |= {"q_num_heads": num_heads, "kv_num_heads": kv_num_heads, "is_causal": 1}
        return scaled_dot_product_attention(q, k, v, attention_bias, **options)
    if past_key is None or attention_bias is not None:
        raise GraphgenError("GroupQueryAttention: a window without a past, or a bias with one")
    if past_value is None or seqlens_k is None or total_sequence_length is None:
        raise GraphgenError("GroupQueryAttention: a past needs its values and both lengths")
    lengths = (seqlens_k, total_sequence_length)
    k, v = _written(past_key, k, *lengths), _written(past_value, v, *lengths)
    columns = arange(dim(k, 2))  # (C,)
    rows = unsqueeze(_held(q, *lengths), [1]) + unsqueeze(arange(dim(q, 1)), [0])  # (B, T)
    row = unsqueeze(rows, [1, 3])
    keep: Tensor = columns <= row
    if local_window_size >= 0:
        keep = logical_and(keep, columns > row - local_window_size)
    return merge_heads(
        scaled_dot_product_attention(split_heads(q, num_heads), k, v, keep, **options)
    )


def _held(x: Tensor, seqlens_k: Tensor, total_sequence_length: Tensor) -> Tensor:
    """How many tokens each row of the past holds, (B,), before the T of x come."""
    t, int64 = dim(x, 1), ir.DataType.INT64
    held = cast(seqlens_k, to=int64) + 1 - t
    return where(equal(cast(total_sequence_length, to=int64), t), 0, held)


def _written(past: Tensor, new: Tensor, seqlens_k: Tensor, total_sequence_length: Tensor) -> Tensor:
    """A buffer (B, G, C, D) with (B, T, G·D) after what each row holds."""
    held = _held(new, seqlens_k, total_sequence_length)
    places: Tensor = unsqueeze(arange(dim(past, 2)), [0]) - unsqueeze(held, [1])  # (B, C)
    inside = logical_and(places >= 0, places < dim(new, 1))
    new = split_heads(new, past.shape[1])
    places = unsqueeze(where(inside, places, 0), [1, 3])
    moved = gather_elements(new, expand(places, [1, past.shape[1], 1, past.shape[3]]), axis=2)
    return where(unsqueeze(inside, [1, 3]), moved, past)


@group_query_attention.output(1)
def _(k: Tensor, past_key: Tensor, seqlens_k: Tensor, total_sequence_length: Tensor) -> Tensor:
    """The keys with the new ones."""
    return _written(past_key, k, seqlens_k, total_sequence_length)


@group_query_attention.output(2)
def _(v: Tensor, past_value: Tensor, seqlens_k: Tensor, total_sequence_length: Tensor) -> Tensor:
    """The values with the new ones."""
    return _written(past_value, v, seqlens_k, total_sequence_length)
