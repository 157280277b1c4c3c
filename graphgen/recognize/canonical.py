"""One form for what exporters and people write in many ways: rules of the canonical form.

Normalizations count their axis from the end, reductions and layout operators from the front;
constants go on the right; einsums become products; known shapes are written as 0 (the same),
numbers and one -1. Calculations stay unchanged, because each has its own rounding: recognizers read
powers, quotients and the places of factors (recognize/algebra.py).
"""

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.graph import constant, is_float, present_inputs, produced_by, scalar
from graphgen.infer import describe, is_named, is_rounded, same_dim, same_shape
from graphgen.match import Miss, Rewrite
from graphgen.op import canonical, find_op, is_a, read_attributes
from graphgen.ops.dropout import dropout_in_inference
from graphgen.ops.elementwise import (
    add,
    div,
    equal,
    exp,
    greater,
    greater_or_equal,
    identity,
    less,
    less_or_equal,
    logical_and,
    logical_or,
    maximum,
    minimum,
    mul,
    sub,
    tanh,
    where,
)
from graphgen.ops.layout import (
    _cast_like,
    _reshape,
    _shape,
    _split,
    cast,
    concat,
    constant_of_shape,
    dim,
    expand,
    flatten,
    gather,
    size_from,
    slice_,
    squeeze,
    transpose,
    unsqueeze,
)
from graphgen.ops.linalg import matmul
from graphgen.ops.norm import layer_normalization, rms_normalization
from graphgen.ops.reduce import reduce_max, reduce_mean, reduce_min, reduce_prod, reduce_sum
from graphgen.ops.sizes import sizes_vector
from graphgen.ops.softmax import log_softmax, softmax
from graphgen.recognize.axes import (
    LAYOUT,
    Dim,
    View,
    leaves,
    permutation_of,
    size_in,
    swaps_last,
)
from graphgen.recognize.bounds import never
from graphgen.recognize.products import PRODUCTS, multiplied, operand_of
from graphgen.record import current_tape
from graphgen.rounded import FileSizes
from graphgen.traits import Trait
from graphgen.value import Value, adopt

_NORMS = (softmax, log_softmax, layer_normalization, rms_normalization)


@canonical(add, sub, mul, div, logical_and, logical_or)
def neutral(node: ir.Node) -> Rewrite | None:
    """x - 0 = x · 1 = x / 1 = x ∧ true = x ∨ false = x, and so x + 0 but for a float -0."""
    unit = {"Add": 0.0, "Sub": 0.0, "Or": 0.0}.get(node.op_type, 1.0)
    x, other = node.inputs
    number = scalar(other)
    if x is None or number is None or number != unit:
        return None
    if not same_shape(x.shape, node.outputs[0].shape):
        return None
    added = math.copysign(1.0, number) * (-1.0 if is_a(node, sub) else 1.0)
    if is_a(node, add, sub) and added > 0 and is_float(x):
        return None  # -0 + 0 is 0, and 1 / 0 is not 1 / -0
    return Rewrite(x, [x], f"{node.op_type} with {unit:g} changes nothing", may_share=True)


@canonical(logical_and, logical_or)
def decided(node: ir.Node) -> Rewrite | None:
    """x ∧ false = false, x ∨ true = true, also of a comparison of constants."""
    for x in present_inputs(node):
        if _truth_of(x) is is_a(node, logical_or) and same_shape(x.shape, node.outputs[0].shape):
            return Rewrite(x, [x], f"{node.op_type} is decided", may_share=True)
    return None


def _truth_of(condition: ir.Value | None) -> bool | None:
    """What a condition is everywhere, if it is constant or compares two constants."""
    made = produced_by(condition, less, less_or_equal, greater, greater_or_equal, equal)
    given = [condition] if made is None else made.inputs
    arrays = [a for x in given if (a := constant(x)) is not None and 0 < a.size <= _FEW]
    op = None if made is None else find_op(made)
    if len(arrays) < len(given) or (op is None and arrays[0].dtype != bool):
        return None
    answers = np.asarray(arrays[0] if op is None else op(*arrays))
    return None if answers.min() != answers.max() else bool(answers.min())


