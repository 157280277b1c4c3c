"""Scaled dot-product attention."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.graph import Miss, Rewrite, constant, produced_by, scalar
from graphgen.infer import same_dim
from graphgen.op import Operand, adopt, composite, read_attributes
from graphgen.ops.elementwise import greater, logical_and, logical_not, tanh, where
from graphgen.ops.layout import (
    arange,
    dim,
    expand,
    numpy_dtype,
    rank,
    reshape,
    swap_last,
    transpose,
    unsqueeze,
)
from graphgen.ops.linalg import matmul
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
    if flat := rank(q) == 3:
        if not q_num_heads or not kv_num_heads:
            raise GraphgenError(
                "Attention: three-dimensional operands need q_num_heads and kv_num_heads"
            )
        q, k, v = (
            split_heads(x, n) for x, n in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads))
        )
    groups = q.shape[1] // k.shape[1]
    k, v = repeat_heads(k, groups), repeat_heads(v, groups)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    y = matmul(attention_weights(*attention_scores(q, k, mask, is_causal, scale, softcap)), v)
    return merge_heads(y) if flat else y


def attention_scores(
    q: Any, k: Any, mask: Any, is_causal: int, scale: float, softcap: float
) -> tuple[Any, Any]:
    """Q Kᵀ · scale, with a float mask added, and the bool mask that keeps, or None."""
    scores = matmul(q, swap_last(k)) * scale
    keep = None
    if mask is not None and numpy_dtype(mask) == np.bool_:
        keep = mask
    elif mask is not None:
        scores, keep = scores + mask, greater(mask, _lowest(q))
    if softcap:
        scores = tanh(scores / softcap) * softcap
    if is_causal:
        causal = causal_mask(dim(q, 2), dim(k, 2))
        keep = causal if keep is None else logical_and(keep, causal)
    return scores, keep


def attention_weights(scores: Any, keep: Any) -> Any:
    """The softmax of the scores that are kept, 0 elsewhere; a row with nothing kept is zeros."""
    if keep is None:
        return softmax(scores)
    # Masked twice: before, so that the softmax is finite; after, so that empty rows are zero.
    return where(keep, softmax(where(keep, scores, _lowest(scores))), 0.0)


def _lowest(x: Operand) -> float:
    """The lowest number of x's dtype, float32's for float64: that is float32 widened to check."""
    dtype = numpy_dtype(x)
    info: Any = ml_dtypes.finfo  # untyped there; numpy's own does not know bfloat16
    return float(info(np.float32 if dtype == np.float64 else dtype).min)


def attention(
    q: Operand, k: Operand, v: Operand, mask: Operand = None, **attributes: Any
) -> Operand:
    """`scaled_dot_product_attention` with the mask expanded over the last two axes.

    Kernels of ONNX Runtime refuse a mask that broadcasts there, such as (B, 1, 1, S) for padding.
    """
    if mask is not None:
        axis = 1 if rank(q) == 3 else 2
        ones: list[Any] = [1] * (rank(mask) - 2)
        if mask.shape[-2] == 1 or mask.shape[-1] == 1:
            mask = expand(mask, [*ones, dim(q, axis), dim(k, axis)])
    return scaled_dot_product_attention(q, k, v, mask, **attributes)


@composite("MultiHeadAttention", domain="com.microsoft")
def multi_head_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    num_heads: int,
    scale: float | None = None,
    unidirectional: int = 0,
) -> Operand:
    """Attention on (B, T, H·D) and (B, S, H·D) in older runtimes; unidirectional needs T = S."""
    heads = {"q_num_heads": num_heads, "kv_num_heads": num_heads}
    return scaled_dot_product_attention(q, k, v, scale=scale, is_causal=unidirectional, **heads)


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
    """Without a mask: with one, a row that keeps nothing would not give zeros."""
    unequal = is_causal and not same_dim(q.shape[1], k.shape[1])
    if mask is not None or softcap or unequal or rank(q) != 3 or q_num_heads != kv_num_heads:
        return None
    return multi_head_attention(
        q, k, v, num_heads=q_num_heads, scale=scale, unidirectional=is_causal
    )


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

    Anchored at the product with V. Factors are collected from Q, K and the scores; a mask from
    what is added to the scores or chosen by Where, before and after the softmax.
    """
    if node.op_type == "Attention":
        return _flatten(node)
    found = _Scores.of(node.inputs[0])
    if found is None:
        return None
    if isinstance(found, Miss):
        return found
    q, k, v = found.q, found.k, adopt(node.inputs[1])
    ranks = [None if x.shape is None else len(x.shape) for x in (q, k, v)]
    if ranks != [4, 4, 4]:
        return Miss(f"Q, K and V have ranks {ranks}, wanted [4, 4, 4]")
    if not all(isinstance(d, int) for d in (*q.shape[1::2], *k.shape[1::2], *v.shape[1::2])):
        return Miss("the numbers of heads and features must be known before the run")
    grouped = _without_groups(k), _without_groups(v)
    if grouped[0] is not None and grouped[1] is not None:
        k, v = grouped
    attributes: dict[str, Any] = {}
    if not math.isclose(found.scale, 1.0 / math.sqrt(q.shape[-1]), rel_tol=1e-6):
        attributes["scale"] = found.scale
    mask, causal, told = found.mask()
    if causal:
        attributes["is_causal"] = 1
    result = _emit(q, k, v, mask, attributes)
    ends = [_end(x) for x in (q, k, v)]
    groups = "" if q.shape[1] == k.shape[1] else f" in {k.shape[1]} groups"
    reason = f"{q.shape[1]} heads{groups}, {told}"
    return Rewrite(result, [*ends, *found.ends], reason, caveat=found.caveat())


