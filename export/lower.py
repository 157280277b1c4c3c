"""Training artifacts made ready for the stock runtime, which lacks the official kernels."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from graphgen.errors import GraphgenError
from graphgen.export.artifacts import (
    ACCUMULATOR,
    BUFFER,
    EVAL,
    LOSS,
    OPTIMIZER,
    RESET,
    TRAINING,
)
from graphgen.export.optimizers import Optimizer, read_optimizer

# Measured on a decoder of 4 layers, d=192, 16 x 128 tokens, vocabulary 2000, on one thread: memory
# above the state 201 MB, 384 MB with the pattern planner, 239 MB in the default order, 454 MB with
# both. The runtime's own optimisations double the time to load and leave 0.55 s a step as it is:
# the file was optimised when it was written. Threads that wait without spinning take 0.088 s a step
# instead of 0.114 (3 layers, d=160, 8 x 128 tokens, two threads): two sessions take turns here.
SESSION_OPTIONS = {
    "graph_optimization_level": "DISABLE_ALL",
    "execution_order": "PRIORITY_BASED",
    "enable_mem_pattern": "0",
    "session.intra_op.allow_spinning": "0",
}


@dataclass(frozen=True)
class Program:
    """What a trainer runs: models as bytes, and what it has to feed them."""

    training: bytes
    evaluation: bytes
    optimizer: Optimizer
    trainable: tuple[str, ...]
    loss: dict[str, Any]


def lower(directory: Path) -> Program:
    """Read a folder of training artifacts and rewrite it for the stock runtime.

    Each `InPlaceAccumulatorV2(buffer, gradient, reset)` goes and the gradient becomes the output
    `<p>_grad`, in the order of the files; the buffers and `lazy_reset_grad` are no inputs any
    longer. The optimizer's settings are read out of its graph (`Optimizer.update` is run instead).
    `SESSION_OPTIONS` are what both models should be run with.

    Raises GraphgenError for a folder without these files or with others' contents.
    """
    training = _load(directory / TRAINING)
    graph = training.graph
    loss = graph.outputs[0]
    names: list[str] = []
    gradients: list[ir.Value] = []
    for node in list(graph):
        if node.op_type == ACCUMULATOR and node.domain == "com.microsoft":
            buffer, gradient, _ = node.inputs
            assert buffer is not None and gradient is not None
            name = str(buffer.name).removesuffix(BUFFER)
            names.append(name)
            gradients.append(_output(graph, node, gradient, f"{name}_grad", gradients))
    graph.outputs[:] = [loss, *gradients]
    common.RemoveUnusedNodesPass()(training)
    for value in list(graph.inputs):
        if value.name == RESET or str(value.name).endswith(BUFFER):
            graph.inputs.remove(value)
    training.functions.clear()
    if not names:
        raise GraphgenError(f"{directory / TRAINING}: it trains no parameter; write it again")
    return Program(
        training=ir.to_proto(training).SerializeToString(deterministic=True),
        evaluation=ir.to_proto(_load(directory / EVAL)).SerializeToString(deterministic=True),
        optimizer=read_optimizer(
            ir.to_proto(_load(directory / OPTIMIZER)), str(directory / OPTIMIZER)
        ),
        trainable=tuple(names),
        loss=json.loads(training.metadata_props.get(LOSS, "{}")),
    )


def _output(
    graph: ir.Graph, node: ir.Node, gradient: ir.Value, name: str, taken: Sequence[ir.Value]
) -> ir.Value:
    """The gradient as an output of its own, in the place of its accumulator."""
    if gradient in taken or gradient.producer() is None:
        identity = ir.node("Identity", [gradient])
        graph.insert_before(node, identity)
        identity.outputs[0].type, identity.outputs[0].shape = gradient.type, gradient.shape
        gradient = identity.outputs[0]
    graph.outputs[:] = [value for value in graph.outputs if value.producer() is not node]
    graph.remove(node, safe=True)
    gradient.name = name
    return gradient


def _load(path: Path) -> ir.Model:
    try:
        return ir.from_proto(onnx.load(path))
    except OSError as error:
        raise GraphgenError(
            f"{path} cannot be read: {error.strerror}; give a folder that gg.artifacts wrote"
        ) from None
    except Exception as error:  # each malformation has its own
        reason = " ".join(str(error.__cause__ or error).split())
        raise GraphgenError(
            f"{path} is no ONNX model, or one cut short ({reason}); write the artifacts again"
        ) from None
