"""How rotary position embeddings are recognized, as polynomials in their elements."""

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.graph import constant, is_float, present_inputs, produced_by
from graphgen.infer import describe, same_shape
from graphgen.match import Miss, Rewrite
from graphgen.measure.reference import evaluate_node
from graphgen.op import find_op, is_a
from graphgen.operands import Array
from graphgen.ops.elementwise import mul, neg
from graphgen.ops.layout import cast, dim, expand, rank, reshape, slice_
from graphgen.ops.rotary import rotary_embedding, rotate
from graphgen.recognize.axes import UNKNOWN_SIZE, View, leaves, size_of
from graphgen.rounded import rest_below
from graphgen.value import Tensor, Value


@rotary_embedding.recognize("Add", "Sub", "Concat")
def _(node: ir.Node) -> Rewrite | Miss | None:
    """A rotation however it is written, with or without features that stay.

    It is anchored at its last sum, or at what joins the parts. If it is made from x, cos and sin
    only by products, sums and moves, it is a polynomial in their elements. It is the body if both
    are equal at random whole numbers (Schwartz, doi 10.1145/322217.322225).
    """
    sums, ends = _sums(node)
    missed = None
    for pairs in itertools.product(*(_factors(v) for n in sums for v in n.inputs)) if sums else ():
        features, angles = [x for x, _ in pairs], list(dict.fromkeys(angle for _, angle in pairs))
        x = _source([*ends, *features]) if len(angles) == 2 else None
        turn = None if x is None else Rotation.of(x, x, angles, node.outputs[0])
        laid = next((v for v in features if same_shape(v.shape, node.outputs[0].shape)), None)
        if turn is None and x is not None and laid is not None and laid is not x:
            turn = Rotation.of(laid, x, angles, node.outputs[0])  # x in two layouts
        if turn is not None:
            return replace(turn.rewrite(node.outputs[0]), anchor=sums[0])
        if x is not None and any(produced_by(v, "Concat") for v in (node.outputs[0], *features)):
            given = f"{describe(x)} and the angles {' and '.join(map(describe, angles))}"
            wanted = "(x0 cos - x1 sin, x1 cos + x0 sin)"
            missed = Miss(f"made of {given}, but it is not {wanted}", sums[0])
    return missed


def _sums(node: ir.Node) -> tuple[list[ir.Node], list[ir.Value]]:
    """The sums of two products that `node` is or joins, and what else it joins."""
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


def _factors(value: ir.Value | None) -> list[tuple[ir.Value, ir.Value]]:
    """The factors of a product: one with its shape, one that may be an angle, in either order."""
    node = _product(value)
    given = present_inputs(node) if node is not None else []
    return [
        (x, angle)
        for x, angle in itertools.permutations(given)
        if node is not None and same_shape(x.shape, node.outputs[0].shape) and angle.shape
    ]


_MOVES = frozenset("Cast Concat Gather Neg Reshape Slice Split Squeeze Transpose Unsqueeze".split())


_ANGLES = _MOVES | frozenset(
    "Add Sub Mul Div Cos Sin Cast Expand GatherElements Identity Range Shape Tile".split()
)


def _moved(node: ir.Node | None) -> list[ir.Value]:
    """What a node moves, the same for all sizes of a run: sizes that only a run knows stay.

    A cast to a wider dtype changes no number: the runtime puts one before each float16 operand.
    Signs are moved as well.
    """
    if node is not None and is_a(node, mul):
        x, signs = present_inputs(node)
        known = constant(signs)
        is_sign = known is not None and known.ndim < 2 and np.all(np.abs(known) == 1.0)
        return [x] if is_sign and same_shape(x.shape, node.outputs[0].shape) else []
    if node is None or node.domain or node.op_type not in _MOVES:
        return []
    values, others = present_inputs(node), []
    if node.op_type == "Cast" and not _is_wider(node.outputs[0].dtype, values[0].dtype):
        return []
    if node.op_type != "Concat":
        values, others = values[:1], values[1:]
    sizes = [
        None if v.shape is None else sorted(str(d) for d in v.shape if not isinstance(d, int))
        for v in (*values, node.outputs[0])
    ]
    fixed = all(s == sizes[0] for s in sizes) and all(constant(v) is not None for v in others)
    return values if fixed else []


