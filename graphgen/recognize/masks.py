"""What masks mean, however they were computed: truth values as lines over rows and columns."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen.graph import constant, is_float, present_inputs, produced_by, scalar
from graphgen.match import Miss
from graphgen.operands import Array
from graphgen.recognize.axes import Dims, View, leaves
from graphgen.recognize.sampled import Sampled
from graphgen.value import graph_value

CAUSAL, ALWAYS = "causal", "always"


def meaning(value: ir.Value, view: View, target: Dims) -> str:
    """What a truth value over rows and columns keeps: the past, a window, everything; or ""."""
    number = repeated_scalar(value)
    if number is not None:
        return ALWAYS if number else ""
    own, full = ([leaves(d) for d in dims[-2:]] for dims in (view.dims, target))
    known = constant(value)
    if known is not None and own == full and known.shape[-1] == known.shape[-2]:
        return CAUSAL if np.all(known == np.tril(np.ones(known.shape[-2:], bool))) else ""
    node = graph_value(view.source).producer()
    difference = None if node is None else _difference(node, view)
    if difference is None:
        return ""
    slopes, least = difference
    if least >= 0 and all(slope > 0 for slope in slopes.values()):
        return ALWAYS
    if own != full:
        return ""
    if (slopes, least) == ({-2: 1, -1: -1}, 0):
        return CAUSAL
    return f"window of {least + 1}" if slopes == {-2: -1, -1: 1} and least >= 0 else ""


Line: TypeAlias = tuple[dict[int, int], int]
"""A number for each place: its slope along axes counted from the end, and its value at 0."""


def _difference(node: ir.Node, view: View) -> Line | None:
    """What a comparison requires to be at least 0."""
    signs = {"GreaterOrEqual": (1, 0), "Greater": (1, -1), "LessOrEqual": (-1, 0), "Less": (-1, -1)}
    if node.domain or node.op_type not in signs:
        return None
    a, b = (line_of(x) for x in node.inputs)
    sign, extra = signs[node.op_type]
    if a is None or b is None:
        return None
    slopes, start = _sum(a, b, -1)
    return _moved(({i: sign * c for i, c in slopes.items()}, sign * start + extra), view)


def line_of(value: ir.Value | None) -> Line | None:
    """Whole numbers that grow evenly along axes: ranges, and sums with them."""
    view = View.of(value) if value is not None else None
    if view is None:
        return None
    source = graph_value(view.source)
    known, node = constant(source), source.producer()
    if known is not None:
        steps = np.diff(known.reshape(-1))
        if known.dtype.kind != "i" or not known.size or np.any(steps != steps[:1]):
            return None
        long = [i - known.ndim for i, d in enumerate(known.shape) if d > 1]
        if len(long) > 1:
            return None
        return _moved(({i: int(steps[0]) for i in long}, int(known.reshape(-1)[0])), view)
    if node is None or node.domain:
        return None
    if node.op_type == "Range":
        start, step = (scalar(node.inputs[i]) for i in (0, 2))
        if start is None or step is None or start % 1 or step % 1:
            return None
        return _moved(({-1: int(step)}, int(start)), view)
    if node.op_type in ("Add", "Sub"):
        a, b = (line_of(x) for x in node.inputs)
        both = None if a is None or b is None else _sum(a, b, 1 if node.op_type == "Add" else -1)
        return None if both is None else _moved(both, view)
    if node.op_type == "Cast" and not is_float(source):
        inner = line_of(node.inputs[0])
        return None if inner is None else _moved(inner, view)
    return None


def _sum(a: Line, b: Line, sign: int) -> Line:
    slopes = {i: a[0].get(i, 0) + sign * b[0].get(i, 0) for i in {*a[0], *b[0]}}
    return {i: c for i, c in slopes.items() if c}, a[1] + sign * b[1]


def _moved(line: Line, view: View) -> Line | None:
    """A line along a view's source as one along the view."""
    places = {tuple(leaves(d)): i - len(view.dims) for i, d in enumerate(view.dims) if d}
    moved = {tuple(leaves(view.axes[i])): slope for i, slope in line[0].items()}
    if any(axes and axes not in places for axes in moved):
        return None
    return {places[axes]: slope for axes, slope in moved.items() if axes}, line[1]


def repeated_scalar(value: ir.Value | None) -> float | None:
    """The number that a constant, a repeated one, or a product of such consists of, or None."""
    while (node := produced_by(value, "Expand", "Reshape", "Unsqueeze", "Cast")) is not None:
        value = node.inputs[0]
    if (product := produced_by(value, "Mul")) is not None:
        factors = [repeated_scalar(x) for x in product.inputs]
        return None if None in factors else math.prod(x for x in factors if x is not None)
    filled = produced_by(value, "ConstantOfShape")
    if filled is not None:
        fill = filled.attributes.get("value")
        return 0.0 if fill is None else float(fill.as_tensor().numpy().reshape(-1)[0])
    array = constant(value)
    if array is None or array.size == 0 or array.dtype.kind not in "fiub":
        return None
    return float(array.reshape(-1)[0]) if np.all(array == array.reshape(-1)[0]) else None


