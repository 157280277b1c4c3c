"""LSTM and GRU written as a Scan or Loop over their cell, or as one cell after another.

A body is read as what it computes: a sum of products of gates, each times a linear map of what is
scanned and of the states. Slices and joins of gates, transposed, merged and split weights and
biases all become rows of these maps, so it does not matter how they are written.

RNN is not made: onnxruntime's has an absolute error of 6e-8, all there is of a small state.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations
from operator import is_not
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen.graph import constant, present_inputs
from graphgen.infer import Dim, same_dim
from graphgen.match import Rewrite, region_of, users_outside
from graphgen.op import Op, is_a, read_attributes
from graphgen.operands import Array
from graphgen.ops.control_flow import cond
from graphgen.ops.elementwise import greater, identity
from graphgen.ops.layout import (
    _split,
    concat,
    dim,
    expand,
    gather,
    shape,
    slice_,
    squeeze,
    transpose,
    unsqueeze,
)
from graphgen.ops.linalg import gemm
from graphgen.ops.recurrent import gru, lstm
from graphgen.ops.reduce import reduce_prod
from graphgen.ops.sizes import sizes_vector
from graphgen.recognize.steps import bare, steps_of
from graphgen.recognize.unrolled import gathered, is_last, stacked, unrolled
from graphgen.traits import Trait
from graphgen.value import Tensor, adopt, graph_value

Source: TypeAlias = ir.Value | None
Linear: TypeAlias = dict[Source, Array]
"""y = Σ A x over sources x, (n, size) each; of None, the bias (n,), or () for a number."""


class Gate(NamedTuple):
    """Some rows of a Sigmoid or Tanh of a value."""

    kind: str
    of: ir.Value
    rows: range


Sum: TypeAlias = dict[frozenset[Gate], Linear]
"""Σ of products of gates, times a linear map."""

_PLAIN: frozenset[Gate] = frozenset()
_LARGEST = 4096  # of a row: a map of so many features takes 128 MiB
_TERMS = 64  # of a sum: a cell has four, and each (1 - gate) doubles them


class _UnreadableError(Exception):
    """A value is no such sum."""


class _Body:
    """What the values of a body are, in terms of its inputs (B, size)."""

    def __init__(self, inputs: Sequence[ir.Value]):
        if not all(0 < _size(x) <= _LARGEST for x in inputs):
            raise _UnreadableError
        self.graph = inputs[0].graph
        self.known: dict[ir.Value, Sum] = {x: {_PLAIN: {x: np.eye(_size(x))}} for x in inputs}

    def of(self, value: ir.Value | None) -> Sum:
        if value is None:
            return {}
        if value not in self.known:
            self.known[value] = self._read(value)
        return self.known[value]

    def _read(self, value: ir.Value) -> Sum:
        content, node = constant(value), value.producer()
        if content is not None:
            if content.ndim and content.size != content.shape[-1]:
                raise _UnreadableError
            return {_PLAIN: {None: content.reshape(content.size if content.size > 1 else ())}}
        if node is None or node.domain or node.graph is not self.graph:
            raise _UnreadableError
        inputs = node.inputs
        if is_a(node, Trait.BROADCASTS):
            sizes = {_size(x) for x in inputs if x is not None and constant(x) is None}
            if sizes != {_size(value)}:
                raise _UnreadableError  # one number for many
        match node.op_type:
            case "Identity":
                return self.of(inputs[0])
            case "Add" | "Sub":
                second = self.of(inputs[1])
                minus = _scaled(second, np.array(-1.0)) if node.op_type == "Sub" else second
                return _added(self.of(inputs[0]), minus)
            case "Mul":
                return _multiplied(self.of(inputs[0]), self.of(inputs[1]))
            case "Sigmoid" | "Tanh":
                assert inputs[0] is not None
                gate = Gate(node.op_type, inputs[0], range(_size(value)))
                return {frozenset([gate]): {None: np.ones(_size(value))}}
            case "MatMul":
                return self._product(inputs[0], constant(inputs[1]))
            case "Gemm":
                options, w = read_attributes(gemm, node), constant(inputs[1])
                factors = (options["transA"], options["alpha"], options["beta"])
                if factors != (0, 1, 1) or w is None:
                    raise _UnreadableError
                y = self._product(inputs[0], w.T if options["transB"] else w)
                return _added(y, self.of(inputs[2])) if len(inputs) > 2 else y
            case "Split":
                return self._part(node, value)
            case "Slice":
                given = [constant(x) for x in inputs[1:]]
                if any(x is None or x.size != 1 for x in given) or not 3 <= len(given) <= 4:
                    raise _UnreadableError
                start, end, axis, *step = [int(x.item()) for x in given if x is not None]
                if axis not in (-1, 1) or step not in ([], [1]) or inputs[0] is None:
                    raise _UnreadableError
                return _rows(self.of(inputs[0]), range(_size(inputs[0]))[start:end])
            case "Concat" if node.attributes["axis"].as_int() in (-1, 1):
                return self._joined(present_inputs(node))
        raise _UnreadableError

    def _product(self, x: ir.Value | None, w: Array | None) -> Sum:
        if x is None or w is None or w.ndim != 2:
            raise _UnreadableError
        given = self.of(x)
        if given.keys() != {_PLAIN}:
            return {_PLAIN: {x: w.T}}  # of gates: the value is a source of its own
        maps = given[_PLAIN].items()
        return {_PLAIN: {source: w.T if source is x else w.T @ a for source, a in maps}}

    def _part(self, node: ir.Node, value: ir.Value) -> Sum:
        x = node.inputs[0]
        if x is None or read_attributes(_split, node)["axis"] not in (-1, 1):
            raise _UnreadableError
        before = sum(_size(y) for y in node.outputs[: value.index()])
        return _rows(self.of(x), range(before, before + _size(value)))

    def _joined(self, parts: Sequence[ir.Value]) -> Sum:
        sums = [self.of(part) for part in parts]
        if any(part.keys() != {_PLAIN} for part in sums):
            raise _UnreadableError
        maps = [part[_PLAIN] for part in sums]
        sources = dict.fromkeys(source for a in maps for source in a)
        whole: Linear = {}
        for source in sources:
            size = () if source is None else (_size(source),)
            rows = [a.get(source, np.zeros(())) for a in maps]
            sizes = [(_size(part), *size) for part in parts]
            whole[source] = np.concatenate([*map(np.broadcast_to, rows, sizes)])
        return {_PLAIN: whole}

    def gate(self, gate: Gate) -> Sum:
        """What a gate is the Sigmoid or Tanh of."""
        return _rows(self.of(gate.of), gate.rows)


def _size(value: ir.Value) -> int:
    size = None if value.shape is None or len(value.shape) != 2 else value.shape[1]
    if not isinstance(size, int):
        raise _UnreadableError
    return size


def _scaled(given: Sum, by: Array) -> Sum:
    def rows(source: Source, a: Array) -> Array:
        return a * (by if source is None or not by.ndim else by[:, None])

    return {gates: {s: rows(s, a) for s, a in linear.items()} for gates, linear in given.items()}


def _added(a: Sum, b: Sum) -> Sum:
    result = {gates: dict(linear) for gates, linear in a.items()}
    for gates, linear in b.items():
        into = result.setdefault(gates, {})
        for source, rows in linear.items():
            into[source] = into[source] + rows if source in into else rows
    return {gates: linear for gates, linear in result.items() if any(map(np.any, linear.values()))}


def _multiplied(a: Sum, b: Sum) -> Sum:
    result: Sum = {}
    if len(a) * len(b) > _TERMS:
        raise _UnreadableError
    for gates, linear in a.items():
        for others, second in b.items():
            known, rest = (second, linear) if second.keys() <= {None} else (linear, second)
            if not known.keys() <= {None} or gates & others:
                raise _UnreadableError
            part = {gates | others: rest}
            result = _added(result, _scaled(part, known.get(None, np.zeros(()))))
    return result


def _rows(given: Sum, rows: range) -> Sum:
    def cut(a: Array) -> Array:
        return a if not a.ndim else a[rows.start : rows.stop]

    return {
        frozenset(Gate(g.kind, g.of, g.rows[rows.start : rows.stop]) for g in gates): {
            source: cut(a) for source, a in linear.items()
        }
        for gates, linear in given.items()
    }


class _Cell(NamedTuple):
    """What each gate reads, in ONNX's order: rows of x, of the state h, and two biases."""

    rows: list[tuple[Array, Array, Array, Array]]
    options: dict[str, int]


