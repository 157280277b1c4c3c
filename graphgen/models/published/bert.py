"""BERT (arXiv 1810.04805), and the encoders whose fields and weights are named as BERT's.

RoBERTa (1907.11692), XLM-RoBERTa (1911.02116), CamemBERT (1911.03894), ELECTRA (2003.10555).
"""

from functools import partial
from typing import Any

from graphgen import nn, ops
from graphgen.models.published.config import ACTIVATIONS, Config
from graphgen.models.published.family import Family, Source
from graphgen.models.published.heads import tasks
from graphgen.models.published.specification import EncoderSpecification, Sight


def specification(config: Config, **own: Any) -> EncoderSpecification:
    """The encoder that the fields of BERT's classes describe, with terms of its own."""
    config.expect("is_decoder", False)
    config.expect("add_cross_attention", False)
    kinds = ["rope", "rotary"] if "layers" in own else ["absolute"]
    config.expect("position_embedding_type", *kinds)
    config.expect("directionality", "bidi")
    features, heads = config.take("hidden_size", int), config.take("num_attention_heads", int)
    config.expect("emb_size", features)  # TinyBERT's note
    hidden = config.take("intermediate_size", int)
    activation = config.choose("hidden_act", ACTIVATIONS, own.pop("absent", "gelu"))
    given: dict[str, Any] = {
        "vocabulary": config.take("vocab_size", int),
        "features": features,
        "layers": [Sight()] * config.take("num_hidden_layers", int),
        "norm": own.get("norm")
        or partial(nn.LayerNorm, epsilon=config.take("layer_norm_eps", float, 1e-12)),
        "attention": lambda number: nn.Attention(features, num_heads=heads),
        "feed_forward": lambda number: nn.FeedForward(features, hidden, activation=activation),
        "activation": activation,
        "positions": config.take("max_position_embeddings", int, 512),
        "tied": config.take("tie_word_embeddings", bool, True),
    }
    if "types" not in own:
        given["types"] = config.take("type_vocab_size", int, 2)
    return EncoderSpecification(**given | own)


def roberta(config: Config, **own: Any) -> EncoderSpecification:
    """The n-th token that is not padding has position n + padding's id."""
    padding = config.optional("pad_token_id", int, 1)
    if padding is None or padding >= config.take("max_position_embeddings", int, 512):
        config.refuse("pad_token_id", padding, "an id that has a position")
    return specification(config, padding=padding, activation="gelu", **own)


def electra(config: Config) -> EncoderSpecification:
    """The vectors of tokens have a size of their own, and a layer makes D features of them."""
    size = config.take("embedding_size", int, 128)
    return specification(config, embedding_features=size, activation="gelu", pooled=ops.gelu)


NAMES: dict[str, Source] = {
    "head": "",
    "embedding": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "layers": "encoder.layer",
    "query": "self.query",
    "key": "self.key",
    "value": "self.value",
    "output": "output.dense",
    "after1": "attention.output.LayerNorm",
    "feed_forward": "",
    "up": "intermediate.dense",
    "down": "output.dense",
    "after2": "output.LayerNorm",
    "labels": "classifier",
    "span": "qa_outputs",
}
UNUSED = r"(embeddings\.position_ids|pooler\..*)|classifier\..*|qa_outputs\..*"
"""Weights of other tasks, after the family's prefix."""

BERT = Family(
    tasks=tasks(specification),
    names={
        **NAMES,
        "encoder": "bert",
        "transform": "cls.predictions.transform.dense",
        "transform_norm": "cls.predictions.transform.LayerNorm",
        "decoder": "cls.predictions.decoder",
        "decoder_bias": "cls.predictions.decoder.bias",
        "pooler": "bert.pooler.dense",
        "classifier": "classifier",
    },
    older={r"cls\.predictions\.bias": "cls.predictions.decoder.bias"},
    tied={"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"},
    unused=r"(bert\.)?" + UNUSED + r"|cls\..*",
    prefix="bert.",
)
ROBERTA = Family(
    pads=r"(.*\.)?(word|position)_embeddings\.weight",
    tasks=tasks(roberta),
    names={
        **NAMES,
        "encoder": "roberta",
        "transform": "lm_head.dense",
        "transform_norm": "lm_head.layer_norm",
        "decoder": "lm_head.decoder",
        "decoder_bias": "lm_head.decoder.bias",
        "pooler": "classifier.dense",
        "classifier": "classifier.out_proj",
    },
    older={r"lm_head\.bias": "lm_head.decoder.bias"},
    tied={"lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight"},
    unused=r"(roberta\.)?" + UNUSED + r"|lm_head\..*",
    prefix="roberta.",
)
ELECTRA = Family(
    tasks=tasks(electra),
    names={
        **NAMES,
        "encoder": "electra",
        "projection": "embeddings_project",
        "transform": "generator_predictions.dense",
        "transform_norm": "generator_predictions.LayerNorm",
        "decoder": "generator_lm_head",
        "decoder_bias": "generator_lm_head.bias",
        "pooler": "classifier.dense",
        "classifier": "classifier.out_proj",
    },
    tied={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
    unused=r"(electra\.)?" + UNUSED + r"|(generator|discriminator)_\w+\..*|sequence_summary\..*",
    prefix="electra.",
)
FAMILIES = {
    "bert": BERT,
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), ROBERTA),
    "electra": ELECTRA,
}
