"""Writing ONNX files, complete or not at all: to a temporary file, which is then renamed."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from graphgen.arguments import checked
from graphgen.edit import tidy
from graphgen.errors import GraphgenError, unwrapped, user_line
from graphgen.expansion import inner_graphs
from graphgen.export.functions import attach_functions
from graphgen.export.opset import OLDEST, hide_from_checker, in_memory, stamp, without_weights
from graphgen.export.outputs import declared_shapes, omitted_outputs, shield_outputs
from graphgen.export.partial import beside, in_turn
from graphgen.export.protobuf import GRAPH, INITIALIZER, RAW_DATA, field
from graphgen.export.read import IN_BYTES, PAGE
from graphgen.files import path_of
from graphgen.garbage import uncollected
from graphgen.graph import ModelLike, bytes_of, model_in
from graphgen.infer import OPSET, schema_of
from graphgen.maps import to_proto
from graphgen.runtime import OPTIONS_KEY
from graphgen.traits import NONE, TRAITS, Trait

_LARGE = 3 << 29
"""Tensors with more bytes (1.5 GiB) go next to the model; protobuf ends at 2 GiB."""


_LIMIT = (1 << 31) - 1
"""The most bytes that protobuf reads."""


_GENERATED = re.compile(r"\b_d\d+\b")


@checked
def export(
    model: ModelLike,
    path: str | os.PathLike[str],
    *,
    external_data: bool | None = None,
    watch: Callable[[Any], Iterable[Any]] = iter,
    written: "Written | None" = None,
) -> Path:
    """Write a model as ONNX that any runtime reads, with the lowest opset and IR it can have.

    Args:
        model: An `ir.Model`, or what `optimize` returns; its session options are written too.
        path: The file; a regular file there is replaced once the new one is complete.
        external_data: Put weights into `<file>_data` next to it, as m.onnx_data; by default above
            1.5 GiB.
        watch: Wraps the list of weights that go next to it, like `rich.progress.track`.
        written: Weights that lie next to graphs of this folder already, which are not written
            again; those that are written now are added.

    The same model gives the same bytes. Operators of our own are written with their bodies, as
    functions. Raises GraphgenError, and leaves everything as it was, if the model is not valid
    or the file cannot be written.
    """
    path = path_of(path, "export")
    who = f"export({path.name})"
    ready = _prepare(model, who)
    size = sum(bytes_of(tensor) for _, tensor in tensors_of(ready))
    if external_data is None:
        external_data = size > _LARGE
    data_path = path.parent / f"{path.name}_data"
    with replacing(who, *([data_path] if external_data else []), path, named=True) as files:
        if external_data:
            write_data(ready, files[0], data_path, watch, written)
        with files[-1].open("wb") as stream:
            stream.writelines(_serialize(ready, who))
    return path


def to_bytes(model: ModelLike) -> bytes:
    """The model as `export` would write it, in one piece. Raises GraphgenError above 2 GiB."""
    return b"".join(_serialize(_prepare(model, "to_bytes"), "to_bytes"))


@uncollected
def _prepare(model: ModelLike, who: str) -> ir.Model:
    """A copy that shares weights, with functions and versions, and passes the checker."""
    options = getattr(model, "session_options", None)
    copy = model_in(model, who).clone()
    _expect_values(copy, who)
    if options is not None:
        copy.metadata_props[OPTIONS_KEY] = json.dumps(options, sort_keys=True)
    omitted = omitted_outputs(copy)
    shield_outputs(copy.graph)
    attach_functions(copy)
    common.NameFixPass()(copy)
    tidy(copy)
    for value in omitted:
        value.name = ""
    outputs, imports = copy.graph.outputs, copy.graph.opset_imports
    shown, declared = [value.shape for value in outputs], declared_shapes(copy.graph)
    claims = [[declared.get(value, value.shape) for value in outputs]] if declared else []
    first, present = None, imports.setdefault("", OPSET)
    oldest = min(OLDEST, present)
    while oldest <= present:
        stamp(copy, oldest)
        for shapes in (*claims, shown):  # the file may declare what is not so
            if (reason := _problem(copy, shapes)) is None:
                return copy
            first = first or reason
        # onnx may have learned to infer an operator in a later version.
        oldest, imports[""] = imports[""] + 1, present
    stamp(copy)
    ranks = [shape and ir.Shape([None] * len(shape)) for shape in shown]
    if _problem(copy, ranks) is not None:  # ONNX infers some sizes unlike the runtime
        raise GraphgenError(f"{who}: the model is not valid ONNX: {first}")
    return copy


def _expect_values(model: ir.Model, who: str) -> None:
    """Raise GraphgenError if an initializer has no value."""
    for graph in model.graphs():
        for name, value in graph.initializers.items():
            if value.const_value is None:
                problem = f"the initializer {name!r} has no value"
                wanted = "give it a const_value, or make it an input"
                raise GraphgenError(f"{who}: {problem}; {wanted}{user_line()}")


def _problem(model: ir.Model, shapes: Iterable[ir.Shape | None]) -> str | None:
    """Give the outputs these shapes; what the checker says of the model, or None if it is valid."""
    for value, shape in zip(model.graph.outputs, shapes, strict=True):
        value.shape = shape
    light = _to_proto(without_weights(model))
    hide_from_checker(light)
    _write_defaults(light.graph, model.graph.opset_imports)
    try:
        onnx.checker.check_model(light, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return " ".join(str(error).split())
    return None


def _write_defaults(graph: onnx.GraphProto, imports: Mapping[str, int]) -> None:
    """Write the attributes that operators with a body have by default: the checker forgets them."""
    for node in graph.node:
        schema: Any = schema_of(node.domain, node.op_type, imports.get(node.domain, 1))
        given = {attribute.name for attribute in node.attribute}
        for name, formal in schema.attributes.items() if schema and schema.has_function else ():
            if name not in given and formal.default_value.type:
                node.attribute.append(formal.default_value)
        for subgraph in inner_graphs(node):
            _write_defaults(subgraph, imports)


def _serialize(model: ir.Model, who: str) -> Iterator[bytes | memoryview]:
    """The file in pieces, so that at most one weight at a time is in memory."""
    graph, large = model.graph, []
    for value, tensor in list(tensors_of(model)):
        if isinstance(tensor, Beside):
            continue
        in_bytes = tensor.dtype in IN_BYTES and tensor.nbytes >= PAGE
        if in_bytes and value.graph is graph and not value.is_graph_input():
            del graph.initializers[str(value.name)]
            head = onnx.TensorProto(
                name=value.name, data_type=tensor.dtype, dims=tensor.shape.numpy()
            ).SerializeToString() + field(RAW_DATA, tensor.nbytes)
            large.append((field(INITIALIZER, len(head) + tensor.nbytes) + head, tensor))
        elif isinstance(tensor, ir.ExternalTensor):
            value.const_value = in_memory(tensor)
    proto = _to_proto(model)
    try:
        rest = proto.graph.SerializeToString(deterministic=True)
        size = len(rest) + sum(len(head) + tensor.nbytes for head, tensor in large)
        proto.ClearField("graph")
        start = proto.SerializeToString(deterministic=True) + field(GRAPH, size)
        if len(start) + size > _LIMIT:
            raise ValueError("too large for protobuf")
    except Exception as error:  # protobuf's EncodeError, or a ValueError
        raise GraphgenError(
            f"{who}: the model takes more than the 2 GiB of one file; write its weights next to "
            "it with external_data=True"
        ) from error
    yield start + rest
    for head, tensor in large:
        yield head
        yield content_of(tensor)


def content_of(tensor: ir.TensorProtocol) -> bytes | memoryview:
    """A tensor's bytes as files have them; not a copy, which takes longer than writing them."""
    if tensor.dtype not in IN_BYTES or sys.byteorder == "big":
        return tensor.tobytes()
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data


