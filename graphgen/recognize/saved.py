"""What the runtime writes when it saves a file: layouts and means moved apart from their uses."""

import onnx_ir as ir

from graphgen.graph import constant, present_inputs, produced_by, scalar
from graphgen.match import Rewrite
from graphgen.op import canonical, find_op, is_a, read_attributes
from graphgen.ops.layout import transpose
from graphgen.ops.norm import layer_normalization, rms_normalization
from graphgen.ops.saved import simplified_layer_normalization
from graphgen.recognize.axes import View, permutation_of
from graphgen.traits import Trait
from graphgen.value import Tensor, Value


@canonical(transpose)
def transposed_operands(node: ir.Node) -> Rewrite | None:
    """The transpose of an elementwise result is that of its operands, if it costs nothing there.

    The runtime moves transposes behind products, so that a rotation has parts in two layouts.
    """
    total, perm = node.inputs[0], permutation_of(node)
    made = produced_by(total, Trait.BROADCASTS)
    op = None if made is None else find_op(made)
    if op is None or made is None or total is None:
        return None
    turned = [_transposed(x, perm) for x in present_inputs(made)]
    if any(x is None for x in turned) or len(total.uses()) > 1 or total.is_graph_output():
        return None
    result = op(*turned, **read_attributes(op, made))
    return Rewrite(result, present_inputs(made), "transpose of operands that are there")


def _transposed(x: ir.Value, perm: list[int]) -> Tensor | None:
    """The transpose of x if the graph has it, or if it takes no more layouts than x; or None."""
    if scalar(x) is not None:
        return Value(x)
    readers = [use.node for use in x.uses() if is_a(use.node, transpose)]
    if any(permutation_of(n) == perm for n in readers):
        return transpose(Value(x), perm=perm)
    view = View.of(x, repeated=False)
    if view is None or not view.steps or len(view.dims) != len(perm):
        return None
    return view.arranged([view.dims[i] for i in perm], at_most=view.steps)


@canonical(rms_normalization, simplified_layer_normalization)
def centered(node: ir.Node) -> Rewrite | None:
    """The RMS norm of x - mean(x) is a layer norm without a bias; the runtime writes it so."""
    d, scale = present_inputs(node)
    turned = produced_by(d, "Transpose")
    made = produced_by(d if turned is None else turned.inputs[0], "Sub")
    x, mean = (None, None) if made is None else made.inputs
    means = produced_by(mean, "ReduceMean")
    if x is None or x.shape is None or means is None or means.inputs[0] is not x:
        return None
    rank = len(x.shape)
    order = list(range(rank)) if turned is None else permutation_of(turned)
    axes = constant(means.inputs[1]) if len(means.inputs) > 1 else None
    last = axes is not None and [int(a) % rank for a in axes] == order[-1:]
    if node.attributes.get_int("axis", -1) not in (-1, rank - 1) or node.outputs[1:] or not last:
        return None
    if not means.attributes.get_int("keepdims", 1):
        return None
    source = Value(x) if turned is None else transpose(Value(x), perm=order)
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    result = layer_normalization(source, Value(scale), epsilon=epsilon)
    return Rewrite(result, [x, scale], "of differences from the mean")
