"""Sparse constants of files, which become dense when read, as onnxruntime does."""

import math

import numpy as np
import onnx
from onnx import numpy_helper

from graphgen.errors import GraphgenError
from graphgen.expansion import all_nodes, inner_graphs

_BYTES, _TIMES = 1 << 26, 64
"""All may have so many bytes when dense, and so many times what the file has without weights."""

_NO_ZERO = {onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING}


def make_dense(proto: onnx.ModelProto) -> None:
    """Write sparse initializers, and those in a Constant, in subgraphs and functions too, as dense.

    Raises GraphgenError for one that onnx's checker refuses, as with indices out of range or not
    in order, for one in another file, and if all of them get too large.
    """
    room = _BYTES + _TIMES * proto.ByteSize()
    for holder in (proto.graph, *proto.functions):
        nodes = [*all_nodes(holder.node)]
        copies = 1 if holder is proto.graph else _TIMES  # `check_expansion` allows so many
        graphs = [graph for node in nodes for graph in inner_graphs(node)]
        for graph in (proto.graph, *graphs) if holder is proto.graph else graphs:
            for tensor in graph.sparse_initializer:
                room -= _bytes(tensor, room // copies) * copies
                graph.initializer.append(_dense(tensor))
            del graph.sparse_initializer[:]
        for attribute in (a for n in nodes if n.domain in ("", "ai.onnx") for a in n.attribute):
            if attribute.name == "sparse_value" and attribute.HasField("sparse_tensor"):
                room -= _bytes(attribute.sparse_tensor, room // copies) * copies
                dense = _dense(attribute.sparse_tensor)
                attribute.Clear()
                attribute.name, attribute.type = "value", onnx.AttributeProto.TENSOR
                attribute.t.CopyFrom(dense)


def _bytes(tensor: onnx.SparseTensorProto, room: int) -> int:
    """How many bytes it has when dense; raises GraphgenError for more than there is room for."""
    dtype, name = tensor.values.data_type, tensor.values.name
    outside = onnx.TensorProto.EXTERNAL
    if outside in (tensor.values.data_location, tensor.indices.data_location):
        raise GraphgenError(f"the sparse tensor {name!r} is in another file; export it as dense")
    if dtype in _NO_ZERO or dtype not in onnx.TensorProto.DataType.values():
        raise GraphgenError(f"the sparse tensor {name!r} is not of numbers; export it as dense")
    try:
        onnx.checker.check_sparse_tensor(tensor)
    except onnx.checker.ValidationError as error:
        reason = str(error).strip().splitlines()[0]
        raise GraphgenError(f"{reason}; export the tensor again, or as dense") from error
    size: int = math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(dtype).itemsize
    if size > room:
        raise GraphgenError(
            f"the sparse tensor {name!r} of sizes {[*tensor.dims]} has {size:,} bytes when dense, "
            f"where at most {max(room, 0):,} more are allowed; export it as dense"
        )
    return size


def _dense(tensor: onnx.SparseTensorProto) -> onnx.TensorProto:
    values, indices = map(numpy_helper.to_array, (tensor.values, tensor.indices))
    whole = np.zeros(tensor.dims, values.dtype)
    if indices.ndim == 1:
        whole.reshape(-1)[indices] = values
    else:
        whole[tuple(indices.T)] = values
    dense = numpy_helper.from_array(whole, tensor.values.name)
    dense.data_type = tensor.values.data_type
    return dense
