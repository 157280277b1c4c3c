"""Attention to one more token over a cache of int8, by products of integers."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.edit import infer_model, tidy
from graphgen.graph import present_inputs
from graphgen.match import Engine, Pass, PassReport, Replacement, Rewrite, run_passes, whole
from graphgen.op import is_a, read_attributes
from graphgen.ops.quantized import dequantize_linear, matmul_integer, quantize_linear
from graphgen.passes import optimize
from graphgen.value import Tensor, adopt

Pays = Callable[[int, int], bool]
"""Whether the products are faster, for that many queries a key, and features of each."""

_FULL: Any = np.float32(0.75)  # of a buffer: below, it is faster to copy what it holds first
_MOST = 2**17  # keys: their sums of products of bytes fit into 32 bits

# A processor that multiplies unsigned by signed bytes may add two products in 16 bits and cut them
# off there. 255 · 63 + 255 · 63 and 127 · 128 + 127 · 128 are below 2¹⁵.
_STEPS: Any = np.array([1 / 63, 1 / 63 / 126, 1 / 63 / 126**2], np.float32)
_ONE: Any = np.float32(1)
_ZERO: Any = np.uint8(64)
_MIDDLE: Any = np.uint8(128)


def attend_by_products(model: ir.Model, pays: Pays, engine: Engine | None = None) -> ir.Model:
    """A copy in which one more token reads a cache of int8 by MatMulInteger, where it pays.

    GroupQueryAttention multiplies each query by the keys that it shares with others; here all
    queries of a key's head are one product. Each query, and each row of weights, is three digits of
    6 bits and a sign, s (a + b / 126 + c / 126²): it loses 5e-7 of its largest number, and no
    processor's sum is cut off. Only prompts and guessed tokens, more than one a row, stay with the
    operator. The buffers of keys become uint8 around 128: that is the side of a product that has to
    be unsigned. A buffer that is not nearly full is copied as far as it is, so that time goes by
    the tokens that there are, not by those that are to come.
    """
    sites = {node for node in model.graph if _is_site(node) and pays(*_sizes(node))}
    if not sites:
        return model
    given, model, engine = model, model.clone(), engine or Engine()
    pairs = zip(given.graph, model.graph, strict=True)
    sites = {own for node, own in pairs if node in sites}
    engine.context = infer_model(model)

    def unsigned(model: ir.Model) -> Replacement:
        for node in sites:
            for value in (node.inputs[3], node.outputs[1]):
                assert value is not None
                value.type = ir.TensorType(ir.DataType.UINT8)
        return Replacement(model, "keys around 128")

    def run(model: ir.Model, engine: Engine) -> PassReport:
        def rule(node: ir.Node) -> Rewrite | None:
            if node not in sites:
                return None
            results = _chosen(node)
            return Rewrite(results, present_inputs(node), "one token reads by products")

        return engine.run("by_products", model, {ops.group_query_attention: [rule]}, forward=True)

    passes = [whole("unsigned_keys", unsigned), Pass("by_products", run)]
    *_, report = run_passes(model, passes, engine)
    if report.count("fired") < len(sites):  # its buffers are of int8 still
        return given
    tidy(model)
    return optimize(model, passes=("clean",)).model


def _is_site(node: ir.Node) -> bool:
    """Whether a node is the attention of `in_place` with scales, alone on its buffers."""
    if not is_a(node, ops.group_query_attention):
        return False
    a = read_attributes(ops.group_query_attention, node)
    given = [i for i, value in enumerate(node.inputs) if value is not None]
    if (
        a["kv_cache_bit_width"] != 8
        or a["local_window_size"] == 0
        or not {*given} <= {*range(7), 11, 12, 13}
    ):
        return False
    if not {*range(7), 12, 13} <= {*given} or a["do_rotary"] or (a["smooth_softmax"] or 0) > 0:
        return False
    units = [value.const_value for i, value in enumerate(node.inputs) if i > 11 and value]
    if any(x is None or x.size != 1 or float(x.numpy().ravel()[0]) != 1.0 for x in units):
        return False
    past, present = node.inputs[3], node.outputs[1]
    alone = past is not None and past.is_graph_input() and len(past.uses()) == 1
    return alone and present.is_graph_output() and not present.uses()


def _sizes(node: ir.Node) -> tuple[int, int]:
    """How many heads of queries share one of keys, and how many features each has."""
    heads, keys = (node.attributes[n].as_int() for n in ("num_heads", "kv_num_heads"))
    past = node.inputs[3]
    assert past is not None and past.shape is not None
    return heads // keys, int(past.shape[3])  # type: ignore[arg-type]


def _chosen(node: ir.Node) -> list[Tensor]:
    """What the operator gives, with buffers of keys in uint8."""
    a = read_attributes(ops.group_query_attention, node)
    given: list[Any] = [None if value is None else adopt(value) for value in node.inputs]
    q, k, v, keys, values, last, total = given[:7]
    single = ops.logical_and(ops.equal(ops.dim(q, 1), 1), ops.dim(keys, 2) <= _MOST)

    def products() -> list[Tensor]:
        return _one_token(q, k, v, keys, values, last, given[11], a)

    def operator() -> list[Tensor]:
        own = _moved(keys, ir.DataType.INT8)
        y: Any = ops.group_query_attention(q, k, v, own, values, last, total, *given[7:], **a)
        _, own, new = map(adopt, y.value.producer().outputs)
        return [y, _moved(own, ir.DataType.UINT8), new]

    return list(ops.cond(single, products, operator))


def _moved(x: Tensor, to: ir.DataType) -> Tensor:
    """Bytes around 128 as bytes around 0, or back: the highest bit is the other one."""
    if to == ir.DataType.INT8:
        return ops.cast(ops.bitwise_xor(x, _MIDDLE), to=to)
    return ops.bitwise_xor(ops.cast(x, to=to), _MIDDLE)


def _one_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    last: Tensor,
    sinks: Tensor | None,
    a: Mapping[str, Any],
) -> list[Tensor]:
    """Attention of (B, 1, H·D) to buffers (B, G, C, D), of which row b ends at `last`[b]."""
    g, d, b = a["kv_num_heads"], keys.shape[3], ops.dim(q, 0)
    last = ops.cast(last, to=ir.DataType.INT64)
    places = ops.unsqueeze(last, [1, 2]) + np.zeros((1, g, 1), np.int64)
    rows = ops.unsqueeze(ops.arange(b), [1, 2]) + np.zeros((1, g, 1), np.int64)
    heads = ops.expand(np.arange(g)[None, :, None], [b, 1, 1])
    where = ops.concat(rows, heads, places, axis=2)  # (B, G, 3)

    def written(buffer: Tensor, new: Tensor, zero: Any) -> Tensor:
        rounded = quantize_linear(ops.reshape(new, [b, g, d]), _ONE, zero)
        return ops.scatter_nd(buffer, where, rounded)

    keys, values = written(keys, k, _MIDDLE), written(values, v, np.int8(0))
    held = ops.reduce_max(last, [0]) + 1  # (1,), of the longest row
    part = ops.cast(held, to=ir.DataType.FLOAT) / ops.cast(ops.dim(keys, 2), to=ir.DataType.FLOAT)

    def whole() -> list[Tensor]:
        return [_products(q, keys, values, last, sinks, a)]

    def copied() -> list[Tensor]:
        own, new = (ops.slice_(x, [0], held, [2]) for x in (keys, values))
        return [_products(q, own, new, last, sinks, a)]

    return [*ops.cond(ops.squeeze(part >= _FULL, [0]), whole, copied), keys, values]


def _products(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    last: Tensor,
    sinks: Tensor | None,
    a: Mapping[str, Any],
) -> Tensor:
    """Attention of (B, 1, H·D) to (B, G, C, D), the keys around 128, up to `last` in each row."""
    g, d, b = a["kv_num_heads"], keys.shape[3], ops.dim(q, 0)
    r = a["num_heads"] // g
    columns, at = ops.arange(ops.dim(keys, 2)), ops.unsqueeze(last, [1])
    seen = columns <= at
    if a["local_window_size"] >= 0:
        seen = ops.logical_and(seen, columns > at - a["local_window_size"])
    hides = ops.unsqueeze(ops.where(seen, np.float32(0), np.float32(-np.inf)), [1, 2])
    q = ops.reshape(q, [b, g, r, d])
    tiny = np.float32(1e-30)
    most = ops.maximum(ops.reduce_max(ops.abs(q), [3], keepdims=1), tiny)
    q, digits = q / most, list[Tensor]()
    for step in _STEPS:
        digits.append(ops.round(q * (1 / step)))
        q = q - digits[-1] * step
    rounded = ops.cast(ops.concat(*digits, axis=2), to=ir.DataType.INT8)  # (B, G, 3·R, D)
    rounded = ops.transpose(rounded, perm=[0, 1, 3, 2])
    scores = ops.cast(matmul_integer(keys, rounded, _MIDDLE), to=ir.DataType.FLOAT)  # (…, C, 3·R)
    scale = np.float32(a["scale"] or d**-0.5)
    back = np.concatenate([np.eye(r, dtype=np.float32) * step for step in _STEPS], 1)  # (R, 3·R)
    scores = ops.fused_matmul(most * (back * scale), scores, transB=1)  # (B, G, R, C)
    if a["softcap"]:
        cap = np.float32(a["softcap"])
        scores = ops.tanh(scores / cap) * cap
    scores = scores + hides
    if sinks is not None:
        column = ops.expand(ops.reshape(sinks, [1, g, r, 1]), [b, 1, 1, 1])
        scores = ops.concat(scores, column, axis=3)
    weights = ops.softmax(scores, axis=-1)
    if sinks is not None:
        weights = ops.slice_(weights, [0], [-1], [3])
    top = ops.maximum(ops.reduce_max(weights, [3], keepdims=1), tiny)  # many small ones count, too
    weights, parts = weights * (1 / top), list[Tensor]()
    for step in _STEPS:
        parts.append(quantize_linear(weights, step, _ZERO))
        weights = weights - dequantize_linear(parts[-1], step, _ZERO)
    sums = matmul_integer(ops.concat(*parts, axis=2), values, _ZERO)  # (B, G, 3·R, D)
    y = ops.matmul(back, ops.cast(sums, to=ir.DataType.FLOAT)) * top
    return ops.reshape(y, [b, 1, g * r * d])
