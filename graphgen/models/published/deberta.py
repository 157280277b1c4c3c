"""DeBERTa (arXiv 2006.03654), version 2, and version 3 (2111.09543), which has 2's classes."""

from collections.abc import Callable
from functools import partial
from typing import Any

from graphgen import nn, ops
from graphgen.models.published.bert import NAMES, specification
from graphgen.models.published.config import ACTIVATIONS, Config
from graphgen.models.published.disentangled import DisentangledAttention, Distances
from graphgen.models.published.encoder import Encoder
from graphgen.models.published.family import Family, Source
from graphgen.models.published.heads import HEADS, MaskedLM, tasks
from graphgen.models.published.specification import EncoderSpecification
from graphgen.nn.feed_forward import ACTIVATIONS as FUNCTIONS
from graphgen.parts import Part
from graphgen.value import Tensor

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: FUNCTIONS[kind] for name, kind in ACTIVATIONS.items()},
    "tanh": ops.tanh,
}

_TERMS: list[list[str]] = [[], ["c2p"], ["p2c"], ["c2p", "p2c"]]
"""Which scores of distances there may be, in order."""


class Joined(nn.Module):
    """norm(x + f(convolution(first))); padding counts as zero."""

    def __init__(self, features: int, config: Config, norm: Callable[[int], nn.Module]):
        kernel, groups = config.take("conv_kernel_size", int), config.take("conv_groups", int, 1)
        if kernel % 2 == 0:
            config.refuse("conv_kernel_size", kernel, "odd")
        if features % groups:
            config.refuse("conv_groups", groups, f"a divisor of hidden_size, {features}")
        self.conv = nn.Convolution(features, features, kernel=kernel, groups=groups)
        self.activation = config.choose("conv_act", _FUNCTIONS, "tanh")
        self.norm = norm(features)

    def __call__(self, first: Tensor, x: Tensor, kept: Tensor) -> Tensor:  # (B, T, D), (B, T)
        joined: Tensor = self.norm(x + self.activation(self.conv(first, kept)))
        return joined


def deberta(config: Config) -> EncoderSpecification:
    """Queries, keys and values in one weight, a vector for each distance."""
    config.expect("talking_head", False)
    return _specification(config, None, separate=True)


