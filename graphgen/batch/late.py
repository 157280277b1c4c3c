"""Rows that are queries or documents, whose tokens keep a vector each (ColBERT, 2004.12832).

PyLate puts a token behind the first that says which of the two a text is, lengthens queries by
tokens of the mask, and gives no vectors of a document's punctuation.
"""

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graphgen.batch.texts import INPUTS
from graphgen.errors import GraphgenError
from graphgen.models.published.config import Config
from graphgen.models.published.folder import settings
from graphgen.models.published.sentence import default_prompt
from graphgen.models.published.tokenizer import encoded, named_tokens, tokenizer
from graphgen.operands import Array

KEPT = "kept"
"""Which tokens have a vector in the results, among the arrays that a graph reads."""

_SETTINGS = "config_sentence_transformers.json"


class _Kind(NamedTuple):
    """Queries or documents: their longest text, the token that tells them, and what cuts them."""

    limit: int
    prefix: int | None
    tokenizer: Any


class LateText(NamedTuple):
    """The tokens of a text, how many of them the others see, and which have a vector."""

    ids: list[int]
    seen: int
    kept: list[bool]

    @property
    def size(self) -> int:
        """How many tokens; texts of similar size run together."""
        return len(self.ids)


class LateTexts:
    """Rows with `query`, or `text`, a document, as PyLate reads them.

    Raises GraphgenError for settings of config_sentence_transformers.json that are no such.
    """

    reads = ("query", "text")

    def __init__(self, folder: Path, *, truncate: bool):
        self.prompt = default_prompt(folder)
        fields = settings(folder, _SETTINGS)
        self.where = folder / _SETTINGS
        config = Config({**fields, "model_type": "ColBERT"}, str(self.where))
        config.expect("similarity_fn_name", "MaxSim")
        config.expect("truncate_dim")
        self.kinds = {
            "query": self._kind(folder, config, "query", "[Q] ", 32, truncate),
            "text": self._kind(folder, config, "document", "[D] ", 180, truncate),
        }
        tokens, named = self.kinds["query"].tokenizer, named_tokens(folder)
        self.expands = config.take("do_query_expansion", bool, True)
        self.attends = config.take("attend_to_expansion_tokens", bool, False) and self.expands
        fill = named.get("mask_token", named.get("eos_token"))
        self.fill = None if fill is None else tokens.token_to_id(fill)
        if self.expands and self.fill is None:
            raise GraphgenError(
                f"{folder}: queries are lengthened by mask_token, which the tokenizer lacks: name "
                f"it in tokenizer_config.json, or set do_query_expansion to false in {_SETTINGS}"
            )
        words = config.raw("skiplist_words", list(string.punctuation))
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            config.refuse("skiplist_words", words, "a list of texts")
        found = [tokens.token_to_id(word) for word in words]
        if None in found:  # it is then the unknown token, as in transformers
            found.append(tokens.token_to_id(named.get("unk_token", "")))
        self.skipped = {*found} - {None}

    def _kind(
        self, folder: Path, config: Config, name: str, usual: str, limit: int, truncate: bool
    ) -> _Kind:
        limit = config.take(f"{name}_length", int, limit)
        prefix = config.raw(f"{name}_prefix", usual)
        tokens = tokenizer(folder)
        if tokens is None:
            raise GraphgenError(f"{folder} has no tokenizer.json, by which texts are read")
        number = tokens.token_to_id(prefix) if isinstance(prefix, str) else None
        if number is None and prefix != "":
            config.refuse(f"{name}_prefix", prefix, "a token of tokenizer.json")
        room = limit - (number is not None)
        if room < 1:
            config.refuse(f"{name}_length", limit, "2 or more")
        return _Kind(limit, number, tokenizer(folder, limit=room) if truncate else tokens)

    def look(self, row: dict[str, Any], where: str) -> LateText:
        """The tokens of a row. Raises GraphgenError if it has none or too many."""
        given = [name for name in self.reads if isinstance(row.get(name), str)]
        if len(given) != 1:
            raise GraphgenError(
                f"{where} has {' and '.join(given) or 'neither `query` nor `text`'}; give `query`, "
                "a text, or `text`, a document"
            )
        kind = self.kinds[given[0]]
        ids = [*encoded(where, kind.tokenizer, self.prompt + row[given[0]].strip()).ids]
        if kind.prefix is not None:
            ids.insert(1, kind.prefix)
        if not 0 < len(ids) <= kind.limit:
            raise GraphgenError(
                f"{where} has {len(ids)} tokens; it must have 1 to {kind.limit}, by {self.where}: "
                "--truncate cuts texts that are too long"
            )
        if given[0] == "text":
            return LateText(ids, len(ids), [i not in self.skipped for i in ids])
        seen = len(ids)
        if self.expands and self.fill is not None:
            ids += [self.fill] * (kind.limit - seen)
        return LateText(ids, len(ids) if self.attends else seen, [True] * len(ids))

    def feeds(self, texts: Sequence[LateText]) -> dict[str, Array]:
        """Arrays (B, T), padded on the right; the mask is 1 at what the others see."""
        shape = (len(texts), max(text.size for text in texts))
        ids, mask, types, kept = (np.zeros(shape, np.int64) for _ in range(4))
        for row, text in enumerate(texts):
            ids[row, : text.size], kept[row, : text.size] = text.ids, text.kept
            mask[row, : text.seen] = 1
        return dict(zip((*INPUTS, KEPT), (ids, mask, types, kept), strict=True))
