"""Arrays in .npy, .npz and .jsonl files: what to feed a model, and what came out."""

import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.export.named_losses import IGNORED, LABELS
from graphgen.files import read_bytes, regular
from graphgen.operands import Array
from graphgen.plan import TensorType

Column: TypeAlias = Array | list[Array]
"""Samples: an array, samples first, or a list of arrays of different sizes."""


def feeds(given: Sequence[str]) -> dict[str, Array]:
    """Arrays by input name, from `NAME=x.npy` and `x.npz`. Raises GraphgenError for others."""
    found: dict[str, Array] = {}
    for item in given:
        name, equals, path = item.partition("=")
        if equals and path.endswith(".npy"):
            found[name] = _read(path)
        elif item.endswith(".npz"):
            found |= read_npz(item)
        else:
            raise GraphgenError(f"--input {item}: give NAME=FILE.npy, or FILE.npz with all names")
    return found


def read_npz(path: str) -> dict[str, Array]:
    """All arrays of an .npz file by name. Raises GraphgenError if it is not one, or damaged."""
    found = _read(path)
    if not isinstance(found, np.lib.npyio.NpzFile):
        raise GraphgenError(f"{path} holds one array without a name; give an .npz file")
    try:
        with found:
            return dict(found)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise GraphgenError(f"{path} is damaged: {error}; write it again") from error


def read_jsonl(
    path: Path, inputs: Mapping[str, TensorType], *, pad: bool = False
) -> dict[str, Column]:
    """The samples of a file of JSON lines by input name; ragged ones, only with `pad`, as lists.

    Raises GraphgenError for a line that is not an object of the `inputs`, or not like the first.
    """
    rows: dict[str, list[Array]] = {name: [] for name in inputs}
    try:
        lines = read_bytes(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise GraphgenError(f"{path} cannot be read: {error}; give a file of JSON lines") from error
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
            if not isinstance(found, dict) or found.keys() != inputs.keys():
                raise ValueError(f"not an object with {', '.join(inputs)}")
            for name, value in found.items():
                array = _to_array(name, value, inputs[name].dtype)
                if rows[name] and array.ndim != rows[name][0].ndim:
                    raise ValueError(f"{name!r} is not nested as in the first line")
                if rows[name] and array.shape != rows[name][0].shape and not pad:
                    raise ValueError(
                        f"{name!r} has shape {list(array.shape)}, but {list(rows[name][0].shape)} "
                        f"in the first line; --pad pads with 0, labels with {IGNORED}"
                    )
                rows[name].append(array)
        except (ValueError, RecursionError) as error:
            raise GraphgenError(f"{path}, line {number}: {error}") from error
    labels = inputs.get(LABELS)
    if pad and labels is not None and np.dtype(labels.dtype).kind == "f":
        raise GraphgenError(f"{path}: --pad cannot mark {LABELS} of {labels.dtype} as ignored")
    alike = {name: len({array.shape for array in column}) == 1 for name, column in rows.items()}
    return {name: np.stack(column) if alike[name] else column for name, column in rows.items()}


def _to_array(name: str, value: Any, dtype: Any) -> Array:
    """Numbers from JSON in the dtype of the input, if it can hold all of them."""
    try:
        array = np.asarray(value)
    except ValueError:  # nested lists of different lengths
        array = np.asarray(None)
    if array.dtype.kind in "biuf":
        with np.errstate(over="ignore"):
            converted = array.astype(dtype)
        if converted.dtype.kind == "f" and np.array_equal(
            np.isfinite(array), np.isfinite(converted)
        ):
            return converted
        if np.array_equal(array, converted):
            return converted
    raise ValueError(f"{name!r} is not a list of numbers that fit {dtype}")


def _read(path: str) -> Any:
    try:
        return np.load(regular(path), allow_pickle=False)
    except OSError as error:
        raise GraphgenError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise GraphgenError(
            f"{path} is not a file of numpy arrays: {error}; write it with np.save or np.savez"
        ) from error


def statistics(array: Array) -> dict[str, Any]:
    """dtype, shape, and the least, the greatest and the mean of the finite elements."""
    row: dict[str, Any] = {"dtype": str(array.dtype), "shape": list(array.shape)}
    numbers = array.astype(np.float64) if array.dtype.kind not in "OUS" else np.zeros(0)
    finite = numbers[np.isfinite(numbers)]
    for name, function in (("min", np.min), ("max", np.max), ("mean", np.mean)):
        row[name] = float(function(finite)) if finite.size else None
    return {**row, "not_finite": int(numbers.size - finite.size)}
