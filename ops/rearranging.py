"""Operators of foreign graphs that move elements: blocks of an image, sequences, selections."""

from typing import Any, Literal

import numpy as np

from graphgen.infer import axis_from_front
from graphgen.op import composite, primitive
from graphgen.ops.layout import _ints, concat, dim, numpy_dtype, reshape, transpose, unsqueeze
from graphgen.ops.padding import add_at, places_of
from graphgen.ops.reduce import reduce_sum
from graphgen.record import Sizes
from graphgen.traits import Trait
from graphgen.value import Tensor


@composite("DepthToSpace", traits=Trait.MOVES)
def depth_to_space(x: Tensor, *, blocksize: int, mode: Literal["DCR", "CRD"] = "DCR") -> Tensor:
    """Channels to blocks of pixels: (N, C, H, W) to (N, C/b², b H, b W).

    Channel (i b + j) C/b² + c is pixel (i, j) of the blocks of channel c, or with "CRD" channel
    c b² + i b + j, as in PyTorch's PixelShuffle.
    """
    n, c, h, w = (dim(x, i) for i in range(4))
    b, rest = blocksize, c // blocksize**2
    first, perm = (
        ([n, b, b, rest, h, w], [0, 3, 4, 1, 5, 2])
        if mode == "DCR"
        else ([n, rest, b, b, h, w], [0, 1, 4, 2, 5, 3])
    )
    return reshape(transpose(reshape(x, first), perm=perm), [n, rest, h * b, w * b])


@composite("SpaceToDepth", traits=Trait.MOVES)
def space_to_depth(x: Tensor, *, blocksize: int) -> Tensor:
    """Blocks of pixels to channels, (N, C, H, W) to (N, b² C, H/b, W/b).

    Pixel (i, j) of the blocks of channel c is channel (i b + j) C + c.
    """
    n, c, h, w = (dim(x, i) for i in range(4))
    b = blocksize
    blocks = transpose(reshape(x, [n, c, h // b, b, w // b, b]), perm=[0, 3, 5, 1, 2, 4])
    return reshape(blocks, [n, c * b**2, h // b, w // b])


@primitive("ReverseSequence", traits=Trait.MOVES)
def reverse_sequence(
    x: Tensor, lengths: Tensor, *, time_axis: int = 0, batch_axis: int = 1
) -> Tensor:
    """x with the first lengths[b] elements along `time_axis` of each row b in reverse order."""
    moved = np.moveaxis(np.array(x), (batch_axis, time_axis), (0, 1))
    for row, length in zip(moved, np.asarray(lengths), strict=True):
        row[:length] = row[:length][::-1].copy()
    return np.moveaxis(moved, (0, 1), (batch_axis, time_axis))


@reverse_sequence.vjp
def _(g: Tensor, lengths: Tensor, time_axis: int, batch_axis: int) -> Tensor:
    """dx = g in reverse order."""
    return reverse_sequence(g, lengths, time_axis=time_axis, batch_axis=batch_axis)


@primitive("Compress", traits=Trait.MOVES | Trait.SIZED)
def compress(x: Tensor, condition: Tensor, *, axis: int | None = None) -> Tensor:
    """The slices of x along `axis` where the condition holds; of all elements in a row if None."""
    kept = np.asarray(condition)[: np.size(x) if axis is None else x.shape[axis]]
    return np.asarray(np.compress(kept, x, axis))


@compress.vjp
def _(g: Tensor, x: Tensor, condition: Tensor, axis: int | None) -> Tensor:
    """dx = g where it was taken from, and zeros."""
    return add_at(compress(places_of(x), condition, axis=axis), g, x)


@primitive("OneHot", traits=Trait.ADDS_AXIS)
def _one_hot(indices: Tensor, depth: Sizes, values: Tensor, *, axis: int = -1) -> Tensor:
    """values[1] at each index along a new `axis` of size `depth`, values[0] elsewhere.

    A negative index counts from the end; one beyond either end is nowhere.
    """
    [size] = _ints(depth)
    at = np.expand_dims(np.asarray(indices), axis)
    at = np.where(at < 0, at + size, at)
    n = at.ndim
    along = np.arange(size).reshape([-1 if i == axis_from_front("OneHot", axis, n) else 1
                                     for i in range(n)])  # fmt: skip
    return np.where(at == along, values[1], values[0]).astype(numpy_dtype(values))


@_one_hot.vjp
def _(
    g: Tensor, indices: Tensor, depth: Any, values: Tensor, axis: int
) -> tuple[Tensor | None, ...]:
    """dvalues = (Σ g elsewhere, Σ g at the indices)."""
    ones = np.array([0, 1], numpy_dtype(values))
    whole, hit = (
        reduce_sum(v, None, keepdims=0) for v in (g, g * _one_hot(indices, depth, ones, axis=axis))
    )
    return None, None, concat(unsqueeze(whole - hit, [0]), unsqueeze(hit, [0]), axis=0)
