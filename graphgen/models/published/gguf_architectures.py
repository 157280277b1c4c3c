"""The architectures whose GGUF files are read, with the names of the gguf package's tables.

https://github.com/ggml-org/llama.cpp/tree/master/gguf-py
"""

from graphgen.models.published.gguf_architecture import (
    FIELDS,
    HEADS,
    LAYER,
    MEAN,
    PAIRED,
    WINDOW,
    WITH_RMS,
    falcon,
    gemma_scale,
    grouped,
    has,
    like_llama,
    phi3,
    starcoder2,
    turned,
)
from graphgen.models.published.gguf_experts import ROUTED

_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SANDWICH = LAYER | _AFTER | {"ffn_norm": "pre_feedforward_layernorm"}
_MEGATRON = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_BIASES = has(attention_bias="attn_q.bias")
_CAPS = {f"{x}_logit_softcapping": f"{x}_logit_softcapping" for x in ("attn", "final")}


def _others(body: str, table: str, norm: str, head: str = "lm_head") -> dict[str, str]:
    names = {"token_embd": f"{body}.{table}", "output_norm": f"{body}.{norm}"}
    return names | {"output": head}


_LLAMA = like_llama(
    "llama", derive=has(attention_bias="attn_q.bias", mlp_bias="ffn_up.bias"), order=PAIRED
)
_COHERE = FIELDS | {MEAN: "layer_norm_eps", "logit_scale": "logit_scale"}

ARCHITECTURES = {
    **ROUTED,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": like_llama("qwen2"),
    "qwen3": like_llama("qwen3"),
    "smollm3": like_llama("smollm3", derive=_LLAMA.derive, order=PAIRED),
    "granite": like_llama(
        "granite",
        fields=WITH_RMS
        | {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        derive=_LLAMA.derive,
        order=PAIRED,
    ),
    "gemma": like_llama("gemma", gains=True),
    "gemma2": like_llama(
        "gemma2",
        WINDOW,
        layer=_SANDWICH,
        fields=WITH_RMS | _CAPS | {WINDOW: "sliding_window"},
        derive=gemma_scale(46),
        lacks=("query_pre_attn_scalar",),
        gains=True,
    ),
    "gemma3_text": like_llama(
        "gemma3",
        WINDOW,
        layer=_SANDWICH,
        fields=WITH_RMS
        | {
            "final_logit_softcapping": "final_logit_softcapping",
            WINDOW: "sliding_window",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        derive=gemma_scale(62),
        lacks=("query_pre_attn_scalar",),
        gains=True,
    ),
    "olmo2": like_llama("olmo2", layer=LAYER | _AFTER, derive=_BIASES),
    "phi3": like_llama(
        "phi3",
        WINDOW,
        "rope.dimension_count",
        layer=LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        derive=turned("partial_rotary_factor", phi3),
    ),
    "glm4": like_llama(
        "glm4",
        "rope.dimension_count",
        layer=LAYER
        | {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        derive=turned("partial_rotary_factor", _BIASES),
    ),
    "stablelm": like_llama(
        "stablelm",
        "rope.dimension_count",
        layer=LAYER | {f"attn_{x}_norm": f"self_attn.{x}_layernorm.norms.{{}}" for x in "qk"},
        fields=FIELDS | {MEAN: "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
        derive=turned(
            "partial_rotary_factor",
            has(use_qkv_bias="attn_q.bias", qk_layernorm="attn_q_norm.weight"),
        ),
    ),
    "starcoder2": like_llama(
        "starcoder2",
        layer=LAYER | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        fields=FIELDS | {MEAN: "norm_epsilon"},
        derive=starcoder2,
        lacks=("sliding_window",),
    ),
    "cohere": like_llama(
        "command-r",
        "logit_scale",
        fields=_COHERE,
        derive=has(attention_bias="attn_q.bias", use_qk_norm="attn_q_norm.weight"),
    ),
    "cohere2": like_llama(
        "cohere2",
        "logit_scale",
        WINDOW,
        fields=_COHERE | {WINDOW: "sliding_window"},
        derive=_BIASES,
    ),
    "gpt2": like_llama(
        "gpt2",
        "context_length",
        layer={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        others=_others("transformer", "wte", "ln_f") | {"position_embd": "transformer.wpe"},
        layers="transformer.h",
        fields={
            "block_count": "n_layer",
            "embedding_length": "n_embd",
            "feed_forward_length": "n_inner",
            HEADS: "n_head",
            "context_length": "n_positions",
            "vocab_size": "vocab_size",
            MEAN: "layer_norm_epsilon",
        },
    ),
    "falcon": like_llama(
        "falcon",
        "attention.head_count_kv",
        layer=_MEGATRON
        | {"attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense"},
        instead={"attn_norm_2": {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}},
        others=_others("transformer", "word_embeddings", "ln_f"),
        layers="transformer.h",
        fields=FIELDS | {MEAN: "layer_norm_epsilon", "feed_forward_length": "ffn_hidden_size"},
        derive=falcon,
        order={"attn_qkv": grouped},
    ),
    "gpt_neox": like_llama(
        "gptneox",
        "rope.dimension_count",
        "use_parallel_residual",
        layer=_MEGATRON
        | {"attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"},
        others=_others("gpt_neox", "embed_in", "final_layer_norm", "embed_out"),
        layers="gpt_neox.layers",
        fields=FIELDS
        | {
            MEAN: "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
            "rope.freq_base": "rotary_emb_base",
        },
        derive=turned("rotary_pct"),
        order={"attn_qkv": lambda rows, heads, kv_heads: grouped(rows, heads, heads)},
    ),
}
"""By model_type."""
