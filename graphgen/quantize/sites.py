"""What is quantized: products with a constant matrix, tables of rows, and what is put there."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.graph import constant, produced_by
from graphgen.infer import describe
from graphgen.match import Miss, Refusal, Rewrite
from graphgen.op import is_a
from graphgen.operands import Array
from graphgen.ops.quantized import (
    dynamic_quantize_linear,
    gather_block_quantized,
    matmul_integer_to_float,
    matmul_nbits,
)
from graphgen.recognize.axes import permutation_of
from graphgen.record import current_tape
from graphgen.targets import Target
from graphgen.value import Tensor, Value, adopt

AccuracyLevel: TypeAlias = Literal[0, 4]
"""Of MatMulNBits: 0 reads floats as they are, 4 rounds them to int8 in blocks: mostly faster."""

_TINY = 1e-30  # instead of 0, the largest of a block of zeros
SMALL = 2048
"""The weights of a table below which there is nothing to gain."""
_FLOAT = ir.DataType.FLOAT


@dataclass
class Site:
    """y = α x W + bias with a constant W, (N, K) if `by_rows`, else (K, N); or rows of a table.

    `reads` is what the nodes of the site read, x and weights.
    """

    end: ir.Node  # makes y
    node: ir.Node  # the product, or the Gather
    x: ir.Value  # of a table, the indices
    weight: ir.Value
    by_rows: bool
    table: bool = False
    alpha: float = 1.0
    bias: ir.Value | Array | None = None
    symmetric: bool = False
    reads: list[ir.Value] = field(default_factory=list)

    def now(self) -> "Site":
        """The same with the x that its node reads now: others may have been rewritten before."""
        x = self.node.inputs[1 if self.table else 0]
        assert x is not None
        return replace(self, x=x, reads=[x if value is self.x else value for value in self.reads])

    @property
    def columns(self) -> int:
        """K, of a product x (..., K) Wᵀ."""
        shape = self.weight.shape
        return int(shape.numpy()[1 if self.by_rows else 0]) if shape is not None else 0


def site_at(node: ir.Node, tables: Collection[ir.Value]) -> Site | Miss | Refusal | None:
    """A product with a constant matrix, or a lookup in one of the tables.

    A Miss or a Refusal says why a product or a lookup cannot be quantized; None is for nodes that
    are neither.
    """
    if is_a(node, ops.gather):
        return _table_at(node, tables)
    return _product_at(node) if is_a(node, ops.matmul, ops.gemm, ops.fused_matmul) else None


def _product_at(node: ir.Node) -> Site | Miss | None:
    given, y = node.attributes, node.outputs[0]
    (x, matrix), c = node.inputs[:2], node.inputs[2] if len(node.inputs) > 2 else None
    weight, turned = _constant(matrix)
    if x is None or matrix is None or weight is None:
        return None
    if not _is_matrix(weight):
        return Miss(f"the operand is {describe(weight)}, not a float matrix")
    for name in ("transA", "transBatchA", "transBatchB"):
        if given.get_int(name, 0) != 0:
            return Miss(f"{name} is {given.get_int(name)}, and no quantized product has that")
    if x.dtype is not _FLOAT or x.shape is None or len(x.shape) < 2 or y.shape is None:
        return Miss(f"x is {describe(x)}, and not known to be float matrices")
    by_rows = turned != (given.get_int("transB", 0) != 0)
    site = Site(node, node, x, weight, by_rows, alpha=given.get_float("alpha", 1.0) or 0.0)
    site.reads = [x, matrix, weight]
    columns = weight.shape[0 if by_rows else 1] if weight.shape is not None else None
    if c is not None:
        site.bias = _bias(c, columns, given.get_float("beta", 1.0))
        site.reads.append(c)
        return Miss(f"C is {describe(c)}, not {columns} constants") if site.bias is None else site
    [*users] = [use.node for use in y.uses()]
    if len(users) == 1 and not y.is_graph_output() and produced_by(users[0].outputs[0], ops.add):
        other = next((v for v in users[0].inputs if v is not None and v is not y), None)
        site.bias = _bias(other, columns, 1.0)
        if site.bias is not None and other is not None:
            site.end = users[0]
            site.reads.append(other)
    return site


def _constant(value: ir.Value | None) -> tuple[ir.Value | None, bool]:
    """The weight that a matrix is, if it is one, and whether it is the weight's transpose."""
    turn = produced_by(value, ops.transpose)
    if turn is not None and permutation_of(turn) == [1, 0]:
        value = turn.inputs[0]
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    known = value is not None and not value.is_graph_input() and tensor is not None
    return (value, turn is not None) if known else (None, False)


