"""Scaled dot-product attention."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.graph import Miss, Rewrite, present_inputs
from graphgen.infer import describe, same_dim
from graphgen.op import Operand, adopt, composite, read_attributes
from graphgen.ops.attention_layout import (
    Scores,
    between,
    lowest_of,
    multiplied,
    origin_of,
    products_above,
    weights_of,
)
from graphgen.ops.axes import UNKNOWN_SIZE, Dim, Dims, View, leaves, size_of, size_text, unify
from graphgen.ops.elementwise import greater, logical_and, logical_not, tanh, where
from graphgen.ops.layout import (
    arange,
    cast,
    cast_like,
    dim,
    expand,
    numpy_dtype,
    rank,
    reshape,
    swap_last,
    transpose,
    unsqueeze,
    with_rank,
)
from graphgen.ops.linalg import matmul
from graphgen.ops.reduce import reduce_max
from graphgen.ops.softmax import softmax


@composite("Attention")
def scaled_dot_product_attention(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Operand:
    """softmax(Q Kᵀ · scale) V (Vaswani et al., arXiv 1706.03762); scale is 1/√d by default.

    Q is (B, H, T, D), K and V are (B, G, S, D) with G dividing H, or (B, T, H·D) and (B, S, G·D)
    with the numbers of heads given. A bool mask, broadcast to (B, H, T, S), keeps what is True; a
    float one is added. The causal mask keeps column ≤ row, aligned to the top left. A row with
    nothing kept gives zeros, and so do its gradients.
    """
    heads = {"q_num_heads": q_num_heads, "kv_num_heads": kv_num_heads}
    return attention_with_weights(
        q, k, v, mask, is_causal=is_causal, scale=scale, softcap=softcap, **heads
    )[0]


def attention_with_weights(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Operand, Operand]:
    """The same in simpler operators, and its weights: the softmax, (B, H, T, S)."""
    flat = rank(q) == 3
    q, k, v, _ = on_heads(q, k, v, q_num_heads, kv_num_heads)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    weights = attention_weights(*attention_scores(q, k, mask, is_causal, scale, softcap))
    y = matmul(weights, v)
    return (merge_heads(y) if flat else y), weights


def on_heads(
    q: Any, k: Any, v: Any, q_num_heads: int | None, kv_num_heads: int | None
) -> tuple[Any, Any, Any, int]:
    """Q, K and V as (B, H, T, D), K and V repeated, and how many heads of Q each of theirs serves.

    Raises GraphgenError where the numbers of heads or features are not known.
    """
    for x in (q, k, v):
        if not all(isinstance(d, int) for d in (x.shape[1::2] if rank(x) == 4 else x.shape[2:])):
            told = "its heads and features must be known before the run"
            raise GraphgenError(f"Attention: an operand is {describe(x)}; {told}")
    if rank(q) == 3:
        if not q_num_heads or not kv_num_heads:
            raise GraphgenError(
                "Attention: three-dimensional operands need q_num_heads and kv_num_heads"
            )
        q, k, v = map(split_heads, (q, k, v), (q_num_heads, kv_num_heads, kv_num_heads))
    groups = q.shape[1] // k.shape[1]
    return q, repeat_heads(k, groups), repeat_heads(v, groups), groups


def attention_scores(
    q: Any, k: Any, mask: Any, is_causal: int, scale: float, softcap: float
) -> tuple[Any, Any]:
    """Q Kᵀ · scale, capped, with a float mask added, and the bool mask that keeps, or None."""
    scores = matmul(q * scale, swap_last(k))
    keep = None
    if softcap:
        scores = tanh(scores / softcap) * softcap
    if mask is not None and numpy_dtype(mask) == np.bool_:
        keep = mask
    elif mask is not None:
        scores, keep = scores + mask, _shows(mask, q)
    if is_causal:
        causal = causal_mask(dim(q, 2), dim(k, 2))
        if keep is None:  # each row keeps a column: it needs no guard
            return scores + where(causal, np.zeros((), numpy_dtype(q)), -math.inf), None
        keep = logical_and(keep, causal)
    return scores, keep


def _shows(mask: Any, q: Any) -> Any:
    """What a float mask keeps: all above the lowest number, and NaN, which is to be seen."""
    return logical_not(mask <= lowest_of(q))


def attention_weights(scores: Any, keep: Any) -> Any:
    """The softmax of the scores that are kept, 0 elsewhere; a row with nothing kept is zeros."""
    if keep is None:
        return softmax(scores)
    # Masked twice: before, so that the softmax is finite; after, so that empty rows are zero.
    return where(keep, softmax(where(keep, scores, lowest_of(scores))), 0.0)


def attention(
    q: Operand, k: Operand, v: Operand, mask: Operand = None, **attributes: Any
) -> Operand:
    """`scaled_dot_product_attention` with the mask expanded over the last two axes.

    Kernels of ONNX Runtime refuse a mask that broadcasts there, such as (B, 1, 1, S) for padding.
    """
    if mask is not None:
        axis = 1 if rank(q) == 3 else 2
        mask = with_rank(mask, 2)
        if not all(map(same_dim, mask.shape[-2:], (q.shape[axis], k.shape[axis]))):
            ones: list[Any] = [1] * (rank(mask) - 2)
            mask = expand(mask, [*ones, dim(q, axis), dim(k, axis)])
    return scaled_dot_product_attention(q, k, v, mask, **attributes)


@composite("MultiHeadAttention", domain="com.microsoft")
def multi_head_attention(
    q: Any,
    k: Any,
    v: Any,
    bias: Any = None,
    key_padding_mask: Any = None,
    attention_bias: Any = None,
    *,
    num_heads: int,
    scale: float | None = None,
    unidirectional: int = 0,
) -> Operand:
    """Attention on (B, T, H·D) and (B, S, H·D) in older runtimes; unidirectional needs T = S.

    `attention_bias` is added to the scores. The other two inputs are there to keep its place.
    """
    if k is None or v is None or bias is not None or key_padding_mask is not None:
        raise GraphgenError("MultiHeadAttention: packed operands, bias and padding have no body")
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attention_bias,
        scale=scale,
        is_causal=unidirectional,
        q_num_heads=num_heads,
        kv_num_heads=num_heads,
    )


@scaled_dot_product_attention.spelling
def _(q: Any, k: Any, v: Any, mask: Any = None, **attributes: Any) -> Operand:
    """The mask expanded, for kernels that do not broadcast it."""
    return None if mask is None else attention(q, k, v, mask, **attributes)


@scaled_dot_product_attention.spelling
def _(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Operand:
    """MultiHeadAttention with the mask as its bias, of which older kernels want all four sizes.

    There, a row with nothing kept gives a mean of V or NaN: zeros are chosen in its place.
    """
    flat, heads = rank(q) == 3, q_num_heads or q.shape[1]
    kv_heads = kv_num_heads or k.shape[1]
    if softcap or not (isinstance(heads, int) and isinstance(kv_heads, int)):
        return None
    if kv_heads != heads:
        k, v = (split_heads(x, kv_heads) if flat else x for x in (k, v))
        k, v = (repeat_heads(x, heads // kv_heads) for x in (k, v))
    q, k, v = (merge_heads(x) if rank(x) == 4 else x for x in (q, k, v))
    b, t, s = dim(q, 0), dim(q, 1), dim(k, 1)
    keep = bias = None
    if mask is not None:
        mask = with_rank(mask, 4)
        bias = np.zeros((), numpy_dtype(q)) if numpy_dtype(mask) == np.bool_ else mask
        keep = mask if bias is not mask else _shows(mask, q)
    if is_causal and (keep is not None or not same_dim(q.shape[1], k.shape[1])):
        causal = causal_mask(t, s)
        keep = causal if keep is None else logical_and(keep, causal)
        bias = np.zeros((), numpy_dtype(q)) if bias is None else bias
        is_causal = 0
    if keep is not None:
        bias = expand(where(keep, bias, lowest_of(q)), [b, heads, t, s])
    y = multi_head_attention(
        q, k, v, None, None, bias, num_heads=heads, scale=scale, unidirectional=is_causal
    )
    if mask is not None:
        some = greater(reduce_max(cast(keep, to=ir.DataType.FLOAT), [-1]), 0.0)
        y = where(
            transpose(some, perm=[0, 2, 1, 3]), reshape(y, [b, t, heads, v.shape[2] // heads]), 0.0
        )
        y = reshape(y, [b, t, v.shape[2]])
    return y if flat else split_heads(y, heads)


def causal_mask(rows: Any, columns: Any) -> Operand:
    """The bool mask column ≤ row; the sizes are ints or results of `dim`."""
    return unsqueeze(arange(rows), [1]) >= unsqueeze(arange(columns), [0])


def split_heads(x: Operand, heads: int) -> Operand:
    """(B, T, H·D) to (B, H, T, D)."""
    return transpose(
        reshape(x, [dim(x, 0), dim(x, 1), heads, x.shape[2] // heads]), perm=[0, 2, 1, 3]
    )


def merge_heads(x: Operand) -> Operand:
    """(B, H, T, D) to (B, T, H·D)."""
    b, t = dim(x, 0), dim(x, 2)
    return reshape(transpose(x, perm=[0, 2, 1, 3]), [b, t, x.shape[1] * x.shape[3]])


def repeat_heads(x: Operand, groups: int) -> Operand:
    """(B, G, S, D) to (B, G·groups, S, D): each head of keys serves `groups` heads of queries."""
    if groups == 1:
        return x
    b, heads, s, d = dim(x, 0), x.shape[1], dim(x, 2), x.shape[3]
    wide = expand(unsqueeze(x, [2]), [1, 1, groups, 1, 1])
    return reshape(wide, [b, heads * groups, s, d])


@scaled_dot_product_attention.recognise
def _(node: ir.Node) -> Rewrite | Miss | None:
    """Attention around a softmax, whichever way its heads, scale and mask are laid out.

    Anchored at the product with V. Axes are followed from Q, K, V and the masks to here, so that
    any layout of them is the operator's own, or made it.
    """
    if node.op_type == "Attention":
        return _flatten(node)
    missed: Miss | None = None
    for i, softmax_node, after in weights_of(node) if node.op_type == "MatMul" else ():
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


def _rewrite(node: ir.Node, i: int, scores: Scores) -> Rewrite | Miss:
    """The operator in place of a product with V; input i are the weights."""
    weights, v = View(None, [], scores.dims), View.of(adopt(node.inputs[1 - i]))
    if v is None or len(v.dims) < 2:
        return Miss(f"V is {describe(node.inputs[1 - i])}, wanted two dimensions or more")
    if leaves(scores.dims[-1 - i]) != leaves(scores.key):
        summed = scores.dims[-1 - i]
        of = "queries" if leaves(summed) == scores.query else "batches or heads"
        told = f"{size_text(scores.key)} keys, the sum with V along {size_text(summed)} {of}"
        return Miss(f"the softmax is along {told}, wanted the same")
    # The sum with V proves the length of the keys: as they are as many as V has rows.
    kept = [axis.size for axis in leaves(scores.key)] == [axis.size for axis in v.dims[i - 2]]
    for axis, reason in scores.unequal:
        if not kept or leaves(axis) != leaves(scores.key):
            return Miss(f"{reason}, either of which may be 1")
    dims = multiplied(node, *((weights, v) if i == 0 else (v, weights)))
    if isinstance(dims, Miss):
        return dims
    if scores.query and not {*scores.query} & {*leaves(dims[i - 2])}:
        rows = f"{size_text(scores.query)}, those of the product with V {size_text(dims[i - 2])}"
        return Miss(f"the rows of the scores are {rows}; wanted the same axis")
    laid = Heads.of(scores, v, leaves(v.dims[-1 - i]), dims)
    if isinstance(laid, Miss):
        return laid
    views = (scores.q, scores.k, v)
    ends = [*(view.source for view in views), *scores.ends]
    dtypes = {view.source.dtype for view in views}
    if len(dtypes) > 1 and None not in dtypes:  # where 16 bits come in, float32 is more exact
        wide = max(ir.DataType.FLOAT, *dtypes, key=lambda dtype: dtype.itemsize)
        for view in views:
            view.source = cast(view.source, to=wide)
    for term in (*scores.biases, *scores.rows):  # a kernel takes a float32 mask beside 16 bits
        if len(dtypes) > 1 or term in scores.rows or term.value.dtype == ir.DataType.DOUBLE:
            term.value = cast_like(term.value, v.source)
    for term in scores.rows:
        factor = term.placed(scores.q.axes, scores.known)
        if factor is None:
            given = describe(term.value)
            return Miss(f"the scores are multiplied by {given}, wanted one number for each query")
        scores.q.source = scores.q.source * factor
    mask = scores.mask(laid.target(laid.query, laid.key))
    if isinstance(mask, Miss):
        return mask
    attributes: dict[str, Any] = {"softcap": scores.softcap}
    if not math.isclose(scores.scale, 1.0 / math.sqrt(laid.features), rel_tol=1e-6):
        attributes["scale"] = scores.scale
    result = laid.emit(mask.value, {**attributes, "is_causal": int(mask.causal)}, dims)
    if result is None:
        return Miss(f"{UNKNOWN_SIZE}: Q, K, V are {', '.join(describe(x.source) for x in views)}")
    if len(dtypes) > 1:
        result = cast_like(result, node.outputs[0])
    return Rewrite(result, ends, f"{laid.told}, {mask.told}", caveat=mask.caveat)


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

    @classmethod
    def of(cls, scores: Scores, v: View, value: Dim, dims: Dims) -> "Heads | Miss":
        """Tell batch from heads: they lie beside features, serve groups, or are the last axis."""
        q, k, feature, value = scores.q, scores.k, leaves(scores.feature), leaves(value)
        batch = [axis for d in dims[:-2] for axis in leaves(d)]
        beside = {
            axis
            for view, own in ((q, feature), (k, feature), (v, value))
            for d in view.axes
            if own and own[-1] in leaves(d)
            for axis in leaves(d)
        }
        several = [leaves(d) for d in dims[:-2] if d]
        beside.update(axis for axis in batch if not (k.has(axis) and v.has(axis)))
        beside.update(several[-1] if len(several) > 1 else [])
        heads = [axis for axis in batch if axis in beside and isinstance(axis.size, int)]
        batch = [axis for axis in batch if axis not in heads]
        if not all(isinstance(axis.size, int) for axis in feature):
            given = size_text(feature)
            return Miss(f"Q and K have {given} features, wanted a number known before the run")
        heads = sorted(heads, key=lambda axis: not (k.has(axis) or v.has(axis)))
        axes = (leaves(scores.query), leaves(scores.key), feature, value)
        return cls(q, k, v, batch, heads, *axes, [*scores.known, v])

    @property
    def groups(self) -> Dim:
        """The heads that K or V have."""
        return [axis for axis in self.heads if self.k.has(axis) or self.v.has(axis)]

    @property
    def features(self) -> int:
        """The size of Q's and K's features."""
        return size_of(self.feature)

    @property
    def told(self) -> str:
        """How many heads, in words."""
        heads, groups = size_of(self.heads), size_of(self.groups)
        return f"{heads} heads" + ("" if heads == groups else f" in {groups} groups")

    def target(self, rows: Dim, columns: Dim) -> Dims:
        """(B, H, rows, columns)."""
        return [self.batch, self.heads, rows, columns]

    def emit(self, mask: Operand, attributes: dict[str, Any], dims: Dims) -> Operand | None:
        """Attention on (B, T, H·D) where Q, K and V lie like that, else on (B, H, T, D)."""
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
        y = attention(q, k, v, mask, **attributes)
        return View(y, made, made).arranged(dims, self.known)


def _flatten(node: ir.Node) -> Rewrite | None:
    """Attention on split heads as attention on (B, T, H·D), where the heads were split from it."""
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
    told = f"{heads['q_num_heads']} heads, on three dimensions"
    return Rewrite(split_heads(y, size_of(q.dims[1])), present_inputs(node), told)
