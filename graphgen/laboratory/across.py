"""Which node is computed otherwise than on the CPU: `bisect --against`, `--against-python`.

All nodes run on the other side, which is a provider, a runtime, a precision, what a pass makes of
the graph, or another file, each on the values that the CPU has computed for it, so that no error is
passed on: the graph is cut at every value that both sides have, and one session runs all pieces.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphgen import ops
from graphgen.display import listed, on_screen
from graphgen.errors import GraphgenError
from graphgen.export.session import Session, model_of
from graphgen.export.write import to_bytes
from graphgen.graph import ModelLike
from graphgen.laboratory.sides import Against, Other, Side, check, side_of
from graphgen.maps import from_proto
from graphgen.measure.accuracy import differ, finite
from graphgen.measure.cost import used_outputs
from graphgen.measure.feeds import at_sizes, given_sizes, invent
from graphgen.operands import Array
from graphgen.passes.legalize import runnable
from graphgen.passes.repros import BOTH, write
from graphgen.traits import Trait, has
from graphgen.version import VERSION


@dataclass
class Differing:
    """A node whose result differs, alone, by more than the tolerance; `problem` if it fails."""

    node: str
    operator: str
    error: float  # relative RMS, infinite where shapes, integers or truth values differ
    problem: str = ""
    instead: list[str] = field(default_factory=list)  # the other file's operators in its place

    def __str__(self) -> str:
        what = f"fails: {self.problem}" if self.problem else f"differs by {self.error:.2g}"
        instead = f" (there {', '.join(self.instead)})" if self.instead else ""
        return f"{self.operator} {self.node}{instead} {what}"


@dataclass
class Crossing:
    """What `bisect(against=...)` found: the nodes that differ, in the order of the graph.

    Of another file, `matched` counts the values that were compared, by `structure` as `diff` pairs
    their nodes and by `name`; `unmatched` names the values of `model` and `against` that were not.
    """

    model: str
    against: str
    tolerance: float
    nodes: int
    whole: float | None = None  # the error of the model's outputs; None if it does not run there
    problem: str = ""  # why it does not run there
    placement: dict[str, int] = field(default_factory=dict)
    differing: list[Differing] = field(default_factory=list)
    matched: dict[str, int] = field(default_factory=dict)
    unmatched: dict[str, list[str]] = field(default_factory=dict)
    folder: str | None = None  # of the first of them

    def to_json(self) -> dict[str, Any]:
        """The object that docs/bisect-against.schema.json describes; non-finite is null."""
        found: dict[str, Any] = finite({"graphgen": VERSION, **asdict(self)})
        return found

    def __str__(self) -> str:
        whole = f"it does not run ({self.problem})"
        if self.whole is not None:
            whole = f"its outputs differ by {self.whole:.2g}"
        placed = ", ".join(f"{count} on {name}" for name, count in self.placement.items())
        placed = f" ({placed})" if placed else ""
        lines = [f"{self.model} on {self.against}: {whole}; {self.nodes} nodes{placed}"]
        if self.matched:
            counts = ", ".join(f"{count} by {how}" for how, count in self.matched.items())
            lines.append(f"values compared: {counts}")
            for side, names in self.unmatched.items():
                which = self.model if side == "model" else self.against
                lines.append(f"not in both, of {which}: {listed(names, len(names)) or 'none'}")
        if not self.differing:
            lines.append(f"no node alone differs by more than {self.tolerance:g} from the CPU")
        by_operator: dict[str, list[Differing]] = {}
        for one in self.differing:
            by_operator.setdefault(one.operator, []).append(one)
        for operator, found in by_operator.items():
            more = f", and {len(found) - 1} more {operator}" if found[1:] else ""
            lines.append(f"{found[0]}{more}")
        if self.folder is not None:
            lines.append(f"python {self.folder}/run.py shows the first")
        return "\n".join(lines)

    @on_screen
    def __repr__(self) -> Iterator[str]:
        first, *rest = str(self).split("\n")
        yield f"Crossing: {first}"
        yield from rest


def across(
    model: str | os.PathLike[str] | ModelLike,
    against: Against | None = None,
    *,
    python: str | os.PathLike[str] | None = None,
    tolerance: float | None = None,
    dims: Mapping[str, int] | None = None,
    feeds: Mapping[str, Array] | None = None,
    output: str | os.PathLike[str] | None = None,
    progress: Callable[[str], object] = lambda text: None,
) -> Crossing:
    """The nodes that the other side computes otherwise than the CPU, each on the CPU's values.

    Args:
        model: A path, or what `build`, `load` or `optimize` returned.
        against: A provider, its library's path, float16 or bfloat16, a pass, or the path of another
            .onnx file with the same inputs.
        python: Instead, the path of a Python interpreter with another onnxruntime; it needs only
            that and numpy.
        tolerance: The largest relative RMS difference of floats; integers and truth values must be
            equal. By default 1e-5; 5e-3 for float16, 4e-2 for bfloat16.
        dims: Sizes of symbolic dimensions, which arrays in `feeds` fix, too.
        feeds: Arrays for inputs, by name; others are random.
        output: A folder that gets NUMBER-OPERATOR for the first node found: a model of it alone,
            or of what both files have there, its inputs, and a run.py for plain onnxruntime.
        progress: What is told how far it is.

    Both sides run with the runtime's own optimizations off.

    Raises GraphgenError if the tolerance is no finite number of at least 0, the other side cannot
    be used, or the CPU does not run the model.
    """
    if (against is None) == (python is None):
        raise GraphgenError("bisect: give either what to compare with, or the path of a Python")
    if tolerance is not None and not 0 <= tolerance < np.inf:
        raise GraphgenError(f"bisect: tolerance is {tolerance}; it must be a number of at least 0")
    if python is None:
        check(against)
    name = Path(model).name if isinstance(model, str | os.PathLike) else "the model"
    model = model_of(model, "bisect")
    model = runnable(at_sizes(model, given_sizes(model, dims or {}, feeds or {}), least=0))
    arrays = invent(model, feeds or {})
    made = {str(v.name): n for n in model.graph for v in used_outputs(n) if _is_tensor(v)}
    side = side_of(against, python, model, [*made], arrays)
    limit = side.tolerance if tolerance is None else tolerance
    progress("all values on the CPU")
    every = Session(_showing(model, [*made]), provider="cpu", optimize=False)
    values = arrays | dict(zip(made, every(arrays), strict=True))
    found = Crossing(name, side.name, limit, 0)
    progress(f"the model on {side.name}")
    outputs = [n for n in (str(v.name) for v in model.graph.outputs) if n in made]
    try:
        _whole(found, side, outputs, values, arrays)
    except GraphgenError as error:
        found.problem = str(error)
        side.check()
    if isinstance(side, Other):
        _tell(found, side, made)
    progress(f"node by node on {side.name}")
    pieces = _cut(side.model, {side.named[n]: n for n in made if n in side.named}, values)
    groups = _by_node({n: node for n, node in made.items() if n in side.named})
    found.nodes, found.placement = len(groups), side.placement
    for names, results in _run(pieces, groups, values, side):
        node, wanted = made[names[0]], [side.seen(values[n]) for n in names]
        results = results if isinstance(results, str) else [*map(side.seen, results)]
        for one in _judged(node, results, wanted, limit):
            part = _showing(pieces, [side.named[n] for n in names])
            operators = [n.op_type for n in part.graph if not has(n, Trait.CONSTANT)]
            one.instead = operators if side.rebuilt and operators != [node.op_type] else []
            found.differing.append(one)
            if found.folder is None and output is not None:
                models = {"node": part}
                if not side.alone:
                    own = _showing(_cut(model, {n: n for n in side.named}, values), names)
                    models = dict(zip(BOTH, _with_all_inputs(own, part), strict=True))
                given = _fed(next(iter(models.values())), values)
                if side.alone:  # as `export` writes it, for runtimes as old as can read it
                    models = {"node": from_proto(onnx.load_from_string(to_bytes(part)))}
                folder = write(Path(output), node.op_type, models, given, side.script)
                found.folder = str(folder)
    side.check_that_it_ran()
    return found


_GIVEN = "given:"
"""What the names of cut values begin with."""


def _whole(
    found: Crossing, side: Side, outputs: Sequence[str], values: Mapping[str, Array], arrays: Any
) -> None:
    """Fill in the error of the whole model; of another file, drop what is not the same value."""
    shown = [side.named[n] for n in outputs]
    if not isinstance(side, Other):
        results = side.run(_showing(side.model, shown), arrays)
        found.whole = differ([values[n] for n in outputs], results).rel_rms
        return
    given = {n: arrays[n] for n in side.given}
    names = [n for n in side.named if n in values]
    results = side.run(_showing(side.model, [side.named[n] for n in names]), given)
    got = dict(zip(names, results, strict=True))
    wanted = [values[n] for n in outputs]
    found.whole = differ(wanted, [got[n] for n in outputs]).rel_rms
    right = found.whole <= found.tolerance
    for name in set(names) - {*outputs}:
        x, y = values[name], got[name]
        if not _alike(x, y, judge=right or name in side.by_name):
            del side.named[name]


_FAR = 0.5
"""Two values that differ by more, of models with equal outputs, mean different things."""


def _alike(x: Array, y: Array, *, judge: bool) -> bool:
    """Whether two values can be the same: sizes and masks must be equal, floats if `judge` near."""
    kinds = [ir.DataType.from_numpy(one.dtype).is_floating_point() for one in (x, y)]
    if x.shape != y.shape or not all(kinds):
        return not any(kinds) and np.array_equal(x, y)
    return not judge or differ([x], [y]).rel_rms <= _FAR


def _tell(found: Crossing, side: Other, made: Mapping[str, ir.Node]) -> None:
    """Which values of two files are compared, and which are not."""
    by_name = len({*side.by_name} & side.named.keys())
    compared = {n for n in made if n in side.named}
    found.matched = {"structure": len(compared) - by_name, "name": by_name}
    theirs = [str(y.name) for n in side.model.graph for y in used_outputs(n) if _is_tensor(y)]
    there = {side.named[n] for n in compared}
    found.unmatched = {
        "model": [n for n in made if n not in compared],
        "against": [n for n in theirs if n not in there],
    }


def _is_tensor(value: ir.Value) -> bool:
    return not isinstance(value.type, ir.SequenceType | ir.OptionalType) and value.name != ""


def _showing(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """A copy with these values as its outputs, and only what they need."""
    copy = model.clone()
    known = ir.convenience.create_value_mapping(copy.graph, include_subgraphs=False)
    copy.graph.outputs[:] = [known[name] for name in names]
    RemoveUnusedNodesPass()(copy)
    cut = [x for x in copy.graph.inputs if str(x.name).startswith(_GIVEN) and not x.uses()]
    for value in cut:
        copy.graph.inputs.remove(value)
    return copy


def _cut(model: ir.Model, named: Mapping[str, str], values: Mapping[str, Array]) -> ir.Model:
    """A copy in which every node takes inputs of the graph instead of the results in `named`.

    That leads to the first graph's names, after which the inputs are called. Results that are no
    tensors stay as they are; so do values that bodies read from outside.
    """
    copy = model.clone()
    given: dict[ir.Value, ir.Value] = {}
    for node in copy.graph:
        if has(node, Trait.CONSTANT):
            continue
        for i, x in enumerate(node.inputs):
            maker = None if x is None else x.producer()
            if x is None or maker is None or has(maker, Trait.CONSTANT) or x.name not in named:
                continue
            if x not in given:
                first = named[str(x.name)]
                dtype = ir.DataType.from_numpy(values[first].dtype)
                given[x] = ir.Value(name=f"{_GIVEN}{first}", shape=x.shape)
                given[x].type = x.type if x.dtype in (None, dtype) else ir.TensorType(dtype)
                copy.graph.inputs.append(given[x])
                if x.dtype not in (None, dtype):  # the other file calculates in another
                    cast = ir.node(ops.cast.name, [given[x]], {"to": x.dtype})
                    cast.outputs[0].type, cast.outputs[0].shape = x.type, x.shape
                    copy.graph.insert_before(node, cast)
                    given[x] = cast.outputs[0]
            node.replace_input_with(i, given[x])
    return copy


def _with_all_inputs(*models: ir.Model) -> Sequence[ir.Model]:
    """The models, each with the inputs of all: a script feeds them with the same arrays."""
    for model in models:
        known = {x.name for x in model.graph.inputs}
        others = (x for other in models for x in other.graph.inputs)
        for x in [x for x in others if x.name not in known]:
            known.add(x.name)
            model.graph.inputs.append(ir.Value(name=x.name, shape=x.shape, type=x.type))
    return models


def _fed(model: ir.Model, values: Mapping[str, Array]) -> dict[str, Array]:
    names = [str(x.name) for x in model.graph.inputs]
    known = ((name, values.get(name.removeprefix(_GIVEN))) for name in names)
    return {name: x for name, x in known if x is not None}


def _by_node(made: Mapping[str, ir.Node]) -> list[list[str]]:
    """The names of each node's results, in the order of the graph."""
    found: dict[ir.Node, list[str]] = {}
    for name, node in made.items():
        found.setdefault(node, []).append(name)
    return [*found.values()]


