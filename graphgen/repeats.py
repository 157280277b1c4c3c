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

_BY_SIZES = (
    Trait.LAYOUT | Trait.SHAPE | Trait.BROADCASTS | Trait.PRODUCT | Trait.NORMALIZES | Trait.BY_ROWS
)  # numbers that these read decide no size of the result, but for known integers

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
        dtype, content = type_.dtype, _content_of(x, context)
        dims = tuple([d if isinstance(d, int) else d.value for d in shape.dims])
        if None in dims or (read and not content and dtype not in _NO_SIZES):
            return None
        key += [dtype, dims, content]
    return tuple(key)


def _content_of(x: ir.Value, context: ShapeInferenceContext) -> object:
    """What is known to be in a small tensor, or None."""
    held, sizes = ir.convenience.get_const_tensor(x), context._symbolic_values.get(x)
    if held is not None and held.size <= _FEW and held.dtype != ir.DataType.STRING:
        return held.tobytes()
    return None if sizes is None else tuple(map(str, sizes))


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
    """Keep the types and sizes found for a node, unless it holds more.

    A size that was made up has one name wherever such operands decide it.
    """
    types = []
    plain = [x is None or _content_of(x, context) is not None for x in node.inputs]
    described = all(plain) or has(node, Trait.SHAPE)
    sized = described or has(node, _BY_SIZES) or (has(node, Trait.SIZED) and all(plain[1:]))
    for y in node.outputs:
        held, sizes = y.const_value, context._symbolic_values.get(y)
        if y.shape is None or y.dtype is None or not isinstance(y.type, ir.TensorType):
            return
        if held is not None and (sizes is None or held.numpy().reshape(-1).tolist() != sizes):
            return
        if held is None and sizes is not None and all(isinstance(n, int) for n in sizes):
            return  # once recalled, it would be held
        for found, decided in ((y.shape, sized), (sizes, described)):
            if not decided and _made_up(found, context) - _made_up(key, context):
                return
        types.append((y.dtype, y.shape.dims, sizes and tuple(sizes)))
    _found.setdefault(context, {})[key] = types


def _made_up(found: object, context: ShapeInferenceContext) -> set[str]:
    """The names of sizes in a shape, sizes or a key that inference made up."""
    names = {*_NAME.findall(str(found))}
    return {n for n in names if n.startswith(ELEMENT) or context.is_generated_symbol(n)}
