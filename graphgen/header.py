"""What an ONNX file says about itself, without its nodes and weights."""

import hashlib
import mmap
import os
from collections.abc import Iterator

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from graphgen.errors import GraphgenError
from graphgen.expansion import check_expansion
from graphgen.files import path_of, regular

_TURN, _PRODUCT = b"Transpose", b"MatMul"  # as they stand in a file


def read_header(model: object) -> tuple[str, onnx.ModelProto]:
    """Return a name for messages, and the model without its nodes and weights.

    It steps from field to field over the mapped file and lets onnx parse only the few it needs, so
    the cost does not grow with the weights. `onnx.load` would read and parse all of them.
    """
    if isinstance(model, bytes):
        return "Session(<bytes>)", _parse_header("Session(<bytes>)", model)
    if not isinstance(model, str | os.PathLike):
        raise GraphgenError(
            f"Session: model is of {type(model)}; give the path or the bytes of an ONNX model"
        )
    model = path_of(model, "Session")
    who = f"Session({model.name})"
    try:
        with regular(model).open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise GraphgenError(f"{who}: the file is empty; give an ONNX model")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return who, _parse_header(who, data)
    except OSError as error:
        raise GraphgenError(f"{who}: cannot read {os.fspath(model)}: {error.strerror}") from error


def mentions(model: str | os.PathLike[str] | bytes, text: bytes) -> bool:
    """Whether these bytes stand in a model, such as a name; nothing is parsed or copied."""
    if isinstance(model, bytes):
        return text in model
    with (
        regular(model).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        return data.find(text) >= 0


def turns_for_vector(model: str | os.PathLike[str] | bytes) -> bool:
    """Whether the main graph multiplies a transposed matrix by what may be a vector.

    Only names, shapes, and the nodes that this is about are parsed.
    """
    if isinstance(model, bytes):
        return _turns_for_vector(model)
    with (
        regular(path_of(model, "Session")).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        return _turns_for_vector(data)


def _turns_for_vector(data: bytes | mmap.mmap) -> bool:
    if data.find(_TURN) < 0:
        return False
    graph, tensor = onnx.GraphProto, onnx.TensorProto
    parts = [
        (kind, start, end)
        for number, _, first, last in _fields(data, 0, len(data))
        if number == onnx.ModelProto.GRAPH_FIELD_NUMBER
        for kind, _, start, end in _fields(data, first, last)
    ]
    texts = (data[start:end] for kind, start, end in parts if kind == graph.NODE_FIELD_NUMBER)
    nodes = [onnx.NodeProto.FromString(x) for x in texts if _TURN in x or _PRODUCT in x]
    turned = {n.output[0] for n in nodes if n.op_type.encode() == _TURN and _swaps(n)}
    products = [node for node in nodes if node.op_type.encode() == _PRODUCT]
    vectors = {node.input[1] for node in products if node.input[0] in turned}
    for kind, start, end in parts if vectors else ():
        name, rank = "", 1
        if kind == graph.INITIALIZER_FIELD_NUMBER:
            known = (tensor.DIMS_FIELD_NUMBER, tensor.NAME_FIELD_NUMBER)
            fields = _fields(data, start, end)
            weight = tensor.FromString(b"".join(data[a:b] for n, a, _, b in fields if n in known))
            name, rank = weight.name, len(weight.dims)
        elif kind in (graph.INPUT_FIELD_NUMBER, graph.VALUE_INFO_FIELD_NUMBER):
            value = onnx.ValueInfoProto.FromString(data[start:end])
            shaped = value.type.tensor_type
            name, rank = value.name, len(shaped.shape.dim) if shaped.HasField("shape") else 1
        if rank != 1:
            vectors.discard(name)
    return bool(vectors)


def _swaps(transpose: onnx.NodeProto) -> bool:
    """Whether it may swap the last two axes alone."""
    perm = [n for attribute in transpose.attribute for n in attribute.ints]
    return perm == [*range(len(perm) - 2), len(perm) - 1, len(perm) - 2] if perm else True


def digest_of(data: bytes) -> str:
    """A hash of a serialized model without its metadata; nothing is parsed or copied."""
    found, metadata = hashlib.blake2b(digest_size=4), onnx.ModelProto.METADATA_PROPS_FIELD_NUMBER
    for number, start, _, end in _fields(data, 0, len(data)):
        if number != metadata:
            found.update(memoryview(data)[start:end])
    return found.hexdigest()


def _parse_header(who: str, data: bytes | mmap.mmap) -> onnx.ModelProto:
    header, graph, functions = onnx.ModelProto(), onnx.GraphProto, []
    try:
        for number, start, payload, end in _fields(data, 0, len(data)):
            if number == header.GRAPH_FIELD_NUMBER:
                for part, first, _, last in _fields(data, payload, end):
                    if part in (graph.INPUT_FIELD_NUMBER, graph.OUTPUT_FIELD_NUMBER):
                        header.graph.MergeFromString(data[first:last])
            elif number == header.FUNCTIONS_FIELD_NUMBER:
                functions.append(onnx.FunctionProto.FromString(data[payload:end]))
            else:
                header.MergeFromString(data[start:end])
        if not header.HasField("graph"):
            raise ValueError("no graph")
    except (ValueError, IndexError, DecodeError) as error:
        raise GraphgenError(
            f"{who}: not an ONNX model, or one cut short at {len(data)} bytes; write it again"
        ) from error
    try:
        check_expansion(functions)  # the runtime would try to put them in place
    except GraphgenError as error:
        raise GraphgenError(f"{who}: {error}") from error
    return header


def _fields(data: bytes | mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(number, start, start of the payload, end) of each protobuf field in data[at:end]."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while data[at] >= 128 and shift < 63:  # a longer one is not protobuf
            value, shift, at = value | (data[at] & 127) << shift, shift + 7, at + 1
        return value | data[at] << shift, at + 1

    while at < end:
        start = at
        tag, payload = varint(at)
        if tag & 7 == 2:  # length-delimited
            size, payload = varint(payload)
            at = payload + size
        elif tag & 7 == 0:
            at = varint(payload)[1]
        else:
            at = payload + {1: 8, 5: 4}.get(tag & 7, len(data))
        if at > end:
            raise ValueError("a field runs past the end")
        yield tag >> 3, start, payload, at
