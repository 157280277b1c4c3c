"""The trainer: steps over batches, with evaluations, checkpoints and resume."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphgen.display import fields, on_screen
from graphgen.errors import GraphgenError, one_of, positive, user_line
from graphgen.export.adapters import Adapter
from graphgen.export.checkpoint import Checkpoint
from graphgen.export.named_losses import IGNORED, LABELS
from graphgen.export.optimizers import in_short
from graphgen.export.trained import export_trained
from graphgen.graph import ModelLike
from graphgen.operands import Array
from graphgen.runtime import Provider
from graphgen.train.batches import Place, length, named, stream
from graphgen.train.data import Batch, Batches, Dataset, is_sure, tokens_in
from graphgen.train.engine import Engine, check_rate
from graphgen.train.parallel import Processes
from graphgen.train.resume import BATCHES, RUN, Change, check_same, describe_run
from graphgen.train.run import Bar, History, Run, standing
from graphgen.train.schedule import Schedule, constant


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
        self.schedule = constant(1e-3) if schedule is None else schedule
        self._processes = Processes() if processes is None else processes
        self._engine = Engine(
            f"Trainer({directory.name})",
            directory,
            accumulate=accumulate,
            seed=seed,
            threads=threads,
            provider=provider,
            strict=strict,
            processes=self._processes,
        )
        self._who, self._labels = self._engine.who, self._engine.labels
        self.optimizer, self.seed, self.inputs = self._engine.optimizer, seed, self._engine.inputs
        self.accumulate, self.plan = self._engine.accumulate, self._engine.plan
        self._place = Place(self.inputs, self._who)

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield f"{self._who}, step {self.step:,}"
        state = self._engine.state
        trained = state.views["p"].values()
        frozen = f"; {len(state.frozen):,} are frozen" * bool(state.frozen)
        yield from fields(
            trains=f"{len(trained):,} weights, {sum(x.size for x in trained):,} parameters{frozen}",
            inputs=[f"{name}: {kind}" for name, kind in self.inputs.items()],
            optimizer=in_short(self.optimizer),
            schedule=repr(self.schedule),
            device=self._engine.device,
        )

    @property
    def step(self) -> int:
        """How many updates were made."""
        return self._engine.step

    @property
    def parameters(self) -> dict[str, Array]:
        """Copies of all parameters by name, the frozen ones last; integers of those in few bits."""
        return self._engine.parameters

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
        resumed = None if found is None else int(found.properties.get(BATCHES, 0))
        unknown = steps is None and length(batches) is None
        if evaluate is not None and evaluate_every is None and unknown:
            raise GraphgenError(
                f"{who}: evaluate= needs evaluate_every= or steps=, because it is not known which "
                f"of these batches is the last{user_line()}"
            )
        self._place.go_on(batches, endless=steps is not None, resumed=resumed, who=who)
        if run is not None:
            given = describe_run(self._engine, self.schedule, self._place, evaluate)
        if run is not None and found is not None:
            warned = not self._processes.rank
            parts = self._engine, self.schedule, run, found, given, allow_changes
            given = check_same(*parts, warned=warned)
            self._engine.restore(found)
            history = run.read(self.step, warned=warned)
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
                bar.show(self.step, metrics["loss"], sum(map(tokens_in, group)))
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
        for number, given in enumerate(stream(batches)):
            batch = named(given, self.inputs, f"{self._who}: batch {number}")
            batch, weight = self._engine.own_part(batch, number)
            sure = sure and is_sure(batch, self._labels)
            self._check_sure(sure, number, alone=not number)
            if weight:
                total += weight * self._engine.evaluate(batch, number)
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
        return export_trained(model, self._engine.floats(), path, self.adapter)

    @property
    def adapter(self) -> Adapter | None:
        """What was trained of artifacts with `lora`, to save, merge or give to `gg.generate`."""
        return self._engine.adapter

    def _goes_on(self, steps: int | None, patience: int | None, since: int) -> bool:
        return (steps is None or self.step < steps) and (patience is None or since < patience)

    def _one_step(self, given: Sequence[Batch], number: int) -> dict[str, float]:
        """One update from the batches from `number` on: their mean by counted labels."""
        engine = self._engine
        parts = [engine.own_part(batch, number + i) for i, batch in enumerate(given)]
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
        engine.state.begin(any(weights))
        first, size = self.step * self.accumulate, self._processes.size
        sites = [(first + i) * size + self._processes.rank for i in range(len(group))]
        for i, (batch, weight) in enumerate(zip(group, weights, strict=True)):
            if share := weight / whole:
                loss += share * engine.add_gradients(batch, number + i, sites[i], share)
        [loss] = self._processes.sum(loss)
        self._processes.reduce(engine.state.end())
        norm = engine.norm()
        if not engine.scale.made(norm):
            return self._one_step(given, number)  # with a smaller loss scale
        if not math.isfinite(norm):
            for i, weight in enumerate(weights):
                if weight and (cause := engine.blame(group[i], sites[i])):
                    raise engine.stop(f"gradient's norm is {norm:g}", number + i, cause)
            self._processes.sum(0.0)  # if another process has the cause, it ends this one here
            raise engine.stop(f"gradient's norm is {norm:g}", number, None)
        rate = self.schedule(self.step + 1)
        check_rate(self._who, rate, f"at step {self.step + 1} the schedule gives")
        engine.update(rate, norm)
        return {"step": self.step, "loss": loss, "learning_rate": rate, "gradient_norm": norm}

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

    def _save(self, path: Path, given: Mapping[str, Any]) -> None:
        path.parent.mkdir(exist_ok=True)
        properties: dict[str, int | float | str] = {
            "graphgen.seed": self.seed,
            BATCHES: self._place.used,
            RUN: json.dumps(given, sort_keys=True),
        }
        self._engine.checkpoint(self.schedule(max(self.step, 1)), properties).save(path)


def _due(step: int, every: int | None) -> bool:
    return bool(every) and step % (every or 1) == 0
