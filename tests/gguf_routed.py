"""GGUF files of decoders with experts: names, arrays and fields, as converters have them."""

import re
from typing import Any

import numpy as np

ARCHITECTURES = {"gpt_oss": "gpt-oss", "glm4_moe": "glm4moe", "minimax_m2": "minimax-m2"}
ARCHITECTURES |= {"ernie4_5_moe": "ernie4_5-moe", "granitemoeshared": "granitemoe"}
ARCHITECTURES |= dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "deepseek2")
KINDS = (*ARCHITECTURES, "dots1", "granitemoe")
AFTER = ("gpt_oss", "glm4_moe")  # the norm after attention has another name

BY_NAME = {
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "mlp.gate.e_score_correction": "exp_probs_b",
    "mlp.moe_statics.e_score_correction": "exp_probs_b",
    "block_sparse_moe.e_score_correction": "exp_probs_b",
    "self_attn.sinks": "attn_sinks",
    **{f"mlp.shared_experts.{x}_proj": f"ffn_{x}_shexp" for x in ("gate", "up", "down")},
    "block_sparse_moe.gate_linear": "ffn_gate_exps",
    "block_sparse_moe.up_linear": "ffn_up_exps",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "shared_mlp.gate_linear": "ffn_gate_shexp",
    "shared_mlp.up_linear": "ffn_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in ("q_a", "q_b", "k_b", "v_b", "kv_b")},
    **{f"self_attn.{x}_layernorm": f"attn_{x}_norm" for x in ("q_a", "kv_a")},
}


def taken_apart(fields: dict[str, Any], weights: dict[str, Any], *, old: bool) -> dict[str, Any]:
    """The weights as a file has them, by the names that they would have in the checkpoint.

    Older files have keys and values of latent vectors in one.
    """
    found = dict[str, Any]()
    for name, w in weights.items():
        own = re.sub(r"e_score_correction_bias$", "e_score_correction.bias", name)
        if own.endswith("moe_statics.e_score_correction.bias"):
            w = w[0]
        if name.endswith("sinks"):
            found[f"{name}.weight"] = w
        elif ".experts.gate_up_proj" in name:
            last = "bias" if name.endswith("_bias") else "weight"
            rows = np.swapaxes(w, 1, 2) if w.ndim == 3 else w
            for i, part in enumerate(("gate", "up")):
                whole = re.sub(r"gate_up_proj(_bias)?$", f"{part}_proj.{last}", name)
                found[whole] = np.ascontiguousarray(rows[:, i::2])
        elif re.search(r"experts\.down_proj(_bias)?$", name):
            last = "bias" if name.endswith("_bias") else "weight"
            rows = np.ascontiguousarray(np.swapaxes(w, 1, 2)) if w.ndim == 3 else w
            found[re.sub(r"down_proj(_bias)?$", f"down_proj.{last}", name)] = rows
        elif name.endswith("input_linear.weight"):
            for part, rows in zip(("gate", "up"), np.split(w, 2, axis=-2), strict=True):
                found[name.replace("input_linear", f"{part}_linear")] = np.ascontiguousarray(rows)
        elif name.endswith("kv_b_proj.weight") and not old:
            heads, plain = fields["num_attention_heads"], fields["qk_nope_head_dim"]
            k, v = np.split(w.reshape(heads, -1, w.shape[1]), [plain], axis=1)
            found[name.replace("kv_b", "k_b")] = np.ascontiguousarray(np.swapaxes(k, 1, 2))
            found[name.replace("kv_b", "v_b")] = np.ascontiguousarray(v)
        else:
            found[own] = w
    return found


def more_fields(fields: dict[str, Any], *, old: bool) -> dict[str, Any]:
    """What a file says of experts and of latent vectors, without the architecture's name."""
    kind = fields["model_type"]
    names = {
        "expert_count": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
        "expert_used_count": ("num_experts_per_tok", "moe_k"),
        "expert_feed_forward_length": ("moe_intermediate_size",),
        "expert_shared_count": ("n_shared_experts", "moe_num_shared_experts"),
        "expert_shared_feed_forward_length": ("shared_intermediate_size",),
        "expert_weights_scale": ("routed_scaling_factor",),
        "expert_weights_norm": ("norm_topk_prob",),
        "expert_group_count": ("n_group",),
        "expert_group_used_count": ("topk_group",),
        "leading_dense_block_count": ("first_k_dense_replace", "moe_layer_start_index"),
        "interleave_moe_layer_step": ("moe_layer_interval",),
        "rope.dimension_count": ("rotary_dim", "qk_rope_head_dim"),
        "nextn_predict_layers": ("num_nextn_predict_layers",),
    }
    found = {own: fields[n] for own, given in names.items() for n in given if n in fields}
    if kind in ("gpt_oss", "minimax_m2"):
        found["expert_feed_forward_length"] = fields["intermediate_size"]
    if kind == "gpt_oss":
        found["attention.sliding_window"] = fields["sliding_window"]
    if kind == "ernie4_5_moe":
        found["expert_shared_feed_forward_length"] = fields["intermediate_size"] // 2
    if kind in ("glm4_moe", "dots1", "minimax_m2", "deepseek_v3", "glm4_moe_lite"):
        found["expert_gating_func"] = 2
    if kind == "deepseek_v2" and not old:
        found["expert_gating_func"] = 1
    if "kv_lora_rank" in fields:
        rank, part = fields["kv_lora_rank"], fields["qk_rope_head_dim"]
        size = fields["qk_nope_head_dim"] + part
        found["attention.kv_lora_rank"] = rank
        if fields.get("q_lora_rank"):
            found["attention.q_lora_rank"] = fields["q_lora_rank"]
        cache, heads = (rank + part, rank), (size, fields["v_head_dim"])
        for i, name in enumerate(("attention.key_length", "attention.value_length")):
            found |= {name: heads[i]} if old else {name: cache[i], f"{name}_mla": heads[i]}
        found |= {} if old else {"attention.head_count_kv": 1}
        growth = (fields.get("rope_parameters") or {}).get("mscale_all_dim")
        if growth:
            found["rope.scaling.yarn_log_multiplier"] = 0.1 * growth
    return found


_STRETCHED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16} | {
    "rope_theta": 1e4,
    "beta_fast": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}

# Files lack these, or say them in a way of their own; all published checkpoints have the same.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt_oss": {"attention_bias": True},
    "gpt_oss, plain": {
        "sliding_window": 4,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1.5e5},
    },
    "glm4_moe": {"first_k_dense_replace": 1, "norm_topk_prob": True},
    "glm4_moe, groups": {},
    "dots1": {"sliding_window": None, "first_k_dense_replace": 1, "norm_topk_prob": False},
    "minimax_m2": {},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_interval": 1}
    | {"moe_num_shared_experts": 2},
    "granitemoe": {"num_experts_per_tok": 2, "residual_multiplier": 1.0},
    "granitemoeshared": {"logits_scaling": 1.0, "embedding_multiplier": 1.0},
    "deepseek_v2": {
        "rope_parameters": _STRETCHED,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
    },
    "deepseek_v2, groups": {
        "rope_parameters": _STRETCHED,
        "mlp_bias": False,
        "attention_bias": False,
    }
    | {"routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
    "deepseek_v3": {
        "rope_parameters": _STRETCHED,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "glm4_moe_lite": {"mlp_layer_types": None, "first_k_dense_replace": 1, "n_group": 1}
    | {"topk_group": 1, "n_shared_experts": 1, "norm_topk_prob": True}
    | {"routed_scaling_factor": 1.8},
}
