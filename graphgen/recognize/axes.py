"""Axes followed through layout operators: which part of one index is which part of another.

A dimension is a list of axes. Merging dimensions joins their lists, splitting one refines an axis
into parts, a transpose puts lists in order; a dimension of size 1 is the empty list.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import onnx_ir as ir

from graphgen.forms import TEXTS
from graphgen.graph import produced_by, scalar
from graphgen.infer import is_named, is_rounded, same_dim
from graphgen.ops.layout import dim, expand, reshape, swap_of, transpose, unsqueeze
from graphgen.record import current_tape
from graphgen.rounded import FileSizes, bounded
from graphgen.traits import TRAITS, Trait
from graphgen.value import Tensor, Value, graph_value

UNKNOWN_SIZE = "a size that a layout needs is not known before the run"
"""Why a view could not be arranged."""

LAYOUT = tuple(name for (_, name), traits in TRAITS.items() if Trait.LAYOUT in traits)
"""The names of the operators that give their operand in another shape or order."""


class Axis:
    """A factor of an index: its size, and what it was split into or found equal to.

    `first` is the size before a mask that may be longer.
    """

    def __init__(
        self, size: int | ir.SymbolicDim, first: int | ir.SymbolicDim | None = None
    ) -> None:
        self.size = size
        self.first = size if first is None else first
        self.parts: list[Axis] = []

    def leaves(self) -> "list[Axis]":
        """Its parts, as far as they are known."""
        return [leaf for part in self.parts for leaf in part.leaves()] or [self]


Dim: TypeAlias = list[Axis]
Dims: TypeAlias = list[Dim]


def leaves(dimension: Dim) -> Dim:
    """The axes of one dimension, split and unified as far as known."""
    return [leaf for axis in dimension for leaf in axis.leaves()]


def size_of(dimension: Dim) -> int:
    """The size of a dimension whose axes are all known; 1 if it has none."""
    return math.prod(axis.size for axis in leaves(dimension) if isinstance(axis.size, int))


def size_text(dimension: Dim) -> str:
    """The size of a dimension in words, `batch·heads` if it has several axes."""
    return "·".join(str(axis.size) for axis in leaves(dimension)) or "1"


def is_told(size: int | ir.SymbolicDim) -> bool:
    """Whether a size says which others it differs from in a sum that runs.

    `same_size` does not know: it takes no sum for granted, in which sizes differ only where one is
    1. There, Min(2, n) is n, as `broadcast_partner` finds, and Min(m, n) may be 1.
    """
    return is_named(size) and not is_rounded(size)


def is_one_beside(size: int | ir.SymbolicDim, other: int | ir.SymbolicDim) -> bool:
    """Whether Min(1, n) is 1 beside another size in a sum that runs, or 0 as the other is."""
    several = isinstance(other, int) and other > 1
    match bounded(str(size)):
        case "min", "1", rest:
            return rest == str(other) or (several and rest.isidentifier())
    return False


def is_always(size: int | ir.SymbolicDim, other: int | ir.SymbolicDim) -> bool:
    """Whether two sizes are one wherever the graph runs, though their names do not show it."""
    tape = current_tape()
    context = None if tape is None else tape.context
    return isinstance(context, FileSizes) and context.are_equal(size, other)


def is_repeated_to(size: int | ir.SymbolicDim, other: int | ir.SymbolicDim) -> bool:
    """Whether a size is the other one or 1 wherever the graph runs, as a product shows."""
    tape = current_tape()
    context = None if tape is None else tape.context
    return isinstance(context, FileSizes) and context.is_repeated_to(size, other)


def fresh(shape: ir.Shape) -> Dims:
    """A separate axis for each dimension that is not 1."""
    return [[] if d == 1 else [Axis(d)] for d in shape]


def unify(a: Dim, b: Dim, *, equal: bool = False) -> bool:
    """Make two dimensions the same index, splitting axes as needed; False if they may differ.

    `equal` says that their sizes are known to be equal as a whole.
    """
    left, right = leaves(a), leaves(b)
    while left and right:
        if equal and 1 in (len(left), len(right)):
            one, other = (left[0], right) if len(left) == 1 else (right[0], left)
            if other != [one]:
                one.parts = other
            return one not in other or other == [one]
        if not (_unify_end(left, right, 0) or (equal and _unify_end(left, right, -1))):
            return False
    return not left and not right


def _unify_end(left: Dim, right: Dim, end: int) -> bool:
    """Unify the first or last axes of both, and remove them; the larger one is split for that."""
    x, y = left[end], right[end]
    if x is y or same_dim(x.size, y.size) or same_dim(x.first, y.first):
        if x is not y:
            x.parts = [y]
        del left[end], right[end]
        return True
    if not (isinstance(x.size, int) and isinstance(y.size, int)):
        return False
    small, large = sorted((x.size, y.size))
    if large % small:
        return False
    sizes = [small, large // small] if end == 0 else [large // small, small]
    (x if x.size == large else y).parts = [Axis(size) for size in sizes]
    left[:], right[:] = leaves(left), leaves(right)
    return True


def regroup(dims: Dims, shape: ir.Shape) -> Dims | None:
    """The axes of a reshape's result, or None if it is unknown what becomes of them.

    Equal sizes at either end are the same axis; in the remaining middle, one dimension takes all
    axes, or one axis is split into all dimensions.
    """
    given = leaves([axis for d in dims for axis in d])
    wanted: Dims = [[] for _ in shape]
    open_ = [i for i, d in enumerate(shape) if d != 1]
    for end in (0, -1):
        while given and open_:
            taken = _take(given, shape[open_[end]], end)
            if not taken:
                break
            wanted[open_.pop(end)] = taken
    if len(open_) == 1:
        wanted[open_[0]] = given
    elif len(given) == 1 and open_:
        given[0].parts = [Axis(shape[i]) for i in open_]
        for i, part in zip(open_, given[0].parts, strict=True):
            wanted[i] = [part]
    elif given or open_:
        return None
    return wanted


def _take(given: Dim, size: int | ir.SymbolicDim, end: int) -> Dim:
    """Remove axes that together have `size` from one end of `given`, or none if none fit."""
    if same_dim(given[end].size, size):
        return [given.pop(end)]
    if not isinstance(size, int):
        return _take_product(given, size, end)
    count = 0
    product = 1
    while product < size and count < len(given):
        axis = given[count if end == 0 else -1 - count]
        if not isinstance(axis.size, int) or axis.size == 0:
            return []
        if size % (product * axis.size):
            rest = size // product
            if size % product or axis.size % rest:
                return []
            sizes = [rest, axis.size // rest] if end == 0 else [axis.size // rest, rest]
            axis.parts = [Axis(s) for s in sizes]
            given[:] = leaves(given)
            continue
        product *= axis.size
        count += 1
    if product != size:
        return []
    cut = given[:count] if end == 0 else given[len(given) - count :]
    given[:] = given[count:] if end == 0 else given[: len(given) - count]
    return cut


def _take_product(given: Dim, size: ir.SymbolicDim, end: int) -> Dim:
    """Remove axes from one end of `given` whose product has a name, as 2·n; or none."""
    product: int | ir.SymbolicDim = 1
    for count, axis in enumerate(given if end == 0 else given[::-1], 1):
        if not isinstance(axis.size, int) and axis.size.value is None:
            break
        product = _times(product, axis.size)
        if same_dim(product, size):
            cut = given[:count] if end == 0 else given[-count:]
            given[:] = given[count:] if end == 0 else given[:-count]
            return cut
    return []


@lru_cache(TEXTS)
def _times(a: int | ir.SymbolicDim, b: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
    """a · b, which sympy makes a text of anew each time."""
    return a * b


def factor_of(node: ir.Node) -> float:
    """The constant that a Mul or Div multiplies by, 0 if unknown; 1 for other nodes."""
    if node.op_type not in ("Mul", "Div"):
        return 1.0
    c = scalar(node.inputs[1]) or 0.0
    return c if node.op_type == "Mul" or not c else 1.0 / c


def permutation_of(transpose: ir.Node) -> list[int]:
    """The axes a Transpose puts in order: without perm, all of them reversed."""
    attr, x = transpose.attributes.get("perm"), transpose.inputs[0]
    if attr is not None:
        return list(attr.as_ints())
    return [] if x is None or x.shape is None else list(range(len(x.shape)))[::-1]


def swaps_last(transpose: ir.Node) -> bool:
    """Whether it transposes matrices: a product can read them so."""
    n = len(perm := permutation_of(transpose))
    return n > 1 and perm == swap_of(n)


def in_rank_of(value: ir.Value, dims: Dims) -> Dims:
    """The axes of a result, which a number with more dimensions puts dimensions of 1 before."""
    return [[] for _ in range(len(value.shape or ()) - len(dims))] + dims


def follow(node: ir.Node, dims: Dims) -> Dims | None:
    """The axes of a layout operator's result, from those of its input; None if unknown."""
    x, shape = node.inputs[0], node.outputs[0].shape
    if node.op_type in ("Identity", "Mul"):
        return in_rank_of(node.outputs[0], dims)
    if node.op_type == "Transpose":
        return [dims[p] for p in permutation_of(node)]
    if x is None or x.shape is None or shape is None:
        return None
    if node.op_type != "Expand":
        return regroup(dims, shape)
    padded: list[Any] = [1] * (len(shape) - len(x.shape)) + list(x.shape)
    lists: Dims = [[] for _ in range(len(shape) - len(dims))] + dims
    if any(old != 1 and not same_dim(old, new) for old, new in zip(padded, shape, strict=True)):
        return None
    return [
        [Axis(new)] if old == 1 and new != 1 else axes
        for old, new, axes in zip(padded, shape, lists, strict=True)
    ]


