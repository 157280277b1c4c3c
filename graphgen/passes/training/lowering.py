"""From a differentiated graph to one that a runtime can run, with each value calculated once."""

from functools import partial

import onnx_ir as ir
from onnx_ir.passes import common

from graphgen import ops
from graphgen.errors import GraphgenError
from graphgen.graph import present_inputs
from graphgen.match import Engine, Pass, PassReport, Rewrite, whole
from graphgen.op import find_op
from graphgen.passes.canonicalize import canonicalize
from graphgen.passes.clean import clean
from graphgen.passes.legalize import by_body, inline
from graphgen.passes.training.products import in_half, products, split_transposes
from graphgen.targets import Target
from graphgen.value import adopt


def lowering(target: Target, half: ir.DataType | None = None) -> list[Pass]:
    """The passes, in their order; with `half`, products calculate in that dtype.

    No node draws random numbers, so equal nodes may be merged: dropout is a function.
    """
    folding = whole("clean", clean)
    passes = [
        folding,
        Pass("inline", partial(_inline, target=target, half=half is not None)),
        folding,
        Pass("canonicalize", canonicalize),
        Pass("split_transposes", split_transposes),
        Pass("products", products),
        folding,
    ]
    return passes if half is None else [*passes, in_half(half), folding]


def _inline(model: ir.Model, engine: Engine, *, target: Target, half: bool) -> PassReport:
    """Composites as their bodies if the target has no kernel.

    Raises GraphgenError for one without a body.
    """
    report = inline(model, engine, "inline", partial(_body, target=target, half=half))
    for site in report.sites:
        if site.status == "missed" and not site.rolled_back:
            raise GraphgenError(site.reason)
    return report


def _body(node: ir.Node, *, target: Target, half: bool) -> Rewrite | None:
    """The body and no variant, so that the backward pass shares what it computes.

    Products in half precision are taken out of Attention, whose softmax is not in half precision.
    """
    op, missing = find_op(node), target.missing(node)
    if op is not None and half and op is ops.scaled_dot_product_attention:
        missing = missing or "its products are to be in half precision"
    if op is None or not op.composite or missing is None:
        return None
    return by_body(op, node, None, missing)


def remove_dropout(model: ir.Model) -> None:
    """Replace dropout by its mean, the identity; inputs that only dropout had go with it."""
    before = {value for value in model.graph.inputs if value.uses()}
    done = Engine().run("remove_dropout", model, {ops.dropout: [_mean]}, forward=True)
    for site in done.sites:
        if site.status != "fired":
            problem = f"the evaluation model would keep a dropout: {site.reason}"
            raise GraphgenError(f"artifacts: {site.where}: {problem}")
    common.RemoveUnusedNodesPass()(model)
    for value in before:
        if not value.uses():
            model.graph.inputs.remove(value)


def _mean(node: ir.Node) -> Rewrite:
    return Rewrite(adopt(node.inputs[0]), present_inputs(node), "its mean")
