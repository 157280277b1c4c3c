"""Decoders that read several documents in a row: tokens see only those of their own."""

import onnx_ir as ir

from graphgen import ops
from graphgen.edit import infer_model, register_constants
from graphgen.errors import GraphgenError
from graphgen.graph import constant
from graphgen.op import is_a
from graphgen.places import where_is
from graphgen.record import recording
from graphgen.traits import Trait
from graphgen.value import adopt

_MASK = "attention_mask"


def keep_apart(model: ir.Model) -> None:
    """Let `attention_mask` number the documents of a row, from 1; 0 is padding, as before.

    Row t of the mask (B, 1, T, S) then also needs the number of column s: T = S, since what is
    trained has no cache. With a single document, numbered 1, nothing changes.

    Raises GraphgenError unless the input is int[B, S], and all that is read of it is its shape and
    the truth values (B, 1, 1, S) that other truth values are joined with.
    """
    graph = model.graph
    mask = next((value for value in graph.inputs if value.name == _MASK), None)
    if mask is None or mask.shape is None or len(mask.shape) != 2:
        raise GraphgenError(
            f"artifacts: documents need the input {_MASK}[batch, sequence], which can number "
            "documents; this model has none, so its tokens see all documents of a row"
        )
    columns = _truths(mask)
    for value in columns:
        with recording(context=infer_model(model)) as tape:
            number = adopt(mask)
            same = ops.equal(ops.unsqueeze(number, [1, 3]), ops.unsqueeze(number, [1, 2]))
            kept = tape.operand(ops.logical_and(adopt(value), same))  # (B, 1, T, S)
            node = value.producer()
            assert node is not None
            readers = [(reader, place) for reader, place in value.uses() if reader.graph is graph]
            graph.insert_after(node, tape.nodes)
            register_constants(graph, tape.constants.values())
            tape.kept = True
        for reader, place in readers:
            reader.replace_input_with(place, kept)


def _truths(mask: ir.Value) -> list[ir.Value]:
    """The values (B, 1, 1, S) that say which columns are no padding."""
    found = []
    for node, _ in mask.uses():
        if is_a(node, Trait.SHAPE):
            continue
        [value] = node.outputs
        if not is_a(node, ops.cast) or node.attributes["to"].as_int() != ir.DataType.BOOL:
            raise _otherwise(node)
        for row, _ in value.uses():
            axes = constant(row.inputs[1]) if is_a(row, ops.unsqueeze) else None
            if axes is None or sorted(axes.reshape(-1).tolist()) != [1, 2]:
                raise _otherwise(row)
            for reader, _ in row.outputs[0].uses():
                if not is_a(reader, ops.logical_and):
                    raise _otherwise(reader)
            found.append(row.outputs[0])
    return found


def _otherwise(node: ir.Node) -> GraphgenError:
    return GraphgenError(
        f"artifacts: documents: {_MASK} is read by {node.op_type} ({where_is(node)}), which could "
        "not tell documents apart; leave documents out, or build the decoder's folder with graphgen"
    )
