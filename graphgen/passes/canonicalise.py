"""The canonical form: one spelling for what exporters and hands write in many.

Reductions and normalisations count their axes from the end, layout operators from the front;
constants stand on the right; powers, reciprocals and divisions by a constant are products; scalar
factors stand outermost; shapes that are known are written as 0 (the same), numbers and one -1.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.graph import (
    Rewrite,
    constant,
    infer_model,
    permutation_of,
    present_inputs,
    produced_by,
    scalar,
    tidy,
)
from graphgen.infer import same_dim, same_shape
from graphgen.match import Engine, PassReport, Rule
from graphgen.op import Operand, adopt, find_op, is_default, read_attributes

_ROUNDS = 20


def canonicalise(model: ir.Model, engine: Engine, context: Any) -> PassReport:
    """Apply the rules until none fires."""
    total = PassReport("canonicalise", nodes_before=model.graph.num_nodes())
    for node in model.graph:
        for attr in [a for a in node.attributes.values() if is_default(node, a)]:
            del node.attributes[attr.name]
    for _ in range(_ROUNDS):
        report = engine.run("canonicalise", model, RULES, context)
        fired = [site for site in report.sites if site.status == "fired"]
        total.sites += fired
        total.seconds += report.seconds
        if not fired:
            break
    tidy(model)
    total.nodes_after = model.graph.num_nodes()
    return total


def canonical(model: ir.Model) -> None:
    """Bring a model into the canonical form; for the patterns made from bodies."""
    canonicalise(model, Engine(), infer_model(model))


def _inputs(node: ir.Node) -> list[Any]:
    return [adopt(value) for value in node.inputs]


def _same(value: ir.Value, reason: str) -> Rewrite:
    return Rewrite(value, [value], reason, may_share=True)


def _is_float(value: ir.Value) -> bool:
    return value.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def _moderate(c: Any) -> bool:
    """Whether a factor is so near to 1 that moving it can hardly overflow or underflow."""
    return bool(np.all((np.abs(c) >= 1e-4) & (np.abs(c) <= 1e4)))


def power(node: ir.Node) -> Rewrite | None:
    """x² = x·x, x³ = x·x·x, x^½ = √x, x^-½ = 1/√x."""
    x, exponent = _inputs(node)
    p = scalar(exponent)
    if p in (2.0, 3.0):
        y = x * x
        return Rewrite(y if p == 2.0 else y * x, [x], "power as product")
    if p in (0.5, -0.5):
        root = ops.sqrt(x)
        return Rewrite(root if p > 0 else ops.reciprocal(root), [x], "power as root")
    return None


def division(node: ir.Node) -> Rewrite | None:
    """x / c = x · (1/c) for a constant c; 1 / x is the reciprocal."""
    x, divisor = _inputs(node)
    c = constant(divisor)
    if c is None and scalar(x) == 1.0 and same_shape(divisor.shape, node.outputs[0].shape):
        return Rewrite(ops.reciprocal(divisor), [divisor], "one over x as reciprocal")
    if c is None or not _is_float(node.outputs[0]) or not np.all(c) or constant(x) is not None:
        return None
    if c.size > 1 or np.all(c == 1) or not _moderate(c):
        return None
    return Rewrite(x * (1 / c).astype(c.dtype), [x], "division by a constant as product")


def product(node: ir.Node) -> Rewrite | None:
    """a · (1/b) = a / b; (x·c)·y = (x·y)·c, and two scalar factors are one."""
    if not _is_float(node.outputs[0]):
        return None
    for a, b in _both_orders(node):
        inverse = produced_by(b, "Reciprocal")
        if inverse is not None and constant(a) is None:
            divisor: Any = adopt(inverse.inputs[0])
            return Rewrite(a / divisor, [a, divisor], "quotient")
        inner = produced_by(a, "Mul")
        if inner is None or len(a.uses()) > 1:
            continue
        x, factor = _inputs(inner)
        c, outer = constant(factor), constant(b)
        if c is None or c.size > 1 or not _moderate(c):
            continue
        if outer is not None and outer.size == 1:
            both = (c * outer).astype(c.dtype)
            return Rewrite(x * both, [x], "two scalar factors as one")
        return Rewrite((x * b) * factor, [x, b], "scalar factor outermost")
    return None


def _both_orders(node: ir.Node) -> Sequence[tuple[Any, Any]]:
    a, b = _inputs(node)
    return ((a, b), (b, a))


def neutral(node: ir.Node) -> Rewrite | None:
    """x + 0 = x - 0 = x · 1 = x / 1 = x ∧ true = x ∨ false = x, where that keeps the shape."""
    unit = {"Add": 0.0, "Sub": 0.0, "Or": 0.0}.get(node.op_type, 1.0)
    x, other = node.inputs
    if x is None or scalar(other) != unit or not same_shape(x.shape, node.outputs[0].shape):
        return None
    return _same(x, f"{node.op_type} of {unit:g} is nothing")


def commute(node: ir.Node) -> Rewrite | None:
    """Constants on the right, other operands in the order of their names."""
    if len(node.inputs) != 2:
        return None
    a, b = _inputs(node)
    op = find_op(node)
    left, right = ((constant(v) is not None, str(v.name)) for v in (a, b))
    if op is None or left <= right:
        return None
    return Rewrite(op(b, a), [a, b], "operands in order")


def nothing(node: ir.Node) -> Rewrite | None:
    """Identity, a cast to the dtype it has, a reshape or expansion to the shape it has."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or len(node.outputs) > 1:
        return None
    if y.is_graph_output() and (x.producer() is None or x.is_graph_output()):
        return None  # an output needs a value of its own
    if node.op_type == "Cast" and x.dtype != y.dtype:
        return None
    if node.op_type in ("Reshape", "Expand") and not same_shape(x.shape, y.shape):
        return None
    return _same(x, f"{node.op_type} of nothing")


