"""Matrix products."""

from typing import Any

import numpy as np

from graphgen.op import Operand, composite, primitive
from graphgen.ops.elementwise import mul
from graphgen.ops.layout import dim, rank, reshape, shape, squeeze, swap_last, unsqueeze
from graphgen.ops.reduce import reduce_sum


@primitive("MatMul")
def matmul(a: Any, b: Any) -> Operand:
    """A B in the last two axes, the leading ones broadcast; a vector is one row or one column."""
    return np.matmul(a, b)


@matmul.vjp
def _(g: Any, y: Any, a: Any, b: Any) -> Operand:
    """dA = G Bᵀ, dB = Aᵀ G; vectors are lifted to matrices and back.

    With a matrix B, the leading axes of A are rows like any other: one product of matrices each,
    instead of a batch of them and its sum.
    """
    if rank(b) == 2 and rank(a) >= 2:
        rows, columns = (
            reshape(x, [-1, dim(b, i)]) if rank(a) > 2 else x for i, x in enumerate((a, g))
        )
        da = gemm(columns, b, transB=1)
        return reshape(da, shape(a)) if rank(a) > 2 else da, gemm(rows, columns, transA=1)
    row, column = rank(a) == 1, rank(b) == 1
    g = unsqueeze(g, [-1]) if column else g
    g = unsqueeze(g, [-2]) if row else g
    a2 = unsqueeze(a, [0]) if row else a
    b2 = unsqueeze(b, [-1]) if column else b
    da, db = matmul(g, swap_last(b2)), matmul(swap_last(a2), g)
    da = squeeze(_sum_to_rank(da, 2), [-2]) if row else da
    return da, squeeze(_sum_to_rank(db, 2), [-1]) if column else db


def _sum_to_rank(x: Operand, n: int) -> Operand:
    extra = rank(x) - n
    return reduce_sum(x, list(range(extra)), keepdims=0) if extra > 0 else x


@composite("Gemm")
def gemm(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Operand:
    """α op(A) op(B) + β C, with op the identity or the transpose."""
    a = swap_last(a) if transA else a
    b = swap_last(b) if transB else b
    y = matmul(a, b)
    y = y if alpha == 1.0 else mul(y, alpha)
    if c is None:
        return y
    return y + (c if beta == 1.0 else mul(c, beta))
