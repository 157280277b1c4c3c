"""What a step of a loop computes, and whether that is the cell of an LSTM or GRU.

A body is read as what it computes: a sum of products of gates, each times a linear map of what is
scanned and of the states. Slices and joins of gates, transposed, merged and split weights and
biases all become rows of these maps, so it does not matter how they are written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.graph import constant, present_inputs, produced_by
from graphgen.infer import same_dim
from graphgen.op import Op, find_op, is_a, read_attributes
from graphgen.operands import Array
from graphgen.ops.layout import _split
from graphgen.ops.linalg import gemm
from graphgen.ops.recurrent import gru, lstm
from graphgen.recognize.steps import bare
from graphgen.traits import Trait

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
_FAR = (1 << 31) - 1  # no axis is as long
_TERMS = 64  # of a sum: a cell has four, and each (1 - gate) doubles them


class UnreadableError(Exception):
    """A value is no such sum."""


class Body:
    """What values of a body are, in terms of its states and other `inputs` (B, size).

    `outside` says whether a value does not depend on these states, and may be such an input, too.
    """

    def __init__(
        self,
        states: Sequence[ir.Value],
        inputs: Sequence[ir.Value],
        outside: Callable[[ir.Value], bool] = lambda _: False,
    ):
        given = [*states, *inputs]
        if not all(0 < size_of(x) <= _LARGEST for x in given):
            raise UnreadableError
        self.graph, self.inputs = given[0].graph, inputs
        self.states, self._outside = states, outside
        self.known: dict[ir.Value, Sum] = {x: {_PLAIN: {x: np.eye(size_of(x))}} for x in given}
        self.axes = dict.fromkeys(given, 1)
        """Along which axis a value has its features; the batch is the other one."""

    def is_outside(self, value: ir.Value) -> bool:
        """Whether a value is known for all steps before the first one."""
        return value not in self.states and (value in self.inputs or self._outside(value))

    def of(self, value: ir.Value | None, axis: int = 1) -> Sum:
        """The sum that a value is, which has its features along this axis."""
        if value is None:
            return {}
        if (number := content(value)) is not None:
            along = (1, *number.shape)[-1 if axis else -2]
            if number.size > 1 and number.size != along:
                raise UnreadableError
            return {_PLAIN: {None: number.reshape(number.size if number.size > 1 else ())}}
        if self.axes.setdefault(value, axis) != axis:
            raise UnreadableError
        if value not in self.known:
            try:
                self.known[value] = self._read(value, axis)
            except UnreadableError:
                if not axis or not self.is_outside(value) or size_of(value) > _LARGEST:
                    raise
                self.known[value] = {_PLAIN: {value: np.eye(size_of(value))}}
        return self.known[value]

    def _read(self, value: ir.Value, axis: int) -> Sum:
        node = value.producer()
        if node is None or node.domain or node.graph is not self.graph:
            raise UnreadableError
        inputs = node.inputs
        if is_a(node, Trait.BROADCASTS):
            sizes = {size_of(x, axis) for x in inputs if x is not None and content(x) is None}
            if sizes != {size_of(value, axis)}:
                raise UnreadableError  # one number for many
        match node.op_type:
            case "Identity":
                return self.of(inputs[0], axis)
            case "Transpose" if node.attributes.get_ints("perm", [1, 0]) == (1, 0):
                return self.of(inputs[0], 1 - axis)
            case "Add" | "Sub":
                second = self.of(inputs[1], axis)
                minus = _scaled(second, np.array(-1.0)) if node.op_type == "Sub" else second
                return _added(self.of(inputs[0], axis), minus)
            case "Mul":
                return _multiplied(self.of(inputs[0], axis), self.of(inputs[1], axis))
            case "Sigmoid" | "Tanh":
                assert inputs[0] is not None
                self.axes.setdefault(inputs[0], axis)
                gate = Gate(node.op_type, inputs[0], range(size_of(value, axis)))
                return {frozenset([gate]): {None: np.ones(size_of(value, axis))}}
            case "MatMul" | "Gemm":
                return self._product(node, axis)
            case "Split":
                return self._part(node, value, axis)
            case "Slice":
                return _rows(self.of(inputs[0], axis), _cut(node, axis))
            case "Concat" if node.attributes["axis"].as_int() % 2 == axis:
                return self._joined(present_inputs(node), axis)
        raise UnreadableError

    def _product(self, node: ir.Node, axis: int) -> Sum:
        """y = x W, or yᵀ = Wᵀ xᵀ where the features come first."""
        options = {"transA": 0, "transB": 0, "alpha": 1.0, "beta": 1.0}
        options |= read_attributes(gemm, node) if is_a(node, gemm) else {}
        turned = [options["transA"], options["transB"]]
        x, w = node.inputs[1 - axis], content(node.inputs[axis])
        if x is None or w is None or w.ndim != 2:
            raise UnreadableError
        w = w if turned[axis] == axis else w.T  # (features of y, features of x)
        along = 1 - axis if turned[1 - axis] else axis
        given = self.of(x, along)
        maps: Linear = {x: w}  # of gates: the value is a source of its own
        if given.keys() == {_PLAIN}:
            maps = {source: w if source is x else w @ a for source, a in given[_PLAIN].items()}
        y = _scaled({_PLAIN: maps}, np.array(options["alpha"]))
        if len(node.inputs) < 3 or not options["beta"]:
            return y
        return _added(y, _scaled(self.of(node.inputs[2], axis), np.array(options["beta"])))

    def _part(self, node: ir.Node, value: ir.Value, axis: int) -> Sum:
        x = node.inputs[0]
        if x is None or read_attributes(_split, node)["axis"] % 2 != axis:
            raise UnreadableError
        before = sum(size_of(y, axis) for y in node.outputs[: value.index()])
        return _rows(self.of(x, axis), range(before, before + size_of(value, axis)))

    def _joined(self, parts: Sequence[ir.Value], axis: int) -> Sum:
        sums = [self.of(part, axis) for part in parts]
        if any(part.keys() != {_PLAIN} for part in sums):
            raise UnreadableError
        maps = [part[_PLAIN] for part in sums]
        sources = dict.fromkeys(source for a in maps for source in a)
        whole: Linear = {}
        for source in sources:
            size = () if source is None else (size_of(source, self.axes[source]),)
            rows = [a.get(source, np.zeros(())) for a in maps]
            sizes = [(size_of(part, axis), *size) for part in parts]
            whole[source] = np.concatenate([*map(np.broadcast_to, rows, sizes)])
        return {_PLAIN: whole}

    def gate(self, gate: Gate) -> Sum:
        """What a gate is the Sigmoid or Tanh of."""
        return _rows(self.of(gate.of, self.axes[gate.of]), gate.rows)


def _cut(node: ir.Node, axis: int) -> range:
    """Which features a Slice takes; of the other axis, all."""
    x, *given = present_inputs(node)
    numbers = [content(v) for v in given]
    if len(numbers) < 3 or any(v is None for v in numbers):
        raise UnreadableError
    places = [np.atleast_1d(v) for v in numbers if v is not None]
    found, count = range(size_of(x, axis)), len(places[0])
    for start, end, along, step in zip(*[*places, np.ones(count)][:4], strict=True):
        rows, other = (x.shape or ())[int(along)], int(along) % 2 != axis
        whole = start == 0 and end >= (rows if isinstance(rows, int) else _FAR)
        if step != 1 or (other and not whole):
            raise UnreadableError
        found = found if other else found[int(start) : int(end)]
    return found


def content(value: ir.Value | None, depth: int = 8) -> Array | None:
    """A constant, or what slices, joins and other layouts make of constants."""
    found, node = constant(value), None if value is None else value.producer()
    op = None if node is None or found is not None else find_op(node)
    if op is None or node is None or not depth or not is_a(node, Trait.MOVES):
        return found
    given = [None if x is None else content(x, depth - 1) for x in node.inputs]
    if any(x is not None and a is None for x, a in zip(node.inputs, given, strict=True)):
        return None
    try:
        made = op.compute(given, read_attributes(op, node))
    except GraphgenError:
        return None
    assert value is not None
    result: Array = made[node.outputs.index(value)] if isinstance(made, tuple) else made
    return result


def size_of(value: ir.Value, axis: int = 1) -> int:
    """How many features a value of two axes has."""
    size = None if value.shape is None or len(value.shape) != 2 else value.shape[axis]
    if not isinstance(size, int):
        raise UnreadableError
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
        raise UnreadableError
    for gates, linear in a.items():
        for others, second in b.items():
            known, rest = (second, linear) if second.keys() <= {None} else (linear, second)
            if not known.keys() <= {None} or gates & others:
                raise UnreadableError
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


class Cell(NamedTuple):
    """A cell of an operator, which reads these sources, joined.

    `rows` are what each gate reads, in ONNX's order: rows of x, of the state h, and two biases.
    """

    op: Op
    sources: list[ir.Value]
    rows: list[tuple[Array, Array, Array, Array]]
    options: dict[str, int]


_Given: TypeAlias = tuple[Linear, Array, Array, Array]
"""What a gate reads of each source of x, of the state, and its two biases."""


def _read_gate(body: Body, linear: Mapping[Source, Array], h: Source, size: int) -> _Given:
    xs: Linear = {source: a for source, a in linear.items() if source not in (h, None)}
    for source in xs:
        if source is None or body.axes[source] != 1 or not body.is_outside(source):
            raise UnreadableError
    bias = np.broadcast_to(linear.get(None, np.zeros(())), size)
    return xs, linear.get(h, np.zeros((size, size))), bias, 0 * bias


def _cell_of(op: Op, body: Body, gates: Sequence[_Given], **options: int) -> Cell:
    named = [source for xs, *_ in gates for source in xs if source is not None]
    sources = list(dict.fromkeys(named)) or [*body.inputs[:1]]
    rows = list[tuple[Array, Array, Array, Array]]()
    for xs, r, b, rb in gates:
        parts = [xs.get(s, np.zeros((len(b), size_of(s)))) for s in sources]
        rows.append((np.concatenate(parts, axis=1), r, b, rb))
    return Cell(op, sources, rows, options)


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


def cell_in(body: Body, new: Sequence[ir.Value]) -> Cell | None:
    """The cell that makes new states of the states of a body: h and c of an LSTM, h of a GRU."""
    if len(new) not in (1, 2):
        return None
    op, read = (lstm, _lstm_cell) if len(new) == 2 else (gru, _gru_cell)
    try:
        return _of_one_step(op, body, new) or read(body, new)
    except (UnreadableError, ValueError):  # or another number of gates
        return None


def _lstm_cell(body: Body, new: Sequence[ir.Value]) -> Cell | None:
    """c' = f c + i g, h' = o tanh(c')."""
    h, c = body.states
    after, kept = map(body.of, new)
    for f, i, g in _pairs("SST", kept):
        for o, t in _pairs("ST", after):
            exact = _only(kept, {frozenset([f]): (c, 1.0), frozenset([i, g]): (None, 1.0)})
            full = bare(t.of) is bare(new[1]) and len(t.rows) == size_of(c)
            if exact and full and _only(after, {frozenset([o, t]): (None, 1.0)}):
                gates = [_plain(body.gate(n)) for n in (i, o, f, g)]
                return _cell_of(lstm, body, [_read_gate(body, n, h, size_of(h)) for n in gates])
    return None


def _gru_cell(body: Body, new: Sequence[ir.Value]) -> Cell | None:
    """h' = (1 - z) g + z h, s before the product in g, or behind it."""
    [h], after = body.states, body.of(new[0])
    for z, g in _pairs("ST", after):
        both = {frozenset([z]): (h, 1.0), frozenset([g]): (None, 1.0)}
        if not _only(after, {**both, frozenset([z, g]): (None, -1.0)}):
            continue
        inside, size = body.gate(g), size_of(h)
        resets = [gate for product in inside for gate in product]
        if resets:
            [s] = resets
            xs, _, b, _ = _read_gate(body, inside.get(_PLAIN, {}), None, size)
            more, r, rb, _ = _read_gate(body, inside[frozenset([s])], h, size)
            if any(map(np.any, more.values())):
                return None
        else:
            linear = _plain(inside)
            [value] = [x for x in linear if x is not None and not body.is_outside(x)]
            xs, r, b, rb = _read_gate(body, linear, value, size)
            kept = body.of(value, body.axes[value])
            [[s]] = kept
            if not _only(kept, {frozenset([s]): (h, 1.0)}):
                return None
        if s.kind != "Sigmoid":
            return None
        gates = [_read_gate(body, _plain(body.gate(n)), h, size) for n in (z, s)]
        return _cell_of(gru, body, [*gates, (xs, r, b, rb)], linear_before_reset=int(bool(resets)))
    return None


def _of_one_step(op: Op, body: Body, new: Sequence[ir.Value]) -> Cell | None:
    """The operator itself over a sequence of one step, as torch.jit.script exports a cell."""
    node, size = _unshaped(new[0]).producer(), size_of(body.states[0])
    if node is None or not is_a(node, op) or node.inputs[0] is None:
        return None
    x, *weights, lengths = [*node.inputs, None, None][:5]
    states, ends = node.inputs[5 : 5 + len(new)], node.outputs[1 : 1 + len(new)]
    source = _unshaped(node.inputs[0], body.inputs)
    if len(node.inputs) != 5 + len(new) or lengths is not None or not body.is_outside(source):
        return None
    pairs = [*zip([*states, *ends], [*body.states, *new], strict=True), (x, source)]
    options = {k: v for k, v in read_attributes(op, node).items() if v}
    before = int(options.pop("linear_before_reset", 0))
    if not all(_is_first(whole, part) for whole, part in pairs):
        return None
    w, r, b = (None if weight is None else content(weight) for weight in weights)
    if options != {"direction": "forward", "hidden_size": size} or w is None or r is None:
        return None
    count = w.shape[1] // size
    own, carried = np.zeros((2, count * size)) if b is None else b[0].reshape(2, -1)
    rows = [slice(i * size, (i + 1) * size) for i in range(count)]
    gates: list[_Given] = [({source: w[0][i]}, r[0][i], own[i], carried[i]) for i in rows]
    return _cell_of(op, body, gates, **({"linear_before_reset": before} if op is gru else {}))


def _unshaped(value: ir.Value, ends: Sequence[ir.Value] = ()) -> ir.Value:
    while (node := produced_by(value, "Squeeze", "Unsqueeze", "Reshape", "Identity")) is not None:
        if value in ends:
            break
        value = present_inputs(node)[0]
    return value


def _is_first(whole: ir.Value | None, part: ir.Value) -> bool:
    """Whether (1, B, n) is (B, n), both of which are layouts of the same elements."""
    if whole is None or whole.shape is None or part.shape is None or len(part.shape) != 2:
        return False
    same = _unshaped(whole, [part]) is part or _unshaped(part) is whole
    return same and len(whole.shape) == 3 and all(map(same_dim, whole.shape, (1, *part.shape)))


def _plain(given: Sum) -> Linear:
    if given.keys() != {_PLAIN}:
        raise UnreadableError
    return given[_PLAIN]


def is_tanh_cell(
    state: ir.Value, rows: Sequence[ir.Value], new: ir.Value, outside: Callable[[ir.Value], bool]
) -> bool:
    """Whether h' = tanh(W x + R h + b), the cell of an RNN."""
    try:
        body = Body([state], rows, outside)
        [[gate]] = body.of(new)
        _read_gate(body, _plain(body.gate(gate)), state, size_of(state))
    except (UnreadableError, ValueError):
        return False
    return gate.kind == "Tanh"
