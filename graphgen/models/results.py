"""What the outputs of a graph say of each text, task by task."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphgen import ops
from graphgen.errors import GraphgenError
from graphgen.models.folder import labels, told
from graphgen.op import Array

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
COLUMNS = {
    "feature-extraction": ("embedding",),
    "text-classification": ("label", "score"),
    "token-classification": ("labels", "scores"),
    **dict.fromkeys(
        ("text-generation", "text2text-generation"), ("generated_tokens", "generated_text")
    ),
}
"""What a row gets for each task; no text without a tokenizer."""


class Results:
    """The rows of results of a folder's graph, whose inputs and outputs have these dimensions.

    feature-extraction: the output sentence_embedding, else the mean of last_hidden_state over the
    tokens. text-classification: the label with the highest logit, and its probability, which is by
    itself where labels do not exclude each other. token-classification: the same for each token.
    Raises GraphgenError where the graph is for none of them, or for another `task`.
    """

    def __init__(
        self,
        folder: Path,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        task: str | None = None,
    ):
        logits: tuple[Any, ...] = outputs.get("logits") or ()
        config = told(folder, "config.json")
        found = {2: "text-classification", 3: "token-classification"}.get(len(logits), "")
        if logits and logits[-1] == config.get("vocab_size"):  # of the next token, or a masked one
            found = ""
        if {"sentence_embedding", "last_hidden_state"} & outputs.keys():
            found = "feature-extraction"
        fits = set(INPUTS[:2]) <= inputs.keys() <= set(INPUTS)
        if not found or not fits or task not in (None, found):
            raise GraphgenError(
                f"{folder}: the graph makes {', '.join(outputs)} of {', '.join(inputs)}, which is "
                f"not for {task or 'a task of rows'}; there are {', '.join(COLUMNS)}, of "
                f"{' and '.join(INPUTS[:2])}"
            )
        self.columns = COLUMNS[found]
        if found != "feature-extraction":
            self.labels = labels(folder, logits[-1])
            several = config.get("problem_type") == "multi_label_classification"
            alone = several or len(self.labels) == 1
            self.probability = ops.sigmoid if alone else ops.softmax

    def read(self, outputs: Mapping[str, Array], mask: Array) -> Sequence[tuple[Any, ...]]:
        """The columns of each row; `mask` (B, T) is 1 at its tokens and 0 behind them."""
        if "sentence_embedding" in outputs:
            return [(y,) for y in outputs["sentence_embedding"].astype(np.float32)]
        if "last_hidden_state" in outputs:
            x = outputs["last_hidden_state"].astype(np.float32)  # (B, T, D)
            shares = (mask / mask.sum(1, keepdims=True)).astype(np.float32)
            return [(y,) for y in np.einsum("btd,bt->bd", x, shares)]
        scores = np.asarray(self.probability(outputs["logits"].astype(np.float32)))
        best, score = scores.argmax(-1), scores.max(-1)  # (B,) or (B, T)
        if best.ndim == 1:
            return [(self.labels[i], p) for i, p in zip(best, score, strict=True)]
        lengths = mask.sum(1)
        return [
            ([self.labels[i] for i in row[:n]], p[:n])
            for row, p, n in zip(best, score, lengths, strict=True)
        ]
