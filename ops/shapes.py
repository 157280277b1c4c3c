"""Shapes, operator by operator, where the inference libraries accept or miss something wrong."""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import zip_longest

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

from graphgen.forms import TEXTS, dim_of, readable
from graphgen.graph import AXES, constant, produced_by, scalar
from graphgen.infer import (
    CHECKS,
    DeclaredSizes,
    Dim,
    describe,
    expect_axis,
    expect_same,
    forget,
    is_named,
    mends,
    same_dim,
    same_size,
)
from graphgen.ops.attention import expect_heads, expect_one_batch
from graphgen.ops.linalg import labels_of
from graphgen.ops.quantized import expect_scales
from graphgen.ops.spatial_shapes import give_up
from graphgen.repeats import ELEMENT
from graphgen.rounded import FileSizes, bounded, rejoined, rest_below, smallest, tree
from graphgen.traits import Trait

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
            common = _decisive(dims) if common is None else common
            result.append(_joined(dims, context) if common is None else common)
    return ir.Shape(result)


def _joined(dims: Sequence[Dim], context: ShapeInferenceContext) -> Dim:
    return context.join(dims) if isinstance(context, FileSizes) else context.new_symbolic_dim()


def _decisive(dims: Sequence[Dim]) -> Dim | None:
    """The dimension that the result has, though others may be 1: it is not, unless all are."""
    for dim in dims:
        if is_above_one(dim):
            return dim
        name = str(dim)
        found = bounded(name)
        rest = found[2] if found and found[:2] == ("max", "0") else name
        if all(same_dim(other, dim) or str(other) == f"Max(1, {rest})" for other in dims):
            return dim
        if name.isidentifier() and all(_is_one_with(name, str(other)) for other in dims):
            return dim
    return None


def is_above_one(size: Dim) -> bool:
    """Whether a size is never 1, and 0 only where it is a multiple."""
    return size > 1 if isinstance(size, int) else _is_above_one(str(size))


@lru_cache(TEXTS)
def _is_above_one(size: str) -> bool:
    expression = None if size.isidentifier() else tree(size)
    if expression is None:
        return False
    factor, part = expression.as_coeff_Mul()
    multiple = factor.is_Integer and factor > 1 and part.is_integer and part.is_nonnegative
    return bool(multiple) or smallest(size) > 1


@lru_cache(TEXTS)
def _is_one_with(name: str, size: str) -> bool:
    """Whether a size is 1 where `name` is 1, whatever else it is."""
    dim = ir.SymbolicDim(size)
    try:
        return dim.free_symbols() == {name} and bool(dim.evaluate({name: 1}) == 1)
    except (ValueError, ArithmeticError):
        return False


def broadcast_partner(dims: Sequence[Dim]) -> Dim | None:
    """The dimension that all of these equal whenever the program runs at all, or None.

    Min(n, s) equals s in this sense: if they differ, it is not 1, so nothing broadcasts. Slicing a
    table of n positions gives such a size; its last s are all n where s is 0. Nor is 4*b ever 1.
    """
    for dim in dims:
        others = [str(other) for other in dims if not same_dim(other, dim)]
        if all(rest_below(other) == str(dim) or _is_last(other, str(dim)) for other in others):
            return dim
    return dims[0] if all(map(is_above_one, dims)) else None


def _is_last(part: str, size: str) -> bool:
    """Whether a size is that of x[-size:], of a number n of elements above 1."""
    expression = tree(part) if "Min(" in part else None
    n = 0 if expression is None else expression.as_coeff_Add()[0]
    return bool(n > 1) and expression == tree(f"{n} - {n}*Min(1, {size}) + Min({n}, {size})")


def _check_concat(node: ir.Node) -> None:
    shapes = [v.shape for v in node.inputs if v is not None and v.shape is not None]
    rank = len(shapes[0])
    axis = node.attributes["axis"].as_int()
    if any(len(shape) != rank for shape in shapes):
        raise ValueError(
            "all operands must have the same rank; add axes of size 1 with ops.unsqueeze"
        )
    expect_axis(axis, rank)