def _emit(q: Operand, k: Operand, v: Operand, mask: Operand, attributes: dict[str, Any]) -> Operand:
    """Attention on (B, T, H·D) where the heads were split from it, else on (B, H, T, D)."""
    q3, k3, v3 = (_before_split(x) for x in (q, k, v))
    if q3 is None or k3 is None or v3 is None:
        return attention(q, k, v, mask, **attributes)
    heads = {"q_num_heads": q.shape[1], "kv_num_heads": k.shape[1]}
    return split_heads(attention(q3, k3, v3, mask, **{**attributes, **heads}), q.shape[1])


def _flatten(node: ir.Node) -> Rewrite | None:
    """Attention on split heads as attention on (B, T, H·D), where the heads were split from it."""
    if len(node.outputs) > 1 or len(node.inputs) > 4:
        return None
    q, k, v = (adopt(x) for x in node.inputs[:3])
    if any(_before_split(x) is None for x in (q, k, v)):
        return None
    mask = adopt(node.inputs[3]) if len(node.inputs) > 3 else None
    y = _emit(q, k, v, mask, read_attributes(scaled_dot_product_attention, node))
    return Rewrite(y, _present(node), f"{q.shape[1]} heads, on three dimensions")


def _present(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None]


def _end(x: ir.Value) -> ir.Value:
    """Where the matched region ends on the way to Q, K or V: before recorded layout operators."""
    node = x.producer()
    while node is not None and node.graph is None and node.inputs[0] is not None:
        x = node.inputs[0]
        node = x.producer()
    return x


def _before_split(x: ir.Value) -> Operand | None:
    """The (B, T, H·D) that (B, H, T, D) was split from, or None."""
    moved = produced_by(x, "Transpose")
    split = produced_by(moved.inputs[0], "Reshape") if moved is not None else None
    if moved is None or split is None or list(moved.attributes["perm"].as_ints()) != [0, 2, 1, 3]:
        return None
    source, y = adopt(split.inputs[0]), split.outputs[0]
    if source.shape is None or len(source.shape) != 3 or y.shape is None:
        return None
    same = all(map(same_dim, source.shape[:2], y.shape[:2]))
    return source if same and isinstance(source.shape[2], int) else None


def _without_groups(x: ir.Value) -> Operand | None:
    """(B, G, S, D) where x is that, each head repeated: Unsqueeze, Expand, Reshape."""
    merge = produced_by(x, "Reshape")
    repeat = produced_by(merge.inputs[0], "Expand") if merge is not None else None
    add = produced_by(repeat.inputs[0], "Unsqueeze") if repeat is not None else None
    if merge is None or repeat is None or add is None or x.shape is None:
        return None
    source, wide = adopt(add.inputs[0]), repeat.outputs[0].shape
    axes = constant(add.inputs[1])
    if source.shape is None or wide is None or len(source.shape) != 4 or len(wide) != 5:
        return None
    b, g, s, d = source.shape
    fits = (same_dim(b, wide[0]), same_dim(g, wide[1]), same_dim(s, wide[3]), same_dim(d, wide[4]))
    merged = isinstance(g, int) and isinstance(wide[2], int) and x.shape[1] == g * wide[2]
    return source if axes is not None and list(axes) == [2] and all(fits) and merged else None


