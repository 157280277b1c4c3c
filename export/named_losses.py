"""Losses with a name and options, of an output and of what it should be."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.arguments import checked
from graphgen.errors import GraphgenError, near
from graphgen.export.outputs import declared_shapes
from graphgen.graph import is_float
from graphgen.infer import describe
from graphgen.ops.layout import numpy_dtype
from graphgen.record import Tape
from graphgen.value import Tensor, adopt

LABELS = "labels"
IGNORED = -100
"""The label that cross-entropy leaves out."""

OPTIONS = {
    "cross_entropy": {"axis", "weight", "label_smoothing", "z_loss"},
    "binary_cross_entropy": {"axis", "weight"},
    "mse": set[str](),
    "l1": set[str](),
    "huber": {"delta"},
    "smooth_l1": {"delta"},
}
"""The losses that have a name, and the options that not all of them have."""


@checked
@dataclass(frozen=True)
class Loss:
    """A loss by its name, with options. `gg.artifacts` sums those of a list.

    Args:
        name: "cross_entropy" of logits, float[..., C, ...], and labels, int64 without the axis C,
            where -100 does not count; "binary_cross_entropy" of logits and targets in [0, 1];
            "mse", the mean squared error; "l1", the mean absolute one; "huber" or "smooth_l1", a
            square near 0 and a line beyond `delta`, as PyTorch defines both; or a scalar output.
        output: The output it is of; by default the only float one not called present.*.
        labels: The name of the new input for what the output should be. Two losses may have one.
        factor: What it is multiplied by in a sum.
        axis: Where the classes are: by default the last axis, except that logits of more than 3
            dimensions need it. PyTorch's losses have 1.
        weight: A number for each class; the mean over labels is then weighted, as PyTorch's. For
            binary_cross_entropy, of targets of 1 (its pos_weight): for all, or for each class.
        delta: From where on huber and smooth_l1 (its beta) are straight, by default 1.
        label_smoothing: As for `gg.artifacts`.
        z_loss: As for `gg.artifacts`.
    """

    name: str
    output: str | None = None
    labels: str = LABELS
    factor: float = 1.0
    axis: int | None = None
    weight: float | Sequence[float] | None = None
    delta: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        checks: dict[str, tuple[Callable[[Any], bool], str]] = {
            "name": (lambda x: isinstance(x, str), "be a string"),
            "labels": (lambda x: isinstance(x, str) and bool(x), "be the name of an input"),
            "factor": (lambda x: _is_number(x) and x != 0, "be finite and not 0"),
            "axis": (lambda x: x is None or type(x) is int, "be an integer"),
            "weight": (_are_weights, "be numbers from 0, finite and not all 0"),
            "delta": (lambda x: x is None or (_is_number(x) and x > 0), "be above 0 and finite"),
            "label_smoothing": (
                lambda x: _is_number(x) and 0.0 <= x < 1.0,
                "be at least 0 and below 1",
            ),
            "z_loss": (lambda x: _is_number(x) and x >= 0.0, "be at least 0 and finite"),
        }
        for name, (fits, wanted) in checks.items():
            if not fits(value := getattr(self, name)):
                raise GraphgenError(f"loss {self.name}: {name} is {value!r}; it must {wanted}")

    @classmethod
    def read(cls, text: str) -> "Loss":
        """Loss("l1", output="boxes", factor=0.5) of the text "l1:output=boxes,factor=0.5".

        The numbers of `weight` are separated by slashes: "cross_entropy:axis=1,weight=1/2/0.5".
        """
        name, colon, rest = text.partition(":")
        given: dict[str, Any] = {}
        for part in rest.split(",") if colon else ():
            key, _, value = part.partition("=")
            known = [f.name for f in fields(cls) if f.name != "name"]
            if key not in known or key in given or not value:
                raise GraphgenError(
                    f"loss {text!r}: {part!r} is not NAME=VALUE, each name once, of "
                    f"{', '.join(known)}{near(key, known)}"
                )
            given[key] = value
        try:
            for key, value in given.items():
                if key == "weight":
                    numbers = tuple(map(float, value.split("/")))
                    given[key] = numbers if "/" in value else numbers[0]
                elif key not in ("output", "labels"):
                    given[key] = int(value) if key == "axis" else float(value)
        except ValueError:
            raise GraphgenError(f"loss {text!r}: {key} is {value!r}, which is no number") from None
        return cls(name, **given)

    @property
    def given(self) -> list[str]:
        """The options that are not at their default."""
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default][1:]


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def _are_weights(x: Any) -> bool:
    numbers = list(x) if isinstance(x, (tuple, list)) else [1.0 if x is None else x]
    return all(_is_number(w) and w >= 0 for w in numbers) and any(numbers)


def by_name(graph: ir.Graph, loss: Loss, outputs: dict[str, ir.Value], tape: Tape) -> Tensor:
    """Record a loss. Raises GraphgenError for an output, labels or a weight that do not fit it."""
    if loss.name in outputs:
        return adopt(outputs[loss.name])
    result = _choose_output(outputs, loss.output)
    if any(x.name == loss.labels for x in (*graph.inputs, *graph.initializers.values())):
        kind = "a weight" if loss.labels in graph.initializers else "an input"
        raise GraphgenError(
            f"artifacts: the model has {kind} {loss.labels!r} already, which loss={loss.name!r} "
            "adds as an input; rename it, or give the name of a scalar output as the loss"
        )
    if result.shape is None:  # of what a loop collects, the file may know it
        result.shape = declared_shapes(graph).get(result)
    if result.shape is None:
        raise GraphgenError(
            f"artifacts: the rank of output {result.name} is unknown; export the model with it"
        )
    logits, dims = adopt(result), list(result.shape)
    if loss.name == "cross_entropy":
        return _cross_entropy(loss, result, tape)
    labels = _labels(loss, tape, result.dtype, dims)
    if loss.name == "mse":
        return ops.mean_squared_error(logits, labels)
    if loss.name == "l1":
        return ops.mean_absolute_error(logits, labels)
    if loss.name == "binary_cross_entropy":
        weight = loss.weight
        if isinstance(weight, Sequence):
            axis = _axis(loss, result)
            _expect_classes(loss, result, dims[axis])
            weight = np.reshape(weight, [-1, *[1] * (len(dims) - 1 - axis)]).tolist()
        elif loss.axis is not None:
            raise GraphgenError(
                "artifacts: axis has no effect with loss=binary_cross_entropy without a weight "
                "for each class; leave it out"
            )
        weights = None if weight is None else np.asarray(weight, numpy_dtype(logits))
        return ops.binary_cross_entropy(logits, labels, weights)
    delta = 1.0 if loss.delta is None else float(loss.delta)
    value = ops.huber_loss(logits, labels, delta=delta)
    return value if loss.name == "huber" or delta == 1.0 else value / delta


def _cross_entropy(loss: Loss, result: ir.Value, tape: Tape) -> Tensor:
    axis = _axis(loss, result)
    classes = result.shape[axis] if result.shape else None
    places = loss.output is not None and classes is not None  # such as tokens of a text
    if result.shape is None or not (places or isinstance(classes, int)):
        raise GraphgenError(
            f"artifacts: output {result.name} is {describe(result)}; cross_entropy needs logits "
            "with a known number of classes as the last dimension, or as that of axis=...; if its "
            f"classes are places, name it: cross_entropy:output={result.name}"
        )
    if classes == 1:
        raise GraphgenError(
            f"artifacts: output {result.name} is {describe(result)}; cross_entropy of one class is "
            "0: give loss='mse' for a number, 'binary_cross_entropy' for yes or no"
        )
    if loss.weight is not None:
        _expect_classes(loss, result, classes)
    logits: Tensor = adopt(result)
    dims = [*result.shape[:axis], *result.shape[axis + 1 :]]
    if axis < len(dims):
        logits = ops.transpose(logits, perm=[*(i for i in range(len(dims) + 1) if i != axis), axis])
    labels = ops.reshape(_labels(loss, tape, ir.DataType.INT64, dims), [-1])
    # As rows, so that the head's gradient is made of matrix products.
    rows = ops.reshape(logits, [-1, ops.dim(logits, -1)])
    options: dict[str, Any] = {"label_smoothing": loss.label_smoothing, "z_loss": loss.z_loss}
    if loss.weight is None:
        return ops.cross_entropy(rows, labels, ignore_index=IGNORED, **options)
    weight = np.asarray(loss.weight, numpy_dtype(logits))
    return ops.weighted_cross_entropy(rows, labels, weight, ignore_index=IGNORED, **options)


def _axis(loss: Loss, result: ir.Value) -> int:
    """The axis of the classes, from the front."""
    count = len(result.shape or ())
    if loss.axis is None and count > 3:
        raise GraphgenError(
            f"artifacts: output {result.name} is {describe(result)}; loss={loss.name!r} needs the "
            f"axis of its classes: gg.Loss({loss.name!r}, axis=1) as in PyTorch, or axis=-1"
        )
    axis = -1 if loss.axis is None else loss.axis
    if not -count <= axis < count:
        raise GraphgenError(
            f"artifacts: output {result.name} is {describe(result)}, which has no axis {axis}"
        )
    return axis % count


def _expect_classes(loss: Loss, result: ir.Value, classes: Any) -> None:
    count = len(loss.weight) if isinstance(loss.weight, Sequence) else 1
    if classes != count:
        raise GraphgenError(
            f"artifacts: loss {loss.name}: weight has {count} numbers, but output {result.name}, "
            f"{describe(result)}, has {classes} classes: give one for each"
        )


def _labels(loss: Loss, tape: Tape, dtype: ir.DataType | None, dims: Sequence[Any]) -> Tensor:
    """The input of a loss's labels, which another loss may have made."""
    made = tape.inputs.get(loss.labels)
    assert dtype is not None
    if made is None:
        return tape.input(loss.labels, dtype, [*dims])
    wanted = ir.Value(type=ir.TensorType(dtype), shape=ir.Shape(dims))
    if made.dtype != dtype or made.shape != wanted.shape:
        raise GraphgenError(
            f"artifacts: {loss.labels!r} are labels of two losses, as {describe(made)} and as "
            f"{describe(wanted)}; give gg.Loss(..., labels=...) another name"
        )
    return adopt(made)


def _choose_output(outputs: dict[str, ir.Value], name: str | None) -> ir.Value:
    floats = [n for n, v in outputs.items() if is_float(v) and not re.match(r"present[._]", n)]
    if name is None and len(floats) == 1:
        return outputs[floats[0]]
    if name in floats:
        return outputs[str(name)]
    problem = "output is not given" if name is None else f"output is {name!r}"
    raise GraphgenError(
        f"artifacts: {problem}; choose the one to train from the float outputs "
        f"{', '.join(floats) or '(there is none)'}"
    )
