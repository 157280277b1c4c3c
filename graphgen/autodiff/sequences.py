"""Sequences on the way to a loss become tensors, which have gradients."""

from typing import Any

import onnx_ir as ir

from graphgen.edit import splice
from graphgen.ops.sequences import as_tensor, collected, of_stack, stacked_instead
from graphgen.record import recording
from graphgen.value import adopt


def without_sequences(model: ir.Model, context: Any) -> bool:
    """Replace sequences of known parts, and those that loops collect; whether there were any."""
    changed = False
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in list(graph):
            if collected(node):
                _stack(node, context)
                changed = True
                continue
            with recording(context=context) as tape:
                found = as_tensor(node)
                if found is not None:
                    splice(node, tape, [tape.operand(found)])
                    changed = True
    return changed


def _stack(node: ir.Node, context: Any) -> None:
    """Let a Loop stack what it collects in sequences."""
    inserts = collected(node)
    sequences = [node.outputs[i] for i in inserts]
    readers = [use.node for sequence in sequences for use in sequence.uses()]
    with recording(context=context) as tape:
        instead = stacked_instead(node, tape, inserts)
        results = [None if y in sequences else instead[y] for y in node.outputs]
        graph = node.graph
        assert graph is not None
        graph.insert_before(node, tape.nodes)
        tape.kept = True
    for reader in readers:
        read = reader.inputs[0]
        assert read is not None
        with recording(context=context) as tape:
            splice(reader, tape, [tape.operand(of_stack(reader, adopt(instead[read])))])
    for old, new in zip(node.outputs, results, strict=True):
        if new is not None:
            name, old.name = old.name, None
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            new.name = name
    graph.remove(node, safe=True)
