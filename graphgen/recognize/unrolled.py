"""Cells that an exporter wrote one after another, for a number of steps known to it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple

import onnx_ir as ir
from typing_extensions import TypeVar

from graphgen.graph import constant, present_inputs, produced_by, scalar
from graphgen.op import read_attributes
from graphgen.ops.layout import gather
from graphgen.recognize.steps import bare

Cell = TypeVar("Cell")
Read = Callable[[ir.Value, list[ir.Value], list[ir.Value]], Cell | None]
"""What a cell is that makes new states of a row and states, or None."""

_FEWEST = 3  # steps that pay
_WALKED = 100  # nodes behind a gate; the cells of exporters have some ten


class Unrolled(NamedTuple, Generic[Cell]):
    """states[t + 1] = cell(rows[t], states[t]): the states are h, or h and c."""

    cell: Cell
    rows: list[ir.Value]
    states: list[list[ir.Value]]


def unrolled(
    end: ir.Value, read: Read[Cell], same: Callable[[Cell, Cell], bool]
) -> Unrolled[Cell] | None:
    """The steps that end with the state h, as many as are of one cell, if they pay.

    None also if a row is made of a state: then it cannot be known before the first step.
    """
    found: Unrolled[Cell] | None = None
    while True:
        new = _states(end)
        step = None if new is None else _step(new, read)
        if new is None or step is None or (found and not same(step[0], found.cell)):
            break
        cell, row, before = step
        if found is None:
            found = Unrolled(cell, [], [new])
        elif any(a is not b for a, b in zip(new, found.states[0], strict=True)):
            break
        found.rows.insert(0, row)
        found.states.insert(0, before)
        end = before[0]
    if found is None or len(found.rows) < _FEWEST:
        return None
    inner = {state.producer() for states in found.states[1:] for state in states}
    return None if _reaches(found.rows, inner) else found


def _reaches(values: Sequence[ir.Value], nodes: set[ir.Node | None]) -> bool:
    seen, pending = set[ir.Node](), [value.producer() for value in values]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if node in nodes:
            return True
        seen.add(node)
        pending += [x.producer() for x in present_inputs(node)]
    return False


def _states(h: ir.Value) -> list[ir.Value] | None:
    """h and the c of h = o tanh(c), or h alone of (1 - z) g + z h."""
    node = h.producer()
    if node is None or node.domain or len(node.inputs) != 2:
        return None
    kinds = [_kind(x) for x in node.inputs]
    if node.op_type == "Mul" and sorted(map(str, kinds)) == ["Sigmoid", "Tanh"]:
        squashed = node.inputs[kinds.index("Tanh")]
        c = squashed.producer().inputs[0] if squashed else None  # type: ignore[union-attr]
        return None if c is None else [h, bare(c)]
    return [h] if node.op_type == "Add" else None


def _kind(value: ir.Value | None) -> str | None:
    """The operator that makes a value, or that of which it is a part."""
    node = None if value is None else bare(value).producer()
    while node is not None and node.op_type in ("Split", "Slice"):
        node = next(_makers(node), None)
    return None if node is None or node.domain else node.op_type


def _step(new: list[ir.Value], read: Read[Cell]) -> tuple[Cell, ir.Value, list[ir.Value]] | None:
    """The cell, the row and the states before of one step."""
    products = [node for node in _makers(new[-1].producer()) if node.op_type == "Mul"]
    factors = [x for node in products for x in present_inputs(node)]
    gate = next((x for x in factors if _kind(x) == "Sigmoid"), None)
    sources = [] if gate is None else list(dict.fromkeys(_sources(gate)))
    if len(sources) != 2:
        return None
    if len(new) == 2:
        others = [x for x in factors if _kind(x) not in ("Sigmoid", "Tanh")]
        kept = [bare(x) for x in others]
        if len(kept) != 1:
            return None
    else:
        kept = []
    # The one that a cell before has made is the state; of the first step both may be.
    sources.sort(key=lambda source: _is_made(source, kept), reverse=True)
    for h, row in (sources, sources[::-1]):
        if (cell := read(row, [h, *kept], new)) is not None:
            return cell, row, [h, *kept]
    return None


def _is_made(value: ir.Value, kept: Sequence[ir.Value]) -> bool:
    states = _states(value)
    return states is not None and states[1:] == [*kept]


def _makers(node: ir.Node | None) -> Iterator[ir.Node]:
    for x in [] if node is None else present_inputs(node):
        if (maker := bare(x).producer()) is not None:
            yield maker


def _sources(gate: ir.Value) -> Iterator[ir.Value]:
    """What the products read whose sum a gate is of."""
    pending, walked = [gate], 0
    while pending and walked < _WALKED:
        value, walked = bare(pending.pop()), walked + 1
        node = value.producer()
        if node is None or node.domain or constant(value) is not None:
            continue
        if node.op_type in ("MatMul", "Gemm"):
            given = present_inputs(node)
            joined = produced_by(given[0], "Concat")
            yield from map(bare, present_inputs(joined) if joined else given[:1])
        elif node.op_type in ("Add", "Sigmoid", "Split", "Slice", "Concat"):
            pending += present_inputs(node)


def is_last(node: ir.Node, states: int) -> bool:
    """Whether a node may stack states of unrolled cells, or make the last one."""
    if node.op_type == "Concat":
        given = stacked(node)
        return given is not None and len(_states(given[0][-1]) or ()) == states
    new = _states(node.outputs[0])
    if new is None or len(new) != states:
        return False
    goes_on = [use.node for use in new[-1].uses() if use.node.op_type in ("Mul", "Sub")]
    return not goes_on


def stacked(node: ir.Node) -> tuple[list[ir.Value], int] | None:
    """The values that a Concat stacks, and along which new axis."""
    axis, values = node.attributes["axis"].as_int(), list[ir.Value]()
    for part in present_inputs(node):
        maker = produced_by(part, "Unsqueeze")
        given = None if maker is None else constant(maker.inputs[1])
        rank = None if part.shape is None else len(part.shape)
        if maker is None or rank is None or given is None or given.size != 1:
            return None
        if int(given.item()) % rank != axis % rank:
            return None
        values += map(bare, present_inputs(maker)[:1])
    return values, axis % 3


def gathered(rows: Sequence[ir.Value]) -> tuple[ir.Value, int] | None:
    """The value of which these are all rows in order, and along which axis."""
    places = set[tuple[ir.Value, int]]()
    for t, row in enumerate(rows):
        node = produced_by(row, "Gather")
        x = None if node is None else node.inputs[0]
        if node is None or x is None or x.shape is None or scalar(node.inputs[1]) != t:
            return None
        places.add((x, read_attributes(gather, node)["axis"] % len(x.shape)))
    [(x, axis), *others] = places
    size = (x.shape or ())[axis]
    return None if others or size != len(rows) else (x, axis)
