"""LFM2: short convolutions, and attention in some layers (arXiv 2511.23404)."""

from functools import partial

from graphgen import nn
from graphgen.models.published.config import Config
from graphgen.models.published.named import (
    all_turned,
    divided_heads,
    family,
    specification,
)
from graphgen.models.published.specification import Specification
from graphgen.models.published.stateful import ShortConvolution, beside_states, name_of

_TRAINED = """
block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_use_xavier_init theta
""".split()
"""How it was initialized; and a field that no class reads."""


def lfm2(config: Config) -> Specification:
    """Layers whose attention normalizes queries and keys, between layers of convolutions."""
    config.ignore(*_TRAINED)
    features, layers = config.take("hidden_size", int), config.take("num_hidden_layers", int)
    for name in ("block_dim", "conv_dim", "conv_dim_out"):
        config.expect(name, features)
    config.expect("num_heads", config.take("num_attention_heads", int))
    config.expect("block_use_swiglu", True)
    config.expect("use_pos_enc", True)
    epsilon = config.take("norm_eps", float, 1e-5)
    config.expect("block_norm_eps", epsilon)
    norm = partial(nn.RMSNorm, epsilon=epsilon)
    divided_heads(config)
    known = {"full_attention": True, "conv": False}
    sights = beside_states(
        config, all_turned(config, [None] * layers), known, _listed(config, layers)
    )
    kernel, bias = config.take("conv_L_cache", int, 3), config.take("conv_bias", bool, False)
    if kernel < 2:
        config.refuse("conv_L_cache", kernel, "2 at least")
    hidden = _hidden(config)
    # Where a file has it, the older field counts.
    tied = config.take("tie_embedding", bool, config.take("tie_word_embeddings", bool, True))
    return specification(
        config,
        attention={"bias": False, "norm": norm},
        stateful=lambda number: ShortConvolution(features, kernel=kernel, bias=bias),
        norm=norm,
        feed_forward=lambda number: nn.FeedForward(
            features, hidden, activation="silu", gated=True, bias=False
        ),
        sights=sights,
        tied=tied,
    )


def _listed(config: Config, layers: int) -> list[str]:
    """The kinds of layers by full_attn_idxs, which count where there are no layer_types."""
    every = range(layers)
    listed = config.raw("full_attn_idxs", [*every])
    if not isinstance(listed, list) or not {*map(repr, listed)} <= {*map(repr, every)}:
        config.refuse("full_attn_idxs", listed, f"a list of layers from 0 to {layers - 1}")
    kinds = ["full_attention" if i in listed else "conv" for i in every]
    if config.given("full_attn_idxs") and config.given("layer_types") not in (None, kinds):
        config.ignore("full_attn_idxs")
    return kinds


def _hidden(config: Config) -> int:
    """The inner features of the feed-forward; by default, two thirds of what the field says."""
    hidden = config.take("block_ff_dim", int, config.take("intermediate_size", int, 12288))
    multiple = config.take("block_multiple_of", int, 256)
    factor = config.optional("block_ffn_dim_multiplier", float, 1.0)
    if not config.take("block_auto_adjust_ff_dim", bool, True):
        return hidden
    hidden = int(2 * hidden / 3)
    if factor is None:
        return hidden
    hidden = -(-int(factor * hidden) // multiple) * multiple
    if hidden < 1:
        config.refuse("block_ffn_dim_multiplier", factor, "above 0")
    return hidden


FAMILIES = {
    "lfm2": family(
        lfm2,
        attention=name_of("conv"),
        input="in_proj",
        convolution="conv",
        output="out_proj",
        query_norm="q_layernorm",
        key_norm="k_layernorm",
        feed_forward="feed_forward",
        gate="w1",
        up="w3",
        down="w2",
        norm="model.embedding_norm",
        norm1="operator_norm",
        norm2="ffn_norm",
    ),
}
