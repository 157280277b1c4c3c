"""GPT-2 (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners") and kin."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from graphgen import nn
from graphgen.models.published.config import ACTIVATIONS, Config
from graphgen.models.published.decoder import tasks
from graphgen.models.published.family import Family, Source
from graphgen.models.published.megatron import check_heads
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
    scale = _scale(config, features, heads)
    shrinks = config.take("scale_attn_by_inverse_layer_idx", bool, False)
    return _specification(
        config,
        features,
        layers=[Sight()] * config.take("n_layer", int),
        attention=lambda number: nn.Attention(
            features, num_heads=heads, scale=scale / (number + 1) if shrinks else scale
        ),
        hidden=config.take("n_inner", int, 4 * features),
        positions=length,
        head_rows=True,
    )


def bigcode(config: Config) -> Specification:
    """StarCoder and SantaCoder (arXiv 2305.06161): one head of keys and values for all queries."""
    features = config.take(config.named("n_embd", "hidden_size"), int)
    heads = config.take(config.named("n_head", "num_attention_heads"), int)
    config.expect("add_cross_attention", False)
    # The precision of a product; what older programs note about inference and training.
    config.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    config.ignore("inference_runner", "max_batch_size", "max_sequence_length", "pad_key_length")
    config.ignore("pre_allocate_kv_cache", "validate_runner_input", "num_key_value_heads")
    kv_heads = 1 if config.take("multi_query", bool, True) else heads
    scale = _scale(config, features, heads)
    return _specification(
        config,
        features,
        layers=[Sight()] * config.take(config.named("n_layer", "num_hidden_layers"), int),
        attention=lambda number: nn.Attention(
            features, num_heads=heads, kv_heads=kv_heads, scale=scale
        ),
        hidden=config.take("n_inner", int, 4 * features),
        positions=config.take(config.named("n_positions", "max_position_embeddings"), int, 1024),
        activation="gelu_pytorch_tanh",
    )


def neo(config: Config) -> Specification:
    """GPT-Neo (Black et al., 2021): scores without a scale, and every other layer local."""
    features = config.take("hidden_size", int)
    heads = config.take(config.named("num_heads", "num_attention_heads"), int)
    layers = config.take(config.named("num_layers", "num_hidden_layers"), int)
    window = config.take("window_size", int, 256)
    kinds = _kinds(config, layers)
    return _specification(
        config,
        features,
        layers=[Sight(window if kind == "local" else None) for kind in kinds],
        attention=lambda number: nn.Attention(
            features, num_heads=heads, scale=1.0, bias=False, output_bias=True
        ),
        hidden=config.take("intermediate_size", int, 4 * features),
        positions=config.take("max_position_embeddings", int, 2048),
    )


def _kinds(config: Config, layers: int) -> list[str]:
    """Whether each layer looks to the start: attention_types are kinds and how often they come."""
    types = config.raw("attention_types", [[["global", "local"], 12]])
    try:
        kinds = [str(kind) for some, count in types for _ in range(count) for kind in some]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != layers or not {*kinds} <= {"global", "local"}:
        config.refuse("attention_types", types, f"{layers} in all of global and local")
    if config.raw("attention_layers", kinds) != kinds:
        config.refuse("attention_layers", config.given("attention_layers"), f"{kinds}")
    return kinds


def _scale(config: Config, features: int, heads: int) -> float:
    check_heads(config, features, heads)
    scaled = config.take("scale_attn_weights", bool, True)
    return 1.0 / math.sqrt(features // heads) if scaled else 1.0


def _specification(
    config: Config,
    features: int,
    *,
    hidden: int,
    layers: Sequence[Sight],
    activation: str = "gelu_new",
    **own: Any,
) -> Specification:
    kind = config.choose("activation_function", ACTIVATIONS, activation)
    return Specification(
        vocabulary=config.take("vocab_size", int),
        features=features,
        layers=layers,
        norm=partial(nn.LayerNorm, epsilon=config.take("layer_norm_epsilon", float, 1e-5)),
        feed_forward=lambda number: nn.FeedForward(features, hidden, activation=kind),
        tied=config.take("tie_word_embeddings", bool, True),
        **own,
    )


_NAMES: dict[str, Source] = {
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
}


def _family(specify: Callable[[Config], Specification], **more: Any) -> Family:
    return Family(
        tasks=tasks(specify),
        prefix="transformer.",
        tied={"lm_head.weight": "transformer.wte.weight"},
        unused=r"lm_head\.weight|(transformer\.)?h\.\d+\.attn\.(attention\.)?(masked_)?bias",
        **more,
    )


def _shared(which: int) -> Callable[[Any], Part]:
    """Queries, keys or values (0, 1, 2): those of one head behind all queries, or head by head."""

    def part(attention: nn.Attention) -> Part:
        heads = attention.num_heads
        if attention.kv_heads == heads:
            return Part("c_attn", which, 3, heads)
        number, width = (0, heads) if which == 0 else (heads + which - 1, 1)
        return Part("c_attn", number, heads + 2, 1, width)

    return part


FAMILIES = {
    "gpt2": _family(gpt2, names=_NAMES, transposed=False),
    "gpt_bigcode": _family(
        bigcode, names=_NAMES | {"query": _shared(0), "key": _shared(1), "value": _shared(2)}
    ),
    "gpt_neo": _family(
        neo,
        names=_NAMES
        | {"attention": "attn.attention", "query": "q_proj", "key": "k_proj", "value": "v_proj"}
        | {"attention.output": "out_proj"},
    ),
}
