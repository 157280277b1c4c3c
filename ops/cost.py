"""What operators cost: FLOPs follow from their declarations.

A multiplication of matrices costs 2 K for each element of its result, with K the inner size; a
reduction one for each element that goes in, any other primitive one for each that comes out, moving
data nothing; a composite costs what its body does.
"""

import math
from typing import Any, NamedTuple

import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.graph import operator_name, where_is
from graphgen.op import find_op, read_attributes, recording

_MOVES = frozenset(
    "Shape Size Reshape Transpose Unsqueeze Squeeze Flatten Expand Concat Split Slice Gather "
    "GatherElements GatherND ScatterElements ScatterND Range ConstantOfShape Trilu NonZero Tile "
    "Cast Identity Pad TopK".split()
)
_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
_REDUCTIONS = frozenset({"ArgMax", "CumSum"})  # besides Reduce...


class Flops(NamedTuple):
    """Floating-point operations of matrix products, and of everything else."""

    products: int = 0
    others: int = 0

    @property
    def total(self) -> int:
        """Both together."""
        return self.products + self.others

    def plus(self, other: "Flops") -> "Flops":
        """The sum, one by one."""
        return Flops(self.products + other.products, self.others + other.others)


class UnknownSizeError(Exception):
    """A value whose size is not known before the run."""


def flops(node: ir.Node, context: Any) -> Flops:
    """The cost of one node; raises GraphgenError for an operator whose cost is not known."""
    op = find_op(node)
    if op is None or node.op_type == "Einsum":
        raise GraphgenError(f"{operator_name(node)} at {where_is(node)}: no cost is known of it")
    if op.composite:
        with recording(context=context) as tape:
            result = op.expand(node.inputs, read_attributes(op, node))
            tape.trim(result if isinstance(result, tuple) else [result])
            total = Flops()
            for part in tape.nodes:
                total = total.plus(flops(part, context))
            return total
    if node.op_type in _MOVES:
        return Flops()
    if node.op_type == "MatMul":
        inner = node.inputs[0]
        assert inner is not None and inner.shape is not None
        if not isinstance(inner.shape[-1], int):
            raise UnknownSizeError
        return Flops(products=2 * inner.shape[-1] * elements(node.outputs[0]))
    if node.op_type in _CONVOLUTIONS:
        weights, over = node.inputs[1], (node.outputs if node.op_type == "Conv" else node.inputs)[0]
        assert weights is not None and weights.shape is not None
        return Flops(
            products=2 * elements(weights) // int(weights.shape.numpy()[0]) * elements(over)
        )
    reduces = node.op_type.startswith("Reduce") or node.op_type in _REDUCTIONS
    return Flops(others=elements(node.inputs[0] if reduces else node.outputs[0]))


def elements(value: ir.Value | None) -> int:
    """How many a value has; raises UnknownSizeError where that is not known before the run."""
    if value is None or value.shape is None or not value.shape.is_static():
        raise UnknownSizeError
    return math.prod(value.shape.numpy())