def _check_attention(node: ir.Node) -> None:
    q, k, v = node.inputs[:3]
    assert q is not None and k is not None and v is not None
    expect_one_batch(x.shape[0] for x in (q, k, v) if x.shape)
    if q.shape is None or len(q.shape) != 3:
        expect_heads(x.shape[1] if x.shape and len(x.shape) == 4 else None for x in (q, k, v))
        return
    for value, name in ((q, "q_num_heads"), (k, "kv_num_heads"), (v, "kv_num_heads")):
        heads, width = node.attributes.get(name), value.shape[-1] if value.shape else None
        if heads is None:
            raise ValueError(f"three-dimensional operands need {name}")
        if heads.as_int() < 1:
            raise ValueError(f"{name}={heads.as_int()}; it must be at least 1")
        if isinstance(width, int) and width % heads.as_int():
            raise ValueError(f"{name}={heads.as_int()} does not divide {describe(value)}")
    expect_heads(node.attributes[f"{x}_num_heads"].as_int() for x in ("q", "kv", "kv"))


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


@mends("Squeeze")
def _squeeze(node: ir.Node, context: ShapeInferenceContext) -> None:
    """The dropped axes are unknown if computed, or if all of size 1 go and a size is unknown."""
    x, *axes = node.inputs
    found = axes[0] if axes else None
    every = found is None and x is not None and x.shape is not None and not x.shape.is_static()
    if every or (found is not None and context.get_symbolic_value(found) is None):
        node.outputs[0].shape = None
        forget(node.outputs[0], context)


@mends("MatMul")
def _multiply(node: ir.Node, context: ShapeInferenceContext) -> None:
    """The batch of a matrix product is what both operands' batches broadcast to."""
    known = [v.shape for v in node.inputs if v is not None and v.shape is not None]
    if len(known) == 2 and min(map(len, known)) >= 1:
        x, y = known
        summed = [x[-1], y[-2 if len(y) > 1 else -1]]
        expect_same(summed, context)
        _show_equal(node, [summed], context)
    if len(known) == 2 and min(map(len, known)) >= 2:
        batches = [ir.Shape(shape[:-2]) for shape in known]
        batch = broadcast(batches, context)
        pairs = zip(*map(reversed, batches), strict=False)
        _show_equal(node, [pair for pair in pairs if all(map(is_above_one, pair))], context)
        _expect_elements(node, batches, context)
        node.outputs[0].shape = ir.Shape([*batch, known[0][-2], known[1][-1]])


def _show_equal(
    node: ir.Node, pairs: Iterable[Sequence[Dim]], context: ShapeInferenceContext
) -> None:
    """Note sizes that are equal wherever a node runs that always does."""
    if isinstance(context, FileSizes) and node.graph is not None and node.graph is context.graph:
        for one, other in pairs:
            context.show_equal(one, other)


@mends("Concat")
def _join(node: ir.Node, context: ShapeInferenceContext) -> None:
    """Joined operands have the same sizes on the other axes.

    In a file, one without elements may have others: the runtime does not look at it.
    """
    every = [v.shape for v in node.inputs if v is not None and v.shape is not None]
    axis, y = node.attributes["axis"].as_int(), node.outputs[0]
    if y.shape is not None and isinstance(size := y.shape[axis], ir.SymbolicDim):
        y.shape[axis] = dim_of(rejoined(str(size)))  # as torch.roll cuts and joins an axis
    filled = [shape for shape in every if shape[axis] != 0]
    shapes = filled if filled and isinstance(context, FileSizes) else every
    for i, dims in enumerate(zip(*shapes, strict=False)):
        if i == axis % len(shapes[0]):
            continue
        fixed = {d for d in dims if isinstance(d, int)}
        if len(fixed) > 1:
            problem = f"dimension {i} differs: {sorted(fixed)}"
            raise ValueError(f"{problem}; only sizes of axis {axis} may differ")
        expect_same(dims, context)
        if y.shape is not None and len(shapes) < len(every):
            y.shape = ir.Shape([dims[0] if j == i else d for j, d in enumerate(y.shape)])


@mends("Squeeze")
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


@mends("Split")
def _part(node: ir.Node, context: ShapeInferenceContext) -> None:
    """The sizes of the parts add up to that of the axis; each of four of 4 n is n."""
    x, sizes = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    known = None if sizes is None else context.get_symbolic_value(sizes)
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    size = None if x is None or x.shape is None or sizes is not None else x.shape[axis]
    if isinstance(size, ir.SymbolicDim) and is_named(size):
        part = dim_of(f"({size}) / {len(node.outputs)}")
        for y in node.outputs if "/" not in str(part) else ():
            if y.shape is not None:
                y.shape[axis] = part
    if known and x is not None and x.shape is not None and all(isinstance(d, int) for d in known):
        expect_same([sum(map(int, map(str, known))), x.shape[axis]], context)


