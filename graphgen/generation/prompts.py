"""Prompts as texts or tokens, the tokenizer that converts them, and strings to stop at."""

from collections.abc import Callable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias

from graphgen.errors import GraphgenError, user_line
from graphgen.generation.options import listed
from graphgen.models.published import folder as folders
from graphgen.operands import Array

Prompts: TypeAlias = (
    str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Array | Sequence[Array]
)
"""Texts or lists of tokens, one or several; for models of sound, files or samples."""


def read_prompts(
    prompts: Prompts,
    encode: Callable[[str], list[int]],
    *,
    vocabulary: int | None,
    context: int | None,
    room: int,
) -> list[list[int]]:
    """Prompts as tokens, from one or several texts, which `encode` turns into tokens, or lists.

    Raises GraphgenError if there are none, or if one is empty, has tokens beyond the vocabulary, or
    leaves no room for `room` more tokens in the context.
    """
    rows = []
    for number, prompt in enumerate(_listed(prompts)):
        row = (encode(prompt) if prompt else []) if isinstance(prompt, str) else prompt
        if not row:
            raise GraphgenError(
                f"generate: prompt {number} is empty; give at least one token{user_line()}"
            )
        if vocabulary is not None and not 0 <= min(row) <= max(row) < vocabulary:
            raise GraphgenError(
                f"generate: prompt {number} has tokens from {min(row)} to {max(row)}; the model "
                f"has tokens 0 to {vocabulary - 1}{user_line()}"
            )
        if context is not None and len(row) + room > context:
            raise GraphgenError(
                f"generate: prompt {number} has {len(row)} tokens, and the model's context "
                f"{context}{': nothing fits after it' * room}; give a shorter prompt{user_line()}"
            )
        rows.append(row)
    if not rows:
        raise GraphgenError(f"generate: there is no prompt; give at least one{user_line()}")
    return rows


def _listed(prompts: Prompts) -> list[str | list[int]]:
    """A list of prompts, texts or lists of tokens, from one or several of them."""
    given: Any = [prompts] if isinstance(prompts, str) else listed(prompts)
    rows: list[str | list[int]] = []
    for number, prompt in enumerate([given] if given and isinstance(given[0], Integral) else given):
        tokens = [] if isinstance(prompt, str) else listed(prompt)
        if not all(isinstance(t, Integral) and not isinstance(t, bool) for t in tokens):
            raise GraphgenError(
                f"generate: prompt {number} is {prompt!r:.60}; give a text or a list of "
                f"tokens{user_line()}"
            )
        rows.append(prompt if isinstance(prompt, str) else [int(token) for token in tokens])
    return rows


def read_tokenizer(folder: Path | None, vocabulary: int | None) -> Any:
    """The tokenizer of a folder. Raises GraphgenError if none fits."""
    found = folders.tokenizer(folder, vocabulary=vocabulary)
    if found is None:
        raise GraphgenError(
            f"generate: {folder or 'the model'} has no tokenizer.json: give prompts as lists of "
            f"tokens, and no strings to stop at{user_line()}"
        )
    return found


_LOST = "\ufffd"
"""What a decoded part of a character becomes."""

_EDGE = 4
"""How many characters at the start of a tail may differ from the whole text: parts of a character,
a dropped blank, a mark that a word continues; and the most tokens that one character takes."""


def says(
    tokens: list[int], strings: Sequence[str], texts: Callable[[list[list[int]]], list[str]]
) -> bool:
    """Whether the text of the tokens has one of the strings, which it lacked before the last token.

    It decodes a tail long enough for the longest string, whatever the last token is. If a tail
    begins within a character, and the tokenizer then loses what follows, the next longer one works.
    """
    longest = max(map(len, strings))
    least = _EDGE * (longest + _EDGE) + 1
    for size in range(least, min(least + _EDGE, len(tokens))):
        tail, last = texts([tokens[-size:], tokens[-1:]])
        known = tail[_EDGE:].rstrip(_LOST)
        if len(known) >= longest + len(last) and _LOST not in known:
            if not any(string in tail for string in strings):
                return False
            break  # in the whole text, this tail may begin differently
    [whole] = texts([tokens])
    return any(string in whole for string in strings)
