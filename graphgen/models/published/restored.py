"""The weights of a checkpoint, put together from the parameters that were taken from them."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import TypeAlias

import numpy as np

from graphgen.models.published.family import Family
from graphgen.models.published.weights import Stack, halved, unstacked
from graphgen.nn.module import Module, Parameter, members
from graphgen.operands import Array
from graphgen.parts import Part


def parameters_in(module: Module) -> Iterator[tuple[str, Parameter]]:
    """The parameters of a module by their paths."""
    return ((path, item) for path, item in members(module) if isinstance(item, Parameter))


Made: TypeAlias = tuple[tuple[int, ...], Callable[[], Array]]
"""The shape of an array, and what makes it."""


def restored(
    family: Family,
    module: Module,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Array],
) -> dict[str, Made]:
    """The checkpoint's weights: what `Family.weights` takes apart, stacks and transposes."""
    turning = family.turned(module)
    found, parts, turned = dict[str, Made](), dict[str, dict[str, Part]](), set[str]()
    for path, source in family.sources(module).items():
        shape = shapes[path]
        if isinstance(source, Stack):
            size = (shape[1] // len(source.names), *shape[2:])
            for row, (i, name) in product(range(shape[0]), enumerate(source.names)):
                found[name.format(row)] = size, partial(_row, read, path, row, source, i)
            continue
        if path.rpartition(".")[2] in family.halved:
            found[source.name] = shape, partial(_halved, read, path)
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


def _halved(read: Callable[[str], Array], path: str) -> Array:
    return halved(read(path))


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
