"""Metrics of held-out data: functions of all predictions and labels together.

A metric takes the predictions of all batches as one array, and the labels as another. `NAMED` are
metrics by name; any other function is given as it is, or as a `Metric` with what it needs.
"""

import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from graphgen.errors import GraphgenError, near
from graphgen.export.named_losses import IGNORED, LABELS
from graphgen.operands import Array

Function: TypeAlias = Callable[[Any, Any], float]
Pair: TypeAlias = tuple[Array, Array]


@dataclass(frozen=True)
class Metric:
    """A function of predictions and labels, with what the trainer should know about it.

    Args:
        function: Gets the predictions and the labels of all samples, as two arrays.
        name: What `metrics.jsonl` calls it, after `evaluation_`; the function's own name if empty.
        higher: Whether more is better.
        output: The output that predicts; by default the only one that the artifacts keep.
        labels: The input with the labels.
        prepare: Applied to output and labels of each batch, so that less is kept of them. Without,
            batches are joined along their first axis; in others, outputs are padded with 0 and
            labels with -100 to the longest.
        of_loss: Calculates the metric from the mean loss instead.
    """

    function: Function
    name: str = ""
    higher: bool = True
    output: str | None = None
    labels: str = LABELS
    prepare: Callable[[Array, Array], Pair] | None = None
    of_loss: Callable[[float], float] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or getattr(self.function, "__name__", "metric"))

    def value(self, loss: float, pairs: Sequence[Pair]) -> float:
        """The metric of all batches, each as `prepare` left it. Raises GraphgenError if not finite.

        `loss` is their mean loss.
        """
        if self.of_loss is not None:
            found: Any = self.of_loss(loss)
        else:
            outputs, labels = ([*arrays] for arrays in zip(*pairs, strict=True))
            found = self.function(joined(outputs, 0), joined(labels, IGNORED))
        try:
            number = float(found)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise GraphgenError(f"metric {self.name} is {found!r:.60}; it must be a finite number")
        return number


def joined(arrays: Sequence[Array], padding: int) -> Array:
    """Batches one after the other, padded to the longest in their further dimensions."""
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) == 1:
        return np.concatenate(arrays)
    if len({*map(len, shapes)}) != 1:
        raise GraphgenError(f"batches of {len(shapes)} ranks cannot be joined: {sorted(shapes)}")
    longest = np.max([*shapes], axis=0)
    result = np.full((sum(map(len, arrays)), *longest), padding, arrays[0].dtype)
    at = 0
    for array in arrays:
        result[(slice(at, at + len(array)), *map(slice, array.shape[1:]))] = array
        at += len(array)
    return result


def classes(output: Array, labels: Array) -> Pair:
    """The most probable classes and the right ones, of all labels that count.

    Classes are along the last axis; an output of the labels' shape, or with a last axis of 1, has
    one logit for each, above 0 for class 1.
    """
    output, counted = _one_logit(output, labels), labels != IGNORED
    if output.shape == labels.shape:
        predicted, right = output > 0, labels > 0.5
        return predicted[counted].astype(np.int64), right[counted].astype(np.int64)
    if output.shape[:-1] != labels.shape:
        raise GraphgenError(
            f"a metric of classes: the output is {[*output.shape]} and the labels {[*labels.shape]}"
            "; the output must have one more dimension, of classes, last or at axis 1"
        )
    return output.argmax(axis=-1)[counted], labels[counted]


def _one_logit(output: Array, labels: Array) -> Array:
    """An output of one logit for each label in the labels' shape: one class would always be 0."""
    return output.reshape(labels.shape) if output.shape == (*labels.shape, 1) else output


def class_counts(output: Array, labels: Array) -> Pair:
    """Of each class, how often it was right, and how often predicted or a label: int64[1, C]."""
    output = _one_logit(output, labels)
    predicted, right = classes(output, labels)
    count = 2 if output.shape == labels.shape else output.shape[-1]
    if right.size and (right.dtype.kind not in "iu" or right.min() < 0 or right.max() >= count):
        raise GraphgenError(
            f"f1: labels are {right.dtype} from {right.min()} to {right.max()}; the output has "
            f"{count} classes: give integers from 0 to {count - 1}, or {IGNORED} for none"
        )
    of = [np.bincount(x, minlength=count) for x in (right[predicted == right], predicted, right)]
    return of[0][None], (of[1] + of[2])[None]


