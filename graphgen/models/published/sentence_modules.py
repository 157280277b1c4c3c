"""modules.json, in which sentence-transformers lists the parts of a model."""

from pathlib import Path

from graphgen.errors import GraphgenError
from graphgen.files import present, read_json
from graphgen.models.published.stages import STAGES

MODULES = ("Transformer", "Pooling", *STAGES)
SPARSE = "SpladePooling"
"""What follows the logits of tokens instead of a pooling."""

_ROUTED = "its queries and documents are read by different parts, which a graph cannot tell apart"
_OTHERS = {
    "StaticEmbedding": "its texts have no special tokens, which readers of tokenizer.json add",
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
            (t.rpartition(".")[2], str(e["path"])) for t, e in zip(types, listed, strict=True)
        ]
    except (TypeError, KeyError) as error:
        raise GraphgenError(f"{path}: each module must have a type and a path") from error
    if own := [t for t in types if not t.startswith("sentence_transformers.")]:
        raise GraphgenError(
            f"{path}: {', '.join(own)} is code in the checkpoint, which is not run; remove it, or "
            "choose another checkpoint"
        )
    kinds = [kind.replace("MLMTransformer", "Transformer") for kind, _ in entries]
    sparse = kinds == [MODULES[0], SPARSE]
    unknown = sorted({*kinds} - {*MODULES})
    if unknown and not sparse:
        reasons = "".join(f": {_OTHERS[kind]}" for kind in unknown if kind in _OTHERS)
        raise GraphgenError(
            f"{path}: the modules {', '.join(unknown)} are not supported{reasons}; supported are "
            f"{', '.join(MODULES)}, and {SPARSE} alone behind a Transformer: remove those, or "
            "choose another checkpoint"
        )
    fits = kinds[:2] == [*MODULES[:2]] and {*kinds[2:]} <= {*STAGES}
    if not (fits or sparse) or entries[0][1]:
        raise GraphgenError(
            f"{path} lists {', '.join(kinds)}; it must list Transformer, Pooling and then any of "
            f"{', '.join(STAGES)}, and the first in this folder"
        )
    for _, name in entries[1:]:
        if not name or Path(name).name != name:
            raise GraphgenError(f"{path}: {name!r} is not the name of a folder next to it")
    return entries


def is_sparse(folder: Path) -> bool:
    """Whether modules.json makes a sparse vector of the logits of tokens."""
    path = folder / "modules.json"
    listed = read_json(path, list) if present(path) else []
    return any(isinstance(e, dict) and str(e.get("type")).endswith(f".{SPARSE}") for e in listed)


def stage_folders(folder: Path) -> list[str]:
    """The folders of what follows the pooling in modules.json, which `sentence_head` has read."""
    return [str(entry["path"]) for entry in read_json(folder / "modules.json", list)[2:]]
