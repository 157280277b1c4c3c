"""What a call takes besides values: arrays, numbers and lists of them, in the right dtype."""

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Protocol, TypeAlias, TypeGuard

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError, near, user_line

Array: TypeAlias = np.ndarray[Any, Any]


class HasDType(Protocol):
    """What NumPy takes for a dtype because it has one, such as `gg.float32`."""

    @property
    def dtype(self) -> np.dtype[Any]: ...


DTypeLike: TypeAlias = HasDType | np.dtype[Any] | type[Any] | str | ir.DataType
"""`gg.float16`, what NumPy takes for a dtype (`np.float16`, `"float16"`), or an `ir.DataType`."""

_DTYPES = ("to", "dtype", "output_dtype", "stash_type", "softmax_precision")  # attributes

UFUNCS: dict[np.ufunc, Callable[..., Any]] = {}
"""numpy's functions for Python's operators, and what stands for them here; filled by ops/."""


def is_array(x: Any) -> TypeGuard[Array | np.generic]:
    """Whether an operand has its own dtype; next to others that do, `np.sqrt(2)` does not.

    `np.sqrt(2)` is also a Python float, and what numpy makes of float64 arrays without dimensions.
    """
    return isinstance(x, (np.ndarray, np.generic)) and not isinstance(x, float)


def dtype_of(x: Any) -> ir.DataType | None:
    """The dtype of a value, a parameter or an array; None for a number, or if it is unknown."""
    given = None if isinstance(x, float) else getattr(x, "dtype", None)
    return onnx_dtype(given) if isinstance(given, np.dtype) else given


@cache  # each array of each call is asked for it
def onnx_dtype(dtype: np.dtype[Any]) -> ir.DataType:
    """ONNX's name of NumPy's dtype. Raises GraphgenError if it has none."""
    try:
        return ir.DataType.from_numpy(dtype)
    except TypeError:
        mend = "convert the array, as with .astype(np.float32)"
        raise GraphgenError(f"ONNX has no dtype {dtype}; {mend}{user_line()}") from None


def to_dtype(given: Any) -> ir.DataType:
    """A dtype, however it is named, as the graph has it. Raises TypeError for anything else."""
    known = given is not None and not isinstance(given, bool)  # np.dtype(None) is float64
    with suppress(TypeError, ValueError):
        number = isinstance(given, int)
        if known:
            return ir.DataType(given) if number else ir.DataType.from_numpy(np.dtype(given))
    raise TypeError('it must be a dtype, such as gg.float32, np.float32 or "float32"')


def number_dtype(who: str, x: Any, inputs: Sequence[Any]) -> np.dtype[Any]:
    """The dtype of a number, or a list of them, if no tensor of its type variable gives one.

    A float has the dtype of the call's other floats. Raises GraphgenError for anything else.
    """
    try:
        dtype = np.asarray(x).dtype if isinstance(x, (int, float, list, tuple)) else None
    except ValueError:  # lists of different lengths
        dtype = None
    if dtype is not None and dtype.kind == "f":
        dtypes = [d for d in map(dtype_of, inputs) if d is not None]
        floats = [d.numpy() for d in dtypes if d.is_floating_point()]
        floats += [given.dtype for given in inputs if isinstance(given, np.float64)]
        return floats[0] if floats else np.dtype(np.float32)
    if isinstance(x, int):
        return np.dtype(np.bool_ if isinstance(x, bool) else np.int64)
    if dtype is None or dtype.kind not in "biu":
        raise GraphgenError(
            f"{who}: {x!r} is not an operand; give a value, an array or a number{user_line()}"
        )
    return dtype


def number_as(who: str, x: Any, dtype: np.dtype[Any]) -> Array:
    """A number, or a list of them, as an array of `dtype`; a float may lose digits.

    Raises GraphgenError if numpy would promote the tensor next to it, which ONNX cannot: for a
    float with integers, a number with bools, and a number outside the range of the dtype.
    """
    wanted = onnx_dtype(dtype)
    problem = _misfit(np.asarray(x), wanted)
    if problem is not None:
        raise GraphgenError(
            f"{who}: {x!r} with a tensor of {wanted.name.lower()}, which {problem}; a number takes "
            f"the dtype of the tensor: cast that first, or give another number{user_line()}"
        )
    with np.errstate(over="ignore"):
        return np.asarray(x, dtype)


