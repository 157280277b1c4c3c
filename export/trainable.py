"""Which weights of a model are trained, and why the others are not: a table, not a guess.

Exporters rename weights that they transpose, store equal ones once, and write constants among them.
Module paths of nodes show some of that: a pattern is refused if it names a part of what is one
weight here, or a weight that has another name here. The table shows what cannot be known.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.display import Tabular
from graphgen.errors import GraphgenError, warn
from graphgen.graph import constant, fixed_values, is_constant_name, is_float, parameters
from graphgen.infer import describe
from graphgen.op import is_a
from graphgen.passes.training.adapters import ADAPTERS
from graphgen.places import block_of
from graphgen.subgraphs import ancestors, reads
from graphgen.traits import Trait, has

_EXPORT = (
    "export with torch.onnx.export(..., dynamo=True, optimize=False), which keeps weights and "
    "their names"
)


class Weight(NamedTuple):
    """A weight or constant of a model, whether it is trained, and why not or as what."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    trained: bool
    why: str


class Weights(Tabular, list[Weight]):
    """All weights of a model, as a list that shows itself as a table."""

    def cells(self) -> list[list[str]]:
        rows = [["weight", "type", "", "why"]]
        for w in self:
            rows.append([w.name, f"{w.dtype}{[*w.shape]}", ("frozen", "trained")[w.trained], w.why])
        return rows

    def packed(self, schemes: Mapping[str, str]) -> "Weights":
        """The same, with those that are kept in few bits."""
        return Weights(
            w._replace(dtype=schemes[w.name], why="kept in few bits") if w.name in schemes else w
            for w in self
        )

    def summary(self) -> str:
        """How many are trained."""
        trained = [math.prod(w.shape) for w in self if w.trained]
        return f"{len(trained):,} of {len(self):,} are trained, {sum(trained):,} parameters"

    def heading(self) -> str:
        return f"Weights: {self.summary()}"


def choose_trainable(model: ir.Model, pattern: str | None, *, adapters: bool = False) -> Weights:
    """Every initializer, and whether it is trained; trained ones reach the loss in float32.

    `pattern` is searched in the names; without one, every float parameter that the loss depends on
    is trained; with `adapters` those are, beside what `pattern` names.

    Raises GraphgenError for a pattern that names nothing, something that must not be trained, or a
    part of what is one weight here; and for equal weights that are stored once.
    """
    [loss] = model.graph.outputs
    read = reads(model.graph)
    needed = {loss}.union(*(read[node] for node in ancestors(loss, read)))
    every, values = parameters(model.graph), model.graph.initializers
    fixed = fixed_values(model.graph)
    foreign = model.producer_name != "graphgen"  # ours keep their declared names
    uses = {n: _Uses(value, foreign) for n, value in values.items() if is_float(value)}
    beside = _search(ADAPTERS, values) if adapters else []
    if pattern is None and adapters:
        names, problem = beside, ""
    elif pattern is None:
        names = [n for n, v in every.items() if v in needed and not uses[n].is_folded_constant]
        problem = f"the loss {loss.name} depends on none of the {len(every)} float parameters"
    else:
        names = _search(pattern, values)
        some = ", ".join([*every][:6])
        problem = f"trainable={pattern!r} matches no parameter; there are {some or 'none'}"
        for name, used in uses.items():
            if values[name] in needed and values[name] not in fixed:
                used.check(pattern)
    if not names:
        raise GraphgenError(f"artifacts: {problem}")
    names = [name for name in values if name in {*names, *beside}]
    for name in names:
        value = values[name]
        if value in fixed:
            others = ", ".join(n for n in names if n in every) or "others"
            raise GraphgenError(
                f"artifacts: trainable={pattern!r} matches {name}, which is {fixed[value]}: no "
                f"gradient may change it; name only {others}"
            )
        if value.dtype is not ir.DataType.FLOAT:
            raise GraphgenError(
                f"artifacts: parameter {name} is {describe(value)}; only float32 is trained: "
                "convert it, or choose others with trainable="
            )
        if value not in needed:
            raise GraphgenError(
                f"artifacts: the loss {loss.name} does not depend on parameter {name}; leave it "
                "out of trainable="
            )
        if len(uses[name].blocks) > 1 and _is_uniform(value):
            raise GraphgenError(
                f"artifacts: {name} is one weight of {_listed(uses[name].blocks)}, whose weights "
                "were equal and were stored once; trained, they would stay equal: "
                f"{_EXPORT}, or leave it out with trainable="
            )
    copies = _copies(names, values)
    shared = [n for n in names if len(uses[n].blocks) > 1]
    if shared or copies:
        one = [f"{n} is one weight of {_listed(uses[n].blocks)}" for n in shared]
        one += [f"{n} is {copies[n]}" for n in copies]
        rest = f", and {len(one) - 3} more" if len(one) > 3 else ""
        warn(
            f"artifacts: {'; '.join(one[:3])}{rest}: tied in the model, or only equal when it was "
            "exported; its file does not say which"
        )

    def why(name: str, value: ir.Value) -> str:
        if value in fixed:
            return fixed[value]
        if not is_float(value):
            return "only float32 is trained"
        if name in names:
            return copies.get(name, uses[name].known())
        if name not in every or uses[name].is_folded_constant:
            return "a constant"
        if value not in needed:
            return "not reached by the loss"
        return "; ".join(filter(None, ["not named by trainable=", uses[name].known()]))

    return Weights(
        Weight(
            name,
            str(value.dtype).lower(),
            tuple(value.shape.numpy()) if value.shape is not None else (),
            name in names,
            why(name, value),
        )
        for name, value in values.items()
        if not is_constant_name(name)
    )


