"""Granite 3, with experts or without, and those of Granite 4 that have attention alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from graphgen.models.published.config import Config
from graphgen.models.published.experts import Experts, sizes_of
from graphgen.models.published.named import (
    all_turned,
    divided_heads,
    family,
    feed_forward,
    specification,
)
from graphgen.models.published.specification import Sight, Specification
from graphgen.parts import Part


def granite(config: Config) -> Specification:
    """Multipliers of vectors, scores, residuals and logits."""

    def factor(name: str) -> float:
        return config.take(name, float, 1.0)

    kind, own = config.model_type, dict[str, Any]()
    if kind == "granitemoehybrid":
        own = _attention_alone(config)
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


def _attention_alone(config: Config) -> dict[str, Any]:
    """What is left of Granite 4 without Mamba's layers; some have no positions."""
    layers = config.take("num_hidden_layers", int)
    for name in ("layer_types", "layers_block_type"):
        kinds = config.raw(name, ["attention"] * layers)
        wanted = f"a list of {layers} of attention: Mamba's layers are not built"
        if not isinstance(kinds, list) or len(kinds) != layers:
            config.refuse(name, kinds, wanted)
        if not {*map(str, kinds)} <= {"attention", "full_attention"}:
            config.refuse(name, kinds, wanted)
    if not {"layer_types", "layers_block_type"} & {*config.fields}:
        config.refuse("layer_types", None, "given: the class has Mamba's layers without it")
    config.ignore("normalization_function", "init_method", "mlp_bias")
    for name in config.fields:
        if name.startswith(("mamba_", "time_step_")):
            config.raw(name)
    divided_heads(config)
    turned = config.raw("position_embedding_type") == "rope"
    if not turned:
        config.expect("position_embedding_type", "nope")
        config.ignore("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
    sights = all_turned(config, [None] * layers) if turned else [Sight()] * layers
    if config.given("num_local_experts") == 0:
        config.ignore(*_OF_EXPERTS.split())
        plain = feed_forward(config, inner="shared_intermediate_size", bias=False)
        return {"sights": sights, "feed_forward": plain}
    shared = config.take("shared_intermediate_size", int, 1024)
    return {"sights": sights, "feed_forward": _experts(config, shared)}


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
    ),
    halved=("inner",),
)

FAMILIES = {
    "granite": family(granite),
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), _EXPERTS),
}
