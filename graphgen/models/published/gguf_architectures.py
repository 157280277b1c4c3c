"""The architectures whose GGUF files are read, with the names of the gguf package's tables.

https://github.com/ggml-org/llama.cpp/tree/master/gguf-py
"""

from collections.abc import Collection
from typing import Any

from graphgen.models.published.gguf_architecture import (
    BIASES,
    BOTH_BIASES,
    FIELDS,
    HEADS,
    LAYER,
    MEAN,
    PAIRED,
    WINDOW,
    WITH_RMS,
    Derive,
    each,
    has,
    like_llama,
    turned,
    without_mamba,
)
from graphgen.models.published.gguf_encoders import ENCODERS
from graphgen.models.published.gguf_experts import COUNT, ROUTED
from graphgen.models.published.gguf_near_llama import AFTER, NEAR
from graphgen.models.published.gguf_older import OLDER
from graphgen.models.published.gguf_routed import CHOSEN


def _gemma_scale(largest: int) -> Derive:
    """Gemma 2 and 3: the features of a head, or in the model of most layers those of all, divided.

    Files lack what the scores are divided by; the published checkpoints have these.
    """

    def derive(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        divided = own["embedding_length"] // own[HEADS]
        head = own.get("attention.key_length", 256)
        return {"query_pre_attn_scalar": divided if own["block_count"] == largest else head}

    return derive


def _phi3(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """A window of 0 stands for none; the length of longrope is a field of the configuration."""
    window = own.pop(WINDOW) or None
    original = own.get("rope.scaling.original_context_length")
    found = {"sliding_window": window, "original_max_position_embeddings": original}
    return {name: value for name, value in found.items() if value is not None}


def _starcoder2(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Files lack the window, which is 4,096 in all published checkpoints."""
    return {"sliding_window": 4096, **has(use_bias="attn_q.bias")(own, tensors)}


_SANDWICH = LAYER | AFTER | {"ffn_norm": "pre_feedforward_layernorm"}
_CAPS = {f"{x}_logit_softcapping": f"{x}_logit_softcapping" for x in ("attn", "final")}
_LLAMA = like_llama(
    "llama", when=lambda own, tensors: not own.get(COUNT), derive=BOTH_BIASES, order=PAIRED
)
_COHERE = FIELDS | {MEAN: "layer_norm_eps", "logit_scale": "logit_scale"}

ARCHITECTURES = {
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
        derive=each(_LLAMA.derive, without_mamba),
        order=PAIRED,
    ),
    "gemma": like_llama("gemma", gains=True),
    "gemma2": like_llama(
        "gemma2",
        WINDOW,
        layer=_SANDWICH,
        fields=WITH_RMS | _CAPS | {WINDOW: "sliding_window"},
        derive=_gemma_scale(46),
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
        derive=_gemma_scale(62),
        lacks=("query_pre_attn_scalar",),
        gains=True,
    ),
    "phi3": like_llama(
        "phi3",
        WINDOW,
        "rope.dimension_count",
        layer=LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        derive=turned("partial_rotary_factor", _phi3),
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
        derive=turned("partial_rotary_factor", BIASES),
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
        derive=_starcoder2,
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
        derive=BIASES,
    ),
    **NEAR,
    **OLDER,
    **ROUTED,
    **CHOSEN,
    **ENCODERS,
}
"""By model_type."""