@dataclass
class View:
    """A value as a layout of its source: the axes of both. The source lacks repeated axes.

    `given` is the value itself, which shows the sizes that its source has merged with others.
    """

    source: Any
    axes: Dims
    dims: Dims
    factor: float = 1.0
    steps: int = 0
    given: "View | None" = None

    @classmethod
    def of(
        cls, given: ir.Value | Value, *, scaled: bool = False, repeated: bool = True
    ) -> "View | None":
        """Follow a value back through layout operators; None if its rank is unknown.

        With `scaled`, products with a positive constant are followed too, and give the factor;
        without `repeated`, Expand is not followed.
        """
        through = {*LAYOUT, *(["Mul"] if scaled else [])} - (set() if repeated else {"Expand"})
        chain, x, shared = [], graph_value(given), False
        while (node := produced_by(x, *through)) is not None:
            source = node.inputs[0]
            shared |= sum(use.node.op_type != "Shape" for use in x.uses()) > 1
            if node.op_type == "Mul" and shared:
                break  # another node needs the product anyway
            if source is None or source.shape is None or x.shape is None or factor_of(node) <= 0:
                break
            chain.append(node)
            x = source
        if x.shape is None:
            return None
        axes = fresh(x.shape)
        view = cls(Value(x), axes, axes)
        for node in reversed(chain):
            dims = follow(node, view.dims)
            if dims is None:
                y = node.outputs[0]
                if y.shape is None:
                    return None
                axes = fresh(y.shape)
                view = cls(Value(y), axes, axes)
            else:
                factor = view.factor * factor_of(node)
                view = cls(view.source, view.axes, dims, factor, view.steps + 1)
        view.given = cls(Value(graph_value(given)), view.dims, view.dims)
        return view

    def has(self, axis: Axis) -> bool:
        """Whether the source itself has this axis; else it is repeated along it."""
        return any(axis in leaves(d) for d in self.axes)

    def arranged(
        self,
        target: Dims,
        known: "Sequence[View]" = (),
        *,
        repeat: bool = False,
        at_most: int = 3,
    ) -> Tensor | None:
        """The source with the dimensions of `target`: at most a reshape, a transpose, a reshape.

        A dimension of which it has no axis gets size 1, unless `repeat` asks for more; one of which
        it has a part is repeated. `known` holds views whose sources show how often. None if the
        sizes are unknown, or if it takes more than `at_most` of these operators.
        """
        have, want = [leaves(d) for d in self.axes], [leaves(d) for d in target]
        if have == want:
            source: Tensor = self.source
            return source
        own = [axis for d in have for axis in d]
        here = [[axis for axis in d if axis in own] for d in want]
        if {id(a) for d in here for a in d} != {id(a) for a in own}:
            return None
        runs = _runs(have, here)
        order = sorted(range(len(runs)), key=lambda i: own.index(runs[i][0]))
        split = [runs[i] for i in order]
        if (split != have) + (order != sorted(order)) + (runs != here) > at_most:
            return None
        x: Any = self.source
        if split != have:  # by its own sizes: where another source has more, it may have 1
            x = _reshaped(x, have, split, known if self.given is None else [self.given])
        if x is None:
            return None
        perm = [order.index(i) for i in range(len(runs))]
        if perm != sorted(perm):
            x = transpose(x, perm=perm)
        repeated = [d if part or repeat else [] for d, part in zip(want, here, strict=True)]
        if repeated != here:
            x = _repeated(x, runs, repeated, own, [*known, self])
            runs = [[axis] for d in repeated for axis in d]
        return x if x is None or runs == repeated else _reshaped(x, runs, repeated, [*known, self])


