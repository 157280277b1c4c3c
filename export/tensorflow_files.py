"""What files by tf2onnx and jax2onnx, as Keras exports them, tell of a model's variables.

They have none, only constants: those that TensorFlow folded are called by the operation.
"""

import re
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.graph import constant
from graphgen.op import is_a

WHO = "TensorFlow"

ADVICE = "train it where it was made"
"""What to do where a file is not enough: nothing exports one of these with all variables."""

_UNTOLD = {
    "tf2onnx": "which variables are trainable, and lacks biases of zeros",
    "jax2onnx": "which of its constants are parameters, nor which of them are trainable",
}

_CALCULATED = (
    r"(^|/)(mul|sub|add|addv2|truediv|div|realdiv|rsqrt|sqrt|exp|pow|square|abs|mean|sum|maximum|"
    r"minimum|softmax|softplus|sigmoid|tanh|l2_normalize|einsum|matmul|merged_input)(_\d+)?"
    r"(:\d+)?(__\d+)?$|(^|/)constantfolding(/|$)"
)
"""The operations that change numbers; a merged input is a kernel times the scale of a norm."""


def is_by_tensorflow(model: ir.Model) -> bool:
    """Whether tf2onnx wrote a file."""
    return model.producer_name == "tf2onnx"


def untold(model: ir.Model) -> str:
    """What nobody can know of the weights in a file, or ""."""
    maker = str(model.producer_name)
    return f"a file by {maker} does not tell {_UNTOLD[maker]}" if maker in _UNTOLD else ""


def calculated_by_tensorflow(values: Mapping[str, ir.Value]) -> list[str]:
    """What is made of several variables, or is twice what is one: trained, it would differ.

    A cell of Keras has one bias; that of ONNX two, which would move it twice as far.
    """
    return [
        n
        for n, v in values.items()
        if v.dtype is ir.DataType.FLOAT
        and v.shape != ()
        and (re.search(_CALCULATED, n.lower()) or _is_half_empty(v))
    ]


def _is_half_empty(value: ir.Value) -> bool:
    """Whether it is the bias of a cell, and one of its two parts is zero."""
    if not any(is_a(node, ops.lstm, ops.gru, ops.rnn) for node, at in value.uses() if at == 3):
        return False
    array = constant(value)
    if array is None:
        return False
    first, second = np.split(array, 2, axis=-1)
    return not (first.any() and second.any())
