"""The rewrite engine, and recognisers made from the bodies of operators.

A rule looks at one node and gives a replacement, a reason why not, or None where it has nothing to
say. It never edits the graph: it records new nodes, and the engine checks and splices them.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.graph import (
    Miss,
    Refusal,
    Rewrite,
    constant,
    present_inputs,
    prune,
    splice,
    to_model,
    where_is,
)
from graphgen.infer import describe, is_named, same_dim, same_shape
from graphgen.op import PATH, Op, Operand, Tape, Value, adopt, current_tape, recording

Outcome: TypeAlias = Rewrite | Miss | Refusal | None
Rule: TypeAlias = Callable[[ir.Node], Outcome]
"""Looks at one node, inside a recording."""


@dataclass
class Site:
    """What happened at one candidate, and where it is."""

    status: str  # fired, missed, refused
    where: str
    reason: str
    number: int | None = None  # of the rewrite, counted over the whole pipeline
    rolled_back: bool = False  # missed, because verification found a difference


@dataclass
class PassReport:
    """What one pass did."""

    name: str
    seconds: float = 0.0
    nodes_before: int = 0
    nodes_after: int = 0
    sites: list[Site] = field(default_factory=list)

    def count(self, status: str) -> int:
        """How many sites fired, missed or were refused."""
        return sum(site.status == status for site in self.sites)


@dataclass
class Engine:
    """Applies rules, numbers every rewrite and stops after `stop_after` of them.

    `verify`, if given, compares what a node computes with its recorded results and returns what
    differs, or None; a site that differs is not rewritten.
    """

    stop_after: int | None = None
    verify: Callable[[ir.Node, Tape, Sequence[ir.Value], bool], str | None] | None = None
    applied: int = 0
    _failed: set[tuple[Rule, ir.Node]] = field(default_factory=set)

    def run(
        self, name: str, model: ir.Model, rules: Mapping[str, Sequence[Rule]], context: Any
    ) -> PassReport:
        """One walk from the outputs to the inputs, so that the outermost match comes first.

        A subgraph is walked before the node that has it.
        """
        report = PassReport(name, nodes_before=model.graph.num_nodes())
        start = time.perf_counter()
        with recording(context=context) as tape:
            for node in reversed(list(model.graph.all_nodes())):
                for rule in () if node.domain else rules.get(node.op_type, ()):
                    stopped = self.stop_after is not None and self.applied >= self.stop_after
                    if node.graph is None or stopped:
                        break
                    if (rule, node) in self._failed:
                        continue  # told, and it would fail again
                    site = self._try(rule, node, tape, context)
                    tape.discard()
                    if site is not None:
                        report.sites.append(site)
        report.sites.reverse()
        report.seconds = time.perf_counter() - start
        report.nodes_after = model.graph.num_nodes()
        return report

    def _try(self, rule: Rule, node: ir.Node, tape: Tape, context: Any) -> Site | None:
        where = where_is(node)
        tape.path = node.metadata_props.get(PATH, "")
        try:
            outcome = rule(node)
        except GraphgenError as e:  # the operator's own checks refuse what was matched
            outcome = Miss(str(e))
        if isinstance(outcome, Rewrite):
            outcome = self._checked(node, outcome, tape, lambda user: _takes(rule, user, context))
        problem = None
        if isinstance(outcome, Rewrite) and self.verify is not None:
            problem = self.verify(node, tape, _results(outcome), bool(outcome.caveat))
        if problem:
            self._failed.add((rule, node))
            return Site("missed", where, problem, rolled_back=True)
        if isinstance(outcome, Miss):
            return Site("missed", where, outcome.reason)
        if isinstance(outcome, Refusal):
            return Site("refused", where, outcome.reason)
        if outcome is None:
            return None
        inputs = present_inputs(node)
        splice(node, tape, _results(outcome))
        prune(inputs)
        self.applied += 1
        reason = "; ".join(filter(None, (outcome.reason, outcome.caveat)))
        return Site("fired", where, reason, self.applied)

    def _checked(
        self, node: ir.Node, rewrite: Rewrite, tape: Tape, takes: Callable[[ir.Node], bool]
    ) -> Rewrite | Miss:
        """The conditions every rewrite must meet, whatever its rule says.

        No value inside the region is used outside of it, but by nodes that the rule `takes` as
        well: when they are rewritten too, nothing is left that computes it.
        """
        results = _results(rewrite)
        tape.trim(results)
        for old, new in zip(node.outputs, results, strict=True):
            problem = _incompatible(old, new)
            if problem:
                return Miss(problem)
        region = region_of(node, rewrite.inputs)
        inner = set(region)
        for member in () if rewrite.may_share else region:
            if member.op_type in _LAYOUT or not _computes_floats(member):
                continue
            for value in member.outputs if member is not node else ():
                outside = [use.node for use in value.uses() if use.node not in inner]
                others = [user for user in outside if user.graph is not None and not takes(user)]
                if value.is_graph_output() or others:
                    user = others[0].name if others else "a graph output"
                    return Miss(f"the result of {member.op_type} is used elsewhere, by {user}")
        return rewrite


def _computes_floats(node: ir.Node) -> bool:
    """Sizes and masks may stay for other users: computing them costs little."""
    return any(v.dtype is None or v.dtype.is_floating_point() for v in node.outputs)


def _takes(rule: Rule, node: ir.Node, context: Any) -> bool:
    """Whether a rule would rewrite another node, too; nothing of the trial stays."""
    with recording(context=context):
        try:
            return isinstance(rule(node), Rewrite)
        except GraphgenError:
            return False


def _results(rewrite: Rewrite) -> list[ir.Value]:
    several = isinstance(rewrite.results, (tuple, list))
    results = list(rewrite.results) if several else [rewrite.results]
    return [_as_value(result) for result in results]


def _as_value(x: Operand) -> ir.Value:
    tape = current_tape()
    assert tape is not None
    return tape.operand(x)


def _incompatible(old: ir.Value, new: ir.Value) -> str | None:
    """Why `new` cannot stand for `old`, or None."""
    if old.dtype is not None and new.dtype is not None and old.dtype != new.dtype:
        return f"the dtype would change: {describe(old)} to {describe(new)}"
    if old.shape is None or new.shape is None:
        return None
    if len(old.shape) != len(new.shape):
        return f"the rank would change: {describe(old)} to {describe(new)}"
    for a, b in zip(old.shape, new.shape, strict=True):
        if is_named(a) and is_named(b) and not same_dim(a, b):
            return f"the shape would change: {describe(old)} to {describe(new)}"
    return None


def region_of(root: ir.Node, inputs: Iterable[ir.Value]) -> list[ir.Node]:
    """The nodes from `inputs` to `root`; of what only its shape is taken is not in it."""
    stop, seen, pending, nodes = set(inputs), {root}, [root], []
    while pending:
        node = pending.pop()
        nodes.append(node)
        for value in node.inputs if node.op_type != "Shape" else ():
            producer = None if value is None or value in stop else value.producer()
            if producer is not None and producer not in seen:
                seen.add(producer)
                pending.append(producer)
    return nodes


# Cheap enough to be computed for other users as well.
_LAYOUT = frozenset("Transpose Reshape Unsqueeze Squeeze Expand Concat Cast".split())
_COMMUTATIVE = frozenset({"Add", "Mul", "Max", "Min", "And", "Or", "Equal"})
_MARK = 0.123


@dataclass
class Pattern:
    """An operator's body as a graph to find: made once, canonicalised like every other graph.

    Its float constants that equal the mark stand for attributes and match any scalar; everything
    else must be equal, so that a match *is* the body with those attributes.
    """

    op: Op
    inputs: list[ir.Value]
    root: ir.Node
    attributes: dict[str, Any]
    unknown: str | None

    def match(self, node: ir.Node) -> Rewrite | Miss | None:
        """The operator called on what the body's inputs are bound to at `node`."""
        bound: dict[ir.Value, ir.Value] = {}
        found: dict[str, float] = {}
        if not self._node(self.root, node, bound, found):
            return None
        inputs = [bound[value] for value in self.inputs]
        x = inputs[0]
        for value, wanted in zip(inputs[1:], self.inputs[1:], strict=True):
            # The trace stands for gains and biases of the last axis, nothing that broadcasts more.
            fits = value.shape is not None and len(value.shape) == len(wanted.shape or ())
            if not fits or x.shape is None or not same_shape(value.shape, ir.Shape(x.shape[-1:])):
                last = "" if x.shape is None else str(x.shape[-1])
                return Miss(f"{self.op.name}: a gain or bias is {describe(value)}, wanted [{last}]")
        attributes = {**self.attributes, **found}
        result = self.op(*map(adopt, inputs), **attributes)
        told = "".join(f" {k}={v:.6g}" for k, v in found.items())
        return Rewrite(result, inputs, f"{self.op.name}{told}")

    def _node(
        self,
        wanted: ir.Node,
        node: ir.Node,
        bound: dict[ir.Value, ir.Value],
        found: dict[str, float],
    ) -> bool:
        if (wanted.op_type, wanted.domain) != (node.op_type, node.domain):
            return False
        if len(wanted.inputs) != len(node.inputs) or not _same_attributes(wanted, node):
            return False
        orders = [node.inputs]
        if node.op_type in _COMMUTATIVE and len(node.inputs) == 2:
            orders.append(node.inputs[::-1])
        for order in orders:
            trial_bound, trial_found = dict(bound), dict(found)
            pairs = zip(wanted.inputs, order, strict=True)
            if all(self._value(w, v, trial_bound, trial_found) for w, v in pairs):
                bound.update(trial_bound)
                found.update(trial_found)
                return True
        return False

    def _value(
        self,
        wanted: ir.Value | None,
        value: ir.Value | None,
        bound: dict[ir.Value, ir.Value],
        found: dict[str, float],
    ) -> bool:
        if wanted is None or value is None:
            return wanted is value
        if wanted in bound:
            return bound[wanted] is value
        content = constant(wanted)
        if content is not None:
            return self._constant(content, constant(value), found)
        producer = wanted.producer()
        if producer is not None:
            made_by = value.producer()
            if made_by is None or value.index() != wanted.index():
                return False
            if not self._node(producer, made_by, bound, found):
                return False
        bound[wanted] = value
        return True

    def _constant(self, wanted: Any, given: Any, found: dict[str, float]) -> bool:
        if given is None or given.dtype.kind != wanted.dtype.kind:
            return False
        if wanted.dtype.kind != "f":
            return bool(given.shape == wanted.shape and np.array_equal(given, wanted))
        if given.size != 1:
            return False
        number = float(given.reshape(-1)[0])
        if self.unknown is not None and np.isclose(float(wanted), _MARK, rtol=1e-6):
            return bool(np.isclose(found.setdefault(self.unknown, number), number, rtol=1e-6))
        return bool(np.isclose(number, float(wanted), rtol=1e-6, atol=0.0))


def _same_attributes(a: ir.Node, b: ir.Node) -> bool:
    names = set(a.attributes) | set(b.attributes)
    return all(
        n in a.attributes and n in b.attributes and a.attributes[n].value == b.attributes[n].value
        for n in names
    )


def make_pattern(
    op: Op,
    inputs: int,
    canonicalise: Callable[[ir.Model], None],
    *,
    unknown: str | None = None,
    **attributes: Any,
) -> Pattern:
    """The pattern of a body called with `inputs` inputs; `unknown` names a float attribute.

    The trace runs on float[b, s, d], so that only the last axis is tied.
    """
    with recording() as tape:
        shapes: list[list[int | str]] = [["b", "s", 64], [64], [64]]
        values = [
            tape.input(f"x{i}", ir.DataType.FLOAT, shape) for i, shape in enumerate(shapes[:inputs])
        ]
        given = {**attributes, unknown: _MARK} if unknown else attributes
        with tape.inside():
            tape.primitives = True
            result: Value = op.expand(values, {**op.attributes, **given})
        model = to_model(tape, {"y": result})
    canonicalise(model)
    root = model.graph.outputs[0].producer()
    assert root is not None
    return Pattern(op, list(model.graph.inputs), root, attributes, unknown)
