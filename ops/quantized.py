"""Types and shapes of the runtime's operators on integers, of which nobody else knows any.

What a file declares of values inside is a claim; without these rules, the sizes behind a product of
integers would be unknown. Operators: onnxruntime's docs/ContribOperators.md.
"""

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext, registry

from graphgen.infer import Dim

_CONTRIB = "com.microsoft"


@registry.register(_CONTRIB, "MatMulIntegerToFloat")
@registry.register(_CONTRIB, "DynamicQuantizeMatMul")
def _infer_product(context: ShapeInferenceContext, node: ir.Node) -> None:
    """(..., K) times (K, N), in the dtype of the scale."""
    scale = 2 if node.op_type == "MatMulIntegerToFloat" else 0
    x, b, y = node.inputs[0], node.inputs[1], node.outputs[0]
    given = node.inputs[scale]
    y.type = None if given is None else given.type
    if x is None or b is None or x.shape is None or b.shape is None:
        return
    if len(b.shape) == 2 and len(x.shape) > 1:
        y.shape = ir.Shape([*x.shape[:-1], b.shape[1]])


@registry.register(_CONTRIB, "MatMulNBits")
def _infer_product_in_bits(context: ShapeInferenceContext, node: ir.Node) -> None:
    """(..., K) times (K, N), in the dtype of x."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    y.type = x.type
    if x.shape is not None:
        y.shape = ir.Shape([*x.shape[:-1], node.attributes["N"].as_int()])


@registry.register(_CONTRIB, "GatherBlockQuantized")
def _infer_rows(context: ShapeInferenceContext, node: ir.Node) -> None:
    """The rows of a table that indices name, in the dtype of the scales."""
    table, indices, scales = node.inputs[:3]
    y, axis = node.outputs[0], node.attributes.get_int("gather_axis", 0) or 0
    assert table is not None and indices is not None and scales is not None
    y.type = scales.type
    if table.shape is None or indices.shape is None:
        return
    bits = node.attributes.get_int("bits", 4) or 4
    dims: list[Dim] = list(table.shape)
    if table.dtype is ir.DataType.UINT8:
        dims[-1] = dims[-1] * (8 // bits)
    axis %= len(dims)
    y.shape = ir.Shape([*dims[:axis], *indices.shape, *dims[axis + 1 :]])
