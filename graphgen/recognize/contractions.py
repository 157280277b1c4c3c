"""Einsums of two operands as products of matrices: the canonical form of attention by einsum."""

from collections.abc import Sequence

import onnx_ir as ir

from graphgen.graph import present_inputs, produced_by
from graphgen.infer import same_size
from graphgen.match import Miss, Rewrite
from graphgen.op import canonical
from graphgen.ops.layout import dim, expand
from graphgen.ops.linalg import einsum, labels_of, matmul
from graphgen.ops.softmax import softmax
from graphgen.recognize.axes import Axis, Dims, View, is_always
from graphgen.rounded import bounded
from graphgen.traits import Trait
from graphgen.value import Tensor, Value


@canonical(einsum)
def contraction(node: ir.Node) -> Rewrite | Miss | None:
    """A contraction of two operands is a matrix product between layouts.

    Sizes of one label that are summed have to be known to be equal: an einsum repeats a size of 1,
    a product does so in the batch alone. That an empty part of a sum may make it empty does not
    count. What weights multiply is repeated where a mask may have lengthened them.
    """
    equation = node.attributes["equation"].as_string()
    shapes = [x.shape for x in node.inputs if x is not None]
    if None in shapes:
        return None
    terms = labels_of(equation, [len(shape) for shape in shapes if shape is not None])
    if terms is None or len(terms) < 3 or any(len(set(t)) < len(t) for t in terms):
        return None
    if len(terms) > 3:
        return _first_two(node, terms)
    a, b, out = terms
    batch = [c for c in out if c in a and c in b]
    summed = [c for c in a if c in b and c not in out]
    rows, columns = ([c for c in t if c in out and c not in batch] for t in (a, b))
    if not summed or {*a, *b} - {*batch, *summed, *rows, *columns}:
        return None
    axis: dict[str, Axis] = {}
    views = []
    for x, labels in zip(present_inputs(node), (a, b), strict=True):
        own: Dims = []
        y: Tensor = Value(x)
        for c, size in zip(labels, x.shape or (), strict=True):
            known = Axis(size) if size == 1 else axis.setdefault(c, Axis(size))
            first = present_inputs(node)[0]
            place = a.index(c) - len(a) if c in a else 0
            if not (
                same_size(known.size, size)
                or is_always(known.size, size)
                or (c in batch and not isinstance(known.size, int) and not isinstance(size, int))
                or (place and _has_size(first, place, size))
            ):
                longer = _longer(first, place, size) if c in (*summed, *batch) else None
                if longer is None:
                    sizes = f"{known.size} and {size}"
                    return Miss(f"{equation}: {c} has the sizes {sizes}; one may be 1")
                for term in longer:
                    y = expand(
                        y, [dim(Value(term), place) if c == other else 1 for other in labels]
                    )
            own.append([] if size == 1 else [known])
        views.append(View(y, own, own))

    def dims(*groups: Sequence[str]) -> Dims:
        return [[axis[c] for c in group if c in axis] for group in groups]

    left = dims(*batch, *([rows] if batch else rows), summed)
    right = dims(*batch, summed, columns)
    rows_of_a, columns_of_b = views[0].arranged(left, views), views[1].arranged(right, views)
    if rows_of_a is None or columns_of_b is None:
        return None
    made = [*left[:-1], *dims(columns)]
    result = View(matmul(rows_of_a, columns_of_b), made, made).arranged(dims(*out), views)
    return None if result is None else Rewrite(result, present_inputs(node), equation)


def _first_two(node: ir.Node, terms: Sequence[str]) -> Rewrite:
    """An einsum of many operands, as the runtime computes it: that of the first two, and the rest.

    What only those two have is summed at once.
    """
    a, b, *rest = terms
    between = "".join(c for c in dict.fromkeys(a + b) if any(c in t for t in rest))
    x, y, *others = present_inputs(node)
    first = einsum(Value(x), Value(y), equation=f"{a},{b}->{between}")
    *operands, out = rest
    equation = f"{','.join((between, *operands))}->{out}"
    result = einsum(first, *map(Value, others), equation=equation)
    return Rewrite(result, present_inputs(node), f"the first two of {len(terms) - 1} operands")


def _has_size(x: ir.Value, place: int, size: int | ir.SymbolicDim) -> bool:
    """Whether x, as the result of sums, has this size along an axis, counted from the end.

    Some of their terms have it, others have 1 or are cut to at most that: Min(n, size).
    """
    found = _size_at(x, place)
    if found is None or same_size(found, size):
        return found is not None
    made = produced_by(x, softmax, Trait.BROADCASTS)
    if made is None:
        return False
    whole = [_has_size(term, place, size) for term in present_inputs(made)]
    rest = [
        _size_at(v, place)
        for v, known in zip(present_inputs(made), whole, strict=True)
        if not known
    ]
    return any(whole) and all(d == 1 or _is_cut(str(d), str(size)) for d in rest)


def _is_cut(part: str, size: str) -> bool:
    match bounded(part):
        case "min", *of:
            return size in of
    return False


def _longer(x: ir.Value, place: int, size: int | ir.SymbolicDim) -> list[ir.Value] | None:
    """The terms of a softmax of sums that may be longer along an axis than this size, if it is 1.

    None if no term has that size.
    """
    found, made = _size_at(x, place), produced_by(x, softmax, Trait.BROADCASTS)
    if found is not None and same_size(found, size):
        return []
    terms = [] if made is None else present_inputs(made)
    longer = [_longer(term, place, size) for term in terms]
    if all(each is None for each in longer):
        return None
    return [
        y
        for term, each in zip(terms, longer, strict=True)
        for y in ([term] if each is None else each)
        if _size_at(y, place) != 1
    ]


def _size_at(x: ir.Value, place: int) -> int | ir.SymbolicDim | None:
    if x.shape is None:
        return None
    return x.shape[place] if -place <= len(x.shape) else 1
