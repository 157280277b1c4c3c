"""What a family of checkpoints is: its tasks, and what its weights are called."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.models.published.config import Config
from graphgen.models.published.few_bits import FewBits, is_spare, keep, keep_stack
from graphgen.models.published.fresh import Fresh
from graphgen.models.published.weights import (
    Stack,
    alternated,
    lazily,
    misfit,
    part_of,
    stacked,
    stored_names,
)
from graphgen.nn.linear import Linear
from graphgen.nn.module import Module, Parameter, members
from graphgen.parts import Part
from graphgen.safetensors import Weight

Source: TypeAlias = str | Part | Stack | Callable[[Any], str | Part | Stack]
"""What a checkpoint calls a parameter; a function gets the module that holds it."""

_NORMS = {r"(.*LayerNorm\.)gamma": r"\1weight", r"(.*LayerNorm\.)beta": r"\1bias"}
"""What TensorFlow calls the weights of a norm, of any family."""


@dataclass(frozen=True)
class Family:
    """The architectures of one or more model types.

    `tasks` make a module from a configuration. `names` say what the checkpoint calls a part of a
    parameter's path: "attention": "self_attn", or "" if it has no name for it; "gated.up" is only
    the `up` of a `gated`, and one that ends in _ has no point behind it. A `Part` is one of several
    that are stored as one; where only the module knows how many there are, a function of it makes
    the part. `older` maps patterns of former names of weights to their present names. `tied` maps
    weights to the one they may share; `same` maps
    further copies to the original.
    Weights that begin with `prefix` do so in checkpoints with a head; in those of the body alone
    they need not. `unused` is a pattern of weights that checkpoints may hold and the task may leave
    out. Products are x W in graphs; published weights are Wᵀ if `transposed`. Parameters whose last
    name is in `swapped` are stored with their last two axes swapped, too; those in `halved` with
    the even rows of each matrix before the odd ones. What `held` matches is not trained by
    transformers: buffers, and parameters without a gradient; and no gradient reaches the row of the
    token that pads in the tables that `pads` matches. `renamed` maps patterns
    of modules that transformers no longer calls as its checkpoints do: adapters have its names.
    """

    tasks: Mapping[str, Callable[[Config], Any]]
    names: Mapping[str, Source]
    older: Mapping[str, str] = field(default_factory=dict)
    unused: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    transposed: bool = True
    swapped: Collection[str] = ()
    halved: Collection[str] = ()
    held: str = ""
    pads: str = r"(.*\.)?(word_embeddings|embed_tokens|tok_embeddings|shared)\.weight"
    renamed: Mapping[str, str] = field(default_factory=dict)

    def sources(self, module: Module) -> dict[str, Part | Stack]:
        """The weight of each parameter: its name in the checkpoint, and which part of it."""
        found = dict(members(module))
        own = (path for path, item in found.items() if isinstance(item, Parameter))
        return {path: self._source(path, found) for path in own}

    def _source(self, path: str, known: Mapping[str, Any]) -> Part | Stack:
        part, parts, outer, inside = Part(""), list[str](), "", ""
        for piece in path.split("."):
            found = self.names.get(f"{outer}.{piece}", self.names.get(piece, piece))
            if callable(found):
                found = found(known[inside])
            if isinstance(found, Part):
                part, found = found, found.name
            if isinstance(found, Stack):
                inner = ".".join(filter(None, parts))
                names = tuple(f"{inner}.{name}" for name in found.names)
                return found._replace(names=names)
            parts.append(found)
            outer, inside = piece, f"{inside}.{piece}".removeprefix(".")
        return part._replace(name=".".join(filter(None, parts)).replace("_.", "_"))

    def turned(self, module: Module) -> set[str]:
        """The parameters whose last two axes are swapped in the checkpoint."""
        found = set[str]()
        for path, item in members(module):
            if isinstance(item, Linear) and self.transposed:
                found.add(f"{path}.weight")
            elif isinstance(item, Parameter) and path.rpartition(".")[2] in self.swapped:
                found.add(path)
        return found

    def check_ties(self, module: Module, stored: Mapping[str, Weight], where: str) -> None:
        """Raise an error for a stored weight that is tied to another one but differs from it."""
        used = {name for source in self.sources(module).values() for name in stored_names(source)}
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
        for name in [*found]:
            for pattern, now in (_NORMS | dict(self.older)).items():
                if match := re.fullmatch(pattern, name):
                    found.setdefault(match.expand(now), found.pop(name))
        return found

    def weights(
        self,
        module: Module,
        stored: Mapping[str, Weight],
        dtype: ir.DataType,
        where: str,
        fresh: Fresh | None = None,
    ) -> dict[str, ir.TensorProtocol]:
        """The weights of every parameter, lazy. Raises an error that names all that do not fit.

        What is missing is `fresh` where it may be, as is what has another size in a head.
        """
        turning, stored = self.turned(module), self.current(stored)
        bare = bool(self.prefix) and not any(name.startswith(self.prefix) for name in stored)
        found, used = dict[str, ir.TensorProtocol](), set[str]()
        problems = list[str]()
        own = {path: item for path, item in members(module) if isinstance(item, Parameter)}
        for path, source in self.sources(module).items():
            shape, turned = own[path].shape, path in turning
            if isinstance(source, Stack):
                rows = [[n.format(row) for n in source.names] for row in range(shape[0])]
                size = shape[1] // len(source.names)
                wanted: tuple[int, ...] = (size, *shape[2:])
            else:
                rows = [[source.name]]
                wanted = (*shape[:-1], source.whole(shape[-1])) if shape else shape
                wanted = (*wanted[:-2], *wanted[:-3:-1]) if turned else wanted
            if bare:
                rows = [[name.removeprefix(self.prefix) for name in row] for row in rows]
            names = [name for row in rows for name in row]
            used.update(names)
            if wrong := [w for n in names if (w := misfit(n, stored.get(n), wanted))]:
                if fresh is not None and all(fresh.may_replace(n, stored) for n in names):
                    found[path] = fresh.make(path, own[path], dtype, names)
                else:
                    problems += wrong
                continue
            weights = [[stored[name] for name in row] for row in rows]
            halves = path.rpartition(".")[2] in self.halved
            if isinstance(source, Stack):
                read = partial(stacked, weights, source.alternate)
            elif halves:
                read = partial(alternated, weights[0][0])
            else:
                read = partial(part_of, weights[0][0], turned, source)
            found[path] = made = lazily(shape, dtype, path, read)
            if isinstance(source, Stack):
                keep_stack(made, weights, source.alternate)
            elif not halves or isinstance(weights[0][0], FewBits):  # whose blocks alternate
                keep(made, weights[0][0], source, turned)
        unused = f"{self.unused}|{getattr(module, 'unused', '')}"
        extra = sorted(
            n
            for n in stored.keys() - used
            if not re.fullmatch(unused, n) and not is_spare(n, stored)
        )
        problems += [f"{name} is not in the architecture" for name in extra]
        if problems:
            raise GraphgenError(f"{where}: the weights do not fit: {'; '.join(problems)}")
        return found
