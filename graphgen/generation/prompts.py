"""Prompts as texts, tokens or messages, what makes tokens of them, and strings to stop at."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias

from graphgen.errors import GraphgenError, user_line
from graphgen.generation.config import listed
from graphgen.models.published.conversation import Conversation
from graphgen.models.published.folder import settings
from graphgen.models.published.tokenizer import tokenizer as tokenizer_of
from graphgen.operands import Array

Prompts: TypeAlias = (
    str
    | Sequence[str]
    | Sequence[int]
    | Sequence[Sequence[int]]
    | Array
    | Sequence[Array]
    | Conversation
    | Sequence[Conversation]
)
"""Texts, lists of tokens or conversations, one or several; for models of sound, files or samples.

A conversation is a list of messages, or an object with `messages`, `tools` and whatever else the
chat template reads.
"""


def read_prompts(
    prompts: Prompts,
    encode: Callable[[str], list[int]],
    chat: Callable[[Conversation, str], list[int]],
    *,
    vocabulary: int | None,
    context: int | None,
    room: int,
) -> list[list[int]]:
    """Prompts as tokens, from one or several texts, conversations, or lists of tokens.

    `encode` makes tokens of a text, and `chat` of a conversation and where it stands.
    Raises GraphgenError if there are none, or if one is empty, has tokens beyond the vocabulary, or
    leaves no room for `room` more tokens in the context.
    """
    rows = []
    for number, prompt in enumerate(_listed(prompts)):
        if isinstance(prompt, str):
            row = encode(prompt) if prompt else []
        else:
            row = chat(prompt, f"prompt {number}") if _is_conversation(prompt) else prompt
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


def _listed(prompts: Prompts) -> list[Any]:
    """A list of prompts: texts, conversations or lists of tokens, from one or several of them."""
    single = isinstance(prompts, str | bytes | Mapping)
    given: Any = [prompts] if single else listed(prompts)
    if given and (isinstance(given[0], Integral) or _is_message(given[0])):
        given = [given]
    rows: list[Any] = []
    for number, prompt in enumerate(given):
        if isinstance(prompt, str) or _is_conversation(prompt):
            rows.append(prompt)
            continue
        tokens = [prompt] if isinstance(prompt, bytes) else listed(prompt)
        if not all(isinstance(t, Integral) and not isinstance(t, bool) for t in tokens):
            raise GraphgenError(
                f"generate: prompt {number} is {prompt!r:.60}; give a text, a list of tokens, or a "
                f"list of messages{user_line()}"
            )
        rows.append([int(token) for token in tokens])
    return rows


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "messages" not in value


def _is_conversation(value: Any) -> bool:
    several = isinstance(value, Sequence) and len(value) > 0 and _is_message(value[0])
    return isinstance(value, Mapping) or several


def read_tokenizer(folder: Path | None, vocabulary: int | None) -> Any:
    """The tokenizer of a folder. Raises GraphgenError if none fits."""
    found = tokenizer_of(folder, vocabulary=vocabulary)
    if found is None:
        raise GraphgenError(
            f"generate: {folder or 'the model'} has no tokenizer.json: give prompts as lists of "
            f"tokens, and no strings to stop at{user_line()}"
        )
    return found


_WRITTEN = [(f" {mark}", mark) for mark in ".?!,"]
_WRITTEN += [(" ' ", "'"), *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re"))]

MOST_UNSETTLED = max(len(before) for before, _ in _WRITTEN)
"""How many characters at the end of a text may change when more follow, if spaces are removed."""


def removes_spaces(folder: Path | None, tokenizer: Any) -> bool:
    """Whether a folder asks for texts without spaces before marks, as transformers decodes them.

    It does not do it for BPE, unless the folder says so in as many words.
    """
    config = {} if folder is None else settings(folder, "tokenizer_config.json")
    name = "clean_up_tokenization_spaces"
    bpe = type(tokenizer.model).__name__ == "BPE"
    even = config.get(f"{name}_for_bpe_even_though_it_will_corrupt_output")
    return bool(config.get(name)) and (not bpe or bool(even))


def without_spaces(text: str) -> str:
    """A text without spaces before marks and short forms."""
    for before, after in _WRITTEN:
        text = text.replace(before, after)
    return text


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