def inference_dropout(node: ir.Node) -> Rewrite | None:
    """Dropout is the identity unless its training_mode is set."""
    x, mode = node.inputs[0], node.inputs[2] if len(node.inputs) > 2 else None
    if x is None or len(node.outputs) > 1 or (mode is not None and scalar(mode) != 0.0):
        return None
    return _same(x, "dropout in inference is nothing")


def axes_from_end(node: ir.Node) -> Rewrite | None:
    """Reductions and normalisations count axes from the end."""
    x, op = node.inputs[0], find_op(node)
    if x is None or x.shape is None or op is None or len(node.outputs) > 1:
        return None
    n, attributes = len(x.shape), read_attributes(op, node)
    if "axis" in attributes:
        if attributes["axis"] < 0:
            return None
        attributes["axis"] -= n
        return Rewrite(op(*_inputs(node), **attributes), present_inputs(node), "axis from the end")
    axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None or not np.any(axes >= 0):
        return None
    wanted = sorted(int(a) if a < 0 else int(a) - n for a in axes)
    return Rewrite(op(adopt(x), wanted, **attributes), [x], "axes from the end")


def axis_from_front(node: ir.Node) -> Rewrite | None:
    """Layout operators count their axis from the front."""
    x, op = node.inputs[0], find_op(node)
    if x is None or x.shape is None or op is None:
        return None
    attributes = read_attributes(op, node)
    if attributes["axis"] >= 0:
        return None
    attributes["axis"] += len(x.shape)
    return Rewrite(op(*_inputs(node), **attributes), present_inputs(node), "axis from the front")


def permutation(node: ir.Node) -> Rewrite | None:
    """Two transposes are one; a transpose that keeps the order is none."""
    x, y = node.inputs[0], node.outputs[0]
    perm = permutation_of(node)
    if x is None or not perm:
        return None
    if perm == sorted(perm):
        return _same(x, "transpose that keeps the order")
    inner = produced_by(x, "Transpose")
    before = permutation_of(inner) if inner is not None else []
    if inner is None or not before or y.shape is None:
        return None
    source = adopt(inner.inputs[0])
    both = [before[p] for p in perm]
    result = source if both == sorted(both) else ops.transpose(source, perm=both)
    return Rewrite(result, [source], "two transposes as one", may_share=True)