def _read_gate(linear: Mapping[Source, Array], x: ir.Value, h: Source, size: int) -> Any:
    """Rows (H, I) of x and (H, H) of h, and the bias (H,)."""
    if not linear.keys() <= {x, h, None}:
        raise _UnreadableError
    absent = np.zeros((size, size))
    bias = np.broadcast_to(linear.get(None, np.zeros(())), size)
    return linear.get(x, np.zeros((size, _size(x)))), linear.get(h, absent), bias


def _only(given: Sum, wanted: Mapping[frozenset[Gate], tuple[Source, float]]) -> bool:
    """Whether a sum is of these products of gates, each times one source and a number."""
    if given.keys() != wanted.keys():
        return False
    for gates, (source, factor) in wanted.items():
        linear = {s: a for s, a in given[gates].items() if np.any(a)}
        if linear.keys() != {source}:
            return False
        unit = 1.0 if source is None else np.eye(len(linear[source]))
        if not np.array_equal(linear[source], np.broadcast_to(factor * unit, linear[source].shape)):
            return False
    return True


def _pairs(kinds: str, *sums: Sum) -> Iterator[list[Gate]]:
    """Gates of these sums in every order of these kinds, S for Sigmoid and T for Tanh."""
    gates = dict.fromkeys(gate for given in sums for product in given for gate in product)
    for order in permutations(gates) if len(gates) == len(kinds) else ():
        if all(gate.kind[0] == kind for gate, kind in zip(order, kinds, strict=True)):
            yield list(order)


