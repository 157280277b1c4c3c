"""Scaled dot-product attention."""

import math
from typing import Any

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.op import Operand, composite
from graphgen.ops.elementwise import greater, logical_and, tanh, where
from graphgen.ops.layout import (
    arange,
    dim,
    expand,
    numpy_dtype,
    rank,
    reshape,
    swap_last,
    transpose,
    unsqueeze,
)
from graphgen.ops.linalg import matmul
from graphgen.ops.softmax import softmax


@composite("Attention")
def scaled_dot_product_attention(
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
    """softmax(Q Kᵀ · scale) V (Vaswani et al., arXiv 1706.03762); scale is 1/√d by default.

    Q is (B, H, T, D), K and V are (B, G, S, D) with G dividing H, or (B, T, H·D) and (B, S, G·D)
    with the numbers of heads given. A bool mask, broadcast to (B, H, T, S), keeps what is True; a
    float one is added. The causal mask keeps column ≤ row, aligned to the top left. A row with
    nothing kept gives zeros, and so do its gradients.
    """
    if flat := rank(q) == 3:
        if not q_num_heads or not kv_num_heads:
            raise GraphgenError(
                "Attention: three-dimensional operands need q_num_heads and kv_num_heads"
            )
        q, k, v = (
            split_heads(x, n) for x, n in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads))
        )
    groups = q.shape[1] // k.shape[1]
    k, v = repeat_heads(k, groups), repeat_heads(v, groups)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = matmul(q, swap_last(k)) * scale
    lowest = float(np.finfo(numpy_dtype(q)).min)
    keep = None
    if mask is not None and numpy_dtype(mask) == np.bool_:
        keep = mask
    elif mask is not None:
        scores, keep = scores + mask, greater(mask, lowest)
    if softcap:
        scores = tanh(scores / softcap) * softcap
    if is_causal:
        causal = causal_mask(dim(q, 2), dim(k, 2))
        keep = causal if keep is None else logical_and(keep, causal)
    if keep is None:
        y = matmul(softmax(scores), v)
    else:
        # Masked twice: before, so that the softmax is finite; after, so that empty rows are zero.
        weights = softmax(where(keep, scores, lowest))
        y = matmul(where(keep, weights, 0.0), v)
    return merge_heads(y) if flat else y


def attention(
    q: Operand, k: Operand, v: Operand, mask: Operand = None, **attributes: Any
) -> Operand:
    """`scaled_dot_product_attention` with the mask expanded over the last two axes.

    Kernels of ONNX Runtime refuse a mask that broadcasts there, such as (B, 1, 1, S) for padding.
    """
    if mask is not None:
        axis = 1 if rank(q) == 3 else 2
        ones: list[Any] = [1] * (rank(mask) - 2)
        if mask.shape[-2] == 1 or mask.shape[-1] == 1:
            mask = expand(mask, [*ones, dim(q, axis), dim(k, axis)])
    return scaled_dot_product_attention(q, k, v, mask, **attributes)


def causal_mask(rows: Any, columns: Any) -> Operand:
    """The bool mask column ≤ row; the sizes are ints or results of `dim`."""
    return unsqueeze(arange(rows), [1]) >= unsqueeze(arange(columns), [0])


def split_heads(x: Operand, heads: int) -> Operand:
    """(B, T, H·D) to (B, H, T, D)."""
    return transpose(
        reshape(x, [dim(x, 0), dim(x, 1), heads, x.shape[2] // heads]), perm=[0, 2, 1, 3]
    )


def merge_heads(x: Operand) -> Operand:
    """(B, H, T, D) to (B, T, H·D)."""
    b, t = dim(x, 0), dim(x, 2)
    return reshape(transpose(x, perm=[0, 2, 1, 3]), [b, t, x.shape[1] * x.shape[3]])


def repeat_heads(x: Operand, groups: int) -> Operand:
    """(B, G, S, D) to (B, G·groups, S, D): each head of keys serves `groups` heads of queries."""
    if groups == 1:
        return x
    b, heads, s, d = dim(x, 0), x.shape[1], dim(x, 2), x.shape[3]
    wide = expand(unsqueeze(x, [2]), [1, 1, groups, 1, 1])
    return reshape(wide, [b, heads * groups, s, d])
