"""The parts of a training step, one call each, as in the official onnxruntime-training."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphgen.arguments import checked
from graphgen.errors import GraphgenError, Opened, user_line
from graphgen.export.artifact_files import EVAL, parse_artifact, read_artifact
from graphgen.export.checkpoint import Checkpoint
from graphgen.export.inference import inference_of
from graphgen.export.named_losses import IGNORED
from graphgen.export.write import export
from graphgen.files import path_of
from graphgen.operands import Array
from graphgen.plan import TensorType
from graphgen.runtime import Provider
from graphgen.train.batches import named
from graphgen.train.engine import Engine, check_rate
from graphgen.train.parallel import Processes
from graphgen.train.resume import BATCHES


@checked
class TrainingSession(Opened):
    """Trains a folder that `gg.artifacts` wrote, and leaves the loop to you.

    Its methods have the names of the official onnxruntime-training, and its files are the same:

        session = gg.TrainingSession("art", learning_rate=1e-3)
        for x, labels in batches:
            loss = session.train_step(x, labels)
            session.optimizer_step()
            session.lazy_reset_grad()

    A batch is an array for each of `inputs`, in their order, or one dictionary of them; arrays are
    those of numpy, or anything that numpy can read, such as torch's tensors. With one batch for
    each update, all numbers have the bits of `gg.Trainer`'s.

    Args:
        directory: The folder with the four artifacts, which is only read.
        checkpoint: A checkpoint to start from, as for `load_checkpoint`.
        learning_rate: For `optimizer_step`, until `set_learning_rate`.
        seed: Fed to the model's input `seed`; dropout is a function of it and of the number of
            calls of `train_step`.
        threads: How many threads each session of the runtime has; its default if None.
        provider: As for `gg.Session`.
        strict: Refuse a provider that leaves nodes that calculate floats to the CPU.

    Raises GraphgenError for a folder that cannot be trained.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        learning_rate: float = 1e-3,
        seed: int = 0,
        threads: int | None = None,
        provider: Provider | None = None,
        strict: bool = False,
    ) -> None:
        directory = path_of(directory, "TrainingSession")
        self._engine = Engine(
            f"TrainingSession({directory.name})",
            directory,
            accumulate=1,
            seed=seed,
            threads=threads,
            provider=provider,
            strict=strict,
            processes=Processes(),
        )
        self._batches, self._added, self._training = 0, 0, True
        self.set_learning_rate(learning_rate)
        if checkpoint is not None:
            self.load_checkpoint(checkpoint)

    def __repr__(self) -> str:
        mode = "train" if self._training else "eval"
        return f"{self._engine.who}: step {self.step:,}, {mode}, rate {self._rate:g}"

    @property
    def inputs(self) -> dict[str, TensorType]:
        """What a batch has to hold, in order."""
        return self._engine.inputs

    @property
    def step(self) -> int:
        """How many updates were made."""
        return self._engine.step

    @property
    def parameters(self) -> dict[str, Array]:
        """Copies of all parameters by name, the frozen ones last; integers of those in few bits."""
        return self._engine.parameters

    @property
    def gradients(self) -> dict[str, Array]:
        """Copies of the gradients by parameter: zeros after `lazy_reset_grad`."""
        views = self._engine.state.views["g"]
        return {n: g.copy() if self._added else np.zeros_like(g) for n, g in views.items()}

    def train(self, mode: bool = True) -> "TrainingSession":
        """Make a call of this object a `train_step`, or an `eval_step` if not `mode`."""
        self._training = mode
        return self

    def eval(self) -> "TrainingSession":
        """Make a call of this object an `eval_step`."""
        return self.train(False)

    def __call__(self, *batch: Any) -> float:
        """`train_step` after `train()`, as at first, or `eval_step` after `eval()`."""
        return self.train_step(*batch) if self._training else self.eval_step(*batch)

    def train_step(self, *batch: Any) -> float:
        """The loss of a batch; its gradients are added to those since the last reset.

        Raises GraphgenError for a batch that does not fit and for a loss that is not finite; the
        gradients before it are then reset, too.
        """
        added, self._added = self._added, 0
        given, weight = self._read(batch)
        if not weight:
            raise GraphgenError(
                f"{self._engine.who}: batch {self._batches}: there is nothing to learn from: it "
                f"has no samples, or every label is {IGNORED}"
            )
        if not added:
            self._engine.state.begin(True)
        site = self._batches
        loss = self._engine.add_gradients(given, self._batches, site, more=bool(added))
        self._batches, self._added = self._batches + 1, added + 1
        return loss

    def eval_step(self, *batch: Any) -> float:
        """The loss of a batch without dropout."""
        given, _ = self._read(batch)
        return self._engine.evaluate(given, self._batches)

    def optimizer_step(self) -> bool:
        """Update the parameters by the gradients, which stay until `lazy_reset_grad`.

        Returns whether they were: not if a gradient in fp16 was too large, after which the loss
        is scaled less. Raises GraphgenError for any other gradient that is not finite.
        """
        engine = self._engine
        if not self._added:
            raise GraphgenError(
                f"{engine.who}: optimizer_step without gradients: call train_step before it"
                f"{user_line()}"
            )
        engine.state.end()
        norm = engine.norm()
        if not engine.scale.made(norm):
            return False
        if not math.isfinite(norm):
            raise engine.stop(f"gradient's norm is {norm:g}", None, None)
        engine.update(self._rate, norm)
        return True

    def lazy_reset_grad(self) -> None:
        """Let the gradients of the next `train_step` replace those before it."""
        self._added = 0

    def get_learning_rate(self) -> float:
        """The learning rate of the next `optimizer_step`."""
        return self._rate

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set it, before each step if it follows a `gg.schedule`."""
        check_rate(self._engine.who, learning_rate, "learning_rate is")
        self._rate = learning_rate

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """How many numbers `get_contiguous_parameters` returns."""
        return sum(array.size for array in self._chosen(trainable_only).values())

    def get_contiguous_parameters(self, trainable_only: bool = False) -> Array:
        """A copy of the parameters as one array, float32[size], in the order of `parameters`."""
        chosen = self._chosen(trainable_only).values()
        return np.concatenate([array.reshape(-1) for array in chosen])

    def copy_buffer_to_parameters(self, buffer: Any, trainable_only: bool = True) -> None:
        """Set the parameters from what `get_contiguous_parameters` returned.

        Raises GraphgenError for an array of another dtype, shape or size.
        """
        chosen, array = self._chosen(trainable_only), np.asarray(buffer)
        size = self.get_parameters_size(trainable_only)
        if array.dtype != np.float32 or array.shape != (size,):
            raise GraphgenError(
                f"{self._engine.who}: the buffer is {array.dtype}{[*array.shape]}; it must be "
                f"float32[{size}] with trainable_only={trainable_only}{user_line()}"
            )
        at = 0
        for parameter in chosen.values():
            parameter[...] = array[at : at + parameter.size].reshape(parameter.shape)
            at += parameter.size
        self._engine.send(chosen)

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        include_optimizer_state: bool = True,
        properties: Mapping[str, int | float | str] | None = None,
    ) -> Path:
        """Write the official file, with your `properties`, complete or not at all.

        Without `include_optimizer_state`, it has the parameters only.
        """
        saved = self._engine.checkpoint(
            self._rate, {**(properties or {}), "graphgen.seed": self._engine.seed}
        )
        saved.properties[BATCHES] = self._batches
        if not include_optimizer_state:
            saved.optimizer = None
        saved.save(path := path_of(path, "TrainingSession.save_checkpoint"))
        return path

    def load_checkpoint(self, path: str | os.PathLike[str]) -> dict[str, int | float | str]:
        """Go on from a checkpoint of a session, of a trainer or of the official runtime.

        The learning rate stays what it is. Returns the properties in the file. Raises GraphgenError
        for a file that is damaged, or of another model.
        """
        saved = Checkpoint.load(path)
        if (name := self._engine.other_frozen(saved)) is not None:
            raise GraphgenError(
                f"{self._engine.who}: the frozen {name} is another one in {path}; load a "
                f"checkpoint of these artifacts{user_line()}"
            )
        self._engine.restore(saved)
        self._batches, self._added = int(saved.properties.get(BATCHES, self.step)), 0
        return saved.properties

    def export_model_for_inferencing(
        self, path: str | os.PathLike[str], outputs: Sequence[str] | None = None
    ) -> Path:
        """Write the part of the evaluation model that makes some outputs, with the parameters.

        They are named, or all that it can return: those of the model that the loss is computed
        from, and those of `gg.artifacts(outputs=...)`. Inputs that only the loss needs are left
        out. Raises GraphgenError for a name that is not there.
        """
        outputs = self._engine.outputs if outputs is None else outputs
        file = self._engine.directory / EVAL
        model = parse_artifact(file, read_artifact(file))
        result = inference_of(model, outputs, self._engine.state.weights, self._engine.who)
        return export(result, path)

    def _read(self, batch: Sequence[Any]) -> tuple[Mapping[str, Array], float]:
        given = batch[0] if len(batch) == 1 and isinstance(batch[0], Mapping) else batch
        arrays = named(given, self.inputs, f"{self._engine.who}: batch {self._batches}")
        return self._engine.own_part(arrays, self._batches)

    def _chosen(self, trainable_only: bool) -> dict[str, Array]:
        if trainable_only:
            return self._engine.state.views["p"]
        weights = self._engine.state.weights
        for name, array in weights.items():
            if array.dtype != np.float32:
                raise GraphgenError(
                    f"{self._engine.who}: {name} is {array.dtype}, and the buffer float32; choose "
                    f"trainable_only=True{user_line()}"
                )
        return weights
