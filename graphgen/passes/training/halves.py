"""Causal attention of a training graph in two halves of its queries."""

from collections.abc import Callable, Mapping
from functools import partial

import onnx_ir as ir

from graphgen import ops
from graphgen.edit import infer_model
from graphgen.graph import present_inputs
from graphgen.match import Engine, Miss, Pass, PassReport, Refusal, Replacement, Rewrite
from graphgen.op import read_attributes
from graphgen.ops.layout import rank, size_at, with_rank
from graphgen.ops.numbers_of_sizes import size_at as with_sizes
from graphgen.ops.sizes import same_size_at
from graphgen.record import SizeLike
from graphgen.value import Tensor, adopt, sizes_of

HALVES = "causal_halves"
"""The name of the pass."""

_LEAST = 64
"""The tokens from which on halves are faster (docs/benchmarks.md)."""


def in_halves(
    before: ir.Model,
    differentiate: Callable[[ir.Model], object],
    dims: Mapping[str, int] | None = None,
) -> Pass:
    """[A(Q₁, K₁, V₁); A(Q₂, K, V)] for causal self-attention A(Q, K, V) in the loss.

    The first ⌊T/2⌋ queries, Q₁, see only as many keys, K₁, so a quarter of the scores is not
    computed. A mask is cut alike. Each row is the softmax of the same scores as before, so the
    numbers differ by rounding only; of one token, the first half is empty, and so are all of its
    products.

    Args:
        before: The model whose gradients the pass's model already has.
        differentiate: Adds these gradients.
        dims: Sizes of symbolic dimensions; without one, a length counts as long.
    """

    def run(model: ir.Model, engine: Engine) -> PassReport:
        halved = before.clone()
        inner = Engine(engine.stop_after, engine.verify, applied=engine.applied)
        inner.context = infer_model(halved)
        rule = partial(_in_halves, halved.graph, dims or {})
        report = inner.run(HALVES, halved, {ops.scaled_dot_product_attention: [rule]})
        if report.count("fired"):
            differentiate(halved)
            engine.replace(HALVES, model, lambda _: Replacement(halved))
            engine.applied, engine.context = inner.applied, infer_model(model)
        return report

    return Pass(HALVES, run)


def _in_halves(
    graph: ir.Graph, dims: Mapping[str, int], node: ir.Node
) -> Rewrite | Refusal | Miss | None:
    attributes = read_attributes(ops.scaled_dot_product_attention, node)
    given = present_inputs(node)
    if not attributes.pop("is_causal") or node.graph is not graph:
        return None
    if len(node.inputs) > 4 or len(node.outputs) > 1:
        return Miss("it has a past or further outputs, wanted the queries' own keys")
    q, k, v = map(adopt, given[:3])
    axis = 1 if rank(q) == 3 else 2
    if not all(same_size_at(q, axis, x, axis) for x in (k, v)):
        sizes = " and ".join(str(size_at(x, axis)) for x in (q, k))
        return Miss(f"its queries and keys are {sizes}, wanted as many")
    tokens = with_sizes(size_at(q, axis), dims)
    if isinstance(tokens, int) and tokens < _LEAST:
        return Refusal(f"{tokens} tokens are too few for two halves, which pay from {_LEAST} on")
    mask = with_rank(adopt(given[3]), 2) if given[3:] else None
    if mask is not None and not _fits(mask, q, axis):
        return Miss(f"its mask is {sizes_of(mask)}, wanted one of {size_at(q, axis)} tokens, or 1")
    length = ops.dim(q, axis)
    half = length // 2
    first, last = ops.split(q, [half, length - half], axis=axis, num_outputs=2)
    keys, values = (_part(x, axis, 0, half) for x in (k, v))
    masks = (None, None) if mask is None else _masks(mask, half)
    y1 = ops.causal_attention(first, keys, values, masks[0], **attributes)
    y2 = ops.causal_attention(last, k, v, masks[1], **attributes)
    y = ops.concat(y1, y2, axis=axis)
    return Rewrite(y, given, f"in halves of {size_at(q, axis)} tokens")


def _fits(mask: Tensor, q: Tensor, axis: int) -> bool:
    """Whether the last two sizes of a mask are that of the tokens, or 1."""
    return all(size_at(mask, i) == 1 or same_size_at(mask, i, q, axis) for i in (-2, -1))


def _masks(mask: Tensor, half: SizeLike) -> tuple[Tensor, Tensor]:
    """The parts of a mask for both halves of the rows; what it repeats stays."""
    rows, columns = rank(mask) - 2, rank(mask) - 1
    first = last = mask
    if size_at(mask, rows) != 1:
        first, last = _part(mask, rows, 0, half), _part(mask, rows, half, _END)
    return (first if size_at(mask, columns) == 1 else _part(first, columns, 0, half)), last


_END = 2**63 - 1


def _part(x: Tensor, axis: int, start: SizeLike, end: SizeLike) -> Tensor:
    return ops.slice_(x, [start], [end], [axis])
