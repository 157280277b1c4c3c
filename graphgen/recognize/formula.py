"""What nodes of a graph compute: their forms in terms of one value."""

import math
from collections.abc import Collection
from typing import Any

import onnx_ir as ir

from graphgen.graph import constant, produced_by, scalar
from graphgen.infer import same_shape
from graphgen.recognize.algebra import (
    ONE,
    ROOT,
    Form,
    Frozen,
    X,
    count,
    exponential,
    freeze,
    function,
    literal,
    logarithm,
    plus,
    power,
    sigmoid,
    signs,
    times,
    total,
)
from graphgen.recognize.axes import LAYOUT

_LARGE = 32
_HUGE = 1e4  # next to such a number x is lost: it does not cancel
_TOLERANCE = {ir.DataType.FLOAT16: 1e-3, ir.DataType.BFLOAT16: 8e-3}
_FUNCTIONS = frozenset({"Erf", "Abs", "Max", "Min"})
_SUMS = {"ReduceSum", "ReduceMean", "ReduceSumSquare", "ReduceL2", "ReduceLogSumExp"}
_SUMS |= {"GlobalAveragePool"}
_REDUCTIONS = frozenset({*_SUMS, "ReduceMax", "LogSoftmax"})
_LAYOUT = ("Unsqueeze", "Reshape")
KNOWN = _FUNCTIONS | _REDUCTIONS | frozenset(
    "Add Sub Mul Div Neg Sqrt Reciprocal Pow Exp Log Sigmoid Tanh Expand Cast".split()
)  # fmt: skip
"""The operators that have a form."""


_YIELD = {
    "Exp": {"Exp", "Sigmoid", "Tanh", "LogSoftmax", "ReduceLogSumExp"},
    "Σ": _SUMS | {"LogSoftmax"},
}


def sources(form: Frozen) -> list[set[str]]:
    """For each function in a form, the operators that can produce it."""
    kinds = sorted(s for s in signs(form) if isinstance(s, str) and s != ROOT)
    return [_YIELD.get(kind, {kind}) for kind in kinds]


def is_maximum(value: ir.Value | None) -> bool:
    """Whether ReduceMax, in any layout, makes a value, at least -infinity."""
    while (node := produced_by(value, "Max", "Cast", *LAYOUT)) is not None:
        least = scalar(node.inputs[-1]) if node.op_type == "Max" else -math.inf
        if least is None or least > -1e30:
            return False
        value = node.inputs[0]
    return produced_by(value, "ReduceMax") is not None


def is_open(node: ir.Node | None, *, casts: bool) -> bool:
    """Whether `node` has its own form; a cast has one if no precision can be lost."""
    if node is None or node.domain:
        return False
    if node.op_type in _LAYOUT:
        return _rank(node.inputs[0]) < _rank(node.outputs[0])
    return node.op_type in KNOWN and (casts or node.op_type != "Cast")


def _rank(value: ir.Value | None) -> int:
    return 0 if value is None or value.shape is None else len(value.shape)


_UNARY: dict[str, Any] = {
    "Cast": lambda a: a,
    "Expand": lambda a: a,
    "Neg": lambda a: plus({}, a, -1.0),
    "Sqrt": lambda a: power(a, 0.5),
    "Reciprocal": lambda a: power(a, -1.0),
    "Exp": exponential,
    "Log": logarithm,
    "Sigmoid": sigmoid,
    "Tanh": lambda a: plus({ONE: -1.0}, sigmoid(plus({}, a, 2.0)), 2.0),
}


