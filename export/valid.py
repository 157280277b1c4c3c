"""What an ONNX file has to be before its graph is built, whoever wrote it.

A file may be broken, or made to do harm: nothing in it is evaluated, and what is built from it is
not much larger than the file. docs/untrusted-files.md lists the bounds.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache
from hashlib import blake2b
from typing import Any

import onnx
import onnx_ir as ir

from graphgen import ops
from graphgen.errors import GraphgenError, warn
from graphgen.expansion import check_expansion, inner_graphs
from graphgen.export.sparse import make_dense
from graphgen.forms import TEXTS
from graphgen.graph import AXES, DECLARED, SCALARS, operator_name
from graphgen.infer import OPSET, schema_of
from graphgen.op import find_op, is_a
from graphgen.places import where_is

_LONGEST, _OPERATIONS = 120, 12
"""Characters and operations of an expression for a size; sympy's time grows fast with them."""

_ATOM = r"(?:[^\W\d][\w.]*|(?a:\d{1,9}))"
_POWER = re.compile(r"(?<![\w.])[^\W\d][\w.]*\*\*[1-4](?![\w.*])")  # no other power is read
_STEP = re.compile(
    rf"(?:\b(?:Max|max|Min|min|Mod|mod|floor|sqrt))?\({_ATOM}(?:,{_ATOM})*\)"
    rf"|{_ATOM}(?://|[-+*/%]){_ATOM}(?!\()|(?<![\w.)])-{_ATOM}"
)
"""What can become one operand in an expression for a size."""

_BY_MODE = 14
"""The opset from which an attribute of BatchNormalization, not its outputs, says the mode."""

_TEXT, _MESSAGE = 9, 11  # types of protobuf's fields

_CONTENT = {
    getattr(onnx.AttributeProto, kind): name
    for kind, name in {
        "FLOAT": "f", "INT": "i", "STRING": "s", "TENSOR": "t", "GRAPH": "g", "TYPE_PROTO": "tp",
        "FLOATS": "floats", "INTS": "ints", "STRINGS": "strings", "TENSORS": "tensors",
        "GRAPHS": "graphs", "TYPE_PROTOS": "type_protos",
    }.items()
}  # fmt: skip
_TYPED = {f.name for f in onnx.TensorProto.DESCRIPTOR.fields if f.name.endswith("_data")}
_TYPED -= {"raw_data", "external_data"}

_OUTSIDE = {"location", "offset", "length", "checksum", "basepath"}
_ASIDE = {"name", "type", "doc_string", "ref_attr_name"}


def check_file(proto: onnx.ModelProto) -> None:
    """Raise GraphgenError or ValueError for what cannot be read; mend what the runtime ignores.

    That is text which is not UTF-8, except in names that callers have to write, references to a
    function's attributes outside functions, the second of two contents of a tensor, and another
    type for an output that is an input, too. Sparse constants become dense.
    """
    _check_versions(proto)
    make_dense(proto)
    for value in (*proto.graph.input, *proto.graph.output):
        if isinstance(value.name, bytes):  # protobuf's, where it cannot decode
            raise ValueError(f"the name {value.name!r} of an input or output is not UTF-8")
    for graph in (proto, *proto.functions):
        _mend(graph, in_function=graph is not proto)
    _check_notes(proto)
    _check_graph(proto.graph)
    for function in proto.functions:
        _check_names(function.input, function.node, function.output)
    check_expansion(proto.functions, proto.graph.node)


def check_attributes(model: ir.Model) -> None:
    """Raise ValueError for an attribute of a wrong type, or one that an operator must have."""
    for node in model.graph.all_nodes():
        version = model.graph.opset_imports.get(node.domain, 1 if node.domain else OPSET)
        missing = _required(node.domain, node.op_type, version).difference(node.attributes)
        if missing:
            problem = f"{operator_name(node)} has no attribute {min(missing)}; it must have one"
            raise ValueError(f"{where_is(node)}: {problem}")
        if is_a(node, ops.batch_normalization) and version >= _BY_MODE and len(node.outputs) > 3:
            raise GraphgenError(
                f"{where_is(node)}: a norm with {len(node.outputs)} outputs, as torch's exporter "
                "by TorchScript writes instance norms with running statistics in training mode, "
                "and no runtime reads: export it in evaluation mode, or make it with "
                "track_running_stats=False"
            )
        if not node.attributes:
            continue
        schema, op = schema_of(node.domain, node.op_type, version), find_op(node)
        for name, attribute in node.attributes.items():
            if schema is not None and name in schema.attributes:
                wanted = ir.AttributeType[str(schema.attributes[name].type).rpartition(".")[2]]
            elif op is not None and isinstance(default := op.attributes.get(name), int | float):
                wanted = ir.AttributeType["INT" if isinstance(default, int) else "FLOAT"]
            else:
                continue
            if attribute.type != wanted or attribute.is_ref():
                raise ValueError(
                    f"{where_is(node)}: attribute {name} of {operator_name(node)} is of type "
                    f"{attribute.type.name}; it must be of {wanted.name}"
                )


