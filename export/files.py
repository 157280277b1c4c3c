"""ONNX files: any one is read into one canonical form; what is written is legal, or not there."""

import json
import mmap
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from graphgen.errors import GraphgenError, unwrapped
from graphgen.export.functions import attach_functions, detach_functions
from graphgen.export.opset import (
    bytes_of,
    in_memory,
    keeps_meaning,
    lift,
    scopes,
    stamp,
    without_weights,
)
from graphgen.export.protobuf import GRAPH, INITIALIZER, RAW_DATA, field, parse
from graphgen.graph import CONSTANT, infer_model, lift_constants, tidy, without_defaults
from graphgen.infer import OPSET, schema_of
from graphgen.runtime import OPTIONS_KEY

_LARGE = 3 << 29
"""Bytes of all tensors (1.5 GiB) above which they go beside the model; protobuf ends at 2 GiB."""

_LIMIT = (1 << 31) - 1
"""Bytes that protobuf reads at most."""

_PAGE = 4096
"""Offsets in the data file are multiples of it, so that tensors can be mapped; smaller stay in.

Smaller tensors inside a model file are read, larger ones are mapped.
"""

_NOT_MAPPED = {ir.DataType.UNDEFINED, ir.DataType.STRING}
_IN_BYTES = {d for d in ir.DataType if d not in _NOT_MAPPED and d.bitwidth % 8 == 0}

_GENERATED = re.compile(r"\b_d\d+\b")


def load(path: str | os.PathLike[str]) -> ir.Model:
    """Read an ONNX file; weights stay in the file until they are used.

    The model comes in canonical form: opset 23 (or what the file has, if higher), constants as
    initializers, no functions but those of operators we have, nodes sorted, types inferred. An
    input with an initializer stays an input that may be left out.

    Raises GraphgenError if the file is missing, no ONNX, cut short or malformed (a name assigned
    twice or never, a cycle), if its external data is missing, too short or outside of its folder,
    if an operator cannot be raised to opset 23, or if types do not fit.
    """
    path = Path(path)
    who = f"load({path.name})"
    proto, mapped = _read(path, who)
    try:
        _check_versions(proto)
        _check_graph(proto.graph)
        for function in proto.functions:
            _check_names(function.input, function.node, function.output)
        model = ir.from_proto(proto)
        model.graph.name = model.graph.name or "main"
        for graph in model.graphs():
            for name, value in graph.initializers.items():
                if graph is model.graph and name in mapped:
                    value.const_value = _of_file(mapped[name], value)
                elif isinstance(value.const_value, ir.TensorProtoTensor):
                    value.const_value.numpy()  # fails where it has too few bytes
        model.graph.sort()
        _normalise(model)
        _map_external_data(model, path)
    except GraphgenError as error:
        raise GraphgenError(f"{who}: {error}") from error
    except Exception as error:  # each malformation has its own in onnx and onnx_ir
        reason = " ".join(str(error.__cause__ or error).split())
        raise GraphgenError(
            f"{who}: the graph is not valid ONNX: {reason}; export the model again"
        ) from error
    lift(model, who)
    made = {v.name for n in model.graph.all_nodes() if n.op_type == "Constant" for v in n.outputs}
    try:
        lift_constants(model)
        for value in model.graph.initializers.values():
            value.meta[CONSTANT] = value.name in made
        tidy(model)
        with without_defaults(model):
            infer_model(model)
    except (GraphgenError, ir.passes.PassError) as error:
        told = error if isinstance(error, GraphgenError) else error.__cause__
        raise GraphgenError(f"{who}: {told}") from error
    return model


