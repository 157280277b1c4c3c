"""Decoders that read whole rows: what is trained has no cache."""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.edit import infer_model, register_constants
from graphgen.ops.layout import dim
from graphgen.record import recording
from graphgen.value import adopt

PAST = "past_key_values."


def without_past(model: ir.Model) -> None:
    """Give a decoder's cache, its inputs past_key_values.*, no positions: they are no inputs then.

    Nothing happens to a model whose caches are not float[batch, heads, length, features] with
    known heads and features and one batch, in which no other input has their batch, or which has
    what an encoder made among them: without that it would attend to nothing.
    """
    graph = model.graph
    past = {v: [*(v.shape or ())] for v in graph.inputs if str(v.name).startswith(PAST)}
    batches = {str(sizes[0]) for sizes in past.values() if sizes}
    if len(batches) != 1 or any(".encoder." in str(v.name) for v in past) or not len(graph):
        return
    rows = next(
        (v for v in graph.inputs if v not in past and v.shape and str(v.shape[0]) in batches), None
    )
    known = all(
        len(s) == 4
        and isinstance(s[1], int)
        and not isinstance(s[2], int)
        and isinstance(s[3], int)
        for s in past.values()
    )
    if rows is None or not known:
        return
    lengths = {str(sizes[2]) for sizes in past.values()}
    with recording(context=infer_model(model)) as tape:
        made = {}
        for value, (_, heads, _, features) in past.items():
            assert value.dtype is not None
            empty = np.zeros((1, heads, 0, features), value.dtype.numpy())
            made[value] = tape.operand(ops.expand(empty, [dim(adopt(rows), 0), 1, 1, 1]))
        graph.insert_before(graph[0], tape.nodes)
        register_constants(graph, tape.constants.values())
        tape.kept = True
    for value, empty_one in made.items():
        value.replace_all_uses_with(empty_one, replace_graph_outputs=True)
        graph.inputs.remove(value)
    for value in graph.inputs:  # `past + length` is `length`
        if value.shape is not None:
            value.shape = ir.Shape([_without(lengths, size) for size in value.shape])


def _without(lengths: Collection[str], size: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
    parts = [part.strip() for part in str(size).split("+")]
    kept = " + ".join(part for part in parts if part not in lengths)
    if not kept or len(parts) == 1:
        return size
    return int(kept) if kept.isdecimal() else ir.SymbolicDim(kept)
