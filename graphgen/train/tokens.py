"""Texts as tokens: a folder's tokenizer, its special tokens, and what a limit cuts off."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.files import present
from graphgen.models.published.chat import Spans
from graphgen.models.published.folder import context, settings
from graphgen.models.published.tokenizer import encoded, panics, text_of, tokenizer
from graphgen.operands import Array

FILE = "tokenizer.json"
_SPAN = 1024
"""Texts that the tokenizer's threads split together."""


class Text(NamedTuple):
    """One text, or two to be joined; where it stands, for an error; and which parts count."""

    where: str
    parts: Sequence[str]
    spans: Spans | None = None


class Tokens(NamedTuple):
    """The tokens of a text, all (T): numbers, which of two texts each is of, whether each counts.

    `cut` tokens more were cut off.
    """

    ids: Array
    types: Array
    counted: Array
    cut: int = 0


class Tokenizer:
    """The tokenizer of a folder, or of its tokenizer.json, for a model of `vocabulary` tokens.

    Raises GraphgenError if there is none, or if it has tokens that the model lacks.
    """

    def __init__(self, source: Path, vocabulary: int | None = None) -> None:
        self.folder = source.parent if source.name == FILE else source
        if not present(self.folder / FILE):
            raise GraphgenError(f"--tokenizer {source}: there is no {FILE}; give a folder with one")
        self.path = self.folder / FILE
        self.config = settings(self.folder, "config.json")
        self.named = settings(self.folder, "tokenizer_config.json")
        self.whole = tokenizer(self.folder, vocabulary=vocabulary)
        self.context = context(self.folder)

    def text(self, name: str) -> str | None:
        """The text of a special token, such as `eos_token`."""
        return text_of(self.named, name)

    def token(self, name: str) -> int | None:
        """The number of a special token, such as `eos_token`."""
        text = self.text(name)
        found = None if text is None else self.whole.token_to_id(text)
        given = self.config.get(f"{name}_id")
        given = given[0] if isinstance(given, list) and given else given
        found = given if found is None else found
        if found is not None and not (type(found) is int and 0 <= found < 1 << 31):
            raise GraphgenError(
                f"{self.folder / 'config.json'}: {name}_id is {found!r:.40}; it must be a token"
            )
        return found

    def wanted(self, name: str) -> int:
        """The same. Raises GraphgenError if there is no such token."""
        found = self.token(name)
        if found is None:
            raise GraphgenError(
                f"{self.folder}: neither tokenizer_config.json nor config.json names the "
                f"{name}; add it"
            )
        return found

    def encode(
        self,
        texts: Iterable[Text | None],
        limit: int | None,
        *,
        special: bool = True,
        end: int | None = None,
        kept: bool = True,
    ) -> Iterator[Tokens | None]:
        """The tokens of each text, at most `limit`, with what the post-processor adds if `special`.

        The token `end` ends each, and counts, unless the text's end was cut; unless it is `kept`,
        what the post-processor puts there then goes, too. None for None. Raises GraphgenError for a
        text that the tokenizer cannot split.
        """
        cutting, source, room, left = self._cutting(limit, special), iter(texts), limit, False
        if cutting is not None and limit is not None and (end is not None or not kept):
            left = cutting.truncation["direction"] == "left"
        if left and cutting is not None and limit is not None and end is not None:
            added = self.whole.encode("", add_special_tokens=special).ids
            if added[-1:] != [end]:
                room = limit - 1
                cutting.enable_truncation(room, direction="left")
        while span := list(itertools.islice(source, _SPAN)):
            given = [text for text in span if text is not None]
            slicing = not kept and cutting is not None and not left
            found = self._encode(given, room, None if slicing else cutting, special)
            if end is not None:
                found = (_ended(tokens, end, limit, left) for tokens in found)
            yield from (None if text is None else next(found) for text in span)

    def _encode(
        self, span: Sequence[Text], limit: int | None, cutting: Any, special: bool
    ) -> Iterator[Tokens]:
        parts: list[Any] = [t.parts[0] if len(t.parts) == 1 else tuple(t.parts) for t in span]
        try:
            with panics():
                found = self.whole.encode_batch(parts, add_special_tokens=special)
        except Exception:  # it raises nothing more specific, and does not say where
            found = [encoded(t.where, self.whole, *t.parts, special=special) for t in span]
        for text, whole in zip(span, found, strict=True):
            size, kept = len(whole.ids), whole
            if cutting is not None and limit is not None and size > limit:
                kept = encoded(text.where, cutting, *text.parts, special=special)
            ids = np.array(kept.ids[:limit], np.int32)
            types = np.array(kept.type_ids[:limit], np.int8)
            counted = _inside(kept.offsets[:limit], text.spans)
            yield Tokens(ids, types, counted, size - len(ids))

    def words(
        self, rows: Iterable[tuple[str, Sequence[str]]], limit: int | None
    ) -> Iterator[tuple[Tokens, list[int | None]]]:
        """The tokens of each row of words, which are split apart, and of which word each is.

        As transformers splits them: each has a blank before it. Raises GraphgenError for words that
        the tokenizer cannot split.
        """
        cutting = self._cutting(limit, True)
        for one in filter(None, (self.whole, cutting)):
            if type(one.pre_tokenizer).__name__ == "ByteLevel":
                one.pre_tokenizer.add_prefix_space = True
        for where, words in rows:
            whole = encoded(where, self.whole, [*words])
            kept = whole
            if limit is not None and len(whole.ids) > limit:
                kept = encoded(where, cutting, [*words])
            ids, types = np.array(kept.ids, np.int32), np.array(kept.type_ids, np.int8)
            counted = np.ones(len(ids), bool)
            yield Tokens(ids, types, counted, len(whole.ids) - len(ids)), kept.word_ids

    def windows(self, limit: int | None, stride: int) -> Any:
        """The tokenizer that cuts the second of two texts into windows, which share `stride`."""
        if self.named.get("padding_side") == "left":
            raise GraphgenError(
                f"{self.folder / 'tokenizer_config.json'}: padding_side is 'left', so the context "
                "would come before the question, and only 'right' is supported"
            )
        found = tokenizer(self.folder, vocabulary=1 << 31, limit=limit)
        if limit is not None:
            added, side = found.num_special_tokens_to_add(True), found.truncation["direction"]
            if limit - added <= stride:
                raise GraphgenError(
                    f"--max-length {limit} leaves {max(limit - added, 0)} tokens for a text, and "
                    f"windows of a context share {stride}: give a smaller --stride"
                )
            found.enable_truncation(limit, stride=stride, strategy="only_second", direction=side)
        return found

    def _cutting(self, limit: int | None, special: bool) -> Any:
        if limit is None:
            return None
        added = self.whole.num_special_tokens_to_add(True) if special else 0
        if limit <= added:
            raise GraphgenError(
                f"--max-length {limit} leaves no room: {self.path} adds {added} tokens to each text"
            )
        return tokenizer(self.folder, limit=limit, vocabulary=1 << 31)


def _ended(tokens: Tokens, end: int, limit: int | None, left: bool) -> Tokens:
    """Tokens and the one that ends them, which counts, unless their end was cut, not the `left`."""
    ids, types, counted, cut = tokens
    if cut and not left:
        return tokens
    if len(ids) and ids[-1] == end:
        return tokens._replace(counted=np.append(counted[:-1], True))
    if limit is not None and len(ids) == limit:
        return tokens._replace(cut=1)
    last = types[-1:] if len(types) else np.zeros(1, types.dtype)
    ids = np.append(ids, np.int32(end))
    return Tokens(ids, np.append(types, last), np.append(counted, True), cut)


def _inside(offsets: Spans, spans: Spans | None) -> Array:
    """Which tokens have characters of these parts of the text, bool (T)."""
    if spans is None:
        return np.ones(len(offsets), bool)
    found = np.zeros(len(offsets), bool)
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    # Byte-level tokenizers may trim blanks off: a token of blanks is then empty, at its end.
    starts = np.minimum(starts, np.maximum(ends - 1, 0))
    for first, last in spans:
        found |= (starts < ends) & (starts < last) & (ends > first)
    return found