def _is_wider(dtype: ir.DataType | None, other: ir.DataType | None) -> bool:
    """Whether `dtype` holds all floats of another."""
    floats = all(d is not None and d.is_floating_point() for d in (dtype, other))
    return floats and np.can_cast(other.numpy(), dtype.numpy(), "safe")  # type: ignore[union-attr]


def _source(values: list[ir.Value]) -> ir.Value | None:
    """The nearest value from which moves make all the others."""
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
    """Values, computed with random whole numbers for those that they are made from.

    With `angles`, two values are equal only if they are for all such numbers: tables are random,
    except for equal columns, and one-to-one functions replace cos and sin.
    """

    def __init__(self, through: Callable[[ir.Node], bool], *, angles: bool = False) -> None:
        self.through, self.angles = through, angles
        self.known: dict[ir.Value, Array] = {}
        self.ends: list[ir.Value] = []
        self.sizes: dict[str, int] = {}
        self.random = np.random.default_rng(0)

    def of(self, value: ir.Value) -> Array:
        """The value's sample."""
        if value in self.known:
            return self.known[value]
        node, array = value.producer(), constant(value)
        known = node is not None and find_op(node) is not None
        if array is None and node is not None and known and self.through(node):
            given = [None if v is None else self.of(v) for v in node.inputs]
            if self.angles and node.op_type in ("Cos", "Sin") and given[0] is not None:
                array = given[0] * 3.0 + 1.0 if node.op_type == "Cos" else given[0] * 5.0 + 2.0
            else:
                array = evaluate_node(node, given)[value.index() or 0]
        elif array is None:
            array = self.numbers(value)
            self.ends.append(value)
        elif self.angles and is_float(value) and array.size > 1:
            flat = array.reshape(-1, array.shape[-1])
            _, alike = np.unique(flat, axis=1, return_inverse=True)
            array = np.asarray(self.random.integers(1, 2**20, array.shape))[..., alike.ravel()]
        self.known[value] = array.astype(float) if is_float(value) else array
        return self.known[value]

    def numbers(self, value: ir.Value, *, few: bool = False) -> Array:
        """Whole numbers in the shape of a value; small ones if they may be indices.

        With `few`, if all rows behave the same, only the last size and 1 are kept. Min(64, n), as
        of a table that is cut, is n wherever the graph runs.
        """
        last = len(value.shape or ()) - 1
        sizes = [
            d
            if isinstance(d, int) and (d == 1 or i == last or not few)
            else self.sizes.setdefault(rest_below(str(d)) or str(d), 2 + len(self.sizes))
            for i, d in enumerate(value.shape or ())
        ]
        if is_float(value):
            return self.random.integers(1, 2**20, sizes).astype(float)
        return self.random.integers(0, 2, sizes)


def _is_step(node: ir.Node) -> bool:
    """Whether samples of angles pass through a node: not where positions become numbers."""
    kinds = {is_float(v) for v in (*node.inputs[:1], *node.outputs) if v is not None}
    begins = len(kinds) > 1 if node.op_type == "Cast" else node.op_type == "Range" and True in kinds
    return node.op_type in _ANGLES and not begins


