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

Line: TypeAlias = tuple[int, Dim]
"""a n + b, for the number n of the step."""
Lines: TypeAlias = dict[ir.Value, Line]

_FAR = (1 << 31) - 1  # no axis is as long
_LARGEST = 200  # nodes; the cells of LSTM and GRU have some tens


class Rows(NamedTuple):
    """The rows of x along an axis; `row` is the value of the body that is one of them."""

    row: ir.Value
    x: ir.Value
    axis: int


class Steps(NamedTuple):
    """new states, ys[t] = body(states, rows[t]), t going backwards if `reverse`.

    `first` are the states before the first step; the others are values of the body. `ways` says
    of each y along which axis it is stacked, and whether backwards; `outputs` are the node's: the
    last states, and the ys stacked.
    """

    rows: Sequence[Rows]
    reverse: bool
    first: Sequence[ir.Value]
    states: Sequence[ir.Value]
    new: Sequence[ir.Value]
    ys: Sequence[ir.Value]
    ways: Ways
    outputs: Sequence[ir.Value]


def steps_of(node: ir.Node) -> Steps | None:
    """What a Scan or Loop steps over, if all of it, from one end to the other.

    None also for large bodies: readers follow them by recursion.
    """
    if any(len(body) > _LARGEST for body in subgraphs_of(node)):
        return None
    return _of_scan(node) if is_scan(node) else _of_loop(node)


def _of_scan(node: ir.Node) -> Steps | None:
    [body], xs, given = subgraphs_of(node), ways_of(node, "input"), present_inputs(node)
    count = len(node.inputs) - len(xs)
    reverse = {back for _, back in xs}
    if len(reverse) != 1 or len(given) != len(node.inputs):
        return None
    parts = zip(body.inputs[count:], given[count:], xs, strict=True)
    rows = [Rows(row, x, axis) for row, x, (axis, _) in parts]
    states, new, ys = body.inputs[:count], body.outputs[:count], body.outputs[count:]
    ways = ways_of(node, "output")
    return Steps(rows, reverse.pop(), given[:count], states, new, ys, ways, node.outputs)


def _of_loop(node: ir.Node) -> Steps | None:
    """Of a Loop that always makes as many steps as x has rows.

    States that count its steps are left out; their last values may not be used.
    """
    if len(node.inputs) < 3:
        return None
    [body], outputs = subgraphs_of(node), list(node.outputs)
    number, given, *states = body.inputs
    goes_on, *results = body.outputs
    lines: Lines = {number: (1, 0)}
    first, old, new = [], [], []
    for x, state, after, last in zip(node.inputs[2:], states, results, node.outputs, strict=False):
        start, change = _line(x, {}), _line(after, {state: (1, 0)})
        if x is None:
            return None
        if not (start and change and change[0] == 1 and isinstance(change[1], int)):
            first.append(x)
            old.append(state)
            new.append(after)
            continue
        lines[state] = change[1], start[1]
        if last.uses() or last.is_graph_output():
            return None
        outputs.remove(last)
    found = [row for inner in body for y in inner.outputs for row in _rows(y, lines)]
    ends = [y for y in _parts(goes_on) if y is not given]
    found = [row for row in found if _is_whole(node, row[0], ends, lines)]
    reverse = {back for _, back in found}
    if len(reverse) != 1:
        return None
    rows = [row for row, _ in found]
    ys = results[len(states) :]
    return Steps(rows, reverse.pop(), first, old, new, ys, [(0, False)] * len(ys), outputs)


def _is_whole(node: ir.Node, part: Rows, ends: Sequence[ir.Value], lines: Lines) -> bool:
    """Whether a Loop goes over all rows of a value from outside."""
    outside = part.x.graph is not part.row.graph and part.x.shape is not None
    return outside and _runs(node, ends, (part.x.shape or ())[part.axis], lines)


def _runs(node: ir.Node, ends: Sequence[ir.Value], size: Dim, lines: Lines) -> bool:
    """Whether a Loop makes `size` steps: that is its count, or it goes on while n + 1 < size."""
    count, begins = node.inputs[:2]
    starts = [y for y in _parts(begins) if not scalar(y)] if begins is not None else []
    ends = [y for y in ends if not scalar(y)]
    steps = _line(count, {})
    counted = steps is not None and _same(steps, (0, size))
    if not counted and not (ends and (count is None or (scalar(count) or 0) >= _FAR)):
        return False
    return all(_is_less(y, (0, 0), (0, size), {}) for y in starts) and all(
        _is_less(y, (1, 0), (0, size - 1), lines) or _is_less(y, (1, 1), (0, size), lines)
        for y in ends
    )