@mends("Einsum")
def _contract(node: ir.Node, context: ShapeInferenceContext) -> None:
    """A label has one size; in a file another may be 1, which the runtime repeats."""
    y, shapes = (
        node.outputs[0],
        [() if v is None or v.shape is None else v.shape.dims for v in node.inputs],
    )
    terms = labels_of(node.attributes["equation"].as_string(), list(map(len, shapes)))
    found: dict[str, list[Dim]] = {}
    for term, shape in zip(terms or (), shapes, strict=False):
        for label, dim in zip(term, shape, strict=False):
            found.setdefault(label, []).append(dim)
    sizes = {}
    for label, dims in found.items():
        expect_same([dim for dim in dims if dim != 1], context)
        [sizes[label]] = broadcast([ir.Shape([dim]) for dim in dims], context)
    if terms and y.shape is not None:
        y.shape = ir.Shape(
            [sizes.get(label, dim) for label, dim in zip(terms[-1], y.shape, strict=True)]
        )


@mends("NonZero")
def _places(node: ir.Node, context: ShapeInferenceContext) -> None:
    """Of a scalar, ONNX gives no index and the runtime one."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or x.shape is None or not len(x.shape):
        y.shape = ir.Shape([context.new_symbolic_dim(), context.new_symbolic_dim()])


@mends("Unique")
def _unique(node: ir.Node, context: ShapeInferenceContext) -> None:
    """Along an axis, the slices that are unique; the library always flattens."""
    x, y, axis = node.inputs[0], node.outputs[0], node.attributes.get("axis")
    if x is not None and axis is not None:
        y.shape = None if x.shape is None else ir.Shape(x.shape)
        give_up(y, [axis.as_int()], context)


@mends(Trait.BROADCASTS)
def _broadcast_operands(node: ir.Node, context: ShapeInferenceContext) -> None:
    """The library names the result of two different symbols after the first of them."""
    shapes = [v.shape for v in node.inputs if v is not None]
    known = [shape for shape in shapes if shape is not None]
    if len(known) == len(shapes):
        node.outputs[0].shape = broadcast(known, context)
        _expect_elements(node, known, context)


@mends("Where")
def _repeated_size(node: ir.Node, context: ShapeInferenceContext) -> None:
    """b where a is 1, else a: the size of which the graph has made one by broadcasting these two.

    Of numbers, and of sizes that nothing broadcasts, it is a wherever a is not 1.
    """
    condition, b, a = node.inputs
    asked = condition.producer() if condition is not None else None
    if asked is None or asked.op_type != "Equal" or a is None or asked.inputs[0] is not a:
        return
    one, every = constant(asked.inputs[1]), [context.get_symbolic_value(x) for x in (a, b) if x]
    sizes = [d for values in every for d in values or () if str(d).isidentifier()]
    single = all(values is not None and len(values) == 1 for values in every)
    if isinstance(context, FileSizes) and single and len(sizes) == 2:
        common = context.name_of(sizes)
        if one is not None and one.tolist() in (1, [1]) and common is not None:
            context.set_symbolic_value(node.outputs[0], [common])


def _expect_elements(
    node: ir.Node, shapes: Sequence[ir.Shape], context: ShapeInferenceContext
) -> None:
    """The runtime refuses to broadcast 0 with 4: so a symbol with which a size is 0 never is.

    Nor n with Min(9, n) where they differ: so they are equal in a graph that always does so. So is
    n, where a reshape kept 2 if n is 0, and n is not 0.
    """
    if isinstance(context, FileSizes) and node.graph is not None and node.graph is context.graph:
        for dims in zip_longest(*map(reversed, shapes), fillvalue=1):
            sizes = [d for d in dims if d != 1]
            common = broadcast_partner(sizes) if len(sizes) > 1 else None
            if common is not None and all(map(is_named, sizes)):
                common = next((d for d in sizes if isinstance(d, int)), common)
                for d in sizes:
                    if not same_dim(d, common):
                        context.fix(d, common)
            for d in sizes:
                size, own = context.kept.get(str(d), (None, 1))
                if size is not None and size in sizes and is_above_one(own):
                    context.fixed[str(d)] = size
                    if context.is_at_least(own, 2):  # 3·m may be 0 as well
                        context.note(size, 1)
            if any(isinstance(d, int) and d > 1 for d in dims):
                found = (context.emptied.get(str(d)) for d in dims)
                for symbol in filter(None, found):
                    context.note(ir.SymbolicDim(symbol), 1)


@mends("Range")
def _count(node: ir.Node, context: ShapeInferenceContext) -> None:
    """0, 1, ... below a size that is cast to floats, as TensorFlow counts, which end at 2**24."""
    start, limit, delta = node.inputs
    cast = None if limit is None else produced_by(limit, "Cast")
    given = None if cast is None or cast.inputs[0] is None else cast.inputs[0]
    sizes = None if given is None else context.get_symbolic_value(given)
    if scalar(start) != 0 or scalar(delta) != 1 or not sizes or limit is None or not limit.dtype:
        return
    whole = {ir.DataType.FLOAT: 2**24, ir.DataType.DOUBLE: 2**53}.get(limit.dtype)
    if whole is not None and str(sizes[0]).isidentifier() and ELEMENT not in str(sizes[0]):
        node.outputs[0].shape = ir.Shape([ir.SymbolicDim(f"Min({whole}, {sizes[0]})")])


@mends("Shape")
def _list_of_sizes(node: ir.Node, context: ShapeInferenceContext) -> None:
    """The sizes of a tensor of unknown rank are a list all the same."""
    if node.outputs[0].shape is None:
        node.outputs[0].shape = ir.Shape([context.new_symbolic_dim()])


@mends("Gather")
def _size_of(node: ir.Node, context: ShapeInferenceContext) -> None:
    """One size of a tensor of unknown rank is a size, which a list of sizes may then hold."""
    sizes, result = node.inputs[0], node.outputs[0]
    if sizes is None or (producer := sizes.producer()) is None or producer.op_type != "Shape":
        return
    if result.shape is not None and not result.shape and not context.get_symbolic_value(result):
        context.set_symbolic_value(result, [context.new_symbolic_dim()])


@mends("Transpose")
def _permuted(node: ir.Node, context: ShapeInferenceContext) -> None:
    """What is permuted has an axis for each number of the permutation."""
    if node.outputs[0].shape is None and "perm" in node.attributes:
        axes = node.attributes["perm"].as_ints()
        node.outputs[0].shape = ir.Shape([context.new_symbolic_dim() for _ in axes])


@mends("Gemm")
def _two_axes(node: ir.Node, context: ShapeInferenceContext) -> None:
    """A Gemm has two axes, whatever is known of its operands."""
    if node.outputs[0].shape is None:
        dims: list[Dim] = []
        for axis, name in enumerate(("transA", "transB")):
            operand = node.inputs[axis]
            shape = None if operand is None else operand.shape
            index = axis ^ (node.attributes.get_int(name, 0) != 0)
            known = shape is not None and len(shape) == 2
            dims.append(shape[index] if shape and known else context.new_symbolic_dim())
        node.outputs[0].shape = ir.Shape(dims)


@mends(*_RANKED)
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
    if isinstance(rank, int) and 0 <= rank <= AXES and (keepdims is None or keepdims.as_int()):
        y.shape = ir.Shape([context.new_symbolic_dim() for _ in range(rank)])


@mends("Reshape")
def _check_reshape(node: ir.Node, context: ShapeInferenceContext) -> None:
    (x, sizes), shape = node.inputs[:2], readable(node.outputs[0].shape)
    if x is not None and sizes is not None and x.shape is not None and shape is not None:
        given, axes = context.get_symbolic_value(sizes) or [], len(x.shape)
        if 0 in given[axes:] and "allowzero" not in node.attributes:
            where = given.index(0, axes)
            raise ValueError(f"size {where} is 0, which keeps that of axis {where} of {axes}")
        _check_size(x.shape, shape, isinstance(context, FileSizes))
        _note_numbers(node, x.shape, given, context)


def _note_numbers(
    node: ir.Node, shape: ir.Shape, wanted: Sequence[Dim], context: ShapeInferenceContext
) -> None:
    """Of n elements a reshape to 12 and 1 makes 12, so a graph that always does so has n = 12."""
    names = [d for d in shape if isinstance(d, ir.SymbolicDim)]
    numbers = [d for d in wanted if isinstance(d, int) and d > 0]
    if not (isinstance(context, FileSizes) and node.graph is context.graph and wanted):
        return
    rest, count = math.prod(d for d in shape if isinstance(d, int)), math.prod(numbers)
    if len(names) != 1 or len(numbers) < len(wanted) or not rest or count % rest:
        return
    if str(names[0]).isidentifier():
        context.fixed[str(names[0])] = count // rest


def _check_size(before: Iterable[Dim], after: Iterable[Dim], of_file: bool) -> None:
    """Both have as many elements; in a file, any two have none where a size of both may be 0."""
    before, after = list(before), list(after)
    for dim in [dim for dim in after if not (isinstance(dim, int) and dim == 0)]:
        # Equal symbols cancel.
        if (at := next((i for i, d in enumerate(before) if same_dim(dim, d)), None)) is not None:
            if of_file and not isinstance(dim, int):
                return
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
