"""The training checkpoint of ONNX Runtime: parameters, optimizer moments and user properties.

The file is a flatbuffer: identifier `ODTC`, version 2, schema `ort_training_checkpoint.fbs` of
onnxruntime 1.19. Generated bindings exist only inside the onnxruntime wheel, off the import path,
so the schema's eight small tables are written and read here by slot number. Files keep the order
of the dictionaries; the official runtime sorts by name when it saves and looks up by name when it
loads.

A flatbuffer ends at 2 GiB. As in the official runtime, the parameters of a larger checkpoint stand
one after another in a second file, named like the first with `.data` behind it. So do moments that
are themselves larger, which the official runtime cannot hold, and the frozen parameters of a run,
which all its checkpoints share.
"""

import math
import mmap
import os
import shutil
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import flatbuffers.builder
import flatbuffers.number_types
import flatbuffers.table
import numpy as np
import onnx_ir as ir

from graphgen.display import fields, in_bytes, on_screen
from graphgen.errors import GraphgenError
from graphgen.export.checkpoint_data import Array, Data, Unchanged, data_of, link, same
from graphgen.export.write import replacing
from graphgen.files import regular

_flatbuffers: Any = flatbuffers  # a package without types
_kinds = _flatbuffers.number_types

_IDENTIFIER, _VERSION, _GROUP = b"ODTC", 2, "group0"
_ROOM = 1800 << 20  # bytes of tensors in the flatbuffer: the official runtime's own bound
_CHECKSUM = 4
"""The slot behind those of ModuleState, which other readers skip: the CRC-32 of the second file, so
that the file of another checkpoint is noticed."""

_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(eq=False)
class OptimizerState:
    """The optimizer's moments by parameter name; `momentum1` is empty for SGD, which has only one.

    `average` is the moving average of the parameters, if one is kept, or empty. The file holds
    `learning_rate` (the official `initial_lr`) as float32.
    """

    step: int
    learning_rate: float
    momentum0: dict[str, Array]
    momentum1: dict[str, Array]
    average: dict[str, Array] = field(default_factory=dict)

    @on_screen
    def __repr__(self) -> Iterator[str]:
        moments = f"{1 + bool(self.momentum1)} moments of {len(self.momentum0):,} parameters"
        yield f"OptimizerState(step {self.step:,}, rate {self.learning_rate:.4g}, {moments})"


