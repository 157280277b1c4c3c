"""MPT (MosaicML 2023)."""

import math
from functools import partial
from typing import Any

import numpy as np

from graphgen import nn
from graphgen.models.published.config import Config
from graphgen.models.published.decoder import tasks
from graphgen.models.published.family import Family
from graphgen.models.published.megatron import UNUSED
from graphgen.models.published.specification import Sight, Specification
from graphgen.operands import Array
from graphgen.parts import Part


def mpt(config: Config) -> Specification:
    """No positions but ALiBi (arXiv 2108.12409), and no biases."""
    # How it was made; where there are slopes, positions are not learned.
    config.ignore("learned_pos_emb", "embedding_fraction", "init_device", "init_config", "verbose")
    config.ignore("tokenizer_name", "max_seq_len")
    config.expect("no_bias", True)
    config.expect("expansion_ratio", 4)
    config.expect("logit_scale")
    config.expect("norm_type", "low_precision_layernorm", "layernorm")
    features = config.take(config.named("d_model", "hidden_size"), int)
    heads = config.take(config.named("n_heads", "num_attention_heads"), int)
    if features % heads:
        config.refuse("n_heads", heads, f"a divisor of {features}, the features")
    options, slopes = _attention(config, heads)
    return Specification(
        vocabulary=config.take("vocab_size", int),
        features=features,
        layers=[Sight()] * config.take(config.named("n_layers", "num_hidden_layers"), int),
        norm=partial(
            nn.LayerNorm, epsilon=config.take("layer_norm_epsilon", float, 1e-5), bias=False
        ),
        attention=lambda number: nn.Attention(features, num_heads=heads, bias=False, **options),
        feed_forward=lambda number: nn.FeedForward(
            features, 4 * features, activation="gelu", bias=False
        ),
        slopes=slopes,
        tied=config.take("tie_word_embeddings", bool, True),
    )


def _attention(config: Config, heads: int) -> tuple[dict[str, Any], Array]:
    """Options of the attention, and its slopes."""
    given = config.raw("attn_config", {})
    kind = given.get("model_type") if isinstance(given, dict) else None
    own = config.part("attn_config", kind if isinstance(kind, str) else "mpt")
    own.ignore("attn_impl")
    own.expect("attn_type", "multihead_attention")
    own.expect("alibi", True)
    own.expect("alibi_bias_max", 8)
    for name in ("qk_ln", "qk_gn", "prefix_lm", "attn_uses_sequence_id", "rope"):
        own.expect(name, False)
    own.expect("sliding_window_size", -1)
    clip = own.take("clip_qkv", float, 0.0)
    if clip < 0.0:
        own.refuse("clip_qkv", clip, "at least 0")
    options: dict[str, Any] = {"clip": clip or None}
    if own.given("softmax_scale") is not None:
        options["scale"] = own.take("softmax_scale", float)
    return options, _slopes(heads)


def _slopes(heads: int) -> Array:
    """Those of the next power of two: every other one first, if there are fewer heads."""
    power = 2 ** math.ceil(math.log2(heads))
    found = 2.0 ** (-np.arange(1, power + 1) * (8.0 / power))
    if power != heads:
        found = np.concatenate([found[1::2], found[::2]])[:heads]
    return np.asarray(found, np.float32)


FAMILIES = {
    "mpt": Family(
        tasks=tasks(mpt),
        names={
            "decoder": "",
            "embedding": "transformer.wte",
            "layers": "transformer.blocks",
            "norm": "transformer.norm_f",
            "head": "lm_head",
            "attention": "attn",
            **{name: Part("Wqkv", i, 3) for i, name in enumerate(("query", "key", "value"))},
            "output": "out_proj",
            "feed_forward": "ffn",
            "up": "up_proj",
            "down": "down_proj",
            "norm1": "norm_1",
            "norm2": "norm_2",
        },
        prefix="transformer.",
        tied={"lm_head.weight": "transformer.wte.weight"},
        unused=UNUSED,
    ),
}
