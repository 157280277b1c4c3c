"""The tokenizer in a model's folder, and the special tokens that its settings name."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graphgen.errors import GraphgenError
from graphgen.files import present
from graphgen.models.published.folder import settings

SPECIAL = [f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
"""The fields of tokenizer_config.json that name special tokens of any model."""


class BeyondVocabularyError(GraphgenError):
    """A tokenizer has tokens that a model has no place for."""


def tokenizer(
    folder: Path | None, *, limit: int | None = None, vocabulary: int | None = None
) -> Any:
    """The folder's tokenizer, which cuts texts to `limit` tokens; None if there is none.

    Raises GraphgenError if the library is missing or the file is not a tokenizer, and
    BeyondVocabularyError if it has tokens beyond the graph's vocabulary, or the configuration's.
    """
    path = Path() if folder is None else folder / "tokenizer.json"
    if folder is None or not present(path):
        return None
    try:
        from tokenizers import Tokenizer

        with panics():
            found = Tokenizer.from_file(str(path))
    except ImportError as error:
        raise GraphgenError(
            f'{path} needs tokenizers; run `pip install "graphgen-onnx[text]"`'
        ) from error
    except Exception as error:  # it raises nothing more specific
        raise GraphgenError(f"{path} is not a tokenizer: {error}") from error
    wanted = vocabulary or settings(folder, "config.json").get("vocab_size")
    last = max(found.get_vocab().values(), default=0)
    if isinstance(wanted, int) and last >= wanted:
        raise BeyondVocabularyError(
            f"{path} has {last + 1} tokens and the model {wanted}: it belongs to another model; "
            "copy the right tokenizer.json"
        )
    side = (found.truncation or {}).get("direction", "right")
    config = settings(folder, "tokenizer_config.json")
    side = config.get("truncation_side") or side
    if side not in ("left", "right"):
        raise GraphgenError(
            f"{folder / 'tokenizer_config.json'}: truncation_side is {side!r}; it must be 'left' "
            "or 'right'"
        )
    already = {token.content for token in found.get_added_tokens_decoder().values()}
    for text in _special(folder):
        full = isinstance(wanted, int) and found.get_vocab_size() >= wanted
        if text not in already and not (full and found.token_to_id(text) is None):
            found.add_special_tokens([text])
    found.no_padding()
    found.encode_special_tokens = config.get("split_special_tokens") is True
    if limit is None:
        found.no_truncation()
    else:
        found.enable_truncation(limit, direction=side)
    return found


def of_tokenizer(folder: Path) -> dict[str, Any]:
    """The fields of tokenizer_config.json, and of special_tokens_map.json where that counts, too.

    transformers reads it in older folders, whose tokenizer_config.json lists no added tokens.
    """
    config = settings(folder, "tokenizer_config.json")
    more = {} if "added_tokens_decoder" in config else settings(folder, "special_tokens_map.json")
    return config | more


def named_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that the settings of a tokenizer name, in the order of transformers."""
    config = of_tokenizer(folder)
    given = dict.fromkeys(SPECIAL) | {n: x for n, x in config.items() if n.endswith("_token")}
    for name in ("extra_special_tokens", "model_specific_special_tokens"):
        given |= more if isinstance(more := config.get(name), dict) else {}
    return {name: text for name in given if (text := text_of(given, name))}


def _special(folder: Path) -> Iterator[str]:
    """The special tokens of the settings of a tokenizer, with a name and without.

    transformers splits texts at them where tokenizer.json does not, too, with the next free number
    if they have none there; what has no place in the vocabulary cannot be read by the model.
    """
    yield from named_tokens(folder).values()
    config = of_tokenizer(folder)
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    texts = (text_of({"": token}, "") for token in (more if isinstance(more, list) else ()))
    yield from filter(None, texts)


def text_of(config: Mapping[str, Any], name: str) -> str | None:
    """The text of a special token, such as `eos_token`, by the fields of tokenizer_config.json."""
    given = config.get(name)
    given = given.get("content") if isinstance(given, dict) else given
    return given if isinstance(given, str) else None


@contextmanager
def panics() -> Iterator[None]:
    """Raise as RuntimeError where the code of tokenizers in Rust gives up: that is no Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(str(error)) from error


def encoded(who: str, tokenizer: Any, *texts: str | list[str], special: bool = True) -> Any:
    """What a tokenizer makes of a text, of its words, or of a pair.

    Raises GraphgenError if it cannot.
    """
    words = isinstance(texts[0], list)
    try:
        with panics():
            return tokenizer.encode(*texts, is_pretokenized=words, add_special_tokens=special)
    except Exception as error:  # it raises nothing more specific, say for want of [UNK]
        raise GraphgenError(
            f"{who}: tokenizer.json does not split the text {texts[0]!r:.40}: {error}; "
            "give another text, or the file that belongs to the checkpoint"
        ) from error
