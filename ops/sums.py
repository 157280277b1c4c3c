"""Sums in one operator with the norm or Gelu behind them, as ONNX Runtime has them.

Whether that is faster than the body depends on the provider.
"""

from typing import Any

import onnx_ir as ir

from graphgen.graph import Rewrite, present_inputs, produced_by
from graphgen.infer import same_shape
from graphgen.op import Operand, adopt, composite, find_op, read_attributes
from graphgen.ops.activation import gelu
from graphgen.ops.norm import layer_normalization, rms_normalization


@composite("SkipLayerNormalization", domain="com.microsoft")
def skip_layer_normalization(
    x: Any, skip: Any, gamma: Any, beta: Any = None, bias: Any = None, *, epsilon: float = 1e-12
) -> Operand:
    """The layer normalisation of x + skip + bias, (B, T, D), of which bias is (D,)."""
    return layer_normalization(_total(x, skip, bias), gamma, beta, epsilon=epsilon)


@composite("SkipSimplifiedLayerNormalization", domain="com.microsoft")
def skip_rms_normalization(
    x: Any, skip: Any, gamma: Any, bias: Any = None, *, epsilon: float = 1e-12
) -> Operand:
    """The RMS normalisation of x + skip + bias, (B, T, D), of which bias is (D,)."""
    return rms_normalization(_total(x, skip, bias), gamma, epsilon=epsilon)


def _total(x: Any, skip: Any, bias: Any) -> Any:
    return x + skip if bias is None else x + skip + bias


@composite("BiasGelu", domain="com.microsoft")
def bias_gelu(x: Any, bias: Any) -> Operand:
    """Gelu of x + bias, (..., D) and (D,)."""
    return gelu(x + bias)


_NORMS = {layer_normalization: skip_layer_normalization, rms_normalization: skip_rms_normalization}


@skip_layer_normalization.recognise
def fused_sum(node: ir.Node) -> Rewrite | None:
    """The norm or Gelu at `node` and the sum before it as one operator."""
    op, total = find_op(node), produced_by(node.inputs[0], "Add")
    if op is None or total is None or len(node.outputs) > 1:
        return None
    x, y, *rest = map(adopt, (*total.inputs, *node.inputs[1:]))
    given = read_attributes(op, node)
    if any(v is not None and v.shape is None for v in (x, y, *rest)):
        return None
    if op is gelu and given["approximate"] == "none":
        x, y = (x, y) if len(y.shape) == 1 else (y, x)
        if len(y.shape) == 1 and len(x.shape) > 1 and same_shape(ir.Shape(x.shape[-1:]), y.shape):
            return Rewrite(bias_gelu(x, y), [x, y], "BiasGelu")
    fused = _NORMS.get(op)
    if fused is None or given["axis"] != -1 or len(x.shape) != 3 or len(rest[0].shape) != 1:
        return None
    if not same_shape(x.shape, y.shape):
        return None
    result = fused(x, y, *rest, epsilon=given["epsilon"])
    return Rewrite(result, [x, y, *present_inputs(node)[1:]], fused.name)
