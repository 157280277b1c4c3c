"""The rewrite engine, and recognisers made from the bodies of operators.

A rule looks at one node and gives a replacement, a reason why not, or None where it has nothing to
say. It never edits the graph: it records new nodes, and the engine checks and splices them.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.errors import GraphgenError
from graphgen.graph import (
    Miss,
    Refusal,
    Rewrite,
    constant,
    is_float,
    present_inputs,
    produced_by,
    prune,
    scalar,
    splice,
    to_model,
    where_is,
)
from graphgen.infer import describe, is_named, same_dim, same_shape
from graphgen.op import PATH, Op, Operand, Tape, Value, adopt, recording
from graphgen.ops.algebra import (
    ROOT,
    UNKNOWN,
    Form,
    Found,
    Frozen,
    difference,
    freeze,
    signs,
    unify,
)
from graphgen.ops.axes import LAYOUT
from graphgen.ops.formula import Expression, is_open, sources

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
    anchor: ir.Node | None = None
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

    `verify`, if given, compares what a node computes with a rewrite's recorded results and returns
    what differs, or None; a site that differs is not rewritten.
    """

    stop_after: int | None = None
    verify: Callable[[ir.Node, Tape, Rewrite, Sequence[ir.Value]], str | None] | None = None
    applied: int = 0
    _failed: set[tuple[Rule, ir.Node]] = field(default_factory=set)

    def run(
        self, name: str, model: ir.Model, rules: Mapping[str, Sequence[Rule]], context: Any
    ) -> PassReport:
        """One walk from the outputs to the inputs, so that the outermost match comes first.

        A subgraph is walked before the node that has it.
        """
        report = PassReport(name)
        failed: dict[ir.Node | None, Site] = {}
        with recording(context=context) as tape:
            for node in reversed(list(model.graph.all_nodes())):
                for rule in () if node.domain else rules.get(node.op_type, ()):
                    stopped = self.stop_after is not None and self.applied >= self.stop_after
                    if node.graph is None or stopped:
                        break
                    if (rule, node) in self._failed:
                        continue  # told, and it would fail again
                    site = self._try(rule, node, tape)
                    tape.discard()
                    if site is None:
                        continue
                    report.sites.append(site)
                    if site.anchor in failed:
                        report.sites.remove(failed.pop(site.anchor))
                    if site.anchor is not None and site.status != "fired":
                        failed[site.anchor] = site
        report.sites.reverse()
        return report

    def _try(self, rule: Rule, node: ir.Node, tape: Tape) -> Site | None:
        where = where_is(node)
        tape.path = node.metadata_props.get(PATH, "")
        try:
            outcome = rule(node)
        except GraphgenError as e:  # the operator's own checks refuse what was matched
            outcome = Miss(str(e))
        results = _results(outcome, tape) if isinstance(outcome, Rewrite) else []
        if isinstance(outcome, Rewrite):
            outcome = self._checked(node, rule, outcome, results, tape)
        problem = None
        if isinstance(outcome, Rewrite) and self.verify is not None:
            problem = self.verify(node, tape, outcome, results)
        if problem and isinstance(outcome, Rewrite):
            self._failed.add((rule, node))
            return Site("missed", where, problem, anchor=outcome.anchor, rolled_back=True)
        if outcome is None:
            return None
        if not isinstance(outcome, Rewrite):
            status = "missed" if isinstance(outcome, Miss) else "refused"
            return Site(status, where, outcome.reason, anchor=outcome.anchor)
        inputs = present_inputs(node)
        splice(node, tape, results)
        prune(inputs)
        self.applied += 1
        reason = "; ".join(filter(None, (outcome.reason, outcome.caveat)))
        return Site("fired", where, reason, self.applied, outcome.anchor)

    def _checked(
        self, node: ir.Node, rule: Rule, rewrite: Rewrite, results: list[ir.Value], tape: Tape
    ) -> Rewrite | Miss:
        """The conditions every rewrite must meet, whatever its rule says.

        No value inside the region is used outside of it, but by nodes that the rule takes as
        well: when they are rewritten too, nothing is left that computes it.
        """
        tape.trim(results)
        for old, new in zip(node.outputs, results, strict=True):
            problem = _incompatible(old, new)
            if problem:
                return Miss(problem, rewrite.anchor)
        used = [v for new in tape.nodes for v in present_inputs(new)]  # that stays
        region = region_of(node, [*rewrite.inputs, *used])
        inner = set(region)
        for member in () if rewrite.may_share else region:
            if member.op_type in _LAYOUT or not _computes_floats(member):
                continue
            for value in member.outputs if member is not node else ():
                for user in _users(value, inner, node):
                    if user is not None and _takes(rule, user, tape.context):
                        continue
                    by = "a graph output" if user is None else user.name
                    told = f"the result of {member.op_type} is used elsewhere, by {by}"
                    return Miss(told, rewrite.anchor)
        return rewrite