class Expression:
    """The forms of values in terms of x.

    Values that do not depend on x, or are not made by `nodes`, stand for themselves and are
    collected in `leaves`. `size` is how many elements a sum adds up, if the shape should not
    decide. Casts that lose precision are not part of a formula, unless `any_cast`.
    """

    def __init__(
        self,
        x: ir.Value,
        nodes: Collection[ir.Node],
        *,
        size: float | None = None,
        any_cast: bool = False,
    ):
        self.x, self.nodes, self._size, self._any_cast = x, nodes, size, any_cast
        self.dtypes = {str(x.dtype)}
        self.leaves: dict[ir.Value, None] = {x: None}
        self.sums: dict[tuple[int, ...], float | None] = {}
        self.tolerance = 1e-6
        self._forms: dict[ir.Value, Form] = {x: {frozenset({(X, 1.0)}): 1.0}}
        self._kept: dict[ir.Value | None, ir.Shape] = {}  # as with keepdims, until it is reshaped
        self._depends: dict[ir.Value | None, bool] = {x: True, None: False}

    def give(self, value: ir.Value, number: float) -> None:
        """Use a number instead of a value."""
        self._forms[value] = literal(number)

    def depends(self, value: ir.Value | None) -> bool:
        """Whether `value` depends on x."""
        if value not in self._depends:
            node = value.producer() if value is not None else None
            inside = node is not None and node in self.nodes
            self._depends[value] = inside and any(map(self.depends, node.inputs))  # type: ignore
        return self._depends[value]

    def of(self, value: ir.Value) -> Form:
        """The form of `value`."""
        if value not in self._forms:
            self._forms[value] = self._form(value)
        return self._forms[value]

    def _form(self, value: ir.Value) -> Form:
        number, node = scalar(value), value.producer()
        if number is not None and abs(number) <= _HUGE:
            self.tolerance = max(self.tolerance, _TOLERANCE.get(value.dtype, 0.0))  # type: ignore
            return literal(number)
        form = self._node(node) if node is not None and self.depends(value) else None
        if form is None or len(form) > _LARGE:
            self.leaves[value] = None
            self._kept.pop(value, None)
            return {frozenset({(value, 1.0)}): 1.0}
        return form

    def _node(self, node: ir.Node) -> Form | None:
        kind, y = node.op_type, node.outputs[0]
        if kind in _LAYOUT:
            x = node.inputs[0]
            back = x is not None and self.depends(x) and self.of(x)
            return back or None if same_shape(self._kept.get(x), y.shape) else None
        if kind in _REDUCTIONS:
            return self._reduce(node, node.inputs[0], axes_of(node))
        if kind == "Cast" and not self._is_wide(node.outputs[0].dtype):
            return None
        operands = node.inputs[:1] if kind in ("Cast", "Expand") else node.inputs
        if kind == "Max":  # empty maxima begin with the lowest number or -infinity
            least = -1e30 if any(map(is_maximum, operands)) else -math.inf
            operands = [v for v in operands if (c := scalar(v)) is None or not c <= least]
            if len(operands) == 1 and operands[0] is not None:
                return self.of(operands[0])
        forms = [self.of(v) for v in operands if v is not None]
        kept = [self._kept[v] for v in operands if v in self._kept]
        if kept:
            others = [v for v in operands if v not in self._kept and scalar(v) is None]
            if others or kind == "Expand" or not all(same_shape(s, kept[0]) for s in kept):
                return None
            self._kept[y] = kept[0]
        if math.prod(map(len, forms)) > _LARGE:
            return None
        a, b = forms[0], forms[-1]
        if kind in ("Add", "Sub"):
            return plus(a, b, 1.0 if kind == "Add" else -1.0)
        if kind in ("Mul", "Div"):
            return times(a, b if kind == "Mul" else power(b, -1.0))
        if kind == "Pow":
            p = scalar(node.inputs[1])
            return None if p is None else power(a, p)
        if kind == "Max" and {} in forms and any(map(self._is_variance, forms)):
            return a or b
        if kind in _FUNCTIONS:
            odd = -1.0 if kind == "Erf" and sum(a.values()) < 0 else 1.0  # erf(-a) = -erf(a)
            return plus({}, function(kind, *(plus({}, f, odd) for f in forms)), odd)
        result: Form = _UNARY[kind](a)
        return result

    def _is_variance(self, a: Form) -> bool:
        """Whether a is mean(x²) - mean(x)², which cannot be negative."""
        x = self._forms[self.x]
        for axes, size in self.sums.items():
            n = count(size, axes)
            square, mean = (times(total(f, axes, n), power(n, -1.0)) for f in (times(x, x), x))
            if freeze(plus(square, times(mean, mean), -1.0)) == freeze(a):
                return True
        return False

    def _is_wide(self, dtype: ir.DataType | None) -> bool:
        """Where 16-bit values go in and out, no precision above float32 shows inside."""
        wider = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
        self.dtypes.add(str(dtype))
        fits = dtype == self.x.dtype or (self.x.dtype in _TOLERANCE and dtype in wider)
        return fits or self._any_cast

    def _reduce(
        self, node: ir.Node, x: ir.Value | None, axes: tuple[int, ...] | None
    ) -> Form | None:
        kind, attr = node.op_type, node.attributes.get("keepdims")
        if x is None or axes is None:
            return None
        a = self.of(x)
        if x in self._kept or not self._spans(x, axes):
            return None
        if attr is not None and not attr.as_int():  # lacks its axes until they are restored
            dims = [1 if i - _rank(x) in axes else d for i, d in enumerate(x.shape or ())]
            self._kept[node.outputs[0]] = ir.Shape(dims)
        if kind == "ReduceMax":
            return function(kind, a, axes=axes)
        size = self.sums[axes] = self._size or _elements(x, axes)
        n = count(size, axes)
        if kind in ("ReduceLogSumExp", "LogSoftmax"):
            log = logarithm(total(exponential(a), axes, n))
            return log if kind == "ReduceLogSumExp" else plus(a, log, -1.0)
        s = total(times(a, a) if kind in ("ReduceSumSquare", "ReduceL2") else a, axes, n)
        if kind in ("ReduceMean", "GlobalAveragePool"):
            return times(s, power(n, -1.0))
        return power(s, 0.5) if kind == "ReduceL2" else s

    def _spans(self, value: ir.Value, axes: tuple[int, ...]) -> bool:
        """Whether `value` is as long along `axes` as x, and so not repeated."""
        if value.shape is None and self.x.shape is None:  # then nothing else can lengthen it
            return len(self.leaves) == 1 and all(n.op_type != "Expand" for n in self.nodes)
        if not _rank(value) or _rank(value) != _rank(self.x):
            return False
        ours, theirs = ([v.shape[a] for a in axes] for v in (self.x, value))  # type: ignore
        return same_shape(ir.Shape(ours), ir.Shape(theirs))


def axes_of(reduction: ir.Node) -> tuple[int, ...] | None:
    """The axes that a node adds up along, counted from the end, or None if unknown."""
    x = reduction.inputs[0]
    if reduction.op_type == "GlobalAveragePool":
        return tuple(range(2 - _rank(x), 0)) or None
    if reduction.op_type == "LogSoftmax":
        attr = reduction.attributes.get("axis")
        axis = -1 if attr is None else attr.as_int()
        return (axis if axis < 0 else axis - _rank(x),)
    axes = constant(reduction.inputs[1]) if len(reduction.inputs) > 1 else None
    if axes is None or not axes.size or (not _rank(x) and (axes >= 0).any()):
        return None
    return tuple(sorted(int(a) if a < 0 else int(a) - _rank(x) for a in axes))


def _elements(x: ir.Value, axes: tuple[int, ...]) -> float | None:
    """How many elements a sum of x along `axes` adds up, if known."""
    dims = [x.shape[a] for a in axes] if x.shape is not None else [None]
    return float(math.prod(dims)) if all(isinstance(d, int) for d in dims) else None  # type: ignore
