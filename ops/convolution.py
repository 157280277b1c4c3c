"""Convolutions and pooling over the axes after batch and channels."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from graphgen.errors import GraphgenError, user_line
from graphgen.infer import describe
from graphgen.op import composite, primitive
from graphgen.operands import Array
from graphgen.ops.elementwise import abs, equal, pow, sqrt, where
from graphgen.ops.layout import (
    _shape,
    concat,
    dim,
    numpy_dtype,
    rank,
    reshape,
    shape,
    slice_,
    transpose,
    zeros_like,
)
from graphgen.ops.padding import add_at, pad, shaped
from graphgen.ops.reduce import reduce_max, reduce_mean, reduce_sum
from graphgen.record import SizeLike
from graphgen.traits import Trait
from graphgen.value import Tensor, Value

AutoPad: TypeAlias = Literal["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]
Ints: TypeAlias = Sequence[int] | None
"""One int for each spatial axis, or None for the default."""


class Window(NamedTuple):
    """How a window moves over the spatial axes."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    before: list[int]
    after: list[int]

    @property
    def pads(self) -> list[int]:
        """The padding as an attribute: before each axis, then after each."""
        return [*self.before, *self.after]

    @property
    def extent(self) -> list[int]:
        """How many elements a window spans, from the first to the last."""
        return [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]


