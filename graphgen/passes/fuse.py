"""Fusions: the operators' recognizers, applied if the target has the fused kernel."""

from collections.abc import Callable, Sequence
from functools import partial

import onnx_ir as ir

from graphgen import ops
from graphgen.edit import tidy
from graphgen.graph import constant, present_inputs, produced_by
from graphgen.match import Engine, Miss, Outcome, PassReport, Refusal, Rewrite, Rule
from graphgen.op import Op, find_op, is_a, read_attributes
from graphgen.ops.contrib import bias_gelu, skip_layer_normalization
from graphgen.passes.fusions import FORMULAS, RECOGNIZED, patterns
from graphgen.passes.legalize import as_variant
from graphgen.recognize.pattern import ENDS, Pattern, downstream, upstream
from graphgen.recognize.sums import SUMMED, fused_sum, shared_sum
from graphgen.targets import Target
from graphgen.value import Value, adopt, graph_value

_GATES = {ops.quick_gelu: ", the gate of a SwiGLU", ops.gelu: ", the gate of a GeGLU"}


def fuse(
    model: ir.Model,
    engine: Engine,
    *,
    name: str,
    target: Target,
    strict_masked_rows: bool = False,
) -> PassReport:
    """Run one fusion by its name in `RECOGNIZED` or `FORMULAS`, or `keep_apart`."""
    rules: dict[Op | str, list[Rule]] = {}
    guard = partial(
        _where_it_pays, target=target, strict=strict_masked_rows, optional=name == "fuse_sums"
    )
    if name == "keep_apart":
        rule = partial(_apart, target)
        on_gpu = target.name in ("cuda", "webgpu")
        kept = () if on_gpu else (ops.layer_normalization, ops.gelu)
        rules = {op: [rule] for op in kept}
    # Measured on the CPU only; and no gradient goes through the choice for no steps.
    elsewhere = name == "fuse_recurrent" and target.name != "cpu"
    for op in () if elsewhere else RECOGNIZED.get(name, ()):
        assert op.recognizer is not None
        for root in op.roots:
            rules.setdefault(root, []).append(guard(op.recognizer))
    if name in FORMULAS:
        for root in {*ENDS, *(pattern.root.op_type for pattern in patterns(name))}:
            rules.setdefault(root, []).append(guard(partial(_first, patterns(name))))
        for anchor in set[str]().union(*(pattern.anchors for pattern in patterns(name))):
            rules.setdefault(anchor, []).append(partial(_missed, patterns(name)))
    report = engine.run(name, model, rules)
    if name == "fuse_sums":  # a shared sum is rewritten before the norm that reads it
        rules = {op: [guard(shared_sum)] for op in (ops.add, *SUMMED)}
        report.sites += engine.run(name, model, rules, forward=True).sites
    if report.count("fired"):
        tidy(model)
    return report


def _first(candidates: Sequence[Pattern], node: ir.Node) -> Outcome:
    """The first pattern that matches; the remark says which activation is the gate of a GLU."""
    kinds = {pattern.stashes for pattern in candidates}
    above = {casts: upstream(node.outputs[0], casts=casts) for casts in kinds}
    for pattern in candidates:
        found = pattern.match(node, above[pattern.stashes])
        if found is None:
            continue
        products = [use.node for use in node.outputs[0].uses() if is_a(use.node, ops.mul)]
        if any(constant(v) is None for n in products for v in n.inputs if v not in node.outputs):
            found.reason += _GATES.get(pattern.op, "")
        return found
    return None


def _apart(target: Target, node: ir.Node) -> Outcome:
    """Put a reshape to the same shape between a sum and a node that the runtime would fuse with it.

    On the CPU the runtime's own passes merge both into one operator, which is slower; they do not
    look through a reshape, which moves no data.
    """
    op, total = find_op(node), node.inputs[0]
    fused = fused_sum(node) if produced_by(total, ops.add) else None
    made = None if fused is None else graph_value(fused.results).producer()
    if op is None or total is None or made is None or total.dtype != ir.DataType.FLOAT:
        return None
    both = is_a(made, skip_layer_normalization, bias_gelu)
    if not both or len(total.uses()) > 1 or _is_repeated(total):
        return None  # the runtime does not either
    if total.is_graph_output() or target.pays(made, optional=True) is None:
        return None
    x = ops.reshape(adopt(total), [0] * len(total.shape or ()))
    y = op(x, *map(adopt, node.inputs[1:]), **read_attributes(op, node))
    reason = f"kept apart from Add: the runtime would fuse both into {made.op_type}"
    return Rewrite(y, present_inputs(node), reason)


def _is_repeated(total: ir.Value) -> bool:
    """Whether another node computes the same sum: the two will be one."""
    node = total.producer()
    operands = [] if node is None else present_inputs(node)
    users = {use.node for x in operands for use in x.uses()} - {node}
    return any(_same_sum(user, node) for user in users)


def _same_sum(a: ir.Node | None, b: ir.Node | None) -> bool:
    if a is None or b is None or not (is_a(a, ops.add) and is_a(b, ops.add)):
        return False
    pairs = zip(present_inputs(a), present_inputs(b), strict=True)
    return all(x is y or _same_sum(x.producer(), y.producer()) for x, y in pairs)


def _missed(candidates: Sequence[Pattern], anchor: ir.Node) -> Outcome:
    """Why no pattern matches where the anchor and what it depends on meet again."""
    for node in downstream(anchor):
        if _first(candidates, node) is not None:
            return None  # that one reports it
        misses = [(p.miss(node, anchor), p) for p in candidates if len(p.inputs) < 3]
        (depth, reason), pattern = max(misses, key=lambda miss: miss[0][0])
        if depth >= 0:
            return Miss(f"{pattern.op.name}: {reason}", anchor)
    return None


def _where_it_pays(
    rule: Callable[[ir.Node], Outcome], *, target: Target, strict: bool, optional: bool
) -> Rule:
    """A rule whose result is refused if the target has no kernel for it, or a slow one."""

    def guarded(node: ir.Node) -> Outcome:
        outcome = rule(node)
        if not isinstance(outcome, Rewrite):
            return outcome
        if strict and outcome.caveat:
            return Refusal(outcome.caveat, outcome.anchor)
        for value in outcome.every() if outcome.fused is None else [outcome.fused]:
            fused = _fused_node(value)
            if fused is None:
                continue
            missing = target.missing(fused)
            if missing and as_variant(fused, target) is None:
                return Refusal(missing, outcome.anchor)
            if slower := target.pays(fused, optional=optional, layout=outcome.layout):
                return Refusal(slower, outcome.anchor)
        outcome.every()  # recorded now that it pays; what fails here is a miss
        return outcome

    return guarded


def _fused_node(value: ir.Value | Value) -> ir.Node | None:
    """The composite that makes `value`, past layout operators."""
    node = graph_value(value).producer()
    while node is not None:
        op = find_op(node)
        if op is not None and op.composite:
            return node
        first = node.inputs[0] if node.inputs else None
        node = first.producer() if first is not None else None
    return None
