"""Products of matrices and their sums in a training graph, with little memory."""

from typing import Any

import onnx_ir as ir

from graphgen import ops
from graphgen.graph import present_inputs, produced_by, scalar
from graphgen.infer import same_shape
from graphgen.match import Rewrite
from graphgen.op import find_op, read_attributes
from graphgen.recognize.axes import permutation_of
from graphgen.record import adopt


def transposed_operands(node: ir.Node) -> Rewrite | None:
    """A Gemm of transposed matrices as one with the flags the other way."""
    inputs, attributes, found = [*map(adopt, node.inputs)], _attributes(node), False
    for i, flag in enumerate(("transA", "transB")):
        made = produced_by(node.inputs[i], "Transpose")
        if made is not None and made.inputs[0] is not None:
            inputs[i], attributes[flag], found = adopt(made.inputs[0]), 1 - attributes[flag], True
    if not found:
        return None
    result = ops.gemm(*inputs, **attributes)
    return Rewrite(
        result, [x for x in inputs if x is not None], "transposes as flags", may_share=True
    )


def transposed_product(node: ir.Node) -> Rewrite | None:
    """(A B)ᵀ = Bᵀ Aᵀ: the gradient of a table that is tied to the head is as large as the table."""
    made = produced_by(node.inputs[0], "Gemm")
    if made is None or len(present_inputs(made)) > 2 or permutation_of(node) != [1, 0]:
        return None
    a, b = map(adopt, made.inputs)
    attributes = _attributes(made)
    flags = {"transA": 1 - attributes["transB"], "transB": 1 - attributes["transA"]}
    return Rewrite(ops.gemm(b, a, **attributes | flags), [a, b], "transposed product")


def scaled_rows(node: ir.Node) -> Rewrite | None:
    """A factor for each row, in a product, to where there are fewer columns.

    (diag(s) X) B = diag(s) (X B) and (diag(s) X)ᵀ B = Xᵀ (diag(s) B). The gradient of the logits
    would be calculated from memory as large as they are, into more of it.
    """
    attributes = _attributes(node)
    scaled = produced_by(node.inputs[0], "Mul")
    if scaled is None or len(present_inputs(node)) > 2:
        return None
    x, s = map(adopt, scaled.inputs)
    x, s = (s, x) if x.shape is not None and x.shape[-1] == 1 else (x, s)
    b = adopt(node.inputs[1])
    if s.shape is None or x.shape is None or b.shape is None or len(s.shape) != 2:
        return None
    many, few = x.shape[-1], b.shape[-2 if attributes["transB"] else -1]
    sizes = isinstance(many, int) and isinstance(few, int) and few < many
    if not sizes or s.shape[-1] != 1 or len(x.shape) != 2 or x.shape[0] != s.shape[0]:
        return None
    if not attributes["transA"]:
        result: Any = ops.gemm(x, b, **attributes) * s
    elif not attributes["transB"]:
        result = ops.gemm(x, b * s, **attributes)
    else:
        return None
    return Rewrite(result, [x, s, b], "rows scaled where they are short", may_share=True)


def _attributes(node: ir.Node) -> dict[str, Any]:
    op = find_op(node)
    assert op is not None
    return read_attributes(op, node)


RULES = {"Gemm": [transposed_operands, scaled_rows], "Transpose": [transposed_product]}


def swaps_last(transpose: ir.Node) -> bool:
    """Whether it is of matrices: a product can read them so."""
    perm = permutation_of(transpose)
    n = len(perm)
    return n > 1 and perm == [*range(n - 2), n - 1, n - 2]


def transposes_operands(node: ir.Node) -> bool:
    """Whether a node does nothing but transpose matrices for products."""
    transposes = node.op_type == "Transpose" and not node.domain and swaps_last(node)
    return transposes and all(use.node.op_type == "MatMul" for use in node.outputs[0].uses())


_ADDED_TO = {"Gemm": slice(2, 3), "ScatterElements": slice(1), "Add": slice(2)}
"""Which operands may be in the memory of the result."""


def running_sums(gradient: ir.Value) -> list[ir.Value]:
    """The sums on the way to a gradient that can be in its memory, from it to the first of them.

    Each has one reader, which adds something that is elsewhere: a product to its operand C, rows
    that are scattered, or an Add.
    """
    sums = [gradient]
    while (node := sums[-1].producer()) is not None and not node.domain:
        operands = node.inputs[_ADDED_TO.get(node.op_type, slice(0))]
        if any(x is None or x.producer() is None for x in operands):
            break  # it adds to a buffer
        like = [x for x in operands if x is not None and same_shape(x.shape, gradient.shape)]
        own = [x for x in like if len(x.uses()) == 1 and not x.is_graph_output()]
        if not own or own[0].dtype != gradient.dtype:
            break
        sums.append(own[0])
    return sums


def add_to(total: ir.Value, part: ir.Value) -> bool:
    """Have a product, or rows scattered into zeros, added to `total` by the node that makes it.

    False, and nothing is done, where it is neither or where `part` has other readers.
    """
    node = part.producer()
    if node is None or len(part.uses()) > 1 or not same_shape(total.shape, part.shape):
        return False
    product = node.op_type == "Gemm" and len(present_inputs(node)) == 2
    zeros = produced_by(node.inputs[0], "Expand") if _adds_rows(node) else None
    if not product and (zeros is None or scalar(zeros.inputs[0]) != 0):
        return False
    if product:
        node.resize_inputs(3)
    node.replace_input_with(2 if product else 0, total)
    return True


def _adds_rows(node: ir.Node) -> bool:
    return node.op_type == "ScatterElements" and _attributes(node)["reduction"] == "add"
