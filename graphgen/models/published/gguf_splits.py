"""How llama.cpp cuts texts before their bytes are merged, by tokenizer.ggml.pre of a GGUF file."""

from typing import Any

_TIKTOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def _by_case(short: str, digits: str) -> str:
    """Words are cut before capitals; `short` forms belong to them or not."""
    any_case = r"\p{Lm}\p{Lo}\p{M}]"
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}{any_case}", rf"[\p{{Ll}}{any_case}"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}{upper}*{lower}+{short}|{before}{upper}+{lower}*{short}"
    rest = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return rf"{words}|{digits}|{rest}"


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PLAIN = {**_BYTES, "use_regex": False}
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral")
_THREES = (*_LLAMA3, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe")  # digits by three
_ONES = ("smollm", "starcoder", "refact", "command-r")


def _split(pattern: str) -> dict[str, Any]:
    shape = {"type": "Split", "behavior": "Isolated", "invert": False}
    return {**shape, "pattern": {"Regex": pattern}}


SPLITS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_BYTES],
    **{key: [_split(_TIKTOKEN % "1,3"), PLAIN] for key in _THREES},
    **{key: [_split(_TIKTOKEN % "1"), PLAIN] for key in ("qwen2", "deepseek-r1-qwen")},
    "tekken": [_split(_by_case("", r"\p{N}")), PLAIN],
    **{key: [_split(_by_case(_SHORT, r"\p{N}{1,3}")), PLAIN] for key in ("gpt-4o", "llama4")},
    **{key: [{"type": "Digits", "individual_digits": True}, _BYTES] for key in _ONES},
}
NFC = ("qwen2", "deepseek-r1-qwen", "command-r")  # compose letters and accents first
WHOLE = (*_LLAMA3, "tekken")  # take a piece that is a token as it is, and begin texts with BOS
