"""Recording: calls on values become nodes of a tape."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from typing import Any, Protocol, TypeAlias

import numpy as np
import onnx.defs
import onnx_ir as ir

from graphgen.errors import GraphgenError, user_line
from graphgen.infer import DeclaredSizes, describe, infer, new_context
from graphgen.operands import onnx_dtype
from graphgen.subgraphs import detach, read_by
from graphgen.value import Size, Tensor as Tensor, Value as Value, adopt as adopt, graph_value

TensorLike: TypeAlias = Tensor | Size | np.generic | float | int
"""A tensor, or a number, which takes the dtype of the tensor next to it."""

SizeLike: TypeAlias = Size | int | Tensor
"""A size as `ops.dim` gives it, or a tensor with one element."""

Operands: TypeAlias = TensorLike | Sequence[TensorLike]
"""Of an operator that takes several: each is one argument, or all are in one list.

Its body gets them unlisted, as arguments.
"""

Sizes: TypeAlias = SizeLike | Sequence[SizeLike]
"""Sizes or axes: one tensor, or a list that may hold sizes known only at run time."""

Operand: TypeAlias = TensorLike | ir.Value | Sequence[Any] | None
"""What an operator may be given, with values of any graph and inputs that are left out."""

Attributes: TypeAlias = dict[str, Any]
Rule: TypeAlias = Callable[..., Any]

TABLE: dict[tuple[str, str], Any] = {}
"""Every operator, a `graphgen.op.Op`, by (domain, ONNX name)."""

PATH = "graphgen.path"
"""Node metadata: the path of the node's module, such as `decoder.layers.3.attention`."""


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
        self.constants: dict[object, ir.Value] = {}
        self.path = ""
        self.names: dict[int, str] = {}
        self.inputs: dict[str, ir.Value] = {}
        self.initializers: dict[str, ir.Value] = {}
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
        outputs = [ir.Value() for _ in range(op.count_outputs(inputs, attributes))]
        given = op.node_attributes(attributes)
        node = ir.Node(op.domain, op.name, operands, given, outputs=outputs)
        if self.path:
            node.metadata_props[PATH] = self.path
        self.nodes.append(node)
        infer(node, self.context)
        if op.composite and op.schema is not None and isinstance(self.context, DeclaredSizes):
            self._check_body(op, node, attributes)
        results = [Value(value) for value in outputs]
        return tuple(results) if len(results) > 1 and op.together else results[0]

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
        """A graph input; the same one if the name is asked for again.

        Raises GraphgenError if it was asked for with another type.
        """
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(list(shape)))
        found = self.inputs.setdefault(name, value)
        if (found.dtype, found.shape) != (value.dtype, value.shape):
            raise GraphgenError(
                f"the input {name} is {describe(found)}, and another of this name has to be "
                f"{describe(value)}: rename it{user_line()}"
            )
        return Value(found)

    def operand(self, x: Operand) -> ir.Value:
        """`x` in the graph: what stands for a value, or a constant."""
        value = graph_value(x)
        return self.constant(x) if value is None else value

    def constant(self, x: Operand) -> ir.Value:
        """A constant of this recording, shared by equal ones; a build copies the content."""
        array, built = np.asarray(x), isinstance(self.context, DeclaredSizes)
        array = array.copy() if built and array.flags.writeable else array
        content = sha256(array.tobytes()).digest() if built or array.nbytes <= 1024 else id(x)
        key = (array.dtype, array.shape, content)
        if key not in self.constants:
            dtype = onnx_dtype(array.dtype)
            value = ir.Value(const_value=ir.Tensor(array), shape=ir.Shape(array.shape))
            value.type = ir.TensorType(dtype)
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
