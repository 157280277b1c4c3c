"""Scaled dot-product attention."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from graphgen.errors import GraphgenError, user_line
from graphgen.infer import DOMAIN, describe
from graphgen.op import composite
from graphgen.ops.activation import softcap as capped
from graphgen.ops.elementwise import logical_and, logical_not, where
from graphgen.ops.layout import (
    arange,
    cast,
    concat,
    dim,
    expand,
    lowest_of,
    numpy_dtype,
    rank,
    reshape,
    slice_,
    swap_last,
    transpose,
    unsqueeze,
    with_rank,
)
from graphgen.ops.linalg import matmul
from graphgen.ops.reduce import reduce_sum
from graphgen.ops.sizes import same_size_at
from graphgen.ops.softmax import softmax
from graphgen.record import SizeLike
from graphgen.traits import Trait
from graphgen.value import Tensor, sizes_of


@composite("Attention", traits=Trait.WIDTH_AS_ZERO)
def scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """softmax(Q Kᵀ · scale) V (Vaswani et al., arXiv 1706.03762); scale is 1/√d by default.

    Q is (B, H, T, D), K and V are (B, G, S, D) with G dividing H, or (B, T, H·D) and (B, S, G·D)
    with the numbers of heads given. A bool mask, broadcast to (B, H, T, S), keeps what is True; a
    float one is added. The causal mask keeps column ≤ row, aligned to the top left. A row with
    nothing kept gives zeros, and so do its gradients.
    """
    heads = {"q_num_heads": q_num_heads, "kv_num_heads": kv_num_heads}
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "softcap": softcap, **heads}
    return attention_with_weights(q, k, v, mask, **options)[0]


def attention_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """softmax(Q Kᵀ · scale) V in simpler operators, and its weights: the softmax, (B, H, T, S).

    With `sinks`, (H,), each head may look at nothing: the softmax is over the scores and the head's
    sink, which has no value (arXiv 2508.10925, 2.2), so the weights of a row sum to less than 1.
    Other operands and options are those of `scaled_dot_product_attention`.
    """
    flat = rank(q) == 3
    q, k, v, _ = on_heads(q, k, v, q_num_heads, kv_num_heads)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores, keep = attention_scores(q, k, mask, is_causal, scale, softcap)
    if sinks is None:
        weights = attention_weights(scores, keep)
    else:
        if keep is not None:
            scores = where(keep, scores, lowest_of(scores))
        column = expand(reshape(sinks, [1, -1, 1, 1]), [dim(q, 0), 1, dim(q, 2), 1])
        weights = slice_(softmax(concat(scores, column, axis=-1)), [0], [-1], [-1])
    y = matmul(weights, v)
    return (merge_heads(y) if flat else y), weights


@composite("SinkAttention", domain=DOMAIN)
def sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """`attention_with_weights` without the weights: (B, H, T, D) or (B, T, H·D).

    It is what passes recognize of the body; no runtime has it, but GroupQueryAttention has sinks.
    """
    heads = {"q_num_heads": q_num_heads, "kv_num_heads": kv_num_heads}
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "softcap": softcap, **heads}
    return attention_with_weights(q, k, v, mask, sinks=sinks, **options)[0]


def on_heads(
    q: Tensor, k: Tensor, v: Tensor, q_num_heads: int | None, kv_num_heads: int | None
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Q, K and V as (B, H, T, D), K and V repeated, and how many heads of Q share one of theirs.

    Raises GraphgenError if the numbers of heads or features are unknown, if the batches differ, or
    if the heads of K and V do, or do not divide those of Q.
    """
    for x in (q, k, v):
        sizes = sizes_of(x)
        known = None if sizes is None else sizes[1::2] if len(sizes) == 4 else sizes[2:]
        if known is None or not all(isinstance(d, int) for d in known):
            problem = "its heads and features must be known before the run"
            raise GraphgenError(f"Attention: an operand is {describe(x)}; {problem}{user_line()}")
    try:
        expect_one_batch(x.shape[0] for x in (q, k, v))
        flat = (q_num_heads, kv_num_heads, kv_num_heads)
        expect_heads(flat if rank(q) == 3 else (x.shape[1] for x in (q, k, v)))
    except ValueError as error:
        raise GraphgenError(f"Attention: {error}{user_line()}") from error
    if rank(q) == 3:
        if not q_num_heads or not kv_num_heads:
            raise GraphgenError(
                f"Attention: three-dimensional operands need q_num_heads and kv_num_heads"
                f"{user_line()}"
            )
        q, k, v = map(split_heads, (q, k, v), (q_num_heads, kv_num_heads, kv_num_heads))
    groups = q.shape[1] // k.shape[1]
    return q, repeat_heads(k, groups), repeat_heads(v, groups), groups


