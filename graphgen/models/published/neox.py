"""GPT-NeoX, Pythia and GPT-J: attention and feed-forward side by side."""

from typing import Any

from graphgen import nn
from graphgen.models.published.config import Config
from graphgen.models.published.decoder import tasks
from graphgen.models.published.family import Family
from graphgen.models.published.megatron import (
    MEGATRON,
    UNUSED,
    layer_norm,
    plain,
    transformer,
)
from graphgen.models.published.rope import rotary
from graphgen.models.published.specification import Sight, Specification
from graphgen.nn.position import rotary_frequencies


def neox(config: Config) -> Specification:
    """GPT-NeoX and Pythia (arXiv 2204.06745, 2304.01373)."""
    features, heads = config.take("hidden_size", int), config.take("num_attention_heads", int)
    names = ("rotary_emb_base", "rotary_pct")
    turn = rotary(config, features // heads, partial=0.25, names=names)
    # Versions around 4.45 write both a second time, and no version reads these.
    config.expect("rope_theta", config.given(names[0]) or 1e4)
    config.expect("partial_rotary_factor", config.given(names[1]) or 0.25)
    bias = config.take("attention_bias", bool, True)
    config.ignore("is_decoder")  # the class is one, whatever the field says
    parallel = config.take("use_parallel_residual", bool, True)
    return Specification(
        vocabulary=config.take("vocab_size", int),
        features=features,
        layers=[Sight(None, turn)] * config.take("num_hidden_layers", int),
        norm=layer_norm(config, "layer_norm_eps"),
        attention=lambda number: nn.Attention(features, num_heads=heads, bias=bias),
        feed_forward=plain(
            config, (features, config.take("intermediate_size", int)), "hidden_act", "gelu"
        ),
        parallel=parallel,
        tied=config.take("tie_word_embeddings", bool, False),
    )


def gptj(config: Config) -> Specification:
    """GPT-J (Wang and Komatsuzaki, 2021): one norm for both; neighbors are turned."""
    features, heads = config.take("n_embd", int), config.take("n_head", int)
    config.expect("rotary", True)
    config.expect("scale_attn_weights", True)
    config.expect("tie_word_embeddings", False)
    turned, size = config.take("rotary_dim", int, 64), features // heads
    if turned > size or turned % 2:
        config.refuse("rotary_dim", turned, f"even and at most {size}, the features of a head")
    config.take("n_positions", int, 2048)
    turn = nn.Rotary(rotary_frequencies(turned))
    options: dict[str, Any] = {"num_heads": heads, "bias": False, "interleaved": True}
    return Specification(
        vocabulary=config.take("vocab_size", int),
        features=features,
        layers=[Sight(None, turn)] * config.take("n_layer", int),
        norm=layer_norm(config, "layer_norm_epsilon"),
        attention=lambda number: nn.Attention(features, **options),
        feed_forward=plain(
            config,
            (features, config.take("n_inner", int, 4 * features)),
            "activation_function",
            "gelu_new",
        ),
        norms=("norm1",),
        parallel=True,
        head_bias=True,
    )


FAMILIES = {
    "gpt_neox": Family(
        tasks=tasks(neox),
        names=MEGATRON
        | {
            "embedding": "gpt_neox.embed_in",
            "layers": "gpt_neox.layers",
            "norm": "gpt_neox.final_layer_norm",
        },
        older={r"embed_out\.weight": "lm_head.weight"},
        prefix="gpt_neox.",
        tied={"lm_head.weight": "gpt_neox.embed_in.weight"},
        unused=UNUSED,
    ),
    "gptj": Family(
        tasks=tasks(gptj),
        names=transformer(
            "wte",
            decoder="",
            head="lm_head",
            attention="attn",
            query="q_proj",
            key="k_proj",
            value="v_proj",
            output="out_proj",
            feed_forward="mlp",
            up="fc_in",
            down="fc_out",
            norm1="ln_1",
        ),
        prefix="transformer.",
        unused=r"lm_head\.(weight|bias)|" + UNUSED,
    ),
}