class _Scores:
    """What stands between Q, K and the weights that multiply V: scale, biases, masks."""

    def __init__(self) -> None:
        self.q: Any = None
        self.k: Any = None
        self.scale = 1.0
        self.keeps: list[Any] = []
        self.guards: list[Any] = []
        self.biases: list[Any] = []
        self.ends: list[ir.Value] = []
        self.nan_guarded = False

    @classmethod
    def of(cls, weights: ir.Value | None) -> "_Scores | Miss | None":
        """Follow the weights back to the product of Q and K; None where there is no softmax."""
        found = cls()
        softmax_node = found._softmax(weights)
        if softmax_node is None:
            return None
        scores = softmax_node.inputs[0]
        axis = softmax_node.attributes.get("axis")
        if axis is not None and axis.as_int() != -1:
            return Miss(f"the softmax is along axis {axis.as_int()}, wanted -1")
        return found._product(scores)

    def _softmax(self, weights: ir.Value | None) -> ir.Node | None:
        while (choice := produced_by(weights, "Where")) is not None:
            condition, a, b = choice.inputs
            if produced_by(condition, "IsNaN") is not None and scalar(a) == 0.0:
                self.nan_guarded, weights = True, b
            elif scalar(b) == 0.0:
                self.guards += _conjuncts(condition)
                self._end(condition)
                weights = a
            else:
                return None
        return produced_by(weights, "Softmax")

    def _product(self, scores: ir.Value | None) -> "_Scores | Miss":
        while (step := produced_by(scores, "Add", "Where", "Mul", "Div")) is not None:
            problem = getattr(self, f"_{step.op_type.lower()}")(step)
            if isinstance(problem, Miss):
                return problem
            scores = problem
        product = produced_by(scores, "MatMul")
        if product is None:
            made = scores.producer() if scores is not None else None
            return Miss(f"the scores come from {made.op_type if made else 'an input'}, not MatMul")
        self.q, factor = _without_factor(product.inputs[0])
        self.scale *= factor
        transposed, factor = _without_factor(product.inputs[1])
        self.scale *= factor
        self.k = _swap_last(transposed)
        return self

    def _add(self, step: ir.Node) -> ir.Value | Miss:
        towards = [_leads_to_product(x) for x in step.inputs]
        if sum(towards) != 1:
            return Miss(f"{sum(towards)} operands of the Add come from a product, wanted 1")
        scores, bias = step.inputs[:: 1 if towards[0] else -1]
        assert scores is not None and bias is not None
        self._end(bias)
        self._take_bias(bias)
        return scores

    def _end(self, value: ir.Value | None) -> None:
        assert value is not None
        self.ends.append(value)

    def _take_bias(self, bias: ir.Value) -> None:
        choice = produced_by(bias, "Where")
        if choice is not None and self.scale == 1.0:
            condition, a, b = choice.inputs
            if scalar(a) == 0.0 and _is_lowest(b):
                self.keeps += _conjuncts(condition)
                return
            if scalar(b) == 0.0 and _is_lowest(a):
                self.keeps.append(logical_not(adopt(condition)))
                return
        value: Any = adopt(bias)
        self.biases.append(value if self.scale == 1.0 else value * self.scale)

    def _where(self, step: ir.Node) -> ir.Value | Miss:
        condition, a, b = step.inputs
        self._end(condition)
        if a is not None and _is_lowest(b):
            self.keeps += _conjuncts(condition)
            return a
        if b is not None and _is_lowest(a):
            self.keeps.append(logical_not(adopt(condition)))
            return b
        return Miss("Where chooses between the scores and something that is not -infinity")

    def _mul(self, step: ir.Node) -> ir.Value | Miss:
        factor = scalar(step.inputs[1])
        if factor is None or step.inputs[0] is None:
            return Miss("the scores are multiplied by something that is not a constant scalar")
        self.scale *= factor
        return step.inputs[0]

    def _div(self, step: ir.Node) -> ir.Value | Miss:
        divisor = scalar(step.inputs[1])
        if not divisor or step.inputs[0] is None:
            return Miss("the scores are divided by something that is not a constant scalar")
        self.scale /= divisor
        return step.inputs[0]

    def mask(self) -> tuple[Operand, bool, str]:
        """The mask to give to the operator, whether it is causal besides, and both in words."""
        bias, keep, causal = None, None, False
        for term in dict.fromkeys(self.keeps):
            if _is_causal(term, self.q, self.k):
                causal = True
                continue
            keep = term if keep is None else logical_and(keep, term)
        for term in self.biases:
            bias = term if bias is None else bias + term
        words = [*(["causal"] if causal else []), *(["mask"] if keep is not None else [])]
        words += ["bias"] if bias is not None else []
        if bias is None:
            return keep, causal, " and ".join(words) or "no mask"
        if keep is not None:
            bias = where(keep, bias, _lowest(bias))
        return bias, causal, " and ".join(words)

    def caveat(self) -> str:
        """What the operator changes where the graph masks a whole row."""
        if (not self.keeps and not self.biases) or self.guards or self.nan_guarded:
            return ""
        return "a row that is masked entirely would give zeros"


