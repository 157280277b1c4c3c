"""Grouped causal attention: without the scores that are masked, and with a cache in place."""

from typing import Any, NamedTuple

import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.op import composite
from graphgen.ops.attention import (
    attention,
    merge_heads,
    scaled_dot_product_attention,
    sink_attention,
    split_heads,
)
from graphgen.ops.elementwise import clip, equal, logical_and, round as to_nearest, where
from graphgen.ops.layout import (
    arange,
    cast,
    cast_like,
    dim,
    expand,
    gather_elements,
    split,
    unsqueeze,
)
from graphgen.ops.rotary import rotary_embedding
from graphgen.value import Tensor


@composite(
    "GroupQueryAttention",
    domain="com.microsoft",
    outputs=lambda inputs, attributes: 3 if inputs[3:] and inputs[3] is not None else 1,
)
def group_query_attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    total_sequence_length: Tensor | None = None,
    cos_cache: Tensor | None = None,
    sin_cache: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_bias: Tensor | None = None,
    head_sink: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    scale: float | None = None,
    local_window_size: int = -1,
    softcap: float | None = None,
    do_rotary: int | None = None,
    rotary_interleaved: int | None = None,
    smooth_softmax: int = -1,
    k_quant_type: str = "NONE",
    v_quant_type: str = "NONE",
    kv_cache_bit_width: int | None = None,
) -> Tensor:
    """Causal attention on (B, T, H·D) and (B, T, G·D), a float mask added (arXiv 2305.13245).

    Q may also be all three, (B, T, (H + 2·G)·D). `seqlens_k` is int32[B], the number of keys minus
    one; `total_sequence_length` is the largest number of keys, int32. Without a past that is T for
    all rows. A past is a buffer (B, G, capacity, D); its row b holds seqlens_k[b] + 1 - T tokens,
    or none if total_sequence_length is T. The new ones go after those, as outputs 1 and 2. Each
    query keeps the last `local_window_size` keys, and has its head's sink, of `head_sink` (H,), if
    these are given: see `attention_with_weights`. With `do_rotary`, Q and K are turned first by the
    rows of the caches, (P, R/2), at these places. Buffers of int8 hold round(x / scale), at most
    ±127 (-128 below), and the scales have one element, or are (1, G, 1, D).
    """
    if kv_cache_bit_width not in (None, 0, 8):
        raise GraphgenError("GroupQueryAttention: a cache of four bits has no body")
    if position_ids is not None or smooth_softmax > 0:
        raise GraphgenError("GroupQueryAttention: positions and smooth softmax have no body")
    lengths = (seqlens_k, total_sequence_length)
    q, k, v = _apart(q, k, v, num_heads, kv_num_heads)
    if do_rotary:
        how = _Turn(cos_cache, sin_cache, _places(q, past_key, *lengths), rotary_interleaved or 0)
        q, k = how.of(q, num_heads), how.of(k, kv_num_heads)
    options: dict[str, Any] = {"scale": scale or None, "softcap": softcap or 0.0}
    if past_key is None and local_window_size < 0:
        options |= {"q_num_heads": num_heads, "kv_num_heads": kv_num_heads, "is_causal": 1}
        if head_sink is not None:
            return sink_attention(q, k, v, head_sink, attention_bias, **options)
        return scaled_dot_product_attention(q, k, v, attention_bias, **options)
    if attention_bias is not None:
        raise GraphgenError("GroupQueryAttention: a bias with a past or a window has no body")
    k = _meant(_written(past_key, k, *lengths, kv_num_heads, k_scale), k_scale)
    v = _meant(_written(past_value, v, *lengths, kv_num_heads, v_scale), v_scale)
    columns = arange(dim(k, 2))  # (C,)
    row = unsqueeze(_places(q, past_key, *lengths), [1, 3])  # (B or 1, 1, T, 1)
    keep: Tensor = columns <= row
    if local_window_size >= 0:
        keep = logical_and(keep, columns > row - local_window_size)
    q = split_heads(q, num_heads)
    if head_sink is not None:
        return merge_heads(sink_attention(q, k, v, head_sink, keep, **options))
    return merge_heads(attention(q, k, v, keep, **options))


