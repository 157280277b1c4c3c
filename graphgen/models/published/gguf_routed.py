"""The architectures of GGUF whose experts are chosen otherwise than they are weighed, or packed."""

from collections.abc import Collection
from typing import Any

from graphgen.models.published.gguf_architecture import (
    BIASES,
    LAYER,
    PAIRED,
    WINDOW,
    WITH_RMS,
    divided,
    each,
    has,
    like_llama,
    turned,
    unstretched,
    without_mamba,
)
from graphgen.models.published.gguf_choices import (
    CHOSEN_BY,
    GROUPED,
    SIGMOID,
    SOFTMAX,
    by_scores,
    experts_of,
    guesses,
)
from graphgen.models.published.gguf_experts import COUNT, USED
from graphgen.models.published.gguf_latent import LATENT
from graphgen.models.published.gguf_pairs import STATICS, halved, in_turn, one_row


def _ernie(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """The size of what all tokens use is that of its tensors, whatever the field says."""
    own.pop("expert_shared_feed_forward_length", None)
    return by_scores(SOFTMAX)(own, tensors)


_SHARED = "blk.0.ffn_up_shexp.weight"


_GRANITE: dict[str, Any] = {
    "layer": LAYER
    | {"ffn_gate_inp": "block_sparse_moe.router.layer"}
    | {"ffn_gate_exps": "block_sparse_moe.gates", "ffn_up_exps": "block_sparse_moe.ups"}
    | {"ffn_down_exps": "block_sparse_moe.output_linear"}
    | {"ffn_gate_shexp": "shared_mlp.gates", "ffn_up_shexp": "shared_mlp.ups"}
    | {"ffn_down_shexp": "shared_mlp.output_linear"},
    "fields": WITH_RMS
    | {COUNT: "num_local_experts", USED: "num_experts_per_tok"}
    | {"expert_shared_feed_forward_length": "shared_intermediate_size"}
    | {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier"}
    | {"residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"},
    "derive": without_mamba,
    "order": PAIRED,
    "finish": halved,
}

CHOSEN = {
    **LATENT,
    "gpt_oss": like_llama(
        "gpt-oss",
        COUNT,
        USED,
        layer=LAYER
        | {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}
        | {"attn_sinks.weight": "self_attn.sinks"}
        | {f"ffn_{x}_exps": f"mlp.experts.{x}_proj" for x in ("gate", "up", "down")},
        fields=WITH_RMS
        | {COUNT: "num_local_experts", USED: "num_experts_per_tok", WINDOW: "sliding_window"}
        | {"expert_feed_forward_length": "intermediate_size"},
        derive=each(BIASES, divided, unstretched),
        yarn=lambda own, tensors: {"truncate": False},  # of which files say nothing
        finish=in_turn,
    ),
    "glm4_moe": like_llama(
        "glm4moe",
        COUNT,
        USED,
        "rope.dimension_count",
        layer=LAYER
        | {"post_attention_norm": "post_attention_layernorm"}
        | experts_of("mlp", "gate.e_score_correction_bias"),
        fields=WITH_RMS | CHOSEN_BY | GROUPED,
        derive=each(
            guesses,
            by_scores(SIGMOID),
            turned(
                "partial_rotary_factor",
                has(attention_bias="attn_q.bias", use_qk_norm="attn_q_norm.weight"),
            ),
        ),
    ),
    "dots1": like_llama(
        "dots1",
        COUNT,
        USED,
        layer=LAYER | experts_of("mlp", "gate.e_score_correction_bias"),
        fields=WITH_RMS | CHOSEN_BY | GROUPED,
        derive=each(by_scores(SIGMOID), BIASES, lambda own, tensors: {"sliding_window": None}),
        lacks=("sliding_window",),
    ),
    "minimax_m2": like_llama(
        "minimax-m2",
        COUNT,
        USED,
        layer=LAYER | experts_of("block_sparse_moe", "e_score_correction_bias", "w1 w3 w2"),
        fields=WITH_RMS
        | {COUNT: "num_local_experts", USED: "num_experts_per_tok"}
        | {"expert_feed_forward_length": "intermediate_size"}
        | {"rope.dimension_count": "rotary_dim"},
        derive=each(by_scores(SIGMOID), divided),
    ),
    "ernie4_5_moe": like_llama(
        "ernie4_5-moe",
        COUNT,
        USED,
        layer=LAYER | experts_of("mlp", STATICS),
        fields=WITH_RMS
        | {COUNT: "moe_num_experts", USED: "moe_k"}
        | {"expert_feed_forward_length": "moe_intermediate_size"}
        | {"expert_shared_count": "moe_num_shared_experts"}
        | {"interleave_moe_layer_step": "moe_layer_interval"}
        | {"leading_dense_block_count": "moe_layer_start_index"},
        derive=each(_ernie, divided, has(use_bias="attn_q.bias")),
        finish=one_row,
    ),
    "granitemoe": like_llama(
        "granitemoe", COUNT, USED, when=lambda own, tensors: _SHARED not in tensors, **_GRANITE
    ),
    "granitemoeshared": like_llama(
        "granitemoe", COUNT, USED, when=lambda own, tensors: _SHARED in tensors, **_GRANITE
    ),
}
"""By model_type."""