def _lstm_cell(
    body: _Body, x: ir.Value, states: Sequence[ir.Value], new: Sequence[ir.Value]
) -> _Cell | None:
    """c' = f c + i g, h' = o tanh(c')."""
    h, c = states
    after, kept = map(body.of, new)
    for f, i, g in _pairs("SST", kept):
        for o, t in _pairs("ST", after):
            exact = _only(kept, {frozenset([f]): (c, 1.0), frozenset([i, g]): (None, 1.0)})
            full = t.of is bare(new[1]) and len(t.rows) == _size(c)
            if exact and full and _only(after, {frozenset([o, t]): (None, 1.0)}):
                read = [_read_gate(_plain(body.gate(n)), x, h, _size(h)) for n in (i, o, f, g)]
                return _Cell([(w, r, b, 0 * b) for w, r, b in read], {})
    return None


def _gru_cell(
    body: _Body, x: ir.Value, states: Sequence[ir.Value], new: Sequence[ir.Value]
) -> _Cell | None:
    """h' = (1 - z) g + z h, s before the product in g, or behind it."""
    [h], after = states, body.of(new[0])
    for z, g in _pairs("ST", after):
        both = {frozenset([z]): (h, 1.0), frozenset([g]): (None, 1.0)}
        if not _only(after, {**both, frozenset([z, g]): (None, -1.0)}):
            continue
        inside, size = body.gate(g), _size(h)
        resets = [gate for product in inside for gate in product]
        if resets:
            [s] = resets
            w, _, b = _read_gate(inside.get(_PLAIN, {}), x, None, size)
            none, r, rb = _read_gate(inside[frozenset([s])], x, h, size)
            if np.any(none):
                return None
        else:
            linear = _plain(inside)
            [value] = linear.keys() - {x, None}
            w, r, b = _read_gate(linear, x, value, size)
            rb, [[s]] = 0 * b, body.of(value)
            if not _only(body.of(value), {frozenset([s]): (h, 1.0)}):
                return None
        if s.kind != "Sigmoid":
            return None
        read = [_read_gate(_plain(body.gate(n)), x, h, size) for n in (z, s)]
        rows = [(w_, r_, b_, 0 * b_) for w_, r_, b_ in read]
        return _Cell([*rows, (w, r, b, rb)], {"linear_before_reset": int(bool(resets))})
    return None