def _conjuncts(condition: ir.Value | None) -> list[Any]:
    node = produced_by(condition, "And")
    if node is None:
        return [adopt(condition)]
    return [term for x in node.inputs for term in _conjuncts(x)]


def _is_lowest(value: ir.Value | None) -> bool:
    """Whether a scalar is so low that exp gives 0 beside any other score: finfo.min or -inf."""
    number = scalar(value)
    return number is not None and number < -1e30


def _leads_to_product(x: ir.Value | None) -> bool:
    while (step := produced_by(x, "Add", "Where", "Mul", "Div", "MatMul")) is not None:
        if step.op_type == "MatMul":
            return True
        if step.op_type == "Add":
            return any(_leads_to_product(y) for y in step.inputs)
        x = step.inputs[1 if step.op_type == "Where" and _is_lowest(step.inputs[2]) else 0]
        x = step.inputs[2] if step.op_type == "Where" and _is_lowest(step.inputs[1]) else x
    return False


def _without_factor(x: ir.Value | None) -> tuple[Any, float]:
    step = produced_by(x, "Mul")
    factor = scalar(step.inputs[1]) if step is not None else None
    return (adopt(x), 1.0) if step is None or factor is None else (adopt(step.inputs[0]), factor)


def _swap_last(x: Any) -> Any:
    """x with its last two axes swapped, taking a transpose back where there is one."""
    step = produced_by(x, "Transpose")
    if step is None or x.shape is None:
        return swap_last(x)
    perm = list(step.attributes["perm"].as_ints())
    perm[-1], perm[-2] = perm[-2], perm[-1]
    source = adopt(step.inputs[0])
    return source if perm == sorted(perm) else transpose(source, perm=perm)


def _is_causal(keep: ir.Value, q: Any, k: Any) -> bool:
    """Whether a mask keeps column ≤ row: computed from two ranges, or a constant triangle."""
    known = constant(keep)
    if known is not None:
        triangle = np.tril(np.ones(known.shape[-2:], bool)) if known.ndim >= 2 else None
        return triangle is not None and bool(np.all(known == triangle))
    step = produced_by(keep, "GreaterOrEqual")
    if step is None:
        return False
    rows, columns = (_positions(x) for x in step.inputs)
    return (
        rows is not None
        and columns is not None
        and (rows[0], columns[0]) == (-2, -1)
        and same_dim(rows[1], q.shape[2])
        and same_dim(columns[1], k.shape[2])
    )


def _positions(x: ir.Value | None) -> tuple[int, Any] | None:
    """(axis from the end, length) of 0, 1, ... along one axis, or None."""
    lifted = produced_by(x, "Unsqueeze")
    source = lifted.inputs[0] if lifted is not None else x
    if x is None or x.shape is None or source is None or source.shape is None:
        return None
    long = [i - len(x.shape) for i, d in enumerate(x.shape) if d != 1]
    counted = produced_by(source, "Range")
    known = constant(source)
    if len(source.shape) != 1 or len(long) != 1:
        return None
    if known is not None:
        return (long[0], len(known)) if np.array_equal(known, np.arange(len(known))) else None
    if counted is None or [scalar(counted.inputs[i]) for i in (0, 2)] != [0.0, 1.0]:
        return None
    return long[0], source.shape[0]