def _is_matrix(weight: ir.Value) -> bool:
    tensor = ir.convenience.get_const_tensor(weight)
    floats = tensor is not None and tensor.dtype is _FLOAT and len(tensor.shape) == 2
    return tensor is not None and floats and tensor.size > 0


def _bias(value: ir.Value | None, columns: Any, factor: float | None) -> ir.Value | Array | None:
    """`value` · `factor` as a vector of N; None unless `value` is N constants."""
    array = constant(value)
    if array is None or array.shape not in ((columns,), (1, columns)):
        return None
    if array.ndim == 1 and factor == 1.0:
        return value
    scaled: Array = (array.reshape(-1) * np.float32(factor)).astype(np.float32)
    return scaled


def _table_at(node: ir.Node, tables: Collection[ir.Value]) -> Site | Refusal | None:
    table, indices = node.inputs
    weight, turned = _constant(table)
    if weight not in tables or weight is None or turned or not _is_matrix(weight):
        return None
    if node.attributes.get_int("axis", 0) != 0 or indices is None or constant(indices) is not None:
        return None
    size = 0 if weight.const_value is None else weight.const_value.size
    if size < SMALL:
        return Refusal(f"the table has {size} weights; below {SMALL} there is nothing to gain")
    return Site(node, node, indices, weight, True, table=True, reads=[indices, weight])


