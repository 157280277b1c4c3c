"""The last pass: operators that the target cannot run become their bodies."""

from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.edit import infer_model, tidy
from graphgen.errors import GraphgenError
from graphgen.graph import bodies, operator_name, present_inputs, produced_by
from graphgen.infer import OPSET, schema_of
from graphgen.match import Engine, Miss, Outcome, PassReport, Refusal, Rewrite, Rule, Site
from graphgen.op import TABLE, Op, find_op, is_a, read_attributes
from graphgen.ops.attention import attention
from graphgen.ops.contrib import (
    bias_gelu,
    embed_layer_normalization,
    skip_layer_normalization,
    skip_rms_normalization,
)
from graphgen.ops.layout import cast
from graphgen.ops.norm import group_norm_by_instances
from graphgen.places import where_is
from graphgen.recognize.axes import View
from graphgen.recognize.group_query import as_group_query
from graphgen.record import current_tape
from graphgen.targets import Target, TargetName, newest_opset, target as find_target
from graphgen.traits import Trait, has
from graphgen.value import Tensor, Value, adopt
from graphgen.version import minor


def as_variant(node: ir.Node, target: Target) -> Tensor | None:
    """The node's result, recorded in other operators that `target` has, or None."""
    op, tape = find_op(node), current_tape()
    if op is None or tape is None or any(v.shape is None for v in present_inputs(node)):
        return None
    inputs, attributes = op.bind(list(map(adopt, node.inputs)), read_attributes(op, node))
    for variant in op.variants:
        before = len(tape.nodes)
        result: Tensor | None = variant(*inputs, **attributes)
        if result is not None and all(map(target.runs, tape.nodes[before:])):
            return result
    return None


def legalize(model: ir.Model, engine: Engine, target: Target) -> PassReport:
    """Inline the body of every composite for which `target` has no kernel, until none is left.

    A node with neither a kernel nor a body stays, with a remark. So does a quantized one: its body
    would read all weights again in each run, in float32.
    """
    target = _for_all(target, model)
    report = inline(model, engine, "legalize", partial(_inlined, target=target))
    if not engine.stopped:
        report.sites += _left(model, target)
    tidy(model)
    return report


def runnable(part: ir.Model, target: TargetName = "cpu") -> ir.Model:
    """The model, or a copy in which operators that the target lacks are their bodies.

    The target is this runtime's CPU, or another one.
    """
    profile = find_target(target)
    composites = [node for node in part.graph if (op := find_op(node)) is not None and op.composite]
    if newest_opset() < OPSET or not all(map(profile.runs, composites)):
        part = part.clone()
        legalize(part, Engine(context=infer_model(part)), profile)
        part.graph.opset_imports[""] = min(newest_opset(), part.graph.opset_imports[""])
    return part


def _for_all(target: Target, model: ir.Model) -> Target:
    """The target at the newest opset at which it has a kernel for every node of the model.

    A file has one opset, and random operators, Multinomial and RoiAlign have kernels up to 21 only:
    beside them, Attention of opset 23 has to be another operator.
    """
    newest = min(map(target.newest, model.graph.all_nodes()), default=target.opset)
    if newest == target.opset:
        return target
    return replace(target, opset=newest, runtime=f"{target.runtime} at opset {newest}")


def inline(model: ir.Model, engine: Engine, name: str, rule: Rule) -> PassReport:
    """Apply a rule to what has a body or a variant, and at once to those in its results."""
    rules = {op: [rule] for op in TABLE.values() if op.composite or op.variants}
    return engine.run(name, model, rules, nested=True)


def by_body(
    op: Op, node: ir.Node, first: Tensor | None, reason: str, *, inlined: bool = True
) -> Rewrite:
    """A composite as what `first` is, or its body, and the bodies of its further outputs."""
    results = [*bodies(op, node, first), *[None] * len(node.outputs)][: len(node.outputs)]
    return Rewrite(results, present_inputs(node), reason, inlined=inlined)