def _users(value: ir.Value, inner: set[ir.Node], root: ir.Node) -> Iterator[ir.Node | None]:
    """Who uses a value, or what layouts make of it, outside of a region; None for an output."""
    if value.is_graph_output():
        yield None
    for node in (use.node for use in value.uses() if use.node is not root):
        if node not in inner and node.graph is not None:
            yield node
        elif node in inner and node.op_type in _LAYOUT:
            yield from _users(node.outputs[0], inner, root)


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


def _results(rewrite: Rewrite, tape: Tape) -> list[ir.Value]:
    several = isinstance(rewrite.results, (tuple, list))
    return [tape.operand(x) for x in (rewrite.results if several else [rewrite.results])]


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
_DEEP = 14
_LAST = "wanted the last, of known size, in the dtype of x or after a cast up from 16 bits"


@dataclass
class Pattern:
    """An operator's body as a formula to find.

    A match *is* the body: the same form in the algebra, with its inputs bound to values, and the
    attribute `unknown` and the axes read from the graph.
    """

    op: Op
    inputs: list[ir.Value]
    root: ir.Node
    attributes: dict[str, Any]
    unknown: str | None

    def __post_init__(self) -> None:
        self.stashes = "stash_type" in self.op.attributes
        self._forms: dict[tuple[float | None, bool], Frozen] = {}
        self._sources = sources(self.form(None))

    def form(self, size: float | None, *, gains: bool = True) -> Frozen:
        """The body's form where a sum has `size` elements; without `gains` they are 1."""
        if (size, gains) not in self._forms:
            y = self.root.outputs[0]
            expression = Expression(self.inputs[0], upstream(y, casts=False), size=size)
            for gain in () if gains else self.inputs[1:]:
                expression.give(gain, 1.0)
            self._forms[size, gains] = freeze(expression.of(y))
        return self._forms[size, gains]

    def match(self, node: ir.Node) -> Rewrite | None:
        """The operator called on what the body's inputs are bound to at `node`."""
        y = node.outputs[0]
        nodes = upstream(y, casts=self.stashes)
        kinds = {n.op_type for n in nodes}
        if self.op.name in kinds or not all(kinds & source for source in self._sources):
            return None
        # Without its maximum a softmax may overflow: somebody who asks for that must see it.
        if "ReduceMax" not in kinds and any(use.node.op_type == "IsNaN" for use in y.uses()):
            return None
        for x in _candidates(y, nodes):
            expression = Expression(x, nodes)
            form = expression.of(y)
            for size in dict.fromkeys(expression.sums.values() or [None]):
                for found in self._read(form, size, expression.tolerance):
                    rewrite = self._rewrite(x, found, expression)
                    if rewrite is not None:
                        rewrite.anchor = next(n for n in nodes if n.op_type in self._sources[0])
                        return rewrite
        return None

    def miss(self, node: ir.Node, anchor: ir.Node) -> tuple[int, str]:
        """What keeps `node` from being the body, and how deep inside the formula that lies.

        Depth -1 if the anchor does not give this formula away, or does not meet x again there.
        """
        nodes, best = upstream(node.outputs[0], casts=self.stashes), (-1, "")
        for x in _candidates(node.outputs[0], nodes):
            expression = Expression(x, nodes, any_cast=True)
            form = expression.of(node.outputs[0])
            told = signs(freeze(expression.of(anchor.outputs[0])))
            wanted = self.form(next(iter(expression.sums.values()), None), gains=False)
            if sum(map(expression.depends, node.inputs)) < 2 or not form:
                continue
            factor = max(form.values()) / max(c for _, c in wanted)
            given = freeze({m: c / factor for m, c in form.items()})
            if not signs(wanted) <= signs(given):
                continue
            if signs(wanted) - {ROOT} <= told:
                depth, text = difference(wanted, given, expression.tolerance)
                axes = " and ".join(map(str, expression.sums))
                inside = ", ".join(sorted(expression.dtypes))
                if not text:
                    depth, text = _DEEP, f"{axes} are the axes of sums, in {inside}; {_LAST}"
                best = max(best, (depth, text), key=lambda found: found[0])
        return best

    def _read(self, form: Form, size: float | None, tolerance: float) -> Iterator[Found]:
        """The ways to read a form as a multiple of the body's."""
        wanted = self.form(size)
        if len(wanted) != len(form):
            return
        _, c = next(iter(wanted))
        factors = [1.0, *(d / c for d in form.values())] if len(self.inputs) == 1 else [1.0]
        for factor in dict.fromkeys(factors):
            given = freeze({m: d / factor for m, d in form.items()})
            yield from unify(wanted, given, {"factor": factor}, tolerance)

    def _rewrite(self, x: ir.Value, found: Found, expression: Expression) -> Rewrite | None:
        axes, bound = found.get("axes", (-1,)), {x, *found.values()}
        # Infinity does not cancel, nor does what x is lost beside: only a maximum may.
        if not all(v in bound or _is_maximum(v) for v in expression.leaves):
            return None
        if axes != (tuple(range(-len(axes), 0)) if self.stashes else axes[:1]):
            return None
        attributes, factor = dict(self.attributes), found["factor"]
        if self.unknown is not None:
            attributes[self.unknown] = float(np.float32(found["unknown"]))
        told = "".join(f" {k}={v:.6g}" for k, v in attributes.items() if k == self.unknown)
        if axes != (-1,):
            attributes["axis"] = axes[0]
        gains = [_gain(found[value], x, len(axes)) for value in self.inputs[1:]]
        if any(gain is None for gain in gains):
            return None
        result = self.op(adopt(x), *gains, **attributes)
        result = result if factor == 1 else result * factor
        return Rewrite(result, list(expression.leaves), f"{self.op.name}{told}")


