"""ModernBERT (arXiv 2412.13663): rotary positions, two of three layers local, gates, few biases."""

from functools import partial
from typing import Any

from graphgen import nn
from graphgen.models.published.config import ACTIVATIONS, Config
from graphgen.models.published.encoder import Encoder
from graphgen.models.published.family import Family
from graphgen.models.published.heads import HEADS, Span, TokenClassifier, tasks
from graphgen.models.published.named import layer_windows
from graphgen.models.published.poolings import first, mean
from graphgen.models.published.rope import rotary
from graphgen.models.published.specification import EncoderSpecification, Sight
from graphgen.nn.feed_forward import ACTIVATIONS as FUNCTIONS
from graphgen.parts import Part
from graphgen.value import Tensor


def modernbert(config: Config) -> EncoderSpecification:
    """Norms before, but for the first layer; other angles in local layers."""
    config.ignore("layer_norm_eps", "position_embedding_type", "deterministic_flash_attn")
    config.ignore("reference_compile", "repad_logits_with_grad", "sparse_prediction")
    config.ignore("sparse_pred_ignore_index")
    config.expect("head_dim")
    config.raw("classifier_pooling")  # only the head for texts reads it
    features, heads = config.take("hidden_size", int), config.take("num_attention_heads", int)
    hidden = config.take("intermediate_size", int)
    attention_bias = config.take("attention_bias", bool, False)
    options: dict[str, Any] = {
        "activation": config.choose("hidden_activation", ACTIVATIONS, "gelu"),
        "bias": config.take("mlp_bias", bool, False),
    }
    return EncoderSpecification(
        vocabulary=config.take("vocab_size", int),
        features=features,
        layers=_sights(config, features // heads),
        norm=partial(
            nn.LayerNorm,
            epsilon=config.take("norm_eps", float, 1e-5),
            bias=config.take("norm_bias", bool, False),
        ),
        attention=lambda number: nn.Attention(features, num_heads=heads, bias=attention_bias),
        feed_forward=lambda number: nn.FeedForward(features, hidden, gated=True, **options),
        norms=("norm1", "norm2"),
        post=False,
        bare_first=True,
        last_norm=True,
        activation=config.choose("classifier_activation", ACTIVATIONS, "gelu"),
        head_bias=config.take("classifier_bias", bool, False),
        logits_bias=config.take("decoder_bias", bool, True),
        tied=config.take("tie_word_embeddings", bool, True),
    )


def _sights(config: Config, head_dim: int) -> list[Sight]:
    """What each layer sees; a window has as many tokens on both sides of its own."""
    layers, every = (
        config.take("num_hidden_layers", int),
        config.take("global_attn_every_n_layers", int, 3),
    )
    local = layer_windows(config, 1, [i % every > 0 for i in range(layers)])
    config.expect("rope_scaling")
    given = config.raw("rope_parameters", {})
    kinds = {"full_attention": ("global", 1.6e5), "sliding_attention": ("local", 1e4)}
    if not isinstance(given, dict) or not {*given} <= {*kinds}:
        config.refuse("rope_parameters", given, f"an object with {' and '.join(kinds)}")
    turned = []
    for kind, (name, theta) in kinds.items():
        field, found = f"{name}_rope_theta", given.get(kind) or {}
        if not isinstance(found, dict):
            config.refuse("rope_parameters", given, "an object for each kind of layer")
        if config.optional(field, float, theta) is None:
            config.refuse(field, None, "a number, or absent")
        names = (field, "partial_rotary_factor")
        turned.append(rotary(config, head_dim, theta=theta, names=names, parameters=found))
    window = config.take("local_attention", int, 128) // 2
    return [Sight(None, turned[0]) if one is None else Sight(window, turned[1]) for one in local]


class Transformed(nn.Module):
    """A head behind a linear layer, activation and norm."""

    def __init__(self, config: Config, encoder: Encoder, head: Any):
        self.activation = FUNCTIONS[encoder.spec.activation]
        self.transform = nn.Linear(encoder.features, encoder.features, bias=encoder.spec.head_bias)
        self.transform_norm = encoder.spec.norm(encoder.features)
        self.inner = head(config, encoder)

    def __call__(self, x: Tensor, mask: Tensor, encoder: Encoder) -> dict[str, Tensor]:
        x = self.transform_norm(self.activation(self.transform(x)))
        outputs: dict[str, Tensor] = self.inner(x, mask, encoder)
        return outputs


class Pooled(nn.Module):
    """Logits of the labels of a text, (B, labels), from its first vector or the mean of all."""

    def __init__(self, config: Config, encoder: Encoder):
        ways = {"cls": lambda x, mask: first(x), "mean": mean}
        self.pool = config.choose("classifier_pooling", ways, "cls")
        self.transformed = Transformed(config, encoder, TokenClassifier)

    def __call__(self, x: Tensor, mask: Tensor, encoder: Encoder) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = self.transformed(self.pool(x, mask), mask, encoder)
        return outputs


FAMILY = Family(
    tasks=tasks(
        modernbert,
        HEADS
        | {
            "text-classification": Pooled,
            "token-classification": partial(Transformed, head=TokenClassifier),
            "question-answering": partial(Transformed, head=Span),
        },
    ),
    names={
        "head": "",
        "transformed": "",
        "inner": "",
        "encoder": "model",
        "embedding": "embeddings.tok_embeddings",
        "norm": "embeddings.norm",
        "attention": "attn",
        "query": Part("Wqkv", 0, 3),
        "key": Part("Wqkv", 1, 3),
        "value": Part("Wqkv", 2, 3),
        "output": "Wo",
        "norm1": "attn_norm",
        "feed_forward": "mlp",
        "gate": Part("Wi", 0, 2),
        "up": Part("Wi", 1, 2),
        "down": "Wo",
        "norm2": "mlp_norm",
        "last_norm": "final_norm",
        "transform": "head.dense",
        "transform_norm": "head.norm",
        "decoder_bias": "decoder.bias",
        "labels": "classifier",
        "span": "classifier",
    },
    tied={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    unused=r"(head\.(dense|norm)|decoder|classifier)\..*",
    prefix="model.",
)
