"""BART (arXiv 1910.13461) and those after it: Marian, mBART, Pegasus, M2M-100 (and NLLB)."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from graphgen import nn, ops
from graphgen.models.published.config import ACTIVATIONS, Config
from graphgen.models.published.encoder_decoder import Side, Specification, tasks
from graphgen.models.published.family import Family
from graphgen.operands import Array
from graphgen.value import Tensor


class Kind(NamedTuple):
    """What sets a model type apart."""

    post: bool = False
    embedding_norm: bool = False
    offset: int = 0
    activation: str = "gelu"
    scaled: bool = False


KINDS = {
    # The first rows of a table are for padding; no token uses them.
    "bart": Kind(post=True, embedding_norm=True, offset=2),
    "mbart": Kind(embedding_norm=True, offset=2),
    "marian": Kind(post=True),
    "pegasus": Kind(),
    "m2m_100": Kind(activation="relu", scaled=True),
}


def bart(config: Config) -> Specification:
    """Norms after each part or before it, and positions that are learned or sinusoidal.

    BART (arXiv 1910.13461), Marian (1804.00344), mBART (2001.08210), Pegasus (1912.08777) and
    M2M-100 (2010.11125).
    """
    kind, marian = KINDS[config.model_type], config.model_type == "marian"
    for name in ("add_bias_logits", "is_decoder", "tie_encoder_decoder"):
        config.expect(name, False)
    config.expect("normalize_before", not kind.post)
    config.expect("add_final_layer_norm", not kind.post)
    config.expect("normalize_embedding", kind.embedding_norm)
    config.expect("static_position_embeddings", kind.offset == 0)
    config.raw("extra_pos_embeddings")  # the padding token plus one
    layers = [config.take(f"{side}_layers", int) for side in ("encoder", "decoder")]
    config.expect("num_hidden_layers", *layers)
    count = config.take("vocab_size", int)
    shared = not marian or config.take("share_encoder_decoder_embeddings", bool, True)
    counts = {"encoder": count, "decoder": count}
    if marian:
        written = config.take("decoder_vocab_size", int, count)
        counts["decoder"] = count if shared else written
    own = [side for side in counts if not shared or stored(config, f"{side}.embed_tokens")]
    return Specification(
        encoder=one_side(config, kind, "encoder", counts["encoder"]),
        decoder=one_side(config, kind, "decoder", counts["decoder"]),
        own_tables=tuple(own),
        tied=config.take("tie_word_embeddings", bool, True),
        logits_bias=config.has("final_logits_bias"),
    )


def one_side(config: Config, kind: Kind, name: str, vocabulary: int) -> Side:
    """The encoder or the decoder of a configuration."""
    features, heads = config.take("d_model", int), config.take(f"{name}_attention_heads", int)
    hidden = config.take(f"{name}_ffn_dim", int)
    activation = config.choose("activation_function", ACTIVATIONS, kind.activation)
    scaled = config.take("scale_embedding", bool, kind.scaled)
    return Side(
        vocabulary=vocabulary,
        features=features,
        layers=config.take(f"{name}_layers", int),
        norm=nn.LayerNorm,
        attention=lambda kind: kind(features, num_heads=heads),
        feed_forward=lambda: nn.FeedForward(features, hidden, activation=activation),
        post=kind.post,
        last_norm=not kind.post,
        embedding_scale=math.sqrt(features) if scaled else 1.0,
        embedding_norm=kind.embedding_norm,
        **placed(config, kind, name),
    )


def placed(config: Config, kind: Kind, name: str) -> dict[str, Any]:
    """The positions of a side: a table, learned or calculated, and which row is the first."""
    features = config.take("d_model", int)
    length = config.take("max_position_embeddings", int, 1024)
    if config.model_type == "m2m_100":
        padding = config.optional("pad_token_id", int, 1)
        if padding is None or padding >= 1 << 16:
            config.refuse("pad_token_id", padding, "a token, up to 65535")
        if features < 4:
            config.refuse("d_model", features, "4 or more")
        table = Sinusoids(from_padding(length + padding + 1, features, padding))
        return {"positions": table, "offset": padding + 1, "padding": padding}
    rows = length + kind.offset
    learned = kind.offset > 0 or stored(config, f"{name}.embed_positions")
    if learned:
        return {"positions": nn.Embedding(rows, features), "offset": kind.offset}
    return {"positions": Sinusoids(alternating(rows, features))}


class Sinusoids(nn.Module):
    """The rows of a table that nobody learned, (T) to (T, D)."""

    def __init__(self, table: Array):
        self.table = table.astype(np.float32)

    def __call__(self, positions: Tensor) -> Tensor:
        return ops.embedding(self.table, positions)


def alternating(length: int, features: int) -> Array:
    """The sines of arXiv 1706.03762, 3.5, and then the cosines, (length, D)."""
    pairs = np.arange(features) // 2 * 2
    angles = np.arange(length)[:, None] / 10000.0 ** (pairs / features)
    return np.concatenate([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])], axis=1)


def from_padding(length: int, features: int, padding: int) -> Array:
    """Sines and then cosines, whose slowest is 10000 times the fastest; zeros for padding.

    In float32 throughout, as fairseq calculated those that its models were trained with.
    """
    half = features // 2
    step = np.float32(-math.log(10000.0) / (half - 1))
    rates = np.exp(np.arange(half, dtype=np.float32) * step)
    angles = np.arange(length, dtype=np.float32)[:, None] * rates
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    table[padding] = 0.0
    return np.pad(table, ((0, 0), (0, features % 2)))


def stored(config: Config, name: str) -> bool:
    """Whether the checkpoint has a table of that name."""
    return config.has(f"{name}.weight", f"model.{name}.weight")


NAMES = {
    "shared": "model.shared",
    "encoder": "model.encoder",
    "decoder": "model.decoder",
    "embedding": "embed_tokens",
    "positions": "embed_positions",
    "embedding_norm": "layernorm_embedding",
    "last_norm": "layer_norm",
    "head": "lm_head",
    "attention": "self_attn",
    "norm1": "self_attn_layer_norm",
    "cross_attention": "encoder_attn",
    "norm2": "encoder_attn_layer_norm",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "out_proj",
    "feed_forward": "",
    "up": "fc1",
    "down": "fc2",
    "norm3": "final_layer_norm",
}

FAMILY = Family(
    tasks=tasks(bart),
    names=NAMES,
    prefix="model.",
    tied={"lm_head.weight": "model.shared.weight"},
    same={"model.decoder.embed_tokens.weight": "model.shared.weight"},
    unused=r"lm_head\.weight|(model\.)?(shared\.weight|(en|de)coder\.version)|"
    r"(model\.)?(en|de)coder\.embed_positions\.weights",
)

_BIAS, _SINUSOIDS = r"final_logits_bias", r"model\.(en|de)coder\.embed_positions\.weight"

FAMILIES = {
    kind: replace(FAMILY, held=f"{_BIAS}|{_SINUSOIDS}" if KINDS[kind].offset == 0 else _BIAS)
    for kind in KINDS
}
