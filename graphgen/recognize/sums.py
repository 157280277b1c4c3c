"""Sums that become part of the product before them, or of the norm or Gelu after them."""

from itertools import zip_longest

import onnx_ir as ir

from graphgen.graph import constant, present_inputs, produced_by
from graphgen.infer import same_shape
from graphgen.match import Rewrite
from graphgen.op import Op, find_op, is_a, read_attributes
from graphgen.ops.activation import gelu
from graphgen.ops.contrib import (
    bias_gelu,
    embed_layer_normalization,
    skip_layer_normalization,
    skip_rms_normalization,
)
from graphgen.ops.elementwise import add
from graphgen.ops.layout import _reshape, cast, dim, rank, reshape
from graphgen.ops.linalg import gemm
from graphgen.ops.norm import layer_normalization, rms_normalization
from graphgen.value import Tensor, Value, adopt, graph_value


@gemm.recognize("Add")
def product_and_bias(node: ir.Node) -> Rewrite | None:
    """The Add at `node` of a product with a matrix and a bias for its columns as one operator."""
    a, b = node.inputs
    product, bias = (produced_by(a, "MatMul"), b)
    if product is None:
        product, bias = produced_by(b, "MatMul"), a
    if product is None or bias is None or bias.shape is None:
        return None
    inputs = [*present_inputs(product), bias]
    ranks = [None if value.shape is None else len(value.shape) for value in inputs]
    if ranks[0] is None or ranks[0] < 2 or ranks[1] != 2:
        return None
    if not same_shape(ir.Shape((inputs[1].shape or ())[-1:]), bias.shape):
        return None
    x, w, c = map(Value, inputs)
    if rank(x) == 2:
        return Rewrite(gemm(x, w, c), inputs, "Gemm")
    rows = gemm(reshape(x, [-1, dim(w, 0)]), w, c)

    def restored() -> Tensor:  # only if it pays: to record the sizes takes most of the time
        sizes = [*(dim(x, i) for i in range(rank(x) - 1)), dim(w, 1)]
        return _reshape(rows, sizes, allowzero=1)  # any may be 0

    return Rewrite(restored, inputs, "Gemm", fused=rows)


SUMMED: dict[Op, Op] = {
    layer_normalization: skip_layer_normalization,
    rms_normalization: skip_rms_normalization,
}
"""Norms, and the operators that are one of a sum."""
_SUM = 3
"""The output of both that is the sum."""


@skip_layer_normalization.recognize("LayerNormalization", "RMSNormalization", "Gelu")
def fused_sum(node: ir.Node) -> Rewrite | None:
    """The norm or Gelu at `node` and the sum before it as one operator.

    A sum that others read, too, as before the norms of a pre-norm block, is an output of it.
    """
    total = produced_by(node.inputs[0], "Add")
    if total is None or len(node.outputs) > 1 or _norm_of(total) is node:
        return None
    return (_sum_and_gelu if is_a(node, gelu) else _sum_and_norm)(total, node)


def shared_sum(node: ir.Node) -> Rewrite | None:
    """The sum at `node` as an output of an operator with its norm, and that norm as another.

    The sum is looked at first: its rewrite is where the operator comes in.
    """
    if is_a(node, add):
        norm = _norm_of(node)
        made = None if norm is None else _sum_and_norm(node, norm)
        fused = None if made is None else graph_value(made.results).producer()
        if made is not None and fused is not None:
            made.results, made.anchor = fused.outputs[_SUM], norm
            made.reason += " with its sum"
        return made
    total = node.inputs[0]
    both = produced_by(total, *SUMMED.values())
    if both is None or total is None or total.index() != _SUM or not _same_norm(node, both):
        return None
    inputs = [*present_inputs(both), *present_inputs(node)[:1]]
    return Rewrite(both.outputs[0], inputs, f"{both.op_type}, its norm")


def _sum_and_gelu(total: ir.Node, node: ir.Node) -> Rewrite | None:
    """The Gelu of a sum with a bias for the features."""
    shapes = [None if v is None else v.shape for v in total.inputs]
    if read_attributes(gelu, node)["approximate"] != "none" or None in shapes:
        return None
    by_rank = sorted(
        zip(total.inputs, shapes, strict=True), key=lambda operand: -len(operand[1] or ())
    )
    (x, wide), (bias, features) = by_rank
    assert wide is not None and features is not None
    if len(features) != 1 or len(wide) < 2 or not same_shape(ir.Shape(wide[-1:]), features):
        return None
    return Rewrite(bias_gelu(adopt(x), adopt(bias)), present_inputs(total), "BiasGelu")


