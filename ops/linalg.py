"""Matrix products."""

import math
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import registry

from graphgen.infer import CHECKS, expect_same, same_dim
from graphgen.op import composite, infer_from_body, primitive
from graphgen.operands import Array
from graphgen.ops.elementwise import equal, mul, neg
from graphgen.ops.layout import (
    arange,
    cast_like,
    dim,
    expand,
    gather,
    numpy_dtype,
    rank,
    reshape,
    reshape_like,
    shape,
    size_at,
    squeeze,
    swap_last,
    transpose,
    unsqueeze,
    zeros_like,
)
from graphgen.ops.reduce import reduce_sum
from graphgen.record import Operands, TensorLike
from graphgen.traits import Trait
from graphgen.value import Tensor, sizes_of


@primitive("MatMul", ufunc=np.matmul, traits=Trait.PRODUCT | Trait.BY_ROWS)
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Σ_k a[..., i, k] b[..., k, j]: (..., M, K) and (..., K, N) to (..., M, N).

    The leading axes broadcast; a vector counts as one row on the left, as one column on the right.
    Raises GraphgenError if the two sizes K differ.
    """
    x, w = np.asarray(a), np.asarray(b)
    return _exact_in_float64(x, w) if x.dtype.kind in "iu" else np.asarray(np.matmul(x, w))


def _exact_in_float64(a: Array, b: Array) -> Array:
    """The product of integers, in floats if all sums fit: numpy multiplies those much faster."""
    sizes = [float(max(-int(x.min(initial=0)), int(x.max(initial=0)))) for x in (a, b)]
    if a.shape[-1] * sizes[0] * sizes[1] > min(2**53, np.iinfo(a.dtype).max):
        return np.asarray(np.matmul(a, b))
    return np.asarray(np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(a.dtype))


@matmul.vjp
def _(g: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """dA = G Bᵀ, dB = Aᵀ G; vectors are lifted to matrices and back.

    With a matrix B, the leading axes of A are rows like any other: one product of matrices each,
    instead of a batch of them and its sum.
    """
    if rank(b) == 2 and rank(a) >= 2:
        rows, columns = (
            reshape(x, [-1, dim(b, i)]) if rank(a) > 2 else x for i, x in enumerate((a, g))
        )
        da = gemm(columns, b, transB=1)
        return reshape_like(da, a) if rank(a) > 2 else da, gemm(rows, columns, transA=1)
    row, column = rank(a) == 1, rank(b) == 1
    g = unsqueeze(g, [-1]) if column else g
    g = unsqueeze(g, [-2]) if row else g
    a2 = unsqueeze(a, [0]) if row else a
    b2 = unsqueeze(b, [-1]) if column else b
    da, db = matmul(g, swap_last(b2)), matmul(swap_last(a2), g)
    da = squeeze(_sum_to_rank(da, 2), [-2]) if row else da
    return da, squeeze(_sum_to_rank(db, 2), [-1]) if column else db


def _sum_to_rank(x: Tensor, n: int) -> Tensor:
    extra = rank(x) - n
    return reduce_sum(x, list(range(extra)), keepdims=0) if extra > 0 else x


@matmul.flops
def _(y: Sequence[int], a: Sequence[int]) -> int:
    """2 K for each element of the result."""
    return 2 * a[-1] * math.prod(y)


@composite("Gemm", traits=Trait.PRODUCT)
def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """α op(A) op(B) + β C: (M, K), (K, N) and, broadcast to (M, N), C; to (M, N).

    op is the transpose if transA or transB is 1, else the identity.
    """
    a = swap_last(a) if transA else a
    b = swap_last(b) if transB else b
    y = matmul(a, b)
    y = y if alpha == 1.0 else mul(y, alpha)
    if c is None:
        return y
    return y + (c if beta == 1.0 else mul(c, beta))


@composite("FusedMatMul", domain="com.microsoft", traits=Trait.PRODUCT)
def fused_matmul(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Tensor:
    """α op(A) op(B): (..., M, K) and (..., K, N) to (..., M, N), with leading axes that broadcast.

    op is the transpose of the last two axes if transA or transB is 1, after that of (M, ..., K) to
    (..., M, K) if transBatchA or transBatchB is 1; else the identity, as for a vector.
    """
    y = matmul(_turned(a, transA, transBatchA), _turned(b, transB, transBatchB))
    return y if alpha == 1.0 else mul(y, alpha)


infer_from_body(fused_matmul)  # the library does not know transposed batches


def _turned(x: Tensor, last: int, batch: int) -> Tensor:
    """An operand of a fused product, turned as its attributes say."""
    if batch and (n := rank(x)) > 2:
        x = transpose(x, perm=[*range(1, n - 1), 0, n - 1])
    return swap_last(x) if last and rank(x) > 1 else x


def labels_of(equation: str, ranks: Sequence[int]) -> list[str] | None:
    """The labels of an einsum's operands and result, one per axis; None if they do not fit."""
    terms, arrow, out = equation.replace(" ", "").partition("->")
    operands = terms.split(",")
    if len(operands) != len(ranks):
        return None
    letters = "".join(operands).replace(".", "")
    counts = [n - len(t.replace("...", "")) for t, n in zip(operands, ranks, strict=True)]
    if not arrow:
        out = "..." + "".join(sorted(c for c in letters if letters.count(c) == 1))
    free = _unused(letters)
    return [
        t.replace("...", "".join(free[:n][::-1]))
        for t, n in zip((*operands, out), (*counts, max(counts)), strict=True)
    ]


