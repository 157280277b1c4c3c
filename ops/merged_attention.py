"""Attention of the runtime: with projections, padding and a past inside one operator."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.op import composite
from graphgen.ops.attention import (
    attention,
    causal_mask,
    kept_by,
    merge_heads,
    repeat_heads,
    scaled_dot_product_attention,
    split_heads,
)
from graphgen.ops.elementwise import greater, logical_and, where
from graphgen.ops.layout import (
    arange,
    cast,
    concat,
    dim,
    expand,
    gather,
    lowest_of,
    numpy_dtype,
    rank,
    reshape,
    split,
    transpose,
    unsqueeze,
    with_rank,
)
from graphgen.ops.linalg import matmul
from graphgen.ops.reduce import reduce_max
from graphgen.ops.sizes import same_size_at
from graphgen.value import Tensor

_MASKED = -1e4  # what the kernels add to scores where a mask of theirs hides a key


def _with_past(inputs: Sequence[Any], at: int, outputs: int) -> int:
    return outputs if inputs[at:] and inputs[at] is not None else 1


@composite(
    "MultiHeadAttention",
    domain="com.microsoft",
    outputs=lambda inputs, attributes: _with_past(inputs, 6, 3),
)
def multi_head_attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    *,
    num_heads: int,
    scale: float | None = None,
    unidirectional: int = 0,
    mask_filter_value: float | None = None,
) -> Tensor:
    """Attention on (B, T, H·D) and (B, S, H·D) in older runtimes; unidirectional needs T = S.

    K and V may also be (B, H, S, D), one (B, S, H, 2, D), or with Q one (B, T, H, 3, D). `bias`,
    (3·H·D), is added to all three. A past, (B, H, P, D), stands before K and V, which are outputs 1
    and 2 then. `key_padding_mask` is int32: the number of keys, (B,), or what is not 0 is kept, of
    (B, S) or (B, T, S); `mask_filter_value` is added to the scores of other keys, as
    `attention_bias` is.
    """
    q, k, v = _operands(q, k, v, bias, past_key, past_value, num_heads)
    terms = [] if attention_bias is None else [attention_bias]
    if key_padding_mask is not None:
        low = _MASKED if mask_filter_value is None else mask_filter_value
        terms.append(_padding(key_padding_mask, q, k, low))
    past = 0 if past_key is None else dim(past_key, 2)
    return _attended(q, k, v, terms, past, unidirectional, num_heads, scale)


def _with_its_past(
    part: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    num_heads: int,
) -> Tensor:
    """K (1) or V (2) with the past, (B, H, P + S, D)."""
    return _on_heads(_operands(q, k, v, bias, past_key, past_value, num_heads)[part], num_heads)


for _part in (1, 2):
    multi_head_attention.output(_part)(partial(_with_its_past, _part))


def _on_heads(x: Tensor, heads: int) -> Tensor:
    return x if rank(x) == 4 else split_heads(x, heads)


def _operands(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None,
    past_key: Tensor | None,
    past_value: Tensor | None,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Q, (B, T, H·D), and K and V in the same layout, or on heads after their past."""
    if bias is not None and (k is None or v is None):
        raise GraphgenError("MultiHeadAttention: packed operands with a bias have no body")
    if k is None:
        q, k, v = _unpacked(q, 3)
    elif v is None:
        k, v = _unpacked(k, 2)
    assert v is not None
    if bias is not None:
        flat = [rank(x) == 3 for x in (q, k, v)]
        sizes = [
            x.shape[2] if f else heads * x.shape[3] for x, f in zip((q, k, v), flat, strict=True)
        ]
        biases = split(bias, sizes, axis=0, num_outputs=3)
        q, k, v = (x + b if f else x for x, b, f in zip((q, k, v), biases, flat, strict=True))
    if past_key is not None and past_value is not None:
        k = concat(past_key, _on_heads(k, heads), axis=2)
        v = concat(past_value, _on_heads(v, heads), axis=2)
    return q, k, v


