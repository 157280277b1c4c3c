"""Discrete Fourier transforms; complex numbers are pairs in a last axis of size 2."""

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext, registry

from graphgen.errors import GraphgenError, user_line
from graphgen.graph import constant
from graphgen.infer import OPSET, axis_from_front, describe, expect_axis
from graphgen.op import composite, primitive
from graphgen.ops.elementwise import equal, logical_or, where
from graphgen.ops.layout import (
    arange,
    cast,
    cast_like,
    concat,
    dim,
    gather,
    numpy_dtype,
    rank,
    reshape,
    slice_,
    unsqueeze,
)
from graphgen.ops.padding import pad, shaped
from graphgen.ops.sizes import sizes_vector
from graphgen.record import TensorLike
from graphgen.traits import Trait
from graphgen.value import Size, Tensor, Value, sizes_of


@primitive("DFT", traits=Trait.SIZED | Trait.SCALAR)
def dft(
    x: Tensor,
    length: TensorLike | None = None,
    axis: TensorLike | None = None,
    *,
    inverse: int = 0,
    onesided: int = 0,
) -> Tensor:
    """y_k = Σ_t x_t exp(-2πi k t / n), or with inverse=1 (1/n) Σ_t x_t exp(2πi k t / n).

    t and k go along `axis`, by default the last but one; x is cut, or filled with zeros, to n =
    `length`. The last axis of x holds real parts, or real and imaginary ones, that of y both.
    onesided=1 gives k ≤ n/2 alone; with inverse=1 it takes these, and gives real parts, by default
    n = 2 (size - 1) of them.
    """
    along = _axis(x, axis)
    z = x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]
    back = 2 * (x.shape[along] - 1) if onesided and inverse else x.shape[along]
    n = back if length is None else int(np.asarray(length).item())
    if onesided and inverse:
        return np.asarray(np.fft.irfft(z, n, along)[..., None], numpy_dtype(x))
    y = (np.fft.ifft if inverse else np.fft.fft)(z, n, along)
    y = np.take(y, np.arange(n // 2 + 1), along) if onesided else y
    return np.stack([y.real, y.imag], -1).astype(numpy_dtype(x))


@registry.register("", "DFT", since_version=OPSET)
def _infer_dft(context: ShapeInferenceContext, node: ir.Node) -> None:
    """The sizes of x, but for the axis and the last one; onnx's rule loses them all, at times."""
    (x, length, axis), y = (*node.inputs, None, None)[:3], node.outputs[0]
    assert x is not None
    y.type = x.type
    if x.shape is None:
        return
    dims, known = list(x.shape), None if axis is None else constant(axis)
    inverse, onesided = (node.attributes.get_int(name, 0) for name in ("inverse", "onesided"))
    dims[-1] = 1 if inverse and onesided else 2
    if axis is not None and known is None:
        y.shape = ir.Shape([*(context.new_symbolic_dim() for _ in dims[1:]), dims[-1]])
        return
    along = -2 if known is None else int(known.item())
    expect_axis(along, len(dims))
    size = dims[along]
    if length is not None:
        [size] = context.get_symbolic_value(length) or [context.new_symbolic_dim()]
    elif inverse and onesided:
        size = 2 * (size - 1)
    dims[along] = size // 2 + 1 if onesided and not inverse else size
    y.shape = ir.Shape(dims)


def _axis(x: Tensor, axis: Any) -> int:
    along = -2 if axis is None else _number(axis)
    if not isinstance(along, int):
        raise GraphgenError(f"DFT: its axis must be known before the run{user_line()}")
    return axis_from_front("DFT", along, rank(x))


@dft.vjp
def _(
    g: Tensor,
    x: Tensor,
    length: Tensor | None,
    axis: Tensor | None,
    inverse: int,
    onesided: int,
) -> Tensor:
    """dx = Fᴴ g, n times the inverse transform, of y = F x, and F g / n of y = Fᴴ x / n.

    Of onesided=1, g has zeros for the other k; with inverse=1 all k but 0 and n/2 count twice. What
    was cut has the gradient 0.
    """
    along, real = _axis(x, axis), _has_real_parts(x)
    back, size = bool(onesided and inverse), dim(x, along)
    given = None if length is None or not back else _number(length)
    if isinstance(given, int) and isinstance(size, int) and size < given // 2 + 1:
        raise GraphgenError(
            f"DFT: x has {size} elements along axis {along}, and a result of {given} needs "
            f"{given // 2 + 1}, for which runtimes do not agree on zeros{user_line()}"
        )
    n = _vector(dim(g if back else x, along) if length is None else length)
    turned = 0 if back else 1 - inverse
    dx = dft(g, gather(n, 0), np.int64(along), onesided=int(back), inverse=turned)
    if back:
        at = reshape(arange(dim(dx, along)), [-1, *[1] * (rank(x) - 1 - along)])
        ends = logical_or(equal(at, 0), equal(at * 2, n))
        dx = dx * cast_like(where(ends, np.float32(1), np.float32(2)), g)
    elements = cast_like(n, g)
    dx = dx / elements if inverse else dx * elements
    if length is not None or onesided:
        end = sizes_vector(dim(x, along)) - sizes_vector(dim(dx, along))
        dx = pad(dx, concat(np.zeros(1, np.int64), end, axis=0), None, [along])
    return shaped(slice_(dx, [0], [1], [-1]) if real else dx, x)


def _vector(n: Any) -> Tensor:
    """A size or a scalar as int64[1]."""
    if isinstance(n, (int, Size)):
        return sizes_vector(n)
    return reshape(cast(n, to=ir.DataType.INT64), [1])


def _number(n: Any) -> Any:
    """A scalar as an int, if it is known."""
    known = constant(n) if isinstance(n, Value) else n
    return n if known is None else int(np.asarray(known).item())


def _has_real_parts(x: Tensor) -> bool:
    last = (sizes_of(x) or (None,))[-1]
    if last not in (1, 2):
        raise GraphgenError(
            f"DFT: x is {describe(x)}; its last axis must be known to have 1 or 2{user_line()}"
        )
    return last == 1


@composite("STFT", traits=Trait.SIZED | Trait.SCALAR)
def stft(
    x: Tensor,
    frame_step: TensorLike,
    window: Tensor | None = None,
    frame_length: TensorLike | None = None,
    *,
    onesided: int = 1,
) -> Tensor:
    """The DFT of each frame of x, (B, L, 1 or 2), times `window`: (B, frames, k, 2).

    A frame begins every `frame_step` elements, and has as many as the window, or `frame_length`.
    onesided=1 gives k ≤ n/2 alone, of real x.
    """
    if onesided and not _has_real_parts(x):
        raise GraphgenError(f"STFT: onesided=1 is for real numbers, and x has pairs{user_line()}")
    whole: Any = dim(x, 1)
    own: Any = whole if window is None else dim(window, 0)
    n = own if frame_length is None else _number(frame_length)
    step = _number(frame_step)
    if isinstance(n, Value) or isinstance(step, Value):
        n, step, whole = (_vector(size) for size in (n, step, whole))
    first = unsqueeze(arange((whole - n) // step + 1) * step, [1])
    parts = gather(x, first + arange(n), axis=1)  # (B, frames, n, 1 or 2)
    if window is not None:
        parts = parts * unsqueeze(window, [1])
    return dft(parts, None, np.int64(2), onesided=onesided)
