"""The graphs of a folder as one: an encoder-decoder is trained as a whole."""

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir

from graphgen.edit import infer_model, tidy
from graphgen.errors import GraphgenError
from graphgen.export.folders import MODEL, PARTS
from graphgen.export.past import PAST
from graphgen.export.read import load
from graphgen.export.torch_files import origin_of
from graphgen.files import present
from graphgen.graph import ORIGIN, PUBLISHED, constant, is_float
from graphgen.subgraphs import nodes_of, subgraphs_of

_SEES = {"encoder_attention_mask": "attention_mask", "encoder_hidden_states": "last_hidden_state"}
"""What a decoder reads, by its name there: an input, or the output, of the encoder."""

_FLAG = "use_cache_branch"


def joined(folder: Path) -> ir.Model:
    """The graph in a folder of `graphgen build`, or both of an encoder-decoder as one.

    Its inputs are then input_ids, attention_mask and decoder_input_ids, and its output logits.
    Weights that both graphs have are one. Raises GraphgenError for any other folder.
    """
    if present(folder / MODEL):
        return load(folder / MODEL)
    if not all(present(folder / part) for part in PARTS):
        raise GraphgenError(
            f"artifacts: {folder} has neither {MODEL} nor {' and '.join(PARTS)}: give a folder of "
            "graphgen build --layout plain, or an ONNX file"
        )
    encoder, decoder = (load(folder / part) for part in PARTS)
    _first_call(decoder)
    first, graph = encoder.graph, decoder.graph
    for value in graph.inputs:
        if value.name == "input_ids":
            value.name = "decoder_input_ids"
    given = {str(value.name): value for value in (*first.inputs, *first.outputs)}
    for name, own in [(str(value.name), value) for value in graph.inputs if value.name in _SEES]:
        graph.inputs.remove(own)
        own.replace_all_uses_with(given[_SEES[name]])
    first.outputs.clear()
    for value in list(first.initializers.values()):
        _move(value, first, graph, folder)
    for node in first.all_nodes():
        node.name = f"encoder.{node.name}"
        for value in node.outputs:
            value.name = f"encoder.{value.name}" if value.name else value.name
    nodes = list(first)
    first.remove(nodes)
    graph.insert_before(graph[0], nodes)
    inputs = list(first.inputs)
    first.inputs.clear()
    graph.inputs[:] = [*inputs, *graph.inputs]
    named = [json.loads(one.metadata_props.get(PUBLISHED, "{}")) for one in (encoder, decoder)]
    decoder.metadata_props[PUBLISHED] = json.dumps(named[0] | named[1], sort_keys=True)
    held = {**origin_of(encoder)[0], **origin_of(decoder)[0]}
    decoder.metadata_props[ORIGIN] = json.dumps({"frozen": held}, sort_keys=True)
    tidy(decoder)
    infer_model(decoder)
    return decoder


def _first_call(decoder: ir.Model) -> None:
    """Let a decoder be as in its first call, which has no past and gives logits alone."""
    from graphgen.folding import fold_constants  # it takes as long to import as all the rest

    graph = decoder.graph
    graph.outputs[:] = [value for value in graph.outputs if value.name == "logits"]
    for flag in [value for value in graph.inputs if value.name == _FLAG]:
        graph.inputs.remove(flag)
        flag.const_value = ir.tensor(np.zeros(1, bool), name=_FLAG)
        graph.register_initializer(flag)
    fold_constants(decoder, 1, lambda node: bool(subgraphs_of(node)) or None)
    tidy(decoder)
    read = {value for node in nodes_of(graph) for value in node.inputs}  # not in a branch that went
    for value in [v for v in graph.inputs if PAST.match(str(v.name)) and v not in read]:
        graph.inputs.remove(value)


def _move(value: ir.Value, source: ir.Graph, graph: ir.Graph, folder: Path) -> None:
    """Let a graph have an initializer of another, or use its own, which is the same."""
    name = str(value.name)
    del source.initializers[name]
    own = graph.initializers.get(name)
    if own is not None and is_float(value):
        one, other = constant(own), constant(value)
        if one is None or other is None or not np.array_equal(one, other):
            raise GraphgenError(
                f"artifacts: {folder} has two weights {name}, in its encoder and its decoder: "
                "build the folder again"
            )
        value.replace_all_uses_with(own)
        return
    value.name = name if own is None else f"encoder.{name}"
    graph.register_initializer(value)
