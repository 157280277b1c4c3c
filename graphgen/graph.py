"""The questions that passes ask about a graph."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import onnx_ir as ir

from graphgen.errors import GraphgenError, user_line
from graphgen.op import Op, find_op, is_a, read_attributes
from graphgen.operands import Array
from graphgen.places import where_is
from graphgen.record import Operand
from graphgen.subgraphs import nodes_of
from graphgen.traits import Trait, has
from graphgen.value import Tensor, Value, adopt, graph_value

TORCH_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""Metadata of initializers in which torch's exporter says that one is a PARAMETER or a BUFFER."""

TORCH_CALL = "pkg.torch.onnx.fx_node"
"""Metadata of nodes: the call in torch that one is a part of, with the names of its operands."""

SCALARS = "graphgen.scalars"
"""Graph metadata: the names of parameters without dimensions, as JSON."""

AXES = 256
"""The most axes of a tensor in a file; NumPy's arrays have up to 64."""

CONSTANT = "graphgen.constant"
"""In a value's meta: it was a Constant in the file, so it is not a weight."""

DECLARED = "graphgen.declared"
"""Model metadata: how many of each composite the source declared, as JSON."""

NAMES_OF = "graphgen.names_of"
"""In a graph's meta: a function from a part of what the graph was made of, such as one of its
modules, to the names of the part's weights, or None if it is no such part."""

HELD = "graphgen.held"
"""Metadata of an Identity that detaches: ""; of a Gather: the row that no gradient reaches."""

ORIGIN = "graphgen.origin"
"""Model metadata: what is known of its weights where they were made; a JSON object with `frozen`,
why some are not trained by default, and `tied`, their other names; each by their names here."""

PUBLISHED = "graphgen.published"
"""Metadata of a checkpoint's graph: what the checkpoint calls each module with a product, and which
part of how many equal ones along the outputs it is; as JSON."""
FORMER = "graphgen.former"
"""The metadata of a model that says by what other name adapters may know such a module."""


class HasModel(Protocol):
    """What holds a model, such as the result of `optimize`."""

    @property
    def model(self) -> ir.Model:
        """The model."""
        ...


ModelLike: TypeAlias = ir.Model | HasModel


def model_in(given: ModelLike, who: str) -> ir.Model:
    """The model itself, or the one that an object holds. Raises GraphgenError for anything else."""
    model = getattr(given, "model", given)
    if not isinstance(model, ir.Model):
        raise GraphgenError(
            f"{who}: {given!r:.80} is not a model; give what build or optimize returned, "
            f"or read a file with gg.load first{user_line()}"
        )
    return model


def is_constant_name(name: str | None) -> bool:
    """Whether a value is named like our own constants: constant_0, constant_1, ..."""
    return re.fullmatch(r"constant_\d+", name or "") is not None


def constant(x: ir.Value | Value | None) -> Array | None:
    """The content of a value, if it is known before the run, or None."""
    value = graph_value(x)
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def bytes_of(tensor: ir.TensorProtocol) -> int:
    """How many bytes a tensor's content takes; strings, which have no width, count as 0."""
    return 0 if tensor.dtype == ir.DataType.STRING else tensor.nbytes


def scalar(value: ir.Value | Value | None) -> float | None:
    """The one element of a constant with one element, or None."""
    array = constant(value)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def produced_by(x: object, *kinds: Op | Trait | str) -> ir.Node | None:
    """The node that makes a value, if it is of one of these kinds: see `is_a`."""
    value = graph_value(x)
    node = value.producer() if value is not None else None
    return node if node is not None and is_a(node, *kinds) else None


def uses_outputs_beyond(node: ir.Node, count: int) -> bool:
    """Whether an output after the first `count` is used, or is an output of the graph."""
    return any(y.uses() or y.is_graph_output() for y in node.outputs[count:])


def bodies(op: Op, node: ir.Node, first: Tensor | None = None) -> list[Tensor | None]:
    """What `op`'s bodies record, or `first`, for a node's outputs; None for an unused one.

    Raises GraphgenError for an output that is used but has no body.
    """
    if first is None:
        made = op.expand(*op.bind(node.inputs, read_attributes(op, node)))
        if op.together:
            return list(made)
        first = made
    return [first, *further_bodies(op, node, [adopt(value) for value in node.inputs])]


def further_bodies(op: Op, node: ir.Node, inputs: Sequence[Operand]) -> list[Any]:
    """What the bodies record for a node's outputs except the first; None for an unused one."""
    results: list[Any] = []
    for i, y in enumerate(node.outputs[1:], 1):
        used = y.uses() or y.is_graph_output()
        if used and i not in op.further:
            raise GraphgenError(
                f"{where_is(node)}: output {i} of {node.op_type} is used but has no body; declare "
                "it under the operator in ops/ with @<operator>.output, or do not use it"
            )
        results.append(op.further[i](*inputs, **read_attributes(op, node)) if used else None)
    return results


def is_float(value: ir.Value) -> bool:
    """Whether a value is known to be of a floating-point dtype."""
    return value.dtype is not None and value.dtype.is_floating_point()


def present_inputs(node: ir.Node) -> list[ir.Value]:
    """The inputs of a node, without omitted ones."""
    return [value for value in node.inputs if value is not None]


def operator_name(node: ir.Node) -> str:
    """`Softmax`, or `com.microsoft::QuickGelu` outside the standard domain."""
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def count_nodes(model: ir.Model) -> int:
    """How many nodes a model has, subgraphs included."""
    return sum(1 for _ in nodes_of(model.graph))


def count_operators(model: ir.Model) -> dict[str, int]:
    """How many nodes of each operator a model has, subgraphs included."""
    return dict(sorted(Counter(map(operator_name, nodes_of(model.graph))).items()))


def all_values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Inputs, initializers and node outputs of one graph."""
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def fixed_values(graph: ir.Graph) -> dict[ir.Value, str]:
    """Float initializers that no gradient may change, each with what it is.

    An initial state that is a parameter in torch is a weight.
    """
    found: dict[ir.Value, str] = {}
    for node in graph:
        op = find_op(node)
        for name, what in op.fixed.items() if op is not None else ():
            at = op.inputs.index(name) if op is not None else 0
            pending = [value for value in node.inputs[at : at + 1] if value is not None]
            while pending:
                value = pending.pop()
                made = value.producer()
                learned = value.metadata_props.get(TORCH_KIND) == "PARAMETER"
                if value.is_initializer() and is_float(value) and not learned:
                    found[value] = f"{what} of {where_is(node)}"
                elif made is not None and has(made, Trait.MOVES):
                    pending += present_inputs(made)
    return found


def parameters(graph: ir.Graph) -> dict[str, ir.Value]:
    """The float initializers that are weights, by name: what training changes.

    A weight is named by its module or exporter. Our own constants are called constant_N, and those
    of a file are nodes in it. A float scalar is a constant unless `build`, or torch's exporter,
    noted it as a parameter; so are a norm's statistics and the initial state of a recurrence.
    """
    scalars = json.loads(graph.metadata_props.get(SCALARS, "[]"))
    fixed = fixed_values(graph)
    return {
        name: value
        for name, value in graph.initializers.items()
        if is_float(value)
        and not is_constant_name(name)
        and not value.meta.get(CONSTANT)
        and value not in fixed
        and (
            value.shape is None
            or len(value.shape) > 0
            or name in scalars
            or value.metadata_props.get(TORCH_KIND) == "PARAMETER"
        )
    }
