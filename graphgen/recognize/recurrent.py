"""LSTM and GRU written as a Scan or Loop over their cell, or as one cell after another.

A body may have several cells, one behind the other: each becomes its operator over all steps, and
what else the body computes by rows is computed for all of them at once.

RNN is not made: onnxruntime's has an absolute error of 6e-8, all there is of a small state.
"""

from collections.abc import Iterator, Sequence
from itertools import permutations
from operator import is_not
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen.graph import produced_by
from graphgen.infer import Dim, describe, same_dim
from graphgen.match import Miss, Outcome, Refusal, Rewrite, region_of, users_outside
from graphgen.op import is_a
from graphgen.ops.control_flow import cond
from graphgen.ops.elementwise import greater, identity
from graphgen.ops.layout import (
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
from graphgen.ops.recurrent import gru, lstm, rnn
from graphgen.ops.reduce import reduce_prod
from graphgen.ops.sizes import sizes_vector
from graphgen.recognize.all_steps import AllSteps, is_matrix
from graphgen.recognize.cells import Body, Cell, UnreadableError, cell_in, is_tanh_cell, size_of
from graphgen.recognize.steps import Steps, bare, steps_of
from graphgen.recognize.unrolled import gathered, is_last, stacked, unrolled
from graphgen.subgraphs import read_by, subgraphs_of
from graphgen.traits import Trait
from graphgen.value import Tensor, adopt, graph_value

Made: TypeAlias = tuple[Tensor, Tensor, list[Tensor]]
"""An operator's first result, h before the first step, and of all steps (T, B, H); last states."""

_MOST = 8  # states; every pair of them is tried


@lstm.recognize("Scan", "Loop", "Concat", "Mul")
def lstm_over_time(node: ir.Node) -> Outcome:
    """Cells of LSTM and GRU in the Scan or Loop at `node`, or those of an LSTM unrolled."""
    if node.op_type in ("Scan", "Loop"):
        return _over_time(node)
    return _one_by_one(node) if is_last(node, 2) else None


@gru.recognize("Concat", "Add")
def gru_over_time(node: ir.Node) -> Outcome:
    """Unrolled cells of a GRU; they may reset h or its product."""
    return _one_by_one(node) if is_last(node, 1) else None


def _over_time(node: ir.Node) -> Outcome:
    steps = steps_of(node)
    candidate = _may_be_recurrent(node)
    if steps is None:
        lost = Miss("its steps are not known to be those over all rows of some tensors", node)
        return lost if candidate else None
    if not 0 < len(steps.states) <= _MOST:
        return None
    other = next((x for x in steps.states if not is_matrix(x)), None)
    if other is not None:
        lost = Miss(f"its state is {describe(other)}, wanted float[batch, features]", node)
        return lost if candidate else None
    every, fused, names = AllSteps(steps), list[Tensor](), list[str]()
    pending, last = [*range(len(steps.states))], dict[int, Tensor]()
    while pending:
        found = _next_cell(steps, every, pending)
        if found is None:
            return _missed(node, steps, every, pending) if candidate else None
        order, cell = found
        first = [steps.first[i] for i in order]
        made, begin, (y, *ends) = _made(cell, every.rows(cell.sources), first, steps.reverse)
        fused.append(made)
        names.append(cell.op.name)
        every.add(steps.states[order[0]], steps.new[order[0]], begin, y)
        last |= zip(order, ends, strict=True)
        pending = [i for i in pending if i not in order]
    try:
        ys = [
            _stacked(every.of(y), axis, back != steps.reverse)
            for y, (axis, back) in zip(steps.ys, steps.ways, strict=True)
        ]
    except UnreadableError as error:
        cells = [steps.new[i] for i in last]
        only = any(bare(y) is bare(x) for y in steps.ys for x in cells if x not in every.known)
        if only:
            return Miss("all c are used, and LSTM gives the last one only", node)
        return Miss(f"what its steps give is not computed by rows: {error}", node)
    results = dict(zip(steps.outputs, [*(last[i] for i in sorted(last)), *ys], strict=True))
    used = [results[o] if o.uses() or o.is_graph_output() else None for o in node.outputs]
    reason = ", then ".join(names)
    return Rewrite(used, [*read_by(node)], reason, fused=fused[0], anchor=node)


def _may_be_recurrent(node: ir.Node) -> bool:
    """Whether the body has the parts of a recurrent cell, so that it is worth a remark."""
    inner = [n for body in subgraphs_of(node) for n in body]
    squashes = any(is_a(n, "Tanh", "Sigmoid") for n in inner)
    return any(is_a(n, lstm, gru, rnn) for n in inner) or (
        squashes and any(is_a(n, Trait.PRODUCT) for n in inner)
    )


def _next_cell(
    steps: Steps, every: AllSteps, pending: Sequence[int]
) -> tuple[Sequence[int], Cell] | None:
    """A cell that makes one or two of the pending states of themselves and known rows."""
    for count in (2, 1):
        for order in permutations(pending, count):
            states, new = ([given[i] for i in order] for given in (steps.states, steps.new))
            cell = _cell(states, every.matrices(), new, every)
            if cell is not None:
                return order, cell
    return None


def _cell(
    states: Sequence[ir.Value],
    rows: Sequence[ir.Value],
    new: Sequence[ir.Value],
    every: AllSteps | None = None,
) -> Cell | None:
    """The cell that makes new states, if it can be read, and pays."""
    try:
        body = Body(states, rows, every.has) if every else Body(states, rows)
        cell = cell_in(body, new)
        if cell is None or sum(map(size_of, cell.sources)) <= size_of(states[0]):
            return cell
    except UnreadableError:
        return None
    # A row may be a product already: another one would not pay.
    multiplied = all(np.count_nonzero(w, 1).max() < 2 for w, *_ in cell.rows)
    return None if multiplied else cell


def _missed(node: ir.Node, steps: Steps, every: AllSteps, pending: Sequence[int]) -> Outcome:
    """Why no state that is left is that of a cell."""
    for i in pending:
        state, new = steps.states[i], bare(steps.new[i])
        if is_tanh_cell(state, every.matrices(), new, every.has):
            reason = (
                "onnxruntime's RNN has an absolute error of 6e-8 in each step, which is all there "
                "is of a small state; the loop keeps it"
            )
            return Refusal(reason, node)
        if produced_by(new, "Where") is not None:
            made = new.producer()
            if made is not None and any(bare(x) is state for x in made.inputs if x is not None):
                return Miss("a step keeps its state by a mask; LSTM and GRU take lengths", node)
    names = ", ".join(str(steps.states[i].name) for i in pending)
    return Miss(f"how {names} changes is neither LSTM's nor GRU's formula", node)


def _one_by_one(node: ir.Node) -> Rewrite | None:
    """All states of unrolled cells, which a Concat stacks, or the last one; and others in use."""
    axis = None
    if node.op_type == "Concat":
        if (given := stacked(node)) is None:
            return None
        wanted, axis = given
    else:
        wanted = [node.outputs[0]]
    found = unrolled(wanted[-1], lambda row, states, new: _cell(states, [row], new), _are_same)
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
        x = adopt(whole[0]) if not whole[1] else transpose(adopt(whole[0]), perm=[1, 0, 2])
    else:
        x = concat(*(unsqueeze(adopt(row), [0]) for row in rows), axis=0)
    fused, _, (y, *last) = _made(found.cell, [x], first, False)
    # Each h is a row of all of them, but of c there is the last one only.
    inner = {*region_of(node, [*first, *rows])}
    states = [h for h in [*after, *found.states[-1][1:]] if h not in node.outputs]
    also = [h for h in states if [*users_outside(h, inner, node)]]
    result = last[0] if axis is None else _stacked(y, axis, False)
    ends = dict(zip(found.states[-1], last, strict=True))
    others = [ends[h] if h in ends else gather(y, np.array(after.index(h))) for h in also]
    reason = f"{found.cell.op.name} of {len(after)} steps"
    return Rewrite([result, *others], [*first, *rows], reason, fused=fused, also=also)


def _begin_with(first: Sequence[ir.Value], batch: Dim) -> bool:
    return all(
        s.dtype == ir.DataType.FLOAT and s.shape is not None and same_dim(s.shape[0], batch)
        for s in first
    )


def _are_same(a: Cell, b: Cell) -> bool:
    pairs = zip(a.rows, b.rows, strict=True)
    return a.options == b.options and all(
        np.array_equal(x, y) for one, other in pairs for x, y in zip(one, other, strict=True)
    )


def _stacked(y: Tensor, axis: int, turned: bool) -> Tensor:
    """Rows of all steps (T, ...) along another axis, or in the other order."""
    y = slice_(y, [-1], [np.iinfo(np.int64).min], [0], [-1]) if turned else y
    count = len(graph_value(y).shape or ())
    axis %= count
    perm = [*range(1, axis + 1), 0, *range(axis + 1, count)]
    return transpose(y, perm=perm) if axis else y


def _made(cell: Cell, xs: Sequence[Tensor], first: Sequence[ir.Value], reverse: bool) -> Made:
    """All states (T, B, H) and the last ones: the first ones where there is nothing to step over.

    There the runtime gives 0 instead, or ends the process.
    """
    size, parts = size_of(first[0]), [*_of_one_batch([*xs, *map(adopt, first)])]
    sources, states = parts[: len(xs)], parts[len(xs) :]
    x = concat(*sources, axis=-1) if len(sources) > 1 else sources[0]
    w, r, b, rb = (
        np.concatenate(rows)[None].astype(np.float32) for rows in zip(*cell.rows, strict=True)
    )
    bias = np.concatenate([b, rb], axis=1)
    options = {
        "hidden_size": size,
        "direction": "reverse" if reverse else "forward",
        **cell.options,
    }

    def whole() -> list[Tensor]:
        begin = [unsqueeze(state, [0]) for state in states]
        y, *last = cell.op(x, w, r, bias, None, *begin, **options)
        return [squeeze(y, [1]), *(squeeze(state, [0]) for state in last)]

    def nothing() -> list[Tensor]:
        sizes = sizes_vector(dim(x, 0), dim(x, 1), size)
        return [expand(np.zeros((), np.float32), sizes), *(identity(adopt(s)) for s in first)]

    sizes = (graph_value(x).shape or ())[:2]
    probe = whole()
    if all(isinstance(d, int) and d > 0 for d in sizes):
        return probe[0], states[0], probe
    some = greater(reduce_prod(shape(x)[:2], [0], keepdims=0), 0)
    return probe[0], states[0], list(cond(some, whole, nothing))


def _of_one_batch(parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """Each (..., B, n), with the B of all: a step may broadcast where names differ."""
    sizes: list[tuple[Tensor, Dim]] = []
    for part in parts:
        d = (graph_value(part).shape or (0, 0))[-2]
        if not any(same_dim(d, other) for _, other in sizes):
            sizes.append((part, d))
    for part in parts:
        own = (graph_value(part).shape or (0, 0))[-2]
        for other, d in sizes:
            if not same_dim(d, own):
                part = expand(part, sizes_vector(dim(other, -2), 1))
        yield part