@dataclass
class Rotation:
    """x, whose last `tail` axes are the features, turned by angles, given as cos and sin.

    With `doubled`, there is an angle for each feature, not for each pair. `sign` is -1 if x is
    turned the other way.
    """

    x: ir.Value
    angles: Sequence[ir.Value]
    doubled: Sequence[bool]
    interleaved: bool
    tail: int
    sign: int
    ends: list[ir.Value]

    @classmethod
    def of(
        cls, x: ir.Value, source: ir.Value, angles: Sequence[ir.Value], y: ir.Value
    ) -> "Rotation | None":
        """How y is x turned by these angles, or None. All is made of the elements of `source`."""
        few = x is source and _goes_by_rows(y, {x, *angles})
        pairs = any(map(_is_one_of_pairs, angles))
        for interleaved in (pairs, not pairs):
            with suppress(GraphgenError, ValueError, IndexError):  # from shapes that do not fit
                above, doubled = Samples(_is_step, angles=True), []
                for angle in angles:
                    c = above.of(angle)
                    half = np.asarray(_firsts(c, interleaved))
                    doubled.append(np.array_equal(c, _twice(half, interleaved)))
                ends = above.ends if any(doubled) else list(angles)
                samples = Samples(lambda n: n.op_type in ("Add", "Sub", "Mul") or bool(_moved(n)))
                samples.known[source], caches = samples.numbers(source, few=few), []
                features = samples.of(x)
                for angle, twice in zip(angles, doubled, strict=True):
                    c = samples.numbers(angle, few=few)
                    caches.append(np.asarray(_firsts(c, interleaved)) if twice else c)
                    samples.known[angle] = _twice(caches[-1], interleaved) if twice else c
                given = samples.of(y)
                tails = (2, 1) if pairs else (1, 2)
                for tail, order, sign in itertools.product(tails, (1, -1), (1, -1)):
                    sizes = x.shape[-tail:] if x.shape is not None else []
                    if len(features.shape) <= tail or not all(isinstance(d, int) for d in sizes):
                        continue
                    alike = [
                        c[..., 0] if tail == 2 and _is_one_of_pairs(angle) else c
                        for c, angle in zip(caches, angles, strict=True)
                    ]
                    if _is_turned(given, features, alike[::order], tail, interleaved, sign):
                        return cls(
                            x, angles[::order], doubled[::order], interleaved, tail, sign, ends
                        )
        return None

    def rewrite(self, y: ir.Value) -> Rewrite | Miss:
        """The operator on (B, T, H·D) if x has that layout, else on (B, H, T, D)."""
        view = View.of(self.x)
        assert view is not None and y.shape is not None and self.x.shape is not None
        lead = [leaves(d) for d in view.dims[: -self.tail]]
        feature = [axis for d in view.dims[-self.tail :] for axis in leaves(d)]
        views = [View.of(c) for c in self.angles]
        angles = [c.shape.dims for c in self.angles if c.shape is not None]
        for i, angle in enumerate(self.angles):
            at = views[i]
            if at is not None and self.tail == 2 and _is_one_of_pairs(angle):
                views[i], angles[i] = replace(at, dims=at.dims[:-1]), angles[i][:-1]
        if not all(isinstance(shape[-1], int) for shape in angles):
            given = " and ".join(map(describe, self.angles))
            return Miss(f"{UNKNOWN_SIZE}: the angles are {given}")
        n = len(lead)
        varies = [i for i in range(-n, 0) if any(len(s) + i > 0 and s[i - 1] != 1 for s in angles)]
        rows = (varies or [i for i in range(-n, 0) if not lead[i]] or [-n])[-1]
        others = [i for i in range(-n, 0) if i != rows]
        batch = lead[others.pop(0)] if rows != -n else []
        heads = [axis for i in others for axis in lead[i]]
        if set(others).intersection(varies) or not all(isinstance(a.size, int) for a in heads):
            given = " and ".join(map(describe, self.angles))
            wanted = "wanted the same for all heads, of a known number"
            return Miss(f"x is {describe(self.x)}, the angles are {given}; {wanted}")
        own = [axis for d in view.axes for axis in leaves(d)]
        flat = [axis for axis in own if axis in [*lead[rows], *heads]][:1] != heads[:1] or not heads
        split_ = [batch, heads, lead[rows], feature]
        target = [batch, lead[rows], [*heads, *feature]] if flat else split_
        x = view.arranged(target, [view], repeat=True)
        if x is None:
            return Miss(f"{UNKNOWN_SIZE}: x is {describe(self.x)}")
        x = x if y.dtype is None or self.x.dtype == y.dtype else cast(x, to=y.dtype)
        caches: list[Any] = []
        for at, doubled in zip(views, self.doubled, strict=True):
            assert at is not None
            places = [i for i in ((-n, rows) if batch else (rows,)) if len(at.dims) + i > 0]
            dims = [[], [], *(at.dims[i - 1] for i in places), at.dims[-1]][-3:]
            c = at.arranged(dims, [at])
            if c is None:
                return Miss(f"{UNKNOWN_SIZE}: x is {describe(self.x)}")
            if c.shape[-1] != size_of(at.dims[-1]):  # one angle, repeated for all features
                c = expand(c, [*[1] * (rank(c) - 1), size_of(at.dims[-1])])
            c = _firsts(c, self.interleaved) if doubled else c
            caches.append(neg(c) if caches and self.sign < 0 else c)
        features, turned = size_of(feature), 2 * caches[0].shape[-1]
        result = rotate(
            x,
            *caches,
            interleaved=int(self.interleaved),
            num_heads=size_of(heads) if flat else None,
            rotary_embedding_dim=turned if turned < features else 0,
        )
        laid = View(result, target, target).arranged([*lead, feature], [view])
        if laid is None:
            return Miss(f"{UNKNOWN_SIZE}: x is {describe(self.x)}")
        if len(y.shape) > n + 1:
            rest: Any = y.shape[n:]
            laid = reshape(laid, [*(dim(laid, i) for i in range(n)), *rest])
        reason = f"{size_of(heads)} heads, {turned} of {features} features"
        reason += ", even and odd" if self.interleaved else ", by halves"
        return Rewrite(laid, [view.source, *self.ends], reason)


