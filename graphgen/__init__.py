"""A compiler for transformers: declare, fuse, export as ONNX, run and train on ONNX Runtime."""

import onnx_ir as ir

from graphgen import nn, ops
from graphgen.nn.module import DType, build

float32, float16 = DType(ir.DataType.FLOAT), DType(ir.DataType.FLOAT16)
bfloat16, float64 = DType(ir.DataType.BFLOAT16), DType(ir.DataType.DOUBLE)
int64, int32, bool_ = DType(ir.DataType.INT64), DType(ir.DataType.INT32), DType(ir.DataType.BOOL)
