"""Which weights of a model are trained, and why the others are not: a table, not a guess.

Exporters rename weights that they transpose, store equal ones once, and write constants among them.
Module paths of nodes show some of that: a pattern is refused if it names a part of what is one
weight here, or a weight that has another name here. The table shows what cannot be known.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.display import Tabular
from graphgen.errors import GraphgenError, warn
from graphgen.graph import (
    NAMES_OF,
    ORIGIN,
    TORCH_KIND,
    constant,
    fixed_values,
    is_constant_name,
    is_float,
    parameters,
    present_inputs,
)
from graphgen.infer import describe
from graphgen.op import is_a
from graphgen.passes.training.adapters import ADAPTERS
from graphgen.places import block_of
from graphgen.subgraphs import ancestors, reads
from graphgen.traits import Trait, has
from graphgen.value import Deferred

_EXPORT = (
    "export with gg.from_torch, `graphgen import` or torch.onnx.export(..., dynamo=True, "
    "optimize=False), which keep weights and their names"
)

_NO_PARAMETERS = {"BUFFER": "a buffer", "CONSTANT_TENSOR": "a constant in torch"}
"""What torch's exporter calls what is no parameter."""

_TAKE_NORMS = (ops.conv, ops.conv_transpose, ops.gemm)  # into which exporters fold a norm

_Part: TypeAlias = str | Callable[..., Any] | Deferred
Parts: TypeAlias = _Part | Sequence[_Part]
"""Some weights of a model: a regular expression, searched in their names, one whole name, a module
or parameter of what the model was made of, or a list of these."""


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

    def moved(self, names: Sequence[str]) -> "Weights":
        """The same, with statistics that batches move."""
        why = "a running statistic, moved by each batch"
        return Weights(w._replace(why=why) if w.name in names else w for w in self)

    def summary(self) -> str:
        """How many are trained."""
        trained = [math.prod(w.shape) for w in self if w.trained]
        return f"{len(trained):,} of {len(self):,} are trained, {sum(trained):,} parameters"

    def heading(self) -> str:
        return f"Weights: {self.summary()}"


class _Chosen:
    """What `trainable=` or `frozen=` names: by patterns, or meant by whole names or modules."""

    def __init__(
        self, option: str, given: Parts, graph: ir.Graph, tied: Mapping[str, Sequence[str]]
    ) -> None:
        several = isinstance(given, Sequence) and not isinstance(given, str)
        parts: list[Any] = [*given] if several else [given]  # type: ignore[misc]
        texts = [repr(p) if isinstance(p, str) else type(p).__name__ for p in parts]
        self.given = f"{option}=" + (f"[{', '.join(texts)}]" if several else texts[0])
        self.meant, self._patterns = set[str](), list[re.Pattern[str]]()
        self._unmatched = list[str]()
        self._option, self._tied, values = option, tied, graph.initializers
        for part, text in zip(parts, texts, strict=True):
            if not isinstance(part, str):
                self.meant.update(_names_of(part, option, graph))
            elif part in values and not is_constant_name(part):
                self.meant.add(part)
            else:
                self._patterns.append(_pattern(part, option))
                names = {*values, *(n for name in tied if name in values for n in tied[name])}
                if not any(self._patterns[-1].search(n) for n in names if not is_constant_name(n)):
                    self._unmatched.append(text)

    def matches(self, name: str) -> bool:
        """Whether a weight is chosen, by any of its names if the file says that it is tied."""
        names = [name, *self._tied.get(name, ())]
        return name in self.meant or any(p.search(n) for p in self._patterns for n in names)

    def check(self, every: Iterable[str], renamed: Sequence[str]) -> None:
        """Raise if a pattern matches none of the weights, among them `every` parameter."""
        if self._unmatched:
            some = ", ".join([*every][:6]) or "none"
            hint = f"; the exporter renamed {_listed(renamed)}: {_EXPORT}" if renamed else ""
            raise GraphgenError(
                f"artifacts: {self._option}={self._unmatched[0]} matches no parameter; there are "
                f"{some}{hint}"
            )

    def of(self, names: Iterable[str]) -> list[str]:
        """Those of the names that are chosen."""
        return [name for name in names if self.matches(name) and not is_constant_name(name)]


def _names_of(part: object, option: str, graph: ir.Graph) -> list[str]:
    """The names of a module's weights."""
    find = graph.meta.get(NAMES_OF)
    names = None if find is None else find(part)
    if names is None:
        who = "read from a file" if find is None else "not made of it"
        raise GraphgenError(
            f"artifacts: {option}= has {type(part).__name__}, and the model is {who}: give a "
            "pattern of names, a name, or a module of what gg.build or gg.from_torch has made it of"
        )
    return list(names)


