"""Updates in the place of weights: each product reads the weight that its adapter makes."""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graphgen.edit import tidy
from graphgen.errors import GraphgenError
from graphgen.match import Engine, Pass, PassReport, Rewired
from graphgen.operands import Array
from graphgen.passes.training.adapters import Linear, initializer, linears, products_by, some_of
from graphgen.passes.training.updates import Update, Whole
from graphgen.value import Value


def sites_of(
    who: str, found: Mapping[ir.Node, Linear], sizes: Mapping[str, Sequence[int]]
) -> dict[str, Linear]:
    """The first of the products `found` of each module that an update, [out, in], is for.

    Raises GraphgenError for a module without a product, with several weights, or of another size.
    """
    sites = dict[str, Linear]()
    for site in found.values():
        first = sites.setdefault(site.module, site)
        if first.weight is not site.weight and site.module in sizes:
            raise GraphgenError(
                f"{who}: module {site.module} has two weights, {first.weight.name} and "
                f"{site.weight.name}, and its update is of one: export it with names"
            )
    for name, shape in sizes.items():
        if name not in sites or sites[name].sizes != (*shape[::-1],):
            size = f", {[*sites[name].sizes[::-1]]}" if name in sites else ""
            raise GraphgenError(
                f"{who}: the adapter has a matrix {[*shape]} for module {name}, and "
                f"the model has {'it in another size' if size else 'no such product'}{size}; "
                f"its modules are {some_of(found.values())}: give the model it was trained on"
            )
    return sites


def check_finite(who: str, module: str, *arrays: Array | None) -> None:
    """Raise for an update that is not finite."""
    if not all(np.isfinite(array).all() for array in arrays if array is not None):
        raise GraphgenError(
            f"{who}: the update of {module} is not finite: take an earlier checkpoint, from "
            "before the training diverged"
        )


def merging(who: str, updates: Mapping[str, Update | Whole]) -> Pass:
    """What the update of its module makes of it, in the place of each weight W.

    Raises GraphgenError for a module without a product in the model, or of another size.
    """

    def run(model: ir.Model, engine: Engine) -> PassReport:
        found = linears(model)
        sites = sites_of(who, found, {name: update.shape for name, update in updates.items()})
        for name, update in updates.items():
            check_finite(who, name, *update)
        values: dict[tuple[ir.Value, str], ir.Value] = {}

        def merged(node: ir.Node) -> Rewired:
            site, matrix = found[node], node.inputs[1]
            assert matrix is not None
            if (matrix, site.module) not in values:
                weight = updates[site.module].of(site.matrix())
                weight = weight if site.by_rows else weight.T
                check_finite(who, site.module, weight)
                weight = weight if matrix is site.weight else np.ascontiguousarray(weight.T)
                name = f"{site.module}.merged{len(values)}"
                values[matrix, site.module] = initializer(name, weight)
            return Rewired({1: Value(values[matrix, site.module])}, "merged")

        matched = [node for node, site in found.items() if site.module in updates]
        report = engine.run("merge", model, products_by(merged), nodes=matched)
        if left := [site for site in report.sites if site.status != "fired"]:
            raise GraphgenError(f"{who}: {left[0].where} cannot be merged: {left[0].reason}")
        for value in values.values():
            model.graph.register_initializer(value)
        tidy(model)
        for (_, module), value in values.items():  # what nothing else reads leaves its name
            name = str(sites[module].weight.name)
            if name not in model.graph.initializers:
                del model.graph.initializers[str(value.name)]
                value.name = name
                model.graph.register_initializer(value)
        return report

    return Pass("merge", run, "whole")
