"""Runs of a model: sizes for its symbols, and given or random arrays, or edge cases."""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.errors import GraphgenError, near
from graphgen.graph import all_values, is_float
from graphgen.infer import is_named
from graphgen.op import is_a
from graphgen.operands import Array
from graphgen.ops.layout import lowest_of
from graphgen.ops.numbers_of_sizes import size_at
from graphgen.rounded import SHOWN
from graphgen.traits import Trait, has, lookup_of
from graphgen.value import adopt

_MOST_SUMS = 16
"""Of more symbols than this, none is taken for the sum of two others: there are too many."""

_STEPS = 8, 56, 64, 448
"""Multiples of 7 and powers of 2: strides of windows and patches, and frames of 320 samples."""

_LARGEST = 1 << 23
"""No input gets more elements by such a multiple."""

_AROUND_SCORES = (ops.add, ops.mul, ops.div, ops.cast, Trait.LAYOUT)
"""What a mask may pass on its way to the scores, or with them to the softmax."""


def symbols(model: ir.Model) -> list[str]:
    """The symbolic dimensions of the inputs, in order."""
    dims = (d for value in model.graph.inputs for d in value.shape or ())
    names = (sorted(d.free_symbols()) for d in dims if isinstance(d, ir.SymbolicDim))
    return list(dict.fromkeys(name for group in names for name in group))


def check_sizes(model: ir.Model, sizes: Mapping[str, int], least: int = 1) -> None:
    """Raise GraphgenError for a symbol that no input has, or a size below `least` or too large."""
    known = symbols(model)
    for name, size in sizes.items():
        if name not in known:
            raise GraphgenError(
                f"dimension {name!r} is in no input; the symbolic ones are "
                f"{', '.join(known) or '(there are none)'}{near(name, known)}"
            )
        if not isinstance(size, int | np.integer) or not least <= size < 2**31:
            wanted = f"it must be a whole number of at least {least}, below 2^31"
            raise GraphgenError(f"dimension {name} is {size!r}; {wanted}")


def given_sizes(
    model: ir.Model, sizes: Mapping[str, int], arrays: Mapping[str, Array]
) -> dict[str, int]:
    """`sizes`, and the sizes of symbols that arrays for inputs show.

    Raises GraphgenError if two of them disagree, and for what `check_sizes` refuses.
    """
    check_sizes(model, sizes)
    found, known = dict(sizes), symbols(model)
    for value in model.graph.inputs:
        shape = np.shape(arrays[str(value.name)]) if value.name in arrays else ()
        for dim, size in zip(map(str, value.shape or ()), shape, strict=False):
            if dim in known and found.setdefault(dim, size) != size:
                problem = f"of shape {list(shape)}, and {dim} is {found[dim]}; give one size"
                raise GraphgenError(f"the array for {value.name} is {problem}")
    return found


def at_sizes(model: ir.Model, sizes: Mapping[str, int], *, least: int = 1) -> ir.Model:
    """A copy with those symbolic dimensions fixed, which shares weights.

    Raises GraphgenError for a symbol that no input has, and a size below `least` or beyond 31 bits.
    """
    check_sizes(model, sizes, least)
    copy = model.clone()
    for value in all_values(copy.graph):
        if value.shape is not None:
            value.shape = ir.Shape([size_at(dim, sizes) for dim in value.shape])
    return copy


def invent(
    model: ir.Model, given: Mapping[str, Array] | None = None, *, seed: int = 0
) -> dict[str, Array]:
    """Arrays for the inputs of a model without symbols; those in `given` are kept.

    An input with a default keeps it. Floats are normal; integers that look something up lie in the
    first half of the table, because an offset may be added; others are 1: a mask keeps everything.

    Raises GraphgenError for symbols without a size, and for inputs that are sizes or not numbers:
    those must be given.
    """
    given = dict(given or {})
    for value in model.graph.inputs:
        if value.const_value is not None:
            given.setdefault(str(value.name), value.const_value.numpy())
    unknown = [value for value in model.graph.inputs if value.name not in given]
    if missing := symbols(model):
        options = " ".join(f"--dim {name}=..." for name in missing)
        raise GraphgenError(f"the model has dimensions without a size; give {options}")
    lacking = [str(value.name) for value in unknown if not _can_invent(value)]
    if lacking:
        raise GraphgenError(
            f"no numbers can be invented for {', '.join(lacking)}: sizes, or no tensors of numbers;"
            " give --input x.npz with arrays of these names"
        )
    rng = np.random.default_rng(seed)
    for value in unknown:
        assert value.shape is not None
        given[str(value.name)] = _array(value, value.shape.numpy(), rng, "normal")
    return given


class Phase(NamedTuple):
    """A run of a model: its name, the sizes of its symbols, and arrays for its inputs."""

    name: str
    sizes: dict[str, int]
    feeds: dict[str, Array]


