"""Recording: calls on values become nodes of a tape."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, overload

import numpy as np
import onnx.defs
import onnx_ir as ir

from graphgen.errors import GraphgenError, asked_by_library, user_line
from graphgen.infer import DeclaredSizes, Shaped, describe, infer, new_context
from graphgen.operands import UFUNCS, Array, refuse_promotion
from graphgen.subgraphs import detach, read_by


class Tensor(Shaped, Protocol):
    """What operators take and return: a value, an array, or a parameter.

    Unary minus is not part of it, as arrays of bool have none: write `ops.neg`.
    """

    def __array__(self) -> Array: ...
    def __add__(self, other: Any, /) -> "Result": ...
    def __radd__(self, other: Any, /) -> "Result": ...
    def __sub__(self, other: Any, /) -> "Result": ...
    def __rsub__(self, other: Any, /) -> "Result": ...
    def __mul__(self, other: Any, /) -> "Result": ...
    def __rmul__(self, other: Any, /) -> "Result": ...
    def __truediv__(self, other: Any, /) -> "Result": ...
    def __rtruediv__(self, other: Any, /) -> "Result": ...
    def __pow__(self, other: Any, /) -> "Result": ...
    def __matmul__(self, other: Any, /) -> "Result": ...
    def __and__(self, other: Any, /) -> "Result": ...
    def __or__(self, other: Any, /) -> "Result": ...
    def __lt__(self, other: Any, /) -> "Result": ...
    def __le__(self, other: Any, /) -> "Result": ...
    def __gt__(self, other: Any, /) -> "Result": ...
    def __ge__(self, other: Any, /) -> "Result": ...
    def __eq__(self, other: Any, /) -> Any: ...
    def __ne__(self, other: Any, /) -> Any: ...


TensorLike: TypeAlias = Tensor | np.generic | float
"""A tensor, or a number, which takes the dtype of the tensor beside it."""

Size: TypeAlias = Tensor | int
"""A size as `ops.dim` gives it: an int where it is known, else a value."""

Sizes: TypeAlias = Tensor | int | Sequence[Size]
"""Sizes or axes: one tensor, or a list that may hold values."""

Operand: TypeAlias = TensorLike | ir.Value | Sequence[Any] | None
"""What an operator may be given, with values of a foreign graph and inputs that are left out."""

Attributes: TypeAlias = dict[str, Any]
Rule: TypeAlias = Callable[..., Any]

TABLE: dict[tuple[str, str], Any] = {}
"""Every operator, a `graphgen.op.Op`, by (domain, ONNX name)."""

PATH = "graphgen.path"
"""Node metadata: the path of the node's module, such as `decoder.layers.3.attention`."""


class Operators(np.lib.mixins.NDArrayOperatorsMixin):
    """Python's operators as operators of the table; == in a library asks for the same value."""

    if TYPE_CHECKING:  # the mixin's are of Any

        def __add__(self, other: Any) -> "Result": ...
        def __radd__(self, other: Any) -> "Result": ...
        def __sub__(self, other: Any) -> "Result": ...
        def __rsub__(self, other: Any) -> "Result": ...
        def __mul__(self, other: Any) -> "Result": ...
        def __rmul__(self, other: Any) -> "Result": ...
        def __truediv__(self, other: Any) -> "Result": ...
        def __rtruediv__(self, other: Any) -> "Result": ...
        def __pow__(self, other: Any) -> "Result": ...
        def __matmul__(self, other: Any) -> "Result": ...
        def __and__(self, other: Any) -> "Result": ...
        def __or__(self, other: Any) -> "Result": ...
        def __lt__(self, other: Any) -> "Result": ...
        def __le__(self, other: Any) -> "Result": ...
        def __gt__(self, other: Any) -> "Result": ...
        def __ge__(self, other: Any) -> "Result": ...
        def __neg__(self) -> "Result": ...
        def __invert__(self) -> "Result": ...

    __slots__ = ()
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]  # the mixin's is None
    # The result has the dtype of the base, and 2 has none.
    __rpow__ = None  # type: ignore[assignment]

    def __eq__(self, other: Any) -> Any:
        return NotImplemented if _is_identity(other) else np.equal(self, other)

    def __ne__(self, other: Any) -> Any:
        return NotImplemented if _is_identity(other) else np.not_equal(self, other)

    def __bool__(self) -> bool:
        raise GraphgenError(
            f"{getattr(self, 'name', None) or 'a value'} has no truth value before the run; choose "
            f"with ops.where, and ask for the same value with `is`{user_line()}"
        )

    def __array__(self, *_: Any, **__: Any) -> Array:
        problem = "numpy: a value has no elements before the run; use the operators of graphgen.ops"
        raise GraphgenError(problem + user_line())

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Operand, **how: Any) -> Any:
        """The operator for numpy's function of the same meaning; the left side may be an array."""
        if method != "__call__" or ufunc not in UFUNCS:
            return NotImplemented
        refuse_promotion(ufunc.__name__, inputs, how)
        return UFUNCS[ufunc](*inputs)


