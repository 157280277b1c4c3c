"""Training from a folder of artifacts on the stock runtime: the model's code is not needed."""

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from graphgen.errors import GraphgenError
from graphgen.export.artifacts import CHECKPOINT
from graphgen.export.checkpoint import Checkpoint, OptimizerState
from graphgen.export.files import export, load
from graphgen.export.losses import IGNORED, LABELS
from graphgen.export.lower import SESSION_OPTIONS, lower
from graphgen.export.optimizers import Optimizer, clip_scale
from graphgen.export.precision import LOSS_SCALE, LossScale, check_device
from graphgen.op import Array
from graphgen.runtime import OPTIONS_KEY, Bound, Session
from graphgen.schedule import Schedule, constant

Batch: TypeAlias = Mapping[str, Array]
Batches: TypeAlias = Iterable[Batch] | Callable[[], Iterable[Batch]]
History: TypeAlias = list[dict[str, float]]

_CHUNK = 1 << 18
"""Elements updated at a time: with both moments they stay in the cache from node to node."""


class Trainer:
    """Trains the parameters in a folder that `gg.artifacts` wrote; it needs nothing else.

    Args:
        directory: The folder with the four artifacts, which is only read.
        schedule: The learning rate as a function of the step, from 1 on: see `gg.schedule`.
        seed: Fed to the model's input `seed`, which dropout is a function of, as is the step.
        threads: Of each session; the runtime's default if None.
        provider: "cpu", "cuda" or None, as for `Session`.

    `step` is the number of updates made. Raises GraphgenError for a folder that does not train.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        schedule: Schedule | None = None,
        seed: int = 0,
        threads: int | None = None,
        provider: str | None = None,
    ) -> None:
        directory = Path(directory)
        program, start = lower(directory), Checkpoint.load(directory / CHECKPOINT)
        self._who = f"Trainer({directory.name})"
        self.schedule = constant(1e-3) if schedule is None else schedule
        self.optimizer, self.seed, self.step = program.optimizer, seed, 0
        self._classes = program.loss.get("classes")
        self._state = _State(self._who, start, program.trainable, self.optimizer)

        def open_session(model: bytes) -> Session:
            return Session(model, provider=provider, options=SESSION_OPTIONS, threads=threads)

        def feeder(model: bytes, outputs: dict[str, Array]) -> "_Feeder":
            session = open_session(model)
            used = {n: a for n, a in self._state.weights.items() if n in session.inputs}
            return _Feeder(session, used, outputs)

        update = open_session(self.optimizer.update().SerializeToString())
        check_device(self._who, program.loss.get("dtype", "fp32"), update.plan.device)
        self._scale = LossScale.of(program.loss)
        gradients = {f"{n}_grad": a for n, a in self._state.views["g"].items()}
        self._train = feeder(program.training, gradients)
        self._evaluate = feeder(program.evaluation, {})
        self._scalars = {
            n: np.zeros((), np.float32) for n, t in update.inputs.items() if not t.dims
        }
        moments = self.optimizer.moments
        self._updates = [
            update.bind(self._scalars | chunk, {f"{n}_next": chunk[n] for n in ("p", *moments)})
            for chunk in self._state.chunks()
        ]
        self.plan = {
            "training": json.loads(self._train.session.plan.json()),
            "update": json.loads(update.plan.json()),
            "optimizer": repr(self.optimizer),
            "seed": seed,
        }
        self._restore(start)

    @property
    def parameters(self) -> dict[str, Array]:
        """Copies of all parameters by name, the frozen ones last."""
        return {name: array.copy() for name, array in self._state.weights.items()}

    def fit(
        self,
        batches: Batches,
        *,
        steps: int | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        save_every: int = 100,
        resume: bool = False,
        evaluate: Batches | None = None,
        evaluate_every: int | None = None,
        progress: bool = True,
    ) -> History:
        """Train until `step` is `steps`, or once through the batches; what `metrics.jsonl` holds.

        Args:
            batches: Dictionaries of arrays by input name, in an iterable or a function that makes
                one. A list or a function starts again at its end.
            steps: The number of updates in all, those before a resume included.
            checkpoint: A folder for `checkpoint`, written every `save_every` steps and at the end,
                `metrics.jsonl` with a line per step, and `plan.json`.
            resume: Continue from that folder's checkpoint as if there had been no break: the same
                batches must be given again, those that were used are skipped.
            evaluate: Held-out batches, whose mean loss is taken every `evaluate_every` steps and
                at the end.
            progress: Show a progress bar.

        Raises GraphgenError for a batch that does not fit, and for a loss or gradient that is not
        finite, with the step and the parameter; the parameters are then those before that step.
        """
        run = None if checkpoint is None else _Run(Path(checkpoint), self._who)
        used, history = 0, History()
        if run is not None and resume:
            used, history = self._resume(run)
        elif resume:
            raise GraphgenError(f"{self._who}.fit: resume=True needs the folder as checkpoint=")
        if run is not None:
            run.start(history, self.plan, resume)
        saved = self.step
        stream = itertools.islice(_stream(batches, steps is not None), used, None)
        bar = _Bar(self.step, steps if steps is not None else _length(batches), progress)
        with bar:
            while steps is None or self.step < steps:
                batch = next(stream, None)
                if batch is None:
                    break
                metrics, used = self._one_step(batch, used), used + 1
                last = self.step == steps
                if evaluate is not None and (last or _due(self.step, evaluate_every)):
                    metrics["evaluation_loss"] = self.evaluate(evaluate)
                history.append(metrics)
                bar.show(self.step, metrics, _tokens(batch))
                if run is not None:
                    run.log(metrics)
                    if last or _due(self.step, save_every):
                        self._save(run, used)
                        saved = self.step
        if steps is not None and self.step < steps:
            raise GraphgenError(
                f"{self._who}.fit: the batches ended at step {self.step} of {steps}; give a list, "
                "or a function that makes the iterable again"
            )
        if run is not None and self.step != saved:
            self._save(run, used)
        return history

    def evaluate(self, batches: Batches) -> float:
        """The mean loss without dropout; with labels, over all labels that are not ignored."""
        total, count = 0.0, 0
        for number, batch in enumerate(_stream(batches, False)):
            weight = self._check_labels(batch, number)
            total += weight * self._run(self._evaluate, batch, number)
            count += weight
        if not count:
            raise GraphgenError(f"{self._who}.evaluate: there are no batches with labels in them")
        return total / count

    def export(self, model: Any, path: str | os.PathLike[str]) -> Path:
        """Write `model`, an inference model or its file, with the trained parameters by name.

        Raises GraphgenError if the model lacks one of them, or has it in another shape.
        """
        if isinstance(model, (str, os.PathLike)):
            result = load(model)
        else:
            result = getattr(model, "model", model).clone()
        if (options := getattr(model, "session_options", None)) is not None:
            result.metadata_props[OPTIONS_KEY] = json.dumps(options, sort_keys=True)
        initializers = result.graph.initializers
        for name, array in self.parameters.items():
            value = initializers.get(name)
            if value is None or value.shape != array.shape:
                found = "missing" if value is None else f"of shape {value.shape}"
                raise GraphgenError(
                    f"{self._who}.export: parameter {name}, {list(array.shape)}, is {found} in the "
                    "model; give the model that the artifacts were made from, and optimize it after"
                )
            value.const_value = ir.tensor(array, name=name)
        return export(result, path)

    def _one_step(self, batch: Batch, number: int) -> dict[str, float]:
        self._check_labels(batch, number)
        loss = self._run(self._train, batch, number)
        norm = self._state.gradient_norm() / self._scale.value
        if math.isfinite(loss) and not self._scale.made(norm):
            return self._one_step(batch, number)
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise GraphgenError(
                f"{self._who}.fit: at step {self.step + 1} the loss is {loss:g} and the gradient's "
                f"norm {norm:g}: {self._state.blame()}; lower the learning rate or set clip_norm"
            )
        self.step += 1
        rate = self.schedule(self.step)
        scale = clip_scale(norm, self.optimizer.clip_norm) / self._scale.value
        values = {"scale": scale, **self.optimizer.scalars(rate, self.step)}
        for name, scalar in self._scalars.items():
            scalar[...] = values[name]
        for update in self._updates:
            update()
        return {"step": self.step, "loss": loss, "learning_rate": rate, "gradient_norm": norm}

    def _run(self, feeder: "_Feeder", batch: Batch, number: int) -> float:
        own: dict[str, Any] = {"seed": np.int64(self.seed), "step": np.int64(self.step)}
        own[LOSS_SCALE] = np.float32(self._scale.value)
        arrays = {n: np.asarray(x) for n, x in own.items() if n in feeder.session.inputs}
        try:
            return feeder(arrays | {name: np.asarray(array) for name, array in batch.items()})
        except GraphgenError as error:
            reason = str(error).split(": ", 1)[-1]
            raise GraphgenError(f"{self._who}: batch {number}: {reason}") from error

    def _check_labels(self, batch: Batch, number: int) -> int:
        """How many labels (or samples) a batch counts for; labels out of range are refused.

        The runtime takes a label of -1 for the last class.
        """
        labels = np.asarray(batch.get(LABELS, ()))
        if self._classes is None or LABELS not in batch:
            return len(next(iter(batch.values()), ()))
        kept = labels[labels != IGNORED]
        if kept.size and not 0 <= kept.min() <= kept.max() < self._classes:
            raise GraphgenError(
                f"{self._who}: batch {number}: labels go from {kept.min()} to {kept.max()}; they "
                f"must be 0 to {self._classes - 1}, or {IGNORED} where there is none"
            )
        return int(kept.size)

    def _save(self, run: "_Run", used: int) -> None:
        first, second = self._state.moments()
        state = OptimizerState(self.step, self.schedule(max(self.step, 1)), first, second)
        Checkpoint(
            self._state.views["p"],
            self._state.frozen,
            state,
            {"graphgen.seed": self.seed, "graphgen.batches": used, **self._scale.properties()},
        ).save(run.checkpoint)

    def _resume(self, run: "_Run") -> tuple[int, History]:
        saved = Checkpoint.load(run.checkpoint)
        seed = saved.properties.get("graphgen.seed", self.seed)
        if seed != self.seed:
            raise GraphgenError(
                f"{self._who}.fit: the run in {run.folder} has seed {seed}, this trainer "
                f"{self.seed}; give Trainer the same seed to resume"
            )
        self._restore(saved)
        return int(saved.properties.get("graphgen.batches", 0)), run.read(self.step)

    def _restore(self, saved: Checkpoint) -> None:
        self._state.restore(saved)
        self._scale.restore(saved.properties)
        self.step = 0 if saved.optimizer is None else saved.optimizer.step


class _State:
    """Parameters, gradients and moments, each kind one flat buffer with a view per parameter."""

    def __init__(
        self, who: str, start: Checkpoint, names: tuple[str, ...], optimizer: Optimizer
    ) -> None:
        self._who, self.frozen = who, start.frozen
        if {*names} != {*start.trainable}:
            odd = min({*names} ^ {*start.trainable})
            raise GraphgenError(
                f"{who}: parameter {odd!r} is in one of the checkpoint and the training model; "
                "write the artifacts again"
            )
        names = tuple(sorted(names, key=optimizer.decays, reverse=True))  # stable, and so two runs
        shapes = {name: start.trainable[name].shape for name in names}
        starts = [0]
        for shape in shapes.values():  # each on a cache line of 64 bytes
            starts.append(starts[-1] + -(-math.prod(shape) // 16) * 16)
        kinds = ("p", *optimizer.moments, "g")
        self._flat = {kind: np.zeros(starts[-1], np.float32) for kind in kinds}
        self._decayed = starts[sum(map(optimizer.decays, names))]
        self.views = {
            kind: {
                name: flat[at : at + math.prod(shape)].reshape(shape)
                for at, (name, shape) in zip(starts, shapes.items(), strict=False)
            }
            for kind, flat in self._flat.items()
        }
        self.weights = self.views["p"] | self.frozen

    def chunks(self) -> Iterator[dict[str, Array]]:
        """Slices of all buffers, by kind; they do not care where a parameter ends.

        Those of the second run, which does not decay, bring a factor of 1 for it.
        """
        ones = {"decay": np.ones((), np.float32)}
        bounds = (0, self._decayed, self._flat["p"].size)
        for start, end, own in ((*bounds[:2], {}), (*bounds[1:], ones)):
            for at in range(start, end, _CHUNK):
                piece = slice(at, min(at + _CHUNK, end))
                yield own | {kind: flat[piece] for kind, flat in self._flat.items()}

    def gradient_norm(self) -> float:
        """The Euclidean norm of all gradients together; not finite unless they all are."""
        return math.sqrt(sum(float(np.vdot(c["g"], c["g"])) for c in self.chunks()))

    def blame(self) -> str:
        """The first parameter or gradient that has a value that is not finite."""
        for kind, what in (("p", "parameter"), ("g", "the gradient of")):
            for name, array in self.views[kind].items():
                if not np.isfinite(array).all():
                    return f"{what} {name} is not finite"
        return "no gradient is infinite by itself"

    def moments(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """momentum0 and momentum1; the official runtime wants a momentum0 of SGD too."""
        zeros = {name: np.zeros_like(array) for name, array in self.views["p"].items()}
        return self.views.get("m", zeros), self.views.get("v", {})

    def restore(self, saved: Checkpoint) -> None:
        """Copy a checkpoint's tensors into the buffers."""
        tensors = {"p": saved.trainable}
        if saved.optimizer is not None:
            tensors |= {"m": saved.optimizer.momentum0, "v": saved.optimizer.momentum1}
        for kind, views in self.views.items():
            for name, view in views.items() if kind in tensors else ():
                array = tensors[kind].get(name)
                if array is None or array.shape != view.shape or array.dtype != view.dtype:
                    found = "missing" if array is None else f"{array.dtype}{list(array.shape)}"
                    raise GraphgenError(
                        f"{self._who}: {name} is {found} in the checkpoint, float32"
                        f"{list(view.shape)} in the model; resume with the folder it was made with"
                    )
                view[...] = array


