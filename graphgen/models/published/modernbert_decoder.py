"""The decoders of Ettin (arXiv 2507.11412): ModernBERT's layers, which see the tokens before."""

from typing import Any

from graphgen import nn
from graphgen.models.published.classifier import CausalClassifier
from graphgen.models.published.config import ACTIVATIONS, Config
from graphgen.models.published.decoder import CausalLM, Decoder, tasks
from graphgen.models.published.family import Family
from graphgen.models.published.heads import labels
from graphgen.models.published.modernbert import modernbert
from graphgen.models.published.specification import Specification
from graphgen.nn.feed_forward import ACTIVATIONS as FUNCTIONS
from graphgen.nn.module import Parameter, zeros
from graphgen.parts import Part
from graphgen.value import Tensor


def specification(config: Config) -> Specification:
    """The fields are ModernBERT's; a local layer looks back half its `local_attention`."""
    spec = modernbert(config)
    config.expect("sliding_window", config.take("local_attention", int, 128) // 2)
    return Specification(
        vocabulary=spec.vocabulary,
        features=spec.features,
        layers=spec.layers,
        norm=spec.norm,
        attention=spec.attention,
        feed_forward=spec.feed_forward,
        bare_first=True,
        embedding_norm=True,
        tied=spec.tied,
    )


class Transform(nn.Module):
    """Linear, activation and norm, before the last products of a task."""

    def __init__(self, config: Config, spec: Specification):
        bias = config.take("classifier_bias", bool, False)
        self.dense = nn.Linear(spec.features, spec.features, bias=bias)
        self.norm = spec.norm(spec.features)
        self.activation = FUNCTIONS[config.choose("classifier_activation", ACTIVATIONS, "gelu")]

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.activation(self.dense(x)))
        return y


class Head(nn.Module):
    """The logits of next tokens, (..., D) to (..., vocabulary)."""

    def __init__(self, config: Config, decoder: Decoder):
        spec, table = decoder.spec, decoder.embedding
        self.transform = Transform(config, spec)
        self.products = None if spec.tied else nn.Linear(spec.features, table.count, bias=False)
        self.last = table.logits if self.products is None else self.products
        self.products_bias = None
        if config.take("decoder_bias", bool, True):
            self.products_bias = Parameter((table.count,), initialize=zeros)

    def logits(self, x: Tensor) -> Tensor:
        """Of the table of tokens, or of products of their own."""
        y: Tensor = self.last(self.transform(x))
        return y if self.products_bias is None else y + self.products_bias


class Labels(nn.Module):
    """The logits of labels, (..., D) to (..., labels)."""

    def __init__(self, config: Config, spec: Specification):
        self.transform = Transform(config, spec)
        bias = config.take("classifier_bias", bool, False)
        self.classifier = nn.Linear(spec.features, labels(config), bias=bias)

    def logits(self, x: Tensor) -> Tensor:
        """Of one vector or several."""
        y: Tensor = self.classifier(self.transform(x))
        return y


class Classifier(CausalClassifier):
    """The logits of a text's labels, (B, labels), from its last token."""

    def __init__(self, config: Config, decoder: Decoder):
        super().__init__(config, decoder)
        self.score: Any = Labels(config, decoder.spec)


def _generating(config: Config) -> CausalLM:
    made = CausalLM(specification(config))
    made.head = Head(config, made)
    return made


def _classifying(config: Config) -> Classifier:
    return Classifier(config, Decoder(specification(config)))


FAMILY = Family(
    tasks={
        **tasks(specification),
        "text-generation": _generating,
        "text-classification": _classifying,
    },
    names={
        "decoder": "",
        "embedding": "model.embeddings.tok_embeddings",
        "embedding_norm": "model.embeddings.norm",
        "layers": "model.layers",
        "norm": "model.final_norm",
        "norm1": "attn_norm",
        "attention": "attn",
        "query": "q_proj",
        "key": "k_proj",
        "value": "v_proj",
        "output": "Wo",
        "norm2": "mlp_norm",
        "feed_forward": "mlp",
        "gate": Part("Wi", 0, 2),
        "up": Part("Wi", 1, 2),
        "down": "Wo",
        "head": "",
        "head.transform": "lm_head",
        "score": "",
        "score.transform": "head",
        "transform.norm": "norm",
        "products": "decoder",
        "products_bias": "decoder.bias",
    },
    tied={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    unused=r"(lm_head|head|decoder|classifier)\..*",
    prefix="model.",
)
