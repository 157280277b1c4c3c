"""The reference: graphs and nodes on arrays, in float64, by their operators' own meanings."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.graph import constant, further_bodies, uses_outputs_beyond
from graphgen.op import find_op, read_attributes
from graphgen.operands import Array, onnx_dtype
from graphgen.ops.control_flow import is_if, is_loop, is_scan, looped, stepped, ways_of
from graphgen.places import where_is


def evaluate(
    model: ir.Model,
    feeds: Mapping[str, Array],
    *,
    dtype: Any = np.float64,
    values: Sequence[ir.Value] | None = None,
) -> list[Array]:
    """The outputs by the operators' own meanings, all floats widened to `dtype`: the reference.

    Floats of 8 bits or fewer are not widened: they are numbers that were rounded to them.

    With `values`, returns those instead.

    Raises GraphgenError for an operator that the table lacks, and for sizes that do not fit
    together.
    """
    known = {
        value: _widened(np.asarray(feeds[str(value.name)]), dtype)
        for value in model.graph.inputs
        if str(value.name) in feeds
    }
    return _outputs(model.graph, known, dtype, values)


def _outputs(
    graph: ir.Graph,
    outside: Mapping[ir.Value, Array],
    dtype: Any,
    values: Sequence[ir.Value] | None = None,
) -> list[Array]:
    """The outputs, or `values`, of a graph whose inputs and outer values are known."""
    known = dict(outside)

    def content(value: ir.Value) -> Array:
        if value in known:
            return known[value]
        array = constant(value)
        if array is None:
            raise GraphgenError(f"evaluate: the input {value.name} is missing")
        return _widened(array, dtype)  # not kept: weights in float64 would take twice the model

    for node in graph:
        if find_op(node) is None and constant(node.outputs[0]) is not None:
            continue  # an output that folding has already found
        arrays = [None if x is None else content(x) for x in node.inputs]
        found = _controlled(node, arrays, known, dtype)
        found = evaluate_node(node, arrays, dtype=dtype) if found is None else found
        known.update(zip(node.outputs, found, strict=False))
    return [content(value) for value in (graph.outputs if values is None else values)]


def _controlled(
    node: ir.Node, arrays: Sequence[Any], known: Mapping[ir.Value, Array], dtype: Any
) -> list[Array] | None:
    """The outputs of an If, Loop or Scan, from its subgraphs; None for another operator."""
    if is_if(node):
        branch = node.attributes["then_branch" if arrays[0].item() else "else_branch"]
        return _outputs(branch.as_graph(), known, dtype)
    if not is_scan(node) and not is_loop(node):
        return None
    body = node.attributes["body"].as_graph()

    def step(*given: Array) -> list[Array]:
        return _outputs(body, {**known, **dict(zip(body.inputs, given, strict=True))}, dtype)

    if is_loop(node):
        none = [np.zeros([d if isinstance(d, int) else 0 for d in (0, *(y.shape or ())[1:])])
                for y in node.outputs[len(arrays) - 2 :]]  # fmt: skip
        results = looped(step, arrays)
        return results + none[len(results) - len(arrays) + 2 :]
    ways = ways_of(node, "input")
    states = len(arrays) - len(ways)
    return stepped(step, arrays[:states], arrays[states:], ways, ways_of(node, "output"))


def evaluate_node(
    node: ir.Node, arrays: Sequence[Array | None], *, dtype: Any = np.float64
) -> list[Array]:
    """The outputs of one node on arrays, by its operator's meaning; see `evaluate`."""
    op = find_op(node)
    if op is None:
        raise GraphgenError(f"{where_is(node)}: {node.op_type} is not in the operator table")
    attributes = read_attributes(op, node)
    for name in _DTYPES.intersection(attributes):
        if _is_wide(ir.DataType(attributes[name])):
            attributes[name] = ir.DataType.from_numpy(np.dtype(dtype))
    try:
        results = op(*arrays, **attributes)
        results = results if isinstance(results, tuple) else (results,)
        if uses_outputs_beyond(node, len(results)):
            results = (*results, *further_bodies(op, node, arrays))
    except (ValueError, IndexError) as error:  # NumPy's, of a further body
        raise GraphgenError(f"{where_is(node)}: {node.op_type}: {error}") from error
    except GraphgenError as error:
        if error.__cause__ is None:  # the operator's own
            raise
        raise GraphgenError(f"{where_is(node)}: {error}") from error
    return [_widened(np.asarray(y), dtype) for y in results]


def _widened(array: Array, dtype: Any) -> Array:
    if array.dtype == dtype or not _is_wide(onnx_dtype(array.dtype)):
        return array
    with np.errstate(invalid="ignore"):  # a NaN that signals
        return array.astype(dtype)


_DTYPES = {"to", "output_dtype"}
"""Attributes that give the dtype of a result."""


@cache
def _is_wide(dtype: ir.DataType) -> bool:
    return dtype.is_floating_point() and dtype.bitwidth > 8
