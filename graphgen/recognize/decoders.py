"""The parts of a decoder, found by how they are connected: tokens, padding, places and cache."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from graphgen.graph import present_inputs, produced_by
from graphgen.infer import describe, same_dim
from graphgen.match import Miss
from graphgen.op import is_a, read_attributes
from graphgen.ops.attention import scaled_dot_product_attention
from graphgen.ops.layout import concat
from graphgen.places import where_is
from graphgen.recognize.sampled import reads_sizes

_MASK = 3  # which operand of an attention


@dataclass
class Layer:
    """An attention, and the joins of its past with new keys and values, if it has a past."""

    node: ir.Node
    joins: list[ir.Node]
    heads: int
    kv_heads: int
    attributes: dict[str, Any]
    folded: int = 1  # heads that its batch holds: (B·H, 1, T, D)

    @property
    def mask(self) -> ir.Value | None:
        """What it hides, or None."""
        return self.node.inputs[_MASK] if len(self.node.inputs) > _MASK else None

    @classmethod
    def of(cls, node: ir.Node) -> "Layer | Miss":
        """The layer of an attention, or why it is not one of a decoder."""
        attributes = read_attributes(scaled_dot_product_attention, node)
        q, k, v = (value for value in node.inputs[:3] if value is not None)
        if q.shape is None or k.shape is None or len(node.outputs) > 1 or len(node.inputs) > 4:
            return Miss(f"{where_is(node)}: shapes and one result of its attention are wanted")
        split = len(q.shape) == 4
        heads = q.shape[1] if split else attributes["q_num_heads"]
        kv_heads = k.shape[1] if split else attributes["kv_num_heads"]
        joins = [join for value in (k, v) if (join := joined(unfolded(value))) is not None]
        widths = [x.shape[-1] if x.shape is not None else None for x in (k, v)]
        known = all(isinstance(width, int) for width in widths) and len(joins) != 1
        if not known or not isinstance(heads, int) or not isinstance(kv_heads, int):
            given = f"{describe(q)}, {describe(k)}, {describe(v)}"
            return Miss(f"{where_is(node)}: its Q, K and V are {given}; wanted a number of heads")
        return cls(node, joins, heads, kv_heads, attributes)


def joined(value: ir.Value | None) -> ir.Node | None:
    """The node that appends to an input, (B, G, P, D), and makes an output, (B, G, P + T, D)."""
    node = produced_by(value, concat)
    if node is None or value is None or not value.is_graph_output() or len(node.inputs) != 2:
        return None
    past = node.inputs[0]
    if past is None or not past.is_graph_input() or past.shape is None or len(past.shape) != 4:
        return None
    return node if node.attributes["axis"].as_int() in (2, -2) else None


def unfolded(value: ir.Value) -> ir.Value:
    """(B, H, S, D) where a value is that as (B·H, 1, S, D), as BLOOM's keys; else the value."""
    node = produced_by(value, "Reshape")
    x = None if node is None else node.inputs[0]
    shapes = (value.shape, None if x is None else x.shape)
    if x is None or any(shape is None or len(shape) != 4 for shape in shapes):
        return value
    folded, split = shapes
    assert folded is not None and split is not None
    return x if folded[1] == 1 and all(map(same_dim, folded[2:], split[2:])) else value


@dataclass
class Parts:
    """What a decoder reads and makes; `padding` and `positions` may be absent."""

    tokens: ir.Value
    padding: ir.Value | None
    positions: ir.Value | None
    logits: ir.Value
    layers: list[Layer]

    @property
    def dims(self) -> tuple[Any, Any, Any]:
        """The sizes of rows, of new tokens and of the past, which is None without a cache."""
        b, t = self.tokens.shape or (None, None)
        past = self.layers[0].joins[0].inputs[0] if self.layers[0].joins else None
        return b, t, None if past is None else (past.shape or (None, None, None))[2]

    @classmethod
    def of(cls, model: ir.Model) -> "Parts | Miss":
        """The parts of a model whose attentions are fused, or what does not fit."""
        nodes = [n for n in model.graph if is_a(n, scaled_dot_product_attention)]
        if not nodes:
            return Miss("no attention was recognized in it")
        layers: list[Layer] = []
        for node in nodes:
            layer = Layer.of(node)
            if isinstance(layer, Miss):
                return layer
            layers.append(layer)
        if len({len(layer.joins) for layer in layers}) > 1:
            return Miss("some attentions have a past and others have none")
        pasts = [join.inputs[0] for layer in layers for join in layer.joins]
        rest = [value for value in model.graph.inputs if value not in pasts]
        of_masks = behind(layer.mask for layer in layers)
        made = [v for v in model.graph.outputs if len(v.shape or ()) == 3]
        if len(made) > 1:
            made = [v for v in made if v.name == "logits"]
        if len(made) != 1 or made[0].shape is None or not isinstance(made[0].shape[2], int):
            given = ", ".join(f"{v.name}: {describe(v)}" for v in model.graph.outputs[:3])
            return Miss(f"its outputs are {given}; wanted one of floats (batch, tokens, words)")
        [logits] = made
        found = _roles(rest, of_masks, logits.shape[2] if logits.shape else None)
        if isinstance(found, Miss):
            return found
        tokens, padding, positions = found
        if problem := _fold(layers, tokens):
            return problem
        if not logits.shape or not all(map(same_dim, logits.shape[:2], tokens.shape or ())):
            given = f"{tokens.name} is {describe(tokens)}, {logits.name} {describe(logits)}"
            return Miss(f"{given}; wanted a row for each token")
        return cls(tokens, padding, positions, logits, layers)


