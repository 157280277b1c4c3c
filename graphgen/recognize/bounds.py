"""How large numbers can be, whatever the inputs are: norms, and products with constants."""

import math

import numpy as np
import onnx_ir as ir

from graphgen.graph import constant, is_float, produced_by, scalar
from graphgen.op import is_a
from graphgen.ops.elementwise import add, div, mul, neg, sigmoid, sub, tanh, where
from graphgen.ops.layout import lowest_of
from graphgen.ops.linalg import matmul
from graphgen.ops.softmax import softmax
from graphgen.recognize.axes import LAYOUT
from graphgen.traits import Trait, has

_STEPS = 32


def largest(value: ir.Value | None, known: dict[ir.Value, float], steps: int = _STEPS) -> float:
    """What no element that is a number exceeds, above or below 0; infinity if that is unknown.

    `known` has the bounds of some values, and gets those that are found.
    """
    if value is None or not is_float(value) or not steps:
        return math.inf
    if value not in known:
        content, node = constant(value), value.producer()
        if content is not None:
            found = float(np.abs(content).max(initial=0.0))
        else:
            found = math.inf if node is None else _of(node, value, known, steps - 1)
        known[value] = math.inf if math.isnan(found) else found
    return known[value]


def _of(node: ir.Node, y: ir.Value, known: dict[ir.Value, float], steps: int) -> float:
    if node.outputs[0] is not y:
        return max(_operands(node, known, steps)) if has(node, Trait.MOVES) else math.inf
    if is_a(node, softmax, sigmoid, tanh):
        return 1.0
    if has(node, Trait.NORMALIZES):
        return _normalized(node, known, steps)
    if is_a(node, matmul):
        return _product(node, known, steps)
    if is_a(node, div):
        divisor = constant(node.inputs[1])
        least = 0.0 if divisor is None or not divisor.size else float(np.abs(divisor).min())
        return largest(node.inputs[0], known, steps) / least if least else math.inf
    if is_a(node, add, sub):
        return sum(_operands(node, known, steps))
    if is_a(node, mul):
        return math.prod(_operands(node, known, steps))
    adds = node.attributes.get_string("reduction", "none") != "none"
    moves = has(node, Trait.MOVES) and not adds
    return max(_operands(node, known, steps)) if moves or is_a(node, where, neg) else math.inf


def _operands(node: ir.Node, known: dict[ir.Value, float], steps: int) -> list[float]:
    """The bounds of the operands that are floats; of none, it is infinity."""
    given = [x for x in node.inputs if x is not None and is_float(x)]
    return [largest(x, known, steps) for x in given] or [math.inf]


def _normalized(node: ir.Node, known: dict[ir.Value, float], steps: int) -> float:
    """√n of n elements, whose mean square is 1 at most, times the gain, plus the bias."""
    x, gain, *bias = node.inputs
    axis = node.attributes.get_int("axis", -1)
    sizes = [None] if x is None or x.shape is None else x.shape[axis:]
    if not all(isinstance(d, int) for d in sizes):
        return math.inf
    count = math.prod(d for d in sizes if isinstance(d, int))
    shift = sum(largest(b, known, steps) for b in bias if b is not None)
    return math.sqrt(count) * largest(gain, known, steps) + shift


def _product(node: ir.Node, known: dict[ir.Value, float], steps: int) -> float:
    """A row times a column: the largest sum of a constant's, or as many products as it has."""
    for i, x in enumerate(node.inputs):
        content = constant(x)
        if content is not None and content.ndim and content.size:
            along = -1 if i == 0 or content.ndim == 1 else -2
            sums = float(np.abs(content).sum(along, dtype=np.float64).max())
            return sums * largest(node.inputs[1 - i], known, steps)
    a = node.inputs[0]
    count = None if a is None or a.shape is None else a.shape[-1]
    if not isinstance(count, int):
        return math.inf
    return count * math.prod(_operands(node, known, steps))


def never(condition: ir.Value | None) -> bool:
    """Whether a truth value is false everywhere: it asks for infinity where there is none."""
    node = produced_by(condition, "And", "IsInf")
    if node is None or node.op_type == "And":
        return node is not None and any(map(never, node.inputs))
    x = node.inputs[0]
    while (made := produced_by(x, "Cast")) is not None:
        x = made.inputs[0]
    return largest(x, {}) < _FINITE


_FINITE = 6e4  # in every dtype of floats


def is_low(number: float, node: ir.Node, limit: float = -1e30) -> bool:
    """Whether exp of scores plus this number is 0, whatever they are; -6e4 is so in float16."""
    half = node.outputs[0].dtype == ir.DataType.FLOAT16
    return number < (-6e4 if half else limit)


def hides(bias: ir.Value | None, factor: float) -> bool:
    """Whether a bias is such a low number, times something that may be 0 or 1."""
    while (node := produced_by(bias, "Mul", "Cast", *LAYOUT)) is not None:
        c = scalar(node.inputs[1]) if node.op_type == "Mul" else None
        if c is not None and c * factor < -1e30:
            return True
        bias = node.inputs[0]
    return False


def is_tame(bias: ir.Value | None, factor: float) -> bool:
    """Whether a bias consists of constants, or comes from a table of them, and none hides."""
    while (node := produced_by(bias, "Gather", *LAYOUT)) is not None:
        bias = node.inputs[0]
    content = constant(bias)
    return content is not None and bool(np.all(content * factor > lowest_of(content) / 4))
