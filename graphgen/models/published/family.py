"""What a family of checkpoints is: its tasks, and what its weights are called."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.models.published.config import Config
from graphgen.models.published.weights import lazily
from graphgen.nn.feed_forward import Activation
from graphgen.nn.linear import Linear
from graphgen.nn.module import Module, Parameter, TensorSpec, members
from graphgen.operands import Array
from graphgen.safetensors import Weight

ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
"""What configurations call the activations of `nn.FeedForward`."""


class Part(NamedTuple):
    """Part `number` of a weight that holds `of` equal parts, side by side along the outputs."""

    name: str
    number: int = 0
    of: int = 1


class Task(Protocol):
    """A module that `build` records for a task."""

    def inputs(self) -> dict[str, TensorSpec]:
        """What `build` needs to know about the arguments."""
        ...


@dataclass(frozen=True)
class Family:
    """The architectures of one or more model types.

    `tasks` make a module from a configuration. `names` say what the checkpoint calls a part of a
    parameter's path: "attention": "self_attn", or "" if it has no name for it; "gated.up" is only
    the `up` of a `gated`. `older` maps patterns of former names of weights to their present names.
    `tied` maps weights to the one they may share; `same` maps further copies to the original.
    Weights that begin with `prefix` do so in checkpoints with a head; in those of the body alone
    they need not. `unused` is a pattern of weights that checkpoints may hold and the task may leave
    out. Products are x W in graphs; published weights are Wᵀ if `transposed`.
    """

    tasks: Mapping[str, Callable[[Config], Any]]
    names: Mapping[str, str | Part]
    older: Mapping[str, str] = field(default_factory=dict)
    unused: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    transposed: bool = True

    def source(self, path: str) -> Part:
        """The weight of a parameter: its name in the checkpoint, and which part of it."""
        number, of, parts, outer = 0, 1, [], ""
        for piece in path.split("."):
            found = self.names.get(f"{outer}.{piece}", self.names.get(piece, piece))
            if isinstance(found, Part):
                found, number, of = found
            parts.append(found)
            outer = piece
        return Part(".".join(filter(None, parts)), number, of)

    def modules(self, module: Module, *, body: bool) -> dict[str, Part]:
        """What the checkpoint calls each linear layer; of the `body` alone, without the prefix."""
        paths = [path for path, item in members(module) if isinstance(item, Linear)]
        found = {path: self.source(f"{path}.weight") for path in paths}
        prefix = self.prefix if body else ""
        return {
            path: part._replace(name=part.name.removeprefix(prefix).removesuffix(".weight"))
            for path, part in found.items()
        }

    def check_ties(self, module: Module, stored: Mapping[str, Weight], where: str) -> None:
        """Raise an error for a stored weight that is tied to another one but differs from it."""
        used = {self.source(path).name for path, _ in members(module)}
        stored = self.current(stored)
        for name, table in self.tied.items():
            head = stored.get(name) if name not in used else None
            whole = stored.get(table, stored.get(table.removeprefix(self.prefix)))
            if head is not None and whole is not None and not head.equals(whole):
                raise GraphgenError(
                    f"{where}: {name} is tied to {table}, but the file has other numbers for it: "
                    "set tie_word_embeddings to false in config.json to use them, as transformers "
                    "5 does, or remove them to use the table, as transformers 4 does"
                )
        headless = getattr(module, "head", None) is None
        for name, table in self.same.items():
            if name in used and not headless:
                continue  # each is read on its own
            own, whole = (
                stored.get(n, stored.get(n.removeprefix(self.prefix))) for n in (name, table)
            )
            if own is not None and whole is not None and not own.equals(whole):
                raise GraphgenError(
                    f"{where}: {name} and {table} are one table, but the file has different "
                    "numbers for each: remove the wrong one"
                )

    def current(self, stored: Mapping[str, Weight]) -> dict[str, Weight]:
        """The weights by their present names; one that is already stored by that name wins."""
        found = dict(stored)
        for name in stored:
            for pattern, now in self.older.items():
                if match := re.fullmatch(pattern, name):
                    found.setdefault(match.expand(now), found.pop(name))
        return found

    def weights(
        self, module: Module, stored: Mapping[str, Weight], dtype: ir.DataType, where: str
    ) -> dict[str, ir.TensorProtocol]:
        """The weights of every parameter, lazy. Raises an error that names all that do not fit."""
        linear = (
            {f"{path}.weight" for path, item in members(module) if isinstance(item, Linear)}
            if self.transposed
            else set()
        )
        stored = self.current(stored)
        bare = bool(self.prefix) and not any(name.startswith(self.prefix) for name in stored)
        found: dict[str, ir.TensorProtocol] = {}
        used: set[str] = set()
        problems = []
        for path, item in members(module):
            if not isinstance(item, Parameter):
                continue
            name, number, of = self.source(path)
            name = name.removeprefix(self.prefix) if bare else name
            weight, turned = stored.get(name), path in linear
            if weight is None:
                problems.append(f"{name} is missing")
                continue
            used.add(name)
            if not weight.dtype.is_floating_point():
                problems.append(f"{name} is {weight.dtype.name.lower()}, must hold real numbers")
                continue
            shape = weight.shape[::-1] if turned else weight.shape
            shape = (*shape[:-1], shape[-1] // of) if shape else shape
            if shape != item.shape or (weight.shape[0 if turned else -1]) % of:
                wanted = (*item.shape[:-1], item.shape[-1] * of)
                wanted = wanted[::-1] if turned else wanted
                problems.append(f"{name} is {list(weight.shape)}, must be {list(wanted)}")
                continue
            found[path] = lazily(shape, dtype, path, _reader(weight, turned, number, of))
        left = set(stored) - used
        extra = sorted(n for n in left if not re.fullmatch(self.unused, n))
        problems += [f"{name} is not in the architecture" for name in extra]
        if problems:
            raise GraphgenError(f"{where}: the weights do not fit: {'; '.join(problems)}")
        return found


def _reader(weight: Weight, turned: bool, number: int, of: int) -> Callable[[], Array]:
    def read() -> Array:
        array = weight.read().T if turned else weight.read()
        return np.split(array, of, axis=-1)[number] if of > 1 else array

    return read
