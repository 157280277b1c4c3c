"""From the letter that each frame of a sound is most likely to text, as CTC reads them."""

from itertools import groupby
from pathlib import Path
from typing import Any

from graphgen.errors import GraphgenError
from graphgen.files import present
from graphgen.models.published.folder import settings
from graphgen.models.published.tokenizer import named_tokens
from graphgen.operands import Array

_BEFORE_MARKS = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""What `clean_up_tokenization_spaces` writes without the spaces."""


class Spelling:
    """The letters of a folder's vocab.json, as transformers' Wav2Vec2CTCTokenizer joins them.

    Equal neighbors are one, and the token of padding, which stands between others, is none (arXiv
    cs/0603023). Raises GraphgenError for a folder without such a vocabulary.
    """

    def __init__(self, folder: Path, count: int):
        path = folder / "vocab.json"
        if not present(path):
            raise GraphgenError(
                f"{folder} has no vocab.json, by which letters are written; copy it from the "
                "checkpoint"
            )
        config = settings(folder, "tokenizer_config.json")
        known, named = settings(folder, path.name), named_tokens(folder)
        known |= settings(folder, "added_tokens.json")
        if not all(type(i) is int for i in known.values()):
            raise GraphgenError(
                f"{path} is not the vocabulary of one language, a number for each token; write "
                "that of yours"
            )
        self.letters = {i: text for text, i in known.items()}
        added = config.get("added_tokens_decoder")
        for i, token in (added if isinstance(added, dict) else {}).items():
            if isinstance(token, dict) and str(i).isdecimal():
                self.letters[int(i)] = str(token.get("content"))
        if (last := max(self.letters, default=-1)) >= count:
            raise GraphgenError(
                f"{path} has {last + 1} tokens and the model {count}: it belongs to another model; "
                "copy the right one"
            )
        self.blank, self.other = named.get("pad_token", "<pad>"), named.get("unk_token", "<unk>")
        space = config.get("replace_word_delimiter_char", " ")
        self.space = {named.get("word_delimiter_token", "|"): space}
        self.lower = config.get("do_lower_case") is True
        self.cleaned = config.get("clean_up_tokenization_spaces") is True

    def __call__(self, ids: Array) -> str:
        """The text of the tokens of frames, (T,)."""
        tokens = [self.letters.get(int(i), self.other) for i in ids]
        letters: list[Any] = [t for t, _ in groupby(tokens) if t != self.blank]
        text = "".join(self.space.get(t, t) for t in letters).strip()
        text = text.lower() if self.lower else text
        for mark in _BEFORE_MARKS if self.cleaned else ():
            text = text.replace(mark, mark.strip() if mark != " ' " else "'")
        return text