@dataclass(eq=False)
class Checkpoint:
    """What a training run resumes from: parameters by name, trainable and frozen ones separately.

    Tensors are float16, bfloat16, float32, float64, bool or integers of 8 to 64 bits; the official
    runtime 1.19.2 refuses float16 and bfloat16.
    Properties are int64, float32 (a Python float is rounded to it) or str.
    """

    trainable: dict[str, Array]
    frozen: dict[str, Array] = field(default_factory=dict)
    optimizer: OptimizerState | None = None
    properties: dict[str, int | float | str] = field(default_factory=dict)

    @on_screen
    def __repr__(self) -> Iterator[str]:
        size = sum(x.nbytes for group in (self.trainable, self.frozen) for x in group.values())
        yield f"Checkpoint of {in_bytes(size)}"
        yield from fields(
            trainable=_shapes(self.trainable),
            frozen=_shapes(self.frozen),
            optimizer=repr(self.optimizer),
            properties=[f"{name}: {value!r}" for name, value in self.properties.items()],
        )

    def save(self, path: str | os.PathLike[str], *, unchanged: Unchanged | None = None) -> None:
        """Write the file next to `path`, flush it to the disk, then rename it: all or nothing.

        The same contents in the same order give the same bytes. With more than 1,800 MiB of
        tensors, a second file is written, `path` with `.data` behind it. If a run has large
        parameters that stay `unchanged`, the second file has these alone, and is written once.
        Raises GraphgenError for contents that the format cannot hold (dtypes, properties),
        moments that fit no trainable parameter, or a path that cannot be written.
        """
        path = Path(path)
        self._check(path)
        parameters = len(self.trainable) + len(self.frozen)
        every = [*self.tensors()]
        if unchanged is not None and unchanged.pays and _fits(every, unchanged):
            paths = [] if unchanged.stands_at(data_of(path)) else [data_of(path)]
            with replacing("checkpoint", *paths, path, named=True) as [*second, first]:
                for file in second:
                    unchanged.put(file, data_of(path))
                first.write_bytes(_encode(self, unchanged))
        elif _fits(every):
            data = _encode(self)
            with _alone(path) as first:
                first.write_bytes(data)
        else:
            outside = Data(every[:parameters] if _fits(every[parameters:]) else every)
            with replacing("checkpoint", data_of(path), path, named=True) as [second, first]:
                outside.write(second)
                first.write_bytes(_encode(self, outside))

    def tensors(self) -> Iterator[Array]:
        """All of them: parameters, and what the optimizer keeps of each."""
        state = self.optimizer
        kept = [] if state is None else [state.momentum0, state.momentum1, state.average]
        return chain.from_iterable(x.values() for x in (self.trainable, self.frozen, *kept))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Checkpoint":
        """Read a file written by `save` or by the official runtime; arrays are writable copies.

        Raises GraphgenError if the file, or the one beside it, is missing, not a checkpoint,
        damaged or cut short, of another version, or if it has no tensors.
        """
        path = Path(path)
        data = _mapped(path, path)
        if data[4:8] != _IDENTIFIER:
            raise GraphgenError(
                f"checkpoint {path}: not an ONNX Runtime training checkpoint (no 'ODTC' at byte 4);"
                " pass the file named 'checkpoint' of a folder of training artifacts"
            )
        try:
            root = _Record(data, int.from_bytes(data[:4], "little"))
            checkpoint = _decode(root, path)
        except (ValueError, TypeError, struct.error) as error:
            raise GraphgenError(
                f"checkpoint {path}: damaged or cut short ({error}); take an earlier one"
            ) from None
        checkpoint._check(path)
        return checkpoint

    def _check(self, path: Path) -> None:
        """The official runtime looks all tensors up by name and trusts their shapes."""
        if both := self.trainable.keys() & self.frozen.keys():
            raise GraphgenError(
                f"checkpoint {path}: {min(both)!r} is both trainable and frozen; name it once"
            )
        if self.optimizer is None:
            return
        first, second = self.optimizer.momentum0, self.optimizer.momentum1
        if second and first.keys() != second.keys():
            raise GraphgenError(
                f"checkpoint {path}: {min(first.keys() ^ second.keys())!r} has only one of "
                "momentum0 and momentum1; give both moments of every parameter, or no momentum1"
            )
        if (average := self.optimizer.average) and first.keys() != average.keys():
            raise GraphgenError(
                f"checkpoint {path}: {min(first.keys() ^ average.keys())!r} has no average, or no "
                "momentum0; give both of every parameter"
            )
        for name, moment in [*first.items(), *second.items(), *average.items()]:
            parameter = self.trainable.get(name)
            if parameter is None or parameter.shape != moment.shape:
                wanted = "not trainable" if parameter is None else f"{parameter.shape}"
                raise GraphgenError(
                    f"checkpoint {path}: the moment of {name!r} is {moment.shape}, but the "
                    f"parameter is {wanted}; give moments in the shapes of trainable parameters"
                )


def copy(source: Path, target: Path) -> None:
    """Let a checkpoint stand at another place, too. A second file is shared, if the disk can."""
    if not _is_in_two(source):
        with _alone(target) as first:
            shutil.copyfile(source, first)
        return
    paths = [] if same(data_of(source), data_of(target)) else [data_of(target)]
    with replacing("checkpoint", *paths, target, named=True) as [*second, first]:
        for file in second:
            link(data_of(source), file)
        shutil.copyfile(source, first)


