"""Which node another execution provider computes otherwise than the CPU: `bisect --against`.

All nodes run there, each on the values that the CPU has computed for it, so that no error is passed
on: the graph is cut at every value, and one session runs all the pieces.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphgen.display import on_screen
from graphgen.errors import GraphgenError, GraphgenWarning
from graphgen.export.session import Session, model_of
from graphgen.graph import ModelLike
from graphgen.measure.accuracy import differ, finite
from graphgen.measure.cost import used_outputs
from graphgen.measure.feeds import at_sizes, given_sizes, invent
from graphgen.operands import Array
from graphgen.passes.repros import script_against, write
from graphgen.passes.verify import runnable
from graphgen.providers import Provider
from graphgen.traits import Trait, has
from graphgen.version import VERSION


@dataclass
class Differing:
    """A node whose result differs, alone, by more than the tolerance; `problem` if it fails."""

    node: str
    operator: str
    error: float  # relative RMS, infinite where shapes, integers or truth values differ
    problem: str = ""

    def __str__(self) -> str:
        what = f"fails: {self.problem}" if self.problem else f"differs by {self.error:.2g}"
        return f"{self.operator} {self.node} {what}"


@dataclass
class Crossing:
    """What `bisect(against=...)` found: the nodes that differ, in the order of the graph."""

    model: str
    against: str
    tolerance: float
    nodes: int
    whole: float | None = None  # the error of the model's outputs; None if it does not run there
    problem: str = ""  # why it does not run there
    placement: dict[str, int] = field(default_factory=dict)
    differing: list[Differing] = field(default_factory=list)
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
        lines = [f"{self.model} on {self.against}: {whole}; {self.nodes} nodes ({placed})"]
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
    against: Provider,
    *,
    tolerance: float = 1e-5,
    dims: Mapping[str, int] | None = None,
    feeds: Mapping[str, Array] | None = None,
    output: str | os.PathLike[str] | None = None,
    progress: Callable[[str], object] = lambda text: None,
) -> Crossing:
    """The nodes that a provider computes otherwise than the CPU, each on the CPU's values.

    `tolerance` bounds the relative RMS difference of floats; integers and truth values must be
    equal. Both run with the runtime's own optimizations off. `dims` fix symbolic dimensions, as do
    arrays in `feeds`; other inputs are invented. The folder `output` gets NUMBER-OPERATOR for the
    first node found: a model of it alone, its inputs, and a run.py for plain onnxruntime.

    Raises GraphgenError if the tolerance is no finite number of at least 0, the provider cannot be
    used, or the CPU does not run the model.
    """
    if not 0 <= tolerance < np.inf:
        raise GraphgenError(f"bisect: tolerance is {tolerance}; it must be a number of at least 0")
    name = Path(model).name if isinstance(model, str | os.PathLike) else "the model"
    model = model_of(model, "bisect")
    model = runnable(at_sizes(model, given_sizes(model, dims or {}, feeds or {})))
    arrays = invent(model, feeds or {})
    made = {str(v.name): n for n in model.graph for v in used_outputs(n) if _is_tensor(v)}
    progress("all values on the CPU")
    every = Session(_showing(model, [*made]), provider="cpu", optimize=False)
    values = arrays | dict(zip(made, every(arrays), strict=True))
    found = Crossing(name, str(against), tolerance, len({*made.values()}))
    progress(f"the model on {against}")
    outputs = [str(v.name) for v in model.graph.outputs if str(v.name) in values]
    with warnings.catch_warnings(action="ignore", category=GraphgenWarning):  # placement tells
        try:
            session = Session(_showing(model, outputs), provider=against, optimize=False)
            found.placement = session.plan.placement
            found.whole = differ([values[n] for n in outputs], session(arrays)).rel_rms
        except GraphgenError as error:
            found.problem = str(error)
            Session(_NOTHING, provider=against)  # raises if it is the provider that does not work
        progress(f"node by node on {against}")
        pieces = _cut(model)
        for names, results in _run(pieces, _by_node(made), values, against):
            node = made[names[0]]
            found.differing += _judged(node, results, [values[n] for n in names], tolerance)
            if found.differing and found.folder is None and output is not None:
                alone = _showing(pieces, names)
                given = _fed(alone, values)
                script = script_against(against)
                found.folder = str(
                    write(Path(output), node.op_type, {"node": alone}, given, script)
                )
    return found


_GIVEN = "given:"
"""What the names of cut values begin with."""

_NOTHING = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 18]> g (float[1] x) => (float[1] y) { y = Identity(x) }'
).SerializeToString()


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


def _cut(model: ir.Model) -> ir.Model:
    """A copy in which every node takes inputs of the graph instead of others' results.

    Results that are no tensors stay as they are; so do values that bodies read from outside.
    """
    copy = model.clone()
    given: dict[ir.Value, ir.Value] = {}
    for node in copy.graph:
        if has(node, Trait.CONSTANT):
            continue
        for i, x in enumerate(node.inputs):
            maker = None if x is None else x.producer()
            if x is None or maker is None or has(maker, Trait.CONSTANT) or not _is_tensor(x):
                continue
            if x not in given:
                given[x] = ir.Value(name=f"{_GIVEN}{x.name}", shape=x.shape, type=x.type)
                copy.graph.inputs.append(given[x])
            node.replace_input_with(i, given[x])
    return copy


def _fed(model: ir.Model, values: Mapping[str, Array]) -> dict[str, Array]:
    names = [str(x.name) for x in model.graph.inputs]
    return {name: values[name.removeprefix(_GIVEN)] for name in names}


def _by_node(made: Mapping[str, ir.Node]) -> list[list[str]]:
    """The names of each node's results, in the order of the graph."""
    found: dict[ir.Node, list[str]] = {}
    for name, node in made.items():
        found.setdefault(node, []).append(name)
    return [*found.values()]


def _run(
    pieces: ir.Model, groups: list[list[str]], values: Mapping[str, Array], against: Provider
) -> Iterator[tuple[list[str], list[Array] | str]]:
    """Each node's results, or why it fails: all in one session, halved where that fails."""
    names = [name for group in groups for name in group]
    part = _showing(pieces, names)
    try:
        results = Session(part, provider=against, optimize=False)(_fed(part, values))
    except GraphgenError as error:
        if len(groups) == 1:
            yield groups[0], str(error)
            return
        half = len(groups) // 2
        for some in (groups[:half], groups[half:]):
            yield from _run(pieces, some, values, against)
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
