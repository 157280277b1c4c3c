"""The operators, one file a family; `graphgen.op.TABLE` holds them by their ONNX names."""

if __name__ == "ops":  # would load every operator twice
    raise ImportError("import graphgen.ops, not ops")

import graphgen.ops.contrib
import graphgen.ops.foreign
import graphgen.ops.quantized
import graphgen.ops.shapes
from graphgen.ops.activation import gelu, leaky_relu, quick_gelu, relu, silu, softplus
from graphgen.ops.attention import (
    attention,
    attention_with_weights,
    causal_mask,
    merge_heads,
    multi_head_attention,
    scaled_dot_product_attention,
    split_heads,
)
from graphgen.ops.control_flow import cond, scan
from graphgen.ops.convolution import average_pool, conv, global_average_pool, max_pool
from graphgen.ops.dropout import dropout
from graphgen.ops.elementwise import *
from graphgen.ops.embedding import embedding, sinusoidal_positions
from graphgen.ops.group_query import group_query_attention
from graphgen.ops.hashed_attention import hash_rotations, hashed_attention
from graphgen.ops.layout import *
from graphgen.ops.linalg import einsum, fused_matmul, gemm, matmul
from graphgen.ops.loss import cross_entropy, mean_squared_error
from graphgen.ops.norm import (
    batch_normalization,
    group_normalization,
    layer_norm,
    layer_normalization,
    rms_norm,
    rms_normalization,
)
from graphgen.ops.padding import pad, tile
from graphgen.ops.recurrent import gru, gru_cell, lstm, lstm_cell, rnn, rnn_cell
from graphgen.ops.reduce import *
from graphgen.ops.rotary import rotary_embedding, rotate
from graphgen.ops.softmax import log_softmax, softmax
from graphgen.ops.sparse_attention import (
    big_bird_layout,
    block_sparse_attention,
    strided_attention,
    window_attention,
)