def _sum_and_norm(total: ir.Node, node: ir.Node) -> Rewrite | None:
    """The norm of a sum of two of one shape, (B, T, D)."""
    op, inputs = find_op(node), [*total.inputs, *node.inputs[1:]]
    fused = None if op is None else SUMMED.get(op)
    shapes = [ir.Shape([]) if v is None else v.shape for v in inputs]
    a, b, gain = shapes[:3]
    if op is None or fused is None or a is None or b is None or gain is None or None in shapes:
        return None
    given = read_attributes(op, node)
    if given["axis"] != -1 or len(a) != 3 or len(gain) != 1 or not same_shape(a, b):
        return None
    result = fused(*map(adopt, inputs), epsilon=given["epsilon"])
    return Rewrite(result, [*present_inputs(total), *present_inputs(node)[1:]], fused.name)


def _norm_of(total: ir.Node) -> ir.Node | None:
    """The norm of a sum that others read, too; its gain and bias have to be there by then."""
    y = total.outputs[0]
    if len(y.uses()) + y.is_graph_output() < 2:
        return None
    norms = [use.node for use in y.uses() if use.idx == 0 and find_op(use.node) in SUMMED]
    plain = (n for n in norms if len(n.outputs) == 1 and n.graph is total.graph)
    return next((n for n in plain if all(map(_is_constant, present_inputs(n)[1:]))), None)


def _is_constant(value: ir.Value) -> bool:
    return constant(value) is not None


def _same_norm(node: ir.Node, both: ir.Node) -> bool:
    """Whether a norm of an operator's sum is the operator's own."""
    op, fused = find_op(node), find_op(both)
    if op is None or fused is None or SUMMED.get(op) is not fused:
        return False
    own = zip_longest(node.inputs[1:], both.inputs[2:])
    given, wanted = read_attributes(op, node), read_attributes(fused, both)
    same = given["axis"] == -1 and given["epsilon"] == wanted["epsilon"]
    return same and all(a is b for a, b in own)


@embed_layer_normalization.recognize("LayerNormalization")
def embedded_sum(node: ir.Node) -> Rewrite | None:
    """The norm at `node` and two or three embeddings before it as one operator.

    Positions may also be computed in another way, if they are the same in the whole batch: then
    they serve as the table of T positions.
    """
    y, terms = node.outputs[0], _terms(node.inputs[0])
    if find_op(node) is not layer_normalization or len(node.inputs) < 3 or len(node.outputs) > 1:
        return None
    given = read_attributes(layer_normalization, node)
    found = [(term, _lookup(term, y.shape)) for term in terms]
    looked_up = [lookup for _, lookup in found if lookup is not None]
    others = [term for term, lookup in found if lookup is None]
    if y.shape is None or len(y.shape) != 3 or given["axis"] != -1 or not looked_up:
        return None
    (words, ids), *rest = looked_up
    places: Value | None = None
    positions: Tensor
    if others:
        [added, *more] = others
        sizes = [n for n in added.shape or () if n != 1]
        if more or not same_shape(ir.Shape(sizes), ir.Shape(y.shape[1:])):
            return None
        positions = reshape(Value(added), [-1, dim(Value(added), -1)])
    elif rest:
        (positions, places), *rest = rest
    else:
        return None
    kinds, segments = rest[0] if rest else (None, None)
    whole = [None if x is None else cast(x, to=ir.DataType.INT32) for x in (ids, segments, places)]
    tables, norm = (words, positions, kinds), present_inputs(node)[1:3]
    operands = (*whole[:2], *tables, *map(adopt, norm), None, whole[2])
    result = embed_layer_normalization.call(operands, {"epsilon": given["epsilon"]})
    boundary = [*others, *(v.value for lookup in looked_up for v in lookup), *norm]
    return Rewrite(result, boundary, "EmbedLayerNormalization")


def _terms(total: ir.Value | None) -> list[ir.Value]:
    """The terms that one Add or two sum up; [] if there is none."""
    last = produced_by(total, "Add")
    if last is None:
        return []
    a, b = last.inputs
    for one, other in ((a, b), (b, a)):
        if first := produced_by(one, "Add"):
            return [v for v in (*first.inputs, other) if v is not None]
    return [v for v in (a, b) if v is not None]


def _lookup(term: ir.Value, shape: ir.Shape | None) -> tuple[Value, Value] | None:
    """The matrix and the indices, (B, T), of a Gather of its rows with this shape."""
    node = produced_by(term, "Gather")
    if node is None or shape is None or term.shape is None or not same_shape(term.shape, shape):
        return None
    table, ids = present_inputs(node)
    matrix = len(table.shape or ()) == 2 and node.attributes.get_int("axis", 0) == 0
    return (Value(table), Value(ids)) if matrix else None
