"""Falcon and BLOOM, with one head of keys or a few, or with slopes instead of positions."""

import math
from typing import Any

from graphgen import nn
from graphgen.models.published.config import Config
from graphgen.models.published.decoder import tasks
from graphgen.models.published.family import Family
from graphgen.models.published.megatron import (
    MEGATRON,
    UNUSED,
    alibi_slopes,
    check_heads,
    layer_norm,
    plain,
    transformer,
)
from graphgen.models.published.rope import rotary
from graphgen.models.published.specification import Sight, Specification
from graphgen.parts import Part


def falcon(config: Config) -> Specification:
    """Falcon (arXiv 2311.16867): one head of keys, or a few, and up to two norms side by side."""
    features = config.take(config.named("hidden_size", "n_embed"), int)
    heads = config.take(config.named("num_attention_heads", "n_head"), int)
    layers = config.take(config.named("num_hidden_layers", "n_layer"), int)
    new = config.take("new_decoder_architecture", bool, False)
    alibi = config.take("alibi", bool, False)
    kv_heads = config.optional(config.named("num_kv_heads", "n_head_kv"), int) or heads
    if config.take("multi_query", bool, True) and not new:
        kv_heads = 1
    parallel = config.take("parallel_attn", bool, True)
    if new and not parallel:
        config.refuse("parallel_attn", parallel, "true with new_decoder_architecture")
    count = config.take("num_ln_in_parallel_attn", int, 2 if new else 1)
    if count > (2 if new else 1):
        config.refuse("num_ln_in_parallel_attn", count, f"at most {2 if new else 1}")
    config.expect("apply_residual_connection_post_layernorm", False)
    bias = config.take("bias", bool, False)
    hidden = config.take("ffn_hidden_size", int, 4 * features)
    config.expect("ff_factor", hidden // features)
    if alibi:
        config.ignore("max_position_embeddings", "rope_parameters", "rope_scaling", "rope_theta")
    check_heads(config, features, heads)
    turn = None if alibi else rotary(config, features // heads)
    options: dict[str, Any] = {"num_heads": heads, "kv_heads": kv_heads, "bias": bias}
    scale = math.sqrt(features // heads)
    return Specification(
        vocabulary=config.take("vocab_size", int),
        features=features,
        layers=[Sight(None, turn)] * layers,
        norm=layer_norm(config, "layer_norm_epsilon"),
        attention=lambda number: nn.Attention(features, **options),
        feed_forward=plain(config, (features, hidden), "activation", "gelu", bias=bias),
        norms=("norm1",) if parallel and count == 1 else ("norm1", "norm2"),
        parallel=parallel,
        slopes=alibi_slopes(heads) if alibi else None,
        slopes_scale=1.0 / scale,
        rounded=True,
        tied=config.take("tie_word_embeddings", bool, True),
    )


def bloom(config: Config) -> Specification:
    """BLOOM (arXiv 2211.05100): no positions but ALiBi, and a norm of the tokens' vectors."""
    features = config.take(config.named("hidden_size", "n_embed"), int)
    heads = config.take(config.named("n_head", "num_attention_heads"), int)
    layers = config.take(config.named("n_layer", "num_hidden_layers"), int)
    config.expect("apply_residual_connection_post_layernorm", False)
    config.expect("n_inner", 4 * features)
    # How products are split, and in which precision; in exact arithmetic they change no result.
    config.ignore("slow_but_exact", "attention_softmax_in_fp32", "masked_softmax_fusion")
    config.ignore("bias_dropout_fusion", "skip_bias_add", "skip_bias_add_qkv", "offset_alibi")
    config.ignore("seq_length", "unk_token_id")
    return Specification(
        vocabulary=config.take("vocab_size", int),
        features=features,
        layers=[Sight()] * layers,
        norm=layer_norm(config, "layer_norm_epsilon"),
        attention=lambda number: nn.Attention(features, num_heads=heads),
        feed_forward=lambda number: nn.FeedForward(features, 4 * features, activation="gelu_tanh"),
        embedding_norm=True,
        slopes=alibi_slopes(heads),
        tied=config.take("tie_word_embeddings", bool, True),
    )


FAMILIES = {
    "falcon": Family(
        pads="",
        tasks=tasks(falcon),
        names=MEGATRON
        | transformer(
            "word_embeddings",
            attention="self_attention",
            norm1=lambda layer: Part(
                "ln_attn" if layer.spec.parallel and layer.norm2 else "input_layernorm"
            ),
            norm2=lambda layer: Part(
                "ln_mlp" if layer.spec.parallel else "post_attention_layernorm"
            ),
        ),
        prefix="transformer.",
        tied={"lm_head.weight": "transformer.word_embeddings.weight"},
        unused=UNUSED,
    ),
    "bloom": Family(
        pads="",
        tasks=tasks(bloom),
        names=MEGATRON
        | transformer(
            "word_embeddings",
            attention="self_attention",
            embedding_norm="transformer.word_embeddings_layernorm",
        ),
        prefix="transformer.",
        tied={"lm_head.weight": "transformer.word_embeddings.weight"},
        unused=UNUSED,
    ),
}
