"""DeepSeek: experts chosen by groups of them, and attention to latent vectors."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from graphgen import nn
from graphgen.models.published.absent import absent
from graphgen.models.published.config import Config
from graphgen.models.published.experts import sizes_of, stacks
from graphgen.models.published.family import Family
from graphgen.models.published.latent import NAMES as OF_LATENT, latent_attention
from graphgen.models.published.named import family, feed_forward, specification
from graphgen.models.published.router import Routed, Router
from graphgen.models.published.specification import Specification


def deepseek(config: Config, **own: Any) -> Specification:
    """Dense layers first; a scaled sum of experts, and some that all tokens use.

    DeepSeek-V2 (arXiv 2405.04434) takes the largest of a softmax.
    """
    features, hidden = config.take("hidden_size", int), config.take("moe_intermediate_size", int)
    softmax = config.model_type == "deepseek_v2"
    default: tuple[int, int] = absent(config, "experts", (128, 8))
    sizes = sizes_of(config, *default, own="n_routed_experts")
    experts, k = sizes["experts"], sizes["k"]
    config.expect("scoring_func", "softmax" if softmax else "sigmoid")
    config.expect("moe_layer_freq", 1)
    shared = config.count("n_shared_experts", absent(config, "shared", 1))
    options: dict[str, Any] = {
        "normalized": _normalized(config),
        "factor": config.take("routed_scaling_factor", float, absent(config, "factor", 1.0)),
    }
    bias = softmax and config.take("mlp_bias", bool, False)
    groups, dense = _groups(config, experts, k), _dense(config)
    plain = feed_forward(config, bias=bias)

    def routed(number: int) -> nn.Module:
        if number in dense:
            return plain(number)
        router = Router(features, experts, k, softmax=softmax, groups=groups, corrected=not softmax)
        beside = gated(features, hidden * shared, bias) if shared else None
        return Routed(features, hidden, router, beside=beside, **options)

    make: Callable[[int], Any] = routed
    return specification(config, feed_forward=make, **own)


def _normalized(config: Config) -> bool:
    """Whether the weights of chosen experts sum to 1; DeepSeek-V2's class never does that."""
    if config.model_type == "deepseek_v2":
        config.expect("norm_topk_prob", False)
        return False
    default: bool = absent(config, "normalized", False)
    return config.take("norm_topk_prob", bool, default)


def _groups(config: Config, experts: int, k: int) -> tuple[int, int]:
    """How many groups of experts there are, and how many of these count for a token."""
    if config.model_type == "deepseek_v2":
        config.expect("topk_method", "greedy", "group_limited_greedy")
        if config.given("topk_method") != "group_limited_greedy":
            config.ignore("n_group", "topk_group")
            return 1, 1
    else:
        config.expect("topk_method", "noaux_tc")
    default = absent(config, "groups", (1, 1))
    groups = config.take("n_group", int, default[0]), config.take("topk_group", int, default[1])
    if experts % groups[0] or groups[1] > groups[0] or experts // groups[0] < 2:
        config.refuse("n_group", groups[0], f"a divisor of {experts}, groups of two at least")
    if k > experts // groups[0] * groups[1]:
        config.refuse("topk_group", groups[1], f"enough for {k} experts")
    return groups


def _dense(config: Config) -> Collection[int]:
    """The layers without experts."""
    if config.model_type != "glm4_moe_lite":
        return range(config.count("first_k_dense_replace", absent(config, "dense", 0)))
    layers = config.take("num_hidden_layers", int)
    kinds = config.raw("mlp_layer_types", ["dense"] + ["sparse"] * (layers - 1))
    wanted = isinstance(kinds, list) and set(map(str, kinds)) <= {"dense", "sparse"}
    if not wanted or len(kinds) != layers:
        config.refuse("mlp_layer_types", kinds, f"a list of {layers} of dense and sparse")
    found = [number for number, kind in enumerate(kinds) if kind == "dense"]
    config.expect("first_k_dense_replace", *([len(found)] if found == [*range(len(found))] else []))
    return found


def gated(features: int, hidden: int, bias: bool = False) -> nn.FeedForward:
    """What all tokens use beside experts."""
    return nn.FeedForward(features, hidden, activation="silu", gated=True, bias=bias)


GUESSING = ("num_nextn_predict_layers", "num_mtp_layers")  # layers that guess further tokens


def with_latent(config: Config) -> Specification:
    """DeepSeek-V2 and V3 (arXiv 2412.19437), Moonlight, Kimi K2 and GLM-4.7 Flash."""
    # How it was trained and spread over machines.
    config.ignore(*GUESSING, "aux_loss_alpha", "seq_aux", "ep_size")
    return deepseek(config, **latent_attention(config))


_STACKS = stacks("gate_proj", "up_proj", outer="down_proj")
NAMES: dict[str, Any] = {
    "router": "gate",
    "scores": "",
    "correction": "e_score_correction_bias",
    "beside": "shared_experts",
    **_STACKS,
}


def without(layers: str, of: Family) -> Family:
    """A family whose checkpoints may have these layers, which guess: transformers has none."""
    return replace(of, unused=of.unused + rf"|model\.layers\.({layers})\..*")


_LATENT = family(with_latent, **NAMES, **OF_LATENT)

FAMILIES = {
    "deepseek_v2": _LATENT,
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), without("61", _LATENT)),
    "glm4_moe_lite": without("47", _LATENT),
}