def expect_one_batch(batches: Iterable[Any]) -> None:
    """Raise ValueError if Q, K and V have different batches: the kernels do not broadcast them."""
    known = [n for n in batches if isinstance(n, int)]
    if len(set(known)) > 1:
        given = " and ".join(map(str, dict.fromkeys(known)))
        raise ValueError(f"Q, K and V have batches of {given}; make them equal, as by ops.expand")


def expect_heads(numbers: Iterable[Any]) -> None:
    """Raise ValueError if K and V differ in their numbers of heads, or Q's are no multiple."""
    q, k, v = numbers
    if all(isinstance(n, int) for n in (q, k, v)) and (k != v or not k or q % k):
        raise ValueError(
            f"Q has {q} heads, K {k} and V {v}; K and V must have the same number, and Q a "
            "multiple of it"
        )


def attention_scores(
    q: Tensor, k: Tensor, mask: Tensor | None, is_causal: int, scale: float, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """Q Kᵀ · scale, capped, with a float mask added, and the bool mask that keeps, or None."""
    scores = matmul(q * scale, swap_last(k))
    keep = None
    if softcap:
        scores = capped(scores, softcap)
    if mask is not None and numpy_dtype(mask) == np.bool_:
        keep = mask
    elif mask is not None:
        scores, keep = scores + mask, kept_by(mask, q)
    if is_causal:
        causal = causal_mask(dim(q, 2), dim(k, 2))
        if keep is None:  # each row keeps a column: it needs no guard
            return scores + where(causal, np.zeros((), numpy_dtype(q)), -math.inf), None
        keep = logical_and(keep, causal)
    return scores, keep


def kept_by(mask: Tensor, q: Tensor) -> Tensor:
    """What a float mask keeps: all above the lowest number, and NaN, which must stay visible."""
    return logical_not(mask <= lowest_of(q))


def attention_weights(scores: Tensor, keep: Tensor | None) -> Tensor:
    """The softmax of the kept scores, 0 elsewhere; a row with nothing kept is zeros."""
    if keep is None:
        return softmax(scores)
    # Masked twice: before, so that the softmax is finite; after, so that empty rows are zero.
    return where(keep, softmax(where(keep, scores, lowest_of(scores))), 0.0)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """softmax(Q Kᵀ · scale) V, as `scaled_dot_product_attention`, with a mask of any sizes.

    A mask that broadcasts over the last two axes, such as (B, 1, 1, S) for padding, is expanded:
    kernels of ONNX Runtime refuse it.
    """
    if mask is not None:
        axis = 1 if rank(q) == 3 else 2
        mask = with_rank(mask, 2)
        if not all(same_size_at(mask, i - 2, x, axis) for i, x in enumerate((q, k))):
            ones: list[Any] = [1] * (rank(mask) - 2)
            mask = expand(mask, [*ones, dim(q, axis), dim(k, axis)])
    return scaled_dot_product_attention(
        q,
        k,
        v,
        mask,
        is_causal=is_causal,
        kv_num_heads=kv_num_heads,
        q_num_heads=q_num_heads,
        scale=scale,
        softcap=softcap,
    )


@scaled_dot_product_attention.variant
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **attributes: Any) -> Tensor | None:
    """The mask expanded, for kernels that do not broadcast it."""
    return None if mask is None else attention(q, k, v, mask, **attributes)


