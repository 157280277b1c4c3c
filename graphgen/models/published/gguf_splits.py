"""How llama.cpp cuts texts before their bytes are merged, by tokenizer.ggml.pre of a GGUF file."""

from typing import Any

_TIKTOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CODER = "[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"
_DEEP = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_ENDS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _ENDS
)


def _by_case(short: str, digits: str, apart: str = "", last: str = "/") -> str:
    """Words are cut before capitals; `short` forms belong to them or not.

    Characters of the script `apart` are no part of words.
    """
    any_case = r"\p{Lm}\p{Lo}\p{M}" + (f"&&[^{apart}]]" if apart else "]")
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}{any_case}", rf"[\p{{Ll}}{any_case}"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}{upper}*{lower}+{short}|{before}{upper}+{lower}*{short}"
    rest = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n{last}]*{_ENDS}"
    first = f"{apart}+|" if apart else ""
    return rf"{first}{words}|{digits}|{rest}"


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PLAIN = {**_BYTES, "use_regex": False}
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral")
_THREES = (*_LLAMA3, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe")  # digits by three
_FOUR = ("gpt-4o", "llama4", "minimax-m2")
_ONES = ("smollm", "starcoder", "refact", "command-r")


def _split(pattern: str) -> dict[str, Any]:
    shape = {"type": "Split", "behavior": "Isolated", "invert": False}
    return {**shape, "pattern": {"Regex": pattern}}


SPLITS: dict[str, list[dict[str, Any]]] = {
    **{key: [_BYTES] for key in ("gpt-2", "phi-2", "mpt", "olmo", "exaone4")},
    **{key: [*map(_split, _DEEP), PLAIN] for key in ("deepseek-v3", "hunyuan-dense")},
    "deepseek-coder": [*map(_split, _CODER), PLAIN],
    "kimi-k2": [_split(_by_case(_SHORT, r"\p{N}{1,3}", r"\p{Han}", "")), PLAIN],
    "seed-coder": [_split(_SEED), PLAIN],
    "bloom": [_split(r" ?[^(\s|.,!?…。，、।۔،)]+"), PLAIN],
    **{key: [_split(_TIKTOKEN % "1,3"), PLAIN] for key in _THREES},
    **{key: [_split(_TIKTOKEN % "1"), PLAIN] for key in ("qwen2", "deepseek-r1-qwen", "hunyuan")},
    "tekken": [_split(_by_case("", r"\p{N}")), PLAIN],
    **{key: [_split(_by_case(_SHORT, r"\p{N}{1,3}")), PLAIN] for key in _FOUR},
    **{key: [{"type": "Digits", "individual_digits": True}, _BYTES] for key in _ONES},
}
NFC = ("qwen2", "deepseek-r1-qwen", "command-r", "mpt", "olmo")  # compose letters and accents first
WHOLE = (*_LLAMA3, "tekken")  # take a piece that is a token as it is, and begin texts with BOS
