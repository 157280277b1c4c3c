"""Shapes, operator by operator, where the inference libraries accept or miss something wrong."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext, registry

from graphgen.infer import (
    CHECKS,
    MENDS,
    OPSET,
    DeclaredSizes,
    Dim,
    describe,
    expect_axis,
    expect_distinct,
    expect_same,
    forget,
    readable,
    same_dim,
    same_size,
    simplified,
)
from graphgen.ops.linalg import labels_of
from graphgen.ops.quantized import expect_scales
from graphgen.traits import Trait

_RANKS = 16  # longer lists are not shapes
_FAR = (1 << 31) - 1  # no axis is as long
_WIDE = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.DOUBLE, ir.DataType.FLOAT)
_RANKED = (
    "ConstantOfShape Tile ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceSumSquare "
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp".split()
)


def broadcast(shapes: Sequence[ir.Shape], context: ShapeInferenceContext) -> ir.Shape:
    """NumPy's broadcasting on symbolic shapes; two different symbols give a new one.

    Either symbol may be 1 at run time, so neither can name the result.
    """
    rank = max(len(shape) for shape in shapes)
    result: list[Dim] = []
    for position in range(-rank, 0):
        dims = [shape[position] for shape in shapes if len(shape) >= -position]
        dims = [dim for dim in dims if not (isinstance(dim, int) and dim == 1)]
        fixed = [dim for dim in dims if isinstance(dim, int)]
        if not dims:
            result.append(1)
        elif fixed:
            if any(dim != fixed[0] for dim in fixed):
                raise ValueError(
                    f"dimensions {min(fixed)} and {max(fixed)} do not broadcast; make them equal, "
                    "or one of them 1"
                )
            expect_same(dims, context)
            result.append(fixed[0])
        else:
            expect_same(dims, context)
            common = broadcast_partner(dims)
            if common is None and isinstance(context, DeclaredSizes):
                common = dims[0] if all(same_size(dims[0], dim) for dim in dims) else None
            result.append(context.new_symbolic_dim() if common is None else common)
    return ir.Shape(result)


def broadcast_partner(dims: Sequence[Dim]) -> Dim | None:
    """The dimension that all of these equal whenever the program runs at all, or None.

    Min(n, s) equals s in this sense: if they differ, it is not 1, so nothing broadcasts. Slicing a
    table of n positions gives such a size. Nor is 4*b ever 1.
    """
    if all(re.fullmatch(r"([2-9]|\d\d+)(\*\w+)?", str(dim)) for dim in dims):
        return dims[0]
    for dim in dims:
        cut = re.compile(rf"Min\((\d{{2,}}|[2-9]), {re.escape(str(dim))}\)")
        if all(same_dim(other, dim) or cut.fullmatch(str(other)) for other in dims):
            return dim
    return None


def _check_concat(node: ir.Node) -> None:
    shapes = [v.shape for v in node.inputs if v is not None and v.shape is not None]
    rank = len(shapes[0])
    axis = node.attributes["axis"].as_int()
    if any(len(shape) != rank for shape in shapes):
        raise ValueError(
            "all operands must have the same rank; add axes of size 1 with ops.unsqueeze"
        )
    expect_axis(axis, rank)
    for i in range(rank):
        fixed = {shape[i] for shape in shapes if isinstance(shape[i], int)}
        if i != axis % rank and len(fixed) > 1:
            raise ValueError(
                f"dimension {i} differs: {sorted(fixed)}; "  # type: ignore[type-var]
                f"only sizes of axis {axis} may differ"
            )


def _check_attention(node: ir.Node) -> None:
    q, k, v = node.inputs[:3]
    assert q is not None and k is not None and v is not None
    if q.shape is None or len(q.shape) != 3:
        return
    for value, name in ((q, "q_num_heads"), (k, "kv_num_heads"), (v, "kv_num_heads")):
        heads, width = node.attributes.get(name), value.shape[-1] if value.shape else None
        if heads is None:
            raise ValueError(f"three-dimensional operands need {name}")
        if isinstance(width, int) and width % heads.as_int():
            raise ValueError(f"{name}={heads.as_int()} does not divide {describe(value)}")


def _check_transpose(node: ir.Node) -> None:
    [x], perm = node.inputs, node.attributes.get("perm")
    if perm is not None and x is not None and x.shape is not None:
        axes, rank = list(perm.as_ints()), len(x.shape)
        if sorted(axes) != list(range(rank)):
            raise ValueError(f"perm {axes} does not name each of {rank} axes once, from the front")


def _check_clip(node: ir.Node) -> None:
    for value, name in zip(node.inputs[1:], ("min", "max"), strict=False):
        shape = None if value is None else value.shape
        if shape is not None and shape.is_static() and shape.numpy() not in ((), (1,)):
            raise ValueError(f"{name} is {describe(value)}; it must be a scalar")


def _check_scales(node: ir.Node) -> None:
    x, *scales = node.inputs
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
    block_size = node.attributes.get_int("block_size", 0) or 0
    for given in scales:
        if given is not None and given.shape is not None and x is not None and x.shape is not None:
            expect_scales(given.shape.dims, x.shape.dims, axis, block_size)


def _choose_sizes(node: ir.Node, context: ShapeInferenceContext) -> None:
    """Shape values through Equal and Where: `where(sizes == -1, 1, sizes)`, as exporters write."""
    known = [None if v is None else context.get_symbolic_value(v) for v in node.inputs]
    given = [values for values in known if values is not None]
    if len(given) < len(known) or max(map(len, given)) > _RANKS:
        return
    length = max(map(len, given))
    rows = zip(*(values * length if len(values) == 1 else values for values in given), strict=False)
    if node.op_type == "Where":
        if all(isinstance(condition, int) for condition in known[0] or ()):
            chosen = [a if condition else b for condition, a, b in rows]
            context.set_symbolic_value(node.outputs[0], chosen)
        return
    answers = [_equal(a, b) for a, b in rows]
    if None not in answers:
        context.set_symbolic_value(node.outputs[0], [int(bool(a)) for a in answers])


def _compute_sizes(node: ir.Node, context: ShapeInferenceContext) -> None:
    """Shape values through products, and through exact quotients, such as (4·b) / 4."""
    known = [None if v is None else context.get_symbolic_value(v) for v in node.inputs]
    if node.op_type == "ReduceProd":
        if known[0] and not node.attributes.get_int("noop_with_empty_axes", 0):
            product = math.prod(known[0])
            if not isinstance(product, int) or abs(product) < 1 << 63:
                context.set_symbolic_value(node.outputs[0], [product])
        return
    a, b = known
    if node.outputs[0].dtype not in (ir.DataType.INT64, ir.DataType.INT32):
        forget(node.outputs[0], context)  # the library divides all as integers
    if a and b and len(a) == len(b) == 1 and isinstance(a[0], ir.SymbolicDim) and b[0] != 0:
        quotient = simplified(str(a[0] // b[0]))
        if isinstance(quotient, str) and quotient.isidentifier():
            context.set_symbolic_value(node.outputs[0], [ir.SymbolicDim(quotient)])


def _equal(a: Dim, b: Dim) -> bool | None:
    """Whether two sizes are equal, or None if unknown; a size is never negative."""
    if same_dim(a, b):
        return True
    fixed, size = (a, b) if isinstance(a, int) else (b, a)
    negative = isinstance(fixed, int) and fixed < 0 and _is_size(size)
    return False if negative or (isinstance(a, int) and isinstance(b, int)) else None


def _is_size(element: Dim) -> bool:
    """Whether an element is known not to be negative: of sizes, without differences."""
    if isinstance(element, int):
        return element >= 0
    return element.value is not None and not re.search(r"-|\b_element_", element.value)


def _cast_sizes(node: ir.Node, context: ShapeInferenceContext) -> None:
    """Shape values through dtypes that can hold them: True is not a size, and int8 ends at 127."""
    if node.outputs[0].dtype not in _WIDE:
        forget(node.outputs[0], context)


def _slice(node: ir.Node, context: ShapeInferenceContext) -> None:
    """Sizes and shape values of a slice whose start or end may lie beyond the end of an axis.

    The library takes any end to be inside the axis, and axes that it does not know for the first.
    """
    x, y = node.inputs[0], node.outputs[0]
    if x is None or x.shape is None or y.shape is None:
        return
    forget(y, context)
    given = [None if v is None else context.get_symbolic_value(v) for v in node.inputs[1:]]
    starts, ends, axes, steps = [*given, None, None][:4]
    unknown = [k for v, k in zip(node.inputs[1:], given, strict=True) if v is not None and not k]
    rows: list[tuple[Any, ...]] = []
    if starts is not None and ends is not None and not unknown:
        count = len(starts)
        rows = [*zip(axes or range(count), starts, ends, steps or [1] * count, strict=True)]
        expect_distinct(axes or (), len(x.shape))
    if not rows or not all(isinstance(d, int) for row in rows for d in (*row[:2], row[3])):
        _give_up(y, range(len(x.shape)), context)
        return
    dims = list(y.shape)
    for axis, start, end, step in rows:
        size = _sliced(x.shape[axis], start, end, step, dims[axis])
        dims[axis] = context.new_symbolic_dim() if size is None else size
    y.shape = ir.Shape(dims)
    known = context.get_symbolic_value(x)
    if known is not None and isinstance(ends and ends[0], int):
        _, start, end, step = rows[0]
        context.set_symbolic_value(y, known[start:end:step])


def _sliced(size: Dim, start: int, end: Dim, step: int, found: Dim) -> Dim | None:
    """How many elements a slice of one axis has: what the library found, fewer, or None."""
    if isinstance(end, ir.SymbolicDim):
        return found if step > 0 <= start and _is_size(end) else None
    if isinstance(size, int) and step < 0:  # a start before the first element is the first
        stop = None if end in (_FAR, 2**63 - 1) else end
        return len(range(*slice(max(start, -size), stop, step).indices(size)))
    if isinstance(size, int):
        return found
    if step == 1 and start == 0 <= end < _FAR:
        return ir.SymbolicDim(f"Min({end}, {size})") if end else 0
    if step > 0 <= start and end >= _FAR:  # of which the library knows two: 2³¹ - 1 and 2⁶³ - 1
        return ir.SymbolicDim(f"Max(0, -floor(({start} - {size}) / {step}))").simplify()
    whole = step == -1 and start >= _FAR and end <= -_FAR
    return found if whole or (step > 0 <= start and -_FAR < end < 0) else None


def _squeeze(node: ir.Node, context: ShapeInferenceContext) -> None:
    """The dropped axes are unknown if computed, or if all of size 1 go and a size is unknown."""
    x, *axes = node.inputs
    found = axes[0] if axes else None
    every = found is None and x is not None and x.shape is not None and not x.shape.is_static()
    if every or (found is not None and context.get_symbolic_value(found) is None):
        node.outputs[0].shape = None
        forget(node.outputs[0], context)


@registry.register("", "Pad", since_version=OPSET)
def _infer_pad(context: ShapeInferenceContext, node: ir.Node) -> None:
    """Each axis with its padding before and after; the library takes computed axes for all."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    y.type = x.type
    if x.shape is None:
        return
    dims: list[Dim] = list(x.shape)
    given = node.inputs[3] if len(node.inputs) > 3 else None
    pads, axes = (
        None if v is None else context.get_symbolic_value(v) for v in (node.inputs[1], given)
    )
    axes = list(range(len(dims))) if given is None else axes
    if pads is None or axes is None or not all(isinstance(d, int) for d in (*pads, *axes)):
        dims = [context.new_symbolic_dim() for _ in dims]
    else:
        if len(pads) != 2 * len(axes):
            raise ValueError(f"pads has {len(pads)} numbers; {len(axes)} axes need two each")
        for i, axis in enumerate(map(int, map(str, axes))):
            expect_axis(axis, len(dims))
            dims[axis] += pads[i] + pads[i + len(axes)]
    y.shape = ir.Shape(dims)