def causal_mask(rows: SizeLike, columns: SizeLike) -> Tensor:
    """The bool mask column ≤ row; the sizes are ints or results of `dim`."""
    return unsqueeze(arange(rows), [1]) >= unsqueeze(arange(columns), [0])


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, H·D) to (B, H, T, D)."""
    if x.shape is None or len(x.shape) != 3:
        raise GraphgenError(f"split_heads: x is {describe(x)}; it must be (batch, seq, features)")
    return transpose(
        reshape(x, [dim(x, 0), dim(x, 1), heads, x.shape[2] // heads]), perm=[0, 2, 1, 3]
    )


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, T, D) to (B, T, H·D)."""
    b, t = dim(x, 0), dim(x, 2)
    return reshape(transpose(x, perm=[0, 2, 1, 3]), [b, t, x.shape[1] * x.shape[3]])


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    """(B, G, S, D) to (B, G·groups, S, D): each head of keys serves `groups` heads of queries."""
    if groups == 1:
        return x
    b, heads, s, d = dim(x, 0), x.shape[1], dim(x, 2), x.shape[3]
    wide = expand(unsqueeze(x, [2]), [1, 1, groups, 1, 1])
    return reshape(wide, [b, heads * groups, s, d])


@scaled_dot_product_attention.vjp
def _(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: int,
    kv_num_heads: int | None,
    q_num_heads: int | None,
    scale: float | None,
    softcap: float,
) -> tuple[Tensor, ...]:
    """dV = Pᵀ G, dP = G Vᵀ, dS = P ⊙ (dP - Σ P ⊙ dP), dQ = scale dS K, dK = scale dSᵀ Q.

    dV and dK are transposed results, Gᵀ P and scale Qᵀ dS: the narrow operand is turned. The
    weights P, 0 where masked, and scale Q are computed as in the forward pass, so a pass for common
    subexpressions shares them.
    """
    flat = rank(q) == 3
    q, k, v, groups = on_heads(q, k, v, q_num_heads, kv_num_heads)
    g = split_heads(g, q.shape[1]) if flat else g
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores, keep = attention_scores(q, k, mask, is_causal, scale, softcap)
    p = attention_weights(scores, keep)
    dv = matmul(swap_last(g), p)
    dp = matmul(g, swap_last(v))
    ds = p * (dp - reduce_sum(p * dp, [-1]))
    dmask = ds
    if softcap:
        ratio = attention_scores(q, k, None, 0, scale, softcap)[0] / softcap
        ds = ds * (1.0 - ratio * ratio)
    dq: Tensor = matmul(ds, k) * scale
    dk = matmul(swap_last(q * scale), ds)
    dk, dv = (swap_last(_sum_groups(x, groups)) for x in (dk, dv))
    if flat:
        dq, dk, dv = merge_heads(dq), merge_heads(dk), merge_heads(dv)
    return dq, dk, dv, dmask


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    """(B, G·groups, D, S) to (B, G, D, S): the gradient of `repeat_heads`, transposed."""
    if groups == 1:
        return x
    wide = reshape(x, [dim(x, 0), x.shape[1] // groups, groups, dim(x, 2), dim(x, 3)])
    return reduce_sum(wide, [2], keepdims=0)


def cached_mask(attention_mask: Tensor, length: Any, *, window: int | None = None) -> Tensor:
    """The bool mask (B, 1, T, S) of the last T of S tokens; 0 in `attention_mask` is padding.

    Row t sees column s if s ≤ t + (S - T) and, with a window W, s > t + (S - T) - W (Mistral,
    arXiv 2310.06825), and the token there is not padding.
    """
    total = dim(attention_mask, 1)
    columns: Tensor = unsqueeze(arange(total), [0])  # (1, S)
    rows = unsqueeze(arange(length), [1]) + (total - length)  # (T, 1)
    keep: Tensor = columns <= rows
    if window is not None:
        keep = logical_and(keep, columns > rows - window)
    padding = cast(attention_mask, to=np.bool_)
    return logical_and(unsqueeze(keep, [0, 1]), unsqueeze(padding, [1, 2]))
