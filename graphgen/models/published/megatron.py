"""What the older decoders share: plain feed-forwards, packed heads, and Megatron's names."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from graphgen import nn
from graphgen.models.published.config import ACTIVATIONS, Config
from graphgen.models.published.family import Source
from graphgen.operands import Array
from graphgen.parts import Part


def layer_norm(config: Config, field: str) -> partial[nn.LayerNorm]:
    """The norm of a configuration, whose epsilon is in this field."""
    return partial(nn.LayerNorm, epsilon=config.take(field, float, 1e-5))


def check_heads(config: Config, features: int, heads: int) -> None:
    """Refuse more heads than there are features."""
    if heads > features:
        name = "n_head" if config.given("n_head") is not None else "num_attention_heads"
        config.refuse(name, heads, f"at most {features}, the features")


def plain(
    config: Config, sizes: tuple[int, int], field: str, default: str, *, bias: bool = True
) -> Callable[[int], nn.FeedForward]:
    """What makes feed-forwards without a gate, of these features and inner features."""
    activation = config.choose(field, ACTIVATIONS, default)
    return lambda number: nn.FeedForward(*sizes, activation=activation, bias=bias)


def alibi_slopes(heads: int) -> Array:
    """The published slopes, float32 (H,): of the next lower power of two, then every other one."""
    power = 2 ** int(math.log2(heads))
    found = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    found += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
    return np.array(found, np.float32)


def packed(name: str, which: int) -> Callable[[Any], Part]:
    """Queries, keys or values (0, 1, 2) where each head of keys lies behind its queries."""

    def part(attention: Any) -> Part:
        groups = attention.kv_heads
        queries = attention.num_heads // groups
        number, width = (0, queries) if which == 0 else (queries + which - 1, 1)
        return Part(name, number, queries + 2, groups, width)

    return part


MEGATRON: dict[str, Source] = {
    "feed_forward": "mlp",
    "up": "dense_h_to_4h",
    "down": "dense_4h_to_h",
    "output": "dense",
    "query": packed("query_key_value", 0),
    "key": packed("query_key_value", 1),
    "value": packed("query_key_value", 2),
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "decoder": "",
    "head": "lm_head",
}
UNUSED = (
    r"lm_head\.weight|.*\.(rotary_emb\.inv_freq|attention\.(masked_)?bias|attn\.(masked_)?bias)"
)


def transformer(table: str, **names: Source) -> dict[str, Source]:
    """The names of a decoder whose body is called transformer."""
    return {
        "embedding": f"transformer.{table}",
        "layers": "transformer.h",
        "norm": "transformer.ln_f",
        **names,
    }
