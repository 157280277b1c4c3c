"""Decoders that read whole rows: what is trained has no cache."""

import re
from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.edit import infer_model, register_constants
from graphgen.ops.layout import dim
from graphgen.record import recording
from graphgen.value import adopt

PAST = re.compile(r"past_(key_values|conv|recurrent|ssm)\.")
"""The inputs of a cache; those but the first are states, of a fixed size."""


def state_of(name: str) -> str:
    """The kind of state that an input of a cache holds, or ""."""
    found = PAST.match(name)
    return "" if found is None or found[1] == "key_values" else found[1]


def without_past(model: ir.Model) -> None:
    """Give a decoder's cache, its inputs `PAST`, no positions, and zeros for states.

    They are no inputs then. Nothing happens to a model whose caches are not float[batch, heads,
    length, features] with known heads and features and one batch, or states not float[batch, ...]
    of known sizes, in which no other input has their batch, or which has what an encoder made among
    them: without that it would attend to nothing.
    """
    graph = model.graph
    past = {v: [*(v.shape or ())] for v in graph.inputs if PAST.match(str(v.name))}
    batches = {str(sizes[0]) for sizes in past.values() if sizes}
    if len(batches) != 1 or any(".encoder." in str(v.name) for v in past) or not len(graph):
        return
    rows = next(
        (v for v in graph.inputs if v not in past and v.shape and str(v.shape[0]) in batches), None
    )
    grown = {v for v in past if not state_of(str(v.name))}
    known = all(
        [isinstance(d, int) for d in s[1:]]
        == ([True, False, True] if v in grown else [True] * len(s[1:]))
        for v, s in past.items()
    )
    if rows is None or not known:
        return
    lengths = {str(past[v][2]) for v in grown}
    with recording(context=infer_model(model)) as tape:
        made = {}
        for value, (_, *sizes) in past.items():
            assert value.dtype is not None
            numbers = [d if isinstance(d, int) else 0 for d in sizes]
            empty = np.zeros((1, *numbers), value.dtype.numpy())
            ones = [1] * len(numbers)
            made[value] = tape.operand(ops.expand(empty, [dim(adopt(rows), 0), *ones]))
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
