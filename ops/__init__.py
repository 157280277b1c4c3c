"""The operators, one file a family; `graphgen.op.TABLE` holds them by their ONNX names.

Each computes on arrays, and records on values inside `gg.build`. Operands that do not fit are a
GraphgenError that names the operator, their dtypes and shapes, and the line of the call.
"""

from types import FunctionType
from typing import TYPE_CHECKING

if __name__ == "ops":  # would load every operator twice
    raise ImportError("import graphgen.ops, not ops")

import graphgen.ops.contrib
import graphgen.ops.features
import graphgen.ops.foreign
import graphgen.ops.gpu_only
import graphgen.ops.indexing
import graphgen.ops.quantized
import graphgen.ops.resizing
import graphgen.ops.saved
import graphgen.ops.scatter
import graphgen.ops.shape_values
import graphgen.ops.shapes
import graphgen.ops.sizes
import graphgen.ops.variants
import graphgen.ops.versions
from graphgen.arguments import fitting
from graphgen.errors import missing, near
from graphgen.ops.activation import (
    elu,
    gelu,
    hard_sigmoid,
    hard_swish,
    leaky_relu,
    mish,
    prelu,
    quick_gelu,
    relu,
    selu,
    silu,
    softcap,
    softplus,
)
from graphgen.ops.attention import (
    attention,
    attention_with_weights,
    causal_mask,
    merge_heads,
    scaled_dot_product_attention,
    sink_attention,
    split_heads,
)
from graphgen.ops.control_flow import cond, scan
from graphgen.ops.convolution import (
    average_pool,
    conv,
    conv_transpose,
    global_average_pool,
    global_max_pool,
    max_pool,
)
from graphgen.ops.dropout import dropout
from graphgen.ops.elementwise import (
    abs,
    add,
    average,
    ceil,
    clip,
    div,
    equal,
    erf,
    exp,
    floor,
    greater,
    greater_or_equal,
    identity,
    is_nan,
    less,
    less_or_equal,
    log,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    maximum,
    minimum,
    mod,
    mul,
    neg,
    not_equal,
    pow,
    reciprocal,
    round,
    sigmoid,
    sign,
    sqrt,
    stop_gradient,
    sub,
    tanh,
    total,
    where,
)
from graphgen.ops.embedding import embedding, one_hot, sinusoidal_positions
from graphgen.ops.experts import mixture_of_experts
from graphgen.ops.fourier import dft, stft
from graphgen.ops.group_query import group_query_attention
from graphgen.ops.hashed_attention import hash_rotations, hashed_attention
from graphgen.ops.integers import (
    bit_shift,
    bitwise_and,
    bitwise_not,
    bitwise_or,
    bitwise_xor,
    floor_divide,
    remainder,
)
from graphgen.ops.layout import (
    arange,
    cast,
    cast_like,
    concat,
    constant_of_shape,
    dim,
    expand,
    flatten,
    gather,
    gather_elements,
    gather_nd,
    non_zero,
    range_,
    rank,
    reshape,
    scatter_elements,
    scatter_nd,
    shape,
    size,
    slice_,
    split,
    squeeze,
    stack,
    swap_last,
    transpose,
    unsqueeze,
    zeros_like,
)
from graphgen.ops.linalg import det, einsum, fused_matmul, gemm, inverse, matmul, trilu
from graphgen.ops.linear_attention import causal_conv_with_state, linear_attention
from graphgen.ops.loss import (
    binary_cross_entropy,
    cross_entropy,
    huber_loss,
    mean_absolute_error,
    mean_squared_error,
    negative_log_likelihood_loss,
    softmax_cross_entropy_loss,
    weighted_cross_entropy,
)
from graphgen.ops.merged_attention import multi_head_attention
from graphgen.ops.norm import (
    batch_normalization,
    group_normalization,
    instance_normalization,
    layer_norm,
    layer_normalization,
    rms_norm,
    rms_normalization,
)
from graphgen.ops.padding import pad, tile
from graphgen.ops.rearranging import (
    compress,
    depth_to_space,
    reverse_sequence,
    space_to_depth,
)
from graphgen.ops.recurrent import gru, gru_cell, lstm, lstm_cell, rnn, rnn_cell
from graphgen.ops.reduce import (
    argmax,
    cumprod,
    cumsum,
    reduce_l1,
    reduce_l2,
    reduce_log_sum,
    reduce_log_sum_exp,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_prod,
    reduce_sum,
    reduce_sum_square,
    top_k,
)
from graphgen.ops.rotary import rotary_embedding, rotate
from graphgen.ops.sampling import deform_conv, grid_sample, roi_align
from graphgen.ops.scatter import tensor_scatter
from graphgen.ops.sizes import promise_same_size
from graphgen.ops.softmax import log_softmax, softmax
from graphgen.ops.sparse_attention import (
    big_bird_layout,
    block_sparse_attention,
    strided_attention,
    window_attention,
)
from graphgen.ops.state_space import selective_scan
from graphgen.ops.trigonometry import (
    acos,
    acosh,
    asin,
    asinh,
    atan,
    atanh,
    cos,
    cosh,
    sin,
    sinh,
    tan,
)
from graphgen.value import METHODS

