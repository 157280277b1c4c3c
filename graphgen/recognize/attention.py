"""How attention is recognized, however its heads, scale and masks are laid out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.graph import constant, present_inputs, produced_by
from graphgen.infer import describe
from graphgen.match import Miss, Rewrite
from graphgen.op import is_a, read_attributes
from graphgen.ops.attention import (
    attention,
    scaled_dot_product_attention,
    sink_attention,
    split_heads,
)
from graphgen.ops.layout import cast, cast_like, concat, expand, rank, reshape, slice_
from graphgen.ops.linalg import einsum, fused_matmul
from graphgen.ops.softmax import softmax
from graphgen.recognize.axes import (
    UNKNOWN_SIZE,
    Dim,
    Dims,
    View,
    leaves,
    size_in,
    size_of,
    size_text,
    unify,
)
from graphgen.recognize.contractions import contraction
from graphgen.recognize.paths import between, origin_of, products_above, weights_of
from graphgen.recognize.products import PRODUCTS, factor_in, multiplied, operand_of
from graphgen.recognize.scores import Scores, Term
from graphgen.value import Tensor, adopt, graph_value


@scaled_dot_product_attention.recognize("MatMul", str(fused_matmul), "Attention", str(einsum))
def _(node: ir.Node) -> Rewrite | Miss | None:
    """Attention around a softmax, however its heads, scale and mask are laid out.

    It is anchored at the product with V. Axes are followed from Q, K, V and the masks to here, so
    any layout of them is the operator's own, or is converted to it.
    """
    if node.op_type == "Attention":
        return _flatten(node)
    if is_a(node, einsum):
        left = contraction(node) if any(weights_of(node)) else None
        if isinstance(left, Miss):
            return Miss(f"the sum with V: {left.reason}")
        return between(node) if len(node.inputs) == 2 else None
    if not is_a(node, *PRODUCTS):
        return None  # the engine asks about every reader of what would go
    if (sinks := _sinks_attended(node)) is not None:
        return sinks
    missed: Miss | None = None
    for i, softmax_node, after in weights_of(node):
        for product, steps in products_above(softmax_node.inputs[0]):
            found = Scores.of(product, steps, softmax_node)
            for step, spine in after:
                found = found if isinstance(found, Miss) else found.guard(step, spine) or found
            outcome = found if isinstance(found, Miss) else _rewrite(node, i, found)
            if isinstance(outcome, Rewrite):
                return outcome
            missed = missed or outcome
        missed = missed or Miss(f"the scores come from {origin_of(softmax_node)}, not a product")
    return missed or between(node)


def _sinks_attended(node: ir.Node) -> Rewrite | Miss | None:
    """A product with V whose weights are those of scores in a softmax over them and sinks."""
    missed: Miss | None = None
    for i, value in enumerate(node.inputs):
        cut = produced_by(value, slice_)
        softmax_node = None if cut is None else produced_by(cut.inputs[0], softmax)
        join = None if softmax_node is None else produced_by(softmax_node.inputs[0], concat)
        if cut is None or softmax_node is None or join is None or len(join.inputs) != 2:
            continue
        sinks = _sinks(cut, softmax_node, join)
        if isinstance(sinks, Miss):
            return sinks
        for product, steps in products_above(join.inputs[sinks[1]]):
            found = Scores.of(product, steps, softmax_node)
            if not isinstance(found, Miss):
                found.sinks, found.guards = sinks[0], [*found.keeps]  # hidden rows give zeros
            outcome = found if isinstance(found, Miss) else _rewrite(node, i, found)
            if isinstance(outcome, Rewrite):
                return outcome
            missed = missed or outcome
    return missed


def _sinks(cut: ir.Node, softmax_node: ir.Node, join: ir.Node) -> tuple[ir.Value, int] | Miss:
    """Scores of H heads, the first or the last column, which is cut off; and which input is left.

    They are (1, H, 1, 1), or what becomes that, and repeated for batches and queries.
    """
    rank = len(join.outputs[0].shape or ())
    along = {
        softmax_node.attributes.get_int("axis", -1) % max(rank, 1),
        join.attributes["axis"].as_int() % max(rank, 1),
    }
    given = [constant(x) for x in cut.inputs[1:] if x is not None]
    bounds = [None if x is None else x.reshape(-1).tolist() for x in given]
    last = bounds[:2] == [[0], [-1]]
    first = bounds[:1] == [[1]] and bounds[1:2] == [[np.iinfo(np.int64).max]]
    if not (last or first) or bounds[2:3] not in ([[-1]], [[3]]) or bounds[3:] not in ([], [[1]]):
        return Miss("more or less than one column of the weights is cut off")
    column = join.inputs[1 if last else 0]
    view = None if column is None else View.of(column)
    own = [] if view is None else [leaves(d) for d in view.axes if d]
    if (
        view is None
        or along != {rank - 1}
        or rank != 4
        or view.dims[3]
        or own != [leaves(view.dims[1])]
    ):
        return Miss(f"a softmax over joined scores, {describe(column)}; wanted sinks")
    return graph_value(view.source), 0 if last else 1


_MIXED = "mixed among heads by a constant matrix, as talking heads do; the operator mixes none"


def _is_constant(view: View) -> bool:
    """Whether a view is of a constant."""
    return constant(graph_value(view.source)) is not None


def _rewrite(node: ir.Node, i: int, scores: Scores) -> Rewrite | Miss:
    """The operator in place of a product with V; input i is the weights."""
    weights = operand_of(node, i, View(None, [], scores.dims))
    v = operand_of(node, 1 - i, View.of(adopt(node.inputs[1 - i])))
    if v is None or weights is None or len(v.dims) < 2:
        return Miss(f"V is {describe(node.inputs[1 - i])}, wanted two dimensions or more")
    summed = weights.dims[-1 - i]
    if leaves(summed) != leaves(scores.key):
        if _is_constant(v):
            return Miss(f"the weights are {_MIXED}")
        of = "queries" if leaves(summed) == scores.query else "batches or heads"
        lengths = f"{size_text(scores.key)} keys, the sum with V along {size_text(summed)} {of}"
        return Miss(f"the softmax is along {lengths}, wanted the same")
    # The sum with V proves how many keys there are: as many as V has rows.
    kept = [axis.first for axis in leaves(scores.key)] == [axis.size for axis in v.dims[i - 2]]
    dims = multiplied(node, *((weights, v) if i == 0 else (v, weights)), unequal=scores.apart)
    if isinstance(dims, Miss):
        return dims
    if scores.query and not {*scores.query} & {*leaves(dims[i - 2])}:
        if _is_constant(scores.q) or _is_constant(scores.k):
            return Miss(f"the scores are {_MIXED}")
        rows = f"{size_text(scores.query)}, those of the product with V {size_text(dims[i - 2])}"
        return Miss(f"the rows of the scores are {rows}; wanted the same axis")
    laid = Heads.of(scores, v, leaves(v.dims[-1 - i]), dims)
    if isinstance(laid, Miss):
        return laid
    if (unlike := laid.lengthen(scores, kept)) is not None:
        return unlike
    if scores.sinks is not None and leaves(scores.dims[1]) != laid.heads:
        of = f"{size_text(scores.dims[1])} where the heads are {size_text(laid.heads)}"
        return Miss(f"the sinks are those of {of}, wanted one for each head")
    views = (scores.q, scores.k, v)
    ends = [*(view.source for view in views), *scores.ends]
    mixed = _in_one_dtype(scores, views)
    if (unlike := _take_factors(scores)) is not None:
        return unlike
    scores.biases = _summed(scores.biases)
    mask = scores.mask(laid.target(laid.query, laid.key))
    if isinstance(mask, Miss):
        return mask
    attributes: dict[str, Any] = {"softcap": scores.softcap}
    usual = laid.usual_scale
    if usual is None or not math.isclose(scores.scale, usual, rel_tol=1e-6):
        attributes["scale"] = scores.scale
    if scores.sinks is not None:
        ends.append(adopt(scores.sinks))
    attributes["is_causal"] = int(mask.causal)
    result = laid.emit(mask.value, attributes, dims, scores.sinks)
    if result is None:
        return Miss(f"{UNKNOWN_SIZE}: Q, K, V are {', '.join(describe(x.source) for x in views)}")
    if mixed:
        result = cast_like(result, adopt(node.outputs[0]))
    for gate in scores.gates:
        factor = gate.placed(dims, [*scores.known, v])
        if factor is None:
            return Miss(f"the weights are multiplied by {describe(gate.value)}, of other axes")
        result = result * factor
    result = result if factor_in(node) == 1.0 else result * factor_in(node)
    return Rewrite(result, ends, f"{laid.description}, {mask.description}", caveat=mask.caveat)


def _in_one_dtype(scores: Scores, views: Sequence[View]) -> bool:
    """Cast Q, K and V, and terms of the scores, to what a kernel takes; whether they were mixed."""
    dtypes = {view.source.dtype for view in views}
    mixed = len(dtypes) > 1
    if mixed:  # where 16-bit values come in, float32 is more exact
        wide = max(np.dtype(np.float32), *dtypes, key=lambda dtype: dtype.itemsize)
        for view in views:
            view.source = cast(view.source, to=wide)
    # A kernel accepts a float32 mask with 16-bit operands.
    for term in (*scores.biases, *scores.factors):
        if mixed or term in scores.factors or adopt(term.value).dtype == np.float64:
            term.value = cast_like(adopt(term.value), views[-1].source)
    return mixed


def _take_factors(scores: Scores) -> Miss | None:
    """Let Q take the factors that the scores of each query have, and K those of each key."""
    for term in scores.factors:
        for view in (scores.q, scores.k):
            factor = term.placed(view.axes, scores.known)
            if factor is not None:
                x = view.source
                view.source = x / factor if term.divides else x * factor
                break
        else:
            given = describe(term.value)
            return Miss(f"the scores are multiplied by {given}, wanted one for each query or key")
    return None


def _summed(terms: list[Term]) -> list[Term]:
    """Terms of more than four axes that lack one of each other's, as of rows and columns, as one.

    The sum repeats both at once; each by itself would be written out before.
    """
    done = list[Term]()
    for term in terms:
        last = done[-1] if done else term
        a, b = ([leaves(d) for d in x.view.dims] for x in (last, term))
        lacks = [(not x, not y) for x, y in zip(a, b, strict=False) if x != y]
        alike = len(a) == len(b) > 4 and all(map(any, lacks)) and not (last.loose or term.loose)
        if not alike or len({*lacks}) < 2:
            done.append(term)
            continue
        dims = [x or y for x, y in zip(a, b, strict=True)]
        total = adopt(last.value) * last.factor + adopt(term.value) * term.factor
        done[-1] = Term(total, View(total, dims, dims))
    return done


@dataclass
class Heads:
    """Q, K and V with their axes named: batch, heads, query, key, and the features of both."""

    q: View
    k: View
    v: View
    batch: Dim
    heads: Dim
    query: Dim
    key: Dim
    feature: Dim
    value: Dim
    known: list[View]
    # Sizes to which another operand or a mask may lengthen the batch, the queries, and the keys.
    longest: list[Any] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    columns: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, scores: Scores, v: View, value: Dim, dims: Dims) -> "Heads | Miss":
        """Tell heads from batch: heads lie next to features, serve groups, or are the last axis."""
        q, k, feature, value = scores.q, scores.k, leaves(scores.feature), leaves(value)
        batch = [axis for d in dims[:-2] for axis in leaves(d)]
        beside = {
            axis
            for view, own in ((q, feature), (k, feature), (v, value))
            for d in view.axes
            if own and own[-1] in leaves(d)
            for axis in leaves(d)
        }
        beside.update(axis for axis in batch if not (k.has(axis) and v.has(axis)))
        for split in (dims[:-2], scores.split):
            several = [d for d in map(leaves, split) if d and {*d} <= {*batch}]
            beside.update(several[-1] if len(several) > 1 else [])
        for merged in map(leaves, scores.apart):  # all of it may be 1, so that it has no heads
            beside.difference_update(merged if len(merged) > 1 else [])
        heads = [axis for axis in batch if axis in beside and isinstance(axis.size, int)]
        batch = [axis for axis in batch if axis not in heads]
        heads = sorted(heads, key=lambda axis: not (k.has(axis) or v.has(axis)))
        axes = (leaves(scores.query), leaves(scores.key), feature, value)
        return cls(q, k, v, batch, heads, *axes, [*scores.known, v])

    def lengthen(self, scores: Scores, kept: bool) -> Miss | None:
        """Note where an operand or a mask may have more than another operand's 1.

        `kept` says that V shows how many keys there are; else V has as many as the mask.
        """
        for batch in scores.apart:
            own = [(x, x if x.given is None else x.given) for x in (self.q, self.k, self.v)]
            sizes = [size_in(self.batch, views) for views in own]
            if leaves(batch) != self.batch or None in sizes:
                return Miss(f"the batches of Q, K and V, {size_text(batch)}, may differ")
            self.longest += sizes
        for axis, size, reason in scores.unequal:
            if leaves(axis) == self.batch and len(self.batch) == 1:
                self.longest.append(size)
            elif leaves(axis) == self.query and len(self.query) == 1:
                self.rows.append(size)
            elif leaves(axis) != self.key or len(self.key) > 1:
                return Miss(f"{reason}, either of which may be 1")
            elif not kept:
                self.columns.append(size)
        return None

    @property
    def groups(self) -> Dim:
        """The heads that K or V have."""
        return [axis for axis in self.heads if self.k.has(axis) or self.v.has(axis)]

    @property
    def usual_scale(self) -> float | None:
        """1 / √D, if it is known how many features Q and K have: they may be all pixels."""
        known = all(isinstance(axis.size, int) for axis in self.feature)
        return 1.0 / math.sqrt(size_of(self.feature)) if known else None

    @property
    def description(self) -> str:
        """How many heads, in words."""
        heads, groups = size_of(self.heads), size_of(self.groups)
        return f"{heads} heads" + ("" if heads == groups else f" in {groups} groups")

    def target(self, rows: Dim, columns: Dim) -> Dims:
        """(B, H, rows, columns)."""
        return [self.batch, self.heads, rows, columns]

    def emit(
        self,
        mask: Tensor | None,
        attributes: dict[str, Any],
        dims: Dims,
        sinks: ir.Value | None = None,
    ) -> Tensor | None:
        """Attention on (B, T, H·D) if Q, K and V have that layout, else on (B, H, T, D)."""
        lists = (
            (self.q, self.heads, self.query, self.feature),
            (self.k, self.groups, self.key, self.feature),
            (self.v, self.groups, self.key, self.value),
        )
        flat = [[self.batch, rows, [*heads, *own]] for _, heads, rows, own in lists]
        here = [[leaves(d) for d in view.axes] for view, *_ in lists]
        if here == flat and self.heads:
            operands = [self.q.source, self.k.source, self.v.source]
            heads = {"q_num_heads": size_of(self.heads), "kv_num_heads": size_of(self.groups)}
            attributes = {**attributes, **heads}
            made = [self.batch, self.query, [*self.heads, *self.value]]
        else:
            targets = [[self.batch, heads, rows, own] for _, heads, rows, own in lists]
            pairs = zip(lists, targets, strict=True)
            operands = [v.arranged(target, self.known, repeat=True) for (v, *_), target in pairs]
            made = self.target(self.query, self.value)
        q, k, v = operands
        if q is None or k is None or v is None:
            return None
        for size in self.longest:
            q, k, v = (expand(x, [size, *[1] * (rank(x) - 1)]) for x in (q, k, v))
        q = reduce(lambda x, size: expand(x, [size, 1]), self.rows, q)
        k = reduce(lambda x, size: expand(x, [size, 1]), self.columns, k)
        if sinks is None:
            y = attention(q, k, v, mask, **attributes)
        else:
            y = sink_attention(q, k, v, reshape(adopt(sinks), [-1]), mask, **attributes)
        return View(y, made, made).arranged(dims, self.known)


def _flatten(node: ir.Node) -> Rewrite | None:
    """Attention on split heads as attention on (B, T, H·D), if the heads were split from that."""
    if len(node.outputs) > 1 or len(node.inputs) > 4:
        return None
    views = [View.of(x) for x in node.inputs[:3] if x is not None]
    if any(view is None or len(view.dims) != 4 for view in views):
        return None
    q, k, v = (view for view in views if view is not None)
    unify(q.dims[0], k.dims[0], equal=True)
    unify(q.dims[0], v.dims[0], equal=True)
    for view in (q, k, v):
        b, h, t, d = (leaves(each) for each in view.dims)
        if [leaves(each) for each in view.axes] != [b, t, [*h, *d]]:
            return None
    mask = adopt(node.inputs[3]) if len(node.inputs) > 3 else None
    attributes = read_attributes(scaled_dot_product_attention, node)
    heads = {"q_num_heads": size_of(q.dims[1]), "kv_num_heads": size_of(k.dims[1])}
    y = attention(q.source, k.source, v.source, mask, **{**attributes, **heads})
    reason = f"{heads['q_num_heads']} heads, on three dimensions"
    return Rewrite(split_heads(y, size_of(q.dims[1])), present_inputs(node), reason)
