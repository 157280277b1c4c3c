"""ALBERT (arXiv 1909.11942): BERT whose layers share weights, with narrow vectors of tokens."""

from graphgen.models.published.bert import NAMES, specification
from graphgen.models.published.config import Config
from graphgen.models.published.family import Family
from graphgen.models.published.heads import tasks
from graphgen.models.published.specification import EncoderSpecification


def albert(config: Config) -> EncoderSpecification:
    """Groups of neighboring layers, one by default, each with one set of weights."""
    # Sizes of the first implementation; the classes of transformers have never read them.
    config.ignore("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks")
    config.ignore("layers_to_keep")
    config.expect("inner_group_num", 1)
    layers = config.take("num_hidden_layers", int)
    groups = config.take("num_hidden_groups", int, 1)
    if groups > layers:
        config.refuse("num_hidden_groups", groups, f"at most num_hidden_layers, {layers}")
    return specification(
        config,
        absent="gelu_new",
        embedding_features=config.take("embedding_size", int, 128),
        projected=True,
        order=[int(i / (layers / groups)) for i in range(layers)],
    )


FAMILY = Family(
    tasks=tasks(albert),
    names={
        **NAMES,
        "encoder": "albert",
        "projection": "encoder.embedding_hidden_mapping_in",
        "layers": "encoder.albert_layer_groups",
        "attention": "albert_layers.0.attention",
        "query": "query",
        "key": "key",
        "value": "value",
        "output": "dense",
        "after1": "albert_layers.0.attention.LayerNorm",
        "feed_forward": "albert_layers.0",
        "up": "ffn",
        "down": "ffn_output",
        "after2": "albert_layers.0.full_layer_layer_norm",
        "transform": "predictions.dense",
        "transform_norm": "predictions.LayerNorm",
        "decoder": "predictions.decoder",
        "decoder_bias": "predictions.decoder.bias",
        "pooler": "albert.pooler",
        "classifier": "classifier",
    },
    older={r"predictions\.bias": "predictions.decoder.bias"},
    tied={"predictions.decoder.weight": "albert.embeddings.word_embeddings.weight"},
    unused=r"(albert\.)?(embeddings\.position_ids|pooler\..*)|(sop_)?classifier\..*|"
    r"qa_outputs\..*|predictions\..*",
    prefix="albert.",
)
