"""The loss that artifacts train: by name, of outputs and labels, or your own; or several summed."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.edit import claim, infer_model, register_constants
from graphgen.errors import GraphgenError, near
from graphgen.export.loss_weights import LossWeights
from graphgen.export.named_losses import LABELS, OPTIONS, Loss, by_name
from graphgen.graph import constant, is_float
from graphgen.infer import DOMAIN
from graphgen.op import find_op, is_a, read_attributes
from graphgen.record import Tape, recording
from graphgen.subgraphs import ancestors, reads
from graphgen.traits import Trait
from graphgen.value import Size, Tensor, Value, adopt

Term: TypeAlias = str | Loss | Callable[..., Any]
AnyLoss: TypeAlias = Term | Sequence[Term]


class InputType(Protocol):
    """A dtype and sizes of a new input: `gg.float32["batch"]`."""

    dtype: ir.DataType
    shape: tuple[int | str, ...]


def attach_loss(
    model: ir.Model,
    loss: AnyLoss,
    output: str | None,
    inputs: Mapping[str, InputType],
    *,
    label_smoothing: float,
    z_loss: float,
) -> dict[str, Any]:
    """Make the loss the only output of the model; return what the trainer may know about it."""
    graph = model.graph
    outputs = {str(value.name): value for value in graph.outputs}
    options = {"output": output, "label_smoothing": label_smoothing, "z_loss": z_loss}
    terms = _terms(loss, [*outputs], options)
    if inputs and not any(map(callable, terms)):
        one = " + ".join(map(_named, terms))
        raise GraphgenError(f"artifacts: {min(inputs)} has no effect with loss={one}; leave it out")
    described: dict[str, Any] = {"loss": " + ".join(map(_named, terms))}
    first = terms[0]
    as_it_is = isinstance(first, Loss) and terms == [Loss(first.name)] and first.name in outputs
    named = isinstance(first, Loss) and len(terms) == 1 and first.name not in outputs
    with recording(context=infer_model(model)) as tape:
        added = _new_inputs(graph, inputs, tape)
        parts = list[tuple[Tensor, Any]]()
        for term in terms:
            if isinstance(term, Loss):
                part = by_name(graph, term, outputs, tape)
                parts.append((part if term.factor == 1.0 else part * term.factor, None))
            else:
                parts.append(_own(graph, term, added, terms))
        scalar = tape.operand(functools.reduce(ops.add, (part for part, _ in parts)))
        weights = [] if named else LossWeights(graph, tape).of(parts)
        tape.trim([scalar, *(weights or ())])
        graph.extend(tape.nodes)
        graph.inputs.extend(tape.inputs.values())
        tape.kept = True
    register_constants(graph, tape.constants.values())
    graph.outputs[:] = [scalar]
    claim(graph, {} if as_it_is else {"loss": scalar})
    labels = _labels_of(graph)
    described |= _axes(terms, outputs, labels.get("labels", {}), graph.inputs)
    if not named:
        described["weights"] = None if weights is None else _written(graph, weights)
    if as_it_is:
        return described | labels
    if isinstance(first, Loss) and len(terms) == 1:
        if first.name == "cross_entropy" and first.labels == LABELS and first.weight is None:
            [(classes, *_)] = labels["labels"].values()
            return described | (labels if classes is None else {"classes": classes})
        if first.labels == LABELS and first.name != "cross_entropy":
            return described
    return described | _labels_of(graph, terms)


def _written(graph: ir.Graph, weights: Sequence[ir.Value]) -> list[str | float]:
    """The weights by their names in the graph, and those that are known as numbers."""
    found = list[str | float]()
    for number, weight in enumerate(weights):
        source = weight if (node := weight.producer()) is None else node.inputs[0]
        known = None if source is None else constant(source)
        found.append(f"loss_weight_{number}" if known is None else float(known))
        claim(graph, {str(found[-1]): weight} if known is None else {})
    return found


def _terms(
    loss: AnyLoss, outputs: Sequence[str], options: Mapping[str, Any]
) -> list[Loss | Callable[..., Any]]:
    """The losses to sum. Raises GraphgenError for an unknown one, and an option without effect."""
    several = not isinstance(loss, (str, Loss)) and not callable(loss)
    if not loss:
        raise GraphgenError(f"artifacts: loss is {loss!r}; give a loss, or a list of them")
    given: list[Any] = [*loss] if several else [loss]  # type: ignore[misc]
    terms = list[Loss | Callable[..., Any]]()
    for one in given:
        if isinstance(one, str):
            one = Loss(one) if one in outputs else Loss.read(one)
        terms.append(one)
    plain = {name: value for name, value in options.items() if value}
    Loss("", **plain)  # refuses values out of range
    if plain and isinstance(loss, str) and isinstance(terms[0], Loss):
        terms[0] = replace(terms[0], **plain)
    elif plain:
        own = " + ".join(map(_named, terms))
        raise GraphgenError(
            f"artifacts: {min(plain)} has no effect with loss={own}; leave it out, or set it in a "
            "gg.Loss"
        )
    for term in terms:
        if not isinstance(term, Loss):
            continue
        if term.name not in (*outputs, *OPTIONS):
            raise GraphgenError(
                f"artifacts: loss is {term.name!r}; choose {', '.join(map(repr, OPTIONS))}, a "
                f"scalar output of the model ({', '.join(outputs)}) or a function of the outputs"
                + near(term.name, [*OPTIONS, *outputs])
            )
        known = {"factor"}
        if term.name not in outputs:
            known |= {"output", "labels"} | OPTIONS[term.name]
        if useless := set(term.given) - known:
            raise GraphgenError(
                f"artifacts: {min(useless)} has no effect with loss={term.name}; leave it out"
            )
    return terms


def _named(term: Term) -> str:
    if isinstance(term, Loss):
        return term.name if term.factor == 1.0 else f"{term.factor:g} {term.name}"
    return str(getattr(term, "__name__", type(term).__name__))


def _labels_of(graph: ir.Graph, terms: Sequence[Loss | Callable[..., Any]] = ()) -> dict[str, Any]:
    """The inputs that a loss takes labels from.

    Each has its number of classes, None if unknown, the label that does not count, if any, and
    where labels have weights, those of the classes: nothing where they are unknown.
    """
    [loss] = graph.outputs
    found: dict[str, list[Any]] = {}
    for node in ancestors(loss, reads(graph)):
        op = find_op(node)
        if op is None or "labels" not in op.inputs:
            continue
        logits, labels = node.inputs[0], node.inputs[op.inputs.index("labels")]
        while labels is not None and (made := labels.producer()) is not None:
            same = is_a(made, ops.cast, Trait.LAYOUT) and not is_a(made, ops.expand)
            labels = made.inputs[0] if same else None
        if labels is None or logits is None or not labels.is_graph_input():
            continue
        axis = -1 if op.domain == DOMAIN else 1
        classes = logits.shape[axis] if logits.shape is not None else None
        attributes = read_attributes(op, node)
        entry = [classes if isinstance(classes, int) else None, attributes["ignore_index"]]
        if len(node.inputs) > 2 and attributes.get("reduction", "mean") == "mean":
            weights = None if node.inputs[2] is None else constant(node.inputs[2])
            entry += [] if node.inputs[2] is None else [[] if weights is None else weights.tolist()]
        found[str(labels.name)] = entry
    # Losses of other kinds count by other numbers: only without ignored labels by the same.
    for term in terms:
        name = term.labels if isinstance(term, Loss) and term.name in OPTIONS else _named(term)
        if len(terms) > 1 or isinstance(term, Loss):
            found.setdefault(name, [None, None])
    return {"labels": found} if found else {}


def _axes(
    terms: Sequence[Loss | Callable[..., Any]],
    outputs: Mapping[str, ir.Value],
    labels: Mapping[str, list[Any]],
    inputs: Sequence[ir.Value],
) -> dict[str, Any]:
    """Where an output has the classes of each of `labels`, if that is known.

    A loss by name says it. Of others, the sizes of the outputs do, unless two fit.
    """
    own = [x for x in terms if isinstance(x, Loss) and x.name not in outputs]
    found = {x.labels: x.axis for x in own if x.axis is not None}
    found |= {x.labels: -1 for x in own if x.name == "cross_entropy" and x.axis is None}
    shapes = [[*y.shape] for y in outputs.values() if y.shape is not None and is_float(y)]
    sizes = {str(x.name): x.shape for x in inputs}
    for name, (classes, *_) in labels.items():
        if name in found or (wanted := sizes[name]) is None:
            continue
        fitting = {
            axis
            for shape in shapes
            for axis in range(1, len(shape))
            if shape[axis] == classes and [*shape[:axis], *shape[axis + 1 :]] == [*wanted]
        }
        if len(fitting) == 1:
            found[name] = fitting.pop()
    return {"axes": found} if found else {}


def _new_inputs(graph: ir.Graph, inputs: Mapping[str, InputType], tape: Tape) -> dict[str, Value]:
    """The inputs that functions get beside those of the model."""
    known = {str(value.name) for value in (*graph.inputs, *graph.outputs)}
    for name, spec in inputs.items():
        if not isinstance(getattr(spec, "dtype", None), ir.DataType) or not hasattr(spec, "shape"):
            raise GraphgenError(
                f"artifacts: {name} is {spec!r}; give a dtype with sizes, such as "
                'float32["batch", 256]'
            )
        if name in known or name in graph.initializers:
            raise GraphgenError(f"artifacts: the model has a {name} already; rename the new input")
    return {name: tape.input(name, spec.dtype, [*spec.shape]) for name, spec in inputs.items()}


def _own(
    graph: ir.Graph,
    loss: Callable[..., Any],
    added: Mapping[str, Value],
    terms: Sequence[Loss | Callable[..., Any]],
) -> tuple[Value, Any]:
    """Record a function of the outputs, the inputs and new inputs, all by name.

    Returns the loss and, if the function does, its weight in a mean over batches. A
    new input that no function names goes to each, for Python's error about it.
    """
    known = {str(value.name): value for value in (*graph.inputs, *graph.outputs)}
    signature, named = inspect.signature(loss), _named(loss)
    taken = {name for f in terms if callable(f) for name in inspect.signature(f).parameters}
    given = {name: adopt(known[name]) for name in signature.parameters if name in known}
    given |= {n: x for n, x in added.items() if n in signature.parameters or n not in taken}
    try:
        signature.bind(**given)
    except TypeError as error:
        raise GraphgenError(
            f"artifacts: loss {named}: {error}; its arguments are outputs and inputs of the model "
            f"({', '.join(known)}) and new inputs, given as name=gg.float32[...]"
        ) from None
    value = loss(**given)
    value, weight = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(value, Value):
        raise GraphgenError(
            f"artifacts: loss {named} returned {type(value).__name__}; it must return one float "
            "value, or a tuple of it and its weight in a mean over batches"
        )
    if weight is None:
        return value, None
    one = isinstance(weight, (int, float, np.number, Size)) or (
        isinstance(weight, Value) and all(d == 1 for d in weight.value.shape or ())
    )
    if not one or isinstance(weight, bool):
        raise GraphgenError(
            f"artifacts: loss {named} returned the weight {weight!r}; it must be one number, such "
            "as how many labels count"
        )
    return value, ops.cast(weight, to=np.float32)
