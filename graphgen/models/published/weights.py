"""The weights of a published checkpoint, read lazily from safetensors, without torch or pickle.

The format: 8 bytes, little endian, hold the length N of a header; N bytes of JSON give the dtype,
the shape and the offsets after the header of each tensor
(https://github.com/huggingface/safetensors).
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.files import present
from graphgen.models.published.config import read_json
from graphgen.operands import Array

_DTYPES = {
    "F64": ir.DataType.DOUBLE,
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "I64": ir.DataType.INT64,
    "I32": ir.DataType.INT32,
    "I16": ir.DataType.INT16,
    "I8": ir.DataType.INT8,
    "U8": ir.DataType.UINT8,
    "BOOL": ir.DataType.BOOL,
}
_HEADER = 100_000_000  # bytes, the format's own limit
_PIECE = 1 << 22  # elements to compare at once

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Weight:
    """A tensor in a file: nothing is read before `read`, nor kept after it."""

    path: Path
    name: str
    dtype: ir.DataType
    shape: tuple[int, ...]
    offset: int

    def read(self) -> Array:
        """The array."""
        array: Array = self._part(0, math.prod(self.shape)).reshape(self.shape)
        return array

    def equals(self, other: "Weight") -> bool:
        """Whether both hold the same numbers, read piece by piece."""
        count = math.prod(self.shape)
        return self.shape == other.shape and all(
            np.array_equal(self._part(at, end), other._part(at, end))
            for at in range(0, count, _PIECE)
            for end in [min(at + _PIECE, count)]
        )

    def _part(self, start: int, end: int) -> Array:
        kind = self.dtype.numpy()
        at = self.offset + start * kind.itemsize
        read: Array = np.fromfile(self.path, kind, end - start, offset=at)
        if read.size != end - start:
            raise GraphgenError(f"{self.path} has become shorter; build again")
        return read


def lazily(
    shape: tuple[int, ...], dtype: ir.DataType, name: str, make: Callable[[], Array]
) -> ir.LazyTensor:
    """A tensor whose array is made each time it is needed, and converted to `dtype`.

    Making it raises GraphgenError for numbers that are too large for `dtype`.
    """

    def evaluate() -> ir.TensorProtocol:
        given = make()
        with np.errstate(over="ignore"):
            array = given.astype(dtype.numpy(), order="C", copy=False)
        changed = array.dtype != given.dtype
        if changed and np.isinf(array).any() and not np.isinf(given).any():
            raise GraphgenError(
                f"{name}: {np.abs(given).max():g} is too large for {dtype.name.lower()}; choose "
                "another --dtype"
            )
        return ir.Tensor(array, dtype, shape=ir.Shape(shape), name=name)

    return ir.LazyTensor(evaluate, dtype, ir.Shape(shape), name=name)


def read_weights(folder: Path) -> dict[str, Weight]:
    """The tensors of model.safetensors, or of all files of its index, by name.

    Raises GraphgenError if there is neither, if a file is truncated or damaged, if a shard is
    missing or outside the folder, or if the index and the files differ.
    """
    if present(folder / SINGLE):
        return {weight.name: weight for weight in _read_header(folder / SINGLE)}
    if not present(folder / INDEX):
        others = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".h5", ".pt"))
        hint = f"; {', '.join(others)}: convert to safetensors first" if others else ""
        raise GraphgenError(f"{folder} has no {SINGLE} and no {INDEX}{hint}")
    listed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(f, str) for f in listed.values()):
        raise GraphgenError(f"{folder / INDEX}: weight_map must give a file for each weight")
    found: dict[str, Weight] = {}
    for file in sorted(set(listed.values())):
        if Path(file).name != file:
            raise GraphgenError(f"{folder / INDEX}: {file!r} is not the name of a file next to it")
        if not present(folder / file):
            raise GraphgenError(f"{folder / file} is missing; {INDEX} lists it")
        found |= {weight.name: weight for weight in _read_header(folder / file)}
    if absent := sorted(set(listed) - set(found)):
        raise GraphgenError(
            f"{folder / INDEX} lists weights that no file has: {_shortened(absent)}"
        )
    return found


def _read_header(path: Path) -> Iterator[Weight]:
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER):
            raise GraphgenError(
                f"{path} has {size:,} bytes and its header {length:,}: it is truncated, or not a "
                "safetensors file; download it again"
            )
        text = stream.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = []
        for name, entry in header.items():
            start, end = map(_size, entry["data_offsets"])
            entries.append(
                (name, str(entry["dtype"]), tuple(map(_size, entry["shape"])), start, end)
            )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise GraphgenError(
            f"{path}: its header is damaged ({error!r}); download it again"
        ) from error
    for name, kind, shape, start, end in entries:
        if kind not in _DTYPES:
            raise GraphgenError(
                f"{path}: {name} is {kind}; supported are {', '.join(_DTYPES)}: convert it"
            )
        dtype = _DTYPES[kind]
        if end - start != math.prod(shape) * dtype.itemsize or 8 + length + end > size:
            raise GraphgenError(
                f"{path}: {name} is {kind}{list(shape)} at {start} to {end} of {size - 8 - length} "
                "bytes: the file is truncated or damaged; download it again"
            )
        yield Weight(path, name, dtype, shape, 8 + length + start)


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a size")
    return value


def _shortened(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
