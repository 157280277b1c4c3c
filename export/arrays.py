"""Arrays in .npy and .npz files: what to feed a model, and what came out."""

import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.files import regular
from graphgen.operands import Array


def feeds(given: Sequence[str]) -> dict[str, Array]:
    """Arrays by input name, from `NAME=x.npy` and `x.npz`.

    Raises GraphgenError for others, and for a name that is given twice.
    """
    found: dict[str, Array] = {}
    for item in given:
        name, equals, path = item.partition("=")
        if equals and path.endswith(".npy"):
            own = {name: _read(path)}
        elif item.endswith(".npz"):
            own = read_npz(item)
        else:
            raise GraphgenError(f"--input {item}: give NAME=FILE.npy, or FILE.npz with all names")
        if twice := found.keys() & own.keys():
            raise GraphgenError(f"--input has {min(twice)} twice; give each array once")
        found |= own
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


def write_npz(stream: Any, arrays: Mapping[str, Array]) -> None:
    """Write arrays of any names, which `np.savez` would take for its own arguments.

    Texts are written as such: nothing is pickled.
    """
    with zipfile.ZipFile(stream, "w") as archive:
        for name, array in arrays.items():
            plain = array.astype(str) if array.dtype == object else array
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, plain, allow_pickle=False)


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
