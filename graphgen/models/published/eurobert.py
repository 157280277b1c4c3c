"""EuroBERT (arXiv 2503.05500): Llama's layers, which see the tokens on both sides."""

from collections.abc import Callable
from typing import Any

from graphgen import nn, ops
from graphgen.models.published.config import Config
from graphgen.models.published.encoder import Encoder
from graphgen.models.published.family import Family
from graphgen.models.published.heads import WITHOUT_ANSWERS, labels, tasks
from graphgen.models.published.named import NAMES, specification
from graphgen.models.published.poolings import first, mean
from graphgen.models.published.specification import EncoderSpecification
from graphgen.nn.module import Parameter, zeros
from graphgen.value import Tensor


def eurobert(config: Config) -> EncoderSpecification:
    """The layers and norms of Llama, without a norm of the tokens' vectors."""
    config.raw(config.named("classifier_pooling", "clf_pooling"))  # of the head for texts
    config.ignore("bos_token", "eos_token", "mask_token", "pad_token")
    spec = specification(config)
    return EncoderSpecification(
        vocabulary=spec.vocabulary,
        features=spec.features,
        layers=spec.layers,
        norm=spec.norm,
        attention=spec.attention,
        feed_forward=spec.feed_forward,
        norms=spec.norms,
        post=False,
        last_norm=True,
        embedding_norm=False,
        tied=spec.tied,
        logits_bias=config.take("mlp_bias", bool, False),
    )


class MaskedLM(nn.Module):
    """Logits of the token at each position, by one linear layer or the table of tokens."""

    def __init__(self, config: Config, encoder: Encoder):
        table, spec = encoder.embedding, encoder.spec
        tied = spec.tied
        self.decoder = None if tied else nn.Linear(table.features, table.count, bias=False)
        self.decoder_bias = None
        if spec.logits_bias:
            self.decoder_bias = Parameter((table.count,), initialize=zeros)

    def __call__(self, x: Tensor, mask: Tensor, encoder: Encoder) -> dict[str, Tensor]:
        y = encoder.embedding.logits(x) if self.decoder is None else self.decoder(x)
        return {"logits": y if self.decoder_bias is None else y + self.decoder_bias}


_POOLED: dict[str, tuple[Callable[..., Tensor] | None, Callable[..., Tensor] | None]] = {
    "bos": (lambda x, mask: first(x), None),
    "mean": (mean, None),
    "late": (None, mean),
}
"""What takes one vector of the tokens', and what takes one of the logits'."""


class Classifier(nn.Module):
    """Logits of the labels of a text, (B, labels), of its first vector or of the mean."""

    def __init__(self, config: Config, encoder: Encoder):
        field = config.named("classifier_pooling", "clf_pooling")
        self.before, self.after = config.choose(field, _POOLED, "late")
        self.dense = nn.Linear(encoder.features, encoder.features)
        self.labels = nn.Linear(encoder.features, labels(config))

    def __call__(self, x: Tensor, mask: Tensor, encoder: Encoder) -> dict[str, Tensor]:
        x = x if self.before is None else self.before(x, mask)
        y = self.labels(ops.gelu(self.dense(x)))
        return {"logits": y if self.after is None else self.after(y, mask)}


_HEADS: dict[str, Callable[[Config, Encoder], Any]] = {
    **WITHOUT_ANSWERS,
    "fill-mask": MaskedLM,
    "text-classification": Classifier,
}

FAMILY = Family(
    tasks=tasks(eurobert, _HEADS),
    names=NAMES
    | {
        "head": "",
        "encoder": "model",
        "embedding": "embed_tokens",
        "layers": "layers",
        "last_norm": "norm",
        "decoder": "lm_head",
        "decoder_bias": "lm_head.bias",
        "labels": "classifier",
    },
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    unused=r"(lm_head|dense|classifier)\.(weight|bias)|.*rotary_emb\.inv_freq",
    prefix="model.",
)
