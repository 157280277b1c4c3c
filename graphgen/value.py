"""What programs calculate with: values of a graph and sizes, which are written like arrays."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, overload

import numpy as np
import onnx_ir as ir

from graphgen.display import on_screen
from graphgen.errors import GraphgenError, MissingNameError, user_line
from graphgen.infer import Dim, Shaped, describe
from graphgen.operands import UFUNCS, Array, DTypeLike, refuse_promotion

METHODS: dict[
    Literal["index", "cast", "vector", "number", "on_sizes", "like"], Callable[..., Any]
] = {}
"""What values and sizes need of the operators; filled by ops/."""


class Operators(np.lib.mixins.NDArrayOperatorsMixin):
    """Python's operators, and numpy's functions of the same meaning, as operators of the table."""

    if TYPE_CHECKING:  # the mixin's are of Any

        def __add__(self, other: Any) -> "Result": ...
        def __radd__(self, other: Any) -> "Result": ...
        def __sub__(self, other: Any) -> "Result": ...
        def __rsub__(self, other: Any) -> "Result": ...
        def __mul__(self, other: Any) -> "Result": ...
        def __rmul__(self, other: Any) -> "Result": ...
        def __truediv__(self, other: Any) -> "Result": ...
        def __rtruediv__(self, other: Any) -> "Result": ...
        def __floordiv__(self, other: Any) -> "Result": ...
        def __rfloordiv__(self, other: Any) -> "Result": ...
        def __mod__(self, other: Any) -> "Result": ...
        def __rmod__(self, other: Any) -> "Result": ...
        def __pow__(self, other: Any) -> "Result": ...
        def __rpow__(self, other: Any) -> "Result": ...
        def __matmul__(self, other: Any) -> "Result": ...
        def __rmatmul__(self, other: Any) -> "Result": ...
        def __and__(self, other: Any) -> "Result": ...
        def __rand__(self, other: Any) -> "Result": ...
        def __or__(self, other: Any) -> "Result": ...
        def __ror__(self, other: Any) -> "Result": ...
        def __xor__(self, other: Any) -> "Result": ...
        def __rxor__(self, other: Any) -> "Result": ...
        def __lt__(self, other: Any) -> "Result": ...
        def __le__(self, other: Any) -> "Result": ...
        def __gt__(self, other: Any) -> "Result": ...
        def __ge__(self, other: Any) -> "Result": ...
        def __eq__(self, other: Any) -> Any: ...
        def __ne__(self, other: Any) -> Any: ...
        def __neg__(self) -> "Result": ...
        def __abs__(self) -> "Result": ...
        def __invert__(self) -> "Result": ...

    __slots__ = ()

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **how: Any) -> Any:
        """The operator for numpy's function; the left side may be an array."""
        if method != "__call__" or ufunc not in UFUNCS:
            called = ufunc.__name__ + ("" if method == "__call__" else f".{method}")
            raise GraphgenError(
                f"numpy.{called} has no operator for values of a graph; the operators are those of "
                f"graphgen.ops{user_line()}"
            )
        if "out" in how:
            given = f"{ufunc.__name__}: {describe(how['out'][0])}"
            raise GraphgenError(
                f"{given} cannot be changed in place; write x = x + y instead of x += y"
                f"{user_line()}"
            )
        refuse_promotion(ufunc.__name__, inputs, how)
        return UFUNCS[ufunc](*inputs)

    def __getitem__(self, key: Any) -> "Result":
        """NumPy's indexing: ints, slices, None, Ellipsis, arrays of ints and of bools."""
        result: Result = METHODS["index"](self, key)
        return result

    def astype(self, dtype: DTypeLike) -> "Result":
        """The elements in another dtype, as `ops.cast`."""
        result: Result = METHODS["cast"](self, to=dtype)
        return result

    def __setitem__(self, key: object, value: object) -> NoReturn:
        self._refuse("cannot be changed; ops.where chooses between it and other elements")

    def __bool__(self) -> bool:
        self._refuse(
            "has no truth value before the run; choose with ops.where what an element is and with "
            "ops.cond what is computed, join conditions with & | ~ instead of and, or, not, and "
            "repeat with ops.scan"
        )

    def __iter__(self) -> NoReturn:
        self._refuse(
            "cannot be iterated over: index it, split it with ops.split, or step through it with "
            "ops.scan"
        )

    def __contains__(self, item: object) -> NoReturn:
        self._refuse("cannot be searched with `in`; compare with ==, and reduce the result")

    def __int__(self) -> int:
        self._refuse("is not a number before the run; calculate with the value itself")

    __index__ = __float__ = __complex__ = __int__

    def __array__(self, *_: Any, **__: Any) -> Array:
        self._refuse("has no elements before the run; use the operators of graphgen.ops")

    if not TYPE_CHECKING:  # checkers take it for any attribute

        def __getattr__(self, name):
            self._missing(name)

    def _missing(self, name: str) -> NoReturn:
        """Raise for an attribute; numpy and copy ask for names with underscores."""
        if name.startswith("_"):
            raise AttributeError(name)
        hint = f"has no {name}; the operators are functions of graphgen.ops{METHODS['like'](name)}"
        raise MissingNameError(f"{self!r} {hint}{user_line()}")

    def _refuse(self, problem: str) -> NoReturn:
        raise GraphgenError(f"{self!r} {problem}{user_line()}")


