"""GGUF files: one file with the fields, the vocabulary and the tensors of a model.

The format: a header of sizes, fields and tensors' names, then the tensors
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.files import present, regular
from graphgen.models.published.gguf_tensors import FEW, FLOATS, OTHERS, FewTensor, FloatTensor
from graphgen.models.published.weights import INDEX, SINGLE
from graphgen.safetensors import Weight, overlap_in

_SCALARS: dict[int, str] = dict(
    zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
)
_FLOAT, _STRING, _ARRAY = 6, 8, 9
_LONGEST = 1 << 24  # bytes of a string
_COUNT = "split.count"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class Gguf(NamedTuple):
    """The content of a file: arrays of numbers are NumPy's, of strings lists; tensors are lazy."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, Weight]


def gguf_in(folder: Path) -> Path | None:
    """The GGUF file of a folder without safetensors. Raises GraphgenError if there are several."""
    found = sorted(folder.glob("*.gguf"))
    if not found or present(folder / SINGLE) or present(folder / INDEX):
        return None
    parts = all(_PART.search(path.name) for path in found)
    if len({_PART.sub("", path.name) for path in found}) > 1 or (len(found) > 1 and not parts):
        raise GraphgenError(f"{folder} has {len(found)} .gguf files; name one with --like {folder}")
    return found[0]


def open_gguf(path: Path) -> Gguf:
    """A file's fields and tensors, and those of the other parts of a model in several files.

    Raises GraphgenError if one is damaged, missing, or of types that are not read.
    """
    file = _opened(path)
    count, name = file.fields.get(_COUNT, 1), _PART.search(path.name)
    if count in (0, 1):
        return file
    if name is None or int(name[2]) != count:
        problem = f"is one of {count} files, and its name does not end in -00001-of-{count:05}.gguf"
        raise GraphgenError(f"{path} {problem}; give them the names that they had")
    paths = [
        path.with_name(_PART.sub(f"-{i + 1:05}-of-{name[2]}.gguf", path.name)) for i in range(count)
    ]
    if absent := [one for one in paths if not present(one)]:
        more = f", and so are {len(absent) - 1} more" * (len(absent) > 1)
        raise GraphgenError(f"{absent[0]} is missing{more}; {path.name} is one of {count} files")
    parts, tensors = [_opened(one) for one in paths], dict[str, Weight]()
    for number, part in enumerate(parts):
        if (part.fields.get(_COUNT), part.fields.get("split.no")) != (count, number):
            problem = f"is not part {number + 1} of {count}, as its name says"
            raise GraphgenError(f"{part.path} {problem}; download it again")
        if twice := tensors.keys() & part.tensors.keys():
            raise GraphgenError(
                f"{part.path}: {min(twice)} is in another part; download them again"
            )
        tensors |= part.tensors
    if parts[0].fields.get("split.tensors.count", len(tensors)) != len(tensors):
        raise GraphgenError(
            f"{path}: its parts have {len(tensors)} tensors, not as many as it says"
        )
    return Gguf(path, parts[0].fields, tensors)


def _opened(path: Path) -> Gguf:
    try:
        with regular(path).open("rb") as stream:
            return _Reader(stream, path).read()
    except OSError as error:
        raise GraphgenError(f"{path} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, KeyError, OverflowError) as error:
        problem = f"its header is damaged ({error!r:.80}), or not of GGUF 2 or 3"
        raise GraphgenError(f"{path}: {problem}; download it again") from None


class _Reader:
    """Reads a header; no count in it takes more memory than the file has bytes."""

    def __init__(self, stream: BinaryIO, path: Path):
        self.stream, self.path = stream, path
        self.size = os.fstat(stream.fileno()).st_size

    def take(self, form: str) -> Any:
        [value] = struct.unpack(f"<{form}", self.bytes(struct.calcsize(f"<{form}")))
        return value

    def bytes(self, count: int) -> bytes:
        if count > self.size - self.stream.tell():
            raise ValueError(f"{count} bytes more than there are")
        return self.stream.read(count)

    def string(self) -> str:
        if (length := self.take("Q")) > _LONGEST:
            raise ValueError(f"a string of {length} bytes")
        content = self.bytes(length)
        try:
            return content.decode()
        except UnicodeDecodeError:
            problem = f"holds {content[:24]!r}, a string that is not UTF-8, as the format wants it"
            raise GraphgenError(f"{self.path} {problem}; convert the model again") from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _FLOAT:  # of the shortest decimals that mean the same: 1e-5, not 9.99999975e-6
            return float(str(np.float32(self.take("f"))))
        if kind != _ARRAY:
            return self.take(_SCALARS[kind])
        kind, count = self.take("I"), self.take("Q")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        dtype = np.dtype(f"<{_SCALARS[kind]}")
        return np.frombuffer(self.bytes(count * dtype.itemsize), dtype)

    def read(self) -> Gguf:
        if self.bytes(4) != b"GGUF" or self.take("I") not in (2, 3):
            raise ValueError("no GGUF")
        tensors, count = self.take("Q"), self.take("Q")
        fields = {self.string(): self.value(self.take("I")) for _ in range(count)}
        if len(fields) < count:
            raise ValueError("two fields of one name")
        if type(fields.get(_COUNT, 1)) is not int:
            raise ValueError(f"{_COUNT} is no number")
        entries = []
        for _ in range(tensors):
            name, ndim = self.string(), self.take("I")
            if not 1 <= ndim <= 4:
                raise ValueError(f"{name} of {ndim} dimensions")
            shape = tuple(self.take("Q") for _ in range(ndim))[::-1]
            entries.append((name, shape, self.take("I"), self.take("Q")))
        align = fields.get("general.alignment", 32)
        if type(align) is not int or align < 1:
            raise ValueError(f"an alignment of {align!r}")
        start = -(-self.stream.tell() // align) * align
        if any(at % align for *_, at in entries):
            raise ValueError(f"a tensor that does not start at a multiple of {align} bytes")
        found, spans = dict[str, Weight](), []
        for name, shape, kind, at in entries:
            found[name], size = self.tensor(name, shape, kind, start + at)
            spans.append((at, at + size, name))
        if len(found) < len(entries):
            raise ValueError("two tensors of one name")
        if problem := overlap_in(spans):
            raise ValueError(problem)
        return Gguf(self.path, fields, found)

    def tensor(self, name: str, shape: tuple[int, ...], kind: int, at: int) -> tuple[Weight, int]:
        """The tensor, and how many bytes it takes."""
        made: FloatTensor | FewTensor
        if kind in FLOATS:
            made = FloatTensor(self.path, name, FLOATS[kind], shape, at)
        elif kind in FEW and len(shape) in (2, 3) and shape[-1] % FEW[kind][1] == 0:
            made = FewTensor(self.path, name, ir.DataType.FLOAT, shape, at, kind=kind)
        else:
            few = [name for name, *_ in FEW.values()]
            own = FEW[kind][0] if kind in FEW else OTHERS.get(kind, str(kind))
            raise GraphgenError(
                f"{self.path}: {name!r} {list(shape)} is of type {own}; supported are F32, F16, "
                f"BF16, and for matrices of whole blocks {', '.join(few)}: give a file of these"
            )
        if at + made.stored > self.size:
            raise ValueError(f"{name} ends beyond the file")
        return made, made.stored
