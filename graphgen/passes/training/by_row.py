"""Several low-rank adapters beside one base: each row of a batch has its own."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.bits import Blocks, Rows
from graphgen.errors import GraphgenError
from graphgen.graph import constant, produced_by
from graphgen.infer import describe, same_dim
from graphgen.match import Engine, Pass, PassReport, Rewrite
from graphgen.op import Op, find_op, is_a, read_attributes
from graphgen.operands import Array
from graphgen.ops.layout import _reshape
from graphgen.ops.quantized import (
    dynamic_quantize_linear,
    matmul_integer_to_float,
    matmul_nbits,
)
from graphgen.passes.training.adapters import (
    PRODUCTS,
    A,
    B,
    Linear,
    initializer,
    linear_at,
    linears,
    module_of,
)
from graphgen.passes.training.merged import check_finite, sites_of
from graphgen.passes.training.updates import Update
from graphgen.recognize.terms import multiplied, source, sum_of_terms
from graphgen.traits import Trait
from graphgen.value import Tensor, adopt

CHOICE = "adapter"
"""The input, int64[batch], that says which adapter each row has: from 1, and 0 for none."""

Placed: TypeAlias = Mapping[str, Update]
"""The update of each module."""

GAIN, SHIFT = ".lora_gain", ".lora_shift"
"""What follows a module's name in the names of the tables of m / ‖W + s Aᵀ Bᵀ‖ and of what is added
to its bias."""

_QUANTIZED: tuple[Op, ...] = (matmul_nbits, matmul_integer_to_float)
_ACTIVATIONS: tuple[Op, ...] = (ops.relu, ops.gelu, ops.quick_gelu, ops.tanh, ops.sigmoid)
_BIASES = {ops.gemm: 2, matmul_nbits: 5, matmul_integer_to_float: 6}
"""Which input is added to a product."""


def quantized_linears(model: ir.Model) -> dict[ir.Node, Linear]:
    """The products with weights in few bits, as quantizing writes them, with the modules they are.

    That of two terms, with eight bits in blocks, is the sum of both products.
    """
    nodes = {node: _quantized_at(node) for node in model.graph.all_nodes()}
    return {node: site for node, site in nodes.items() if site is not None}


def products(model: ir.Model) -> dict[ir.Node, Linear]:
    """The products with weights, in float32 or in few bits."""
    return linears(model) | quantized_linears(model)


def _quantized_at(node: ir.Node) -> Linear | None:
    product, x = multiplied(node), _operand(node)
    integers = product.inputs[1] if is_a(product, *_QUANTIZED) else None
    if x is None or x.shape is None or integers is None or constant(integers) is None:
        return None
    own = re.sub("_u?int[48]$", "", str(integers.name))
    module = module_of(product, integers, own)
    if is_a(product, matmul_nbits):
        size, out = x.shape[-1], product.attributes.get_int("N", 0)
        assert isinstance(size, int) and out is not None
        return Linear(module, integers, True, 1.0, (size, out))
    assert integers.shape is not None
    size, out = integers.shape.numpy()
    return Linear(module, integers, False, 1.0, (size, out))


def _operand(node: ir.Node) -> ir.Value | None:
    """The rows of float32 that a product multiplies; None where they are not known.

    Columns in another order, as in checkpoints that were sorted, are not those of the update.
    """
    product = multiplied(node)
    x = product.inputs[0] if product.inputs else None
    if is_a(product, matmul_integer_to_float):
        x = source(x, dynamic_quantize_linear)
    elif is_a(product, matmul_nbits) and x is not None:
        whole = sum_of_terms(x)
        if (whole is None) != (product is node):  # one term alone, or a sum of other things
            return None
        if whole is None and x.shape and x.shape[-1] != node.attributes.get_int("K", 0):
            return None
        x = whole or x
    if x is None or x.dtype is not ir.DataType.FLOAT or x.shape is None or not x.shape:
        return None
    turned = produced_by(x, ops.gather) if is_a(product, *_QUANTIZED) else None
    if turned is not None and turned.inputs[0] is not None:
        columns = len(turned.inputs[0].shape or ()) - 1
        if turned.attributes.get_int("axis", 0) in (-1, columns):
            return None
    return x


def weight_of(node: ir.Node) -> Array:
    """W, float[out, in], of a product, restored if it is in few bits."""
    if (site := linear_at(node)) is not None:
        return site.matrix()
    site = _quantized_at(node)
    assert site is not None
    product = multiplied(node)
    arrays = [None if value is None else constant(value) for value in product.inputs]
    if is_a(product, matmul_integer_to_float):
        q, scale, zero = arrays[1], arrays[3], arrays[5] if len(arrays) > 5 else None
        if q is None or scale is None or (zero is not None and zero.any()):
            raise _unreadable(site)
        return Rows(q.T, np.broadcast_to(scale, (q.shape[1],))).dequantized()
    q, scale, zero = arrays[1], arrays[2], arrays[3] if len(arrays) > 3 else None
    bits: Any = product.attributes.get_int("bits", 4)
    if q is None or scale is None or bits not in (4, 8) or _is_shifted(node):
        raise _unreadable(site)
    if zero is None:
        middle, count = (8 | 8 << 4, -(-q.shape[1] // 2)) if bits == 4 else (128, q.shape[1])
        zero = np.full((len(q), count), middle, np.uint8)
    if zero.dtype != np.uint8:
        raise _unreadable(site)
    blocks = Blocks(q, scale.reshape(len(q), -1), zero.reshape(len(q), -1), site.sizes[0], bits)
    return blocks.dequantized()


def _is_shifted(node: ir.Node) -> bool:
    """Whether something is added for each block, as GGUF's minima: the weight is another, then."""
    x, sums = _operand(node), [node]
    for y in sums:
        sums += [use.node for use in y.outputs[0].uses() if is_a(use.node, ops.add)]
    thin = [source(y, ops.mul) or y for add in sums for y in add.inputs]
    blocks = [source(source(y, *PRODUCTS), ops.reduce_sum) for y in thin]
    return any(source(y, _reshape) is x for y in blocks)