def _search(pattern: str, names: Iterable[str]) -> list[str]:
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise GraphgenError(
            f"artifacts: trainable={pattern!r} is not a regular expression: {error}"
        ) from None
    return [name for name in names if search(name) and not is_constant_name(name)]


class _Uses:
    """The modules in which a graph from another tool uses a weight, and hence its names there."""

    def __init__(self, value: ir.Value, foreign: bool) -> None:
        nodes = [*_readers(value)] if foreign else []
        self.name = str(value.name)
        self.blocks = sorted({*map(block_of, nodes)} - {""})
        path = self.name.replace("/", ".")
        self._own = [b for b in self.blocks if path.startswith(f"{b}.")]
        self.renamed = bool(self.blocks) and "." not in path and not self._own
        size = None if value.shape is None else [*value.shape]
        self.is_folded_constant = self.renamed and size is not None and all(d == 1 for d in size)
        self._in_product = any(has(node, Trait.PRODUCT) for node in _through_views(nodes))

    def check(self, pattern: str) -> None:
        """Raise if the pattern names only some of the weights that are stored as this one."""
        if not self.blocks or self.is_folded_constant or (self.renamed and not self._in_product):
            return
        named = bool(re.search(pattern, self.name))
        own = max(self._own, key=len, default=None)
        leaf = self.name[len(own) + 1 :] if own is not None else self.name.rpartition(".")[2]
        leaf = "weight" if self.renamed else leaf
        found = {block: bool(re.search(pattern, f"{block}.{leaf}")) for block in self.blocks}
        found |= dict.fromkeys(self._own, named)
        if not any(found.values()) or (named and (self.renamed or all(found.values()))):
            return
        some = _listed([block for block, given in found.items() if given])
        whole = f", one weight of {_listed(self.blocks)}" if len(self.blocks) > 1 else ""
        raise GraphgenError(
            f"artifacts: trainable={pattern!r} names {some}, whose weight "
            f"is {self.name} in this file{whole}; name all of it or none of it, or "
            f"{_EXPORT}"
        )

    def known(self) -> str:
        """What is known about a weight that is trained."""
        of = _listed(self.blocks)
        if len(self.blocks) > 1:
            return f"one weight of {of}: tied, or stored once since equal"
        if self.renamed:
            return f"the weight of {of}, renamed" if self._in_product else f"of {of}: a constant?"
        return f"used in {of}" if self.blocks and not self._own else ""


def _listed(blocks: Sequence[str]) -> str:
    more = [f"{len(blocks) - 3} more"] if len(blocks) > 4 else []
    return " and ".join([*blocks[: 3 if more else 4], *more])


def _readers(value: ir.Value) -> Iterator[ir.Node]:
    """The nodes that use a value, past nodes that only rename it."""
    for node in value.consumers():
        if is_a(node, ops.identity):
            yield from _readers(node.outputs[0])
        else:
            yield node


def _through_views(nodes: list[ir.Node]) -> Iterator[ir.Node]:
    for node in nodes:
        yield node
        if is_a(node, Trait.LAYOUT, ops.slice_, ops.concat):
            yield from _through_views([*_readers(node.outputs[0])])


def _is_uniform(value: ir.Value) -> bool:
    array = constant(value)
    return array is not None and array.size > 0 and bool((array == array.flat[0]).all())


def _copies(names: list[str], values: Mapping[str, ir.Value]) -> dict[str, str]:
    """Weights that are the transpose of another: exporters make them from a tied weight."""
    matrices = dict[tuple[int, ...], list[str]]()
    found = dict[str, str]()
    for name in names:
        shape = values[name].shape
        if shape is None or len(shape) != 2 or _is_uniform(values[name]):
            continue
        array = constant(values[name])
        if array is None:
            continue
        for other in matrices.get(array.shape[::-1], ()):
            one = constant(values[other])
            if one is not None and np.array_equal(one.T, array):
                found[name] = f"{other} transposed, trained apart from it"
        matrices.setdefault(array.shape, []).append(name)
    return found
