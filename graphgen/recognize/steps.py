"""Which rows of a tensor a Scan or a Loop steps over, with which states."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import onnx_ir as ir

from graphgen.graph import present_inputs, produced_by, scalar
from graphgen.infer import Dim, same_dim
from graphgen.op import is_a, read_attributes
from graphgen.ops.control_flow import Ways, is_scan, ways_of
from graphgen.ops.layout import gather
from graphgen.record import current_tape
from graphgen.subgraphs import subgraphs_of


class Steps(NamedTuple):
    """new states, ys[t] = body(states, x[t]), t going along `axis` of x, backwards if `reverse`.

    `first` are the states before the first step; `row` is x[t] and the others are values of the
    body. `ways` says of each y along which axis its rows are stacked, and whether backwards.
    """

    x: ir.Value
    row: ir.Value
    axis: int
    reverse: bool
    first: Sequence[ir.Value]
    states: Sequence[ir.Value]
    new: Sequence[ir.Value]
    ys: Sequence[ir.Value]
    ways: Ways


def steps_of(node: ir.Node) -> Steps | None:
    """What a Scan or Loop steps over, if that is one tensor, from one of its ends to the other."""
    return _of_scan(node) if is_scan(node) else _of_loop(node)


def _of_scan(node: ir.Node) -> Steps | None:
    [body], xs, given = subgraphs_of(node), ways_of(node, "input"), present_inputs(node)
    count = len(node.inputs) - len(xs)
    if len(xs) != 1 or len(given) != count + 1:
        return None
    *states, row = body.inputs
    new, ys = body.outputs[:count], body.outputs[count:]
    return Steps(given[-1], row, *xs[0], given[:-1], states, new, ys, ways_of(node, "output"))


def _of_loop(node: ir.Node) -> Steps | None:
    """Of a Loop that always makes as many steps as x has rows."""
    [body], first = subgraphs_of(node), [x for x in node.inputs[2:] if x is not None]
    number, given, *states = body.inputs
    goes_on, *results = body.outputs
    if not first or len(first) != len(states):
        return None
    if not (node.inputs[1] is None or scalar(node.inputs[1])):
        return None
    if not (bare(goes_on) is given or scalar(bare(goes_on))):
        return None
    rows = [row for inner in body for y in inner.outputs for row in _rows(y, number)]
    if len(rows) != 1:
        return None
    [(row, x, axis, reverse)] = rows
    steps = _index(node.inputs[0], number)
    if x.graph is body or x.shape is None or steps is None or not _same(steps, (0, x.shape[axis])):
        return None
    new, ys = results[: len(first)], results[len(first) :]
    return Steps(x, row, axis, reverse, first, states, new, ys, [(0, False)] * len(ys))


def bare(value: ir.Value) -> ir.Value:
    """The value that an Identity repeats."""
    while (node := produced_by(value, "Identity")) is not None:
        value = present_inputs(node)[0]
    return value


def _rows(y: ir.Value, number: ir.Value) -> Iterator[tuple[ir.Value, ir.Value, int, bool]]:
    """y, x, its axis, and whether backwards, if y is the row of x at the number of the step.

    Where a Slice ends does not matter: it has one row, or it could not have the shape of y.
    """
    outer = produced_by(y, "Squeeze", "Reshape")
    cut = produced_by(y if outer is None else outer.inputs[0], "Gather", "Slice")
    if cut is None or cut.inputs[0] is None or y.shape is None:
        return
    x, start, single = cut.inputs[0], _index(cut.inputs[1], number), cut.op_type == "Gather"
    axis = read_attributes(gather, cut)["axis"] if single else scalar([*cut.inputs, None][3])
    if x.shape is None or start is None or axis is None:
        return
    axis = int(axis) % len(x.shape)
    kept = [d for i, d in enumerate(x.shape) if i != axis]
    if len(kept) == len(y.shape) and all(map(same_dim, kept, y.shape)):
        reverse = _same(start, (-1, x.shape[axis] - 1)) or (single and start == (-1, -1))
        if reverse or start == (1, 0):
            yield y, x, axis, reverse


Line: TypeAlias = tuple[int, Dim]
"""a n + b, for the number n of the step."""


def _same(x: Line, y: Line) -> bool:
    return x[0] == y[0] and same_dim(x[1], y[1])


def _index(x: ir.Value | None, number: ir.Value) -> Line | None:
    """An integer as a line, if it is one whose sizes are known."""
    tape = current_tape()
    if x is number:
        return 1, 0
    if x is None or tape is None or x.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
        return None
    known = tape.context.get_symbolic_value(x)
    if known is not None:
        return (0, known[0]) if len(known) == 1 else None
    node = x.producer()
    if node is None:
        return None
    if is_a(node, "Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze"):
        return _index(node.inputs[0], number)
    terms = [_index(term, number) for term in node.inputs]
    match node.op_type, terms:
        case "Add", [(int(a), b), (int(c), d)]:
            return a + c, b + d
        case "Sub", [(int(a), b), (int(c), d)]:
            return a - c, b - d
        case "Neg", [(int(a), b)]:
            return -a, -b
        case "Mul", [(int(a), b), (0, int(c))]:
            return a * c, b * c
    return None
