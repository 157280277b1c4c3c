"""Weights that a checkpoint already has in few bits, written into the graph as they are."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import onnx_ir as ir

from graphgen.bits import KEPT, STACKED, Blocks, layout_of
from graphgen.graph import ModelLike, bytes_of
from graphgen.match import Engine, Pass, PassReport, Refusal
from graphgen.places import where_is
from graphgen.quantize import profile_of
from graphgen.quantize.effect import Layer, Report
from graphgen.quantize.experts import (
    Stack,
    Treated,
    kept as kept_experts,
    layers_of,
    obstacle,
    weights_of,
)
from graphgen.quantize.layers import rewritten, rules_of, settle, treat_experts
from graphgen.quantize.sites import Site, reads_rows, site_at, with_integers
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
    report, spool = Report(method, str(target), 0.0), Spool("keep_bits")

    def run(model: ir.Model, engine: Engine) -> PassReport:
        done, kept = PassReport("quantize"), _stored(model, KEPT)
        stored = {(weight, by_rows) for weight, (_, by_rows) in kept.items()}
        groups: dict[ir.Value, list[Site]] = {}
        for node in model.graph.all_nodes():
            site = site_at(node, kept)
            if isinstance(site, Site) and (site.weight, site.by_rows) in stored:
                groups.setdefault(site.weight, []).append(site)
        for weight, group in groups.items():
            layers, outcomes = _group(model.graph, group, kept[weight][0](), target, spool)
            rules, nodes = rules_of(outcomes), [*outcomes]
            found = engine.run("quantize", model, rules, forward=True, nodes=nodes).sites
            settle(zip(nodes, layers, strict=True), found)
            report.layers += layers
            done.sites += found
        treat = partial(_experts, model.graph, _stored(model, STACKED), target, spool)
        report.layers += treat_experts(model, engine, treat, done)
        for weight in kept.keys() - groups.keys():
            name = str(weight.name)
            size = 0 if weight.const_value is None else bytes_of(weight.const_value)
            why = "no product of the graph has it as it was stored"
            report.layers.append(Layer(name, name, "", (), "float", 0.0, "weight", size, size, why))
        return done

    return rewritten("keep_bits", model, Pass("quantize", run), Engine(), report), report


def _stored(model: ir.Model, key: str) -> dict[ir.Value, Any]:
    """What the weights of a graph that were stored in few bits have under a key."""
    weights = {x: x.const_value for x in model.graph.initializers.values()}
    return {x: w.meta[key] for x, w in weights.items() if w is not None and key in w.meta}


def _group(
    graph: ir.Graph, group: list[Site], blocks: Blocks, target: TargetName, spool: Spool
) -> tuple[list[Layer], dict[ir.Node, Any]]:
    """The layers of one weight, and the rewrite of each, or why it stays in float."""
    weight = group[0].weight.const_value
    assert weight is not None
    profile = profile_of("keep_bits", "int4" if blocks.bits == 4 else "weights8", target)
    size = blocks.integers.shape[-1] * 8 // blocks.bits
    able = blocks.bits == 8 or reads_rows(profile, blocks.columns, size)
    arrays, name = layout_of(blocks, False), str(group[0].weight.name)
    made, scheme = spool.weights(graph, name, arrays), f"{blocks.bits} bits"
    shape, why = (len(blocks.integers), blocks.columns), f"{scheme}, as the checkpoint has them"
    outcomes = dict[ir.Node, Callable[[], Any] | Refusal]()
    for site in group:
        outcomes[site.end] = partial(with_integers, site, made, shape, why, order=blocks.order)
        if site.table and not able:
            outcomes[site.end] = Refusal(f"{target} reads no rows of such blocks of four bits")
    layers = [
        Layer(name, where_is(site.end), site.node.op_type, shape, scheme, 0.0, "weight")
        for site in group
    ]
    layers[0].bytes_before = bytes_of(weight)
    layers[0].bytes_after = sum(array.nbytes for array in arrays.values())
    return layers, outcomes


def _experts(
    graph: ir.Graph,
    stacks: Mapping[ir.Value, Stack],
    target: TargetName,
    spool: Spool,
    node: ir.Node,
) -> Treated:
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
    return kept_experts("keep_bits", node, both, 4, partial(spool.weights, graph))
