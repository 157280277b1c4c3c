"""From the graphs of a built folder back to the weights of the checkpoint, by its own names."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.graph import constant, parameters
from graphgen.models.published.config import Config
from graphgen.models.published.weights import Stack, converted, lazily, unstacked
from graphgen.nn.module import Module, Parameter, members
from graphgen.operands import Array
from graphgen.parts import Part
from graphgen.safetensors import Weight

if TYPE_CHECKING:
    from graphgen.models.published.family import Family

STORED = "graphgen.stored"
"""Metadata of a checkpoint's graph: a JSON object with its `task`, what the checkpoint has `stored`
if that decides about the architecture, the `dtype` of most of its weights and the `dtypes` of
others, and whether its names are `bare`, without the prefix of the body."""


class Checkpoint(NamedTuple):
    """The weights of a checkpoint, which are made when they are read, one at a time.

    `rounded` are the names of those read so far whose dtype holds them less exactly.
    """

    weights: Mapping[str, ir.TensorProtocol]
    rounded: list[str]


def note(task: str, stored: Mapping[str, Weight], *, several: bool, bare: bool) -> str:
    """The metadata of a graph for a task, made of weights by their present names."""
    kinds = {n: w.dtype.name for n, w in stored.items() if w.dtype.is_floating_point()}
    [(most, _)] = Counter(kinds.values()).most_common(1) or [("FLOAT", 0)]
    others = {name: kind for name, kind in sorted(kinds.items()) if kind != most}
    noted = {"task": task, "dtype": most, "dtypes": others, "bare": bare}
    return json.dumps(noted | ({"stored": sorted(stored)} if several else {}))


def stored_weights(
    config: Config,
    family: "Family",
    models: Sequence[ir.Model],
    dtype: ir.DataType | None = None,
    updates: Mapping[str, Callable[[Array], Array]] | None = None,
) -> Checkpoint:
    """The weights of a checkpoint of its graphs: in `dtype`, or as each was stored.

    `updates` make a new parameter of the old one, by its name.

    Raises GraphgenError for graphs that do not say what they were built from, or lack weights.
    """
    where, noted, arrays = config.where, _Noted("", "FLOAT", {}, False, ()), dict[str, Array]()
    for model in models:
        noted = _Noted.of(model, where)
        own = {name: constant(value) for name, value in parameters(model.graph).items()}
        arrays |= {n: x for n, x in own.items() if x is not None and x.dtype == np.float32}
    if any(name.startswith("head.stages.") for name in arrays):
        raise GraphgenError(
            f"{where}: the graph next to it has modules of sentence-transformers with weights of "
            "their own, such as Dense, which are not written back; build it from a folder whose "
            "modules.json lists none"
        )
    if noted.task not in family.tasks:
        raise GraphgenError(
            f"{where}: {config.model_type} has no task {noted.task!r}; build the folder again"
        )
    config.stored = frozenset(noted.stored)
    module = family.tasks[noted.task](config)
    shapes = {path: item.shape for path, item in _parameters(module)}
    if wrong := [p for p, shape in shapes.items() if p not in arrays or arrays[p].shape != shape]:
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise GraphgenError(
            f"{where}: the graphs next to it have no {', '.join(wrong[:4])}{more} in float32 and "
            "of its size: they are in few bits or half precision, or of another configuration; "
            "build the folder without --quantize and --dtype"
        )
    added = updates or {}

    def read(path: str) -> Array:
        return added[path](arrays[path]) if path in added else arrays[path]

    weights, rounded = dict[str, ir.TensorProtocol](), list[str]()

    def stored(name: str, kind: ir.DataType, make: Callable[[], Array]) -> Array:
        array = make()
        made = converted(array, kind, name)
        if made.dtype != array.dtype and not np.array_equal(made.astype(array.dtype), array):
            rounded.append(name)
        return made

    for name, (shape, make) in _joined(family, module, shapes, read).items():
        short = name.removeprefix(family.prefix)
        kept = noted.dtypes.get(name, noted.dtypes.get(short, noted.dtype))
        kind = ir.DataType[kept] if dtype is None else dtype
        given = short if noted.bare else name
        weights[given] = lazily(shape, kind, given, partial(stored, name, kind, make))
    return Checkpoint(weights, rounded)


class _Noted(NamedTuple):
    task: str
    dtype: str
    dtypes: dict[str, str]
    bare: bool
    stored: Collection[str]

    @classmethod
    def of(cls, model: ir.Model, where: str) -> "_Noted":
        try:
            fields = json.loads(model.metadata_props[STORED])
            found = cls(
                str(fields["task"]),
                str(fields["dtype"]),
                {str(name): str(kind) for name, kind in fields["dtypes"].items()},
                bool(fields["bare"]),
                [*map(str, fields.get("stored", ()))],
            )
            if not all(
                ir.DataType[k].is_floating_point() for k in {found.dtype, *found.dtypes.values()}
            ):
                raise ValueError("a dtype of integers")
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
            raise GraphgenError(
                f"{where}: a graph next to it does not say what it was built from; build the "
                "folder again with graphgen build"
            ) from None
        return found


def _parameters(module: Module) -> Iterator[tuple[str, Parameter]]:
    return ((path, item) for path, item in members(module) if isinstance(item, Parameter))


_Made: TypeAlias = tuple[tuple[int, ...], Callable[[], Array]]
"""The shape of an array, and what makes it."""


def _joined(
    family: "Family",
    module: Module,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Array],
) -> dict[str, _Made]:
    """The checkpoint's weights: what `Family.weights` takes apart, stacks and transposes."""
    turning = family.turned(module)
    found, parts, turned = dict[str, _Made](), dict[str, dict[str, Part]](), set[str]()
    for path, source in family.sources(module).items():
        shape = shapes[path]
        if isinstance(source, Stack):
            size = (shape[1] // len(source.names), *shape[2:])
            for row, (i, name) in product(range(shape[0]), enumerate(source.names)):
                found[name.format(row)] = size, partial(_row, read, path, row, source, i)
            continue
        if path in turning:
            turned.add(source.name)
        if source.of == source.width:
            parts[source.name] = {path: source}
        else:
            parts.setdefault(source.name, {})[path] = source
    for name, own in parts.items():
        path, part = next(iter(own.items()))
        before = shapes[path]
        whole = (*before[:-1], part.whole(before[-1])) if before else before
        assert sum(shapes[p][-1] for p in own if before) == sum(whole[-1:]), name
        size = (*whole[:-2], *whole[:-3:-1]) if name in turned else whole
        found[name] = size, partial(_whole, read, own, whole, name in turned)
    return found


def _row(read: Callable[[str], Array], path: str, row: int, source: Stack, number: int) -> Array:
    return unstacked(read(path)[row], source)[number]


def _whole(
    read: Callable[[str], Array], parts: Mapping[str, Part], shape: tuple[int, ...], turned: bool
) -> Array:
    """A weight that is stored as one, of its parts."""
    [(path, part), *more] = parts.items()
    if not more and part.of == part.width:
        array = read(path)
    else:
        array = np.zeros(shape, np.float32)
        for path, part in parts.items():
            array[..., part.outputs(shape[-1])] = read(path)
    return np.swapaxes(array, -1, -2) if turned else array