@lru_cache(4096)  # a file may make up names
def _required(domain: str, op_type: str, version: int) -> frozenset[str]:
    """The attributes without a default."""
    schema = schema_of(domain, op_type, version)
    given = {} if schema is None else schema.attributes
    return frozenset(name for name, attribute in given.items() if attribute.required)


def _check_versions(proto: onnx.ModelProto) -> None:
    newest = onnx.defs.onnx_opset_version()
    for entry in proto.opset_import:
        if entry.domain in ("", "ai.onnx") and not 0 < entry.version <= newest:
            raise GraphgenError(
                f"the model has opset {entry.version}, but the installed onnx "
                f"{onnx.__version__} knows 1 to {newest}: install a newer one, or export again"
            )
    if proto.ir_version > onnx.IR_VERSION:
        raise GraphgenError(
            f"the model has IR version {proto.ir_version}, but the installed onnx "
            f"{onnx.__version__} knows only up to {onnx.IR_VERSION}: install a newer onnx"
        )


def _check_notes(proto: onnx.ModelProto) -> None:
    """Leave out, with a warning, what we once noted and somebody has damaged."""
    for props, key, well in (
        (proto.metadata_props, DECLARED, _is_counts),
        (proto.graph.metadata_props, SCALARS, _is_names),
    ):
        for entry in [entry for entry in props if entry.key == key]:
            try:
                damaged = not well(json.loads(entry.value))
            except (ValueError, RecursionError):
                damaged = True
            if damaged:
                warn(f"the metadata {key!r} is damaged, and left out")
                props.remove(entry)


def _is_counts(found: Any) -> bool:
    return isinstance(found, dict) and all(type(n) is int for n in found.values())


def _is_names(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(name, str) for name in found)


@cache
def _field_of(dtype: int) -> str:
    """The field of a TensorProto that holds numbers of this dtype, or ""."""
    try:
        return str(onnx.helper.tensor_dtype_to_field(dtype))
    except KeyError:
        return ""


def _mend(message: Any, *, in_function: bool) -> None:
    """Check and mend a message and all inside it, functions' bodies excepted."""
    match message.DESCRIPTOR.name:
        case "Dimension":
            _mend_size(message)
        case "GraphProto":
            types = {value.name: value.type for value in message.input}
            for value in message.output:  # an input that is one, too, is what the input declares
                if value.name in types:
                    value.type.CopyFrom(types[value.name])
        case "TensorShapeProto" if len(message.dim) > AXES:
            raise ValueError(f"a tensor of {len(message.dim)} axes is declared; {AXES} at most")
        case "TensorProto":
            _mend_tensor(message)
        case "NodeProto":
            message.ClearField("device_configurations")
        case "AttributeProto":
            _mend_attribute(message, in_function=in_function)
    for field, content in message.ListFields():
        if field.type == _MESSAGE and field.name != "functions":
            for part in content if field.is_repeated else [content]:
                _mend(part, in_function=in_function)
        elif field.type == _TEXT:
            _mend_text(message, field, content)


def _mend_size(size: Any) -> None:
    if size.dim_param:
        size.dim_param = legible(size.dim_param)
    else:
        size.ClearField("dim_param")
    if size.dim_value < 0:  # any size, for the runtime
        size.ClearField("dim_value")


