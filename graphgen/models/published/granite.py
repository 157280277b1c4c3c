"""Granite 3, with experts or without, and Granite 4, with layers of Mamba-2 or without."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from graphgen.models.published.config import Config
from graphgen.models.published.experts import Experts, sizes_of
from graphgen.models.published.mamba2 import NAMES, mamba2
from graphgen.models.published.named import (
    all_turned,
    divided_heads,
    family,
    feed_forward,
    specification,
)
from graphgen.models.published.specification import Sight, Specification
from graphgen.models.published.stateful import beside_states, name_of
from graphgen.parts import Part


def granite(config: Config) -> Specification:
    """Multipliers of vectors, scores, residuals and logits."""

    def factor(name: str) -> float:
        return config.take(name, float, 1.0)

    kind, own = config.model_type, dict[str, Any]()
    if kind == "granitemoehybrid":
        own = _hybrid(config)
    elif kind != "granite":
        shared = config.count("shared_intermediate_size", 0) if kind == "granitemoeshared" else 0
        own["feed_forward"] = _experts(config, shared)
    scaling = factor("logits_scaling")
    if scaling <= 0.0:
        config.refuse("logits_scaling", scaling, "above 0")
    return specification(
        config,
        attention={"scale": factor("attention_multiplier")},
        embedding_scale=factor("embedding_multiplier"),
        residual_scale=factor("residual_multiplier"),
        logits_scale=1.0 / scaling,
        **own,
    )


def _experts(config: Config, shared: int) -> Callable[[int], Any]:
    sizes = config.take("hidden_size", int), config.take("intermediate_size", int)
    options = sizes_of(config, 8, 2)
    options |= {"normalized": True, "shared": shared, "shared_gated": False}
    return lambda number: Experts(*sizes, **options)


_OF_EXPERTS = "num_local_experts num_experts_per_tok intermediate_size router_aux_loss_coef"


def _hybrid(config: Config) -> dict[str, Any]:
    """What sets Granite 4 apart: layers of Mamba-2, and attention that may have no positions."""
    layers, features = config.take("num_hidden_layers", int), config.take("hidden_size", int)
    config.ignore("normalization_function", "init_method", "mlp_bias")
    divided_heads(config)
    turned = config.raw("position_embedding_type") == "rope"
    if not turned:
        config.expect("position_embedding_type", "nope")
        config.ignore("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
    sights = all_turned(config, [None] * layers) if turned else [Sight()] * layers
    known = {"attention": True, "full_attention": True, "mamba": False, "linear_attention": False}
    names = ("layer_types", "layers_block_type")
    found: dict[str, Any] = {
        "sights": beside_states(config, sights, known, ["mamba"] * layers, names)
    }
    if any(sight.stateful for sight in found["sights"]):
        found["stateful"] = mamba2(config, features)
    else:
        for name in config.fields:
            if name.startswith(("mamba_", "time_step_")):
                config.raw(name)  # of no layer
    if config.given("num_local_experts") == 0:
        config.ignore(*_OF_EXPERTS.split())
        plain = feed_forward(config, inner="shared_intermediate_size", bias=False)
        return found | {"feed_forward": plain}
    shared = config.take("shared_intermediate_size", int, 1024)
    return found | {"feed_forward": _experts(config, shared)}


_SHARED = "shared_mlp.input_linear"
_EXPERTS = replace(
    family(
        granite,
        feed_forward="",
        router="block_sparse_moe.router.layer",
        inner="block_sparse_moe.input_linear.weight",
        outer="block_sparse_moe.output_linear.weight",
        shared="",
        gate=Part(_SHARED, 0, 2),
        up=Part(_SHARED, 1, 2),
        down="shared_mlp.output_linear",
        attention=name_of("mamba"),
        **NAMES,
    ),
    halved=("inner",),
)

FAMILIES = {
    "granite": family(granite),
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), _EXPERTS),
}