def _plain(given: Sum) -> Linear:
    if given.keys() != {_PLAIN}:
        raise _UnreadableError
    return given[_PLAIN]


Reader: TypeAlias = Callable[..., _Cell | None]
Made: TypeAlias = tuple[Tensor, Callable[[], list[Tensor]]]


def _over_time(node: ir.Node, read: Reader, op: Op) -> Rewrite | None:
    steps = steps_of(node)
    if steps is None or len(steps.states) not in (1, 2):
        return None
    if len(steps.x.shape or ()) != 3 or steps.axis not in (0, 1):
        return None
    if any(v.dtype != ir.DataType.FLOAT for v in (*steps.first, steps.x)):
        return None
    for order in permutations(range(len(steps.states))):
        first, states, new = (
            [given[i] for i in order] for given in (steps.first, steps.states, steps.new)
        )
        cell = _cell(read, steps.row, states, new)
        if cell is None:
            continue
        if any(bare(y) is not bare(new[0]) for y in steps.ys):
            continue
        if not _begin_with(first, (steps.x.shape or ())[1 - steps.axis]):
            return None
        if any(axis not in (0, 1) for axis, _ in steps.ways):
            return None
        made = _made(op, cell, adopt(steps.x), first, (steps.axis, steps.reverse))

        def results(order: Sequence[int] = order, made: Made = made) -> list[Tensor | None]:
            y, *last = made[1]()
            back = [last[order.index(i)] for i in range(len(order))]
            ys = [_stacked(y, axis, back != steps.reverse) for axis, back in steps.ways]
            found = dict(zip(steps.outputs, [*back, *ys], strict=True))
            return [found[o] if o.uses() or o.is_graph_output() else None for o in node.outputs]

        return Rewrite(results, [*present_inputs(node), steps.x], op.name, fused=made[0])
    return None


def _cell(
    read: Reader, row: ir.Value, states: Sequence[ir.Value], new: Sequence[ir.Value]
) -> _Cell | None:
    """The cell that makes new states, if it can be read, and pays."""
    try:
        cell, size = read(_Body([*states, row]), row, states, new), _size(states[0])
        wide = _size(row) > size
    except (_UnreadableError, ValueError):  # or another number of states or gates
        return None
    if cell is None or not wide:
        return cell
    # A row may be a product already: another one would not pay.
    multiplied = all(np.count_nonzero(w, 1).max() < 2 for w, *_ in cell.rows)
    return None if multiplied else cell


def _begin_with(first: Sequence[ir.Value], batch: Dim) -> bool:
    return all(
        s.dtype == ir.DataType.FLOAT and s.shape is not None and same_dim(s.shape[0], batch)
        for s in first
    )