class Value(Operators):
    """A value of the graph that is being recorded, to calculate with as with an array."""

    __slots__ = ("value",)

    def __init__(self, value: ir.Value):
        self.value = value
        """What stands for it in the graph."""

    @property
    def shape(self) -> Any:
        """Its sizes, a tuple of ints and, for what is known only at run time, of `Size`.

        It is None if not even their number is known, as in some files.
        """
        if self.value.shape is None:
            return None
        return tuple(
            d if isinstance(d, int) else Size(d, at=(self.value, axis))
            for axis, d in enumerate(self.value.shape)
        )

    def __len__(self) -> int:
        first = (*(self.shape or ()), None)[0]
        if not isinstance(first, int):
            self._refuse("has no len() before the run; its first size is ops.dim(x, 0)")
        return first

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        if self.value.shape is None:
            self._refuse("has a number of dimensions that is known only at run time")
        return len(self.value.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's dtype of its elements."""
        if self.value.dtype is None:
            self._refuse("has a dtype that is known only at run time")
        return self.value.dtype.numpy()

    def __getattr__(self, name: str) -> Any:
        """What rules ask of the value in the graph: its producer, its uses, its name."""
        known = hasattr(ir.Value, name) and not name.startswith("_")
        return getattr(self.value, name) if known else self._missing(name)

    @on_screen
    def __repr__(self) -> Iterator[str]:
        name = "" if self.value.name is None else f"{self.value.name}: "
        yield f"Value({name}{describe(self.value)})"


class Size(Operators):
    """A size that is known only at run time: a whole number, and used like an int.

    With ints and other sizes, + - * // % give sizes; next to a tensor it takes the tensor's dtype.
    """

    __slots__ = ("at", "made", "signed", "symbol")

    def __init__(
        self,
        symbol: Dim,
        *,
        at: tuple[ir.Value, int] | None = None,
        made: ir.Value | None = None,
        signed: bool = False,
    ):
        self.symbol = symbol
        """What inference knows it as."""
        self.at = at
        """A value and one of its axes, whose size it is."""
        self.made = made
        """Where it stands in the graph, as int64[1]; it is recorded when it is first needed."""
        self.signed = signed
        """Whether it may be below 0, as a difference of sizes may."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **how: Any) -> Any:
        alone = all(isinstance(x, (Size, int, np.integer)) for x in inputs)
        if alone and method == "__call__" and not how:
            return METHODS["on_sizes"](ufunc, *inputs)
        return super().__array_ufunc__(ufunc, method, *inputs, **how)

    def __eq__(self, other: object) -> Any:  # for `None in sizes`
        return False if other is None else super().__eq__(other)

    def __ne__(self, other: object) -> Any:
        return True if other is None else super().__ne__(other)

    def __getitem__(self, key: Any) -> NoReturn:
        self._refuse("is one number, which has no elements")

    def __int__(self) -> int:
        self._refuse(
            "is a size that is known only at run time, where range(), math and float() need a "
            "number; calculate with + - * // % or as an operand of ops, and step with ops.scan"
        )

    __index__ = __float__ = __complex__ = __int__

    def _anew(self, other: object) -> Any:
        """Have Python calculate n += 1 as n = n + 1, as for ints: there is nothing to change."""
        return NotImplemented

    __iadd__ = __isub__ = __imul__ = __ifloordiv__ = __imod__ = __itruediv__ = __ipow__ = _anew

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield str(self.symbol)


class Deferred(Operators):
    """An operand that becomes a value or an array when it is used, such as a parameter."""

    __slots__ = ()

    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """NumPy's dtype of its elements."""
        raise NotImplementedError

    def resolve(self, tape: Any) -> ir.Value | Array:
        """The graph's value inside a recording, the array outside one."""
        raise NotImplementedError


if TYPE_CHECKING:
    Tensor: TypeAlias = Value | Deferred | Array
else:

    class Tensor:
        """What operators take and return: a value, a parameter, or an array."""


@overload
def adopt(value: ir.Value) -> Value: ...
@overload
def adopt(value: Any) -> Any: ...
def adopt(value: Any) -> Any:
    """A value of a graph to calculate with; None and arrays as they are."""
    return Value(value) if isinstance(value, ir.Value) else value


@overload
def graph_value(x: ir.Value | Value) -> ir.Value: ...
@overload
def graph_value(x: Any) -> Any: ...
def graph_value(x: Any) -> Any:
    """What stands for an operand in the graph; None for arrays and numbers."""
    if isinstance(x, Value):
        return x.value
    return x if isinstance(x, ir.Value) else None


def sizes_of(x: Shaped) -> tuple[Dim, ...] | None:
    """The sizes of a value or an array as inference has them: ints and symbols, or nothing."""
    shape = x.value.shape if isinstance(x, Value) else x.shape
    return None if shape is None else tuple(shape)


Result: TypeAlias = Array | Value | Any
"""What arithmetic gives, which is a Tensor, and lets a name of it hold another Tensor later.

Any is there for `y = 2 * x; y = relu(y)`; checkers look at the other two in all that is done
with y.
"""
