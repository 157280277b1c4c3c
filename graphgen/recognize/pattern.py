"""Recognizers made from the bodies of operators."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.edit import to_model
from graphgen.graph import constant, is_float, produced_by
from graphgen.infer import incompatible, same_shape
from graphgen.match import CHANNELS, Rewrite
from graphgen.op import Op
from graphgen.ops.layout import expand, numpy_dtype, reshape, transpose
from graphgen.ops.norm import layer_normalization
from graphgen.ops.softmax import softmax
from graphgen.recognize.algebra import (
    ROOT,
    UNKNOWN,
    Form,
    Found,
    Frozen,
    difference,
    freeze,
    signs,
    unify,
)
from graphgen.recognize.formula import Expression, axes_of, is_maximum, is_open, sources
from graphgen.recognize.groups import by_instances
from graphgen.record import recording
from graphgen.value import Tensor, Value, adopt

ENDS = ("Add", "Sub", "Mul", "Div", "Neg", "Cast", "Exp", "Log", "Max")
"""The operators that a formula may end with, besides the last one of its body."""

_MEANS = ("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2", "GlobalAveragePool")
_TURNS = {
    "ReduceMean": _MEANS,
    **{name: (name,) for name in ("ReduceSum", "Erf", "Tanh", "Sigmoid")},
}
"""The operators of a body that show a formula which does not match, with their equivalents."""

_ARGUMENT = math.sqrt(2.0)
"""A scale of x by `UNKNOWN` times this gives Gelu's erf the argument `UNKNOWN` x."""

_DEEP = 14
_LAST = "wanted axes of known size, in the dtype of x or after a cast up from 16 bits"


