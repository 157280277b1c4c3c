"""What an ONNX file says about itself, without its nodes and weights."""

import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator

import onnx
import onnx.inliner
import onnx.shape_inference
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from graphgen.errors import GraphgenError
from graphgen.expansion import check_expansion, inner_graphs
from graphgen.files import path_of, regular

_TURN, _CAST, _PRODUCTS = b"Transpose", b"Cast", (b"MatMul", b"FusedMatMul")  # in a file
_SMALL = 1 << 10  # bytes of sizes, which inference reads


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
    """Whether a model multiplies a computed matrix by what may be a vector, and transposes any.

    Also whether it multiplies what is transposed and then cast, with which the runtime may end the
    process. It moves transposes through other nodes into such products. Weights are not parsed.
    """
    if isinstance(model, bytes):
        return _turns_for_vector(model)
    with (
        regular(path_of(model, "Session")).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        return _turns_for_vector(data)


def _turns_for_vector(data: bytes | mmap.mmap) -> bool:
    if data.find(_TURN) < 0 or data.find(_PRODUCTS[0]) < 0:
        return False
    try:
        model = _without_weights(data)
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
        graphs = [*_graphs(model.graph)]
        nodes = [(node.op_type.encode(), node) for graph in graphs for node in graph.node]
        turned = {node.output[0] for name, node in nodes if name == _TURN}
        cast = {n.output[0] for name, n in nodes if name == _CAST and n.input[0] in turned}
        products = [node for name, node in nodes if name in _PRODUCTS]
        given = {value.name for graph in graphs for value in (*graph.input, *graph.initializer)}
        factors = {node.input[1] for node in products if node.input[0] not in given}
        if not turned or any(cast.intersection(node.input) for node in products):
            return bool(turned and products)
        ranks = _ranks(graphs)
        if not factors <= ranks.keys():
            ranks = _ranks(_graphs(onnx.shape_inference.infer_shapes(model).graph))
    except Exception:  # of the inliner or of inference: onnx has no class for them
        return True
    return any(ranks.get(name, 1) == 1 for name in factors)


def _without_weights(data: bytes | mmap.mmap) -> onnx.ModelProto:
    """A model whose large weights and constants have a shape, and no data."""
    model, graph, tensor = onnx.ModelProto(), onnx.GraphProto, onnx.TensorProto
    kept = (tensor.DIMS_FIELD_NUMBER, tensor.DATA_TYPE_FIELD_NUMBER, tensor.NAME_FIELD_NUMBER)
    for number, start, first, last in _fields(data, 0, len(data)):
        if number != onnx.ModelProto.GRAPH_FIELD_NUMBER:
            model.MergeFromString(data[start:last])
            continue
        for kind, begin, payload, end in _fields(data, first, last):
            if kind != graph.INITIALIZER_FIELD_NUMBER or end - begin < _SMALL:
                model.graph.MergeFromString(data[begin:end])
            else:
                parts = [data[x:z] for n, x, _, z in _fields(data, payload, end) if n in kept]
                model.graph.initializer.append(tensor.FromString(b"".join(parts)))
            if kind == graph.NODE_FIELD_NUMBER and end - begin > _SMALL:
                for attribute in model.graph.node[-1].attribute:
                    attribute.t.ClearField("raw_data")
    return model


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph, and those in its nodes."""
    yield graph
    for node in graph.node:
        for inner in inner_graphs(node):
            yield from _graphs(inner)


def _ranks(graphs: Iterable[onnx.GraphProto]) -> dict[str, int]:
    """How many dimensions values have, as far as a file says."""
    found: dict[str, int] = {}
    for graph in graphs:
        found |= {weight.name: len(weight.dims) for weight in graph.initializer}
        for value in (*graph.input, *graph.value_info, *graph.output):
            shaped = value.type.tensor_type
            if shaped.HasField("shape"):
                found[value.name] = len(shaped.shape.dim)
    return found


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
