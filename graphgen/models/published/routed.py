"""Decoders that choose experts as DeepSeek-V3 does: GLM-4.5, dots.llm1, MiniMax-M2, ERNIE 4.5."""

from collections.abc import Callable
from typing import Any

from graphgen import nn
from graphgen.models.published.config import Config
from graphgen.models.published.deepseek import GUESSING, NAMES, deepseek, gated, without
from graphgen.models.published.experts import sizes_of, stacks
from graphgen.models.published.named import (
    all_turned,
    family,
    feed_forward,
    layer_windows,
    rms_norm,
    specification,
)
from graphgen.models.published.router import Routed, Router
from graphgen.models.published.specification import Specification


def glm(config: Config) -> Specification:
    """GLM-4.5 (arXiv 2508.06471): half of each head is turned, and heads may be normalized."""
    config.ignore(*GUESSING)
    norm = rms_norm(config) if config.take("use_qk_norm", bool, False) else None
    return deepseek(config, attention={"norm": norm, "output_bias": False})


def dots(config: Config) -> Specification:
    """dots.llm1 (arXiv 2506.05767): norms of each head, and windows in some layers."""
    layers = config.take("num_hidden_layers", int)
    window = config.optional("sliding_window", int, 4096)
    first = config.raw("max_window_layers", 62)
    if type(first) is not int:
        config.refuse("max_window_layers", first, "an integer")
    local = [window is not None and i >= first for i in range(layers)]
    sights = all_turned(config, layer_windows(config, window, local))
    return deepseek(config, attention={"norm": rms_norm(config)}, sights=sights)


def minimax(config: Config) -> Specification:
    """MiniMax-M2: norms of all queries and all keys, and a part of each head is turned."""
    sizes = config.take("hidden_size", int), config.take("intermediate_size", int)
    chosen = sizes_of(config, 256, 8)
    size = config.take("head_dim", int, 128)
    part = config.raw("rotary_dim", size)
    if type(part) is not int or not 0 < part <= size:
        config.refuse("rotary_dim", part, f"from 1 to {size}")
    config.expect("scoring_func", "sigmoid")
    config.expect("use_routing_bias", True)

    def routed(number: int) -> nn.Module:
        router = Router(sizes[0], chosen["experts"], chosen["k"], softmax=False, groups=(1, 1))
        return Routed(*sizes, router)

    windows = layer_windows(config, None, [False] * config.take("num_hidden_layers", int))
    return specification(
        config,
        attention={"norm": rms_norm(config), "wide_norm": True, "bias": False},
        feed_forward=routed,
        sights=all_turned(config, windows, partial=part / size),
    )


def ernie(config: Config) -> Specification:
    """ERNIE 4.5 with experts: neighbors are turned, and dense layers stand around the others."""
    features, layers = config.take("hidden_size", int), config.take("num_hidden_layers", int)
    config.ignore("compression_ratio", "fuse_rope", "weight_share_add_bias", "use_rmsnorm")
    hidden = config.take("moe_intermediate_size", int, 1536)
    bias = config.take("use_bias", bool, False)
    chosen = sizes_of(config, 64, 6, "moe_num_experts", "moe_k")
    shared = config.count("moe_num_shared_experts", 2)
    least = config.take("moe_norm_min", float, 1e-12)
    if not 0.0 <= least <= 1e-6:
        config.refuse("moe_norm_min", least, "at most 1e-6: no larger one is built")
    first, last = config.count("moe_layer_start_index", 1), config.raw("moe_layer_end_index", -1)
    every = config.take("moe_layer_interval", int, 1)
    if type(last) is not int or last < -1:
        config.refuse("moe_layer_end_index", last, "the number of a layer, or -1")
    last = layers - 1 if last == -1 else last
    plain = feed_forward(config, bias=bias)

    def routed(number: int) -> nn.Module:
        if (number + 1) % every or not first <= number <= last:
            return plain(number)
        router = Router(features, chosen["experts"], chosen["k"], softmax=True, groups=(1, 1))
        beside = gated(features, hidden * shared, bias) if shared else None
        return Routed(features, hidden, router, beside=beside)

    make: Callable[[int], Any] = routed
    attention = {"interleaved": True, "bias": bias}
    return specification(config, attention=attention, feed_forward=make, head_bias=bias)


FAMILIES = {
    "glm4_moe": without("46|92", family(glm, **NAMES)),  # of Air and the largest
    "dots1": family(dots, **NAMES),
    "minimax_m2": family(
        minimax,
        feed_forward="block_sparse_moe",
        router="",
        scores="gate",
        correction="e_score_correction_bias",
        **stacks("w1", "w3", outer="w2"),
    ),
    "ernie4_5_moe": family(
        ernie,
        **NAMES
        | {"router": "", "scores": "gate"}
        | {"correction": "moe_statics.e_score_correction_bias"},
    ),
}
