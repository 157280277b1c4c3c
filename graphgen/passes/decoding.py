"""Decoders whose cache stays in place: keys and values are written into their old buffers."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.edit import infer_model, tidy
from graphgen.graph import constant, operator_name, present_inputs, produced_by, uses_outputs_beyond
from graphgen.infer import same_dim
from graphgen.match import (
    Engine,
    Miss,
    Pass,
    PassReport,
    Replacement,
    Rewired,
    Rewrite,
    run_passes,
    whole,
)
from graphgen.op import is_a, read_attributes
from graphgen.operands import Array
from graphgen.ops.quantized import dynamic_quantize_linear
from graphgen.passes import optimize
from graphgen.places import where_is
from graphgen.recognize.decoders import behind, joined
from graphgen.recognize.masks import causal_window
from graphgen.recognize.sampled import Sampled, depends
from graphgen.recognize.terms import is_static, multiplied, split_in_blocks, sum_of_terms
from graphgen.record import current_tape
from graphgen.targets import Target
from graphgen.traits import Trait, has
from graphgen.value import Tensor, adopt

_ATTENTIONS = (ops.scaled_dot_product_attention, ops.sink_attention)

CAPACITY = "max_sequence_length"
"""The name of the buffers' size."""

KEPT = "logits_to_keep"
"""The input, int64, that says of how many last tokens the logits are wanted."""


def in_place(
    model: ir.Model, engine: Engine | None = None, *, scales: Mapping[str, Array] | None = None
) -> ir.Model | Miss:
    """A copy with the cache in buffers (B, G, capacity, D), or why that is impossible.

    It is possible if each layer appends new keys and values to a past, (B, G, P, D), and attends to
    all with a mask that is causal, with or without a window, and hides padding. Then the operator
    GroupQueryAttention of com.microsoft takes the buffer as its past and returns it: bound to one
    address, nothing is copied. Row b of the buffers holds as many tokens as its attention mask has
    ones, so padding has to be on the right, and the next tokens take its place. After a past, only
    one row can take more than one token at a time. Where tokens are multiplied by their mask, as
    before a state of all of them, no row may have padding.

    With `scales`, by the names of the pasts, each (G, D), the buffers hold round(x / scale) as
    int8.
    """
    model, engine = model.clone(), engine or Engine()
    engine.context = infer_model(model)
    if any(is_a(node, ops.softmax) for node in model.graph):  # parts, where they are faster
        fuse_attention(model, engine)
        model = optimize(model, passes=("canonicalize", "clean")).model  # one group: no Squeeze
        engine.context = infer_model(model)
    layers: dict[ir.Node, _Layer] = {}
    for node in model.graph:
        found = _Layer.of(node)
        if isinstance(found, Miss):
            return Miss(f"{where_is(node)}: {found.reason}", node)
        if found is not None:
            layers[node] = found
    if len({layer.padding for layer in layers.values()}) != 1:
        return Miss("no attention has a past and a mask, or not all have the same mask")
    run_passes(
        model,
        [
            whole("buffers", partial(_buffers, layers=[*layers.values()], few=scales is not None)),
            Pass("unpadded", partial(_unpadded, layers=[*layers.values()])),
            Pass("in_place", partial(_attend_in_place, layers=layers, scales=scales)),
            Pass("join_in_place", _join_in_place),
        ],
        engine,
    )
    tidy(model)
    if left := [y.name for y in model.graph.outputs if joined(y) is not None]:
        return Miss(f"no attention reads {left[0]}, a past with more behind it")
    if problem := _lengths_read(model, next(iter(layers.values())).padding):
        return problem
    return optimize(model, passes=("canonicalize", "clean")).model


def fuse_attention(model: ir.Model, engine: Engine) -> PassReport:
    """Fuse attention also where its parts are faster, so that what it reads can be told."""
    op = ops.scaled_dot_product_attention
    assert op.recognizer is not None
    report = engine.run("fuse_attention", model, {root: [op.recognizer] for root in op.roots})
    tidy(model)
    return report


def lacks(model: ir.Model, target: Target) -> str:
    """Why a target does not compute the attention of a cache in place, or ""."""
    found = (node for node in model.graph if is_a(node, ops.group_query_attention))
    return next(filter(None, map(target.missing, found)), "")


