"""Operators by their definition in ONNX: what the schema of an operator spells in simpler ones.

It is used where no declaration of ours is: for gradients, which are then those of the nodes.
"""

from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from graphgen.infer import OPSET, infer, schema_of
from graphgen.op import find_op
from graphgen.record import Tape


def has_function(node: ir.Node) -> bool:
    """Whether a node's operator is none of ours, but ONNX defines it by a function."""
    schema: Any = schema_of(node.domain, node.op_type) if find_op(node) is None else None
    return bool(schema and (schema.has_function or schema.has_context_dependent_function))


def record_function(node: ir.Node, tape: Tape) -> list[ir.Value]:
    """Record the nodes of such a function; return its results."""
    schema: Any = schema_of(node.domain, node.op_type)
    call = ir.to_proto(node)
    given = {attribute.name for attribute in call.attribute}
    defaults = [a.default_value for n, a in schema.attributes.items() if n not in given]
    call.attribute.extend(value for value in defaults if value.name)
    if schema.has_function:
        version = max(v for v in schema.function_opset_versions if v <= OPSET)
        content = schema.get_function_with_opset_version(version)
    else:
        version = max(v for v in schema.context_dependent_function_opset_versions if v <= OPSET)
        types = [onnx.TypeProto() if x is None else ir.to_proto(x).type for x in node.inputs]
        content = schema.get_context_dependent_function_with_opset_version(
            version, call.SerializeToString(), [t.SerializeToString() for t in types]
        )
    function = ir.from_proto(onnx.FunctionProto.FromString(content))
    assert isinstance(function, ir.Function)
    inputs = [None if x is None else ir.Value(name=f"x{i}") for i, x in enumerate(node.inputs)]
    attributes = [ir.from_proto(attribute) for attribute in call.attribute]
    again = ir.Node(
        function.domain,
        function.name,
        inputs,
        attributes,
        outputs=[ir.Value(name=f"y{i}") for i in range(len(node.outputs))],
    )
    model = ir.Model(
        ir.Graph([x for x in inputs if x is not None], again.outputs, nodes=[again]),
        ir_version=10,
        functions=[function],
    )
    common.InlinePass()(model)
    results, nodes = list(model.graph.outputs), list(model.graph)
    model.graph.outputs.clear()
    for x, value in zip(inputs, node.inputs, strict=True):
        if x is not None and value is not None:
            x.replace_all_uses_with(value)
    model.graph.remove(nodes)
    for new in nodes:
        new.name = None
        for value in new.outputs:
            value.name = None
        tape.nodes.append(new)
        infer(new, tape.context)
    return results
