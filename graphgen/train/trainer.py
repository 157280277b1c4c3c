"""The trainer: steps over batches, with evaluations, checkpoints and resume."""

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from graphgen.arguments import checked
from graphgen.display import fields, on_screen
from graphgen.errors import GraphgenError, Opened, positive, user_line
from graphgen.export.adapters import Adapter
from graphgen.export.optimizers import in_short
from graphgen.export.trained import export_trained
from graphgen.files import path_of
from graphgen.graph import ModelLike
from graphgen.operands import Array
from graphgen.runtime import Provider
from graphgen.train.batches import Place, none_given
from graphgen.train.callbacks import Callback, Calls
from graphgen.train.data import Batches, Dataset, tokens_in
from graphgen.train.engine import Engine
from graphgen.train.evaluation import Metrics, mean_loss, measure, predictions
from graphgen.train.fitting import Evaluations, States, check_folder
from graphgen.train.metrics import AnyMetric
from graphgen.train.parallel import Processes
from graphgen.train.probe import check_shifted
from graphgen.train.rates import RateCurve, find_rate
from graphgen.train.resume import BATCHES, Change, check_same, describe_run
from graphgen.train.run import Bar, History, Run
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
        positive(who, save_every=save_every, evaluate_every=evaluate_every, patience=patience)
        check_folder(who, run, resume, keep=keep, allow_changes=allow_changes)
        evaluations = Evaluations(
            self._engine,
            evaluate,
            every=evaluate_every,
            metrics=metrics,
            best=best,
            patience=patience,
        )
        evaluations.check(who, batches, steps)
        first = not self._processes.rank  # only the first process writes
        with run if run is not None and first else nullcontext():
            found = run.load(resume) if run is not None and resume else None
            for data in (batches, evaluate):
                if isinstance(data, Dataset):
                    data.check(self._labels)
            resumed = None if found is None else int(found.properties.get(BATCHES, 0))
            self._place.go_on(batches, endless=steps is not None, resumed=resumed, who=who)
            history, states = History(), None
            if run is not None:
                described = describe_run(self._engine, self.schedule, self._place, evaluate, best)
                if found is not None:
                    parts = self._engine, self.schedule, run, found, described, allow_changes
                    described = check_same(*parts, warned=first)
                    self._engine.restore(found)
                    history = run.read(self.step, warned=first)
                saved = run, self._engine, self.schedule, self._place, described
                states = States(*saved, every=save_every, keep=keep) if first else None
            if steps is not None and steps < self.step:
                raise GraphgenError(
                    f"{who}: steps is {steps}, but {self.step} updates are already made, and steps "
                    f"counts all of them: give more{user_line()}"
                )
            if states is not None:
                states.start(history, self.plan, resume)
            if (rest := self._place.rest) is not None:
                steps = self.step + -(-rest // self.accumulate)
            lost = first and run is not None and not run.best.exists()
            evaluations.go_on(history, best_is_kept=not self._anywhere(lost))
            calls = Calls(callbacks if first else (), self)
            calls("begin", history)
            with Bar(self.step, steps, progress and first) as bar:
                ended = self._updates(steps, history, evaluations, states, calls, bar)
            if states is not None:
                states.save(calls)
            if ended and not history and not resume:
                raise none_given(who)
            if ended and steps is not None:
                raise GraphgenError(
                    f"{who}: the batches ended at step {self.step} of {steps}; give a list, or a "
                    "function that makes the iterable again"
                )
            calls("end", history)
            return history

    def _updates(
        self,
        steps: int | None,
        history: History,
        evaluations: Evaluations,
        states: States | None,
        calls: Calls,
        bar: Bar,
    ) -> bool:
        """Update until `steps`, patience or a callback ends it; returns whether the batches did."""
        begun = self.step
        while self._is_wanted(steps, evaluations, calls):
            group = self._place.take(self.accumulate)
            if not group:
                return True
            if self.step == begun:
                check_shifted(self, group, f"{self._who}.fit")
            line = self._engine.one_update(group, self._place.used, self.schedule)
            self._place.used_up(group)
            last = self.step == steps
            evaluated = evaluations.are_due(self.step, last=last)
            if evaluated:
                with self._engine.averaged():
                    line |= evaluations.take()
                    if states is not None and not evaluations.since:
                        states.save_best()
            history.append(line)
            bar.show(self.step, line["loss"], sum(map(tokens_in, group)))
            if evaluated:
                calls("evaluation", line)
            calls("step", line)
            if states is not None:
                states.log(line, calls, last=last)
        return False

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

    def _is_wanted(self, steps: int | None, evaluations: Evaluations, calls: Calls) -> bool:
        """Whether there is another step; if a callback ends the run, all processes hear of it."""
        wanted = (steps is None or self.step < steps) and evaluations.have_patience
        return wanted and not self._anywhere(calls.stop)

    def _anywhere(self, condition: bool) -> bool:
        """Whether it holds in one of the processes."""
        return bool(self._processes.sum(float(condition))[0])
