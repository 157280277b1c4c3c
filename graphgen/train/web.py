"""Training artifacts for runtimes without a trainer of ours: in a browser, in Node, anywhere.

The official files need kernels that a stock session lacks, and our trainer binds buffers in place,
which JavaScript cannot. These are plain graphs: arrays in, arrays out.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphgen import ops, safetensors
from graphgen.errors import GraphgenError
from graphgen.export.artifact_files import CHECKPOINT
from graphgen.export.checkpoint import Checkpoint, OptimizerState
from graphgen.export.optimizers import Optimizer
from graphgen.export.partial import in_place_of
from graphgen.export.precision import LossScale
from graphgen.export.write import export
from graphgen.nn.module import build, float32, int64
from graphgen.operands import Array
from graphgen.passes.training.accumulate import GRADIENT
from graphgen.passes.training.adapters import initializer
from graphgen.train.lower import lower
from graphgen.train.on_device import MOMENT, next_state
from graphgen.value import Value

STEP, UPDATE, EVAL, STATE = "step.onnx", "update.onnx", "eval.onnx", "state.safetensors"
FILES = {STEP, UPDATE, EVAL, STATE}
RATE, NUMBER = "learning_rate", "update_number"


def write_web(artifacts: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Write a folder from which onnxruntime-web and onnxruntime-node train.

    - step.onnx: a batch and the trained parameters in; the loss and `<parameter>_grad` out.
    - update.onnx: the state, the gradients, `learning_rate`, float[], and `update_number`,
      int64[], from 1, in; the next state out, each tensor as `<name>_next`.
    - eval.onnx: a batch and the trained parameters in; the loss without dropout out.
    - state.safetensors: the state at first, parameters and moments of the optimizer.

    What is frozen is inside the graphs. The numbers are those of `Trainer`. Raises GraphgenError
    for artifacts that sum the gradients of several batches, or are not of float32.
    """
    directory, out = Path(artifacts), Path(out)
    program, start = lower(directory), Checkpoint.load(directory / CHECKPOINT)
    if moved := program.loss.get("statistics"):
        raise GraphgenError(
            f"web: {directory}: each batch moves {min(moved)}, which the loop in a browser does "
            "not do: write artifacts of the module in evaluation mode"
        )
    if program.accumulate > 1 or LossScale.of(program.loss).dynamic:
        what = "sum the gradients of several batches" if program.accumulate > 1 else "are of fp16"
        raise GraphgenError(f"web: {directory}: the artifacts {what}; write them without")
    shapes = {name: start.trainable[name].shape for name in program.trainable}
    state = {name: start.trainable[name] for name in shapes}
    old = start.optimizer
    for number, moment in enumerate(program.optimizer.moments):
        kept = {} if old is None else (old.momentum0, old.momentum1)[number]
        for name, shape in shapes.items():
            state[name + MOMENT.format(moment)] = kept.get(name, np.zeros(shape, np.float32))
    out = Path(os.path.realpath(out))
    if out.exists() and (not out.is_dir() or {p.name for p in out.iterdir()} - FILES):
        raise GraphgenError(f"web: {out} exists and holds something else; choose another place")
    try:
        with in_place_of(out) as folder:
            for name, model in ((STEP, program.training), (EVAL, program.evaluation)):
                export(_plain(model, start.frozen), folder / name)
            export(_update(program.optimizer, shapes), folder / UPDATE)
            (folder / STATE).write_bytes(safetensors.to_bytes(state))
    except OSError as error:
        raise GraphgenError(f"web: {out} cannot be written: {error.strerror}") from error
    return out


def read_web(state: str | os.PathLike[str], artifacts: str | os.PathLike[str], step: int) -> None:
    """Put a state after `step` updates, a file as `write_web` writes it, into the artifacts.

    Every command that reads their checkpoint then goes on from it. Raises GraphgenError for the
    state of other artifacts.
    """
    file, path = Path(state), Path(artifacts) / CHECKPOINT
    start, optimizer = Checkpoint.load(path), lower(Path(artifacts)).optimizer
    found = {weight.name: weight for weight in safetensors.read_header(file)}
    parts = list[dict[str, Array]]()
    for ending in ("", *(MOMENT.format(moment) for moment in optimizer.moments)):
        parts.append({})
        for name, array in start.trainable.items():
            weight = found.pop(name + ending, None)
            if weight is None or weight.shape != array.shape or weight.dtype != ir.DataType.FLOAT:
                shape = "missing" if weight is None else f"{weight.dtype.name}{[*weight.shape]}"
                raise GraphgenError(
                    f"web: {file}: {name + ending} is {shape}, and the artifacts have "
                    f"float32{[*array.shape]}: give the state of these artifacts"
                )
            parts[-1][name] = weight.read()
    if found:
        raise GraphgenError(f"web: {file}: {min(found)} is not of the artifacts {path.parent}")
    trained, *moments = parts
    absent = [{name: np.zeros_like(array) for name, array in trained.items()}, {}]
    first, second = moments + absent[len(moments) :]
    kept = OptimizerState(step, 0.0, first, second)
    Checkpoint(trained, start.frozen, kept, start.properties).save(path)


def _plain(model: bytes, frozen: Mapping[str, Array]) -> ir.Model:
    """The graph with what is frozen inside, and of running sums only the last, the gradients."""
    result = ir.from_proto(onnx.load_model_from_string(model))
    graph = result.graph
    for value in [x for x in graph.inputs if x.name in frozen]:
        constant = initializer(str(value.name), frozen[str(value.name)])
        value.replace_all_uses_with(constant)
        graph.inputs.remove(value)
        graph.register_initializer(constant)
    loss, *others = graph.outputs
    graph.outputs[:] = [loss, *(y for y in others if str(y.name).endswith(GRADIENT))]
    return result


def _update(optimizer: Optimizer, shapes: Mapping[str, tuple[int, ...]]) -> ir.Model:
    """One update of all parameters together, as the optimizer's docstring says."""

    def update(**given: Any) -> dict[str, Any]:
        gradients, scale = {name: given[name + GRADIENT] for name in shapes}, None
        if (most := optimizer.clip_norm) is not None:
            squares = [ops.reduce_sum(g * g, keepdims=0) for g in gradients.values()]
            norm = ops.sqrt(sum(squares[1:], squares[0]))
            scale = ops.minimum(np.float32(1), np.float32(most) / (norm + np.float32(1e-6)))
        # 1 - 0.999 has three digits less in float32.
        rate, number = (given[name].astype(np.float64) for name in (RATE, NUMBER))
        scalars = {
            setting: {
                name: ops.cast(x, to=np.float32) if isinstance(x, Value) else np.float32(x)
                for name, x in optimizer.scalars(rate, number, setting).items()
            }
            for setting in map(optimizer.setting, shapes)
        }
        return next_state(optimizer, given, gradients, scalars, scale)

    specs: dict[str, Any] = {RATE: float32[()], NUMBER: int64[()]}
    for name, shape in shapes.items():
        moments = (name + MOMENT.format(moment) for moment in optimizer.moments)
        specs |= dict.fromkeys((name, name + GRADIENT, *moments), float32[shape])
    return build(update, **specs)
