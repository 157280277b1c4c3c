"""The opset a graph needs: files are raised to ours when read, and get the lowest when written."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

import onnx
import onnx.version_converter
import onnx_ir as ir
from onnx_ir.passes import common

from graphgen.errors import GraphgenError
from graphgen.expansion import all_nodes
from graphgen.graph import bytes_of
from graphgen.infer import OPSET, schema_of
from graphgen.maps import from_proto, to_proto
from graphgen.op import TABLE
from graphgen.ops.versions import (
    INFERRED_ANEW,
    REDEFINED,
    overflows_at,
    raise_alone,
    raise_redefined,
    raise_scans,
)
from graphgen.places import block_of
from graphgen.record import PATH

UNCHECKED = "unchecked"
"""The domain, for a while, of operators that onnx must not look into."""

OLDEST = 13
"""The lowest opset of files that are written."""

_SMALL = 1024  # bytes: shapes, axes and scalars, which inference and conversion need

# From IR version 9 on, each version but 14 came with dtypes: the first number of those.
_NEW_DTYPES = [ir.DataType.FLOAT8E4M3FN, ir.DataType.UINT4, ir.DataType.FLOAT4E2M1, 24, 25, 27]


class _Signature(NamedTuple):
    since: int
    deprecated: bool
    attributes: dict[str, tuple[bool, bytes]]  # by name: required, default (b"" for none)
    arity: tuple[range, range]  # of inputs and outputs
    formals: tuple[list[tuple[bool, frozenset[str]]], ...]  # of both: optional, dtypes


@cache
def _signature(op_type: str, version: int) -> _Signature | None:
    schema = schema_of("", op_type, version)
    if schema is None:
        return None
    optional = schema.FormalParameterOption.Optional
    return _Signature(
        schema.since_version,
        schema.deprecated,
        {n: (a.required, _default(a)) for n, a in schema.attributes.items()},
        (
            range(schema.min_input, schema.max_input + 1),
            range(schema.min_output, schema.max_output + 1),
        ),
        tuple(
            [(formal.option == optional, frozenset(formal.types)) for formal in formals]
            for formals in (schema.inputs, schema.outputs)
        ),
    )


def _default(attribute: onnx.defs.OpSchema.Attribute) -> bytes:
    default: bytes = attribute.default_value.SerializeToString()
    return default


def keeps_meaning(node: ir.Node, old: int, new: int) -> bool:
    """Whether a node that is legal at opset `old` is so at `new`, and means the same there.

    The schemas say so, and a list of what they cannot say, both complete from opset 13 on. An
    operator outside the standard, or unknown at `old`, has nothing to lose.
    """
    before, after = _signature(node.op_type, old), _signature(node.op_type, new)
    if node.domain or before is None:
        return True
    if after is None or after.deprecated:
        return False
    if before.since == after.since:
        return True
    first, second = sorted((before, after), key=lambda signature: signature.since)
    for table in (REDEFINED, INFERRED_ANEW) if new < old else (REDEFINED,):
        redefined, affects = table.get(node.op_type, (0, None))
        if affects is not None and first.since < redefined <= second.since and affects(node):
            return False
    return _attributes_fit(node, first, second, after) and all(
        _values_fit(values, after.arity[i], after.formals[i], lowered=new < old)
        for i, values in enumerate((node.inputs, node.outputs))
    )


def _attributes_fit(
    node: ir.Node, first: _Signature, second: _Signature, after: _Signature
) -> bool:
    given = node.attributes.keys()
    if not given <= after.attributes.keys():
        return False
    for name in (first.attributes.keys() | second.attributes.keys()) - given:
        if after.attributes.get(name, (False, b""))[0]:
            return False
        # The default of a new attribute keeps the old meaning; a changed or dropped one does not.
        if name in first.attributes:
            default = first.attributes[name][1]
            if default != second.attributes.get(name, (False, b""))[1]:
                return False
    return True


def _values_fit(
    values: Sequence[ir.Value | None],
    arity: range,
    formals: list[tuple[bool, frozenset[str]]],
    *,
    lowered: bool,
) -> bool:
    if len(values) not in arity:
        return False
    for i, value in enumerate(values):
        optional, dtypes = formals[min(i, len(formals) - 1)]
        if value is None:
            if not optional:
                return False
        elif name := _name_of(value.type):
            if name not in dtypes:
                return False
        elif lowered and value.uses():  # later versions only add dtypes
            return False
    return True


def _name_of(of: ir.TypeProtocol | None) -> str:
    """`seq(tensor(float))`: a type as schemas write it; nothing if it is not known."""
    if isinstance(of, ir.TensorType):  # most are; of a protocol, another answer takes longer
        return f"tensor({of.dtype.name.lower()})"
    for kind, name in ((ir.SequenceType, "seq"), (ir.OptionalType, "optional")):
        if isinstance(of, kind):
            return f"{name}({inner})" if (inner := _name_of(of.elem_type)) else ""
    return ""


def scopes(model: ir.Model) -> list[ir.Graph | ir.Function]:
    """The main graph and the functions: what imports opsets."""
    return [model.graph, *model.functions.values()]


def _standard_nodes(model: ir.Model) -> Iterator[ir.Node]:
    for scope in scopes(model):
        yield from (node for node in scope.all_nodes() if not node.domain)


def stamp(model: ir.Model, oldest: int = OLDEST) -> None:
    """Import the lowest opset from 13 on at which no node loses its meaning, and the IR it needs.

    The nodes' schemas decide: attributes, arity and dtypes, also in subgraphs and functions.
    `oldest` is the lowest to consider. An operator that is newer than the model's opset raises it.
    """
    imports, nodes = model.graph.opset_imports, list(_standard_nodes(model))
    present = _with_newer(imports.get("", OPSET), nodes)
    for version in range(oldest, present):
        if all(
            keeps_meaning(node, present, version) and not overflows_at(node, version)
            for node in nodes
        ):
            present = version
            break
    for scope in scopes(model):
        others = sorted((d, v) for d, v in scope.opset_imports.items() if d)
        scope.opset_imports.clear()
        scope.opset_imports.update({"": present, **dict(others)})
    opset = onnx.helper.make_opsetid("", present)
    versions = [onnx.helper.find_min_ir_version_for([opset]), 8 if model.functions else 4]
    for graph in model.graphs():
        for value in chain(graph.inputs, graph.initializers.values()):
            if new := bisect_right(_NEW_DTYPES, value.dtype or 0):
                versions.append(8 + new)
    model.ir_version = max(versions)


def _with_newer(present: int, nodes: Sequence[ir.Node]) -> int:
    """The opset, or the first at which operators exist that it does not have."""
    unknown = {node.op_type for node in nodes if _signature(node.op_type, present) is None}
    schemas = [schema_of("", name, onnx.defs.onnx_opset_version()) for name in sorted(unknown)]
    raised = max([present, *(schema.since_version for schema in schemas if schema is not None)])
    for node in nodes if raised > present else ():
        if not keeps_meaning(node, present, raised):
            newer = ", ".join(sorted(unknown))
            raise GraphgenError(
                f"{newer} needs opset {raised}, at which {node.op_type} means something else: "
                "leave one of them out"
            )
    return raised


def lift(model: ir.Model, who: str) -> None:
    """Raise the standard opset to `OPSET` if it is lower, without touching weights.

    If a node would change its meaning, and not only reductions, equal Splits and group norms do,
    onnx converts the graph; since it drops all that nodes carry, their origin is written into them
    first. Raises a GraphgenError that names the operators that cannot be raised.
    """
    _mark_places(model)
    present = model.graph.opset_imports.setdefault("", OPSET)
    if present >= OPSET:
        return

    def redefined(node: ir.Node) -> bool:
        return not keeps_meaning(node, present, OPSET)

    changed = {n.op_type for n in _standard_nodes(model) if redefined(n)}
    if present < OLDEST or (changed and not raise_alone(model, redefined)):
        try:
            raise_redefined(model, redefined, UNCHECKED)
            _without_batches(model)
            model.graph = _convert(model)
        except Exception as error:  # every adapter raises its own
            names = ", ".join(sorted(changed)) or "the graph"
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise GraphgenError(
                f"{who}: {names} cannot be raised from opset {present} to {OPSET} ({reason}); "
                f"export the model again with opset {OPSET}"
            ) from error
    model.graph.opset_imports[""] = OPSET


def _without_batches(model: ir.Model) -> None:
    """Raise a graph of opset 8 with a Scan to 9; the converter gets the sizes of its inputs wrong.

    Raises ValueError if another operator of opset 8 means something else at 9.
    """
    imports, nodes = model.graph.opset_imports, list(_standard_nodes(model))
    if imports[""] == 8 and raise_scans(model, UNCHECKED):
        for node in nodes:
            if node.graph is not None and not keeps_meaning(node, 8, 9):
                raise ValueError(f"{node.op_type} of opset 8 is next to a Scan of opset 8")
        imports[UNCHECKED], imports[""] = 1, 9


def _convert(model: ir.Model) -> ir.Graph:
    light, present = without_weights(model), model.graph.opset_imports[""]
    for node in light.graph.all_nodes():
        # The runtime has some before ONNX: LayerNormalization, in files that it has optimized.
        if not node.domain and schema_of("", node.op_type, present) is None:
            node.domain, light.graph.opset_imports[UNCHECKED] = UNCHECKED, 1
    proto = onnx.shape_inference.infer_shapes(to_proto(light))
    proto = onnx.version_converter.convert_version(proto, OPSET)
    checked = onnx.ModelProto.FromString(proto.SerializeToString())
    hide_from_checker(checked)
    onnx.checker.check_model(checked)
    graph = from_proto(proto).graph
    for node in graph.all_nodes():
        node.domain = "" if node.domain == UNCHECKED else node.domain
    inputs = {value.name: value for value in graph.inputs}
    before = {value.name: value.shape for value in model.graph.inputs}
    for name, shape in before.items():
        if inputs[name].shape != shape:
            raise ValueError(f"the input {name} would change its shape")
    graph.metadata_props.update(model.graph.metadata_props)
    for name, old in model.graph.initializers.items():
        value = graph.initializers.get(name) or inputs[name]
        value.metadata_props.update(old.metadata_props)
        if name in graph.initializers:
            continue
        if name not in before:
            graph.inputs.remove(value)
        value.const_value = old.const_value
        graph.register_initializer(value)
    _take_places(graph, model.graph)
    return graph


def hide_from_checker(proto: onnx.ModelProto) -> None:
    """Put unknown operators where the checker refuses something that the runtime accepts.

    That is an input or output without a rank, or an operator of the runtime's in the standard
    domain.
    """
    graph = proto.graph
    for values, role in ((graph.input, "output"), (graph.output, "input")):
        for i, value in reversed(list(enumerate(values))):
            if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
                node = onnx.NodeProto(op_type="Any", domain=UNCHECKED)
                getattr(node, role).append(value.name)
                graph.node.insert(0 if role == "output" else len(graph.node), node)
                del values[i]
    for node in all_nodes(graph.node):
        known = schema_of(node.domain, node.op_type) is not None
        if not node.domain and not known and ("", node.op_type) in TABLE:
            node.domain = UNCHECKED  # what the runtime alone defines there
    proto.opset_import.add(domain=UNCHECKED, version=1)


def _mark_places(model: ir.Model) -> None:
    """Write into every node where it is; neither its name nor its order survives."""
    for node in model.graph.all_nodes():
        if path := block_of(node):
            node.metadata_props[PATH] = path


def _take_places(graph: ir.Graph, old: ir.Graph) -> None:
    """Write into the nodes of a converted graph what those of the old one carried.

    Nodes are recognized by their outputs; a new node takes it from a consumer.
    """
    given = {v.name: node.metadata_props for node in old.all_nodes() for v in node.outputs}
    for node in reversed(list(graph.all_nodes())):
        users = [use.node.metadata_props for v in node.outputs for use in v.uses()]
        known = [given[v.name] for v in node.outputs if v.name in given]
        node.metadata_props.update(next(iter([*known, *users]), {}))


def without_weights(model: ir.Model) -> ir.Model:
    """A copy whose initializers above 1 kB are inputs, so that a checker reads no weights."""
    light = model.clone()
    light.ir_version = max(light.ir_version, 4)
    for name, value in list(light.graph.initializers.items()):
        tensor = value.const_value
        assert tensor is not None
        if bytes_of(tensor) > _SMALL:
            del light.graph.initializers[name]
            value.const_value = None
            if value not in light.graph.inputs:
                light.graph.inputs.append(value)
        elif isinstance(tensor, ir.ExternalTensor):
            value.const_value = in_memory(tensor)
    common.NameFixPass()(light)
    return light


def in_memory(tensor: ir.ExternalTensor) -> ir.TensorProtocol:
    """The tensor as one to write into the model; its bytes stay mapped from its file."""
    return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, shape=tensor.shape, name=tensor.name)
