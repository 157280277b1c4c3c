"""The parts of tokenizer.json that a tokenizer's class of transformers 5 has of its own."""

from collections.abc import Mapping
from typing import Any

from graphgen.models.published.gguf_tokenizer import SPLITS
from graphgen.models.published.tokenizer import text_of

_BYTES = dict.fromkeys(["GPT2", "Roberta", "GPTNeoX", "CodeGen", "Whisper", "Deberta"], "gpt-2")
_BYTES |= {"Qwen2": "qwen2", "Cohere": "command-r"}
"""Classes whose tokens are of bytes, and what GGUF calls their way to cut texts."""

_COMPOSED = ("Qwen2", "Cohere", "GPTNeoX")  # letters and accents, first

_BRACKETS = (("cls_token", "[CLS]"), ("sep_token", "[SEP]"))
_ANGLES = (("cls_token", "<s>"), ("sep_token", "</s>"))
_AROUND: dict[str, tuple[tuple[str, str], ...]] = {
    **dict.fromkeys(["Bert", "Deberta", "DebertaV2"], _BRACKETS),
    **dict.fromkeys(["MPNet", "Roberta", "Camembert"], _ANGLES),
    "XLMRoberta": (("bos_token", "<s>"), ("eos_token", "</s>")),
    **dict.fromkeys(["T5", "Pegasus"], (("", ""), ("eos_token", "</s>"))),
    "GPTNeoX": (("", ""), ("", "")),
}
"""The fields that name the tokens which a class puts before and after a text, and its own names."""


def charsmap_of(written: Mapping[str, Any]) -> list[dict[str, Any]]:
    """SentencePiece's table of characters in a tokenizer.json, which some classes keep."""
    found = written.get("normalizer") or {}
    listed = found.get("normalizers", [found]) if isinstance(found, dict) else []
    return [one for one in listed if isinstance(one, dict) and "precompiled_charsmap" in one][:1]


def around(name: str, config: Mapping[str, Any], reader: Any) -> dict[str, Any]:
    """The tokens that a class puts around a text; nothing if it does as the file says."""
    if name not in _AROUND:
        return {}
    first, last = (text_of(config, field) or own for field, own in _AROUND[name])
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    tokens = dict[str, Any]()
    for place, text in ((0, first), (len(single) + bool(first), last)):
        number = reader.token_to_id(text) if text else None
        if number is not None:
            single.insert(place, {"SpecialToken": {"id": text, "type_id": 0}})
            tokens[text] = {"id": text, "ids": [number], "tokens": [text]}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": pair}
    return {"post_processor": {**template, "special_tokens": tokens}}


def parts_of(
    name: str, config: Mapping[str, Any], charsmap: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """The parts of tokenizer.json that a class of transformers has of its own."""
    space, lower = config.get("add_prefix_space"), config.get("do_lower_case")
    before: list[dict[str, Any]] = [{"type": "NFC"}] if name in _COMPOSED else []
    words: list[dict[str, Any]]
    model: dict[str, Any] = {}
    if name in _BYTES:
        *first, last = SPLITS[_BYTES[name]]
        words = [*first, {**last, "add_prefix_space": space is True}]
        return _made(before, words, model)
    always = "never" if space is False else "always"
    match name:
        case "Bert" | "MPNet":
            before = [{"type": "BertNormalizer", "clean_text": True}]
            before[0]["handle_chinese_chars"] = config.get("tokenize_chinese_chars", True)
            before[0]["strip_accents"] = config.get("strip_accents")
            before[0]["lowercase"] = lower is not False
            words = [{"type": "BertPreTokenizer"}]
        case "T5" | "XLMRoberta" | "Camembert" | "Albert":
            before, words = charsmap, [{"type": "WhitespaceSplit"}, _space(always, split=True)]
            if name == "Albert":
                accents = [{"type": "NFKD"}, {"type": "StripAccents"}]
                quotes = [_replace("String", text, '"') for text in ("``", "''")]
                before = [
                    *quotes,
                    *accents * (config.get("keep_accents") is not True),
                    *[{"type": "Lowercase"}] * (lower is not False),
                    *charsmap,
                ]
        case "Pegasus":
            before = [
                *(charsmap or [_replace("Regex", "\\n", " ")]),
                _replace("Regex", " {2,}", " "),
            ]
            words = [_space("always", split=True)]
        case "DebertaV2":
            blanks = _replace("Regex", r"\s{2,}|[\n\r\t]", " ")
            before = [blanks, {"type": "NFC"}, {"type": "Strip", "strip_left": False}]
            before[-1]["strip_right"] = True
            before = [*[{"type": "Lowercase"}] * (lower is True), *before]
            words = [{"type": "Punctuation", "behavior": "Isolated"}]
            words = words * (config.get("split_by_punct") is True)
            words += [_space("first" if space is False else "always", split=True)]
        case "Gemma":
            before = [_replace("String", " ", "\u2581")]
            words = [{**SPLITS["qwen2"][0], "behavior": "MergedWithPrevious"}]
            words[0]["pattern"] = {"String": " "}
            model = {"fuse_unk": True, "byte_fallback": True}
        case "Llama":
            scheme = "always" if config.get("legacy") else "first"
            words = [_space("never" if space is False else scheme, split=False)]
            model = {"fuse_unk": True, "byte_fallback": True, "unk_token": None}
        case _:
            return None
    return _made(before, words, model)


def _made(
    before: list[dict[str, Any]], words: list[dict[str, Any]], model: dict[str, Any]
) -> dict[str, Any]:
    return {
        "normalizer": {"type": "Sequence", "normalizers": before} if before else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": words},
        "model": model,
    }


def _space(scheme: str, *, split: bool) -> dict[str, Any]:
    """SentencePiece's mark of a space, and before which parts of a text it stands."""
    own = {"replacement": "\u2581", "prepend_scheme": scheme, "split": split}
    return {"type": "Metaspace", **own}


def _replace(kind: str, pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}
