"""The engine of training: sessions and buffers of one folder, with which each step is made.

`Trainer` runs it over batches; `TrainingSession` gives each part of a step to its caller.
"""

import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from graphgen.errors import GraphgenError, check_seed, user_line
from graphgen.export.adapters import LORA, Adapter
from graphgen.export.artifact_files import CHECKPOINT
from graphgen.export.checkpoint import Checkpoint, OptimizerState
from graphgen.export.named_losses import IGNORED, LABELS
from graphgen.export.optimizers import Setting, clip_scale
from graphgen.export.precision import LOSS_SCALE, LossScale, check_device
from graphgen.export.trained import BASE, parameters_of
from graphgen.operands import Array
from graphgen.runtime import Provider, return_memory
from graphgen.train.batches import own_part
from graphgen.train.data import Batch, LabelKind, check_rows, weight_of
from graphgen.train.in_place import CHUNK, InPlace
from graphgen.train.lower import lower, making, returning
from graphgen.train.opening import Opening
from graphgen.train.parallel import Processes
from graphgen.train.schedule import Schedule
from graphgen.train.shares import Shares
from graphgen.train.state import Feeder, State

_LARGE = 1 << 22
"""Bytes of weights from which on it pays to return the memory that opening took."""


class NotFiniteError(GraphgenError):
    """A loss or a gradient is NaN or infinite; nothing was updated."""