def keep_last(model: ir.Model, name: str = "logits", *, several: bool = False) -> bool:
    """Compute an output (B, T, V) for each row's last token only, (B, 1, V); say whether it worked.

    With a cache in place, that is the last token that the attention mask does not hide; else the
    last of all. It is chosen before the products that make the output, in the model itself. With
    `several`, a new input `KEPT` says of how many tokens, up to that one, the output is wanted.
    """
    context = infer_model(model)
    y = next(value for value in model.graph.outputs if value.name == name)
    if y.shape is not None and y.shape[1] == 1:
        return True
    above = _above(y)
    if not above:
        return False
    x, readers = above[-1]
    inside = _between(x, y)
    cached = next((n for n in model.graph if is_a(n, ops.group_query_attention)), None)
    kept = ir.val(KEPT, ir.DataType.INT64, []) if several else None
    if kept is not None:
        model.graph.inputs.append(kept)

    def choose(node: ir.Node) -> Rewired | None:
        tape = current_tape()
        if node not in readers or tape is None:
            return None
        tape.path = ""  # of no module
        last = _last(adopt(x), cached, kept)
        return Rewired({i: last for i, value in enumerate(node.inputs) if value is x}, "the last")

    engine = Engine(context=context)
    engine.run("keep_last", model, {operator_name(node): [choose] for node in readers})
    for value in {v for node in inside for v in node.outputs} - {v for v, _ in above} - {y}:
        value.shape = None  # within a product of two terms, (2, B, T, K)
    for value in (y, *(v for _, nodes in above for node in nodes for v in node.outputs)):
        if value.shape is not None and len(value.shape) == 3:
            value.shape = ir.Shape([value.shape[0], KEPT if several else 1, value.shape[2]])
    tidy(model)
    return True


def _last(x: Tensor, cached: ir.Node | None, kept: ir.Value | None) -> Tensor:
    """(B, N, D) of x (B, T, D): the last token, or the last of those that fill a cache in place.

    It is one if nothing says how many are `kept`.
    """
    places = None if kept is None else ops.arange(adopt(kept)) - adopt(kept)  # -N ... -1
    if cached is None and places is not None:
        return ops.gather(x, places, axis=1)
    if cached is None:
        return ops.slice_(x, [-1], [2**31], [1])
    seqlens_k, total = (adopt(value) for value in cached.inputs[5:7])
    rows, t = ops.dim(x, 0), ops.dim(x, 1)
    held = ops.cast(seqlens_k - total, to=ir.DataType.INT64) + t
    last = ops.arange(rows) * t + ops.where(held > 0, held, 0)  # of B·T
    flat = ops.reshape(x, [-1, ops.dim(x, 2)])
    if places is None:
        return ops.unsqueeze(ops.gather(flat, last), [1])
    return ops.gather(flat, ops.unsqueeze(last, [1]) + (places + 1))


def _buffers(model: ir.Model, *, layers: Sequence["_Layer"], few: bool) -> Replacement:
    """The past is as large as the buffers, and the present whatever the attention makes of it."""
    for join in (join for layer in layers for join in layer.joins):
        past, present = join.inputs[0], join.outputs[0]
        if past is not None and past.shape is not None:
            past.shape = ir.Shape([*past.shape[:2], CAPACITY, past.shape[3]])
        present.shape = None
        if few and past is not None:
            # A clone shares its types with the model that it was made of.
            past.type = present.type = ir.TensorType(ir.DataType.INT8)
    return Replacement(model, "keys and values in buffers")


def _attend_in_place(
    model: ir.Model,
    engine: Engine,
    *,
    layers: Mapping[ir.Node, "_Layer"],
    scales: Mapping[str, Array] | None,
) -> PassReport:
    def rule(node: ir.Node) -> Rewrite | None:
        layer = layers.get(node)
        if layer is None:
            return None
        y = ops.split_heads(layer.record(scales), layer.heads)
        reason = "keys and values are written where they stay"
        return Rewrite(y, present_inputs(node), reason, untrimmed=True)

    rules = {op: [rule] for op in _ATTENTIONS}
    return engine.run("in_place", model, rules, forward=True)


def _unpadded(model: ir.Model, engine: Engine, *, layers: Sequence["_Layer"]) -> PassReport:
    """Tokens are no longer multiplied by the end of the padding, whose length is another now."""
    padding = layers[0].padding
    _, _, new, _ = adopt(layers[0].node.inputs[0]).shape  # (B, H, T, D)

    def rule(node: ir.Node) -> Rewrite | None:
        for own, x in itertools.permutations(present_inputs(node)):
            if _is_end(own, padding, new):
                return Rewrite(x, present_inputs(node), "no token is padding")
        return None

    return engine.run("unpadded", model, {ops.mul: [rule]}, forward=True)


