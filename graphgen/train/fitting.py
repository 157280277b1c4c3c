"""The parts of one call of `Trainer.fit`: what it refuses, its evaluations, what it saves."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphgen.errors import one_of, refuse
from graphgen.export.checkpoint_data import Unchanged
from graphgen.train.batches import Place, length
from graphgen.train.callbacks import Calls
from graphgen.train.data import Batches
from graphgen.train.engine import Engine
from graphgen.train.evaluation import Metrics, mean_loss, measure
from graphgen.train.metrics import AnyMetric
from graphgen.train.resume import BATCHES, RUN, Change
from graphgen.train.run import History, Run, standing
from graphgen.train.schedule import Schedule


def is_due(step: int, every: int | None) -> bool:
    """Whether something that happens every so many steps, or never, happens after this one."""
    return bool(every) and step % (every or 1) == 0


class Evaluations:
    """The evaluations of a run, and where it stands by them.

    `since` is how many there were after the best one.
    """

    def __init__(
        self,
        engine: Engine,
        batches: Batches | None,
        *,
        every: int | None,
        metrics: Sequence[AnyMetric],
        best: str,
        patience: int | None,
    ) -> None:
        self._engine, self.batches, self._every, self.best = engine, batches, every, best
        self._metrics = Metrics(metrics, engine)
        self._patience, self._lowest, self.since = patience, math.inf, 0

    def check(self, who: str, batches: Batches, steps: int | None) -> None:
        """Raise GraphgenError where an option of evaluations lacks another one."""
        given, every = self.batches, self._every
        refuse(
            who,
            {
                f"evaluate_every={every} needs evaluate=": every is not None
                and given is None
                and self._patience is None,
                f"patience={self._patience} needs evaluate= and evaluate_every=": (
                    self._patience is not None and (given is None or every is None)
                ),
                "metrics= and best= need evaluate=": given is None
                and bool(self._metrics or self.best != "loss"),
                "evaluate= needs evaluate_every= or steps=, because it is not known which of these "
                "batches is the last": given is not None
                and every is None
                and (steps is None and length(batches) is None),
                "evaluate= has no batches": given is not None and length(given) == 0,
                "evaluate= is an iterator, which can be read once; give a list, or a function that "
                "makes one": isinstance(given, Iterator) and every is not None,
            },
        )
        self._metrics.higher(self.best)  # or an error

    def go_on(self, history: History, *, best_is_kept: bool) -> None:
        """Stand where the run stood; without its best state, the next evaluation is the best."""
        self._lowest, self.since = standing(
            history, self.best, higher=self._metrics.higher(self.best)
        )
        if not best_is_kept:
            self._lowest = math.inf

    def are_due(self, step: int, *, last: bool) -> bool:
        """Whether the run is evaluated after this step."""
        return self.batches is not None and (last or is_due(step, self._every))

    def take(self) -> dict[str, float]:
        """Evaluate now; returns what that adds to the line of the step."""
        if self.batches is None:
            return {}
        found = (
            measure(self._engine, self.batches, self._metrics)
            if self._metrics
            else {"loss": mean_loss(self._engine, self.batches)}
        )
        value = found[self.best] * (-1.0 if self._metrics.higher(self.best) else 1.0)
        better = value < self._lowest
        self._lowest, self.since = (value, 0) if better else (self._lowest, self.since + 1)
        return {f"evaluation_{name}": value for name, value in found.items()}

    @property
    def have_patience(self) -> bool:
        """Whether the run goes on, for all that it has not improved."""
        return self._patience is None or self.since < self._patience


class States:
    """What a run saves: its state every so many steps, and that of its best evaluation."""

    def __init__(
        self,
        run: Run,
        engine: Engine,
        schedule: Schedule,
        place: Place,
        described: Mapping[str, Any],
        *,
        every: int,
        keep: int,
    ) -> None:
        self._run, self._engine, self._schedule, self._place = run, engine, schedule, place
        self._described, self._every, self._keep = described, every, keep
        self._saved, self._unchanged = engine.step, Unchanged(engine.unchanged())

    def start(self, history: History, plan: object, resume: bool | int) -> None:
        """Make the folder, or go on in it, from its last state or from one that was kept."""
        if resume is not True and resume:
            self._run.go_back(resume)
        self._run.start(history, plan, bool(resume), self._engine.checkpoint(0.0, {}))
        self._run.rotate(self._keep or len(self._run.kept()), self._engine.step)

    def log(self, line: Mapping[str, float], calls: Calls, *, last: bool) -> None:
        """Append the metrics of a step, and save its state if that is due."""
        due = last or is_due(self._engine.step, self._every)
        self._run.log(line, flush=due)
        if due:
            self.save(calls)

    def save(self, calls: Calls) -> None:
        """Save the state of now, unless it is saved."""
        step = self._engine.step
        if step == self._saved:
            return
        if self._keep:  # first, so that a run that is killed here makes it again
            self._write(self._run.at(step))
            self._run.publish(step)
            self._run.rotate(self._keep, step)
        else:
            self._write(self._run.checkpoint)
        self._saved = step
        calls("checkpoint", self._run.checkpoint)

    def save_best(self) -> None:
        """Save the weights of now as those of the best evaluation."""
        self._write(self._run.best)

    def _write(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        properties: dict[str, int | float | str] = {
            "graphgen.seed": self._engine.seed,
            BATCHES: self._place.used,
            RUN: json.dumps(self._described, sort_keys=True),
        }
        rate = self._schedule(max(self._engine.step, 1))
        self._engine.checkpoint(rate, properties).save(path, unchanged=self._unchanged)


def check_folder(
    who: str,
    run: Run | None,
    resume: bool | int,
    *,
    keep: int,
    allow_changes: Sequence[Change],
) -> None:
    """Raise GraphgenError where an option of the run's folder lacks another one."""
    refuse(
        who,
        {
            f"resume={resume} needs the folder as checkpoint=": bool(resume) and run is None,
            f"keep={keep} needs checkpoint=": bool(keep) and run is None,
            f"keep is {keep!r}; it must be a number from 0": type(keep) is not int or keep < 0,
            "allow_changes needs resume=True and checkpoint=": bool(allow_changes) and not resume,
        },
    )
    for change in allow_changes:
        one_of(who, Change, allow_changes=change)