def _is_one_of_pairs(angle: ir.Value) -> bool:
    """Whether an angle may be one for both of a pair, as of complex numbers: (T, R/2, 1)."""
    return angle.shape is not None and len(angle.shape) > 1 and angle.shape[-1] == 1


def _goes_by_rows(y: ir.Value, ends: set[ir.Value]) -> bool:
    """Whether y is made from `ends` element by element, except along the last axis."""
    pending = [y]
    while pending:
        value = pending.pop()
        node = value.producer() if value not in ends else None
        if node is None or node.op_type in ("Add", "Cast", "Sub", "Mul", "Neg"):
            pending += [] if node is None else present_inputs(node)
            continue
        axes = [attr.as_int() for name, attr in node.attributes.items() if name == "axis"]
        if node.op_type == "Slice" and len(node.inputs) > 3:
            axes = [int(a) for a in constant(node.inputs[3])]  # type: ignore[union-attr]
        last = len(value.shape or ()) - 1
        if node.op_type not in ("Slice", "Split", "Concat") or axes not in ([last], [-1]):
            return False
        pending += present_inputs(node)[: None if node.op_type == "Concat" else 1]
    return True


def _is_turned(
    given: Array, x: Array, caches: Sequence[Array], tail: int, interleaved: bool, sign: int
) -> bool:
    """Whether the body gives `given`; most differences show in the first rows."""
    lead, size = x.shape[:-tail], math.prod(x.shape[-tail:])
    if given.size != x.size or caches[0].shape[-1] != caches[1].shape[-1]:
        return False
    try:
        cos, sin = (
            np.broadcast_to(c, (*lead, c.shape[-1])).reshape(1, -1, c.shape[-1]) for c in caches
        )
    except ValueError:
        return False
    how: dict[str, Any] = {
        "interleaved": int(interleaved),
        "rotary_embedding_dim": 2 * cos.shape[-1],
    }
    given, x = (a.reshape(1, 1, -1, size) for a in (given, x))
    return how["rotary_embedding_dim"] <= size and all(
        np.array_equal(
            given[:, :, :n], rotary_embedding(x[:, :, :n], cos[:, :n], sign * sin[:, :n], **how)
        )
        for n in (16, x.shape[2])
    )


def _firsts(c: Tensor, interleaved: bool) -> Tensor:
    """The first of every two equal elements along the last axis of a cache."""
    joined = produced_by(c, "Concat")
    axis = joined.attributes["axis"].as_int() if joined is not None else 0
    if joined is not None and axis % rank(c) == rank(c) - 1 and not interleaved:
        a, *others = joined.inputs
        if a is not None and others == [a]:
            return Value(a)
    end, step = (2**31, 2) if interleaved else (c.shape[-1] // 2, 1)
    return slice_(c, [0], [end], [-1], [step])


def _twice(c: Array, interleaved: bool) -> Array:
    return np.repeat(c, 2, -1) if interleaved else np.concatenate([c, c], -1)
