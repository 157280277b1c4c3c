"""What the recogniser of attention reads out of a graph: heads, groups, scale and masks."""

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphgen.graph import Miss, constant, permutation_of, produced_by, scalar
from graphgen.infer import describe, is_named, same_dim
from graphgen.op import Operand, adopt
from graphgen.ops.elementwise import logical_and, logical_not, where
from graphgen.ops.layout import numpy_dtype, swap_last, transpose


def before_split(x: ir.Value) -> Operand | None:
    """The (B, T, H·D) that (B, H, T, D) was split from, or None."""
    moved = produced_by(x, "Transpose")
    split = produced_by(moved.inputs[0], "Reshape") if moved is not None else None
    if moved is None or split is None or permutation_of(moved) != [0, 2, 1, 3]:
        return None
    source, y = adopt(split.inputs[0]), split.outputs[0]
    if source.shape is None or len(source.shape) != 3 or y.shape is None:
        return None
    same = all(map(same_dim, source.shape[:2], y.shape[:2]))
    return source if same and isinstance(source.shape[2], int) else None


def without_groups(x: ir.Value) -> Operand | None:
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


def lowest_of(x: Operand) -> float:
    """The lowest number of x's dtype, float32's for float64: that is float32 widened to check."""
    dtype = numpy_dtype(x)
    info: Any = ml_dtypes.finfo  # untyped there; numpy's own does not know bfloat16
    return float(info(np.float32 if dtype == np.float64 else dtype).min)


class Scores:
    """What stands between Q, K and the weights that multiply V: scale, biases, masks."""

    def __init__(self) -> None:
        self.q: Any = None
        self.k: Any = None
        self.scale = 1.0
        self.keeps: list[Any] = []
        self.guards: list[Any] = []
        self.biases: list[Any] = []
        self.ends: list[ir.Value] = []

    @classmethod
    def of(cls, weights: ir.Value | None) -> "Scores | Miss | None":
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
            asked = produced_by(condition, "IsNaN")
            if asked is not None and asked.inputs[0] is b and scalar(a) == 0.0:
                weights = b
            elif scalar(b) == 0.0:
                self.guards += _conjuncts(condition)
                self._end(condition)
                weights = a
            else:
                return None
        return produced_by(weights, "Softmax")

    def _product(self, scores: ir.Value | None) -> "Scores | Miss":
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
            if scalar(a) == 0.0 and self._is_lowest(b):
                self.keeps += _conjuncts(condition)
                return
            if scalar(b) == 0.0 and self._is_lowest(a):
                self.keeps.append(logical_not(adopt(condition)))
                return
        value: Any = adopt(bias)
        self.biases.append(value if self.scale == 1.0 else value * self.scale)

    def _where(self, step: ir.Node) -> ir.Value | Miss:
        condition, a, b = step.inputs
        self._end(condition)
        if a is not None and self._is_lowest(b):
            self.keeps += _conjuncts(condition)
            return a
        if b is not None and self._is_lowest(a):
            self.keeps.append(logical_not(adopt(condition)))
            return b
        return Miss("Where chooses between the scores and something that is not -infinity")

    def _mul(self, step: ir.Node) -> ir.Value | Miss:
        factor = scalar(step.inputs[1])
        if factor is None or factor <= 0 or step.inputs[0] is None:
            return Miss("the scores are multiplied by something that is no positive constant")
        self.scale *= factor
        return step.inputs[0]

    def _div(self, step: ir.Node) -> ir.Value | Miss:
        divisor = scalar(step.inputs[1])
        if divisor is None or divisor <= 0 or step.inputs[0] is None:
            return Miss("the scores are divided by something that is no positive constant")
        self.scale /= divisor
        return step.inputs[0]

    def problem(self) -> Miss | None:
        """Why guards and masks are not those of the operator, or None."""
        if not set(self.guards) <= set(self.keeps):
            return Miss("the weights are masked by something that the scores are not masked by")
        wanted = (self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2])
        for term in (*self.keeps, *self.biases):
            if term.shape is None or len(term.shape) > 4:
                return Miss(f"a mask is {describe(term)}, wanted at most four dimensions")
            for d, full in zip(reversed(term.shape), reversed(wanted), strict=False):
                if d != 1 and not same_dim(d, full) and is_named(d):
                    return Miss(f"a mask has {d} where the scores have {full}")
        return None

    def _is_lowest(self, value: ir.Value | None) -> bool:
        """Whether a scalar stays so low, after the factors met so far, that exp gives 0."""
        number = scalar(value)
        if value is None or number is None:
            return False
        half = value.dtype == ir.DataType.FLOAT16  # its lowest number is -65504
        return number * self.scale < (-6e4 if half else -1e30)

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
            bias = where(keep, bias, lowest_of(bias))
        return bias, causal, " and ".join(words)

    def caveat(self) -> str:
        """What the operator changes where the graph masks a whole row."""
        if not self.biases and set(self.guards) == set(self.keeps):
            return ""
        return "a row that is masked entirely would give zeros"


def _conjuncts(condition: ir.Value | None) -> list[Any]:
    node = produced_by(condition, "And")
    if node is None:
        return [adopt(condition)]
    return [term for x in node.inputs for term in _conjuncts(x)]


def _leads_to_product(x: ir.Value | None) -> bool:
    """Whether a value comes from a MatMul through the operators that stand around scores."""
    pending, seen = [x], set()
    while pending:
        step = produced_by(pending.pop(), "Add", "Where", "Mul", "Div", "MatMul")
        if step is None or step in seen:
            continue
        seen.add(step)
        if step.op_type == "MatMul":
            return True
        pending += {"Add": step.inputs[:], "Where": step.inputs[1:]}.get(
            step.op_type, step.inputs[:1]
        )
    return False


def _without_factor(x: ir.Value | None) -> tuple[Any, float]:
    step = produced_by(x, "Mul")
    factor = scalar(step.inputs[1]) if step is not None else None
    if step is None or factor is None or factor <= 0:
        return adopt(x), 1.0
    return adopt(step.inputs[0]), factor


def _swap_last(x: Any) -> Any:
    """x with its last two axes swapped, taking a transpose back where there is one."""
    step = produced_by(x, "Transpose")
    if step is None or x.shape is None:
        return swap_last(x)
    perm = permutation_of(step)
    perm[-1], perm[-2] = perm[-2], perm[-1]
    source = adopt(step.inputs[0])
    return source if perm == sorted(perm) else transpose(source, perm=perm)


def _is_causal(keep: ir.Value, q: Any, k: Any) -> bool:
    """Whether a mask keeps column ≤ row: computed from two ranges, or a constant triangle."""
    known = constant(keep)
    if known is not None:
        sizes = (q.shape[2], k.shape[2])
        if not all(isinstance(d, int) for d in sizes) or known.shape[-2:] != sizes:
            return False
        return bool(np.all(known == np.tril(np.ones(sizes, bool))))
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
