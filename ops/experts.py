"""Feed-forwards of which each row uses a few, as the one operator that runtimes have."""

from typing import Any, TypeAlias

from graphgen.errors import GraphgenError, user_line
from graphgen.op import composite
from graphgen.ops.activation import relu
from graphgen.ops.elementwise import clip, sigmoid
from graphgen.ops.embedding import one_hot
from graphgen.ops.layout import (
    arange,
    cast_like,
    dim,
    gather,
    reshape,
    slice_,
    swap_last,
    transpose,
    unsqueeze,
)
from graphgen.ops.linalg import matmul
from graphgen.ops.quantized import gather_block_quantized
from graphgen.ops.reduce import reduce_sum, top_k
from graphgen.ops.softmax import softmax
from graphgen.traits import Trait
from graphgen.value import Tensor


@composite("MoE", domain="com.microsoft")
def mixture_of_experts(
    x: Tensor,
    scores: Tensor,
    inner: Tensor,
    inner_bias: Tensor | None,
    outer: Tensor,
    outer_bias: Tensor | None = None,
    *,
    k: int = 1,
    activation_type: str = "relu",
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    swiglu_fusion: int = 0,
    swiglu_limit: float | None = None,
    normalize_routing_weights: int = 0,
) -> Tensor:
    """Σ p_e f_e(x) over the k experts e with the largest scores, (N, D) (arXiv 2401.04088, 2.1).

    x is (N, D), the scores (N, E) and p their softmax, renormalized over the chosen if
    `normalize_routing_weights`. f_e(x) is W₂ (g σ(α g) (u + β)), where rows of W₁ x + b make g and
    u in turn; g is at most `swiglu_limit`, and |u| too. W₁ is `inner`, (E, 2 H, D), and W₂ `outer`,
    (E, D, H). Only the activation swiglu of swiglu_fusion 1 has a body, in which all experts
    compute.
    """
    _expect_swiglu("MoE", activation_type, swiglu_fusion)
    p = _of_chosen(softmax(scores), scores, inner.shape[0], k, normalize_routing_weights)
    how = (activation_alpha, activation_beta, swiglu_limit)
    return _weighted(x, p, (inner, inner_bias), (outer, outer_bias), *how)


def _expect_swiglu(name: str, activation_type: str, swiglu_fusion: int) -> None:
    if activation_type != "swiglu" or swiglu_fusion != 1:
        problem = "only swiglu with swiglu_fusion=1 has a body"
        raise GraphgenError(f"{name}(activation_type={activation_type!r}): {problem}{user_line()}")


def _of_chosen(p: Tensor, scores: Tensor, count: int, k: int, normalized: int) -> Tensor:
    """p (N, E) of the k experts with the largest scores, 0 of others.

    Of equal scores these are the last, as in onnxruntime's kernels; TopK alone takes the first.
    """
    _, from_last = top_k(slice_(scores, [-1], [-(2**63)], [1], [-1]), [k])  # (N, k)
    chosen = one_hot(count - 1 - from_last, count)
    p = p * cast_like(reduce_sum(chosen, [1], keepdims=0), p)
    return p / reduce_sum(p, [1]) if normalized else p


_Affine: TypeAlias = tuple[Tensor, Tensor | None]


def _weighted(
    x: Tensor, p: Tensor, inner: _Affine, outer: _Affine, alpha: float, beta: float, limit: Any
) -> Tensor:
    """Σ p_e f_e(x); all experts compute."""
    h = matmul(unsqueeze(x, [0]), swap_last(inner[0]))  # (E, N, 2 H)
    if inner[1] is not None:
        h = h + unsqueeze(inner[1], [1])
    pairs = reshape(h, [*(dim(h, i) for i in range(2)), -1, 2])
    gate, up = (gather(pairs, i, axis=3) for i in (0, 1))
    if limit is not None:
        gate, up = clip(gate, None, limit), clip(up, -limit, limit)
    h = gate * sigmoid(gate * alpha) * (up + beta)  # (E, N, H)
    y = matmul(h, swap_last(outer[0]))
    if outer[1] is not None:
        y = y + unsqueeze(outer[1], [1])
    shares = unsqueeze(transpose(p, perm=[1, 0]), [2])  # (E, N, 1)
    return reduce_sum(y * shares, [0], keepdims=0)


@composite("QMoE", domain="com.microsoft", traits=Trait.QUANTIZED)
def quantized_experts(
    x: Tensor,
    scores: Tensor,
    inner: Tensor,
    inner_scales: Tensor,
    inner_bias: Tensor | None,
    outer: Tensor,
    outer_scales: Tensor,
    outer_bias: Tensor | None = None,
    third: Tensor | None = None,
    third_scales: Tensor | None = None,
    third_bias: Tensor | None = None,
    inner_zeros: Tensor | None = None,
    outer_zeros: Tensor | None = None,
    third_zeros: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    k: int = 1,
    activation_type: str = "relu",
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    swiglu_fusion: int = 0,
    swiglu_limit: float | None = None,
    normalize_routing_weights: int = 0,
    expert_weight_bits: int = 4,
    block_size: int | None = None,
    accuracy_level: int = 0,
) -> Tensor:
    """`mixture_of_experts` with weights in blocks of integers along their last axis.

    `inner` is (E, 2 H, D · bits / 8) and `outer` (E, D, H · bits / 8), uint8, packed as in
    `matmul_nbits`; scales are (E, rows, blocks), and zero points are packed, too, 2^(bits - 1) by
    default. accuracy_level lets a kernel round what the products read, at 4 to int8 in blocks.

    p is of `weights`, (N, E), if given; an expert whose share is negative is left out. Without,
    this has to be `normalize_routing_weights`: the kernel of the CPU normalizes in any case
    (onnxruntime 1.32).

    Raises GraphgenError for weights of a third product, and for scales of whole rows.
    """
    _expect_swiglu("QMoE", activation_type, swiglu_fusion)
    thirds = (third, third_scales, third_bias, third_zeros)
    if any(part is not None for part in thirds) or block_size is None:
        problem = "only two weights in blocks have a body"
        raise GraphgenError(f"QMoE(block_size={block_size}): {problem}{user_line()}")
    if weights is None and not normalize_routing_weights:
        problem = "without the input router_weights, kernels normalize: give it, or 1"
        raise GraphgenError(f"QMoE(normalize_routing_weights=0): {problem}{user_line()}")
    how = {"bits": expert_weight_bits, "block_size": block_size}
    first = _meant(inner, inner_scales, inner_zeros, **how), inner_bias
    second = _meant(outer, outer_scales, outer_zeros, **how), outer_bias
    p = softmax(scores) if weights is None else weights
    p = _of_chosen(p, scores, inner.shape[0], k, normalize_routing_weights)
    p = p if weights is None else relu(p)
    return _weighted(x, p, first, second, activation_alpha, activation_beta, swiglu_limit)


def _meant(q: Tensor, scales: Tensor, zeros: Tensor | None, **how: int) -> Tensor:
    """What the integers of all experts stand for, (E, rows, K)."""
    count = q.shape[0] * q.shape[1]
    flat = [None if part is None else reshape(part, [count, -1]) for part in (q, scales, zeros)]
    table, per_block, zero_points = flat
    assert table is not None and per_block is not None
    w = gather_block_quantized(table, arange(count), per_block, zero_points, **how)
    return reshape(w, [*q.shape[:2], -1])