def _unpacked(x: Tensor, count: int) -> list[Tensor]:
    """(B, T, H, count, D) as `count` tensors (B, T, H·D)."""
    lead, width = [dim(x, 0), dim(x, 1)], x.shape[2] * x.shape[4]
    parts = split(x, axis=3, num_outputs=count)
    return [reshape(part, [*lead, width]) for part in parts]


def _padding(mask: Tensor, x: Tensor, k: Tensor, low: float) -> Tensor:
    """`low` where an int32 mask hides a key, else 0, as a bias of the scores of x and K.

    (B,) is how many keys each row keeps, (2·B,) where they end and then where they start; of
    (B, S) and (B, T, S) what is above 0 is kept.
    """
    keep: Tensor
    if rank(mask) > 3:
        raise GraphgenError("Attention: a mask of four dimensions has no body")
    if rank(mask) == 1:
        columns = unsqueeze(arange(dim(k, 1 if rank(k) == 3 else 2)), [0])  # (1, S)
        ends, starts = mask, None
        if not same_size_at(mask, 0, x, 0):
            if mask.shape[0] != x.shape[0] * 2:
                raise GraphgenError("Attention: a mask of other lengths than the batch has no body")
            ends, starts = split(mask, axis=0, num_outputs=2)
        keep = columns < _column(ends)
        keep = keep if starts is None else logical_and(keep, columns >= _column(starts))
    else:
        keep = greater(mask, np.zeros((), numpy_dtype(mask)))
    zero = np.zeros((), numpy_dtype(x))
    return where(unsqueeze(keep, [1, 2] if rank(keep) == 2 else [1]), zero, low)


def _column(lengths: Tensor) -> Tensor:
    return unsqueeze(cast(lengths, to=ir.DataType.INT64), [1])


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Sequence[Tensor],
    past: Any,
    causal: int,
    heads: int,
    scale: float | None,
) -> Tensor:
    """Attention with the sum of `terms` as its bias; causal after `past` keys; 0 is no scale."""
    mask: Tensor | None = None
    for term in terms:
        mask = term if mask is None else mask + term
    after = not (isinstance(past, int) and past == 0)
    if causal and after:
        rows, columns = (arange(n) for n in (dim(q, 1), dim(k, 2)))
        keep: Tensor = unsqueeze(rows, [1]) + past >= unsqueeze(columns, [0])
        mask = keep if mask is None else where(keep, mask, lowest_of(q))
    given: dict[str, Any] = {"scale": scale or None, "is_causal": int(bool(causal) and not after)}
    if rank(k) == 4:
        return merge_heads(attention(split_heads(q, heads), k, v, mask, **given))
    return attention(q, k, v, mask, q_num_heads=heads, kv_num_heads=heads, **given)


@composite(
    "Attention", domain="com.microsoft", outputs=lambda inputs, attributes: _with_past(inputs, 4, 2)
)
def _merged_attention(
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    mask_index: Tensor | None = None,
    past: Tensor | None = None,
    attention_bias: Tensor | None = None,
    *,
    num_heads: int,
    qkv_hidden_sizes: Sequence[int] | None = None,
    scale: float | None = None,
    unidirectional: int = 0,
    mask_filter_value: float | None = None,
    do_rotary: int | None = None,
    past_present_share_buffer: int | None = None,
) -> Tensor:
    """Attention on the parts Q, K and V of x W + b, with x (B, T, C), W (C, 3·H·D).

    `mask_index` is int32: how many keys to keep, (B,), where they end and then where they start,
    (2·B,), or what is above 0 is kept, of (B, S) or (B, T, S); `mask_filter_value` is added to the
    scores of other keys, as `attention_bias` is. `past` is K and V, (2, B, H, P, D);
    with the new ones they are output 1. Parts of unequal width are `qkv_hidden_sizes`.
    """
    if do_rotary or past_present_share_buffer:
        raise GraphgenError("Attention: rotary positions and shared buffers have no body")
    q, k, v = _projected(x, weights, bias, past, num_heads, qkv_hidden_sizes)
    terms = [] if attention_bias is None else [attention_bias]
    held: Any = 0 if past is None else dim(past, 3)
    if mask_index is not None:
        low = _MASKED if mask_filter_value is None else mask_filter_value
        terms.append(_padding(mask_index, x, k, low))
    return _attended(q, k, v, terms, held, unidirectional, num_heads, scale)