@dataclass
class Pattern:
    """An operator's body as a formula to find.

    A match *is* the body: the same form in the algebra, with its inputs bound to values, and the
    attribute `unknown` and the axes read from the graph. If `unknown` is an input, it is that input
    times a number: x · s of an activation, as where the runtime rounded its constants to float16.
    """

    op: Op
    inputs: list[ir.Value]
    root: ir.Node
    attributes: dict[str, Any]
    unknown: str | None

    def __post_init__(self) -> None:
        self.stashes = "stash_type" in self.op.attributes
        self._forms: dict[tuple[float | None, bool], Frozen] = {}
        self._sources = sources(self.form(None))

    @property
    def anchors(self) -> set[str]:
        """The operators that start the search for a formula that was not found, to tell why."""
        body = upstream(self.root.outputs[0], casts=True)
        return {name for node in body for name in _TURNS.get(node.op_type, ())}

    def form(self, size: float | None, *, gains: bool = True) -> Frozen:
        """The body's form if a sum has `size` elements; without `gains` they are 1."""
        if (size, gains) not in self._forms:
            y = self.root.outputs[0]
            expression = Expression(self.inputs[0], upstream(y, casts=False), size=size)
            for gain in () if gains else self.inputs[1:]:
                expression.give(gain, 1.0)
            self._forms[size, gains] = freeze(expression.of(y))
        return self._forms[size, gains]

    def match(self, node: ir.Node, nodes: Mapping[ir.Node, None]) -> Rewrite | None:
        """The operator, called on what the body's inputs are bound to at `node`.

        `nodes` are those `upstream` of its result, with casts if the pattern `stashes`.
        """
        y = node.outputs[0]
        kinds = {n.op_type for n in nodes}
        if self.op.name in kinds or not all(kinds & source for source in self._sources):
            return None
        # Without its own maximum a softmax may overflow, or be 0 / 0 where none of its numbers is
        # small: a graph that tests for that must see it.
        tested = any(use.node.op_type == "IsNaN" for use in y.uses())
        largest = {axes_of(n) for n in nodes if n.op_type == "ReduceMax"}
        if tested and not largest:
            return None
        for x in _candidates(y, nodes):
            expression = Expression(x, nodes)
            form = expression.of(y)
            for size in dict.fromkeys(expression.sums.values() or [None]):
                for found in self._read(form, size, expression.tolerance):
                    if tested and found.get("axes", (-1,)) not in largest:
                        continue
                    rewrite = self._rewrite(x, found, expression)
                    if rewrite is not None:
                        rewrite.anchor = next(n for n in nodes if n.op_type in self._sources[0])
                        return rewrite
        return None

    def miss(self, node: ir.Node, anchor: ir.Node) -> tuple[int, str]:
        """What keeps `node` from being the body, and how deep inside the formula that lies.

        Depth -1 if the anchor does not reveal this formula, or does not meet x again there.
        """
        nodes, best = upstream(node.outputs[0], casts=self.stashes), (-1, "")
        for x in _candidates(node.outputs[0], nodes):
            expression = Expression(x, nodes, any_cast=True)
            form = expression.of(node.outputs[0])
            seen = signs(freeze(expression.of(anchor.outputs[0])))
            wanted = self.form(next(iter(expression.sums.values()), None), gains=False)
            if sum(map(expression.depends, node.inputs)) < 2 or not form:
                continue
            factor = max(form.values()) / max(c for _, c in wanted)
            given = freeze({m: c / factor for m, c in form.items()})
            if not signs(wanted) <= signs(given):
                continue
            if signs(wanted) - {ROOT} <= seen:
                depth, text = difference(wanted, given, expression.tolerance)
                axes = " and ".join(map(str, expression.sums))
                inside = ", ".join(sorted(expression.dtypes))
                if not text:
                    depth, text = _DEEP, f"{axes} are the axes of sums, in {inside}; {_LAST}"
                best = max(best, (depth, text), key=lambda found: found[0])
        return best

    def _read(self, form: Form, size: float | None, tolerance: float) -> Iterator[Found]:
        """The ways to read a form as a multiple of the body's."""
        wanted = self.form(size)
        if len(wanted) != len(form):
            return
        _, c = next(iter(wanted))
        factors = [1.0, *(d / c for d in form.values())] if len(self.inputs) == 1 else [1.0]
        for factor in dict.fromkeys(factors):
            given = freeze({m: d / factor for m, d in form.items()})
            yield from unify(wanted, given, {"factor": factor}, tolerance)

    def _rewrite(self, x: ir.Value, found: Found, expression: Expression) -> Rewrite | None:
        axes, bound = found.get("axes", (-1,)), {x, *found.values()}
        # Infinity does not cancel, nor does a number so large that x is lost: only a maximum may.
        others = [v for v in expression.leaves if v not in bound]
        if not all(is_maximum(v) and _is_one(v, axes) for v in others):
            return None
        order = _order(x, axes) if self.stashes else None
        if order is None and axes != (_last(len(axes)) if self.stashes else axes[:1]):
            return None
        attributes, factor = dict(self.attributes), found["factor"]
        if self.unknown in self.op.inputs:
            scale = float(np.float32(found["unknown"] * _ARGUMENT))
            y = self.op(adopt(x) * scale, **attributes) * (factor * UNKNOWN * _ARGUMENT / scale)
            return Rewrite(y, list(expression.leaves), f"{self.op.name} of {scale:.6g}·x")
        if self.unknown is not None:
            attributes[self.unknown] = float(np.float32(found["unknown"]))
        attribute = "".join(f" {k}={v:.6g}" for k, v in attributes.items() if k == self.unknown)
        if axes != (-1,):
            attributes["axis"] = axes[0] if order is None else -len(axes)
        given = [found[value] for value in self.inputs[1:]]
        gains = [_gain(value, x, axes) for value in given]
        if any(gain is None for gain in gains):
            # Between transposes it would be slower for more than one image.
            other = self.op is not layer_normalization or not attributes["epsilon"]
            if other or factor != 1 or order is not None:
                return None
            y = by_instances(x, len(axes), given, attributes["epsilon"])
            reason = f"InstanceNormalization{attribute}"
            return None if y is None else Rewrite(y, list(expression.leaves), reason)
        rows = adopt(x) if order is None else transpose(adopt(x), perm=order)
        result = self.op(rows, *gains, **attributes)
        result = result if order is None else transpose(result, perm=np.argsort(order).tolist())
        result = result if factor == 1 else result * factor
        reason, layout = f"{self.op.name}{attribute}", ""
        if order is not None:
            reason, layout = f"{reason} of channels", CHANNELS
        undefined = self.op is layer_normalization and not attributes["epsilon"]
        caveat = "a row of equal numbers would be NaN" if undefined else ""
        # Beside -3.4e38 the logarithm of n is lost: n weights of 1.
        logs = (n.outputs[0] for n in expression.nodes if n.op_type in ("Log", "ReduceLogSumExp"))
        if self.op is softmax and any(map(expression.depends, logs)):
            caveat = "a row that is masked entirely would give the mean"
        return Rewrite(result, list(expression.leaves), reason, caveat, layout=layout)


def _is_one(value: ir.Value, axes: tuple[int, ...]) -> bool:
    """Whether a value has one element along axes, so that it leaves sums along them."""
    shape = value.shape
    if shape is None:
        made = produced_by(value, "ReduceMax")
        return made is not None and {*axes} <= {*(axes_of(made) or ())}
    return all(-axis > len(shape) or shape[axis] == 1 for axis in axes)


def upstream(y: ir.Value, *, casts: bool) -> dict[ir.Node, None]:
    """The nodes above `y`, nearest first, as long as they have a form."""
    nodes: dict[ir.Node, None] = {}
    level = [y]
    for _ in range(_DEEP):
        new = []
        for node in (value.producer() for value in level):
            if node is not None and node not in nodes and is_open(node, casts=casts):
                nodes[node] = None
                new.append(node)
        level = [value for node in new for value in node.inputs if value is not None]
    return nodes


