"""Reading ONNX files: every model comes in one canonical form; weights stay in the file."""

import mmap
import os
import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from graphgen.arguments import checked
from graphgen.edit import infer_model, lift_constants, tidy, without_defaults
from graphgen.errors import GraphgenError
from graphgen.export.functions import detach_functions
from graphgen.export.opset import in_memory, keeps_meaning, lift, scopes
from graphgen.export.outputs import SIGNATURE, behind_identity
from graphgen.export.protobuf import GRAPH, INITIALIZER, RAW_DATA, parse
from graphgen.export.valid import check_attributes, check_file
from graphgen.files import path_of, regular
from graphgen.garbage import uncollected
from graphgen.graph import CONSTANT
from graphgen.infer import OPSET
from graphgen.maps import from_proto
from graphgen.model import readable
from graphgen.traits import Trait, has

PAGE = 4096
"""Offsets in the data file are multiples of it, so tensors can be mapped.

Smaller tensors stay inside the model file. In such a file, smaller tensors are read, others mapped.
"""

_NOT_MAPPED = {ir.DataType.UNDEFINED, ir.DataType.STRING}
IN_BYTES = {d for d in ir.DataType if d not in _NOT_MAPPED and d.bitwidth % 8 == 0}


@checked
@uncollected
def load(path: str | os.PathLike[str]) -> ir.Model:
    """Read an ONNX file; weights stay in the file until they are used.

    The model comes in canonical form: opset 23 (or the file's, if higher), constants as
    initializers, functions inlined except those with the name of an operator, which the runtime
    ignores, nodes sorted, types inferred. An input with an initializer may still be left out.

    Raises GraphgenError if the file is missing, not ONNX, cut short or malformed (a name assigned
    twice or never, a cycle), if its external data is missing, too short or outside its folder, if
    an operator cannot be raised to opset 23, or if types do not fit.
    """
    path = path_of(path, "load")
    who = f"load({path.name})"
    proto, mapped = _read(path, who)
    try:
        check_file(proto)
        model = readable(from_proto(proto))
        model.graph.name = model.graph.name or "main"
        declared = {value.name: value.shape for value in model.graph.outputs}
        for graph in model.graphs():
            for name, value in graph.initializers.items():
                if graph is model.graph and name in mapped:
                    value.const_value = _of_file(mapped[name], value)
                _check_size(value.const_value)
                if value.const_value is not None and value not in graph.inputs:
                    value.type = ir.TensorType(value.const_value.dtype)  # files may declare others
                    value.shape = ir.Shape(value.const_value.shape.numpy())
        for node in (node for scope in scopes(model) for node in scope.all_nodes()):
            for attribute in node.attributes.data.values():
                if attribute.type is ir.AttributeType.TENSOR:
                    _check_size(attribute.value)
        model.graph.sort()
        _normalize(model)
        check_attributes(model)
        _map_external_data(model, path)
    except GraphgenError as error:
        raise GraphgenError(f"{who}: {error}") from error
    except Exception as error:  # onnx and onnx_ir have one for each defect
        reason = " ".join(str(error.__cause__ or error).split())
        raise GraphgenError(
            f"{who}: the graph is not valid ONNX: {reason}; export the model again"
        ) from error
    lift(model, who)
    model.graph.meta[SIGNATURE] = declared
    made = {v.name for n in model.graph.all_nodes() if has(n, Trait.CONSTANT) for v in n.outputs}
    try:
        lift_constants(model)
        for value in model.graph.initializers.values():
            value.meta[CONSTANT] = value.name in made or _is_scripted_constant(str(value.name))
        tidy(model)
        with without_defaults(model):
            infer_model(model)
    except (GraphgenError, ir.passes.PassError) as error:
        cause = error if isinstance(error, GraphgenError) else error.__cause__
        raise GraphgenError(f"{who}: {cause}") from error
    return model


def _is_scripted_constant(name: str) -> bool:
    """Whether TorchScript's exporter called a Constant so: other tools make it an initializer."""
    return re.fullmatch(r"(.*/)?Constant(_\d+)?_output_0", name) is not None


