"""For how much a batch counts in the mean of a loss: what the loss divides its sum by.

The loss of joined batches with losses l and weights w is Σ w l / Σ w. A loss that is a sum over the
samples has no weight: the losses of batches add up. Both are read in the graph of the loss, by how
each value depends on the samples; what cannot be read there is not guessed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.errors import GraphgenError
from graphgen.export.named_losses import LABELS
from graphgen.graph import constant, is_float, parameters, scalar
from graphgen.infer import is_named
from graphgen.op import find_op, is_a, read_attributes
from graphgen.ops.layout import _cast_like, _reshape
from graphgen.record import Tape
from graphgen.subgraphs import read_by
from graphgen.traits import Trait, has
from graphgen.value import Tensor, adopt, graph_value

Term: TypeAlias = tuple[Tensor | ir.Value, Any]
"""A loss and its weight, None if the function that made it does not say it."""

_ROUNDING = 1e-6
"""What may be added to a divisor so that it is not 0."""


@dataclass(frozen=True)
class Kind:
    """How a value depends on the samples of a batch.

    `state` is "rows" if each sample has a part of it, "sum" if it is a sum of such parts,
    "inverse" for a constant over such a sum, "sizes" if only sizes are read, "given" if it depends
    on an input that is not divided into samples, else "fixed". `over` has what it is divided by.
    `scaled` says that a number may stand for what it should be divided by.
    """

    state: Literal["rows", "sum", "inverse", "sizes", "given", "fixed"]
    over: dict[object, ir.Value] = field(default_factory=dict)
    scaled: bool = False


_CASTS = (ops.cast, _cast_like, ops.identity)

_ROWS, _SUM, _FIXED = Kind("rows"), Kind("sum"), Kind("fixed")


class LossWeights:
    """Reads the weights of losses that are recorded on a tape, of outputs of a graph."""

    def __init__(self, graph: ir.Graph, tape: Tape) -> None:
        self._tape, self._weights = tape, {*parameters(graph).values()}
        self._inputs = [*graph.inputs, *tape.inputs.values()]
        self._samples = _sizes_of_samples(self._inputs)
        self._kinds: dict[ir.Value, Kind | None] = {}
        self._keys: dict[ir.Value, int] = {}
        self._alike: dict[object, int] = {}
        self._read = 0
        for value in (*self._inputs, *graph.initializers.values()):
            self._kinds[value] = self._of_input(value, value.is_initializer())
        for node in graph:
            self._classify(node, inside=True)

    def of(self, terms: Sequence[Term]) -> list[ir.Value] | None:
        """The weights of a sum of losses: none if it is a sum over samples, None if unknown.

        With several, a batch has to count for the same share of each. A loss may come with its
        weight, which is then not looked for.
        """
        kinds = list[Kind | None]()
        for loss, given in terms:
            if given is None:
                kinds.append(self._kind(graph_value(loss)))
            else:
                again = self._again(self._tape.operand(given))
                if again is None:
                    raise GraphgenError(
                        "artifacts: the weight of the loss depends on weights of the model, or on "
                        "random numbers; calculate it from inputs alone"
                    )
                kinds.append(Kind("sum", {self._key(again): _from(again, 0.0)}))
        found = reduce(_added, kinds)
        static = any(isinstance(size, int) for size in self._samples)
        if found is None or found.state != "sum":
            return None
        return None if not found.over and (found.scaled or static) else [*found.over.values()]

    def _noted(self, value: ir.Value | None) -> Kind | None:
        """What is noted about a value; nothing if the node that makes it has to be read closer."""
        if value is None:
            return _FIXED
        return self._kinds.get(value, _FIXED if value.producer() is None else None)

    def _of_input(self, value: ir.Value, fixed: bool) -> Kind | None:
        if fixed:
            return _FIXED
        count = self._count(value)
        return {0: Kind("given"), 1: _ROWS}.get(count)

    def _count(self, value: ir.Value, unnamed: int = -1) -> int:
        """How many axes of a value are of samples; `unnamed` if that is not known.

        Where one is, an axis without a name is no second one.
        """
        if value.shape is None:
            return unnamed
        found = sum(self._is_of_samples(i, d) for i, d in enumerate(value.shape))
        return found if found or all(map(is_named, value.shape)) else unnamed

    def _is_of_samples(self, axis: int, size: int | ir.SymbolicDim) -> bool:
        if isinstance(size, int) or not is_named(size):
            return axis == 0 and size in self._samples
        return not self._samples.isdisjoint(map(str, size.free_symbols()))

    def _axis(self, value: ir.Value | None) -> int | None:
        """The first axis of samples."""
        shape = () if value is None or value.shape is None else value.shape
        return next((i for i, d in enumerate(shape) if self._is_of_samples(i, d)), None)

    def _classify(self, node: ir.Node, *, inside: bool) -> None:
        """Note how the results of a node depend on samples, where that is plain.

        Outputs of the model are taken to keep samples apart, and what is `inside` of it, too, but
        for what works along their axis, numbers that may stand for how many count, and what is
        calculated with them.
        """
        read = node.inputs[:1] if is_a(node, _cast_like) else read_by(node)  # else only a dtype
        given = [self._noted(x) for x in read]
        states = {None if k is None else k.state for k in given}
        plain = all(k is not None and not k.over and not k.scaled for k in given)
        plain = plain and states.isdisjoint(("sum", "inverse"))
        for value in node.outputs:
            count = self._count(value, unnamed=1 if inside and "rows" in states else -1)
            kind: Kind | None
            if has(node, Trait.SHAPE):
                kind = Kind("sizes")
            elif count == 1 and inside:
                apart = not self._crosses(node, inside=True)
                apart = apart and not self._is_scaled(node, self._is_number_or_row)
                if not apart and not value.is_graph_output():
                    continue
                kind = _ROWS
            elif not plain or count not in (0, 1):
                continue  # `_kind` looks closer
            elif count == 1:
                if self._crosses(node) or self._is_scaled(node, lambda _: True):
                    continue
                if "rows" not in states and not is_a(node, ops.expand, ops.constant_of_shape):
                    continue  # the place of a sample is not the same in a joined batch
                kind = _ROWS
            elif "rows" in states:
                continue
            else:
                order: Sequence[Any] = ("sizes", "given", "fixed")
                kind = Kind(next((s for s in order if s in states), "fixed"))
            self._kinds[value] = kind

    def _crosses(self, node: ir.Node, *, inside: bool = False) -> bool:
        """Whether a node works along the axis of samples, or may.

        `inside` of the model, views and operators that nobody knows are taken not to.
        """
        op, x = find_op(node), node.inputs[0] if node.inputs else None
        if op is None or has(node, Trait.CONTROL_FLOW):
            return not inside
        if is_a(node, ops.einsum):
            return not inside and self._mixes(node)
        if is_a(node, ops.concat):
            x = next((y for y in node.inputs if self._axis(y) is not None), x)
        place = self._axis(x)
        if x is None or place is None:
            return False
        if is_a(node, _reshape, ops.flatten):
            return not inside and (place, self._axis(node.outputs[0])) != (0, 0)
        if has(node, Trait.LAYOUT):
            return False
        if is_a(node, ops.gather_nd, ops.scatter_nd):
            return node.attributes.get_int("batch_dims", 0) <= place
        rank = len(x.shape or ())
        found = [*range(rank - 2, rank)] if is_a(node, ops.trilu) else list[int]()
        for name in ("axis", "axes"):
            attribute = node.attributes.get(name)
            axes: Any = op.attributes.get(name) if attribute is None else attribute.value
            if name in op.inputs and op.inputs.index(name) < len(node.inputs):
                given = node.inputs[op.inputs.index(name)]
                axes = None if given is None else constant(given)
                if given is not None and axes is None:
                    return True
            found += [] if axes is None else np.reshape(axes, -1).tolist()
        return place in [axis % rank for axis in found]

    def _mixes(self, node: ir.Node) -> bool:
        """Whether a product of einsum's does not keep the samples of all operands together."""
        terms, arrow, result = node.attributes.get_string("equation", "").partition("->")
        letters = set[str]()
        for term, x in zip(terms.replace(" ", "").split(","), node.inputs, strict=True):
            if (place := self._axis(x)) is not None:
                letters.add(term[place] if "." not in term else ".")
        return not arrow or len(letters) != 1 or letters.isdisjoint(result)

    def _is_scaled(self, node: ir.Node, counts: Callable[[ir.Value], bool]) -> bool:
        """Whether rows are calculated with what may be, or was divided by, how many count.

        Of values about which nothing is noted, or only that they are of sizes, those that `counts`
        accepts may be.
        """
        scales = is_a(node, ops.mul, ops.div)
        for value in node.inputs:
            if value is not None and is_float(value):
                kind = self._noted(value)
                if (kind is None or kind.state == "sizes") and counts(value):
                    return True
                if kind is not None and kind.state == "given" and scales and _is_number(value):
                    return True
        return False

    def _is_number_or_row(self, value: ir.Value) -> bool:
        """Whether a value of the model may be how many count, or rows divided by that."""
        if self._noted(value) is None:
            return _is_number(value) or self._count(value) == 1
        size = self._size(value)
        return size is not None and self._of_size(size) != _FIXED

    def _kind(self, value: ir.Value | None) -> Kind | None:
        """How a value depends on samples; None if that is not known."""
        for node in self._tape.nodes[self._read :]:
            self._classify(node, inside=False)
        self._read = len(self._tape.nodes)
        known = self._noted(value)
        if value is None or value.producer() is None:
            return known
        if known is None or known.state == "sizes":
            known = self._kinds[value] = self._looked(value)
        return known

    def _looked(self, value: ir.Value) -> Kind | None:
        """What `_kind` finds by the node that makes a value."""
        node = value.producer()
        assert node is not None
        if (size := self._size(value)) is not None:
            return self._of_size(size)
        op, given = find_op(node), [x for x in node.inputs if x is not None]
        if op is None or not given:
            return None
        if is_a(node, ops.reduce_sum, ops.reduce_mean):
            return self._reduced(node)
        if is_a(node, ops.mul, ops.div):
            return self._scaled(node)
        kinds = [self._kind(x) for x in given]
        if is_a(node, ops.add, ops.sub):
            first, second = kinds
            return _added(first, second)
        if is_a(node, ops.neg, Trait.LAYOUT) and not is_a(node, ops.expand):
            return None if self._crosses(node) else kinds[0]
        if is_a(node, ops.cast, _cast_like) and (is_float(value) or not is_float(given[0])):
            return None if value.dtype == ir.DataType.BOOL else kinds[0]
        if self._count(value) == 1 and not self._crosses(node):
            apart = [k for k in kinds if k is not None and not k.over]
            states = {k.state for k in apart}
            plain = "rows" in states and states <= {"rows", "fixed", "given"}
            scaled = any(k.scaled for k in apart)
            return Kind("rows", {}, scaled) if len(apart) == len(kinds) and plain else None
        if op.composite and not op.together and len(node.outputs) == 1:
            with self._tape.inside():
                made = op.expand(node.inputs, read_attributes(op, node))
            return self._kind(graph_value(made))
        return None

    def _reduced(self, node: ir.Node) -> Kind | None:
        x, value = node.inputs[0], node.outputs[0]
        kind = self._kind(x)
        if kind is None or kind.state != "rows" or self._count(value) == 1 or x is None:
            return kind
        if is_a(node, ops.reduce_sum):
            return replace(kind, state="sum")
        axes = constant(node.inputs[1]) if len(node.inputs) > 1 else np.arange(len(x.shape or ()))
        if kind.over or axes is None or x.shape is None:
            return None
        axes = axes if axes.size else np.arange(len(x.shape))
        size = prod((x.shape[axis] for axis in axes.reshape(-1).tolist()), start=1)
        weight = self._made(size)
        return None if weight is None else Kind("sum", {("size", str(size)): weight})

    def _scaled(self, node: ir.Node) -> Kind | None:
        """What a product or a quotient is."""
        x, y = node.inputs
        assert x is not None and y is not None
        divides = is_a(node, ops.div)
        y, least = _unguarded(y) if divides else (y, 0.0)
        a, b = self._kind(x), self._kind(y)
        if a is None or b is None:
            return None
        if not divides and (b.state in ("sum", "inverse") or a.state in ("fixed", "given")):
            a, b, x, y = b, a, y, x
        if b.state in ("fixed", "given"):
            counts = b.state == "given" or isinstance(self._size(y), ir.SymbolicDim)
            return replace(a, scaled=a.scaled or b.scaled or (counts and _is_number(y)))
        if divides and b == _SUM:
            weight = self._again(y)
            if weight is None or a.over or a.state not in ("rows", "sum", "fixed"):
                return None
            over: dict[object, ir.Value] = {(self._key(weight), least): _from(weight, least)}
            return Kind("inverse" if a.state == "fixed" else a.state, over)
        if not divides and a.state == "inverse" and b.state in ("rows", "sum") and not b.over:
            return replace(b, over=a.over)
        if a.state == b.state == "rows" and not b.over:
            return replace(a, scaled=a.scaled or b.scaled)
        if not divides and a.state == b.state == "rows" and not a.over:
            return replace(b, scaled=a.scaled or b.scaled)
        return None

    def _size(self, value: ir.Value) -> int | ir.SymbolicDim | None:
        """The size that an integer, or such a number, stands for, if it does."""
        node = value.producer()
        if is_float(value) and node is not None and is_a(node, ops.cast):
            value = node.inputs[0] or value
        known = [*(self._tape.context.get_symbolic_value(value) or ())]
        return known[0] if len(known) == 1 and not is_float(value) else None

    def _of_size(self, size: int | ir.SymbolicDim) -> Kind | None:
        if isinstance(size, int):
            return _FIXED
        if not is_named(size):
            return None
        mine = self._samples & {*map(str, size.free_symbols())}
        expression: Any = size._expr
        factors = expression.args if expression.is_Mul else (expression,)
        plain = [f for f in factors if str(f) in mine]
        others = [f for f in factors if mine & {*map(str, f.free_symbols)} and f not in plain]
        if not mine:
            return _FIXED
        return _SUM if len(plain) == 1 and not others else None

    def _made(self, size: int | ir.SymbolicDim) -> ir.Value | None:
        """A size as a number, from the sizes of inputs."""
        sizes = dict[str, Any]()
        for value in self._inputs:
            for axis, d in enumerate(value.shape or ()):
                if not isinstance(d, int) and is_named(d):
                    sizes.setdefault(str(d), (value, axis))

        def calculated(expression: Any) -> Any:
            if expression.is_Integer:
                return int(expression)
            if expression.is_Symbol and str(expression) in sizes:
                value, axis = sizes[str(expression)]
                return ops.dim(adopt(value), axis)
            parts = [calculated(part) for part in expression.args]
            if not parts or None in parts or not (expression.is_Add or expression.is_Mul):
                return None
            first, *others = parts
            return sum(others, first) if expression.is_Add else prod(others, start=first)

        found = size if isinstance(size, int) else calculated(size._expr)
        if found is None or isinstance(found, int):
            return None if found is None else self._tape.constant(np.float32(found))
        return graph_value(ops.cast(found, to=np.float32))

    def _again(self, value: ir.Value) -> ir.Value | None:
        """A number from inputs alone: without what lends only its size; None if it cannot be.

        Neither weights of the model nor random numbers may change it.
        """
        if (size := self._size(value)) is not None:
            return self._made(size)
        makers, node = _makers(value), value.producer()
        op = None if node is None else find_op(node)
        read = {x for maker in makers if not has(maker, Trait.SHAPE) for x in read_by(maker)}
        random = any(has(maker, Trait.RANDOM) or is_a(maker, ops.dropout) for maker in makers)
        if random or not read.isdisjoint(self._weights):
            return None
        if node is None or not any(has(maker, Trait.SHAPE) for maker in makers):
            return value
        if op is None or len(node.outputs) > 1:
            return None
        again = [None if x is None else self._again_as(x) for x in node.inputs]
        if again.count(None) > [*node.inputs].count(None):
            return None
        made: Tensor = op.call([*map(adopt, again)], read_attributes(op, node))
        return self._tape.operand(made)

    def _again_as(self, value: ir.Value) -> ir.Value | None:
        """The same, of the value's own dtype and rank: a size is made as a number of float32."""
        made = value if constant(value) is not None else self._again(value)
        if made is None or made is value or value.dtype is None:
            return made
        x = ops.cast(adopt(made), to=value.dtype)
        alone = value.shape is not None and len(value.shape) == 1 and made.shape == ()
        return self._tape.operand(ops.unsqueeze(x, [0]) if alone else x)

    def _key(self, value: ir.Value) -> int:
        """What is equal for values that are calculated alike."""
        if value not in self._keys:
            node, content = value.producer(), constant(value)
            key: tuple[object, ...] = (value,)
            if node is not None:
                given = [None if x is None else self._key(x) for x in node.inputs]
                attributes = sorted((name, str(a.value)) for name, a in node.attributes.items())
                index = node.outputs.index(value)
                key = (node.op_identifier(), str(attributes), index, *given)
            elif content is not None:
                key = (value.dtype, content.shape, content.tobytes())
            self._keys[value] = self._alike.setdefault(key, len(self._alike))
        return self._keys[value]