def _is_identity(other: Operand) -> bool:
    """Whether a comparison with `other` asks for the same value, as in the libraries."""
    number = isinstance(other, (int, float, complex, np.ndarray, np.generic))
    return not number and (current_tape() is None or asked_by_library())


class Value(Operators, ir.Value):
    """A value of the graph that can be calculated with; otherwise just an `ir.Value`."""

    __slots__ = ()


@overload
def adopt(value: ir.Value) -> Value: ...
@overload
def adopt(value: Any) -> Any: ...
def adopt(value: Any) -> Any:
    """Give a value of a foreign graph Python's operators, in place (the layout is the same)."""
    if type(value) is ir.Value:
        value.__class__ = Value
    return value


Result: TypeAlias = Array | Value | Any
"""What arithmetic gives, which is a Tensor, and lets a name of it hold another Tensor later.

A protocol that returned itself would have pyright compare NumPy's overloads without end. Any is
there for `y = 2 * x; y = relu(y)`; checkers look at the other two in all that is done with y.
"""


if TYPE_CHECKING:  # both meet it, arrays of bool too
    _tensors: tuple[Tensor, ...] = (np.zeros(1), np.zeros(1, np.bool_), Value())


class Deferred(Operators):
    """An operand that becomes a value or an array when it is used, such as a parameter."""

    __slots__ = ()

    def resolve(self, tape: "Tape | None") -> Operand:
        """The graph's value inside a recording, the array outside one."""
        raise NotImplementedError


class Declaration(Protocol):
    """What a recording needs from an operator."""

    name: str
    domain: str
    composite: bool
    together: bool
    schema: onnx.defs.OpSchema | None

    def count_outputs(self, inputs: Sequence[Operand], attributes: Attributes) -> int:
        """How many values a call returns."""
        ...

    def node_attributes(self, attributes: Attributes) -> list[ir.Attr]:
        """The attributes of its node."""
        ...

    def expand(self, inputs: Sequence[Operand], attributes: Attributes) -> Any:
        """Record the body instead of the operator."""
        ...