def _read(path: Path, who: str) -> tuple[onnx.ModelProto, dict[str, memoryview]]:
    """The model without the content of its larger weights, and where that is mapped, by name."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        proto, mapped = onnx.ModelProto(), {}
        graphs = parse(data, GRAPH, proto)
        for initializers in [parse(graph, INITIALIZER, proto.graph) for graph in graphs]:
            for content in initializers:
                tensor = proto.graph.initializer.add()
                [*_, raw] = [memoryview(b""), *parse(content, RAW_DATA, tensor)]
                if len(raw) >= _PAGE and tensor.data_type in _IN_BYTES:
                    mapped[tensor.name] = raw
                else:
                    tensor.ParseFromString(content)
    except OSError as error:
        raise GraphgenError(
            f"{who}: {path} cannot be read: {error.strerror}; pass the path of an ONNX model"
        ) from error
    except Exception as error:  # protobuf's DecodeError, whose place depends on its version
        raise GraphgenError(
            f"{who}: {path} is not an ONNX model, or one cut short at {size} bytes; export or "
            "copy it again"
        ) from error
    if not proto.HasField("graph") or not proto.opset_import:
        raise GraphgenError(
            f"{who}: {path} is not an ONNX model, or one cut short: it has no graph or no opset; "
            "export or copy it again"
        )
    return proto, mapped


def _of_file(data: memoryview, value: ir.Value) -> ir.TensorProtocol:
    assert value.dtype is not None and value.const_value is not None
    array = np.frombuffer(data, value.dtype.numpy().newbyteorder("<"))
    return ir.tensor(array.reshape(value.const_value.shape.numpy()), value.dtype, name=value.name)


def _check_versions(proto: onnx.ModelProto) -> None:
    newest = onnx.defs.onnx_opset_version()
    for entry in proto.opset_import:
        if entry.domain in ("", "ai.onnx") and not 0 < entry.version <= newest:
            raise GraphgenError(
                f"the model has opset {entry.version}, and the installed onnx "
                f"{onnx.__version__} knows 1 to {newest}: install a newer one, or export again"
            )
    if proto.ir_version > onnx.IR_VERSION:
        raise GraphgenError(
            f"the model has IR version {proto.ir_version}, and the installed onnx "
            f"{onnx.__version__} knows {onnx.IR_VERSION}: install a newer onnx"
        )


def _check_graph(graph: onnx.GraphProto, outer: frozenset[str] = frozenset()) -> None:
    names = [value.name for value in graph.input]
    inputs = {*names}
    names += [t.name for t in graph.initializer if t.name not in inputs]
    sparse = [t.values.name for t in graph.sparse_initializer]
    sparse += [n.output[0] for n in graph.node for a in n.attribute if a.HasField("sparse_tensor")]
    if sparse:
        raise GraphgenError(
            f"{sparse[0]!r} is a sparse tensor, which is not read; export the model with dense ones"
        )
    if not graph.output:
        raise GraphgenError(
            f"the graph {graph.name!r} has no outputs; export it with what it gives"
        )
    _check_names(names, graph.node, [value.name for value in graph.output], outer)
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = _legible(dim.dim_param)


@cache
def _legible(name: str) -> str:
    """The name of a size as inference can read it: a word, or an expression of words."""
    try:
        ir.SymbolicDim(name) + 1
        return name
    except Exception:  # a ValueError, or what the parser stumbles upon
        return "dim_" + re.sub(r"\W+", "_", name)


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        yield from [attribute.g] if attribute.HasField("g") else attribute.graphs


def _check_names(
    names: Sequence[str],
    nodes: Sequence[onnx.NodeProto],
    outputs: Sequence[str],
    outer: frozenset[str] = frozenset(),
) -> None:
    """Raise ValueError unless each name is assigned once, and is assigned if it is used."""
    assigned = Counter([*names, *(name for node in nodes for name in node.output if name)])
    for name, times in assigned.items():
        if times > 1:
            raise ValueError(f"{name!r} is assigned {times} times")
    known = outer.union(assigned)
    for node in nodes:
        for text in (node.op_type, node.domain, *node.input, *node.output):
            if not isinstance(text, str):  # protobuf gives bytes for what it cannot decode
                raise ValueError(f"the name {text!r} is not UTF-8")
        for name in node.input:
            if name and name not in known:
                raise ValueError(f"{node.op_type} {node.name} reads {name!r}, which nothing makes")
        for subgraph in _subgraphs(node):
            _check_graph(subgraph, known)
    for name in outputs:
        if name not in assigned:
            raise ValueError(f"the output {name!r} is made by nothing in its graph")


def _normalise(model: ir.Model) -> None:
    """One spelling: the standard domain is "", no foreign functions, no Constant as an output."""
    for scope in scopes(model):
        imports = scope.opset_imports
        if "ai.onnx" in imports:  # the same domain's other name
            imports[""] = max(imports.pop("ai.onnx"), imports.get("", 0))
    if model.ir_version < 4:  # when every initializer had to be an input, which then says nothing
        for value in [v for v in model.graph.inputs if v.is_initializer()]:
            model.graph.inputs.remove(value)
    model.ir_version = max(model.ir_version, 10)
    detach_functions(model)
    present = model.graph.opset_imports.get("", OPSET)
    for function in model.functions.values():
        old = function.opset_imports.get("", present)
        if all(keeps_meaning(node, old, present) for node in function.all_nodes()):
            function.opset_imports[""] = present
    common.InlinePass()(model)
    for i, value in enumerate(model.graph.outputs):
        node = value.producer()
        if node is not None and node.op_type == "Constant" and not node.domain:
            identity = ir.node("Identity", [value])  # an initializer is not made by a node
            model.graph.append(identity)
            output = identity.outputs[0]
            output.type, output.shape, output.name = value.type, value.shape, value.name
            value.name = f"{value.name}_value"
            model.graph.outputs[i] = output


def _map_external_data(model: ir.Model, path: Path) -> None:
    """Map every tensor that lies in another file; what is mapped outlives that file's name."""
    for graph in model.graphs():
        ir.external_data.set_base_dir(graph, path.parent)
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = _mapped(value.const_value, path.parent.resolve())
    for node in model.graph.all_nodes():
        for name, attribute in node.attributes.items():
            if isinstance(attribute.value, ir.ExternalTensor):
                tensor = _mapped(attribute.value, path.parent.resolve())
                node.attributes[name] = ir.AttrTensor(name, tensor)


