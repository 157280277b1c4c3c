"""Several low-rank adapters beside one base: each row of a batch has its own."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.errors import GraphgenError
from graphgen.graph import constant
from graphgen.infer import describe, same_dim
from graphgen.match import Engine, Pass, PassReport, Rewrite
from graphgen.op import find_op, read_attributes
from graphgen.passes.training.adapters import (
    PRODUCTS,
    A,
    B,
    Linear,
    Update,
    check_finite,
    initializer,
    linears,
    sites_of,
)
from graphgen.value import Tensor, adopt

CHOICE = "adapter"
"""The input, int64[batch], that says which adapter each row has: from 1, and 0 for none."""

Placed: TypeAlias = Mapping[str, Update]
"""The update of each module."""

GAIN = ".lora_gain"
"""What follows a module's name in the name of the table of m / ‖W + s Aᵀ Bᵀ‖, for DoRA."""


def by_row(who: str, adapters: Sequence[Placed]) -> Pass:
    """y = x W + x Aₖ Bₖ for a row x of the batch and its adapter k (S-LoRA, arXiv 2311.03285).

    The matrices of all adapters lie in two tables a module, of which each row gathers its own; an
    adapter that lacks the module, or is of a lower rank, has zeros there. Where some have
    magnitudes (DoRA), a third one has the factor of each output.

    Raises GraphgenError for a module without a product in the model or of another size, and for a
    product whose operand is not (batch, in) or (batch, length, in).
    """

    def run(model: ir.Model, engine: Engine) -> PassReport:
        found, graph = linears(model), model.graph
        sites = dict[str, Linear]()
        for adapter in adapters:
            sizes = {name: update.shape for name, update in adapter.items()}
            known = sites_of(who, found, sizes)
            sites |= {name: known[name] for name in sizes}
            for name, update in adapter.items():
                check_finite(who, name, *update)
        choice, batch = _choice(who, graph)
        tables = {name: _tables(site, adapters) for name, site in sites.items()}

        def adapted(node: ir.Node) -> Rewrite:
            site, op, x = found[node], find_op(node), node.inputs[0]
            assert op is not None and x is not None
            shape = [*(x.shape or ())]
            if len(shape) not in (2, 3) or not same_dim(shape[0], batch):
                raise GraphgenError(
                    f"{who}: {site.module} reads {describe(x)}, and rows that choose adapters are "
                    f"those of {batch}: merge the adapter instead"
                )
            a, b, *more = (
                ops.gather(adopt(table), adopt(choice), axis=0) for table in tables[site.module]
            )
            rows: Tensor = adopt(x)  # it may have an adapter since
            rows = rows if len(shape) == 3 else ops.unsqueeze(rows, [1])
            update = ops.matmul(ops.matmul(rows, a), b)
            update = update if len(shape) == 3 else ops.squeeze(update, [1])
            if site.alpha != 1.0:
                update = update * np.float32(site.alpha)
            given, attributes = [*map(adopt, node.inputs)], read_attributes(op, node)
            if more:
                gain = ops.unsqueeze(more[0], [1]) if len(shape) == 3 else more[0]
                result = gain * (op(*given[:2], **attributes) + update)
                if len(given) > 2 and given[2] is not None:
                    result = result + given[2] * np.float32(attributes.get("beta", 1.0))
            else:
                result = op(*given, **attributes) + update
            inputs = [value for value in node.inputs if value is not None]
            return Rewrite(result, inputs, f"{len(adapters)} adapters", may_share=True)

        matched = [node for node, site in found.items() if site.module in sites]
        rules = {op: [adapted] for op in PRODUCTS}
        report = engine.run("by_row", model, rules, forward=True, nodes=matched)
        if left := [site for site in report.sites if site.status != "fired"]:
            raise GraphgenError(f"{who}: {left[0].where} has no adapter: {left[0].reason}")
        for made in tables.values():
            for table in made:
                graph.register_initializer(table)
        return report

    return Pass("by_row", run)


def _choice(who: str, graph: ir.Graph) -> tuple[ir.Value, int | ir.SymbolicDim]:
    """The new input, and the size of the batch, which all inputs have first."""
    firsts = [value.shape[0] for value in graph.inputs if value.shape]
    if not firsts or len(firsts) < len(graph.inputs) or not all(map(same_dim, firsts, firsts[1:])):
        raise GraphgenError(
            f"{who}: the inputs have no first size in common, "
            f"{', '.join(map(describe, graph.inputs))}, so no rows choose adapters: merge one"
        )
    if any(value.name == CHOICE for value in graph.inputs):
        raise GraphgenError(f"{who}: the model has an input {CHOICE!r} already: give its base")
    kind = ir.TensorType(ir.DataType.INT64)
    value = ir.Value(name=CHOICE, type=kind, shape=ir.Shape([firsts[0]]))
    graph.inputs.append(value)
    return value, firsts[0]


def _tables(site: Linear, adapters: Sequence[Placed]) -> list[ir.Value]:
    """Aᵀ, float[1 + adapters, in, rank], and s · Bᵀ, float[1 + adapters, rank, out].

    With magnitudes also the factor of each output, float[1 + adapters, out].
    """
    size, out = site.sizes
    rank = max(len(adapter[site.module].a) for adapter in adapters if site.module in adapter)
    a = np.zeros((len(adapters) + 1, size, rank), np.float32)
    b = np.zeros((len(adapters) + 1, rank, out), np.float32)
    gains, weight = np.ones((len(adapters) + 1, out), np.float32), constant(site.weight)
    assert weight is not None
    for number, adapter in enumerate(adapters, 1):
        if site.module in adapter:
            one, other, magnitude = update = adapter[site.module]
            a[number, :, : len(one)], b[number, : len(one)] = one.T, other.T
            if magnitude is not None:
                gains[number] = update.gain(weight if site.by_rows else weight.T)
    found = {A: a, B: b} | ({GAIN: gains} if (gains != 1).any() else {})
    return [initializer(site.module + part, table) for part, table in found.items()]
