"""What a model's folder says in addition to its graph: context, vocabulary, labels."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphgen.errors import GraphgenError
from graphgen.files import present, read_json
from graphgen.models.published.language_model import language_fields

_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions")
_AFTER_PADDING = (
    *("roberta", "xlm-roberta", "camembert", "mpnet", "data2vec-text"),
    *("roberta-prelayernorm", "xlm-roberta-xl", "esm"),
)
"""Types whose positions begin after that of padding."""

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
