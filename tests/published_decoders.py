"""Small configurations of published decoders, and weights for them that depend on names alone."""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from random_checkpoints import stored_shapes, write_weights

from graphgen.models.published import FAMILIES
from graphgen.models.published.config import Config

LENGTH = 9
RESULTS = np.load(Path(__file__).parent / "fixtures" / "decoders" / "results.npz")
_BASE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_OLD = {name: value for name, value in _BASE.items() if name != "num_key_value_heads"}
_MOE = {**_BASE, "num_experts": 6, "moe_intermediate_size": 24}
_LATENT = {
    **_OLD,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 4,
} | {
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
}
_STRETCHED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16} | {
    "rope_theta": 1e4,
    "beta_fast": 32,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
}
_NEOX = {**_OLD, "model_type": "gpt_neox"}
_BLOOM = {"model_type": "bloom", "vocab_size": 40, "hidden_size": 32, "n_layer": 2} | {
    "pad_token_id": 0
}
_FALCON = {
    "model_type": "falcon",
    **{name: value for name, value in _OLD.items() if name != "intermediate_size"},
    "ffn_hidden_size": 48,
}
_OPT = {**_OLD, "model_type": "opt", "intermediate_size": None, "ffn_dim": 48}
_GEMMA = {**_BASE, "head_dim": 16, "sliding_window": 5}
_NEO = {"model_type": "gpt_neo", "vocab_size": 40, "hidden_size": 32, "pad_token_id": 0}
_LONG = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 9.0, 27.0]}
_LONG_ROPE = {"rope_type": "longrope", **_LONG}

_GRANITE_4 = {
    **_BASE,
    "layer_types": ["attention", "attention"],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 40,
    "mamba_n_heads": 8,
}

_HYBRID = {**_BASE, "num_hidden_layers": 3, "head_dim": 16} | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}
_HYBRID_MOE = {
    **_HYBRID,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
} | {"shared_expert_intermediate_size": 20}