def downstream(node: ir.Node) -> Iterator[ir.Node]:
    """The products and quotients below `node`, nearest first, as long as there are formulas."""
    seen, level = {node}, [node]
    for _ in range(_DEEP // 2):
        used = dict.fromkeys(use.node for n in level for v in n.outputs for use in v.uses())
        level = [n for n in used if n not in seen and is_open(n, casts=True)]
        seen.update(level)
        yield from (n for n in level if n.op_type in ("Mul", "Div"))


def _candidates(y: ir.Value, nodes: Mapping[ir.Node, None]) -> Iterator[ir.Value]:
    """Values that may be the input x of a formula for `y`, farthest first: no other is as large."""
    values = dict.fromkeys(v for n in nodes for v in n.inputs if v is not None)
    for x in reversed(values):
        floats = x.dtype is None or is_float(x)
        if x.const_value is not None or not floats or incompatible(y, x) is not None:
            continue
        seen, pending = {x}, list[ir.Value | None]([y])
        while pending:
            value = pending.pop()
            if value is None or value in seen:
                continue
            seen.add(value)
            node = value.producer()
            if node is not None and node.op_type == "ReduceMax":
                continue  # what a softmax subtracts cancels, whatever it is
            if node is not None and node in nodes:
                pending += node.inputs
            elif value.const_value is None and same_shape(value.shape, y.shape):
                break
        else:
            yield x


def _gain(value: ir.Value | float, x: ir.Value, axes: tuple[int, ...]) -> Tensor | None:
    """A gain or bias as an operand in the shape of the axes of x that are summed, or None."""
    wanted = ir.Shape([None] * len(axes) if x.shape is None else [x.shape[axis] for axis in axes])
    if not isinstance(value, ir.Value):
        static = wanted.is_static()
        return np.full(wanted.numpy(), value, numpy_dtype(adopt(x))) if static else None
    if value.shape is None:
        return None
    content = constant(value)
    operand: Tensor = adopt(value)
    if value.dtype != x.dtype:
        cast = produced_by(value, "Cast")
        operand = adopt(cast.inputs[0]) if cast is not None else operand
        if content is not None:
            operand = content.astype(numpy_dtype(adopt(x)))
            if not np.array_equal(operand.astype(content.dtype), content):
                return None
        elif operand.dtype != numpy_dtype(adopt(x)):
            return None
    if axes == _last(len(axes)) and same_shape(value.shape, wanted):
        return operand
    sizes = dict(zip(_last(len(value.shape)), value.shape, strict=True))
    if any(size != 1 for axis, size in sizes.items() if axis not in axes):
        return None
    dims = ir.Shape([sizes.get(axis, 1) for axis in axes])
    if not (wanted.is_static() and dims.is_static()):
        return None
    if any(d not in (1, w) for d, w in zip(dims, wanted, strict=True)):
        return None
    return expand(reshape(operand, dims.numpy()), wanted.numpy())


def _last(count: int) -> tuple[int, ...]:
    """So many axes at the end, counted from there."""
    return tuple(range(-count, 0))


def _order(x: ir.Value, axes: tuple[int, ...]) -> list[int] | None:
    """The axes of x with those that are summed last; None if they are, or one is the first.

    Along the first axis, sums are as fast as two transposes.
    """
    summed = [] if x.shape is None else [axis + len(x.shape) for axis in axes]
    if x.shape is None or axes == _last(len(axes)) or 0 in summed:
        return None
    return [*(i for i in range(len(x.shape)) if i not in summed), *summed]


def make_pattern(op: Op, inputs: int, *, unknown: str | None = None, **attributes: Any) -> Pattern:
    """The pattern of a body called with `inputs` inputs.

    `unknown` names a float attribute, or the first input, which is then multiplied by a number.

    The trace has one dtype and rank; its form holds for all.
    """
    with recording() as tape:
        shapes: list[list[int | str]] = [["b", "s", "d"], ["d"], ["d"]]
        values = [
            tape.input(name, ir.DataType.FLOAT, shape)
            for name, shape in zip(op.inputs[:inputs], shapes, strict=False)
        ]
        scaled = unknown in op.inputs
        given = {**attributes, unknown: UNKNOWN} if unknown and not scaled else attributes
        with tape.inside():
            tape.primitives = True
            first = [values[0] * (UNKNOWN * _ARGUMENT)] if scaled else values[:1]
            result: Value = op.expand([*first, *values[1:]], {**op.attributes, **given})
        model = to_model(tape, {"y": result.value})
    root = model.graph.outputs[0].producer()
    assert root is not None
    return Pattern(op, list(model.graph.inputs), root, attributes, unknown)
