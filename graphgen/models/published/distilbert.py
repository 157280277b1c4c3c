"""DistilBERT (arXiv 1910.01108): BERT with half the layers, without token types and pooler."""

from functools import partial

from graphgen import nn, ops
from graphgen.models.published.config import ACTIVATIONS, Config
from graphgen.models.published.family import Family
from graphgen.models.published.heads import tasks
from graphgen.models.published.specification import EncoderSpecification, Sight


def distilbert(config: Config) -> EncoderSpecification:
    """BERT's encoder by other names of the fields."""
    # These have no effect: positions and weights are read as stored.
    config.ignore("sinusoidal_pos_embds", "tie_weights_")
    features, heads = config.take("dim", int), config.take("n_heads", int)
    hidden = config.take("hidden_dim", int)
    activation = config.choose("activation", ACTIVATIONS, "gelu")
    return EncoderSpecification(
        vocabulary=config.take("vocab_size", int),
        features=features,
        layers=[Sight()] * config.take("n_layers", int),
        norm=partial(nn.LayerNorm, epsilon=1e-12),
        attention=lambda number: nn.Attention(features, num_heads=heads),
        feed_forward=lambda number: nn.FeedForward(features, hidden, activation=activation),
        activation=activation,
        pooled=ops.relu,
        positions=config.take("max_position_embeddings", int, 512),
        tied=config.take("tie_word_embeddings", bool, True),
    )


FAMILY = Family(
    tasks=tasks(distilbert),
    names={
        "head": "",
        "encoder": "distilbert",
        "embedding": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "norm": "embeddings.LayerNorm",
        "layers": "transformer.layer",
        "query": "q_lin",
        "key": "k_lin",
        "value": "v_lin",
        "output": "out_lin",
        "after1": "sa_layer_norm",
        "feed_forward": "ffn",
        "up": "lin1",
        "down": "lin2",
        "after2": "output_layer_norm",
        "transform": "vocab_transform",
        "transform_norm": "vocab_layer_norm",
        "decoder": "vocab_projector",
        "decoder_bias": "vocab_projector.bias",
        "pooler": "pre_classifier",
        "labels": "classifier",
        "span": "qa_outputs",
    },
    tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    unused=r"(distilbert\.)?embeddings\.position_ids|vocab_\w+\..*|(pre_)?classifier\..*|"
    r"qa_outputs\..*",
    prefix="distilbert.",
)