def _inlined(node: ir.Node, *, target: Target) -> Outcome:
    """An operator without a kernel, as a variant or as its body."""
    op = find_op(node)
    if op is None or has(node, Trait.QUANTIZED):
        return None
    if (missing := target.missing(node)) is None:
        if faster := _faster(node, target):
            return faster
        slower = target.pays(node) if op in _SUMS else None
        with suppress(GraphgenError):  # it has no body for these operands: it stays
            return by_body(op, node, None, f"{slower}: its body instead") if slower else None
        return None
    try:
        result, others = as_variant(node, target), list[str]()
        result = _by_instances(node, target) if result is None else result
        if result is not None and (tape := current_tape()) is not None:
            made = filter(None, map(find_op, tape.nodes))
            others = [other.name for other in made if other.composite]
        elif not op.composite:
            return None
        reason = f"{missing}: {others[-1] if others else 'its body'} instead"
        return by_body(op, node, result, reason, inlined=not others)
    except GraphgenError as error:
        return Miss(f"{missing}: {error}")


def _by_instances(node: ir.Node, target: Target) -> Tensor | None:
    """A norm of groups as one of instances, where that measured faster than its body; or None."""
    op, tape = find_op(node), current_tape()
    if op is None or op is not ops.group_normalization or tape is None:
        return None
    before = len(tape.nodes)
    result = group_norm_by_instances(*map(adopt, node.inputs), **read_attributes(op, node))
    norm = next(n for n in tape.nodes[before:] if is_a(n, ops.instance_normalization))
    return result if target.runs(norm) and target.pays(norm, optional=True) is None else None


_SUMS = (skip_layer_normalization, skip_rms_normalization, bias_gelu, embed_layer_normalization)
"""What the runtime makes of good operators when it saves a file, also where that is slower."""


def _faster(node: ir.Node, target: Target) -> Rewrite | Refusal | None:
    """The node as what measured faster, its body or another operator, with the figures."""
    op = find_op(node)
    if op is None or op is not ops.scaled_dot_product_attention:
        return None
    if len(node.outputs) > 1 or len(node.inputs) > 4:
        return None
    half = node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.FLOAT16
    if half and target.name == "cpu":
        return Refusal(_MAY_OVERFLOW) if _is_cached(node) else _in_float32(node)
    if slower := target.pays(node):
        return by_body(op, node, None, f"{slower}: its body instead")
    if len(present_inputs(node)) > 3:
        return None  # of a row that a mask hides entirely that kernel gives the mean of V, not 0
    result = as_group_query(*map(adopt, node.inputs), **read_attributes(op, node))
    made = tape.nodes if result is not None and (tape := current_tape()) is not None else []
    other = next((n for n in made if is_a(n, ops.group_query_attention)), None)
    if other is None or minor(target.runtime) < (1, 22) or not target.runs(other):
        return None
    reason = target.prefers(other, node)
    return Rewrite([result], present_inputs(node), reason) if reason else None


_MAY_OVERFLOW = (
    "in float16, as its keys are joined to a cache: a score beyond 65,504 would make NaN of its row"
)


def _in_float32(node: ir.Node) -> Rewrite:
    """Attention in float16 between casts, as fast on the CPU: 0.5 to 1.0 of the time, with AVX-512.

    The kernel for float16 gives NaN where a score is beyond 65,504; the runtime computes products
    and softmax of float16 in float32.
    """
    given = [Value(x) for x in present_inputs(node)]  # a mask comes last, if there is one
    wide = [cast(x, to=np.float32) if x.dtype == np.float16 else x for x in given]
    q, k, v, *mask = wide
    attributes = read_attributes(ops.scaled_dot_product_attention, node)
    y = attention(q, k, v, *mask, **attributes)
    reason = "in float32 between casts, in which no score overflows"
    return Rewrite(cast(y, to=np.float16), present_inputs(node), reason)


def _is_cached(node: ir.Node) -> bool:
    """Whether the keys are joined to others, as to a cache, which decoding keeps as it is."""
    view = View.of(present_inputs(node)[1])
    return view is not None and produced_by(view.source, ops.concat) is not None


def _left(model: ir.Model, target: Target) -> list[Site]:
    """A remark for each operator without a body that is unknown, or that no kernel runs."""
    found: dict[str, list[ir.Node]] = {}
    for node in model.graph.all_nodes():
        op, version = find_op(node), model.graph.opset_imports.get(node.domain, 1)
        reason = None
        if op is None and schema_of(node.domain, node.op_type, version) is None:
            reason = None if target.runs(node) else f"{operator_name(node)} is not known"
        elif op is None or not op.composite or has(node, Trait.QUANTIZED):
            reason = target.lacks(node)
        if reason is not None:
            found.setdefault(reason, []).append(node)
    return [
        Site(
            "missed", where_is(nodes[0]), f"{reason}, {len(nodes)} left as they were", node=nodes[0]
        )
        for reason, nodes in found.items()
    ]