def _unreadable(site: Linear) -> GraphgenError:
    problem = "is in few bits that magnitudes and heads of adapters cannot be taken of"
    return GraphgenError(f"adapter: {site.weight.name} {problem}: give the folder in float32")


def by_row(who: str, adapters: Sequence[Placed]) -> Pass:
    """y = x W + x Aₖ Bₖ for a row x of the batch and its adapter k (S-LoRA, arXiv 2311.03285).

    The matrices of all adapters lie in two tables a module, of which each row gathers its own; an
    adapter that lacks the module, or is of a lower rank, has zeros there. Where some have
    magnitudes (DoRA) or biases, a third and a fourth one have the factor of each output and what is
    added to it. W may be in few bits. Rows that were made one axis of batch and length by a Reshape
    have the adapters of their batch.

    Raises GraphgenError for a module without a product in the model or of another size, and for a
    product whose operand is not known to be rows of the batch.
    """

    def run(model: ir.Model, engine: Engine) -> PassReport:
        found, graph = products(model), model.graph
        sites, nodes = dict[str, Linear](), {site.module: node for node, site in found.items()}
        for adapter in adapters:
            sizes = {name: update.shape for name, update in adapter.items()}
            known = sites_of(who, found, sizes)
            sites |= {name: known[name] for name in sizes}
            for name, update in adapter.items():
                check_finite(who, name, *update)
        choice, batch = _choice(who, graph)
        matched = [node for node, site in found.items() if site.module in sites]
        ranks = {node: _rank(_operand(node), batch) for node in matched}
        tables = {name: _tables(nodes[name], sites[name], adapters) for name in sites}

        def adapted(node: ir.Node) -> Rewrite:
            site, op, x = found[node], find_op(node), _operand(node)
            assert op is not None and x is not None
            rank = ranks[node]
            if not rank:
                raise GraphgenError(
                    f"{who}: {site.module} reads {describe(x)}, and rows that choose adapters are "
                    f"those of {batch}: merge the adapter instead"
                )
            chosen = {
                part: ops.gather(adopt(table), adopt(choice), axis=0)
                for part, table in tables[site.module].items()
            }
            between, flat = [*range(1, rank - 1)], rank > len(x.shape or ())

            def spread(part: Tensor) -> Tensor:
                """A row of each output, for all rows of an element of the batch."""
                return ops.unsqueeze(part, [1] if flat else between) if rank > 2 else part

            def as_flat(y: Tensor) -> Tensor:
                return ops.reshape(y, [-1, site.sizes[1]]) if flat else y

            def by_batch(y: Tensor, size: int) -> Tensor:
                if not flat:
                    return y if rank > 2 else ops.unsqueeze(y, [1])
                return ops.reshape(y, [ops.dim(adopt(choice), 0), -1, size])

            rows = by_batch(adopt(x), site.sizes[0])  # it may have an adapter since
            a, b = chosen[A], chosen[B]
            if rank > 3:
                a, b = (ops.unsqueeze(part, between[:-1]) for part in (a, b))
            update = ops.matmul(ops.matmul(rows, a), b)
            update = update if rank > 2 else ops.squeeze(update, [1])
            update = update if site.alpha == 1.0 else update * np.float32(site.alpha)
            result, plain = _with_and_without_bias(op, node)
            if GAIN in chosen:
                gain = spread(chosen[GAIN])
                plain = by_batch(plain, site.sizes[1]) if flat else plain
                update = gain * update + (gain - np.float32(1)) * plain
            if SHIFT in chosen:
                update = update + spread(chosen[SHIFT])
            inputs = [value for value in node.inputs if value is not None]
            made = result + as_flat(update)
            return Rewrite(made, inputs, f"{len(adapters)} adapters", may_share=True)

        rules = {op: [adapted] for op in (*PRODUCTS, *_QUANTIZED, ops.reduce_sum)}
        report = engine.run("by_row", model, rules, forward=True, nodes=matched)
        if left := [site for site in report.sites if site.status != "fired"]:
            raise GraphgenError(f"{who}: {left[0].where} has no adapter: {left[0].reason}")
        for made in tables.values():
            for table in made.values():
                graph.register_initializer(table)
        return report

    return Pass("by_row", run)


