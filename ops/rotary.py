"""Rotary position embedding: pairs of features turned by an angle that grows with the position."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.graph import (
    Miss,
    Rewrite,
    constant,
    is_float,
    present_inputs,
    produced_by,
)
from graphgen.infer import describe, same_dim, same_shape
from graphgen.op import Array, Operand, adopt, composite, find_op, read_attributes
from graphgen.ops.axes import View, leaves, size_of
from graphgen.ops.elementwise import neg
from graphgen.ops.layout import (
    arange,
    concat,
    dim,
    expand,
    gather,
    rank,
    reshape,
    slice_,
    split,
    unsqueeze,
)


@composite("RotaryEmbedding")
def rotary_embedding(
    x: Any,
    cos_cache: Any,
    sin_cache: Any,
    position_ids: Any = None,
    *,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
) -> Operand:
    """(x₀ cos - x₁ sin, x₁ cos + x₀ sin) for each pair of features (Su et al., arXiv 2104.09864).

    x is (B, H, T, D), or (B, T, H·D) with `num_heads`. Of the first `rotary_embedding_dim`
    features of a head (0: of all), x₀ are the first half and x₁ the second, or the even and the
    odd ones if `interleaved`; the others stay. The caches are (B, T, R/2), or (P, R/2) of which
    `position_ids`, int64 (B, T), chooses rows.
    """
    flat = rank(x) == 3
    if flat and not num_heads:
        raise GraphgenError("RotaryEmbedding: a three-dimensional operand needs num_heads")
    if not isinstance(x.shape[-1], int):
        raise GraphgenError(
            f"RotaryEmbedding: x is {describe(x)}; its features must be known before the run"
        )
    size = x.shape[-1] // (num_heads or 1) if flat else x.shape[-1]
    cos, sin = (
        unsqueeze(c if position_ids is None else gather(c, position_ids), [2 if flat else 1])
        for c in (cos_cache, sin_cache)
    )
    y, rest = (reshape(x, [dim(x, 0), dim(x, 1), num_heads, size]) if flat else x), []
    turned = rotary_embedding_dim or size
    if turned < size:
        y, *rest = split(y, [turned, size - turned], axis=-1, num_outputs=2)
    lead = [dim(y, i) for i in range(3)]
    if interleaved:
        pairs = reshape(y, [*lead, turned // 2, 2])
        a, b = (gather(pairs, np.asarray(i), axis=-1) for i in (0, 1))
    else:
        a, b = split(y, axis=-1, num_outputs=2)
    halves = (a * cos - b * sin, b * cos + a * sin)
    if interleaved:
        y = reshape(concat(*(unsqueeze(h, [-1]) for h in halves), axis=-1), [*lead, turned])
    else:
        y = concat(*halves, axis=-1)
    y = concat(y, *rest, axis=-1) if rest else y
    return reshape(y, [dim(x, i) for i in range(rank(x))])  # refuses angles of other positions


@composite("RotaryEmbedding", domain="com.microsoft")
def _by_position(
    x: Any,
    position_ids: Any,
    cos_cache: Any,
    sin_cache: Any,
    *,
    interleaved: int | None = None,
    num_heads: int | None = None,
    rotary_embedding_dim: int | None = None,
) -> Operand:
    """The same in older runtimes, where the caches have a row for each position."""
    return rotary_embedding(
        x,
        cos_cache,
        sin_cache,
        position_ids,
        interleaved=interleaved or 0,
        num_heads=num_heads,
        rotary_embedding_dim=rotary_embedding_dim or 0,
    )


def rotary(x: Operand, cos: Operand, sin: Operand, **attributes: Any) -> Operand:
    """`rotary_embedding` with caches that broadcast to (B, T, R/2): kernels want all of it."""
    axis = 1 if rank(x) == 3 else 2
    caches = [
        c
        if all(map(same_dim, c.shape[:2], (x.shape[0], x.shape[axis])))
        else expand(c, [dim(x, 0), dim(x, axis), 1])
        for c in (cos, sin)
    ]
    return rotary_embedding(x, *caches, **attributes)


@rotary_embedding.spelling
def _(x: Any, cos: Any, sin: Any, position_ids: Any = None, **attributes: Any) -> Operand:
    """The caches expanded."""
    return None if position_ids is not None else rotary(x, cos, sin, **attributes)


@rotary_embedding.spelling
def _(x: Any, cos: Any, sin: Any, position_ids: Any = None, **attributes: Any) -> Operand:
    """By position: without positions, each place in the batch is a row of the caches."""
    if attributes["rotary_embedding_dim"] and not attributes["num_heads"]:
        attributes["num_heads"] = x.shape[1]  # that kernel asks for it
    if position_ids is None:
        b, t = dim(x, 0), dim(x, 1 if rank(x) == 3 else 2)
        cos, sin = (reshape(expand(c, [b, t, 1]), [-1, c.shape[-1]]) for c in (cos, sin))
        position_ids = reshape(arange(dim(cos, 0)), [b, t])
    return _by_position(x, position_ids, cos, sin, **attributes)


@rotary_embedding.recognise
def _(node: ir.Node) -> Rewrite | Miss | None:
    """A rotation in any spelling, with the features that stay or without.

    Anchored at its last sum, or at what joins the parts. Made of x, cos and sin by products, sums
    and moves alone, it is a polynomial in their elements: the body, if both are equal at whole
    numbers chosen at random (Schwartz, doi 10.1145/322217.322225).
    """
    sums, ends = _sums(node)
    pairs = [_factors(v) for n in sums for v in n.inputs]
    found = [pair for pair in pairs if pair is not None]
    angles = list(dict.fromkeys(angle for _, angle in found))
    if not sums or len(found) < len(pairs) or len(angles) != 2:
        return None
    x, y = _source([*ends, *(factor for factor, _ in found)]), node.outputs[0]
    shape = [] if x is None or x.shape is None else list(x.shape)
    for tail, interleaved, (cos, sin) in itertools.product((1, 2), (0, 1), (angles, angles[::-1])):
        if x is None or len(shape) <= tail or not all(isinstance(d, int) for d in shape[-tail:]):
            continue
        try:
            turn = Rotation(x, (cos, sin), tail, interleaved)
            sign = turn.sign_of(y)
        except (GraphgenError, ValueError, IndexError):
            continue  # other shapes would fit
        if sign:
            return replace(turn.rewrite(y, sign), anchor=sums[0])
    joined = any(produced_by(v, "Concat") for v in (y, *(factor for factor, _ in found)))
    told = "features and angles of a rotation that is not (x0 cos - x1 sin, x1 cos + x0 sin)"
    return Miss(told, sums[0]) if joined and x is not None else None


def _sums(node: ir.Node) -> tuple[list[ir.Node], list[ir.Value]]:
    """The sums of two products that `node` is or joins, and what it joins with them."""
    if node.op_type != "Concat":
        return ([node] if all(map(_product, node.inputs)) else []), []
    sums, ends = [], []
    for value in present_inputs(node):
        apart = produced_by(value, "Unsqueeze", "Reshape")
        made_by = produced_by(value if apart is None else apart.inputs[0], "Add", "Sub")
        if made_by is not None and all(map(_product, made_by.inputs)):
            sums.append(made_by)
        else:
            ends.append(value)
    return sums, ends


def _product(value: ir.Value | None) -> ir.Node | None:
    """The product that a value is, whatever its sign."""
    negated = produced_by(value, "Neg")
    return produced_by(value if negated is None else negated.inputs[0], "Mul")


def _factors(value: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """The two factors of a product; the second is repeated along some axis."""
    node = _product(value)
    if node is None or len(present_inputs(node)) != 2:
        return None
    shape = node.outputs[0].shape
    large, small = sorted(present_inputs(node), key=lambda v: not same_shape(v.shape, shape))
    return None if small.shape is None or same_shape(small.shape, shape) else (large, small)


_MOVES = frozenset("Concat Gather Neg Reshape Slice Split Squeeze Transpose Unsqueeze".split())
_ANGLES = _MOVES | frozenset(
    "Add Sub Mul Div Cos Sin Cast Expand GatherElements Identity Range Shape Tile".split()
)


def _moved(node: ir.Node | None) -> list[ir.Value]:
    """What a node moves, alike in runs of all sizes: those that only a run knows stay."""
    if node is None or node.domain or node.op_type not in _MOVES:
        return []
    values, others = present_inputs(node), []
    if node.op_type != "Concat":
        values, others = values[:1], values[1:]
    sizes = [
        None if v.shape is None else sorted(str(d) for d in v.shape if not isinstance(d, int))
        for v in (*values, node.outputs[0])
    ]
    fixed = all(s == sizes[0] for s in sizes) and all(constant(v) is not None for v in others)
    return values if fixed else []


def _source(values: list[ir.Value]) -> ir.Value | None:
    """The nearest value of which all the others are made by moves."""
    parents: dict[ir.Value, list[ir.Value]] = {}
    level = values
    while level:
        parents |= {v: _moved(v.producer()) for v in level}
        level = [p for v in level for p in parents[v] if p not in parents]

    def covers(x: ir.Value) -> bool:
        seen, pending = {x}, list(values)
        while pending:
            value = pending.pop()
            if value not in seen:
                seen.add(value)
                if not parents[value]:
                    return False
                pending += parents[value]
        return True

    return next(filter(covers, parents), None)


class Samples:
    """What values are where those that they are made of are whole numbers at random."""

    def __init__(self, through: Callable[[ir.Node], bool]) -> None:
        self.through = through
        self.known: dict[ir.Value, Array] = {}
        self.ends: list[ir.Value] = []
        self.sizes: dict[str, int] = {}
        self.random = np.random.default_rng(0)

    def of(self, value: ir.Value) -> Array:
        """The value's sample; constants are what they are."""
        if value in self.known:
            return self.known[value]
        node, array = value.producer(), constant(value)
        op = find_op(node) if node is not None else None
        if array is None and node is not None and op is not None and self.through(node):
            given = [None if v is None else self.of(v) for v in node.inputs]
            results = op(*given, **read_attributes(op, node))
            array = results[value.index() or 0] if isinstance(results, tuple) else results
        if array is None:
            array = self.numbers(value)
            self.ends.append(value)
        self.known[value] = array.astype(float) if is_float(value) else array
        return self.known[value]

    def numbers(self, value: ir.Value) -> Array:
        """Whole numbers in the shape of a value; small ones where they may be positions."""
        sizes = [
            d if isinstance(d, int) else self.sizes.setdefault(str(d), 2 + len(self.sizes))
            for d in value.shape or ()
        ]
        numbers = self.random.integers(1, 2**20 if is_float(value) else 4, sizes)
        return numbers.astype(float) if is_float(value) else numbers


