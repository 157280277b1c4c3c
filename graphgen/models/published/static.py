"""Static embeddings of texts: a vector for each token, whatever stands beside it, and their mean.

model2vec and the module StaticEmbedding of sentence-transformers make them.
"""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from graphgen import nn, ops
from graphgen.errors import GraphgenError
from graphgen.models.published.config import Config
from graphgen.models.published.encoder import TOKENS
from graphgen.models.published.family import Family
from graphgen.models.published.heads import Vectors
from graphgen.nn.module import Parameter, TensorSpec, ones
from graphgen.operands import Array
from graphgen.safetensors import Weight
from graphgen.value import Tensor

STATIC = "model2vec"
"""The type of model in the config.json of such a folder."""

COUNTED = "counts_unknown"
"""The field of ours that says that the unknown token counts, as in sentence-transformers."""

MAPPING = "mapping"
"""The row of each token, where several tokens share one."""

_OF_DISTILLING = (
    *("apply_pca", "apply_zipf", "sif_coefficient", "hidden_dim", "seq_length", "pooling"),
    *("tokenizer_name", "embedding_dtype", "token_remove_pattern", "head_config"),
)
"""How a table was made, and a classifier that is in a file of its own."""


class Table(nn.Module):
    """The vector of each token, (B, T) to (B, T, D), times its weight if tokens have weights."""

    mapping: Array | None = None

    def __init__(self, config: Config):
        count, self.features = config.take("vocab_size", int), config.take("hidden_size", int)
        self.count, self.rows = count, config.take("vocabulary_quantization", int, count)
        self.embedding = nn.Embedding(self.rows, self.features)
        weighted = config.take("weighted", bool, False)
        self.weights = Parameter((count,), initialize=ones) if weighted else None

    def __call__(self, input_ids: Tensor) -> Tensor:
        rows = input_ids if self.mapping is None else ops.gather(self.mapping, input_ids)
        x: Tensor = self.embedding(rows)
        if self.weights is None:
            return x
        return x * ops.unsqueeze(ops.gather(self.weights, input_ids), [2])


class Static(nn.Module):
    """The table, and the head that pools its vectors, but for those of the unknown token."""

    def __init__(self, config: Config):
        self.table, self.head = Table(config), Vectors()
        self.unknown = config.optional("unk_token_id", int)
        for name in ("normalize", COUNTED):  # which modules.json, and the unknown token, say, too
            config.take(name, bool, False)
        config.ignore(*_OF_DISTILLING)
        for name in ("max_length", "max_characters"):  # by which texts are cut before
            config.raw(name)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        kept = attention_mask  # (B, T)
        if self.unknown is not None:
            other = ops.logical_not(ops.equal(input_ids, self.unknown))
            kept = kept * ops.cast(other, to=ir.DataType.INT64)
        return self.head(self.table(input_ids), kept, self.table)

    def inputs(self) -> dict[str, TensorSpec]:
        """Tokens, and the mask of those that are not padding."""
        return dict.fromkeys(["input_ids", "attention_mask"], TOKENS)

    @property
    def one_way(self) -> str:
        """Why there is no way back to a checkpoint, if there is none."""
        shared = self.table.rows != self.table.count
        return "several tokens share a row of the table, and only the graph says which" * shared

    @property
    def features(self) -> int:
        """D."""
        return self.table.features

    def fill(self, stored: Mapping[str, Weight], where: str) -> None:
        """Take what the checkpoint has of whole numbers. Raises GraphgenError if it is no table."""
        given = stored.get(MAPPING)
        if given is None:
            return
        own, wanted = self.table, (self.table.count,)
        rows = (
            given.read() if given.dtype.is_integer() and given.shape == wanted else np.array([-1])
        )
        if rows.min() < 0 or rows.max() >= own.rows:
            raise GraphgenError(
                f"{where}: {MAPPING} is {given.dtype.name.lower()}{[*given.shape]}; it must be "
                f"{own.count} whole numbers, each a row of the {own.rows} of embeddings"
            )
        own.mapping = rows.astype(np.int64)


FAMILIES = {
    STATIC: Family(
        tasks={"feature-extraction": Static},
        names={"table": "", "embedding": "embeddings", "weight": ""},
        older={r"embedding\.weight": "embeddings"},
        unused=MAPPING,
    )
}
