"""WordPiece's vocabulary in a GGUF file, as tokenizer.json has it."""

from pathlib import Path
from typing import Any

from graphgen.errors import GraphgenError

MARK = "\u2581"
_CONTROL = 3  # type


def word_pieces(path: Path, own: dict[str, Any], types: Any) -> dict[str, Any]:
    """The parts of tokenizer.json for a vocabulary in which words begin with a mark.

    Files do not say whether texts keep their capitals. Where no word has one, they are lower case,
    without accents. Raises GraphgenError for others, and for tokens that are missing.
    """
    vocabulary = dict[str, int]()
    for i, token in enumerate(own["tokens"]):
        if types[i] == _CONTROL:
            word = token
        elif token.startswith(MARK):
            word = token.removeprefix(MARK)
        else:
            word = f"##{token}"
        vocabulary[word] = i
        if types[i] != _CONTROL and word != word.lower() and not word.startswith("["):
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
