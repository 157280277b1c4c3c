"""OPT (arXiv 2205.01068)."""

from functools import partial

from graphgen import nn
from graphgen.models.published.config import Config
from graphgen.models.published.decoder import tasks
from graphgen.models.published.family import Family
from graphgen.models.published.megatron import (
    plain,
)
from graphgen.models.published.specification import Sight, Specification


def opt(config: Config) -> Specification:
    """OPT (arXiv 2205.01068): learned positions, the first at row 2, and norms before or after."""
    # What the publishers of Galactica note about their architecture.
    config.expect("learned_embeddings", True)
    config.expect("scale_embeddings", False)
    features, heads = config.take("hidden_size", int), config.take("num_attention_heads", int)
    bias = config.take("enable_bias", bool, True)
    before = config.take("do_layer_norm_before", bool, True)
    affine = config.take("layer_norm_elementwise_affine", bool, True)
    removed = config.take("_remove_final_layer_norm", bool, False)
    return Specification(
        vocabulary=config.take("vocab_size", int),
        features=features,
        layers=[Sight()] * config.take("num_hidden_layers", int),
        norm=partial(nn.LayerNorm, gain=affine, bias=affine),
        attention=lambda number: nn.Attention(features, num_heads=heads, bias=bias),
        feed_forward=plain(
            config,
            (features, config.take("ffn_dim", int)),
            "activation_function",
            "relu",
            bias=bias,
        ),
        norms=("norm1", "norm2") if before else ("after1", "after2"),
        post=not before,
        last_norm=before and not removed,
        embedding_features=config.take("word_embed_proj_dim", int, features),
        positions=config.take("max_position_embeddings", int, 2048),
        offset=2,
        counted=True,
        tied=config.take("tie_word_embeddings", bool, True),
    )


FAMILIES = {
    "opt": Family(
        tasks=tasks(opt),
        names={
            "decoder": "",
            "head": "lm_head",
            "embedding": "model.decoder.embed_tokens",
            "positions": "model.decoder.embed_positions",
            "inward": "model.decoder.project_in",
            "outward": "model.decoder.project_out",
            "layers": "model.decoder.layers",
            "norm": "model.decoder.final_layer_norm",
            "attention": "self_attn",
            "query": "q_proj",
            "key": "k_proj",
            "value": "v_proj",
            "output": "out_proj",
            "feed_forward": "",
            "up": "fc1",
            "down": "fc2",
            **dict.fromkeys(("norm1", "after1"), "self_attn_layer_norm"),
            **dict.fromkeys(("norm2", "after2"), "final_layer_norm"),
        },
        prefix="model.",
        tied={"lm_head.weight": "model.decoder.embed_tokens.weight"},
        unused=r"lm_head\.weight",
    ),
}
