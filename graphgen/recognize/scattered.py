"""Assignments to slices: exporters write them as a scatter to places that are all in order."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphgen.graph import constant, present_inputs, produced_by
from graphgen.infer import same_dim, same_shape
from graphgen.match import Rewrite
from graphgen.op import canonical
from graphgen.ops.elementwise import add
from graphgen.ops.layout import scatter_nd
from graphgen.ops.padding import pad
from graphgen.recognize.masks import line_of
from graphgen.value import Value


@canonical(scatter_nd)
def stored(node: ir.Node) -> Rewrite | None:
    """x[:, :] = y is y, x[a:a] = y is x, and x[a:, b:] += y is x plus y between zeros."""
    x, places, updates = present_inputs(node)
    if places.shape is not None and 0 in places.shape.dims[:-1]:
        return Rewrite(Value(x), [x], "nothing is stored", may_share=True)
    if node.attributes.get_string("reduction", "none") != "none" or x.shape is None:
        return None
    starts = _starts(places, len(x.shape))
    if starts is None or places.shape is None or updates.shape is None:
        return None
    region = ir.Shape(places.shape[:-1])
    if not same_shape(region, updates.shape):
        return None
    if not any(starts) and same_shape(region, x.shape):
        return Rewrite(Value(updates), [updates], "all elements are stored", may_share=True)
    sum_ = produced_by(updates, "Add")
    for i, read in enumerate(sum_.inputs if sum_ is not None else ()):
        more = None if sum_ is None else sum_.inputs[1 - i]
        if more is None or not _reads(read, x, starts) or not _is(read, region):
            continue
        pads = _pads(x.shape, more, region, starts)
        if pads is not None:
            result = add(Value(x), pad(Value(more), pads))
            return Rewrite(result, [x, more], "a sum with a slice as one with all", may_share=True)
    return None


def _is(value: ir.Value | None, shape: ir.Shape) -> bool:
    return value is not None and same_shape(value.shape, shape)


def _starts(places: ir.Value, rank: int) -> list[int] | None:
    """The first index of each axis, if the tuples count all axes from there on in order."""
    if places.shape is None or len(places.shape) != rank + 1 or places.shape[-1] != rank:
        return None
    known = constant(places)
    if known is not None:
        first = known.reshape(-1, rank)[:1]
        counted = np.moveaxis(np.indices(known.shape[:-1]), 0, -1) + first
        good = first.size and first.min() >= 0 and np.array_equal(known, counted)
        return [int(start) for start in first[0]] if good else None
    join = produced_by(places, "Concat")
    if (
        join is None
        or len(join.inputs) != rank
        or join.attributes["axis"].as_int() not in (-1, rank)
    ):
        return None
    starts = []
    for i, index in enumerate(join.inputs):
        line = line_of(index)
        one = same_dim(places.shape[i], 1)
        if line is None or line[0] != ({} if one else {i - rank - 1: 1}) or line[1] < 0:
            return None
        starts.append(line[1])
    return starts


def _reads(value: ir.Value | None, x: ir.Value, starts: Sequence[int]) -> bool:
    """Whether a value is a part of x that begins at `starts`."""
    found = [0] * len(starts)
    while value is not x:
        node = produced_by(value, "Slice")
        given = [] if node is None else [constant(v) for v in present_inputs(node)[1:]]
        if node is None or len(given) < 3 or any(v is None for v in given):
            return False
        first, _, axes, *steps = (v.reshape(-1).tolist() for v in given if v is not None)
        if any(n != 1 for step in steps for n in step) or min(first, default=0) < 0:
            return False
        for axis, start in zip(axes, first, strict=True):
            found[axis] += start
        value = node.inputs[0]
    return found == [*starts]


def _pads(
    shape: ir.Shape, more: ir.Value, region: ir.Shape, starts: Sequence[int]
) -> list[int] | None:
    """How many zeros go before and after `more` along each axis; None if that is unknown."""
    after = []
    for axis, (size, length, start) in enumerate(zip(shape, region, starts, strict=True)):
        if not start and same_dim(size, length):
            after.append(0)
            continue
        place = axis - len(shape) + len(more.shape or ())
        if more.shape is None or place < 0 or not same_dim(more.shape[place], length):
            return None
        if not isinstance(size, int) or not isinstance(length, int) or size < start + length:
            return None
        after.append(size - start - length)
    first = len(shape) - len(more.shape or ())
    return [*starts[first:], *after[first:]]
