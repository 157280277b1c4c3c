"""Encoders that differ from BERT and RoBERTa in the places or the names of their norms.

RoBERTa-PreLayerNorm (arXiv 1904.01038), XLM-RoBERTa-XL (2105.00572), Megatron-BERT (1909.08053) and
the texts of Data2Vec (2202.03555).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from graphgen import nn
from graphgen.models.published.bert import BERT, ROBERTA, UNUSED, roberta, specification
from graphgen.models.published.config import Config
from graphgen.models.published.family import Family, Source
from graphgen.models.published.heads import tasks
from graphgen.models.published.specification import EncoderSpecification

_BEFORE: dict[str, Any] = {"norms": ("norm1", "norm2"), "last_norm": True}


def before(config: Config) -> EncoderSpecification:
    """Norms before attention and feed-forward, and one at the end."""
    return roberta(config, **_BEFORE)


def xl(config: Config) -> EncoderSpecification:
    """The same, without one of the vectors of tokens."""
    norm = partial(nn.LayerNorm, epsilon=config.take("layer_norm_eps", float, 1e-5))
    types, count = (config.take(*own) for own in _SIZES_OF_XL)
    own = {"norm": norm, "types": types, "positions": count, "embedding_norm": False}
    return roberta(config, **_BEFORE, **own)


_SIZES_OF_XL = (("type_vocab_size", int, 1), ("max_position_embeddings", int, 514))


def megatron(config: Config) -> EncoderSpecification:
    """The same with the positions of BERT."""
    return specification(config, embedding_norm=False, **_BEFORE)


def _like(
    base: Family,
    make: Callable[[Config], EncoderSpecification],
    prefix: str = "",
    names: Mapping[str, Source] = {},
) -> Family:
    """A family with the names of another one, and some of its own; the body is called `prefix`."""
    old = base.prefix.removesuffix(".")
    new = prefix or old
    return replace(
        base,
        tasks=tasks(make),
        names={**base.names, "encoder": new, **names},
        tied={a: b.replace(f"{old}.", f"{new}.", 1) for a, b in base.tied.items()},
        unused=rf"({new}\.)?" + UNUSED + r"|(lm_head|cls)\..*",
        prefix=f"{new}.",
    )


_PRE = {"norm1": "attention.LayerNorm", "norm2": "intermediate.LayerNorm"}
_XL = {"norm1": "attention.self_attn_layer_norm", "norm2": "LayerNorm"}
_MEGATRON = {"norm1": "attention.ln", "norm2": "ln", "last_norm": "encoder.ln"}

FAMILIES = {
    "data2vec-text": _like(ROBERTA, roberta, "data2vec_text"),
    "roberta-prelayernorm": _like(
        ROBERTA, before, "roberta_prelayernorm", {**_PRE, "last_norm": "LayerNorm"}
    ),
    "xlm-roberta-xl": _like(ROBERTA, xl, names={**_XL, "last_norm": "encoder.LayerNorm"}),
    "megatron-bert": _like(BERT, megatron, names=_MEGATRON),
}
