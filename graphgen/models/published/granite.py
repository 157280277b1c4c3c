"""Granite 3, and those of Granite 4 that have attention and no experts."""

from typing import Any

from graphgen.models.published.config import Config
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

    own: dict[str, Any] = {} if config.model_type == "granite" else _dense(config)
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


_OF_EXPERTS = "num_local_experts num_experts_per_tok intermediate_size router_aux_loss_coef"


def _dense(config: Config) -> dict[str, Any]:
    """What is left of Granite 4 without experts and Mamba's layers; some have no positions."""
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
    if config.given("num_local_experts") != 0:
        experts = config.given("num_local_experts")
        config.refuse("num_local_experts", experts, "0: its experts are not built")
    for name in _OF_EXPERTS.split():
        config.raw(name)
    config.ignore("normalization_function", "init_method", "mlp_bias")
    for name in config.fields:
        if name.startswith(("mamba_", "time_step_")):
            config.raw(name)
    divided_heads(config)
    turned = config.raw("position_embedding_type") == "rope"
    if not turned:
        config.expect("position_embedding_type", "nope")
        config.ignore("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
    return {
        "sights": all_turned(config, [None] * layers) if turned else [Sight()] * layers,
        "feed_forward": feed_forward(config, inner="shared_intermediate_size", bias=False),
    }


FAMILIES = {
    "granite": family(granite),
    "granitemoehybrid": family(
        granite,
        feed_forward="shared_mlp",
        gate=Part("input_linear", 0, 2),
        up=Part("input_linear", 1, 2),
        down="output_linear",
    ),
}
