"""OPT (arXiv 2205.01068) and BioGPT."""

import math
from collections.abc import Callable
from functools import partial

from graphgen import nn
from graphgen.models.published.config import Config
from graphgen.models.published.decoder import tasks
from graphgen.models.published.family import Family, Source
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


def biogpt(config: Config) -> Specification:
    """BioGPT (arXiv 2210.10341): OPT's layers, positions and names with vectors times √D."""
    features, heads = config.take("hidden_size", int), config.take("num_attention_heads", int)
    scaled = config.take("scale_embedding", bool, True)
    config.ignore("layer_norm_eps")  # which the class never reads
    return Specification(
        vocabulary=config.take("vocab_size", int),
        features=features,
        layers=[Sight()] * config.take("num_hidden_layers", int),
        norm=nn.LayerNorm,
        attention=lambda number: nn.Attention(features, num_heads=heads),
        feed_forward=plain(
            config, (features, config.take("intermediate_size", int)), "hidden_act", "gelu"
        ),
        embedding_scale=math.sqrt(features) if scaled else 1.0,
        positions=config.take("max_position_embeddings", int, 1024),
        offset=2,
        tied=config.take("tie_word_embeddings", bool, True),
    )


def _family(
    specify: Callable[[Config], Specification], prefix: str, body: str, head: str, norm: str
) -> Family:
    names: dict[str, Source] = {
        "decoder": "",
        "head": head,
        "embedding": f"{body}embed_tokens",
        "positions": f"{body}embed_positions",
        "inward": f"{body}project_in",
        "outward": f"{body}project_out",
        "layers": f"{body}layers",
        "norm": f"{body}{norm}",
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
    }
    tied = {f"{head}.weight": f"{body}embed_tokens.weight"}
    unused = rf"{head}\.weight"
    return Family(tasks=tasks(specify), names=names, prefix=prefix, tied=tied, unused=unused)


FAMILIES = {
    "opt": _family(opt, "model.", "model.decoder.", "lm_head", "final_layer_norm"),
    "biogpt": _family(biogpt, "biogpt.", "biogpt.", "output_projection", "layer_norm"),
}
