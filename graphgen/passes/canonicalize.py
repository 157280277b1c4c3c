"""The canonical form: one spelling for what exporters and people write in many ways.

The rules are in ops/, under `@canonical` of their operators.
"""

import onnx_ir as ir

from graphgen.edit import tidy
from graphgen.match import Engine, PassReport
from graphgen.op import TABLE, is_default
from graphgen.subgraphs import nodes_of

_ROUNDS = 20


def canonicalize(model: ir.Model, engine: Engine) -> PassReport:
    """Apply the rules until none fires."""
    total = PassReport("canonicalize")
    rules = {op: op.canonical for op in TABLE.values() if not op.domain}
    for node in nodes_of(model.graph):
        for attr in [a for a in node.attributes.data.values() if is_default(node, a)]:
            del node.attributes[attr.name]
    for _ in range(_ROUNDS):
        report = engine.run("canonicalize", model, rules)
        total.sites += [s for s in report.sites if s.status == "fired" or s.rolled_back]
        if not report.count("fired"):
            break
    tidy(model)
    return total
