"""tokenizer.json and tokenizer_config.json, which say some things twice and have to agree."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from graphgen.errors import GraphgenError
from graphgen.files import present, read_bytes
from graphgen.models.published.folder import settings
from graphgen.models.published.tokenizer import tokenizer
from graphgen.models.published.tokenizer_classes import class_of

_TWICE = {
    "BertNormalizer": {
        "do_lower_case": "lowercase",
        "strip_accents": "strip_accents",
        "tokenize_chinese_chars": "handle_chinese_chars",
    },
    "ByteLevel": {"add_prefix_space": "add_prefix_space"},
}
"""By a part of tokenizer.json: fields of tokenizer_config.json, and what the part calls them."""


_VOCABULARY = re.compile(r"vocab\..+|.+\.(model|spm|tiktoken)|tekken\.json")
"""Files of vocabularies, of which transformers can make a tokenizer.json."""

_EXTRA = ("additional_special_tokens", "extra_special_tokens")


def unread(folder: Path) -> Iterator[str]:
    """A line if a tokenizer's files are there that no text can be read by."""
    path = folder / "tokenizer.json"
    others = [x.name for x in sorted(folder.iterdir()) if _VOCABULARY.fullmatch(x.name)]
    if not present(path) and others:
        yield (
            f"{folder} has {others[0]}, but no {path.name}, by which texts are read: write it with "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers"
        )
    try:
        tokenizer(folder)
    except GraphgenError as error:
        if not isinstance(error.__cause__, ImportError):
            yield f"no text can be read: {error}"


def check_tokenizer(folder: Path) -> None:
    """Raise an error if the two files of a tokenizer contradict each other.

    transformers takes some fields of the normalizer of BERT, the leading space of byte-level
    tokens, and added tokens from tokenizer_config.json, or from defaults of the tokenizer's class;
    all others read tokenizer.json.
    """
    path, other = folder / "tokenizer.json", folder / "tokenizer_config.json"
    try:
        read = json.loads(read_bytes(path).decode())
    except (OSError, ValueError, RecursionError):
        return  # reading it gives the error
    written = read if isinstance(read, dict) else {}
    parts, given = [*_parts(written)], settings(folder, other.name)
    bert = class_of(folder) in ("Bert", "MPNet")
    fields = [
        (name, given.get(name), f"{own} in {path.name}", part.get(own))
        for part in parts
        for name, own in _TWICE[part["type"]].items()
        if part["type"] != "BertNormalizer" or bert or not given.get("tokenizer_class")
    ]
    if bert and "do_lower_case" not in given:  # then their code does it, whatever the file says
        name, cased = (
            "do_lower_case (by default)",
            [p for p in parts if p.get("lowercase") is False],
        )
        fields += [(name, True, f"lowercase in {path.name}", False) for _ in cased]
    if "added_tokens_decoder" not in given:  # older files say it
        more = settings(folder, "special_tokens_map.json")
        given = given | {name: more[name] for name in _EXTRA if name in more}
        numbers = settings(folder, "added_tokens.json")
        given["added_tokens_decoder"] = {str(n): {"content": text} for text, n in numbers.items()}
    fields += _added(written, given)
    for name, wanted, where, found in fields:
        if wanted is not None and wanted != found:
            raise GraphgenError(
                f"{other}: {name} is {wanted!r}, but {where} is {found!r}: make them agree, "
                "because some clients read the one and some the other"
            )


def _added(
    written: Mapping[str, Any], given: Mapping[str, Any]
) -> Iterator[tuple[str, Any, str, Any]]:
    """What both files say about added tokens, and where."""
    tokens = [token for token in _listed(written.get("added_tokens")) if isinstance(token, dict)]
    by_number = {str(token.get("id")): token for token in tokens}
    decoder = given.get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        for field, wanted in token.items() if isinstance(token, dict) else ():
            where = f"{field} of token {number} in tokenizer.json"
            yield f"{field} of token {number}", wanted, where, by_number.get(number, {}).get(field)
    model = written.get("model")
    words = _listed(model.get("vocab") if isinstance(model, dict) else None)
    known = {str(token.get("content")) for token in tokens}
    known.update(str(word[0] if isinstance(word, list) and word else word) for word in words)
    for name in _EXTRA:
        special = given.get(name)
        for token in _listed([*special.values()] if isinstance(special, dict) else special):
            text = token.get("content") if isinstance(token, dict) else token
            if text not in known:
                yield f"one of {name}", text, "its number in tokenizer.json", None


def _listed(value: Any) -> list[Any]:
    """A list, or the keys of an object; nothing of anything else."""
    return [*value] if isinstance(value, list | dict) else []


def _parts(written: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of a tokenizer.json that tokenizer_config.json may contradict."""
    before = written.get("pre_tokenizer")
    listed = before.get("pretokenizers") if isinstance(before, dict) else None
    for part in (written.get("normalizer"), before, *_listed(listed)):
        if isinstance(part, dict) and part.get("type") in [*_TWICE]:  # a list is not hashable
            yield part
