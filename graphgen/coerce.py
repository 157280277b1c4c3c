"""What the operands of a call become: numbers, sizes and lists in the dtype that ONNX wants."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import onnx.defs
import onnx_ir as ir

from graphgen.infer import formal_input
from graphgen.operands import is_array, number_as, number_dtype, size_as
from graphgen.record import TABLE, Operand, Rule, Tape
from graphgen.traits import Trait
from graphgen.value import METHODS, Deferred, Size, Value

TENSORS = (Value, ir.Value, Size, Deferred, np.ndarray)


class Coercing(Protocol):
    """What an operator says about its operands."""

    name: str
    schema: onnx.defs.OpSchema | None
    traits: Trait
    numbered: Rule | None


def resolved(x: Operand, tape: Tape | None) -> Operand:
    """What an operand is in this recording: a value of the graph, an array or a number."""
    if isinstance(x, Value):
        return x.value
    return x.resolve(tape) if isinstance(x, Deferred) else x


def bound_dtypes(
    schema: onnx.defs.OpSchema | None, inputs: Sequence[Operand]
) -> dict[str, np.dtype[Any]]:
    """The numpy dtype that each type variable of the schema is bound to by `inputs`."""
    if schema is None:
        return {}
    bound: dict[str, np.dtype[Any]] = {}
    for i, x in enumerate(inputs):
        if is_array(x):
            bound.setdefault(formal_input(schema, i).type_str, np.asarray(x).dtype)
        elif isinstance(x, ir.Value) and x.dtype is not None:
            bound.setdefault(formal_input(schema, i).type_str, x.dtype.numpy())
    return bound


def _is_typed(x: Operand) -> bool:
    """Whether an operand is what a node reads already: a value, an array or nothing."""
    return x is None or is_array(x) or isinstance(x, ir.Value)  # which is slow if it is not


def coerced(op: Coercing, inputs: Sequence[Operand]) -> list[Operand]:
    """Give Python numbers the dtype that ONNX's type rules want at their place.

    A number takes the dtype of the operands with the same type variable. A list of sizes is
    one-dimensional int64 and may hold values (dimensions known only at run time).
    """
    if all(map(_is_typed, inputs)):
        return list(inputs)
    bound = bound_dtypes(op.schema, inputs)
    kinds = [formal_input(op.schema, i).type_str if op.schema else "" for i in range(len(inputs))]
    result: list[Operand] = []
    for x, kind in zip(inputs, kinds, strict=True):
        if _is_typed(x):
            result.append(x)
            continue
        if isinstance(x, (list, tuple)) and any(isinstance(d, TENSORS) for d in x):
            sizes = (size_as(op.name, _vector(d)) for d in x)
            joined = TABLE["", "Concat"](*sizes, axis=0)
            result.append(joined.value if isinstance(joined, Value) else joined)
            continue
        # 1 is a float next to 0.5, as in a list of both.
        beside = (y for y, other in zip(inputs, kinds, strict=True) if other == kind)
        number = next((y for y in beside if isinstance(x, int) and type(y) is float), x)
        dtype = number_dtype(op.name, 0 if isinstance(x, Size) else number, inputs)
        dtype = bound.get(kind, dtype)
        if op.numbered is not None:
            dtype = op.numbered(1 if isinstance(x, Size) else x, dtype, bound)
        listed = kind in ("tensor(int64)", "Tind") and Trait.SCALAR not in op.traits
        if isinstance(x, Size):
            ranks = (len(y.shape or ()) for y in inputs if isinstance(y, ir.Value) or is_array(y))
            spread = listed or (Trait.BROADCASTS in op.traits and any(ranks))
            result.append(METHODS["number"](op.name, x, dtype, spread))
            continue
        if listed:
            dtype = np.dtype(np.int64) if x in ([], ()) else dtype
            x = list(x) if isinstance(x, (list, tuple)) else [x]
        result.append(number_as(op.name, x, dtype))
    return result


def _vector(size: Any) -> Any:
    """An element of a list of sizes; one that is known only at run time as int64[1]."""
    return METHODS["vector"](size) if isinstance(size, (Value, ir.Value, Size)) else size
