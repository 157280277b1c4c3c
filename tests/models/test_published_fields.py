"""Fields of published decoders' configurations that the small ones of other tests do not have."""

from typing import Any

import pytest
from published_decoders import fields as small

from graphgen.models.published import FAMILIES
from graphgen.models.published.config import Config
from graphgen.models.published.frequencies import LongRotary
from graphgen.models.published.rope import rotary

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolLM3-3B": (
        "smollm3",
        {
            "attention_bias": False,
            "hidden_act": "silu",
            "layer_types": ["full_attention", "full_attention"],
            "max_window_layers": 28,
            "mlp_bias": False,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 0],
            "rope_scaling": None,
            "sliding_window": None,
            "use_sliding_window": False,
        },
    ),
    "granite-3.3-2b-base": (
        "granite",
        {
            "attention_bias": False,
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "hidden_act": "silu",
            "logits_scaling": 8.0,
            "mlp_bias": False,
            "residual_multiplier": 0.22,
            "rope_scaling": None,
        },
    ),
    "OLMo-2-0425-1B": (
        "olmo2",
        {"attention_bias": False, "hidden_act": "silu", "rope_scaling": None},
    ),
    "Phi-3-mini-4k-instruct": (
        "phi3",
        {
            "attention_bias": False,
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
            "hidden_act": "silu",
            "original_max_position_embeddings": 64,
            "rope_scaling": None,
            "sliding_window": 2047,
        },
    ),
    "Phi-4-mini-instruct": (
        "phi3",
        {
            "attention_bias": False,
            "full_attn_mod": 1,
            "hidden_act": "silu",
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "mlp_bias": False,
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {
                "long_factor": [1, 1, 1],
                "short_factor": [1, 1, 1],
                "type": "longrope",
            },
            "sliding_window": 262144,
        },
    ),
    "gemma-2b": (
        "gemma",
        {
            "attention_bias": False,
            "hidden_act": "gelu",
            "hidden_activation": None,
            "rope_scaling": None,
        },
    ),
    "gemma-2-2b": (
        "gemma2",
        {
            "attention_bias": False,
            "attn_logit_softcapping": 50.0,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": 30.0,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
        },
    ),
    "gemma-3-1b-pt": (
        "gemma3_text",
        {
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": None,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
    ),
    "c4ai-command-r-v01": (
        "cohere",
        {
            "attention_bias": False,
            "hidden_act": "silu",
            "logit_scale": 0.0625,
            "model_max_length": 131072,
            "use_qk_norm": False,
        },
    ),
    "c4ai-command-r7b-12-2024": (
        "cohere2",
        {
            "attention_bias": False,
            "cache_implementation": "hybrid",
            "head_dim": 8,
            "hidden_act": "silu",
            "layer_switch": 4,
            "logit_scale": 0.25,
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rope_scaling": None,
            "rotary_pct": 1.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "use_parallel_block": True,
            "use_parallel_embedding": False,
            "use_qk_norm": False,
        },
    ),
    "glm-4-9b-hf": (
        "glm",
        {"attention_bias": True, "hidden_act": "silu", "partial_rotary_factor": 0.5},
    ),
    "GLM-4-9B-0414": (
        "glm4",
        {"attention_bias": False, "hidden_act": "silu", "partial_rotary_factor": 0.5},
    ),
    "stablelm-3b-4e1t": (
        "stablelm",
        {
            "hidden_act": "silu",
            "partial_rotary_factor": 0.25,
            "qk_layernorm": False,
            "rope_scaling": None,
            "use_parallel_residual": False,
            "use_qkv_bias": True,
        },
    ),
    "starcoder2-3b": (
        "starcoder2",
        {
            "activation_function": "gelu_pytorch_tanh",
            "attention_softmax_in_fp32": True,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_epsilon": 1e-05,
            "mlp_type": "default",
            "norm_epsilon": 1e-05,
            "norm_type": "layer_norm",
            "scale_attention_softmax_in_fp32": True,
            "scale_attn_weights": True,
            "sliding_window": 4096,
            "use_bias": True,
        },
    ),
    "pythia-160m": (
        "gpt_neox",
        {
            "attention_bias": True,
            "hidden_act": "gelu",
            "rope_scaling": None,
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
            "use_parallel_residual": True,
        },
    ),
    "gpt-j-6b": (
        "gptj",
        {
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-05,
            "n_inner": None,
            "rotary": True,
            "rotary_dim": 8,
            "scale_attn_weights": True,
            "summary_activation": None,
            "summary_use_proj": True,
        },
    ),
    "opt-125m": (
        "opt",
        {
            "_remove_final_layer_norm": False,
            "activation_function": "relu",
            "do_layer_norm_before": True,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "prefix": "</s>",
            "word_embed_proj_dim": 32,
        },
    ),
    "falcon-7b": (
        "falcon",
        {
            "alibi": False,
            "apply_residual_connection_post_layernorm": False,
            "auto_map": {},
            "bias": False,
            "layer_norm_epsilon": 1e-05,
            "multi_query": True,
            "new_decoder_architecture": False,
            "parallel_attn": True,
        },
    ),
    "bloom-560m": (
        "bloom",
        {
            "apply_residual_connection_post_layernorm": False,
            "attention_softmax_in_fp32": True,
            "bias_dropout_fusion": True,
            "layer_norm_epsilon": 1e-05,
            "masked_softmax_fusion": True,
            "n_inner": None,
            "offset_alibi": 100,
            "seq_length": 2048,
            "skip_bias_add": True,
            "skip_bias_add_qkv": False,
            "slow_but_exact": False,
            "unk_token_id": 0,
        },
    ),
    "Mixtral-8x7B-v0.1": (
        "mixtral",
        {
            "hidden_act": "silu",
            "num_experts_per_tok": 2,
            "num_local_experts": 5,
            "sliding_window": None,
        },
    ),
    "Qwen1.5-MoE-A2.7B": (
        "qwen2_moe",
        {
            "decoder_sparse_step": 1,
            "hidden_act": "silu",
            "max_window_layers": 21,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
            "num_experts": 6,
            "num_experts_per_tok": 4,
            "shared_expert_intermediate_size": 40,
            "sliding_window": 32768,
            "use_sliding_window": False,
        },
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        {
            "attention_bias": True,
            "experts_per_token": 3,
            "hidden_act": "silu",
            "initial_context_length": 4096,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_experts_per_tok": 3,
            "output_router_logits": False,
            "rope_parameters": None,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "router_aux_loss_coef": 0.9,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
        },
    ),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        {
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 16,
            "hidden_act": "silu",
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "rope_scaling": None,
            "sliding_window": None,
            "use_sliding_window": False,
        },
    ),
}
"""The model type of each, and fields as they are published."""


@pytest.mark.parametrize("name", DECODERS)
def test_a_published_configuration_is_accepted(name: str) -> None:
    kind, published = DECODERS[name]
    for task in FAMILIES[kind].tasks.values():
        config = Config(small(kind) | published | {"architectures": ["X"], "use_cache": True})
        task(config)
        config.finish()


@pytest.mark.parametrize(
    ("kind", "outer", "inner", "length"),
    [
        ("phi3", None, 16, 4096),
        ("phi3", 12, 16, 12),
        ("llama", None, 16, 16),
        ("llama", 12, 16, 12),
        ("llama", None, None, 64),
    ],
)
def test_where_long_texts_begin(kind: str, outer: Any, inner: Any, length: int) -> None:
    """The class of Phi-3 has the field: its default comes before that of rope_parameters."""
    name = "original_max_position_embeddings"
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    given = {"rope_type": "longrope", **factors, name: inner}
    fields = {"model_type": kind, "max_position_embeddings": 64, name: outer}
    found = rotary(Config(fields | {"rope_parameters": given}), 8)
    assert isinstance(found, LongRotary)
    assert found.length == length