def _mend_tensor(tensor: onnx.TensorProto) -> None:
    if any(size < 0 for size in tensor.dims):
        raise ValueError(f"the tensor {tensor.name!r} has sizes {list(tensor.dims)}")
    read = "raw_data" if tensor.HasField("raw_data") else _field_of(tensor.data_type)
    for name in _TYPED:
        if name != read:
            tensor.ClearField(name)  # the runtime does not look at it
    for entry in [e for e in tensor.external_data if e.key not in _OUTSIDE]:
        tensor.external_data.remove(entry)
    for entry in tensor.external_data:
        if entry.key in ("offset", "length") and not re.fullmatch("[0-9]+", entry.value):
            where = f"the {entry.key} of the data of {tensor.name!r}"
            raise ValueError(f"{where} is {entry.value!r}, not a number of bytes")


def _mend_attribute(attribute: onnx.AttributeProto, *, in_function: bool) -> None:
    if not in_function:
        attribute.ClearField("ref_attr_name")
    elif attribute.ref_attr_name:
        for name in _held(attribute):
            attribute.ClearField(name)  # the call says what it is
    given = _held(attribute)
    if not given <= {_CONTENT.get(attribute.type)}:
        kind = onnx.AttributeProto.AttributeType.Name(attribute.type)
        held = ", ".join(sorted(given))
        raise ValueError(f"the attribute {attribute.name!r} is of type {kind} and holds {held}")


def _mend_text(message: Any, field: Any, content: Any) -> None:
    """Read text that is not UTF-8 as the runtime does; the names of operators have to be."""
    if field.is_repeated:
        for i, text in enumerate(content):
            if isinstance(text, bytes):
                content[i] = text.decode(errors="backslashreplace")
    elif isinstance(content, bytes):
        if field.name in ("op_type", "domain"):
            raise ValueError(f"the name {content!r} is not UTF-8")
        setattr(message, field.name, content.decode(errors="backslashreplace"))


def _held(attribute: onnx.AttributeProto) -> set[str]:
    return {field.name for field, _ in attribute.ListFields()} - _ASIDE


@lru_cache(TEXTS)
def legible(name: str) -> str:
    """The name of a size as inference can read it: a word, or an expression of words.

    Anything else becomes a word that no other name becomes.
    """
    if len(name) <= _LONGEST and (name.isidentifier() or _is_expression(name)):
        return name
    digest = blake2b(name.encode(errors="surrogatepass"), digest_size=6).hexdigest()
    word = re.sub(r"\W+", "_", name[:40])
    return f"dim_{word}_{digest}"


def _is_expression(text: str) -> bool:
    """Whether a name is a short expression of words and numbers with a finite value."""
    rest = _POWER.sub("size", re.sub(r"\s*([-+*/%(),])\s*", r"\1", text.strip()))
    if "**" in rest:  # sympy would calculate 9**9**9**9
        return False
    for _ in range(_OPERATIONS):
        if rest == (rest := _STEP.sub("size", rest, count=1)):
            break
    if not re.fullmatch(_ATOM, rest):
        return False
    try:
        return "zoo" not in str(ir.SymbolicDim(text) + 1)
    except (ValueError, ArithmeticError, TypeError):  # a division by zero, an argument too few
        return False


def _check_graph(graph: onnx.GraphProto, outer: frozenset[str] = frozenset()) -> None:
    _keep_one(graph.initializer)
    names = [value.name for value in graph.input]
    inputs = {*names}
    names += [t.name for t in graph.initializer if t.name not in inputs]
    if not graph.output:
        raise GraphgenError(
            f"the graph {graph.name!r} has no outputs; export it with what it gives"
        )
    _check_names(names, graph.node, [value.name for value in graph.output], outer)


def _keep_one(weights: Any) -> None:
    """Of weights that are the same in all, one stays; the runtime takes any of others."""
    seen = set[bytes]()
    if len({weight.name for weight in weights}) == len(weights):
        return
    for i, content in reversed([*enumerate(weight.SerializeToString() for weight in weights)]):
        if content in seen:
            del weights[i]
        seen.add(content)


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
        for name in node.input:
            if name and name not in known:
                raise ValueError(f"{node.op_type} {node.name} reads {name!r}, which nothing makes")
        for subgraph in inner_graphs(node):
            _check_graph(subgraph, known)
    for name in outputs:
        if name not in assigned:
            raise ValueError(f"the output {name!r} is not made by anything in its graph")
