"""What a folder of a model says beside its graph: context, vocabulary, labels, tokenizer."""

from pathlib import Path
from typing import Any

from graphgen.errors import GraphgenError
from graphgen.models.config import read_json

_LENGTHS = {
    "config.json": ("max_position_embeddings", "n_positions"),
    "tokenizer_config.json": ("model_max_length",),
    "sentence_bert_config.json": ("max_seq_length",),
}


def told(folder: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file of the folder; an empty one where there is no such file."""
    return read_json(folder / name) if (folder / name).is_file() else {}


def context(folder: Path) -> int | None:
    """The most tokens that a text may have, where a file says so."""
    sizes = [told(folder, file).get(name) for file, names in _LENGTHS.items() for name in names]
    config = told(folder, "config.json")
    if "roberta" in str(config.get("model_type")) and isinstance(sizes[0], int):
        sizes[0] -= 1 + int(config.get("pad_token_id", 1))  # positions begin behind padding's
    return min((int(size) for size in sizes if isinstance(size, int | float)), default=None)


def labels(folder: Path, count: int) -> list[str]:
    """The names of the labels in the order of their logits; LABEL_0 ... where they have none."""
    named = told(folder, "config.json").get("id2label")
    named = named if isinstance(named, dict) else {}
    if named and {*named} != {str(i) for i in range(count)}:
        raise GraphgenError(
            f"{folder / 'config.json'}: id2label names {len(named)} labels, of which the graph "
            f"gives {count} logits; build the folder again with the task that has these labels"
        )
    return [str(named.get(str(i), f"LABEL_{i}")) for i in range(count)]


def tokenizer(folder: Path, limit: int | None = None) -> Any:
    """The folder's tokenizer, which cuts texts to `limit` tokens; None where there is none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        from tokenizers import Tokenizer

        found = Tokenizer.from_file(str(path))
    except ImportError as error:
        raise GraphgenError(
            f"{path} needs tokenizers; run `pip install graphgen-onnx[map]`"
        ) from error
    except Exception as error:  # it raises nothing more special
        raise GraphgenError(f"{path} is no tokenizer: {error}") from error
    found.no_padding()
    if limit is None:
        found.no_truncation()
    else:
        found.enable_truncation(limit)
    return found