def _pool(node: ir.Node, context: ShapeInferenceContext) -> None:
    """No formula holds for every size: a window may be longer, or begin in the padding."""
    x, strides = node.inputs[0], node.attributes.get_ints("strides", ()) or ()
    if x is not None and x.shape is not None and max(strides, default=1) > 1:
        unknown = [i for i, d in enumerate(x.shape) if i > 1 and not isinstance(d, int)]
        for value in node.outputs:
            _give_up(value, unknown, context)


def _transposed_convolution(node: ir.Node, context: ShapeInferenceContext) -> None:
    """With SAME, the runtime gives less than input times stride if the kernel is shorter."""
    y = node.outputs[0]
    if "SAME" in (node.attributes.get_string("auto_pad", "") or "") and y.shape is not None:
        _give_up(y, range(2, len(y.shape)), context)


def _resize(node: ir.Node, context: ShapeInferenceContext) -> None:
    """In float32, as the runtime multiplies, 0.7 * 10 is 7; to keep the aspect changes sizes."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or x.shape is None or y.shape is None:
        return
    given = node.inputs[2] if len(node.inputs) > 2 else None
    tensor = None if given is None else ir.convenience.get_const_tensor(given)
    scales = np.empty(0) if tensor is None else tensor.numpy()
    axes = node.attributes.get_ints("axes", None) or range(len(x.shape))
    policy = node.attributes.get_string("keep_aspect_ratio_policy", "stretch")
    if not scales.size:
        _give_up(y, axes if policy != "stretch" else [], context)
    for axis, scale in zip(axes, scales, strict=False):
        size = x.shape[axis]
        sure = not scale % 1
        if isinstance(size, int):
            sure = int(size * np.float32(scale)) == int(size * float(scale)) == y.shape[axis]
        _give_up(y, [] if sure else [axis], context)


def _mel_weights(node: ir.Node, context: ShapeInferenceContext) -> None:
    """A row for each of the dft_length // 2 + 1 frequencies; the library makes it a column."""
    bins, length = (v and context.get_symbolic_value(v) for v in node.inputs[:2])
    known = [length and length[0] // 2 + 1, bins and bins[0]]
    node.outputs[0].shape = ir.Shape([d or context.new_symbolic_dim() for d in known])


def _give_up(value: ir.Value, axes: Iterable[int], context: ShapeInferenceContext) -> None:
    """Make the sizes of these axes unknown."""
    if value.shape is not None:
        dims = list(value.shape)
        for axis in axes:
            dims[axis] = context.new_symbolic_dim()
        value.shape = ir.Shape(dims)


def _expand(node: ir.Node, context: ShapeInferenceContext) -> None:
    """x broadcast with the sizes if they are known, else new symbols."""
    x, sizes = node.inputs
    assert x is not None and sizes is not None
    node.outputs[0].shape = None if x.shape is None else _expanded(x.shape, sizes, context)


def _expanded(shape: ir.Shape, sizes: ir.Value, context: ShapeInferenceContext) -> ir.Shape | None:
    wanted = context.get_symbolic_value(sizes)
    if wanted is not None:
        return broadcast([shape, ir.Shape(wanted)], context)
    count = sizes.shape[0] if sizes.shape is not None and len(sizes.shape) == 1 else None
    if not isinstance(count, int):
        return None
    return ir.Shape([context.new_symbolic_dim() for _ in range(max(count, len(shape)))])


def _fill(node: ir.Node, context: ShapeInferenceContext) -> None:
    """Shape values of ConstantOfShape."""
    [y], fill = node.outputs, node.attributes.get("value")
    length = y.shape[0] if y.shape is not None and len(y.shape) == 1 else None
    if fill is not None and isinstance(length, int) and length <= _RANKS:
        array = fill.as_tensor().numpy()
        if array.dtype.kind == "i":
            context.set_symbolic_value(y, [int(array.reshape(-1)[0])] * length)


def _multiply(node: ir.Node, context: ShapeInferenceContext) -> None:
    """The batch of a matrix product is what both operands' batches broadcast to."""
    known = [v.shape for v in node.inputs if v is not None and v.shape is not None]
    if len(known) == 2 and min(map(len, known)) >= 1:
        x, y = known
        expect_same([x[-1], y[-2 if len(y) > 1 else -1]], context)
    if len(known) == 2 and min(map(len, known)) >= 2:
        batch = broadcast([ir.Shape(shape[:-2]) for shape in known], context)
        node.outputs[0].shape = ir.Shape([*batch, known[0][-2], known[1][-1]])


def _join(node: ir.Node, context: ShapeInferenceContext) -> None:
    """Joined operands have the same sizes on the other axes."""
    shapes = [v.shape for v in node.inputs if v is not None and v.shape is not None]
    axis = node.attributes["axis"].as_int()
    for i, dims in enumerate(zip(*shapes, strict=False)):
        if i != axis % len(shapes[0]):
            expect_same(dims, context)


def _drop(node: ir.Node, context: ShapeInferenceContext) -> None:
    """Dropped axes have size 1; without axes, a size that may be 1 leaves the rank open."""
    x, axes = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    assert x is not None
    if x.shape is None or (axes is not None and context.get_symbolic_value(axes) is None):
        return
    given = range(len(x.shape)) if axes is None else context.get_symbolic_value(axes) or ()
    named = [x.shape[int(str(i))] for i in given]
    sizes = [dim for dim in named if axes is not None or isinstance(dim, ir.SymbolicDim)]
    expect_same([1, *sizes], context)


def _part(node: ir.Node, context: ShapeInferenceContext) -> None:
    """The sizes of the parts add up to that of the axis."""
    x, sizes = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    known = None if sizes is None else context.get_symbolic_value(sizes)
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    if known and x is not None and x.shape is not None and all(isinstance(d, int) for d in known):
        expect_same([sum(map(int, map(str, known))), x.shape[axis]], context)


def _contract(node: ir.Node, context: ShapeInferenceContext) -> None:
    """A label of an einsum has one size."""
    shapes = [() if v is None or v.shape is None else v.shape.dims for v in node.inputs]
    terms = labels_of(node.attributes["equation"].as_string(), list(map(len, shapes)))
    found: dict[str, list[Dim]] = {}
    for term, shape in zip(terms or (), shapes, strict=False):
        for label, dim in zip(term, shape, strict=False):
            found.setdefault(label, []).append(dim)
    for dims in found.values():
        expect_same([dim for dim in dims if dim != 1], context)


def _broadcast_operands(node: ir.Node, context: ShapeInferenceContext) -> None:
    """The library names the result of two different symbols after the first of them."""
    shapes = [v.shape for v in node.inputs if v is not None]
    known = [shape for shape in shapes if shape is not None]
    if len(known) == len(shapes):
        node.outputs[0].shape = broadcast(known, context)


def _same_rank(node: ir.Node, context: ShapeInferenceContext) -> None:
    """The rank of a result with computed sizes or axes, if the library gives none."""
    x, y, keepdims = node.inputs[0], node.outputs[0], node.attributes.get("keepdims")
    over_all = all(v is None for v in node.inputs[1:]) and "axes" not in node.attributes
    over_all = over_all and not node.attributes.get_int("noop_with_empty_axes", 0)
    if y.shape is None and over_all and keepdims is not None and not keepdims.as_int():
        y.shape = ir.Shape([])
    if y.shape is not None or x is None or x.shape is None:
        return
    rank: int | ir.SymbolicDim = len(x.shape)
    if node.op_type == "ConstantOfShape":
        rank = x.shape[0] if len(x.shape) == 1 else -1
    if isinstance(rank, int) and rank >= 0 and (keepdims is None or keepdims.as_int()):
        y.shape = ir.Shape([context.new_symbolic_dim() for _ in range(rank)])


def _check_reshape(node: ir.Node, context: ShapeInferenceContext) -> None:
    (x, sizes), shape = node.inputs[:2], readable(node.outputs[0].shape)
    if x is not None and sizes is not None and x.shape is not None and shape is not None:
        given, axes = context.get_symbolic_value(sizes) or [], len(x.shape)
        if 0 in given[axes:] and "allowzero" not in node.attributes:
            where = given.index(0, axes)
            raise ValueError(f"size {where} is 0, which keeps that of axis {where} of {axes}")
        _check_size(x.shape, shape)


def _check_size(before: Iterable[Dim], after: Iterable[Dim]) -> None:
    before, after = list(before), list(after)
    for dim in [dim for dim in after if not (isinstance(dim, int) and dim == 0)]:
        # Equal symbols cancel.
        if (at := next((i for i, d in enumerate(before) if same_dim(dim, d)), None)) is not None:
            after.remove(dim)
            del before[at]
    if all(isinstance(d, int) for d in (*before, *after)):
        sizes = [math.prod(int(str(d)) for d in dims) for dims in (before, after)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{sizes[0]} elements cannot become {sizes[1]}; give sizes with the same product, "
                "one of which may be -1"
            )


CHECKS |= {
    "Concat": _check_concat,
    "Attention": _check_attention,
    "Transpose": _check_transpose,
    "Clip": _check_clip,
    "QuantizeLinear": _check_scales,
    "DequantizeLinear": _check_scales,
}
MENDS |= {
    Trait.BROADCASTS: [_broadcast_operands],
    "Equal": [_choose_sizes],
    "Where": [_choose_sizes],
    "Div": [_compute_sizes],
    "ReduceProd": [_compute_sizes],
    "ConstantOfShape": [_fill],
    "Expand": [_expand],
    "MatMul": [_multiply],
    "Reshape": [_check_reshape],
    "Cast": [_cast_sizes],
    "Slice": [_slice],
    "Squeeze": [_squeeze, _drop],
    "AveragePool": [_pool],
    "MaxPool": [_pool],
    "LpPool": [_pool],
    "ConvTranspose": [_transposed_convolution],
    "Resize": [_resize],
    "MelWeightMatrix": [_mel_weights],
    "Concat": [_join],
    "Einsum": [_contract],
    "Split": [_part],
}
for _name in _RANKED:
    MENDS.setdefault(_name, []).append(_same_rank)