@_merged_attention.output(1)
def _(
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    past: Tensor | None,
    num_heads: int,
    qkv_hidden_sizes: Sequence[int] | None,
) -> Tensor:
    """K and V with the past, (2, B, H, P + T, D)."""
    _, *both = _projected(x, weights, bias, past, num_heads, qkv_hidden_sizes)
    return concat(*(unsqueeze(_on_heads(part, num_heads), [0]) for part in both), axis=0)


def _projected(
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    past: Tensor | None,
    heads: int,
    sizes: Sequence[int] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The three parts of x W + b, K and V on heads if they have a past."""
    parts = matmul(x, weights)
    parts = parts if bias is None else parts + bias
    q, k, v = split(parts, None if sizes is None else list(sizes), axis=2, num_outputs=3)
    if past is not None:
        before = (gather(past, np.asarray(i), axis=0) for i in (0, 1))
        k, v = (
            concat(old, split_heads(new, heads), axis=2)
            for old, new in zip(before, (k, v), strict=True)
        )
    return q, k, v


@scaled_dot_product_attention.variant
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: int,
    kv_num_heads: int | None,
    q_num_heads: int | None,
    scale: float | None,
    softcap: float,
) -> Tensor | None:
    """MultiHeadAttention with the mask as its bias; older kernels want all four of its sizes.

    There, a row with nothing kept gives a mean of V or NaN: zeros replace it.
    """
    flat, heads = rank(q) == 3, q_num_heads or q.shape[1]
    kv_heads = kv_num_heads or k.shape[1]
    if softcap or not (isinstance(heads, int) and isinstance(kv_heads, int)):
        return None
    if kv_heads != heads:
        k, v = (split_heads(x, kv_heads) if flat else x for x in (k, v))
        k, v = (repeat_heads(x, heads // kv_heads) for x in (k, v))
    q, k, v = (merge_heads(x) if rank(x) == 4 else x for x in (q, k, v))
    b, t, s = dim(q, 0), dim(q, 1), dim(k, 1)
    keep: Tensor | None = None
    bias: Tensor | None = None
    if mask is not None:
        mask = with_rank(mask, 4)
        bias = np.zeros((), numpy_dtype(q)) if numpy_dtype(mask) == np.bool_ else mask
        keep = mask if bias is not mask else kept_by(mask, q)
    if is_causal and (keep is not None or not same_size_at(q, 1, k, 1)):
        causal = causal_mask(t, s)
        keep = causal if keep is None else logical_and(keep, causal)
        bias = np.zeros((), numpy_dtype(q)) if bias is None else bias
        is_causal = 0
    if keep is not None and bias is not None:
        bias = expand(where(keep, bias, lowest_of(q)), [b, heads, t, s])
    y = multi_head_attention(
        q, k, v, None, None, bias, num_heads=heads, scale=scale, unidirectional=is_causal
    )
    if mask is not None and keep is not None:
        # Turned as floats: WebGPU has no Transpose of bools.
        most = transpose(reduce_max(cast(keep, to=ir.DataType.FLOAT), [-1]), perm=[0, 2, 1, 3])
        y = where(greater(most, 0.0), reshape(y, [b, t, heads, v.shape[2] // heads]), 0.0)
        y = reshape(y, [b, t, v.shape[2]])
    return y if flat else split_heads(y, heads)