def deberta2(config: Config) -> EncoderSpecification:
    """Vectors for ranges of distances, with a norm and weights shared with those of tokens."""
    buckets = config.raw("position_buckets", -1)
    if type(buckets) is not int or 0 < buckets < 4 or buckets > 1 << 15:
        config.refuse("position_buckets", buckets, "an integer from 4 to 32768, or 0 for none")
    features = config.take("hidden_size", int)
    config.expect("attention_head_size", features // config.take("num_attention_heads", int))
    normed = config.choose("norm_rel_ebd", {"none": False, "layer_norm": True}, "none")
    return _specification(
        config,
        buckets if buckets > 0 else None,
        separate=False,
        shared=config.take("share_att_key", bool, False),
        normed=normed,
    )


def _specification(
    config: Config,
    buckets: int | None,
    *,
    separate: bool,
    shared: bool = False,
    normed: bool = False,
) -> EncoderSpecification:
    config.ignore("padding_idx", "pooler")
    features, heads = config.take("hidden_size", int), config.take("num_attention_heads", int)
    config.expect("pooler_hidden_size", features)
    length = config.take("max_position_embeddings", int, 512)
    furthest = config.raw("max_relative_positions", -1)
    if type(furthest) is not int or furthest > 1 << 15:
        config.refuse("max_relative_positions", furthest, "an integer up to 32768, or -1")
    furthest = length if furthest < 1 else furthest
    if buckets is not None and furthest <= buckets // 2 + 1:
        config.refuse("position_buckets", buckets, f"below {2 * furthest - 2}")
    types = config.count("type_vocab_size", 0)
    terms = config.raw("pos_att_type", [])
    terms = terms.lower().replace(" ", "").split("|") if isinstance(terms, str) else terms
    if (
        not isinstance(terms, list) or sorted(map(str, terms)) not in _TERMS
    ):  # the scale counts them
        config.refuse("pos_att_type", terms, "c2p, p2c or both, as a list or with | between")
    vectors = config.take("relative_attention", bool, False)
    epsilon = config.take("layer_norm_eps", float, 1e-7)
    norm = partial(nn.LayerNorm, epsilon=epsilon)
    own: dict[str, Any] = {"terms": {*terms}, "vectors": vectors, "separate": separate}
    legacy = config.take("legacy", bool, True)
    size = config.take("embedding_size", int, features)
    if not legacy and size != features:
        config.refuse("embedding_size", size, f"hidden_size, {features}, where legacy is false")
    tied = config.take("tie_word_embeddings", bool, True)
    convolution = None
    if not separate and config.raw("conv_kernel_size", 0) != 0:
        convolution = Joined(features, config, norm)
    return specification(
        config,
        norm=norm,
        attention=lambda number: DisentangledAttention(
            features, num_heads=heads, shared=shared, **own
        ),
        types=types,
        positions=length if config.take("position_biased_input", bool, True) else None,
        embedding_features=size,
        embedded=True,
        tied=tied or not legacy,
        pooled=config.choose("pooler_hidden_act", _FUNCTIONS, "gelu"),
        distances=Distances(
            features, furthest=furthest, buckets=buckets, norm=norm if normed else None
        )
        if vectors
        else None,
        convolution=convolution,
    )


class DebertaLM(MaskedLM):
    """The head of masked tokens, which newer files store by other names."""

    def __init__(self, config: Config, encoder: Encoder):
        self.legacy = config.take("legacy", bool, True)
        newer = config.has("lm_predictions.")
        if self.legacy and newer and not config.has("cls."):
            config.refuse("legacy", True, "false: the checkpoint's head is lm_predictions")
        super().__init__(config, encoder)


def _head(older: str, newer: str) -> Callable[[DebertaLM], Part]:
    return lambda head: Part(
        f"cls.predictions.{older}" if head.legacy else f"lm_predictions.lm_head.{newer}"
    )


def _family(specify: Callable[[Config], EncoderSpecification], **names: Source) -> Family:
    return Family(
        tasks=tasks(specify, HEADS | {"fill-mask": DebertaLM}),
        names={
            **NAMES,
            "encoder": "deberta",
            "projection": "embeddings.embed_proj",
            "distances": "encoder",
            "distances.table": "rel_embeddings",
            "distances.norm": "LayerNorm",
            "convolution": "encoder.conv",
            "convolution.norm": "LayerNorm",
            "transform": _head("transform.dense", "dense"),
            "transform_norm": _head("transform.LayerNorm", "LayerNorm"),
            "decoder": "cls.predictions.decoder",
            "decoder_bias": _head("decoder.bias", "bias"),
            "pooler": "pooler.dense",
            "classifier": "classifier",
            **names,
        },
        older={r"cls\.predictions\.bias": "cls.predictions.decoder.bias"},
        tied={"cls.predictions.decoder.weight": "deberta.embeddings.word_embeddings.weight"},
        unused=r"(deberta\.)?embeddings\.position_(ids|embeddings\..*)|(lm|mask)_predictions\..*|"
        r"cls\..*|pooler\..*|classifier\..*|qa_outputs\..*",
        prefix="deberta.",
    )


FAMILIES = {
    "deberta": _family(
        deberta,
        query=lambda attention: Part("self.in_proj", 0, 3, attention.num_heads),
        key=lambda attention: Part("self.in_proj", 1, 3, attention.num_heads),
        value=lambda attention: Part("self.in_proj", 2, 3, attention.num_heads),
        query_bias="self.q_bias",
        value_bias="self.v_bias",
        distance_key="self.pos_proj",
        distance_query="self.pos_q_proj",
    ),
    "deberta-v2": _family(
        deberta2,
        query="self.query_proj",
        key="self.key_proj",
        value="self.value_proj",
        distance_key="self.pos_key_proj",
        distance_query="self.pos_query_proj",
    ),
}
