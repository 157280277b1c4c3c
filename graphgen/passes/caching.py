"""Decoders of any exporter with the inputs, the cache and the names that clients give theirs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from graphgen import ops
from graphgen.edit import LENGTHS, infer_model, tidy
from graphgen.errors import GraphgenError
from graphgen.graph import all_values, is_float, operator_name, present_inputs
from graphgen.match import Engine, Miss, Outcome, Rewired, Rewrite
from graphgen.op import find_op, read_attributes
from graphgen.ops.attention import cached_mask
from graphgen.ops.layout import lowest_of
from graphgen.ops.sizes import sizes_vector
from graphgen.passes import optimize
from graphgen.passes.decoding import fuse_attention
from graphgen.places import where_is
from graphgen.recognize.decoders import Layer, Parts, joined
from graphgen.recognize.masks import causal_window
from graphgen.recognize.places import Places, read_beside
from graphgen.recognize.sampled import reads_sizes
from graphgen.record import recording
from graphgen.value import Tensor, Value, adopt, graph_value

BATCH, LENGTH, PAST_LENGTH = "batch_size", "sequence_length", "past_sequence_length"
TOTAL = f"{PAST_LENGTH} + {LENGTH}"
"""The sizes of a decoder's inputs, as clients know them."""

PAST, PRESENT = "past_key_values", "present"
_IDS, _PADDING, _POSITIONS = "input_ids", "attention_mask", "position_ids"


@dataclass
class WithCache:
    """A decoder as clients drive it; `names` are those that its inputs and logits had before."""

    model: ir.Model
    names: dict[str, str]
    layers: int
    had_cache: bool
    unknown: str  # of a mask that stays as the graph makes it: what it is

    def line(self) -> str:
        """What was found, in words."""
        other = {ours: name for ours, name in self.names.items() if "." not in ours}
        named = [f"{ours} is {name} there" for ours, name in other.items() if name != ours]
        cache = "it has a cache" if self.had_cache else "it got a cache"
        mask = [f"a mask stays as it is: {self.unknown}"] if self.unknown else []
        return "; ".join([f"{self.layers} attentions", *named, cache, *mask])


def with_cache(model: ir.Model) -> WithCache | Miss:
    """A decoder as clients drive it, from one of any exporter; or why that is impossible.

    Its inputs are input_ids, attention_mask, position_ids and past_key_values.N.key and .value, its
    outputs logits and present.N.key and .value. The parts are found by how they are connected. A
    model without a cache gets one: keys and values of every attention are joined to a past. The
    results of a row are those of the model for its tokens alone, without padding.
    """
    model = optimize(_as_called(model)).model
    fuse_attention(model, Engine(context=infer_model(model)))
    parts = Parts.of(model)
    if isinstance(parts, Miss):
        return parts
    fixed = [str(d) for d in parts.dims[:2] if isinstance(d, int)]
    if fixed or parts.tokens.shape is None:
        given = f"{parts.tokens.name} is {parts.tokens.shape}"
        return Miss(f"{given}: its sizes are fixed; export it with dynamic axes for both")
    _in_int64(model.graph, parts)
    graph, dims = model.graph, parts.dims
    masks = {layer.node: _window(layer, dims) for layer in parts.layers}
    for layer in parts.layers:
        found = masks[layer.node]
        if isinstance(found, Miss) and dims[2] is None and layer.mask is None:
            return Miss(f"{where_is(layer.node)}: {found.reason}")
    places = Places(dims, parts.padding)
    padding = parts.padding or _input(_PADDING, ir.DataType.INT64, [dims[0], TOTAL])
    positions = parts.positions or _input(_POSITIONS, ir.DataType.INT64, [*dims[:2]])
    new = [value for value in (padding, positions) if value not in graph.inputs]
    graph.inputs.extend(new)
    engine = Engine(context=infer_model(model))
    moved = _Moved(places, positions, model, parts)
    engine.run("places", model, {name: [moved.rule] for name in moved.names}, forward=True)
    if moved.misses:
        return moved.misses[0]
    past = _past(parts) if dims[2] is None else [j.inputs[0] for y in parts.layers for j in y.joins]
    graph.inputs.extend(v for v in past if v is not None and v not in graph.inputs)
    cached = _Cached(parts, masks, padding, past)
    rules = {ops.scaled_dot_product_attention: [cached.rule]}
    engine.run("cache", model, rules, forward=True)
    if cached.misses:
        return cached.misses[0]
    names = _named(model, parts, [padding, positions], past, cached.present)
    for value in new:
        del names[str(value.name)]
    infer_model(model)
    tidy(model)
    made = optimize(model, passes=("canonicalize", "clean")).model
    unknown = next((m.reason for m in masks.values() if isinstance(m, Miss)), "")
    return WithCache(made, names, len(parts.layers), dims[2] is not None, unknown)


