"""Folders of static embeddings, as model2vec and sentence-transformers save them.

Neither library adds special tokens to a text, and their folders lack what other clients read.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.files import present, read_json
from graphgen.models.published.sentence_modules import TABLE, entry, modules_of
from graphgen.models.published.static import COUNTED, MAPPING, STATIC
from graphgen.models.published.static_tokens import Tokens
from graphgen.models.published.weights import SINGLE, read_weights
from graphgen.safetensors import Weight, write

_LENGTH = 512
"""The most tokens of a text, where a folder of model2vec does not say."""

_SETTINGS = "config_sentence_transformers.json"


def holds_table(folder: Path) -> bool:
    """Whether a folder holds static embeddings."""
    config, modules = folder / "config.json", folder / "modules.json"
    if present(config) and read_json(config).get("model_type") == STATIC:
        return True
    listed = read_json(modules, list) if present(modules) else []
    first = listed[0] if listed and isinstance(listed[0], dict) else {}
    return str(first.get("type")).endswith(f".{TABLE}")


@contextmanager
def static_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder of the same in the one form that is built, which clients can read.

    Its config.json has the sizes, and the token that does not count; its tokenizer.json adds no
    special tokens. Raises GraphgenError for a folder that the two libraries do not read, or not as
    the same.
    """
    config, where = folder / "config.json", folder
    given = read_json(config) if present(config) else {}
    of_model2vec = given.get("model_type") == STATIC and given.get(COUNTED) is not True
    modules = modules_of(folder) or [(TABLE, "")]
    if of_model2vec:
        _check_modules(folder, [kind for kind, _ in modules], given.get("normalize", False))
        stages = [("Normalize", "1_Normalize")] if given.get("normalize") is True else []
    else:
        where, stages = folder / modules[0][1], modules[1:]
    stored = read_weights(where, "StaticModel or SentenceTransformer and save_pretrained")
    tokens = Tokens(where / "tokenizer.json")
    fields = _fields(given, stored, where)
    if (count := 1 + max(tokens.vocabulary.values())) > fields["vocab_size"]:
        raise GraphgenError(
            f"{tokens.path} has {count} tokens and the table {fields['vocab_size']}: it belongs to "
            "another model; copy the right tokenizer.json"
        )
    if of_model2vec:
        fields.setdefault("unk_token_id", tokens.unknown)
        length = given.get("max_length", _LENGTH)
        if length is not None and (type(length) is not int or not 0 < length < 1 << 31):
            raise GraphgenError(f"{config}: max_length is {length!r:.60}; make it a size, or null")
        if length is not None:
            fields.setdefault("max_characters", length * tokens.median())
    else:
        fields |= {"unk_token_id": None, COUNTED: True}
        length = tokens.truncation()
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}-") as name:
        made = Path(name)
        for place, content in {
            "config.json": fields,
            "modules.json": [
                entry(number, kind, path)
                for number, (kind, path) in enumerate([(TABLE, ""), *stages])
            ],
            "tokenizer.json": {**tokens.written, "post_processor": None, "padding": None},
            "tokenizer_config.json": tokens.settings(length),
        }.items():
            (made / place).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        for _, path in stages:
            if (folder / path).is_dir():
                shutil.copytree(folder / path, made / path)
        if not of_model2vec and present(folder / _SETTINGS):
            shutil.copyfile(folder / _SETTINGS, made / _SETTINGS)
        _weights(stored, made / SINGLE)
        try:
            yield made
        except GraphgenError as error:  # which is about the files that they were made of
            raise GraphgenError(str(error).replace(name, str(folder))) from error


def _check_modules(folder: Path, kinds: list[str], normalize: Any) -> None:
    wanted = [TABLE, *["Normalize"] * (normalize is True)]
    if kinds != wanted and present(folder / "modules.json"):
        raise GraphgenError(
            f"{folder / 'modules.json'} lists {', '.join(kinds)}, but normalize in config.json is "
            f"{normalize!r}, by which model2vec reads {', '.join(wanted)}: make them agree"
        )


def _fields(given: Mapping[str, Any], stored: Mapping[str, Weight], where: Path) -> dict[str, Any]:
    """The fields of config.json, with the sizes that the weights have."""
    table = stored.get("embeddings", stored.get("embedding.weight"))
    if table is None or len(table.shape) != 2 or not all(table.shape):
        have = f"; it has {', '.join(sorted(stored)) or 'nothing'}" if table is None else ""
        kind = "missing" if table is None else f"{[*table.shape]}"
        raise GraphgenError(
            f"{where}: embeddings is {kind}; it must be a row for each token{have}: give the "
            "folder of a model of model2vec, or of sentence-transformers with StaticEmbedding"
        )
    rows, features = table.shape
    if (mapping := stored.get(MAPPING)) is not None:
        rows = mapping.shape[0] if mapping.shape else 0
    fields = {**given, "model_type": STATIC, "vocab_size": rows, "hidden_size": features}
    fields.pop("vocabulary_quantization", None)
    if mapping is not None:
        fields["vocabulary_quantization"] = table.shape[0]
    return {**fields, "weighted": "weights" in stored}


def _weights(stored: Mapping[str, Weight], path: Path) -> None:
    """The file of weights, or one of floats if they are whole numbers, which model2vec averages."""
    files = {weight.path for weight in stored.values()}
    whole = any(w.dtype == ir.DataType.INT8 for n, w in stored.items() if n != MAPPING)
    if len(files) == 1 and not whole:
        try:
            path.symlink_to(files.pop().resolve())
        except OSError:  # where only some may make links
            shutil.copyfile(next(iter(stored.values())).path, path)
        return
    arrays = {
        name: ir.Tensor(x.astype(np.float32) if x.dtype == np.int8 else x)
        for name, x in ((name, weight.read()) for name, weight in stored.items())
    }
    with path.open("wb") as stream:
        write(stream, arrays, {"format": "pt"})
