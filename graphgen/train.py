"""Training from a folder of artifacts on the stock runtime: the model's code is not needed."""

import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.export.artifacts import CHECKPOINT
from graphgen.export.checkpoint import Checkpoint, OptimizerState
from graphgen.export.data import Batch, Batches, length, stream
from graphgen.export.losses import IGNORED, LABELS
from graphgen.export.lower import SESSION_OPTIONS, lower
from graphgen.export.nonfinite import find_not_finite
from graphgen.export.optimizers import Optimizer, clip_scale
from graphgen.export.parallel import Processes
from graphgen.export.precision import LOSS_SCALE, LossScale, check_device
from graphgen.export.run import Bar, History, Run, standing
from graphgen.export.trained import export_trained
from graphgen.op import Array
from graphgen.runtime import Bound, Session, return_memory
from graphgen.schedule import Schedule, constant

_CHUNK = 1 << 18
"""Elements updated at a time: with both moments they stay in the cache from node to node."""


class Trainer:
    """Trains the parameters in a folder that `gg.artifacts` wrote; it needs nothing else.

    Args:
        directory: The folder with the four artifacts, which is only read.
        schedule: The learning rate as a function of the step, from 1 on: see `gg.schedule`.
        seed: Fed to the model's input `seed`, which dropout is a function of, as is the step.
        accumulate: How many batches make one update, whose gradient and loss are those of the
            joined batch: means by counted labels. By default what the artifacts say, else 1.
        threads: Of each session; the runtime's default if None.
        provider: "cpu", "cuda" or None, as for `Session`.
        processes: Those that train together, each with its samples of every batch; the losses are
            those of one process. See `graphgen.export.parallel`.

    `step` is the number of updates made, `inputs` what each batch has to hold. Raises
    GraphgenError for a folder that does not train.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        schedule: Schedule | None = None,
        seed: int = 0,
        accumulate: int | None = None,
        threads: int | None = None,
        provider: str | None = None,
        processes: Processes | None = None,
    ) -> None:
        directory = Path(directory)
        program, start = lower(directory, accumulate), Checkpoint.load(directory / CHECKPOINT)
        self._who = f"Trainer({directory.name})"
        self.schedule = constant(1e-3) if schedule is None else schedule
        self.optimizer, self.seed, self.step = program.optimizer, seed, 0
        self._processes = Processes() if processes is None else processes
        self._classes = program.loss.get("classes")
        self.accumulate = program.accumulate
        if self.accumulate < 1:
            raise GraphgenError(f"{self._who}: accumulate is {accumulate}; it must be at least 1")
        self._state = _State(
            self._who, start, program.trainable, self.optimizer, summed=self.accumulate > 1
        )

        def open_session(model: bytes, threads: int | None = threads) -> Session:
            return Session(model, provider=provider, options=SESSION_OPTIONS, threads=threads)

        weights, buffers = self._state.weights, self._state.views["g"]
        gradients = {n: buffers[p] for n, p in program.gradients.items()}

        def feeder(model: bytes) -> "_Feeder":
            session = open_session(model)
            in_place = session.plan.device == "cpu"  # else each is copied: only the last one
            wanted = [n for n in session.outputs if in_place or n.endswith("_grad")]
            outputs = {n: gradients[n] for n in wanted if n in gradients}
            used = {n: a for n, a in (weights | gradients).items() if n in session.inputs}
            find = functools.partial(find_not_finite, model, open_session=open_session)
            return _Feeder(session, used, outputs, find)

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
        self._restore(start)
        del start, program
        return_memory()

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
        patience: int | None = None,
        progress: bool = True,
    ) -> History:
        """Train until `step` is `steps`, or once through the batches; what `metrics.jsonl` holds.

        Args:
            batches: Dictionaries of arrays by input name, in an iterable or a function that makes
                one. A list or a function starts again at its end, a `Dataset` has none.
            steps: The number of updates in all, those before a resume included.
            checkpoint: A folder for `checkpoint`, written every `save_every` steps and at the end,
                `best/checkpoint`, that of the lowest evaluation loss, `metrics.jsonl` with a line
                per step, and `plan.json`.
            resume: Continue from that folder's checkpoint as if there had been no break: the same
                batches must be given again, of which those that were used are skipped.
            evaluate: Held-out batches, whose mean loss is taken every `evaluate_every` steps and
                at the last of `steps`.
            patience: Stop when so many evaluations in a row were not below the lowest.
            progress: Show a progress bar.

        Raises GraphgenError for a batch that does not fit, and for a loss or gradient that is not
        finite, with the step and the first tensor that is not; the parameters are then those
        before that step.
        """
        who = f"{self._who}.fit"
        run = None if checkpoint is None else Run(Path(checkpoint), who)
        used, history = 0, History()
        if patience is not None and (evaluate is None or evaluate_every is None):
            raise GraphgenError(f"{who}: patience={patience} needs evaluate= and evaluate_every=")
        if run is not None and resume:
            used, history = self._resume(run)
        elif resume:
            raise GraphgenError(f"{who}: resume=True needs the folder as checkpoint=")
        if self._processes.rank:
            run = None  # the first one writes
        if run is not None:
            run.start(history, self.plan, resume)
        if steps is None and (count := length(batches)) is not None:
            steps = self.step + max(0, -(-(count - used) // self.accumulate))
        left = stream(batches, used, again=steps is not None)
        saved, (best, since) = self.step, standing(history)
        with Bar(self.step, steps, progress and not self._processes.rank) as bar:
            while self._goes_on(steps, patience, since):
                group = list(itertools.islice(left, self.accumulate))
                if not group:
                    break
                metrics, used = self._one_step(group, used), used + len(group)
                last = self.step == steps
                if evaluate is not None and (last or _due(self.step, evaluate_every)):
                    metrics["evaluation_loss"] = loss = self.evaluate(evaluate)
                    best, since = (loss, 0) if loss < best else (best, since + 1)
                    if run is not None and not since:
                        self._save(run.best, used)
                history.append(metrics)
                bar.show(self.step, metrics, sum(map(_tokens, group)))
                if run is not None:
                    due = last or _due(self.step, save_every)
                    run.log(metrics, flush=due)
                    if due:
                        self._save(run.checkpoint, used)
                        saved = self.step
        if run is not None and self.step != saved:
            self._save(run.checkpoint, used)
        if steps is not None and self._goes_on(steps, patience, since):
            raise GraphgenError(
                f"{who}: the batches ended at step {self.step} of {steps}; give a list, or a "
                "function that makes the iterable again"
            )
        return history

    def evaluate(self, batches: Batches) -> float:
        """The mean loss without dropout; with labels, over all labels that are not ignored."""
        total, count = 0.0, 0.0
        for number, batch in enumerate(stream(batches)):
            batch = self._share(batch, number)
            if weight := self._count(batch, number):
                total += weight * self._run(self._evaluate, batch, number)
                count += weight
        total, count = self._sum(total, count)
        if not count:
            raise GraphgenError(f"{self._who}.evaluate: there are no batches with labels in them")
        return total / count

    def export(self, model: Any, path: str | os.PathLike[str]) -> Path:
        """Write `model`, an inference model or its file, with the trained parameters by name.

        Raises GraphgenError if the model lacks one of them, or has it in another shape.
        """
        return export_trained(model, self.parameters, path)

    def _goes_on(self, steps: int | None, patience: int | None, since: int) -> bool:
        return (steps is None or self.step < steps) and (patience is None or since < patience)

    def _one_step(self, group: Sequence[Batch], number: int) -> dict[str, float]:
        """One update by the batches from `number` on: their mean by counted labels."""
        given = group
        group = [self._share(batch, number + i) for i, batch in enumerate(given)]
        weights = [self._count(batch, number + i) for i, batch in enumerate(group)]
        [whole] = self._sum(sum(weights))
        if not whole:
            raise GraphgenError(
                f"{self._who}: batch {number}: there is nothing to learn from: no samples, or no "
                f"label that is not {IGNORED}"
            )
        loss = 0.0
        self._state.begin(any(weights))
        first, size = self.step * self.accumulate, self._processes.size
        steps = [(first + i) * size + self._processes.rank for i in range(len(group))]
        for i, (batch, weight) in enumerate(zip(group, weights, strict=True)):
            if share := weight / whole:
                self._state.weigh(share)
                loss += share * self._run(self._train, batch, number + i, steps[i])
        [loss] = self._sum(loss)
        self._processes.reduce(self._state.end())
        norm = self._state.gradient_norm() / self._scale.value
        if not self._scale.made(norm):
            return self._one_step(given, number)  # with a smaller loss scale
        if not math.isfinite(norm):
            for i, weight in enumerate(weights):
                if weight and (cause := self._train.blame(group[i], self._own(steps[i]))):
                    raise self._stop(f"gradient's norm is {norm:g}", number + i, cause)
            self._sum(0.0)  # another process that has the cause ends this one here
            raise self._stop(f"gradient's norm is {norm:g}", number, None)
        self.step += 1
        rate = self.schedule(self.step)
        scale = clip_scale(norm, self.optimizer.clip_norm) / self._scale.value
        values = {"scale": scale, **self.optimizer.scalars(rate, self.step)}
        for name, scalar in self._scalars.items():
            scalar[...] = values[name]
        for _ in self._pool.map(lambda update: update(), self._updates):
            pass  # but what one raised
        return {"step": self.step, "loss": loss, "learning_rate": rate, "gradient_norm": norm}

    def _sum(self, *numbers: float) -> list[float]:
        """Numbers summed over all processes."""
        array = np.array(numbers, np.float64)
        self._processes.reduce(array)
        return [*map(float, array)]

    def _share(self, batch: Batch, number: int) -> Batch:
        """This process's samples; what has another first dimension than the samples goes whole."""
        if not isinstance(batch, Mapping) or not batch:
            raise GraphgenError(
                f"{self._who}: batch {number} is a {type(batch).__name__}; give a dictionary with "
                f"arrays for {', '.join(self.inputs)}"
            )
        if self._processes.size == 1:
            return batch
        first = {n: t.dims[0] if t.dims else None for n, t in self.inputs.items()}
        samples = next((d for n, d in first.items() if n != LABELS and d is not None), None)
        if isinstance(samples, int):
            raise GraphgenError(
                f"{self._who}: the model takes {samples} samples, which {self._processes.size} "
                "processes cannot divide; build it with a name in place of that size"
            )
        mine = self._processes.share
        return {
            n: mine(a) if n == LABELS or first.get(n) == samples else a for n, a in batch.items()
        }

    def _run(self, feeder: "_Feeder", batch: Batch, number: int, step: int = 0) -> float:
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

    def _count(self, batch: Batch, number: int) -> int:
        """How many labels (or samples) a batch counts for; labels out of range are refused.

        The runtime takes a label of -1 for the last class.
        """
        if LABELS not in batch:
            return int(np.shape(next(iter(batch.values())))[0])
        labels = np.asarray(batch[LABELS])
        if self._classes is None:
            return labels.size
        kept = labels[labels != IGNORED]
        if kept.size and not 0 <= kept.min() <= kept.max() < self._classes:
            raise GraphgenError(
                f"{self._who}: batch {number}: labels go from {kept.min()} to {kept.max()}; they "
                f"must be 0 to {self._classes - 1}, or {IGNORED} where there is none"
            )
        return int(kept.size)

    def _save(self, path: Path, used: int) -> None:
        path.parent.mkdir(exist_ok=True)
        first, second = self._state.moments()
        state = OptimizerState(self.step, self.schedule(max(self.step, 1)), first, second)
        properties: dict[str, int | float | str] = {
            "graphgen.seed": self.seed,
            "graphgen.batches": used,
            **self._scale.properties(),
        }
        Checkpoint(self._state.views["p"], self._state.frozen, state, properties).save(path)

    def _resume(self, run: Run) -> tuple[int, History]:
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
        self,
        who: str,
        start: Checkpoint,
        names: tuple[str, ...],
        optimizer: Optimizer,
        *,
        summed: bool,
    ) -> None:
        self._who, self.frozen, self._summed, self._unit = who, start.frozen, summed, 0.0
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
        self._flat = {k: np.zeros(starts[-1], np.float32) for k in ("p", *optimizer.moments, "g")}
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

    def begin(self, some: bool) -> None:
        """Before the batches of an update, if there are `some`."""
        self._unit = 0.0
        if self._summed or not some:
            self._flat["g"].fill(0.0)

    def weigh(self, share: float) -> None:
        """Before gradients of a batch are added as they are, which count for a `share`."""
        if self._unit not in (0.0, share):
            self._flat["g"] *= np.float32(self._unit / share)
        self._unit = share

    def end(self) -> Array:
        """After the batches of an update: all its gradients."""
        self.weigh(1.0)
        return self._flat["g"]

    def gradient_norm(self) -> float:
        """The Euclidean norm of all gradients together; not finite unless they all are."""
        return math.sqrt(sum(float(np.vdot(c["g"], c["g"])) for c in self.chunks()))

    def moments(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """momentum0 and momentum1; the official runtime wants a momentum0 of SGD too."""
        if "m" in self.views:
            return self.views["m"], self.views["v"]
        return {name: np.zeros_like(array) for name, array in self.views["p"].items()}, {}

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
        self,
        session: Session,
        weights: Mapping[str, Array],
        outputs: Mapping[str, Array],
        find: Callable[[Mapping[str, Array]], str | None],
    ) -> None:
        self.session, self._weights, self._outputs, self._find = session, weights, outputs, find
        self._key: object = None
        self._buffers: dict[str, Array] = {}
        self._bound: Bound | None = None

    def __call__(self, batch: Batch, own: Mapping[str, Array]) -> float:
        """The loss; the outputs' buffers are filled. Batches of one shape share their buffers."""
        batch = self._arrays(batch, own)
        key = {name: (array.dtype, array.shape) for name, array in batch.items()}
        if self._bound is None or key != self._key:
            buffers = {name: np.array(array, order="C") for name, array in batch.items()}
            self._bound = self.session.bind({**self._weights, **buffers}, self._outputs)
            self._key, self._buffers = key, buffers
        for name, array in batch.items():
            np.copyto(self._buffers[name], array)
        return float(np.asarray(self._bound()[0]).reshape(()))

    def blame(self, batch: Batch, own: Mapping[str, Array]) -> str | None:
        """What is not finite first with this batch, if anything is; its gradients start at 0."""
        for gradient in self._outputs.values():
            gradient.fill(0.0)
        return self._find({**self._weights, **self._arrays(batch, own)})

    def _arrays(self, batch: Batch, own: Mapping[str, Array]) -> dict[str, Array]:
        """The batch and, where the model has these inputs, numbers of our `own`."""
        numbers = {n: number for n, number in own.items() if n in self.session.inputs}
        return {**numbers, **{name: np.asarray(array) for name, array in batch.items()}}


def _due(step: int, every: int | None) -> bool:
    return bool(every) and step % (every or 1) == 0


def _tokens(batch: Batch) -> int:
    """Labels where there are some, else what the first input has of them."""
    return int(np.size(batch[LABELS] if LABELS in batch else next(iter(batch.values()))))
