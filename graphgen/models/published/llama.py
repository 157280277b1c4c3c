"""Decoders whose fields and weights are named as Llama's, and what sets each apart."""

from functools import partial
from typing import Any

from graphgen import nn
from graphgen.models.published.config import Config
from graphgen.models.published.family import Source
from graphgen.models.published.named import (
    all_turned,
    divided_heads,
    family,
    feed_forward,
    head_dim,
    layer_windows,
    rms_norm,
    specification,
    windows,
)
from graphgen.models.published.rope import given_parameters
from graphgen.models.published.specification import Sight, Specification, each_head
from graphgen.models.published.weights import Stack
from graphgen.parts import Part


def llama(config: Config, **own: Any) -> Specification:
    """Llama, Mistral and Ministral (arXiv 2302.13971, 2310.06825)."""
    # What the publishers of SmolLM2, Falcon3 and InternLM2 note about their architecture.
    config.expect("bias", False)
    config.expect("is_llama_config", True)
    config.expect("rope_interleaved", False)
    config.expect("activation", "swiglu")
    return specification(config, **own)


_TEMPERED = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""What Ministral 3's class takes where a configuration says nothing of its positions."""


def ministral3(config: Config) -> Specification:
    """Positions of YaRN, beyond which queries grow, unless the configuration says others."""
    given = given_parameters(config) or _TEMPERED
    return llama(config, sights=all_turned(config, windows(config), parameters=given))


def qwen2(config: Config) -> Specification:
    """Biases of queries, keys and values (arXiv 2407.10671)."""
    config.ignore("dual_chunk_attention_config")  # of Qwen2.5-1M; transformers never reads it
    config.expect("use_mrope", False)
    bias = config.take("attention_bias", bool, False)
    return specification(config, attention={"bias": True, "output_bias": bias})


def qwen3(config: Config) -> Specification:
    """Norms of each head's queries and keys (arXiv 2505.09388)."""
    config.expect("use_mrope", False)
    return specification(config, attention={"norm": rms_norm(config)})


def smollm3(config: Config) -> Specification:
    """Layers without positions (SmolLM3; NoPE, arXiv 2501.18795)."""
    config.ignore("max_window_layers")  # copied from Qwen2, and never read
    layers = config.take("num_hidden_layers", int)
    every = config.take("no_rope_layer_interval", int, 4)
    turned = config.raw("no_rope_layers", [int((i + 1) % every != 0) for i in range(layers)])
    if (
        not isinstance(turned, list)
        or len(turned) < layers
        or not {*map(repr, turned)} <= {"0", "1"}
    ):
        config.refuse("no_rope_layers", turned, f"a list of {layers} of 1 (with rope) and 0")
    window = config.optional("sliding_window", int)
    used = config.take("use_sliding_window", bool, False) and window is not None
    found = layer_windows(config, window, [used and not turned[i] for i in range(layers)])
    sights = [
        sight if turned[i] else Sight(sight.window)
        for i, sight in enumerate(all_turned(config, found))
    ]
    return specification(config, sights=sights)


def phi3(config: Config) -> Specification:
    """Packed weights and LongRoPE (Phi-3 and Phi-4, arXiv 2404.14219)."""
    config.expect("attention_bias", False)
    config.expect("mlp_bias", False)
    config.expect("lm_head_bias", False)
    config.ignore("full_attn_mod", "interpolate_factor")
    config.take("original_max_position_embeddings", int, 4096)  # of longrope alone
    attention = {"bias": False, "output_bias": False}
    return specification(config, attention=attention, feed_forward=feed_forward(config, bias=False))


def glm(config: Config) -> Specification:
    """GLM-4 (arXiv 2406.12793): neighbors are turned, in half of each head."""
    return specification(
        config,
        attention={"output_bias": False, "interleaved": True},
        feed_forward=feed_forward(config, bias=False),
        norms=("norm1", "norm2", *(("after1", "after2") if config.model_type == "glm4" else ())),
    )


def stablelm(config: Config) -> Specification:
    """StableLM 2 (arXiv 2402.17834): a quarter of each head is turned; norms may be per head."""
    norm = partial(nn.LayerNorm, epsilon=config.take("layer_norm_eps", float, 1e-5))
    divided_heads(config)
    attention: dict[str, Any] = {"bias": config.take("use_qkv_bias", bool, False)}
    if config.take("qk_layernorm", bool, False):
        attention |= {"wide_norm": True, "norm": each_head(head_dim(config), norm)}
    parallel = config.take("use_parallel_residual", bool, False)
    return specification(
        config,
        attention={"output_bias": False, **attention},
        norm=norm,
        feed_forward=feed_forward(config, bias=False),
        norms=("norm1",) if parallel else ("norm1", "norm2"),
        parallel=parallel,
    )


def starcoder2(config: Config) -> Specification:
    """Norms with means, biases, no gate (arXiv 2402.19173)."""
    bias = config.take("use_bias", bool, True)
    options: dict[str, Any] = {"activation": "gelu_pytorch_tanh", "gated": False, "bias": bias}
    # The older class noted these, and had no others.
    config.expect("norm_type", "layer_norm")
    config.expect("mlp_type", "default")
    config.ignore("activation_function", "layer_norm_epsilon", "scale_attn_weights")
    config.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    return specification(
        config,
        attention={"bias": bias},
        norm=partial(nn.LayerNorm, epsilon=config.take("norm_epsilon", float, 1e-5)),
        feed_forward=feed_forward(config, **options),
    )


AFTER = {"after1": "post_attention_layernorm", "after2": "post_feedforward_layernorm"}
GATE_UP = {"gate": Part("gate_up_proj", 0, 2), "up": Part("gate_up_proj", 1, 2)}
QKV: dict[str, Source] = {
    "query": lambda a: Part("qkv_proj", 0, a.num_heads + 2 * a.kv_heads, 1, a.num_heads),
    "key": lambda a: Part("qkv_proj", a.num_heads, a.num_heads + 2 * a.kv_heads, 1, a.kv_heads),
    "value": lambda a: Part(
        "qkv_proj", a.num_heads + a.kv_heads, a.num_heads + 2 * a.kv_heads, 1, a.kv_heads
    ),
}


FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "ministral"), family(llama)),
    "ministral3": family(ministral3),
    "qwen2": family(qwen2),
    "qwen3": family(qwen3),
    "smollm3": family(smollm3),
    "phi3": family(phi3, **QKV, **GATE_UP),
    "glm": family(glm, **GATE_UP),
    "glm4": family(
        glm,
        after1="post_self_attn_layernorm",
        after2="post_mlp_layernorm",
        **GATE_UP,
    ),
    "stablelm": family(
        stablelm,
        query_norm="q_layernorm",
        key_norm="k_layernorm",
        gains=Stack(("norms.{}.weight",)),
    ),
    "starcoder2": family(starcoder2, up="c_fc", down="c_proj"),
}