def _as_called(model: ir.Model) -> ir.Model:
    """A copy with the sizes of calls: one number of rows, one of new tokens, one of the past.

    Many files give the same number several names: then one of them could be 1, and be repeated.
    There is a row or more, and a new token or more.
    """
    model = model.clone()
    infer_model(model)
    joins = [join for value in model.graph.outputs if (join := joined(value)) is not None]
    held, new = ([x.shape for n in joins if (x := n.inputs[i]) is not None] for i in (0, 1))
    given = [x for x in model.graph.inputs if not is_float(x) and len(x.shape or ()) == 2]
    lengths = [x.shape[1] for x in given if x.shape is not None]
    read = [length for x, length in zip(given, lengths, strict=True) if "mask" not in str(x.name)]
    length = next((shape[2] for shape in new if shape and shape[2] in lengths), (*read, None)[0])
    if not held or held[0] is None or not isinstance(length, ir.SymbolicDim):
        return model
    rows, past = held[0][0], held[0][2]
    names: dict[str, Any] = {}
    for shape in filter(None, held):
        names |= {str(shape[0]): rows, str(shape[2]): past}
    for x in given:
        assert x.shape is not None and isinstance(past, ir.SymbolicDim)
        names[str(x.shape[0])] = rows
        if x.shape[1] != length:
            names[str(x.shape[1])] = length if "position" in str(x.name) else past + length
    for x in model.graph.inputs:
        dims = [names.get(str(d), d) if str(d).isidentifier() else d for d in x.shape or ()]
        x.shape = None if x.shape is None else ir.Shape(dims)
    for y in model.graph.outputs:
        y.shape = None  # with those names
    model.graph.meta[LENGTHS] = {str(rows), str(length)}
    return model


def _window(
    layer: Layer, dims: tuple[Any, Any, Any]
) -> "tuple[ir.Value | None, int | None] | Miss":
    return causal_window(layer.mask, dims, causal=bool(layer.attributes["is_causal"]))


def _input(name: str, dtype: ir.DataType, dims: list[Any]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(dims))


def _in_int64(graph: ir.Graph, parts: Parts) -> None:
    """Read whole numbers of another dtype as clients give them."""
    for role in ("tokens", "padding", "positions"):
        old = getattr(parts, role)
        if old is None or old.dtype == ir.DataType.INT64:
            continue
        new = _input(str(old.name), ir.DataType.INT64, [*old.shape])
        with recording() as tape:
            cast = ops.cast(adopt(new), to=old.dtype)
        old.replace_all_uses_with(cast)
        graph.insert_before(graph[0], tape.nodes)
        tape.kept = True
        graph.inputs[graph.inputs.index(old)] = new
        old.name = None
        setattr(parts, role, new)


def _past(parts: Parts) -> list[ir.Value | None]:
    """New inputs for the cache, (B, G, P, D) each."""
    made: list[ir.Value | None] = []
    for i, layer in enumerate(parts.layers):
        for kind, value in zip(("key", "value"), layer.node.inputs[1:3], strict=True):
            assert value is not None and value.shape is not None and value.dtype is not None
            width = value.shape[-1]
            size = width if len(value.shape) == 4 else width // layer.kv_heads
            dims = [parts.dims[0], layer.kv_heads * layer.folded, PAST_LENGTH, size]
            made.append(_input(f"{PAST}.{i}.{kind}", value.dtype, dims))
    return made


