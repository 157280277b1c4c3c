"""The files of a folder of training artifacts, and what the training graph says of its loss."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.export.checkpoint_data import data_of
from graphgen.export.partial import in_place_of
from graphgen.export.valid import check_attributes, check_file
from graphgen.files import read_bytes

TRAINING, EVAL, OPTIMIZER = "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"
CHECKPOINT = "checkpoint"

LOSS = "graphgen.loss"
"""Metadata of training_model.onnx: a JSON object with `loss`, for labels `classes`, how many
batches to `accumulate` before an update, if more than one, `documents` if so, which `outputs` of
the model the evaluation can return, and, if adapters are trained, `lora`: rank, alpha, dropout,
rank_stabilized and the names of its modules; `base`: the weights in few bits, by name, as the
fields of `graphgen.passes.training.packed.Packed`; and `weights`, unless the loss is one with a
name: for how much a batch counts, as names of values of eval_model.onnx, or numbers; none if the
losses of batches add up, null if it is not known."""


def read_artifact(path: Path) -> bytes:
    """The bytes of one of the files. Raises GraphgenError where they cannot be read."""
    try:
        return read_bytes(path)
    except OSError as error:
        raise GraphgenError(
            f"{path} cannot be read: {error.strerror}; give a folder that gg.artifacts wrote"
        ) from None


def parse_artifact(path: Path, data: bytes) -> ir.Model:
    """The model in such a file, as it is. Raises GraphgenError where there is none."""
    try:
        check_file(proto := onnx.load_from_string(data))
        model = ir.from_proto(proto)
        check_attributes(model)
        return model
    except Exception as error:  # each malformation has its own
        reason = " ".join(str(error.__cause__ or error).split())
        raise GraphgenError(
            f"{path} is not an ONNX model, or one cut short ({reason}); write the artifacts again"
        ) from None


def loss_in(training: ir.Model, path: Path) -> dict[str, Any]:
    """What the file of a training graph says of its loss. Raises GraphgenError if it is damaged."""
    try:
        found = json.loads(training.metadata_props.get(LOSS, "{}"))
        whole = type(found.get("accumulate", 1)) is type(found.get("classes", 1)) is int
        for _, labels in found.get("labels", {}).items():
            classes, ignored, *weights = labels
            whole = whole and all(n is None or type(n) is int for n in (classes, ignored))
            for numbers in weights:
                whole = whole and len(weights) == 1 and all(type(w) is float for w in numbers)
        whole = whole and all(type(name) is str for name in [*found.get("outputs", [])])
        whole = whole and all(type(x) in (str, float) for x in found.get("weights") or [])
        moved = found.get("statistics", {})
        whole = whole and all(type(name) is str for name in [*moved, *moved.values()])
        if not (whole and isinstance(found.get("dtype", ""), str)):
            raise ValueError("of another type")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise GraphgenError(
            f"{path}: its metadata {LOSS!r} is damaged: {error}; write the artifacts again"
        ) from error
    return dict(found)


@contextmanager
def replaced(directory: Path) -> Iterator[Path]:
    """A new folder next to `directory`, which replaces it if all goes well."""
    files = {TRAINING, EVAL, OPTIMIZER, CHECKPOINT, data_of(Path(CHECKPOINT)).name}
    directory = Path(os.path.realpath(directory))  # a symbolic link stays
    try:
        if directory.exists() and (other := {p.name for p in directory.iterdir()} - files):
            raise GraphgenError(
                f"artifacts: {directory} holds {min(other)!r}, which is not a training artifact "
                "and would be replaced as a whole; choose a folder of its own"
            )
        with in_place_of(directory) as new:
            yield new
    except OSError as error:
        raise GraphgenError(
            f"artifacts: {directory} cannot be written: {error.strerror}; choose another place"
        ) from None