_FEW = 16  # elements, of which sizes are chosen


@canonical(div)
def one_over(node: ir.Node) -> Rewrite | None:
    """1 / x, where the 1 has more dimensions than x, is that of a number, unsqueezed.

    The runtime makes y / x of y · (1 / x), also where the 1 alone has those dimensions, and loses
    them (onnxruntime 1.32).
    """
    one, x = present_inputs(node)
    array = constant(one)
    if array is None or scalar(one) != 1.0 or x.shape is None or array.ndim <= len(x.shape):
        return None
    further = [*range(array.ndim - len(x.shape))]
    return Rewrite(unsqueeze(div(array.reshape(()), Value(x)), further), [x], "1 is a number")


@canonical(add, mul, maximum, minimum, logical_and, logical_or, equal)
def commute(node: ir.Node) -> Rewrite | None:
    """Constants go on the right, other operands in the order of their names."""
    if len(node.inputs) != 2:
        return None
    a, b = node.inputs
    op = find_op(node)
    left, right = ((constant(v) is not None, str(v.name)) for v in present_inputs(node))
    if op is None or left <= right:
        return None
    return Rewrite(op(b, a), present_inputs(node), "operands in canonical order")


@canonical(identity, cast, expand, _reshape)
def nothing(node: ir.Node) -> Rewrite | None:
    """Drop Identity, a cast to the same dtype, and a reshape or expansion to the same shape."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or len(node.outputs) > 1:
        return None
    source = x.producer()
    outside = source is None or source.graph is not node.graph
    if y.is_graph_output() and (outside or x.is_graph_output()):
        return None  # an output needs its own value
    if node.op_type == "Cast" and x.dtype != y.dtype:
        return None
    if node.op_type in ("Reshape", "Expand") and not same_shape(x.shape, y.shape):
        return None
    return Rewrite(x, [x], f"{node.op_type} changes nothing", may_share=True)


@canonical(constant_of_shape)
def short_constant(node: ir.Node) -> Rewrite | None:
    """A few numbers are written: the library that folds constants leaves how they are made."""
    [sizes], fill = present_inputs(node), node.attributes.get("value")
    known, tape = constant(sizes), current_tape()
    if tape is None or known is None or known.min(initial=0) < 0 or np.prod(known) > 16:
        return None
    number = np.zeros(1, np.float32) if fill is None else fill.as_tensor().numpy()
    filled = np.full(known.tolist(), number.item(), number.dtype)
    written = identity(Value(tape.constant(filled)))
    return Rewrite(written, [sizes], f"{describe(node.outputs[0])} is constant")


@canonical(concat)
def without_empty(node: ir.Node) -> Rewrite | None:
    """Drop parts without elements, such as an empty memory; their other sizes do not matter."""
    axis = node.attributes["axis"].as_int()
    parts = present_inputs(node)
    kept = [x for x in parts if x.shape is None or x.shape[axis] != 0]
    if not kept or len(kept) == len(parts):
        return None
    return Rewrite(concat(*map(adopt, kept), axis=axis), kept, "empty parts are not joined")


@canonical(slice_)
def all_of_it(node: ir.Node) -> Rewrite | None:
    """Drop a slice that is as long as its operand, as torch writes x[:, t] in a loop."""
    x, y, steps = node.inputs[0], node.outputs[0], node.inputs[4:]
    if x is None or y.is_graph_output() or not same_shape(x.shape, y.shape):
        return None
    if any(step is not None and not np.all(constant(step) == 1) for step in steps):
        return None
    return Rewrite(x, [x], "Slice changes nothing", may_share=True)


@canonical(where)
def chosen(node: ir.Node) -> Rewrite | None:
    """A Where with a known condition is the chosen operand, if that has the result's shape.

    That of infinity in weights of a softmax is known, as torch.nan_to_num asks for it.
    """
    condition = False if never(node.inputs[0]) else _truth_of(node.inputs[0])
    x = None if condition is None else node.inputs[1 if condition else 2]
    if x is None or not same_shape(x.shape, node.outputs[0].shape):
        return None
    return Rewrite(x, [x], "choice that is known", may_share=True)


@canonical(*_NORMS, concat, _split, gather)
def axis_in_order(node: ir.Node) -> Rewrite | None:
    """Normalizations count their axis from the end, layout operators from the front."""
    x, op, from_end = node.inputs[0], find_op(node), find_op(node) in _NORMS
    if x is None or x.shape is None or op is None or (from_end and len(node.outputs) > 1):
        return None
    attributes = read_attributes(op, node)
    if (attributes["axis"] < 0) == from_end:
        return None
    attributes["axis"] += len(x.shape) * (-1 if from_end else 1)
    reason = f"axis counted from the {'end' if from_end else 'front'}"
    return Rewrite(op(*map(adopt, node.inputs), **attributes), present_inputs(node), reason)


@canonical(softmax)
def maximum_twice(node: ir.Node) -> Rewrite | None:
    """softmax(x - max x) = softmax(x), bit by bit: it subtracts the maximum itself."""
    less = produced_by(node.inputs[0], sub)
    most = None if less is None else produced_by(less.inputs[1], reduce_max)
    x = None if less is None else less.inputs[0]
    axes = None if most is None or len(most.inputs) < 2 else constant(most.inputs[1])
    if most is None or x is None or most.inputs[0] is not x or x.shape is None or axes is None:
        return None
    along = [int(axis) % len(x.shape) for axis in axes.reshape(-1)]
    attributes = read_attributes(softmax, node)
    if (
        along != [attributes["axis"] % len(x.shape)]
        or not read_attributes(reduce_max, most)["keepdims"]
    ):
        return None
    return Rewrite(
        softmax(adopt(x), **attributes), [x], "its maximum is subtracted once", may_share=True
    )


@canonical(_reshape)
def softmax_of_rows(node: ir.Node) -> Rewrite | None:
    """softmax(x) on the rows of x, then in the shape of x: so onnx writes it of opset 12.

    The same of log_softmax, and of its exp, as some files compute a softmax.
    """
    power = produced_by(node.inputs[0], exp)
    made = produced_by(node.inputs[0] if power is None else power.inputs[0], softmax, log_softmax)
    rows = None if made is None else produced_by(made.inputs[0], flatten)
    x = None if rows is None else rows.inputs[0]
    if made is None or rows is None or x is None or x.shape is None:
        return None
    length, last = len(x.shape), read_attributes(softmax, made)["axis"] in (-1, 1)
    shape = produced_by(node.inputs[1], _shape)
    whole = shape is not None and shape.inputs[0] is x and not shape.attributes
    if not last or read_attributes(flatten, rows)["axis"] not in (-1, length - 1) or not length:
        return None
    if not whole and not same_shape(x.shape, node.outputs[0].shape):
        return None
    y = (softmax if is_a(made, softmax) else log_softmax)(adopt(x), axis=-1)
    return Rewrite(y if power is None else exp(y), [x], "a softmax of rows")


@canonical(reduce_sum, reduce_mean, reduce_max, reduce_min, reduce_prod)
def axes_from_front(node: ir.Node) -> Rewrite | None:
    """Reductions count axes from the front: ONNX Runtime skips others if x is empty."""
    x, op = node.inputs[0], find_op(node)
    axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if x is None or x.shape is None or op is None or axes is None or not np.any(axes < 0):
        return None
    wanted = sorted(int(a) % len(x.shape) for a in axes)
    result = op(adopt(x), wanted, **read_attributes(op, node))
    return Rewrite(result, [x], "axes counted from the front")


@canonical(_shape)
def shape_of_result(node: ir.Node) -> Rewrite | None:
    """A result's shape is an operand's, or made of numbers and sizes of inputs and operands."""
    y = node.inputs[0]
    made = y.producer() if y is not None else None
    if y is None or made is None or node.graph is None:
        return None
    attributes = read_attributes(_shape, node)
    above = [*node.graph.inputs, *present_inputs(made)]
    wanted = (y.shape or ())[attributes["start"] : attributes["end"]]
    sizes = [_size_of(d, above) for d in wanted]
    x = _of_same_shape(y) if len(sizes) != 1 or None in sizes else None
    if x is not None:
        while (further := _of_same_shape(x)) is not None:
            x = further  # in one go: a residual stream runs through all layers
        return Rewrite(_shape(adopt(x), **attributes), [x], "shape of an operand", may_share=True)
    if None in sizes or all(isinstance(size, int) for size in sizes):
        return None
    return Rewrite(sizes_vector(*sizes), above, "sizes of inputs and operands", may_share=True)


def _of_same_shape(y: ir.Value) -> ir.Value | None:
    """An operand of y's producer that is known to have y's shape, by its names or its meaning."""
    made = y.producer()
    if made is None:
        return None
    operands = present_inputs(made)
    for x in operands:
        if x.shape is not None and all(map(is_named, x.shape)) and same_shape(x.shape, y.shape):
            return x
    if is_a(made, Trait.BROADCASTS):  # a number changes no shape
        operands = [x for x in operands if (c := constant(x)) is None or c.size != 1]
        return operands[0] if len(operands) == 1 and _of_same_rank(operands[0], y) else None
    return operands[0] if is_a(made, softmax, log_softmax, tanh, cast) else None


def _of_same_rank(a: ir.Value, b: ir.Value) -> bool:
    return a.shape is not None and b.shape is not None and len(a.shape) == len(b.shape)


@canonical(_shape)
def shape_of_operands(node: ir.Node) -> Rewrite | None:
    """A size of a layout, or the shape of a product of batches, is made of sizes of operands.

    So neither has to stay where only its shape is read, as that of the scores of Q and K.
    """
    made = produced_by(node.inputs[0], *PRODUCTS, *LAYOUT)
    given = [] if made is None else [View.of(x) for x in present_inputs(made)]
    if made is None or None in given:
        return None
    if is_a(made, *PRODUCTS):
        views = [view for i, x in enumerate(given) if (view := operand_of(made, i, x)) is not None]
        batches = min(len(view.dims) for view in views) > 2
        dims = multiplied(made, *views) if batches else None
    else:
        view = View.of(made.outputs[0])
        views, dims = ([view], view.dims) if view is not None and view.steps else ([], None)
        if any(map(is_rounded, made.outputs[0].shape or ())):
            return None  # of blocks, whose number is the same only while it has one name
    attributes = read_attributes(_shape, node)
    places = slice(*attributes.values())
    wanted = None if isinstance(dims, Miss) else (dims or [])[places]
    if isinstance(dims, Miss):
        sizes = [_repeated_batch(made, axis) for axis in range(*places.indices(len(views[0].dims)))]
    elif not wanted or (len(wanted) > 1 and not is_a(made, *PRODUCTS)):
        return None
    else:
        sizes = [_size_along(leaves(d), views) for d in wanted]
    if None in sizes or all(isinstance(size, int) for size in sizes):
        return None
    ends = [view.source for view in views]
    return Rewrite(sizes_vector(*sizes), ends, "sizes of operands", may_share=True)


def _repeated_batch(product: ir.Node, axis: int) -> Any:
    """The size of a leading axis of a product, where one operand may be repeated to the other."""
    operands, y = present_inputs(product), product.outputs[0].shape
    ranks = {len(x.shape or ()) for x in operands}
    if not is_a(product, matmul) or y is None or ranks != {len(y)} or axis >= len(y) - 2:
        return None
    here = [x for x in operands if x.shape is not None and same_dim(x.shape[axis], y[axis])]
    if here:
        return dim(adopt(here[0]), axis)
    a, b = (sizes_vector(dim(adopt(x), axis)) for x in operands)
    return size_from(_broadcast(a, b))


def _broadcast(a: Any, b: Any) -> Any:
    """The sizes to which those of two are repeated."""
    return where(equal(a, 1), b, a)


def _size_along(axes: Dim, views: Sequence[View]) -> Any:
    """The size of a dimension with these axes, multiplied together if need be, or None."""
    size = size_in(axes, views)
    if size is None and len(axes) > 1:
        sizes = [size_in([axis], views) for axis in axes]
        size = None if None in sizes else math.prod(sizes)
    return size


def _size_of(size: Any, above: Sequence[ir.Value]) -> Any:
    """A size as a number or as that of one of the values, or None."""
    found, values = None, above
    while (nearer := _with_size(size, values)) is not None:
        found, made = nearer, nearer[0].producer()
        values = [] if made is None else present_inputs(made)  # in one go, up to the first with it
    if found is not None:
        return dim(adopt(found[0]), found[1])
    tape = current_tape()
    if isinstance(size, int) or tape is None or not isinstance(tape.context, FileSizes):
        return size if isinstance(size, int) else None
    names = sorted(tape.context.joined.get(str(size), ()))
    sizes = [_size_of(ir.SymbolicDim(name), above) for name in names]
    if not names or None in sizes:
        return None
    vectors = [sizes_vector(each) for each in sizes]
    return size_from(reduce(_broadcast, vectors))


def _with_size(size: Any, values: Sequence[ir.Value]) -> tuple[ir.Value, int] | None:
    """The first of these values that has an axis with this name, and its place."""
    for x in values:
        for i, d in enumerate(x.shape or ()):
            if isinstance(d, ir.SymbolicDim) and is_named(d) and same_dim(d, size):
                return x, i
    return None


@canonical(gather, slice_)
def size_from_shape(node: ir.Node) -> Rewrite | None:
    """One or more elements of a shape are the Shape of only these axes."""
    made, given = produced_by(node.inputs[0], "Shape"), [constant(v) for v in node.inputs[1:]]
    x = made.inputs[0] if made is not None else None
    if made is None or x is None or x.shape is None:
        return None
    if any(g is None or g.size != 1 or g.ndim > 1 for g in given):
        return None
    first, *others = (int(g.item()) for g in given if g is not None)
    attributes = read_attributes(_shape, made)
    axes = list(range(len(x.shape)))[attributes["start"] : attributes["end"]]
    if node.op_type == "Slice":
        axes = axes[first : others[0]] if others[2:] in ([], [1]) else []
    else:
        axes = axes[first:][:1]
    if not axes:
        return None
    sizes = _shape(adopt(x), start=axes[0], end=axes[-1] + 1)
    single = node.op_type == "Gather" and given[0] is not None and given[0].ndim == 0
    return Rewrite(squeeze(sizes, [0]) if single else sizes, [x], "sizes of a shape")


@canonical(_cast_like)
def cast_to(node: ir.Node) -> Rewrite | None:
    """CastLike becomes Cast, because the library that folds constants forgets its `saturate`."""
    x, like = map(adopt, node.inputs)
    if node.outputs[0].dtype is None:
        return None
    saturate = node.attributes.get_int("saturate", 1)
    result = cast(x, to=node.outputs[0].dtype, saturate=saturate)
    return Rewrite(result, [x, like], "a cast to a known dtype")


@canonical(matmul)
def vector_in_front(node: ir.Node) -> Rewrite | None:
    """Aᵀ v = v A, of a vector v; next to other transposes, v is a matrix of one column.

    The runtime makes one operator of the left form, whose kernel is wrong (onnxruntime 1.20 to
    1.32): `graphgen.targets.kernels.REFUSED`. It moves transposes through other nodes to A.
    """
    a, v = present_inputs(node)
    if v.shape is None or len(v.shape) != 1 or a.shape is None or len(a.shape) < 2:
        return None
    turn = produced_by(a, transpose)
    if turn is not None and swaps_last(turn):
        return Rewrite(matmul(Value(v), adopt(turn.inputs[0])), [a, v], "v A", may_share=True)
    if turn is not None and permutation_of(turn) == [*range(len(a.shape))]:
        return None  # it goes
    if a.producer() is None or not any(is_a(other, transpose) for other in node.graph or ()):
        return None
    return Rewrite(squeeze(matmul(Value(a), unsqueeze(Value(v), [1])), [-1]), [a, v], "a column")


@canonical(dropout_in_inference)
def nothing_in_inference(node: ir.Node) -> Rewrite | None:
    """Dropout is the identity unless its training_mode is set."""
    x, mode = node.inputs[0], node.inputs[2] if len(node.inputs) > 2 else None
    if x is None or len(node.outputs) > 1 or (mode is not None and scalar(mode) != 0.0):
        return None
    return Rewrite(x, [x], "Dropout changes nothing in inference", may_share=True)