def _fits(tensors: Iterable[Array], outside: Data | None = None) -> bool:
    """Whether a flatbuffer can hold the tensors that do not stand `outside`."""
    apart = () if outside is None else outside.arrays
    return sum(x.nbytes for x in tensors) - sum(x.nbytes for x in apart) <= _ROOM


@contextmanager
def _alone(path: Path) -> Iterator[Path]:
    """Replace a checkpoint by one without a second file."""
    larger = data_of(path).is_file() and _is_in_two(path)  # else the second is of something else
    with replacing("checkpoint", path) as [file]:
        yield file
    if larger:
        data_of(path).unlink(missing_ok=True)


def _mapped(path: Path, first: Path, access: int = mmap.ACCESS_READ) -> bytes | mmap.mmap:
    try:
        with regular(path).open("rb") as file:
            empty = os.fstat(file.fileno()).st_size == 0  # mmap refuses an empty file
            return b"" if empty else mmap.mmap(file.fileno(), 0, access=access)
    except OSError as error:
        what = f"{path.name}, which has its tensors, " if path != first else ""
        raise GraphgenError(
            f"checkpoint {first}: {what}cannot be read: {error.strerror}; "
            "pass the path of an ONNX Runtime training checkpoint"
        ) from None


def _is_in_two(path: Path) -> bool:
    """Whether a checkpoint stands there that has a second file."""
    try:
        data = _mapped(path, path)
        module = _Record(data, int.from_bytes(data[:4], "little")).record(1)
        found = module is not None and module.number(3, _kinds.BoolFlags)
    except (GraphgenError, ValueError, TypeError, struct.error):
        return False
    return data[4:8] == _IDENTIFIER and bool(found)


# Writing. A flatbuffer is built from its leaves to its root; a field is (kind, value) at the slot
# of its position, and 0, every field's default, is left out.

_Builder = _flatbuffers.Builder
_INT32, _INT64 = _Builder.PrependInt32Slot, _Builder.PrependInt64Slot
_FLOAT32, _OFFSET = _Builder.PrependFloat32Slot, _Builder.PrependUOffsetTRelativeSlot
_BOOL = _Builder.PrependBoolSlot


def _place_slot(builder: Any, slot: int, value: int, _: int) -> None:
    """external_data_offset, the one field whose default is another: -1."""
    builder.PrependInt64Slot(slot, value, -1)


def _encode(checkpoint: Checkpoint, outside: Data | None = None) -> memoryview:
    optimizer, places = checkpoint.optimizer, {} if outside is None else outside.places
    sizes = [array.nbytes * (id(array) not in places) for array in checkpoint.tensors()]
    # Growing the buffer would copy it: reserve what the tensors take, and some for each table.
    builder = _Builder(1024 + 512 * len(sizes) + sum(sizes))
    optimizers = [] if optimizer is None else [_optimizer(builder, optimizer, places)]
    module = _table(
        builder,
        (_OFFSET, _tensors(builder, checkpoint.trainable, places)),
        (_OFFSET, _tensors(builder, checkpoint.frozen, places)),
        (_BOOL, False),  # is_nominal_state
        (_BOOL, outside is not None),
        (_INT64, 0 if outside is None else outside.checksum),
    )
    root = _table(
        builder,
        (_INT32, _VERSION),
        (_OFFSET, module),
        (_OFFSET, _vector(builder, optimizers)),
        (_OFFSET, _properties(builder, checkpoint.properties)),
    )
    builder.Finish(root, _IDENTIFIER)
    return memoryview(builder.Bytes)[builder.Head() :]


def _table(builder: Any, *fields: tuple[Any, int | float]) -> int:
    builder.StartObject(len(fields))
    for slot, (prepend, value) in enumerate(fields):
        prepend(builder, slot, value, 0)
    return int(builder.EndObject())


def _vector(builder: Any, tables: Sequence[int]) -> int:
    builder.StartVector(4, len(tables), 4)
    for table in reversed(tables):
        builder.PrependUOffsetTRelative(table)
    return int(builder.EndVector())


