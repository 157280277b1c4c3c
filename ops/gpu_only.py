"""Operators that optimizers write into files for a GPU; the runtime has no CPU kernel for them.

Their bodies run such a file on the CPU, and let it be fused as its source would be.
"""

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.op import composite
from graphgen.ops.activation import gelu, silu
from graphgen.ops.attention import split_heads
from graphgen.ops.convolution import AutoPad, Ints, conv
from graphgen.ops.elementwise import abs as absolute, log, maximum, minimum, neg, sigmoid, where
from graphgen.ops.layout import (
    arange,
    cast,
    cast_like,
    dim,
    gather,
    rank,
    reshape,
    split,
    squeeze,
    transpose,
    unsqueeze,
)
from graphgen.ops.linalg import matmul
from graphgen.ops.norm import group_normalization
from graphgen.ops.reduce import reduce_sum
from graphgen.ops.softmax import softmax
from graphgen.traits import Trait
from graphgen.value import Tensor

_CONTRIB = "com.microsoft"
_LAST = [0, 2, 3, 1]  # channels
_SECOND = [0, 3, 1, 2]


@composite("BiasSoftmax", domain=_CONTRIB)
def bias_softmax(x: Tensor, bias: Tensor, *, axis: int = 1, is_inner_broadcast: int) -> Tensor:
    """softmax(x + bias) over the axes from `axis` on, as one."""
    total: Tensor = x + bias
    if axis in (-1, rank(x) - 1):
        return softmax(total)
    rows = reshape(total, [*(dim(x, i) for i in range(axis % rank(x))), -1])
    return reshape(softmax(rows), [dim(x, i) for i in range(rank(x))])


@composite("GemmFastGelu", domain=_CONTRIB, traits=Trait.PRODUCT)
def gemm_fast_gelu(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Gelu by tanh of x W + bias."""
    y = matmul(x, w)
    return gelu(y if bias is None else y + bias, approximate="tanh")


@composite("BiasAdd", domain=_CONTRIB)
def bias_add(x: Tensor, bias: Tensor, skip: Tensor) -> Tensor:
    """x + bias + skip, (B, S, C) and (C,)."""
    return x + bias + skip


@composite("BiasSplitGelu", domain=_CONTRIB)
def bias_split_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """a Gelu(b), the halves of x + bias, (B, S, D) and (D,)."""
    a, b = split(x + bias, axis=2, num_outputs=2)
    return a * gelu(b)


@composite("GroupNorm", domain=_CONTRIB)
def group_norm(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    *,
    activation: int,
    groups: int,
    channels_last: int = 1,
    epsilon: float = 1e-5,
) -> Tensor:
    """Group normalization of (B, H, W, C), or (B, C, H, W) unless `channels_last`.

    With `activation` 1, SiLU of it. gamma and beta, (C,), may be of a wider dtype.
    """
    y = transpose(x, perm=_SECOND) if channels_last else x
    gains = (cast_like(v, x) for v in (gamma, beta))
    y = group_normalization(y, *gains, num_groups=groups, epsilon=epsilon)
    y = silu(y) if activation else y
    return transpose(y, perm=_LAST) if channels_last else y


@composite("SkipGroupNorm", domain=_CONTRIB)
def skip_group_norm(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    skip: Tensor,
    bias: Tensor | None = None,
    *,
    activation: int,
    groups: int,
    channels_last: int = 1,
    epsilon: float = 1e-5,
) -> Tensor:
    """`group_norm` of x + skip + bias; skip is of x's shape, (B, 1, 1, C) or (B, C), bias (C,)."""
    return group_norm(
        _total(x, skip, bias, channels_last),
        gamma,
        beta,
        activation=activation,
        groups=groups,
        channels_last=channels_last,
        epsilon=epsilon,
    )


@skip_group_norm.output(1)
def _total(x: Tensor, skip: Tensor, bias: Tensor | None, channels_last: int) -> Tensor:
    """x + skip + bias."""
    if not channels_last and (rank(skip) == 2 or bias is not None):
        raise GraphgenError("SkipGroupNorm: a bias of channels in front has no body")
    total: Tensor = x + (unsqueeze(skip, [1, 2]) if rank(skip) == 2 else skip)
    return total if bias is None else total + bias


@composite("NhwcConv", domain=_CONTRIB, traits=Trait.PRODUCT)
def conv_of_last(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    auto_pad: AutoPad = "NOTSET",
    dilations: Ints = None,
    group: int = 1,
    kernel_shape: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> Tensor:
    """conv of (B, H, W, C) and (M, kH, kW, C / group), the channels last in the result, too."""
    y = conv(
        transpose(x, perm=_SECOND),
        transpose(w, perm=_SECOND),
        b,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    return transpose(y, perm=_LAST)


@composite("RelativePositionBias", domain=_CONTRIB)
def relative_position_bias(
    table: Tensor,
    query_length: Tensor,
    key_length: Tensor,
    *,
    is_bidirectional: int = 0,
    max_distance: int,
) -> Tensor:
    """T5's bias of scores, (1, H, T, S), by buckets of distances (arXiv 1910.10683).

    The table is (buckets, H), but lies in memory by columns, as (H, buckets). Half of the buckets
    are of one distance each, the others grow as its logarithm, up to `max_distance`.
    """
    buckets, heads = table.shape
    rows, columns = (arange(_scalar(n)) for n in (query_length, key_length))
    distance: Tensor = unsqueeze(columns, [0]) - unsqueeze(rows, [1])  # (T, S)
    after: Any = 0
    if is_bidirectional:
        buckets //= 2
        after = where(distance > 0, buckets, 0)
        distance = absolute(distance)
    else:
        distance = maximum(neg(distance), 0)
    exact = buckets // 2
    ratio = cast(maximum(distance, exact), to=ir.DataType.FLOAT) / exact
    steps = log(ratio) / math.log(max_distance / exact) * (buckets - exact)
    far = minimum(cast(steps, to=ir.DataType.INT64) + exact, buckets - 1)
    bucket: Tensor = where(distance < exact, distance, far) + after
    return unsqueeze(gather(reshape(table, [heads, -1]), bucket, axis=1), [0])


def _scalar(length: Tensor) -> Tensor:
    return squeeze(length, [0]) if rank(length) else length


@composite("GatedRelativePositionBias", domain=_CONTRIB)
def gated_relative_position_bias(
    q: Tensor,
    query_bias: Tensor,
    positions: Tensor,
    weight: Tensor,
    bias: Tensor,
    constant: Tensor,
    *,
    num_heads: int,
) -> Tensor:
    """WavLM's bias of scores, (B, H, T, T), of (1, H, T, T) positions (arXiv 2110.13900).

    It is positions · (u (r c - 1) + 2) with u and r the sigmoids of the sums of the halves of
    (Q + query_bias) W + bias on heads, W (D, n), and c the constants, (1, H, 1, 1).
    """
    heads = split_heads(q + query_bias, num_heads)  # (B, H, T, D)
    halves: Sequence[Tensor] = split(matmul(heads, weight) + bias, axis=-1, num_outputs=2)
    u, r = (sigmoid(reduce_sum(half, [-1])) for half in halves)
    return (u * (r * constant - 1.0) + 2.0) * positions