def _sizes_of_samples(inputs: Sequence[ir.Value]) -> set[int | str]:
    """What inputs call their number of samples: their first size, if no other input has it later.

    That of the first input, whose samples several processes share, is one in any case.
    """
    dims = [[*value.shape] for value in inputs if value.shape and value.name != LABELS]
    first = [one[0] for one in dims[:1]]
    later = {str(d) for one in dims for d in one[1:]}
    first += [one[0] for one in dims if not isinstance(one[0], int) and str(one[0]) not in later]
    return {d if isinstance(d, int) else str(d) for d in first}


def _unguarded(value: ir.Value) -> tuple[ir.Value, float]:
    """What a divisor is where it is not made larger so that it is not 0, and from where on."""
    node = value.producer()
    if node is None:
        return value, 0.0
    given = [x for x in node.inputs if x is not None]
    if is_a(node, *_CASTS):
        return _unguarded(given[0])
    if is_a(node, ops.where) and (test := given[0].producer()) is not None:
        tested, other = (*test.inputs, None)[:2]
        kept = given[2] if is_a(test, ops.equal) else given[1]
        if is_a(test, ops.equal, ops.greater) and kept is tested and _constant(other) == 0.0:
            return kept, 0.0
    for x, least in zip(given, map(_constant, given[1::-1]), strict=False):
        if least is not None and len(given) == 2:
            if is_a(node, ops.maximum, ops.clip) and least > 0.0:
                return x, least
            if is_a(node, ops.add) and 0.0 <= least <= _ROUNDING:
                return x, 0.0
    return value, 0.0