def _tensors(builder: Any, tensors: Mapping[str, Array], places: Mapping[int, int]) -> int:
    return _vector(builder, [_tensor(builder, n, array, places) for n, array in tensors.items()])


def _tensor(builder: Any, name: str, array: Array, places: Mapping[int, int]) -> int:
    try:
        data_type = ir.DataType.from_numpy(array.dtype)
    except TypeError:
        data_type = ir.DataType.UNDEFINED
    # The schema has ONNX's numbers; the official runtime knows no dtype after BFLOAT16.
    if not 0 < data_type <= ir.DataType.BFLOAT16 or data_type is ir.DataType.STRING:
        raise GraphgenError(
            f"checkpoint: tensor {name!r} has dtype {array.dtype.str}, which the format cannot "
            "hold; convert it to a little-endian number of whole bytes, such as float32"
        )
    place = places.get(id(array), -1)
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if place < 0 else None
    return _table(
        builder,
        (_OFFSET, builder.CreateString(name)),
        (_OFFSET, 0),  # doc_string
        (_OFFSET, builder.CreateNumpyVector(np.array(array.shape, dtype="<i8"))),
        (_INT32, data_type.value),
        (_OFFSET, 0 if raw is None else builder.CreateNumpyVector(raw)),
        (_OFFSET, 0),  # string_data
        (_place_slot, place),
    )


def _optimizer(builder: Any, state: OptimizerState, places: Mapping[int, int]) -> int:
    parameters = []
    for name in state.momentum0:
        moments = {"momentum0": state.momentum0[name]}
        if state.momentum1:
            moments["momentum1"] = state.momentum1[name]
        if state.average:
            moments["average"] = state.average[name]
        tensors = _tensors(builder, moments, places)
        parameters.append(
            _table(builder, (_OFFSET, builder.CreateString(name)), (_OFFSET, tensors))
        )
    return _table(
        builder,
        (_OFFSET, builder.CreateString(_GROUP)),
        (_INT64, state.step),
        (_FLOAT32, state.learning_rate),
        (_OFFSET, _vector(builder, parameters)),
    )


def _properties(builder: Any, properties: Mapping[str, int | float | str]) -> int:
    ints, floats, strings = [], [], []
    for name, value in properties.items():
        key = (_OFFSET, builder.CreateString(name))
        match value:
            case str():
                strings.append(_table(builder, key, (_OFFSET, builder.CreateString(value))))
            case int() if -(2**63) <= value < 2**63:
                ints.append(_table(builder, key, (_INT64, int(value))))
            case float() if not _FLOAT32_MAX < abs(value) < math.inf:
                floats.append(_table(builder, key, (_FLOAT32, float(value))))
            case _:
                raise GraphgenError(
                    f"checkpoint: property {name!r} is {value!r} of type {type(value).__name__}; "
                    "give a str, an int of 64 bits or a float in the range of float32"
                )
    vectors = [(_OFFSET, _vector(builder, tables)) for tables in (ints, floats, strings)]
    return _table(builder, *vectors)


# Reading. Nothing in the file is trusted before it is compared with the file's size.


def _shapes(arrays: Mapping[str, Array]) -> list[str]:
    return [f"{name}: {array.dtype}{[*array.shape]}" for name, array in arrays.items()]


class _Record:
    """One table of the file, read by slot; any reference outside the file is an error."""

    def __init__(self, data: bytes | mmap.mmap, position: int) -> None:
        self._data = data
        self._table = _flatbuffers.table.Table(data, position)

    def number(self, slot: int, kind: Any, default: int = 0) -> Any:
        return self._table.GetSlot(4 + 2 * slot, default, kind)

    def array(self, slot: int, dtype: str = "u1") -> Array:
        """The vector at `slot` as a view of the file; empty when the field is absent."""
        offset = self._table.Offset(4 + 2 * slot)
        if not offset:
            return np.empty(0, dtype)
        start, count = self._table.Vector(offset), self._table.VectorLen(offset)
        return np.frombuffer(self._data, dtype, count, start)

    def text(self, slot: int) -> str:
        return self.array(slot).tobytes().decode()

    def record(self, slot: int) -> "_Record | None":
        offset = self._table.Offset(4 + 2 * slot)
        if not offset:
            return None
        return _Record(self._data, self._table.Indirect(self._table.Pos + offset))

    def records(self, slot: int) -> "Iterator[_Record]":
        offset = self._table.Offset(4 + 2 * slot)
        if offset:
            start = self._table.Vector(offset)
            for index in range(self.array(slot, "<u4").size):
                yield _Record(self._data, self._table.Indirect(start + 4 * index))