def _is_end(value: ir.Value, padding: ir.Value, new: Any) -> bool:
    """Whether a value is the end of the padding, (B, S), that is of the new tokens: (B, T, 1)."""
    if padding.shape is None or value.shape is None or len(value.shape) != 3:
        return False
    if not depends(value, {padding: True}):
        return False
    random = np.random.default_rng(0)
    for rows, length, total in ((2, 3, 7), (3, 1, 4), (1, 5, 5)):
        kept = random.integers(0, 2, (rows, total))
        names = map(str, (*padding.shape, new))
        sizes = dict(zip(names, (rows, total, length), strict=True))
        made = Sampled(sizes, {padding: kept})(value)
        if made is None or not np.array_equal(made, kept[:, total - length :, None]):
            return False
    return True


def _join_in_place(model: ir.Model, engine: Engine) -> PassReport:
    """What joined a past and new keys or values is what the attention gives back."""
    return engine.run("join_in_place", model, {ops.concat: [_given_back]}, forward=True)


def _given_back(node: ir.Node) -> Rewrite | None:
    past = node.inputs[0]
    for attention in (use.node for use in past.uses()) if past is not None else ():
        if is_a(attention, ops.group_query_attention):
            result = attention.outputs[1 if attention.inputs[3] is past else 2]
            return Rewrite(result, present_inputs(node), "the buffer of the attention")
    return None


def _above(y: ir.Value) -> list[tuple[ir.Value, set[ir.Node]]]:
    """Values (B, T, ·) that y is computed from row by row, with their readers, nearest first."""
    found: list[tuple[ir.Value, set[ir.Node]]] = []
    value = y
    while (read := _read_by_rows(value)) is not None:
        value, readers = read
        if value.shape is None or y.shape is None or len(value.shape) != 3:
            break
        if not all(map(same_dim, value.shape[:2], y.shape[:2])):
            break
        found.append((value, readers))
        if {use.node for use in value.uses()} - readers or value.is_graph_output():
            break
    return found


def _read_by_rows(y: ir.Value) -> tuple[ir.Value, set[ir.Node]] | None:
    """The value whose rows make the rows of y, and what reads it first, if there is one."""
    node = y.producer()
    if node is None:
        return None
    product = multiplied(node)
    x = None if product is node or product.inputs[0] is None else sum_of_terms(product.inputs[0])
    if x is not None:
        between = _between(x, y)
        readers = {use.node for use in x.uses()} & between
        free = x.shape is not None and len(x.shape) > 1 and not isinstance(x.shape[1], int)
        return (x, readers) if free and len(readers) == 1 else None
    if not has(node, Trait.BY_ROWS):
        return None
    made = dict.fromkeys(v for v in present_inputs(node) if not is_static(v))
    if is_a(node, ops.add) and len(made) == 2:
        for shifted, y in itertools.permutations(made):
            split, read = split_in_blocks(shifted), _read_by_rows(y)
            if split is not None and read is not None and read[0] is split.inputs[0]:
                return read[0], read[1] | {split}
        return None
    makers = {produced_by(v, dynamic_quantize_linear) for v in made}
    if len(makers) == 1 and (quantized := makers.pop()) is not None:
        made, node = dict.fromkeys(present_inputs(quantized)), quantized
    return (next(iter(made)), {node}) if len(made) == 1 and _goes_by_rows(node) else None


def _between(x: ir.Value, y: ir.Value) -> set[ir.Node]:
    """The nodes that make y of x and constants alone, and nothing else but y; else none."""
    last = y.producer()
    found = set() if last is None else {last}
    left = [*found]
    while left:
        for value in present_inputs(left.pop()):
            node = value.producer()
            if value is x or is_static(value) or constant(value) is not None or node in found:
                continue
            if node is None:
                return set()
            found.add(node)
            left.append(node)
    used = {use.node for node in found - {last} for y in node.outputs for use in y.uses()}
    return found if used <= found else set()