def _mapped(tensor: ir.ExternalTensor, folder: Path) -> ir.TensorProtocol:
    location = Path(tensor.location)
    file = (folder / location).resolve()
    what = f"the data of {tensor.name!r} is in {str(location)!r}"
    if location.is_absolute() or not file.is_relative_to(folder):
        raise GraphgenError(
            f"{what}, outside of the model's folder {folder}; put it into that folder and "
            "export the model again"
        )
    if not file.is_file():
        raise GraphgenError(f"{what}, which is missing; put that file beside the model")
    end = (tensor.offset or 0) + (tensor.length or tensor.nbytes)
    if file.stat().st_size < end or (tensor.length or tensor.nbytes) != tensor.nbytes:
        raise GraphgenError(
            f"{what}, which has {file.stat().st_size} bytes where {end} are needed; "
            "copy that file again"
        )
    try:
        return in_memory(tensor)
    except Exception as error:  # hard links are refused, for one
        raise GraphgenError(f"{what}, which cannot be mapped: {error}") from error


def export(
    model: Any,
    path: str | os.PathLike[str],
    *,
    external_data: bool | None = None,
    watch: Callable[[Any], Iterable[Any]] = iter,
) -> Path:
    """Write a model as ONNX that any runtime reads, with the lowest opset and IR it can have.

    Args:
        model: An `ir.Model`, or what `optimize` returns: its session options go along.
        path: The file; a regular file there is replaced once the new one is complete.
        external_data: Put weights into `<name>.onnx_data` beside it; by default above 1.5 GiB.
        watch: Wraps the list of weights that go beside it, as `rich.progress.track` does.

    The same model gives the same bytes. Operators of our own are written with their bodies, as
    functions. Raises GraphgenError, and leaves everything as it was, if the model is not valid
    or the file cannot be written.
    """
    path = Path(path)
    who = f"export({path.name})"
    ready = _prepare(model, who)
    size = sum(bytes_of(tensor) for _, tensor in tensors_of(ready))
    if external_data is None:
        external_data = size > _LARGE
    data_path = path.parent / f"{path.stem}.onnx_data"
    with replacing(who, *([data_path] if external_data else []), path) as files:
        if external_data:
            write_data(ready, files[0], data_path, watch)
        with files[-1].open("wb") as stream:
            stream.writelines(_serialise(ready, who))
    return path


def to_bytes(model: Any) -> bytes:
    """The model as `export` would write it, in one piece. Raises GraphgenError over 2 GiB."""
    return b"".join(_serialise(_prepare(model, "to_bytes"), "to_bytes"))


