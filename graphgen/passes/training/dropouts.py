"""Dropout in graphs of other tools: where they have it, or where their training form had it."""

from collections.abc import Mapping
from typing import Literal, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.arguments import searched
from graphgen.errors import GraphgenError
from graphgen.graph import constant, present_inputs, scalar, uses_outputs_beyond
from graphgen.match import Engine, Miss, Pass, PassReport, Rewrite, Rule, run_passes
from graphgen.op import Op, is_a
from graphgen.ops.dropout import dropout_in_inference
from graphgen.passes.training.numbers import random_numbers
from graphgen.places import class_of, where_is
from graphgen.value import adopt

RATE = "graphgen.dropout"
"""Metadata of a node where a module drops out in training: the part that it zeroes."""

Dropout: TypeAlias = float | Literal["declared"] | Mapping[str, float]
"""The rate everywhere; or, by patterns of modules, in these only; or those that the model has."""

_SITES = 1 << 21  # the first number of a mask; those of adapters are below, those of a model too


def is_site(node: ir.Node) -> bool:
    """Whether a module drops out here in training."""
    traced = is_a(node, ops.identity) and class_of(node) == "torch.nn.modules.dropout.Dropout"
    return traced or is_a(node, dropout_in_inference)


def read_rates(given: list[str]) -> Dropout:
    """What texts say: "declared", "0.1", or some of "PATTERN:0.1"."""
    if given == ["declared"]:
        return "declared"
    rates = dict[str, float]()
    for text in given:
        pattern, _, rate = text.rpartition(":")
        try:
            rates[pattern] = float(rate)
        except ValueError:
            raise GraphgenError(
                f"artifacts: dropout is {text!r}; give a rate such as 0.1, 'PATTERN:0.1' for "
                "modules of these names, or 'declared'"
            ) from None
    return rates[""] if [*rates] == [""] else rates


def in_inference(model: ir.Model) -> None:
    """Switch off dropout that a file has switched on."""
    run_passes(model, [Pass("dropout_off", _switch_off)], Engine())


def _switch_off(model: ir.Model, engine: Engine) -> PassReport:
    def off(node: ir.Node) -> Rewrite | None:
        if not _is_on(node) or uses_outputs_beyond(node, 1):
            return None
        x, *ratio = map(adopt, node.inputs[:2])
        return Rewrite(dropout_in_inference(x, *ratio), present_inputs(node), "switched off")

    return engine.run("dropout_off", model, {dropout_in_inference: [off]}, forward=True)


def put_dropout(model: ir.Model, given: Dropout | None) -> None:
    """Dropout by our hash in the place of that of the file, or at sites that have it in training.

    Without `given`, that is where the file has it switched on.

    Raises GraphgenError for a rate that is not from 0 and below 1, or unknown, for a pattern that
    matches no site, and for a mask that is used.
    """
    sites = [node for node in model.graph.all_nodes() if is_site(node)]
    rates = {node: rate for node in sites if (rate := _rate(node, given)) is not None}
    _check(given, sites)
    on = {node: rate for node, rate in rates.items() if rate}
    drawn = random_numbers(model.graph, "dropout") if on else None
    numbers = {node: number for number, node in enumerate(sites, _SITES)}

    def put(node: ir.Node) -> Rewrite | Miss | None:
        if node not in rates:
            return None
        if uses_outputs_beyond(node, 1):
            return Miss("its mask is used: export it without")
        x, inputs = adopt(node.inputs[0]), present_inputs(node)
        if node not in on or drawn is None:
            return Rewrite(ops.identity(x), inputs, "rate 0")
        ratio, number = np.asarray(on[node], x.dtype), np.asarray(numbers[node], np.int64)
        y = ops.dropout(x, ratio, adopt(drawn[0]), adopt(drawn[1]), number)
        return Rewrite(y, inputs, f"rate {on[node]:g}")

    def run(model: ir.Model, engine: Engine) -> PassReport:
        kinds: dict[Op, list[Rule]] = {dropout_in_inference: [put], ops.identity: [put]}
        report = engine.run("dropout", model, kinds, forward=True, nodes=[*rates])
        if left := [site for site in report.sites if site.status != "fired"]:
            raise GraphgenError(f"artifacts: {left[0].where}: Dropout: {left[0].reason}")
        return report

    if rates:
        run_passes(model, [Pass("dropout", run)], Engine())


def _is_on(node: ir.Node) -> bool:
    """Whether a node of the standard Dropout may drop out."""
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    known = constant(mode)
    return mode is not None and (known is None or bool(known))


def _rate(node: ir.Node, given: Dropout | None) -> float | None:
    """The rate of a site, or None where it has none now."""
    own = is_a(node, dropout_in_inference)
    if given is None and not (own and _is_on(node)):
        return None
    rate: float | None
    if isinstance(given, Mapping):
        found = [rate for pattern, rate in given.items() if _is_at(node, pattern)]
        if not found:
            return None
        rate = found[0]
    elif given is None or given == "declared":
        ratio = node.inputs[1] if own and len(node.inputs) > 1 else None
        rate = 0.5 if own and ratio is None else scalar(ratio)
        rate = float(node.metadata_props[RATE]) if RATE in node.metadata_props else rate
        if rate is None:
            raise GraphgenError(
                f"artifacts: {where_is(node)} drops out at a rate that the file does not say; give "
                f"it: dropout={{{where_is(node)!r}: 0.1}}, or gg.from_torch the module"
            )
    else:
        rate = given
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0.0 <= rate < 1.0:
        raise GraphgenError(
            f"artifacts: the dropout of {where_is(node)} is {rate!r}; it must be from 0, below 1"
        )
    return float(rate)


def _is_at(node: ir.Node, pattern: str) -> bool:
    found = searched(f"artifacts: dropout: {pattern!r}", pattern)
    return found.search(where_is(node)) is not None


def _check(given: Dropout | None, sites: list[ir.Node]) -> None:
    if given is None:
        return
    if not sites:
        raise GraphgenError(
            "artifacts: dropout= has no place in this graph: the exporter has left no trace of it; "
            "use gg.from_torch with the module in training mode"
        )
    for pattern in given if isinstance(given, Mapping) else ():
        if not any(_is_at(node, pattern) for node in sites):
            some = ", ".join([*map(where_is, sites)][:6])
            raise GraphgenError(
                f"artifacts: dropout: {pattern!r} matches no module with dropout; there are {some}"
            )
