"""Products of matrices: the axes of what they multiply, and of their results."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import onnx_ir as ir

from graphgen.graph import present_inputs
from graphgen.match import Miss
from graphgen.op import find_op, read_attributes
from graphgen.ops.linalg import fused_matmul, matmul
from graphgen.ops.shapes import broadcast_partner
from graphgen.recognize.axes import Dim, Dims, View, is_always, unify

PRODUCTS = (matmul, fused_matmul)
"""Products, also one with layouts and a factor of its own, as the runtime saves them."""

_T = TypeVar("_T")


def operand_of(product: ir.Node, i: int, view: View | None) -> View | None:
    """Operand i as the product multiplies it."""
    return None if view is None else replace(view, dims=_turned(product, i, view.dims))


def _turned(product: ir.Node, i: int, dims: Sequence[_T]) -> list[_T]:
    """The dimensions of operand i in the order in which the product multiplies them."""
    op = find_op(product)
    given = {} if op is None else read_attributes(op, product)
    dims = list(dims)
    if given.get("transBatch" + "AB"[i]) and len(dims) > 2:
        dims = [*dims[1:-1], dims[0], dims[-1]]
    return [*dims[:-2], *dims[:-3:-1]] if given.get("trans" + "AB"[i]) else dims


def factor_in(product: ir.Node) -> float:
    """What a product's result is multiplied by in it."""
    return product.attributes.get_float("alpha", 1.0)


def multiplied(
    product: ir.Node, a: View, b: View, *, unequal: list[Dim] | None = None
) -> Dims | Miss:
    """The axes of a product, the contracted ones unified.

    Batches that may differ, as one of them may be 1, are noted in `unequal` if it is given.
    """
    inputs = enumerate(present_inputs(product))
    shapes = [_turned(product, i, x.shape.dims) for i, x in inputs if x.shape is not None]
    if not unify(a.dims[-1], b.dims[-2], equal=True):
        return Miss(f"the features {shapes[0][-1]} and {shapes[1][-2]} are of different axes")
    batch: Dims = []
    for i in range(3, 1 + max(len(a.dims), len(b.dims))):
        own, other = (v.dims[-i] if len(v.dims) >= i else [] for v in (a, b))
        if own and other:
            sizes = [shape[-i] for shape in shapes]
            equal = broadcast_partner(sizes) is not None or is_always(*sizes)
            if not unify(own, other, equal=equal):
                if unequal is None or not unify(own, other, equal=True):
                    return Miss(f"the batches {sizes[0]} and {sizes[1]} may differ")
                unequal.append(own)
        batch.insert(0, own or other)
    return [*batch, a.dims[-2], b.dims[-1]]
