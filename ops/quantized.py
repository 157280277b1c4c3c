"""Operators on weights and activations of few bits: ONNX's, and those of the runtime.

A number x is stored as an integer q = saturate(round(x / scale) + zero point), halves rounded to
even, and means (q - zero point) · scale. One scale and zero point serve a whole tensor, an index of
one axis, or a block of neighbors along one axis. The bodies are exact. If a kernel rounds more, as
MatMulNBits does with activations at accuracy_level 4, that is the kernel's error. Sources: ONNX's
specification, onnxruntime's docs/ContribOperators.md.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError, user_line
from graphgen.infer import Dim, axis_from_front, expect_axis, is_named
from graphgen.op import composite, infer_from_body
from graphgen.ops.elementwise import (
    clip,
    div,
    equal,
    maximum,
    minimum,
    neg,
    round as to_nearest,
    where,
)
from graphgen.ops.integers import bit_shift
from graphgen.ops.layout import (
    arange,
    cast,
    cast_like,
    concat,
    dim,
    flatten,
    gather,
    numpy_dtype,
    rank,
    reshape,
    shape,
    size_at,
    slice_,
    swap_last,
    unsqueeze,
)
from graphgen.ops.linalg import matmul
from graphgen.ops.reduce import reduce_max, reduce_min
from graphgen.ops.softmax import softmax
from graphgen.record import SizeLike
from graphgen.traits import Trait
from graphgen.value import Tensor, sizes_of

_CONTRIB = "com.microsoft"
_BY_ROWS = Trait.QUANTIZED | Trait.BY_ROWS
_FLOAT, _UINT8, _INT32 = ir.DataType.FLOAT, ir.DataType.UINT8, ir.DataType.INT32


@composite("QuantizeLinear", traits=Trait.QUANTIZED)
def quantize_linear(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
) -> Tensor:
    """saturate(round(x / scale) + zero), of the dtype of `zero`, by default uint8.

    `scale` and `zero` have one element, one for each index of `axis`, or x's rank with one for each
    `block_size` elements along `axis`. A float of 8 bits or fewer is not rounded to a
    whole number, and has no zero point; beyond the end it is NaN if `saturate` is 0 (the
    runtime stores ±480 as ±448). The division is in `precision`, by default scale's dtype.
    """
    to = ir.DataType(output_dtype or _UINT8)
    to = to if zero is None else ir.DataType.from_numpy(numpy_dtype(zero))
    zero = None if zero is None else _whole(zero)
    scale = _spread("QuantizeLinear", scale, x, axis, block_size)
    zero = None if zero is None else _spread("QuantizeLinear", zero, x, axis, block_size)
    if precision:
        scale = cast(scale, to=ir.DataType(precision))
    x = cast_like(x, scale) / scale
    if to.is_floating_point():
        return cast(x, to=to, saturate=saturate)
    return _saturated(x, zero, to)


@composite("DequantizeLinear", traits=Trait.QUANTIZED)
def dequantize_linear(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Tensor:
    """(x - zero) · scale, in `output_dtype`, by default scale's; sizes as for QuantizeLinear."""
    x, zero = _whole(x), None if zero is None else _whole(zero)
    scale = _spread("DequantizeLinear", scale, x, axis, block_size)
    zero = None if zero is None else _spread("DequantizeLinear", zero, x, axis, block_size)
    scale = cast(scale, to=ir.DataType(output_dtype)) if output_dtype else scale
    return _meant(x, scale, zero)


