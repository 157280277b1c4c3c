"""Sums of which one term is 0 wherever the other is not: choices, written with numbers 0 and 1."""

import itertools
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.graph import constant, is_float, present_inputs, produced_by, scalar
from graphgen.infer import same_shape
from graphgen.match import Rewrite
from graphgen.op import canonical, find_op, is_a, read_attributes
from graphgen.ops.elementwise import add, logical_not, mul, sub, where
from graphgen.ops.layout import _reshape, cast, numpy_dtype, slice_, squeeze, unsqueeze
from graphgen.recognize.masks import repeated_scalar
from graphgen.value import Tensor, Value, adopt


@canonical(add, sub)
def choice(node: ir.Node) -> Rewrite | None:
    """x · m + y · (1 - m) = where(m, x, y) for a truth value m, or its numbers 0 and 1.

    In a difference y is one number, as GPT-2 hides what is ahead; m may be a constant.
    """
    terms = [produced_by(value, mul) for value in node.inputs]
    found = [
        [
            (*truth, x)
            for x, m in itertools.permutations(present_inputs(term))
            if (truth := _truth(m))
        ]
        for term in terms
        if term is not None
    ]
    why = "sum of exclusive products as choice"
    for (m, sign, x), (n, other, y) in itertools.product(*found) if None not in terms else ():
        instead = _other(node, y) if m is n and sign != other else None
        if instead is not None:
            (condition, ends), kept = _condition(m), Value(x)
            pair = (kept, instead) if sign else (instead, kept)
            return Rewrite(where(condition, *pair), [*ends, x, y], why)
    rest, product = constant(node.inputs[1]), terms[0]
    for x, m in itertools.permutations(present_inputs(product)) if product else ():
        numbers = constant(m)
        if numbers is None or rest is None or numbers.shape != rest.shape or numbers.all():
            continue
        low, factor = (np.unique(a[b]) for a, b in ((rest, numbers == 0), (numbers, numbers != 0)))
        if len(low) == len(factor) == 1 and not rest[numbers != 0].any():
            low = low if is_a(node, add) else -low
            kept = adopt(x) if factor[0] == 1 else adopt(x) * factor[0]
            return Rewrite(where(numbers != 0, kept, low.reshape(())), [x], why)
    return None


@canonical(where)
def shifted(node: ir.Node) -> Rewrite | None:
    """where(m, x + low, x) = x + where(m, low, -0), as Keras hides scores: x + -0 is x."""
    condition, *values = present_inputs(node)
    for i, (moved, x) in enumerate(itertools.permutations(values)):
        made = produced_by(moved, add, sub)
        number = None if made is None or made.inputs[0] is not x else scalar(made.inputs[1])
        if made is not None and number is not None and is_float(x):
            number = number if is_a(made, add) else -number
            pair = [np.asarray(each, numpy_dtype(adopt(x))) for each in (number, -0.0)]
            chosen = where(Value(condition), *pair[:: 1 - 2 * i])
            return Rewrite(adopt(x) + chosen, [condition, x], "choice of what is added")
    return None


_MOVES = (slice_, _reshape, unsqueeze, squeeze)


def _condition(value: ir.Value) -> tuple[Tensor, list[ir.Value]]:
    """What `_truth` found as a truth value, moved as its numbers are, and what it is made of."""
    if value.dtype == ir.DataType.BOOL:
        return Value(value), [value]
    moved = produced_by(value, *_MOVES)
    found = None if moved is None else _truth(moved.inputs[0])
    sizes = [] if moved is None else moved.inputs[1:]
    if moved is None or found is None:  # of a table, which has to stay what it is
        return cast(Value(value), to=bool), [x for x in sizes if x is not None]
    truth, ends = _condition(found[0])
    op = find_op(moved)
    assert op is not None
    truth = truth if found[1] else logical_not(truth)
    given = [None if x is None else Value(x) for x in sizes]
    result: Tensor = op(truth, *given, **read_attributes(op, moved))
    return result, [*ends, *(x for x in sizes if x is not None)]


def _other(node: ir.Node, y: ir.Value) -> Tensor | None:
    """What is chosen where x is not; None if it would have to be negated at run time."""
    number = repeated_scalar(y) if is_a(node, sub) else None
    if number is None:
        return adopt(y) if is_a(node, add) else None
    return np.asarray(-number, numpy_dtype(adopt(y)))


def _truth(value: Any) -> tuple[ir.Value, bool] | None:
    """What is 1, or with False 0, where `value` is 1, and else the other; None for others.

    A truth value, or its numbers in another shape, or times ones; or a part of a constant table of
    0 and 1, as of a triangle for the longest text.
    """
    same = produced_by(value, mul)
    for x, ones in itertools.permutations(present_inputs(same)) if same else ():
        if repeated_scalar(ones) == 1.0 and same_shape(x.shape, value.shape):
            return _truth(x)
    rest, made = produced_by(value, sub), produced_by(value, "Cast", "Not")
    negated = made is not None and made.op_type == "Not"
    if rest is not None and repeated_scalar(rest.inputs[0]) == 1.0:
        negated, made = True, rest
    if made is None:
        moved = produced_by(value, *_MOVES)
        source = None if moved is None else moved.inputs[0]
        table = constant(source)
        known = value.dtype == ir.DataType.BOOL or (moved is not None and _truth(source))
        cut = table is not None and table.size and np.isin(table, (0, 1)).all()
        return (value, True) if known or cut else None
    if (truth := _truth(made.inputs[-1])) is None:
        return (value, True) if value.dtype == ir.DataType.BOOL else None
    return truth[0], truth[1] != negated
