"""From the graphs of a built folder back to the weights of the checkpoint, by its own names."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.graph import constant, parameters
from graphgen.models.published.config import Config
from graphgen.models.published.family import Family
from graphgen.models.published.restored import parameters_in, restored
from graphgen.models.published.sentence import sentence_head
from graphgen.models.published.sentence_modules import stage_folders
from graphgen.models.published.weights import converted, lazily, read_weights
from graphgen.operands import Array
from graphgen.safetensors import Weight

STORED = "graphgen.stored"
"""Metadata of a checkpoint's graph: a JSON object with its `task`, what the checkpoint has `stored`
if that decides about the architecture, the `dtype` of most of its weights and the `dtypes` of
others, and whether its names are `bare`, without the prefix of the body."""


STAGES = "head.stages."
"""How parameters of modules of sentence-transformers begin."""


class Checkpoint(NamedTuple):
    """The weights of a checkpoint, which are made when they are read, one at a time.

    `rounded` are the names of those read so far whose dtype holds them less exactly.
    """

    weights: Mapping[str, ir.TensorProtocol]
    rounded: list[str]


def note(task: str, stored: Mapping[str, Weight], *, asked: bool, bare: bool) -> str:
    """The metadata of a graph for a task, made of weights by their present names.

    These are in it if the module `asked` for them, as for those that make it another one.
    """
    kinds = {n: w.dtype.name for n, w in stored.items() if w.dtype.is_floating_point()}
    [(most, _)] = Counter(kinds.values()).most_common(1) or [("FLOAT", 0)]
    others = {name: kind for name, kind in sorted(kinds.items()) if kind != most}
    noted = {"task": task, "dtype": most, "dtypes": others, "bare": bare}
    return json.dumps(noted | ({"stored": sorted(stored)} if asked else {}))


def stored_weights(
    config: Config,
    family: Family,
    models: Sequence[ir.Model],
    dtype: ir.DataType | None = None,
    updates: Mapping[str, Callable[[Array], Array]] | None = None,
) -> Checkpoint:
    """The weights of a checkpoint of its graphs: in `dtype`, or as each was stored.

    Those of modules of sentence-transformers are not among them: see `stored_stages`.

    `updates` make a new parameter of the old one, by its name.

    Raises GraphgenError for graphs that do not say what they were built from, or lack weights.
    """
    where, noted, arrays = config.where, _Noted("", "FLOAT", {}, False, ()), _floats(models)
    for model in models:
        noted = _Noted.of(model, where)
    if noted.task not in family.tasks:
        raise GraphgenError(
            f"{where}: {config.model_type} has no task {noted.task!r}; build the folder again"
        )
    config.stored = frozenset(noted.stored)
    module = family.tasks[noted.task](config)
    if reason := getattr(module, "one_way", ""):
        raise GraphgenError(f"{where}: there is no way back to a checkpoint: {reason}")
    shapes = {path: item.shape for path, item in parameters_in(module)}
    if wrong := [p for p, shape in shapes.items() if p not in arrays or arrays[p].shape != shape]:
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise GraphgenError(
            f"{where}: the graphs next to it have no {', '.join(wrong[:4])}{more} in float32 and "
            "of its size: they are in few bits or half precision, or of another configuration; "
            "build the folder without --quantize and --dtype"
        )
    read, weights, rounded = _read(arrays, updates), dict[str, ir.TensorProtocol](), list[str]()
    for name, (shape, make) in restored(family, module, shapes, read).items():
        short = name.removeprefix(family.prefix)
        kept = noted.dtypes.get(name, noted.dtypes.get(short, noted.dtype))
        kind = ir.DataType[kept] if dtype is None else dtype
        given = short if noted.bare else name
        weights[given] = lazily(shape, kind, given, partial(_stored, name, kind, make, rounded))
    return Checkpoint(weights, rounded)


def stored_stages(
    folder: Path,
    features: int,
    models: Sequence[ir.Model],
    dtype: ir.DataType | None = None,
    updates: Mapping[str, Callable[[Array], Array]] | None = None,
) -> dict[str, Checkpoint]:
    """The weights of what follows an encoder of so many features in a folder of sentences.

    They are by the folders of these modules, which `folder` has, with their names and dtypes.
    """
    read, found = _read(_floats(models), updates), dict[str, Checkpoint]()
    family, named = Family(tasks={}, names={}), sentence_head(folder, features, ir.DataType.FLOAT)
    stages = named[0].stages if named else []
    for number, (place, stage) in enumerate(zip(stage_folders(folder), stages, strict=True)):
        shapes = {path: item.shape for path, item in parameters_in(stage)}
        kinds = {n: w.dtype for n, w in read_weights(folder / place).items()} if shapes else {}
        own, weights = list[str](), dict[str, ir.TensorProtocol]()
        of_stage = partial(_of_stage, read, number)
        for name, (shape, make) in restored(family, stage, shapes, of_stage).items():
            kind = kinds[name] if dtype is None else dtype
            weights[name] = lazily(shape, kind, name, partial(_stored, name, kind, make, own))
        if weights:
            found[place] = Checkpoint(weights, own)
    return found


def _of_stage(read: Callable[[str], Array], number: int, path: str) -> Array:
    return read(f"{STAGES}{number}.{path}")


def _floats(models: Sequence[ir.Model]) -> dict[str, Array]:
    """The parameters of graphs that are in float32."""
    own = ((n, constant(v)) for model in models for n, v in parameters(model.graph).items())
    return {name: x for name, x in own if x is not None and x.dtype == np.float32}


def _read(
    arrays: Mapping[str, Array], updates: Mapping[str, Callable[[Array], Array]] | None
) -> Callable[[str], Array]:
    """What reads a parameter, with its update if it has one."""
    added = updates or {}
    return lambda path: added[path](arrays[path]) if path in added else arrays[path]


def _stored(name: str, kind: ir.DataType, make: Callable[[], Array], rounded: list[str]) -> Array:
    """A weight in the dtype that it is stored in; `rounded` gets its name if that loses bits."""
    array = make()
    made = converted(array, kind, name)
    if made.dtype != array.dtype and not np.array_equal(made.astype(array.dtype), array):
        rounded.append(name)
    return made


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
