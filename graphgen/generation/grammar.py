"""Answers held to a grammar: a JSON schema, a regular expression or a Lark grammar."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from graphgen.errors import GraphgenError, needed, user_line
from graphgen.files import read_bytes, read_json
from graphgen.generation.prefixes import common
from graphgen.operands import Array

Grammar: TypeAlias = Mapping[str, Any] | re.Pattern[str] | str | Path
"""A JSON schema, a compiled regular expression, a Lark grammar, or a file of one of them."""

_BLANKS = {"whitespace_pattern": r"[\x20\x0A\x09]{1,32}"}
"""Blanks between the parts of JSON, of which a model could otherwise write any number."""

_OPTIONS = '"x-guidance"'  # of llguidance, in a schema

_KINDS = {".json": "JSON schema", ".regex": "regular expression", ".lark": "Lark grammar"}


class Grammatical:
    """Says which tokens may come next so that a row's text stays in the language of a grammar.

    Each row has a parser of its own (llguidance), which goes back where the row's tokens are others
    than those before. A text in the language may end with one of the tokens `ends`.

    Raises GraphgenError if the grammar does not parse, or has no text.
    """

    def __init__(self, grammar: Grammar, tokenizer: Any, ends: Sequence[int]) -> None:
        library, (self._name, kind, text) = needed("llguidance"), _read(grammar)
        if not ends:
            raise GraphgenError(
                "generate: a grammar needs a token that ends a row, and the folder names none; "
                f"give eos{user_line()}"
            )
        self._ends, self._rows = {*ends}, dict[int, tuple[Any, list[int]]]()
        try:
            tokens = library.LLTokenizer(tokenizer.to_str(), eos_token=list(ends))
        except ValueError as error:
            raise GraphgenError(f"generate: no grammar for this tokenizer: {error}") from error
        parser = library.LLMatcher
        blanks = {} if _OPTIONS in text else _BLANKS
        make = {
            "JSON schema": partial(parser.grammar_from_json_schema, defaults=blanks),
            "regular expression": parser.grammar_from_regex,
            "Lark grammar": parser.grammar_from_lark,
        }[kind]
        self._fresh = parser(tokens, make(text), log_level=0)
        self._check(self._fresh, f"{kind}: ")

    def __call__(self, number: int, tokens: Sequence[int]) -> Array:
        """Which tokens may follow these new tokens of a row, True or False, (vocabulary,)."""
        matcher = self._after(number, tokens)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little").astype(bool)
        if not allowed.any() or matcher.get_error().startswith("NoExtension"):
            raise GraphgenError(
                f"generate: {self._name}: no token of the tokenizer can come behind the "
                f"{len(tokens)} tokens of row {number}; change the grammar"
            )
        self._check(matcher)
        return allowed

    def accepts(self, number: int, tokens: Sequence[int]) -> bool:
        """Whether a row is a text in the language."""
        return bool(self._after(number, tokens).is_accepting())

    def _after(self, number: int, tokens: Sequence[int]) -> Any:
        """The parser of a row, behind its tokens."""
        matcher, read = self._rows.get(number) or (self._fresh.deep_copy(), [])
        text = [token for token in tokens if token not in self._ends]
        same = common(read, text)
        if same < len(read):
            matcher.rollback(len(read) - same)
        matcher.consume_tokens(text[same:])
        self._check(matcher)
        self._rows[number] = matcher, text
        return matcher

    def _check(self, matcher: Any, where: str = "") -> None:
        if matcher.is_error():
            [problem, *more] = matcher.get_error().splitlines()
            causes = [line for line in more if line.startswith("error: ")]  # of an expression
            problem = " ".join([f"{problem:.200}", *causes[:1]])
            raise GraphgenError(f"generate: {self._name}: {where}{problem}{user_line()}")


def _read(grammar: Any) -> tuple[str, str, str]:
    """What to call a grammar, its kind, and its text. Raises GraphgenError if it cannot be read."""
    if isinstance(grammar, Mapping):
        try:
            return "grammar", "JSON schema", json.dumps(grammar)
        except (TypeError, ValueError) as error:
            raise GraphgenError(
                f"generate: grammar is no JSON schema: {error}{user_line()}"
            ) from error
    if isinstance(grammar, re.Pattern):
        if not isinstance(grammar.pattern, str) or grammar.flags != re.UNICODE:
            raise GraphgenError(
                f"generate: grammar is {grammar!r:.60}; give a regular expression of text without "
                f"flags; (?i) and the like may stand in it{user_line()}"
            )
        return "grammar", "regular expression", grammar.pattern
    if isinstance(grammar, str):
        return "grammar", "Lark grammar", grammar
    if not isinstance(grammar, Path) or grammar.suffix not in _KINDS:
        raise GraphgenError(
            f"generate: grammar is {grammar!r:.60}; give a file that ends in {', '.join(_KINDS)}, "
            f"a schema as a dict, re.compile(...), or a Lark grammar as text{user_line()}"
        )
    kind = _KINDS[grammar.suffix]
    if kind == "JSON schema":
        return str(grammar), kind, json.dumps(read_json(grammar))
    try:
        text = read_bytes(grammar).decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, ValueError) as error:
        raise GraphgenError(f"generate: {grammar} cannot be read: {error}") from error
    return str(grammar), kind, text.strip() if kind == "regular expression" else text
