"""The folder of a training run, its metrics and their plot, and the progress bar."""

import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from graphgen.display import on_screen, rich_table
from graphgen.errors import GraphgenError, user_line, warn
from graphgen.export.artifact_files import CHECKPOINT
from graphgen.export.checkpoint import Checkpoint, copy
from graphgen.export.checkpoint_data import data_of
from graphgen.export.partial import beside, lock_of, reserve
from graphgen.export.write import replacing
from graphgen.files import read_bytes
from graphgen.train.metrics import Metric

if TYPE_CHECKING:
    from rich.table import Table


class History(list[dict[str, float]]):
    """The metrics of each step: `step`, `loss`, `evaluation_loss` where it was taken, ..."""

    @on_screen
    def __repr__(self) -> Iterator[str]:
        losses = [line["loss"] for line in self]
        ends = f": loss {losses[0]:.4g} at first, {losses[-1]:.4g} at last" if losses else ""
        best, _ = standing(self)
        held_out = f", lowest evaluation loss {best:.4g}" if math.isfinite(best) else ""
        yield f"History of {len(self):,} steps{ends}{held_out}"


class Run:
    """The folder of a run: checkpoints, `metrics.jsonl` and `plan.json`."""

    def __init__(self, folder: Path, who: str) -> None:
        self.folder, self._who = folder, who
        self.checkpoint, self.best = folder / CHECKPOINT, folder / "best" / CHECKPOINT
        self._metrics = folder / "metrics.jsonl"
        self._lock: int | None = None

    def __enter__(self) -> "Run":
        if self._metrics.is_file():
            self._hold()
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _hold(self) -> None:
        """Let no other run write here until this one ends: their lines and states would mix."""
        try:
            lock = lock_of(self._metrics)
        except BlockingIOError:
            raise GraphgenError(
                f"{self._who}: another run writes to {self.folder}; wait for its end, or choose "
                "another folder"
            ) from None
        self.__exit__()  # `start` makes the file anew
        self._lock = lock

    def at(self, step: int) -> Path:
        """Where the state at a step is kept."""
        return self.folder / f"step-{step}" / CHECKPOINT

    def kept(self) -> dict[int, Path]:
        """The states that are kept, by step."""
        found = (re.fullmatch(r"step-(\d+)", path.name) for path in self.folder.glob("step-*"))
        return {int(one[1]): self.at(int(one[1])) for one in sorted(filter(None, found), key=str)}

    def load(self, resume: bool | int) -> Checkpoint:
        """The last state, or that of the step `resume`. Raises GraphgenError if it is not kept."""
        if resume is True:
            return Checkpoint.load(self.checkpoint)
        if resume not in self.kept():
            states = ", ".join(map(str, sorted(self.kept()))) or "none"
            raise GraphgenError(
                f"{self._who}: resume={resume}, but of the steps of {self.folder} there are kept: "
                f"{states}; see keep={user_line()}"
            )
        return Checkpoint.load(self.at(resume))

    def publish(self, step: int) -> None:
        """Let a kept state be that of the run."""
        copy(self.at(step), self.checkpoint)

    def rotate(self, keep: int, last: int) -> None:
        """Remove the kept states but the last `keep`, and those after the step `last`."""
        with self._writing():
            steps = sorted(self.kept())
            stay = [step for step in steps if step <= last][-keep:] if keep else []
            for step in {*steps} - {*stay}:
                shutil.rmtree(self.folder / f"step-{step}")

    def read(self, step: int, *, warned: bool = True) -> History:
        """The metrics up to `step`; an interrupted run may have gone further.

        Damaged lines are left out and named in a warning, unless they come after the line of
        `step`: those are written again.
        """
        history, damaged, complete = History(), list[int](), False
        try:
            lines = read_bytes(self._metrics).splitlines()
        except OSError as error:
            lines, problem = [], f"cannot be read: {error.strerror}"
        else:
            problem = ""
        for number, line in enumerate(lines, 1):
            found = _metrics_in(line)
            if found is None:
                damaged += [] if complete else [number]
            elif found["step"] <= step:
                history.append(found)
            complete = complete or (found is not None and found["step"] >= step)
        if damaged:
            lines_are = "line {} is" if len(damaged) == 1 else "lines {} are"
            problem = f"{lines_are.format(', '.join(map(str, damaged)))} damaged and left out"
        elif not problem and not complete and step:
            end = history[-1]["step"] if history else 0
            problem = f"ends at step {end}, but the checkpoint at {step}"
        if problem and warned:
            warn(
                f"{self._who}: {self._metrics}: {problem}; the history and the best evaluation "
                "are those of the other lines"
            )
        return history

    def go_back(self, step: int) -> None:
        """Let a kept state be that of the run; what came after it goes."""
        self.publish(step)
        self.rotate(len(self.kept()), step)
        if self.best.exists():
            state = Checkpoint.load(self.best).optimizer
            if state is None or state.step > step:
                self.best.unlink()
                data_of(self.best).unlink(missing_ok=True)

    def start(self, history: History, plan: object, resumed: bool, state: Checkpoint) -> None:
        """Make the folder; one that already holds a run must be resumed.

        Raises GraphgenError, and leaves no file, if there is no room for a checkpoint as large as
        `state`: otherwise, the first one would fail after hours of training.
        """
        if self.checkpoint.exists() and not resumed:
            raise GraphgenError(
                f"{self._who}: {self.folder} holds a run; continue it with resume=True, or "
                "choose another folder"
            )
        new = not self.folder.exists()
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            for partial in self.folder.rglob(".*.partial"):  # left by a killed run
                partial.unlink()
        try:
            self._check_room(sum(array.nbytes for array in state.tensors()))
        except GraphgenError:
            if new:
                self.folder.rmdir()
            raise
        with replacing(self._who, self.folder / "plan.json", self._metrics) as files:
            files[0].write_text(json.dumps(plan, indent=2) + "\n")
            files[1].write_text("".join(json.dumps(line) + "\n" for line in history))
        self._hold()

    def _check_room(self, size: int) -> None:
        with self._writing(), beside(self.checkpoint) as file, file.open("wb") as stream:
            reserve(stream, size)

    def log(self, metrics: Mapping[str, float], flush: bool) -> None:
        """Append one line; `flush` it to the disk before this step's checkpoint is written."""
        with self._writing(), self._metrics.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
            if flush:
                file.flush()
                os.fsync(file.fileno())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise GraphgenError(
                f"{self._who}: checkpoint={str(self.folder)!r} cannot be written: "
                f"{error.strerror}; choose another folder"
            ) from error


