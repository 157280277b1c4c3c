"""Products of x as a sum of two terms, as weights of eight bits multiply it: t W + (x - t) W."""

from collections.abc import Sequence

import onnx_ir as ir

from graphgen import ops
from graphgen.graph import constant, present_inputs, produced_by
from graphgen.infer import same_shape
from graphgen.op import Op, is_a
from graphgen.ops.layout import _reshape
from graphgen.ops.quantized import matmul_nbits


def multiplied(node: ir.Node) -> ir.Node:
    """The product whose two results a node sums up, over their first axis; else the node."""
    product = produced_by(node.inputs[0], matmul_nbits) if is_a(node, ops.reduce_sum) else None
    over = product is not None and len(node.inputs) > 1 and _are(node.inputs[1], [0])
    return product if product and over and node.attributes.get_int("keepdims", 1) == 0 else node


def source(x: ir.Value | None, *kinds: Op) -> ir.Value | None:
    """What the node of such a kind that makes a value reads first."""
    node = produced_by(x, *kinds)
    return None if node is None else node.inputs[0]


def sum_of_terms(terms: ir.Value) -> ir.Value | None:
    """x, if `terms` are t and x - t along a new first axis, maybe with columns of zeros behind.

    Whatever t is, the products with both terms add up to that with x: products are linear.
    """
    both = produced_by(source(terms, _reshape), ops.concat)
    if both is None or len(both.inputs) != 2 or both.attributes.get_int("axis", -1) != 0:
        return None
    nodes = [produced_by(term, ops.unsqueeze) for term in both.inputs]
    if not all(node is not None and _are(node.inputs[1], [0]) for node in nodes):
        return None
    first, rest = (source(term, ops.unsqueeze) for term in both.inputs)
    less = produced_by(rest, ops.sub)
    whole = source(less.inputs[0], _reshape) if less and less.inputs[1] is first else None
    if whole is None or whole.shape is None or terms.shape is None:
        return None
    if not same_shape(terms.shape, ir.Shape([2, *whole.shape])):
        return None
    padded = produced_by(whole, ops.pad)
    if padded is None:
        return whole
    pads = constant(padded.inputs[1])
    behind = pads is not None and not pads[:-1].any() and pads[-1] > 0
    return padded.inputs[0] if behind and len(padded.inputs) == 2 else whole


def split_in_blocks(y: ir.Value) -> ir.Node | None:
    """The Reshape of x (..., K) to blocks (..., K / n, n), if y is a product of their sums.

    So are the shifts of blocks multiplied: the rows of y are those of x.
    """
    scaled = produced_by(y, ops.mul)
    number = None if scaled is None else constant(scaled.inputs[1])
    product = produced_by(
        scaled.inputs[0] if scaled and number is not None and number.size == 1 else y, ops.matmul
    )
    if product is None or product.inputs[1] is None or not is_static(product.inputs[1]):
        return None
    sums = produced_by(product.inputs[0], ops.reduce_sum)
    if sums is None or len(sums.inputs) < 2 or sums.attributes.get_int("keepdims", 1) != 0:
        return None
    split = produced_by(sums.inputs[0], _reshape)
    x = None if split is None else split.inputs[0]
    if split is None or x is None or x.shape is None:
        return None
    if not any(_are(sums.inputs[1], [axis]) for axis in (-1, len(x.shape))):
        return None
    blocks, fixed = split.outputs[0].shape, constant(split.inputs[1]) is not None
    apart = blocks is not None and same_shape(ir.Shape(blocks[:-2]), ir.Shape(x.shape[:-1]))
    return split if fixed and apart else None


def is_static(value: ir.Value) -> bool:
    """Whether a value is a weight, possibly moved; its content is not read."""
    node = value.producer()
    if node is None:
        return value.is_initializer()
    return is_a(node, ops.transpose) and all(is_static(v) for v in present_inputs(node))


def _are(x: ir.Value | None, numbers: Sequence[int]) -> bool:
    array = constant(x)
    return array is not None and [*array.reshape(-1)] == [*numbers]
