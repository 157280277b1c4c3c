"""Training artifacts made ready for the stock runtime, which lacks the official kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from graphgen import ops
from graphgen.errors import GraphgenError
from graphgen.export.artifact_files import (
    EVAL,
    OPTIMIZER,
    TRAINING,
    loss_in,
    parse_artifact,
    read_artifact,
)
from graphgen.export.optimizers import Optimizer, read_optimizer
from graphgen.header import digest_of
from graphgen.infer import new_context
from graphgen.match import Engine, run_passes
from graphgen.op import is_a
from graphgen.passes.training.accumulate import bindings, for_stock

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

    `gradients` holds the inputs and outputs of `training` to bind to the gradient of a parameter,
    each with its name; `tables` holds, for inputs that look up rows of a table as they are, how
    many it has; `digest` is equal for training models with equal graphs.
    """

    training: bytes = field(repr=False)
    evaluation: bytes = field(repr=False)
    optimizer: Optimizer
    trainable: tuple[str, ...] = field(repr=False)
    gradients: dict[str, str] = field(repr=False)
    accumulate: int
    loss: dict[str, Any]
    tables: dict[str, int] = field(repr=False)
    digest: str


def lower(directory: Path, accumulate: int | None = None, *, cpu: bool = True) -> Program:
    """Read a folder of training artifacts and rewrite it for the stock runtime.

    - Each `InPlaceAccumulatorV2(buffer, gradient, reset)` goes, and the gradient becomes the output
      `<p>_grad`, in the order of the files, which a trainer binds to its own buffer;
      `lazy_reset_grad` is no longer an input.
    - Running sums of a gradient are outputs too, to be bound to the same memory: a product adds to
      one with its operand C, which the runtime then copies onto itself, and rows are scattered
      into it. Each such sum has one reader, which writes the next one.
    - With `accumulate` above 1, by default as the files say, the first sum starts from the official
      buffer, an input to bind to that memory as well; otherwise the buffers are not inputs.
    - On the CPU, a product with a transposed operand becomes a FusedMatMul: nothing moves.
    - There, the gradient of a weight reads a transposed copy where that pays, and a product of
      many rows with a weight becomes a batch of blocks of rows, which the kernel computes faster.
    - The optimizer's settings are read from its graph; `Optimizer.update` runs instead, in place,
      on flat chunks of all parameters.
    - The order of the nodes stays: it is the schedule. `SESSION_OPTIONS` keeps it.

    The same files are rewritten only once: they are known by their hash. Raises GraphgenError for a
    folder without these files or with other contents.
    """
    files = [read_artifact(directory / name) for name in (TRAINING, EVAL, OPTIMIZER)]
    return _lower(directory, accumulate, cpu, *files)


@lru_cache(maxsize=1)  # by the hash of the files
def _lower(
    directory: Path,
    accumulate: int | None,
    cpu: bool,
    training_file: bytes,
    evaluation: bytes,
    optimizer: bytes,
) -> Program:
    training = parse_artifact(directory / TRAINING, training_file)
    described = loss_in(training, directory / TRAINING)
    steps: int = described.get("accumulate", 1) if accumulate is None else accumulate
    engine = Engine(context=new_context({"com.microsoft": 1, **training.graph.opset_imports}))
    run_passes(training, for_stock(steps > 1, cpu=cpu), engine)
    bound = bindings(training.graph)
    if not bound:
        raise GraphgenError(f"{directory / TRAINING}: it trains no parameter; write it again")
    evaluated = parse_artifact(directory / EVAL, evaluation)
    return Program(
        training=_to_bytes(training),
        evaluation=_to_bytes(evaluated),
        optimizer=read_optimizer(
            ir.to_proto(parse_artifact(path := directory / OPTIMIZER, optimizer)), str(path)
        ),
        trainable=tuple(dict.fromkeys(bound.values())),
        gradients=bound,
        accumulate=steps,
        loss=described,
        tables=_tables(evaluated.graph),
        digest=digest_of(training_file),
    )


def _tables(graph: ir.Graph) -> dict[str, int]:
    """For each input that looks up rows of a matrix of fixed size, how many the smallest has."""
    found = dict[str, int]()
    for ids in graph.inputs:
        for node, place in ids.uses():
            if place != 1 or not is_a(node, ops.gather) or node.attributes.get_int("axis", 0) != 0:
                continue
            table = node.inputs[0]
            if table is None or table.producer() is not None or table.shape is None:
                continue
            if table.shape.rank() == 2 and isinstance(rows := table.shape[0], int):
                found[str(ids.name)] = min(rows, found.get(str(ids.name), rows))
    return found


def returning(evaluation: bytes, outputs: Sequence[str], who: str) -> bytes:
    """An evaluation model that returns some of its values, too, after the loss.

    Raises GraphgenError for a name that is not there.
    """
    model = ir.from_proto(onnx.load_model_from_string(evaluation))
    made = {str(value.name): value for node in model.graph for value in node.outputs}
    for name in outputs:
        if name not in made:
            raise GraphgenError(
                f"{who}: the evaluation model does not return {name!r}; write the artifacts again "
                f"with outputs=[{name!r}] (--outputs {name})"
            )
    graph = model.graph
    graph.outputs[:] = [graph.outputs[0], *(made[name] for name in outputs)]
    return _to_bytes(model)


def making(evaluation: bytes, values: Sequence[str], who: str) -> bytes:
    """The part of an evaluation model that makes some of its values, which become its outputs."""
    model = ir.from_proto(onnx.load_model_from_string(returning(evaluation, values, who)))
    del model.graph.outputs[0]
    common.RemoveUnusedNodesPass()(model)
    for value in [value for value in model.graph.inputs if not value.uses()]:
        model.graph.inputs.remove(value)
    return _to_bytes(model)


def _to_bytes(model: ir.Model) -> bytes:
    data: bytes = ir.to_proto(model).SerializeToString(deterministic=True)
    return data
