"""MPNet (arXiv 2004.09297): RoBERTa with a bias of all scores by distance, as T5 has."""

from graphgen import nn
from graphgen.models.published.bert import ROBERTA, UNUSED, specification
from graphgen.models.published.config import Config
from graphgen.models.published.family import Family
from graphgen.models.published.heads import tasks
from graphgen.models.published.specification import EncoderSpecification

_PADDING = 1  # whatever the configuration says


def mpnet(config: Config) -> EncoderSpecification:
    """32 buckets up to a distance of 128: the class reads the size of the table only."""
    config.expect("relative_attention_num_buckets", 32)
    heads = config.take("num_attention_heads", int)
    return specification(
        config,
        types=0,
        padding=_PADDING,
        relative=nn.RelativeBias(heads, count=32, furthest=128),
        activation="gelu",
    )


FAMILY = Family(
    pads=r"(.*\.)?(word|position)_embeddings\.weight",
    tasks=tasks(mpnet),
    names={
        **ROBERTA.names,
        "encoder": "mpnet",
        "relative": "encoder.relative_attention_bias",
        "query": "attn.q",
        "key": "attn.k",
        "value": "attn.v",
        "output": "attn.o",
        "after1": "attention.LayerNorm",
    },
    older=ROBERTA.older,
    tied={"lm_head.decoder.weight": "mpnet.embeddings.word_embeddings.weight"},
    unused=r"(mpnet\.)?" + UNUSED + r"|lm_head\..*",
    prefix="mpnet.",
)