def _read(path: Path, who: str) -> tuple[onnx.ModelProto, dict[str, memoryview]]:
    """The model without the content of its larger weights, and those contents mapped, by name."""
    try:
        with regular(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        proto, mapped = onnx.ModelProto(), dict[str, memoryview]()
        graphs = parse(data, GRAPH, proto)
        for initializers in [parse(graph, INITIALIZER, proto.graph) for graph in graphs]:
            for content in initializers:
                tensor = proto.graph.initializer.add()
                [*_, raw] = [memoryview(b""), *parse(content, RAW_DATA, tensor)]
                first = raw
                if large := len(raw) >= PAGE and tensor.data_type in IN_BYTES:
                    first = mapped.setdefault(tensor.name, raw)
                if not large or (first is not raw and first != raw):  # which is refused
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


def _check_size(tensor: object) -> None:
    """Raise ValueError unless a tensor has as many bytes as its sizes say."""
    if isinstance(tensor, ir.TensorProtoTensor):
        tensor.numpy()


def _normalize(model: ir.Model) -> None:
    """One form: the standard domain is "", no functions of others, no Constant as an output."""
    for scope in scopes(model):
        imports = scope.opset_imports
        if "ai.onnx" in imports:  # the same domain's other name
            imports[""] = max(imports.pop("ai.onnx"), imports.get("", 0))
    if model.ir_version < 4:  # then every initializer had to be an input
        for value in [v for v in model.graph.inputs if v.is_initializer()]:
            model.graph.inputs.remove(value)
    model.ir_version = max(model.ir_version, 10)
    detach_functions(model)
    present = model.graph.opset_imports.get("", OPSET)
    for function in model.functions.values():
        for domain in function.opset_imports.keys() & model.graph.opset_imports.keys():
            if not domain.startswith("ai.onnx") and domain:  # of no operators with versions
                function.opset_imports[domain] = model.graph.opset_imports[domain]
        old = function.opset_imports.get("", present)
        if all(keeps_meaning(node, old, present) for node in function.all_nodes()):
            function.opset_imports[""] = present
    common.InlinePass()(model)
    model.functions.clear()  # those that nothing calls
    for i, value in enumerate(model.graph.outputs):
        node = value.producer()
        if node is not None and has(node, Trait.CONSTANT):
            behind_identity(model.graph, i)  # no node makes an initializer


def _map_external_data(model: ir.Model, path: Path) -> None:
    """Map every tensor that is in another file; the mapping outlives that file's name."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = _mapped(value.const_value, path.parent)
    for node in model.graph.all_nodes():
        for name, attribute in node.attributes.data.items():
            held = attribute.value if attribute.type is ir.AttributeType.TENSOR else None
            if isinstance(held, ir.ExternalTensor):
                node.attributes[name] = ir.AttrTensor(name, _mapped(held, path.parent))


def _mapped(tensor: ir.ExternalTensor, folder: Path) -> ir.TensorProtocol:
    location, tensor.base_dir, folder = Path(tensor.location), folder, folder.resolve()
    file = (folder / location).resolve()
    what = f"the data of {tensor.name!r} is in {str(location)!r}"
    if location.is_absolute() or not file.is_relative_to(folder):
        raise GraphgenError(
            f"{what}, outside the model's folder {folder}; put it into that folder and "
            "export the model again"
        )
    if not file.is_file():
        raise GraphgenError(f"{what}, which is missing; put that file next to the model")
    if (length := tensor.length or tensor.nbytes) != tensor.nbytes:
        raise GraphgenError(
            f"{what}, whose length is {length} bytes by the model, but its elements take "
            f"{tensor.nbytes}; export the model again"
        )
    end = (tensor.offset or 0) + length
    if file.stat().st_size < end:
        raise GraphgenError(
            f"{what}, which has {file.stat().st_size} bytes where {end} are needed; "
            "copy that file again"
        )
    try:
        return in_memory(tensor)
    except Exception as error:  # hard links are refused, for example
        raise GraphgenError(f"{what}, which cannot be mapped: {error}") from error