def asks_for_hidden_rows(
    condition: ir.Value | None, scores: ir.Value | None, axis: int, *, answer: bool
) -> bool:
    """Whether a condition is `answer` where all scores along an axis are -infinity, and only there.

    It is computed for rows of two scores, of all numbers that such a question may take for another.
    """
    if scores is None or scores.shape is None or len(scores.shape) < 2:
        return False
    numbers = np.array([-np.inf, np.finfo(np.float32).min, -1e9, 0.0, 1.0, np.inf, np.nan])
    rows = np.stack(np.meshgrid(numbers, numbers), -1).reshape(
        -1, *[1] * (len(scores.shape) - 2), 2
    )
    rows = np.moveaxis(rows, -1, axis)
    infinite = [use.node for use in scores.uses() if use.node.op_type == "IsInf"]
    known = {node.outputs[0]: np.isinf(rows) for node in infinite if not node.attributes}
    made = Sampled({}, {scores: rows, **known})(condition)
    hidden = np.isneginf(rows).all(axis, keepdims=True)
    return made is not None and np.array_equal(made, hidden == answer)


_MASKING = frozenset(
    "Add And Cast Concat ConstantOfShape CumSum Equal Expand Flatten Gather GatherND "
    "Greater GreaterOrEqual Identity Less LessOrEqual Max Min Mul Not Or Range Reshape Shape Slice "
    "Squeeze Sub Transpose Trilu Unsqueeze Where".split()
)
"""The operators that compare places, or look them up, and move the results."""

_ALL = 1 << 62  # a window without an end
_MOST = 4200  # tokens whose squares are tried


def causal_window(
    mask: ir.Value | None, dims: Sequence[Any], *, causal: bool = False
) -> tuple[ir.Value | None, int | None] | Miss:
    """The padding (B, S) that a mask hides, or None, and its window, or None; or what it is else.

    `dims` are B, T and P: the mask is for the last T of S = P + T tokens, and keeps column s of row
    t if s ≤ t + P and, with a window W, s > t + P - W, and if the padding is not 0. P may be None:
    there is no past. It is computed at sizes below and above every constant in its computation.
    `causal` says that the attention hides what is behind row t by itself.
    """
    nodes, read, pending = set[ir.Node](), set[ir.Value](), [mask]
    while pending:
        value = pending.pop()
        node = None if value is None else value.producer()
        if node is None or node in nodes:
            continue
        if node.domain or node.op_type not in _MASKING:
            return Miss(f"its mask is made by {node.op_type}, which is no comparison of places")
        nodes.add(node)
        if node.op_type != "Shape":
            pending += node.inputs
            read.update(v for v in present_inputs(node) if v.is_graph_input())
    numbers = [a for n in nodes for v in n.inputs if (a := constant(v)) is not None and a.size]
    largest = max((int(m) for a in numbers if (m := np.abs(a).max()) < 1 << 24), default=0)
    padding, *others = (*read, None)
    if others not in ([], [None]):
        given = ", ".join(sorted(str(v.name) for v in read))
        return Miss(f"its mask depends on {given}, wanted one input, that of the padding")
    if mask is None and not causal:
        return Miss("it has no mask")
    names = [d for d in dims if d is not None]
    if any(isinstance(d, int) for d in names[1:]) or (padding and padding.shape is None):
        return Miss(f"its sizes are fixed, {[str(d) for d in names]}, wanted symbols")
    without = dims[2] is None
    if without and largest > _MOST:
        return Miss(f"its mask compares places with {largest}, too many to try without a past")
    tried = ((2, 2, largest + 3), (3, 4, 3), (2, 1, 5), (3, min(largest, 60) + 3, 0))
    tried = ((2, largest + 3, 0), (3, 4, 0), (2, 1, 0), (3, 9, 0)) if without else tried
    window, random = None, np.random.default_rng(0)
    for b, t, p in tried:
        b = dims[0] if isinstance(dims[0], int) else b
        ones = np.ones((b, t + p), np.int64)
        hidden = random.integers(0, 2, ones.shape) if window is not None else ones
        sizes = {str(d): n for d, n in zip(dims, (b, t, p), strict=True) if d is not None}
        if padding is not None and padding.shape is not None:
            sizes.setdefault(str(padding.shape[-1]), t + p)
        columns, rows = np.arange(t + p), np.arange(t)[:, None] + p
        keep = (columns <= rows) if causal else np.ones((t, t + p), bool)
        if mask is not None:
            made = _kept(mask, {} if padding is None else {padding: hidden}, sizes)
            if made is None or made.ndim > 4:
                name = "the sizes" if padding is None else f"{padding.name} and the sizes"
                return Miss(f"its mask cannot be computed of {name} alone")
            keep = keep & made
        if window is None:  # what the last row keeps, with more columns than any constant
            window = int(keep[..., -1, :].sum() // max(1, keep[..., -1, 0].size))
            window = _ALL if window == t + p else window
        inside = (columns <= rows) & (columns > rows - window)
        wanted = inside if padding is None else inside & (hidden != 0)[:, None, None, :]
        if not window or not _same(keep, wanted):
            kept = f"of {t} tokens after {p} its mask keeps {int(keep.sum())} of {keep.size} places"
            return Miss(f"{kept}, wanted the {int(wanted.sum())} of all before, or of a window")
    return padding, None if window == _ALL else window


def _same(a: Array, b: Array) -> bool:
    """Whether two masks are the same where they are repeated to the same sizes."""
    try:
        return bool(np.all(np.equal(*np.broadcast_arrays(a, b))))
    except ValueError:
        return False


def _kept(value: ir.Value, known: dict[ir.Value, Array], sizes: dict[str, int]) -> Array | None:
    """What a mask keeps if inputs have these sizes."""
    array = Sampled(sizes, known)(value)
    if array is None or array.dtype == bool:
        return array
    return np.equal(array, 0) if np.all((array == 0) | (array < -1e9)) else None
