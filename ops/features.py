"""Shapes of the operators of ai.onnx.ml, which choose and prepare features."""

import math

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

from graphgen.infer import mends


@mends("ArrayFeatureExtractor")
def _extracted(node: ir.Node, context: ShapeInferenceContext) -> None:
    """x[..., y] for all elements of y, whatever its shape; a vector x counts as one row."""
    x, y = node.inputs[:2]
    if x is not None and x.shape is not None:
        count = context.new_symbolic_dim() if y is None or y.shape is None else math.prod(y.shape)
        node.outputs[0].shape = ir.Shape([*(x.shape[:-1] or [1]), count])


@mends("Binarizer", "Imputer", "Normalizer", "Scaler")
def _kept_shape(node: ir.Node, context: ShapeInferenceContext) -> None:
    """These of ai.onnx.ml keep the shape, of which onnx infers nothing."""
    x = node.inputs[0]
    node.outputs[0].shape = None if x is None else x.shape