def product(
    site: Site,
    made: Mapping[str, ir.Value],
    shape: tuple[int, ...],
    shared: bool,
    order: Array | None = None,
    level: AccuracyLevel = 4,
) -> Tensor:
    """A product with integers, recorded; `shared` ones are (N, K), as a table has them.

    With `order`, they are in this order along K. `level` is of four bits: with eight, any but 4
    takes many times as long.
    """
    scale, (rows, columns) = Value(made["scale"]), shape
    x = adopt(site.x) if order is None else ops.gather(adopt(site.x), order, axis=-1)
    if "shift" in made:  # x W + Σ over blocks of shift · Σ x, which is a thin product of floats
        less = {role: value for role, value in made.items() if role != "shift"}
        count = _sizes(made["shift"])[1]
        leading = [ops.dim(x, i) for i in range(x.ndim - 1)]
        sums = ops.reduce_sum(ops.reshape(x, [*leading, count, -1]), [-1], keepdims=0)
        thin = ops.matmul(sums, ops.transpose(Value(made["shift"]), perm=[1, 0]))
        thin = thin if site.alpha == 1.0 else thin * np.float32(site.alpha)
        return product(site, less, shape, shared, order, level) + thin
    bias, tape = adopt(site.bias), current_tape()
    assert tape is not None
    if site.alpha != 1.0:
        array = constant(scale)
        assert array is not None
        scale = Value(tape.constant(array * np.float32(site.alpha)))
    # Level 4: x is rounded to int8 in blocks, of which the products are exact.
    how: dict[str, Any] = {"K": columns, "N": rows, "accuracy_level": 4}
    zeros = None if site.symmetric or "int8" in made else Value(made["zero_point"])
    if "int4" in made:
        how |= {"block_size": _block_size(made["int4"], 4), "accuracy_level": level}
        return matmul_nbits(x, Value(made["int4"]), scale, zeros, None, bias, **how)
    if "uint8" in made:
        how |= {"bits": 8, "block_size": (size := _block_size(made["uint8"], 8))}
        how["K"] = whole = -(-columns // size) * size
        terms = _two_terms(x, size, whole - columns)
        y = matmul_nbits(terms, Value(made["uint8"]), scale, zeros, None, None, **how)
        y = ops.reduce_sum(y, [0], keepdims=0)
        return y if bias is None else y + bias
    q, x_scale, x_zero = dynamic_quantize_linear(x)
    b: Tensor = Value(made["int8"])
    b = ops.transpose(b, perm=[1, 0]) if shared else b
    return matmul_integer_to_float(q, b, x_scale, scale, x_zero, None, bias)


def _two_terms(x: Tensor, size: int, padding: int) -> Tensor:
    """x (..., K) as a sum of two terms (2, ..., K) that int8 holds in blocks of `size`.

    The first is x rounded to multiples of its block's largest element over 127, as the kernel
    rounds it at level 4: which changes nothing further. The second is what that leaves.
    """
    leading = [ops.dim(x, i) for i in range(x.ndim - 1)]
    padded = ops.pad(x, [0] * (2 * x.ndim - 1) + [padding]) if padding else x
    blocks = ops.reshape(padded, [*leading, -1, size])
    widest = ops.reduce_max(ops.abs(blocks), [-1])
    unit = ops.maximum(widest, np.float32(_TINY)) * np.float32(1 / 127)
    first = ops.round(blocks / unit) * unit
    both = [ops.unsqueeze(term, [0]) for term in (first, blocks - first)]
    return ops.reshape(ops.concat(*both, axis=0), [2, *leading, -1])


def rows(site: Site, made: Mapping[str, ir.Value], shape: tuple[int, ...]) -> Tensor:
    """The rows of a table of integers, recorded."""
    indices, given = adopt(site.x), {role: Value(value) for role, value in made.items()}
    scale = given["scale"]
    if "shift" in made:  # of each block
        y = rows(site, {role: value for role, value in made.items() if role != "shift"}, shape)
        shift, leading = ops.gather(given["shift"], indices), [ops.dim(y, i) for i in range(y.ndim)]
        y = ops.reshape(y, [*leading[:-1], _sizes(made["shift"])[1], -1])
        return ops.reshape(y + ops.unsqueeze(shift, [-1]), [*leading[:-1], shape[1]])
    if "int8" in made:
        q = ops.cast(ops.gather(given["int8"], indices), to=_FLOAT)
        factors = ops.gather(scale, indices)
        if scale.ndim == 1:  # as a product wants it
            factors = ops.unsqueeze(factors, [-1])
        return q * factors
    if "uint8" in made:
        integers = (given[role] for role in ("uint8", "zero_point"))
        q, zeros = (ops.cast(ops.gather(x, indices), to=_FLOAT) for x in integers)
        count, size = _sizes(made["uint8"])[1:]
        leading = [ops.dim(indices, i) for i in range(indices.ndim)]
        steps = q - ops.unsqueeze(zeros, [-1])
        if "rest" in made:
            pairs = ops.cast(ops.gather(given["rest"], indices), to=_FLOAT)
            second = ops.floor(pairs * np.float32(1 / 16))
            both = [ops.unsqueeze(e, [-1]) for e in (pairs - second * np.float32(16), second)]
            finer = ops.reshape(ops.concat(*both, axis=-1), [*leading, count, size])
            steps = steps + (finer * np.float32(1 / 16) - np.float32(0.5))
        blocks = steps * ops.unsqueeze(ops.gather(scale, indices), [-1])
        y = ops.reshape(blocks, [*leading, count * size])
        return y if count * size == shape[1] else ops.slice_(y, [0], [shape[1]], [-1])
    table, size = ops.reshape(given["int4"], [shape[0], -1]), _block_size(made["int4"], 4)
    return gather_block_quantized(table, indices, scale, given["zero_point"], block_size=size)


def with_integers(
    site: Site,
    made: Mapping[str, ir.Value],
    shape: tuple[int, ...],
    reason: str,
    shared: bool = False,
    order: Array | None = None,
    level: AccuracyLevel = 4,
) -> Rewrite:
    """The rewrite of a site whose weight, (N, K) of this shape, became integers: see `product`."""
    now = site.now()
    if site.table:
        return Rewrite(rows(now, made, shape), now.reads, reason)
    return Rewrite(product(now, made, shape, shared, order, level), now.reads, reason)


def reads_rows(target: Target, columns: int, block_size: int) -> bool:
    """Whether a target reads rows of a table in blocks of four bits."""
    kernels = target.kernels.get((op := gather_block_quantized).domain, {}).get(op.name, [])
    able = any("uint8" in dtypes.get("T1", ()) for *_, dtypes in kernels)
    blocks, rest = divmod(columns, block_size)
    misread = target.name == "cuda" and blocks % 2 == 1  # two zero points share a byte
    return able and not rest and not misread


def _block_size(integers: ir.Value, bits: int) -> int:
    return 8 // bits * _sizes(integers)[-1]


def _sizes(weight: ir.Value) -> tuple[int, ...]:
    assert weight.const_value is not None
    return tuple(weight.const_value.shape.numpy())
