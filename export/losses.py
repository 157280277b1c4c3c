"""The loss that artifacts train: cross-entropy or squared error of an output, or your own."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import onnx_ir as ir

from graphgen import ops
from graphgen.edit import infer_model, register_constants
from graphgen.errors import GraphgenError, near
from graphgen.graph import all_values, is_float
from graphgen.infer import DOMAIN, describe
from graphgen.op import find_op, is_a, read_attributes
from graphgen.record import Tape, recording
from graphgen.subgraphs import ancestors, reads
from graphgen.traits import Trait
from graphgen.value import Tensor, Value, adopt

LABELS = "labels"
IGNORED = -100
"""The label that cross-entropy leaves out."""

Loss = str | Callable[..., Any]


class InputType(Protocol):
    """A dtype and sizes of a new input: `gg.float32["batch"]`."""

    dtype: ir.DataType
    shape: tuple[int | str, ...]


def attach_loss(
    model: ir.Model,
    loss: Loss,
    output: str | None,
    inputs: Mapping[str, InputType],
    *,
    label_smoothing: float,
    z_loss: float,
) -> dict[str, Any]:
    """Make the loss the only output of the model; return what the trainer may know about it."""
    graph = model.graph
    outputs = {str(value.name): value for value in graph.outputs}
    named = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    _check_options(named, output, inputs, label_smoothing, z_loss, own=not isinstance(loss, str))
    if isinstance(loss, str) and loss in outputs:
        graph.outputs[:] = [outputs[loss]]
        return {"loss": loss, **_labels_of(graph)}
    if isinstance(loss, str) and loss not in ("cross_entropy", "mse"):
        raise GraphgenError(
            f"artifacts: loss is {loss!r}; choose 'cross_entropy', 'mse', a scalar output of the "
            f"model ({', '.join(outputs)}) or a function of the outputs"
            + near(loss, ["cross_entropy", "mse", *outputs])
        )
    described: dict[str, Any] = {"loss": named}
    with recording(context=infer_model(model)) as tape:
        if not isinstance(loss, str):
            value: Any = _own(graph, loss, named, inputs, tape)
        else:
            result = _choose_output(outputs, output)
            if any(x.name == LABELS for x in graph.inputs):
                raise GraphgenError(
                    f"artifacts: the model has an input {LABELS!r} already, which loss={loss!r} "
                    "adds; rename it, or give the name of a scalar output as the loss"
                )
            if result.shape is None:
                raise GraphgenError(
                    f"artifacts: the rank of output {result.name} is unknown; export the model "
                    "with it"
                )
            if loss == "mse":
                labels = _input(tape, LABELS, result.dtype, result.shape)
                value = ops.mean_squared_error(adopt(result), labels)
            else:
                described["classes"] = _classes(result)
                labels = _input(tape, LABELS, ir.DataType.INT64, result.shape[:-1])
                # As rows, so that the head's gradient is made of matrix products.
                value = ops.cross_entropy(
                    ops.reshape(adopt(result), [-1, described["classes"]]),
                    ops.reshape(labels, [-1]),
                    ignore_index=IGNORED,
                    label_smoothing=label_smoothing,
                    z_loss=z_loss,
                )
        graph.extend(tape.nodes)
        graph.inputs.extend(tape.inputs.values())
        tape.kept = True
    register_constants(graph, tape.constants.values())
    scalar = tape.operand(value)
    graph.outputs[:] = [scalar]
    claim(graph, {"loss": scalar})
    return described if "classes" in described else described | _labels_of(graph)


def _labels_of(graph: ir.Graph) -> dict[str, Any]:
    """The inputs that a loss takes labels from.

    Each has its number of classes, None if unknown, and the label that does not count, if any.
    """
    [loss] = graph.outputs
    found: dict[str, list[int | None]] = {}
    for node in ancestors(loss, reads(graph)):
        op = find_op(node)
        if op is None or "labels" not in op.inputs:
            continue
        logits, labels = node.inputs[0], node.inputs[op.inputs.index("labels")]
        while labels is not None and (made := labels.producer()) is not None:
            same = is_a(made, ops.cast, Trait.LAYOUT) and not is_a(made, ops.expand)
            labels = made.inputs[0] if same else None
        if labels is None or logits is None or not labels.is_graph_input():
            continue
        axis = -1 if op.domain == DOMAIN else 1
        classes = logits.shape[axis] if logits.shape is not None else None
        ignored = read_attributes(op, node)["ignore_index"]
        found[str(labels.name)] = [classes if isinstance(classes, int) else None, ignored]
    return {"labels": found} if found else {}


def claim(graph: ir.Graph, named: Mapping[str, ir.Value]) -> None:
    """Give values their names; another value of the graph with such a name gets a longer one."""
    for other in all_values(graph):
        name = str(other.name)
        if named.get(name, other) is not other:
            other.name = f"{name}_before"
    for name, value in named.items():
        value.name = name


def _check_options(
    loss: str,
    output: str | None,
    inputs: Mapping[str, InputType],
    label_smoothing: float,
    z_loss: float,
    *,
    own: bool,
) -> None:
    if not 0.0 <= label_smoothing < 1.0:
        raise GraphgenError(
            f"artifacts: label_smoothing is {label_smoothing}; it must be at least 0 and below 1"
        )
    if not 0.0 <= z_loss < math.inf:
        raise GraphgenError(f"artifacts: z_loss is {z_loss}; it must be at least 0 and finite")
    given = {
        "label_smoothing": (label_smoothing, not own and loss == "cross_entropy"),
        "z_loss": (z_loss, not own and loss == "cross_entropy"),
        "output": (output, not own and loss in ("cross_entropy", "mse")),
        **dict.fromkeys(inputs, (True, own)),
    }
    for name, (value, read) in given.items():
        if value and not read:
            raise GraphgenError(f"artifacts: {name} has no effect with loss={loss}; leave it out")


def _own(
    graph: ir.Graph,
    loss: Callable[..., Any],
    named: str,
    inputs: Mapping[str, InputType],
    tape: Tape,
) -> Value:
    """Record a function of the outputs, the inputs and new inputs, all by name."""
    known = {str(value.name): value for value in (*graph.inputs, *graph.outputs)}
    for name, spec in inputs.items():
        if not isinstance(getattr(spec, "dtype", None), ir.DataType) or not hasattr(spec, "shape"):
            raise GraphgenError(
                f"artifacts: {name} is {spec!r}; give a dtype with sizes, such as "
                'float32["batch", 256]'
            )
        if name in known or name in graph.initializers:
            raise GraphgenError(f"artifacts: the model has a {name} already; rename the new input")
    added = {name: _input(tape, name, spec.dtype, spec.shape) for name, spec in inputs.items()}
    signature = inspect.signature(loss)
    given = {name: adopt(known[name]) for name in signature.parameters if name in known} | added
    try:
        signature.bind(**given)
    except TypeError as error:
        raise GraphgenError(
            f"artifacts: loss {named}: {error}; its arguments are outputs and inputs of the model "
            f"({', '.join(known)}) and new inputs, given as name=gg.float32[...]"
        ) from None
    value: Tensor = loss(**given)
    if not isinstance(value, Value):
        raise GraphgenError(
            f"artifacts: loss {named} returned {type(value).__name__}; it must return one float "
            "value"
        )
    return value


def _input(tape: Tape, name: str, dtype: ir.DataType | None, dims: Iterable[Any]) -> Value:
    assert dtype is not None
    return tape.input(name, dtype, [*dims])


def _classes(logits: ir.Value) -> int:
    classes = logits.shape[-1] if logits.shape else None
    if isinstance(classes, int):
        return classes
    raise GraphgenError(
        f"artifacts: output {logits.name} is {describe(logits)}; cross_entropy needs logits with a "
        "known number of classes as the last dimension"
    )


def _choose_output(outputs: dict[str, ir.Value], name: str | None) -> ir.Value:
    floats = [n for n, v in outputs.items() if is_float(v) and not n.startswith("present.")]
    if name is None and len(floats) == 1:
        return outputs[floats[0]]
    if name in floats:
        return outputs[str(name)]
    problem = "output is not given" if name is None else f"output is {name!r}"
    raise GraphgenError(
        f"artifacts: {problem}; choose the one to train from the float outputs "
        f"{', '.join(floats) or '(there is none)'}"
    )