def _window(
    x: Tensor,
    kernel: Sequence[SizeLike],
    strides: Ints,
    dilations: Ints,
    pads: Ints,
    auto_pad: str,
    ceil: int = 0,
) -> Window:
    """The attributes of a node with their defaults, padding as numbers."""
    spans = [k for k in kernel if isinstance(k, int)]
    if len(spans) < len(kernel):
        raise GraphgenError(
            f"a window is {list(kernel)}; its sizes must be known before the run{user_line()}"
        )
    n = len(spans)
    strides, dilations = strides or [1] * n, dilations or [1] * n
    before, after = (list(p) for p in np.reshape(pads or [0] * 2 * n, (2, n)).tolist())
    window = Window(spans, list(strides), list(dilations), before, after)
    if not ceil and auto_pad in ("NOTSET", "VALID"):
        return window
    sizes = [s for i in range(2, 2 + n) if isinstance(s := dim(x, i), int)]
    if len(sizes) < n:
        option = "ceil_mode" if ceil else f"auto_pad={auto_pad}"
        raise GraphgenError(
            f"{option} needs sizes known before the run, not {x.shape}{user_line()}"
        )
    for i, (size, step, extent) in enumerate(zip(sizes, strides, window.extent, strict=True)):
        if ceil:
            steps = -(-(size + before[i] + after[i] - extent) // step)
            steps -= steps * step >= size + before[i]  # no window lies entirely in the padding
            after[i] = max(after[i], steps * step + extent - size - before[i])
        else:
            missing = max((-(-size // step) - 1) * step + extent - size, 0)
            after[i] = (missing + (auto_pad == "SAME_UPPER")) // 2
            before[i] = missing - after[i]
    return window


def _windows(x: Array, w: Window, fill: float) -> Array:
    """(N, C, *out, *kernel): what each window sees of x, (N, C, *sizes)."""
    n = len(w.kernel)
    padded = np.pad(x, [(0, 0), (0, 0), *zip(w.before, w.after, strict=True)], constant_values=fill)
    seen = sliding_window_view(padded, w.extent, tuple(range(2, 2 + n)))
    steps = [slice(None, None, s) for s in (*w.strides, *w.dilations)]
    result: Array = seen[(slice(None), slice(None), *steps)]
    return result


@primitive("Conv", traits=Trait.PRODUCT)
def conv(
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
    """y[n, o] = Σ w[o, c] x[n, c] over each window, + b[o]: (N, C, ...) and (O, C/group, ...).

    A window begins every `strides` elements and reads every `dilations`-th, both 1 by default.
    Zeros stand around x: pads[i] before and pads[n + i] after axis i of n, or what `auto_pad` says.
    Raises GraphgenError if C is not what w and `group` say.
    """
    x, w = np.asarray(x), np.asarray(w)
    window = _window(x, w.shape[2:], strides, dilations, pads, auto_pad)
    over = [1, *range(w.ndim, 2 * w.ndim - 2)], [1, *range(2, w.ndim)]
    parts = zip(np.split(_windows(x, window, 0), group, 1), np.split(w, group), strict=True)
    y = np.concatenate([np.moveaxis(np.tensordot(a, k, over), -1, 1) for a, k in parts], 1)
    return y if b is None else np.asarray(y + np.reshape(b, (-1, *[1] * (w.ndim - 2))))


@conv.flops
def _(y: Sequence[int], w: Sequence[int]) -> int:
    """2 C/group times the window for each element of the result."""
    return 2 * math.prod(w[1:]) * math.prod(y)


@conv.vjp
def _(
    g: Tensor,
    x: Tensor,
    w: Tensor,
    auto_pad: str,
    dilations: Ints,
    group: int,
    pads: Ints,
    strides: Ints,
) -> tuple[Tensor, ...]:
    """dx = the transposed convolution of g with w; dw = the convolution of x with g; db = Σ g."""
    window = _window(x, w.shape[2:], strides, dilations, pads, auto_pad)
    moved: dict[str, Any] = {
        "dilations": window.dilations,
        "strides": window.strides,
        "group": group,
    }
    dx = conv_transpose(g, w, **moved)  # for all that a window reaches, padding included
    sizes, reached = (_spatial(v) for v in (x, dx))
    none = np.zeros(2, np.int64)
    before = np.array(window.before, np.int64)
    widths = concat(none, -before, none, sizes + before - reached, axis=0)
    if isinstance(widths, Value) or np.any(widths):
        dx = pad(dx, widths)
    db = reduce_sum(g, [0, *range(2, rank(g))], keepdims=0)
    return shaped(dx, x), _weights(x, g, w, window, group), db


def _spatial(x: Tensor) -> Tensor:
    sizes = shape(x)
    return _shape(x, start=2) if isinstance(sizes, Value) else np.asarray(sizes)[2:]


def _weights(x: Tensor, g: Tensor, w: Tensor, window: Window, group: int) -> Tensor:
    """Σ g[n, o, i] x[n, c, i·stride + k·dilation]: batch and channels swap, and so do the steps."""
    n, (_, columns, *kernel) = rank(x) - 2, w.shape
    turned = [1, 0, *range(2, 2 + n)]
    if group > 1:  # (N, G, C/G, ...) to (C/G, G·N, ...)
        sizes = [dim(x, i) for i in range(2, 2 + n)]
        split = reshape(x, [dim(x, 0), group, columns, *sizes])
        moved = transpose(split, perm=[2, 1, 0, *range(3, 3 + n)])
        x = reshape(moved, [columns, -1, *sizes])
    else:
        x = transpose(x, perm=turned)
    steps: dict[str, Any] = {
        "strides": window.dilations,
        "dilations": window.strides,
        "pads": window.pads,
    }
    dw = transpose(conv(x, transpose(g, perm=turned), group=group, **steps), perm=turned)
    return shaped(slice_(dw, [0] * n, kernel, list(range(2, 2 + n))), w)


@conv.variant
def _(x: Tensor, w: Tensor, b: Tensor | None, group: int, **attributes: Any) -> Tensor | None:
    """With channels of zeros up to a multiple of 4: WebGPU gets some other numbers wrong."""
    channels = w.shape[1]
    if group > 1 or not isinstance(channels, int) or channels % 4 == 0:
        return None
    widths = np.zeros((2, rank(w)), np.int64)
    widths[1, 1] = -channels % 4
    x, w = (pad(one, widths.reshape(-1)) for one in (x, w))
    return conv(x, w, b, **attributes)


@conv.variant
def _(x: Tensor, w: Tensor, b: Tensor | None, pads: Ints, **attributes: Any) -> Tensor | None:
    """With pads of their own: WebGPU leaves out those at the end of windows of one element."""
    if not pads or not any(pads):
        return None
    return conv(pad(x, pads, axes=list(range(2, rank(x)))), w, b, **attributes)


@primitive("ConvTranspose", traits=Trait.PRODUCT)
def conv_transpose(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    auto_pad: AutoPad = "NOTSET",
    dilations: Ints = None,
    group: int = 1,
    kernel_shape: Ints = None,
    output_padding: Ints = None,
    output_shape: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> Tensor:
    """The transpose of `conv` with w, (C, O/group, ...), of x, (N, C, ...), + b; to (N, O, ...).

    Each element of x adds its window, w times it, to y, which along an axis of n elements has
    stride · (n - 1) + dilation · (kernel - 1) + 1, without the pads, plus `output_padding`.
    """
    window = _transposed(x, w, strides, dilations, pads, auto_pad, output_shape)
    n, extra = len(window.kernel), output_padding or [0] * len(window.kernel)
    whole = [
        (size - 1) * s + e + o
        for size, s, e, o in zip(x.shape[2:], window.strides, window.extent, extra, strict=True)
    ]
    y = np.zeros((x.shape[0], w.shape[1] * group, *whole), numpy_dtype(x))
    groups = list(zip(np.split(x, group, 1), np.split(w, group), strict=True))
    for at in np.ndindex(*window.kernel):
        part = [np.tensordot(a, k[..., *at], ([1], [0])) for a, k in groups]
        first = [i * d for i, d in zip(at, window.dilations, strict=True)]
        ends = [
            f + (m - 1) * s + 1 for f, m, s in zip(first, x.shape[2:], window.strides, strict=True)
        ]
        reached = tuple(map(slice, first, ends, window.strides))
        y[:, :, *reached] += np.moveaxis(np.concatenate(part, -1), -1, 1)
    if any(p + q >= m for p, q, m in zip(window.before, window.after, whole, strict=True)):
        raise ValueError(f"the pads {window.pads} leave nothing of {whole}")
    kept = [slice(p, m - q) for p, q, m in zip(window.before, window.after, whole, strict=True)]
    y = y[:, :, *kept]
    return y if b is None else np.asarray(y + np.reshape(b, (-1, *[1] * n)))


@conv_transpose.flops
def _(x: Sequence[int], w: Sequence[int]) -> int:
    """2 O/group times the window for each element that goes in."""
    return 2 * math.prod(w[1:]) * math.prod(x)


@conv_transpose.vjp
def _(
    g: Tensor,
    x: Tensor,
    w: Tensor,
    auto_pad: str,
    dilations: Ints,
    group: int,
    output_shape: Ints,
    pads: Ints,
    strides: Ints,
) -> tuple[Tensor, ...]:
    """dx = the convolution of g with w; dw = the convolution of g with x; db = Σ g."""
    window = _transposed(x, w, strides, dilations, pads, auto_pad, output_shape)
    steps: dict[str, Any] = {"strides": window.strides, "dilations": window.dilations}
    dx = conv(g, w, group=group, pads=window.pads, **steps)
    db = reduce_sum(g, [0, *range(2, rank(g))], keepdims=0)
    return shaped(dx, x), _weights(g, x, w, window, group), db


def _transposed(
    x: Tensor, w: Tensor, strides: Ints, dilations: Ints, pads: Ints, auto_pad: str, sizes: Ints
) -> Window:
    if auto_pad not in ("NOTSET", "VALID") or sizes is not None:
        raise GraphgenError(
            "ConvTranspose: auto_pad and output_shape have no meaning here: give pads"
        )
    return _window(x, w.shape[2:], strides, dilations, pads, auto_pad)


def _in_numbers(
    x: Tensor,
    kernel: Sequence[int],
    strides: Ints,
    dilations: Ints,
    pads: Ints,
    auto_pad: AutoPad,
) -> dict[str, Any]:
    """The attributes of a pool; ONNX Runtime's auto_pad is that of a window without dilations."""
    if auto_pad in ("SAME_UPPER", "SAME_LOWER") and any(d > 1 for d in dilations or ()):
        pads = _window(x, kernel, strides, dilations, pads, auto_pad).pads
        auto_pad = "NOTSET"
    given = {"auto_pad": auto_pad, "pads": pads, "strides": strides, "dilations": dilations}
    return {"kernel_shape": kernel, **given}


@composite("AveragePool")
def _average_pool(
    x: Tensor,
    *,
    auto_pad: AutoPad = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Ints = None,
    kernel_shape: Sequence[int],
    pads: Ints = None,
    strides: Ints = None,
) -> Tensor:
    """The mean over each window of x, (N, C, ...), without padding unless count_include_pad=1."""
    window = _window(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    total, given = _sums(x, window), list(pads or [0] * 2 * len(window.kernel))
    if not any(window.pads) or (count_include_pad and (not ceil_mode or given == window.pads)):
        return total / float(math.prod(window.kernel))
    ones, counted = zeros_like(x) + 1.0, window
    if count_include_pad:  # what ceil_mode adds at the ends never counts
        n = len(window.kernel)
        ones = pad(ones, given, 1.0, list(range(2, 2 + n)))
        after = [a - b for a, b in zip(window.after, given[n:], strict=True)]
        counted = window._replace(before=[0] * n, after=after)
    return total / _sums(ones, counted)


def _sums(x: Tensor, window: Window) -> Tensor:
    """The sum over each window, a convolution with ones for each channel."""
    if not isinstance(channels := dim(x, 1), int):
        raise GraphgenError(
            f"a pool: the channels of {describe(x)} must be known before the run{user_line()}"
        )
    ones = np.ones([channels, 1, *window.kernel], numpy_dtype(x))
    moved: dict[str, Any] = {"strides": window.strides, "dilations": window.dilations}
    return conv(x, ones, group=channels, pads=window.pads, **moved)


@composite("LpPool")
def _lp_pool(
    x: Tensor,
    *,
    auto_pad: AutoPad = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints = None,
    kernel_shape: Sequence[int],
    p: int = 2,
    pads: Ints = None,
    strides: Ints = None,
) -> Tensor:
    """(Σ |x|ᵖ)^(1/p) over each window of x, (N, C, ...); its gradient is 0 where that is 0."""
    window = _window(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    return _root(_sums(_power(x, p), window), p)


def _power(x: Tensor, p: int) -> Tensor:
    return abs(x) if p == 1 else x * x if p == 2 else pow(abs(x), float(p))


def _root(total: Tensor, p: int) -> Tensor:
    if p == 1:
        return total
    nothing = equal(total, 0.0)
    safe = where(nothing, 1.0, total)  # the slope at 0 is infinite
    return where(nothing, 0.0, sqrt(safe) if p == 2 else pow(safe, 1.0 / p))


def average_pool(
    x: Tensor,
    *,
    kernel_shape: Sequence[int],
    auto_pad: AutoPad = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> Tensor:
    """The mean over each window of x, (N, C, ...), of `kernel_shape`.

    Windows are those of `conv`. Padding is left out, or counted as zeros with
    count_include_pad=1; ceil_mode=1 adds a window for what is left at the end. ONNX: AveragePool.
    """
    window = _in_numbers(x, kernel_shape, strides, dilations, pads, auto_pad)
    return _average_pool(x, ceil_mode=ceil_mode, count_include_pad=count_include_pad, **window)


@primitive("MaxPool", outputs=2)
def _max_pool(
    x: Tensor,
    *,
    auto_pad: AutoPad = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints = None,
    kernel_shape: Sequence[int],
    pads: Ints = None,
    storage_order: int = 0,
    strides: Ints = None,
) -> tuple[Tensor, ...]:
    """The largest element of each window of x, (N, C, ...), and its flat index in x."""
    if storage_order:
        raise GraphgenError("MaxPool: storage_order is 1; only 0 has a meaning here")
    x = np.asarray(x)
    window = _window(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    lowest = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    places = np.arange(x.size, dtype=np.int64).reshape(x.shape)
    seen, places = (
        v.reshape(*v.shape[: len(window.kernel) + 2], -1)
        for v in (_windows(x, window, lowest), _windows(places, window, 0))
    )
    best = np.argmax(seen, -1)[..., None]
    return tuple(np.take_along_axis(v, best, -1)[..., 0] for v in (seen, places))


@_max_pool.vjp
def _(g: tuple[Tensor, ...], y: tuple[Tensor, ...], x: Tensor, **attributes: Any) -> Tensor:
    """dx = g where the maximum was; the first of equal ones."""
    by_rows = len(y) > 1 and not attributes["storage_order"]
    places = y[1] if by_rows else _max_pool(x, **{**attributes, "storage_order": 0})[1]
    return add_at(places, g[0], x)


def max_pool(
    x: Tensor,
    *,
    kernel_shape: Sequence[int],
    auto_pad: AutoPad = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> Tensor:
    """The largest element of each window of x, (N, C, ...), of `kernel_shape`.

    Windows are `strides` apart, 1 by default, and their elements `dilations`. pads[i] elements
    before and pads[n + i] after axis i of n never win. ONNX: MaxPool, without its second output.
    """
    window = _in_numbers(x, kernel_shape, strides, dilations, pads, auto_pad)
    return _max_pool(x, ceil_mode=ceil_mode, **window)[0]


@composite("GlobalAveragePool")
def global_average_pool(x: Tensor) -> Tensor:
    """The mean of each channel of x, (N, C, ...), whose sizes become 1."""
    return reduce_mean(x, list(range(2, rank(x))))


@composite("GlobalMaxPool")
def global_max_pool(x: Tensor) -> Tensor:
    """The largest element of each channel of x, (N, C, ...), whose sizes become 1."""
    return reduce_max(x, list(range(2, rank(x))))
