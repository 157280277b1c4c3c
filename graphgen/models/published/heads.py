"""Tasks of encoders: heads on the vectors of the tokens, (B, T, D)."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from graphgen import nn, ops
from graphgen.models.published.config import Config
from graphgen.models.published.encoder import Encoder
from graphgen.models.published.poolings import first
from graphgen.models.published.specification import EncoderSpecification
from graphgen.nn.feed_forward import ACTIVATIONS, Activation
from graphgen.nn.module import Parameter, TensorSpec, zeros
from graphgen.value import Tensor

LOGITS_OF_TOKENS = (
    "text-generation",
    "text2text-generation",
    "fill-mask",
    "automatic-speech-recognition",
)
"""The tasks whose output has a number for each token of the vocabulary."""


class Encoded(nn.Module):
    """An encoder of tokens, and the head that makes the outputs of a task.

    `after` makes further outputs of those and the mask.
    """

    after: Callable[[dict[str, Tensor], Tensor], dict[str, Tensor]] | None = None

    def __init__(self, encoder: Any, head: Any):
        self.encoder, self.head = encoder, head

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor, **types: Tensor
    ) -> dict[str, Tensor]:  # (B, T) each; in the mask, 1 is a token and 0 padding
        x = self.encoder(input_ids, attention_mask, **types)  # (B, T, D)
        outputs: dict[str, Tensor] = self.head(x, attention_mask, self.encoder)
        return outputs if self.after is None else outputs | self.after(outputs, attention_mask)

    def inputs(self) -> dict[str, TensorSpec]:
        """The inputs of the encoder."""
        specs: dict[str, TensorSpec] = self.encoder.inputs()
        return specs

    @property
    def features(self) -> int:
        """D."""
        return self.encoder.features  # type: ignore[no-any-return]


class Vectors(nn.Module):
    """The vectors themselves."""

    def __call__(self, x: Tensor, mask: Tensor, encoder: Any) -> dict[str, Tensor]:
        return {"last_hidden_state": x}


class MaskedLM(nn.Module):
    """Logits of the token at each position: linear, activation, norm, the table of tokens."""

    def __init__(self, config: Config, encoder: Encoder):
        table, spec = encoder.embedding, encoder.spec
        self.activation: Activation = spec.activation
        self.transform = nn.Linear(spec.features, table.features, bias=spec.head_bias)
        self.transform_norm = spec.norm(table.features)
        tied = encoder.spec.tied
        self.decoder = None if tied else nn.Linear(table.features, table.count, bias=False)
        self.decoder_bias = None
        if spec.logits_bias:
            self.decoder_bias = Parameter((table.count,), initialize=zeros)

    def __call__(self, x: Tensor, mask: Tensor, encoder: Encoder) -> dict[str, Tensor]:
        x = self.transform_norm(ACTIVATIONS[self.activation](self.transform(x)))
        y = encoder.embedding.logits(x) if self.decoder is None else self.decoder(x)
        y = y if self.decoder_bias is None else y + self.decoder_bias
        return {"logits": y}  # (B, T, vocabulary)


class Classifier(nn.Module):
    """Logits of the labels of a text, (B, labels): W₂ f(W₁ x₀), with x₀ its first vector."""

    def __init__(self, config: Config, encoder: Encoder):
        self.activation = encoder.spec.pooled
        self.pooler = nn.Linear(encoder.features, encoder.features)
        self.classifier = nn.Linear(encoder.features, labels(config))

    def __call__(self, x: Tensor, mask: Tensor, encoder: Encoder) -> dict[str, Tensor]:
        return {"logits": self.classifier(self.activation(self.pooler(first(x))))}


class TokenClassifier(nn.Module):
    """Logits of the labels of each token, (B, T, labels)."""

    def __init__(self, config: Config, encoder: Encoder):
        self.labels = nn.Linear(encoder.features, labels(config))

    def __call__(self, x: Tensor, mask: Tensor, encoder: Encoder) -> dict[str, Tensor]:
        return {"logits": self.labels(x)}


class Span(nn.Module):
    """Logits of each token being the first and the last of the answer, (B, T) each."""

    def __init__(self, config: Config, encoder: Encoder):
        self.span = nn.Linear(encoder.features, 2)

    def __call__(self, x: Tensor, mask: Tensor, encoder: Encoder) -> dict[str, Tensor]:
        parts = ops.split(self.span(x), axis=2, num_outputs=2)  # (B, T, 1) each
        names = ("start_logits", "end_logits")
        return {name: ops.squeeze(y, [2]) for name, y in zip(names, parts, strict=True)}


HEADS: dict[str, Callable[[Config, Encoder], Any]] = {
    "feature-extraction": lambda config, encoder: Vectors(),
    "fill-mask": MaskedLM,
    "text-classification": Classifier,
    "token-classification": TokenClassifier,
    "question-answering": Span,
}
"""The head of each task of encoders of text."""

WITHOUT_ANSWERS = {name: head for name, head in HEADS.items() if name != "question-answering"}
"""The same, for types of which transformers has no head for answers."""


def tasks(
    specify: Callable[[Config], EncoderSpecification],
    heads: Mapping[str, Callable[[Config, Encoder], Any]] = HEADS,
) -> dict[str, Callable[[Config], Encoded]]:
    """The tasks of a family whose configurations `specify` reads."""

    def create(config: Config, head: Callable[[Config, Encoder], Any]) -> Encoded:
        encoder = Encoder(specify(config))
        return Encoded(encoder, head(config, encoder))

    return {name: partial(create, head=head) for name, head in heads.items()}


def labels(config: Config) -> int:
    """How many labels a classifier has: those with a name, 2 by default."""
    named = config.raw("id2label")
    if named is None:
        return config.take("num_labels", int, 2)
    if not isinstance(named, dict) or not named:
        config.refuse("id2label", named, "an object that names each label")
    return len(named)
