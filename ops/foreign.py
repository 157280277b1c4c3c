"""Traits of operators that have only a name here, no meaning: they come with files.

And the types of quantized ones for which the inference library has wrong rules.
"""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext, registry

from graphgen.graph import constant
from graphgen.infer import OPSET, infer
from graphgen.traits import Trait, declare_traits

_CONTRIB = "com.microsoft"

declare_traits("Constant", Trait.CONSTANT)
for _name in ("If", "Loop", "Scan"):
    declare_traits(_name, Trait.CONTROL_FLOW)
for _name in ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike"):
    declare_traits(_name, Trait.RANDOM)
for _name in ("RandomUniform", "RandomUniformLike"):
    declare_traits(_name, Trait.RANDOM)

# Quantized numbers.
for _name in ("ConvInteger", "QLinearConv"):
    declare_traits(_name, Trait.QUANTIZED | Trait.PRODUCT)
declare_traits("MatMulBnb4", Trait.QUANTIZED | Trait.PRODUCT, domain=_CONTRIB)
declare_traits("QAttention", Trait.QUANTIZED | Trait.PRODUCT, domain=_CONTRIB)
declare_traits("QLinearWhere", Trait.QUANTIZED | Trait.BROADCASTS, domain=_CONTRIB)


def _sizes_as(name: str) -> Callable[[ShapeInferenceContext, ir.Node], None]:
    """The rule for the quantized form of an operator on one tensor: its sizes, and x's dtype."""

    def rule(context: ShapeInferenceContext, node: ir.Node) -> None:
        x, y, given = node.inputs[0], node.outputs[0], dict(node.attributes)
        assert x is not None
        y.type, y.shape = x.type, None
        last = given.pop("channels_last", None)
        if last is None or not last.as_int():
            of_floats = ir.Value(type=ir.TensorType(ir.DataType.FLOAT), shape=x.shape)
            other = ir.Node("", name, [of_floats], given.values())
            infer(other, context)
            y.shape = other.outputs[0].shape

    return rule


def _embed(context: Any, node: ir.Node) -> None:
    """(B, T, D) of the dtype of the scales, and the lengths, (B,)."""
    ids, table, scale = (node.inputs[i] for i in (0, 2, 8))
    assert ids is not None and table is not None and scale is not None
    y, *lengths = node.outputs
    y.type, y.shape = scale.type, None
    if ids.shape is not None and table.shape is not None:
        y.shape = ir.Shape([*ids.shape, table.shape[-1]])
        for value in lengths:
            value.type, value.shape = ids.type, ir.Shape(ids.shape[:1])


def _by_weights_of_four_bits(context: Any, node: ir.Node) -> None:
    """The product of A (..., K) with weights (N, K), or of A (..., N) where they are not turned.

    No schema checks its attributes; without right ones the size is not known, and the runtime
    refuses the node.
    """
    given = {n: x.value for n, x in node.attributes.items() if x.type is ir.AttributeType.INT}
    a, y = next(iter(node.inputs), None), node.outputs[0]
    if a is None:
        return
    y.type, y.shape = a.type, None
    features = given.get("N" if given.get("transB", 1) else "K", -1)
    if a.shape is not None and features >= 0:
        y.shape = ir.Shape([*a.shape[:-1], features])


def _as_standard(name: str) -> Callable[[ShapeInferenceContext, ir.Node], None]:
    """The rule for an operator that the runtime had before ONNX, or for further dtypes."""

    def rule(context: ShapeInferenceContext, node: ir.Node) -> None:
        standard = registry.get("", name, version=OPSET)
        assert standard is not None
        standard(context, node)

    return rule


def _shaped_by(index: int, change: Callable[[ir.Node, list[Any]], list[Any] | None]) -> Any:
    """The rule for a result of the dtype of input `index`, whose sizes `change` makes of its."""

    def rule(context: ShapeInferenceContext, node: ir.Node) -> None:
        x, y = node.inputs[index], node.outputs[0]
        dims = None if x is None or x.shape is None else change(node, [*x.shape])
        y.type, y.shape = None if x is None else x.type, None if dims is None else ir.Shape(dims)

    return rule


def _distances(node: ir.Node, dims: list[Any]) -> list[Any] | None:
    """(M, N) for each of the M rows of A and the N of B."""
    b = node.inputs[1]
    return None if b is None or b.shape is None else [dims[0], b.shape[0]]


def _with_axis(node: ir.Node, dims: list[Any]) -> list[Any] | None:
    """A size of 1 at a constant place, counted from the end if it is negative."""
    axis = constant(node.inputs[1])
    if axis is None:
        return None
    at = int(axis.reshape(-1)[0]) + (len(dims) + 1 if axis.reshape(-1)[0] < 0 else 0)
    return [*dims[:at], 1, *dims[at:]]


