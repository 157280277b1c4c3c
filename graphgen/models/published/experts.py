"""Decoders that route each token to a few experts: Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE."""

from collections.abc import Callable
from typing import Any

from graphgen import nn, ops
from graphgen.models.published.config import Config
from graphgen.models.published.named import (
    all_turned,
    divided_heads,
    family,
    feed_forward,
    layer_windows,
    rms_norm,
    specification,
)
from graphgen.models.published.olmo import clip
from graphgen.models.published.sparse_layers import sparse_layers
from graphgen.models.published.specification import Specification
from graphgen.models.published.weights import Stack
from graphgen.nn.module import Parameter, normal, zeros
from graphgen.value import Tensor


class Experts(nn.Module):
    """The k of E gated feed-forwards with the largest scores of a row, and one that all share.

    Args:
        features: D, the size of each row.
        hidden: H, the inner size of each expert.
        experts: E.
        k: How many each row uses.
        normalized: Whether the weights of the chosen sum to 1.
        shared: The inner size of the one that all rows use; 0 for none.
        shared_gated: Whether it is multiplied by a gate of its own.
        bias: Whether the scores and both products of each expert have one.
        options: Of `ops.mixture_of_experts`, for the activation.

    `fused` says whether a checkpoint has the weights of all experts as one.
    """

    fused = False

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        experts: int,
        k: int,
        normalized: bool,
        shared: int = 0,
        shared_gated: bool = True,
        bias: bool = False,
        **options: float,
    ):
        self.k, self.normalized, self.options = k, normalized, options
        self.router: Any = nn.Linear(features, experts, bias=bias)
        self.inner = Parameter((experts, 2 * hidden, features), initialize=normal(0.02))
        self.outer = Parameter((experts, features, hidden), initialize=normal(0.02))
        self.inner_bias = self.outer_bias = None
        if bias:
            self.inner_bias = Parameter((experts, 2 * hidden), initialize=zeros)
            self.outer_bias = Parameter((experts, features), initialize=zeros)
        self.shared = self.shared_gate = None
        if shared:
            self.shared = nn.FeedForward(
                features, shared, activation="silu", gated=True, bias=False
            )
            self.shared_gate = nn.Linear(features, 1, bias=False) if shared_gated else None

    def __call__(self, x: Tensor) -> Tensor:  # (B, T, D)
        rows = ops.reshape(x, [-1, x.shape[2]])
        y = self.mixed(rows, self.router(rows))
        y = ops.reshape(y, [ops.dim(x, 0), ops.dim(x, 1), x.shape[2]])
        if self.shared is None:
            return y
        z = self.shared(x)
        return y + (z if self.shared_gate is None else ops.sigmoid(self.shared_gate(x)) * z)

    def mixed(self, rows: Tensor, scores: Tensor) -> Tensor:
        """Σ of the experts that these scores, (N, E), choose for rows (N, D)."""
        found: Tensor = ops.mixture_of_experts(
            rows,
            scores,
            self.inner,
            self.inner_bias,
            self.outer,
            self.outer_bias,
            k=self.k,
            activation_type="swiglu",
            swiglu_fusion=1,
            normalize_routing_weights=int(self.normalized),
            **self.options,
        )
        return found


_PER_TOKEN = "num_experts_per_tok"


def sizes_of(
    config: Config, default: int, k: int, own: str = "num_experts", of_token: str = _PER_TOKEN
) -> dict[str, Any]:
    """How many experts there are, and how many of them a token uses; other fields are checked.

    `own` is what the class itself calls the former, and `of_token` the latter.
    """
    experts = config.named("num_local_experts", own)
    of_token = config.named(*dict.fromkeys((_PER_TOKEN, of_token)))
    found = config.take(experts, int, default)
    used = config.take(of_token, int, k)
    if used > found:
        config.refuse(of_token, used, f"at most {found}, {experts}")
    config.expect("hidden_act", "silu")
    config.ignore("router_aux_loss_coef", "router_jitter_noise")  # of training alone
    return {"experts": found, "k": used}


def mixtral(config: Config) -> Specification:
    """Mixtral (arXiv 2401.04088): two of eight experts in every layer."""
    sizes = config.take("hidden_size", int), config.take("intermediate_size", int)
    options = sizes_of(config, 8, 2)
    return specification(
        config,
        attention={"bias": False},
        feed_forward=lambda number: Experts(*sizes, normalized=True, **options),
    )


def qwen_moe(config: Config) -> Specification:
    """Qwen2-MoE and Qwen3-MoE (arXiv 2407.10671, 2505.09388): many small experts."""
    older = config.model_type == "qwen2_moe"
    features, layers = config.take("hidden_size", int), config.take("num_hidden_layers", int)
    options = sizes_of(config, *((60, 4) if older else (128, 8)))
    options["normalized"] = config.take("norm_topk_prob", bool, False)
    options["shared"] = config.take("shared_expert_intermediate_size", int, 5632) if older else 0
    hidden = config.take("moe_intermediate_size", int, 1408 if older else 768)
    has_experts, plain = sparse_layers(config), feed_forward(config, bias=False)

    def routed(number: int) -> nn.Module:
        return Experts(features, hidden, **options) if has_experts(number) else plain(number)

    attention: dict[str, Any] = {"norm": rms_norm(config)}
    if older:
        attention = {"bias": config.take("qkv_bias", bool, True), "output_bias": False}
    config.expect("use_sliding_window", False)
    config.ignore("sliding_window", "max_window_layers")  # of windows that are not used
    found = layer_windows(config, None, [False] * layers)
    make: Callable[[int], Any] = routed
    return specification(
        config, attention=attention, feed_forward=make, sights=all_turned(config, found)
    )


def olmoe(config: Config) -> Specification:
    """OLMoE (arXiv 2409.02060): small experts in every layer, and norms of all queries and keys."""
    sizes = config.take("hidden_size", int), config.take("intermediate_size", int)
    options = sizes_of(config, 64, 8)
    normalized = config.take("norm_topk_prob", bool, False)
    divided_heads(config)
    return specification(
        config,
        attention={"norm": rms_norm(config), "wide_norm": True, "clip": clip(config)},
        feed_forward=lambda number: Experts(*sizes, normalized=normalized, **options),
    )


def stacks(*names: str, outer: str) -> dict[str, Stack]:
    """The weights of experts that are stored one by one."""
    return {
        "inner": Stack(tuple(f"experts.{{}}.{name}.weight" for name in names), alternate=True),
        "outer": Stack((f"experts.{{}}.{outer}.weight",)),
    }


_QWEN = family(
    qwen_moe,
    router="gate",
    shared="shared_expert",
    shared_gate="shared_expert_gate",
    **stacks("gate_proj", "up_proj", outer="down_proj"),
)

FAMILIES = {
    "mixtral": family(
        mixtral,
        feed_forward="block_sparse_moe",
        router="gate",
        **stacks("w1", "w3", outer="w2"),
    ),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _QWEN),
    "olmoe": family(olmoe, router="gate", **stacks("gate_proj", "up_proj", outer="down_proj")),
}
