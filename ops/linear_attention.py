"""Attention without softmax, whose past is one matrix a head, and the convolution before it."""

from typing import Literal, TypeAlias

import numpy as np

from graphgen.errors import GraphgenError, user_line
from graphgen.op import composite
from graphgen.ops.activation import silu
from graphgen.ops.control_flow import scan
from graphgen.ops.convolution import conv
from graphgen.ops.elementwise import exp
from graphgen.ops.layout import (
    concat,
    dim,
    expand,
    numpy_dtype,
    reshape,
    slice_,
)
from graphgen.ops.linalg import matmul
from graphgen.value import Tensor

UpdateRule: TypeAlias = Literal["linear", "gated", "delta", "gated_delta"]


@composite("LinearAttention", domain="com.microsoft", outputs=2, together=True)
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_state: Tensor | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    q_num_heads: int,
    kv_num_heads: int,
    update_rule: UpdateRule = "gated_delta",
    scale: float = 0.0,
    chunk_size: int = 64,
    state_window: int = 0,
) -> tuple[Tensor, Tensor]:
    """y_t = c S_tᵀ q_t, (B, T, H·V), and the last S, for the matrices S_t (K, V) of each head.

    S_t = S_(t-1) + k_t v_tᵀ if the rule is `linear` (arXiv 2006.16236). A `gated` one decays first:
    S_t = D S_(t-1) + k_t v_tᵀ with D = exp(g_t) (arXiv 2312.06635; with one g a head also the state
    space of arXiv 2405.21060). A `delta` rule replaces what k_t stands for (arXiv 2406.06484):
    S_t = D S_(t-1) + β_t k_t (v_t - (D S_(t-1))ᵀ k_t)ᵀ, where D is 1, or as above if it is
    `gated_delta` (arXiv 2412.06464).

    `query` is (B, T, H·K), `key` (B, T, G·K) and `value` (B, T, G·V) for H = q_num_heads, a
    multiple of G = kv_num_heads; each S serves H / G heads of queries in a row. S_0 is
    `past_state`, (B, G, K, V), 0 by default; g is `decay`, (B, T, G) or (B, T, G·K), and β `beta`,
    (B, T, G) or (B, T, 1). c is `scale`, 1 / √K if that is 0. `chunk_size` changes no result.

    Raises GraphgenError for heads that do not fit, for a rule whose terms are missing, and for the
    states of earlier tokens, `state_window`.
    """
    given = f"LinearAttention(update_rule={update_rule!r})"
    for name, term, wanted in (
        ("decay", decay, "gated" in update_rule),
        ("beta", beta, "delta" in update_rule),
    ):
        if wanted and term is None:
            raise GraphgenError(f"{given}: it has no {name}; give it, or another rule{user_line()}")
    if state_window:
        raise GraphgenError(f"{given}: state_window={state_window} has no body{user_line()}")
    if q_num_heads % kv_num_heads:
        raise GraphgenError(
            f"LinearAttention(q_num_heads={q_num_heads}, kv_num_heads={kv_num_heads}): the second "
            f"must divide the first{user_line()}"
        )
    sizes = [dim(query, 0), dim(query, 1)]
    q = reshape(query, [*sizes, kv_num_heads, q_num_heads // kv_num_heads, -1])
    k, v = (reshape(x, [*sizes, kv_num_heads, 1, -1]) for x in (key, value))
    factor = scale or (query.shape[-1] // q_num_heads) ** -0.5
    xs = [q * factor, k, v]
    if decay is not None and "gated" in update_rule:
        xs.append(exp(reshape(decay, [*sizes, kv_num_heads, -1, 1])))
    if beta is not None and "delta" in update_rule:
        xs.append(reshape(beta, [*sizes, -1, 1, 1]))

    def step(
        state: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:  # (B, G, K, V), (B, G, H / G, K), (B, G, 1, K or V)
        if "gated" in update_rule:
            state = state * more[0]
        if "delta" in update_rule:
            v = (v - matmul(k, state)) * more[-1]
        state = state + reshape(k, [*(dim(k, i) for i in range(2)), -1, 1]) * v
        return [state], [matmul(q, state)]

    if past_state is None:
        none = np.zeros((), numpy_dtype(value))
        shape = [sizes[0], kv_num_heads, dim(k, 4), dim(v, 4)]
        past_state = expand(none, shape)
    [state], [y] = scan(step, [past_state], xs, axis=1)  # (B, T, G, H / G, V)
    return reshape(y, [*sizes, -1]), state


@composite("CausalConvWithState", domain="com.microsoft", outputs=2, together=True)
def causal_conv_with_state(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    past_state: Tensor | None = None,
    *,
    activation: Literal["none", "silu", "swish"] = "none",
) -> tuple[Tensor, Tensor]:
    """y_t = f(b + Σ_j w_j x_(t-J+1+j)) for each channel of x (B, C, T), and the last J - 1 of x.

    `weight` is (C, 1, J); before x come the J - 1 elements of `past_state`, (B, C, J - 1), zeros by
    default; the result (B, C, T) is followed by the state that the next elements have as theirs.
    f is silu, or nothing. It is the causal convolution of `nn.Convolution` in parts.
    """
    before = weight.shape[-1] - 1
    if past_state is None:
        none = np.zeros((), numpy_dtype(x))
        past_state = expand(none, [dim(x, 0), dim(x, 1), before])
    whole = concat(past_state, x, axis=2)
    y = conv(whole, weight, bias, group=weight.shape[0])
    y = y if activation == "none" else silu(y)
    return y, slice_(whole, [dim(x, 2)], [2**63 - 1], [2])