def _prepare(model: Any, who: str) -> ir.Model:
    """A copy, weights shared, with functions and versions, that the checker accepts."""
    options = getattr(model, "session_options", None)
    model = getattr(model, "model", model)
    if not isinstance(model, ir.Model):
        raise GraphgenError(
            f"{who}: got a {type(model).__name__}; pass a model from build, load or optimize"
        )
    copy = model.clone()
    if options is not None:
        copy.metadata_props[OPTIONS_KEY] = json.dumps(options, sort_keys=True)
    attach_functions(copy)
    common.NameFixPass()(copy)
    tidy(copy)
    stamp(copy)
    light = _to_proto(without_weights(copy))
    _hide_from_checker(light)
    try:
        onnx.checker.check_model(light, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        reason = " ".join(str(error).split())
        raise GraphgenError(f"{who}: the model is not valid ONNX: {reason}") from error
    return copy


def _hide_from_checker(proto: onnx.ModelProto) -> None:
    """Put operators that no checker knows where it refuses what the runtime takes.

    That is an input or output without a rank, and what the runtime adds to the standard domain.
    """
    graph = proto.graph
    for values, role in ((graph.input, "output"), (graph.output, "input")):
        for i, value in reversed(list(enumerate(values))):
            if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
                node = onnx.NodeProto(op_type="Any", domain="unchecked")
                getattr(node, role).append(value.name)
                graph.node.insert(0 if role == "output" else len(graph.node), node)
                del values[i]
    for node in graph.node:
        if node.op_type == "SimplifiedLayerNormalization":
            node.domain = "unchecked"
    proto.opset_import.add(domain="unchecked", version=1)


def _serialise(model: ir.Model, who: str) -> Iterator[bytes]:
    """The file in pieces, so that no more than one weight at a time is in memory."""
    graph, large = model.graph, []
    for value, tensor in list(tensors_of(model)):
        if isinstance(tensor, Beside):
            continue
        in_bytes = tensor.dtype in _IN_BYTES and tensor.nbytes >= _PAGE
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
            f"{who}: the model takes more than the 2 GiB of one file; write its weights beside "
            "it with external_data=True"
        ) from error
    yield start + rest
    for head, tensor in large:
        yield head
        yield tensor.tobytes()


class Beside(ir.ExternalTensor):
    """A tensor in a data file, which no copy of the model reads."""


def tensors_of(model: ir.Model) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """The initializers of all graphs of a model, with their content."""
    values = (value for graph in model.graphs() for value in graph.initializers.values())
    yield from ((value, value.const_value) for value in values if value.const_value is not None)


def write_data(model: ir.Model, file: Path, target: Path, watch: Any) -> None:
    """Write the tensors of a page and more to `file`, and refer to them under its later name."""
    with file.open("wb") as stream:
        for value, tensor in watch(list(tensors_of(model))):
            if bytes_of(tensor) < _PAGE:
                continue
            stream.seek(-stream.tell() % _PAGE, os.SEEK_CUR)
            offset = stream.tell()
            stream.write(tensor.tobytes())  # maps what lies in a file, even if that is `target`
            value.const_value = Beside(
                target.name,
                offset,
                tensor.nbytes,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=str(value.name),
            )


def _to_proto(model: ir.Model) -> onnx.ModelProto:
    with unwrapped():  # of a weight that is read lazily
        proto = ir.to_proto(model)
    _clean_types(proto.graph, model.graph.opset_imports)
    for function in proto.functions:
        del function.value_info[:]
    return proto


def _clean_types(graph: onnx.GraphProto, imports: Mapping[str, int]) -> None:
    """Drop the types that a reader infers itself, and the names of sizes that nobody gave."""
    unknown = set()
    for node in graph.node:
        if schema_of(node.domain, node.op_type, imports.get(node.domain, 1)) is None:
            unknown.update(node.output)
        for subgraph in _subgraphs(node):
            _clean_types(subgraph, imports)
    infos = [info for info in graph.value_info if info.name in unknown]
    del graph.value_info[:]
    graph.value_info.extend(infos)
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if _GENERATED.search(dim.dim_param):
                dim.ClearField("dim_param")


@contextmanager
def replacing(who: str, *paths: Path) -> Iterator[list[Path]]:
    """Files to write beside `paths`, flushed and renamed to them when all are complete.

    A crash at any moment leaves each path as it was or complete, and at most a `.*.partial` beside.
    A symbolic link stays, and the file that it leads to is replaced.
    """
    if not all(path.name for path in paths):
        raise GraphgenError(f"{who}: {paths[-1]} is a folder; give the path of a file")
    targets = [Path(os.path.realpath(path)) for path in paths]
    partial = [path.with_name(f".{path.name}.{os.getpid()}.partial") for path in targets]
    try:
        for path, target in zip(paths, targets, strict=True):
            if target.exists() and not target.is_file():  # renaming would destroy a device
                raise GraphgenError(
                    f"{who}: {path} cannot be written: it is no regular file; choose another place"
                )
        try:
            yield partial
            for file in partial:
                _flush(file)
            for file, target in zip(partial, targets, strict=True):
                file.replace(target)
            for folder in {target.parent for target in targets}:
                _flush(folder)
        finally:
            for file in partial:
                with suppress(OSError):
                    file.unlink()
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
