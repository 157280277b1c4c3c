"""The operators, one file a family; `graphgen.op.TABLE` holds them by their ONNX names."""

if __name__ == "ops":  # would load every operator twice
    raise ImportError("import graphgen.ops, not ops")

import graphgen.ops.contrib
import graphgen.ops.foreign
import graphgen.ops.quantized
import graphgen.ops.shapes
import graphgen.ops.versions
from graphgen.ops.activation import *
from graphgen.ops.attention import (
    attention as attention,
    attention_with_weights as attention_with_weights,
    causal_mask as causal_mask,
    merge_heads as merge_heads,
    multi_head_attention as multi_head_attention,
    scaled_dot_product_attention as scaled_dot_product_attention,
    split_heads as split_heads,
)
from graphgen.ops.control_flow import cond as cond, scan as scan
from graphgen.ops.convolution import (
    average_pool as average_pool,
    conv as conv,
    global_average_pool as global_average_pool,
    max_pool as max_pool,
)
from graphgen.ops.dropout import dropout as dropout
from graphgen.ops.elementwise import *
from graphgen.ops.embedding import *
from graphgen.ops.group_query import group_query_attention as group_query_attention
from graphgen.ops.hashed_attention import (
    hash_rotations as hash_rotations,
    hashed_attention as hashed_attention,
)
from graphgen.ops.layout import *
from graphgen.ops.linalg import (
    einsum as einsum,
    fused_matmul as fused_matmul,
    gemm as gemm,
    matmul as matmul,
)
from graphgen.ops.loss import (
    cross_entropy as cross_entropy,
    mean_squared_error as mean_squared_error,
)
from graphgen.ops.norm import *
from graphgen.ops.padding import pad as pad, tile as tile
from graphgen.ops.recurrent import (
    gru as gru,
    gru_cell as gru_cell,
    lstm as lstm,
    lstm_cell as lstm_cell,
    rnn as rnn,
    rnn_cell as rnn_cell,
)
from graphgen.ops.reduce import *
from graphgen.ops.rotary import rotary_embedding as rotary_embedding, rotate as rotate
from graphgen.ops.softmax import *
from graphgen.ops.sparse_attention import (
    big_bird_layout as big_bird_layout,
    block_sparse_attention as block_sparse_attention,
    strided_attention as strided_attention,
    window_attention as window_attention,
)
from graphgen.ops.state_space import selective_scan as selective_scan
