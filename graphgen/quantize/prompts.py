"""A second graph that reads prompts in int8, beside one whose weights have four bits."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.bits import Blocks, Rows, chunks, layout_of, to_rows
from graphgen.errors import GraphgenError
from graphgen.export.folders import PROMPTS_KEY
from graphgen.graph import ModelLike, constant, model_in
from graphgen.match import Engine, Miss, Pass, PassReport, Refusal, Rewrite
from graphgen.measure.accuracy import relative
from graphgen.op import is_a
from graphgen.operands import Array
from graphgen.ops.quantized import matmul_integer_to_float, matmul_nbits, quantize_linear
from graphgen.places import where_is
from graphgen.processor import FITS, INT8_KEY
from graphgen.quantize.effect import Layer, Report
from graphgen.quantize.layers import rewritten, rules_of, settle
from graphgen.quantize.spool import Spool
from graphgen.value import Tensor, Value, adopt

LEAST = 16
"""Tokens from which on int8 is faster on all processors that were measured."""

_TINY = 1e-30  # instead of 0, the largest of a row of zeros
_ZERO = 128  # the zero point of bytes that stand for -127 to 127
_CHUNK = 1 << 19  # weights at a time


def has_four_bits(model: ModelLike) -> bool:
    """Whether a model has products that `int8_prompts` replaces."""
    nodes = model_in(model, "int8_prompts").graph.all_nodes()
    return any(is_a(n, matmul_nbits) and n.attributes.get_int("bits", 4) == 4 for n in nodes)


def int8_prompts(model: ModelLike, *, least: int = LEAST) -> tuple[ir.Model, Report]:
    """A copy of a quantized decoder for many rows at once: four-bit weights in eight bits.

    A product x Ŵᵀ of weights Ŵ in blocks of four bits becomes

        s = max |x| / 127 of each row      y = (round(x / s) · q) s t      Ŵ ≈ t q

    with a scale t for each output channel and int8 q, which every processor sums exactly. A row's
    scale is its own, so that its result does not depend on what else is read. Products that give
    the `logits` stay as they are: a prompt needs one row of them. `least` is from how many tokens
    on the copy is the faster one, which its metadata say.

    The report has the error of each weight next to the four-bit one. Raises GraphgenError if there
    is no such product.
    """
    report, outputs = Report("int8", "cpu", 0.0), model_in(model, "int8_prompts").graph.outputs
    words = next((y.shape[-1] for y in outputs if y.name == "logits" and y.shape), None)
    spool, held = Spool("int8_prompts"), dict[ir.Value, dict[str, ir.Value]]()
    layers = dict[ir.Node, Layer]()

    def rule(graph: ir.Graph, node: ir.Node) -> Rewrite | Miss | Refusal:
        x, packed = node.inputs[:2]
        blocks = _blocks_of(node)
        if x is None or packed is None or isinstance(blocks, Miss):
            return blocks if isinstance(blocks, Miss) else Miss("it has no operands")
        shape = (len(blocks.integers), blocks.columns)
        if shape[0] == words:
            return Refusal("it gives the logits, of which a prompt needs one row")
        path, operator = where_is(node), node.op_type
        layer = Layer(str(packed.name), path, operator, shape, "int8", 0.0, "weight")
        if packed not in held:
            rows, layer.error = _rows_of(blocks)
            arrays = layout_of(rows, False)
            layer.bytes_after = sum(array.nbytes for array in arrays.values())
            held[packed] = spool.weights(graph, str(packed.name), arrays)
        layers[node] = layer
        bias = node.inputs[5] if len(node.inputs) > 5 else None
        y = _product(adopt(x), held[packed], adopt(bias))
        reads = [value for value in node.inputs if value is not None]
        return Rewrite(y, reads, f"int8, relative error of its weight {layer.error:.3g}")

    def run(model: ir.Model, engine: Engine) -> PassReport:
        found = [node for node in model.graph.all_nodes() if is_a(node, matmul_nbits)]
        rules = rules_of({node: partial(rule, model.graph, node) for node in found})
        return engine.run("int8_prompts", model, rules, forward=True, nodes=found)

    made = rewritten("int8_prompts", model, Pass("int8_prompts", run), Engine(), report)
    if not layers:
        raise GraphgenError(
            "int8_prompts: the model has no products with weights of four bits; quantize it to int4"
        )
    settle(layers.items(), report.sites.sites)
    report.layers = [*layers.values()]
    made.metadata_props.update({INT8_KEY: FITS, PROMPTS_KEY: str(least)})
    return made, report


def _blocks_of(node: ir.Node) -> Blocks | Miss:
    """The weights of a MatMulNBits, or why they are not constants of four bits."""
    given = [*node.inputs, *[None] * 6][:6]
    how = node.attributes
    bits, size = how.get_int("bits", 4), how.get_int("block_size", 0) or 0
    if bits != 4:
        return Miss(f"its weights have {bits} bits")
    packed, scales, zeros = (constant(value) for value in given[1:4])
    if packed is None or scales is None or (zeros is None and given[3] is not None):
        return Miss("its weights are not constant")
    if given[4] is not None:
        return Miss("it has an order of its own (g_idx)")
    rows, count = packed.shape[0], -(-(columns := how.get_int("K", 0) or 0) // size)
    if zeros is None:
        zeros = np.full((rows, -(-count // 2)), 0x88, np.uint8)
    if zeros.dtype != np.uint8:
        return Miss(f"its zero points are {zeros.dtype}")
    packed = packed.reshape(rows, count, size // 2)
    return Blocks(packed, scales.reshape(rows, count), zeros.reshape(rows, -1), columns)


def _rows_of(blocks: Blocks) -> tuple[Rows, float]:
    """A scale for each row and int8, and the relative error next to the blocks."""
    shape = len(blocks.integers), blocks.columns
    integers, scales = np.empty(shape, np.int8), np.empty(shape[0], np.float32)

    def parts() -> Iterator[tuple[Array, Array]]:
        for part in chunks(shape, _CHUNK):
            w = blocks.dequantized(part)
            rows = to_rows(w)
            integers[part], scales[part] = rows.integers, rows.scales
            yield w, rows.dequantized()

    error = relative(parts())
    return Rows(integers, scales), error


def _product(x: Tensor, made: dict[str, ir.Value], bias: Tensor | None) -> Tensor:
    """x (..., K) times int8, each row rounded with a scale of its own."""
    widest = ops.reduce_max(ops.abs(x), [-1])
    unit = ops.maximum(widest, np.float32(_TINY)) * np.float32(1 / 127)
    one, zero = np.array(1, np.float32), np.array(_ZERO, np.uint8)
    q = quantize_linear(x / unit, one, zero)
    b, scale = Value(made["int8"]), Value(made["scale"])
    y = matmul_integer_to_float(q, b, one, scale, zero, None, None) * unit
    return y if bias is None else y + bias