def _unused(labels: str) -> list[str]:
    return [c for c in string.ascii_uppercase + string.ascii_lowercase if c not in labels]


@primitive("Einsum", traits=Trait.PRODUCT)
def einsum(*xs: Operands, equation: str) -> Tensor:
    """Σ of the products of elements with the same labels, over labels that the result lacks.

    `ops.einsum(q, k, equation="bihd,bjhd->bhij")`. A label twice in one term takes the diagonal.
    """
    return np.asarray(np.einsum(equation, *list[Any](xs)))


@einsum.vjp
def _(g: Tensor, xs: Sequence[Tensor], equation: str) -> tuple[Tensor, ...]:
    """dx = the sum over labels that x lacks; labels summed in x alone are repeated.

    Of a label that x has again, each further one gets a name of its own, and the product with an
    identity matrix leaves zeros beside the diagonal.
    """
    terms = labels_of(equation, [rank(x) for x in xs])
    assert terms is not None
    free, out = _unused("".join(terms)), terms.pop()
    gradients = []
    for i, (x, term) in enumerate(zip(xs, terms, strict=True)):
        given, others = [out, *terms[:i], *terms[i + 1 :]], [*xs[:i], *xs[i + 1 :]]
        own, names = list(term), iter(free)
        for axis, label in enumerate(term):
            if (first := term.index(label)) < axis:
                own[axis] = next(names)
                given.append(label + own[axis])
                others.append(_identity(x, first, axis))
        shared = [c for c in own if any(c in t for t in given)]
        dx = einsum(g, *others, equation=f"{','.join(given)}->{''.join(shared)}")
        alone = [k for k, c in enumerate(own) if c not in shared]
        dx = unsqueeze(dx, alone) if alone else dx
        gradients.append(expand(dx, shape(x)) if _is_smaller(dx, x) else dx)
    return tuple(gradients)


def _is_smaller(g: Tensor, x: Tensor) -> bool:
    """Whether an axis has the size 1, or may have it, where x has more: others repeat it there."""
    pairs = zip(sizes_of(g) or (), sizes_of(x) or (), strict=False)
    return any(
        n != 1 and not same_dim(m, n) and (m == 1 or not isinstance(m, int)) for m, n in pairs
    )


def _identity(x: Tensor, row: int, column: int) -> Tensor:
    """1 on the diagonal between two axes of x."""
    rows, columns = unsqueeze(arange(dim(x, row)), [1]), unsqueeze(arange(dim(x, column)), [0])
    return cast_like(equal(rows, columns), x)


@einsum.flops
def _(xs: Sequence[Sequence[int]], equation: str) -> int:
    """For each choice of all labels, the products and the sum."""
    sizes: dict[str, int] = {}
    for term, dims in zip(labels_of(equation, list(map(len, xs))) or (), xs, strict=False):
        sizes |= {c: max(n, sizes.get(c, 1)) for c, n in zip(term, dims, strict=True)}
    return len(xs) * math.prod(sizes.values())