class Beside(ir.ExternalTensor):
    """A tensor in a data file that no copy of the model reads."""


def tensors_of(model: ir.Model) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """The initializers of all graphs of a model, with their content."""
    values = (value for graph in model.graphs() for value in graph.initializers.values())
    yield from ((value, value.const_value) for value in values if value.const_value is not None)


Written: TypeAlias = dict[int, tuple[ir.TensorProtocol, Beside]]
"""By the identity of a tensor, it and where it was written."""


def write_data(
    model: ir.Model, file: Path, target: Path, watch: Any, written: Written | None = None
) -> None:
    """Write tensors of at least a page to `file`, and refer to them by its final name.

    Those that are `written` in other files are referred to there.
    """
    known = {} if written is None else dict(written)
    with file.open("wb") as stream:
        for value, tensor in watch(list(tensors_of(model))):
            if bytes_of(tensor) < PAGE:
                continue
            _, there = known.get(id(tensor), (None, None))
            if there is None:
                stream.seek(-stream.tell() % PAGE, os.SEEK_CUR)
                name, offset = target.name, stream.tell()
                stream.write(content_of(tensor))  # maps what is in a file, even in `target`
            else:
                name, offset = str(there.location), there.offset or 0
            value.const_value = Beside(
                name,
                offset,
                tensor.nbytes,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=str(value.name),
            )
            if written is not None:
                written[id(tensor)] = tensor, value.const_value


