"""The last pass: operators that the target cannot run become their bodies."""

import time
from typing import Any

import onnx_ir as ir

from graphgen.graph import splice, tidy, where_is
from graphgen.match import PassReport, Site
from graphgen.op import Operand, adopt, find_op, read_attributes, recording
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
    pending = list(model.graph)
    while pending:
        node = pending.pop()
        op = find_op(node)
        if op is None or not op.composite:
            continue
        missing = target.missing(node)
        if missing is None:
            continue
        with recording(context=context) as tape:
            result = respell(node, target)
            instead = "its body" if result is None else result.producer().op_type
            if result is None:
                result = op.expand(node.inputs, read_attributes(op, node))
            tape.trim([result])
            splice(node, tape, [result])
        report.sites.append(Site("fired", where_is(node), f"{missing}: {instead} instead"))
        pending += tape.nodes
    tidy(model)
    report.seconds = time.perf_counter() - start
    report.nodes_after = model.graph.num_nodes()
    return report
