"""Adapters in a model that is to be trained: new ones, or one that goes on where it ended."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.export.adapters import Adapter
from graphgen.passes.training.adapters import A, LoRA, adapt, linears, only, published_names


def attach(
    model: ir.Model, lora: LoRA | Adapter | str, *, few_bits: bool
) -> tuple[dict[str, Any], list[str]]:
    """Add new adapters to a model, or an `Adapter`, which a text may name by its path.

    Returns what files note of them, and the weights that are trained as a whole beside them.
    `few_bits` says that the weights beside them will be rounded to these.
    """
    if isinstance(lora, str):
        lora = Adapter.load(lora) if Path(lora).exists() else LoRA.read(lora)
    if isinstance(lora, LoRA):
        return adapt(model, lora, few_bits=few_bits), []
    if lora.scaled:
        raise GraphgenError(
            "artifacts: lora: an adapter from a file .onnx_adapter, or with PEFT's base_layer, is "
            "read in another form than it was trained in: go on from the run, or merge it and "
            "begin a new one"
        )
    placed = lora.of_model(model)
    placed.check_sizes("artifacts: lora", model)
    lora.put_whole(model)
    usual = replace(lora.settings(""), targets=only(placed.modules))
    own = {module: replace(usual, rank=r, alpha=a) for module, (r, a) in placed.own.items()}
    noted = adapt(model, usual, few_bits=few_bits, own=own, shared=_shared(model, placed))
    for name, array in placed.matrices.items():
        if (value := model.graph.initializers.get(name)) is not None:
            value.const_value = ir.tensor(np.ascontiguousarray(array), name=value.name)
    return noted, _whole(model, lora)


def _whole(model: ir.Model, adapter: Adapter) -> list[str]:
    """The weights that an adapter has as a whole, by the model's names."""
    sites = {site.module: site.weight for site in linears(model).values()}
    found = list[str]()
    for name in adapter.saved:
        module, _, part = name.rpartition(".")
        [place] = adapter.places(model, [module])[module]
        weight = sites.get(place)
        if weight is None or len(weight.uses()) > 1:
            raise GraphgenError(
                f"artifacts: lora: {module} was trained as a whole, and the model ties it to "
                "another weight: merge the adapter and begin a new one"
            )
        found.append(str(weight.name) if part == "weight" else f"{place}.bias")
    return found


def _shared(model: ir.Model, adapter: Adapter) -> dict[str, str]:
    """The modules, parts of one weight of the checkpoint, whose A is that of another part."""
    first, found, names = dict[str, str](), dict[str, str](), published_names(model)
    for module in adapter.modules:
        if module in names:
            other = first.setdefault(names[module].name, module)
            if np.array_equal(adapter.matrices[module + A], adapter.matrices[other + A]):
                found[module] = other
    return {module: other for module, other in found.items() if module != other}