def _one_by_one(node: ir.Node, read: Reader, op: Op) -> Rewrite | None:
    """All states of unrolled cells, which a Concat stacks, or the last one; and others in use."""
    axis = None
    if node.op_type == "Concat":
        if (given := stacked(node)) is None:
            return None
        wanted, axis = given
    else:
        wanted = [node.outputs[0]]
    found = unrolled(wanted[-1], partial(_cell, read), _are_same)
    if found is None or axis not in (None, 0, 1):
        return None
    after, first = [new[0] for new in found.states[1:]], found.states[0]
    if axis is not None and (len(wanted) != len(after) or any(map(is_not, wanted, after))):
        return None
    rows = found.rows
    if (sizes := rows[0].shape) is None or not _begin_with([*first, *rows], sizes[0]):
        return None
    x: Tensor
    if (whole := gathered(rows)) is not None:
        x, along = adopt(whole[0]), whole[1]
    else:
        x, along = concat(*(unsqueeze(adopt(row), [0]) for row in rows), axis=0), 0
    made = _made(op, found.cell, x, first, (along, False))
    # Each h is a row of all of them, but of c there is the last one only.
    inner = {*region_of(node, [*first, *rows])}
    states = [h for h in [*after, *found.states[-1][1:]] if h not in node.outputs]
    also = [h for h in states if [*users_outside(h, inner, node)]]

    def results() -> list[Tensor]:
        y, *last = made[1]()
        whole = last[0] if axis is None else _stacked(y, axis, False)
        ends = dict(zip(found.states[-1], last, strict=True))
        rows = [ends[h] if h in ends else gather(y, np.array(after.index(h))) for h in also]
        return [whole, *rows]

    reason = f"{op.name} of {len(after)} steps"
    return Rewrite(results, [*first, *rows], reason, fused=made[0], also=also)


def _are_same(a: _Cell, b: _Cell) -> bool:
    pairs = zip(a.rows, b.rows, strict=True)
    return a.options == b.options and all(
        np.array_equal(x, y) for one, other in pairs for x, y in zip(one, other, strict=True)
    )


def _stacked(y: Tensor, axis: int, turned: bool) -> Tensor:
    """All states (T, B, H) along another axis, or in the other order."""
    y = slice_(y, [-1], [np.iinfo(np.int64).min], [0], [-1]) if turned else y
    return transpose(y, perm=[1, 0, 2]) if axis else y


def _made(
    op: Op,
    cell: _Cell,
    x: Tensor,
    first: Sequence[ir.Value],
    way: tuple[int, bool],
) -> Made:
    """All states (T, B, H) and the last ones: the first ones where there is nothing to step over.

    There the runtime gives 0 instead, or ends the process.
    """
    (axis, reverse), size = way, _size(first[0])
    w, r, b, rb = (
        np.concatenate(rows)[None].astype(np.float32) for rows in zip(*cell.rows, strict=True)
    )
    bias = np.concatenate([b, rb], axis=1)
    x = transpose(x, perm=[1, 0, 2]) if axis else x
    options = {
        "hidden_size": size,
        "direction": "reverse" if reverse else "forward",
        **cell.options,
    }

    def whole() -> list[Tensor]:
        begin = [unsqueeze(adopt(state), [0]) for state in first]
        y, *last = op(x, w, r, bias, None, *begin, **options)
        return [squeeze(y, [1]), *(squeeze(state, [0]) for state in last)]

    def nothing() -> list[Tensor]:
        sizes = sizes_vector(dim(x, 0), dim(x, 1), size)
        return [expand(np.zeros((), np.float32), sizes), *(identity(adopt(s)) for s in first)]

    def either() -> list[Tensor]:
        sizes = (graph_value(x).shape or ())[:2]
        if all(isinstance(d, int) and d > 0 for d in sizes):
            return whole()
        return list(cond(greater(reduce_prod(shape(x)[:2], [0], keepdims=0), 0), whole, nothing))

    return whole()[0], either


@lstm.recognize("Scan", "Loop", "Concat", "Mul")
def lstm_over_time(node: ir.Node) -> Rewrite | None:
    """An LSTM cell in the Scan or Loop at `node`, or unrolled, its gates in any order."""
    if node.op_type in ("Scan", "Loop"):
        return _over_time(node, _lstm_cell, lstm)
    return _one_by_one(node, _lstm_cell, lstm) if is_last(node, 2) else None


@gru.recognize("Scan", "Loop", "Concat", "Add")
def gru_over_time(node: ir.Node) -> Rewrite | None:
    """A GRU cell in the Scan or Loop at `node`, or unrolled; it may reset h or its product."""
    if node.op_type in ("Scan", "Loop"):
        return _over_time(node, _gru_cell, gru)
    return _one_by_one(node, _gru_cell, gru) if is_last(node, 1) else None
