"""Runs of a graph that is being rewritten: what sizes values have where inference cannot tell."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.edit import identity_of
from graphgen.errors import GraphgenError
from graphgen.forms import MADE_UP
from graphgen.graph import all_values
from graphgen.infer import is_named
from graphgen.maps import to_proto
from graphgen.measure.feeds import feeds_of_kind, sizes_of
from graphgen.operands import Array
from graphgen.passes.legalize import runnable
from graphgen.record import recording
from graphgen.runtime import Session
from graphgen.value import adopt, graph_value

_MOST_NUMBERS = 64
"""Longer lists of integers are not sizes; what they hold is not kept."""


Trials: TypeAlias = Mapping[int, Sequence[tuple[dict[str, int], dict[str, Array]]]]
"""By the size to start from, sizes of a part's symbols, and arrays for some of its inputs."""


@dataclass
class Run:
    """The sizes of a graph's symbols in one run, of its values, and what short integers held."""

    sizes: dict[str, int]
    shapes: dict[ir.Value, tuple[int, ...]]
    numbers: dict[ir.Value, Array]

    def trial(self, inputs: Sequence[ir.Value]) -> tuple[dict[str, int], dict[str, Array]]:
        """The sizes of a part with these inputs, as `Memory.shape` names them, and its integers."""
        sizes, numbers = dict(self.sizes), dict[str, Array]()
        for i, value in enumerate(inputs):
            for axis, size in enumerate(self.shapes.get(value, ())):
                sizes[_symbol(i, axis)] = size
            if value in self.numbers:
                numbers[f"x{i}"] = self.numbers[value]
        return sizes, numbers


@dataclass
class Memory:
    """What verification keeps from one site to the next: equal parts, and runs of the graph.

    Behind windows that are shifted and padded, sizes have no name. Without the runs, the part of
    each site would hold all nodes above it, and the time would grow with their number squared.
    """

    equal: set[bytes] = field(default_factory=set)
    runs: dict[int, Run] = field(default_factory=dict)
    _seen: set[ir.Value] = field(default_factory=set)

    def observe(self, graph: ir.Graph, nodes: Iterable[ir.Node], bases: Iterable[int]) -> None:
        """Run the graph at sizes from each base, if some of the nodes were in no run yet."""
        if all(value in self._seen for node in nodes for value in node.outputs):
            return
        self._seen = set(all_values(graph))
        try:
            self.runs = dict(_runs(graph, dict.fromkeys(bases)))
        except (GraphgenError, ValueError):  # over 2 GiB, say, or a body that reads outer values
            self.runs = {}

    def knows(self, value: ir.Value) -> bool:
        """Whether all runs tell the sizes of a value, and, of integers, what it held."""
        runs = list(self.runs.values())
        whole = value.dtype is None or value.dtype.is_integer()
        held = [run.numbers if whole else run.shapes for run in runs]
        return bool(runs) and all(value in known for known in held)

    def shape(self, value: ir.Value, i: int) -> ir.Shape | None:
        """The shape of input `i` of a part; a size without a name gets one of its own."""
        shape = value.shape
        if shape is None:
            ranks = {len(run.shapes.get(value, ())) for run in self.runs.values()}
            shape = ir.Shape([None] * max(ranks)) if len(ranks) == 1 else None
        if shape is None:
            return None
        pairs = enumerate(shape)
        return ir.Shape([d if is_named(d) else _symbol(i, axis) for axis, d in pairs])


def renumbered(shape: ir.Shape | None, names: dict[str, str]) -> ir.Shape | None:
    """A copy in which made-up names count from 0, so that the parts of equal layers are equal."""
    if shape is None:
        return None

    def name(found: re.Match[str]) -> str:
        return names.setdefault(found[0], f"_d{len(names)}")

    return ir.Shape([d if is_named(d) else MADE_UP.sub(name, str(d)) for d in shape])


def _symbol(i: int, axis: int) -> str:
    return f"x{i}_{axis}"


def serialized(part: ir.Model) -> bytes:
    """The bytes of a model. Raises GraphgenError if they are too many for one file."""
    try:
        data: bytes = to_proto(part).SerializeToString()
        return data
    except Exception as e:  # protobuf's EncodeError, or a ValueError, by its version
        raise GraphgenError("it takes more than the 2 GiB of one file") from e


def _runs(graph: ir.Graph, bases: Iterable[int]) -> Iterator[tuple[int, Run]]:
    """From each base, the first sizes at which the graph runs."""
    feeds, whole = (ir.Model(graph.clone(), ir_version=10) for _ in range(2))
    values = zip(all_values(graph), all_values(whole.graph), strict=True)
    free = [pair for pair in values if pair[0].const_value is None]
    tensors = [(a, b) for a, b in free if isinstance(b.type, ir.TensorType)]
    integers = [(a, b) for a, b in tensors if b.dtype is not None and b.dtype.is_integer()]
    fixed = {a: s.numpy() for a, b in tensors if (s := b.shape) is not None and s.is_static()}
    unknown = [(a, b) for a, b in tensors if a not in fixed]
    with recording() as tape:
        shapes = [graph_value(ops.shape(adopt(value))) for _, value in unknown]
        tape.kept = True
    held = [identity_of(value) for _, value in integers]
    whole.graph.extend([*tape.nodes, *held])
    whole.graph.outputs[:] = [*shapes, *(node.outputs[0] for node in held)]
    session = Session(serialized(runnable(whole)), provider="cpu", optimize=False, threads=1)
    for base in bases:
        for sizes in sizes_of(feeds, base, long=True):
            try:
                found = session(feeds_of_kind(feeds, sizes, "normal", seed=base))
            except GraphgenError:
                continue  # sizes that do not fit together
            numbers = zip(integers, found[len(shapes) :], strict=True)
            yield (
                base,
                Run(
                    sizes,
                    fixed
                    | {v: tuple(map(int, n)) for (v, _), n in zip(unknown, found, strict=False)},
                    {v: np.array(x) for (v, _), x in numbers if x.size <= _MOST_NUMBERS},
                ),
            )
            break
