"""Causal self-attention as GroupQueryAttention, with the splits of heads that it undoes."""

from typing import Any

import numpy as np

from graphgen.ops.attention import split_heads
from graphgen.ops.elementwise import where
from graphgen.ops.group_query import group_query_attention
from graphgen.ops.layout import (
    cast,
    dim,
    expand,
    gather,
    lowest_of,
    numpy_dtype,
    rank,
    with_rank,
)
from graphgen.ops.sizes import same_size_at, sizes_vector
from graphgen.recognize.axes import View
from graphgen.value import Tensor, Value


def as_group_query(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **attributes: Any
) -> Tensor | None:
    """Causal self-attention as `group_query_attention`; None if it is something else.

    `attributes` are all those of Attention.
    """
    split = rank(q) == 4
    if not attributes["is_causal"] or attributes["softcap"] or not same_size_at(q, -2, k, -2):
        return None
    heads = q.shape[1] if split else attributes["q_num_heads"]
    kv_heads = k.shape[1] if split else attributes["kv_num_heads"]
    flat = [x for x in map(_flat, (q, k, v)) if x is not None] if split else [q, k, v]
    if len(flat) < 3 or not isinstance(heads, int):
        return None
    q, k, v = flat
    if q.shape[2] % (8 * heads) or not same_size_at(k, 2, v, 2):
        return None  # the kernel wants multiples of eight features, and as many in V
    bias = mask
    if mask is not None:
        bias = with_rank(mask, 4)
        if numpy_dtype(bias) == np.bool_:
            bias = where(bias, np.zeros((), numpy_dtype(q)), lowest_of(q))
    length = cast(sizes_vector(dim(k, 1)), to=np.int32)
    lengths = expand(length - np.ones((), np.int32), [dim(q, 0)])
    given = {"num_heads": heads, "kv_num_heads": kv_heads, "scale": attributes["scale"]}
    absent = (None, None, None)
    # Of an empty batch there is no first one, which is an error; the kernel would end the process.
    longest = gather(lengths, np.array(0)) + np.ones((), np.int32)
    y = group_query_attention(q, k, v, None, None, lengths, longest, *absent, bias, **given)
    return split_heads(y, heads) if split else y


def _flat(x: Tensor) -> Tensor | None:
    """(B, H, T, D) as (B, T, H·D), from where it was split."""
    view = View.of(x) if isinstance(x, Value) else None
    if view is None or not all(isinstance(d, int) for d in x.shape[1::2]):
        return None
    b, h, t, d = view.dims
    return view.arranged([b, t, [*h, *d]])
