"""ESM-1b and ESM-2 (bioRxiv 622803 and 2022.07.20.500902): the amino acids of proteins."""

from typing import Any

from graphgen import ops
from graphgen.models.published.bert import ROBERTA, UNUSED, roberta
from graphgen.models.published.config import Config
from graphgen.models.published.encoder import Encoder
from graphgen.models.published.family import Family
from graphgen.models.published.heads import WITHOUT_ANSWERS, Encoded
from graphgen.models.published.rope import rotary
from graphgen.models.published.specification import EncoderSpecification, Sight
from graphgen.value import Tensor

_MASKED = 0.15 * 0.8
"""How much of each text was hidden in training."""


def specification(config: Config) -> EncoderSpecification:
    """Norms before; positions as in RoBERTa, or rotary."""
    config.expect("hidden_act", "gelu")
    config.expect("is_folding_model", False)
    config.raw("vocab_list")  # of folding models
    own: dict[str, Any] = {"norms": ("norm1", "norm2"), "post": False, "last_norm": True}
    kinds = {"absolute": False, "rotary": True}
    turned = config.choose("position_embedding_type", kinds, "absolute")
    features, heads = config.take("hidden_size", int), config.take("num_attention_heads", int)
    for name in ("rope_parameters", "rope_scaling", "head_dim"):
        config.expect(name)
    theta = config.take("rope_theta", float, 1e4)
    if turned:
        turn = rotary(config, features // heads, theta=theta)
        own["layers"] = [Sight(None, turn)] * config.take("num_hidden_layers", int)
        own["positions"] = None
    norm = config.take("emb_layer_norm_before", bool, False)
    return roberta(config, types=0, embedding_norm=norm, **own)


class Proteins(Encoder):
    """An encoder whose tokens' vectors are scaled by how many of them are hidden."""

    def __init__(self, config: Config):
        super().__init__(specification(config))
        self.hidden = None
        if config.take("token_dropout", bool, False):
            self.hidden = config.take("mask_token_id", int)

    def embedded(
        self, input_ids: Tensor, token_type_ids: Tensor | None, mask: Tensor | None = None
    ) -> Tensor:
        """Hidden tokens have no vector, and the others grow as in training."""
        x = super().embedded(input_ids, token_type_ids, mask)
        assert mask is not None
        return x * ops.unsqueeze(ops.cast_like(mask, x), [2])

    def tokens(self, input_ids: Tensor, mask: Tensor | None) -> Tensor:
        """The vectors of tokens alone, (B, T, D)."""
        x = super().tokens(input_ids, mask)
        if self.hidden is None or mask is None:
            return x
        kept = ops.cast_like(ops.logical_not(ops.equal(input_ids, self.hidden)), x)  # (B, T)
        count = ops.reduce_sum(ops.cast_like(mask, x), axis=1)  # (B, 1)
        rest = 1.0 - ops.reduce_sum(1.0 - kept, axis=1) / count
        return x * ops.unsqueeze(kept * ((1 - _MASKED) / rest), [2])


def _task(head: Any) -> Any:
    def make(config: Config) -> Encoded:
        encoder = Proteins(config)
        return Encoded(encoder, head(config, encoder))

    return make


FAMILY = Family(
    tasks={name: _task(head) for name, head in WITHOUT_ANSWERS.items()},
    names={
        **ROBERTA.names,
        "encoder": "esm",
        "norm": "embeddings.layer_norm",
        "norm1": "attention.LayerNorm",
        "norm2": "LayerNorm",
        "last_norm": "encoder.emb_layer_norm_after",
    },
    older=ROBERTA.older,
    tied={"lm_head.decoder.weight": "esm.embeddings.word_embeddings.weight"},
    unused=r"(esm\.)?"
    + UNUSED
    + r"|(esm\.)?contact_head\..*|.*rotary_embeddings\.inv_freq|.*position_embeddings\.weight"
    + r"|lm_head\..*",
    prefix="esm.",
)
