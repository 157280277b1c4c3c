"""Folding, common subexpressions and dead code, from the libraries."""

from functools import partial

import onnx_ir as ir
from onnx_ir.passes import common

from graphgen.edit import infer_model, lift_constants, tidy
from graphgen.forms import MADE_UP
from graphgen.graph import constant, count_nodes, parameters
from graphgen.match import Replacement
from graphgen.subgraphs import nodes_of
from graphgen.traits import Trait, has

# Folding never grows the file by more than about 1 MB.
_FOLDED_BYTES = 1 << 20
_SHORT = 16
_STRING = ir.DataType.STRING
_TYPES = (ir.AttributeType.TYPE_PROTO, ir.AttributeType.TYPE_PROTOS)


def clean(model: ir.Model) -> Replacement:
    """Fold constants, merge equal subexpressions, drop dead code, and infer types again.

    Random operators are never merged: two of them draw different numbers.
    """
    changed, unknown = _fold(model), _unknown_sizes(model)
    before = count_nodes(model), len(model.graph.initializers)
    lift_constants(model)
    _share_constants(model.graph)
    if not any(has(node, Trait.RANDOM) for node in nodes_of(model.graph)):
        for graph in filter(_comparable, list(model.graphs())):
            found = common.CommonSubexpressionEliminationPass()(ir.Model(graph, ir_version=10))
            changed |= found.modified
    tidy(model)
    changed |= before != (count_nodes(model), len(model.graph.initializers))
    context, last = infer_model(model), unknown
    while (unknown := _unknown_sizes(model)) < last and _fold(model):  # one size shows the next
        tidy(model)
        context, last = infer_model(model), unknown
    return Replacement(model, "folded and merged" if changed else "", context)


def _fold(model: ir.Model) -> bool:
    from graphgen.folding import fold_constants  # a sixth of the time to import `optimize`

    return fold_constants(model, _FOLDED_BYTES // 8, partial(_should_fold, _declared(model)))


def _unknown_sizes(model: ir.Model) -> int:
    """How many values have a size for which inference made a name up."""
    shapes = [value.shape for node in nodes_of(model.graph) for value in node.outputs]
    return sum(MADE_UP.search(str(shape)) is not None for shape in shapes if shape is not None)


def _comparable(graph: ir.Graph) -> bool:
    """Whether the library can compare all attributes; those that are types it cannot."""
    return not any(attr.type in _TYPES for node in graph for attr in node.attributes.data.values())


def _declared(model: ir.Model) -> set[ir.Value]:
    """The parameters of a model that was declared here.

    A file of another tool does not say which of its initializers are parameters.
    """
    ours = model.producer_name == "graphgen"
    return {*parameters(model.graph).values()} if ours else set()


def _should_fold(declared: set[ir.Value], node: ir.Node) -> bool | None:
    """Whether to fold a node; not a weight that stays in use, which the file would hold twice.

    Tied weights would also come apart. Nor a declared parameter: training would change what it was
    folded to instead, as each row that is read of a table on its own, and it could not go back to
    its checkpoint; runtimes fold it when they load the file. Nor sequences and strings, which the
    library cannot turn into tensors; nor random numbers, which would be the same in each run; nor
    operators that the runtime computes differently.
    """
    if has(node, Trait.RANDOM | Trait.REFERENCE_DIFFERS):
        return False
    if any(isinstance(v.type, ir.SequenceType) or v.dtype is _STRING for v in node.outputs):
        return False
    for value in node.inputs:
        if value in declared:
            return False
        if value is None or value.const_value is None:
            continue
        if value.const_value.size > _SHORT and len(value.uses()) > 1:
            return False
    return None


def _share_constants(graph: ir.Graph) -> None:
    """Merge equal scalars and short constants; never parameters, which may be equal by chance."""
    named = parameters(graph)
    first: dict[object, ir.Value] = {}
    for name, value in list(graph.initializers.items()):
        array = None if name in named or value.is_graph_output() else constant(value)
        if array is None or array.size > _SHORT:
            continue
        kept = first.setdefault((value.dtype, array.shape, array.tobytes()), value)
        if kept is not value:
            value.replace_all_uses_with(kept)
            del graph.initializers[name]
