"""Feed-forwards of which each row uses a few, as the one operator that runtimes have."""

from graphgen.errors import GraphgenError, user_line
from graphgen.op import composite
from graphgen.ops.elementwise import clip, sigmoid
from graphgen.ops.embedding import one_hot
from graphgen.ops.layout import cast_like, dim, gather, reshape, swap_last, transpose, unsqueeze
from graphgen.ops.linalg import matmul
from graphgen.ops.reduce import reduce_sum, top_k
from graphgen.ops.softmax import softmax
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
    if activation_type != "swiglu" or swiglu_fusion != 1:
        problem = "only swiglu with swiglu_fusion=1 has a body"
        raise GraphgenError(f"MoE(activation_type={activation_type!r}): {problem}{user_line()}")
    p = softmax(scores)
    _, chosen = top_k(p, [k])  # (N, k)
    p = p * cast_like(reduce_sum(one_hot(chosen, inner.shape[0]), [1], keepdims=0), p)
    if normalize_routing_weights:
        p = p / reduce_sum(p, [1])
    h = matmul(unsqueeze(x, [0]), swap_last(inner))  # (E, N, 2 H)
    if inner_bias is not None:
        h = h + unsqueeze(inner_bias, [1])
    pairs = reshape(h, [*(dim(h, i) for i in range(2)), -1, 2])
    gate, up = (gather(pairs, i, axis=3) for i in (0, 1))
    if swiglu_limit is not None:
        gate, up = clip(gate, None, swiglu_limit), clip(up, -swiglu_limit, swiglu_limit)
    h = gate * sigmoid(gate * activation_alpha) * (up + activation_beta)  # (E, N, H)
    y = matmul(h, swap_last(outer))
    if outer_bias is not None:
        y = y + unsqueeze(outer_bias, [1])
    shares = unsqueeze(transpose(p, perm=[1, 0]), [2])  # (E, N, 1)
    return reduce_sum(y * shares, [0], keepdims=0)
