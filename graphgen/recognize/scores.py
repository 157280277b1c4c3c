"""What the recognizer of attention reads from a graph: axes, scale, softcap and masks.

Scores are followed from the product of Q and K through everything that keeps their meaning: which
axis is batch, head, query, key or feature is known at each step, whatever its place.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from graphgen.graph import constant, is_float, present_inputs, produced_by, scalar
from graphgen.infer import describe, is_named, same_dim, same_shape
from graphgen.match import Miss
from graphgen.ops.elementwise import add, logical_and, logical_not, maximum, where
from graphgen.ops.layout import (
    dim,
    lowest_of,
    numpy_dtype,
    squeeze,
    transpose,
    unsqueeze,
)
from graphgen.ops.shapes import broadcast_partner, is_above_one
from graphgen.ops.softmax import softmax
from graphgen.recognize.axes import (
    LAYOUT,
    Axis,
    Dim,
    Dims,
    View,
    factor_of,
    follow,
    in_rank_of,
    is_always,
    is_one_beside,
    is_repeated_to,
    is_told,
    leaves,
    size_text,
    unify,
)
from graphgen.recognize.bounds import hides, is_low, is_tame, largest
from graphgen.recognize.masks import (
    ALWAYS,
    CAUSAL,
    asks_for_hidden_rows,
    meaning,
    repeated_scalar,
)
from graphgen.recognize.paths import Step, weights_changed
from graphgen.recognize.products import factor_in, multiplied, operand_of
from graphgen.value import Tensor, adopt, graph_value


def content_of(value: ir.Value | None) -> str:
    """A number for a remark, or the name and type of a value that is not a number."""
    number = repeated_scalar(value)
    name = "" if value is None else value.name
    return f"{name}: {describe(value)}" if number is None else f"{number:g}"


def _is_zero(value: ir.Value | None) -> bool:
    return repeated_scalar(value) == 0.0


class Scores:
    """Q Kᵀ and what is done to it until it multiplies V: axes, scale, softcap, biases, masks."""

    def __init__(self, q: View, k: View) -> None:
        self.q, self.k = q, k
        self.dims: Dims = []
        self.split: Dims = []  # those at the softmax, behind which batch and heads may be merged
        self.query: Dim = []
        self.key: Dim = []
        self.feature: Dim = []
        self.scale = q.factor * k.factor
        self.softcap = 0.0
        self.keeps: list[Term] = []
        self.guards: list[Term] = []
        self.biases: list[Term] = []
        self.factors: list[Term] = []  # of each query or key
        self.gates: list[Term] = []  # the same of the weights
        self.lows: list[float] = []
        self.bounds: dict[ir.Value, float] = {}  # if a number is low beside these scores alone
        self.sinks: ir.Value | None = None  # a score of each head more, without a value
        # Axes that a mask may lengthen, with its size and the reason not to take it.
        self.unequal: list[tuple[Dim, Any, str]] = []
        self.apart: list[Dim] = []  # batches along which an operand may have 1 and another more
        self.unknown = 0  # biases that may be that low
        self.floor = False  # whether a bias may be as low as the lowest number
        self.replaced = False  # whether numbers take the place of hidden scores: none is added
        self.shielded = False  # whether weights that are NaN, of whatever scores, become 0
        self.maxima: list[Dims] = []  # the axes of maxima that are subtracted
        self.known: list[View] = [q, k]
        self.ends: list[ir.Value] = []

    @classmethod
    def of(cls, product: ir.Node, steps: Sequence[Step], softmax: ir.Node) -> "Scores | Miss":
        """The scores of one product, at the softmax."""
        operands = enumerate(present_inputs(product))
        a, b = (operand_of(product, i, View.of(x, scaled=True)) for i, x in operands)
        if a is None or b is None or min(len(a.dims), len(b.dims)) < 2:
            given = " and ".join(map(describe, product.inputs))
            return Miss(f"Q and K are {given}, wanted two dimensions or more")
        found, alpha = cls(a, b), factor_in(product)
        if not alpha > 0:
            return Miss(f"the product of Q and K has alpha={alpha:g}, wanted a number above 0")
        found.scale *= alpha
        dims = multiplied(product, a, b, unequal=found.apart)
        if isinstance(dims, Miss):
            return dims
        found.dims = dims
        factors = [factor_of(node) for node, _ in steps]
        for i, (node, spine) in enumerate(steps):
            if not factors[i] > 0:
                before = {done.op_type for done, _ in steps[:i]} - {"Mul", "Div", "Cast", *LAYOUT}
                by = node.inputs[1 - spine]
                divides = node.op_type == "Div" and spine == 0 and repeated_scalar(by) != 0.0
                if not (node.op_type == "Mul" or divides) or before:
                    other = content_of(by)
                    return Miss(f"{node.op_type} of the scores by {other}, wanted a number above 0")
                factors[i] = 1.0
                if (problem := found._term(found.factors, node, by, divides=divides)) is not None:
                    return problem
            found.scale *= factors[i]
            later = [after.op_type for after, _ in steps[i:]]
            problem = found.take(node, spine, math.prod(factors[i:]), "Tanh" in later)
            if problem is not None:
                return problem
        found.split = found.dims
        axis = softmax.attributes["axis"].as_int() if "axis" in softmax.attributes else -1
        found.key, rows, columns = leaves(found.dims[axis]), a.dims[-2], b.dims[-1]
        found.query, found.feature = leaves(rows), leaves(a.dims[-1])
        if found.key == leaves(rows):  # K Qᵀ
            found.q, found.k, found.query = b, a, leaves(columns)
        elif found.key != leaves(columns):
            wanted = f"wanted that of {size_text(columns)} keys or of {size_text(rows)}"
            return Miss(f"the softmax is along axis {axis}, of {size_text(found.key)}; {wanted}")
        for along in found.maxima:
            if found.key not in map(leaves, along):
                given = ", ".join(map(size_text, along))
                return Miss(f"a maximum along {given} is subtracted, wanted one along the keys")
        return found

    def take(self, node: ir.Node, i: int, factor: float = 1.0, capped: bool = False) -> Miss | None:
        """What one node does to its input i, the scores, or why that is unknown.

        `factor` is what they are multiplied by from here on; `capped` says that a tanh follows.
        """
        if node.op_type == "Sub" and not capped and (along := self._maximum(node)) is not None:
            self.maxima.append(along)
            return None
        self.ends += [x for j, x in enumerate(node.inputs) if j != i and x is not None]
        if node.op_type in LAYOUT:
            dims = follow(node, self.dims)
            if dims is None:
                given = f"from {describe(node.inputs[i])} to {describe(node.outputs[0])}"
                return Miss(f"{node.op_type} {given} does not keep the axes of the scores")
            self.dims = dims
        elif node.op_type in ("Mul", "Div"):
            self.dims = in_rank_of(node.outputs[0], self.dims)
        elif node.op_type == "Tanh":
            self.softcap = factor
        elif node.op_type == "Cast" and not is_float(node.outputs[0]):
            return Miss(f"the scores are cast to {describe(node.outputs[0])}, wanted floats")
        elif node.op_type in ("Max", "Clip"):
            return self._limited(node, i, factor)
        elif node.op_type in ("Add", "Sub"):
            x, bias = node.inputs[i], node.inputs[1 - i]
            if x is not None and _is_zero(bias) and same_shape(x.shape, node.outputs[0].shape):
                return None  # 0 and -0 have one exp
            if self.bounds:
                return Miss(f"{content_of(bias)} is added after a mask, wanted before it")
            return self._add(node, bias, factor, capped)
        elif node.op_type == "Where":
            low = repeated_scalar(node.inputs[3 - i])
            if low is None or capped or not self._is_hidden(node, i, low, factor):
                given = content_of(node.inputs[3 - i]) + " before the softcap" * capped
                wanted = "wanted -infinity or as low" + " after it" * capped
                return Miss(f"Where chooses between the scores and {given}, {wanted}")
            if low * factor not in self.lows:
                self.lows.append(low * factor)
            self.replaced = True
            return self._keep(node, node.inputs[0], negated=i == 2)
        return None

    def _limited(self, node: ir.Node, i: int, factor: float) -> Miss | None:
        """A maximum with the lowest number, which only -infinity is below."""
        limits = [x for j, x in enumerate(node.inputs) if j != i and x is not None]
        low = scalar(limits[0]) if len(limits) == 1 and limits[0] in node.inputs[:2] else None
        self.floor = True
        if low is not None and is_low(low * factor, node):
            return None
        given = " and ".join(map(content_of, limits)) or "nothing"
        return Miss(f"{node.op_type} of the scores with {given}, wanted the lowest number alone")

    def _is_hidden(self, node: ir.Node, i: int, low: float, factor: float) -> bool:
        """Whether exp of a number is 0 beside scores: that of -1e9, or as their bounds show it."""
        if is_low(low * factor, node, -0.9e9):
            return True
        bound = largest(node.inputs[i], self.bounds)
        self.bounds[node.outputs[0]] = bound  # of what is not hidden
        return (low + bound) * factor < -1000

    def _maximum(self, difference: ir.Node) -> Dims | None:
        """The axes along which the scores' own maximum is subtracted, as CogView does; or None."""
        x, other = present_inputs(difference)
        view = View.of(other, repeated=False)
        made = None if view is None else produced_by(graph_value(view.source), "ReduceMax")
        axes = None if made is None else constant(made.inputs[-1])
        if view is None or made is None or axes is None or made.inputs[0] is not x:
            return None
        reduced = {int(axis) % len(self.dims) for axis in axes.reshape(-1)}
        kept = iter(view.axes)
        if made.attributes.get_int("keepdims", 1):
            kept = (d for i, d in enumerate(view.axes) if i not in reduced)
        wanted = [[] if i in reduced else leaves(next(kept)) for i in range(len(self.dims))]
        if [leaves(d) for d in view.dims] != wanted:
            return None
        return [self.dims[i] for i in reduced]

    def _add(
        self, node: ir.Node, bias: ir.Value | None, factor: float, capped: bool
    ) -> Miss | None:
        choice = produced_by(bias, "Where")
        if choice is not None and node.op_type == "Add" and not capped:
            condition, a, b = choice.inputs
            for kept, masked, negated in ((a, b, False), (b, a, True)):
                low = repeated_scalar(masked)
                if low is not None and _is_zero(kept) and is_low(low * factor, node):
                    self.lows.append(low * factor)
                    return self._keep(node, condition, negated)
        if capped:
            return Miss("a bias is added before the softcap, wanted after")
        sign = -1.0 if node.op_type == "Sub" else 1.0
        self.floor |= hides(bias, factor * sign)
        self.unknown += not is_tame(bias, factor * sign)
        return self._term(self.biases, node, bias, factor=factor * sign)

    def _keep(self, node: ir.Node, condition: ir.Value | None, negated: bool) -> Miss | None:
        if negated:
            return self._term(self.keeps, node, condition, negated=True)
        problems = [self._term(self.keeps, node, term) for term in _conjuncts(condition)]
        return next(filter(None, problems), None)

    def guard(self, node: ir.Node, i: int) -> Miss | None:
        """What a node after the softmax does: a Where must keep what the scores keep."""
        if node.op_type == "Mul":
            gate = node.inputs[1 - i]
            self.ends += [gate] if gate is not None else []
            problem = self._term(self.gates, node, gate)
            axes = [axis for term in self.gates[-1:] for d in term.view.axes for axis in leaves(d)]
            along = problem is None and {*axes} & {*leaves(self.key)}
            return weights_changed("Mul changes") if along else problem
        if node.op_type != "Where":
            return self.take(node, i)
        if self.gates:  # which may be NaN where the choice gives 0
            return weights_changed("Mul, Where change")
        asked = produced_by(node.inputs[0], "IsNaN")
        made = produced_by(node.inputs[i], softmax)
        axis = -1 if made is None else made.attributes.get_int("axis", -1)
        shields = i == 2 and asked is not None and asked.inputs[0] is node.inputs[2]
        hidden = made and asks_for_hidden_rows(node.inputs[0], made.inputs[0], axis, answer=i == 2)
        if shields or hidden:
            self.shielded |= shields
            self.guards += self.keeps if {*self.lows} == {-np.inf} and not self.floor else []
            return None
        self.ends += [value for value in node.inputs[:1] if value is not None]
        terms = [node.inputs[0]] if i == 2 else _conjuncts(node.inputs[0])
        problems = [self._term(self.guards, node, term, negated=i == 2) for term in terms]
        kept = {term.key() for term in self.keeps}
        wrong = any(term.key() not in kept for term in self.guards)
        by, own = (
            " and ".join(content_of(term.value) for term in terms) or "nothing"
            for terms in (self.guards, self.keeps)
        )
        reason = f"the weights are masked by {by}, the scores by {own}; wanted the same mask"
        return next(filter(None, problems), Miss(reason) if wrong else None)

    def _term(self, terms: "list[Term]", node: ir.Node, value: Any, **kind: Any) -> Miss | None:
        """Note a mask or bias; its axes are those of the scores next to it."""
        view, full = View.of(value), node.outputs[0].shape
        if view is None or full is None or len(view.dims) > len(self.dims):
            shape = describe(node.outputs[0])
            return Miss(f"a mask is {describe(value)} where the scores are {shape}")
        dims, loose = [*view.dims], False
        pairs = zip(reversed(view.dims), reversed(self.dims), strict=False)
        for j, (own, wanted) in enumerate(pairs, 1):
            d, size = value.shape[-j], full[-j]
            known = is_told(d) and is_told(size) and broadcast_partner((d, size)) is None
            repeated = is_above_one(size) or is_repeated_to(d, size)
            if own and known and isinstance(d, ir.SymbolicDim) and repeated:
                known, loose = False, loose or not is_always(d, size)
            scores = [axis.first for axis in leaves(wanted)]
            if own and len(scores) == 1 and same_dim(scores[0], size) and is_one_beside(d, size):
                dims[-j] = []
                continue
            if own and not unify(own, wanted, equal=not known):
                return Miss(f"a mask has {d} where the scores have {size}")
            named = own and len(scores) == 1 and is_told(d) and is_told(scores[0])
            named = named and not is_always(d, scores[0]) and not is_above_one(scores[0])
            named = named and not is_repeated_to(d, scores[0])
            # A size without a name may be 1 where a mask has a number, as a trace's biases do.
            fixed = own and len(scores) == 1 and is_above_one(d) and not is_named(scores[0])
            if fixed or (named and broadcast_partner((d, *scores)) is None):
                problem = f"a mask has {d} where the scores have {scores[0]}"
                self.unequal.append((wanted, dim(adopt(value), len(view.dims) - j), problem))
        terms.append(Term(value, replace(view, dims=dims), loose=loose, **kind))
        # A factor of one number may have put more dimensions of 1 before these.
        for axes, size in zip(map(leaves, reversed(self.dims)), reversed(full), strict=False):
            if len(axes) == 1 and not isinstance(size, int) and not same_dim(axes[0].size, size):
                axes[0].parts = [Axis(size, axes[0].first)]
        return None

    def mask(self, target: Dims) -> "Mask | Miss":
        """The mask to give to the operator, with the dimensions of `target`.

        The operator gives zeros for rows that a truth value or the lowest number hides. If the
        graph has finite numbers there, which give the mean of V, so does the mask: half the lowest.
        """
        keeps = {term.key(): term for term in self.keeps}
        guarded = keeps.keys() == {term.key() for term in self.guards}
        meanings = {
            key: "" if term.negated or term.loose else meaning(term.value, term.view, target)
            for key, term in keeps.items()
        }
        keeps = {key: term for key, term in keeps.items() if meanings[key] != ALWAYS}
        causal = [key for key in keeps if meanings[key] == CAUSAL]
        is_attribute = bool(causal) and not self.biases
        alone = is_attribute and len(causal) == len(keeps)
        words = dict.fromkeys(
            [meanings[key] or "mask" for key in keeps] + ["bias"] * bool(self.biases)
        )
        in_words = " and ".join(words) or "no mask"
        in_words += "; a score that is NaN would make NaN of its row, not 0" * self.shielded
        chosen = [term for key, term in keeps.items() if not (is_attribute and key in causal)]
        placed = [term.placed(target, self.known) for term in (*chosen, *self.biases)]
        here = [x for x in placed if x is not None]
        if len(here) < len(placed):
            given = " and ".join(describe(term.value) for term in (*chosen, *self.biases))
            return Miss(f"the mask is {given} and repeated, wanted sizes known before the run")
        keep = reduce(logical_and, here[: len(chosen)]) if chosen else None
        bias = reduce(add, here[len(chosen) :]) if self.biases else None
        fixed = all(term.shows(self.key, lowest_of(self.q.source)) for term in self.biases)
        # The sum of two lowest numbers is -infinity: what they leave of a row is not tracked.
        once = len(self.lows) <= 1 and all(map(np.isfinite, self.lows))
        exact = bool(keeps or self.floor) and not self.guards and once
        if exact and not is_attribute and numpy_dtype(self.q.source).itemsize > 2:
            lowest = lowest_of(self.q.source) / 2
            if bias is not None and (self.floor or not fixed):
                bias = maximum(bias, lowest)
            if keep is not None and bias is not None and not self.replaced:
                # As the graph adds them: a choice between what has all axes takes twice as long.
                bias = bias + where(keep, 0.0, lowest)
            elif keep is not None:
                bias = where(keep, 0.0 if bias is None else bias, lowest)
            twice = "a row that is masked entirely, twice in part, would give another mean of V"
            caveat = twice if len(self.lows) + self.unknown > 1 else ""
            return Mask(bias, is_attribute, in_words, caveat)
        sound = alone or (guarded and not self.biases) or (not keeps and fixed)
        if self.bounds and not sound:
            return Miss(f"a row that is masked entirely has {self.lows[0]:g}, wanted -infinity")
        caveat = "" if sound else "a row that is masked entirely would give zeros"
        if keep is not None and bias is not None:
            keep = where(keep, bias, lowest_of(bias))
        return Mask(bias if keep is None else keep, is_attribute, in_words, caveat)


