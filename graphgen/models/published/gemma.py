"""Gemma 1, 2 and 3 (arXiv 2403.08295, 2408.00118, 2503.19786)."""

import math
from typing import Any

from graphgen.models.published.absent import absent
from graphgen.models.published.config import Config
from graphgen.models.published.llama import AFTER
from graphgen.models.published.named import (
    all_turned,
    family,
    feed_forward,
    layer_windows,
    rms_norm,
    specification,
)
from graphgen.models.published.rope import parameters_by_kind
from graphgen.models.published.specification import Sight, Specification

_SANDWICH = ("norm1", "after1", "norm2", "after2")


def _gemma(config: Config, field: str, **own: Any) -> Specification:
    if "both_sides" not in own:
        config.expect("use_bidirectional_attention", False)
    features = config.take("hidden_size", int)
    return specification(
        config,
        norm=rms_norm(config, unit_offset=True),
        feed_forward=feed_forward(config, field=field, activation="gelu_pytorch_tanh", bias=False),
        embedding_scale=math.sqrt(features),
        **own,
    )


def gemma(config: Config) -> Specification:
    """Gains of 1 + w, a gate with GELU, vectors times √D."""
    # Its "gelu" has always meant the approximation by tanh; the class reads this field alone.
    config.expect("hidden_act", "gelu", "gelu_pytorch_tanh")
    config.expect("hidden_activation", "gelu_pytorch_tanh")
    return _gemma(config, "hidden_activation")


def gemma2(config: Config) -> Specification:
    """Norms before and after, softcaps, every other layer local."""
    config.ignore("hidden_act")  # the class reads hidden_activation
    config.ignore("sliding_window_size")  # a copy of sliding_window, which the class reads
    layers = config.take("num_hidden_layers", int)
    window = config.optional("sliding_window", int, absent(config, "window"))
    found = layer_windows(config, window, [i % 2 == 0 for i in range(layers)])
    return _gemma(
        config,
        "hidden_activation",
        sights=all_turned(config, found),
        attention=_scores(config, softcap=_cap(config, "attn_logit_softcapping", 50.0)),
        norms=_SANDWICH,
        logits_softcap=_cap(config, "final_logit_softcapping", 30.0),
    )


def gemma3(config: Config) -> Specification:
    """Norms of queries and keys, and other angles in its local layers, five of six.

    EmbeddingGemma (arXiv 2509.20354) sees the tokens on both sides, half a window on each.
    """
    config.ignore("hidden_act")  # the class reads hidden_activation
    layers, every = (
        config.take("num_hidden_layers", int),
        config.take("sliding_window_pattern", int, 6),
    )
    window = config.optional("sliding_window", int, absent(config, "window"))
    both_sides = config.take("use_bidirectional_attention", bool, False)
    if both_sides and window is not None:
        window //= 2
    local = layer_windows(config, 1, [(i + 1) % every > 0 for i in range(layers)])
    config.expect("attn_logit_softcapping")  # transformers leaves the scores as they are
    far, near = parameters_by_kind(config)
    turned = (
        all_turned(config, [None], parameters=far, theta=1e6),
        all_turned(
            config,
            [window],
            parameters={"rope_theta": config.take("rope_local_base_freq", float, 1e4)} | near,
        ),
    )
    sights: list[Sight] = [turned[0 if one is None else 1][0] for one in local]
    return _gemma(
        config,
        "hidden_activation",
        sights=sights,
        attention=_scores(config, norm=rms_norm(config, unit_offset=True)),
        norms=_SANDWICH,
        logits_softcap=_cap(config, "final_logit_softcapping", 0.0),
        both_sides=both_sides,
    )


def _scores(config: Config, **options: Any) -> dict[str, Any]:
    """The scale of scores, which is not by the features of a head."""
    scalar = config.take("query_pre_attn_scalar", float, 256.0)
    if scalar <= 0.0:
        config.refuse("query_pre_attn_scalar", scalar, "above 0")
    return {"scale": scalar**-0.5, **options}


def _cap(config: Config, name: str, default: float) -> float:
    cap = config.optional(name, float, default or None) or 0.0
    if cap < 0.0:
        config.refuse(name, cap, "above 0")
    return cap


_NORMS = AFTER | {"norm2": "pre_feedforward_layernorm"}

FAMILIES = {
    "gemma": family(gemma),
    "gemma2": family(gemma2, **_NORMS),
    "gemma3_text": family(gemma3, **_NORMS),
}
