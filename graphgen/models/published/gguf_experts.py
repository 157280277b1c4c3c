"""The architectures of GGUF whose layers have experts: all matrices of a kind are one tensor."""

from typing import Any

from graphgen.models.published.gguf_architecture import (
    LAYER,
    PAIRED,
    WITH_RMS,
    Architecture,
    like_llama,
)

COUNT, USED, SHARED_GATE = "expert_count", "expert_used_count", "ffn_gate_inp_shexp"
_OURS = "gate_proj up_proj down_proj"


def _routed(
    name: str, experts: str, block: str = "mlp", matrices: str = _OURS, **own: Any
) -> Architecture:
    """With `experts`, the field of their number, whose matrices have these names in a block."""
    parts = dict(zip(("gate", "up", "down"), matrices.split(), strict=True))
    return like_llama(
        name,
        COUNT,
        USED,
        layer=LAYER
        | {"ffn_gate_inp": f"{block}.gate", SHARED_GATE: f"{block}.shared_expert_gate"}
        | {f"ffn_{x}_exps": f"{block}.experts.{{}}.{other}" for x, other in parts.items()}
        | {f"ffn_{x}_shexp": f"{block}.shared_expert.{x}_proj" for x in parts},
        fields=WITH_RMS
        | {
            COUNT: experts,
            USED: "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        **own,
    )


ROUTED = {
    "mixtral": _routed(
        "llama",
        "num_local_experts",
        "block_sparse_moe",
        "w1 w3 w2",
        when=lambda own, tensors: bool(own.get(COUNT)),
        order=PAIRED,
    ),
    "qwen2_moe": _routed("qwen2moe", "num_experts"),
    # Weights of the chosen experts sum to 1 in all published checkpoints; files do not say it.
    "qwen3_moe": _routed(
        "qwen3moe",
        "num_experts",
        derive=lambda own, tensors: {"norm_topk_prob": True},
        lacks=("norm_topk_prob",),
    ),
    "olmoe": _routed("olmoe", "num_experts"),
}
