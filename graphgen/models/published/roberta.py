"""RoBERTa (arXiv 1907.11692) and XLM-RoBERTa (1911.02116): BERT with other positions and heads."""

from functools import partial

import onnx_ir as ir

from graphgen import ops
from graphgen.models.published import bert
from graphgen.models.published.config import Config
from graphgen.models.published.family import Family
from graphgen.models.published.heads import MaskedLM, tasks
from graphgen.value import Tensor


class Encoder(bert.Encoder):
    """BERT's encoder; the n-th token that is not padding has position n + padding's id."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.padding = config.raw("pad_token_id", 1)
        if type(self.padding) is not int or not 0 <= self.padding < self.positions.length:
            config.refuse("pad_token_id", self.padding, "an id that has a position")

    def place(self, x: Tensor, input_ids: Tensor) -> Tensor:
        """The vectors (B, T, D) with their positions; padding has its id as position."""
        kept = ops.cast(ops.logical_not(ops.equal(input_ids, self.padding)), to=ir.DataType.INT64)
        positions = ops.cumsum(kept, 1) * kept + self.padding  # (B, T)
        return x + ops.embedding(self.positions.weight, positions)


FAMILY = Family(
    tasks=tasks(Encoder, masked=partial(MaskedLM, activation="gelu")),
    names={
        **bert.NAMES,
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
    unused=r"(roberta\.)?(embeddings\.position_ids|pooler\..*)|lm_head\..*|classifier\..*|"
    r"qa_outputs\..*",
    prefix="roberta.",
)
