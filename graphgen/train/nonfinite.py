"""Where a value that is not finite comes from: run the model again and watch every value."""

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import onnx
import onnx_ir as ir

from graphgen import ops
from graphgen.graph import constant, is_float, operator_name
from graphgen.operands import Array
from graphgen.places import where_is
from graphgen.record import recording
from graphgen.runtime import Session
from graphgen.value import adopt


def find_not_finite(
    model: bytes, feeds: Mapping[str, Array], open_session: Callable[[bytes], Session]
) -> str | None:
    """What is not finite first, in words, with its module path; None if all outputs are finite.

    It is an input or parameter; else the first value on the way to an output that is not finite
    though all its operands are; else the first NaN computed from no NaN, since masks of -inf are
    intended. Only Σ|x| of each value leaves the graph, so this takes no more memory than a step.
    """
    for name, array in feeds.items():
        if not np.isfinite(array).all():
            return f"{name}, which was fed, is not finite"
    program = ir.from_proto(onnx.load_model_from_string(model))
    outputs, watched = [*program.graph.outputs], [*_watch(program.graph)]
    data = ir.to_proto(program).SerializeToString()
    sums = dict(zip(watched, map(float, open_session(data)(feeds)[len(outputs) :]), strict=True))

    def total(value: ir.Value) -> float:
        array = constant(value)
        return sums.get(value, 0.0) if array is None else float(np.abs(array, dtype=float).sum())

    pending = [value for value in outputs if not math.isfinite(total(value))][:1]
    reached = {*pending}
    while pending:
        node = pending.pop().producer()
        new = (
            {x for x in node.inputs if x is not None and not math.isfinite(total(x))}
            if node
            else ()
        )
        pending += {*new} - reached
        reached |= {*new}
    for fine in (math.isfinite, lambda x: not math.isnan(x)):
        for value in watched:
            node, found = value.producer(), total(value)
            assert node is not None
            before = [total(x) for x in node.inputs if x is not None]
            if value in reached and before and not fine(found) and all(map(fine, before)):
                what = f"{value.name!r}, made by {operator_name(node)} in {where_is(node)}"
                return f"{what}, is {'NaN' if math.isnan(found) else 'infinite'} first"
    return None


def _watch(graph: ir.Graph) -> Iterator[ir.Value]:
    """Every value that may be float; Σ|x| of each, in float32, becomes an output."""
    for node in list(graph):
        for value in node.outputs:
            if value.name and (value.dtype is None or is_float(value)):
                with recording() as tape:
                    x = ops.cast(adopt(value), to=ir.DataType.FLOAT)
                    output = tape.operand(ops.reduce_l1(x, keepdims=0))
                    graph.insert_after(node, tape.nodes)
                    tape.kept = True
                output.name = f"{value.name}.watched"
                output.type, output.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([])
                graph.outputs.append(output)
                yield value
