"""modules.json, in which sentence-transformers lists the parts of a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphgen.errors import GraphgenError
from graphgen.files import present, read_json
from graphgen.models.published.stages import STAGES

MODULES = ("Transformer", "Pooling", *STAGES)
SPARSE = "SpladePooling"
"""What follows the logits of tokens instead of a pooling."""

TABLE = "StaticEmbedding"
"""What may stand alone instead of a Transformer and a Pooling."""

LATE = "pylate.models.Dense.Dense"
"""What PyLate calls a Dense of the vectors of tokens, which are compared one by one (ColBERT)."""

_ROUTED = "its queries and documents are read by different parts, which a graph cannot tell apart"
_OTHERS = {
    "Router": _ROUTED,
    "Asym": _ROUTED,
    "MultiVectorMask": "which of its vectors count depends on whether a text is a query",
}
"""Modules that no graph is made of, and why."""


def modules_of(folder: Path) -> list[tuple[str, str]]:
    """The kinds of modules in modules.json and their folders; none without such a file.

    Raises a GraphgenError that names those that are not built.
    """
    path = folder / "modules.json"
    if not present(path):
        return []
    listed = read_json(path, list)
    try:
        types = [str(e["type"]) for e in listed]
        entries = [
            (t if t == LATE else t.rpartition(".")[2], str(e["path"]))
            for t, e in zip(types, listed, strict=True)
        ]
    except (TypeError, KeyError) as error:
        raise GraphgenError(f"{path}: each module must have a type and a path") from error
    if own := [t for t in types if not t.startswith("sentence_transformers.") and t != LATE]:
        raise GraphgenError(
            f"{path}: {', '.join(own)} is code in the checkpoint, which is not run; remove it, or "
            "choose another checkpoint"
        )
    kinds = [kind.replace("MLMTransformer", "Transformer") for kind, _ in entries]
    static = is_static(entries)
    sparse = kinds == [MODULES[0], SPARSE]
    late = is_late(entries)
    unknown = sorted({*kinds[static:]} - {*MODULES})
    if unknown and not sparse and not late:
        reasons = "".join(f": {_OTHERS[kind]}" for kind in unknown if kind in _OTHERS)
        raise GraphgenError(
            f"{path}: the modules {', '.join(unknown)} are not supported{reasons}; supported are "
            f"{', '.join(MODULES)}, {TABLE} as the first, and {SPARSE} or {LATE} alone behind a "
            "Transformer: remove those, or choose another checkpoint"
        )
    fits = static or kinds[:2] == [*MODULES[:2]]
    fits = fits and {*kinds[_before_stages(entries) :]} <= {*STAGES}
    if not (fits or sparse or late) or (entries[0][1] and not static):
        raise GraphgenError(
            f"{path} lists {', '.join(kinds)}; it must list Transformer, Pooling and then any of "
            f"{', '.join(STAGES)}, and the first in this folder"
        )
    if static and entries[0][1] == ".":  # as model2vec writes it
        entries[0] = (TABLE, "")
    for _, name in entries[1 if not entries[0][1] else 0 :]:
        if not name or Path(name).name != name or name == "..":
            raise GraphgenError(f"{path}: {name!r} is not the name of a folder next to it")
    return entries


def entry(number: int, kind: str, path: str) -> dict[str, Any]:
    """What modules.json says of a module."""
    kind = f"sentence_transformers.models.{kind}"
    return {"idx": number, "name": str(number), "path": path, "type": kind}


def is_sparse(folder: Path) -> bool:
    """Whether modules.json makes a sparse vector of the logits of tokens."""
    path = folder / "modules.json"
    listed = read_json(path, list) if present(path) else []
    return any(isinstance(e, dict) and str(e.get("type")).endswith(f".{SPARSE}") for e in listed)


def stage_folders(folder: Path) -> list[str]:
    """The folders of what follows the pooling in modules.json, which `sentence_head` has read."""
    entries = modules_of(folder)
    return [name for _, name in stages_in(entries)]


def stages_in(entries: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The modules with a folder that follow the vectors of tokens or the pooling."""
    return [(kind.rpartition(".")[2], name) for kind, name in entries[_before_stages(entries) :]]


def _before_stages(entries: Sequence[tuple[str, str]]) -> int:
    return 1 if is_static(entries) or is_late(entries) else 2


def is_late(entries: Sequence[tuple[str, str]]) -> bool:
    """Whether the vectors of tokens stay, as PyLate compares them."""
    kinds = [kind for kind, _ in entries]
    return len(kinds) > 1 and kinds[0] == MODULES[0] and {*kinds[1:]} == {LATE}


def is_static(entries: Sequence[tuple[str, str]]) -> bool:
    """Whether modules begin with a table of tokens' vectors."""
    return bool(entries) and entries[0][0] == TABLE
