"""The paths of attention's values: from a product with V up to its softmax, and to Q Kᵀ."""

from collections.abc import Iterator

import onnx_ir as ir

from graphgen.graph import constant, operator_name, produced_by
from graphgen.match import Miss
from graphgen.op import is_a
from graphgen.ops.softmax import softmax
from graphgen.recognize.axes import LAYOUT
from graphgen.recognize.masks import repeated_scalar
from graphgen.recognize.products import PRODUCTS
from graphgen.traits import Trait, has

Step = tuple[ir.Node, int]
"""A node on the path of the scores, and which of its inputs they are."""


def weights_changed(does: str) -> Miss:
    """Why weights that something changes are none."""
    problem = f"{does} the weights between their softmax and the product"
    return Miss(f"{problem}, wanted layouts alone there")


def weights_of(product: ir.Node) -> Iterator[tuple[int, ir.Node, list[Step]]]:
    """(which input, its softmax, the steps after it) for inputs of a product that are weights."""
    for i, operand in enumerate(product.inputs):
        others = [x for x in product.inputs if x is not operand]
        gated = [] if any(constant(x) is not None for x in others) else [1, 0]  # no gate of a layer
        seen: set[ir.Node] = set()
        pending: list[tuple[ir.Value | None, list[Step]]] = [(operand, [])]
        while pending:
            value, steps = pending.pop()
            node = produced_by(value, "Where", "Cast", "Mul", "Softmax", *LAYOUT)
            if node is None or node in seen:
                continue
            seen.add(node)
            if node.op_type == "Softmax":
                yield i, node, steps
                continue
            spines = _guarded(node) if node.op_type == "Where" else [0]
            spines = gated if node.op_type == "Mul" else spines
            pending += [(node.inputs[j], [(node, j), *steps]) for j in spines]


def between(product: ir.Node) -> Miss | None:
    """What changes the result of a softmax on its way into a product with a computed value."""
    for value, other in zip(product.inputs, product.inputs[::-1], strict=True):
        pending: list[tuple[ir.Value | None, tuple[str, ...]]] = []
        pending += [(value, ())] if constant(other) is None else []
        seen = set()
        while pending:
            at, changed = pending.pop()
            node = None if at is None else at.producer()
            if node is None or node in seen:
                continue
            seen.add(node)
            if has(node, Trait.MOVES | Trait.BROADCASTS):
                changed = changed if node.op_type in LAYOUT else (node.op_type, *changed)
                pending += [(v, changed) for v in node.inputs]
            elif changed and is_a(node, softmax):
                names = [*dict.fromkeys(changed)]
                does = f"{', '.join(names)} {'changes' if len(names) == 1 else 'change'}"
                return weights_changed(does)
    return None


def _guarded(choice: ir.Node) -> list[int]:
    """Which input of a Where is the weights, against 0 where a mask hides or where they are NaN."""
    return [i for i in (1, 2) if repeated_scalar(choice.inputs[3 - i]) == 0.0][:1]


def products_above(scores: ir.Value | None) -> Iterator[tuple[ir.Node, list[Step]]]:
    """The products that scores come from, each with the steps from it down to them."""
    seen: set[ir.Node] = set()
    pending: list[tuple[ir.Value | None, list[Step]]] = [(scores, [])]
    while pending:
        value, steps = pending.pop()
        node = produced_by(value, *PRODUCTS, *_STEPS)
        if node is None or node in seen:
            continue
        seen.add(node)
        if is_a(node, *PRODUCTS):
            yield node, steps
        else:
            spines = {"Add": (1, 0), "Mul": (1, 0), "Where": (2, 1)}.get(node.op_type, (0,))
            pending += [(node.inputs[i], [(node, i), *steps]) for i in spines]


def origin_of(softmax: ir.Node) -> str:
    """The operator at which the path from a softmax to a product ends, for a remark."""
    node = softmax.inputs[0].producer() if softmax.inputs[0] is not None else None
    while node is not None and not node.domain and node.op_type in _STEPS:
        first = node.inputs[1 if node.op_type == "Where" else 0]
        node = first.producer() if first is not None else None
    return "an input" if node is None else operator_name(node)


_STEPS = ("Add", "Sub", "Where", "Mul", "Div", "Tanh", "Cast", "Max", "Clip", *LAYOUT)
