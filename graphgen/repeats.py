"""Types of nodes that repeat: the layers of a model are alike, so rules run for one of them."""

import re
from typing import Any
from weakref import WeakKeyDictionary

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

from graphgen.traits import Trait, has

_FEW = 16
_NAME = re.compile(r"\w+")
_PLAIN = {ir.AttributeType[name] for name in ("INT", "INTS", "FLOAT", "FLOATS", "STRING")}
_NO_SIZES = {dtype for dtype in ir.DataType if dtype.is_floating_point()} | {ir.DataType.BOOL}

ELEMENT = "_element_"
"""How the name of an unknown element of an integer tensor begins."""

_found: WeakKeyDictionary[ShapeInferenceContext, dict[object, Any]] = WeakKeyDictionary()


def operands_of(node: ir.Node, context: ShapeInferenceContext) -> object:
    """All that the types of a node's results depend on, or None if that is unknown.

    It cannot for integers of which nothing is known, as they may be sizes, where the node reads
    them; and for results of which something is known already.
    """
    if any(y.type or y.shape for y in node.outputs):
        return None
    read = not has(node, Trait.SHAPE)
    key: list[object] = [node.domain, node.op_type, len(node.outputs)]
    for attr in node.attributes.data.values():
        if attr.type not in _PLAIN:
            return None
        key += [attr.name, tuple(attr.value) if isinstance(attr.value, list) else attr.value]
    for x in node.inputs:
        if x is None:
            key.append(None)
            continue
        type_, shape = x.type, x.shape
        if shape is None or not isinstance(type_, ir.TensorType):
            return None
        dtype = type_.dtype
        held, sizes = ir.convenience.get_const_tensor(x), context._symbolic_values.get(x)
        content: object = None
        if held is not None and held.size <= _FEW and dtype != ir.DataType.STRING:
            content = held.tobytes()
        elif sizes is not None:
            content = tuple(map(str, sizes))
        dims = tuple([d if isinstance(d, int) else d.value for d in shape.dims])
        if None in dims or (read and not content and dtype not in _NO_SIZES):
            return None
        key += [dtype, dims, content]
    return tuple(key)


def recall(node: ir.Node, key: object, context: ShapeInferenceContext) -> bool:
    """Give a node the types that were found for such operands; False if there were none yet."""
    types = _found.get(context, {}).get(key)
    if types is None:
        return False
    for y, (dtype, dims, sizes) in zip(node.outputs, types, strict=True):
        y.type, y.shape = ir.TensorType(dtype), ir.Shape(dims)
        if sizes is not None:
            context.set_symbolic_value(y, [*sizes])
    return True


def remember(node: ir.Node, key: object, context: ShapeInferenceContext) -> None:
    """Keep the types and sizes found for a node, unless it holds more, or a size was made up."""
    given, types = {*_NAME.findall(str(key))}, []
    for y in node.outputs:
        held, sizes = y.const_value, context._symbolic_values.get(y)
        if y.shape is None or y.dtype is None or not isinstance(y.type, ir.TensorType):
            return
        if held is not None and (sizes is None or held.numpy().reshape(-1).tolist() != sizes):
            return
        if held is None and sizes is not None and all(isinstance(n, int) for n in sizes):
            return  # once recalled, it would be held
        names = {*_NAME.findall(f"{y.shape} {sizes}")} - given
        if any(context.is_generated_symbol(n) or n.startswith(ELEMENT) for n in names):
            return
        types.append((y.dtype, y.shape.dims, sizes and tuple(sizes)))
    _found.setdefault(context, {})[key] = types
