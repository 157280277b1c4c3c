"""Training from a folder of artifacts on the stock runtime: the model's code is not needed."""

import contextlib
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from graphgen.display import fields, on_screen
from graphgen.errors import GraphgenError, one_of, positive, user_line, warn
from graphgen.export.adapters import LORA, Adapter
from graphgen.export.artifacts import CHECKPOINT
from graphgen.export.checkpoint import Checkpoint, OptimizerState
from graphgen.export.named_losses import IGNORED, LABELS
from graphgen.export.optimizers import clip_scale, in_short
from graphgen.export.precision import LOSS_SCALE, LossScale, check_device
from graphgen.export.trained import BASE, export_trained, parameters_of
from graphgen.graph import ModelLike
from graphgen.operands import Array
from graphgen.runtime import Provider, Session, return_memory
from graphgen.train.data import (
    Batch,
    Batches,
    Dataset,
    LabelKind,
    Place,
    describe,
    is_sure,
    length,
    own_part,
    stream,
    weight_of,
)
from graphgen.train.lower import SESSION_OPTIONS, lower
from graphgen.train.nonfinite import find_not_finite
from graphgen.train.parallel import Processes
from graphgen.train.run import Bar, History, Run, standing
from graphgen.train.schedule import Schedule, constant, name_of
from graphgen.train.state import Feeder, State

Change: TypeAlias = Literal[
    "data", "evaluation", "optimizer", "schedule", "accumulate", "seed", "loss", "model"
]
"""What may differ in a resumed run, if allowed."""

_RUN, _BATCHES = "graphgen.run", "graphgen.batches"  # properties of a checkpoint


