"""Training artifacts made ready for the stock runtime, which lacks the official kernels."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from graphgen.errors import GraphgenError
from graphgen.export.artifacts import ACCUMULATOR, BUFFER, EVAL, LOSS, OPTIMIZER, RESET, TRAINING
from graphgen.export.optimizers import Optimizer, read_optimizer
from graphgen.graph import present_inputs, produced_by
from graphgen.header import digest_of
from graphgen.passes.training.products import add_to, running_sums, swaps_last

# The file's order is the schedule: PRIORITY_BASED keeps it. The pattern planner doubles the memory;
# and a buffer that the runtime reuses for a later value of the same size stays allocated in the
# meantime (decoder of 4 layers, d=256, 8 x 128 tokens, everything recomputed: 64 MB above the state
# with reuse, 38 without, 27 by the plan; the same time). The runtime's own optimizations double the
# time to load and leave the step as it is: the file was optimized when it was written. Threads that
# wait without spinning take 0.088 s a step instead of 0.114 (3 layers, d=160, 8 x 128 tokens, two
# threads): two sessions take turns here.
SESSION_OPTIONS = {
    "graph_optimization_level": "DISABLE_ALL",
    "execution_order": "PRIORITY_BASED",
    "enable_mem_pattern": "0",
    "enable_mem_reuse": "0",
    "session.intra_op.allow_spinning": "0",
}


@dataclass(frozen=True)
class Program:
    """What a trainer runs: models as bytes, and what it has to feed them.

    `gradients` are the inputs and outputs of `training` that are to be bound to the gradient of a
    parameter, each with its name; `digest` is equal for training models with equal graphs.
    """

    training: bytes
    evaluation: bytes
    optimizer: Optimizer
    trainable: tuple[str, ...]
    gradients: dict[str, str]
    accumulate: int
    loss: dict[str, Any]
    digest: str


def lower(directory: Path, accumulate: int | None = None) -> Program:
    """Read a folder of training artifacts and rewrite it for the stock runtime.

    - Each `InPlaceAccumulatorV2(buffer, gradient, reset)` goes, and the gradient becomes the output
      `<p>_grad`, in the order of the files, which a trainer binds to a buffer of its own;
      `lazy_reset_grad` is no input any longer.
    - What a gradient is summed up in is an output too, to be bound to the same memory: a product
      adds to it by its operand C, which the runtime then copies onto itself, rows are scattered
      into it. Each such sum has one reader, which writes the next one.
    - With `accumulate` above 1, by default as the files say, the first sum starts from the official
      buffer, an input to be bound to that memory as well; otherwise the buffers are no inputs.
    - A product with a transposed operand becomes a FusedMatMul: nothing is moved.
    - The optimizer's settings are read out of its graph; `Optimizer.update` is run instead, in
      place, on flat chunks of all parameters.
    - The order of the nodes stays: it is the schedule. `SESSION_OPTIONS` keep to it.

    The same files are rewritten once: they are known by their hash. Raises GraphgenError for a
    folder without these files or with others' contents.
    """
    files = [_read(directory / name) for name in (TRAINING, EVAL, OPTIMIZER)]
    return _lower(directory, accumulate, *files)


@lru_cache(maxsize=1)  # by the hash of the files
def _lower(
    directory: Path,
    accumulate: int | None,
    training_file: bytes,
    evaluation: bytes,
    optimizer: bytes,
) -> Program:
    training = _parse(directory / TRAINING, training_file)
    described = json.loads(training.metadata_props.get(LOSS, "{}"))
    accumulate = described.get("accumulate", 1) if accumulate is None else accumulate
    graph = training.graph
    loss = graph.outputs[0]
    buffers: dict[str, ir.Value] = {}
    gradients: list[ir.Value] = []
    for node in list(graph):
        if node.op_type == ACCUMULATOR and node.domain == "com.microsoft":
            buffer, gradient, _ = node.inputs
            assert buffer is not None and gradient is not None
            name = str(buffer.name).removesuffix(BUFFER)
            buffers[name] = buffer
            gradients.append(_output(graph, node, gradient, f"{name}_grad", gradients))
    graph.outputs[:] = [loss, *gradients]
    _fuse_transposes(training)
    bound: dict[str, str] = {}
    for i, (name, buffer) in enumerate(buffers.items(), 1):
        sums = _sum_in_place(graph, i, buffer if accumulate > 1 else None)
        for number, value in enumerate(sums[1:]):
            value.name = f"{name}_grad.{number}"
            graph.outputs.append(value)
        used = [*sums, *([buffer] if accumulate > 1 else [])]
        bound |= {str(value.name): name for value in used}
    common.RemoveUnusedNodesPass()(training)
    for value in list(graph.inputs):
        if value.name == RESET or (str(value.name).endswith(BUFFER) and value.name not in bound):
            graph.inputs.remove(value)
    training.functions.clear()
    if not buffers:
        raise GraphgenError(f"{directory / TRAINING}: it trains no parameter; write it again")
    return Program(
        training=ir.to_proto(training).SerializeToString(deterministic=True),
        evaluation=ir.to_proto(_parse(directory / EVAL, evaluation)).SerializeToString(
            deterministic=True
        ),
        optimizer=read_optimizer(
            ir.to_proto(_parse(directory / OPTIMIZER, optimizer)), str(directory / OPTIMIZER)
        ),
        trainable=tuple(buffers),
        gradients=bound,
        accumulate=accumulate,
        loss=described,
        digest=digest_of(training_file),
    )


def _fuse_transposes(model: ir.Model) -> None:
    """FusedMatMul in the place of a product with a transposed operand: nothing is moved."""
    for node in list(model.graph):
        if node.op_type != "MatMul" or node.outputs[0].dtype is not ir.DataType.FLOAT:
            continue
        inputs, attributes = list(node.inputs), dict[str, int]()
        for i, letter in enumerate("AB"):
            made = produced_by(inputs[i], "Transpose")
            if made is not None and swaps_last(made):
                inputs[i], attributes[f"trans{letter}"] = made.inputs[0], 1
        if attributes:
            fused = ir.node("FusedMatMul", inputs, attributes, domain="com.microsoft")
            fused.metadata_props.update(node.metadata_props)
            ir.convenience.replace_nodes_and_values(
                model.graph, node, [node], [fused], node.outputs, fused.outputs
            )
            model.graph.opset_imports["com.microsoft"] = 1


def _sum_in_place(graph: ir.Graph, i: int, buffer: ir.Value | None) -> list[ir.Value]:
    """The running sums of output i, of which the first adds to the buffer, if one is given."""
    while any(_join(graph, value) for value in running_sums(graph.outputs[i])):
        pass
    first = running_sums(graph.outputs[i])[-1]
    if buffer is not None and not add_to(buffer, first):
        node, made = ir.node("Add", [buffer, buffer]), first.producer()
        assert made is not None
        ir.convenience.replace_nodes_and_values(graph, made, [], [node], [first], node.outputs)
        node.replace_input_with(0, first)
        first.name = f"{first.name}.batch"
    return running_sums(graph.outputs[i])


def _join(graph: ir.Graph, total: ir.Value) -> bool:
    """An Add as part of the node that makes one of its operands, if that can do it."""
    add = produced_by(total, "Add")
    if add is None:
        return False
    for part, other in itertools.permutations(present_inputs(add)):
        if not part.is_graph_output() and add_to(other, part):
            node = part.producer()
            assert node is not None
            graph.remove(node)
            graph.insert_before(add, node)
            ir.convenience.replace_nodes_and_values(graph, node, [add], [], [total], [part])
            return True
    return False


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


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise GraphgenError(
            f"{path} cannot be read: {error.strerror}; give a folder that gg.artifacts wrote"
        ) from None


def _parse(path: Path, data: bytes) -> ir.Model:
    try:
        return ir.from_proto(onnx.load_from_string(data))
    except Exception as error:  # each malformation has its own
        reason = " ".join(str(error.__cause__ or error).split())
        raise GraphgenError(
            f"{path} is no ONNX model, or one cut short ({reason}); write the artifacts again"
        ) from None
