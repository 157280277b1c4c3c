"""Forward values that the backward pass calculates again instead of keeping, and the savings.

A forward value that the backward pass needs is either kept, or calculated again from kept ones just
before its first use there (Chen et al., arXiv 1604.06174):

- none: only what costs little for the bytes it holds: activations and norms, from what the
  gradients of these operators need anyway;
- full: everything but the checkpoints, the values that cross a place where the forward pass keeps
  least alive; in a transformer that is the residual stream between two sublayers;
- auto: as little as fits into a memory budget: first like none; then also products of little depth,
  such as the attention weights from queries and keys; then like full, in as few of the first
  segments as possible.

Each chain of recomputation starts from `Reshape(x, Shape(cotangent))`: the runtime's pass for
common subexpressions cannot merge it with the forward pass, nor can it run before the backward.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

import onnx_ir as ir

from graphgen import ops
from graphgen.errors import GraphgenError, one_of
from graphgen.graph import is_float, operator_name, present_inputs
from graphgen.infer import OPSET, infer, new_context, same_shape
from graphgen.match import Engine, Pass, PassReport, Replacement, Rewired, whole
from graphgen.measure.cost import is_view, peak_alive, roots_of
from graphgen.measure.feeds import check_sizes
from graphgen.op import is_a
from graphgen.ops.layout import _reshape, _shape
from graphgen.ops.numbers_of_sizes import size_at
from graphgen.passes.training import MARK
from graphgen.passes.training.accumulate import running_sums
from graphgen.passes.training.products import transposes_operands
from graphgen.record import Tape, current_tape
from graphgen.subgraphs import ancestors, reads, subgraphs_of
from graphgen.traits import Trait, has

Recompute: TypeAlias = Literal["none", "full", "auto"]
RECOMPUTE = "recompute"
"""The name of the pass."""

_PRODUCTS = (ops.matmul, ops.gemm, ops.conv, ops.einsum)

_CHEAP = 3
"""How many elementwise passes a value is worth."""

_DEAR = 20
"""How many it is worth if memory is short: attention weights of heads up to 144 wide."""

_DEPTH = 8  # terms of a product that take as long as an elementwise pass: 5.6 to 9.2 were measured

_ARENA = 1.13  # what the runtime's arena takes for each byte in it, and what it takes before that
_SESSION = 10 << 20
_TYPICAL = 256  # an unknown size
_VALLEY = 1.5  # a checkpoint has this many times less alive than both sides


def recomputation(
    weights: Collection[str],
    mode: Recompute = "auto",
    *,
    memory: int | None = None,
    state: int = 0,
    dims: Mapping[str, int] | None = None,
) -> list[Pass]:
    """The passes that let a training graph calculate forward values again.

    Args:
        weights: The names of the parameters; the outputs of the model are the loss and gradients.
        mode: auto, none or full, as above.
        memory: The bytes that may be used; without it, auto is full.
        state: The bytes of weights, gradients and moments, which count too.
        dims: The sizes of the symbolic dimensions at which memory is counted.

    Raises GraphgenError for another mode and, when they run, for a symbol that no input has, and
    for a budget that nothing fits into.
    """
    one_of("artifacts", Recompute, recompute=mode)
    dims = dims or {}

    def run(model: ir.Model, engine: Engine) -> PassReport:
        check_sizes(model, dims)
        budget = None if memory is None else memory - state
        plan = (0 if mode == "none" else None), False
        if budget is not None and mode == "auto":
            plan = _within(model, weights, dims, budget)
        report = _Training(model, weights, dims).rewrite(engine, *plan)
        if budget is None or engine.stopped:
            return report
        if (peak := step_bytes(model, dims)) > budget:
            sizes = ", ".join(f"{name}={size}" for name, size in dims.items()) or "typical sizes"
            less = "; recompute='auto' needs less" if mode == "none" else ""
            raise GraphgenError(
                f"memory={memory}: with recompute={mode!r}, {state + peak} bytes are needed at "
                f"{sizes}; give as much, or a smaller batch{less}"
            )
        return report

    return [whole("schedule", _scheduled), Pass(RECOMPUTE, run, "whole")]


def _within(
    model: ir.Model, weights: Collection[str], dims: Mapping[str, int], budget: int
) -> tuple[int | None, bool]:
    """How many segments, and whether products, so that a step takes no more than the budget.

    All segments, if nothing fits into it.
    """

    def attempt(segments: int | None, products: bool = False) -> tuple[int, int]:
        graph = _Training(copy := model.clone(), weights, dims)
        graph.rewrite(Engine(), segments, products)
        return step_bytes(copy, dims), len(graph.valleys)

    peak, segments = attempt(None)
    plan: tuple[int | None, bool] = None, False
    low, high = 0, segments + 1 if peak <= budget else 0
    while low < high:
        middle = (low + high) // 2  # 0 is none, and from there on products are in it
        tried = max(middle - 1, 0), middle > 0
        if attempt(*tried)[0] <= budget:
            plan, high = tried, middle
        else:
            low = middle + 1
    return plan


def step_bytes(model: ir.Model, dims: Mapping[str, int]) -> int:
    """The bytes that a session takes for a step, without weights, gradients and moments."""
    return _SESSION + int(_ARENA * peak_bytes(model, dims))


def peak_bytes(model: ir.Model, dims: Mapping[str, int]) -> int:
    """The most bytes that intermediate values take together when nodes run in the file's order.

    Inputs and outputs of the graph, and what outputs are summed up in, are buffers of the caller's
    and are not counted. Nor are transposed operands of products: `fuse_transposes` makes flags of
    them.
    """
    graph = model.graph
    given = {value for output in graph.outputs for value in running_sums(output)}
    return peak_alive(
        graph, _Sizes(dims).nbytes, roots=_roots(graph), in_place=True, elsewhere=given
    )


class _Sizes:
    """Bytes and costs at the given sizes of the symbolic dimensions."""

    def __init__(self, dims: Mapping[str, int]):
        self._dims = dims

    def shape(self, value: ir.Value) -> list[int]:
        """The sizes of the axes; unknown ones are typical."""
        if value.shape is None:
            return []
        known = dict.fromkeys(value.shape.free_symbols(), _TYPICAL) | dict(self._dims)
        sizes = (size_at(dim, known) for dim in value.shape)
        return [size if isinstance(size, int) else _TYPICAL for size in sizes]

    def nbytes(self, value: ir.Value) -> int:
        """The bytes that a value takes in memory."""
        itemsize = value.dtype.itemsize if value.dtype is not None else 0
        return math.ceil(math.prod(self.shape(value)) * itemsize)

    def cost(self, node: ir.Node) -> float:
        """The bytes that elementwise operators write in the time that a node takes."""
        if is_view(node):
            return 0
        written = self.nbytes(node.outputs[0])
        if is_a(node, ops.matmul):
            depth = [math.inf, *self.shape(present_inputs(node)[0])][-1]
            return written * depth / _DEPTH
        return math.inf if is_a(node, *_PRODUCTS) else written


class _Training:
    """A training graph in two parts: what the loss depends on, and the backward pass."""

    def __init__(self, model: ir.Model, weights: Collection[str], dims: Mapping[str, int]):
        self._sizes = _Sizes(dims)
        self._context = new_context({"": OPSET})
        self._reads = reads(model.graph)
        needed_by_loss = ancestors(model.graph.outputs[0], self._reads)
        self._model = model
        self._forward = [n for n in model.graph if n in needed_by_loss]
        self._backward = [n for n in model.graph if n not in needed_by_loss]
        self._active = {v for v in model.graph.inputs if v.name not in weights}
        self._bits = {v for v in model.graph.inputs if v.name in weights and not is_float(v)}
        starts = self._active | self._bits  # weights in few bits are restored again, not kept
        for node in self._forward:  # values that depend on the batch, and restored weights
            if not starts.isdisjoint(self._reads[node]):
                starts.update(node.outputs)
                self._active.update(node.outputs)
        self._roots = _roots(model.graph)
        found = list(self._find_valleys())
        # One that is higher than both of its neighbors lies within a sublayer.
        beside = zip(found, found[:1] + found[:-1], found[1:] + found[-1:], strict=True)
        self.valleys = [v for v, a, b in beside if v[0] <= _VALLEY * max(a[0], b[0])]

    def choose(self, segments: int | None, products: bool = False) -> set[ir.Value]:
        """The values to keep if this many segments are recomputed, or all of them.

        After the last of these segments, what the backward pass needs is kept, unless it is cheap
        or, with `products`, a product of little depth.
        """
        until = self.valleys[:segments]
        kept = {value for *_, crossing in until for value in crossing}
        for node in self._forward:
            if has(node, Trait.SHAPE) or subgraphs_of(node):
                kept.update(node.outputs)
        start = until[-1][1] if until else 0
        made = {v: i for i, node in enumerate(self._forward) for v in node.outputs}
        needed = dict.fromkeys(
            v for n in self._backward for v in n.inputs if v in self._active and v in made
        )
        later = [v for v in needed if made[v] >= start and v not in kept]
        later.sort(key=made.__getitem__)
        kept.update(later)
        for value in later:
            chain = self._chain(value, kept)
            if not products and any(is_a(node, *_PRODUCTS) for node in chain):
                continue
            worth = (_DEAR if products else _CHEAP) * self._sizes.nbytes(value)
            if sum(map(self._sizes.cost, chain)) <= worth:
                kept.discard(value)
        return kept

    def rewrite(self, engine: Engine, segments: int | None, products: bool) -> PassReport:
        """Calculate again, before the first node of the backward pass that uses it, what is not
        kept; each of these nodes is a site."""
        kept, backward = self.choose(segments, products), {*self._backward}
        again: dict[ir.Value, ir.Value] = {}
        cotangents: dict[ir.Value, None] = {}

        def again_of(value: ir.Value, before: ir.Node, tape: Tape) -> ir.Value:
            if value not in self._active and value not in self._bits:
                return value
            if value not in again:
                producer = value.producer()
                if producer is None or value in kept:
                    again[value] = self._restart(value, cotangents, before, tape)
                else:
                    inputs = [
                        x if x is None else again_of(x, before, tape) for x in producer.inputs
                    ]
                    copies = _copy(producer, inputs, tape)
                    again.update(zip(producer.outputs, copies, strict=True))
            return again[value]

        def rule(node: ir.Node) -> Rewired | None:
            tape, operands = current_tape(), dict[int, ir.Value]()
            if tape is None or node not in backward:
                return None
            for i, value in enumerate(node.inputs if cotangents else ()):
                lost = value in self._active and value not in kept
                if value is not None and value.producer() is not None and lost:
                    operands[i] = again_of(value, node, tape)
            if not cotangents or not cotangents.keys().isdisjoint(node.inputs):
                cotangents.update(dict.fromkeys(node.outputs))
            made = [n for n in tape.nodes if n.metadata_props[MARK] == "copy"]
            operators = ", ".join(dict.fromkeys(n.op_type for n in made)) or "nothing more"
            return Rewired(operands, f"calculated again: {operators}") if operands else None

        rules = {operator_name(node): [rule] for node in self._backward}
        return engine.run(RECOMPUTE, self._model, rules, forward=True)

    def _restart(
        self, value: ir.Value, cotangents: dict[ir.Value, None], before: ir.Node, tape: Tape
    ) -> ir.Value:
        """`value`, in a way that depends on a cotangent."""
        near = [v for v in present_inputs(before) if v in cotangents]
        near.append(next(reversed(cotangents)))
        like = next((v for v in near if same_shape(v.shape, value.shape)), None)
        if like is not None:
            nodes = [ir.node(_shape.name, [like])]
        else:  # whatever the size, it equals itself
            size, own = ir.node(ops.size.name, [near[0]]), ir.node(_shape.name, [value])
            same = ir.node(ops.equal.name, [size.outputs[0]] * 2)
            sizes = [same.outputs[0], own.outputs[0], size.outputs[0]]
            nodes = [size, own, same, ir.node(ops.where.name, sizes)]
        nodes.append(ir.node(_reshape.name, [value, nodes[-1].outputs[0]]))
        for node in nodes:
            node.metadata_props[MARK] = "start"
            infer(node, self._context)
        nodes[-1].outputs[0].shape = value.shape
        tape.nodes += nodes
        return nodes[-1].outputs[0]

    def _chain(self, value: ir.Value, kept: set[ir.Value]) -> set[ir.Node]:
        """The nodes that calculate `value` from kept values and inputs."""
        return ancestors(value, self._reads, lambda x: x in self._active and x not in kept)

    def _find_valleys(self) -> Iterator[tuple[int, int, list[ir.Value]]]:
        """Where the forward pass keeps least alive: the bytes, position and crossing values."""
        last = {
            self._roots.get(v, v): i
            for i, node in enumerate(self._forward)
            for v in self._reads[node]
        }
        alive: dict[ir.Value, int] = {}
        best: tuple[int, int, list[ir.Value]] | None = None
        high = 0
        for i, node in enumerate(self._forward):
            for value in node.outputs:
                if value in self._active and value not in self._roots:
                    alive[value] = self._sizes.nbytes(value)
            alive = {v: size for v, size in alive.items() if last.get(v, 0) > i}
            total = sum(alive.values())
            if best is None:
                high = max(high, total)
            if best is None and total * _VALLEY > high:
                continue
            if best is None or total < best[0]:
                best = total, i + 1, list(alive)
            elif total >= _VALLEY * best[0]:
                yield best
                best, high = None, total


def _scheduled(model: ir.Model) -> Replacement:
    """A copy in which what only the backward pass uses stands where it is first used."""
    model = model.clone()
    graph, read = model.graph, reads(model.graph)
    needed_by_loss = ancestors(graph.outputs[0], read)
    nodes = list(graph)
    place = {node: i for i, node in enumerate(nodes)}
    last = max(map(place.__getitem__, needed_by_loss))
    waiting, moved = {*nodes[:last]} - needed_by_loss, 0

    def claim(node: ir.Node) -> Iterator[ir.Node]:
        made = waiting.intersection(x.producer() for x in read[node])
        for producer in sorted(made, key=place.__getitem__):
            if producer in waiting:  # still
                waiting.remove(producer)
                yield from claim(producer)
                yield producer

    for node in nodes:
        if node not in waiting and (late := list(claim(node))):
            graph.insert_before(node, late)
            moved += len(late)
    return Replacement(model, "what only the backward pass uses stands in it" if moved else "")


def _roots(graph: ir.Graph) -> dict[ir.Value, ir.Value]:
    """The value whose memory a reshaped one is, or an operand that is transposed in a product."""

    def shares(node: ir.Node) -> bool:
        transposed = transposes_operands(node) and not node.outputs[0].is_graph_output()
        return is_view(node) or transposed

    return roots_of(graph, shares)


def _copy(node: ir.Node, inputs: Sequence[ir.Value | None], tape: Tape) -> list[ir.Value]:
    """The outputs of a node's copy on other inputs."""
    copy = ir.Node(
        node.domain,
        node.op_type,
        inputs,
        list(node.attributes.values()),
        num_outputs=len(node.outputs),
        metadata_props={**node.metadata_props, MARK: "copy"},
    )
    for old, new in zip(node.outputs, copy.outputs, strict=True):
        new.type, new.shape = old.type, old.shape
    tape.nodes.append(copy)
    return list(copy.outputs)
