"""Two graphs aligned by what they compute: names mean nothing, weights count by their content.

A node has a cone below it, all that it is computed from, and one above it, all that is computed
from it (Weisfeiler and Leman's refinement, in the two directions of the edges). Nodes with the same
cone are a pair, and so are nodes that read the same weights. From pairs it spreads to their
neighbors: first to those that are equal except for what they read, at last to those of the same
operator. The nodes left over form regions: a region of one graph replaces one of the other.
"""

import re
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen.graph import all_values
from graphgen.op import is_default
from graphgen.places import block_of, shared
from graphgen.subgraphs import subgraphs_of
from graphgen.traits import Trait, has

_Near: TypeAlias = list[tuple[ir.Node, Hashable]]
"""Nodes next to a node or at an end of the graph, each with its place there."""

_SAMPLE = 1024
"""How many elements of a weight aligning looks at; comparing pairs looks at all."""

_SHORT = 16
"""The most integers of a constant that is part of the structure, as the sizes of a reshape."""


def attributes(node: ir.Node) -> dict[str, Hashable]:
    """The attributes that are not defaults, without subgraphs, which are read like operands."""
    found: dict[str, Hashable] = {}
    for name, attr in sorted(node.attributes.items()):
        if attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) or is_default(node, attr):
            continue
        value = attr.value
        if isinstance(value, ir.TensorProtocol):
            found[name] = str(value.numpy().tolist())
        else:
            found[name] = float(np.float32(value)) if isinstance(value, float) else str(value)
    return found


def ids_of(model: ir.Model) -> dict[ir.Node, str]:
    """The names of all nodes, or else their operators; repeated ones are numbered: x, x#2.

    Nodes of subgraphs come before the node that holds them.
    """
    ids, seen = dict[ir.Node, str](), Counter[str]()
    for node in _bottom_up(model.graph):
        name = node.name or node.op_type
        seen[name] += 1
        ids[node] = name if seen[name] == 1 else f"{name}#{seen[name]}"
    return ids


