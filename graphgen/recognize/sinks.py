"""A softmax scaled by how little a sink takes of it: a softmax with one score more."""

import numpy as np
import onnx_ir as ir

from graphgen.graph import constant, produced_by
from graphgen.infer import same_shape
from graphgen.match import Rewrite
from graphgen.ops.elementwise import sigmoid, sub
from graphgen.ops.layout import concat, dim, expand, slice_, unsqueeze
from graphgen.ops.linalg import matmul
from graphgen.ops.reduce import reduce_log_sum_exp
from graphgen.ops.softmax import softmax
from graphgen.value import Tensor, adopt


def scaled_by_what_is_left(node: ir.Node) -> Rewrite | None:
    """(softmax(s) V) · σ(ln Σ exp s - c) is (softmax of s and c, without c's weight) V.

    σ(ln Σ exp s - c) = Σ exp s / (Σ exp s + exp c) for a constant c, as Granite writes the sinks of
    arXiv 2508.10925; the logarithm takes three times as long as the softmax.
    """
    for product, factor in (node.inputs, node.inputs[::-1]):
        made, share = produced_by(product, matmul), _source(factor)
        weights = None if made is None else produced_by(made.inputs[0], softmax)
        gate = produced_by(share, sigmoid)
        left = None if gate is None else produced_by(gate.inputs[0], sub)
        log = None if left is None else produced_by(left.inputs[0], reduce_log_sum_exp)
        if weights is None or made is None or left is None or log is None or factor is None:
            continue
        scores, v, sinks = weights.inputs[0], made.inputs[1], left.inputs[1]
        given = constant(sinks)
        if scores is None or scores is not log.inputs[0] or scores.shape is None or v is None:
            continue
        rank, axes = len(scores.shape), constant(log.inputs[1]) if len(log.inputs) > 1 else None
        along = [] if axes is None else [int(axis) % rank for axis in axes.reshape(-1)]
        column = ir.Shape([*scores.shape[:-1], 1])
        if [*along, weights.attributes.get_int("axis", -1) % rank] != [rank - 1, rank - 1]:
            continue
        # A sink of infinity gives 0 as a factor, and NaN as a score.
        if given is None or sinks is None or not (given < np.inf).all():
            continue
        if v.shape is None or len(v.shape) < 2 or not same_shape(factor.shape, column):
            continue
        if not same_shape(left.outputs[0].shape, log.outputs[0].shape):
            continue
        one: Tensor = adopt(sinks)
        if not log.attributes.get_int("keepdims", 1):
            one = unsqueeze(one, [len(given.shape)])
        s = adopt(scores)
        one = expand(one, [*(dim(s, axis) for axis in range(rank - 1)), 1])
        joined = slice_(softmax(concat(s, one, axis=rank - 1)), [0], [-1], [rank - 1])
        reason = "a sink, which takes its share of the softmax"
        caveat = "a row that is masked entirely would give zeros"
        return Rewrite(matmul(joined, adopt(v)), [scores, v, sinks], reason, caveat)
    return None


def _source(value: ir.Value | None) -> ir.Value | None:
    """What a factor for each row is, before it gets the axes of the rows."""
    while (node := produced_by(value, "Reshape", "Unsqueeze", "Squeeze", "Flatten")) is not None:
        value = node.inputs[0]
    return value