def _metrics_in(line: bytes) -> dict[str, float] | None:
    """The numbers in one line, or None if it is damaged."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested without end
        return None
    numbers = isinstance(found, dict) and all(map(_is_number, found.values()))
    return found if numbers and {"step", "loss"} <= found.keys() else None


def _is_number(value: object) -> bool:
    """Whether it is one that plots can show: an int of JSON may have any size."""
    return type(value) is float or (type(value) is int and abs(value) < 1 << 63)


def standing(history: History, best: str = "loss", *, higher: bool = False) -> tuple[float, int]:
    """The best evaluation and how many came after it, by the metric `best`.

    It is negative if `higher` values are better, so that the lowest is the best; infinity if there
    is none.
    """
    key = f"evaluation_{best}"
    found = [-line[key] if higher else line[key] for line in history if key in line]
    value = min(found, default=math.inf)
    return value, len(found) - 1 - found.index(value) if found else 0


def evaluations(history: History, metrics: Sequence[Metric]) -> "Table":
    """The last evaluation and the best one, by each metric, to print."""
    rows = [["metric", "last", "best", "at step"]]
    lines = [line for line in history if "evaluation_loss" in line]
    for name, higher in {"loss": False, **{m.name: m.higher for m in metrics}}.items():
        key = f"evaluation_{name}"
        found = [line for line in lines if key in line]
        if found:
            best = (max if higher else min)(found, key=lambda line: line[key])
            figures = f"{found[-1][key]:.4g}", f"{best[key]:.4g}", f"{best['step']:,.0f}"
            rows.append([name, *figures])
    return rich_table("", rows)


def plot(history: History, path: Path) -> None:
    """The loss of every step and its running mean, and of the evaluations, if there are any.

    Raises ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [line["step"] for line in history]
    losses = np.array([line["loss"] for line in history])
    width = max(1, len(losses) // 20)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(steps, losses, alpha=0.35, label="each step")
    mean = np.convolve(losses, np.ones(width) / width, "valid")
    axes.plot(steps[width - 1 :], mean, label=f"mean of {width} steps")
    held_out = {x["step"]: x["evaluation_loss"] for x in history if "evaluation_loss" in x}
    if held_out:
        axes.plot([*held_out], [*held_out.values()], "o-", markersize=3, label="evaluation")
    axes.set(xlabel="step", ylabel="loss", title="training loss")
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing("plot", path) as [file]:
        figure.savefig(file, dpi=120, format="png")
    pyplot.close(figure)


class Bar:
    """A progress bar with the loss and the speed."""

    def __init__(self, step: int, steps: int | None, shown: bool) -> None:
        text = "{task.completed:.0f}/{task.total} loss {task.fields[loss]:.4f}"
        self._progress = Progress(
            BarColumn(),
            TextColumn(text + " {task.fields[speed]:,.0f} tokens/s"),
            TimeRemainingColumn(),
            disable=not shown,
        )
        self._task = self._progress.add_task(
            "", total=steps, completed=step, loss=math.nan, speed=0.0
        )
        self._then = time.perf_counter()

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._progress.disable:  # rich before 14 prints a line even then
            self._progress.stop()

    def show(self, step: int, loss: float, tokens: int) -> None:
        """Advance by one step, which used so many tokens."""
        now = time.perf_counter()
        speed, self._then = tokens / (now - self._then), now
        self._progress.update(self._task, completed=step, loss=loss, speed=speed)
