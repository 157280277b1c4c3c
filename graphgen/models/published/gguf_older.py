"""The architectures of GGUF that are not called as Llama: GPT-2, Falcon, BLOOM, MPT and others."""

from collections.abc import Collection
from typing import Any

from graphgen.models.published.gguf_architecture import (
    FIELDS,
    HEADS,
    MEAN,
    Derive,
    grouped,
    like_llama,
    turned,
)

_MEGATRON = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_OF_GPT2: dict[str, Any] = {
    "layer": {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    "layers": "transformer.h",
    "fields": {
        "block_count": "n_layer",
        "embedding_length": "n_embd",
        "feed_forward_length": "n_inner",
        HEADS: "n_head",
        "context_length": "n_positions",
        "vocab_size": "vocab_size",
        MEAN: "layer_norm_epsilon",
    },
}


def _others(body: str, table: str, norm: str, head: str = "lm_head") -> dict[str, str]:
    names = {"token_embd": f"{body}.{table}", "output_norm": f"{body}.{norm}"}
    return names | {"output": head}


def falcon(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """One head of keys in Falcon 7B; a few, and one or two norms, in 11B, 40B and 180B."""
    own.pop("tensor_data_layout", None)
    few = own.pop("attention.head_count_kv")
    found = {"new_decoder_architecture": few > 1, "bias": "blk.0.attn_qkv.bias" in tensors}
    if few == 1:
        return {**found, "multi_query": True}
    norms = 2 if "blk.0.attn_norm_2.weight" in tensors else 1
    return {**found, "num_kv_heads": few, "num_ln_in_parallel_attn": norms}


def _as_many_keys(*more: str) -> Derive:
    """The number of heads of keys, which is that of heads or 1, and what is always the same."""

    def derive(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        few, found = own.get(_KV), dict[str, Any]()
        if "multi_query" in more and few in (1, own[HEADS]):
            found["multi_query"] = own.pop(_KV) == 1
        elif few == own[HEADS]:
            own.pop(_KV)
        if own.get("feed_forward_length") == 4 * own["embedding_length"]:
            own.pop("feed_forward_length")
        return found

    return derive


def _mpt(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """What is said of the attention; slopes of another largest bias than 8 are not built."""
    found = _as_many_keys()(own, tensors)
    attention = {"alibi": own.pop(_ALIBI) > 0.0} if own.get(_ALIBI) in (0.0, 8.0) else {}
    if (clip := own.pop(_CLIP, None)) is not None:
        attention["clip_qkv"] = clip
    return {**found, "attn_config": attention}


_KV, _ALIBI, _CLIP = f"{HEADS}_kv", "attention.max_alibi_bias", "attention.clamp_kqv"

OLDER = {
    "gpt2": like_llama(
        "gpt2",
        "context_length",
        others=_others("transformer", "wte", "ln_f") | {"position_embd": "transformer.wpe"},
        **_OF_GPT2,
    ),
    "gpt_bigcode": like_llama(
        "starcoder",
        "context_length",
        _KV,
        others=_others("transformer", "wte", "ln_f") | {"position_embd": "transformer.wpe"},
        derive=_as_many_keys("multi_query"),
        **_OF_GPT2,
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
    "bloom": like_llama(
        "bloom",
        layer=_MEGATRON
        | {"attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense"},
        others=_others("transformer", "word_embeddings", "ln_f")
        | {"token_embd_norm": "transformer.word_embeddings_layernorm"},
        layers="transformer.h",
        fields={
            "block_count": "n_layer",
            "embedding_length": "hidden_size",
            HEADS: "n_head",
            "context_length": "seq_length",
            "vocab_size": "vocab_size",
            MEAN: "layer_norm_epsilon",
        },
        derive=_as_many_keys(),
        order={"attn_qkv": lambda rows, heads, kv_heads: grouped(rows, heads, heads)},
    ),
    "mpt": like_llama(
        "mpt",
        "attention.max_alibi_bias",
        layer={
            "attn_norm": "norm_1",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
        others=_others("transformer", "wte", "norm_f"),
        layers="transformer.blocks",
        fields={
            "block_count": "n_layers",
            "embedding_length": "d_model",
            HEADS: "n_heads",
            "context_length": "max_seq_len",
            "vocab_size": "vocab_size",
            MEAN: "layer_norm_epsilon",
        },
        derive=_mpt,
    ),
}
"""By model_type."""
