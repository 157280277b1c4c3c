"""Scaled dot-product attention."""

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.graph import Miss, Rewrite, present_inputs
from graphgen.infer import same_dim
from graphgen.op import Operand, adopt, composite, read_attributes
from graphgen.ops.attention_layout import Scores, before_split, lowest_of, without_groups
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
    y = matmul(attention_weights(*attention_scores(q, k, mask, is_causal, scale, softcap)), v)
    return merge_heads(y) if flat else y


def attention_scores(
    q: Any, k: Any, mask: Any, is_causal: int, scale: float, softcap: float
) -> tuple[Any, Any]:
    """Q Kᵀ · scale, with a float mask added, and the bool mask that keeps, or None."""
    scores = matmul(q, swap_last(k)) * scale
    keep = None
    if mask is not None and numpy_dtype(mask) == np.bool_:
        keep = mask
    elif mask is not None:
        scores, keep = scores + mask, greater(mask, lowest_of(q))
    if softcap:
        scores = tanh(scores / softcap) * softcap
    if is_causal:
        causal = causal_mask(dim(q, 2), dim(k, 2))
        keep = causal if keep is None else logical_and(keep, causal)
    return scores, keep


def attention_weights(scores: Any, keep: Any) -> Any:
    """The softmax of the scores that are kept, 0 elsewhere; a row with nothing kept is zeros."""
    if keep is None:
        return softmax(scores)
    # Masked twice: before, so that the softmax is finite; after, so that empty rows are zero.
    return where(keep, softmax(where(keep, scores, lowest_of(scores))), 0.0)


def attention(
    q: Operand, k: Operand, v: Operand, mask: Operand = None, **attributes: Any
) -> Operand:
    """`scaled_dot_product_attention` with the mask expanded over the last two axes.

    Kernels of ONNX Runtime refuse a mask that broadcasts there, such as (B, 1, 1, S) for padding.
    """
    if mask is not None:
        axis = 1 if rank(q) == 3 else 2
        while rank(mask) < 2:
            mask = unsqueeze(mask, [0])
        if not all(map(same_dim, mask.shape[-2:], (q.shape[axis], k.shape[axis]))):
            ones: list[Any] = [1] * (rank(mask) - 2)
            mask = expand(mask, [*ones, dim(q, axis), dim(k, axis)])
    return scaled_dot_product_attention(q, k, v, mask, **attributes)


@composite("MultiHeadAttention", domain="com.microsoft")
def multi_head_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    num_heads: int,
    scale: float | None = None,
    unidirectional: int = 0,
) -> Operand:
    """Attention on (B, T, H·D) and (B, S, H·D) in older runtimes; unidirectional needs T = S."""
    heads = {"q_num_heads": num_heads, "kv_num_heads": num_heads}
    return scaled_dot_product_attention(q, k, v, scale=scale, is_causal=unidirectional, **heads)


@scaled_dot_product_attention.spelling
def _(
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
    """Without a mask: with one, a row that keeps nothing would not give zeros."""
    unequal = is_causal and not same_dim(q.shape[1], k.shape[1])
    if mask is not None or softcap or unequal or rank(q) != 3 or q_num_heads != kv_num_heads:
        return None
    return multi_head_attention(
        q, k, v, num_heads=q_num_heads, scale=scale, unidirectional=is_causal
    )


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


@scaled_dot_product_attention.recognise
def _(node: ir.Node) -> Rewrite | Miss | None:
    """Attention around a softmax, whichever way its heads, scale and mask are laid out.

    Anchored at the product with V. Factors are collected from Q, K and the scores; a mask from
    what is added to the scores or chosen by Where, before and after the softmax.
    """
    if node.op_type == "Attention":
        return _flatten(node)
    found = Scores.of(node.inputs[0])
    if found is None:
        return None
    if isinstance(found, Miss):
        return found
    q, k, v = found.q, found.k, adopt(node.inputs[1])
    ranks = [None if x.shape is None else len(x.shape) for x in (q, k, v)]
    if ranks != [4, 4, 4]:
        return Miss(f"Q, K and V have ranks {ranks}, wanted [4, 4, 4]")
    if not all(isinstance(d, int) for d in (*q.shape[1::2], *k.shape[1::2], *v.shape[1::2])):
        return Miss("the numbers of heads and features must be known before the run")
    one_k, one_v = without_groups(k), without_groups(v)
    if one_k is not None and one_v is not None and one_k.shape[1] == one_v.shape[1]:
        k, v = one_k, one_v
    elif k.shape[1] not in (1, q.shape[1]):
        return Miss(f"K has {k.shape[1]} heads where Q has {q.shape[1]}")
    if k.shape[1] != v.shape[1]:
        return Miss(f"K has {k.shape[1]} heads, V {v.shape[1]}: the operator wants as many")
    if not all(same_dim(q.shape[0], x.shape[0]) for x in (k, v)):
        return Miss(f"the batches {q.shape[0]}, {k.shape[0]} and {v.shape[0]} may differ")
    problem = found.problem()
    if problem is not None:
        return problem
    attributes: dict[str, Any] = {}
    if not math.isclose(found.scale, 1.0 / math.sqrt(q.shape[-1]), rel_tol=1e-6):
        attributes["scale"] = found.scale
    mask, causal, told = found.mask()
    if causal:
        attributes["is_causal"] = 1
    result = _emit(q, k, v, mask, attributes)
    ends = [_end(x) for x in (q, k, v)]
    groups = "" if q.shape[1] == k.shape[1] else f" in {k.shape[1]} groups"
    reason = f"{q.shape[1]} heads{groups}, {told}"
    return Rewrite(result, [*ends, *found.ends], reason, caveat=found.caveat())


def _emit(q: Operand, k: Operand, v: Operand, mask: Operand, attributes: dict[str, Any]) -> Operand:
    """Attention on (B, T, H·D) where the heads were split from it, else on (B, H, T, D)."""
    q3, k3, v3 = (before_split(x) for x in (q, k, v))
    if q3 is None or k3 is None or v3 is None:
        return attention(q, k, v, mask, **attributes)
    heads = {"q_num_heads": q.shape[1], "kv_num_heads": k.shape[1]}
    return split_heads(attention(q3, k3, v3, mask, **{**attributes, **heads}), q.shape[1])


def _flatten(node: ir.Node) -> Rewrite | None:
    """Attention on split heads as attention on (B, T, H·D), where the heads were split from it."""
    if len(node.outputs) > 1 or len(node.inputs) > 4:
        return None
    q, k, v = (adopt(x) for x in node.inputs[:3])
    if any(before_split(x) is None for x in (q, k, v)):
        return None
    mask = adopt(node.inputs[3]) if len(node.inputs) > 3 else None
    y = _emit(q, k, v, mask, read_attributes(scaled_dot_product_attention, node))
    return Rewrite(y, present_inputs(node), f"{q.shape[1]} heads, on three dimensions")


def _end(x: ir.Value) -> ir.Value:
    """Where the matched region ends on the way to Q, K or V: before recorded layout operators."""
    node = x.producer()
    while node is not None and node.graph is None and node.inputs[0] is not None:
        x = node.inputs[0]
        node = x.producer()
    return x