def _apart(
    q: Tensor, k: Tensor | None, v: Tensor | None, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V, which may be packed in Q."""
    if k is not None and v is not None:
        return q, k, v
    width = q.shape[2] // (heads + 2 * kv_heads)
    q, k, v = split(q, [heads * width, *[kv_heads * width] * 2], axis=2, num_outputs=3)
    return q, k, v


class _Turn(NamedTuple):
    """Rotary positions: the caches, (P, R/2), and the places, (B or 1, T)."""

    cos: Tensor | None
    sin: Tensor | None
    places: Tensor
    interleaved: int

    def of(self, x: Tensor, heads: int) -> Tensor:
        """x, (B, T, heads·D), turned."""
        if self.cos is None or self.sin is None:
            raise GraphgenError("GroupQueryAttention: rotary positions need both caches")
        turned = 2 * self.cos.shape[-1]
        return rotary_embedding(
            x,
            self.cos,
            self.sin,
            expand(self.places, [dim(x, 0), 1]),
            interleaved=self.interleaved,
            num_heads=heads,
            rotary_embedding_dim=turned if turned < x.shape[2] // heads else 0,
        )


def _places(
    q: Tensor,
    past: Tensor | None,
    seqlens_k: Tensor | None,
    total_sequence_length: Tensor | None,
) -> Tensor:
    """The place of each query in its row, (B, T), or (1, T) without a past."""
    new = unsqueeze(arange(dim(q, 1)), [0])
    if past is None:
        return new
    return unsqueeze(_held(q, seqlens_k, total_sequence_length), [1]) + new


def _held(x: Tensor, seqlens_k: Tensor | None, total_sequence_length: Tensor | None) -> Tensor:
    """How many tokens each row of the past holds, (B,), before the T of x come."""
    if seqlens_k is None or total_sequence_length is None:
        raise GraphgenError("GroupQueryAttention: a past needs both lengths")
    t, int64 = dim(x, 1), ir.DataType.INT64
    held = cast(seqlens_k, to=int64) + 1 - t
    return where(equal(cast(total_sequence_length, to=int64), t), 0, held)


def _written(
    past: Tensor | None,
    new: Tensor,
    seqlens_k: Tensor | None,
    total_sequence_length: Tensor | None,
    heads: int,
    scale: Tensor | None,
) -> Tensor:
    """A buffer (B, G, C, D) with (B, T, G·D) after what each row holds, or these alone."""
    split_new = split_heads(new, heads)
    if scale is not None:
        rounded = clip(to_nearest(split_new / scale), -128.0, 127.0)
        split_new = cast(rounded, to=ir.DataType.INT8)
    if past is None:
        return split_new
    held = _held(new, seqlens_k, total_sequence_length)
    places: Tensor = unsqueeze(arange(dim(past, 2)), [0]) - unsqueeze(held, [1])  # (B, C)
    inside = logical_and(places >= 0, places < dim(new, 1))
    places = unsqueeze(where(inside, places, 0), [1, 3])
    moved = gather_elements(split_new, expand(places, [1, heads, 1, past.shape[3]]), axis=2)
    return where(unsqueeze(inside, [1, 3]), moved, past)


def _meant(buffer: Tensor, scale: Tensor | None) -> Tensor:
    """What a buffer of integers stands for."""
    return buffer if scale is None else cast_like(buffer, scale) * scale


@group_query_attention.output(1)
def _(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    past_key: Tensor | None,
    seqlens_k: Tensor | None,
    total_sequence_length: Tensor | None,
    cos_cache: Tensor | None,
    sin_cache: Tensor | None,
    k_scale: Tensor | None,
    num_heads: int,
    kv_num_heads: int,
    do_rotary: int | None,
    rotary_interleaved: int | None,
) -> Tensor:
    """The keys with the new ones."""
    lengths = (seqlens_k, total_sequence_length)
    q, k, v = _apart(q, k, v, num_heads, kv_num_heads)
    if do_rotary:
        places = _places(q, past_key, *lengths)
        k = _Turn(cos_cache, sin_cache, places, rotary_interleaved or 0).of(k, kv_num_heads)
    return _written(past_key, k, *lengths, kv_num_heads, k_scale)


@group_query_attention.output(2)
def _(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    past_value: Tensor | None,
    seqlens_k: Tensor | None,
    total_sequence_length: Tensor | None,
    v_scale: Tensor | None,
    num_heads: int,
    kv_num_heads: int,
) -> Tensor:
    """The values with the new ones."""
    v = _apart(q, k, v, num_heads, kv_num_heads)[2]
    return _written(past_value, v, seqlens_k, total_sequence_length, kv_num_heads, v_scale)
