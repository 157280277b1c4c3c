"""What a graph computes of its sizes alone, found by trying: values at sizes of one's choice."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.graph import constant, present_inputs
from graphgen.measure.reference import evaluate_node
from graphgen.operands import Array


class Sampled:
    """Values of a graph at given sizes, by the names of these, and with inputs that are given.

    Other inputs have a shape and no content: what reads that is not known.
    """

    def __init__(self, sizes: Mapping[str, int], given: Mapping[ir.Value, Array]) -> None:
        self.sizes = dict(sizes)
        self._known: dict[ir.Value, Array | None] = dict(given)

    def __call__(self, value: ir.Value | None) -> Array | None:
        """The content of a value, floats in float64; None if it is not known."""
        if value is None:
            return None
        if value not in self._known:
            self._known[value] = None  # until it is known, and for good if it is not
            array, node = constant(value), value.producer()
            if array is not None or node is None:
                self._known[value] = array
            else:
                made = self._made(node)
                self._known.update(zip(node.outputs, made, strict=False))
        return self._known[value]

    def dims(self, value: ir.Value) -> list[int] | None:
        """The sizes of a value, also of one without known content."""
        known = self._known.get(value)
        if known is not None:
            return [*known.shape]
        try:
            dims = [d if isinstance(d, int) else d.evaluate(self.sizes) for d in value.shape or ()]
        except (ValueError, TypeError, ZeroDivisionError):
            return None
        numbers = [d for d in dims if isinstance(d, int)]
        return None if value.shape is None or len(numbers) < len(dims) else numbers

    def _made(self, node: ir.Node) -> Sequence[Any]:
        if reads_sizes(node) and node.inputs[0] is not None:
            dims = self.dims(node.inputs[0])
            if dims is None:
                return ()
            if node.op_type == "Size":
                return [np.array(np.prod(dims), np.int64)]
            span = slice(node.attributes.get_int("start", 0), node.attributes.get_int("end", None))
            return [np.array(dims, np.int64)[span]]
        arrays = [self(v) for v in node.inputs]
        if any(v is not None and a is None for v, a in zip(node.inputs, arrays, strict=True)):
            return ()
        try:
            return evaluate_node(node, arrays)
        except GraphgenError:
            return ()


def reads_sizes(node: ir.Node) -> bool:
    """Whether a node reads only the sizes of its operand."""
    return not node.domain and node.op_type in ("Shape", "Size")


def depends(value: ir.Value, known: dict[ir.Value, bool]) -> bool:
    """Whether the content of a value depends on that of some others, which `known` maps to True."""
    pending = [value]
    while pending:
        at = pending[-1]
        node = at.producer()
        if at in known or node is None or reads_sizes(node):
            known.setdefault(at, False)
            pending.pop()
            continue
        operands = present_inputs(node)
        if unknown := [v for v in operands if v not in known]:
            pending += unknown
            continue
        known[at] = any(known[v] for v in operands)
        pending.pop()
    return known[value]
