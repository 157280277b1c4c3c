"""The architectures of GGUF near Llama's: other norms, turns, windows and activations."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.models.published.few_bits import Made
from graphgen.models.published.gguf_architecture import (
    BIASES,
    BOTH_BIASES,
    FIELDS,
    LAYER,
    MEAN,
    PAIRED,
    WINDOW,
    WITH_RMS,
    divided,
    each,
    has,
    like_llama,
    local,
    turned,
    unstretched,
)
from graphgen.models.published.gguf_rope import same
from graphgen.safetensors import Weight

AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TEMPERATURE, _GROWTH = "attention.temperature_scale", "rope.scaling.yarn_log_multiplier"


def _window(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Without a window, no layer has one."""
    found = local(own, tensors)
    return found if WINDOW in own else {"sliding_window": None, **found}


def _ministral(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """How queries grow; llama.cpp takes 1 for mscale, as in the published checkpoints."""
    beta, growth = own.pop(_TEMPERATURE, None), own.pop(_GROWTH, None)
    found = {"mscale": None if growth is None else 1.0, "mscale_all_dim": growth}
    found["llama_4_scaling_beta"] = beta
    return {name: value for name, value in found.items() if value is not None}


def _olmo(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """The norm has no field of its own."""
    if same(own.get(MEAN), 1e-5):
        own.pop(MEAN)
    return {}


_XIELU = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}


def _apertus(found: dict[str, Weight], fields: Mapping[str, Any]) -> dict[str, Weight]:
    """The weights of the activation are fields, with a number for each layer."""
    made = dict(found)
    for name, shape in _XIELU.items():
        numbers = fields.get(f"xielu.{name}")
        for layer, number in enumerate(numbers if isinstance(numbers, np.ndarray) else []):
            own = f"model.layers.{layer}.mlp.act_fn.{name}"
            array = np.full(shape, number, np.float32)
            where = (Path(), own, ir.DataType.FLOAT, shape, 0)
            made[own] = Made(*where, make=lambda array=array: array)  # type: ignore[misc]
    return made


_NEAR_QWEN = LAYER | {"post_attention_norm": "post_attention_layernorm"}
_MEANS = FIELDS | {MEAN: "layer_norm_eps"}
_OF_HEADS = {"attn_q_norm": "query_layernorm", "attn_k_norm": "key_layernorm"}

NEAR = {
    "arcee": like_llama("arcee", derive=BOTH_BIASES, order=PAIRED),
    "seed_oss": like_llama(
        "seed_oss",
        layer=_NEAR_QWEN,
        derive=each(
            divided, has(attention_bias="attn_q.bias", attention_out_bias="attn_output.bias")
        ),
    ),
    "ernie4_5": like_llama("ernie4_5", derive=each(divided, has(use_bias="attn_q.bias"))),
    "hunyuan_v1_dense": like_llama(
        "hunyuan-dense",
        layer=LAYER | {part: f"self_attn.{name}" for part, name in _OF_HEADS.items()},
        derive=BIASES,
    ),
    "exaone4": like_llama(
        "exaone4",
        layer=LAYER | AFTER,
        fields=WITH_RMS | {WINDOW: "sliding_window"},
        derive=_window,
    ),
    "apertus": like_llama(
        "apertus",
        layer=LAYER | {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        derive=each(BIASES, unstretched),
        finish=_apertus,
    ),
    "nemotron": like_llama(
        "nemotron",
        "rope.dimension_count",
        fields=FIELDS | {MEAN: "norm_eps"},
        derive=turned("partial_rotary_factor", BOTH_BIASES),
        gains=True,
    ),
    "phi": like_llama(
        "phi2",
        "rope.dimension_count",
        layer=LAYER
        | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        others={
            "token_embd": "model.embed_tokens",
            "output_norm": "model.final_layernorm",
            "output": "lm_head",
        },
        fields=_MEANS,
        derive=turned("partial_rotary_factor"),
    ),
    "glm": like_llama(
        "chatglm",
        "rope.dimension_count",
        layer=LAYER | {"ffn_up": "mlp.gate_up_proj"},
        derive=turned("partial_rotary_factor", BIASES, divided),
    ),
    "ministral3": like_llama("mistral3", derive=divided, order=PAIRED, yarn=_ministral),
    "olmo": like_llama(
        "olmo",
        fields=FIELDS | {"attention.clamp_kqv": "clip_qkv"},
        derive=_olmo,
        order=PAIRED,
    ),
    "olmo2": like_llama(
        "olmo2", when=lambda own, tensors: WINDOW not in own, layer=LAYER | AFTER, derive=BIASES
    ),
    "olmo3": like_llama(
        "olmo2",
        WINDOW,
        when=lambda own, tensors: WINDOW in own,
        layer=LAYER | AFTER,
        fields=WITH_RMS | {WINDOW: "sliding_window"},
        derive=each(BIASES, local),
    ),
}
"""By model_type."""
