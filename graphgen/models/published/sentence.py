"""Sentence embeddings as a folder of sentence-transformers asks for them (arXiv 1908.10084).

Its modules.json lists what follows the encoder; 1_Pooling/config.json says how to pool.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir

from graphgen import nn, ops
from graphgen.errors import GraphgenError
from graphgen.files import present, read_json
from graphgen.models.published.config import Config
from graphgen.models.published.folder import settings
from graphgen.models.published.heads import first, mean
from graphgen.value import Tensor


def _max(x: Tensor, mask: Tensor) -> Tensor:
    kept = ops.unsqueeze(ops.cast(mask, to=ir.DataType.BOOL), [2])  # (B, T, 1)
    return ops.reduce_max(ops.where(kept, x, -math.inf), axis=1, keepdims=False)


POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": lambda x, mask: first(x),
    "max": _max,
    "mean": mean,
}
"""From vectors (B, T, D) and a mask (B, T) to one, (B, D); several are joined in this order."""

MODULES = ("Transformer", "Pooling", "Normalize")


class SentenceVectors(nn.Module):
    """The vectors of the tokens, and the sentence's, (B, D) for each way of pooling."""

    def __init__(self, poolings: list[str], *, normalize: bool):
        self.poolings, self.normalize = poolings, normalize

    def __call__(self, x: Tensor, mask: Tensor, encoder: Any) -> dict[str, Tensor]:
        parts = [pool(x, mask) for name, pool in POOLINGS.items() if name in self.poolings]
        y = parts[0] if len(parts) == 1 else ops.concat(*parts, axis=1)
        if self.normalize:
            y = y / ops.maximum(ops.reduce_l2(y, axis=1), 1e-12)
        return {"last_hidden_state": x, "sentence_embedding": y}


def sentence_head(folder: Path, features: int) -> SentenceVectors | None:
    """The head that modules.json asks for, or None if there is no such file.

    Raises a GraphgenError that names an unknown module or way of pooling.
    """
    path = folder / "modules.json"
    if not present(path):
        return None
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
    kinds = [kind for kind, _ in entries]
    if unknown := sorted(set(kinds) - set(MODULES)):
        raise GraphgenError(
            f"{path}: the modules {', '.join(unknown)} are not supported; supported are "
            f"{', '.join(MODULES)}: remove those, or choose another checkpoint"
        )
    if kinds not in (list(MODULES[:2]), list(MODULES)) or entries[0][1]:
        raise GraphgenError(
            f"{path} lists {', '.join(kinds)}; it must list {', '.join(MODULES)} in this order, "
            "with or without Normalize, and the first in this folder"
        )
    if Path(entries[1][1]).name != entries[1][1]:
        raise GraphgenError(f"{path}: {entries[1][1]!r} is not the name of a folder next to it")
    file = "sentence_bert_config.json"
    if settings(folder, file).get("do_lower_case"):
        raise GraphgenError(
            f"{folder / file}: do_lower_case is True, but clients of tokenizer.json do not read "
            "it: make it part of the normalizer there, and False here"
        )
    return SentenceVectors(
        _poolings(folder / entries[1][1] / "config.json", features), normalize=len(kinds) == 3
    )


def default_prompt(folder: Path) -> str:
    """What sentence-transformers puts before each text of this folder; usually nothing.

    Raises GraphgenError if it names a prompt that does not exist.
    """
    file = "config_sentence_transformers.json"
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


def _poolings(path: Path, features: int) -> list[str]:
    """The ways of pooling that a configuration asks for."""
    config = Config({"model_type": "pooling", **read_json(path)}, str(path))
    config.expect("word_embedding_dimension", features)
    config.expect("embedding_dimension", features)
    config.expect("include_prompt", True)
    prefix = "pooling_mode"
    flags = {
        f"{prefix}_{name}": name.removesuffix("_tokens").removesuffix("_token")
        for name in ("cls_token", "max_tokens", "mean_tokens")
    }
    chosen = [name for flag, name in flags.items() if config.take(flag, bool, False)]
    for other in ("mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"):
        config.expect(f"{prefix}_{other}", False)
    named = config.raw(prefix, chosen)
    chosen = [named] if isinstance(named, str) else named
    known = list(POOLINGS)
    if not isinstance(chosen, list) or not chosen or not all(name in known for name in chosen):
        config.refuse(prefix, chosen, f"one or more of {', '.join(known)}")
    config.finish()
    return chosen