class _Feeder:
    """A session with its weights bound, run on one batch after another."""

    def __init__(
        self, session: Session, weights: Mapping[str, Array], outputs: Mapping[str, Array]
    ) -> None:
        self.session, self._weights, self._outputs = session, weights, outputs
        self._key: object = None
        self._buffers: dict[str, Array] = {}
        self._bound: Bound | None = None

    def __call__(self, batch: Mapping[str, Array]) -> float:
        """The loss; the outputs' buffers are filled. Batches of one shape share their buffers."""
        key = {name: (array.dtype, array.shape) for name, array in batch.items()}
        if self._bound is None or key != self._key:
            buffers = {name: np.array(array, order="C") for name, array in batch.items()}
            self._bound = self.session.bind({**self._weights, **buffers}, self._outputs)
            self._key, self._buffers = key, buffers
        for name, array in batch.items():
            np.copyto(self._buffers[name], array)
        return float(np.asarray(self._bound()[0]).reshape(()))


class _Run:
    """The folder of a run."""

    def __init__(self, folder: Path, who: str) -> None:
        self.folder, self.checkpoint, self._who = folder, folder / CHECKPOINT, who
        self._metrics = folder / "metrics.jsonl"

    def read(self, step: int) -> History:
        """The metrics up to `step`; a run that was broken off may have gone further."""
        try:
            lines = [json.loads(line) for line in self._metrics.read_text().splitlines()[:step]]
        except (OSError, ValueError):
            return []
        return [line for line in lines if line["step"] <= step]

    def start(self, history: History, plan: object, resumed: bool) -> None:
        """Make the folder; one that has a run in it already is only continued."""
        if self.checkpoint.exists() and not resumed:
            raise GraphgenError(
                f"{self._who}.fit: {self.folder} holds a run; continue it with resume=True, or "
                "choose another folder"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "plan.json").write_text(json.dumps(plan, indent=2) + "\n")
            self._metrics.write_text("".join(json.dumps(line) + "\n" for line in history))
        except OSError as error:
            raise self._unwritable(error) from error

    def log(self, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        try:
            with self._metrics.open("a") as file:
                file.write(json.dumps(metrics) + "\n")
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> GraphgenError:
        return GraphgenError(
            f"{self._who}.fit: checkpoint={str(self.folder)!r} cannot be written: "
            f"{error.strerror}; choose another folder"
        )


class _Bar:
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

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, step: int, metrics: Mapping[str, float], tokens: int) -> None:
        """Advance by one step that had so many tokens."""
        now = time.perf_counter()
        speed, self._then = tokens / (now - self._then), now
        self._progress.update(self._task, completed=step, loss=metrics["loss"], speed=speed)


def _stream(batches: Batches, again: bool) -> Iterator[Batch]:
    """The batches, from the start again where that is asked for and possible."""
    while True:
        source = iter(batches() if callable(batches) else batches)
        first = next(source, None)
        if first is None:
            return
        yield first
        yield from source
        if not again or source is batches:
            return


def _length(batches: Batches) -> int | None:
    return len(batches) if isinstance(batches, Sized) else None


def _due(step: int, every: int | None) -> bool:
    return bool(every) and step % (every or 1) == 0


def _tokens(batch: Batch) -> int:
    """Labels where there are some, else what the first input has of them."""
    return int(np.size(batch[LABELS] if LABELS in batch else next(iter(batch.values()))))
