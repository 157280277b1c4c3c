"""How GGUF files say which experts are chosen, and how they are weighed."""

from collections.abc import Collection
from typing import Any

from graphgen.models.published.gguf_architecture import Derive
from graphgen.models.published.gguf_experts import COUNT, USED

GROUPS, GATING, NORMED = "expert_group_count", "expert_gating_func", "expert_weights_norm"
SOFTMAX, SIGMOID = 1, 2  # of the latter field
CHOSEN_BY = {
    COUNT: "n_routed_experts",
    USED: "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    NORMED: "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
}
GROUPED = {GROUPS: "n_group", "expert_group_used_count": "topk_group"}


def experts_of(block: str, correction: str, matrices: str = "gate_proj up_proj down_proj") -> Any:
    """What the parts of experts are called, and those of what all tokens use beside them."""
    parts = dict(zip(("gate", "up", "down"), matrices.split(), strict=True))
    return (
        {"ffn_gate_inp": f"{block}.gate", "exp_probs_b.bias": f"{block}.{correction}"}
        | {f"ffn_{x}_exps": f"{block}.experts.{{}}.{name}" for x, name in parts.items()}
        | {f"ffn_{x}_shexp": f"{block}.shared_experts.{name}" for x, name in parts.items()}
    )


def by_scores(kind: int) -> Derive:
    """Scores of this kind alone, where a file says it."""

    def derive(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        if own.get(GATING) == kind:
            own.pop(GATING)
        return {}

    return derive


def guesses(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Layers behind the others guess further tokens; they are left out."""
    own["block_count"] -= own.pop("nextn_predict_layers", 0)
    return {}