def _runs(have: Dims, want: Dims) -> Dims:
    """The axes in the wanted order; those that stay side by side in both are one run."""
    follower = {id(a): b for d in have for a, b in itertools.pairwise(d)}
    runs: Dims = []
    for d in want:
        last: Axis | None = None
        for axis in d:
            if last is not None and follower.get(id(last)) is axis:
                runs[-1].append(axis)
            else:
                runs.append([axis])
            last = axis
    return runs


def _reshaped(x: Any, have: Dims, want: Dims, known: Sequence[View] = ()) -> Tensor | None:
    """A reshape of x, whose dimensions are `have`, or an unsqueeze, which takes an empty batch."""
    named = [d for d in have if any(not isinstance(axis.size, int) for axis in d)]
    if [d for d in want if d] == have and len(named) > 1:
        return unsqueeze(x, [i for i, d in enumerate(want) if not d])
    sizes = [size_in(d, [View(x, have, have), *known]) for d in want]
    unknown = [i for i, size in enumerate(sizes) if size is None]
    for i in [*unknown[1:], *unknown[:1]]:
        if sizes.count(None) > 1:  # one may stay: what is left
            sizes[i] = _size_of_input(want[i], [View(x, have, have), *known])
    if sizes.count(None) > 1 or 0 in [s for s in sizes if isinstance(s, int)]:
        return None  # a 0 would be another axis's size
    return reshape(x, [-1 if s is None else s for s in sizes])


