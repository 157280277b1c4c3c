"""The changes between two graphs that are aligned, each where it is made."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.graph import constant, operator_name
from graphgen.infer import describe
from graphgen.op import PATH
from graphgen.ops.align import COMMUTATIVE, Alignment, Side, attributes

_SHOWN = 4  # elements of a constant that are written out
_RUN = 12  # operators of a region that are named one by one
_SHORT = 3  # operators of a region whose constants are told, too
_CHUNK = 1 << 22  # elements of a weight that are compared at once


@dataclass
class Change:
    """One difference; `a` and `b` are the ids of the nodes that it is about."""

    kind: str
    where: str
    text: str
    a: list[str] = field(default_factory=list)
    b: list[str] = field(default_factory=list)
    largest: float | None = None


class Comparison:
    """The changes between two sides that are aligned."""

    def __init__(self, a: Side, b: Side):
        self.a, self.b, self.aligned = a, b, Alignment(a, b)
        self.blocks = self._find_blocks()
        self.names = {**_named(a.nodes), **_named(b.nodes)}
        self.joined: list[tuple[ir.Node, ir.Node]] = []
        self.weights: dict[tuple[ir.Value, ir.Value], Change | None] = {}
        self.ports: list[tuple[Any, ir.Node | None, ir.Value | None, ir.Value | None]] = []
        self.lone = {*a.nodes, *b.nodes} - {*self.aligned.pairs, *self.aligned.back}

    def changes(self) -> list[Change]:
        """Those of pairs, of weights and of regions without a partner, in the order of A."""
        found = [(self.a.rank[x], self._of_pair(x, y)) for x, y in self.aligned.pairs.items()]
        last = len(self.a.nodes)
        mine, theirs = (
            {str(y.name): y for y in side.model.graph.outputs} for side in (self.a, self.b)
        )
        for name in [name for name in mine if name in theirs]:
            if text := self._reads(None, mine[name], theirs[name]):
                found.append((last, Change("changed", "", f"output {name} {text}")))
        found += list(self._regions())
        found += [(self.a.rank[self.a.users[x][0][0]], c) for (x, _), c in self.weights.items()]
        return [change for _, change in sorted(found, key=lambda one: one[0]) if change is not None]

    def _of_pair(self, x: ir.Node, y: ir.Node) -> Change | None:
        mine, theirs = attributes(x), attributes(y)
        told = [
            f"{name} {mine.get(name, 'default')} -> {theirs.get(name, 'default')}"
            for name in sorted({*mine, *theirs})
            if mine.get(name) != theirs.get(name)
        ]
        left, right = self.a.reads[x], self.b.reads[y]
        if len(left) == len(right) > 1 and x.op_type not in COMMUTATIVE:
            order = self._order(left, right)
            if order is not None and order != sorted(order):
                told.append(f"operands in the order {', '.join(map(str, order))}")
                left = right = []
        elif x.op_type in COMMUTATIVE:
            left, right = self._left_over(left, right)
        length = max(len(left), len(right))
        for i in range(length):
            one, other = (v[i] if i < len(v) else None for v in (left, right))
            if text := self._reads(x, one, other):
                told.append(text if length < 2 else f"operand {i} {text}")
        if not told:
            return None
        text = f"{operator_name(x)}: {'; '.join(told)}"
        return Change("changed", self._where([x, y]), text, [self.names[x]], [self.names[y]])

    def _order(self, left: Sequence[Any], right: Sequence[Any]) -> list[int] | None:
        """Where in `right` the operands of `left` are, if they are the same ones."""
        rest, order = list(range(len(right))), []
        for i, x in enumerate(left):
            found = [j for j in sorted(rest, key=lambda j: j != i) if self._same(x, right[j])]
            if not found:
                return None
            order.append(found[0])
            rest.remove(found[0])
        return order

    def _left_over(self, left: Sequence[Any], right: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Operands of a commutative operator that the other has not, those without a pair first."""
        mine, theirs = list(left), list(right)
        for x in left:
            found = next((y for y in theirs if self._same(x, y)), None)
            if found is not None:
                mine.remove(x)
                theirs.remove(found)

        def kind(value: ir.Value) -> int:
            made = value.producer()
            return 2 if made is None else int(made not in self.lone)

        return sorted(mine, key=kind), sorted(theirs, key=kind)

    def _same(self, x: ir.Value | None, y: ir.Value | None) -> bool:
        return self.aligned.same(x, y) and (x is None or y is None or not self._weight(x, y))

    def _reads(self, node: ir.Node | None, x: ir.Value | None, y: ir.Value | None) -> str:
        """What a pair reads in A and in B, where that is not the same and not told elsewhere."""
        if self._same(x, y) or (x is not None and y is not None and self._weight(x, y)):
            return ""
        made = [None if v is None else v.producer() for v in (x, y)]
        if lone := [n for n in made if n in self.lone]:
            self.joined.append((lone[0], lone[-1]))
            self.ports += [(n, node, x, y) for n in lone]
            return ""
        return f"{_made(x)} -> {_made(y)}"

    def _weight(self, x: ir.Value, y: ir.Value) -> bool:
        """Whether two values are weights of different content, which is then noted."""
        if x not in self.a.content or y not in self.b.content:
            return False
        if (x, y) not in self.weights:
            self.weights[x, y] = self._weights(x, y)
        return self.weights[x, y] is not None

    def _weights(self, x: ir.Value, y: ir.Value) -> Change | None:
        one, other = constant(x), constant(y)
        if one is None or other is None or max(one.size, other.size) <= _SHOWN:
            return None
        names = [str(v.name) for v in (x, y)]
        name = next((name for name in names if "." in name), names[0])
        user, reader = self.a.users[x][0][0], self.b.users[y][0][0]
        where = name.rpartition(".")[0] or self._where([user, reader])
        change = Change("weight", where, name, [self.names[user]], [self.names[reader]])
        if one.dtype != other.dtype or one.shape != other.shape:
            change.text += f": {describe(x)} -> {describe(y)}"
            return change
        largest = _largest(one, other)
        if not math.isfinite(largest):
            change.text += ": elements of one are no finite numbers"
            return change
        change.largest = largest
        return change if largest else None

    def _regions(self) -> Iterator[tuple[int, Change]]:
        """What has no partner, as regions of A that stand for regions of B."""
        import networkx as nx  # here, since every command line imports this module

        anchors: dict[int, list[ir.Node]] = {}
        regions = nx.Graph()
        regions.add_nodes_from(n for n in (*self.a.nodes, *self.b.nodes) if n in self.lone)
        regions.add_edges_from(self.joined)
        for side in (self.a, self.b):
            for node in [n for n in side.nodes if n in self.lone]:
                made = [v for v in side.reads[node] if v is not None and v.producer() in self.lone]
                regions.add_edges_from(
                    (node, v.producer()) for v in made if self._joins(side, node, v)
                )
                for label in side.weights[node]:
                    anchors.setdefault(label, []).append(node)
        for nodes in anchors.values():
            if len(nodes) == 2:
                regions.add_edge(*nodes)
        for part in nx.connected_components(regions):
            left, right = (
                sorted((n for n in part if n in side.rank), key=side.rank.__getitem__)
                for side in (self.a, self.b)
            )
            ports = [port for port in self.ports if port[0] in part]
            near = [*left, *(reader for _, reader, _, _ in ports)]
            ranks = [self.a.rank[n] for n in near if n in self.a.rank]
            names = [[self.names[n] for n in nodes] for nodes in (left, right)]
            kind, text = "replaced", f"{_run(left)} -> {_run(right)}"
            if not left or not right:
                kind, text = "removed" if left else "added", _run(left or right)
                text += self._around(left or right, ports)
            where = self._where([*left, *right])
            yield (
                min(ranks, default=len(self.a.nodes)),
                Change(kind, where, text, names[0], names[1]),
            )

    def _joins(self, side: Side, node: ir.Node, value: ir.Value) -> bool:
        """Whether what makes a value is of one region with a node that reads it.

        Sizes are a region of their own in each block; other regions end where a layer does, and at
        what several layers share.
        """
        made = value.producer()
        assert made is not None
        if _is_size(node) or _is_size(made):
            return _is_size(node) == _is_size(made) and self.blocks[node] == self.blocks[made]
        layers = {_layer(self.blocks[user]) for user, _ in side.users[value]}
        own = _layer(self.blocks[made])
        return own == _layer(self.blocks[node]) or (not own and len(layers) == 1)

    def _around(self, nodes: Sequence[ir.Node], ports: Sequence[Any]) -> str:
        """What else a region that only one of the graphs has says."""
        mine, other = (self.a, self.b) if nodes[0] in self.a.rank else (self.b, self.a)
        known = {other.below[n] for n in other.nodes}
        if all(mine.below[n] in known for n in nodes):
            return ", which are computed elsewhere too"
        ends = [v for n in nodes for v in mine.reads[n] if v is None or v.producer() not in nodes]
        for _, reader, x, y in ports:
            there = y if mine is self.a else x
            pairs = [(v, there) if mine is self.a else (there, v) for v in ends]
            if not any(self.aligned.same(*pair) for pair in pairs):
                told = "the output" if reader is None else operator_name(reader)
                return f"; {told} reads {_made(x)} -> {_made(y)}"
        return ""

    def _where(self, nodes: Iterable[ir.Node]) -> str:
        """The innermost block that all of the nodes of A are in, or those of B if A tells none."""
        told = [(n in self.a.rank, self.blocks[n]) for n in nodes]
        return _common(block for mine, block in told if mine) or _common(b for _, b in told)

    def _find_blocks(self) -> dict[ir.Node, str]:
        """The block of each node, where nothing tells it that of its partner or of its users."""
        found: dict[ir.Node, str] = {}
        sides = ((self.a, self.aligned.pairs), (self.b, self.aligned.back))
        for side, partners in sides:
            for node in reversed(side.nodes):
                told = [n.metadata_props.get(PATH, "") for n in (node, partners.get(node)) if n]
                users = [user for y in node.outputs for user, _ in side.users.get(y, ())]
                block = next(filter(None, told), "")
                found[node] = block or _common(found[user] for user in users)
        return found


