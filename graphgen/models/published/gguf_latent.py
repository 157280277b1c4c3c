"""The architecture of GGUF with attention to latent vectors: DeepSeek-V2, V3 and others."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.models.published.gguf_architecture import LAYER, WITH_RMS, Derive, each, like_llama
from graphgen.models.published.gguf_choices import (
    CHOSEN_BY,
    GATING,
    GROUPED,
    GROUPS,
    NORMED,
    SIGMOID,
    SOFTMAX,
    by_scores,
    experts_of,
    guesses,
)
from graphgen.models.published.gguf_experts import COUNT
from graphgen.models.published.gguf_pairs import made, two
from graphgen.models.published.gguf_rope import SCALING
from graphgen.operands import Array
from graphgen.safetensors import Weight


def _latent(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """The sizes of attention to latent vectors; of keys and values, files say those of the cache.

    Older files say them of heads, and nothing of groups of experts.
    """
    names = ("attention.kv_lora_rank", "rope.dimension_count")
    rank, part = (own.pop(name) for name in names)
    key, value = (own.pop(f"attention.{x}_length", None) for x in ("key", "value"))
    heads = [own.pop(f"attention.{x}_length_mla", None) for x in ("key", "value")]
    if heads != [None, None] and (key, value) != (rank + part, rank):
        own["attention.key_length"] = key
    key, value = (key, value) if heads == [None, None] else heads
    if own.get("attention.head_count_kv") in (1, own["attention.head_count"]):
        own.pop("attention.head_count_kv")
    if not all(type(x) is int for x in (rank, part, key, value)):
        own["attention.key_length"] = key
        return {}
    own.setdefault(GROUPS, "missing")
    normed = bool(own.pop(NORMED, False))
    return {
        "kv_lora_rank": rank,
        "q_lora_rank": own.pop("attention.q_lora_rank", None),
        "qk_rope_head_dim": part,
        "qk_nope_head_dim": key - part,
        "v_head_dim": value,
        "norm_topk_prob": normed,
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in tensors,
    }


def _v2(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Groups count where there are several."""
    groups = own.get(GROUPS)
    several = {"topk_method": "group_limited_greedy" if groups != 1 else "greedy"}
    return several if isinstance(groups, int) else {}


def _growth(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """A tenth of mscale_all_dim; mscale is the same in all published checkpoints."""
    growth = own.pop(f"{SCALING}yarn_log_multiplier", None)
    if not isinstance(growth, float):
        return {}
    return dict.fromkeys(("mscale", "mscale_all_dim"), float(f"{10 * growth:.6g}"))


def _with_heads(found: dict[str, Weight], fields: Mapping[str, Any]) -> dict[str, Weight]:
    """Keys and values of latent vectors are one weight, head by head; keys are turned."""
    left = dict(found)
    for before, *both in two(found, "k_b_proj.weight", "v_b_proj.weight"):
        k, v = (left[name] for name in both)
        if len(k.shape) != 3 or len(v.shape) != 3:
            continue
        rows = k.shape[0] * (k.shape[2] + v.shape[1])
        name = f"{before}kv_b_proj.weight"
        where = (k.path, name, ir.DataType.FLOAT, (rows, k.shape[1]), k.offset)
        left[name] = made(where, partial(_heads, k, v), k, v)
        for own in both:
            del left[own]
    return left


def _heads(k: Weight, v: Weight) -> Array:
    both = [np.swapaxes(k.read(), 1, 2).astype(np.float32), v.read().astype(np.float32)]
    found: Array = np.concatenate(both, axis=1)
    return found.reshape(-1, found.shape[2])


_OF_LATENT: dict[str, Any] = {
    "layer": LAYER
    | experts_of("mlp", "gate.e_score_correction_bias")
    | {"attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa"}
    | {f"attn_{x}": f"self_attn.{x}_proj" for x in ("q_a", "q_b", "k_b", "v_b", "kv_b")}
    | {f"attn_{x}_norm": f"self_attn.{x}_layernorm" for x in ("q_a", "kv_a")},
    "fields": {n: x for n, x in WITH_RMS.items() if x not in ("head_dim", "num_key_value_heads")}
    | CHOSEN_BY
    | GROUPED,
    "yarn": _growth,
    "finish": _with_heads,
}
_NEEDED = ("attention.kv_lora_rank", "rope.dimension_count", COUNT)


def _deepseek(sigmoid: bool, *derive: Derive) -> Any:
    return like_llama(
        "deepseek2",
        *_NEEDED,
        when=lambda own, tensors: (own.get(GATING) == SIGMOID) is sigmoid,
        derive=each(guesses, by_scores(SIGMOID if sigmoid else SOFTMAX), _latent, *derive),
        **_OF_LATENT,
    )


_V3 = _deepseek(True)

LATENT = {
    "deepseek_v3": _V3,
    "deepseek_v2": _deepseek(False, _v2),
    "kimi_k2": _V3,
    "glm4_moe_lite": _V3,
}
"""By model_type."""