class Mask(NamedTuple):
    """What the operator gets.

    A mask, whether it is also causal, both in words, and what changes in rows that the graph masks
    entirely.
    """

    value: Tensor | None
    causal: bool
    description: str
    caveat: str


@dataclass
class Term:
    """A mask or bias: its value and axes, what multiplies it, whether it says what to hide.

    If it is `loose`, it may have 1 where the scores have more; the operator repeats it along them.
    A factor may be one that `divides`: its reciprocal may be infinite.
    """

    value: Any
    view: View
    factor: float = 1.0
    negated: bool = False
    loose: bool = False
    divides: bool = False

    def key(self) -> object:
        """A key that is equal for the same value along the same axes; constants by content."""
        content = constant(self.value)
        return (
            graph_value(self.value) if content is None else content.tobytes(),
            tuple(tuple(leaves(d)) for d in self.view.dims if d),
            self.negated,
        )

    def shows(self, key: Dim, lowest: float) -> bool:
        """Whether it is a constant that leaves something of every row of keys."""
        content, axes = constant(self.value), [leaves(d) for d in self.view.dims]
        along = tuple(i for i, d in enumerate(axes) if d == key)
        return content is not None and bool(
            np.all((content * self.factor).max(along, initial=-np.inf) > lowest)
        )

    def placed(self, target: Dims, known: Sequence[View]) -> Tensor | None:
        """The mask with the dimensions of `target`, or 1; None if they cannot be made."""
        wanted = [leaves(d) for d in target[len(target) - len(self.view.dims) :]]
        given = [leaves(d) for d in self.view.dims]
        fits = all(g in ([], w) for g, w in zip(given, wanted, strict=False))
        whole = len(given) <= len(target) and fits
        x = adopt(self.value) if whole else self.view.arranged(target, known)
        if self.loose and not whole:
            x = _moved(adopt(self.value), given, [leaves(d) for d in target])
        if x is None:
            return None
        return logical_not(x) if self.negated else x if self.factor == 1.0 else x * self.factor


def _moved(x: Tensor, given: Dims, target: Dims) -> Tensor | None:
    """x with its dimensions in the order of `target`, and 1 for others; None if it lacks one."""
    perm = _order(given, target[len(target) - len(given) :])
    if perm is not None:
        return transpose(x, perm=perm)
    own = [axes for axes in given if axes]
    if any(axes not in target for axes in own):
        return None
    x = squeeze(x, [i for i, axes in enumerate(given) if not axes])
    order = sorted(own, key=target.index)
    x = x if order == own else transpose(x, perm=[own.index(axes) for axes in order])
    return unsqueeze(x, [i for i, axes in enumerate(target) if axes not in own])


def _order(given: Dims, wanted: Dims) -> list[int] | None:
    """How to put dimensions in the wanted order, those of size 1 where others are wanted."""
    ones = [i for i, axes in enumerate(given) if not axes]
    order = [
        given.index(axes) if axes in given else ones.pop(0) if ones else len(given)
        for axes in wanted
    ]
    return order if sorted(order) == [*range(len(given))] else None


def _conjuncts(condition: ir.Value | None) -> list[Any]:
    node = produced_by(condition, "And")
    if node is None:
        return [condition]
    return [term for x in node.inputs for term in _conjuncts(x)]