class Tape:
    """The nodes and constants recorded in one scope, with what is known about their types.

    `primitives` records the bodies of composites instead of the composites themselves.
    """

    def __init__(self, *, primitives: bool = False, training: bool = False, context: Any = None):
        self.primitives = primitives
        self.training = training
        self.context = context or new_context()
        self.nodes: list[ir.Node] = []
        self.constants: dict[object, Value] = {}
        self.path = ""
        self.names: dict[int, str] = {}
        self.inputs: dict[str, Value] = {}
        self.initializers: dict[str, Value] = {}
        self.declared: Counter[str] = Counter()
        self.kept = False
        self.checked: set[object] = set()
        self._inner = 0

    def share(self, outer: "Tape") -> None:
        """Share the names, inputs, weights and constants of the recording around this one."""
        vars(self).update({k: v for k, v in vars(outer).items() if k not in ("nodes", "kept")})

    def declare(self, name: str) -> None:
        """Count a composite that the user declared, not one inside another's body."""
        if not self._inner:
            self.declared[name] += 1

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Record the body of a composite."""
        self._inner += 1
        try:
            yield
        finally:
            self._inner -= 1

    def record(
        self, op: Declaration, inputs: Sequence[Operand], attributes: Attributes
    ) -> Value | tuple[Value, ...]:
        """Add one node for a call of `op` and infer its types."""
        operands = [None if x is None else self.operand(x) for x in inputs]
        outputs = [Value() for _ in range(op.count_outputs(inputs, attributes))]
        given = op.node_attributes(attributes)
        node = ir.Node(op.domain, op.name, operands, given, outputs=outputs)
        if self.path:
            node.metadata_props[PATH] = self.path
        self.nodes.append(node)
        infer(node, self.context)
        if op.composite and op.schema is not None and isinstance(self.context, DeclaredSizes):
            self._check_body(op, node, attributes)
        return tuple(outputs) if len(outputs) > 1 and op.together else outputs[0]

    def _check_body(self, op: Declaration, node: ir.Node, attributes: Attributes) -> None:
        """Raise what inference says about the body; check integers, maybe sizes, each time."""
        types = ", ".join(map(describe, node.inputs))
        key = (op, types, repr(attributes))
        if key in self.checked:
            return
        try:
            with recording(context=self.context):
                op.expand(node.inputs, attributes)
        except GraphgenError as error:
            if error.__cause__ is not None:  # else the operator has no body for these operands
                raise GraphgenError(f"{op.name}({types}): {error}") from error
        given = [x.dtype for x in node.inputs if x is not None]
        if not any(dtype is None or dtype.is_integer() for dtype in given):
            # Only now: whoever catches the error and asks again gets it again.
            self.checked.add(key)

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> Value:
        """A graph input; the same one if the name is asked for again."""
        value = Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(list(shape)))
        return self.inputs.setdefault(name, value)

    def operand(self, x: Operand) -> ir.Value:
        """`x` as a value: itself, or a constant."""
        return x if isinstance(x, ir.Value) else self.constant(x)

    def constant(self, x: Operand) -> Value:
        """A constant of this recording, shared by equal ones; a build copies the content."""
        array, built = np.asarray(x), isinstance(self.context, DeclaredSizes)
        array = array.copy() if built and array.flags.writeable else array
        content = sha256(array.tobytes()).digest() if built or array.nbytes <= 1024 else id(x)
        key = (array.dtype, array.shape, content)
        if key not in self.constants:
            tensor = ir.tensor(array)
            value = Value(const_value=tensor, shape=ir.Shape(array.shape))
            value.type = ir.TensorType(tensor.dtype)
            self.constants[key] = value
        return self.constants[key]

    def trim(self, results: Sequence[ir.Value]) -> None:
        """Drop the nodes that no result needs."""
        needed, pending = set(), [value.producer() for value in results]
        while pending:
            node = pending.pop()
            if node is not None and node.graph is None and node not in needed:
                needed.add(node)
                pending += [value.producer() for value in read_by(node)]
        detach([node for node in self.nodes if node not in needed])
        self.nodes = [node for node in self.nodes if node in needed]

    def discard(self) -> None:
        """Forget everything recorded; nodes that no graph has taken are detached."""
        detach([node for node in self.nodes if node.graph is None])
        self.nodes, self.constants, self.kept = [], {}, False


_current: ContextVar[Tape | None] = ContextVar("recording", default=None)


def current_tape() -> Tape | None:
    """The innermost open recording."""
    return _current.get()


@contextmanager
def recording(
    *, primitives: bool = False, training: bool = False, context: Any = None
) -> Iterator[Tape]:
    """Record calls on values. Unless `tape.kept` is set, every node is detached at the end."""
    tape = Tape(primitives=primitives, training=training, context=context)
    token = _current.set(tape)
    try:
        yield tape
    finally:
        _current.reset(token)
        if not tape.kept:
            tape.discard()
