"""Prompts as texts or tokens, and the tokenizer that turns one into the other."""

from numbers import Integral
from pathlib import Path
from typing import Any

from graphgen.errors import GraphgenError
from graphgen.models import folder as folders
from graphgen.models.generation import listed


def read_prompts(prompts: Any) -> list[str | list[int]]:
    """Texts or lists of tokens, of one of them or several."""
    given = [prompts] if isinstance(prompts, str) else listed(prompts)
    rows: list[str | list[int]] = []
    for number, prompt in enumerate([given] if given and isinstance(given[0], Integral) else given):
        tokens = [] if isinstance(prompt, str) else listed(prompt)
        if not all(isinstance(t, Integral) and not isinstance(t, bool) for t in tokens):
            raise GraphgenError(
                f"generate: prompt {number} is {prompt!r:.60}; give a text or a list of tokens"
            )
        rows.append(prompt if isinstance(prompt, str) else [int(token) for token in tokens])
    return rows


def read_tokenizer(folder: Path | None, vocabulary: int | None) -> Any:
    """The tokenizer of a folder. Raises GraphgenError where there is none that fits."""
    found = folders.tokenizer(folder, vocabulary=vocabulary)
    if found is None:
        raise GraphgenError(
            f"generate: {folder or 'the model'} has no tokenizer.json: give prompts as lists of "
            "tokens, and no strings to stop at"
        )
    return found
