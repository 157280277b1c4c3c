"""The gradient of scaled dot-product attention, by hand: few passes over the (T, S) weights."""

import math
from typing import Any

from graphgen.op import Operand
from graphgen.ops.attention import (
    attention_scores,
    attention_weights,
    merge_heads,
    on_heads,
    scaled_dot_product_attention,
    split_heads,
)
from graphgen.ops.layout import dim, rank, reshape, swap_last
from graphgen.ops.linalg import matmul
from graphgen.ops.reduce import reduce_sum


@scaled_dot_product_attention.vjp
def _(
    g: Any,
    y: Any,
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Operand:
    """dV = Pᵀ G, dP = G Vᵀ, dS = P ⊙ (dP - Σ P ⊙ dP), dQ = scale dS K, dK = scale dSᵀ Q.

    The weights P, 0 where masked, and scale Q are spelled as in the forward pass, so that a pass
    for common subexpressions shares them.
    """
    flat = rank(q) == 3
    q, k, v, groups = on_heads(q, k, v, q_num_heads, kv_num_heads)
    g = split_heads(g, q.shape[1]) if flat else g
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores, keep = attention_scores(q, k, mask, is_causal, scale, softcap)
    p = attention_weights(scores, keep)
    dv = matmul(swap_last(p), g)
    dp = matmul(g, swap_last(v))
    ds = p * (dp - reduce_sum(p * dp, [-1]))
    dmask = ds
    if softcap:
        ratio = attention_scores(q, k, None, 0, scale, softcap)[0] / softcap
        ds = ds * (1.0 - ratio * ratio)
    dq = matmul(ds, k) * scale
    dk = matmul(swap_last(ds), q * scale)
    dk, dv = (_sum_groups(x, groups) for x in (dk, dv))
    if flat:
        dq, dk, dv = merge_heads(dq), merge_heads(dk), merge_heads(dv)
    return dq, dk, dv, dmask


def _sum_groups(x: Any, groups: int) -> Operand:
    """(B, G·groups, S, D) to (B, G, S, D): the gradient of `repeat_heads`."""
    if groups == 1:
        return x
    wide = reshape(x, [dim(x, 0), x.shape[1] // groups, groups, dim(x, 2), x.shape[3]])
    return reduce_sum(wide, [2], keepdims=0)
