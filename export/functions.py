"""Operators that no runtime knows, carried by the file as model-local functions."""

from collections import Counter
from collections.abc import Iterable

import onnx_ir as ir

from graphgen.edit import constant_node, identity_of
from graphgen.errors import GraphgenError, warn
from graphgen.export.opset import scopes
from graphgen.infer import DOMAIN, OPSET, describe, new_context, schema_of
from graphgen.op import TABLE, Op, find_op, read_attributes
from graphgen.places import where_is
from graphgen.record import recording
from graphgen.targets.tables import committed


def attach_functions(model: ir.Model) -> None:
    """Give every node of our own domain a function that holds its operator's body.

    A body depends on attributes, dtypes, ranks and static sizes, so an operator may need several:
    `Dropout`, `Dropout_2`, ... in the order of first use. Equal bodies are shared.
    """
    imports = {"": OPSET, "com.microsoft": 1, **model.graph.opset_imports, DOMAIN: 1}
    by_call: dict[object, str] = {}
    by_body: dict[object, str] = {}
    count: Counter[str] = Counter()

    def attach(nodes: Iterable[ir.Node]) -> None:
        for node in nodes:
            if node.domain != DOMAIN:
                continue
            call = _describe_call(node)
            if call not in by_call:
                function = _record(node, imports)
                attach(function)
                body = (call[:2], _text(function))
                if body not in by_body:
                    count[node.op_type] += 1
                    number = count[node.op_type]
                    by_body[body] = node.op_type if number == 1 else f"{node.op_type}_{number}"
                    function.name = by_body[body]
                    model.functions[function.identifier()] = function
                by_call[call] = by_body[body]
            node.op_type = by_call[call]

    attach(list(model.graph.all_nodes()))


def detach_functions(model: ir.Model) -> None:
    """Drop functions whose operators the table or the runtime has; their nodes call the operator.

    If ONNX Runtime knows an operator by a function's name, it runs the operator and ignores the
    function, whatever its overload. Nodes of ours get the plain name back.
    """
    ours = {}
    for key, function in model.functions.items():
        name, _, number = function.name.rpartition("_")
        plain = name if number.isdigit() and function.domain == DOMAIN else function.name
        domain = "" if function.domain == "ai.onnx" else function.domain
        version = model.graph.opset_imports.get(domain, 1)
        known = bool(domain) and (domain, plain) in TABLE
        if not known and _is_operator(domain, plain, version):
            warn(
                f"the model's function {plain} has the name of an operator, which onnxruntime runs "
                "instead; the function is left out: rename it to have it run"
            )
            known = True
        if known:
            ours[key] = plain
    for key in ours:
        del model.functions[key]
    for scope in scopes(model):
        for node in scope.all_nodes():
            node.op_type = ours.get(node.op_identifier(), node.op_type)


def _is_operator(domain: str, name: str, version: int) -> bool:
    """Whether the runtime knows an operator of this name at a version of its domain.

    It has ONNX's operators, except the optimizers of ai.onnx.preview.training, and its own.
    """
    if domain in ("", "ai.onnx.ml") and schema_of(domain, name, version) is not None:
        return True
    tables = [committed(provider)["kernels"].get(domain, {}) for provider in ("cpu", "cuda")]
    return any(first <= version for rows in tables for first, *_ in rows.get(name, ()))


def _describe_call(node: ir.Node) -> tuple[object, object, object]:
    """What a body can depend on; of symbols only which are equal counts, not their names."""
    symbols: dict[str | None, str] = {}
    shapes: list[object] = []
    for value in node.inputs:
        if value is not None and value.shape is None:
            raise GraphgenError(
                f"{where_is(node)}: {node.op_type} got {describe(value)}, whose rank is unknown, "
                "but its body needs the rank: legalize the graph before the export"
            )
        dims = () if value is None or value.shape is None else value.shape.dims
        shapes.append(
            tuple(
                symbols.setdefault(d.value, f"d{len(symbols)}")
                if isinstance(d, ir.SymbolicDim)
                else d
                for d in dims
            )
        )
    attributes = tuple((a.name, repr(a.value)) for a in node.attributes.values())
    dtypes = tuple(None if v is None else v.dtype for v in node.inputs)
    return (node.op_type, attributes), dtypes, tuple(shapes)


def _record(node: ir.Node, imports: dict[str, int]) -> ir.Function:
    op = find_op(node)
    if op is None or not op.composite:
        raise GraphgenError(
            f"{where_is(node)}: {node.op_type} of domain {DOMAIN} has no body to write into the "
            "file; declare it as a composite"
        )
    with recording(context=new_context(imports)) as tape:
        inputs = [_parameter(op, i, value) for i, value in enumerate(node.inputs)]
        given = [None if node.inputs[i] is None else x for i, x in enumerate(inputs)]
        result = op.expand(given, read_attributes(op, node))
        several = result if isinstance(result, tuple) else (result,)
        results = [tape.operand(value) for value in several]
        for i, value in enumerate(results):
            if value.producer() not in tape.nodes or value in results[:i]:
                tape.nodes.append(identity_of(value))
                results[i] = tape.nodes[-1].outputs[0]
        constants = []  # a function has no initializers
        for value in tape.constants.values():
            if value.uses():
                constants.append(constant_node(value))
                value.replace_all_uses_with(constants[-1].outputs[0])
        graph = ir.Graph(
            inputs, results, nodes=[*constants, *tape.nodes], opset_imports=dict(imports)
        )
        tape.kept = True
    used = {n.domain for n in graph}
    for domain in set(imports) - used - {""}:
        del graph.opset_imports[domain]
    attributes = [ir.Attr(a.name, a.type, None) for a in node.attributes.values()]
    return ir.Function(op.domain, op.name, graph=graph, attributes=attributes)


def _parameter(op: Op, index: int, value: ir.Value | None) -> ir.Value:
    name = op.inputs[min(index, len(op.inputs) - 1)]
    name = f"{name}_{index}" if op.variadic else name
    if value is None:
        return ir.Value(name=name)
    return ir.Value(name=name, type=value.type, shape=value.shape)


def _text(function: ir.Function) -> bytes:
    """The body's bytes, without the types of its values."""
    proto = ir.to_proto(function)
    del proto.value_info[:]
    text: bytes = proto.SerializeToString(deterministic=True)
    return text
