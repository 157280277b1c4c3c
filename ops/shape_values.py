"""What tensors of sizes hold, and the shapes that follow from it, where the libraries miss them."""

import math
import re
from functools import lru_cache
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

from graphgen.forms import TEXTS, common_form, dim_of, simplified
from graphgen.graph import AXES, constant, produced_by
from graphgen.infer import Dim, expect_distinct, forget, is_rounded, mends, same_dim
from graphgen.op import find_op, read_attributes
from graphgen.ops.numbers_of_sizes import size_at, whole_numbers
from graphgen.ops.shapes import broadcast
from graphgen.ops.spatial_shapes import give_up
from graphgen.repeats import ELEMENT
from graphgen.rounded import FileSizes, shorter, smallest, spread

_RANKS = 16  # longer lists are not shapes
_FAR = (1 << 31) - 1  # no axis is as long
_WIDE = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.DOUBLE, ir.DataType.FLOAT)


@mends("Equal", "Where")
def _choose_sizes(node: ir.Node, context: ShapeInferenceContext) -> None:
    """Shape values through Equal and Where: `where(sizes == -1, 1, sizes)`, as exporters write."""
    known = [None if v is None else context.get_symbolic_value(v) for v in node.inputs]
    condition = constant(node.inputs[0]) if known[0] is None else None
    if condition is not None and condition.dtype == bool and condition.size <= _RANKS:  # no floats
        known[0] = [int(element) for element in condition.reshape(-1)]
    given = [values for values in known if values is not None]
    if len(given) < len(known) or max(map(len, given)) > _RANKS:
        return
    length = max(map(len, given))
    rows = zip(*(values * length if len(values) == 1 else values for values in given), strict=False)
    if node.op_type == "Where":
        if all(isinstance(condition, int) for condition in known[0] or ()):
            chosen = [a if condition else b for condition, a, b in rows]
            context.set_symbolic_value(node.outputs[0], chosen)
        return
    answers = [_equal(a, b, context) for a, b in rows]
    if None not in answers:
        context.set_symbolic_value(node.outputs[0], [int(bool(a)) for a in answers])


