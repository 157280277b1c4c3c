"""What runs at the moments of `Trainer.fit`: your own callbacks, and logs for other programs."""

import csv
import io
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from graphgen.errors import GraphgenError
from graphgen.export.write import replacing

if TYPE_CHECKING:
    from graphgen.train.run import History
    from graphgen.train.trainer import Trainer

Log: TypeAlias = Literal["csv", "tensorboard", "wandb"]


class Callback:
    """Derive from it what you need; a method that returns True ends the run after this step.

    With several processes, only the first one calls them.
    """

    def begin(self, trainer: "Trainer", history: "History") -> bool | None:
        """Before the first step; `history` holds the steps of a resumed run, and grows."""

    def step(self, trainer: "Trainer", metrics: Mapping[str, float]) -> bool | None:
        """After each update, and the evaluation after it, with the line of `metrics.jsonl`."""

    def evaluation(self, trainer: "Trainer", metrics: Mapping[str, float]) -> bool | None:
        """After each evaluation, with the same line."""

    def checkpoint(self, trainer: "Trainer", path: Path) -> bool | None:
        """After the state is written to a file."""

    def end(self, trainer: "Trainer", history: "History") -> bool | None:
        """After the last step, but not after an error."""


class Calls:
    """The callbacks of a run; `stop` says whether one of them ended it."""

    def __init__(self, callbacks: Sequence[Callback], trainer: "Trainer") -> None:
        self._callbacks, self._trainer, self.stop = callbacks, trainer, False

    def __call__(self, moment: str, given: object) -> None:
        """Call a method of each."""
        for each in self._callbacks:
            self.stop = bool(getattr(each, moment)(self._trainer, given)) or self.stop


class CsvLog(Callback):
    """The history as CSV, written with each checkpoint and at the end."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._history: list[dict[str, float]] = []

    def begin(self, trainer: "Trainer", history: "History") -> None:
        """Keep the history, which grows."""
        self._history = history

    def checkpoint(self, trainer: "Trainer", path: Path) -> None:
        """Write it."""
        text = io.StringIO()
        columns = dict.fromkeys(name for line in self._history for name in line)
        writer = csv.DictWriter(text, [*columns], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._history)
        with replacing("csv log", self._path) as [file]:
            file.write_text(text.getvalue(), encoding="utf-8")

    def end(self, trainer: "Trainer", history: "History") -> None:
        """Write it."""
        self.checkpoint(trainer, self._path)


class TensorBoard(Callback):
    """Event files in a folder, by tensorboard or tensorboardX, whichever is installed.

    A resumed run adds a file; steps that were made twice are in it twice.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = str(folder)
        self._writer: Any = None

    def begin(self, trainer: "Trainer", history: "History") -> None:
        """Open a file. Raises GraphgenError if neither package is installed."""
        self._writer = _event_writer(self._folder)

    def step(self, trainer: "Trainer", metrics: Mapping[str, float]) -> None:
        """Add every number."""
        for name, value in metrics.items():
            if name != "step" and self._writer is not None:
                self._writer.add_scalar(name, value, trainer.step)

    def checkpoint(self, trainer: "Trainer", path: Path) -> None:
        """Write what is buffered."""
        if self._writer is not None:
            self._writer.flush()

    def end(self, trainer: "Trainer", history: "History") -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


class Wandb(Callback):
    """A run of Weights & Biases, made by `wandb.init` with these options."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._run: Any = None

    def begin(self, trainer: "Trainer", history: "History") -> None:
        """Start the run. Raises GraphgenError without wandb."""
        try:
            wandb: Any = import_module("wandb")
        except ImportError as error:
            raise GraphgenError(
                f"the log wandb does not import ({error}); pip install wandb"
            ) from (error)
        plan = {"optimizer": trainer.plan["optimizer"], "seed": trainer.seed}
        self._run = wandb.init(**{"config": plan, **self._options})

    def step(self, trainer: "Trainer", metrics: Mapping[str, float]) -> None:
        """Log every number."""
        if self._run is not None:
            self._run.log({**metrics}, step=trainer.step)

    def end(self, trainer: "Trainer", history: "History") -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()


def log_for(kind: Log, folder: Path | None) -> Callback:
    """The log of a kind for the folder of a run. Raises GraphgenError if it needs one."""
    if kind == "wandb":
        return Wandb(**({} if folder is None else {"dir": str(folder)}))
    if folder is None:
        raise GraphgenError(f"--log {kind} is written into the run's folder: give --checkpoint DIR")
    return CsvLog(folder / "metrics.csv") if kind == "csv" else TensorBoard(folder / "tensorboard")


def _event_writer(folder: str) -> Any:
    try:
        return import_module("tensorboard.summary").Writer(folder)
    except ImportError:
        try:
            return import_module("tensorboardX").SummaryWriter(folder)
        except ImportError as error:
            raise GraphgenError(
                'neither tensorboard nor tensorboardX imports; pip install "graphgen-onnx[log]"'
            ) from error
