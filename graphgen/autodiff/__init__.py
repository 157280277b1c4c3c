"""Reverse mode: one walk from the loss to the parameters, one dictionary of cotangents.

A node's operator gives the rule; a composite without one is replaced by its body first, so that
forward and backward pass share the intermediate values.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.arguments import checked
from graphgen.autodiff.reverse import owned, prepared, walk
from graphgen.autodiff.sequences import without_sequences
from graphgen.edit import infer_model, lift_constants, register_constants, tidy
from graphgen.errors import GraphgenError
from graphgen.graph import ModelLike, is_float, model_in
from graphgen.infer import describe
from graphgen.ops.layout import numpy_dtype
from graphgen.record import recording
from graphgen.value import Tensor, adopt

_SMALL = 1024  # the most bytes to fold


@checked
def grad(model: ModelLike, *, of: str | None = None, wrt: Iterable[str] | None = None) -> ir.Model:
    """A copy of `model` with the gradient of one output as further outputs, named `<name>_grad`.

    Args:
        model: A model with a scalar float output.
        of: The name of that output; the only output by default.
        wrt: Names of float inputs or initializers; all float inputs by default.

    Raises GraphgenError for an output that is not scalar, an unknown name, a value that the
    output does not depend on, an output that has the gradient's name already, and an operator
    without a gradient rule.
    """
    result = model_in(model, "grad").clone()
    graph = result.graph
    outputs = {str(v.name): v for v in graph.outputs}
    if of is None and len(outputs) > 1:
        raise GraphgenError(f"grad: of= must name one of the outputs {', '.join(outputs)}")
    if of is not None and of not in outputs:
        raise GraphgenError(f"grad: there is no output {of}; there are {', '.join(outputs)}")
    loss = outputs[of] if of is not None else graph.outputs[0]
    known = {str(v.name): v for v in (*graph.inputs, *graph.initializers.values())}
    if wrt is None:
        wrt = [str(v.name) for v in graph.inputs if v.dtype and v.dtype.is_floating_point()]
    names = list(wrt)
    if not names:
        raise GraphgenError(
            "grad: wrt= names nothing, and there is no float input; name parameters"
        )
    for name in names:
        if name not in known:
            raise GraphgenError(f"grad: wrt={name} is not an input or initializer of the model")
        if names.count(name) > 1:
            raise GraphgenError(f"grad: wrt= names {name} twice; name it once")
        if f"{name}_grad" in outputs:
            raise GraphgenError(
                f"grad: the model already has an output {name}_grad; rename that, or leave {name} "
                "out of wrt="
            )
    for name, value in zip(names, backward(result, loss, [known[n] for n in names]), strict=True):
        value.name = f"{name}_grad"
        graph.outputs.append(value)
    tidy(result)
    return result


def backward(model: ir.Model, loss: ir.Value, wrt: Sequence[ir.Value]) -> list[ir.Value]:
    """Append the backward pass to the model's graph; return the gradients in `wrt`'s order."""
    graph = model.graph
    place = list(graph.outputs).index(loss) if loss.is_graph_output() else None
    context = infer_model(model)
    if without_sequences(model, context):
        context = infer_model(model)
    unknown = any(value.shape is None for node in graph for value in node.outputs)
    if unknown or any(True for _ in graph.subgraphs()):
        context = _folded(model, wrt)
    loss = loss if place is None else graph.outputs[place]  # it may have been a branch's
    if loss.shape is None or any(d != 1 for d in loss.shape) or not is_float(loss):
        raise GraphgenError(
            f"gradient: {loss.name} is {describe(loss)}; a loss must be one float: take its mean"
        )
    for value in wrt:
        if not is_float(value):
            raise GraphgenError(
                f"gradient: {value.name} is {describe(value)}; only floats have a gradient"
            )
    active = prepared(
        graph, wrt, lambda: [loss if place is None else graph.outputs[place]], context
    )
    loss = loss if place is None else graph.outputs[place]  # or a composite's
    if loss not in active:
        raise GraphgenError(
            f"gradient: {loss.name} depends on none of {', '.join(str(v.name) for v in wrt)}"
        )
    cotangents: dict[ir.Value, Tensor] = {}
    with recording(context=context) as tape:
        scalar_loss = adopt(loss)
        one = np.ones((), numpy_dtype(scalar_loss))
        cotangents[loss] = ops.expand(one, ops.shape(scalar_loss))
        walk(graph, active, cotangents, tape)
        unused = [str(v.name) for v in wrt if v not in cotangents]
        if unused:
            raise GraphgenError(f"gradient: {loss.name} does not depend on {', '.join(unused)}")
        made = set(tape.nodes)
        results = [owned(cotangents[value], made, tape) for value in wrt]
        graph.extend(tape.nodes)
        tape.kept = True
    register_constants(graph, tape.constants.values())
    return results


def _folded(model: ir.Model, wrt: Sequence[ir.Value]) -> Any:
    """Fold what constants decide, sizes and branches of an If, but nothing that reads `wrt`."""
    from graphgen.folding import fold_constants  # as in passes/clean.py

    fixed = set(wrt)
    fold_constants(model, _SMALL, lambda node: None if fixed.isdisjoint(node.inputs) else False)
    lift_constants(model)
    return infer_model(model)
