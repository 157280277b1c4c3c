"""The changes between two aligned graphs, each where it is made."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeAlias

import onnx_ir as ir

from graphgen.display import on_screen
from graphgen.graph import constant, operator_name
from graphgen.infer import describe
from graphgen.laboratory.align import Alignment, attributes
from graphgen.laboratory.text import SHOWN, literal
from graphgen.measure.accuracy import largest_difference
from graphgen.traits import Trait, has

_RUN = 12  # the most operators of a region to name one by one
_SHORT = 3  # the most operators of a region to show with constants

_Operand: TypeAlias = ir.Value | None
_Port: TypeAlias = tuple[ir.Node | None, _Operand, _Operand]
"""A node of a pair, or None for the output, and its operand in A and in B; one has no partner."""


@dataclass
class Change:
    """One difference; `a` and `b` are the ids of its nodes."""

    kind: str
    where: str
    text: str
    a: list[str] = field(default_factory=list)
    b: list[str] = field(default_factory=list)
    largest: float | None = None

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield f"Change({self.kind}{f' at {self.where}' * bool(self.where)}: {self.text})"


class Comparison:
    """The changes between two aligned graphs: of pairs, of weights and of regions."""

    def __init__(self, aligned: Alignment):
        self.a, self.b, self.aligned = aligned.a, aligned.b, aligned
        self.weights: dict[tuple[ir.Value, ir.Value], Change | None] = {}
        self.ports: dict[ir.Node, list[_Port]] = {}
        self.joined: list[tuple[ir.Node, ir.Node]] = []

    def changes(self) -> list[Change]:
        """All changes, in the order of A."""
        found = [(self.a.rank[x], self._of_pair(x, y)) for x, y in self.aligned.pairs.items()]
        theirs = {y.name: y for y in self.b.model.graph.outputs}
        for x in [x for x in self.a.model.graph.outputs if x.name in theirs]:
            if text := self._reads(None, x, theirs[x.name]):
                found.append((len(self.a.nodes), Change("changed", "", f"output {x.name} {text}")))
        found += self._regions()
        for (x, _), change in self.weights.items():
            ranks = [self.a.rank[node] for node, _ in self.a.users.get(x, ())]
            found.append((min(ranks, default=len(self.a.nodes)), change))
        return [change for _, change in sorted(found, key=lambda one: one[0]) if change is not None]

    def _of_pair(self, x: ir.Node, y: ir.Node) -> Change | None:
        mine, theirs = attributes(x), attributes(y)
        parts = [
            f"{name} {mine.get(name, 'default')} -> {theirs.get(name, 'default')}"
            for name in sorted({*mine, *theirs})
            if mine.get(name) != theirs.get(name)
        ]
        left, right = self.a.reads[x], self.b.reads[y]
        order = self._order(left, right)
        if has(x, Trait.COMMUTATIVE):
            left, right = self._rest(left, order.keys()), self._rest(right, order.values())
        elif len(order) == len(left) == len(right) and [*order.values()] != sorted(order.values()):
            parts.append(f"operands in the order {', '.join(map(str, order.values()))}")
            left = right = []
        operands = [*zip_longest(left, right)]
        for i, (one, other) in enumerate(operands):
            if text := self._reads(x, one, other):
                parts.append(text if len(operands) < 2 else f"operand {i} {text}")
        if not parts:
            return None
        text = f"{operator_name(x)}: {'; '.join(parts)}"
        return Change("changed", self.aligned.where([x, y]), text, [self.a.ids[x]], [self.b.ids[y]])

    def _order(self, left: Sequence[_Operand], right: Sequence[_Operand]) -> dict[int, int]:
        """Where in `right` the operands of `left` are: at their own place, or the first match."""
        order: dict[int, int] = {}
        for i, x in enumerate(left):
            for j in sorted({*range(len(right))} - {*order.values()}, key=lambda j: (j != i, j)):
                if self.aligned.same(x, right[j]) and not self._weight(x, right[j]):
                    order[i] = j
                    break
        return order

    def _rest(self, values: Sequence[_Operand], done: Collection[int]) -> list[_Operand]:
        """The other operands: first those from lone nodes, last those that no node makes."""
        rest = [v for i, v in enumerate(values) if i not in done]
        return sorted(rest, key=lambda v: (not self._lone(v), v is None or v.producer() is None))

    def _reads(self, reader: ir.Node | None, x: _Operand, y: _Operand) -> str:
        """What a pair reads in A and in B, if it differs and no other change says so."""
        if self._weight(x, y) or self.aligned.same(x, y):
            return ""
        if lone := self._lone(x, y):
            self.ports.setdefault(lone[0], []).append((reader, x, y))
            self.joined.append((lone[0], lone[-1]))
            return ""
        return f"{_made(x)} -> {_made(y)}"

    def _lone(self, *values: _Operand) -> list[ir.Node]:
        """The makers of these values that have no partner."""
        made = [value.producer() for value in values if value is not None]
        return [node for node in made if node is not None and node in self.aligned.lone]

    def _weight(self, x: _Operand, y: _Operand) -> Change | None:
        """The change between two weights with different content."""
        if x is None or y is None or x not in self.a.content or y not in self.b.content:
            return None
        if (x, y) not in self.weights:
            self.weights[x, y] = self._of_weights(x, y)
        return self.weights[x, y]

    def _of_weights(self, x: ir.Value, y: ir.Value) -> Change | None:
        one, other = constant(x), constant(y)
        if one is None or other is None or max(one.size, other.size) <= SHOWN:
            return None
        name = next((str(v.name) for v in (x, y) if "." in str(v.name)), str(x.name))
        users = [n for s, v in ((self.a, x), (self.b, y)) for n, _ in s.users.get(v, ())[:1]]
        where = name.rpartition(".")[0] or self.aligned.where(users)
        mine, theirs = ([s.ids[n] for n in users if n in s.rank] for s in (self.a, self.b))
        change = Change("weight", where, name, mine, theirs)
        if one.dtype != other.dtype or one.shape != other.shape:
            change.text += f": {describe(x)} -> {describe(y)}"
        elif math.isinf(largest := largest_difference(one, other)):
            change.text += ": elements of one are no finite numbers"
        elif largest:
            change.largest = largest
        else:
            return None
        return change

    def _regions(self) -> Iterator[tuple[int, Change]]:
        """The regions without a partner, and where they begin in A."""
        for left, right in self.aligned.regions(self.joined):
            nodes = [*left, *right]
            ports = [port for node in nodes for port in self.ports.get(node, ())]
            kind, text = "replaced", f"{_run(left)} -> {_run(right)}"
            if not left or not right:
                kind, text = "removed" if left else "added", _run(nodes)
                text += self._around(nodes, ports)
            change = Change(kind, self.aligned.where(nodes), text)
            change.a, change.b = [self.a.ids[n] for n in left], [self.b.ids[n] for n in right]
            near = [*left, *(reader for reader, _, _ in ports if reader is not None)]
            yield min((self.a.rank[n] for n in near), default=len(self.a.nodes)), change

    def _around(self, nodes: Sequence[ir.Node], ports: Sequence[_Port]) -> str:
        """What to add about a region that only one of the graphs has."""
        removed = nodes[0] in self.a.rank
        mine, other = (self.a, self.b) if removed else (self.b, self.a)
        known = {other.below[n] for n in other.nodes}
        if all(mine.below[n] in known for n in nodes):
            return ", which are computed elsewhere too"
        ends = [v for n in nodes for v in mine.reads[n]]
        for reader, x, y in ports:
            pairs = [(v, y) if removed else (x, v) for v in ends]
            if not any(self.aligned.same(*pair) for pair in pairs):
                who = "the output" if reader is None else operator_name(reader)
                return f"; {who} reads {_made(x)} -> {_made(y)}"
        return ""


def _run(nodes: Sequence[ir.Node]) -> str:
    """The operators in order, or counted if there are many."""
    names = [operator_name(node) for node in nodes]
    if len(names) > _RUN:
        return ", ".join(f"{n} {x}" if n > 1 else x for x, n in Counter(names).items())
    if len(names) <= _SHORT:
        texts = [", ".join(filter(None, map(literal, node.inputs))) for node in nodes]
        names = [f"{name} {text}".strip() for name, text in zip(names, texts, strict=True)]
    return ", ".join(names)


def _made(value: _Operand) -> str:
    """What a value is, in the same words for all repeated layers."""
    if value is None:
        return "nothing"
    made = value.producer()
    return operator_name(made) if made is not None else literal(value) or str(value.name)