def _run(
    pieces: ir.Model, groups: list[list[str]], values: Mapping[str, Array], side: Side
) -> Iterator[tuple[list[str], list[Array] | str]]:
    """Each node's results, or why it fails: all in one session, halved where that fails."""
    names = [name for group in groups for name in group]
    if not names:
        return
    part = _showing(pieces, [side.named[name] for name in names])
    try:
        results = side.run(part, _fed(part, values))
    except GraphgenError as error:
        if len(groups) == 1:
            yield groups[0], str(error)
            return
        half = len(groups) // 2
        for some in (groups[:half], groups[half:]):
            yield from _run(pieces, some, values, side)
        return
    by_name = dict(zip(names, results, strict=True))
    for group in groups:
        yield group, [by_name[name] for name in group]


def _judged(
    node: ir.Node, results: list[Array] | str, wanted: list[Array], tolerance: float
) -> list[Differing]:
    """[] if a node's results are within the tolerance."""
    name = str(node.name)
    if isinstance(results, str):
        return [Differing(name, node.op_type, np.inf, results)]
    exact = all(
        np.array_equal(a, b)
        for a, b in zip(wanted, results, strict=True)
        if np.issubdtype(a.dtype, np.integer) or a.dtype == np.bool_
    )
    error = differ(wanted, results).rel_rms if exact else np.inf
    return [] if error <= tolerance else [Differing(name, node.op_type, error)]
