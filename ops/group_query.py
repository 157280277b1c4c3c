"""Grouped causal attention, which ONNX Runtime computes without the scores that are masked."""

from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.infer import same_dim
from graphgen.op import Operand, composite
from graphgen.ops.attention import lowest_of, scaled_dot_product_attention, split_heads
from graphgen.ops.axes import View
from graphgen.ops.elementwise import where
from graphgen.ops.layout import cast, dim, expand, numpy_dtype, rank, reshape, with_rank


@composite("GroupQueryAttention", domain="com.microsoft")
def group_query_attention(
    q: Any,
    k: Any,
    v: Any,
    past_key: Any = None,
    past_value: Any = None,
    seqlens_k: Any = None,
    total_sequence_length: Any = None,
    cos_cache: Any = None,
    sin_cache: Any = None,
    position_ids: Any = None,
    attention_bias: Any = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    scale: float | None = None,
) -> Operand:
    """Causal attention on (B, T, H·D) and (B, T, G·D), a float mask added (arXiv 2305.13245).

    `seqlens_k` is int32[B], the number of keys less one, `total_sequence_length` the int32 T.
    """
    if any(x is not None for x in (past_key, past_value, cos_cache, sin_cache, position_ids)):
        raise GraphgenError("GroupQueryAttention: a past and rotary positions have no body")
    heads = {"q_num_heads": num_heads, "kv_num_heads": kv_num_heads}
    return scaled_dot_product_attention(q, k, v, attention_bias, is_causal=1, scale=scale, **heads)


def as_group_query(q: Any, k: Any, v: Any, mask: Any = None, **attributes: Any) -> Operand:
    """Causal self-attention by `group_query_attention`; None where it is something else.

    `attributes` are all those of Attention.
    """
    split = rank(q) == 4
    if (
        not attributes["is_causal"]
        or attributes["softcap"]
        or not same_dim(q.shape[-2], k.shape[-2])
    ):
        return None
    heads = q.shape[1] if split else attributes["q_num_heads"]
    kv_heads = k.shape[1] if split else attributes["kv_num_heads"]
    q, k, v = (_flat(x) if split else x for x in (q, k, v))
    if q is None or k is None or v is None or not isinstance(heads, int):
        return None
    if q.shape[2] % (8 * heads) or k.shape[2] != v.shape[2]:
        return None  # the kernel wants features in eights, as many in V
    bias = mask
    if mask is not None:
        bias = with_rank(bias, 4)
        if numpy_dtype(bias) == np.bool_:
            bias = where(bias, np.zeros((), numpy_dtype(q)), lowest_of(q))
    length = cast(np.asarray([n]) if isinstance(n := dim(k, 1), int) else n, to=ir.DataType.INT32)
    lengths = expand(length - np.ones((), np.int32), [dim(q, 0)])
    given = {"num_heads": heads, "kv_num_heads": kv_heads, "scale": attributes["scale"]}
    absent = (None, None, None)
    y = group_query_attention(
        q, k, v, None, None, lengths, reshape(length, []), *absent, bias, **given
    )
    return split_heads(y, heads) if split else y


def _flat(x: Any) -> Operand | None:
    """(B, H, T, D) as (B, T, H·D), from where it was split."""
    view = View.of(x)
    if view is None or not all(isinstance(d, int) for d in x.shape[1::2]):
        return None
    b, h, t, d = view.dims
    return view.arranged([b, t, [*h, *d]])