class Side:
    """One of the two graphs: what each node and value is, in labels that both share.

    `ids` are those of `ids_of`; `rank` is the order of the nodes.
    """

    def __init__(self, model: ir.Model, ends: Mapping[ir.Value, Hashable], labels: dict[Any, int]):
        self.model, self._ends, self._labels = model, ends, labels
        self.ids = ids_of(model)
        self.nodes = list(self.ids)
        self.rank = {node: i for i, node in enumerate(self.nodes)}
        self.reads: dict[ir.Node, list[ir.Value | None]] = {
            node: [*node.inputs, *(y for graph in subgraphs_of(node) for y in graph.outputs)]
            for node in self.nodes
        }
        self.users: dict[ir.Value, _Near] = {}
        for node in self.nodes:
            for i, value in enumerate(self.reads[node]):
                if value is not None:
                    self.users.setdefault(value, []).append((node, place(node, i)))
        makers = [(y.producer(), ends.get(y)) for y in model.graph.outputs]
        self.ends: _Near = [(maker, end) for maker, end in makers if maker is not None]
        self._inner: dict[ir.Value, Hashable] = {}
        depth: dict[Any, int] = {model.graph: 0}
        for owner in reversed(
            self.nodes
        ):  # before the nodes in its graphs, which may be of its kind
            for j, graph in enumerate(subgraphs_of(owner)):
                depth[graph] = depth[owner.graph] + 1
                at = owner.op_type, depth[graph], j
                self._inner |= {value: (*at, i) for i, value in enumerate(graph.inputs)}
        self.operator = {n: self._label(n.domain, n.op_type) for n in self.nodes}
        given = {n: tuple(attributes(n).items()) for n in self.nodes}
        self.equal = {n: self._label(self.operator[n], given[n]) for n in self.nodes}
        self.content: dict[ir.Value, int] = {}
        self.form: dict[ir.Value, int] = {}
        for graph in [model.graph, *model.graph.subgraphs()]:
            for value in all_values(graph):
                if value.producer() is None:
                    self.content[value], self.form[value] = self._leaf(value)
        self.weights = {n: self._weights_of(n) for n in self.nodes}
        self.below, self.above = self._cones(self.content)
        self.below_form, self.above_form = self._cones(self.form)

    def _label(self, *parts: Hashable) -> int:
        return self._labels.setdefault(parts, len(self._labels))

    def _leaf(self, value: ir.Value) -> tuple[int, int]:
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is None or value.is_graph_input():
            end = self._label("input", self._ends.get(value, self._inner.get(value, value.name)))
            return end, end
        form = ("tensor", str(tensor.dtype), tuple(tensor.shape))
        flat = tensor.numpy().reshape(-1)
        step = max(1, flat.size // _SAMPLE)
        sample = flat[::step]
        strings = flat.dtype.hasobject  # their bytes are addresses
        label = self._label(*form, str(sample.tolist()) if strings else sample.tobytes())
        integers = flat.size <= _SHORT and flat.dtype.kind in "iub"
        return label, label if integers else self._label(*form)

    def _weights_of(self, node: ir.Node) -> tuple[int, ...]:
        """The labels of the weights that a node reads: its anchors."""
        leaves = [v for v in self.reads[node] if v in self.content and not v.is_graph_input()]
        sizes = [ir.convenience.get_const_tensor(v) for v in leaves]
        return tuple(
            self.content[v]
            for v, t in zip(leaves, sizes, strict=True)
            if t is not None and t.size > _SHORT
        )

    def _cones(
        self, leaves: Mapping[ir.Value, int]
    ) -> tuple[dict[ir.Value | ir.Node, int], dict[ir.Node, int]]:
        below: dict[Any, int] = dict(leaves)
        for node in self.nodes:
            read = [-1 if x is None else below[x] for x in self.reads[node]]
            read = sorted(read) if has(node, Trait.COMMUTATIVE) else read
            below[node] = self._label(self.equal[node], *read)
            below.update((y, self._label("output", below[node], y.index())) for y in node.outputs)
        above: dict[ir.Node, int] = {}
        for node in reversed(self.nodes):
            read = [leaves[x] for x in self.reads[node] if x is not None and x in leaves]
            users = [
                sorted(self._label(above[user], i) for user, i in self.users.get(y, ()))
                for y in node.outputs
            ]
            ends = tuple(self._ends.get(y) for y in node.outputs)
            key = (self.equal[node], *sorted(read), *map(tuple, users), ends)
            above[node] = self._label("above", *key)
        return below, above


def place(node: ir.Node, i: int) -> int:
    """The number of an operand; 0 if the order of operands means nothing."""
    return 0 if has(node, Trait.COMMUTATIVE) else i


def _bottom_up(graph: ir.Graph) -> Iterator[ir.Node]:
    """The nodes of a graph; those of its subgraphs come before the node that holds them."""
    for node in graph:
        for inner in subgraphs_of(node):
            yield from _bottom_up(inner)
        yield node


class Alignment:
    """Pairs of nodes of two graphs. Deterministic: of equal candidates it takes the first.

    `pairs` leads from A to B, `back` from B to A; `lone` holds the nodes of both without a partner.
    """

    def __init__(self, one: ir.Model, other: ir.Model):
        ends, labels = _ends(one, other), dict[Any, int]()
        a, b = self.a, self.b = Side(one, ends, labels), Side(other, ends, labels)
        self.pairs: dict[ir.Node, ir.Node] = {}
        self.back: dict[ir.Node, ir.Node] = {}
        self._match(a.below, b.below, several=True)
        self._match(a.above, b.above)
        both = [{n: (s.operator[n], s.weights[n]) for n in s.nodes if s.weights[n]} for s in (a, b)]
        self._match(*both)
        forms = [{n: (s.below_form[n], s.above_form[n]) for n in s.nodes} for s in (a, b)]
        self._match(*forms, several=True)
        self._spread(a.below_form, b.below_form)
        self._spread(a.equal, b.equal)
        for mine, theirs in ((a.below_form, b.below_form), (a.above_form, b.above_form)):
            self._match(mine, theirs)
            self._spread(a.equal, b.equal)
        self._spread(a.operator, b.operator)
        self._spread(a.operator, b.operator, several=True)
        paired = {*self.pairs, *self.back}
        self.lone = dict.fromkeys(n for n in (*a.nodes, *b.nodes) if n not in paired)
        self.blocks = {**self._blocks(a, self.pairs), **self._blocks(b, self.back)}

    def _pair(self, a: ir.Node, b: ir.Node) -> None:
        self.pairs[a], self.back[b] = b, a

    def _match(
        self, mine: Mapping[Any, Hashable], theirs: Mapping[Any, Hashable], *, several: bool = False
    ) -> None:
        """Pair nodes without a partner whose keys are equal and unique, or (`several`) in order."""
        left = _groups((n for n in self.a.nodes if n in mine and n not in self.pairs), mine.get)
        right = _groups((n for n in self.b.nodes if n in theirs and n not in self.back), theirs.get)
        for key, nodes in left.items():
            others = right.get(key, [])
            if several or len(nodes) == len(others) == 1:
                for a, b in zip(nodes, others, strict=False):
                    self._pair(a, b)

    def _spread(
        self, mine: Mapping[Any, int], theirs: Mapping[Any, int], *, several: bool = False
    ) -> None:
        """Pair the neighbors of pairs that have the same place and the same key."""
        least = min(len(self.a.nodes), len(self.b.nodes))
        if len(self.pairs) == least:
            return
        queue = deque([(self.a.ends, self.b.ends), *self._around(self.pairs.items())])
        while queue and len(self.pairs) < least:
            left, right = queue.popleft()
            left = [n for n in left if n[0] not in self.pairs]
            right = [n for n in right if n[0] not in self.back]
            ones = _groups(left, lambda n: (n[1], mine[n[0]]))
            others = _groups(right, lambda n: (n[1], theirs[n[0]]))
            for key, nodes in ones.items():
                found = others.get(key, [])
                if several or len(nodes) == len(found) == 1:
                    for (x, _), (y, _) in zip(nodes, found, strict=False):
                        if x not in self.pairs and y not in self.back:
                            self._pair(x, y)
                            queue.extend(self._around([(x, y)]))

    def _around(self, pairs: Iterable[tuple[ir.Node, ir.Node]]) -> Iterator[tuple[_Near, _Near]]:
        """The makers of a pair's operands, and the readers of its outputs, each with its place."""
        for a, b in pairs:
            yield _makers(self.a, a), _makers(self.b, b)
            for x, y in zip(a.outputs, b.outputs, strict=False):
                yield self.a.users.get(x, []), self.b.users.get(y, [])

    def same(self, x: ir.Value | None, y: ir.Value | None) -> bool:
        """Whether two values are computed the same way, or by a pair."""
        if x is None or y is None or self.a.below[x] == self.b.below[y]:
            return x is y if x is None or y is None else True
        made, other = x.producer(), y.producer()
        if made is None or other is None:
            return False
        return self.pairs.get(made) is other and x.index() == y.index()

    def _blocks(self, side: Side, partners: Mapping[ir.Node, ir.Node]) -> dict[ir.Node, str]:
        """The block of each node: its own, that of its partner, or that of all who read it."""
        found: dict[ir.Node, str] = {}
        for node in reversed(side.nodes):
            known = [module_of(n) for n in (node, partners.get(node)) if n is not None]
            users = [user for y in node.outputs for user, _ in side.users.get(y, ())]
            found[node] = next(filter(None, known), "") or _common(found[user] for user in users)
        return found

    def where(self, nodes: Iterable[ir.Node]) -> str:
        """The innermost block that holds all nodes of A, or if A has none, all nodes of B."""
        known = [(n in self.a.rank, self.blocks[n]) for n in nodes]
        return _common(block for mine, block in known if mine) or _common(b for _, b in known)

    def regions(
        self, joined: Iterable[tuple[ir.Node, ir.Node]]
    ) -> Iterator[tuple[list[ir.Node], list[ir.Node]]]:
        """The nodes without a partner: nodes of A and the nodes of B in their place, or none.

        `joined` holds lone nodes that belong together, such as those that the two of a pair read.
        """
        import networkx as nx  # here, because every command line imports this module

        anchors: dict[int, list[ir.Node]] = {}
        graph = nx.Graph()
        graph.add_nodes_from(self.lone)
        graph.add_edges_from(joined)
        for node in self.lone:
            side = self.a if node in self.a.rank else self.b
            for value in side.reads[node]:
                made = None if value is None else value.producer()
                if value is not None and made in self.lone and self._joins(side, node, value):
                    graph.add_edge(node, made)
            for label in side.weights[node]:
                anchors.setdefault(label, []).append(node)
        graph.add_edges_from((n[0], n[1]) for n in anchors.values() if len(n) == 2)
        for part in nx.connected_components(graph):
            mine, theirs = (
                sorted(part & s.rank.keys(), key=s.rank.__getitem__) for s in (self.a, self.b)
            )
            yield mine, theirs

    def _joins(self, side: Side, node: ir.Node, value: ir.Value) -> bool:
        """Whether the maker of a value is in one region with a node that reads the value.

        Sizes form their own region in each block; other regions end where a layer ends, and at
        nodes that several layers share.
        """
        made = value.producer()
        assert made is not None
        if _is_size(node) or _is_size(made):
            return _is_size(node) == _is_size(made) and self.blocks[node] == self.blocks[made]
        layers = {_layer(self.blocks[user]) for user, _ in side.users[value]}
        own = _layer(self.blocks[made])
        return own == _layer(self.blocks[node]) or (not own and len(layers) == 1)


def _ends(a: ir.Model, b: ir.Model) -> dict[ir.Value, str]:
    """A label for each input and output: its name, or its number among those without a partner."""
    ends: dict[ir.Value, str] = {}
    for role in ("inputs", "outputs"):
        both = {v.name for v in getattr(a.graph, role)} & {v.name for v in getattr(b.graph, role)}
        for model in (a, b):
            values = getattr(model.graph, role)
            rest = [v for v in values if v.name not in both]
            own = {v: f"{role} {rest.index(v) if v in rest else v.name}" for v in values}
            ends = own | ends  # a value that is both counts as an input
    return ends


def module_of(node: ir.Node) -> str:
    """The module of a node, from what exporters note, or from the names of its weights."""
    names = [str(v.name) for v in node.inputs if v is not None and v.is_initializer()]
    return block_of(node) or next((n.rpartition(".")[0] for n in names if ":" not in n), "")


def _common(paths: Iterable[str]) -> str:
    """The innermost block that holds all of these paths; empty ones do not count."""
    return ".".join(shared(path.split(".") for path in paths if path))


def _layer(path: str) -> str:
    """The path up to its last number: `layers.3` of `layers.3.attention`."""
    found = re.match(r"(.*\.)?\d+(?![^.])", path)
    return found[0] if found else ""


def _is_size(node: ir.Node) -> bool:
    """Whether a node computes with sizes or positions."""
    values = [node.outputs[0], *node.inputs[:1]]
    dtypes = [value.dtype for value in values if value is not None]
    return ir.DataType.INT64 in (dtypes if dtypes[0] == ir.DataType.BOOL else dtypes[:1])


def _makers(side: Side, node: ir.Node) -> _Near:
    made = [(v.producer(), i) for i, v in enumerate(side.reads[node]) if v is not None]
    return [(maker, place(node, i)) for maker, i in made if maker is not None]


def _groups(items: Iterable[Any], key: Callable[[Any], Hashable]) -> dict[Hashable, list[Any]]:
    found: dict[Hashable, list[Any]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


__all__ = ["Alignment", "attributes", "ids_of", "module_of"]