def _to_proto(model: ir.Model) -> onnx.ModelProto:
    with unwrapped():  # from a weight that is read lazily
        proto = to_proto(model)
    _clean_types(proto.graph, model.graph.opset_imports)
    for function in proto.functions:
        del function.value_info[:]
    return proto


def _clean_types(graph: onnx.GraphProto, imports: Mapping[str, int]) -> None:
    """Drop types that a reader infers itself, and generated names of sizes."""
    unknown = set()
    for node in graph.node:
        if schema_of(node.domain, node.op_type, imports.get(node.domain, 1)) is None:
            unknown.update(node.output)
        if Trait.WIDTH_AS_ZERO in TRAITS.get((node.domain, node.op_type), NONE):
            unknown.update(node.input)
        for subgraph in inner_graphs(node):
            _clean_types(subgraph, imports)
    infos = [info for info in graph.value_info if info.name in unknown]
    del graph.value_info[:]
    graph.value_info.extend(infos)
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if _GENERATED.search(dim.dim_param):
                dim.ClearField("dim_param")


@contextmanager
def replacing(who: str, *paths: Path, named: bool = False) -> Iterator[list[Path]]:
    """Files to write next to `paths`, flushed and renamed to them when all are complete.

    A crash at any moment leaves each path unchanged or complete, and at most a `.*.partial` next to
    it, which the next run removes. Of two writers at once, the files of the last one stay. A
    symbolic link stays, and the file that it points to is replaced.

    If the last one has the others `named`, it is removed before these are replaced: a crash in
    between leaves none, and never an old one beside new ones.
    """
    if not all(path.name for path in paths):
        raise GraphgenError(f"{who}: {paths[-1]} is a folder; give the path of a file")
    targets = [Path(os.path.realpath(path)) for path in paths]
    try:
        for path, target in zip(paths, targets, strict=True):
            if target.exists() and not target.is_file():  # renaming would destroy a device
                raise GraphgenError(
                    f"{who}: {path} cannot be written: it is not a regular file; choose another "
                    "place"
                )
        with ExitStack() as stack:
            partial = [stack.enter_context(beside(target)) for target in targets]
            yield partial
            for file in partial:
                _flush(file)
            folders = {target.parent for target in targets}
            with ExitStack() as locks:
                for folder in sorted(folders):
                    locks.enter_context(in_turn(folder))
                if named and len(targets) > 1:
                    targets[-1].unlink(missing_ok=True)
                for file, target in zip(partial, targets, strict=True):
                    file.replace(target)
            for folder in folders:
                _flush(folder)
    except OSError as error:
        raise GraphgenError(
            f"{who}: {paths[-1]} cannot be written: {error.strerror}; choose another place"
        ) from error


def _flush(path: Path) -> None:
    """Wait until the disk has a file, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