class Engine:
    """The models of a folder of artifacts, opened on buffers of all parameters and gradients.

    A step is `state.begin`, `add_gradients` of each batch, `state.end`, `norm`, `update`:
    `one_update` makes it.
    """

    def __init__(
        self,
        who: str,
        directory: Path,
        *,
        accumulate: int | None,
        ema: float | None = None,
        seed: int,
        threads: int | None,
        provider: Provider | None,
        strict: bool,
        processes: Processes,
    ) -> None:
        check_seed(who, seed)
        self._lower = functools.partial(lower, directory, cpu=provider in (None, "auto", "cpu"))
        program, start = self._lower(accumulate), Checkpoint.load(directory / CHECKPOINT)
        self.who, self.seed, self.step, self.processes = who, seed, 0, processes
        self.directory, self.ema, self._swapped = directory, ema, False
        if ema is not None and not 0.0 < ema < 1.0:
            raise GraphgenError(f"{who}: ema is {ema!r}; it must be between 0 and 1{user_line()}")
        self.optimizer, self.loss, self.digest = program.optimizer, program.loss, program.digest
        self.outputs: list[str] = program.loss.get("outputs", [])
        found: dict[str, list[Any]] = program.loss.get("labels", {})
        if "classes" in program.loss:  # plain cross-entropy
            found = {LABELS: [program.loss["classes"], IGNORED]}
        self.labels = {name: LabelKind(*entry) for name, entry in found.items()}
        self._tables = program.tables
        self.statistics: dict[str, str] = program.loss.get("statistics", {})
        if self.statistics and processes.size > 1:
            raise GraphgenError(
                f"{who}: each batch moves {min(self.statistics)}, and {processes.size} processes "
                f"have different parts of a batch: train in one{user_line()}"
            )
        start.frozen |= {n: start.frozen[n].copy() for n in self.statistics if n in start.frozen}
        self.accumulate = program.accumulate
        if self.accumulate < 1:
            raise GraphgenError(
                f"{who}: accumulate is {accumulate}; it must be at least 1{user_line()}"
            )
        self.state = State(
            who,
            start,
            program.trainable,
            self.optimizer,
            summed=self.accumulate > 1,
            averaged=ema is not None,
        )
        self._open = Opening(
            who,
            self.state,
            self.optimizer,
            program.gradients,
            alone=processes.size == 1,
            provider=provider,
            strict=strict,
            threads=threads,
        )
        self._there = self._open.there
        self.scale = LossScale.of(program.loss)
        if (dtype := program.loss.get("dtype", "fp32")) != "fp32":
            check_device(who, dtype, self._open.device)
        self._train = self._open(program.training, program.gradients, summed=self.accumulate > 1)
        own = {"seed", "step", LOSS_SCALE, *self.state.weights, *program.gradients}
        self.inputs = {n: t for n, t in self._train.session.inputs.items() if n not in own}
        self._evaluation = program.evaluation
        self._evaluators: dict[tuple[str, ...], Feeder] = {(): self._open(program.evaluation)}
        evaluation = program.evaluation  # and not the program, which is large
        self.shares = Shares(
            who,
            program.loss,
            self.inputs,
            self.labels,
            processes,
            lambda names: self._open(making(evaluation, names, who)),
        )
        self.device = self._train.session.plan.device
        scaled = self.scale.dynamic or self.optimizer.clip_norm is not None
        numbers = [*self.optimizer.scalars(0.0, 1, Setting(1.0, 0.0)), *(["scale"] * scaled)]
        self._update = InPlace(self.optimizer.update, ["p", "g", *self.optimizer.moments], numbers)
        # Threads of chunks, not within passes, which is faster (docs/benchmarks.md).
        count, chunks = threads or os.cpu_count() or 1, [*self.state.chunks(CHUNK)]
        self._shares = [chunks[i::count] for i in range(count)]
        self._pools: dict[int, ThreadPoolExecutor] = {}  # by process: a fork has no threads
        self.plan = {
            "training": json.loads(self._train.session.plan.json()),
            "optimizer": repr(self.optimizer),
            "seed": seed,
            **({} if ema is None else {"ema": ema}),
        }
        self._properties = {n: v for n, v in start.properties.items() if n in (LORA, BASE)}
        self.restore(start)
        del start, program
        if sum(array.nbytes for array in self.state.weights.values()) > _LARGE:
            return_memory()

    @property
    def parameters(self) -> dict[str, Array]:
        """Copies of all parameters by name, the frozen ones last; integers of those in few bits."""
        return {name: array.copy() for name, array in self.state.weights.items()}

    @property
    def adapter(self) -> Adapter | None:
        """What is trained of artifacts with `lora`."""
        return Adapter.of(Checkpoint(self.parameters, properties=self._properties), self.who)

    def floats(self) -> dict[str, Array]:
        """All parameters by name, those in few bits as the numbers that they stand for."""
        saved = Checkpoint(self.state.weights, properties=self._properties)
        return parameters_of(saved, self.who)

    def own_part(self, batch: Batch, number: int) -> tuple[Batch, float]:
        """The part of a batch for this process, and how many labels it counts for."""
        who = f"{self.who}: batch {number}"
        own = own_part(batch, self.inputs, self.processes, who)
        name = next(iter(self.labels), LABELS)
        rows = len(batch[name]) if self.processes.rank and name in batch else 0
        first = rows * self.processes.rank // self.processes.size
        return own, weight_of(own, self.labels, who, first)

    def add_gradients(
        self, batch: Batch, number: int, site: int, share: float = 1.0, *, more: bool = False
    ) -> float:
        """The loss of a batch, of which a `share` of the gradients is added to those before.

        Without `accumulate`, they replace those before, unless `more`. `site` is what dropout
        depends on, beside the seed.
        """
        self.state.weigh(share)
        feeder = self._adding if more else self._train
        if more:
            self.state.pull()
        results = self._run(feeder, batch, number, site)
        if self._there is not None and not more and self.accumulate == 1:
            self._there.made_there("g")
        if self.statistics:
            made = dict(zip(feeder.session.outputs, results, strict=True))
            moved = {name: made[output] for name, output in self.statistics.items()}
            for name, array in moved.items():
                if not np.isfinite(array).all():
                    cause = f"{name} is not finite: the norm needs more than one value per channel"
                    raise self.stop("statistic", number, cause)
            self._put(moved)
        return _number(results[0])

    def _put(self, statistics: Mapping[str, Array]) -> None:
        """Set running statistics, which both models read."""
        for name, array in statistics.items():
            np.copyto(self.state.frozen[name], array)
        self.send({name: self.state.frozen[name] for name in statistics})

    @contextmanager
    def _undoing(self) -> Iterator[Callable[[], None]]:
        """A function that sets running statistics back, and is called if an error ends this."""
        before = {name: self.state.frozen[name].copy() for name in self.statistics}
        undo = functools.partial(self._put, before)
        try:
            yield undo
        except BaseException:
            undo()
            raise

    @cached_property
    def _adding(self) -> Feeder:
        """The training model that adds to the gradients before, opened when it is first used."""
        if self.accumulate > 1:
            return self._train
        program = self._lower(2)
        if program.digest != self.digest:
            raise GraphgenError(
                f"{self.who}: {self.directory} was written again meanwhile; open it again"
            )
        return self._open(program.training, program.gradients, summed=True)

    def evaluate(self, batch: Batch, number: int) -> float:
        """The loss of a batch without dropout."""
        return self.predict(batch, number, ())[0]

    def predict(
        self, batch: Batch, number: int, outputs: tuple[str, ...], *, checked: bool = True
    ) -> tuple[float, list[Array]]:
        """The loss of a batch without dropout, and some of `outputs`.

        Raises GraphgenError for a loss that is not finite, if `checked`.
        """
        if outputs not in self._evaluators:
            model = returning(self._evaluation, outputs, self.who)
            self._evaluators[outputs] = self._open(model)
        loss, *others = self._run(self._evaluators[outputs], batch, number, 0, checked)
        return _number(loss), others[: len(outputs)]  # the file itself may return more

    def one_update(self, group: Sequence[Batch], number: int, rate: Schedule) -> dict[str, float]:
        """One update from batches, from `number` on: that of all as one batch.

        Returns the metrics of the step. Raises GraphgenError where nothing counts, or a loss, a
        gradient or the rate of the step is not finite; nothing is updated then.
        """
        with self._undoing() as undo:
            return self._one_update(group, number, rate, undo)

    def _one_update(
        self, group: Sequence[Batch], number: int, rate: Schedule, undo: Callable[[], None]
    ) -> dict[str, float]:
        parts = [self.own_part(batch, number + i) for i, batch in enumerate(group)]
        own, counts = zip(*parts, strict=True)
        shares = self.shares.of_update(own, counts, number)
        [whole] = self.processes.sum(sum(shares))
        if not whole:
            raise GraphgenError(
                f"{self.who}: batch {number}: there is nothing to learn from: it has no samples, "
                f"or every label is {IGNORED}"
            )
        loss = 0.0
        self.state.begin(any(shares))
        first, size = self.step * self.accumulate, self.processes.size
        sites = [(first + i) * size + self.processes.rank for i in range(len(own))]
        for i, (batch, share) in enumerate(zip(own, shares, strict=True)):
            if share:
                loss += share * self.add_gradients(batch, number + i, sites[i], share)
        [loss] = self.processes.sum(loss)
        self.processes.reduce(self.state.end())
        norm = self.norm()
        if not self.scale.made(norm):
            undo()
            return self._one_update(group, number, rate, undo)  # with a smaller loss scale
        if not math.isfinite(norm):
            self.state.pull()
            for i, share in enumerate(shares):
                if share and (cause := self._train.blame(own[i], self._own(sites[i]))):
                    raise self.stop(f"gradient's norm is {norm:g}", number + i, cause)
            self.processes.sum(0.0)  # if another process has the cause, it ends this one here
            raise self.stop(f"gradient's norm is {norm:g}", number, None)
        now = rate(self.step + 1)
        check_rate(self.who, now, f"at step {self.step + 1} the schedule gives")
        self.update(now, norm)
        return {"step": self.step, "loss": loss, "learning_rate": now, "gradient_norm": norm}

    def norm(self) -> float:
        """The Euclidean norm of all gradients together; finite only if they all are."""
        if self._there is not None and self._there.is_newer("g"):
            return self._there.norm() / self.scale.value
        return self.state.gradient_norm() / self.scale.value

    def update(self, rate: float, norm: float) -> None:
        """Update all parameters by their gradients, whose norm this is, at a learning rate."""
        self.step += 1
        scale = clip_scale(norm, self.optimizer.clip_norm) / self.scale.value
        self.scale.count()
        numbers = {
            setting: {
                name: np.float32(number)
                for name, number in self.optimizer.scalars(rate, self.step, setting).items()
            }
            | {"scale": np.float32(scale)}
            for setting in self.state.settings
        }
        kept = 0.0 if self.ema is None else min(self.ema, (1 + self.step) / (10 + self.step))
        if self._there is not None:
            if not self._there.is_newer("g"):
                self._there.send("g")
            self._there.update(numbers, 1.0 - kept)
            return

        def update(share: Sequence[tuple[Setting, Mapping[str, Array]]]) -> None:
            spare = self._update.spare()
            for setting, chunk in share:
                self._update(chunk, numbers[setting], spare)
                if (average := chunk.get("e")) is not None:
                    average += np.float32(1.0 - kept) * (chunk["p"] - average)

        if (process := os.getpid()) not in self._pools:
            self._pools[process] = ThreadPoolExecutor(len(self._shares))
        for _ in self._pools[process].map(update, self._shares):
            pass  # only to raise what an update raised
        self.send(self.state.views["p"])

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Meanwhile, the parameters are their moving averages, if these are kept."""
        if self.ema is None:
            yield
            return
        self._swap(True)
        try:
            yield
        finally:
            self._swap(False)

    def _swap(self, swapped: bool) -> None:
        self._swapped = swapped
        self.state.swap()
        self._send_state()

    def stop(self, what: str, number: int | None, cause: str | None) -> NotFiniteError:
        """The error for a loss or gradient that is not finite, in a batch, from a cause."""
        where = "" if number is None else f" in batch {number},"
        return NotFiniteError(
            f"{self.who}: at step {self.step + 1} the {what}:{where} "
            f"{cause or 'each value is finite'}; look at the data, lower the learning rate or set "
            "clip_norm"
        )

    def send(self, parameters: Mapping[str, Array]) -> None:
        """Copy parameters that have changed to the device."""
        self._open.send(parameters)

    def _send_state(self) -> None:
        """Copy all that `state` holds but gradients to the device."""
        if self._there is None:
            self.send(self.state.views["p"])
        else:
            self._there.send(self._there.buffers.keys() - {"g"})

    def restore(self, saved: Checkpoint) -> None:
        """Go on from a checkpoint."""
        self.state.restore(saved)
        self._put({n: saved.frozen[n] for n in self.statistics if n in saved.frozen})
        self._send_state()
        self.scale.restore(saved.properties)
        self.step = 0 if saved.optimizer is None else saved.optimizer.step

    def checkpoint(self, rate: float, properties: Mapping[str, int | float | str]) -> Checkpoint:
        """All that `restore` needs, at a learning rate and with further properties."""
        average = {} if self._swapped else self.state.views.get("e", {})
        state = OptimizerState(self.step, rate, *self.state.moments(), average)
        kept = {**properties, **self._properties, **self.scale.properties()}
        return Checkpoint(self.state.views["p"], self.state.frozen, state, kept)

    def unchanged(self) -> list[Array]:
        """The frozen parameters that no step changes, as each `checkpoint` has them."""
        return [x for name, x in self.state.frozen.items() if name not in self.statistics]

    def copied(self) -> Checkpoint:
        """A checkpoint of copies: what comes after it does not change it."""
        saved = self.checkpoint(0.0, {})
        assert saved.optimizer is not None
        kept = (saved.optimizer.momentum0, saved.optimizer.momentum1, saved.optimizer.average)
        moments = [{n: a.copy() for n, a in one.items()} for one in kept]
        state = OptimizerState(self.step, 0.0, *moments)
        own = {n: a.copy() for n, a in saved.trainable.items()}
        frozen = saved.frozen | {n: saved.frozen[n].copy() for n in self.statistics}
        return Checkpoint(own, frozen, state, saved.properties)

    def other_frozen(self, saved: Checkpoint) -> str | None:
        """The last frozen parameter that a checkpoint has otherwise, or that only one has."""
        found, frozen = None, self.state.frozen
        for name in sorted((frozen.keys() | saved.frozen.keys()) - self.statistics.keys()):
            one, other = saved.frozen.get(name), frozen.get(name)
            if one is None or other is None or one.tobytes() != other.tobytes():
                found = name
        return found

    def _run(
        self, feeder: Feeder, batch: Batch, number: int, site: int, checked: bool = True
    ) -> list[Array]:
        for name in self._tables.keys() & batch.keys():
            check_rows(batch[name], self._tables[name], f"{self.who}: batch {number}: {name}")
        try:
            results = feeder(batch, self._own(site))
        except GraphgenError as error:
            reason = str(error).split(": ", 1)[-1]
            raise GraphgenError(f"{self.who}: batch {number}: {reason}") from error
        if checked and not math.isfinite(loss := _number(results[0])):
            self.state.pull()
            cause = feeder.blame(batch, self._own(site))
            evaluated = feeder in self._evaluators.values()
            what = "loss of the evaluation before it" if evaluated else "loss"
            raise self.stop(f"{what} is {loss:g}", number, cause)
        return results

    def _own(self, site: int) -> dict[str, Array]:
        numbers = {"seed": np.asarray(self.seed, np.int64), "step": np.asarray(site, np.int64)}
        return numbers | {LOSS_SCALE: np.asarray(self.scale.value, np.float32)}


def _number(loss: Array) -> float:
    return float(np.asarray(loss).reshape(()))


def check_rate(who: str, rate: Any, what: str) -> None:
    """Raise for a learning rate that is not finite, or below 0; `what` says where it is from."""
    if not isinstance(rate, int | float | np.floating) or not 0.0 <= rate < math.inf:
        raise GraphgenError(
            f"{who}: {what} {rate}; a learning rate is finite and at least 0{user_line()}"
        )
