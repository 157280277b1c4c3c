"""Shapes of convolutions, pools, resized and padded images, where the libraries miss them."""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext, registry

from graphgen.forms import MADE_UP, TEXTS, dim_of, simplified
from graphgen.infer import (
    OPSET,
    DeclaredSizes,
    Dim,
    FileSizes,
    expect_axis,
    mends,
)
from graphgen.rounded import bounded


def give_up(value: ir.Value, axes: Iterable[int], context: ShapeInferenceContext) -> None:
    """Make the sizes of these axes unknown."""
    if value.shape is not None:
        dims = list(value.shape)
        for axis in axes:
            dims[axis] = context.new_symbolic_dim()
        value.shape = ir.Shape(dims)


@registry.register("", "Pad", since_version=OPSET)
def _infer_pad(context: ShapeInferenceContext, node: ir.Node) -> None:
    """Each axis with its padding before and after; the library takes computed axes for all."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    y.type = x.type
    if x.shape is None:
        return
    dims: list[Dim] = list(x.shape)
    given = node.inputs[3] if len(node.inputs) > 3 else None
    pads, axes = (
        None if v is None else context.get_symbolic_value(v) for v in (node.inputs[1], given)
    )
    axes = list(range(len(dims))) if given is None else axes
    if pads is None or axes is None or not all(isinstance(d, int) for d in axes):
        dims = [context.new_symbolic_dim() for _ in dims]
    else:
        if len(pads) != 2 * len(axes):
            raise ValueError(f"pads has {len(pads)} numbers; {len(axes)} axes need two each")
        for i, axis in enumerate(map(int, map(str, axes))):
            expect_axis(axis, len(dims))
            dims[axis] += pads[i] + pads[i + len(axes)]
    y.shape = ir.Shape(dims)


@mends("AveragePool", "MaxPool", "LpPool")
def _pool(node: ir.Node, context: ShapeInferenceContext) -> None:
    """⌊(n - reach) / stride⌋ + 1 windows in n elements; reach is a window without its padding.

    The runtime rounds a negative quotient to 0: where n is less than reach, though by less than a
    stride, there is one window. It refuses n = 0 unless there is another axis of 0, by which n less
    a reach of one stride gives none. To round up, as `ceil_mode` asks, it divides in float32, of
    which no formula of sizes holds.
    """
    x, strides = node.inputs[0], node.attributes.get_ints("strides", ()) or ()
    if x is None or x.shape is None or max(strides, default=1) == 1:
        return
    padded = node.attributes.get_string("auto_pad", "NOTSET") or "NOTSET"
    exact = padded == "NOTSET" and not node.attributes.get_int("ceil_mode", 0)
    windows, axes = node.attributes["kernel_shape"].as_ints(), len(strides)
    pads = node.attributes.get_ints("pads", None) or [0] * 2 * axes
    apart = node.attributes.get_ints("dilations", None) or [1] * axes
    for i, stride in enumerate(strides):
        axis, reach = 2 + i, apart[i] * (windows[i] - 1) + 1 - pads[i] - pads[axes + i]
        rest = [d for j, d in enumerate(x.shape.dims) if j != axis]
        known = exact and reach <= stride and node.outputs[0].shape is not None
        size = x.shape[axis]
        none = reach == stride and not all(isinstance(d, int) and d for d in rest)
        none = none and not _is_some(size, context)
        known = known and not (none and any(_may_vanish(d, context) for d in rest))
        others = ir.Shape(rest).free_symbols()
        own = ir.Shape([size]).free_symbols()
        together = others & own or (others and any(map(MADE_UP.search, others | own)))
        vanish = _may_vanish(size, context) and any(_may_vanish(d, context) for d in rest)
        least = 1 if together or vanish or 0 in x.shape.dims else 2
        fixed = isinstance(size, int)
        for value in [] if fixed and isinstance(context, DeclaredSizes) else node.outputs:
            behind = reach == 1 and (_is_one_or_more(size) or _behind(size) is not None)
            if known and (reach >= least or behind) and value.shape is not None:
                value.shape[axis] = _windows(size, reach, stride, none)
            give_up(value, [] if known or fixed else [axis], context)


def _may_vanish(size: Dim, context: ShapeInferenceContext) -> bool:
    """Whether a size may be 0 where no symbol is: what a slice leaves, say."""
    if isinstance(size, int) or re.fullmatch(r"[\w*]+", str(size)) or _is_one_or_more(size):
        return size == 0
    return not (isinstance(context, FileSizes) and context.is_at_least(size, 1))


def _is_some(size: Dim, context: ShapeInferenceContext) -> bool:
    """Whether a size is 1 or more in every run, by a number or by what the graph does with it."""
    if isinstance(size, int) or _is_one_or_more(size):
        return size != 0
    return isinstance(context, FileSizes) and context.is_at_least(size, 1, later=True)


def _is_one_or_more(size: Dim) -> bool:
    """Whether a size is the maximum of another one and 1, or a larger number."""
    found = bounded(str(size))
    return found is not None and found[0] == "max" and found[1].isdecimal() and int(found[1]) > 0


def _behind(size: Dim) -> tuple[str, ir.SymbolicDim] | None:
    """The names of n and of Max(1, m) in Min(n, Max(1, m)), as of windows behind windows."""
    match bounded(str(size)):
        case "min", most, rest if (found := bounded(rest)) and found[:2] == ("max", "1"):
            return most, ir.SymbolicDim(rest)
    return None


@lru_cache(TEXTS)
def _windows(size: Dim, reach: int, stride: int, none: bool) -> Dim:
    """How many windows there are, one at least, or with `none` no window in no element.

    So no maximum inside says more where its number has one window or none: pools behind pools would
    have maxima in each other, of which each takes sympy three times as long as the one before.
    """
    if isinstance(size, int):
        return 0 if none and not size else max(1, (size - reach) // stride + 1)
    most = str(size)
    if (behind := _behind(size)) is not None:  # 0 and 1 elements are in one window
        most, size = behind
    expression: Any = size._expr
    number, rest = expression.as_coeff_Add()
    if rest.func.__name__ == "Max" and number.is_Integer:
        parts = [part for part in rest.args if not part.is_Integer]
        if len(parts) == 1 and all(c + number < reach + stride for c in {*rest.args} - {*parts}):
            size = ir.SymbolicDim(str(parts[0] + number))
    some = f"Max(1, {simplified(str((size - reach) // stride + 1))})"
    return dim_of(f"Min({most}, {some})" if none else some)


@mends("Conv", "ConvTranspose", "AveragePool", "MaxPool")
def _expect_windows(node: ir.Node, context: ShapeInferenceContext) -> None:
    """A window of a program fits into what it moves over; in a file, it may never be used."""
    sizes = node.outputs[0].shape if isinstance(context, DeclaredSizes) else None
    for axis, size in enumerate(sizes or ()):
        if axis > 1 and isinstance(size, int) and size < 1:
            problem = f"axis {axis} of the result would have {size} elements"
            raise ValueError(f"{problem}; give a smaller window or larger sizes, or other pads")


@mends("Conv")
def _note_lengths(node: ir.Node, context: ShapeInferenceContext) -> None:
    """The runtime refuses a window that is longer than what it slides over."""
    x, w, y = node.inputs[0], node.inputs[1], node.outputs[0]
    if not isinstance(context, FileSizes) or node.graph is None or node.graph is not context.graph:
        return
    if x is None or w is None or x.shape is None or w.shape is None or y.shape is None:
        return
    axes = len(x.shape) - 2
    padded = node.attributes.get_string("auto_pad", "NOTSET") or "NOTSET"
    pads = node.attributes.get_ints("pads", None) or [0] * 2 * axes
    apart = node.attributes.get_ints("dilations", None) or [1] * axes
    for i, (size, window) in enumerate(zip(x.shape[2:], w.shape[2:], strict=True)):
        if isinstance(size, int) or not isinstance(window, int) or padded != "NOTSET":
            continue
        context.note(_moved(size, pads[i] + pads[axes + i] - apart[i] * (window - 1) - 1), 0)
        context.note(y.shape[2 + i], 1)


@lru_cache(TEXTS)
def _moved(size: ir.SymbolicDim, by: int) -> ir.SymbolicDim:
    """A size and a number, worked out once."""
    return size + by


@mends("ConvTranspose")
def _transposed_convolution(node: ir.Node, context: ShapeInferenceContext) -> None:
    """With SAME, the runtime gives less than input times stride if the kernel is shorter."""
    y = node.outputs[0]
    if "SAME" in (node.attributes.get_string("auto_pad", "") or "") and y.shape is not None:
        give_up(y, range(2, len(y.shape)), context)


@mends("Resize")
def _resize(node: ir.Node, context: ShapeInferenceContext) -> None:
    """In float32, as the runtime multiplies, 0.7 * 10 is 7; to keep the aspect changes sizes."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or x.shape is None or y.shape is None:
        return
    given = node.inputs[2] if len(node.inputs) > 2 else None
    tensor = None if given is None else ir.convenience.get_const_tensor(given)
    scales = np.empty(0) if tensor is None else tensor.numpy()
    axes = node.attributes.get_ints("axes", None) or range(len(x.shape))
    policy = node.attributes.get_string("keep_aspect_ratio_policy", "stretch")
    if not scales.size:
        give_up(y, axes if policy != "stretch" else [], context)
    for axis, scale in zip(axes, scales, strict=False):
        size = x.shape[axis]
        sure = not scale % 1
        if isinstance(size, int):
            sure = int(size * np.float32(scale)) == int(size * float(scale)) == y.shape[axis]
        give_up(y, [] if sure else [axis], context)


@mends("MelWeightMatrix")
def _mel_weights(node: ir.Node, context: ShapeInferenceContext) -> None:
    """A row for each of the dft_length // 2 + 1 frequencies; the library makes it a column."""
    bins, length = (v and context.get_symbolic_value(v) for v in node.inputs[:2])
    known = [length and length[0] // 2 + 1, bins and bins[0]]
    node.outputs[0].shape = ir.Shape([d or context.new_symbolic_dim() for d in known])
