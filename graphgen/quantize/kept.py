"""Weights that a checkpoint already has in few bits, written into the graph as they are."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import onnx_ir as ir

from graphgen.bits import KEPT, STACKED, Blocks
from graphgen.graph import ModelLike, bytes_of, model_in
from graphgen.match import Engine, Pass, PassReport, Refusal, Rewrite, run_passes
from graphgen.model import readable
from graphgen.passes.clean import clean
from graphgen.places import where_is
from graphgen.quantize import (
    layout_of,
    named,
    profile_of,
    rules_of,
    settle,
    total_bytes,
)
from graphgen.quantize.effect import Layer, Report
from graphgen.quantize.experts import (
    Stack,
    experts_of,
    kept as kept_experts,
    layers_of,
    obstacle,
    weights_of,
)
from graphgen.quantize.sites import Site, product, reads_rows, rows, site_at
from graphgen.quantize.spool import Spool
from graphgen.targets import TargetName


def keep_bits(
    model: ModelLike, *, target: TargetName = "cpu", method: str = "kept"
) -> tuple[ir.Model, Report]:
    """A copy of an optimized model whose weights of few bits are multiplied as they were stored.

    These are the weights that `from_folder` reads from a checkpoint of `method`, such as gptq. What
    is not a product, or rows, of one stays in float, and the report says so. Four bits are
    multiplied as int4 is, eight bits as weights8.

    Raises GraphgenError for a target without the operators.
    """
    model = readable(model_in(model, "keep_bits").clone())
    kept = {
        value: value.const_value.meta[KEPT]
        for value in model.graph.initializers.values()
        if value.const_value is not None and KEPT in value.const_value.meta
    }
    report = Report(method, str(target), 0.0, total_bytes(model))
    spool = Spool("keep_bits")
    stacks = {
        value: value.const_value.meta[STACKED]
        for value in model.graph.initializers.values()
        if value.const_value is not None and STACKED in value.const_value.meta
    }
    groups: dict[ir.Value, list[Site]] = {}
    for node in model.graph.all_nodes():
        site = site_at(node, kept)
        if isinstance(site, Site) and site.weight in kept and kept[site.weight][1] == site.by_rows:
            groups.setdefault(site.weight, []).append(site)

    def run(model: ir.Model, engine: Engine) -> PassReport:
        done = PassReport("quantize")
        for weight, group in groups.items():
            blocks: Blocks = kept[weight][0]()
            profile = profile_of("keep_bits", "int4" if blocks.bits == 4 else "weights8", target)
            size = blocks.integers.shape[-1] * 8 // blocks.bits
            able = blocks.bits == 8 or reads_rows(profile, blocks.columns, size)
            arrays = layout_of(blocks, False)
            made = {
                role: named(model.graph, f"{weight.name}_{role}", spool.keep(array))
                for role, array in arrays.items()
            }
            shape, scheme = (len(blocks.integers), blocks.columns), f"{blocks.bits} bits"

            def rewrite(
                site: Site,
                made: Any = made,
                blocks: Blocks = blocks,
                shape: Any = shape,
                able: bool = able,
            ) -> Rewrite | Refusal:
                if site.table and not able:
                    return Refusal(f"{target} reads no rows of such blocks of four bits")
                site = site.now()
                y = (
                    rows(site, made, shape)
                    if site.table
                    else product(site, made, shape, False, blocks.order)
                )
                return Rewrite(y, site.reads, f"{blocks.bits} bits, as the checkpoint has them")

            nodes = [site.end for site in group]
            rules = rules_of({site.end: partial(rewrite, site) for site in group})
            found = engine.run("quantize", model, rules, forward=True, nodes=nodes).sites
            for site in group:
                assert weight.const_value is not None
                name, path = str(weight.name), where_is(site.end)
                layer = Layer(name, path, site.node.op_type, shape, scheme, 0.0, "weight")
                if site is group[0]:
                    layer.bytes_before = bytes_of(weight.const_value)
                    layer.bytes_after = sum(array.nbytes for array in arrays.values())
                settle(layer, next((s for s in found if s.node is site.end), None))
                report.layers.append(layer)
            done.sites += found
        for node in [*experts_of(model)]:
            layers, outcome = _experts(model.graph, node, stacks, target, spool)
            found = engine.run("quantize", model, rules_of({node: outcome}), nodes=[node]).sites
            for layer in layers:
                settle(layer, next(iter(found), None))
                if layer.scheme == "float":
                    layer.bytes_after = layer.bytes_before
            report.layers += layers
            done.sites += found
        return done

    [report.sites] = run_passes(model, [Pass("quantize", run)], Engine())
    for weight in kept.keys() - groups.keys():
        name = str(weight.name)
        size = 0 if weight.const_value is None else bytes_of(weight.const_value)
        why = "no product of the graph has it as it was stored"
        report.layers.append(Layer(name, name, "", (), "float", 0.0, "weight", size, size, why))
    clean(model)
    report.bytes_after = total_bytes(model)
    return model, report


def _experts(
    graph: ir.Graph,
    node: ir.Node,
    stacks: Mapping[ir.Value, Stack],
    target: TargetName,
    spool: Spool,
) -> tuple[list[Layer], Refusal | Callable[[], Rewrite]]:
    """The layers of experts, and what becomes of them; none of those that were not in few bits."""
    both = [stacks[value] for value in weights_of(node) if value in stacks]
    if not both:
        return [], Refusal("its weights are floats")
    profile = profile_of("keep_bits", "int4", target)
    reason = obstacle(node, "int4", profile)
    if len(both) != len(weights_of(node)):
        reason = "one of its weights is of floats"
    if reason:
        return layers_of(node, "4 bits"), Refusal(reason)
    return kept_experts(node, both, 4, lambda n, array: named(graph, n, spool.keep(array)))