@primitive("Trilu", traits=Trait.SCALAR | Trait.MOVES)
def trilu(x: Tensor, k: TensorLike | None = None, *, upper: int = 1) -> Tensor:
    """The upper (or lower) triangle of the last two axes, from diagonal k; zeros elsewhere."""
    diagonal = 0 if k is None else int(np.asarray(k).item())
    return np.triu(x, diagonal) if upper else np.tril(x, diagonal)


@trilu.vjp
def _(g: Tensor, k: Tensor, upper: int) -> Tensor:
    """dx = the same triangle of g."""
    return trilu(g, k, upper=upper)


def _check_matmul(node: ir.Node) -> None:
    a, b = (() if v is None or v.shape is None else tuple(v.shape) for v in node.inputs)
    if not a or not b:
        return
    k, axis = a[-1], max(-2, -len(b))
    if isinstance(k, int) and isinstance(b[axis], int) and k != b[axis]:
        raise ValueError(
            f"dimension -1 of A is {k} and dimension {axis} of B is {b[axis]}; they must be equal: "
            "ops.swap_last exchanges the last two axes of a matrix"
        )


CHECKS["MatMul"] = _check_matmul


@primitive("Inverse", domain="com.microsoft")
def inverse(x: Tensor) -> Tensor:
    """X⁻¹ of each matrix, (..., M, M). A singular one gives NaN or infinities."""
    given = _wide(x)
    try:
        found: Array = np.linalg.inv(given)
    except np.linalg.LinAlgError:
        regular = np.linalg.det(given)[..., None, None] != 0
        found = np.linalg.inv(np.where(regular, given, np.nan))
    return found.astype(numpy_dtype(x))


def _wide(x: Tensor) -> Array:
    """x in a dtype for which numpy has decompositions."""
    array = np.asarray(x)
    return array.astype(np.promote_types(array.dtype, np.float32))


def _as_x(context: Any, node: ir.Node) -> None:
    """The shape of x, whose matrices are square: for others the runtime ends the process (1.32)."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    rows, columns = x.shape[-2:] if x.shape is not None and len(x.shape) > 1 else (1, 1)
    if isinstance(rows, int) and isinstance(columns, int) and rows != columns:
        raise ValueError(f"a matrix of {rows} x {columns} has no inverse; it must be square")
    expect_same([rows, columns], context)
    y.type, y.shape = x.type, x.shape


registry.register("com.microsoft", "Inverse", since_version=1)(_as_x)


@inverse.vjp
def _(g: Tensor, y: Tensor) -> Tensor:
    """dX = -Yᵀ G Yᵀ."""
    turned = swap_last(y)
    return neg(matmul(matmul(turned, g), turned))


@primitive("Det")
def det(x: Tensor) -> Tensor:
    """The determinant of each matrix, (..., M, M) to (...)."""
    return np.asarray(np.linalg.det(_wide(x)), numpy_dtype(x))


@det.vjp
def _(g: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """dX = g C, with the cofactors C = det X X⁻ᵀ (Jacobi), also where X is singular.

    There torch 2.13 has 0, which is true only below rank M - 1. Of matrices larger than 8 x 8, it
    is NaN there: their minors would take M² times the memory.
    """
    size, g = size_at(x, -1), unsqueeze(g, [-2, -1])
    if isinstance(size, int) and size <= _SMALL:
        return g * _cofactors(x, size)
    return g * unsqueeze(y, [-2, -1]) * swap_last(inverse(x))


_SMALL = 8


def _cofactors(x: Tensor, size: int) -> Tensor:
    """(-1)^(i + j) of the determinant of X without row i and column j."""
    n = rank(x)
    if size < 2:
        return zeros_like(x) + 1.0
    rest = np.array([[j for j in range(size) if j != i] for i in range(size)])
    parts = gather(gather(x, rest, axis=-2), rest, axis=-1)  # (..., row, rest, column, rest)
    minors = det(transpose(parts, perm=[*range(n - 2), n - 2, n, n - 1, n + 1]))
    signs = (-1.0) ** np.add.outer(np.arange(size), np.arange(size))
    return minors * cast_like(signs, x)
