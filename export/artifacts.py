"""The four training artifacts of ONNX Runtime, written from a model by its own reverse mode.

- training_model.onnx: from the model's inputs, `labels`, the parameters, for every trainable p a
  `<p>_grad.accumulation.buffer`, and `lazy_reset_grad`, to the loss and, for every trainable p,
  `<p>_grad.accumulation.out`.
- eval_model.onnx: from the model's inputs, `labels` and the parameters to the loss, no dropout.
- optimizer_model.onnx: one update of sequences of parameters, gradients and moments.
- checkpoint: the parameters, trainable and frozen ones apart.

The official runtime 1.19.2 trains them as they are; `graphgen.export.lower` prepares them for the
stock runtime.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from graphgen import ops
from graphgen.autodiff import backward
from graphgen.errors import GraphgenError
from graphgen.export.checkpoint import Checkpoint
from graphgen.export.files import load
from graphgen.export.opset import keeps_meaning, stamp
from graphgen.export.optimizers import AdamW, Optimizer
from graphgen.graph import (
    all_values,
    bodies,
    infer_model,
    is_constant_name,
    is_float,
    parameters,
    register_constants,
    replace_composites,
    tidy,
    where_is,
)
from graphgen.infer import DOMAIN, describe
from graphgen.match import Engine
from graphgen.op import TABLE, Op, Operand, adopt, recording
from graphgen.passes.canonicalise import canonicalise
from graphgen.passes.clean import clean
from graphgen.targets import target

TRAINING, EVAL, OPTIMIZER = "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"
CHECKPOINT = "checkpoint"
LABELS, RESET, ACCUMULATOR = "labels", "lazy_reset_grad", "InPlaceAccumulatorV2"
BUFFER, FLAG = "_grad.accumulation.buffer", "_grad.accumulation.out"
IGNORED = -100
"""The label that cross-entropy leaves out."""

LOSS = "graphgen.loss"
"""Metadata of training_model.onnx: a JSON object with the loss and, for labels, `classes`."""

_ACCUMULATE = """
    <domain: "com.microsoft", opset_import: ["" : 18]>
    InPlaceAccumulatorV2 (buffer, gradient, reset) => (updated_flag) {
        inverse = Not (reset)
        updated_flag = And (reset, inverse)
    }"""  # False: it changes nothing, and only lets the stock runtime load the file


def artifacts(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    loss: str = "cross_entropy",
    optimizer: Optimizer | None = None,
    output: str | None = None,
    trainable: str | None = None,
    label_smoothing: float = 0.0,
) -> None:
    """Write the four training artifacts of `model` into `directory`.

    Args:
        model: The path of an ONNX file, a model, or an object with one as `.model`.
        directory: Made if missing; the artifacts in it are replaced once the new ones are complete.
        loss: "cross_entropy" of the output, float[..., C], with the input `labels`, int64[...],
            where -100 is ignored; "mse" of the output with `labels` of its shape and dtype; or
            the name of a scalar output that is the loss.
        optimizer: `AdamW()` by default, or `SGD()`.
        output: The output to be trained; by default the only float one not called present.*.
        trainable: A regular expression, searched in the parameters' names; by default every
            float32 parameter that the loss depends on.
        label_smoothing: s in [0, 1): the target is 1 - s on the label plus s/C on every class.

    Raises GraphgenError for a loss, output, pattern or weight that cannot be trained, for an
    operator without a gradient or beyond opset 21, and for a directory that cannot be written.
    """
    optimizer = AdamW() if optimizer is None else optimizer
    training = _copy(model)
    described = _attach_loss(training, loss, output, label_smoothing)
    names = _choose_trainable(training, trainable)
    frozen = [name for name in parameters(training.graph) if name not in names]
    weights = {name: _array(training, name) for name in (*names, *frozen)}
    evaluation = training.clone()
    _remove_dropout(evaluation)
    _differentiate(training, names)
    for one in (training, evaluation):
        _weights_to_inputs(one, weights)
        _finish(one)
    _accumulate(training, names)
    training.metadata_props[LOSS] = json.dumps(described, sort_keys=True)
    checkpoint = Checkpoint(
        {name: weights[name] for name in names}, {name: weights[name] for name in frozen}
    )
    with _replaced(Path(directory)) as partial:
        for one, file in ((training, TRAINING), (evaluation, EVAL)):
            (partial / file).write_bytes(_to_bytes(one))
        data = optimizer.official().SerializeToString(deterministic=True)
        (partial / OPTIMIZER).write_bytes(data)
        checkpoint.save(partial / CHECKPOINT)


def _copy(model: Any) -> ir.Model:
    """A copy to work on, without functions: operators of our table, or their nodes in place."""
    if isinstance(model, (str, os.PathLike)):
        result = load(model)
    else:
        model = getattr(model, "model", model)
        if not isinstance(model, ir.Model):
            raise GraphgenError(
                f"artifacts: the model is a {type(model).__name__}; give the path of an ONNX file "
                "or what gg.build or gg.optimize returned"
            )
        result = model.clone()
    for key in [key for key in result.functions if key[:2] in TABLE]:
        del result.functions[key]
    if result.functions:
        common.InlinePass()(result)
    return result


def _attach_loss(
    model: ir.Model, loss: str, output: str | None, label_smoothing: float
) -> dict[str, Any]:
    """Make the loss the only output of the model; returns what the trainer may know of it."""
    graph = model.graph
    outputs = {str(value.name): value for value in graph.outputs}
    if not 0.0 <= label_smoothing < 1.0:
        raise GraphgenError(
            f"artifacts: label_smoothing is {label_smoothing}; it must be at least 0 and below 1"
        )
    if loss in outputs:
        graph.outputs[:] = [outputs[loss]]
        return {"loss": loss}
    if loss not in ("cross_entropy", "mse"):
        raise GraphgenError(
            f"artifacts: loss is {loss!r}; choose 'cross_entropy', 'mse' or a scalar output of the "
            f"model ({', '.join(outputs)})"
        )
    if any(value.name == LABELS for value in graph.inputs):
        raise GraphgenError(
            f"artifacts: the model has an input {LABELS!r} already, which loss={loss!r} adds; "
            "rename it, or give the name of a scalar output as the loss"
        )
    result = _choose_output(outputs, output)
    with recording(context=infer_model(model)) as tape:
        if result.shape is None:
            raise GraphgenError(f"artifacts: the rank of output {result.name} is not known")
        if loss == "mse":
            labels = _labels(result.dtype, result.shape)
            value = ops.mean_squared_error(adopt(result), labels)
            described: dict[str, Any] = {"loss": loss}
        else:
            if not result.shape or not isinstance(classes := result.shape[-1], int):
                raise GraphgenError(
                    f"artifacts: output {result.name} is {describe(result)}; cross_entropy needs "
                    "logits with a known number of classes as the last dimension"
                )
            labels = _labels(ir.DataType.INT64, result.shape[:-1])
            value = ops.cross_entropy(
                adopt(result), labels, ignore_index=IGNORED, label_smoothing=label_smoothing
            )
            described = {"loss": loss, "classes": classes}
        graph.extend(tape.nodes)
        graph.inputs.append(labels)
        tape.kept = True
    register_constants(graph, tape.constants.values())
    graph.outputs[:] = [value]
    _claim(graph, value, "loss")
    return described


def _labels(dtype: ir.DataType | None, dims: Iterable[int | ir.SymbolicDim]) -> Any:
    assert dtype is not None
    return adopt(ir.Value(name=LABELS, type=ir.TensorType(dtype), shape=ir.Shape(dims)))


def _choose_output(outputs: dict[str, ir.Value], name: str | None) -> ir.Value:
    floats = [n for n, v in outputs.items() if is_float(v) and not n.startswith("present.")]
    if name is None and len(floats) == 1:
        return outputs[floats[0]]
    if name in floats:
        return outputs[str(name)]
    problem = "output is not given" if name is None else f"output is {name!r}"
    raise GraphgenError(
        f"artifacts: {problem}; choose the one to train of the float outputs "
        f"{', '.join(floats) or '(there is none)'}"
    )


def _choose_trainable(model: ir.Model, pattern: str | None) -> list[str]:
    """The names of the parameters to train; every one is float32 and the loss depends on it."""
    [loss] = model.graph.outputs
    needed = _ancestors(loss)
    if pattern is None:
        every = parameters(model.graph)
        names = [n for n, value in every.items() if value in needed]
        problem = f"the loss {loss.name} depends on none of the {len(every)} float parameters"
    else:
        try:
            search = re.compile(pattern).search
        except re.error as error:
            raise GraphgenError(
                f"artifacts: trainable={pattern!r} is no regular expression: {error}"
            ) from None
        names = [n for n in model.graph.initializers if search(n) and not is_constant_name(n)]
        some = ", ".join([*parameters(model.graph)][:6])
        problem = f"trainable={pattern!r} matches no parameter; there are {some or 'none'}"
    if not names:
        raise GraphgenError(f"artifacts: {problem}")
    for name in names:
        value = model.graph.initializers[name]
        if value.dtype is not ir.DataType.FLOAT:
            raise GraphgenError(
                f"artifacts: parameter {name} is {describe(value)}; only float32 is trained: "
                "convert it, or choose others with trainable="
            )
        if value not in needed:
            raise GraphgenError(
                f"artifacts: the loss {loss.name} does not depend on parameter {name}; leave it "
                "out of trainable="
            )
    return names


def _ancestors(value: ir.Value) -> set[ir.Value]:
    seen, pending = {value}, [value]
    while pending:
        node = pending.pop().producer()
        for x in node.inputs if node is not None else ():
            if x is not None and x not in seen:
                seen.add(x)
                pending.append(x)
    return seen


def _differentiate(model: ir.Model, names: Sequence[str]) -> None:
    graph = model.graph
    wanted = [graph.initializers[name] for name in names]
    gradients = backward(model, graph.outputs[0], wanted)
    graph.outputs.extend(gradients)
    for name, value in zip(names, gradients, strict=True):
        _claim(graph, value, f"{name}_grad")


def _remove_dropout(model: ir.Model) -> None:
    """Dropout in its mean, which is the identity; inputs that only it had go with it."""
    before = {value for value in model.graph.inputs if value.uses()}
    for node in list(model.graph):
        if (node.domain, node.op_type) == (DOMAIN, "Dropout"):
            x, y = node.inputs[0], node.outputs[0]
            assert x is not None
            y.replace_all_uses_with(x)
            model.graph.remove(node, safe=True)
    common.RemoveUnusedNodesPass()(model)
    for value in before:
        if not value.uses():
            model.graph.inputs.remove(value)


def _weights_to_inputs(model: ir.Model, names: Iterable[str]) -> None:
    graph = model.graph
    for name in names:
        value = graph.initializers.pop(name)
        value.const_value = None
        if not value.is_graph_input():  # in a foreign file it may be one already
            graph.inputs.append(value)


def _finish(model: ir.Model) -> None:
    """Only operators that the official runtime has, each calculated once, in canonical form."""
    official = target("official")
    _, context = clean(model)

    def body(op: Op, node: ir.Node) -> list[Operand] | None:
        # The body and no other spelling, so that the backward pass shares what it computes.
        return bodies(op, node) if official.missing(node) else None

    replace_composites(model.graph, context, body)
    # No node draws random numbers, so that equal ones may be merged: dropout is a function.
    _, context = clean(model)
    canonicalise(model, Engine(), context)
    clean(model)


def _to_bytes(model: ir.Model) -> bytes:
    stamp(model)
    opset, newest = model.graph.opset_imports[""], target("official").opset
    ir_version = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", newest)])
    if opset > newest or model.ir_version > ir_version:
        newer = [n for n in model.graph if not n.domain and not keeps_meaning(n, opset, newest)]
        what = f"{newer[0].op_type} ({where_is(newer[0])})" if newer else "a dtype in it"
        raise GraphgenError(
            f"artifacts: {what} needs opset {opset} and IR version {model.ir_version}; training "
            f"files are limited to {newest} and {ir_version}"
        )
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    data: bytes = proto.SerializeToString(deterministic=True)
    return data


def _accumulate(model: ir.Model, names: Sequence[str]) -> None:
    """The official form: gradients go into buffers, a flag for each is the output."""
    graph = model.graph
    loss, *gradients = graph.outputs
    graph.outputs[:] = [loss]
    reset = ir.Value(name=RESET, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([1]))
    for name, gradient in zip(names, gradients, strict=True):
        buffer = ir.Value(name=name + BUFFER, type=gradient.type, shape=_input(graph, name).shape)
        node = ir.node(ACCUMULATOR, [buffer, gradient, reset], domain="com.microsoft")
        flag = node.outputs[0]
        flag.name, flag.type, flag.shape = name + FLAG, reset.type, ir.Shape([1])
        graph.append(node)
        graph.inputs.append(buffer)
        graph.outputs.append(flag)
    graph.inputs.append(reset)
    function = ir.serde.deserialize_function(onnx.parser.parse_function(_ACCUMULATE))
    model.functions[function.identifier()] = function
    tidy(model)


def _input(graph: ir.Graph, name: str) -> ir.Value:
    return next(value for value in graph.inputs if value.name == name)


def _claim(graph: ir.Graph, value: ir.Value, name: str) -> None:
    """Give `value` a name; another value of the graph that has it gets a longer one."""
    for other in all_values(graph):
        if other.name == name and other is not value:
            other.name = f"{name}_before"
    value.name = name


def _array(model: ir.Model, name: str) -> np.ndarray[Any, Any]:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.numpy()


@contextmanager
def _replaced(directory: Path) -> Iterator[Path]:
    """A new folder beside `directory`, which takes its place when all went well."""
    files = {TRAINING, EVAL, OPTIMIZER, CHECKPOINT}
    directory = Path(os.path.realpath(directory))  # a symbolic link stays
    try:
        if directory.exists() and (other := {p.name for p in directory.iterdir()} - files):
            raise GraphgenError(
                f"artifacts: {directory} holds {min(other)!r}, which is no training artifact, and "
                "would be replaced as a whole; choose a folder of its own"
            )
        directory.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent)
        try:
            partial, old = Path(scratch, "new"), Path(scratch, "old")
            partial.mkdir()
            yield partial
            if directory.exists():
                directory.rename(old)
            partial.rename(directory)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise GraphgenError(
            f"artifacts: {directory} cannot be written: {error.strerror}; choose another place"
        ) from None