@dataclass
class _Layer:
    """An attention to keys and values that are joined to a past."""

    node: ir.Node
    joins: list[ir.Node]
    padding: ir.Value
    window: int | None
    heads: int
    kv_heads: int
    attributes: dict[str, Any]
    sinks: ir.Value | None = None

    @classmethod
    def of(cls, node: ir.Node) -> "_Layer | Miss | None":
        """The layer of an Attention, or why it is not one; None if it has no past."""
        if not is_a(node, *_ATTENTIONS):
            return None
        joins = [join for value in node.inputs[1:3] if (join := joined(value)) is not None]
        if not joins:
            return None
        sinks = node.inputs[3] if is_a(node, ops.sink_attention) else None
        masks = node.inputs[3:] if sinks is None else node.inputs[4:]
        attributes = read_attributes(ops.scaled_dot_product_attention, node)
        if len(joins) < 2 or any(len(join.outputs[0].uses()) != 1 for join in joins):
            return Miss("its keys or values are read elsewhere, too")
        if attributes["is_causal"] or len(masks) != 1 or uses_outputs_beyond(node, 1):
            return Miss("a mask, no causal attribute and one output are wanted")
        inputs: list[Any] = [node.inputs[0], *(join.inputs[0] for join in joins)]
        q, k, v = (value.shape for value in inputs)
        if not all(isinstance(d, int) for d in (q[1], k[1], k[3])) or k[3] != v[3] or k[3] % 8:
            return Miss(f"a head has {k[3]} and {v[3]} features; wanted as many, in eights")
        new = [value.shape for join in joins if (value := join.inputs[1]) is not None]
        if len(new) < 2 or not all(shape and isinstance(shape[1], int) for shape in new):
            return Miss("the shapes of new keys and values are not known")
        found = causal_window(masks[0], (q[0], q[2], k[2]))
        if isinstance(found, Miss):
            return found
        if found[0] is None:
            return Miss("its mask depends on no input, wanted one input, that of the padding")
        return cls(node, joins, found[0], found[1], q[1], k[1], attributes, sinks)

    def record(self, scales: Mapping[str, Array] | None) -> Any:
        """The operator that does the same in place, (B, T, H·D).

        A scale for each channel costs the kernel more than one for all: so the operator's is 1, and
        what it reads is divided before. q k = (q s) (k / s), and p v = (p (v / s)) s.
        """
        mask = adopt(self.padding)
        given = (self.node.inputs[0], *(join.inputs[1] for join in self.joins))
        q, k, v = (ops.merge_heads(adopt(x)) for x in given)
        pasts = [join.inputs[0] for join in self.joins]
        past_key, past_value = map(adopt, pasts)
        few: dict[str, Any] = {}
        of_values = None
        if scales is not None:
            of_keys, of_values = (scales[str(x and x.name)] for x in pasts)
            q = q * self._by_head(of_keys)
            k, v = k * (1 / of_keys).ravel(), v * (1 / of_values).ravel()
            few |= dict.fromkeys(("k_scale", "v_scale"), np.ones(1, np.float32))
            few |= dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_TENSOR")
            few["kv_cache_bit_width"] = 8
        y = ops.group_query_attention(
            q,
            k,
            v,
            past_key,
            past_value,
            ops.cast(ops.reduce_sum(mask, [1], keepdims=0) - 1, to=ir.DataType.INT32),
            ops.cast(ops.dim(mask, 1), to=ir.DataType.INT32),
            head_sink=None if self.sinks is None else adopt(self.sinks),
            num_heads=self.heads,
            kv_num_heads=self.kv_heads,
            scale=self.attributes["scale"],
            softcap=self.attributes["softcap"] or None,
            local_window_size=-1 if self.window is None else self.window,
            **few,
        )
        return y if of_values is None else y * self._by_head(of_values)

    def _by_head(self, scales: Array) -> Array:
        """Scales (G, D) as a vector (H·D), of the queries' heads."""
        return np.repeat(scales, self.heads // self.kv_heads, axis=0).ravel()


def _lengths_read(model: ir.Model, padding: ir.Value) -> Miss | None:
    """What reads how long a past is: that is the size of the buffers now."""
    attentions = [node for node in model.graph if is_a(node, ops.group_query_attention)]
    lengths = behind(value for node in attentions for value in node.inputs[5:7])
    kept = [padding, *(value for node in attentions for value in node.inputs[3:5])]
    for value in (value for value in kept if value is not None):
        for use in value.uses():
            if use.node not in lengths and not is_a(use.node, ops.group_query_attention):
                what = f"{use.node.op_type} reads {value.name}, whose length is that of the buffers"
                return Miss(f"{where_is(use.node)}: {what}; places are wanted as position_ids")
    return None


def _goes_by_rows(node: ir.Node) -> bool:
    """Whether a row of the result (B, T, ·) needs only that row of the one non-weight input."""
    if has(node, Trait.NORMALIZES):
        return node.attributes.get_int("axis", -1) in (-1, 2)
    if has(node, Trait.PRODUCT):
        return node.inputs[0] is not None and not is_static(node.inputs[0])
    weights = [v.shape for v in present_inputs(node) if is_static(v)]
    return all(shape is not None and len(shape) <= 1 for shape in weights)