__all__ = [
    "abs",
    "acos",
    "acosh",
    "add",
    "arange",
    "argmax",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "attention",
    "attention_with_weights",
    "average",
    "average_pool",
    "batch_normalization",
    "big_bird_layout",
    "binary_cross_entropy",
    "bit_shift",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "bitwise_xor",
    "block_sparse_attention",
    "cast",
    "cast_like",
    "causal_conv_with_state",
    "causal_mask",
    "ceil",
    "clip",
    "compress",
    "concat",
    "cond",
    "constant_of_shape",
    "conv",
    "conv_transpose",
    "cos",
    "cosh",
    "cross_entropy",
    "cumprod",
    "cumsum",
    "deform_conv",
    "depth_to_space",
    "det",
    "dft",
    "dim",
    "div",
    "dropout",
    "einsum",
    "elu",
    "embedding",
    "equal",
    "erf",
    "exp",
    "expand",
    "flatten",
    "floor",
    "floor_divide",
    "fused_matmul",
    "gather",
    "gather_elements",
    "gather_nd",
    "gelu",
    "gemm",
    "global_average_pool",
    "global_max_pool",
    "greater",
    "greater_or_equal",
    "grid_sample",
    "group_normalization",
    "group_query_attention",
    "gru",
    "gru_cell",
    "hard_sigmoid",
    "hard_swish",
    "hash_rotations",
    "hashed_attention",
    "huber_loss",
    "identity",
    "instance_normalization",
    "inverse",
    "is_nan",
    "layer_norm",
    "layer_normalization",
    "leaky_relu",
    "less",
    "less_or_equal",
    "linear_attention",
    "log",
    "log_softmax",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "lstm",
    "lstm_cell",
    "matmul",
    "max_pool",
    "maximum",
    "mean_absolute_error",
    "mean_squared_error",
    "merge_heads",
    "minimum",
    "mish",
    "mixture_of_experts",
    "mod",
    "mul",
    "multi_head_attention",
    "neg",
    "negative_log_likelihood_loss",
    "non_zero",
    "not_equal",
    "one_hot",
    "pad",
    "pow",
    "prelu",
    "promise_same_size",
    "quick_gelu",
    "range_",
    "rank",
    "reciprocal",
    "reduce_l1",
    "reduce_l2",
    "reduce_log_sum",
    "reduce_log_sum_exp",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_prod",
    "reduce_sum",
    "reduce_sum_square",
    "relu",
    "remainder",
    "reshape",
    "reverse_sequence",
    "rms_norm",
    "rms_normalization",
    "rnn",
    "rnn_cell",
    "roi_align",
    "rotary_embedding",
    "rotate",
    "round",
    "scaled_dot_product_attention",
    "scan",
    "scatter_elements",
    "scatter_nd",
    "selective_scan",
    "selu",
    "shape",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "sinh",
    "sink_attention",
    "sinusoidal_positions",
    "size",
    "slice_",
    "softcap",
    "softmax",
    "softmax_cross_entropy_loss",
    "softplus",
    "space_to_depth",
    "split",
    "split_heads",
    "sqrt",
    "squeeze",
    "stack",
    "stft",
    "stop_gradient",
    "strided_attention",
    "sub",
    "swap_last",
    "tan",
    "tanh",
    "tensor_scatter",
    "tile",
    "top_k",
    "total",
    "transpose",
    "trilu",
    "unsqueeze",
    "weighted_cross_entropy",
    "where",
    "window_attention",
    "zeros_like",
]


def __dir__() -> list[str]:
    return __all__


_ELSEWHERE = {
    "T": "transpose",
    "cat": "concat",
    "concatenate": "concat",
    "permute": "transpose",
    "view": "reshape",
}
"""Names in NumPy and PyTorch, and what stands for them here."""


def _like(name: str) -> str:
    """`; use ops.reduce_sum` for the name of a method or of another library, or ''."""
    for known in (_ELSEWHERE.get(name, name), f"reduce_{name}"):
        if known in __all__:
            return f"; use ops.{known}"
    return near(name, __all__)


METHODS["like"] = _like

for _name in __all__:  # an operator says itself what does not fit
    if isinstance(globals()[_name], FunctionType):
        globals()[_name] = fitting(globals()[_name])


if not TYPE_CHECKING:  # checkers would take every name to exist

    def __getattr__(name):
        raise missing(__name__, name, _like)