def _pattern(text: str, option: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise GraphgenError(
            f"artifacts: {option}={text!r} is not a regular expression: {error}"
        ) from None


def choose_trainable(
    model: ir.Model, trainable: Parts | None, frozen: Parts | None, *, adapters: bool = False
) -> Weights:
    """Every initializer, and whether it is trained; trained ones reach the loss in float32.

    Without `trainable`, every float parameter that the loss depends on is trained; with `adapters`
    those are, beside what `trainable` names. What `frozen` names is not trained.

    Raises GraphgenError for what names nothing, for a pattern that matches something that must not
    be trained, or a part of what is one weight here; and for equal weights that are stored once. A
    weight that is named in full is meant.
    """
    graph = model.graph
    [loss] = graph.outputs
    read = reads(graph)
    needed = {loss}.union(*(read[node] for node in ancestors(loss, read)))
    every, values = parameters(graph), graph.initializers
    fixed = fixed_values(graph)
    foreign = model.producer_name != "graphgen"  # ours keep their declared names
    origin, tied = _origin(model)
    known = ORIGIN in model.metadata_props  # nothing is folded in gg.from_torch
    uses = {
        n: _Uses(v, foreign, tied.get(n, ()), known=known) for n, v in values.items() if is_float(v)
    }
    beside = [n for n in values if re.search(ADAPTERS, n)] if adapters else []
    calculated = list[str]()
    wanted = None if trainable is None else _Chosen("trainable", trainable, graph, tied)
    kept = None if frozen is None else _Chosen("frozen", frozen, graph, tied)
    if wanted is not None:
        names = wanted.of(values)
    elif adapters:
        names = []
    else:
        names = [
            n
            for n, v in every.items()
            if v in needed and not uses[n].is_folded_constant and n not in origin
        ]
        calculated = _calculated(names, values, uses)
        names = [name for name in names if name not in calculated]
        if not names:
            raise GraphgenError(
                f"artifacts: the loss {loss.name} depends on none of the {len(every)} float "
                "parameters"
            )
    for chosen in filter(None, (wanted, kept)):
        for name, used in uses.items():
            if values[name] in needed and values[name] not in fixed and name not in chosen.meant:
                used.check(chosen)
        chosen.check(every, [n for n, used in uses.items() if used.renamed_product])
    names = [n for n in values if n in {*names, *beside} and not (kept and kept.matches(n))]
    if not names:
        raise GraphgenError(
            f"artifacts: {kept.given if kept else 'what is named'} leaves nothing to train; "
            "name fewer"
        )
    meant = wanted.meant if wanted is not None else set()
    for name in names:
        value, weight = values[name], uses.get(name)
        if value in fixed and name not in meant:
            others = ", ".join(n for n in names if n in every) or "others"
            raise GraphgenError(
                f"artifacts: {wanted.given if wanted else ''} matches {name}, which is "
                f"{fixed[value]}: no gradient may change it; name only {others}, or, if it is "
                "meant, its whole name"
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
        if weight is not None and name not in meant and (folded := weight.folded):
            raise GraphgenError(
                f"artifacts: {name} is {folded}: trained, it would not change as it does in torch: "
                f"{_EXPORT}, or leave it out with frozen={name!r}, or, if it is meant, give its "
                "whole name in trainable="
            )
        merged = weight is not None and len(weight.blocks) > 1 and not weight.tied
        if weight is not None and merged and _is_uniform(value) and name not in meant:
            raise GraphgenError(
                f"artifacts: {name} is one weight of {_listed(weight.blocks)}, whose weights "
                "were equal and were stored once; trained, they would stay equal: "
                f"{_EXPORT}, or leave it out with frozen={name!r}, or, if it is meant, give its "
                "whole name in trainable="
            )
    copies = _copies(names, values)
    shared = [n for n in names if len(uses[n].blocks) > 1 and not uses[n].tied]
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
            return fixed[value] + (", trained since it is named" if name in names else "")
        if not is_float(value):
            return "only float32 is trained"
        if name in names:
            return copies.get(name, uses[name].known())
        if name not in every or uses[name].is_folded_constant:
            return "a constant"
        if value not in needed:
            return "not reached by the loss"
        if name in calculated:
            return "calculated by an exporter"
        if wanted is None and name in origin:
            return origin[name]
        frozen = "named by frozen=" if kept and kept.matches(name) else "not named by trainable="
        return "; ".join(filter(None, [frozen, uses[name].known()]))

    return Weights(
        Weight(
            name,
            str(value.dtype).lower(),
            tuple(_shape(value)),
            name in names,
            why(name, value),
        )
        for name, value in values.items()
        if not is_constant_name(name)
    )


def _calculated(
    names: Sequence[str], values: Mapping[str, ir.Value], uses: Mapping[str, "_Uses"]
) -> list[str]:
    """What torch's exporter has calculated and stored beside the parameters that it knows; warns.

    That is a mask, a zero state, or what it made of a parameter, such as an expanded one. Operands
    of products are weights that it transposed.
    """
    known = [n for n in values if TORCH_KIND in values[n].metadata_props]
    found = [n for n in names if known and n not in known and not uses[n].in_product]
    if found:
        more = f", and {len(found) - 6} more" if len(found) > 6 else ""
        warn(
            f"artifacts: torch's exporter calculated {', '.join(found[:6])}{more}, of constants or "
            f"of parameters, so they are not trained; {_EXPORT}; or name them in trainable="
        )
    return found


def _shape(value: ir.Value) -> list[int]:
    """The sizes of an initializer's tensor; its value may have symbols, as a folded one."""
    return [] if value.const_value is None else [*value.const_value.shape.numpy()]


class _Uses:
    """The modules in which a graph from another tool uses a weight, and hence its names there."""

    def __init__(self, value: ir.Value, foreign: bool, tied: Sequence[str], *, known: bool) -> None:
        nodes = [*_readers(value)] if foreign else []
        self.name, self.tied = str(value.name), tied
        self.blocks = sorted({*map(block_of, nodes)} - {""})
        path = self.name.replace("/", ".")
        self._own = [b for b in self.blocks if path.startswith(f"{b}.")]
        torchs = value.metadata_props.get(TORCH_KIND) == "PARAMETER"  # so is the name
        self.renamed = bool(self.blocks) and "." not in path and not (self._own or torchs)
        size = None if value.shape is None else [*value.shape]
        self.is_folded_constant = self.renamed and size is not None and all(d == 1 for d in size)
        self.in_product = any(has(node, Trait.PRODUCT) for node in _through_views(nodes))
        self.renamed_product = self.renamed and self.in_product
        self.folded = "" if known or not nodes else self._folded(nodes)

    def _folded(self, nodes: list[ir.Node]) -> str:
        """What an exporter has folded into the weight of a convolution or a linear layer, or "".

        A norm after it, by whose module the node is then called; its weight keeps its own name, and
        the shift gets a name that no module has.
        """
        if not all(is_a(node, *_TAKE_NORMS) for node in nodes):
            return ""
        if re.fullmatch(r"onnx::Conv(Transpose)?_\d+", self.name):
            return f"a weight of {_listed(self.blocks)} into which a norm was folded"
        beside = {str(value.name) for node in nodes for value in present_inputs(node)}
        own, _, leaf = self.name.rpartition(".")
        if leaf.endswith("_bias") and self.name.removesuffix("_bias") in beside:
            return f"the shift of a norm that was folded into {self.name.removesuffix('_bias')}"
        near = (b == own or b.startswith(f"{own}.") or own.startswith(f"{b}.") for b in self.blocks)
        scripted = any(str(node.name or "").startswith("/") for node in nodes)
        if not own or not self.blocks or scripted or any(near):  # TorchScript repeats some names
            return ""
        return f"used in {_listed(self.blocks)} alone, a norm that was folded into it"

    def check(self, chosen: _Chosen) -> None:
        """Raise if patterns name only some of the weights that are stored as this one."""
        if (
            self.tied
            or not self.blocks
            or self.is_folded_constant
            or (self.renamed and not self.in_product)
        ):
            return
        named = chosen.matches(self.name)
        own = max(self._own, key=len, default=None)
        leaf = self.name[len(own) + 1 :] if own is not None else self.name.rpartition(".")[2]
        leaf = "weight" if self.renamed else leaf
        found = {block: chosen.matches(f"{block}.{leaf}") for block in self.blocks}
        found |= dict.fromkeys(self._own, named)
        if not any(found.values()) or (named and (self.renamed or all(found.values()))):
            return
        some = _listed([block for block, given in found.items() if given])
        whole = f", one weight of {_listed(self.blocks)}" if len(self.blocks) > 1 else ""
        raise GraphgenError(
            f"artifacts: {chosen.given} names {some}, whose weight "
            f"is {self.name} in this file{whole}; name all of it or none of it, or "
            f"{_EXPORT}"
        )

    def known(self) -> str:
        """What is known about a weight that is trained."""
        of = _listed(self.blocks)
        if self.tied:
            return f"tied: also {_listed(self.tied)}"
        if len(self.blocks) > 1:
            return f"one weight of {of}: tied, or stored once since equal"
        if self.renamed:
            return f"the weight of {of}, renamed" if self.in_product else f"of {of}: a constant?"
        return f"used in {of}" if self.blocks and not self._own else ""


def _origin(model: ir.Model) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Why weights are not trained by default, and other names of weights, as their maker says."""
    kinds = {n: v.metadata_props.get(TORCH_KIND) for n, v in model.graph.initializers.items()}
    found = {name: _NO_PARAMETERS[kind] for name, kind in kinds.items() if kind in _NO_PARAMETERS}
    try:
        noted = json.loads(model.metadata_props.get(ORIGIN, "{}"))
        found |= {str(name): str(why) for name, why in noted.get("frozen", {}).items()}
        tied = {str(name): [*map(str, names)] for name, names in noted.get("tied", {}).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise GraphgenError(
            f"artifacts: the model's metadata {ORIGIN!r} is damaged: {error}; import it again"
        ) from None
    return found, tied


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