def numbers(output: Array, labels: Array) -> Pair:
    """All numbers of both, as float64."""
    if output.shape != labels.shape:
        raise GraphgenError(
            f"a metric of numbers: the output is {[*output.shape]} and the labels "
            f"{[*labels.shape]}; they must have one shape"
        )
    return output.reshape(-1).astype(np.float64), labels.reshape(-1).astype(np.float64)


def accuracy(predicted: Array, labels: Array) -> float:
    """The share of labels that were predicted."""
    return float((predicted == labels).mean())


def f1(hits: Array, counts: Array) -> float:
    """2 TP / (2 TP + FP + FN): of class 1 of two, else the mean over the classes that occur."""
    hits, counts = hits.sum(0), counts.sum(0)
    wanted = np.arange(len(counts)) == 1 if len(counts) == 2 else counts > 0
    return float((2.0 * hits[wanted] / np.maximum(counts[wanted], 1)).mean())


def matthews(predicted: Array, labels: Array) -> float:
    """The correlation of classes, in -1 to 1; 0 if either has only one class (Gorodkin, 2004).

    (c s - Σ pₖ tₖ) / √((s² - Σ pₖ²) (s² - Σ tₖ²)), with s labels, of which c were predicted,
    pₖ predictions of class k, and tₖ labels of it.
    """
    kinds = np.union1d(predicted, labels)[:, None]
    p, t = (predicted == kinds).sum(1).astype(float), (labels == kinds).sum(1).astype(float)
    size, right = float(labels.size), float((predicted == labels).sum())
    below = math.sqrt((size**2 - (p**2).sum()) * (size**2 - (t**2).sum()))
    return float((right * size - (p * t).sum()) / below) if below else 0.0


def mse(predicted: Array, labels: Array) -> float:
    """mean((predicted - labels)²)."""
    return float(((predicted - labels) ** 2).mean())


def mae(predicted: Array, labels: Array) -> float:
    """mean(|predicted - labels|)."""
    return float(np.abs(predicted - labels).mean())


def pearson(predicted: Array, labels: Array) -> float:
    """The correlation of numbers, in -1 to 1; 0 if either is constant."""
    if not np.ptp(predicted) or not np.ptp(labels):
        return 0.0  # which the difference to a rounded mean would hide
    p, t = predicted - predicted.mean(), labels - labels.mean()
    below = math.sqrt(float(p @ p) * float(t @ t))
    return float(p @ t) / below if below else 0.0


def perplexity(loss: float) -> float:
    """exp(loss), of a mean cross-entropy."""
    return math.exp(loss) if loss < 709.0 else math.inf


OF_CLASSES = (classes, class_counts)
"""What needs to know where an output has its classes."""

NAMED: Mapping[str, Metric] = {
    "accuracy": Metric(accuracy, prepare=classes),
    "f1": Metric(f1, prepare=class_counts),
    "matthews": Metric(matthews, prepare=classes),
    "mse": Metric(mse, prepare=numbers, higher=False),
    "mae": Metric(mae, prepare=numbers, higher=False),
    "pearson": Metric(pearson, prepare=numbers),
    "perplexity": Metric(mse, "perplexity", higher=False, of_loss=perplexity),
}

AnyMetric: TypeAlias = str | Metric | Function


def read_metric(given: AnyMetric) -> Metric:
    """A metric: itself, one of `NAMED` as "NAME" or "NAME:OUTPUT", or a function of the user's.

    A function may be text, too: "module:function". Raises GraphgenError for anything else.
    """
    if isinstance(given, Metric):
        return given
    if callable(given):
        return Metric(given)
    name, _, rest = str(given).partition(":")
    if name in NAMED and isinstance(given, str):
        found = NAMED[name]
        label = found.name if not rest else f"{found.name}_{rest}"
        return Metric(**{**vars(found), "output": rest or None, "name": label})
    if not rest or not isinstance(given, str):
        raise GraphgenError(
            f"metric {given!r}: choose {', '.join(NAMED)}, one of these with the name of an output "
            f"(accuracy:logits), or module:function{near(name, NAMED)}"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")  # the folder where the command runs
    try:
        function = getattr(importlib.import_module(name), rest)
    except Exception as error:  # whatever the module raises
        raise GraphgenError(f"metric {given}: {type(error).__name__}: {error}") from error
    return read_metric(function)
