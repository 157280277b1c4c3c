"""GPT-2 (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners")."""

import math
from functools import partial

from graphgen import nn
from graphgen.models.published.config import ACTIVATIONS, Config
from graphgen.models.published.decoder import tasks
from graphgen.models.published.family import Family
from graphgen.models.published.specification import Sight, Specification
from graphgen.parts import Part


def gpt2(config: Config) -> Specification:
    """Learned positions, norms before, and a scale of scores that may shrink with the layers."""
    features, heads = config.take("n_embd", int), config.take("n_head", int)
    length = config.take("n_positions", int, 1024)
    config.expect("n_ctx", length)
    config.expect("add_cross_attention", False)
    # The order and precision of one product; in exact arithmetic they change no result.
    config.expect("reorder_and_upcast_attn", False, True)
    scale = 1.0
    if config.take("scale_attn_weights", bool, True):
        scale /= math.sqrt(features // heads)
    shrinks = config.take("scale_attn_by_inverse_layer_idx", bool, False)
    feed_forward = partial(
        nn.FeedForward,
        features,
        config.take("n_inner", int, 4 * features),
        activation=config.choose("activation_function", ACTIVATIONS, "gelu_new"),
    )
    return Specification(
        vocabulary=config.take("vocab_size", int),
        features=features,
        layers=[Sight()] * config.take("n_layer", int),
        norm=partial(nn.LayerNorm, epsilon=config.take("layer_norm_epsilon", float, 1e-5)),
        attention=lambda number: nn.Attention(
            features, num_heads=heads, scale=scale / (number + 1) if shrinks else scale
        ),
        feed_forward=lambda number: feed_forward(),
        positions=length,
        tied=config.take("tie_word_embeddings", bool, True),
        head_rows=True,
    )


FAMILY = Family(
    tasks=tasks(gpt2),
    names={
        "decoder": "",
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "layers": "transformer.h",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "attention": "attn",
        "query": Part("c_attn", 0, 3),
        "key": Part("c_attn", 1, 3),
        "value": Part("c_attn", 2, 3),
        "output": "c_proj",
        "feed_forward": "mlp",
        "up": "c_fc",
        "down": "c_proj",
        "norm1": "ln_1",
        "norm2": "ln_2",
    },
    prefix="transformer.",
    transposed=False,
    tied={"lm_head.weight": "transformer.wte.weight"},
    unused=r"lm_head\.weight|(transformer\.)?h\.\d+\.attn\.(masked_)?bias",
)
