"""Held-out data through the evaluation model: its mean loss, predictions and metrics."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from graphgen.errors import GraphgenError, near, user_line
from graphgen.export.named_losses import IGNORED
from graphgen.operands import Array
from graphgen.train.batches import named, none_given, stream
from graphgen.train.data import Batch, Batches, Dataset
from graphgen.train.engine import Engine
from graphgen.train.metrics import OF_CLASSES, AnyMetric, Metric, Pair, joined, read_metric
from graphgen.train.shares import Weights


class Evaluated(NamedTuple):
    """One batch: for how much it counts, its loss and some outputs."""

    number: int
    batch: Batch
    weights: Weights
    loss: float
    outputs: dict[str, Array]


class Metrics(tuple[Metric, ...]):
    """The metrics of an evaluation, each with another name, and the outputs that they read."""

    def __new__(cls, given: Sequence[AnyMetric], engine: Engine) -> "Metrics":
        """Raises GraphgenError for one that is unknown, or reads what the artifacts do not keep."""
        found = super().__new__(cls, map(read_metric, given))
        names = ["loss", *(metric.name for metric in found)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise GraphgenError(f"{engine.who}: two metrics are called {twice[0]}; rename one")
        if found and engine.processes.size > 1:
            raise GraphgenError(
                f"{engine.who}: metrics need all predictions in one process, and there are "
                f"{engine.processes.size}: train without them, and measure afterwards"
            )
        for metric in found:
            if metric.of_loss is not None and engine.shares.are_sums:
                raise GraphgenError(
                    f"{engine.who}: {metric.name} is of a loss that is a mean, and this one is a "
                    "sum over all samples: divide it by how many there are"
                )
            if metric.of_loss is None:
                output_of(metric.output, engine, f"metric {metric.name}")
                if metric.labels not in engine.inputs:
                    raise GraphgenError(
                        f"{engine.who}: metric {metric.name} wants the labels {metric.labels!r}; "
                        f"the inputs are {', '.join(engine.inputs)}: name one in a Metric"
                    )
        return found

    def higher(self, best: str) -> bool:
        """Whether more of the metric `best`, or of "loss", is better."""
        names = {"loss": False} | {metric.name: metric.higher for metric in self}
        if best not in names:
            raise GraphgenError(
                f"best is {best!r}; choose {', '.join(names)}{near(best, names)}{user_line()}"
            )
        return names[best]


def output_of(name: str | None, engine: Engine, wanted_by: str) -> str:
    """An output that the evaluation can return: the only one if it is not named."""
    outputs = engine.outputs
    if name is None and len(outputs) == 1:
        return outputs[0]
    if name not in outputs:
        several = f"there are {', '.join(outputs)}" if outputs else "the artifacts keep none"
        raise GraphgenError(
            f"{engine.who}: {wanted_by} needs an output to predict with, and {several}"
            f"{near(name, outputs)}: name one of these, or write the artifacts again with outputs="
        )
    return name


def evaluated(
    engine: Engine, batches: Batches, outputs: tuple[str, ...] = (), *, all_rows: bool = False
) -> Iterator[Evaluated]:
    """Each batch through the evaluation model; those without labels that count only if `all_rows`.

    Raises GraphgenError where it is not known for how much a batch counts.
    """
    if isinstance(batches, Dataset):
        batches.check(engine.labels)
    number = -1
    for number, given in enumerate(stream(batches)):
        whole = named(given, engine.inputs, f"{engine.who}: batch {number}")
        batch, count = engine.own_part(whole, number)
        weights = (count,) if all_rows else engine.shares.weights(batch, number, count)
        if number and not all_rows:
            engine.shares.check_known(weights, number)
        if any(weights) or all_rows:
            loss, arrays = engine.predict(batch, number, outputs, checked=any(weights))
            found = dict(zip(outputs, arrays, strict=True))
            yield Evaluated(number, batch, weights, loss, found)
    if number < 0:
        raise none_given(f"{engine.who}.evaluate")


def mean_loss(engine: Engine, batches: Batches) -> float:
    """The loss of all batches as one."""
    return _joined(
        engine, {one.number: (one.weights, one.loss) for one in evaluated(engine, batches)}
    )


def measure(engine: Engine, batches: Batches, metrics: Metrics) -> dict[str, float]:
    """`loss`, that of all batches as one, and each metric by its name."""
    read = {m: output_of(m.output, engine, m.name) for m in metrics if m.of_loss is None}
    outputs = tuple(name for name in engine.outputs if name in read.values())
    kept: dict[tuple[object, ...], list[Pair]] = {}  # metrics may share what they keep
    keys = {metric: (output, metric.labels, metric.prepare) for metric, output in read.items()}
    losses = dict[int, tuple[Weights, float]]()
    for one in evaluated(engine, batches, outputs):
        losses[one.number] = one.weights, one.loss
        for output, labels, prepare in dict.fromkeys(keys.values()):
            pair = one.outputs[output], np.asarray(one.batch[labels])
            pair = _as_in_loss(engine, labels, *pair) if prepare in OF_CLASSES else pair
            pair = pair if prepare is None else prepare(*pair)
            kept.setdefault((output, labels, prepare), []).append(pair)
    loss = _joined(engine, losses)
    found = {"loss": loss}
    for metric in metrics:
        found[metric.name] = metric.value(loss, kept[keys[metric]] if metric in keys else [])
    return found


def _as_in_loss(engine: Engine, name: str, output: Array, labels: Array) -> Pair:
    """Classes last, wherever the loss has them, and -100 for the label that it ignores."""
    axis, kind = engine.loss.get("axes", {}).get(name), engine.labels.get(name)
    if output.ndim == labels.ndim + 1:
        sizes = output.shape
        fitting = [a for a in range(1, len(sizes)) if sizes[:a] + sizes[a + 1 :] == labels.shape]
        if axis is None and len(fitting) > 1:
            raise GraphgenError(
                f"{engine.who}: the output is {[*output.shape]} and {name} are {[*labels.shape]}: "
                f"classes may be along its axes {fitting}, and it is not known which the loss "
                "takes: write the artifacts with gg.Loss('cross_entropy', axis=...)"
            )
        output = np.moveaxis(output, (fitting or [-1])[0] if axis is None else axis, -1)
    if kind is not None and kind.ignored not in (None, IGNORED) and output.ndim > labels.ndim:
        labels = np.where(labels == kind.ignored, IGNORED, labels)
    return output, labels


def predictions(
    engine: Engine, batches: Batches, outputs: Sequence[str] | None
) -> dict[str, Array]:
    """Outputs for all rows, by name; None stands for all that the evaluation can return."""
    if engine.processes.size > 1:
        raise GraphgenError(f"{engine.who}: predictions need one process, which has all samples")
    names: Sequence[str | None] = engine.outputs if outputs is None else outputs
    wanted = tuple(output_of(name, engine, "predict") for name in names or (None,))
    found = [one.outputs for one in evaluated(engine, batches, wanted, all_rows=True)]
    return {name: joined([one[name] for one in found], 0) for name in wanted}


def _joined(engine: Engine, losses: Mapping[int, tuple[Weights, float]]) -> float:
    """The loss of all batches as one, from the weights and the losses of this process's."""
    shares = engine.shares.of({number: weights for number, (weights, _) in losses.items()})
    total = sum(share * loss for share, (_, loss) in zip(shares, losses.values(), strict=True))
    total, whole = engine.processes.sum(total, sum(shares))
    if not whole:
        raise GraphgenError(
            f"{engine.who}.evaluate: no batch has a label that counts: all are {IGNORED}"
        )
    return total
