"""Rows that are texts: the tokens of one row, and the arrays of several that a graph reads."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.models.published.chat import Template
from graphgen.models.published.conversation import CHAT, nested
from graphgen.models.published.folder import settings
from graphgen.models.published.sentence import default_prompt
from graphgen.models.published.static import STATIC
from graphgen.models.published.tokenizer import encoded, named_tokens, tokenizer
from graphgen.operands import Array

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class Text(NamedTuple):
    """The tokens of one text or two, and which of the two each belongs to."""

    ids: list[int]
    types: list[int]

    @property
    def size(self) -> int:
        """How many tokens; texts of similar size run together."""
        return len(self.ids)


class Texts:
    """Rows with `ids`, their tokens, or `text`, which the folder's tokenizer splits.

    The tokenizer joins `text` and `text_pair`, if there is one, into one text. If the folder of
    sentence-transformers names a default prompt, each text begins with it. With `chat`, a row may
    have `messages` instead, and `tools` and `documents` beside them, for the chat template.
    """

    def __init__(self, folder: Path, limit: int | None, *, truncate: bool, chat: bool = False):
        self.folder, self.limit = folder, limit
        self.columns = CHAT if chat else ()
        self.reads = ("ids", "text", "text_pair", *self.columns)
        self.tokenizer = tokenizer(folder, limit=limit if truncate else None)
        read = settings(folder, "tokenizer_config.json").get("model_input_names")
        self.typed = not isinstance(read, list) or INPUTS[2] in read
        self.prompt = default_prompt(folder)
        config = settings(folder, "config.json")
        self.vocabulary = config.get("vocab_size", 1 << 31)
        self.static, self.truncate = config.get("model_type") == STATIC, truncate
        self.characters = config.get("max_characters") if self.static else None

    def look(self, row: dict[str, Any], where: str) -> Text:
        """The tokens of a row. Raises GraphgenError if it has none or too many."""
        ids, types, known = row.get("ids"), None, range(self.vocabulary)
        texts = [row[name] for name in ("text", "text_pair") if row.get(name) is not None]
        right = all(isinstance(text, str) for text in [row.get("text"), *texts])
        chat = "messages" in self.columns and row.get("messages") not in (None, "")
        kinds = (("messages", chat), ("ids", ids is not None), ("text", texts))
        if len(several := [f"`{name}`" for name, given in kinds if given]) > 1:
            raise GraphgenError(f"{where} has {' and '.join(several)}; give one of them")
        if chat:
            return self._conversation(
                {n: row[n] for n in CHAT if row.get(n) not in (None, "")}, where
            )
        if ids is None and self.tokenizer is not None and right:
            texts[0] = self._cut(self.prompt + texts[0], where)
            found = encoded(where, self.tokenizer, *texts)
            ids, types = found.ids, found.type_ids if self.typed else None
        if not isinstance(ids, list) or not all(type(i) is int and i in known for i in ids):
            no = "" if self.tokenizer else f"; {self.folder} has no tokenizer.json for `text`"
            raise GraphgenError(
                f"{where} has neither `text`, a string, nor `ids`, a list of numbers from 0 to "
                f"{self.vocabulary - 1}{no}"
            )
        if not (self.static or ids) or len(ids) > (self.limit or len(ids)):
            raise GraphgenError(
                f"{where} has {len(ids)} tokens; it must have 1 to {self.limit or 'any number'}: "
                "--truncate cuts texts that are too long"
            )
        return Text(ids, types or [0] * len(ids))

    def _cut(self, text: str, where: str) -> str:
        """A text as model2vec reads it, which first cuts it to so many characters."""
        if self.characters is None or len(text) <= self.characters:
            return text
        if self.truncate:
            return text[: self.characters]
        raise GraphgenError(
            f"{where} has {len(text):,} characters, of which model2vec reads the first "
            f"{self.characters:,}: --truncate cuts them"
        )

    @cached_property
    def _chat(self) -> tuple[Template, Any]:
        """The folder's template, and a tokenizer that cuts nothing: the end of a text asks."""
        template = Template(self.folder, dated=True)
        if (found := tokenizer(self.folder)) is None:
            raise GraphgenError(f"{self.folder} has no tokenizer.json, which `messages` need")
        return template, found

    def _conversation(self, given: dict[str, Any], where: str) -> Text:
        """The tokens up to where the assistant's next message begins."""
        template, tokens = self._chat
        text = template.prompt({name: nested(x) for name, x in given.items()}, where)
        ids = encoded(where, tokens, text, special=False).ids
        if not 0 < len(ids) <= (self.limit or len(ids)):
            raise GraphgenError(
                f"{where}: the conversation has {len(ids)} tokens; it must have 1 to "
                f"{self.limit or 'any number'}: leave out messages"
            )
        return Text(ids, [0] * len(ids))

    def feeds(self, texts: Sequence[Text]) -> dict[str, Array]:
        """Arrays (B, T), padded on the right; the mask is 0 there."""
        shape = (len(texts), max(1, *(text.size for text in texts)))
        ids, mask, types = (np.zeros(shape, np.int64) for _ in INPUTS)
        for row, text in enumerate(texts):
            ids[row, : text.size], types[row, : text.size] = text
            mask[row, : text.size] = 1
        return dict(zip(INPUTS, (ids, mask, types), strict=True))


class MaskedTexts(Texts):
    """Rows with one masked token or more, by the tokenizer's mask_token."""

    def __init__(self, folder: Path, limit: int | None, *, truncate: bool):
        super().__init__(folder, limit, truncate=truncate)
        named = named_tokens(folder).get("mask_token")
        self.masked = None
        if named is not None and self.tokenizer is not None:
            self.masked = self.tokenizer.token_to_id(named)
        if self.masked is None:
            raise GraphgenError(
                f"{folder}: to fill masks, it needs tokenizer.json, and its mask_token in "
                "tokenizer_config.json; copy both from the checkpoint"
            )

    def look(self, row: dict[str, Any], where: str) -> Text:
        """The tokens of a row. Raises GraphgenError if none is masked."""
        text = super().look(row, where)
        if self.masked not in text.ids:
            raise GraphgenError(
                f"{where} has no masked token, {self.tokenizer.id_to_token(self.masked)}, which "
                "the model could fill; put one where a word is missing"
            )
        return text

    def filled(self, text: Text, best: Array, chances: Array) -> tuple[list[str], list[Any]]:
        """What is most likely at each masked token of a row, and how likely it is."""
        places = [i for i, token in enumerate(text.ids) if token == self.masked]
        words = (self.tokenizer.decode([int(best[i])], skip_special_tokens=False) for i in places)
        return [*words], [chances[i] for i in places]
