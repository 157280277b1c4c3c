"""DistilBERT (arXiv 1910.01108): BERT with half the layers, without token types and pooler."""

from graphgen import nn, ops
from graphgen.models.published import bert
from graphgen.models.published.config import Config
from graphgen.models.published.family import ACTIVATIONS, Family
from graphgen.models.published.heads import tasks
from graphgen.nn.module import TensorSpec
from graphgen.value import Tensor


class Encoder(nn.Module):
    """A vector for each token, (B, T) to (B, T, D), from its embedding and position."""

    epsilon = 1e-12

    def __init__(self, config: Config):
        # These have no effect: positions and weights are read as stored.
        for name in ("sinusoidal_pos_embds", "tie_weights_"):
            config.raw(name)
        self.features = config.take("dim", int)
        self.activation = config.choose("activation", ACTIVATIONS, "gelu")
        self.tied = config.take("tie_word_embeddings", bool, True)
        self.embedding = nn.Embedding(config.take("vocab_size", int), self.features)
        length = config.take("max_position_embeddings", int, 512)
        self.positions = nn.LearnedPositions(length, self.features)
        self.norm = nn.LayerNorm(self.features, epsilon=self.epsilon)
        self.layers = [
            bert.Layer(
                self.features,
                num_heads=config.take("n_heads", int),
                hidden=config.take("hidden_dim", int),
                activation=self.activation,
                epsilon=self.epsilon,
            )
            for _ in range(config.take("n_layers", int))
        ]

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.norm(self.positions(self.embedding(input_ids)))
        return bert.encode(self.layers, x, attention_mask)

    def inputs(self) -> dict[str, TensorSpec]:
        """Tokens, and the mask of those that are not padding."""
        return dict.fromkeys(["input_ids", "attention_mask"], bert.TOKENS)


FAMILY = Family(
    tasks=tasks(Encoder, pooled=ops.relu),
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
        "norm1": "sa_layer_norm",
        "feed_forward": "ffn",
        "up": "lin1",
        "down": "lin2",
        "norm2": "output_layer_norm",
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