def _reading(model: ir.Model, masks: Mapping[ir.Node, ir.Value | None]) -> set[ir.Node]:
    """The nodes that outputs need, except those that only make masks."""
    nodes, pending = set[ir.Node](), list(model.graph.outputs)
    while pending:
        value = pending.pop()
        node = value.producer()
        if node is not None and node not in nodes:
            nodes.add(node)
            mask = masks.get(node)
            pending += [v for v in present_inputs(node) if v is not mask]
    return nodes


class _Moved:
    """The places of tokens, read from an input wherever the graph counts them."""

    def __init__(self, places: Places, positions: ir.Value, model: ir.Model, parts: Parts) -> None:
        self.places, self.positions, self.tokens = places, positions, parts.tokens
        self.masks = {layer.node: layer.mask for layer in parts.layers}
        self.nodes = _reading(model, self.masks)
        self.names = {*map(operator_name, self.nodes)}
        self.misses: list[Miss] = []

    def rule(self, node: ir.Node) -> Outcome:
        """What a node reads of places in another way."""
        if node not in self.nodes or self.misses:
            return None
        mask = self.masks.get(node)
        found = self.places.rewired(node, adopt(self.positions), mask)
        if isinstance(found, Miss):
            self.misses.append(Miss(f"{where_is(node)}: {found.reason}"))
            return found
        if found:
            self.places.forget()
            return Rewired(found, "the places of tokens, from an input")
        if reads_sizes(node) and _is_new(node.inputs[0], self.tokens):
            return Rewired({0: adopt(self.tokens)}, "the number of new tokens")
        if read := self.places.length_read(node, mask):
            self.misses.append(read_beside(node, read))
        return None


def _is_new(value: ir.Value | None, tokens: ir.Value) -> bool:
    """Whether another value has as many rows and columns as there are new tokens."""
    return value is not None and value is not tokens and value.shape == tokens.shape


class _Cached:
    """Attention to keys and values that are joined to a past, with a mask over both."""

    def __init__(
        self,
        parts: Parts,
        masks: Mapping[ir.Node, Any],
        padding: ir.Value,
        past: list[ir.Value | None],
    ) -> None:
        self.parts, self.masks, self.padding = parts, masks, padding
        self.layers = {layer.node: i for i, layer in enumerate(parts.layers)}
        self.past, self.present = past, list[ir.Value]()
        if parts.dims[2] is not None:
            self.present = [join.outputs[0] for y in parts.layers for join in y.joins]
        self.misses: list[Miss] = []

    def rule(self, node: ir.Node) -> Outcome:
        """The attention with its mask and, if it has none yet, its past."""
        i = self.layers.get(node)
        if i is None or self.misses:
            return None
        layer, found = self.parts.layers[i], self.masks[node]
        tokens, padding = adopt(self.parts.tokens), adopt(self.padding)
        if layer.joins and (isinstance(found, Miss) or layer.folded > 1):
            return None  # over the past and new tokens as it is
        if not isinstance(found, Miss):
            mask: Tensor | Miss = cached_mask(padding, ops.dim(tokens, 1), window=found[1])
        else:
            mask = _longer(layer, self.parts, padding)
        if isinstance(mask, Miss):
            self.misses.append(Miss(f"{where_is(node)}: {found.reason}, and {mask.reason}"))
            return mask
        if layer.joins:
            return Rewired({3: mask}, "a mask that hides padding and what is behind")
        q, k, v = (adopt(value) for value in node.inputs[:3])
        if len(q.shape) == 3:
            q = ops.split_heads(q, layer.heads)
            k, v = (ops.split_heads(x, layer.kv_heads) for x in (k, v))
        pasts = (adopt(value) for value in self.past[2 * i : 2 * i + 2])
        if layer.folded > 1:
            rows, heads = ops.dim(tokens, 0), layer.kv_heads * layer.folded
            k, v = (ops.reshape(x, [rows, heads, ops.dim(x, 2), x.shape[3]]) for x in (k, v))
        k, v = (ops.concat(past, x, axis=2) for past, x in zip(pasts, (k, v), strict=True))
        self.present += [graph_value(k), graph_value(v)]
        if layer.folded > 1:
            rows = ops.dim(q, 0)
            k, v = (
                ops.reshape(x, [rows, layer.kv_heads, ops.dim(x, 2), x.shape[3]]) for x in (k, v)
            )
        how = {name: layer.attributes[name] for name in ("scale", "softcap")}
        y = ops.attention(q, k, v, mask, **how)
        y = ops.merge_heads(y) if len(adopt(node.outputs[0]).shape) == 3 else y
        reason = "its keys and values are joined to a past"
        return Rewrite(y, present_inputs(node), reason, may_share=True, untrimmed=True)


