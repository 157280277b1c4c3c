"""What a step of training works on: flat buffers of all parameters, and sessions bound to them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.export.checkpoint import Checkpoint
from graphgen.export.optimizers import Optimizer, Setting
from graphgen.operands import Array
from graphgen.runtime import Bound, Buffer, Session
from graphgen.train.data import Batch

_CHUNK = 1 << 18
"""Elements in a part of the sum of squares."""


class State:
    """Parameters, gradients and moments: each kind is one flat buffer with a view per parameter."""

    def __init__(
        self,
        who: str,
        start: Checkpoint,
        names: tuple[str, ...],
        optimizer: Optimizer,
        *,
        summed: bool,
        averaged: bool = False,
    ) -> None:
        self._who, self.frozen, self._summed, self._unit = who, start.frozen, summed, 0.0
        self.pull: Callable[[], None] = lambda: None  # what is newer elsewhere, into the buffers
        if {*names} != {*start.trainable}:
            odd = min({*names} ^ {*start.trainable})
            raise GraphgenError(
                f"{who}: parameter {odd!r} is only in one of the checkpoint and the training "
                "model; write the artifacts again"
            )
        # The sort is stable: groups keep their order.
        settings = {name: optimizer.setting(name) for name in names}
        names = tuple(sorted(names, key=lambda n: (-settings[n].weight_decay, -settings[n].rate)))
        shapes = {name: start.trainable[name].shape for name in names}
        starts = [0]
        for shape in shapes.values():  # each on a cache line of 64 bytes
            starts.append(starts[-1] + -(-math.prod(shape) // 16) * 16)
        kinds = ("p", *optimizer.moments, *(["e"] if averaged else []), "g")
        self._flat = {kind: np.zeros(starts[-1], np.float32) for kind in kinds}
        self._bounds = dict[Setting, tuple[int, int]]()
        for name, (at, end) in zip(names, pairwise(starts), strict=True):
            first, _ = self._bounds.get(settings[name], (at, end))
            self._bounds[settings[name]] = first, end
        self._views = {
            kind: {
                name: flat[at : at + math.prod(shape)].reshape(shape)
                for at, (name, shape) in zip(starts, shapes.items(), strict=False)
            }
            for kind, flat in self._flat.items()
        }
        self._weights = self._views["p"] | self.frozen

    @property
    def views(self) -> dict[str, dict[str, Array]]:
        """By kind and name: the parameters p, the gradients g, moments m, v and averages e."""
        self.pull()
        return self._views

    @property
    def weights(self) -> dict[str, Array]:
        """The parameters, the frozen ones last."""
        self.pull()
        return self._weights

    @property
    def settings(self) -> Iterable[Setting]:
        """What the parameters are updated with."""
        return self._bounds.keys()

    def chunks(self, size: int = _CHUNK) -> Iterator[tuple[Setting, dict[str, Array]]]:
        """Slices of all buffers, by kind; they may cross the end of a parameter.

        Those of parameters with one setting come together, and with it.
        """
        self.pull()
        for setting, (start, end) in self._bounds.items():
            for at in range(start, end, size):
                piece = slice(at, min(at + size, end))
                yield setting, {kind: flat[piece] for kind, flat in self._flat.items()}

    def swap(self) -> None:
        """Exchange the parameters and their averages."""
        for _, chunk in self.chunks():
            p = chunk["p"].copy()
            chunk["p"][...], chunk["e"][...] = chunk["e"], p

    def begin(self, some: bool) -> None:
        """Call this before the batches of an update; `some` says whether there are any."""
        self._unit = 0.0
        if self._summed or not some:
            self._flat["g"].fill(0.0)

    def weigh(self, share: float) -> None:
        """Call this before unscaled gradients of a batch, which count for a `share`, are added."""
        if self._unit not in (0.0, share):
            self._flat["g"] *= np.float32(self._unit / share)
        self._unit = share

    def end(self) -> Array:
        """Call this after the batches of an update; it returns all gradients."""
        self.weigh(1.0)
        return self._flat["g"]

    def gradient_norm(self) -> float:
        """The Euclidean norm of all gradients together; finite only if they all are."""
        return math.sqrt(sum(float(np.vdot(c["g"], c["g"])) for _, c in self.chunks()))

    def moments(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """momentum0 and momentum1; the official runtime wants a momentum0 for SGD too."""
        if "m" in self.views:
            return self.views["m"], self.views.get("v", {})
        return {name: np.zeros_like(array) for name, array in self.views["p"].items()}, {}

    def restore(self, saved: Checkpoint) -> None:
        """Copy a checkpoint's tensors into the buffers; moments that it lacks are 0.

        Averages that it lacks begin at its parameters.
        """
        tensors = {"p": saved.trainable, "e": saved.trainable}
        if saved.optimizer is not None:
            tensors |= {"m": saved.optimizer.momentum0, "v": saved.optimizer.momentum1}
            tensors |= {"e": saved.optimizer.average or saved.trainable}
        for kind in {"m", "v"} & self._flat.keys() - tensors.keys():
            if self._flat[kind].any():  # untouched pages take no memory yet
                self._flat[kind].fill(0.0)
        for kind, views in self.views.items():
            for name, view in views.items() if kind in tensors else ():
                array = tensors[kind].get(name)
                if array is None or array.shape != view.shape or array.dtype != view.dtype:
                    found = "missing" if array is None else f"{array.dtype}{list(array.shape)}"
                    raise GraphgenError(
                        f"{self._who}: {name} is {found} in the checkpoint, but float32"
                        f"{list(view.shape)} in the model; resume with the folder it was made with"
                    )
                view[...] = array


class Feeder:
    """A session with its weights bound, run on one batch after another."""

    def __init__(
        self,
        session: Session,
        weights: Mapping[str, Array],
        placed: Mapping[str, Buffer],  # the same where the session reads them
        outputs: Mapping[str, Buffer],
        find: Callable[[Mapping[str, Array]], str | None],
    ) -> None:
        self.session, self._weights, self._placed = session, weights, placed
        self._outputs, self._find = outputs, find
        self._key: object = None
        self._buffers: dict[str, Array] = {}
        self._bound: Bound | None = None

    def __call__(self, batch: Batch, own: Mapping[str, Array]) -> list[Array]:
        """Return the outputs, and fill those with buffers. Batches of one shape share buffers."""
        batch = self._arrays(batch, own)
        key = {name: (array.dtype, array.shape) for name, array in batch.items()}
        if self._bound is None or key != self._key:
            buffers = {name: np.array(array, order="C") for name, array in batch.items()}
            self._bound = self.session.bind({**self._placed, **buffers}, self._outputs)
            self._key, self._buffers = key, buffers
        for name, array in batch.items():
            np.copyto(self._buffers[name], array)
        return self._bound()

    def blame(self, batch: Batch, own: Mapping[str, Array]) -> str | None:
        """What is not finite first with this batch, if anything; its gradients start at 0."""
        for gradient in self._outputs.values():
            if isinstance(gradient, np.ndarray):
                gradient.fill(0.0)
        return self._find({**self._weights, **self._arrays(batch, own)})

    def _arrays(self, batch: Batch, own: Mapping[str, Array]) -> dict[str, Array]:
        """The batch and, if the model has such inputs, numbers of our `own`."""
        inputs = self.session.inputs.keys() - self._weights.keys()  # which may have their names
        numbers = {n: number for n, number in own.items() if n in inputs}
        return {**numbers, **{name: np.asarray(array) for name, array in batch.items()}}