def _is_maximum(value: ir.Value | None) -> bool:
    """Whether ReduceMax gives a value, in whichever layout, at least -infinity."""
    while (node := produced_by(value, "Max", "Cast", *LAYOUT)) is not None:
        least = scalar(node.inputs[-1]) if node.op_type == "Max" else -math.inf
        if least is None or least > -1e30:
            return False
        value = node.inputs[0]
    return produced_by(value, "ReduceMax") is not None


def upstream(y: ir.Value, *, casts: bool) -> dict[ir.Node, None]:
    """The nodes above `y`, nearest first, as far as they have a form."""
    nodes: dict[ir.Node, None] = {}
    level = [y]
    for _ in range(_DEEP):
        made_by = dict.fromkeys(n for value in level if (n := value.producer()) is not None)
        new = [n for n in made_by if n not in nodes and is_open(n, casts=casts)]
        nodes.update(dict.fromkeys(new))
        level = [value for n in new for value in present_inputs(n)]
    return nodes


def downstream(node: ir.Node) -> Iterator[ir.Node]:
    """The products and quotients below `node`, nearest first, as far as there are formulas."""
    seen, level = {node}, [node]
    for _ in range(_DEEP // 2):
        used = dict.fromkeys(use.node for n in level for v in n.outputs for use in v.uses())
        level = [n for n in used if n not in seen and is_open(n, casts=True)]
        seen.update(level)
        yield from (n for n in level if n.op_type in ("Mul", "Div"))


def _candidates(y: ir.Value, nodes: Mapping[ir.Node, None]) -> Iterator[ir.Value]:
    """What may be the input x of a formula for `y`, farthest first: nothing else is as large."""
    values = dict.fromkeys(v for n in nodes for v in n.inputs if v is not None)
    for x in reversed(values):
        floats = x.dtype is None or is_float(x)
        if x.const_value is not None or not floats or _incompatible(y, x) is not None:
            continue
        seen, pending = {x}, [y]
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            node = value.producer()
            if node is not None and node.op_type == "ReduceMax":
                continue  # what a softmax subtracts cancels, whatever it is
            if node is not None and node in nodes:
                pending += present_inputs(node)
            elif value.const_value is None and same_shape(value.shape, y.shape):
                break
        else:
            yield x


def _gain(value: ir.Value | float, x: ir.Value, axes: int) -> Operand | None:
    """A gain or bias as an operand in the shape of x's last axes, or None."""
    wanted = ir.Shape(x.shape[-axes:] if x.shape is not None else [None])
    if not isinstance(value, ir.Value):
        static = wanted.is_static()
        return np.full(wanted.numpy(), value, ops.numpy_dtype(x)) if static else None
    if value.shape is None:
        return None
    operand, content = adopt(value), constant(value)
    if value.dtype != x.dtype:
        cast = produced_by(value, "Cast")
        operand = adopt(cast.inputs[0]) if cast is not None else value
        if content is not None:
            operand = content.astype(ops.numpy_dtype(x))
            if not np.array_equal(operand.astype(content.dtype), content):
                return None
        elif operand.dtype != x.dtype:
            return None
    dims = ir.Shape(list(itertools.dropwhile(lambda d: d == 1, value.shape)))
    if same_shape(value.shape, wanted):
        return operand
    if len(dims) > axes or not (wanted.is_static() and dims.is_static()):
        return None
    if any(d not in (1, w) for d, w in zip(dims[::-1], wanted[::-1], strict=False)):
        return None
    return ops.expand(ops.reshape(operand, dims.numpy()), wanted.numpy())


def make_pattern(op: Op, inputs: int, *, unknown: str | None = None, **attributes: Any) -> Pattern:
    """The pattern of a body called with `inputs` inputs; `unknown` names a float attribute.

    The trace is of one dtype and rank; its form holds for all.
    """
    with recording() as tape:
        shapes: list[list[int | str]] = [["b", "s", "d"], ["d"], ["d"]]
        values = [
            tape.input(name, ir.DataType.FLOAT, shape)
            for name, shape in zip(op.inputs[:inputs], shapes, strict=False)
        ]
        given = {**attributes, unknown: UNKNOWN} if unknown else attributes
        with tape.inside():
            tape.primitives = True
            result: Value = op.expand(values, {**op.attributes, **given})
        model = to_model(tape, {"y": result})
    root = model.graph.outputs[0].producer()
    assert root is not None
    return Pattern(op, list(model.graph.inputs), root, attributes, unknown)