def reshape(node: ir.Node) -> Rewrite | None:
    """Two reshapes are one; a shape computed at run time that inference knows is a constant."""
    x, sizes = _inputs(node)
    y = node.outputs[0]
    if y.shape is None or x.shape is None:
        return None
    if "allowzero" in node.attributes:
        return _plain_reshape(x, sizes, y)
    inner = produced_by(x, "Reshape")
    if inner is not None:
        source: Any = adopt(inner.inputs[0])
        target = _sizes(source, y.shape)
        if target is not None:
            again = ops.reshape(source, target)
            return Rewrite(again, [source], "two reshapes as one", may_share=True)
    if constant(sizes) is None:
        target = _sizes(x, y.shape)
        if target is not None:
            return Rewrite(ops.reshape(x, target), [x, sizes], "shape as a constant")
    return _batched_transpose(x, y)


def _plain_reshape(x: Any, sizes: Any, y: ir.Value) -> Rewrite | None:
    """Without allowzero, which only changes what a size of 0 means, where none of these is 0."""
    known = constant(sizes)
    target: Any = _sizes(x, y.shape) if known is None and y.shape is not None else known
    if target is None or (known is not None and np.any(known == 0)):
        return None
    return Rewrite(ops.reshape(x, target), [x, sizes], "reshape without allowzero")


def _sizes(x: Operand, shape: ir.Shape) -> list[int] | None:
    """`shape` as constant sizes of a reshape of x, or None where two are known only at run time."""
    result: list[int] = []
    for i, d in enumerate(shape):
        if isinstance(d, int) and d != 0:
            result.append(d)
        elif x.shape is not None and i < len(x.shape) and same_dim(d, x.shape[i]):
            result.append(0)
        else:
            result.append(-1)
    return result if result.count(-1) <= 1 else None


def _batched_transpose(x: Operand, y: ir.Value) -> Rewrite | None:
    """Leading axes merged, the last two swapped, leading axes split again: one transpose."""
    swap = produced_by(x, "Transpose")
    merge = produced_by(swap.inputs[0], "Reshape") if swap is not None else None
    if swap is None or merge is None or permutation_of(swap) != [0, 2, 1] or y.shape is None:
        return None
    source: Any = adopt(merge.inputs[0])
    if source.shape is None or len(source.shape) != len(y.shape) or len(y.shape) < 3:
        return None
    merged = merge.outputs[0].shape
    wanted = ir.Shape([*source.shape[:-2], source.shape[-1], source.shape[-2]])
    kept = merged is not None and all(map(same_dim, merged[-2:], source.shape[-2:]))
    if not kept or not same_shape(wanted, y.shape):
        return None
    return Rewrite(ops.swap_last(source), [source], "transpose of a batch", may_share=True)


_ELEMENTWISE = ("Add", "Mul", "Max", "Min", "And", "Or", "Equal")
_REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd")
_NORMS = ("Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization")

RULES: dict[str, list[Rule]] = {
    "Pow": [power],
    "Div": [neutral, division],
    "Sub": [neutral],
    "Identity": [nothing],
    "Cast": [nothing],
    "Expand": [nothing],
    "Dropout": [inference_dropout],
    "Reshape": [nothing, reshape],
    "Transpose": [permutation],
    **{name: [commute] for name in _ELEMENTWISE},
    **{name: [axes_from_end] for name in (*_REDUCTIONS, *_NORMS)},
    **{name: [axis_from_front] for name in ("Concat", "Gather", "Split")},
}
for _name in ("Add", "And", "Or"):
    RULES[_name] = [neutral, commute]
RULES["Mul"] = [neutral, product, commute]
