"""The canonical form: one spelling for what exporters and people write in many ways.

The rules are in ops/, under `@canonical` of their operators.
"""

from dataclasses import dataclass, field

import onnx_ir as ir

from graphgen.edit import tidy
from graphgen.match import Engine, Outcome, PassReport, Rewrite, Rule
from graphgen.op import TABLE, is_default
from graphgen.record import current_tape
from graphgen.subgraphs import nodes_of
from graphgen.targets import Target

_ROUNDS = 20


def canonicalize(model: ir.Model, engine: Engine, target: Target | None = None) -> PassReport:
    """Apply the rules until none fires; nothing that `target` runs becomes what it does not run."""
    total = PassReport("canonicalize")
    rules = {
        op: [_Within(rule, target) for rule in op.canonical] if target else op.canonical
        for op in TABLE.values()
        if not op.domain
    }
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


@dataclass(frozen=True)
class _Within:
    """A rule, without rewrites into operators for which only the old one has a kernel.

    The CPU has Einsum of bfloat16, for example, but no MatMul.
    """

    rule: Rule
    target: Target = field(compare=False)

    def __call__(self, node: ir.Node) -> Outcome:
        outcome, tape = self.rule(node), current_tape()
        made = tape.nodes if tape is not None and isinstance(outcome, Rewrite) else []
        lacks = self.target.lacks
        return None if any(map(lacks, made)) and not lacks(node) else outcome
