"""A decoder that another tool exported, as the graph of a folder like that of a checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.export.read import load
from graphgen.export.write import to_bytes
from graphgen.files import read_json
from graphgen.match import Miss
from graphgen.operands import Array
from graphgen.passes import optimize
from graphgen.passes.caching import PAST, PRESENT, WithCache, with_cache
from graphgen.runtime import QUIET, Session

_LENGTHS = (23, 9, 1)  # tokens of the rows that are tried
_FIRST, _MORE = 6, 5  # tokens of the first calls; then one at a time
_BOUND, _HALF = 1e-4, 2e-2  # relative RMS of logits, and with 16-bit weights


def decoder_like(path: Path, folder: Path) -> WithCache:
    """The decoder in an ONNX file as clients drive it, tried against the file.

    `folder` has the config.json that belongs to it. Raises GraphgenError if the parts are not those
    of a decoder, if config.json is another's, or if the results differ.
    """
    who = f"build({path.name})"
    found = with_cache(load(path))
    if isinstance(found, Miss):
        raise GraphgenError(f"{who}: no cache can be given to it: {found.reason}")
    _check_fields(who, found, folder / "config.json")
    try:
        error = _error(path, found)
    except GraphgenError as problem:
        raise GraphgenError(f"{who}: tried with a cache, it fails: {problem}") from problem
    logits = found.model.graph.outputs[0].dtype
    bound = _BOUND if logits is not None and logits.itemsize > 2 else _HALF
    if not error <= bound:  # nor NaN
        raise GraphgenError(
            f"{who}: with a cache, its logits differ by {error:.1e} (relative RMS) from those of "
            f"the file itself, wanted {bound:.0e}: "
            + (found.unknown or "more than attention connects its tokens, or their places do")
        )
    return found


def _check_fields(who: str, found: WithCache, config: Path) -> None:
    """Raise an error if config.json speaks of other sizes than the graph has."""
    fields, graph = read_json(config), found.model.graph
    assert graph.outputs[0].shape is not None and graph.inputs[-1].shape is not None
    words = graph.outputs[0].shape[2]
    for names, size, what in (
        (("vocab_size",), words, f"logits for {words} words"),
        (("num_hidden_layers", "n_layer", "n_layers"), found.layers, f"{found.layers} attentions"),
    ):
        for name in names:
            given = fields.get(name, size)
            if given != size:
                raise GraphgenError(
                    f"{who}: {config} has {name} {given!r}, and the graph {what}; give the folder "
                    "that belongs to it"
                )


def _error(path: Path, found: WithCache) -> float:
    """How much the logits differ, as relative RMS: padding on both sides, and calls in parts."""
    export = Session(path, options=QUIET)
    new = Session(to_bytes(optimize(found.model).model), options=QUIET)
    words = export.outputs[found.names["logits"]].dims
    random = np.random.default_rng(0)
    rows = [random.integers(0, int(words[2] or 0) if words else 0, n) for n in _LENGTHS]
    wanted = [_alone(export, found, row) for row in rows]
    longest, errors = max(_LENGTHS), []
    steps = [_FIRST, _MORE, *[1] * (longest - _FIRST - _MORE)]
    for left, parts in ((True, [longest]), (False, [longest]), (True, steps)):
        mask = np.arange(longest) < np.array(_LENGTHS)[:, None]
        mask = mask[:, ::-1] if left else mask
        ids = np.zeros(mask.shape, np.int64)
        ids[mask] = np.concatenate(rows)
        logits = _in_parts(new, ids, mask, parts)
        given = np.concatenate([x[m] for x, m in zip(logits, mask, strict=True)])
        exact = np.concatenate(wanted).astype(np.float64)
        errors.append(float(np.linalg.norm(given - exact) / np.linalg.norm(exact)))
    return max(errors, key=lambda error: (np.isnan(error), error))


def _alone(export: Session, found: WithCache, row: Array) -> Array:
    """The logits (T, V) that the file itself has for one row, without padding and past."""
    given = {"input_ids": row[None], "attention_mask": np.ones((1, len(row)))}
    given["position_ids"] = np.arange(len(row))[None]
    feeds = {}
    for ours, theirs in found.names.items():
        if theirs in export.inputs:
            kind = export.inputs[theirs]
            feeds[theirs] = given[ours].astype(kind.dtype) if ours in given else _empty(kind, 1)
    results = dict(zip(export.outputs, export(feeds), strict=True))
    logits: Array = results[found.names["logits"]][0]
    return logits


def _in_parts(new: Session, ids: Array, mask: Array, parts: Sequence[int]) -> Array:
    """The logits (R, T, V) of calls for so many tokens each, one after the other."""
    past = {n: _empty(kind, len(ids)) for n, kind in new.inputs.items() if n.startswith(PAST)}
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    found, at = [], 0
    for length in parts:
        here = slice(at, at + length)
        given = {"input_ids": ids[:, here], "position_ids": positions[:, here]}
        given["attention_mask"] = mask[:, : at + length]
        feeds: Mapping[str, Any] = {
            name: x.astype(new.inputs[name].dtype)
            for name, x in given.items()
            if name in new.inputs
        }
        results = dict(zip(new.outputs, new({**feeds, **past}), strict=True))
        past = {name: results[name.replace(PAST, PRESENT)] for name in past}
        found.append(results["logits"])
        at += length
    return np.concatenate(found, 1)


def _empty(kind: Any, rows: int) -> Array:
    """A cache without tokens."""
    _, heads, _, size = kind.dims
    return np.zeros((rows, heads, 0, size), kind.dtype)
