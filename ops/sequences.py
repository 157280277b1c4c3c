"""Sequences of tensors, as tensors: the parts of one, some tensors, or what a loop collects."""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from graphgen.graph import constant, present_inputs
from graphgen.op import is_a
from graphgen.ops.control_flow import is_loop, loop_node
from graphgen.ops.elementwise import identity
from graphgen.ops.layout import (
    concat,
    dim,
    gather,
    rank,
    reshape,
    slice_,
    squeeze,
    stack,
    transpose,
)
from graphgen.ops.sizes import vector
from graphgen.record import Tape
from graphgen.subgraphs import subgraphs_of
from graphgen.value import Tensor, adopt


def as_tensor(node: ir.Node) -> Tensor | None:
    """Record what a node takes from a sequence that is known, without it; None if it is not."""
    taking = is_a(node, "SequenceAt", "SequenceLength", "ConcatFromSequence")
    if not taking or not present_inputs(node):
        return None
    made = present_inputs(node)[0].producer()
    if made is None:
        return None
    items = list(map(adopt, present_inputs(made))) if is_a(made, "SequenceConstruct") else None
    whole, axis = _rows(made)
    if is_a(node, "SequenceLength"):
        n = None if whole is None else squeeze(adopt(vector(dim(whole, axis))), [0])
        return n if items is None else identity(np.array(len(items)))
    if is_a(node, "ConcatFromSequence"):
        if items is None:
            return None
        axis = node.attributes["axis"].as_int()
        joined = stack if node.attributes.get_int("new_axis", 0) else concat
        return joined(items, axis=axis)
    if whole is not None:
        return gather(whole, adopt(present_inputs(node)[1]), axis=axis)
    at = constant(present_inputs(node)[1])
    if at is None:
        return None
    if items is not None:
        return identity(items[int(at.item())])
    return _part(made, int(at.item())) if is_a(made, "SplitToSequence") else None


def _rows(node: ir.Node) -> tuple[Tensor | None, int]:
    """The tensor of whose rows a SplitToSequence makes a sequence, and their axis.

    The runtime drops the axis for one size of 1 as well, as torch exports `unbind`.
    """
    axis, given = node.attributes.get_int("axis", 0), present_inputs(node)
    if not is_a(node, "SplitToSequence") or node.attributes.get_int("keepdims", 1) != 0:
        return None, axis
    size = constant(given[1]) if len(given) > 1 else np.array(1)
    single = size is not None and not size.ndim and size == 1
    return adopt(given[0]) if single else None, axis


def _part(node: ir.Node, index: int) -> Tensor | None:
    """A part of what a SplitToSequence splits, if it is known where that is."""
    x, *given = map(adopt, present_inputs(node))
    axis = node.attributes.get_int("axis", 0)
    sizes = constant(present_inputs(node)[1]) if given else np.array(1)
    whole = dim(x, axis)
    if sizes is None:
        return None
    if sizes.ndim:
        ends = np.cumsum(sizes)
        start, end = int((ends - sizes)[index]), int(ends[index])
    else:
        step = int(sizes.item())
        if index < 0:
            if not isinstance(whole, int):
                return None
            index += -(-whole // step)
        start, end = index * step, (index + 1) * step
    return slice_(x, [start], [end], [axis])


def collected(node: ir.Node) -> dict[int, ir.Node]:
    """The states of a Loop that are sequences in which it only collects: their SequenceInsert.

    They begin empty, each step adds one tensor at the end and does not look at them, and what
    comes behind takes one of the tensors, or joins them.
    """
    if not is_loop(node):
        return {}
    [body], found = subgraphs_of(node), dict[int, ir.Node]()
    for i, start in enumerate(node.inputs[2:]):
        empty, state = None if start is None else start.producer(), body.inputs[2 + i]
        insert = body.outputs[1 + i].producer()
        uses = [use.node for use in node.outputs[i].uses()]
        if (
            empty is not None
            and is_a(empty, "SequenceEmpty")
            and insert is not None
            and is_a(insert, "SequenceInsert")
            and len(present_inputs(insert)) == 2
            and insert.inputs[0] is state
            and len(state.uses()) == 1
            and not insert.outputs[0].uses()
            and not node.outputs[i].is_graph_output()
            and all(is_a(use, "SequenceAt", "ConcatFromSequence") for use in uses)
            and insert.inputs[1] is not None
            and insert.inputs[1].shape is not None
        ):
            found[i] = insert
    return found


def stacked_instead(
    node: ir.Node, tape: Tape, inserts: Mapping[int, ir.Node]
) -> dict[ir.Value, ir.Value]:
    """Record a Loop that stacks what this one collects in these states.

    Return what stands for which output; for a sequence this is the stack.
    """
    [whole], count = subgraphs_of(node), len(node.inputs) - 2
    body = whole.clone(allow_outer_scope_values=True)
    kept = [i for i in range(count) if i not in inserts]
    given = [*node.inputs[:2], *(node.inputs[2 + i] for i in kept)]
    results = [body.outputs[0], *(body.outputs[1 + i] for i in kept), *body.outputs[1 + count :]]
    dropped = [insert for i in inserts if (insert := body.outputs[1 + i].producer()) is not None]
    for insert in dropped:
        new = ir.node("Identity", [insert.inputs[1]])
        body.append(new)
        results.append(new.outputs[0])
    states = [*body.inputs[:2], *(body.inputs[2 + i] for i in kept)]
    body.outputs[:] = results
    body.remove(dropped, safe=True)
    body.inputs[:] = states
    loop = loop_node(tape, body, given)
    order = [*kept, *range(count, len(node.outputs)), *inserts]
    return dict(zip((node.outputs[i] for i in order), loop.outputs, strict=True))


def of_stack(node: ir.Node, whole: Tensor) -> Tensor:
    """What a SequenceAt or ConcatFromSequence takes from a sequence whose tensors are stacked."""
    if is_a(node, "SequenceAt"):
        return gather(whole, adopt(present_inputs(node)[1]), axis=0)
    items, new = rank(whole) - 1, node.attributes.get_int("new_axis", 0)
    axis = node.attributes["axis"].as_int() % (items + bool(new))
    perm = [*range(1, axis + 1), 0, *range(axis + 1, items + 1)]
    moved = whole if axis == 0 else transpose(whole, perm=perm)
    if new:
        return moved
    sizes = [dim(moved, i) for i in range(items + 1)]
    return reshape(moved, [*sizes[:axis], -1, *sizes[axis + 2 :]])
