"""Sizes with rounded quotients, of convolutions say: one form, and what is sure about them."""

import math
import re
from typing import Any

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext


class FileSizes(ShapeInferenceContext):
    """The state of inference over a graph of a file: `sure` are sizes of at least 0 in every run.

    A difference such as n - 5 may be below 0, but not where a convolution of `graph` slides a
    window of 5 over n; that has the `lengths` that it has, at least 1.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.graph: ir.Graph | None = None
        self.sure: set[str] = set()
        self.lengths: set[str] = set()
        self.asked: set[str] = set()  # what was not sure when it was divided
        self.emptied: dict[str, str] = {}  # by size: the symbol with which it is 0


def without_doubt(shape: ir.Shape | None, context: ShapeInferenceContext) -> ir.Shape | None:
    """The shape with n for Max(0, n) where n is a length."""
    if shape is None or not isinstance(context, FileSizes) or not context.lengths:
        return shape
    cut = [re.fullmatch(r"Max\(0, (.+)\)", str(d)) for d in shape]
    pairs = zip(cut, shape, strict=True)
    return ir.Shape(
        [ir.SymbolicDim(c[1]) if c and c[1] in context.lengths else d for c, d in pairs]
    )


def flattened(size: str) -> str:
    """A size with floor of sums once, in a form that is unique where there is no product of sizes.

    With a whole number a, ⌊(⌊x⌋ + a) / n⌋ is ⌊(x + a) / n⌋, and ⌊x + a⌋ is ⌊x⌋ + a; what is left
    below 1 in ⌊x + r⌋ is rounded down to the steps of x (Graham, Knuth and Patashnik, Concrete
    Mathematics, 3.2).
    """
    return str(_flat(ir.SymbolicDim(size)._expr)) if "floor(" in size else size


def _flat(expression: Any) -> Any:
    """The same of an expression of sympy's, whose symbols are whole numbers."""
    if expression.func.__name__ != "floor":
        return expression.func(*map(_flat, expression.args)) if expression.args else expression
    whole = _flat(expression.args[0]).cancel()
    inner = whole.expand()
    rest, terms = inner.as_coeff_Add()
    parts = [part.as_coeff_Mul() for part in terms.as_ordered_terms()] if terms != 0 else []
    if not rest.is_Rational or not all(f.is_Rational and part.is_integer for f, part in parts):
        return expression.func(whole)  # a quotient of sizes, say
    for factor, part in parts:
        others = [*(other for other, p in parts if p is not part), rest]
        inside = part.func.__name__ == "floor" and factor.p == 1
        if inside and all((other / factor).is_Integer for other in others):
            return _flat(expression.func(inner - factor * part + factor * part.args[0]))
    steps = math.lcm(1, *(int(factor.q) for factor, _ in parts))
    below = (rest % 1) * steps // 1
    return expression.func(inner - rest + below / steps) + rest // 1