def _common(paths: Iterable[str]) -> str:
    """The innermost block that all of these are in, of those that are told."""
    parts = zip(*(path.split(".") for path in paths if path), strict=False)
    return ".".join(column[0] for column in takewhile(lambda same: len(set(same)) == 1, parts))


def _layer(path: str) -> str:
    """The path up to its last number: `layers.3` of `layers.3.attention`."""
    found = re.match(r"(.*\.)?\d+(?![^.])", path)
    return found[0] if found else ""


def _is_size(node: ir.Node) -> bool:
    """Whether a node computes with sizes or positions."""
    values = [node.outputs[0], *node.inputs[:1]]
    dtypes = [value.dtype for value in values if value is not None]
    return ir.DataType.INT64 in (dtypes if dtypes[0] == ir.DataType.BOOL else dtypes[:1])


def _named(nodes: Sequence[ir.Node]) -> dict[ir.Node, str]:
    """An id for each node: its name, numbered where others have it too."""
    seen: Counter[str] = Counter()
    found = {}
    for node in nodes:
        name = node.name or node.op_type
        seen[name] += 1
        found[node] = name if seen[name] == 1 else f"{name}#{seen[name]}"
    return found


def _largest(one: Any, other: Any) -> float:
    """The largest difference of two arrays; infinite where only one is a number."""
    found = 0.0
    one, other = one.reshape(-1), other.reshape(-1)
    for i in range(0, one.size, _CHUNK):
        x, y = one[i : i + _CHUNK], other[i : i + _CHUNK]
        if np.array_equal(x, y):
            continue
        if x.dtype.kind in "OSU":
            return math.inf
        x, y = x.astype(np.float64), y.astype(np.float64)
        equal = (x == y) | (np.isnan(x) & np.isnan(y))
        off = np.abs(np.where(equal, 0, x - y))
        found = max(found, float(np.where(np.isnan(off), np.inf, off).max()))
    return found


def _run(nodes: Sequence[ir.Node]) -> str:
    """The operators in order, counted where they are many."""
    names = [operator_name(node) for node in nodes]
    if len(names) <= _SHORT:
        told = [", ".join(filter(None, map(_shown, node.inputs))) for node in nodes]
        names = [f"{n} {t}" if t else n for n, t in zip(names, told, strict=True)]
    if len(names) > _RUN:
        names = [f"{n} {name}" if n > 1 else name for name, n in Counter(names).items()]
    return ", ".join(names)


def _made(value: ir.Value | None) -> str:
    """What a value is, in words that are the same in repeated layers."""
    if value is None:
        return "nothing"
    if (made := value.producer()) is not None:
        return operator_name(made)
    return _shown(value) or str(value.name)


def _shown(value: ir.Value | None) -> str:
    """A short constant as text, '' for all others."""
    array = None if value is None or value.producer() is not None else constant(value)
    if array is None or array.size > _SHOWN:
        return ""
    return np.array2string(array, precision=6, separator=", ").replace("\n", "")
