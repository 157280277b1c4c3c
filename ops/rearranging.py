"""Operators of foreign graphs that move elements: blocks of an image, sequences, selections."""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext, registry

from graphgen.errors import GraphgenError, user_line
from graphgen.graph import constant
from graphgen.infer import OPSET, axis_from_front
from graphgen.op import composite, primitive
from graphgen.operands import Array
from graphgen.ops.layout import (
    _ints,
    concat,
    dim,
    gather,
    numpy_dtype,
    reshape,
    reshape_like,
    transpose,
    unsqueeze,
)
from graphgen.ops.padding import add_at, pad, places_of
from graphgen.ops.reduce import reduce_sum
from graphgen.record import Sizes
from graphgen.traits import Trait
from graphgen.value import Tensor, Value

Ints: TypeAlias = Sequence[int] | None


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


@primitive("Col2Im", traits=Trait.SIZED)
def _col2im(
    x: Tensor,
    image_shape: Sizes,
    block_shape: Sizes,
    *,
    dilations: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> Tensor:
    """Blocks added up to an image, as PyTorch's fold: (N, C · elements, blocks) to (N, C, *image).

    The blocks begin every `strides` elements of the image and its padding, the last axis first.
    """
    places, sizes, kept = _blocks(image_shape, block_shape, dilations, pads, strides)
    n, columns, blocks = x.shape
    parts = np.reshape(x, (n, columns // len(places), len(places), blocks))
    y = np.zeros((math.prod(sizes), *parts.shape[:2]), numpy_dtype(x))
    np.add.at(y, places, np.moveaxis(parts, (0, 1), (2, 3)))
    return np.moveaxis(y, 0, -1).reshape(*parts.shape[:2], *sizes)[:, :, *kept]


@_col2im.vjp
def _(
    g: Tensor,
    x: Tensor,
    image_shape: Any,
    block_shape: Any,
    dilations: Ints,
    pads: Ints,
    strides: Ints,
) -> Tensor:
    """dx = the blocks of g."""
    known = [constant(v) if isinstance(v, Value) else v for v in (image_shape, block_shape)]
    if known[0] is None or known[1] is None:
        raise GraphgenError(f"Col2Im: its sizes must be known before the run{user_line()}")
    places, sizes, kept = _blocks(known[0], known[1], dilations, pads, strides)
    around = [[k.start for k in kept], [n - k.stop for n, k in zip(sizes, kept, strict=True)]]
    axes = list(range(2, 2 + len(sizes)))
    padded = pad(g, np.array(around).ravel(), None, axes)
    flat = reshape(padded, [dim(g, 0), dim(g, 1), math.prod(sizes)])
    return reshape_like(gather(flat, places, axis=2), x)


def _blocks(
    image: Sizes, block: Sizes, dilations: Ints, pads: Ints, strides: Ints
) -> tuple[Array, list[int], list[slice]]:
    """The flat places of (elements, blocks) in the padded image, its sizes, and the image in it."""
    image, block = _ints(image), _ints(block)
    n = len(image)
    dilations, strides, pads = dilations or [1] * n, strides or [1] * n, pads or [0] * 2 * n
    sizes = [size + pads[i] + pads[n + i] for i, size in enumerate(image)]
    starts = [
        np.arange(0, size - (k - 1) * d, s)
        for size, k, d, s in zip(sizes, block, dilations, strides, strict=True)
    ]
    offsets = [np.arange(k) * d for k, d in zip(block, dilations, strict=True)]
    corners, inside = (
        np.stack(np.meshgrid(*axes, indexing="ij")).reshape(n, -1) for axes in (starts, offsets)
    )
    places = np.ravel_multi_index(tuple(inside[:, :, None] + corners[:, None]), tuple(sizes))
    kept = [slice(pads[i], pads[i] + size) for i, size in enumerate(image)]
    return places.astype(np.int64), sizes, kept


@primitive("MaxUnpool", traits=Trait.REFERENCE_DIFFERS | Trait.SIZED)
def _max_unpool(
    x: Tensor,
    indices: Tensor,
    output_shape: Sizes | None = None,
    *,
    kernel_shape: Sequence[int],
    pads: Ints = None,
    strides: Ints = None,
) -> Tensor:
    """Zeros, with x at its flat indices, those of a MaxPool with the same windows.

    The sizes are `output_shape`, or the least that the pool may have had.
    """
    n = len(kernel_shape)
    steps, around = strides or [1] * n, pads or [0] * 2 * n
    least = [
        (size - 1) * step + k - around[i] - around[n + i]
        for i, (size, step, k) in enumerate(zip(x.shape[2:], steps, kernel_shape, strict=True))
    ]
    sizes = [*x.shape[:2], *least] if output_shape is None else _ints(output_shape)
    y = np.zeros(math.prod(sizes), numpy_dtype(x))
    y[np.ravel(indices)] = np.ravel(x)
    return y.reshape(sizes)


@registry.register("", "MaxUnpool", since_version=OPSET)
def _infer_unpool(context: ShapeInferenceContext, node: ir.Node) -> None:
    """The sizes asked for, or those of the windows side by side; the library knows neither."""
    x, y = node.inputs[0], node.outputs[0]
    given = node.inputs[2] if len(node.inputs) > 2 else None
    assert x is not None
    y.type, y.shape = x.type, None
    known = None if given is None else context.get_symbolic_value(given)
    if x.shape is None:
        return
    if given is not None:
        y.shape = ir.Shape(known or [context.new_symbolic_dim() for _ in x.shape])
        return
    kernel, n = node.attributes["kernel_shape"].as_ints(), len(x.shape) - 2
    steps = node.attributes["strides"].as_ints() if "strides" in node.attributes else [1] * n
    around = node.attributes["pads"].as_ints() if "pads" in node.attributes else [0] * 2 * n
    sizes = [
        (size - 1) * step + k - around[i] - around[n + i]
        for i, (size, step, k) in enumerate(zip(x.shape[2:], steps, kernel, strict=True))
    ]
    y.shape = ir.Shape([*x.shape[:2], *sizes])


@_max_unpool.vjp
def _(g: Tensor, indices: Tensor) -> Tensor:
    """dx = g at the indices."""
    return gather(reshape(g, [-1]), indices)