def _windows(node: ir.Node, dims: list[Any]) -> list[Any] | None:
    """As many windows as fit one after the other, and their size as a further axis."""
    axis, size = (node.attributes.get_int(name, d) for name, d in (("dim", -1), ("size", None)))
    step = node.attributes.get_int("step", 1)
    if axis is None or not size or not step or not -len(dims) <= axis < len(dims):
        return None
    dims[axis] = (dims[axis] - size) // step + 1
    return [*dims, size]


def _cropped(node: ir.Node, dims: list[Any]) -> list[Any] | None:
    """(regions, channels, height, width), of a constant height and width."""
    regions, sizes = node.inputs[1], constant(node.inputs[3])
    if regions is None or regions.shape is None or sizes is None:
        return None
    return [regions.shape[0], dims[1], *sizes.tolist()]


def _looked_up(context: Any, node: ir.Node) -> None:
    """K numbers of the dtype that is asked for, bfloat16 by default, for each index."""
    places, y = node.inputs[1], node.outputs[0]
    y.type = ir.TensorType(ir.DataType(node.attributes.get_int("output_dtype", 16)))
    y.shape = None
    if places is not None and places.shape is not None and "K" in node.attributes:
        y.shape = ir.Shape([*places.shape, node.attributes["K"].as_int()])


def _by_packed_weights(node: ir.Node, dims: list[Any]) -> list[Any] | None:
    """(..., N), the second of the constant sizes of the weights, (K, N)."""
    sizes = constant(node.inputs[2])
    return None if sizes is None or sizes.size != 2 else [*dims[:-1], int(sizes[1])]


def _of_words(node: ir.Node, filters: list[Any]) -> list[Any] | None:
    """(words, features), of the filters of a convolution over the letters of each word."""
    words = node.inputs[0]
    return None if words is None or words.shape is None else [words.shape[0], filters[0]]


def _routed(context: Any, node: ir.Node) -> None:
    """(tokens, experts), of logits or, with weights of a projection, of activations."""
    x, experts = node.inputs[0], node.inputs[1]
    for place, y in enumerate(node.outputs):
        source = experts if place else x
        y.type, y.shape = None if source is None else source.type, None
        if x is not None and x.shape is not None and experts is not None and experts.shape:
            rows = x.shape[0] if len(x.shape) == 2 else context.new_symbolic_dim()
            y.shape = ir.Shape([rows, experts.shape[0]])


def _bifurcation(context: Any, node: ir.Node) -> None:
    """The tokens, as many as agree and follow, and a number as the third input is one."""
    for y, x in zip(node.outputs, node.inputs[1:3], strict=False):
        if x is not None:
            y.type, y.shape = x.type, x.shape
    node.outputs[0].shape = ir.Shape([context.new_symbolic_dim()])


def _with_given_pads(context: ShapeInferenceContext, node: ir.Node) -> None:
    """ConvTranspose with constant pads, which are its third input."""
    x, w, pads, y = *node.inputs[:3], node.outputs[0]
    numbers = constant(pads)
    if x is not None and w is not None and numbers is not None:
        given = [*node.attributes.values(), ir.AttrInt64s("pads", numbers.tolist())]
        copies = [ir.Value(type=v.type, shape=v.shape) for v in (x, w)]
        other = ir.Node("", "ConvTranspose", copies, given)
        infer(other, context)
        y.type, y.shape = x.type, other.outputs[0].shape


def _channels_last(context: ShapeInferenceContext, node: ir.Node) -> None:
    """MaxPool of images (N, ..., C)."""
    x, y = node.inputs[0], node.outputs[0]
    y.type, y.shape = None if x is None else x.type, None
    if x is None or x.shape is None or len(x.shape) < 3:
        return
    n, *sizes, channels = x.shape
    image = ir.Value(type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([n, channels, *sizes]))
    pool = ir.Node("", "MaxPool", [image], [*node.attributes.values()])
    infer(pool, context)
    if (made := pool.outputs[0].shape) is not None:
        y.shape = ir.Shape([n, *made[2:], channels])


def _hashed(context: Any, node: ir.Node) -> None:
    """A hash of 32 bits for each element."""
    x, y = node.inputs[0], node.outputs[0]
    positive = node.attributes.get_int("positive", 1)
    y.type = ir.TensorType(ir.DataType.UINT32 if positive else ir.DataType.INT32)
    y.shape = None if x is None else x.shape


def _different(context: Any, node: ir.Node) -> None:
    """The k different elements of n, in order, where in them each of the n is, and how often."""
    x, count = node.inputs[0], context.new_symbolic_dim()
    places = None if x is None or x.shape is None else ir.Shape(x.shape)
    shapes = (ir.Shape([count]), places, ir.Shape([count]))
    for value, shape in zip(node.outputs, shapes, strict=False):
        value.type, value.shape = ir.TensorType(ir.DataType.INT64), shape
    node.outputs[0].type = None if x is None else x.type


