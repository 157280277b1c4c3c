"""Sizes and numbers for a model's inputs: those that it is given, and what nobody gave."""

from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.graph import all_values, is_float
from graphgen.op import Array

_CARRIES = frozenset(
    "Cast Identity Reshape Unsqueeze Squeeze Flatten Transpose Expand Slice Concat Split Gather "
    "Tile Add Sub Mul Max Min Clip".split()
)
"""Operators whose result holds numbers of their first operand, or near them."""

_LOOKS_UP = {"Gather": 1, "GatherElements": 1, "GatherND": 1, "OneHot": 0}
"""Which input of an operator is an index."""

_MEASURES = frozenset(
    "Reshape Expand ConstantOfShape Range Tile Slice Pad TopK Resize Split".split()
)
"""Operators whose other inputs than the data are sizes, of which no number can be guessed."""

_NO_DATA = frozenset({"ConstantOfShape", "Range"})


def symbols(model: ir.Model) -> list[str]:
    """The symbolic dimensions of the inputs, in order."""
    dims = (d for value in model.graph.inputs for d in value.shape or ())
    names = (sorted(d.free_symbols()) for d in dims if isinstance(d, ir.SymbolicDim))
    return list(dict.fromkeys(name for group in names for name in group))


def check_sizes(model: ir.Model, sizes: Mapping[str, int], least: int = 1) -> None:
    """Raise GraphgenError for a symbol that no input has, and a size below `least` or too large."""
    known = symbols(model)
    for name, size in sizes.items():
        if name not in known:
            raise GraphgenError(
                f"dimension {name!r} is in no input; the symbolic ones are "
                f"{', '.join(known) or '(there are none)'}"
            )
        if not least <= size < 2**31:
            told = f"it must be at least {least}, below 2^31"
            raise GraphgenError(f"dimension {name} is {size}; {told}")


def at_sizes(model: ir.Model, sizes: Mapping[str, int], *, least: int = 1) -> ir.Model:
    """A copy with those symbolic dimensions fixed, weights shared.

    Raises GraphgenError for a symbol that no input has, and a size below `least` or beyond 31 bits.
    """
    check_sizes(model, sizes, least)
    copy = model.clone()
    for value in all_values(copy.graph):
        if value.shape is not None:
            value.shape = value.shape.evaluate(sizes)
    return copy


def invent(
    model: ir.Model, given: Mapping[str, Array] | None = None, *, seed: int = 0
) -> dict[str, Array]:
    """Arrays for the inputs of a model without symbols, those in `given` as they are.

    Floats are normal; integers that look something up lie in the first half of the table, since
    an offset may be added; all others are 1: a mask keeps everything.

    Raises GraphgenError for symbols that have no size, and for inputs that say how large something
    is, or are no numbers: they are to be given.
    """
    given = dict(given or {})
    inputs = [v for v in model.graph.inputs if v.name not in model.graph.initializers]
    if missing := symbols(model):
        told = " ".join(f"--dim {name}=..." for name in missing)
        raise GraphgenError(f"the model has dimensions without a size; give {told}")
    rng = np.random.default_rng(seed)
    lacking = [str(v.name) for v in inputs if v.name not in given and not _can_invent(v)]
    if lacking:
        raise GraphgenError(
            f"no numbers can be invented for {', '.join(lacking)}: sizes, or no tensors of numbers;"
            " give --input x.npz with arrays of these names"
        )
    return given | {str(v.name): _invent(v, rng) for v in inputs if v.name not in given}


def _uses(value: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """The nodes that take what a value holds, behind those that carry it, and as which input."""
    seen, pending = {value}, [value]
    while pending:
        for use in pending.pop().uses():
            yield use.node, use.idx
            carried = use.node.op_type in _CARRIES and (use.idx == 0 or _mixes(use.node))
            new = [v for v in use.node.outputs if carried and v not in seen]
            seen.update(new)
            pending += new


def _mixes(node: ir.Node) -> bool:
    return node.op_type in ("Add", "Sub", "Mul", "Max", "Min", "Concat")


def _can_invent(value: ir.Value) -> bool:
    if value.dtype is None or value.shape is None or value.dtype == ir.DataType.STRING:
        return False
    if is_float(value) or value.dtype == ir.DataType.BOOL:
        return True
    return not any(
        node.op_type in _MEASURES and (i > 0 or node.op_type in _NO_DATA)
        for node, i in _uses(value)
    )


def _invent(value: ir.Value, rng: np.random.Generator) -> Array:
    assert value.shape is not None and value.dtype is not None
    shape = value.shape.numpy()
    if is_float(value):
        return rng.standard_normal(shape).astype(value.dtype.numpy())
    sizes = [size for node, i in _uses(value) if (size := _rows(node, i)) is not None]
    if not sizes or value.dtype == ir.DataType.BOOL:
        return np.ones(shape, value.dtype.numpy())
    return rng.integers(0, max(1, min(sizes) // 2), shape).astype(value.dtype.numpy())


def _rows(node: ir.Node, i: int) -> int | None:
    """How many rows the table has that a node looks up by its input `i`."""
    if _LOOKS_UP.get(node.op_type) != i:
        return None
    table = node.inputs[0]
    if node.op_type == "OneHot" or table is None or table.shape is None:
        return None
    size = table.shape[node.attributes.get_int("axis", 0)]
    return size if isinstance(size, int) else None