def _decode(root: _Record, path: Path) -> Checkpoint:
    version = root.number(0, _kinds.Int32Flags)
    if version != _VERSION:
        raise GraphgenError(
            f"checkpoint {path}: its version is {version}; it must be {_VERSION}: "
            "save it again with onnxruntime-training 1.19"
        )
    module, bag = root.record(1), root.record(3)
    checkpoint = Checkpoint({})
    data: bytes | mmap.mmap = b""
    if module is not None:
        if module.number(2, _kinds.BoolFlags):
            raise GraphgenError(
                f"checkpoint {path}: its tensors are left out (nominal); save the complete "
                "checkpoint"
            )
        if module.number(3, _kinds.BoolFlags):
            data = _mapped(data_of(path), path, mmap.ACCESS_COPY)  # each page once it is changed
            if module.number(_CHECKSUM, _kinds.Int64Flags) not in (0, zlib.crc32(data)):
                raise GraphgenError(
                    f"checkpoint {path}: {data_of(path).name} is not the file that was written "
                    "with it, or damaged; copy both from one place"
                )
        checkpoint.trainable = _read_tensors(module.records(0), data)
        checkpoint.frozen = _read_tensors(module.records(1), data)
    for group in root.records(2):
        if group.text(0) != _GROUP or checkpoint.optimizer is not None:
            raise ValueError(f"optimizer group {group.text(0)!r}, wanted one {_GROUP!r}")
        checkpoint.optimizer = _read_optimizer(group, data)
    if bag is not None:
        entries: list[tuple[_Record, int | float | str]] = [
            *((p, int(p.number(1, _kinds.Int64Flags))) for p in bag.records(0)),
            *((p, float(p.number(1, _kinds.Float32Flags))) for p in bag.records(1)),
            *((p, p.text(1)) for p in bag.records(2)),
        ]
        checkpoint.properties = {entry.text(0): value for entry, value in entries}
    return checkpoint


def _read_tensors(records: Iterator[_Record], data: bytes | mmap.mmap) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    for record in records:
        name, shape = record.text(0), record.array(2, "<i8").tolist()
        if name in tensors:
            raise ValueError(f"two tensors named {name!r}")
        if min(shape, default=0) < 0:  # which reshape would infer
            raise ValueError(f"tensor {name!r} of shape {shape}")
        dtype = ir.DataType(record.number(3, _kinds.Int32Flags)).numpy()
        raw, place = record.array(4), record.number(6, _kinds.Int64Flags, -1)
        if place >= 0:
            raw = np.frombuffer(data, "u1", math.prod(shape) * dtype.itemsize, place)
        else:
            raw = raw.copy()
        tensors[name] = raw.view(dtype).reshape(shape)
    return tensors


def _read_optimizer(group: _Record, data: bytes | mmap.mmap) -> OptimizerState:
    state = OptimizerState(
        step=int(group.number(1, _kinds.Int64Flags)),
        learning_rate=float(group.number(2, _kinds.Float32Flags)),
        momentum0={},
        momentum1={},
    )
    for record in group.records(3):
        name, moments = record.text(0), _read_tensors(record.records(1), data)
        if name in state.momentum0 or not moments.keys() <= {"momentum0", "momentum1", "average"}:
            raise ValueError(f"moments {sorted(moments)} of {name!r}")
        for key, moment in moments.items():
            getattr(state, key)[name] = moment
    return state