def _path(context: Any, node: ir.Node) -> None:
    """Rows and columns of the cheapest path through a table of costs."""
    node.outputs[0].type = ir.TensorType(ir.DataType.INT32)
    node.outputs[0].shape = ir.Shape([2, context.new_symbolic_dim()])


_BLOCKED = "com.microsoft.nchwc"
"""Images whose channels are in blocks, as the runtime saves at its level all, for one machine."""


def _blocked_window(context: ShapeInferenceContext, node: ir.Node) -> None:
    """The sizes of the operator of the same name; its weights say how many channels blocks have."""
    own = ("activation", "activation_params")
    given = [attribute for name, attribute in node.attributes.items() if name not in own]
    x, w = node.inputs[0], node.inputs[1] if node.op_type == "Conv" else None
    assert x is not None
    y = node.outputs[0]
    y.type, y.shape = x.type, None
    if x.shape is None or (node.op_type == "Conv" and (w is None or w.shape is None)):
        return
    dims = list(x.shape)
    if w is not None and w.shape is not None and isinstance(w.shape[1], int):
        group = node.attributes.get_int("group", 1)
        dims[1] = w.shape[1] * (group if group is not None else 1)
    shapes = [ir.Shape(dims), *([] if w is None or w.shape is None else [w.shape])]
    operands = [ir.Value(type=x.type, shape=shape) for shape in shapes]
    other = ir.Node("", node.op_type, operands, given)
    infer(other, context)
    y.shape = other.outputs[0].shape


def _reordered(context: ShapeInferenceContext, node: ir.Node) -> None:
    """Between channels, at axis 1 or the last one, and blocks of them."""
    x, y, last = node.inputs[0], node.outputs[0], node.attributes.get_int("channels_last", 0)
    assert x is not None
    y.type, y.shape = x.type, None
    if x.shape is None or len(x.shape) != 4:
        return
    n, *sizes = x.shape
    if node.op_type == "ReorderInput":  # the channels fill whole blocks
        inner = sizes[:-1] if last else sizes[1:]
        y.shape = ir.Shape([n, context.new_symbolic_dim(), *inner])
    else:
        channels, inner = node.attributes["channels"].as_int(), sizes[1:]
        y.shape = ir.Shape([n, *inner, channels] if last else [n, channels, *inner])


registry.collect()  # the library's rules, which these take the place of
for _name in ("AveragePool", "GlobalAveragePool"):
    registry.register(_CONTRIB, f"QLinear{_name}", since_version=1)(_sizes_as(_name))
registry.register(_CONTRIB, "MatMulBnb4", since_version=1)(_by_weights_of_four_bits)
registry.register(_CONTRIB, "QEmbedLayerNormalization", since_version=1)(_embed)
for _name in "QuantizeLinear DequantizeLinear Trilu GatherND GridSample Pad Range".split():
    registry.register(_CONTRIB, _name, since_version=1)(_as_standard(_name))
for _name, _standard in (("MatMulInteger16", "MatMulInteger"), ("MaxpoolWithMask", "MaxPool")):
    registry.register(_CONTRIB, _name, since_version=1)(_as_standard(_standard))
for _name in ("AttnLSTM", "DynamicQuantizeLSTM"):
    registry.register(_CONTRIB, _name, since_version=1)(_as_standard("LSTM"))
for _name, _rule in (
    ("BifurcationDetector", _bifurcation),
    ("ConvTransposeWithDynamicPads", _with_given_pads),
    ("DynamicTimeWarping", _path),
    ("GatherPacked", _looked_up),
    ("MoEGroupRouter", _routed),
    ("MurmurHash3", _hashed),
    ("NhwcMaxPool", _channels_last),
    ("Unique", _different),
):
    registry.register(_CONTRIB, _name, since_version=1)(_rule)
for _name, _index, _change in (
    ("CDist", 0, _distances),
    ("CropAndResize", 0, _cropped),
    ("ExpandDims", 0, _with_axis),
    ("MatMulFpQ4", 0, _by_packed_weights),
    ("NGramRepeatBlock", 1, lambda _, dims: dims),
    ("SampleOp", 0, lambda _, dims: dims),
    ("UnfoldTensor", 0, _windows),
    ("WordConvEmbedding", 1, _of_words),
):
    registry.register(_CONTRIB, _name, since_version=1)(_shaped_by(_index, _change))
for _name in ("Conv", "AveragePool", "MaxPool", "GlobalAveragePool", "GlobalMaxPool"):
    registry.register(_BLOCKED, _name, since_version=1)(_blocked_window)
for _name in ("ReorderInput", "ReorderOutput"):
    registry.register(_BLOCKED, _name, since_version=1)(_reordered)
