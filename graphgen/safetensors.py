"""Tensors in safetensors files, read lazily, without torch or pickle.

The format: 8 bytes, little endian, hold the length N of a header; N bytes of JSON give the dtype,
the shape and the offsets after the header of each tensor
(https://github.com/huggingface/safetensors).
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from graphgen.errors import GraphgenError
from graphgen.files import parse_json

Array = NDArray[Any]

_DTYPES = {
    "F64": ir.DataType.DOUBLE,
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "I64": ir.DataType.INT64,
    "I32": ir.DataType.INT32,
    "I16": ir.DataType.INT16,
    "I8": ir.DataType.INT8,
    "U32": ir.DataType.UINT32,
    "U8": ir.DataType.UINT8,
    "BOOL": ir.DataType.BOOL,
    "F8_E4M3": ir.DataType.FLOAT8E4M3FN,
    "F8_E5M2": ir.DataType.FLOAT8E5M2,
    "F8_E8M0": ir.DataType.FLOAT8E8M0,
}
_HEADER = 100_000_000  # bytes, the format's own limit
_PIECE = 1 << 22  # elements to compare at once


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
        if self.shape != other.shape:
            return False
        if {type(self), type(other)} != {Weight}:  # one is made of what stands in its file
            return np.array_equal(self.read(), other.read())
        count = math.prod(self.shape)
        return all(
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


def read_header(path: Path) -> list[Weight]:
    """The tensors in a file. Raises GraphgenError if it is damaged or cut short."""
    return read_headers(path)[0]


def read_headers(path: Path) -> tuple[list[Weight], dict[str, Any]]:
    """The tensors in a file, and its metadata."""
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
        header = parse_json(text)
        metadata = dict(header.pop("__metadata__", None) or {})
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
    found = []
    for name, kind, shape, start, end in entries:
        if kind not in _DTYPES:
            raise GraphgenError(
                f"{path}: {name} is {kind}; supported are {', '.join(_DTYPES)}: convert it"
            )
        dtype = _DTYPES[kind]
        if 8 * (end - start) != math.prod(shape) * dtype.bitwidth or 8 + length + end > size:
            raise GraphgenError(
                f"{path}: {name} is {kind}{list(shape)} at {start} to {end} of {size - 8 - length} "
                "bytes: the file is truncated or damaged; download it again"
            )
        found.append(Weight(path, name, dtype, shape, 8 + length + start))
    if problem := overlap_in((start, end, name) for name, *_, start, end in entries):
        raise GraphgenError(f"{path}: {problem}: the file is damaged; download it again")
    return found, metadata


def overlap_in(spans: Iterable[tuple[int, int, str]]) -> str:
    """Which two tensors share bytes, of their starts, ends and names; "" if none do."""
    ordered = sorted(span for span in spans if span[0] < span[1])
    for (_, end, one), (start, _, other) in pairwise(ordered):
        if start < end:
            return f"{one!r} and {other!r} share bytes"
    return ""


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a size")
    return value


def to_bytes(arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> bytes:
    """The content of a file with these arrays, and words about it."""
    stream = BytesIO()
    write(stream, {name: ir.Tensor(array) for name, array in arrays.items()}, metadata)
    return stream.getvalue()


def write(
    stream: BinaryIO,
    tensors: Mapping[str, ir.TensorProtocol],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file with these tensors, one read after the other; `metadata` are words about it."""
    kinds = {dtype: kind for kind, dtype in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        ends = [end, end := end + tensor.nbytes]
        shape = tensor.shape.numpy()
        header[name] = {"dtype": kinds[tensor.dtype], "shape": shape, "data_offsets": ends}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        stream.write(np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data)


def shards(
    tensors: Mapping[str, ir.TensorProtocol], most: int
) -> list[Mapping[str, ir.TensorProtocol]]:
    """The tensors in order, apart where the next one would exceed this many bytes."""
    parts, size = [dict[str, ir.TensorProtocol]()], 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > most:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    return [*parts]