class Trainer:
    """Trains the parameters in a folder that `gg.artifacts` wrote, and needs nothing else.

    Args:
        directory: The folder with the four artifacts, which is only read.
        schedule: The learning rate as a function of the step, from 1 on: see `gg.schedule`; by
            default 0.001 in every step.
        seed: Fed to the model's input `seed`; dropout is a function of it and of the step.
        accumulate: How many batches make one update. Its gradient and loss are those of the joined
            batch: means by counted labels. By default what the artifacts say, else 1.
        threads: How many threads each session has; the runtime's default if None.
        provider: As for `Session`.
        strict: Refuse a provider that leaves nodes that calculate floats to the CPU.
        processes: The processes that train together, each with its samples of every batch; the
            losses are the same as with one process. See `graphgen.train.parallel`.

    `step` is the number of updates made, `inputs` what each batch has to hold. Raises
    GraphgenError for a folder that cannot be trained.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        schedule: Schedule | None = None,
        seed: int = 0,
        accumulate: int | None = None,
        threads: int | None = None,
        provider: Provider | None = None,
        strict: bool = False,
        processes: Processes | None = None,
    ) -> None:
        directory = Path(directory)
        program, start = lower(directory, accumulate), Checkpoint.load(directory / CHECKPOINT)
        self._who = f"Trainer({directory.name})"
        self.schedule = constant(1e-3) if schedule is None else schedule
        self.optimizer, self.seed, self.step = program.optimizer, seed, 0
        self._processes = Processes() if processes is None else processes
        found: dict[str, list[Any]] = program.loss.get("labels", {})
        if "classes" in program.loss:  # plain cross-entropy
            found = {LABELS: [program.loss["classes"], IGNORED]}
        self._labels = {name: LabelKind(*entry) for name, entry in found.items()}
        self._place, self._digest, self._loss = Place(), program.digest, program.loss
        self.accumulate = program.accumulate
        if self.accumulate < 1:
            raise GraphgenError(
                f"{self._who}: accumulate is {accumulate}; it must be at least 1{user_line()}"
            )
        self._state = State(
            self._who, start, program.trainable, self.optimizer, summed=self.accumulate > 1
        )

        def open_session(model: bytes, threads: int | None = threads) -> Session:
            return Session(
                model,
                provider=provider,
                strict=strict,
                options=SESSION_OPTIONS,
                threads=threads,
            )

        weights, buffers = self._state.weights, self._state.views["g"]
        gradients = {n: buffers[p] for n, p in program.gradients.items()}

        def feeder(model: bytes) -> Feeder:
            session = open_session(model)
            in_place = session.plan.device == "cpu"  # else each is copied, so only the last one
            wanted = [n for n in session.outputs if in_place or n.endswith("_grad")]
            outputs = {n: gradients[n] for n in wanted if n in gradients}
            used = {n: a for n, a in (weights | gradients).items() if n in session.inputs}
            find = functools.partial(find_not_finite, model, open_session=open_session)
            return Feeder(session, used, outputs, find)

        self._scale = LossScale.of(program.loss)
        scaled = self._scale.dynamic or self.optimizer.clip_norm is not None
        update = open_session(self.optimizer.update(scaled=scaled).SerializeToString(), 1)
        # Threads of chunks, not of nodes: 54 ms instead of 81 for 40 million elements on two.
        check_device(self._who, program.loss.get("dtype", "fp32"), update.plan.device)
        on_cpu = update.plan.device == "cpu"
        self._pool = ThreadPoolExecutor((threads or os.cpu_count() or 1) if on_cpu else 1)
        self._train = feeder(program.training)
        own = {"seed", "step", LOSS_SCALE, *weights, *gradients}
        self.inputs = {n: t for n, t in self._train.session.inputs.items() if n not in own}
        self._evaluate = feeder(program.evaluation)
        scalars = {n for n, t in update.inputs.items() if not t.dims}
        self._scalars = {n: np.zeros((), np.float32) for n in scalars}
        self._updates = [
            update.bind(self._scalars | c, {n: c[n.removesuffix("_next")] for n in update.outputs})
            for c in self._state.chunks()
        ]
        self.plan = {
            "training": json.loads(self._train.session.plan.json()),
            "update": json.loads(update.plan.json()),
            "optimizer": repr(self.optimizer),
            "seed": seed,
        }
        self._properties = {n: v for n, v in start.properties.items() if n in (LORA, BASE)}
        self._restore(start)
        del start, program
        return_memory()

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield f"{self._who}, step {self.step:,}"
        trained = self._state.views["p"].values()
        frozen = f"; {len(self._state.frozen):,} are frozen" * bool(self._state.frozen)
        yield from fields(
            trains=f"{len(trained):,} weights, {sum(x.size for x in trained):,} parameters{frozen}",
            inputs=[f"{name}: {kind}" for name, kind in self.inputs.items()],
            optimizer=in_short(self.optimizer),
            schedule=repr(self.schedule),
            device=self._train.session.plan.device,
        )

    @property
    def parameters(self) -> dict[str, Array]:
        """Copies of all parameters by name, the frozen ones last; integers of those in few bits."""
        return {name: array.copy() for name, array in self._state.weights.items()}

    def fit(
        self,
        batches: Batches,
        *,
        steps: int | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        save_every: int = 100,
        resume: bool = False,
        allow_changes: Sequence[Change] = (),
        evaluate: Batches | None = None,
        evaluate_every: int | None = None,
        patience: int | None = None,
        progress: bool = True,
    ) -> History:
        """Train until `step` is `steps`, or once through the batches; return the metrics.

        Called again with the same batches (the same object), it goes on where it stopped: always
        with `steps`; without, to the end of the pass through a `Dataset` or a list.

        Args:
            batches: Dictionaries of arrays by input name, in an iterable or a function that makes
                one. A list or a function starts again at its end; a `Dataset` has no end.
            steps: The number of updates in all, including those of earlier calls or a resume.
            checkpoint: A folder for `checkpoint`, written every `save_every` steps and at the end,
                `best/checkpoint`, that of the lowest evaluation loss, `metrics.jsonl` with a line
                per step, and `plan.json`.
            resume: Continue from that folder's checkpoint as if there had been no break. Give the
                same batches again; those already used are skipped. It is refused if the data, the
                optimizer, the schedule, ... differ from those of the run.
            allow_changes: The names of what may differ: see `graphgen.train.Change`.
            evaluate: Held-out batches; their mean loss is taken every `evaluate_every` steps and
                at the last of `steps`.
            patience: Stop after this many evaluations in a row that were not below the lowest.
            progress: Show a progress bar.

        Returns what `metrics.jsonl` holds. Raises GraphgenError for a batch that does not fit, and
        for a loss or gradient that is not finite, with the step and the first such tensor; the
        parameters are then those before that step.
        """
        who = f"{self._who}.fit"
        run = None if checkpoint is None else Run(Path(checkpoint), who)
        history, found, given = History(), None, dict[str, Any]()
        positive(who, save_every=save_every, evaluate_every=evaluate_every, patience=patience)
        if evaluate_every is not None and evaluate is None and patience is None:
            raise GraphgenError(
                f"{who}: evaluate_every={evaluate_every} needs evaluate={user_line()}"
            )
        if patience is not None and (evaluate is None or evaluate_every is None):
            raise GraphgenError(
                f"{who}: patience={patience} needs evaluate= and evaluate_every={user_line()}"
            )
        if resume and run is None:
            raise GraphgenError(f"{who}: resume=True needs the folder as checkpoint={user_line()}")
        for change in allow_changes:
            one_of(who, Change, allow_changes=change)
        if run is not None and resume:
            found = Checkpoint.load(run.checkpoint)
        elif allow_changes:
            raise GraphgenError(
                f"{who}: allow_changes needs resume=True and checkpoint={user_line()}"
            )
        for data in (batches, evaluate):
            if isinstance(data, Dataset):
                data.check(self._labels)
        resumed = None if found is None else int(found.properties.get(_BATCHES, 0))
        unknown = steps is None and length(batches) is None
        if evaluate is not None and evaluate_every is None and unknown:
            raise GraphgenError(
                f"{who}: evaluate= needs evaluate_every= or steps=, because it is not known which "
                f"of these batches is the last{user_line()}"
            )
        self._place.go_on(batches, endless=steps is not None, resumed=resumed, who=who)
        if run is not None:
            given = self._given(evaluate)
        if run is not None and found is not None:
            given = self._check_same(run, found, given, allow_changes)
            self._restore(found)
            history = run.read(self.step, warned=not self._processes.rank)
        if steps is not None and steps < self.step:
            raise GraphgenError(
                f"{who}: steps is {steps}, but {self.step} updates are already made, and steps "
                f"counts all of them: give more{user_line()}"
            )
        if self._processes.rank:
            run = None  # only the first process writes
        if run is not None:
            run.start(history, self.plan, resume)
        if (rest := self._place.rest) is not None:
            steps = self.step + -(-rest // self.accumulate)
        saved, (best, since) = self.step, standing(history)
        with Bar(self.step, steps, progress and not self._processes.rank) as bar:
            while self._goes_on(steps, patience, since):
                group = self._place.take(self.accumulate)
                if not group:
                    break
                metrics = self._one_step(group, self._place.used)
                self._place.used_up(group)
                last = self.step == steps
                if evaluate is not None and (last or _due(self.step, evaluate_every)):
                    metrics["evaluation_loss"] = loss = self.evaluate(evaluate)
                    best, since = (loss, 0) if loss < best else (best, since + 1)
                    if run is not None and not since:
                        self._save(run.best, given)
                history.append(metrics)
                bar.show(self.step, metrics, group)
                if run is not None:
                    due = last or _due(self.step, save_every)
                    run.log(metrics, flush=due)
                    if due:
                        self._save(run.checkpoint, given)
                        saved = self.step
        if run is not None and self.step != saved:
            self._save(run.checkpoint, given)
        if steps is not None and self._goes_on(steps, patience, since):
            raise GraphgenError(
                f"{who}: the batches ended at step {self.step} of {steps}; give a list, or a "
                "function that makes the iterable again"
            )
        return history

    def evaluate(self, batches: Batches) -> float:
        """The mean loss without dropout; with labels, over all labels that are not ignored."""
        total, count, sure = 0.0, 0.0, True
        if isinstance(batches, Dataset):
            batches.check(self._labels)
        for number, batch in enumerate(stream(batches)):
            batch, weight = self._own_part(batch, number)
            sure = sure and is_sure(batch, self._labels)
            self._check_sure(sure, number, alone=not number)
            if weight:
                total += weight * self._run(self._evaluate, batch, number)
                count += weight
        total, count = self._processes.sum(total, count)
        if not count:
            raise GraphgenError(f"{self._who}.evaluate: there are no batches with labels in them")
        return total / count

    def export(
        self, model: str | os.PathLike[str] | ModelLike, path: str | os.PathLike[str]
    ) -> Path:
        """Write `model`, an inference model or its file, with what was trained, adapters merged.

        Raises GraphgenError if the model lacks one of them, or has it in another shape.
        """
        saved = Checkpoint(self._state.weights, properties=self._properties)
        return export_trained(model, parameters_of(saved, self._who), path, self.adapter)

    @property
    def adapter(self) -> Adapter | None:
        """What was trained of artifacts with `lora`, to save, merge or give to `gg.generate`."""
        return Adapter.of(Checkpoint(self.parameters, properties=self._properties), self._who)

    def _goes_on(self, steps: int | None, patience: int | None, since: int) -> bool:
        return (steps is None or self.step < steps) and (patience is None or since < patience)

    def _one_step(self, given: Sequence[Batch], number: int) -> dict[str, float]:
        """One update from the batches from `number` on: their mean by counted labels."""
        parts = [self._own_part(batch, number + i) for i, batch in enumerate(given)]
        group, weights = zip(*parts, strict=True)
        for i, batch in enumerate(group):
            self._check_sure(is_sure(batch, self._labels), number + i, alone=len(group) == 1)
        [whole] = self._processes.sum(sum(weights))
        if not whole:
            raise GraphgenError(
                f"{self._who}: batch {number}: there is nothing to learn from: it has no samples, "
                f"or every label is {IGNORED}"
            )
        loss = 0.0
        self._state.begin(any(weights))
        first, size = self.step * self.accumulate, self._processes.size
        steps = [(first + i) * size + self._processes.rank for i in range(len(group))]
        for i, (batch, weight) in enumerate(zip(group, weights, strict=True)):
            if share := weight / whole:
                self._state.weigh(share)
                loss += share * self._run(self._train, batch, number + i, steps[i])
        [loss] = self._processes.sum(loss)
        self._processes.reduce(self._state.end())
        norm = self._state.gradient_norm() / self._scale.value
        if not self._scale.made(norm):
            return self._one_step(given, number)  # with a smaller loss scale
        if not math.isfinite(norm):
            for i, weight in enumerate(weights):
                if weight and (cause := self._train.blame(group[i], self._own(steps[i]))):
                    raise self._stop(f"gradient's norm is {norm:g}", number + i, cause)
            self._processes.sum(0.0)  # if another process has the cause, it ends this one here
            raise self._stop(f"gradient's norm is {norm:g}", number, None)
        rate = self.schedule(self.step + 1)
        if not 0.0 <= rate < math.inf:
            raise GraphgenError(
                f"{self._who}: at step {self.step + 1} the schedule gives {rate}; a learning rate "
                f"is finite and at least 0{user_line()}"
            )
        self.step += 1
        scale = clip_scale(norm, self.optimizer.clip_norm) / self._scale.value
        values = {"scale": scale, **self.optimizer.scalars(rate, self.step)}
        for name, scalar in self._scalars.items():
            scalar[...] = values[name]
        for _ in self._pool.map(lambda update: update(), self._updates):
            pass  # only to raise what an update raised
        return {"step": self.step, "loss": loss, "learning_rate": rate, "gradient_norm": norm}

    def _own_part(self, batch: Batch, number: int) -> tuple[Batch, float]:
        """The part of a batch for this process, and how many labels it counts for."""
        who = f"{self._who}: batch {number}"
        own = own_part(batch, self.inputs, self._processes, who)
        name = next(iter(self._labels), LABELS)
        rows = len(batch[name]) if self._processes.rank and name in batch else 0
        first = rows * self._processes.rank // self._processes.size
        return own, weight_of(own, self._labels, who, first)

    def _check_sure(self, sure: bool, number: int, *, alone: bool) -> None:
        """Raise if a mean over several batches is wanted, but this one's weight is not known."""
        if not sure and not (alone and self._processes.size == 1):
            names = ", ".join(self._labels) or LABELS
            raise GraphgenError(
                f"{self._who}: batch {number}: the loss leaves out some of {names}, or they are "
                f"{IGNORED}, so it is not known how many count for the mean over batches: write "
                "the loss with one ops.cross_entropy(..., ignore_index=...), or give one joined "
                "batch"
            )

    def _run(self, feeder: Feeder, batch: Batch, number: int, step: int = 0) -> float:
        try:
            loss = feeder(batch, self._own(step))
        except GraphgenError as error:
            reason = str(error).split(": ", 1)[-1]
            raise GraphgenError(f"{self._who}: batch {number}: {reason}") from error
        if not math.isfinite(loss):
            cause = feeder.blame(batch, self._own(step))
            what = "loss" if feeder is self._train else "loss of the evaluation before it"
            raise self._stop(f"{what} is {loss:g}", number, cause)
        return loss

    def _own(self, step: int) -> dict[str, Array]:
        numbers = {"seed": np.asarray(self.seed, np.int64), "step": np.asarray(step, np.int64)}
        return numbers | {LOSS_SCALE: np.asarray(self._scale.value, np.float32)}

    def _stop(self, what: str, number: int, cause: str | None) -> GraphgenError:
        return GraphgenError(
            f"{self._who}: at step {self.step + 1} the {what}: in batch {number}, "
            f"{cause or 'each value is finite'}; look at the data, lower the learning rate or set "
            "clip_norm"
        )

    def _save(self, path: Path, given: Mapping[str, Any]) -> None:
        path.parent.mkdir(exist_ok=True)
        first, second = self._state.moments()
        state = OptimizerState(self.step, self.schedule(max(self.step, 1)), first, second)
        properties: dict[str, int | float | str] = {
            "graphgen.seed": self.seed,
            _BATCHES: self._place.used,
            _RUN: json.dumps(given, sort_keys=True),
            **self._properties,
            **self._scale.properties(),
        }
        Checkpoint(self._state.views["p"], self._state.frozen, state, properties).save(path)

    def _given(self, evaluate: Batches | None) -> dict[str, Any]:
        """What a resumed run must have in common: every `Change`, some of them in parts."""
        loss = {n: v for n, v in self._loss.items() if n not in ("accumulate", "peak_bytes")}
        return {
            "seed": self.seed,
            **{f"data, {name}": text for name, text in self._place.described().items()},
            **{f"evaluation, {name}": text for name, text in describe(evaluate).items()},
            "optimizer": repr(self.optimizer),
            "schedule": name_of(self.schedule),
            "accumulate": self.accumulate,
            "loss": json.dumps(loss, sort_keys=True),
            "model": self._digest,
        }

    def _check_same(
        self, run: Run, saved: Checkpoint, given: Mapping[str, Any], allowed: Sequence[str]
    ) -> dict[str, Any]:
        """What the run in a folder goes on with; raise if it differs, warn if it might."""
        was: dict[str, Any] = {"seed": saved.properties.get("graphgen.seed")}
        # Another program may have written it.
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            was |= json.loads(str(saved.properties.get(_RUN, "{}")))
        now = {n: was.get(n) if v is None and n != "schedule" else v for n, v in given.items()}
        result = dict(now)
        if saved.optimizer is not None and None in (was.get("schedule", ""), now["schedule"]):
            step, rate = saved.optimizer.step, saved.optimizer.learning_rate
            was["schedule"] = (
                f"{np.float32(rate)!s} at step {step}" if _RUN in saved.properties else None
            )
            now["schedule"] = f"{np.float32(self.schedule(max(step, 1)))!s} at step {step}"
        frozen = self._state.frozen
        for name in sorted(frozen.keys() | saved.frozen.keys()):
            one, other = saved.frozen.get(name), frozen.get(name)
            if one is None or other is None or one.tobytes() != other.tobytes():
                was["model"], now["model"] = f"a frozen {name}", "another one, or none"
        changed = {
            name: f"{name} {was[name]}, this trainer {value}"
            for name, value in now.items()
            if None not in (value, was.get(name)) and was[name] != value
        }
        refused = [t for name, t in changed.items() if name.partition(",")[0] not in allowed]
        if refused:
            names = sorted({name.partition(",")[0] for name in changed})
            raise GraphgenError(
                f"{self._who}.fit: the run in {run.folder} has {'; '.join(refused)}; give the same "
                f"to resume, or allow_changes={names} (--allow-changes {' '.join(names)})"
                f"{user_line()}"
            )
        new = [] if saved.optimizer is not None else ["step", "moments"]
        new += [] if _BATCHES in saved.properties else ["batches"]
        missing = f"; its {' and '.join(new)} begin at 0" if new else ""
        if _RUN not in saved.properties:
            unknown = ", ".join(name for name in get_args(Change) if was.get(name) is None)
            missing = f"{unknown} are not compared{missing}"
        if missing and not self._processes.rank:
            warn(
                f"{self._who}.fit: the checkpoint of {run.folder} lacks something: "
                f"{missing.strip('; ')}"
            )
        return result

    def _restore(self, saved: Checkpoint) -> None:
        self._state.restore(saved)
        self._scale.restore(saved.properties)
        self.step = 0 if saved.optimizer is None else saved.optimizer.step


def _due(step: int, every: int | None) -> bool:
    return bool(every) and step % (every or 1) == 0
