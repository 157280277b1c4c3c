"""Rotary position embedding: pairs of features turned by an angle that grows with the position."""

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

from graphgen.errors import GraphgenError, user_line
from graphgen.graph import present_inputs
from graphgen.infer import describe, mends
from graphgen.op import composite
from graphgen.ops.layout import (
    arange,
    concat,
    dim,
    expand,
    gather,
    rank,
    reshape,
    split,
    unsqueeze,
)
from graphgen.ops.sizes import same_size_at
from graphgen.value import Tensor


@composite("RotaryEmbedding")
def rotary_embedding(
    x: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    position_ids: Tensor | None = None,
    *,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    """(x₀ cos - x₁ sin, x₁ cos + x₀ sin) for each pair of features (Su et al., arXiv 2104.09864).

    x is (B, H, T, D), or (B, T, H·D) with `num_heads`. Of the first `rotary_embedding_dim`
    features of a head (0: of all), x₀ are the first half and x₁ the second, or the even and the
    odd ones if `interleaved`; the others stay. The caches are (B, T, R/2), or (P, R/2) with rows
    chosen by `position_ids`, int64 (B, T).
    """
    flat = rank(x) == 3
    if flat and not num_heads:
        raise GraphgenError(
            f"RotaryEmbedding: a three-dimensional operand needs num_heads{user_line()}"
        )
    if not isinstance(x.shape[-1], int):
        raise GraphgenError(
            f"RotaryEmbedding: x is {describe(x)}; its features must be known before the run"
            f"{user_line()}"
        )
    size = x.shape[-1] // (num_heads or 1) if flat else x.shape[-1]
    cos, sin = (
        unsqueeze(c if position_ids is None else gather(c, position_ids), [2 if flat else 1])
        for c in (cos_cache, sin_cache)
    )
    y, rest = x, list[Tensor]()
    if flat:
        y = reshape(x, [dim(x, 0), dim(x, 1), num_heads or 1, size])
    turned = rotary_embedding_dim or size
    if turned < size:
        y, *rest = split(y, [turned, size - turned], axis=-1, num_outputs=2)
    lead = [dim(y, i) for i in range(3)]
    if interleaved:
        pairs = reshape(y, [*lead, turned // 2, 2])
        a, b = (gather(pairs, np.asarray(i), axis=-1) for i in (0, 1))
    else:
        a, b = split(y, axis=-1, num_outputs=2)
    halves = (a * cos - b * sin, b * cos + a * sin)
    if interleaved:
        y = reshape(concat(*(unsqueeze(h, [-1]) for h in halves), axis=-1), [*lead, turned])
    else:
        y = concat(*halves, axis=-1)
    y = concat(y, *rest, axis=-1) if rest else y
    return reshape(y, [dim(x, i) for i in range(rank(x))])  # refuses angles of other positions


@mends("RotaryEmbedding")
def _sizes_of_angles(node: ir.Node, _: ShapeInferenceContext) -> None:
    """Angles of a fixed batch, or of fixed positions, are those of all that is turned.

    Those of one row are for all rows: the caches are expanded, as the kernel wants them.
    """
    angles, y = node.inputs[3 if len(present_inputs(node)) > 3 else 1], node.outputs[0]
    if angles is None or angles.shape is None or y.shape is None or len(y.shape) not in (3, 4):
        return
    dims = list(y.shape)
    for axis, size in zip((0, 1 if len(dims) == 3 else 2), angles.shape, strict=False):
        if isinstance(size, int) and size > 1 and not isinstance(dims[axis], int):
            dims[axis] = size
    y.shape = ir.Shape(dims)


@composite("RotaryEmbedding", domain="com.microsoft")
def _by_position(
    x: Tensor,
    position_ids: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    *,
    interleaved: int | None = None,
    num_heads: int | None = None,
    rotary_embedding_dim: int | None = None,
    is_packed_batching: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """The same in older runtimes, where the caches have a row for each position.

    One position, int64[1], is that of the first token. A three-dimensional x needs no `num_heads`
    if its heads are turned whole.
    """
    if is_packed_batching or scale not in (None, 1.0):
        raise GraphgenError("RotaryEmbedding: packed batches and a scale have no body")
    if rank(position_ids) == 1:
        places = position_ids + arange(dim(x, 1 if rank(x) == 3 else 2))
        position_ids = expand(unsqueeze(places, [0]), [dim(x, 0), 1])
    size, half = x.shape[-1], cos_cache.shape[-1]
    known = isinstance(size, int) and isinstance(half, int)
    if known and rank(x) == 3 and not (num_heads or rotary_embedding_dim):
        num_heads = size // (2 * half)  # angles tell how wide a head is
    return rotary_embedding(
        x,
        cos_cache,
        sin_cache,
        position_ids,
        interleaved=interleaved or 0,
        num_heads=num_heads,
        rotary_embedding_dim=rotary_embedding_dim or 0,
    )


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    """`rotary_embedding` with caches that broadcast to (B, T, R/2), such as (1, T, R/2).

    They are expanded, as kernels want the full size (arXiv 2104.09864).
    """
    axis = 1 if rank(x) == 3 else 2
    caches = [
        c
        if same_size_at(c, 0, x, 0) and same_size_at(c, 1, x, axis)
        else expand(c, [dim(x, 0), dim(x, axis), 1])
        for c in (cos, sin)
    ]
    return rotary_embedding(
        x,
        *caches,
        interleaved=interleaved,
        num_heads=num_heads,
        rotary_embedding_dim=rotary_embedding_dim,
    )


@rotary_embedding.variant
def _(
    x: Tensor, cos_cache: Tensor, sin_cache: Tensor, position_ids: Tensor | None, **attributes: Any
) -> Tensor | None:
    """The caches expanded."""
    return None if position_ids is not None else rotate(x, cos_cache, sin_cache, **attributes)


@rotary_embedding.variant
def _(
    x: Tensor, cos_cache: Tensor, sin_cache: Tensor, position_ids: Tensor | None, **attributes: Any
) -> Tensor | None:
    """By position: without positions, each place in the batch is a row of the caches."""
    if attributes["rotary_embedding_dim"] and not attributes["num_heads"]:
        attributes["num_heads"] = x.shape[1]  # that kernel needs it
        if not isinstance(x.shape[1], int):
            return None
    cos, sin = cos_cache, sin_cache
    if position_ids is None:
        b, t = dim(x, 0), dim(x, 1 if rank(x) == 3 else 2)
        cos, sin = (reshape(expand(c, [b, t, 1]), [-1, c.shape[-1]]) for c in (cos, sin))
        position_ids = unsqueeze(arange(b), [1]) * t + unsqueeze(arange(t), [0])
    return _by_position(x, position_ids, cos, sin, **attributes)