def _longer(layer: Layer, parts: Parts, padding: Value) -> Tensor | Miss:
    """The mask over S = P + T tokens as the graph makes it for so many, the last T rows of it."""
    total, length = ops.dim(padding, 1), str(parts.dims[1])
    made: dict[ir.Value, Any] = {}

    def again(value: ir.Value) -> Any:
        if value not in made:
            node = value.producer()
            if node is None and value.is_graph_input() and value is not parts.padding:
                raise GraphgenError(f"it depends on {value.name}")
            if node is None:
                return adopt(value)
            op, x = find_op(node), node.inputs[0]
            if op is None:
                raise GraphgenError(f"it is made by {node.op_type}")
            if reads_sizes(node) and x is not None:
                if x.shape is None or not value.shape:  # one number: their product
                    raise GraphgenError(f"it reads the size of {x.name}")
                first = node.attributes.get_int("start", 0)
                dims = [*x.shape][first : node.attributes.get_int("end", None)]
                named = [d for d in dims if not isinstance(d, int) and str(d) != length]
                if any(length in d.free_symbols() for d in named):
                    raise GraphgenError(f"it reads the size of {x.name}")
                sizes = [
                    total if str(d) == length else ops.dim(adopt(x), first + j)
                    for j, d in enumerate(dims)
                ]
                made[value] = sizes_vector(*sizes)
            else:
                operands = [None if v is None else again(v) for v in node.inputs]
                results = op(*operands, **read_attributes(op, node))
                results = results if isinstance(results, tuple) else (results,)
                made.update(zip(node.outputs, results, strict=False))
        return made[value]

    mask = layer.mask
    assert mask is not None and mask.shape is not None
    try:
        y: Tensor = again(mask)
    except GraphgenError as error:
        return Miss(str(error))
    if mask.shape[-2] != 1:
        new = ops.dim(adopt(parts.tokens), 1)
        y = ops.slice_(y, [total - new], [1 << 31], [-2])
    if layer.attributes["is_causal"]:
        keep = cached_mask(padding, ops.dim(adopt(parts.tokens), 1))
        is_bool = mask.dtype == ir.DataType.BOOL
        y = ops.logical_and(keep, y) if is_bool else ops.where(keep, y, lowest_of(y))
    return y


def _named(
    model: ir.Model,
    parts: Parts,
    more: list[ir.Value],
    past: list[ir.Value | None],
    present: list[ir.Value],
) -> dict[str, str]:
    """Give inputs and outputs the names, the order and the sizes that clients know.

    Returns the names that they had, by the new ones.
    """
    graph = model.graph
    pairs = zip(past, present, strict=True)
    names = {parts.tokens: _IDS, more[0]: _PADDING, more[1]: _POSITIONS, parts.logits: "logits"}
    for i, (old, new) in enumerate(pairs):
        assert old is not None and old.shape is not None
        kind = f"{i // 2}.{('key', 'value')[i % 2]}"
        names |= {old: f"{PAST}.{kind}", new: f"{PRESENT}.{kind}"}
        _, heads, _, size = old.shape
        old.shape = ir.Shape([BATCH, heads, PAST_LENGTH, size])
    for value in (parts.tokens, more[1]):
        value.shape = ir.Shape([BATCH, LENGTH])
    more[0].shape = ir.Shape([BATCH, TOTAL])
    for value in all_values(graph):
        if value.name in names.values() and value not in names:
            value.name = f"{value.name}_inside"
        if value.producer() is not None:
            value.shape = None  # with the sizes' old names
    before = {name: str(value.name) for value, name in names.items()}
    for value, name in names.items():
        value.name = name
    graph.inputs[:] = [parts.tokens, *more, *(v for v in past if v is not None)]
    graph.outputs[:] = [parts.logits, *present]
    return before