def _constant(value: ir.Value | None) -> float | None:
    """The number that a constant is, maybe of another dtype."""
    while value is not None and (node := value.producer()) is not None and is_a(node, *_CASTS):
        value = node.inputs[0]
    return scalar(value)


def _from(weight: ir.Value, least: float) -> ir.Value:
    """A weight as float32; NaN, which is no weight, where it is above 0 and below `least`."""
    x: Tensor = ops.cast(adopt(weight), to=np.float32)
    if least:
        known = ops.logical_or(ops.equal(x, 0.0), ops.greater_or_equal(x, least))
        x = ops.where(known, x, np.float32(np.nan))
    return graph_value(x)


def _is_number(value: ir.Value) -> bool:
    return value.shape is not None and all(d == 1 for d in value.shape)


def _makers(value: ir.Value) -> set[ir.Node]:
    """The nodes whose elements a value depends on."""
    found, pending = set[ir.Node](), [value]
    while pending:
        node = pending.pop().producer()
        if node is not None and node not in found:
            found.add(node)
            pending += () if has(node, Trait.SHAPE) else read_by(node)
    return found


def _added(a: Kind | None, b: Kind | None) -> Kind | None:
    """What a sum of two values is: a mean that a constant is added to is one."""
    if a is None or b is None:
        return None
    if b.state in ("fixed", "given"):
        a, b = b, a
    if a.state in ("fixed", "given"):
        return b if b.over or b.state in ("fixed", "given") else None
    if a.state != b.state or bool(a.over) != bool(b.over):
        return None
    if a.state == "rows" and a.over.keys() != b.over.keys():
        return None
    return Kind(a.state, a.over | b.over, a.scaled or b.scaled)
