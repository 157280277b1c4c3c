"""What callers give for arrays, and how the runtime holds what NumPy lacks."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper


def as_array(x: Any, dtype: np.dtype[Any] | None = None) -> np.ndarray[Any, Any]:
    """`x` as an array; of a tensor of torch, without the history that NumPy does not read.

    Files of NumPy hold bfloat16 and the like as bytes without a dtype, which get this `dtype`.

    Raises ValueError for masked entries: no graph knows of a mask, so their data would count.
    """
    if np.ma.is_masked(x):
        raise ValueError("some of its entries are masked, and would count: call .filled(...)")
    array = np.asarray(x.detach() if getattr(x, "requires_grad", False) else x)
    if dtype is not None and dtype.isbuiltin != 1 and array.dtype == f"V{dtype.itemsize}":
        return array.view(dtype)
    return array


def bits_of(dtype: np.dtype[Any]) -> int:
    """Of an element in the runtime's memory: below 8 for int4, uint2, float4_e2m1fn and the like.

    An array of ml_dtypes has a byte for each of these.
    """
    narrow = re.match(r"u?int([24])$|float(4)", dtype.name)
    return int(narrow[1] or narrow[2]) if narrow else 8 * dtype.itemsize


def as_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array of ml_dtypes as integers of its shape, as the runtime reads them.

    It is the same memory; but elements of fewer than 8 bits are packed, into the first bytes of it.
    """
    if bits_of(array.dtype) >= 8:
        return array.view(f"u{array.itemsize}")
    data = np.frombuffer(numpy_helper.from_array(array).raw_data, np.uint8)
    return np.resize(np.append(data, np.zeros(array.size, np.uint8)), array.shape)


def from_bytes(data: bytes, dtype: np.dtype[Any], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """The array of ml_dtypes that the runtime holds as these bytes."""
    if bits_of(dtype) >= 8:
        return np.frombuffer(bytearray(data), dtype).reshape(shape)
    number = helper.np_dtype_to_tensor_dtype(dtype)
    return numpy_helper.to_array(TensorProto(data_type=number, dims=shape, raw_data=data))
