"""Loops in one form: their states change, and what they collect is stacked in a tensor."""

import onnx_ir as ir

from graphgen.graph import present_inputs
from graphgen.infer import is_named
from graphgen.match import Rewrite
from graphgen.op import canonical
from graphgen.ops.control_flow import is_loop, loop_node, scan_node, ways_of
from graphgen.ops.sequences import as_tensor, collected, of_stack, stacked_instead
from graphgen.recognize.steps import bare
from graphgen.record import current_tape
from graphgen.subgraphs import read_by, subgraphs_of
from graphgen.value import Tensor, adopt


@canonical("Loop", "Scan")
def unchanged_state(node: ir.Node) -> Rewrite | None:
    """A state that no step changes is read from outside, where it comes from."""
    [body], tape = subgraphs_of(node), current_tape()
    xs = [] if is_loop(node) else ways_of(node, "input")
    # Before the states, a Loop has two more operands, and its body one more result.
    more, also = (2, 1) if is_loop(node) else (0, 0)
    count = len(node.inputs) - more - len(xs)
    starts = {
        i: start
        for i, start in enumerate(node.inputs[more : more + count])
        if start is not None and bare(body.outputs[also + i]) is body.inputs[more + i]
    }
    results = [y for i, y in enumerate(body.outputs) if i - also not in starts]
    same = [i for i in starts if body.inputs[more + i] not in results]
    if not same or tape is None:
        return None
    new = body.clone(allow_outer_scope_values=True)
    results = [y for i, y in enumerate(new.outputs) if i - also not in same]
    kept = [x for i, x in enumerate(new.inputs) if i - more not in same]
    states = {i: new.inputs[more + i] for i in same}
    new.inputs[:], new.outputs[:] = kept, results
    for i, state in states.items():
        state.replace_all_uses_with(starts[i])
    given = [x for i, x in enumerate(node.inputs) if i - more not in same]
    made: ir.Node | None = None
    if len(results) > also:
        if is_loop(node):
            made = loop_node(tape, new, given)
        else:
            made = scan_node(tape, new, list(filter(None, given)), xs, ways_of(node, "output"))
    rest = iter(() if made is None else made.outputs)
    every = [starts[i] if i in same else next(rest) for i in range(len(node.outputs))]
    used = [o.uses() or o.is_graph_output() for o in node.outputs]
    found = [adopt(y) if use else None for y, use in zip(every, used, strict=True)]
    return Rewrite(found, [*read_by(node)], "a state that no step changes is read from outside")


@canonical("SequenceAt", "SequenceLength", "ConcatFromSequence")
def known_sequence(node: ir.Node) -> Rewrite | None:
    """What is taken from a sequence of known tensors is taken from these."""
    sequence = present_inputs(node)[0]
    made = sequence.producer()
    found = as_tensor(node)
    if found is None or made is None:
        return None
    return Rewrite(found, present_inputs(made), "a sequence of known tensors", may_share=True)


@canonical("SequenceAt", "ConcatFromSequence")
def collected_rows(node: ir.Node) -> Rewrite | None:
    """What a Loop collects in a sequence is a stack of rows, if all have one shape."""
    loop, tape = present_inputs(node)[0].producer(), current_tape()
    if loop is None or tape is None or loop.graph is not node.graph:
        return None
    readers = {i: [use.node for use in loop.outputs[i].uses()] for i in collected(loop)}
    inserts = {
        i: insert
        for i, insert in collected(loop).items()
        if readers[i] and all(_of_one_shape(user, insert) for user in readers[i])
    }
    pairs = [(user, loop.outputs[i]) for i in inserts for user in readers[i]]
    if not pairs or pairs[0][0] is not node:
        return None
    instead = stacked_instead(loop, tape, inserts)
    found = [of_stack(user, adopt(instead[sequence])) for user, sequence in pairs]
    others = [
        y
        for i, y in enumerate(loop.outputs)
        if i not in inserts and (y.uses() or y.is_graph_output())
    ]
    results: list[Tensor] = [*found, *(adopt(instead[y]) for y in others)]
    also = [*(user.outputs[0] for user, _ in pairs[1:]), *others]
    # Verification makes tensors for inputs, but neither sequences nor the number of steps.
    inputs = [x for x in read_by(loop) if x.shape is not None and x.shape != ()]
    reason = "what a Loop collects as a stack"
    return Rewrite(results, inputs, reason, may_share=True, also=also)


def _of_one_shape(reader: ir.Node, insert: ir.Node) -> bool:
    """Whether what is collected has to have one shape, so that it can be stacked.

    A new axis asks for that; without one, tensors may be longer or shorter along the axis.
    """
    [_, row] = present_inputs(insert)
    if reader.op_type == "ConcatFromSequence" and reader.attributes.get_int("new_axis", 0) != 0:
        return True
    dims = row.shape or ()
    if reader.op_type == "ConcatFromSequence" and dims:
        axis = reader.attributes["axis"].as_int()
        return -len(dims) <= axis < len(dims) and is_named(dims[axis])
    return bool(dims) and all(map(is_named, dims))
