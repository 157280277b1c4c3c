"""Matrix products in a training graph, with little memory."""

from functools import partial
from typing import Any

import onnx_ir as ir

from graphgen import ops
from graphgen.graph import present_inputs, produced_by
from graphgen.match import Engine, Pass, PassReport, Rewrite, Rule
from graphgen.op import Op, find_op, is_a, read_attributes
from graphgen.ops.layout import swap_of
from graphgen.recognize.axes import permutation_of, swaps_last
from graphgen.value import Tensor, Value, adopt


def transposed_operands(node: ir.Node) -> Rewrite | None:
    """A Gemm of transposed matrices as one with the opposite flags."""
    inputs, attributes, found = [*map(adopt, node.inputs)], _attributes(node), False
    for i, flag in enumerate(("transA", "transB")):
        made = produced_by(node.inputs[i], ops.transpose)
        if made is not None and made.inputs[0] is not None:
            inputs[i], attributes[flag], found = adopt(made.inputs[0]), 1 - attributes[flag], True
    if not found:
        return None
    result = ops.gemm(*inputs, **attributes)
    return Rewrite(
        result, [x for x in inputs if x is not None], "transposes as flags", may_share=True
    )


def transposed_product(node: ir.Node) -> Rewrite | None:
    """(A B)ᵀ = Bᵀ Aᵀ: the gradient of a table that is tied to the head is as large as the table."""
    made = produced_by(node.inputs[0], ops.gemm)
    if made is None or len(present_inputs(made)) > 2 or permutation_of(node) != [1, 0]:
        return None
    a, b = map(Value, present_inputs(made))
    attributes = _attributes(made)
    flags = {"transA": 1 - attributes["transB"], "transB": 1 - attributes["transA"]}
    return Rewrite(ops.gemm(b, a, **attributes | flags), present_inputs(made), "transposed product")


def scaled_rows(node: ir.Node) -> Rewrite | None:
    """Move a factor for each row of a product to where there are fewer columns.

    (diag(s) X) B = diag(s) (X B) and (diag(s) X)ᵀ B = Xᵀ (diag(s) B). Otherwise the gradient of the
    logits would need as much memory again as the logits.
    """
    attributes = _attributes(node)
    scaled = produced_by(node.inputs[0], ops.mul)
    if scaled is None or len(present_inputs(node)) > 2:
        return None
    (x, s), b = present_inputs(scaled), present_inputs(node)[1]
    x, s = (s, x) if x.shape and x.shape[-1] == 1 else (x, s)
    if not (x.shape and s.shape and b.shape) or not len(x.shape) == len(s.shape) == 2:
        return None
    many, few = x.shape[-1], b.shape[-2 if attributes["transB"] else -1]
    sizes = isinstance(many, int) and isinstance(few, int) and few < many
    if not sizes or s.shape[-1] != 1 or x.shape[0] != s.shape[0]:
        return None
    rows, factors, columns = map(Value, (x, s, b))
    if not attributes["transA"]:
        result: Any = ops.gemm(rows, columns, **attributes) * factors
    elif not attributes["transB"]:
        result = ops.gemm(rows, columns * factors, **attributes)
    else:
        return None
    return Rewrite(result, [x, s, b], "rows scaled where they are short", may_share=True)


def _attributes(node: ir.Node) -> dict[str, Any]:
    op = find_op(node)
    assert op is not None
    return read_attributes(op, node)


def products(model: ir.Model, engine: Engine) -> PassReport:
    """Apply these rules until none fires."""
    total = PassReport("products")
    rules: dict[Op, list[Rule]] = {
        ops.gemm: [transposed_operands, scaled_rows],
        ops.transpose: [transposed_product],
    }
    while True:
        report = engine.run("products", model, rules)
        last = not report.count("fired")
        # What misses in one round is tried again in the next, unless verification undid it.
        total.sites += [s for s in report.sites if last or s.status == "fired" or s.rolled_back]
        if last:
            return total


def split_transposes(model: ir.Model, engine: Engine) -> PassReport:
    """Transposed operands of products as one transpose of the last two axes after another.

    Runtimes turn the last one into an attribute of the product; the one before it is then the same
    for K and Kᵀ, and for V and Vᵀ.
    """
    rule = partial(_split_operands, model.graph)
    return engine.run("split_transposes", model, {ops.matmul: [rule]}, forward=True)


def _split_operands(graph: ir.Graph, node: ir.Node) -> Rewrite | None:
    given = list(map(adopt, present_inputs(node)))
    a, b = operands = [_split(value) for value in given]
    if node.graph is not graph or all(new is x for new, x in zip(operands, given, strict=True)):
        return None
    return Rewrite(ops.matmul(a, b), present_inputs(node), "rows and columns swapped last")


def _split(value: Value) -> Tensor:
    made = produced_by(value, ops.transpose)
    perm = [] if made is None else permutation_of(made)
    n, swap = len(perm), swap_of(len(perm))
    if made is None or n < 3 or perm[-2] != n - 1 or perm == swap:
        return value
    rows = ops.transpose(adopt(made.inputs[0]), perm=[perm[i] for i in swap])
    return ops.transpose(rows, perm=swap)


def in_half(dtype: ir.DataType) -> Pass:
    """Cast the float32 operands of MatMul and Gemm to `dtype`, and their results back.

    Softmax, norms, sums, losses and updates stay in float32, as in automatic mixed precision
    (Micikevicius et al., arXiv 1710.03740). Equal casts are shared, so a weight is cast once.
    """

    def run(model: ir.Model, engine: Engine) -> PassReport:
        rule = partial(_in_half, model.graph, dtype)
        rules = {op: [rule] for op in (ops.matmul, ops.gemm)}
        return engine.run("in_half", model, rules, forward=True)

    return Pass("in_half", run)


def _in_half(graph: ir.Graph, dtype: ir.DataType, node: ir.Node) -> Rewrite | None:
    op = find_op(node)
    if op is None or node.graph is not graph or node.outputs[0].dtype is not ir.DataType.FLOAT:
        return None
    operands = [None if x is None else _half(x, dtype) for x in node.inputs]
    product = op(*operands, **read_attributes(op, node))
    return Rewrite(
        ops.cast(product, to=ir.DataType.FLOAT), present_inputs(node), f"in {dtype.name}"
    )


def _half(x: ir.Value, dtype: ir.DataType) -> Tensor:
    """x in `dtype`: if x was cast from that dtype, the original."""
    node = produced_by(x, ops.cast)
    before = node.inputs[0] if node is not None else None
    if before is not None and before.dtype is dtype:
        return Value(before)
    return ops.cast(adopt(x), to=dtype)


def transposes_operands(node: ir.Node) -> bool:
    """Whether a node only transposes matrices for products."""
    transposes = is_a(node, ops.transpose) and swaps_last(node)
    return transposes and all(is_a(use.node, ops.matmul) for use in node.outputs[0].uses())
