"""The trainer: steps over batches, with evaluations, checkpoints and resume."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from graphgen.arguments import checked
from graphgen.display import fields, on_screen
from graphgen.errors import GraphgenError, Opened, one_of, positive, user_line
from graphgen.export.adapters import Adapter
from graphgen.export.checkpoint import Checkpoint
from graphgen.export.optimizers import in_short
from graphgen.export.trained import export_trained
from graphgen.files import path_of
from graphgen.graph import ModelLike
from graphgen.operands import Array
from graphgen.runtime import Provider
from graphgen.train.batches import Place, length, none_given
from graphgen.train.callbacks import Callback, Calls
from graphgen.train.data import Batches, Dataset, tokens_in
from graphgen.train.engine import Engine
from graphgen.train.evaluation import Metrics, mean_loss, measure, predictions
from graphgen.train.metrics import AnyMetric
from graphgen.train.parallel import Processes
from graphgen.train.rates import RateCurve, find_rate
from graphgen.train.resume import BATCHES, RUN, Change, check_same, describe_run
from graphgen.train.run import Bar, History, Run, standing
from graphgen.train.schedule import Schedule, constant


@checked
class Trainer(Opened):
    """Trains the parameters in a folder that `gg.artifacts` wrote, and needs nothing else.

    Args:
        directory: The folder with the four artifacts, which is only read.
        schedule: The learning rate as a function of the step, from 1 on: see `gg.schedule`; by
            default 0.001 in every step.
        seed: Fed to the model's input `seed`; dropout is a function of it and of the step.
        accumulate: How many batches make one update. Its gradient and loss are those of the joined
            batch: means by what each counts for. By default what the artifacts say, else 1.
        ema: d of the moving average e ← d e + (1 - d) p of the weights, with d at most
            (1 + t) / (10 + t) at step t. Evaluations, `best/checkpoint` and `export` then use e.
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
        ema: float | None = None,
        threads: int | None = None,
        provider: Provider | None = None,
        strict: bool = False,
        processes: Processes | None = None,
    ) -> None:
        directory = path_of(directory, "Trainer")
        self.schedule = constant(1e-3) if schedule is None else schedule
        self._processes = Processes() if processes is None else processes
        self._engine = Engine(
            f"Trainer({directory.name})",
            directory,
            accumulate=accumulate,
            ema=ema,
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

    @checked
    def fit(
        self,
        batches: Batches,
        *,
        steps: int | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        save_every: int = 100,
        resume: bool | int = False,
        allow_changes: Sequence[Change] = (),
        evaluate: Batches | None = None,
        evaluate_every: int | None = None,
        metrics: Sequence[AnyMetric] = (),
        best: str = "loss",
        patience: int | None = None,
        keep: int = 0,
        callbacks: Sequence[Callback] = (),
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
                `best/checkpoint`, that of the best evaluation, `metrics.jsonl` with a line per
                step, and `plan.json`.
            resume: Continue from that folder's checkpoint as if there had been no break, or from
                the step of a state that `keep` left there, and forget what came after it. Give the
                same batches again; those already used are skipped. It is refused if the data, the
                optimizer, the schedule, ... differ from those of the run.
            allow_changes: The names of what may differ: see `graphgen.train.Change`.
            evaluate: Held-out batches; their mean loss is taken every `evaluate_every` steps and
                at the last of `steps`.
            metrics: What to measure at each evaluation, too, as for `measure`.
            best: By which of them, or by "loss", evaluations are compared.
            patience: Stop after this many evaluations in a row that were not better than the best.
            keep: How many earlier states to keep: `step-N/checkpoint` for the last of `save_every`.
            callbacks: Called at the moments that `graphgen.train.callbacks.Callback` has methods
                for; they may end the run.
            progress: Show a progress bar.

        Returns what `metrics.jsonl` holds. Raises GraphgenError for a batch that does not fit, and
        for a loss or gradient that is not finite, with the step and the first such tensor; the
        parameters are then those before that step.
        """
        who = f"{self._who}.fit"
        run = None if checkpoint is None else Run(path_of(checkpoint, who), who)
        first = not self._processes.rank
        with run if run is not None and first else nullcontext():
            history, found, given = History(), None, dict[str, Any]()
            positive(who, save_every=save_every, evaluate_every=evaluate_every, patience=patience)
            measured = Metrics(metrics, self._engine)
            for problem, wrong in {
                f"evaluate_every={evaluate_every} needs evaluate=": evaluate_every is not None
                and evaluate is None
                and patience is None,
                f"patience={patience} needs evaluate= and evaluate_every=": patience is not None
                and (evaluate is None or evaluate_every is None),
                "metrics= and best= need evaluate=": (metrics or best != "loss")
                and evaluate is None,
                f"resume={resume} needs the folder as checkpoint=": resume and run is None,
                f"keep={keep} needs checkpoint=": keep and run is None,
                f"keep is {keep!r}; it must be a number from 0": type(keep) is not int or keep < 0,
                "evaluate= needs evaluate_every= or steps=, because it is not known which of these "
                "batches is the last": evaluate is not None
                and evaluate_every is None
                and (steps is None and length(batches) is None),
                "evaluate= has no batches": evaluate is not None and length(evaluate) == 0,
                "evaluate= is an iterator, which can be read once; give a list, or a function that "
                "makes one": isinstance(evaluate, Iterator) and evaluate_every is not None,
                "allow_changes needs resume=True and checkpoint=": allow_changes and not resume,
            }.items():
                if wrong:
                    raise GraphgenError(f"{who}: {problem}{user_line()}")
            higher = measured.higher(best)
            for change in allow_changes:
                one_of(who, Change, allow_changes=change)
            back = resume if resume is not True and run is not None and resume else None
            if run is not None and back is not None and back not in run.kept():
                states = ", ".join(map(str, sorted(run.kept()))) or "none"
                raise GraphgenError(
                    f"{who}: resume={back}, but of the steps of {run.folder} there are kept: "
                    f"{states}; see keep={user_line()}"
                )
            if run is not None and resume:
                found = Checkpoint.load(run.checkpoint if back is None else run.at(back))
            for data in (batches, evaluate):
                if isinstance(data, Dataset):
                    data.check(self._labels)
            resumed = None if found is None else int(found.properties.get(BATCHES, 0))
            self._place.go_on(batches, endless=steps is not None, resumed=resumed, who=who)
            if run is not None:
                given = describe_run(self._engine, self.schedule, self._place, evaluate, best)
            if run is not None and found is not None:
                parts = self._engine, self.schedule, run, found, given, allow_changes
                given = check_same(*parts, warned=first)
                self._engine.restore(found)
                history = run.read(self.step, warned=first)
            if steps is not None and steps < self.step:
                raise GraphgenError(
                    f"{who}: steps is {steps}, but {self.step} updates are already made, and steps "
                    f"counts all of them: give more{user_line()}"
                )
            run = run if first else None  # only the first process writes
            if run is not None:
                if back is not None:
                    run.go_back(back)
                state = self._engine.checkpoint(0.0, {})
                run.start(history, self.plan, bool(resume), state)
                run.rotate(keep or len(run.kept()), self.step)
            if (rest := self._place.rest) is not None:
                steps = self.step + -(-rest // self.accumulate)
            saved, (lowest, since) = self.step, standing(history, best, higher=higher)
            if run is not None and not run.best.exists():
                lowest = math.inf
            calls = Calls(callbacks if first else (), self)
            calls("begin", history)
            with Bar(self.step, steps, progress and first) as bar:
                while self._goes_on(steps, patience, since) and not self._stopped(callbacks, calls):
                    group = self._place.take(self.accumulate)
                    if not group and not history and not resume:
                        raise none_given(who)
                    if not group:
                        break
                    line = self._engine.one_update(group, self._place.used, self.schedule)
                    self._place.used_up(group)
                    last = self.step == steps
                    evaluated = last or _due(self.step, evaluate_every)
                    if evaluate is not None and evaluated:
                        with self._engine.averaged():
                            line |= self._evaluation(evaluate, measured)
                            value = line[f"evaluation_{best}"] * (-1.0 if higher else 1.0)
                            lowest, since = (value, 0) if value < lowest else (lowest, since + 1)
                            if run is not None and not since:
                                self._save(run.best, given)
                    history.append(line)
                    bar.show(self.step, line["loss"], sum(map(tokens_in, group)))
                    if evaluate is not None and evaluated:
                        calls("evaluation", line)
                    calls("step", line)
                    if run is not None:
                        due = last or _due(self.step, save_every)
                        run.log(line, flush=due)
                        if due:
                            self._save_state(run, given, keep, calls)
                            saved = self.step
            if run is not None and self.step != saved:
                self._save_state(run, given, keep, calls)
            if steps is not None and not calls.stop and self._goes_on(steps, patience, since):
                raise GraphgenError(
                    f"{who}: the batches ended at step {self.step} of {steps}; give a list, or a "
                    "function that makes the iterable again"
                )
            calls("end", history)
            return history

    @checked
    def evaluate(self, batches: Batches) -> float:
        """The loss of all batches as one, without dropout: a mean over all labels that count."""
        return mean_loss(self._engine, batches)

    @checked
    def measure(self, batches: Batches, metrics: Sequence[AnyMetric]) -> dict[str, float]:
        """The mean loss without dropout, as `loss`, and metrics by their names.

        A metric is one of "accuracy", "f1", "matthews", "mse", "mae", "pearson" and "perplexity",
        also for one output ("accuracy:kinds"), a function of all predictions and all labels, as two
        arrays, or a `graphgen.train.metrics.Metric`.
        """
        return measure(self._engine, batches, Metrics(metrics, self._engine))

    @checked
    def predict(
        self, batches: Batches, *, outputs: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """Outputs without dropout for all rows, by name, padded with 0 where batches differ.

        By default all that the artifacts keep: see `gg.artifacts(outputs=...)`.
        """
        return predictions(self._engine, batches, outputs)

    @checked
    def find_rate(
        self,
        batches: Batches,
        *,
        lowest: float = 1e-7,
        highest: float = 1.0,
        steps: int = 100,
    ) -> RateCurve:
        """Try learning rates from `lowest` to `highest`, from step to step by a constant factor.

        Nothing stays of it but the losses at these rates, a suggestion, and `plot(path)`. Raises
        GraphgenError where the loss does not fall.
        """
        options = {"lowest": lowest, "highest": highest}
        return find_rate(self._engine, batches, steps=steps, **options)

    @checked
    def export(
        self, model: str | os.PathLike[str] | ModelLike, path: str | os.PathLike[str]
    ) -> Path:
        """Write `model`, an inference model or its file, with what was trained, adapters merged.

        Raises GraphgenError if the model lacks one of them, or has it in another shape.
        """
        with self._engine.averaged():
            return export_trained(model, self._engine.floats(), path, self.adapter)

    @property
    def adapter(self) -> Adapter | None:
        """What was trained of artifacts with `lora`, to save, merge or give to `gg.generate`."""
        return self._engine.adapter

    def _goes_on(self, steps: int | None, patience: int | None, since: int) -> bool:
        return (steps is None or self.step < steps) and (patience is None or since < patience)

    def _stopped(self, callbacks: Sequence[Callback], calls: Calls) -> bool:
        """Whether a callback ended the run: all processes hear of the first one's."""
        return bool(callbacks) and bool(self._processes.sum(float(calls.stop))[0])

    def _evaluation(self, batches: Batches, metrics: Metrics) -> dict[str, float]:
        """What an evaluation adds to the line of a step."""
        if not metrics:
            return {"evaluation_loss": self.evaluate(batches)}
        found = measure(self._engine, batches, metrics)
        return {f"evaluation_{name}": value for name, value in found.items()}

    def _save_state(self, run: Run, given: Mapping[str, Any], keep: int, calls: Calls) -> None:
        if keep:  # first, so that a run that is killed here makes it again
            self._save(run.at(self.step), given)
            run.publish(self.step)
            run.rotate(keep, self.step)
        else:
            self._save(run.checkpoint, given)
        calls("checkpoint", run.checkpoint)

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
