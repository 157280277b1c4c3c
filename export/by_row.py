"""Several adapters in one session, from which each row of a batch chooses by name."""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError, user_line
from graphgen.export.adapters import Adapter
from graphgen.export.session import model_of
from graphgen.graph import ModelLike
from graphgen.match import Engine, run_passes
from graphgen.operands import Array
from graphgen.passes.training.by_row import by_row

Given: TypeAlias = str | os.PathLike[str] | Adapter
"""An adapter, or the place that `Adapter.load` reads it from."""

Chosen: TypeAlias = str | Sequence[str | None] | None
"""The name of an adapter for all rows, or one for each; None stands for the base alone."""


def beside(
    model: str | os.PathLike[str] | ModelLike, adapters: Mapping[str, Given], who: str = "adapter"
) -> ir.Model:
    """A copy of `model` whose rows choose from adapters: y = x W + x Aₖ Bₖ for each product.

    Its new input `adapter`, int64[batch], holds k for each row: `numbers_of` gives it.
    Raises GraphgenError for an adapter of another model, and for a product whose operand is not
    (batch, in) or (batch, length, in).
    """
    if not adapters:
        raise GraphgenError(f"{who}: adapters is empty; give one or more by name{user_line()}")
    result = model_of(model, who).clone()
    found = [a if isinstance(a, Adapter) else Adapter.load(a) for a in adapters.values()]
    run_passes(result, [by_row(who, [adapter.placed(result) for adapter in found])], Engine())
    return result


def adapted(
    models: Sequence[ir.Model],
    who: str,
    adapter: Given | None,
    adapters: Mapping[str, Given] | None,
) -> list[tuple[ir.Model, Collection[str]]]:
    """Graphs of a folder with an adapter merged into their weights, or some beside them.

    With each graph, the names of the weights that were changed. A graph that no adapter changes
    stays as it is. Raises GraphgenError for a module that is in no graph, or in two by two names.
    """
    if adapter is None and adapters is None:
        return [(model, ()) for model in models]
    named = {"": adapter} if adapter is not None else dict(adapters or {})
    if not named:
        raise GraphgenError(f"{who}: adapters is empty; give one or more by name{user_line()}")
    found = {
        n: a if isinstance(a, Adapter) else Adapter.load(a)
        for n, a in named.items()
        if a is not None
    }
    parts = {name: parts_within(who, one, models) for name, one in found.items()}
    made: list[tuple[ir.Model, Collection[str]]] = []
    for place, model in enumerate(models):
        own = {name: split[place] for name, split in parts.items()}
        if len(models) > 1 and not any(part.matrices or part.saved for part in own.values()):
            made.append((model, ()))
        elif adapters is not None:
            made.append((beside(model, own, who), ()))
        else:
            merged, before = own[""].merged(model), model.graph.initializers
            other = {
                name
                for name, value in merged.graph.initializers.items()
                if name in before and value.const_value is not before[name].const_value
            }
            made.append((merged, other))
    return made


def parts_within(who: str, adapter: Adapter, models: Sequence[ir.Model]) -> list[Adapter]:
    """The part of an adapter that each graph has."""
    if len(models) == 1:
        return [adapter]
    parts = [adapter.within(model) for model in models]
    there = {name for part in parts for name in (*part.modules, *part.whole)}
    if missing := sorted({*adapter.modules, *adapter.whole} - there):
        raise GraphgenError(
            f"{who}: no graph of the folder has the module {missing[0]} of the adapter: give the "
            "folder of the checkpoint that it was trained on"
        )
    return parts


def numbers_of(who: str, names: Sequence[str], chosen: Chosen, rows: int) -> Array:
    """What the input `adapter` holds for `rows` rows: 1 + the place of each name; 0 for None.

    Raises GraphgenError for a name that is not one of `names`, and for another number of rows.
    """
    given = [chosen] * rows if chosen is None or isinstance(chosen, str) else [*chosen]
    if len(given) != rows:
        raise GraphgenError(
            f"{who}: adapter names {len(given)} rows, and there are {rows}; give a name, or None, "
            f"for each{user_line()}"
        )
    numbers: dict[str | None, int] = {None: 0}
    numbers |= {name: number for number, name in enumerate(names, 1)}
    for name in given:
        if name not in numbers:
            known = f"there are {', '.join(names)}" if names else "none is open"
            raise GraphgenError(f"{who}: adapter is {name!r}; {known}{user_line()}")
    return np.array([numbers[name] for name in given], np.int64)
