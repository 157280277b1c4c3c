"""What all that makes integers of weights does with a model, its layers and its experts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import onnx_ir as ir

from graphgen.graph import ModelLike, bytes_of, model_in, operator_name
from graphgen.match import Engine, Outcome, Pass, PassReport, Rule, Site, run_passes
from graphgen.model import readable
from graphgen.passes.clean import clean
from graphgen.quantize.effect import Layer, Report
from graphgen.quantize.experts import Treated, experts_of


def rewritten(who: str, model: ModelLike, one: Pass, engine: Engine, report: Report) -> ir.Model:
    """A copy of a model after a pass; the report gets its sites, and the bytes of all weights."""
    model = readable(model_in(model, who).clone())
    report.bytes_before = _total_bytes(model)
    [report.sites] = run_passes(model, [one], engine)
    clean(model)
    report.bytes_after = _total_bytes(model)
    return model


def rules_of(outcomes: Mapping[ir.Node, Any]) -> dict[str, list[Rule]]:
    """Rules that say what was found out about some nodes."""

    def rule(node: ir.Node) -> Outcome:
        found = outcomes.get(node)
        return cast(Callable[[], Outcome], found)() if callable(found) else found

    return {operator_name(node): [rule] for node in outcomes}


def settle(layers: Iterable[tuple[ir.Node, Layer]], sites: Sequence[Site]) -> None:
    """Note what finally became of layers, each at the node that makes its result."""
    for node, layer in layers:
        done = next((site for site in sites if site.node is node), None)
        if done is None or done.status != "fired":
            last = "it comes after the last that was wanted"
            layer.scheme, layer.reason = "float", last if done is None else done.reason


def treat_experts(
    model: ir.Model, engine: Engine, treat: Callable[[ir.Node], Treated], done: PassReport
) -> list[Layer]:
    """The layers of all experts after what `treat` finds for them; `done` gets their sites."""
    treated = list[Layer]()
    for node in [*experts_of(model)]:
        if engine.stopped:
            break
        layers, outcome = treat(node)
        found = engine.run("quantize", model, rules_of({node: outcome}), nodes=[node]).sites
        done.sites += found
        settle(((node, layer) for layer in layers), found)
        for layer in layers:
            if layer.scheme == "float":
                layer.bytes_after = layer.bytes_before
        treated += layers
    return treated


def _total_bytes(model: ir.Model) -> int:
    """Of all weights of a graph."""
    tensors = [value.const_value for value in model.graph.initializers.values()]
    return sum(bytes_of(tensor) for tensor in tensors if tensor is not None)