def _with_and_without_bias(op: Op, node: ir.Node) -> tuple[Tensor, Tensor]:
    """What a product gives, and what it gives without what it adds."""
    given, attributes = [*map(adopt, node.inputs)], read_attributes(op, node)
    result, place = op(*given, **attributes), _BIASES.get(op, len(given))
    bias = given[place] if place < len(given) else None
    if bias is None:
        return result, result
    return result, result - bias * np.float32(attributes.get("beta", 1.0))


def _rank(x: ir.Value | None, batch: int | ir.SymbolicDim) -> int:
    """The rank of rows (batch, ..., in); 3 for (batch · length, in), and 0 if that is not known."""
    shape = [*(x.shape or ())] if x is not None else []
    if len(shape) > 1 and same_dim(shape[0], batch):
        return len(shape)
    source: ir.Value | None = x
    while source is not None and len(shape) == 2:
        node = source.producer()
        if node is None:
            return 0
        source = node.inputs[0]
        if is_a(node, _reshape):  # whose rows are in the order of the batch
            first = [*(source.shape or ())][:1] if source is not None else []
            return 3 if first and same_dim(first[0], batch) else 0
        by_rows = is_a(node, Trait.BY_ROWS, *_ACTIVATIONS) or linear_at(node) is not None
        if not by_rows or source is None or len(source.shape or ()) != 2:
            return 0
    return 0


def _choice(who: str, graph: ir.Graph) -> tuple[ir.Value, int | ir.SymbolicDim]:
    """The new input, and the size of the batch, which all inputs but settings have first."""
    settings = [v for v in graph.inputs if v.shape and len(v.shape) == 1 and v.shape[0] == 1]
    rows = [value for value in graph.inputs if value not in settings]
    firsts = [value.shape[0] for value in rows if value.shape]
    if not firsts or len(firsts) < len(rows) or not all(map(same_dim, firsts, firsts[1:])):
        raise GraphgenError(
            f"{who}: the inputs have no first size in common, "
            f"{', '.join(map(describe, graph.inputs))}, so no rows choose adapters: merge one"
        )
    if any(value.name == CHOICE for value in graph.inputs):
        raise GraphgenError(f"{who}: the model has an input {CHOICE!r} already: give its base")
    kind = ir.TensorType(ir.DataType.INT64)
    value = ir.Value(name=CHOICE, type=kind, shape=ir.Shape([firsts[0]]))
    graph.inputs.append(value)
    return value, firsts[0]


def _tables(node: ir.Node, site: Linear, adapters: Sequence[Placed]) -> dict[str, ir.Value]:
    """Aᵀ, float[1 + adapters, in, rank], and s · Bᵀ, float[1 + adapters, rank, out].

    Where they are needed also factors and what is added to the bias, float[1 + adapters, out].
    """
    own = {number: x[site.module] for number, x in enumerate(adapters, 1) if site.module in x}
    size, out = site.sizes
    rank, count = max(len(update.a) for update in own.values()), len(adapters) + 1
    a, b = np.zeros((count, size, rank), np.float32), np.zeros((count, rank, out), np.float32)
    gains, shifts = np.ones((count, out), np.float32), np.zeros((count, out), np.float32)
    for number, update in own.items():
        a[number, :, : len(update.a)], b[number, : len(update.a)] = update.a.T, update.b.T
        if update.magnitude is not None:
            gains[number] = update.gain(weight_of(node))
        if update.shift is not None:
            shifts[number] = update.shift
    found: dict[str, Array] = {A: a, B: b}
    found |= {GAIN: gains} if (gains != 1).any() else {}
    found |= {SHIFT: shifts} if shifts.any() else {}
    return {part: initializer(site.module + part, table) for part, table in found.items()}
