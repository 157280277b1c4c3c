"""The last pass: operators that the target cannot run become their bodies."""

import time
from typing import Any

import onnx_ir as ir

from graphgen.graph import operator_name, replace_composites, tidy, where_is
from graphgen.infer import schema_of
from graphgen.match import PassReport, Site
from graphgen.op import Op, Operand, adopt, find_op, read_attributes
from graphgen.targets import Target


def respell(node: ir.Node, target: Target) -> Operand | None:
    """The node's result by another operator that `target` has, recorded; or None."""
    op = find_op(node)
    for spelling in op.spellings if op is not None else ():
        attributes = read_attributes(op, node)  # type: ignore[arg-type]
        result = spelling(*map(adopt, node.inputs), **attributes)
        if result is not None and target.missing(result.producer()) is None:
            return result
    return None


def legalise(model: ir.Model, context: Any, target: Target) -> PassReport:
    """Inline the body of every composite for which `target` has no kernel, until none is left."""
    report = PassReport("legalise", nodes_before=model.graph.num_nodes())
    start = time.perf_counter()

    def body(op: Op, node: ir.Node) -> Operand | None:
        missing = target.missing(node)
        if missing is None:
            return None
        result = respell(node, target)
        instead = "its body" if result is None else result.producer().op_type
        report.sites.append(Site("fired", where_is(node), f"{missing}: {instead} instead"))
        return op.expand(node.inputs, read_attributes(op, node)) if result is None else result

    replace_composites(model.graph, context, body)
    report.sites += _unknown(model)
    tidy(model)
    report.seconds = time.perf_counter() - start
    report.nodes_after = model.graph.num_nodes()
    return report


def _unknown(model: ir.Model) -> list[Site]:
    """A remark for each operator that neither ONNX nor our table defines."""
    found: dict[str, list[ir.Node]] = {}
    for node in model.graph.all_nodes():
        version = model.graph.opset_imports.get(node.domain, 1)
        if find_op(node) is None and schema_of(node.domain, node.op_type, version) is None:
            found.setdefault(operator_name(node), []).append(node)
    return [
        Site("missed", where_is(nodes[0]), f"{name} is not known, {len(nodes)} left as they were")
        for name, nodes in found.items()
    ]
