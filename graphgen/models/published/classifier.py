"""Decoders that classify texts, by the last token, which has seen all others, or embed them."""

from typing import Any

import onnx_ir as ir

from graphgen import nn, ops
from graphgen.models.published.cache import token_inputs
from graphgen.models.published.config import Config
from graphgen.models.published.heads import Vectors, labels
from graphgen.models.published.poolings import last
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
        kept = ops.cast(attention_mask, to=ir.DataType.BOOL)
        if self.padding is not None:
            kept = ops.logical_and(kept, ops.logical_not(ops.equal(input_ids, self.padding)))
        x = self.decoder.whole(input_ids, attention_mask)  # (B, T, D)
        return {"logits": self.score.logits(last(x, ops.cast(kept, to=ir.DataType.INT64)))}

    def inputs(self) -> dict[str, TensorSpec]:
        """Tokens, and the mask of those that are not padding."""
        tokens = token_inputs()["input_ids"]
        return {"input_ids": tokens, "attention_mask": tokens}


class CausalVectors(nn.Module):
    """The vectors of a text's tokens, (B, T) to (B, T, D), and what the head makes of them."""

    def __init__(self, decoder: Any):
        self.decoder, self.head = decoder, Vectors()
        self.features = decoder.embedding.features

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.decoder.whole(input_ids, attention_mask)
        return self.head(x, attention_mask, self.decoder)

    inputs = CausalClassifier.inputs
