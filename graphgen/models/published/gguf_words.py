"""Vocabularies of WordPiece and of SentencePiece in a GGUF file, as tokenizer.json has them."""

from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np

from graphgen.errors import GraphgenError

MARK = "\u2581"
UNKNOWN, CONTROL, OWN_TYPE, _BYTE = 2, 3, 4, 6  # types


def word_pieces(path: Path, own: dict[str, Any], types: Any) -> dict[str, Any]:
    """The parts of tokenizer.json for a vocabulary in which words begin with a mark.

    Files do not say whether texts keep their capitals. Where no word has one, they are lower case,
    without accents. Raises GraphgenError for others, and for tokens that are missing.
    """
    vocabulary = dict[str, int]()
    for i, token in enumerate(own["tokens"]):
        if types[i] == CONTROL:
            word = token
        elif token.startswith(MARK):
            word = token.removeprefix(MARK)
        else:
            word = f"##{token}"
        vocabulary[word] = i
        if types[i] != CONTROL and word != word.lower() and not word.startswith("["):
            problem = f"has the word {word!r:.40}: whether texts keep their capitals is not said"
            raise GraphgenError(f"{path} {problem}; give --like DIR")
    tokens = {name: _special(path, own, vocabulary, *of) for name, of in _SPECIAL.items()}
    first, last = ({"SpecialToken": {"id": tokens[n], "type_id": 0}} for n in ("first", "last"))
    single = [first, {"Sequence": {"id": "A", "type_id": 0}}, last]
    other = [{"Sequence": {"id": "B", "type_id": 1}}, {"SpecialToken": {**last["SpecialToken"]}}]
    other[1]["SpecialToken"]["type_id"] = 1
    known = {t: {"id": t, "ids": [vocabulary[t]], "tokens": [t]} for t in tokens.values()}
    pieces = {"unk_token": tokens["unknown"], "continuing_subword_prefix": "##"}
    return {
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
        | {"strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", **pieces, "max_input_chars_per_word": 100}
        | {"vocab": vocabulary},
        "post_processor": {"type": "TemplateProcessing", "single": single}
        | {"pair": [*single, *other], "special_tokens": known},
    }


_SPECIAL = {
    "first": (("cls", "bos"), "[CLS]"),
    "last": (("seperator", "eos"), "[SEP]"),
    "unknown": (("unknown",), "[UNK]"),
}
"""What fields call the tokens around a text, one of them misspelled, and their usual names."""


def _special(
    path: Path, own: dict[str, Any], vocabulary: dict[str, int], names: tuple[str, ...], usual: str
) -> str:
    """A token that a field names, or the usual one."""
    ids = [own[f"{n}_token_id"] for n in names if f"{n}_token_id" in own]
    words = {i: word for word, i in vocabulary.items()}
    found = words.get(ids[0]) if ids and type(ids[0]) is int else usual * (not ids)
    if found not in vocabulary:
        problem = f"has no token for {usual}"
        raise GraphgenError(f"{path} {problem}; give --like DIR")
    return str(found)


_SPACES = (("^ +| +$", " {2,}"), ("", " "))
"""Spaces that say nothing, and what is put in their places."""


def _replaced(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def unigram(path: Path, own: dict[str, Any], scores: Any) -> dict[str, Any]:
    """The parts of tokenizer.json for pieces with scores, of which a text's likeliest are taken.

    Texts are cut at spaces, and each word begins with a mark, as in T5 and XLM-RoBERTa. Raises
    GraphgenError where a file says otherwise.
    """
    unknown, table = own.get("unknown_token_id"), own.get("precompiled_charsmap")
    wanted = ("add_space_prefix", "remove_extra_whitespaces")
    if wrong := [name for name in wanted if own.get(name, True) is not True]:
        raise GraphgenError(f"{path}: tokenizer.ggml.{wrong[0]} is not true; give --like DIR")
    if type(unknown) is not int or not isinstance(table, np.ndarray | None):
        raise GraphgenError(f"{path} has no unknown token, or a damaged charsmap; give --like DIR")
    pieces = [[token, float(score)] for token, score in zip(own["tokens"], scores, strict=True)]
    space = {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "always", "split": True}
    before: dict[str, Any] = {"type": "Sequence", "normalizers": [*map(_replaced, *_SPACES)]}
    words = [space]
    if table is not None:  # in which all blanks become spaces
        text = b64encode(table.astype(np.int64).astype(np.uint8).tobytes()).decode()
        before = {"type": "Precompiled", "precompiled_charsmap": text}
        words = [{"type": "WhitespaceSplit"}, space]
    return {
        "normalizer": before,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": words},
        "decoder": space,
        "model": {"type": "Unigram", "unk_id": unknown, "vocab": pieces, "byte_fallback": False},
    }


def likely_pairs(
    own: dict[str, Any], vocabulary: dict[str, int], scores: Any, types: Any, unknown: str | None
) -> dict[str, Any]:
    """SentencePiece joins the neighbors whose piece has the highest score, the first of equals."""
    plain = {token for token, i in vocabulary.items() if types[i] not in (UNKNOWN, CONTROL, _BYTE)}
    merges = []
    for token in plain:
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [(a, b) for a, b in cuts if a in plain and b in plain]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges.append((-float(scores[vocabulary[token]]), vocabulary[token], pairs))
    pairs = [pair for *_, found in sorted(merges) for pair in found]
    space = own.get("add_space_prefix", True)
    first = [{"type": "Prepend", "prepend": MARK}] if space else []
    swap = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
    back = {"type": "Replace", "pattern": {"String": MARK}, "content": " "}
    last = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if space else []
    model = {"type": "BPE", "vocab": vocabulary, "merges": pairs, "unk_token": unknown}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *last]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, swap]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {**model, "fuse_unk": True, "byte_fallback": bool((types == _BYTE).any())},
    }
