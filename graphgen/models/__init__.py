"""Whole architectures by name, with their sizes."""

from collections.abc import Mapping
from typing import Any

from graphgen.errors import GraphgenError, near, user_line
from graphgen.models.architectures import ARCHITECTURES, Architecture
from graphgen.nn.module import Module, count_parameters
from graphgen.processor import memory


def find(name: str) -> Architecture:
    """The architecture of that name. Raises a GraphgenError that names all if there is none."""
    if name not in ARCHITECTURES:
        raise GraphgenError(
            f"there is no model {name!r}; there are {', '.join(ARCHITECTURES)}"
            f"{near(name, ARCHITECTURES)}{user_line()}"
        )
    return ARCHITECTURES[name]


def create(name: str, **sizes: bool | int | float | str | None) -> Module:
    """The module of that name, with some sizes other than the default.

    Raises GraphgenError for an unknown name or size, a value that is not a size, and a model whose
    weights are larger than this machine's memory.
    """
    found = find(name)
    known = found.sizes()
    for size in sizes:
        if size not in known:
            raise GraphgenError(
                f"{name} has no size {size!r}; it has {', '.join(known)}{near(size, known)}"
                f"{user_line()}"
            )
    sizes = {**found.preset, **sizes}
    count, available = _count_parameters(found, sizes), memory()
    if available is not None and 4 * count > available:
        raise GraphgenError(
            f"{name} with these sizes has {count:,} parameters, {4 * count / 2**30:,.1f} GiB in "
            f"float32, and this machine has {available / 2**30:,.1f} GiB of memory; choose smaller "
            f"sizes{user_line()}"
        )
    return found.create(**sizes)


def _count_parameters(found: Architecture, sizes: Mapping[str, Any]) -> int:
    """The parameters of a module, without making it: models of one and two layers give the rest."""
    if "layers" not in found.sizes():
        return count_parameters(found.create(**sizes))
    layers = {**found.sizes(), **sizes}["layers"]
    if not isinstance(layers, int) or layers < 3:
        return count_parameters(found.create(**sizes))
    one, two = (count_parameters(found.create(**{**sizes, "layers": n})) for n in (1, 2))
    return one + (layers - 1) * (two - one)