@dataclass
class Rotation:
    """x, whose last `tail` axes are the features, turned by angles: their cos and sin."""

    x: ir.Value
    angles: Sequence[ir.Value]
    tail: int
    interleaved: int

    def __post_init__(self) -> None:
        samples = Samples(
            lambda n: (
                bool(_moved(n))
                or (n.op_type in _ANGLES and (n.op_type != "Cast" or is_float(n.outputs[0])))
            )
        )
        self.doubled = []
        for angle in self.angles:
            c = samples.of(angle)
            self.doubled.append(np.array_equal(c, self._twice(self._firsts(c))))
        self.ends = samples.ends if any(self.doubled) else list(self.angles)

    def sign_of(self, y: ir.Value) -> int:
        """1 where y is x turned, -1 where it is turned the other way, else 0."""
        samples = Samples(lambda n: n.op_type in ("Add", "Sub", "Mul") or bool(_moved(n)))
        x = samples.known[self.x] = samples.numbers(self.x)
        lead, features = x.shape[: -self.tail], math.prod(x.shape[-self.tail :])
        caches = []
        for angle, doubled in zip(self.angles, self.doubled, strict=True):
            c = samples.numbers(angle)
            c = self._firsts(c) if doubled else c
            samples.known[angle] = self._twice(c) if doubled else c
            caches.append(np.broadcast_to(c, (*lead, c.shape[-1])).reshape(1, -1, c.shape[-1]))
        cos, sin = caches
        x, given = (a.reshape(1, 1, -1, features) for a in (x, samples.of(y)))
        how = {"interleaved": self.interleaved, "rotary_embedding_dim": 2 * cos.shape[-1]}
        for sign in (1, -1):
            if np.array_equal(given, rotary_embedding(x, cos, sign * sin, **how)):
                return sign
        return 0

    def _firsts(self, c: Operand) -> Operand:
        """The first of each two equal elements along the last axis of a cache."""
        joined = produced_by(c, "Concat") if isinstance(c, ir.Value) else None
        axis = joined.attributes["axis"].as_int() if joined is not None else 0
        if joined is not None and axis % rank(c) == rank(c) - 1 and not self.interleaved:
            a, *others = joined.inputs
            if a is not None and others == [a]:
                return adopt(a)
        end, step = (2**31, 2) if self.interleaved else (c.shape[-1] // 2, 1)
        return slice_(c, [0], [end], [-1], [step])

    def _twice(self, c: Array) -> Array:
        return np.repeat(c, 2, -1) if self.interleaved else np.concatenate([c, c], -1)

    def rewrite(self, y: ir.Value, sign: int) -> Rewrite | Miss:
        """The operator on (B, T, H·D) where x lies like that, else on (B, H, T, D)."""
        view = View.of(adopt(self.x))
        assert view is not None and y.shape is not None and self.x.shape is not None
        lead = [leaves(d) for d in view.dims[: -self.tail]]
        feature = [axis for d in view.dims[-self.tail :] for axis in leaves(d)]
        angles = [c.shape for c in self.angles if c.shape is not None]
        n = len(lead)
        varies = [i for i in range(-n, 0) if any(len(s) + i > 0 and s[i - 1] != 1 for s in angles)]
        rows = (varies or [i for i in range(-n, 0) if not lead[i]] or [-n])[-1]
        others = [i for i in range(-n, 0) if i != rows]
        batch = lead[others.pop(0)] if rows != -n else []
        heads = [axis for i in others for axis in lead[i]]
        if set(others).intersection(varies) or not all(isinstance(a.size, int) for a in heads):
            return Miss("the angles differ between heads, or the number of heads is not known")
        own = [axis for d in view.axes for axis in leaves(d)]
        flat = [axis for axis in own if axis in [*lead[rows], *heads]][:1] != heads[:1] or not heads
        split_ = [batch, heads, lead[rows], feature]
        target = [batch, lead[rows], [*heads, *feature]] if flat else split_
        x = view.arranged(target, [view], repeat=True)
        if x is None:
            return Miss("a size that a layout needs is not known before the run")
        caches: list[Any] = []
        for angle, doubled in zip(self.angles, self.doubled, strict=True):
            at = View.of(adopt(angle))
            assert at is not None
            places = [i for i in ((-n, rows) if batch else (rows,)) if len(at.dims) + i > 0]
            dims = [[], [], *(at.dims[i - 1] for i in places), at.dims[-1]][-3:]
            c = at.arranged(dims, [at])
            if c is None:
                return Miss("a size that a layout needs is not known before the run")
            c = self._firsts(c) if doubled else c
            caches.append(neg(c) if caches and sign < 0 else c)
        features, turned = size_of(feature), 2 * caches[0].shape[-1]
        result = rotary(
            x,
            *caches,
            interleaved=self.interleaved,
            num_heads=size_of(heads) if flat else None,
            rotary_embedding_dim=turned if turned < features else 0,
        )
        result = View(result, target, target).arranged([*lead, feature], [view])
        if result is None:
            return Miss("a size that a layout needs is not known before the run")
        if len(y.shape) > n + 1:
            result = reshape(result, [*(dim(result, i) for i in range(n)), *y.shape[n:]])
        told = f"{size_of(heads)} heads, {turned} of {features} features"
        told += ", even and odd" if self.interleaved else ", by halves"
        return Rewrite(result, [view.source, *self.ends], told)