def _parts(value: ir.Value) -> list[ir.Value]:
    """The values of which this one is the And; without an And, the value itself."""
    found = [bare(value)]
    for y in found:
        both = produced_by(y, "And")
        found += [bare(x) for x in (present_inputs(both) if both else []) if bare(x) not in found]
    return [y for y in found if produced_by(y, "And") is None]


def _is_less(value: ir.Value, a: Line, b: Line, lines: Lines) -> bool:
    node = produced_by(value, "Less", "Greater")
    if node is None:
        return False
    sides = [_line(x, lines) for x in node.inputs]
    wanted = (a, b) if node.op_type == "Less" else (b, a)
    return all(x is not None and _same(x, y) for x, y in zip(sides, wanted, strict=True))


def bare(value: ir.Value) -> ir.Value:
    """The value that an Identity repeats."""
    while (node := produced_by(value, "Identity")) is not None:
        value = present_inputs(node)[0]
    return value


def _rows(y: ir.Value, lines: Lines) -> Iterator[tuple[Rows, bool]]:
    """What y is a row of, if it is that of the step's number, and whether they go backwards.

    Where a Slice ends does not matter: it has one row, or it could not have the shape of y.
    """
    outer = produced_by(y, "Squeeze", "Reshape")
    cut = produced_by(y if outer is None else outer.inputs[0], "Gather", "Slice")
    if cut is None or cut.inputs[0] is None or y.shape is None:
        return
    x, start, single = cut.inputs[0], _line(cut.inputs[1], lines), cut.op_type == "Gather"
    axis = read_attributes(gather, cut)["axis"] if single else scalar([*cut.inputs, None][3])
    if x.shape is None or start is None or axis is None:
        return
    axis = int(axis) % len(x.shape)
    kept = [d for i, d in enumerate(x.shape) if i != axis]
    if len(kept) == len(y.shape) and all(map(same_dim, kept, y.shape)):
        reverse = _same(start, (-1, x.shape[axis] - 1)) or (single and start == (-1, -1))
        if reverse or start == (1, 0):
            yield Rows(y, x, axis), reverse


def _same(x: Line, y: Line) -> bool:
    return x[0] == y[0] and same_dim(x[1], y[1])


def _line(x: ir.Value | None, lines: Lines) -> Line | None:
    """An integer as a line, if it is one whose sizes are known."""
    tape = current_tape()
    if x is None:
        return None
    if x in lines:
        return lines[x]
    if tape is None or x.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
        return _line_of_float(x, lines)
    known = tape.context.get_symbolic_value(x)
    if known is not None:
        return (0, known[0]) if len(known) == 1 else None
    node = x.producer()
    if node is None or not any(y.graph is node.graph for y in lines):
        return None
    if is_a(node, "Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze"):
        return _line(node.inputs[0], lines)
    terms = []
    for term in node.inputs if is_a(node, "Add", "Sub", "Neg", "Mul") else ():
        line = _line(term, lines)
        if line is None:
            return None
        terms.append(line)
    match node.op_type, terms:
        case "Add", [(a, b), (c, d)]:
            lines[x] = a + c, b + d
        case "Sub", [(a, b), (c, d)]:
            lines[x] = a - c, b - d
        case "Neg", [(a, b)]:
            lines[x] = -a, -b
        case "Mul", [(a, b), (0, int(c))]:
            lines[x] = a * c, b * c
    return lines.get(x)


def _line_of_float(x: ir.Value, lines: Lines) -> Line | None:
    """An integer that TensorFlow's comparisons read as a float, which is exact to 2^24."""
    number, made = scalar(x), produced_by(x, "Cast")
    if number is not None and x.dtype == ir.DataType.FLOAT and number.is_integer():
        return 0, int(number)
    source = None if made is None or x.dtype != ir.DataType.FLOAT else made.inputs[0]
    integer = source is not None and source.dtype in (ir.DataType.INT64, ir.DataType.INT32)
    return _line(source, lines) if integer else None
