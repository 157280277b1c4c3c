"""What an evaluation model has of the outputs of its model, and an inference model of these."""

from collections.abc import Mapping, Sequence

import onnx_ir as ir
from onnx_ir.passes import common

from graphgen.errors import GraphgenError, near
from graphgen.operands import Array


def evaluated(
    model: ir.Model,
    outputs: Sequence[ir.Value],
    asked: Sequence[str],
    weights: Sequence[str | float] = (),
) -> list[str]:
    """Of a model's `outputs`, those that were asked for, and those that the loss is made of.

    They become outputs of the model of the loss, after it, and behind them `weights` of the loss,
    by name; what only others need goes. Raises GraphgenError for a name that is not there.
    """
    graph = model.graph
    [loss] = graph.outputs
    made = {x: str(x.name) for x in outputs if x.producer() is not None and x is not loss}
    names = [asked] if isinstance(asked, str) else asked
    for name in names:
        if name not in made.values():
            raise GraphgenError(
                f"artifacts: outputs has {name!r}; give a list of outputs of the model, which has "
                f"{', '.join(made.values())}{near(name, made.values())}"
            )
    further = [x for node in graph for x in node.outputs if x.name in weights]
    graph.outputs.extend(value for value, name in made.items() if name in names)
    graph.outputs.extend(further)
    common.RemoveUnusedNodesPass()(model)
    kept = [x for x in made if (node := x.producer()) is not None and node.graph is graph]
    graph.outputs[:] = [loss, *kept, *further]
    return [made[value] for value in kept]


def inference_of(
    evaluation: ir.Model, outputs: Sequence[str], weights: Mapping[str, Array], who: str
) -> ir.Model:
    """The nodes that make `outputs`, with `weights` instead of inputs of these names.

    `evaluation` is changed. Raises GraphgenError for an output that is not there.
    """
    graph = evaluation.graph
    made = {str(value.name): value for node in graph for value in node.outputs}
    if isinstance(outputs, str) or not outputs:
        raise GraphgenError(f"{who}: outputs is {outputs!r}; give a list of names")
    for name in outputs:
        if name not in made:
            raise GraphgenError(
                f"{who}: the evaluation model has no value {name!r}{near(name, made)}; give names "
                "of the model's outputs"
            )
    graph.outputs[:] = [made[name] for name in outputs]
    for value in [value for value in graph.inputs if value.name in weights]:
        graph.inputs.remove(value)
        value.const_value = ir.tensor(weights[str(value.name)], name=value.name)
        graph.register_initializer(value)
    common.RemoveUnusedNodesPass()(evaluation)
    for value in [value for value in graph.inputs if not value.uses()]:
        graph.inputs.remove(value)
    return evaluation