@mends("Div", "Pow", "ReduceProd")
def _compute_sizes(node: ir.Node, context: ShapeInferenceContext) -> None:
    """Shape values through products, powers like (n/4)², and exact quotients like (4·b) / 4."""
    known = [None if v is None else context.get_symbolic_value(v) for v in node.inputs]
    factors: list[Dim] = []
    if node.op_type == "ReduceProd" and not node.attributes.get_int("noop_with_empty_axes", 0):
        factors = known[0] or []
    if node.op_type == "Pow":
        base, power = (values[0] if values and len(values) == 1 else None for values in known)
        if base is not None and isinstance(power, int) and power <= _MOST_POWER:
            factors = [base] * power
    product = math.prod(factors)
    if factors and (not isinstance(product, int) or abs(product) < 1 << 63):
        context.set_symbolic_value(node.outputs[0], [product])
    if node.op_type != "Div":
        return
    a, b = known
    if node.outputs[0].dtype not in (ir.DataType.INT64, ir.DataType.INT32):
        forget(node.outputs[0], context)  # the library divides all as integers
    if a and b and len(a) == len(b) == 1 and isinstance(a[0], ir.SymbolicDim) and b[0] != 0:
        quotient = simplified(str(a[0] // b[0]))
        if isinstance(quotient, str) and (
            quotient.isidentifier() or (quotient := _rounded(a[0], b[0], quotient, context))
        ):
            context.set_symbolic_value(node.outputs[0], [ir.SymbolicDim(quotient)])


def _rounded(a: Dim, b: Dim, quotient: str, context: ShapeInferenceContext) -> str:
    """The quotient as the runtime rounds it, which is towards 0; "" if that is not known."""
    if not isinstance(b, int) or b < 1:
        return ""
    if _is_at_least(a, 0, context, later=True):
        if isinstance(context, FileSizes):
            context.note(ir.SymbolicDim(quotient), 0)
        return quotient
    return f"Max(0, {quotient})" if _is_at_least(a, 1 - b, context, later=True) else ""


@mends("Mod")
def _remainder(node: ir.Node, context: ShapeInferenceContext) -> None:
    """a - b·⌊a / b⌋ of one whole number, whose sign is that of b: how far it is to a block, say."""
    known = [None if v is None else context.get_symbolic_value(v) for v in node.inputs]
    a, b = (values[0] if values and len(values) == 1 else None for values in known)
    whole = node.outputs[0].dtype in (ir.DataType.INT64, ir.DataType.INT32)
    if isinstance(a, int) and isinstance(b, int) and a >= 0 and b > 0 and whole:
        context.set_symbolic_value(node.outputs[0], [a % b])
        return
    if not (isinstance(a, ir.SymbolicDim) and isinstance(b, int) and b > 0 and whole):
        return
    if re.search(rf"\bNone\b|\b{ELEMENT}", str(a)):
        return
    if node.attributes.get_int("fmod", 0) and not _is_at_least(a, 0, context):
        return  # the sign is that of a
    rest = simplified(f"({a}) - {b} * floor(({a}) / {b})")
    if rest is not None:
        context.set_symbolic_value(node.outputs[0], [dim_of(str(rest))])


_MOST_POWER = 3
"""A volume is a cube; a larger power is no size."""


@mends("Min", "Max")
def _compare_sizes(node: ir.Node, context: ShapeInferenceContext) -> None:
    """Shape values through the smallest and the largest of sizes."""
    given = [values for v in node.inputs if (values := whole_numbers(v, context))]
    found: list[Any] = [*(context.get_symbolic_value(node.outputs[0]) or ())]
    found = found or [None] * max(map(len, given), default=0)
    if len(given) < len(node.inputs):
        return
    lists = [values * len(found) if len(values) == 1 else values for values in given]
    chosen = [_chosen(node.op_type, tuple(row)) for row in zip(*lists, strict=True)]
    made = [old if c is None else c for c, old in zip(chosen, found, strict=True)]
    if None not in made:
        context.set_symbolic_value(node.outputs[0], made)


def _chosen(operator: str, elements: tuple[Dim, ...]) -> Dim | None:
    """The smallest or largest in short form, or None if some are unknown or this would be long."""
    numbers = [element for element in elements if isinstance(element, int)]
    if len(numbers) == len(elements):
        return (min if operator == "Min" else max)(numbers)
    texts = [spread(str(element)) for element in elements]
    if operator == "Min" and len(texts) == 2:
        least = shorter(*texts)
        texts = [least] if least in texts else texts
    nested = sum(text.count("Max(") + text.count("Min(") for text in texts)
    if nested > _MOST_NESTED or any(re.search(rf"\bNone\b|\b{ELEMENT}", text) for text in texts):
        return None
    whole = f"{operator}({', '.join(texts)})" if len(texts) > 1 else texts[0]  # Min(-3) stays one
    short = simplified(str(dim_of(whole)))
    return ir.SymbolicDim(short) if isinstance(short, str) else short


def _is_at_least(
    element: Dim, least: int, context: ShapeInferenceContext, *, later: bool = False
) -> bool:
    """Whether an element is at least 0, or another number, as the program would not run if not."""
    if isinstance(element, int):
        return element >= least
    if least <= 0 and _is_size(element):
        return True
    known = not re.search(rf"\bNone\b|\b{ELEMENT}", str(element))
    return (
        known
        and isinstance(context, FileSizes)
        and context.is_at_least(element, least, later=later)
    )


def _equal(a: Dim, b: Dim, context: ShapeInferenceContext) -> bool | None:
    """Whether two sizes are equal, or None if unknown; a size is never negative."""
    if same_dim(a, b):
        return True
    fixed, size = (a, b) if isinstance(a, int) else (b, a)
    below = isinstance(fixed, int) and fixed < 0
    negative = below and _is_at_least(size, 0, context, later=True)
    return False if negative or (isinstance(a, int) and isinstance(b, int)) else None


def _is_size(element: Dim) -> bool:
    """Whether an element is known not to be negative, whatever sizes its symbols stand for."""
    return element >= 0 if isinstance(element, int) else _is_natural(str(element))


@lru_cache(TEXTS)
def _is_natural(text: str) -> bool:
    if text == "None" or re.search(rf"\b{ELEMENT}", text):
        return False
    if "-" not in text:
        return True
    expression: Any = ir.SymbolicDim(text)._expr
    return bool(expression.is_nonnegative) or smallest(text) >= 0


@mends("Cast")
def _cast_sizes(node: ir.Node, context: ShapeInferenceContext) -> None:
    """Shape values through dtypes that can hold them: True is not a size, and int8 ends at 127."""
    x, y = node.inputs[0], node.outputs[0]
    known = None if x is None else context.get_symbolic_value(x)
    if y.dtype not in _WIDE:
        forget(y, context)
    elif known is not None and context.get_symbolic_value(y) is None:  # back from floats
        context.set_symbolic_value(y, [*known])


@mends("Slice")
def _slice(node: ir.Node, context: ShapeInferenceContext) -> None:
    """Sizes and shape values of a slice whose start or end may lie beyond the end of an axis.

    The library takes any end to be inside the axis, and axes that it does not know for the first.
    """
    x, y = node.inputs[0], node.outputs[0]
    if x is None or x.shape is None or y.shape is None:
        return
    forget(y, context)

    def held(index: int, left_out: Any = None) -> Any:
        value = node.inputs[index] if index < len(node.inputs) else None
        return left_out if value is None else context.get_symbolic_value(value)

    starts, ends, axes, steps = held(1), held(2), held(3, ()), held(4, ())
    known = [numbers for numbers in (starts, axes, steps, ends) if numbers]
    if axes is None or not known:
        give_up(y, range(len(x.shape)), context)
        return
    expect_distinct(axes, len(x.shape))
    count = len(known[0])
    unknown = [ir.SymbolicDim(None)] * count
    steps = unknown if steps is None else steps or [1] * count
    rows = zip(axes or range(count), starts or unknown, ends or unknown, steps, strict=True)
    dims: list[Dim] = list(x.shape)
    last: Any = (None,)
    for axis, start, end, step in rows:
        last = start, end, step
        size = _sliced(x.shape[axis], start, end, step, y.shape[axis], context)
        dims[axis] = context.new_symbolic_dim() if size is None else size
    y.shape = ir.Shape(dims)
    content = context.get_symbolic_value(x)
    if content is not None and all(isinstance(d, int) for d in last):
        context.set_symbolic_value(y, content[slice(*last)])


_MOST_NESTED = 2
"""Slices of slices get a name beyond this: the time of sympy doubles with each Max in another."""


def _sliced(
    size: Dim, start: Dim, end: Dim, step: Dim, found: Dim, context: ShapeInferenceContext
) -> Dim | None:
    """How many elements a slice of one axis has: what the library found, fewer, or None."""
    nested = str(size).count("Max(") + str(size).count("Min(")
    if not isinstance(step, int) or nested > _MOST_NESTED:
        return None
    if not isinstance(start, int) or not isinstance(end, int):
        last = not isinstance(start, int) and isinstance(end, int) and end >= _FAR and step == 1
        count = dim_of(f"-({start})") if last else 0
        if last and same_dim(dim_of(shorter(str(count), str(size))), size):
            return size  # the last n of n or fewer
        if last and isinstance(size, int) and size > 1 and _is_at_least(count, 0, context):
            return _last(size, count, context)
        if step != 1 or not all(_is_at_least(d, 0, context) for d in (start, end)):
            return None
        far = isinstance(end, int) and end >= _FAR
        text = f"({size if far else shorter(str(end), str(size))}) - ({start})"
        return dim_of(text if far and _is_natural(text) else f"Max(0, {text})")
    if isinstance(size, int) and step < 0:  # a start before the first element is the first
        stop = None if end in (_FAR, 2**63 - 1) else end
        return len(range(*slice(max(start, -size), stop, step).indices(size)))
    if isinstance(size, int):
        return found
    if step == 1 and start == 0 <= end < _FAR:
        whole = not end or _is_at_least(size, end, context)
        return end if whole else dim_of(shorter(str(end), str(size)))
    if step > 0 <= start and end >= _FAR:  # of which the library knows two: 2³¹ - 1 and 2⁶³ - 1
        return _left(size, start, step, context)
    if step > 0 <= start and -_FAR < end < 0:
        return _left(size, start - end, step, context)
    return found if step == -1 and start >= _FAR and end <= -_FAR else None


def _last(size: int, count: Dim, context: ShapeInferenceContext) -> Dim:
    """How many elements x[-n:] has: of n = 0 all, as -0 is the first."""
    rest = "" if _is_at_least(count, 1, context) else f" + {size} - {size} * Min(1, {count})"
    return dim_of(f"Min({size}, {count}){rest}")


def _left(size: Dim, cut: int, step: int, context: ShapeInferenceContext) -> Dim:
    """How many elements are left without some, every one or with a step: none if there are few."""
    text = f"-floor(({cut} - ({size})) / {step})"
    sure = _is_natural(f"({size}) - {cut}") or _is_at_least(size, cut, context)
    return dim_of(text if sure else f"Max(0, {text})")


@mends("Expand")
def _expand(node: ir.Node, context: ShapeInferenceContext) -> None:
    """x broadcast with the sizes if they are known, else new symbols."""
    x, sizes = node.inputs
    assert x is not None and sizes is not None
    node.outputs[0].shape = None if x.shape is None else _expanded(x.shape, sizes, context)


def _expanded(shape: ir.Shape, sizes: ir.Value, context: ShapeInferenceContext) -> ir.Shape | None:
    wanted = context.get_symbolic_value(sizes)
    if wanted is not None:
        return broadcast([shape, ir.Shape(wanted)], context)
    count = sizes.shape[0] if sizes.shape is not None and len(sizes.shape) == 1 else None
    if not isinstance(count, int) or count > AXES:
        return None
    return ir.Shape([context.new_symbolic_dim() for _ in range(max(count, len(shape)))])


@mends("ConstantOfShape")
def _fill(node: ir.Node, context: ShapeInferenceContext) -> None:
    """The sizes that the operand holds, and what a short list is filled with."""
    [sizes], [y], fill = node.inputs, node.outputs, node.attributes.get("value")
    wanted = None if sizes is None else context.get_symbolic_value(sizes)
    if wanted is not None:
        negative = [isinstance(d, int) and d < 0 for d in wanted]  # which the runtime refuses
        pairs = zip(wanted, negative, strict=True)
        y.shape = ir.Shape([context.new_symbolic_dim() if below else d for d, below in pairs])
    length = y.shape[0] if y.shape is not None and len(y.shape) == 1 else None
    if fill is not None and isinstance(length, int) and length <= _RANKS:
        array = fill.as_tensor().numpy()
        if array.dtype.kind == "i":
            context.set_symbolic_value(y, [int(array.reshape(-1)[0])] * length)


@mends("Reshape")
def _reshape(node: ir.Node, context: ShapeInferenceContext) -> None:
    """A difference of sizes may be -1 or 0, which have a meaning; unless the elements add up.

    So may a quotient, though no other size is 0: unless `allowzero` is set, it is the size of x.
    """
    x, y, sizes = node.inputs[0], node.outputs[0], node.inputs[1]
    if y.shape is not None and len(y.shape) == 1 and (held := _moved(x, context)) is not None:
        context.set_symbolic_value(y, held)
    wanted = None if sizes is None else context.get_symbolic_value(sizes)
    if x is None or x.shape is None or y.shape is None or wanted is None:
        return
    given, exact = {str(d) for d in x.shape}, node.attributes.get_int("allowzero", 0)

    def is_sure(d: Dim) -> bool:
        if d == -1 or _is_at_least(d, 1, context):
            return True
        if not exact and str(d) not in given:
            return _is_size(d) and not _may_vanish(str(d))
        return _is_at_least(d, 0, context)

    doubtful = [i for i, d in enumerate(wanted) if not is_sure(d)]
    if doubtful and not _same_product(x.shape.dims, tuple(wanted)):
        give_up(y, [*doubtful, *(i for i, d in enumerate(wanted) if d == -1)], context)
    if isinstance(context, FileSizes) and node.graph is context.graph and exact and -1 in wanted:
        for d in wanted:  # beside a size of 0 the runtime cannot tell what -1 is
            if isinstance(d, ir.SymbolicDim) and d.value not in (None, "None"):
                context.note(d, 1)
    pairs = zip(wanted, [*x.shape, *wanted], strict=False)
    plain = exact or all(isinstance(d, int) or same_dim(d, kept) for d, kept in pairs)
    if isinstance(context, FileSizes) and not (plain and (exact or -1 not in wanted)):
        _keep_where_empty(node, tuple(wanted), context)


def _moved(x: ir.Value | None, context: ShapeInferenceContext) -> list[Dim] | None:
    """What a table holds into which a list of sizes was laid and turned: the pads of torch's F.pad.

    Where each element lies is what the operators make of the places.
    """
    steps: list[ir.Node] = []
    while x is not None and x.shape is not None and len(x.shape) > 1:
        step = produced_by(x, "Reshape", "Slice", "Transpose")
        if step is None or len(steps) == _RANKS:
            return None
        steps, x = [step, *steps], step.inputs[0]
    content = None if x is None or not steps else context.get_symbolic_value(x)
    if content is None or not 0 < len(content) <= _RANKS:
        return None
    places = np.arange(len(content))
    for step in steps:
        others = [constant(v) for v in step.inputs[1:]]
        op = find_op(step)
        if op is None or any(other is None for other in others):
            return None
        places = op.compute([places, *others], read_attributes(op, step))
    return [content[i] for i in places.reshape(-1)]


def _keep_where_empty(node: ir.Node, wanted: tuple[Dim, ...], context: FileSizes) -> None:
    """Where a wanted size is 0, x keeps its own; so what is found holds there, or it is given up.

    One symbol is 0 at a time: b·s rows as (b, s) would have unknown sizes otherwise.
    """
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None and x.shape is not None and y.shape is not None
    wrong, always = set[int](), node.graph is not None and node.graph is context.graph
    symbols = [d for d in dict.fromkeys((*x.shape, *wanted)) if isinstance(d, ir.SymbolicDim)]
    lengths = tuple([d for d in symbols if _is_at_least(d, 1, context)])
    doubtful = [d for d in wanted if is_rounded(d) or "-" in str(d).lstrip("-")]
    trials = 1 if {*doubtful} <= {*lengths} else 17
    shapes = x.shape.dims, wanted, y.shape.dims, lengths
    texts, own = common_form([str(d) for dims in shapes for d in dims])
    forms = iter(texts)
    alike = [tuple(_as_text(d, next(forms)) for d in dims) for dims in shapes]
    emptied = dict[int, str]()
    for form, runs, empty, few, zeros in _where_empty(*alike, trials):
        symbol = own(form)
        emptied |= dict.fromkeys(zeros & empty, symbol)
        wrong |= few
        if not runs and always:
            context.note(ir.SymbolicDim(symbol), 1)
        if empty and not context.is_at_least(ir.SymbolicDim(symbol), 1, later=True):
            wrong |= empty
    give_up(y, sorted(wrong), context)
    context.emptied |= {str(y.shape[i]): emptied[i] for i in wrong & emptied.keys()}
    for i in wrong if not node.attributes.get_int("allowzero", 0) else ():
        size = wanted[i]
        if isinstance(size, ir.SymbolicDim) and i < len(x.shape) and _is_size(size):
            context.kept[str(y.shape[i])] = size, x.shape[i]


def _as_text(size: Dim, text: str) -> Dim:
    return size if str(size) == text else ir.SymbolicDim(text)


@lru_cache(TEXTS)
def _where_empty(
    old: tuple[Dim, ...],
    wanted: tuple[Dim, ...],
    found: tuple[Dim, ...],
    lengths: tuple[Dim, ...],
    trials: int,
) -> list[tuple[str, bool, set[int], set[int], set[int]]]:
    """For each symbol, whether a reshape may run where it is 0, and where it is not as found.

    That is, the axes with other sizes than found where the symbol is 0, and where it is small; and
    the axes whose size is 0 where the symbol is.
    There is no run in which one of the `lengths` is below 1.
    """
    shapes = old, wanted, found, lengths
    symbols = sorted(ir.Shape(old).free_symbols() | ir.Shape(wanted).free_symbols())
    result = list[tuple[str, bool, set[int], set[int], set[int]]]()
    for symbol in symbols:
        runs, empty, few, zeros = False, set[int](), set[int](), set(range(len(found)))
        for size in range(trials):
            for many in (
                dict.fromkeys(symbols, 1),
                {s: 5040 * i for i, s in enumerate(symbols, 1)},
            ):
                try:
                    bound = [[size_at(d, many | {symbol: size}) for d in s] for s in shapes]
                except ValueError:  # a comparison with what is divided by 0
                    if size == 0:
                        runs, zeros = True, set()
                    continue
                before, given, after, least = bound
                if any(isinstance(d, int) and d < 1 for d in least):
                    continue
                sure = all(isinstance(d, int) for d in (*before, *given))
                sizes = _reshaped(before, given) if sure else []
                runs = runs or (size == 0 and (bool(sizes) or not sure))
                if size == 0 and (sizes or not sure):
                    zeros &= {i for i, d in enumerate(sizes) if d == 0}
                for i, (d, f) in enumerate(zip(sizes, after, strict=False)):
                    if d != f and (isinstance(f, int) or not f.free_symbols()):
                        (few if size else empty).add(i)
        result.append((symbol, runs, empty, few, zeros))
    return result


def _reshaped(old: list[Any], wanted: list[Any]) -> list[Any]:
    """The sizes that the runtime gives, where `allowzero` is not set; none where it refuses."""
    sizes = [d or kept for d, kept in zip(wanted, old + wanted[len(old) :], strict=False)]
    rest, count = math.prod(d for d in sizes if d != -1), math.prod(old)
    fits = rest and not count % rest if -1 in sizes else rest == count
    if 0 in wanted[len(old) :] or sizes.count(-1) > 1 or min(sizes, default=0) < -1 or not fits:
        return []
    return [count // rest if d == -1 else d for d in sizes]


@lru_cache(TEXTS)
def _may_vanish(text: str) -> bool:
    """Whether a rounded size is 0 for some of the first sizes."""
    size = ir.SymbolicDim(text)
    trials = range(1, 17) if "//" in text or "floor(" in text else ()
    return any(size_at(size, dict.fromkeys(size.free_symbols(), n)) == 0 for n in trials)


@lru_cache(TEXTS)
def _same_product(a: tuple[Dim, ...], b: tuple[Dim, ...]) -> bool:
    symbols = sorted(ir.Shape((*a, *b)).free_symbols())
    for first in (1009, 5040):  # most differ, which numbers show sooner than symbols
        sizes = {symbol: first + 13 * i for i, symbol in enumerate(symbols)}
        counts = [math.prod(size_at(d, sizes) for d in dims) for dims in (a, b)]
        if all(isinstance(count, int) for count in counts) and counts[0] != counts[1]:
            return False
    one, other = (math.prod(dims) for dims in (a, b))
    return simplified(f"({one}) - ({other})") == 0


@mends("Split")
def _split(node: ir.Node, context: ShapeInferenceContext) -> None:
    """Parts of given sizes; the library takes computed ones for equal parts."""
    sizes = node.inputs[1] if len(node.inputs) > 1 else None
    if sizes is None:
        return
    axis, known = node.attributes.get_int("axis", 0) or 0, context.get_symbolic_value(sizes)
    for i, value in enumerate(node.outputs):
        give_up(value, [axis], context)
        if known is not None and i < len(known) and value.shape is not None:
            value.shape[axis] = known[i]
        elif known is None:
            forget(value, context)
