"""Decoders that classify texts: logits of the last token, which has seen all others."""

from typing import Any

import onnx_ir as ir

from graphgen import nn, ops
from graphgen.models.published.cache import places_of, token_inputs
from graphgen.models.published.config import Config
from graphgen.models.published.heads import labels
from graphgen.nn.module import TensorSpec
from graphgen.value import Tensor


class CausalClassifier(nn.Module):
    """The logits of a text's labels, (B, labels), from a decoder of tokens, (B, T) to (B, T, D).

    The last token is the last one that is neither masked nor the configuration's padding, whichever
    side the padding is on. Positions count from the row's start, as in transformers' classes, or
    where the decoder says so without the padding.
    """

    def __init__(self, config: Config, decoder: Any):
        config.raw("tie_word_embeddings")  # there is no head of tokens
        self.padding = config.raw("pad_token_id")
        if self.padding is not None and type(self.padding) is not int:
            config.refuse("pad_token_id", self.padding, "a token")
        self.decoder = decoder
        # Stored like a table of embeddings, whether or not the family transposes its products.
        self.score = nn.Embedding(labels(config), decoder.embedding.features)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        length = ops.dim(input_ids, 1)
        places = ops.unsqueeze(ops.arange(length), [0])  # (1, T)
        kept = ops.cast(attention_mask, to=ir.DataType.BOOL)
        if self.padding is not None:
            kept = ops.logical_and(kept, ops.logical_not(ops.equal(input_ids, self.padding)))
        last = ops.reduce_max(places * ops.cast_like(kept, places), axis=1)  # (B, 1)
        last = ops.expand(ops.unsqueeze(last, [2]), [1, 1, self.score.features])  # (B, 1, D)
        if self.decoder.spec.counted:
            places = places_of(attention_mask, ir.DataType.INT64)
        x = self.decoder.states(input_ids, attention_mask, places)  # (B, T, D)
        x = ops.squeeze(ops.gather_elements(x, last, axis=1), [1])
        return {"logits": self.score.logits(x)}

    def inputs(self) -> dict[str, TensorSpec]:
        """Tokens, and the mask of those that are not padding."""
        tokens = token_inputs()["input_ids"]
        return {"input_ids": tokens, "attention_mask": tokens}
