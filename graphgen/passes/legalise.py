"""The last pass: operators that the target cannot run become their bodies."""

import time
from typing import Any

import onnx_ir as ir

from graphgen.graph import splice, tidy, where_is
from graphgen.match import PassReport, Site
from graphgen.op import find_op, read_attributes, recording
from graphgen.targets import Target


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
            result = op.expand(node.inputs, read_attributes(op, node))
            splice(node, tape, [result])
        report.sites.append(Site("fired", where_is(node), f"{missing}: its body instead"))
        pending += tape.nodes
    tidy(model)
    report.seconds = time.perf_counter() - start
    report.nodes_after = model.graph.num_nodes()
    return report
