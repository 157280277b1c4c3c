"""Activations that are calculated again, from what their gradients calculate anyway."""

from functools import partial

import onnx_ir as ir

from graphgen import ops
from graphgen.graph import scalar
from graphgen.match import Engine, PassReport, Rewrite, Rule
from graphgen.op import Op, is_a, read_attributes
from graphgen.ops.activation import gelu_slope
from graphgen.passes.training import MARK
from graphgen.traits import Trait, has
from graphgen.value import Tensor, Value, adopt


def share_factors(model: ir.Model, engine: Engine) -> PassReport:
    """A Gelu that is calculated again as x Φ, one product, and Φ as its gradient calculates it.

    The kernel of Gelu takes four times as long, nearly all of it for Φ. The result differs from
    the forward pass by rounding. The slope, which reads Φ too, is calculated there as well: one
    array of it is then kept in the place of x.
    """
    place = {node: i for i, node in enumerate(model.graph)}
    made = dict[ir.Node, Tensor]()
    rules: dict[Op, list[Rule]] = {
        ops.gelu: [partial(_again, place, made)],
        ops.add: [partial(_slope, made)],
    }
    return engine.run("share_factors", model, rules, forward=True)


def _again(place: dict[ir.Node, int], made: dict[ir.Node, Tensor], node: ir.Node) -> Rewrite | None:
    """x Φ, where nodes after this one calculate the slope of Gelu at x."""
    x = node.inputs[0]
    if node.metadata_props.get(MARK) != "copy" or node not in place or x is None:
        return None
    if _is_compared(node):
        return None
    start = x.producer()
    if start is not None and start.metadata_props.get(MARK) == "start" and start.inputs[0]:
        x = start.inputs[0]
    slope, phi = gelu_slope(adopt(x), read_attributes(ops.gelu, node)["approximate"])
    assert isinstance(slope, Value)
    later = (n for n, i in place.items() if i > place[node] and is_a(n, ops.add))
    found = [n for n in later if _equal(n.outputs[0], slope.value)]
    if not found:
        return None
    made |= dict.fromkeys(found, slope)
    reason = "with what its gradient reads"
    return Rewrite(adopt(x) * phi, [x], reason, may_share=True, untrimmed=True)


def _is_compared(node: ir.Node) -> bool:
    """Whether it is compared, or what is calculated again from it: with a maximum, to the bit."""
    readers = [use.node for value in node.outputs for use in value.uses()]
    return any(
        is_a(one, ops.equal) or (one.metadata_props.get(MARK) == "copy" and _is_compared(one))
        for one in readers
    )


def _slope(made: dict[ir.Node, Tensor], node: ir.Node) -> Rewrite | None:
    slope = made.get(node)
    if not isinstance(slope, Value):
        return None
    return Rewrite(slope, [slope.value, *filter(None, node.inputs)], "calculated before")


def _equal(a: ir.Value | None, b: ir.Value | None) -> bool:
    """Whether two values are the same by equal nodes of one output, or equal constants."""
    if a is b or a is None or b is None:
        return a is b
    one, other = a.producer(), b.producer()
    if one is None or other is None:
        return scalar(a) is not None and scalar(a) == scalar(b)
    if one.op_identifier() != other.op_identifier() or one.attributes != other.attributes:
        return False
    orders = [other.inputs, other.inputs[::-1]] if has(one, Trait.COMMUTATIVE) else [other.inputs]
    return any(
        len(one.inputs) == len(order) and all(map(_equal, one.inputs, order)) for order in orders
    )