DECODERS: dict[str, dict[str, Any]] = {
    "lfm2": {**_BASE, "num_hidden_layers": 3, "full_attn_idxs": [1], "block_multiple_of": 8},
    "lfm2, odd": {
        "full_attn_idxs": None,
        "layer_types": ["full_attention", "conv", "conv"],
        "conv_bias": True,
        "conv_L_cache": 4,
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": False,
    },
    "qwen3_next": _HYBRID_MOE,
    "qwen3_next, odd": {
        "mlp_only_layers": [0],
        "norm_topk_prob": False,
        "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 2,
        "tie_word_embeddings": True,
    },
    "qwen3_5_text": _HYBRID,
    "qwen3_5_text, odd": {
        "attention_bias": True,
        "linear_conv_kernel_dim": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}
        | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    },
    "qwen3_5_moe_text": _HYBRID_MOE,
    "smollm3": {**_BASE, "no_rope_layer_interval": 2},
    "smollm3, windows": {
        "no_rope_layers": [0, 1, 1],
        "use_sliding_window": True,
        "sliding_window": 4,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "granite": {
        **_BASE,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.3,
        "logits_scaling": 4.0,
        "tie_word_embeddings": True,
    },
    "granitemoehybrid": {
        **_GRANITE_4,
        "position_embedding_type": "rope",
        "attention_multiplier": 0.2,
        "logits_scaling": 4.0,
    },
    "granitemoehybrid, no positions": {"position_embedding_type": None, "residual_multiplier": 0.3},
    "granitemoe": {**_BASE, "num_local_experts": 5, "attention_multiplier": 0.2}
    | {"logits_scaling": 4.0, "embedding_multiplier": 6.0},
    "granitemoeshared": {**_BASE, "num_local_experts": 5, "shared_intermediate_size": 40}
    | {"num_experts_per_tok": 3, "attention_multiplier": 0.2, "residual_multiplier": 0.3},
    "granitemoeshared, none": {"shared_intermediate_size": 0, "tie_word_embeddings": True},
    "granitemoehybrid, experts": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "attention_bias": True,
    },
    "granitemoehybrid, mamba": {
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "residual_multiplier": 0.6,
        "mamba_n_heads": 4,
        "mamba_d_state": 6,
    },
    "granitemoehybrid, groups": {
        "layer_types": ["attention", "mamba"],
        "position_embedding_type": "rope",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 4,
        "mamba_d_conv": 3,
        "mamba_expand": 3,
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
    },
    "olmo": _BASE,
    "olmo, cut off": {"clip_qkv": 1.5},
    "olmo2": _BASE,
    "olmo3": {
        **_BASE,
        "num_hidden_layers": 4,
        "sliding_window": 4,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.2}
        | {"original_max_position_embeddings": 16},
    },
    "ministral": {
        **_BASE,
        "head_dim": 16,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "ministral3": {
        **_BASE,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
        | {"original_max_position_embeddings": 3, "llama_4_scaling_beta": 0.5},
    },
    "mixtral": {**_BASE, "num_local_experts": 5, "sliding_window": 6},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 40, "num_experts_per_tok": 3},
    "qwen3_moe": {**_MOE, "norm_topk_prob": True, "num_experts_per_tok": 2, "head_dim": 16},
    "qwen3_moe, some dense": {
        "mlp_only_layers": [0],
        "norm_topk_prob": False,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        **_BASE,
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 5,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": False}
        | {"rope_theta": 1.5e5, "original_max_position_embeddings": 16},
    },
    "gpt_oss, odd": {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "num_experts_per_tok": 1,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "swiglu_limit": 0.5,
        "swiglu_alpha": 0.75,
        "rope_parameters": None,
    },
    "olmo2, biases": {"attention_bias": True, "num_key_value_heads": 1, "rms_norm_eps": 1e-3},
    "olmoe": {**_MOE, "num_experts_per_tok": 2, "moe_intermediate_size": None},
    "olmoe, cut off": {"clip_qkv": 1.0, "norm_topk_prob": True, "attention_bias": True},
    "glm4_moe": {**_MOE, "n_routed_experts": 6, "num_experts_per_tok": 2, "num_experts": None}
    | {"use_qk_norm": True, "routed_scaling_factor": 1.5, "n_shared_experts": 2},
    "glm4_moe, groups": {
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": False,
    },
    "deepseek_v2": {**_LATENT, "first_k_dense_replace": 1, "rope_parameters": _STRETCHED}
    | {"routed_scaling_factor": 1.5},
    "deepseek_v2, groups": {
        "topk_method": "group_limited_greedy",
        "n_group": 3,
        "topk_group": 2,
        "q_lora_rank": None,
        "n_shared_experts": 1,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "deepseek_v3": {**_LATENT, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1}
    | {"rope_parameters": _STRETCHED},
    "deepseek_v3, odd": {
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "rope_interleave": False,
        "attention_bias": True,
        "rope_parameters": None,
        "tie_word_embeddings": True,
    },
    "glm4_moe_lite": {**_LATENT, "mlp_layer_types": ["sparse", "dense"]},
    "dots1": {**_MOE, "n_routed_experts": 6, "num_experts_per_tok": 3, "num_experts": None}
    | {"n_shared_experts": 1, "sliding_window": 4, "max_window_layers": 1},
    "dots1, odd": {"norm_topk_prob": True, "first_k_dense_replace": 1, "sliding_window": None}
    | {"tie_word_embeddings": True, "attention_bias": True},
    "minimax_m2": {**_BASE, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16}
    | {"rotary_dim": 8},
    "ernie4_5_moe": {**_MOE, "moe_num_experts": 6, "moe_k": 2, "num_experts": None},
    "ernie4_5_moe, biases": {
        "use_bias": True,
        "moe_num_shared_experts": 0,
        "moe_layer_start_index": 0,
        "moe_layer_end_index": 0,
        "tie_word_embeddings": False,
    },
    "arcee": _BASE,
    "seed_oss": {**_BASE, "head_dim": 16, "attention_out_bias": True},
    "helium": {**_BASE, "head_dim": 8, "attention_bias": True, "mlp_bias": True},
    "ernie4_5": {**_BASE, "head_dim": 16},
    "ernie4_5, biases": {"use_bias": True, "tie_word_embeddings": False},
    "hunyuan_v1_dense": {**_BASE, "head_dim": 16, "tie_word_embeddings": True},
    "hunyuan_v1_dense, dynamic": {
        "attention_bias": True,
        "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}
        | {
            "rope_theta": 1e4,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "exaone4": {**_BASE, "sliding_window": 5, "sliding_window_pattern": 2},
    "exaone4, no windows": {
        "sliding_window": None,
        "sliding_window_pattern": None,
        "layer_types": ["full_attention"] * 2,
    },
    "apertus": _BASE,
    "apertus, plain": {
        "hidden_act": "relu2",
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "nemotron": {**_BASE, "head_dim": 16},
    "nemotron, biases": {"attention_bias": True, "mlp_bias": True, "partial_rotary_factor": 0.75},
    "phi": _BASE,
    "phi, norms": {"qk_layernorm": True, "partial_rotary_factor": 0.75},
    "gpt_bigcode": {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    | {"n_inner": 48, "pad_token_id": 0},
    "gpt_bigcode, many heads": {"multi_query": False, "tie_word_embeddings": False},
    "gpt_neo": {**_NEO, "num_layers": 2, "num_heads": 4, "window_size": 4}
    | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64},
    "biogpt": _OLD,
    "phi3": _BASE,
    "phi3, longrope": {
        "rope_parameters": {**_LONG_ROPE, "rope_theta": 1e4},
        "original_max_position_embeddings": 12,
        "sliding_window": 7,
        "num_attention_heads": 4,
    },
    "phi3, part of a head": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}
        | {"partial_rotary_factor": 0.5},
        "tie_word_embeddings": True,
    },
    "gemma": {**_GEMMA, "sliding_window": None, "num_key_value_heads": 1},
    "gemma2": {**_GEMMA, "query_pre_attn_scalar": 24},
    "gemma2, no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3_text": {**_GEMMA, "query_pre_attn_scalar": 24, "sliding_window_pattern": 2},
    "gemma3_text, linear": {
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "final_logit_softcapping": 5.0,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "cohere": _BASE,
    "cohere, norms": {"use_qk_norm": True, "attention_bias": True, "logit_scale": 0.5},
    "cohere2": {**_BASE, "sliding_window": 5, "sliding_window_pattern": 2},
    "glm": {**_BASE, "head_dim": 16},
    "glm4": {**_BASE, "head_dim": 16},
    "stablelm": {**_BASE, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    "stablelm, parallel": {
        "qk_layernorm": True,
        "use_parallel_residual": True,
        "use_qkv_bias": True,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75},
    },
    "starcoder2": {**_BASE, "sliding_window": 6},
    "starcoder2, no biases": {"use_bias": False, "tie_word_embeddings": False},
    "gpt_neox": _NEOX,
    "gpt_neox, in turn": {
        "use_parallel_residual": False,
        "attention_bias": False,
        "hidden_act": "gelu_fast",
        "tie_word_embeddings": True,
        "rotary_pct": 1.0,
    },
    "gptj": {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    | {"rotary_dim": 8, "n_inner": 48, "pad_token_id": 0},
    "opt": {**_OPT, "do_layer_norm_before": True},
    "opt, norms after": {
        "do_layer_norm_before": False,
        "word_embed_proj_dim": 20,
        "enable_bias": False,
        "activation_function": "gelu",
    },
    "falcon": {**_FALCON, "bias": True},
    "falcon, new": {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": False},
    "falcon, one norm": {
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
    },
    "falcon, alibi": {
        "alibi": True,
        "multi_query": False,
        "parallel_attn": False,
        "num_attention_heads": 4,
    },
    "mpt": {"vocab_size": 40, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}
    | {"pad_token_id": 0},
    "mpt, six heads": {
        "d_model": 48,
        "n_heads": 6,
        "attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.3},
        "tie_word_embeddings": False,
    },
    "bloom": {**_BLOOM, "n_head": 4},
    "bloom, six heads": {"hidden_size": 48, "n_head": 6, "tie_word_embeddings": False},
}
"""The first of a model type is whole; the others are named after it, and differ in these fields."""

SLOPED = ("bloom", "mpt")
"""Model types without positions; falcon has them in one of its forms."""
WRITTEN = ("gpt_oss", "ernie4_5_moe", "deepseek_v2")
"""Those with a softmax that no kernel is for."""


def fields(which: str) -> dict[str, Any]:
    """The fields of a configuration, of config.json."""
    kind = which.split(",")[0]
    whole = DECODERS.get(kind, {}) | DECODERS[which] | {"model_type": kind}
    return {name: value for name, value in whole.items() if value is not None or name in _NULLS}


_NULLS = (
    "attn_logit_softcapping final_logit_softcapping sliding_window sliding_window_pattern "
    "q_lora_rank"
).split()


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers so large that each matters; of a name the same, whoever asks."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    array = random.standard_normal(shape, np.float32)
    if len(shape) > 1 and "norm" not in name:
        return array * np.float32(1.5 / shape[-1] ** 0.5)
    # A gain is around 1; that of Gemma is 1 + w, which is as good around 2.
    gain = np.float32(("norm" in name or "ln_" in name) and "bias" not in name)
    return np.asarray(0.3 * array + gain)


def ids() -> np.ndarray:
    """Tokens of three rows, (3, LENGTH)."""
    return np.random.default_rng(0).integers(1, 40, (3, LENGTH))


def no_past(sizes: Mapping[str, Sequence[Any]], rows: int) -> dict[str, np.ndarray]:
    """What stands for a past of no tokens, given the sizes of a graph's inputs by their names."""
    pasts = {name: dims for name, dims in sizes.items() if name.startswith("past_")}
    fixed = {n: [d if isinstance(d, int) else 0 for d in dims[1:]] for n, dims in pasts.items()}
    return {name: np.zeros((rows, *dims), np.float32) for name, dims in fixed.items()}


def past_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """The past of the next call, of the results of one."""
    found = {n.replace("present.", "past_key_values."): x for n, x in results.items()}
    return {n.replace("present_", "past_"): x for n, x in found.items() if n != "logits"}


def mask() -> np.ndarray:
    """A full row, one with padding on the left, and one with it on the right."""
    found = np.ones((3, LENGTH), np.int64)
    found[1, :3] = found[2, 7:] = 0
    return found


def checkpoint(folder: Path, which: str) -> Path:
    """A folder of a small decoder, with the weights that the results are of."""
    given = fields(which)
    family = FAMILIES[given["model_type"]]
    module = family.tasks["text-generation"](Config(given))
    shapes = stored_shapes(family, module)
    (folder / "config.json").write_text(json.dumps(given))
    arrays = {name: weight(name, shape) for name, shape in shapes.items()}
    write_weights(folder / "model.safetensors", arrays)
    return folder
