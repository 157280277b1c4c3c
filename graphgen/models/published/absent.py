"""What the classes of transformers use if a configuration lacks a field, by the type of model."""

from typing import Any

from graphgen.models.published.config import Config

_ABSENT: dict[str, dict[str, Any]] = {
    "apertus": {"epsilon": 1e-5, "theta": 1.2e7},
    "arcee": {"epsilon": 1e-5},
    "cohere": {"theta": 5e5, "tied": True},
    "cohere2": {"window": 4096, "tied": True},
    "deepseek_v2": {"experts": (64, None), "shared": 2, "query_latent": 1536},
    **dict.fromkeys(
        ("deepseek_v3", "kimi_k2"),
        {"experts": (256, 8), "groups": (8, 4), "dense": 3, "normalized": True}
        | {"factor": 2.5, "query_latent": 1536},
    ),
    "dots1": {"kv_heads": 32},
    "ernie4_5": {"kv_heads": 2, "head_dim": 128, "epsilon": 1e-5, "theta": 5e5, "tied": True},
    "ernie4_5_moe": {"kv_heads": 4, "epsilon": 1e-5, "theta": 5e5, "tied": True},
    "eurobert": {"epsilon": 1e-5},
    "exaone4": {"kv_heads": 32, "epsilon": 1e-5, "window": 4096},
    "gemma": {"kv_heads": 16, "head_dim": 256, "tied": True},
    "gemma2": {"kv_heads": 4, "head_dim": 256, "window": 4096, "tied": True},
    "gemma3_text": {"kv_heads": 4, "head_dim": 256, "window": 4096, "tied": True},
    "glm": {"kv_heads": 2, "head_dim": 128, "epsilon": 1.5625e-7, "partial": 0.5, "bias": True},
    "glm4": {"kv_heads": 2, "head_dim": 128, "epsilon": 1.5625e-7, "partial": 0.5, "bias": True},
    "glm4_moe_lite": {"experts": (64, 4), "epsilon": 1e-5, "normalized": True, "factor": 1.8}
    | {"query_latent": 768, "plain": 192, "value_dim": 256},
    "glm4_moe": {"kv_heads": 8, "epsilon": 1e-5, "partial": 0.5, "dense": 1, "normalized": True},
    "gpt_oss": {"kv_heads": 8, "head_dim": 64, "epsilon": 1e-5, "theta": 1.5e5, "bias": True},
    "helium": {"kv_heads": 20, "head_dim": 128, "epsilon": 1e-8, "theta": 1e5},
    "hunyuan_v1_dense": {"epsilon": 1e-5},
    "lfm2": {"kv_heads": 8, "theta": 1e6},
    "minimax_m2": {"kv_heads": 8, "head_dim": 128, "theta": 5e6},
    "ministral": {"kv_heads": 8, "window": 4096},
    "ministral3": {"kv_heads": 8, "head_dim": 128, "epsilon": 1e-5},
    "mistral": {"kv_heads": 8, "window": 4096},
    "mixtral": {"kv_heads": 8, "epsilon": 1e-5, "theta": 1e6},
    "nemotron": {"partial": 0.5},
    "olmo2": {"epsilon": 1e-5},
    "olmo3": {"epsilon": 1e-5, "window": 4096, "theta": 5e5},
    "olmoe": {"epsilon": 1e-5},
    "phi": {"partial": 0.5},
    "phi3": {"epsilon": 1e-5, "partial": 1.0},
    "qwen2": {"kv_heads": 32, "window": 4096},
    "qwen2_moe": {"kv_heads": 16},
    "qwen3": {"kv_heads": 32, "window": 4096, "head_dim": 128},
    "qwen3_moe": {"kv_heads": 4},
    "qwen3_5_moe_text": {"kv_heads": 2, "head_dim": 256, "partial": 0.25, "experts": (256, 8)},
    "qwen3_5_text": {"kv_heads": 4, "head_dim": 256, "partial": 0.25},
    "qwen3_next": {"kv_heads": 2, "head_dim": 256, "partial": 0.25, "experts": (512, 10)},
    "seed_oss": {"kv_heads": 8, "head_dim": 128, "bias": True},
    "smollm3": {"kv_heads": 4, "theta": 2e6, "tied": True},
    "stablelm": {"kv_heads": 32, "partial": 0.25},
    "starcoder2": {"kv_heads": 2, "tied": True},
}


def absent(config: Config, name: str, default: Any = None) -> Any:
    """What stands for a field that is absent."""
    return _ABSENT.get(config.model_type, {}).get(name, default)