@composite("DynamicQuantizeLinear", outputs=3, together=True, traits=_BY_ROWS)
def dynamic_quantize_linear(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x as uint8, its scale and its zero point, so that 0 to 255 span x and 0.

    scale = (max(x, 0) - min(x, 0)) / 255, or 1 if x is 0; the zero point is -min(x, 0) / scale.
    In float32, whatever the reference calculates in: the last digit may decide what rounds up.
    """
    x = x if numpy_dtype(x) == np.float32 else cast(x, to=_FLOAT)
    low = minimum(reduce_min(x, None, keepdims=0), 0.0)
    span = maximum(reduce_max(x, None, keepdims=0), 0.0) - low
    scale = where(equal(span, 0.0), 1.0, span / 255.0)
    zero = _saturated(neg(low) / scale, None, _UINT8)
    return _saturated(x / scale, zero, _UINT8), scale, zero


@composite("MatMulInteger", traits=Trait.QUANTIZED | Trait.PRODUCT)
def matmul_integer(
    a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None
) -> Tensor:
    """(A - a_zero) (B - b_zero) in int32, of (..., M, K) and (..., K, N).

    A zero point has one element, or one for each row of A, or for each column of B.
    """
    return _product(a, b, None if a_zero is None else _by_row(a_zero), b_zero)


@composite("QLinearMatMul", traits=Trait.QUANTIZED | Trait.PRODUCT)
def qlinear_matmul(
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
) -> Tensor:
    """The product of what A and B mean, (..., M, K) and (..., K, N), quantized by `y_scale`."""
    a_scale, y_scale = _by_row(a_scale), _by_row(y_scale)
    y = _product(a, b, _by_row(a_zero), b_zero)
    y = cast_like(y, b_scale) * (a_scale * b_scale)
    return _saturated(y / y_scale, _by_row(y_zero), ir.DataType.from_numpy(numpy_dtype(y_zero)))


@composite("QLinearAdd", domain=_CONTRIB, traits=Trait.QUANTIZED | Trait.BROADCASTS)
def qlinear_add(
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor | None,
    y_scale: Tensor,
    y_zero: Tensor | None = None,
) -> Tensor:
    """The sum of what A and B mean, which broadcast, quantized by `y_scale` in A's dtype.

    Each scale and zero point has one element; a zero point is 0 by default. The runtime (1.32)
    refuses to leave out those of A and B.
    """
    y = _meant(a, a_scale, a_zero) + _meant(b, b_scale, b_zero)
    return _saturated(y / y_scale, y_zero, ir.DataType.from_numpy(numpy_dtype(a)))


@composite("QLinearMul", domain=_CONTRIB, traits=Trait.QUANTIZED | Trait.BROADCASTS)
def qlinear_mul(
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor | None,
    y_scale: Tensor,
    y_zero: Tensor | None = None,
) -> Tensor:
    """The product, element by element, of what A and B mean; otherwise as QLinearAdd."""
    y = _meant(a, a_scale, a_zero) * _meant(b, b_scale, b_zero)
    return _saturated(y / y_scale, y_zero, ir.DataType.from_numpy(numpy_dtype(a)))


@composite("QLinearSoftmax", domain=_CONTRIB, traits=Trait.QUANTIZED)
def qlinear_softmax(
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor | None,
    y_scale: Tensor,
    y_zero: Tensor,
    *,
    axis: int = -1,
    opset: int,
) -> Tensor:
    """The softmax of what X means along `axis`, quantized by `y_scale` in X's dtype.

    Before `opset` 13, it is over all axes from `axis` on together.
    """
    axis, x = axis_from_front("QLinearSoftmax", axis, rank(x)), _meant(x, x_scale, x_zero)
    y = softmax(x, axis=axis) if opset >= 13 else reshape(softmax(flatten(x, axis=axis)), shape(x))
    return _saturated(y / y_scale, y_zero, ir.DataType.from_numpy(numpy_dtype(y_zero)))


@composite("MatMulIntegerToFloat", domain=_CONTRIB, traits=_BY_ROWS | Trait.PRODUCT)
def matmul_integer_to_float(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_zero: Tensor | None = None,
    b_zero: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The product of what A (..., M, K) and B (K, N) mean, + bias (N,).

    The scale and the zero point of A have one element; those of B have one or N.
    """
    y = cast_like(_product(a, b, a_zero, b_zero), b_scale) * (a_scale * b_scale)
    return y if bias is None else y + bias


@composite("DynamicQuantizeMatMul", domain=_CONTRIB, traits=Trait.QUANTIZED | Trait.PRODUCT)
def dynamic_quantize_matmul(
    a: Tensor, b: Tensor, b_scale: Tensor, b_zero: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """MatMulIntegerToFloat of DynamicQuantizeLinear of A (..., M, K), and B (K, N), + bias (N,)."""
    q, a_scale, a_zero = dynamic_quantize_linear(a)
    a_scale = cast_like(a_scale, b_scale)
    return matmul_integer_to_float(q, b, a_scale, b_scale, a_zero, b_zero, bias)


@composite("MatMulNBits", domain=_CONTRIB, traits=_BY_ROWS | Trait.PRODUCT)
def matmul_nbits(
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    groups: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    K: int,
    N: int,
    bits: int = 4,
    block_size: int,
    accuracy_level: int = 0,
) -> Tensor:
    """A Wᵀ + bias, of A (..., K), W (N, K) in blocks along K and bias (N,).

    B, uint8 (N, blocks, block_size · bits / 8), holds W's integers; the first in a byte is in its
    low bits. `scales` are (N, blocks) or flat; `zeros` have A's dtype and the same shape, or are
    packed like B, (N, ⌈blocks · bits / 8⌉), and are 2^(bits - 1) by default. Elements of the last
    block beyond K are ignored. accuracy_level lets a kernel round A, at 4 to int8 in blocks.

    Raises GraphgenError for `groups` (g_idx), which is deprecated, and bits other than 2, 4 and 8.
    """
    if groups is not None:
        raise GraphgenError("MatMulNBits: g_idx is deprecated and has no body; sort B's columns")
    blocks = -(-K // block_size)
    q = _unpacked("MatMulNBits", reshape(b, [N, blocks, -1]), bits)
    zero: Tensor | int = 2 ** (bits - 1)
    if zeros is not None and numpy_dtype(zeros) == np.uint8:
        found = _unpacked("MatMulNBits", reshape(zeros, [N, -1]), bits)
        zero = unsqueeze(slice_(found, [0], [blocks], [1]), [-1])
    elif zeros is not None:
        zero = reshape(zeros, [N, blocks, 1])
    w = reshape(_meant(q, reshape(scales, [N, blocks, 1]), zero), [N, blocks * block_size])
    w = w if blocks * block_size == K else slice_(w, [0], [K], [1])
    y = matmul(a, swap_last(w))
    return y if bias is None else y + bias


@composite("GatherBlockQuantized", domain=_CONTRIB, traits=Trait.QUANTIZED, looks_up=(1, (0, 2, 3)))
def gather_block_quantized(
    table: Tensor,
    indices: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
) -> Tensor:
    """What the slices of a table at the indices along `gather_axis` mean.

    Each `block_size` elements along `quantize_axis` have a scale and a zero point, 0 by default. A
    table of uint8 is packed along its last axis as in MatMulNBits, and so are its zero points,
    2^(bits - 1) by default; it is gathered along the first axis.
    """
    n = rank(table)
    gather_axis = axis_from_front("GatherBlockQuantized: gather_axis", gather_axis, n)
    quantize_axis = axis_from_front("GatherBlockQuantized: quantize_axis", quantize_axis, n)
    kind = ir.DataType.from_numpy(numpy_dtype(table))
    packed = kind is _UINT8
    if packed and (gather_axis != 0 or quantize_axis != n - 1 or n == 1):
        raise GraphgenError(
            f"GatherBlockQuantized: a table of uint8 is gathered along axis 0 and quantized along "
            f"its last one, {n - 1}, not {gather_axis} and {quantize_axis}"
        )
    # All of the table is dequantized first if a scale may serve several slices: that of a table of
    # floats, and that of a block along the gathered axis.
    whole = kind.is_floating_point() or gather_axis == quantize_axis
    count = dim(table, quantize_axis) * (8 // bits if packed else 1)
    if not packed:  # nor does a Gather take four bits
        table, zeros = _whole(table), None if zeros is None else _whole(zeros)
    if not whole:
        table, scales = (gather(x, indices, axis=gather_axis) for x in (table, scales))
        zeros = None if zeros is None else gather(zeros, indices, axis=gather_axis)
    axis = quantize_axis if whole or quantize_axis < gather_axis else quantize_axis - n
    if packed:
        table = _unpacked("GatherBlockQuantized", table, bits)
        zeros = None if zeros is None else _unpacked("GatherBlockQuantized", zeros, bits)
    scales = _blocked(scales, count, axis, block_size)
    zero: Tensor | int | None = 2 ** (bits - 1) if packed else None
    zero = zero if zeros is None else _blocked(zeros, count, axis, block_size)
    y = _meant(table, scales, zero)
    return gather(y, indices, axis=gather_axis) if whole else y


def _saturated(x: Tensor, zero: Tensor | None, to: ir.DataType) -> Tensor:
    """round(x) + zero in an integer dtype, saturated to its range."""
    x = to_nearest(x)
    x = x if numpy_dtype(x).itemsize >= 4 else cast(x, to=_FLOAT)  # it ends before 65,535
    x = x if zero is None else x + cast_like(zero, x)
    return cast(clip(x, float(to.min), float(to.max)), to=to)


def _meant(q: Tensor, scale: Tensor, zero: Tensor | int | None) -> Tensor:
    """(q - zero) · scale in the dtype of the scale, exact for integers up to 16 bits."""
    q, zero = _whole(q), zero if zero is None or isinstance(zero, int) else _whole(zero)
    if zero is not None and not isinstance(zero, int) and (_is_float(q) or _is_float(zero)):
        return (cast_like(q, scale) - cast_like(zero, scale)) * scale
    return cast_like(q if zero is None else q - zero, scale) * scale


def _is_float(x: Tensor) -> bool:
    return ir.DataType.from_numpy(numpy_dtype(x)).is_floating_point()


def _whole(q: Tensor) -> Tensor:
    """Integers as int32, so that no difference overflows; floats unchanged."""
    return q if _is_float(q) or numpy_dtype(q) == np.int32 else cast(q, to=_INT32)


def _product(a: Tensor, b: Tensor, a_zero: Tensor | None, b_zero: Tensor | None) -> Tensor:
    a, b = (
        _whole(x) if zero is None else _whole(x) - _whole(zero)
        for x, zero in ((a, a_zero), (b, b_zero))
    )
    return matmul(a, b)


def _by_row(x: Tensor) -> Tensor:
    """A vector as a column, so that each element is for a row; others unchanged."""
    return x if rank(x) != 1 or size_at(x, 0) == 1 else unsqueeze(x, [-1])


def expect_scales(given: Sequence[Dim], x: Sequence[Dim], axis: int, block_size: int) -> None:
    """Raise ValueError unless scales or zero points of shape `given` fit an x: see QuantizeLinear.

    One serves all of x, whatever the axis; a size that inference made up may be one.
    """
    if len(given) < 2 and all(dim == 1 or not is_named(dim) for dim in given):
        return
    expect_axis(axis, len(x))
    size, wanted = x[axis], list[Dim | str](x)
    if not block_size:
        wanted = [size]
    elif isinstance(size, int):
        wanted[axis] = -(-size // block_size)
    else:
        wanted[axis] = f"⌈{size} / {block_size}⌉"
    pairs = zip(given, wanted, strict=False)
    fit = all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))
    if len(given) != len(wanted) or not fit:
        raise ValueError(
            f"the scale or zero point has the shape [{', '.join(map(str, given))}]; x "
            f"[{', '.join(map(str, x))}] with axis {axis} and block_size {block_size} needs one "
            f"element, or [{', '.join(map(str, wanted))}]"
        )


def _spread(who: str, given: Tensor, x: Tensor, axis: int, block_size: int) -> Tensor:
    """Scales or zero points of x in a shape that broadcasts to x's."""
    try:
        expect_scales(sizes_of(given) or (), sizes_of(x) or (), axis, block_size)
    except ValueError as error:
        raise GraphgenError(f"{who}: {error}{user_line()}") from error
    if rank(given) == 0:
        return given
    if rank(given) == 1 and size_at(given, 0) == 1:
        return reshape(given, [])
    axis = axis_from_front(who, axis, rank(x))
    if block_size:
        return _blocked(given, dim(x, axis), axis, block_size)
    behind = list(range(1, rank(x) - axis))
    return unsqueeze(given, behind) if behind else given


def _blocked(given: Tensor, count: SizeLike, axis: int, block_size: int) -> Tensor:
    """Scales or zero points repeated along an axis that has `count` elements; all in one for 0."""
    if isinstance(count, int):
        return gather(given, np.arange(count) // (block_size or max(count, 1)), axis=axis)
    return gather(given, div(arange(count), block_size), axis=axis)


def _unpacked(who: str, x: Tensor, bits: int) -> Tensor:
    """Bytes (..., n) as numbers of that many bits, (..., n · 8 / bits), the lowest ones first."""
    if bits not in (2, 4, 8):
        raise GraphgenError(f"{who}: bits is {bits}; only 2, 4 and 8 have a meaning here")
    if bits == 8:
        return x
    parts = []
    for above in range(8 - bits, -1, -bits):
        part = bit_shift(x, above, direction="LEFT") if above else x
        parts.append(unsqueeze(bit_shift(part, 8 - bits, direction="RIGHT"), [-1]))
    *sizes, last = (dim(x, i) for i in range(rank(x)))
    width = last * len(parts) if isinstance(last, int) else -1
    return reshape(concat(*parts, axis=-1), [*sizes, width])


@composite("QGemm", domain=_CONTRIB, traits=Trait.QUANTIZED | Trait.PRODUCT)
def qgemm(
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor,
    c: Tensor | None = None,
    y_scale: Tensor | None = None,
    y_zero: Tensor | None = None,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """α (op(A) op(B) + C) of what A (M, K) and B (K, N) mean, quantized if `y_zero` is given.

    C is int32 in the unit of the product, a_scale · b_scale. The scale and the zero point of A
    have one element, those of B one or N.
    """
    a, b = swap_last(a) if transA else a, swap_last(b) if transB else b
    y = _product(a, b, a_zero, b_zero)
    scale = a_scale * b_scale if alpha == 1.0 else a_scale * b_scale * alpha
    y = cast_like(y if c is None else y + c, scale) * scale
    if y_scale is None or y_zero is None:
        return y
    return _saturated(y / y_scale, y_zero, ir.DataType.from_numpy(numpy_dtype(y_zero)))


infer_from_body(qgemm)  # to the library, the result is always float
