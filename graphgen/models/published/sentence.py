"""Sentence embeddings as a folder of sentence-transformers asks for them (arXiv 1908.10084).

Its modules.json lists what follows the encoder; each part has a folder with its config.json.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.files import present, read_json
from graphgen.models.published.config import Config
from graphgen.models.published.family import Family
from graphgen.models.published.folder import notes, settings
from graphgen.models.published.poolings import POOLINGS
from graphgen.models.published.sentence_modules import (
    SPARSE,
    is_late,
    is_sparse,
    is_static,
    modules_of,
    stages_in,
)
from graphgen.models.published.stages import (
    STAGES,
    SentenceVectors,
    SparseVectors,
    Stage,
    TokenVectors,
)
from graphgen.models.published.tokenizer import tokenizer
from graphgen.models.published.weights import read_weights

EMBEDS = "feature-extraction"
_SETTINGS = "config_sentence_transformers.json"
_FILLS = "fill-mask"
_READ = {EMBEDS: "last_hidden_state", _FILLS: "logits"}
"""What the modules read of the results of a task."""
_CAPITALS = "AZ\u00c0\u00dc\u010c\u0394\u0416\u10a0"  # of several alphabets, some with accents


def sentence_head(
    folder: Path, features: int, dtype: ir.DataType
) -> tuple[SentenceVectors | TokenVectors, dict[str, ir.TensorProtocol]] | None:
    """The head that modules.json asks for, and its weights by path; None without such a file.

    Raises a GraphgenError that names an unknown module or way of pooling.
    """
    entries = modules_of(folder)
    if not entries:
        return None
    static, late = is_static(entries), is_late(entries)
    if not static and entries[1][0] == SPARSE:
        raise GraphgenError(
            f"{folder / 'modules.json'}: {SPARSE} reads the logits of tokens: give --task {_FILLS}"
        )
    _check_notes(folder, EMBEDS)
    poolings = ["mean"]
    if not static and not late:
        poolings = _poolings(folder, folder / entries[1][1] / "config.json", features)
    size, weights = features * len(poolings), dict[str, ir.TensorProtocol]()
    stages = list[Stage]()
    for kind, name in stages_in(entries):
        where, plain = folder / name, STAGES[kind].plain
        file = where / "config.json"
        fields = {} if plain and not present(file) else read_json(file)  # older ones have none
        config = _config(file, kind, fields)
        if late:
            config.take("activation_function", str)  # PyLate has no default for it
        stage = STAGES[kind](config, size)
        config.finish()
        if not plain:
            writer = "SentenceTransformer(DIR).save(DIR2)"
            stored, family = read_weights(where, writer), Family(tasks={}, names={})
            known = family.weights(stage, stored, dtype, str(where))
            weights |= {f"head.stages.{len(stages)}.{n}": array for n, array in known.items()}
        size = stage.features
        stages.append(stage)
    if late:
        return TokenVectors(stages), weights
    return SentenceVectors(poolings, stages, _kept(folder)), weights


def _check_notes(folder: Path, task: str) -> None:
    """Raise GraphgenError for notes on how to read texts that the graph cannot heed."""
    name, fields = notes(folder)
    where = folder / name
    config = _config(where, "Transformer", fields)
    if config.take("do_lower_case", bool, False) and not _lowers(folder):
        raise GraphgenError(
            f"{where}: do_lower_case is True, but clients of tokenizer.json do not read "
            "it: make it part of the normalizer there, and False here"
        )
    for field in ("max_seq_length", "tokenizer_name_or_path", "unpad_inputs"):
        config.raw(field)
    config.expect("transformer_task", task)
    config.expect("module_output_name", "token_embeddings")
    known = config.raw("modality_config", {})
    wanted = {"method": "forward", "method_output_name": _READ[task]}
    if not isinstance(known, dict) or known.get("text", wanted) != wanted:
        config.refuse("modality_config", known, f"with {wanted} for text")
    config.finish()


def _kept(folder: Path) -> int | None:
    """How many elements of an embedding sentence-transformers keeps, if it says so."""
    file = folder / _SETTINGS
    size = settings(folder, _SETTINGS).get("truncate_dim")
    if size is not None and (type(size) is not int or size < 1):
        raise GraphgenError(f"{file}: truncate_dim is {size!r:.60}; make it a size, or null")
    return size


def sentence_task(folder: Path, tasks: Collection[str]) -> str | None:
    """What a folder of sentence-transformers is for, if it is one of these tasks."""
    if not present(folder / "modules.json"):
        return None
    across = settings(folder, _SETTINGS).get("model_type") == "CrossEncoder"
    task = "text-classification" if across else _FILLS if is_sparse(folder) else EMBEDS
    return task if task in tasks else None


def sparse_vectors(folder: Path) -> SparseVectors | None:
    """What modules.json makes of the logits of tokens; None unless it is a vector of the text.

    Raises GraphgenError for fields that would change it.
    """
    if not is_sparse(folder):
        return None
    _check_notes(folder, _FILLS)
    [*_, (kind, name)] = modules_of(folder)
    where = folder / name / "config.json"
    config = _config(where, kind, read_json(where))
    found = SparseVectors(config)
    config.finish()
    return found


def _lowers(folder: Path) -> bool:
    """Whether the tokenizer reads capital letters as small ones, as it is."""
    reader = tokenizer(folder)
    normalizer = None if reader is None else reader.normalizer
    return normalizer is not None and all(
        normalizer.normalize_str(letter) == normalizer.normalize_str(letter.lower())
        for letter in _CAPITALS
    )


def _config(path: Path, kind: str, fields: dict[str, Any]) -> Config:
    return Config({"model_type": kind, **fields}, str(path))


def default_prompt(folder: Path) -> str:
    """What sentence-transformers puts before each text of this folder; usually nothing.

    Raises GraphgenError if it names a prompt that does not exist.
    """
    file = _SETTINGS
    named, prompts = (settings(folder, file).get(n) for n in ("default_prompt_name", "prompts"))
    if named is None:
        return ""
    prompt = prompts.get(named) if isinstance(prompts, dict) and isinstance(named, str) else None
    if not isinstance(prompt, str):
        raise GraphgenError(
            f"{folder / file}: default_prompt_name is {named!r}, but prompts has no such text; "
            "make it null"
        )
    return prompt


def _poolings(folder: Path, path: Path, features: int) -> list[str]:
    """The ways of pooling that a configuration asks for, in the order of their vectors."""
    config = _config(path, "pooling", read_json(path))
    config.expect("word_embedding_dimension", features)
    config.expect("embedding_dimension", features)
    if default_prompt(folder):  # which only the caller could tell from the text
        config.expect("include_prompt", True)
    config.take("include_prompt", bool, True)
    prefix = "pooling_mode"
    flags = {
        "cls_token": "cls",
        "max_tokens": "max",
        "mean_tokens": "mean",
        "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
        "weightedmean_tokens": "weightedmean",
        "lasttoken": "lasttoken",
    }
    chosen = [n for flag, n in flags.items() if config.take(f"{prefix}_{flag}", bool, False)]
    named = config.raw(prefix, chosen)
    chosen = [named] if isinstance(named, str) else named
    known = list(POOLINGS)
    if not isinstance(chosen, list) or not chosen or not all(name in known for name in chosen):
        config.refuse(prefix, chosen, f"one or more of {', '.join(known)}")
    config.finish()
    return chosen
