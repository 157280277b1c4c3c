"""Configurations of published checkpoints with their real fields, and small ones made of them."""

import copy
import json
from pathlib import Path
from typing import Any

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "fixtures" / "published_configurations.json").read_text()
)
"""By name: the task that the checkpoint is for, and the fields of its config.json."""

VOCABULARY = 64
_WIDTHS = ("hidden_size", "dim", "d_model", "n_embd", "n_embed")
_HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads")
_HEADS += ("encoder_attention_heads", "decoder_attention_heads")
_GROUPS = ("num_key_value_heads", "num_kv_heads")
_LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_decoder_layers")
_LAYERS += ("encoder_layers", "decoder_layers")
_INNER = ("intermediate_size", "hidden_dim", "ffn_dim", "d_ff", "encoder_ffn_dim")
_INNER += ("decoder_ffn_dim", "ffn_hidden_size", "n_inner", "moe_intermediate_size")
_INNER += ("shared_expert_intermediate_size",)
_EXPERTS = ("num_experts", "num_local_experts")
_PER_LAYER = ("layer_types", "no_rope_layers", "attention_layers")
_OF_HEADS = ("head_dim", "d_kv", "attention_head_size")
_PER_HEAD = 16
_LATENT = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8} | {
    "v_head_dim": 16,
    "n_routed_experts": 16,
    "first_k_dense_replace": 1,
}


def small(fields: dict[str, Any]) -> dict[str, Any]:
    """The same configuration with few layers, features and tokens; all else is as published."""
    found = copy.deepcopy(fields)
    width = next(name for name in _WIDTHS if name in found)
    before, heads = found[width], next(found[name] for name in _HEADS if name in found)
    groups = next((found[name] for name in _GROUPS if found.get(name)), heads)
    shared = 1 if groups < heads and groups == 1 else 2
    count = {heads: 7 if heads % 2 else 4}.get(groups, min(heads // groups, 4) * shared)
    own = found.get("head_dim", before // heads) != before // heads
    found[width] = count * (12 if own else _PER_HEAD)
    sizes = dict.fromkeys(_HEADS, count) | dict.fromkeys(_OF_HEADS, _PER_HEAD)
    sizes |= dict.fromkeys(_GROUPS, count if groups == heads else shared)
    sizes |= {name: 4 * found[width] if found.get(name) == 4 * before else 72 for name in _INNER}
    sizes |= _LATENT | {"rotary_dim": 8, "vocab_size": VOCABULARY}
    sizes |= {"decoder_vocab_size": VOCABULARY, "pooler_hidden_size": found[width]}
    for name in ("embedding_size", "emb_size", "word_embed_proj_dim"):
        sizes[name] = found[width] if found.get(name) == before else 20
    found |= {name: size for name, size in sizes.items() if found.get(name)}
    for name in _LAYERS:
        if found.get(name):
            found[name] = min(found[name], 7 if "gemma3" in found["model_type"] else 3)
    layers = next(found[name] for name in _LAYERS if name in found)
    for name in _PER_LAYER:
        if found.get(name):
            found[name] = found[name][:layers]
    if found.get("attention_types"):  # the same kinds, and how often they come
        found["attention_types"] = [[found["attention_layers"], 1]]
    for name in _EXPERTS:
        if found.get(name):
            found[name] = min(found[name], 8)
    for name in ("sliding_window", "window_size"):
        if found.get(name):
            found[name] = 5  # so that it counts for short texts
    scaling = found.get("rope_scaling") or {}
    for name in ("long_factor", "short_factor"):
        if name in scaling:
            count = int(_PER_HEAD * found.get("partial_rotary_factor", 1.0)) // 2
            scaling[name] = scaling[name][:count]
    return _renumbered(found)


def _renumbered(fields: dict[str, Any]) -> dict[str, Any]:
    """With tokens of the small vocabulary: those beyond it are its last ones."""
    known: dict[int, int] = {}

    def token(value: Any) -> Any:
        if isinstance(value, list):
            return [token(one) for one in value]
        if type(value) is int and value >= VOCABULARY:
            return known.setdefault(value, VOCABULARY - 1 - len(known))
        return value

    tokens = ("_token_id", "_token_ids", "bad_words_ids")
    return {name: token(x) if name.endswith(tokens) else x for name, x in fields.items()}
