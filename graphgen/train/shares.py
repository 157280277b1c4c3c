"""For how much each batch counts where several make one loss: in an update, in an evaluation.

The loss of joined batches is Σ w l / Σ w. The weights w are what the loss divides its sum by, as
the artifacts say; for losses by name, and in folders that do not say it, the number of labels that
count. Losses that are sums add up.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.export.named_losses import IGNORED, LABELS
from graphgen.plan import TensorType
from graphgen.train.batches import is_divided
from graphgen.train.data import Batch, Labels, is_sure
from graphgen.train.parallel import Processes
from graphgen.train.state import Feeder

_ROUNDING = 1e-6
"""How far the shares of a batch may be apart: sums of float32 weights are rounded."""

Weights = tuple[float, ...]
"""For how much a batch counts in each part of a loss; NaN where that is not known."""


class Shares:
    """Weighs batches of one loss, and turns their weights into shares.

    `described` is what the artifacts say about the loss, `open_weights` gives a feeder of values of
    the evaluation model, by name.
    """

    def __init__(
        self,
        who: str,
        described: dict[str, Any],
        inputs: Mapping[str, TensorType],
        labels: Labels,
        processes: Processes,
        open_weights: Callable[[Sequence[str]], Feeder],
    ) -> None:
        self._who, self._labels, self._processes = who, labels, processes
        self._inputs, self._open_weights = inputs, open_weights
        self._by_labels = "weights" not in described
        given: Sequence[str | float] | None = described.get("weights", [])
        self._unknown, self._given = given is None, list(given or ())
        self.are_sums = not (self._by_labels or self._unknown or self._given)

    def weights(self, batch: Batch, number: int, count: float) -> Weights:
        """The weights of a batch with so many labels. Of losses that add up, each counts for 1."""
        if self._by_labels:
            return (count if is_sure(batch, self._labels) else math.nan,)
        if self._unknown:
            return (math.nan,)
        if any(array.ndim and not len(array) for array in map(np.asarray, batch.values())):
            return (0.0,) * max(1, len(self._given))
        if self.are_sums:
            return (1.0,)
        if self._processes.size > 1 and not self._is_divided:
            raise GraphgenError(
                f"{self._who}: the weight of the loss depends on no input that "
                f"{self._processes.size} processes divide: train in one, or let the function of "
                "the loss return a weight that adds up, such as how many labels count"
            )
        names = [weight for weight in self._given if isinstance(weight, str)]
        known = dict(zip(names, self._calculated(batch, number) if names else (), strict=True))
        found = tuple(known[x] if isinstance(x, str) else x for x in self._given)
        for weight in found:
            if weight < 0.0 or math.isinf(weight):
                raise GraphgenError(
                    f"{self._who}: batch {number}: the weight of its loss is {weight:g}; it must "
                    "be finite and at least 0"
                )
        return found

    def of_update(
        self, batches: Sequence[Batch], counts: Sequence[float], first: int
    ) -> list[float]:
        """The shares of the batches of an update, numbered from `first`, with so many labels."""
        if len(batches) == self._processes.size == 1:
            return [float(bool(counts[0]))]
        numbered = enumerate(zip(batches, counts, strict=True), first)
        return self.of({n: self.weights(batch, n, count) for n, (batch, count) in numbered})

    def of(self, batches: Mapping[int, Weights]) -> list[float]:
        """The shares of batches, by their numbers, with these weights: 1 in all processes.

        Where losses add up, each is 1. Raises GraphgenError where weights are not known, or a batch
        has not the same share of each part of the loss.
        """
        weights = [*batches.values()]
        if self.are_sums:
            return [weight for (weight,) in weights]
        if len(weights) == self._processes.size == 1:
            return [float(any(weights[0]))]  # also of NaN
        for number, found in batches.items():
            self.check_known(found, number)
        kinds = range(max(1, len(self._given)))
        sums = self._processes.sum(*(sum(found[i] for found in weights) for i in kinds))
        counted = [i for i in kinds if sums[i]]
        shares = [[found[i] / sums[i] for i in counted] or [0.0] for found in weights]
        for number, own in zip(batches, shares, strict=True):
            if max(own) - min(own) > _ROUNDING * max(own):
                raise GraphgenError(
                    f"{self._who}: batch {number} is {min(own):.3g} of what one part of the loss "
                    f"counts, and {max(own):.3g} of another's, so no mean over batches is the "
                    "loss of all: let it return (loss, weight) to say which one to take, or give "
                    "one joined batch"
                )
        return [own[0] for own in shares]

    def check_known(self, weights: Weights, number: int) -> None:
        """Raise if it is not known for how much a batch counts, as a mean over batches needs."""
        if not any(map(math.isnan, weights)):
            return
        if not self._by_labels:
            raise GraphgenError(
                f"{self._who}: batch {number}: it is not known for how much it counts in a mean "
                "over batches: let the function of the loss return (loss, weight), of which weight "
                "is what it divides its sum by, or give one joined batch"
            )
        raise GraphgenError(
            f"{self._who}: batch {number}: the loss leaves out some of "
            f"{', '.join(self._labels) or LABELS}, or they are {IGNORED}, so it is not known how "
            "many count for the mean over batches: write the artifacts again, or give one joined "
            "batch"
        )

    def _calculated(self, batch: Batch, number: int) -> list[float]:
        """The weights that are values of the evaluation model."""
        inputs = self._feeder.session.inputs
        try:
            found = self._feeder({n: a for n, a in batch.items() if n in inputs}, {})
        except GraphgenError as error:
            reason = str(error).split(": ", 1)[-1]
            raise GraphgenError(f"{self._who}: batch {number}: {reason}") from error
        return [float(np.reshape(x, ())) for x in found]

    @cached_property
    def _is_divided(self) -> bool:
        """Whether what processes divide changes the weights."""
        names = any(isinstance(weight, str) for weight in self._given)
        inputs = self._feeder.session.inputs if names else ()
        return any(is_divided(name, self._inputs) for name in inputs)

    @cached_property
    def _feeder(self) -> Feeder:
        return self._open_weights([x for x in self._given if isinstance(x, str)])
