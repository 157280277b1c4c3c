"""How norms of groups of channels, and over axes of any size, are norms of single channels."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphgen.graph import constant, produced_by
from graphgen.infer import same_shape
from graphgen.match import Rewrite
from graphgen.ops.elementwise import add, mul
from graphgen.ops.layout import numpy_dtype, squeeze, unsqueeze
from graphgen.ops.norm import group_normalization, instance_normalization
from graphgen.value import Tensor, Value, adopt

FLOAT = ir.DataType.FLOAT


@group_normalization.recognize("Reshape")
def _(node: ir.Node) -> Rewrite | None:
    """InstanceNormalization of groups, (N, G, ...), between reshapes, without gains of its own."""
    norm = produced_by(node.inputs[0], "InstanceNormalization")
    groups = None if norm is None else produced_by(norm.inputs[0], "Reshape")
    x = None if groups is None else groups.inputs[0]
    if norm is None or groups is None or x is None or x.shape is None or len(x.shape) < 3:
        return None
    split, channels = groups.outputs[0].shape, x.shape[1]
    count = split[1] if split is not None and len(split) > 2 else None
    if not isinstance(channels, int) or not isinstance(count, int) or channels % (count or 1):
        return None
    same = split is not None and same_shape(ir.Shape(split[:1]), ir.Shape(x.shape[:1]))
    gain, bias = map(constant, norm.inputs[1:])
    if not same or gain is None or bias is None or np.any(gain != 1) or np.any(bias != 0):
        return None
    if not same_shape(x.shape, node.outputs[0].shape):
        return None
    ones, zeros = (f(channels, numpy_dtype(Value(x))) for f in (np.ones, np.zeros))
    epsilon = norm.attributes.get_float("epsilon", 1e-5)
    result = group_normalization(Value(x), ones, zeros, num_groups=count, epsilon=epsilon)
    return Rewrite(result, [x], f"{channels} channels in {count} groups", anchor=norm)


def by_instances(
    x: ir.Value, summed: int, gains: Sequence[ir.Value | float], epsilon: float
) -> Tensor | None:
    """A norm of x over its last axes, of any size, · gain + bias; None if there is none.

    LayerNormalization would need a gain of the size of these axes. One axis is left, or two, of
    which the second is the channels; gains are as they are, those of x's own rank, or numbers.
    """
    kept = len(x.shape or ()) - summed
    count = x.shape[1] if kept == 2 and x.shape is not None else 1
    floats = [v for v in (x, *gains) if isinstance(v, ir.Value)]
    if kept not in (1, 2) or not isinstance(count, int) or {v.dtype for v in floats} != {FLOAT}:
        return None
    ones, zeros = (f(count, np.float32) for f in (np.ones, np.zeros))
    rows = adopt(x) if kept == 2 else unsqueeze(adopt(x), [1])
    y = instance_normalization(rows, ones, zeros, epsilon=epsilon)
    y = y if kept == 2 else squeeze(y, [1])
    for value, (apply, neutral) in zip(gains, ((mul, 1.0), (add, 0.0)), strict=False):
        y = y if value == neutral else apply(y, adopt(value))
    return y