def _fold(layers: Iterable[Layer], tokens: ir.Value) -> Miss | None:
    """Note the heads that are part of a batch; or say which batch is not that of the tokens."""
    batch = str(tokens.shape[0]) if tokens.shape is not None else ""
    for layer in layers:
        k = layer.node.inputs[1]
        rows = k.shape[0] if k is not None and k.shape is not None else None
        one = rows.evaluate({batch: 1}) if isinstance(rows, ir.SymbolicDim) else None
        two = rows.evaluate({batch: 2}) if isinstance(rows, ir.SymbolicDim) else None
        held = [join.inputs[0] for join in layer.joins]
        known = all(x is not None and x.shape and x.shape[1] == one for x in held)
        if not isinstance(one, int) or two != 2 * one or not (known or one == 1):
            given = f"{describe(k)} for {tokens.name}: {describe(tokens)}"
            return Miss(f"{where_is(layer.node)}: its K is {given}; wanted the same batch")
        layer.folded = one
    return None


def behind(values: Iterable[ir.Value | None]) -> set[ir.Node]:
    """The nodes that values are computed by, with those that read sizes, but not beyond them."""
    nodes, pending = set[ir.Node](), list(values)
    while pending:
        value = pending.pop()
        node = None if value is None else value.producer()
        if node is not None and node not in nodes:
            nodes.add(node)
            pending += [] if reads_sizes(node) else present_inputs(node)
    return nodes


@dataclass
class _Use:
    """What is done with an input: `masks` alone, and the rows of the largest table it selects."""

    masks: bool = False
    other: bool = False
    rows: int = 0

    @classmethod
    def of(cls, value: ir.Value, of_masks: set[ir.Node]) -> "_Use":
        """Followed from the input through what moves it."""
        found, pending, seen = cls(), [value], {value}
        while pending:
            at = pending.pop()
            for use in at.uses():
                node, first = use.node, use.node.inputs[0]
                if reads_sizes(node):
                    continue
                if node in of_masks:
                    found.masks = True
                elif not node.domain and node.op_type == "Gather" and use.idx == 1:
                    size = first.shape[0] if first is not None and first.shape is not None else 0
                    found.rows = max(found.rows, size if isinstance(size, int) else 0)
                elif not node.domain and node.op_type in _MOVED:
                    pending += [v for v in node.outputs if v not in seen]
                    seen.update(node.outputs)
                else:
                    found.other = True
        return found


_MOVED = ("Cast", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Identity")


def _roles(
    inputs: Iterable[ir.Value], of_masks: set[ir.Node], vocabulary: Any
) -> "tuple[ir.Value, ir.Value | None, ir.Value | None] | Miss":
    """Tokens, padding and places among the inputs: by what is done with them, then by name."""
    uses = {value: _Use.of(value, of_masks) for value in inputs}
    for value in uses:
        whole = value.dtype is not None and not value.dtype.is_floating_point()
        if not whole or value.shape is None or len(value.shape) != 2:
            wanted = "wanted tokens, their mask, their positions and a cache that new keys and"
            given = f"its input {value.name} is {describe(value)}"
            return Miss(f"{given}; {wanted} values are joined to")
    words = _words(uses, vocabulary)
    if isinstance(words, Miss):
        return words
    roles = {"tokens": words}
    for value, use in uses.items():
        if value is words:
            continue
        masks = use.masks and not (use.rows or use.other)
        role = "mask" if masks or "mask" in str(value.name) else "positions"
        if role in roles:
            return Miss(f"its inputs {roles[role].name} and {value.name} are both its {role}")
        roles[role] = value
    return words, roles.get("mask"), roles.get("positions")


def _words(uses: Mapping[ir.Value, _Use], vocabulary: Any) -> ir.Value | Miss:
    """The input that selects words; positions may select rows of a table, too."""
    found = [value for value, use in uses.items() if use.rows]
    if len(found) > 1:
        found = [value for value in found if uses[value].rows == vocabulary]
    if len(found) != 1 or "position" in str(found[0].name):
        found = [value for value, use in uses.items() if use.rows and value.name == "input_ids"]
    if len(found) == 1:
        return found[0]
    names = ", ".join(str(value.name) for value in uses)
    return Miss(f"which of its inputs, {names}, are words cannot be told")
