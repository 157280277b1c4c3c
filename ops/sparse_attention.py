"""Attention to a pattern of keys, in blocks: what no block holds is not computed.

Self-attention on Q (B, n, H·D), K and V (B, n, G·D) with the numbers of heads given, as in
`attention`. `mask` is for padding, bool (B, n) or (B, 1, 1, n): False is not a key. A query with
nothing to look at gives zeros. If blocks do not divide n, the graph pads; n may be symbolic.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError, positive, user_line
from graphgen.operands import Array
from graphgen.ops.attention import attention, merge_heads, on_heads
from graphgen.ops.attention_blocks import (
    as_value,
    from_blocks,
    join,
    keys_of,
    padding_mask,
    partial_attention,
    rows_of,
    swap_axes,
    to_blocks,
)
from graphgen.ops.elementwise import logical_and, logical_or, maximum, minimum, where
from graphgen.ops.layout import arange, cast, concat, dim, gather, reshape, slice_, unsqueeze
from graphgen.ops.reduce import reduce_sum
from graphgen.record import SizeLike
from graphgen.value import Tensor

BLOCK = 256
"""The largest block of a window; shorter sequences are padded to it."""


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    window: int,
    q_num_heads: int,
    kv_num_heads: int,
    is_causal: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of query i to the keys j with |i - j| < window (Longformer, arXiv 2004.05150).

    If causal, to the last `window` positions, itself included, in blocks of window / 2, which read
    two more: n · 1.5 window products of queries and keys. Otherwise blocks of a window read one
    more on each side: n · 3 window. It is full attention if window ≥ n.
    """
    positive("window_attention", window=window)
    keep = padding_mask("window_attention", q, k, mask)
    n, block = dim(q, 1), min(-(-window // 2) if is_causal else window, BLOCK)
    block = max(min(block, n), 1) if isinstance(n, int) else block
    blocks, index, near = _windows([q, k, v, keep], block, window, is_causal)
    options = q_num_heads, kv_num_heads, scale, softcap
    return from_blocks(_attend(blocks, index, near, *options), q)


def strided_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    stride: int,
    q_num_heads: int,
    kv_num_heads: int,
    is_causal: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of query i to the keys j with |i - j| < stride or stride | i - j; causal, j ≤ i.

    The strided pattern of the Sparse Transformer (arXiv 1904.10509, 4.2), both parts in one
    softmax in every head: each part has its own, and they are joined by their sums. The cost is
    n (2 stride + n / stride) products if causal: n^1.5 with a stride near √n. It is full attention
    if stride is 1 or stride ≥ n.
    """
    positive("strided_attention", stride=stride)
    keep = padding_mask("strided_attention", q, k, mask)
    heads = (q_num_heads, kv_num_heads)
    (*blocks, keep), index, near = _windows([q, k, v, keep], stride, stride, is_causal)
    count = dim(blocks[0], 1)
    keys = keys_of(blocks[1], blocks[2], keep, index, near)
    first = _partial([rows_of(blocks[0]), *keys], heads, scale, softcap)
    first = [_in_blocks(x, count) for x in first]
    # With rows and columns exchanged, a block is what lies a multiple of the stride apart.
    columns = [rows_of(swap_axes(x)) for x in blocks]  # (B·stride, N, ·)
    behind, ahead = (unsqueeze(as_value(arange(count)), [axis]) for axis in (0, 1))
    far = behind < ahead if is_causal else logical_or(behind < ahead, behind > ahead)
    keep = logical_and(far, unsqueeze(swap_axes(keep), [2]))  # (B, stride, N, N); itself is near
    keep = reshape(keep, [-1, 1, count, count])
    second = _partial([*columns, keep], heads, scale, softcap)
    second = [swap_axes(_in_blocks(x, stride)) for x in second]
    parts = [
        [reshape(x, [dim(q, 0), -1, stride, q_num_heads, x.shape[3] // q_num_heads]) for x in part]
        for part in (first, second)
    ]
    y, some = join(parts)
    y = where(some, y, 0.0)
    return from_blocks(reshape(y, [dim(q, 0), -1, stride, y.shape[3] * y.shape[4]]), q)


def _partial(
    operands: Sequence[Tensor], heads: tuple[int, int], scale: float | None, softcap: float
) -> list[Tensor]:
    """`partial_attention` on (G, t, H·D), its results (G, t, H·D) and (G, t, H)."""
    q, k, v, keep = operands
    q, k, v, _ = on_heads(q, k, v, *heads)
    return [merge_heads(x) for x in partial_attention(q, k, v, keep, scale, softcap)]


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    layout: Tensor,
    block: int,
    q_num_heads: int,
    kv_num_heads: int,
    is_causal: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of block i of the queries to the blocks j of keys with layout[i, j].

    (Sparse Transformer, arXiv 1904.10509; BigBird, arXiv 2007.14062: see `big_bird_layout`.) The
    layout, a bool array (N, N), is for up to N · block positions. A shorter sequence uses its top
    left corner: only those rows are computed, each as long as in the layout. A longer sequence is
    refused. If causal, a query sees no key after it. Rows of blocks are computed in groups of
    similar lengths, so that a few full ones do not lengthen the others.
    """
    who = "block_sparse_attention"
    positive(who, block=block)
    layout = np.asarray(layout)
    if layout.dtype != np.bool_ or layout.ndim != 2 or len({*layout.shape}) > 1 or not layout.size:
        raise GraphgenError(
            f"{who}: layout is {layout.dtype}{list(layout.shape)}; it must be a square of bool, "
            f"with a row for each block of queries and a column for each block of keys{user_line()}"
        )
    n, count = dim(q, 1), len(layout)
    if isinstance(n, int) and n > count * block:
        raise GraphgenError(
            f"{who}: layout has {count} blocks of {block}, the sequence {n} positions; it must "
            f"have at least {-(-n // block)}{user_line()}"
        )
    blocks = [to_blocks(x, block) for x in (q, k, v, padding_mask(who, q, k, mask))]
    held = dim(blocks[0], 1)  # blocks of the layout that the sequence has
    layout = layout[:held, :held] if isinstance(held, int) else layout
    layout = np.tril(layout) if is_causal else layout
    listed = np.maximum(layout.sum(1), 1)
    widths = np.minimum(2 ** np.ceil(np.log2(listed)).astype(np.int64), len(layout))
    places = np.zeros(len(layout), np.int64)  # of the rows among their group
    parts, starts = list[Any](), [np.zeros(1, np.int64)]
    groups, group_of = np.unique(widths, return_inverse=True)
    for width in groups:
        rows = np.flatnonzero(widths == width)
        places[rows] = np.arange(len(rows))
        listing = np.argsort(~layout[rows], axis=1, kind="stable")[:, :width]
        seen = np.take_along_axis(layout[rows], listing, 1)
        # At least one row of blocks: nobody reads it, but kernels cannot handle none.
        here = arange(maximum(reduce_sum(cast(held > rows, to=ir.DataType.INT64), keepdims=0), 1))
        behind = (listing < rows[:, None])[:, None, :, None]  # (rows, 1, m, 1)
        index, real, below, own = (
            gather(as_value(x), here, axis=0) for x in (listing, seen, behind, rows)
        )
        near: Any = np.array(True)
        if is_causal:
            lower = np.tri(block, dtype=np.bool_)[:, None, :]  # (b, 1, b)
            near = reshape(logical_or(below, lower), [-1, block, int(width) * block])
        index = where(logical_and(real, held > index), index, held)  # or no block
        queries = gather(blocks[0], minimum(own, held - 1), axis=1)
        operands, options = [queries, *blocks[1:]], (q_num_heads, kv_num_heads, scale, softcap)
        y = _attend(operands, index, near, *options)
        parts.append(y)
        starts.append(starts[-1] + dim(own, 0))
    y = parts[0]
    if len(parts) > 1:
        order = gather(concat(*starts[:-1], axis=0), group_of, axis=0) + places
        y = gather(concat(*parts, axis=1), slice_(order, [0], held, [0]), axis=1)
    return from_blocks(y, q, checked=True)


def big_bird_layout(
    blocks: int, *, window: int = 3, global_blocks: int = 1, random_blocks: int = 2, seed: int = 0
) -> Array:
    """A bool layout (blocks, blocks) for `block_sparse_attention` (BigBird, arXiv 2007.14062).

    Each block sees the `window` around it, the first `global_blocks`, which see everything, and
    `random_blocks` others, drawn from the seed.
    """
    positive("big_bird_layout", blocks=blocks, window=window)
    i = np.arange(blocks)
    layout = abs(i[:, None] - i) <= window // 2
    layout[:, :global_blocks] = layout[:global_blocks] = True
    for row in range(global_blocks, blocks):
        others = np.random.default_rng([seed, row]).permutation(np.flatnonzero(~layout[row]))
        layout[row, others[:random_blocks]] = True
    return layout


def _windows(
    xs: list[Any], block: int, window: int, is_causal: int
) -> tuple[list[Any], Tensor, Tensor]:
    """The operands in blocks, those that each sees, (N, m), and which of their keys, (b, m·b)."""
    blocks = [to_blocks(x, block) for x in xs]
    count = dim(blocks[0], 1)
    reach = -(-(window - 1) // block)
    reach = min(reach, max(count - 1, 0)) if isinstance(count, int) else reach
    offsets = np.arange(-reach, 1 if is_causal else reach + 1)
    index = unsqueeze(arange(count), [1]) + offsets
    rows, columns = unsqueeze(as_value(arange(block)), [1]), arange(block * len(offsets))
    distance = rows - columns + block * reach
    behind = distance >= 0 if is_causal else distance > -window
    return blocks, index, logical_and(distance < window, behind)


def _attend(
    blocks: Sequence[Tensor],
    index: Tensor,
    near: Tensor,
    q_num_heads: int,
    kv_num_heads: int,
    scale: float | None,
    softcap: float,
) -> Tensor:
    """Attention of each block of Q, (B, N, b, H·D), to the blocks of keys at index, (N, m)."""
    q, k, v, keep = blocks
    rows = [rows_of(q), *keys_of(k, v, keep, index, near)]
    options: dict[str, Any] = {"q_num_heads": q_num_heads, "kv_num_heads": kv_num_heads}
    options |= {"scale": scale, "softcap": softcap}
    return _in_blocks(attention(*rows, **options), dim(q, 1))


def _in_blocks(x: Tensor, count: SizeLike) -> Tensor:
    """(B·N, b, F) to (B, N, b, F)."""
    return reshape(x, [-1, count, dim(x, 1), x.shape[2]])