def _misfit(given: Array, wanted: ir.DataType) -> str | None:
    """Why numbers cannot be elements of a dtype, or None."""
    if wanted == ir.DataType.BOOL:
        return None if given.dtype.kind == "b" else "holds no numbers"
    if not wanted.is_floating_point() and given.dtype.kind == "f" and given.size:
        return "holds no fractions"
    least, most = _ends(wanted)
    if not wanted.is_floating_point() and given.size:
        outside = int(given.min()) < least or int(given.max()) > most
    elif given.ndim == 0 and least <= given <= most:
        outside = False
    else:
        with np.errstate(over="ignore"):
            exact = given.astype(np.float64)
            outside = np.any(np.isfinite(exact) & ~np.isfinite(exact.astype(wanted.numpy())))
    return f"ends at {least} and {most}" if outside else None


@cache  # NumPy works it out each time
def _ends(dtype: ir.DataType) -> tuple[Any, Any]:
    return dtype.min, dtype.max


def size_as(who: str, size: Any) -> Any:
    """One size of a list, as int64[1], or a value if it is known only at run time."""
    given = number_as(who, size, np.dtype(np.int64)) if isinstance(size, int) else size
    if dtype_of(given) != ir.DataType.INT64 or tuple(given.shape or ()) not in ((), (1,)):
        raise GraphgenError(
            f"{who}: {size!r} in a list with values; such a list holds sizes, ints or int64[1] "
            f"from ops.dim: join tensors with ops.concat{user_line()}"
        )
    return given if isinstance(given, ir.Value) else np.atleast_1d(given)


def check_attribute(
    who: str, name: str, value: Any, default: Any, kind: Any, choices: Sequence[str] = ()
) -> Any:
    """An attribute as ONNX stores it. Raises GraphgenError if that would change its value."""
    kinds = ir.AttributeType
    try:
        if value is None:
            if default is not None:
                raise TypeError("it must have a value")
        elif name in _DTYPES:
            return to_dtype(value)
        elif kind == kinds.INT:
            return operator.index(value)
        elif kind == kinds.INTS:
            return [operator.index(each) for each in value]
        elif kind == kinds.STRING and not isinstance(value, str):
            raise TypeError("it must be a string")
        elif choices and value not in choices:
            raise ValueError(f"it must be one of {', '.join(choices)}{near(value, choices)}")
        elif kind == kinds.FLOAT and not (type(value) is float and abs(value) < 1e38):
            if not isinstance(value, (int, float, np.ndarray, np.generic)):
                raise TypeError("it must be a number")
            number_as(who, value, np.dtype(np.float32)).reshape(())
    except (TypeError, ValueError) as error:
        raise GraphgenError(
            f"{who}: attribute {name} is {value!r}: {error}{user_line()}"
        ) from error
    return value


def onnx_attributes(
    who: str, values: Mapping[str, Any], defaults: Mapping[str, Any], kinds: Mapping[str, Any]
) -> list[ir.Attr]:
    """Attributes for a node, without those that are in the schema and at their default."""
    result = []
    for name, value in values.items():
        if value is None or (name in kinds and defaults[name] == value):
            continue
        if isinstance(value, (ir.DataType, bool)):
            value = int(value)
        try:
            value = float(value) if kinds.get(name) == ir.AttributeType.FLOAT else value
            result.append(ir.convenience.convert_attribute(name, value, kinds.get(name)))
        except (TypeError, ValueError) as error:
            raise GraphgenError(
                f"{who}: attribute {name} is {value!r}: {error}{user_line()}"
            ) from error
    return result


def refuse_promotion(name: str, inputs: Sequence[Any], how: Mapping[str, Any]) -> None:
    """Raise GraphgenError if one of Python's operators has a different result on arrays.

    `name` is numpy's name of the operator, and `how` the keywords that it was given.
    """
    dtypes = [d for d in map(dtype_of, inputs) if d is not None]
    if how:
        raise GraphgenError(
            f"{name}: {', '.join(how)} would choose elements or a dtype; use ops.where or "
            f"ops.cast{user_line()}"
        )
    if name == "power" and len({*dtypes}) > 1:
        raise GraphgenError(
            f"{name}: x is {dtypes[0].name.lower()} and y is {dtypes[1].name.lower()} in x ** y, "
            f"whose dtype arrays would promote; cast one of them{user_line()}"
        )
    if name == "divide" and dtypes and all(d.is_integer() for d in dtypes):
        raise GraphgenError(
            f"{name}: x / y of {dtypes[0].name.lower()} is a fraction on arrays; write ops.div, "
            f"which divides towards zero, or cast to a float first{user_line()}"
        )
    if any(isinstance(x, np.float64) for x in inputs) and ir.DataType.DOUBLE not in dtypes:
        raise GraphgenError(
            f"{name}: a float64 of numpy makes an array double; write float(...) around "
            f"it{user_line()}"
        )