def phases(
    model: ir.Model,
    dims: Mapping[str, int],
    given: Mapping[str, Array],
    run: Callable[[dict[str, Array]], object],
) -> list[Phase]:
    """One run without a name, or, with a cache, `prefill` and `decode`.

    The prefill has all tokens with nothing before them, if the model accepts that: otherwise `run`
    raises GraphgenError. The decode step has one token, after as many as `dims` says. A single
    symbol without a size is the sum of both, such as the length of a mask.
    """
    sizes, cache = given_sizes(model, dims, given), None if given else _cache(model)

    def phase(name: str, at: dict[str, int]) -> Phase:
        return Phase(name, at, invent(at_sizes(model, at, least=0), given))

    if cache is None or not {*cache} <= {*sizes}:
        return [phase("", sizes)]
    past, step = cache
    both = sizes[past] + sizes[step]
    lacking = [name for name in symbols(model) if name not in sizes]
    sizes |= dict.fromkeys(lacking, both) if len(lacking) == 1 else {}
    kept = {str(d) for v in model.graph.inputs if is_float(v) for d in v.shape or ()}
    totals = [name for name, size in sizes.items() if size == both and name not in kept]

    def at(before: int, new: int) -> dict[str, int]:
        return {**sizes, **dict.fromkeys(totals, before + new), past: before, step: new}

    prefill = phase("prefill", at(0, sizes[step]))
    try:
        run(prefill.feeds)
    except GraphgenError:
        prefill = phase("prefill", sizes)
    return [prefill, phase("decode", at(sizes[past], 1))]


def _cache(model: ir.Model) -> tuple[str, str] | None:
    """The symbols of the past and of the new part, if an output is an input grown by that part."""
    inputs = [v.shape for v in model.graph.inputs if is_float(v) and v.shape is not None]
    for shape in (v.shape for v in model.graph.outputs if v.shape is not None):
        for other in inputs:
            differ = [(a, b) for a, b in zip(other, shape, strict=False) if a != b]
            if len(other) != len(shape) or len(differ) != 1:
                continue
            [(past, both)] = differ
            if isinstance(past, ir.SymbolicDim) and isinstance(both, ir.SymbolicDim):
                new = str(both - past)
                if {str(past), new} <= {*symbols(model)}:
                    return str(past), new
    return None


