"""Qwen3-Next and Qwen3.5: three layers of Gated DeltaNet to one of gated attention."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from graphgen import nn, ops
from graphgen.models.published.absent import absent
from graphgen.models.published.config import Config
from graphgen.models.published.delta_net import APART, BY_HEAD, GatedDeltaNet
from graphgen.models.published.experts import Experts, sizes_of, stacks
from graphgen.models.published.family import Family
from graphgen.models.published.language_model import OF_IMAGES
from graphgen.models.published.named import (
    all_turned,
    family,
    feed_forward,
    rms_norm,
    specification,
)
from graphgen.models.published.rope import given_parameters
from graphgen.models.published.sparse_layers import sparse_layers
from graphgen.models.published.specification import Specification
from graphgen.models.published.stateful import beside_states, name_of
from graphgen.parts import Part
from graphgen.value import Tensor


class GatedAttention(nn.Attention):
    """Attention whose result is multiplied by σ(g), g of the token, before its last product."""

    def __init__(self, features: int, **options: Any):
        super().__init__(features, **options)
        self.gate = nn.Linear(features, self.num_heads * self.head_dim, bias=options["bias"])

    def result(self, y: Tensor, x: Tensor) -> Tensor:
        """The vectors of tokens x, (B, T, D), of what their heads found, (B, T, H·D)."""
        return super().result(y * ops.sigmoid(self.gate(x)), x)


def hybrid(config: Config) -> Specification:
    """Norms of 1 + w, a quarter of each head turned, and queries stored beside their gates."""
    config.expect("attn_output_gate", True)
    config.expect("mamba_ssm_dtype", "float32")
    config.expect("use_sliding_window", False)
    config.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # which guess tokens
    features, layers = config.take("hidden_size", int), config.take("num_hidden_layers", int)
    norm = rms_norm(config, unit_offset=True)
    delta: dict[str, Any] = {
        "key_heads": config.take("linear_num_key_heads", int, 16),
        "value_heads": config.take("linear_num_value_heads", int, 32),
        "key_dim": config.take("linear_key_head_dim", int, 128),
        "value_dim": config.take("linear_value_head_dim", int, 128),
        "kernel": config.take("linear_conv_kernel_dim", int, 4),
        "epsilon": config.take("rms_norm_eps", float, 1e-6),
    }
    config.expect("hidden_act", "silu")
    if delta["kernel"] < 2:
        config.refuse("linear_conv_kernel_dim", delta["kernel"], "2 at least")
    if delta["value_heads"] % delta["key_heads"]:
        problem = f"a multiple of {delta['key_heads']}, linear_num_key_heads"
        config.refuse("linear_num_value_heads", delta["value_heads"], problem)
    every = config.take("full_attention_interval", int, 4)
    known = {"linear_attention": False, "full_attention": True}
    kinds = [[*known][(i + 1) % every == 0] for i in range(layers)]
    given = {n: x for n, x in given_parameters(config).items() if n not in OF_IMAGES}
    sights = all_turned(config, [None] * layers, parameters=given)
    return specification(
        config,
        kind=GatedAttention,
        attention={"norm": norm},
        stateful=lambda number: GatedDeltaNet(features, **delta),
        norm=norm,
        feed_forward=_feed_forward(config, features),
        sights=beside_states(config, sights, known, kinds),
    )


def _feed_forward(config: Config, features: int) -> Callable[[int], Any]:
    """One feed-forward, or some of many small ones and one that all tokens use."""
    if config.model_type == "qwen3_5_text":
        config.expect("mlp_only_layers", [])
        return feed_forward(config, bias=False)
    options = sizes_of(config, *absent(config, "experts"))
    hidden = config.take("moe_intermediate_size", int, 512)
    options["shared"] = config.take("shared_expert_intermediate_size", int, 512)
    options["normalized"] = config.take("norm_topk_prob", bool, True)
    if config.model_type != "qwen3_next":
        config.expect("norm_topk_prob", True)
        config.expect("decoder_sparse_step", 1)
        config.expect("mlp_only_layers", [])
    has_experts, plain = sparse_layers(config), None
    if all(map(has_experts, range(config.take("num_hidden_layers", int)))):
        config.raw("intermediate_size")  # of no layer
    else:
        plain = feed_forward(config, bias=False)
    fused = config.has(ending=_FUSED)

    def routed(number: int) -> nn.Module:
        if plain is not None and not has_experts(number):
            return plain(number)
        made = Experts(features, hidden, **options)
        made.fused = fused
        return made

    return routed


_FUSED = "experts.gate_up_proj"


def _of_attention(number: int) -> Callable[[Any], Part]:
    """Queries or gates (0, 1) of each head, which are stored as one."""
    return lambda of: Part("q_proj", number, 2, of.num_heads)


def _either(name: str, number: int | None, delta: Mapping[str, Any], attention: str) -> Any:
    """What a part is called, by whether its layer attends."""

    def source(of: nn.Module) -> Any:
        if isinstance(of, GatedDeltaNet):
            found = delta[name]
            return found(of) if callable(found) else found
        return attention if number is None else _of_attention(number)(of)

    return source


def _names(delta: Mapping[str, Any]) -> dict[str, Any]:
    shared = {
        "query": _either("query", 0, delta, ""),
        "key": _either("key", None, delta, "k_proj"),
        "value": _either("value", None, delta, "v_proj"),
        "attention.gate": _either("gate", 1, delta, ""),
    }
    return {
        **{name: source for name, source in delta.items() if name not in ("gate", *shared)},
        **shared,
        "attention": name_of("linear_attn"),
        "attention.norm": "norm",
        "router": "gate",
        "shared": "shared_expert",
        "shared_gate": "shared_expert_gate",
    }


_STACKS = stacks("gate_proj", "up_proj", outer="down_proj")
_EITHER: dict[str, Any] = {
    "inner": lambda of: _FUSED if of.fused else _STACKS["inner"],
    "outer": lambda of: "experts.down_proj" if of.fused else _STACKS["outer"],
}


def _of(delta: Mapping[str, Any], **names: Any) -> Family:
    """A family whose checkpoints may have layers that guess tokens; transformers has none."""
    found = family(hybrid, **_names(delta), **names)
    return replace(found, halved=("inner",), unused=found.unused + r"|mtp\..*")


FAMILIES = {
    "qwen3_next": _of(BY_HEAD, **_EITHER),
    "qwen3_5_text": _of(APART),
    "qwen3_5_moe_text": _of(APART, **_EITHER),
}
