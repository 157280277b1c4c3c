"""What a model's folder says in addition to its graph: context, vocabulary, labels, tokenizer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graphgen.errors import GraphgenError
from graphgen.files import present, read_json
from graphgen.models.published.language_model import language_fields

_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions")
_AFTER_PADDING = (
    *("roberta", "xlm-roberta", "camembert", "mpnet", "data2vec-text"),
    *("roberta-prelayernorm", "xlm-roberta-xl"),
)
"""Types whose positions begin after that of padding."""

SPECIAL = [f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
"""The fields of tokenizer_config.json that name special tokens of any model."""

NOTED = [
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
"""What sentence-transformers may call its notes on how an encoder is read; the first one counts."""


def settings(folder: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file of the folder; an empty one if there is no such file.

    Of the config.json of several parts, it is that of the language model.
    """
    found = read_json(folder / name) if present(folder / name) else {}
    return language_fields(found, folder / name) if name == "config.json" else found


def preprocessor(folder: Path, *parts: str) -> tuple[Path, dict[str, Any]]:
    """How images or sounds are read, and the file that says so; no fields if there is none.

    transformers 5 writes it as a part of processor_config.json, which then counts.
    """
    path = folder / "processor_config.json"
    found = settings(folder, path.name)
    for part in parts:
        if isinstance(fields := found.get(part), dict):
            return path, fields
    path = folder / "preprocessor_config.json"
    return path, settings(folder, path.name)


def positions(config: Mapping[str, Any]) -> Any:
    """How many tokens a model has positions for, by the fields of its configuration.

    None if they do not say, and for relative positions, which have no limit.
    """
    kind = config.get("model_type")
    if "relative_attention_num_buckets" in config and kind != "mpnet":
        return None
    size = next((config[name] for name in _POSITIONS if config.get(name) is not None), None)
    if kind in _AFTER_PADDING and isinstance(size, int):
        padding = config.get("pad_token_id") if kind != "mpnet" else 1
        size -= 1 + (padding if isinstance(padding, int) else 1)
    return size


def notes(folder: Path) -> tuple[str, dict[str, Any]]:
    """The file of `NOTED` that says something, and its fields."""
    found = ((name, settings(folder, name)) for name in NOTED)
    return next((one for one in found if one[1]), (NOTED[0], {}))


def context(folder: Path) -> int | None:
    """The most tokens that a text may have, if a file says so."""
    sizes = [
        positions(settings(folder, "config.json")),
        settings(folder, "tokenizer_config.json").get("model_max_length"),
        notes(folder)[1].get("max_seq_length"),
    ]
    # Where no length is known, transformers writes int(1e30).
    real = (size for size in sizes if isinstance(size, int | float) and 1 <= size < 1 << 31)
    return min(map(int, real), default=None)


def labels(folder: Path, count: int) -> list[str]:
    """The names of the labels in the order of their logits; LABEL_0 ... if they have none."""
    named = settings(folder, "config.json").get("id2label")
    named = named if isinstance(named, dict) else {}
    if named and {*named} != {str(i) for i in range(count)}:
        raise GraphgenError(
            f"{folder / 'config.json'}: id2label names {len(named)} labels, but the graph gives "
            f"{count} logits; build the folder again with the task that has these labels"
        )
    return [str(named.get(str(i), f"LABEL_{i}")) for i in range(count)]


def tokenizer(
    folder: Path | None, *, limit: int | None = None, vocabulary: int | None = None
) -> Any:
    """The folder's tokenizer, which cuts texts to `limit` tokens; None if there is none.

    Raises GraphgenError if the library is missing, the file is not a tokenizer, or it has tokens
    beyond the vocabulary: the graph's, or else the configuration's.
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
        raise GraphgenError(
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


def encoded(who: str, tokenizer: Any, *texts: str, special: bool = True) -> Any:
    """What a tokenizer makes of a text, or of a pair. Raises GraphgenError if it cannot."""
    try:
        with panics():
            return tokenizer.encode(*texts, add_special_tokens=special)
    except Exception as error:  # it raises nothing more specific, say for want of [UNK]
        raise GraphgenError(
            f"{who}: tokenizer.json does not split the text {texts[0]!r:.40}: {error}; "
            "give another text, or the file that belongs to the checkpoint"
        ) from error