def _uses(value: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """The nodes that use what a value holds, past those that carry it, and as which input."""
    seen, pending = {value}, [value]
    while pending:
        for use in pending.pop().uses():
            yield use.node, use.idx
            first = use.idx == 0 and has(use.node, Trait.MOVES)
            carried = first or has(use.node, Trait.CARRIES)
            new = [v for v in use.node.outputs if carried and v not in seen]
            seen.update(new)
            pending += new


def _can_invent(value: ir.Value) -> bool:
    if value.dtype is None or value.shape is None or value.dtype == ir.DataType.STRING:
        return False
    if is_float(value) or value.dtype == ir.DataType.BOOL:
        return True
    return not any(
        has(node, Trait.GENERATES) or (i > 0 and has(node, Trait.SIZED)) for node, i in _uses(value)
    )


def _array(value: ir.Value, shape: Sequence[int], rng: np.random.Generator, kind: str) -> Array:
    """Numbers for an input; those that only choose are drawn if the kind is an edge case.

    Raises GraphgenError for more axes than NumPy has, and more elements than memory.
    """
    if value.dtype is None:
        raise GraphgenError(f"no array can be invented for {value.name}, which is no tensor")
    try:
        x: Array = np.ones(shape)
    except (ValueError, MemoryError) as error:
        raise GraphgenError(f"no array can be invented for {value.name}: {error}") from error
    if is_float(value):
        x = _floats(rng, shape, kind)
    elif value.dtype == ir.DataType.BOOL:
        x = x if kind == "normal" else rng.random(shape) < 0.7
    elif sizes := [size for node, i in _uses(value) if (size := _rows(node, i)) is not None]:
        x = rng.integers(0, max(1, min(sizes) // 2), shape)
    elif kind != "normal":
        x = rng.integers(0, 2, shape)
    return x.astype(value.dtype.numpy())


def _rows(node: ir.Node, i: int) -> int | None:
    """How many rows the table has that a node looks up with its input `i`."""
    lookup = lookup_of(node)
    if lookup is None or lookup.rows != i:
        return None
    table = node.inputs[lookup.tables[0]]
    if table is None or table.shape is None:
        return None
    size = table.shape[node.attributes.get_int("axis", 0)]
    return size if isinstance(size, int) else None


_NUMBERED = re.compile(r"_dynamic_axes_(\d+)$")
"""What TorchScript calls an axis of an input that it was given no name for."""


def sizes_of(model: ir.Model, base: int, *, long: bool = False) -> list[dict[str, int]]:
    """Sizes of the symbols that may fit together, starting from one size.

    All are different; or those without a name are equal, since the caches of a loop grow together,
    which their symbols do not say; so are axes of inputs that TorchScript has numbered, of which
    the first count rows; or one is the sum of two: a mask over past and present tokens is as long
    as both together, whatever its axis is called. With `long`, also multiples of what windows and
    strides often divide, many strides long, except for what only counts rows.
    """
    dims = [d for v in model.graph.inputs for d in v.shape or () if isinstance(d, ir.SymbolicDim)]
    named = {name: is_named(d) for d in dims for name in sorted(d.free_symbols()) or [str(d)]}
    apart = {name: base + i for i, name in enumerate(named)}
    alike = {name: base + named[name] * (i + 1) for i, name in enumerate(named)}
    numbered = {name: base + int(n[1]) for name in named if (n := _NUMBERED.search(name))}
    few = named if len(named) <= _MOST_SUMS else {}
    sums = [
        apart | {whole: apart[one] + apart[other]}
        for whole in few
        for one, other in itertools.combinations([name for name in few if name != whole], 2)
    ]
    inner = {
        name
        for v in model.graph.inputs
        for axis, d in enumerate(v.shape or ())
        if isinstance(d, ir.SymbolicDim) and (axis or not str(d).isidentifier())
        for name in d.free_symbols()
    }
    rows = dict.fromkeys(named, base % 2 + 1)
    steps = {name: 2 + (base + i) % 2 for i, name in enumerate(n for n in named if n in inner)}
    chosen = _STEPS if long and steps else ()
    longer = [rows | {name: n * step for name, n in steps.items()} for step in chosen]
    given = [
        apart,
        alike,
        apart | numbered,
        *sums,
        *(x if _is_small(model, x) else apart for x in longer),
    ]
    shown = sorted(model.graph.meta.get(SHOWN, {}).items(), key=lambda pair: len(pair[0]))
    for sizes in given:
        for every, part in shown:  # a mask that is no longer than what it masks, say
            like = next((sizes[name] for name in sorted(part) if name in sizes), None)
            sizes.update({name: like for name in every & sizes.keys() if like is not None})
    return given


def _is_small(model: ir.Model, sizes: Mapping[str, int]) -> bool:
    with suppress(GraphgenError):
        shapes = ([_size(v, d, sizes) for d in v.shape or ()] for v in model.graph.inputs)
        return all(math.prod(shape) <= _LARGEST for shape in shapes)
    return False


def feeds_of_kind(
    model: ir.Model, sizes: Mapping[str, int], kind: str, *, seed: int = 0
) -> dict[str, Array]:
    """Random arrays for the inputs without a default, floats of a kind: see `_floats`.

    A mask hides its last column; if `masked`, also its first row, if there is only one mask.

    Raises GraphgenError for a size below 1, as of windows that do not fit, and too large arrays.
    """
    rng, masks = np.random.default_rng(seed), _masks(model)
    feeds: dict[str, Array] = {}
    for value in (v for v in model.graph.inputs if v.const_value is None):
        shape = [_size(value, d, sizes) for d in value.shape or ()]
        feeds[str(value.name)] = x = _array(value, shape, rng, kind)
        low = None
        if value in masks and shape and kind in ("masked", "infinite"):
            low = -np.inf if kind == "infinite" else lowest_of(adopt(value))
            if shape[-1] > 1:
                x[..., -1] = low
        if kind == "masked" and len(shape) > 1:
            if value.dtype == ir.DataType.BOOL:
                x[..., :1, :] = False
            elif low is not None and len(masks) == 1:
                x[..., :1, :] = low
    return feeds


def _size(value: ir.Value, dim: int | ir.SymbolicDim, sizes: Mapping[str, int]) -> int:
    given = sizes.get(str(dim)) if isinstance(dim, ir.SymbolicDim) else dim
    size = size_at(dim, sizes) if given is None else given
    if not isinstance(size, int) or (dim != size and size < 1):
        raise GraphgenError(f"{value.name} has no size {dim} at {dict(sizes)}")
    return size


def _masks(model: ir.Model) -> set[ir.Value]:
    """The inputs that are added to scores on their way to a softmax.

    None if a mask chooses as well: what remains of a row that two masks hide together depends on
    how low each of them is.
    """
    if any(is_a(node, ops.where) for node in model.graph):
        return set()
    pending: list[ir.Value | None] = []
    for node in model.graph:
        pending += node.inputs[:1] if is_a(node, ops.softmax) else ()
        pending += node.inputs[3:4] if is_a(node, ops.scaled_dot_product_attention) else ()
    found: set[ir.Value] = set()
    while pending:
        value = pending.pop()
        made = value.producer() if value is not None else None
        if value is None or value in found or (made and not is_a(made, *_AROUND_SCORES)):
            continue
        found.add(value)
        pending += made.inputs if made is not None else ()
    return {value for value in found & set(model.graph.inputs) if is_float(value)}


def _floats(rng: np.random.Generator, shape: Sequence[int], kind: str) -> Array:
    """Normal numbers, or large; small ones show a wrong epsilon; rows of one whole number have no
    variance, without rounding; tiny ones have not all their digits.

    Products of large ones are scores of ±300, whose exp overflows. Of ten times those, a few rows
    where two keys are close decide the error of float32: two right spellings differ by more than
    5e-6 at every other size.
    """
    if kind == "equal" and shape:
        return np.broadcast_to(rng.integers(-3, 4, [*shape[:-1], 1]), shape)
    scale = {"large": 10.0, "small": 1e-3, "zeros": 0.0, "tiny": 1e-39}.get(kind, 1.0)
    return rng.standard_normal(shape) * scale + 0.0  # no -0: a variance of zero is not negative