def size_in(dimension: Dim, known: Sequence[View]) -> Any:
    """The size of a dimension: an int, a dimension of a known source, or None."""
    if all(isinstance(axis.size, int) for axis in dimension):
        return size_of(dimension)
    for view in known:
        for i, axes in enumerate(view.axes):
            rest = [axis for axis in leaves(axes) if axis not in dimension]
            whole = len(rest) + len(dimension) == len(leaves(axes))
            if whole and all(isinstance(axis.size, int) for axis in rest):
                size = dim(view.source, i)
                return size // size_of(rest) if rest else size
    if len(dimension) < 2:
        return None
    parts: list[Any] = [size_in([axis], known) for axis in dimension]
    return None if None in parts else math.prod(parts)


def _size_of_input(dimension: Dim, known: Sequence[View]) -> Any:
    """A size that has a name, as an input of the graph of these views has it, or None."""
    nodes = [graph_value(view.source).producer() for view in known]
    graph = next((node.graph for node in nodes if node is not None and node.graph), None)
    size = dimension[0].size if len(dimension) == 1 else 0
    for x in graph.inputs if graph is not None and is_named(size) else ():
        for i, d in enumerate(x.shape or ()):
            if same_dim(d, size):
                return dim(Value(x), i)
    return None


def _repeated(x: Any, runs: Dims, want: Dims, own: Dim, known: Sequence[View]) -> Tensor | None:
    """x with a separate axis for each of `want`, repeated along those that it lacks."""
    single = [[axis] for d in want for axis in d]
    apart = [d if d[0] in own else [] for d in single]
    x = x if runs == apart else _reshaped(x, runs, apart, known)
    sizes = [1 if d[0] in own else size_in(d, known) for d in single]
    for i, d in enumerate(single):
        sizes[i] = _size_of_input(d, known) if sizes[i] is None else sizes[i]
    return None if x is None or None in sizes else expand(x, sizes)
