"""Operators as others that give the same, for kernels that get some of their calls wrong."""

import numpy as np
import onnx_ir as ir

from graphgen.graph import constant
from graphgen.ops.elementwise import _pow, logical_and, mul
from graphgen.ops.layout import cast, expand, shape, slice_
from graphgen.value import Tensor, Value


@logical_and.variant
def _(a: Tensor, b: Tensor) -> Tensor:
    """A product of ones and zeros: WebGPU's shader may be that of other shapes."""
    both = mul(*(cast(x, to=ir.DataType.INT32) for x in (a, b)))
    return cast(both, to=ir.DataType.BOOL)


@_pow.variant
def _(x: Tensor, exponent: Tensor) -> Tensor:
    """Of operands of one shape: WebGPU fails where one repeats along the last axis."""
    exponent = expand(exponent, shape(x))
    return _pow(expand(x, shape(exponent)), exponent)


@slice_.variant
def _(
    x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None, steps: Tensor | None
) -> Tensor | None:
    """What lies up to the start, and that backwards: WebGPU goes back from the last element only.

    None for a start before the last element of an axis whose size is unknown: it may be cut to 0.
    """
    first, last, over, by = (
        constant(v) if isinstance(v, Value) else None if v is None else np.asarray(v)
        for v in (starts, ends, axes, steps)
    )
    if first is None or last is None or by is None or (over is None and axes is not None):
        return None
    along = list(range(len(first))) if over is None else over.tolist()
    far, cut = 2**63 - 1, list[tuple[int, int]]()
    for start, end, axis, step in zip(first, last, along, by, strict=True):
        low, high, size = int(start), int(end), x.shape[axis]
        if step < 0:
            if low < -1 and not isinstance(size, int):
                return None
            low = max(low + size, 0) if low < -1 else low
            low, high = (far if n in (-1, far) else n + 1 for n in (high, low))
        cut.append((low, high))
    part = slice_(x, [low for low, _ in cut], [high for _, high in cut], along)
    return slice_(part, np.where(by < 0, -1, 0), np.where(by < 0, -far, far), along, by)
