"""What the outputs of a graph say about each row, task by task."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphgen import ops
from graphgen.batch.images import PIXELS
from graphgen.batch.spelling import Spelling
from graphgen.batch.texts import INPUTS
from graphgen.errors import GraphgenError
from graphgen.models.published.folder import labels, settings
from graphgen.models.published.wav2vec2 import SAMPLES
from graphgen.operands import Array

SPEECH = "automatic-speech-recognition"
FILLS = "fill-mask"

COLUMNS = {
    "feature-extraction": ("embedding",),
    **dict.fromkeys(
        ("text-classification", "image-classification", "audio-classification"), ("label", "score")
    ),
    **dict.fromkeys(("token-classification", FILLS), ("labels", "scores")),
    **dict.fromkeys(
        ("text-generation", "text2text-generation"), ("generated_tokens", "generated_text")
    ),
    SPEECH: ("generated_text",),
}
"""The columns that each task adds to a row; there is no text without a tokenizer."""

WHOLE = ("sentence_embedding", "text_embeds", "image_embeds", "pooler_output")
"""Outputs that stand for a text or an image; the towers of CLIP and SigLIP have the last three."""

MANY = "token_embeddings"
"""Vectors of the tokens that count, as PyLate compares them."""

SCORES = {op.name: op for op in (ops.identity, ops.sigmoid, ops.tanh)}
"""What cross-encoders of sentence-transformers apply to logits, by the class in torch."""


class Results:
    """The rows of results of a folder's graph, whose inputs and outputs have these dimensions.

    feature-extraction: one of the outputs `WHOLE`, or the vectors `MANY`, else the mean of
    last_hidden_state over the tokens, or for an image its first vector, which stands for the whole.
    automatic-speech-recognition: the letters of the frames of a sound. The classifications of
    texts, images and sounds: the label with the highest logit, and its probability, which is its
    own if labels do not exclude each other; the logit itself if problem_type is regression; for a
    text, what a cross-encoder's configuration applies to the logit. token-classification: the same
    for each token. fill-mask: the number of the token that is most likely at each place, and its
    probability. Raises GraphgenError if the graph is for none of them, or for another `task`.
    """

    def __init__(
        self,
        folder: Path,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        task: str | None = None,
    ):
        logits: tuple[Any, ...] = outputs.get("logits") or ()
        config = settings(folder, "config.json")
        images = inputs.keys() == {PIXELS}
        kinds = {2: "image-classification" if images else "text-classification"}
        found = (kinds | {3: "token-classification"}).get(len(logits), "")
        sounds = SAMPLES in inputs
        if sounds:
            found = {2: "audio-classification", 3: SPEECH}.get(len(logits), "")
        elif logits and logits[-1] == config.get("vocab_size"):
            found = FILLS if len(logits) == 3 else ""
        if {*WHOLE, MANY, "last_hidden_state"} & outputs.keys() and not sounds:
            found = "feature-extraction"
        fits = images or sounds or set(INPUTS[:2]) <= inputs.keys() <= set(INPUTS)
        if not found or not fits or task not in (None, found):
            raise GraphgenError(
                f"{folder}: the graph makes {', '.join(outputs)} from {', '.join(inputs)}, which "
                f"does not fit {task or 'a task of rows'}; tasks are {', '.join(COLUMNS)}, from "
                f"{' and '.join(INPUTS[:2])}, or from {PIXELS} or {SAMPLES}"
            )
        self.columns = ("embeddings",) if MANY in outputs else COLUMNS[found]
        self.spelled = Spelling(folder, logits[-1]) if found == SPEECH else None
        self.fills = found == FILLS
        if found not in ("feature-extraction", SPEECH, FILLS):
            self.labels = labels(folder, logits[-1])
            problem = config.get("problem_type")
            alone = problem == "multi_label_classification" or len(self.labels) == 1
            self.score: Callable[[Any], Any] = ops.sigmoid if alone else ops.softmax
            if problem == "regression":
                self.score = ops.identity
            name = _activation(folder, config)
            if name is not None and found == "text-classification":
                if name.rpartition(".")[2] not in SCORES or not name.startswith("torch."):
                    raise GraphgenError(
                        f"{folder}: activation_fn is {name!r}; known are "
                        f"{', '.join(SCORES)} of torch.nn: name one of them, or apply your own to "
                        "the logits that gg.Session gives"
                    )
                self.score = SCORES[name.rpartition(".")[2]]

    def read(self, outputs: Mapping[str, Array], mask: Array | None) -> Sequence[tuple[Any, ...]]:
        """The columns of each row; `mask` (B, T), if any, is 1 at its tokens and 0 after them."""
        if whole := [outputs[name] for name in WHOLE if name in outputs]:
            return [(y,) for y in whole[0].astype(np.float32)]
        if MANY in outputs and mask is not None:
            each = zip(outputs[MANY].astype(np.float32), mask.astype(bool), strict=True)
            return [([*x[kept]],) for x, kept in each]
        if "last_hidden_state" in outputs:
            x = outputs["last_hidden_state"].astype(np.float32)  # (B, T, D)
            if mask is None:
                return [(y,) for y in x[:, 0]]
            shares = (mask / mask.sum(1, keepdims=True)).astype(np.float32)
            return [(y,) for y in np.einsum("btd,bt->bd", x, shares)]
        if self.spelled is not None:
            return [(self.spelled(row),) for row in outputs["logits"].argmax(-1)]
        if self.fills:
            chances = np.asarray(ops.softmax(outputs["logits"].astype(np.float32)))
            return [*zip(chances.argmax(-1), chances.max(-1), strict=True)]
        scores = np.asarray(self.score(outputs["logits"].astype(np.float32)))
        best, score = scores.argmax(-1), scores.max(-1)  # (B,) or (B, T)
        if best.ndim == 1 or mask is None:
            return [(self.labels[i], p) for i, p in zip(best, score, strict=True)]
        lengths = mask.sum(1)
        return [
            ([self.labels[i] for i in row[:n]], p[:n])
            for row, p, n in zip(best, score, lengths, strict=True)
        ]


def _activation(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The activation after a cross-encoder, as new or old sentence-transformers note it."""
    noted = config.get("sentence_transformers")
    named = settings(folder, "config_sentence_transformers.json").get("activation_fn")
    named = named or (noted.get("activation_fn") if isinstance(noted, dict) else None)
    named = named or config.get("sbert_ce_default_activation_function")
    return None if named is None else str(named)
