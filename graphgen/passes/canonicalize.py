"""The canonical form: one form for what exporters and people write in many ways.

The rules are in ops/, under `@canonical` of their operators.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import onnx_ir as ir

from graphgen.edit import tidy
from graphgen.errors import GraphgenError
from graphgen.infer import DOMAIN
from graphgen.match import Engine, Outcome, PassReport, Rewrite, Rule
from graphgen.op import TABLE, UNDECLARED, Op, find_op, is_default
from graphgen.passes.fusions import FORMULAS, RECOGNIZED
from graphgen.passes.legalize import by_body
from graphgen.record import current_tape
from graphgen.subgraphs import nodes_of
from graphgen.targets import Target
from graphgen.traits import Trait

_ROUNDS = 20
_MADE = {
    *chain.from_iterable(RECOGNIZED.values()),
    *(op for formulas in FORMULAS.values() for op, *_ in formulas),
}
"""What fusions make."""


def canonicalize(model: ir.Model, engine: Engine, target: Target | None = None) -> PassReport:
    """Apply the rules until none fires; nothing that `target` runs becomes what it does not run."""
    total = PassReport("canonicalize")
    declared: dict[Op | str, list[Rule]] = {op: op.canonical for op in TABLE.values()}
    rules: dict[Op | str, Sequence[Rule]] = {
        op: [_Within(rule, target) for rule in given] if target else given
        for op, given in (declared | UNDECLARED).items()
        if isinstance(op, str) or not op.domain
    }
    if target is not None:
        opened: Rule = partial(_opened, target=target)
        rules |= {op: [opened] for op in filter(_is_foreign, TABLE.values())}
    for node in nodes_of(model.graph):
        for attr in [a for a in node.attributes.data.values() if is_default(node, a)]:
            if attr.name != "onesided":  # onnx's inference takes an absent one to be 0
                del node.attributes[attr.name]
    for _ in range(_ROUNDS):
        report = engine.run("canonicalize", model, rules)
        total.sites += [s for s in report.sites if s.status == "fired" or s.rolled_back]
        if not report.count("fired"):
            break
    tidy(model)
    return total


def _is_foreign(op: Op) -> bool:
    """Whether it is a composite of the runtime's that no fusion makes."""
    whole = op in _MADE or op.variants or Trait.QUANTIZED in op.traits
    return op.composite and op.domain not in ("", DOMAIN) and not whole


def _opened(node: ir.Node, *, target: Target) -> Outcome:
    """A node of a file for another provider as its body, before fusions, so that it is fused."""
    op, missing = find_op(node), target.missing(node)
    with suppress(GraphgenError):  # it has no body for these operands: legalize says so
        return by_body(op, node, None, f"{missing}: its body instead") if op and missing else None
    return None


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
