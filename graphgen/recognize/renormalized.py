"""Weights that are multiplied by a mask after their softmax and divided by what is left of them."""

import numpy as np
import onnx_ir as ir

from graphgen.graph import constant, produced_by
from graphgen.match import Miss, Rewrite
from graphgen.ops.elementwise import div, greater, mul, where
from graphgen.ops.layout import cast, lowest_of
from graphgen.ops.reduce import reduce_sum
from graphgen.ops.softmax import softmax
from graphgen.recognize.bounds import largest
from graphgen.recognize.masks import repeated_scalar
from graphgen.recognize.sinks import scaled_by_what_is_left
from graphgen.value import Tensor, Value, adopt

_SPREAD = 80.0
"""How far apart scores may be for the smaller one to keep its weight in float32: exp(-87) is the
smallest number in full precision."""


@softmax.recognize("Mul", "Where")
def _(node: ir.Node) -> Rewrite | Miss | None:
    """Of softmax(s) V, a factor that is a sink's share; of weights, a mask and their new sum."""
    return scaled_by_what_is_left(node) if node.op_type == "Mul" else of_what_is_kept(node)


def of_what_is_kept(node: ir.Node) -> Rewrite | Miss | None:
    """m · softmax(s) / Σ m · softmax(s), or 0 where that sum is, is the softmax of what m keeps.

    So jax2onnx writes a mask, in JAX and in Keras. Where a hidden score is above all that are kept
    by 100, the sum is 0 in float32, and so is the row: only scores that are bounded are the same.
    """
    quotient, zero = produced_by(node.inputs[1], div), repeated_scalar(node.inputs[2])
    kept = None if quotient is None else quotient.inputs[0]
    product, total = produced_by(kept, mul), None
    choice = None if quotient is None else produced_by(quotient.inputs[1], where)
    if choice is not None and choice.inputs[0] is node.inputs[0]:
        total = choice.inputs[1] if repeated_scalar(choice.inputs[2]) == 1.0 else None
    added, more = produced_by(total, reduce_sum), produced_by(node.inputs[0], greater)
    if added is None or more is None or product is None or zero != 0.0:
        return None
    if added.inputs[0] is not kept or more.inputs[0] is not total:
        return None
    axes = constant(added.inputs[1]) if len(added.inputs) > 1 else None
    if repeated_scalar(more.inputs[1]) != 0.0 or axes is None or axes.size != 1:
        return None
    for value, mask in (product.inputs, product.inputs[::-1]):
        weights, keep = produced_by(value, softmax), _truth(mask)
        if weights is None or keep is None or added.attributes.get_int("keepdims", 1) != 1:
            continue
        rank, given = len(node.outputs[0].shape or ()), weights.outputs[0].shape
        axis = weights.attributes.get_int("axis", -1)
        if given is None or len(given) != rank or (axis - int(axes.item())) % rank:
            continue
        if 2 * largest(weights.inputs[0], {}) > _SPREAD:
            return Miss(
                "the mask multiplies the weights of all scores, hidden ones, too: where one is "
                "above all that are kept by 100, the row is 0, and not their softmax"
            )
        s = adopt(weights.inputs[0])
        hidden = where(keep, s, lowest_of(s))
        result = where(keep, softmax(hidden, axis=axis), cast(0.0, to=s.dtype))
        ends = [x for x in (weights.inputs[0], mask) if x is not None]
        return Rewrite(result, ends, "the softmax of what a mask keeps")
    return None


def _truth(mask: ir.Value | None) -> Tensor | None:
    """The truth value of which these are the numbers 0 and 1."""
    content, made = constant(mask), produced_by(mask, cast)
    if content is not None and np.isin(content, (0, 1)).all():
        return content.astype(bool)
    given = None if made is None else made.inputs[0]
    return None if given is None or given.dtype != ir.DataType.BOOL else Value(given)
