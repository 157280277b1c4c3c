"""Operators, declared once: a primitive by its meaning in numpy, a composite by its body.

Called on arrays an operator computes; called on values, inside a recording, it adds a node. ONNX
*inputs* are the positional parameters of the declaring function, ONNX *attributes* its
keyword-only ones, under their ONNX names, so that a node of any graph is a call of its operator.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import registry

from graphgen.errors import GraphgenError, asked_by_library, user_line
from graphgen.infer import (
    DeclaredSizes,
    check_arrays,
    describe,
    expect_present,
    formal_input,
    infer,
    is_default,
    new_context,
    schema_of,
)
from graphgen.operands import (
    UFUNCS,
    Array,
    check_attribute,
    check_power,
    is_array,
    number_as,
    number_dtype,
    onnx_attributes,
    refuse_promotion,
    size_as,
)
from graphgen.subgraphs import detach, read_by

Operand: TypeAlias = Any
"""A value, an array, a number, a list of sizes or a parameter."""

Attributes: TypeAlias = dict[str, Any]
Rule: TypeAlias = Callable[..., Operand]

PATH = "graphgen.path"
"""Node metadata: the module path a node belongs to, such as `decoder.layers.3.attention`."""


class Operators(np.lib.mixins.NDArrayOperatorsMixin):
    """Python's operators as operators of the table; a library's == asks for the same value."""

    __slots__ = ()
    __hash__ = object.__hash__
    __rpow__ = None  # type: ignore[assignment]  # the result has the dtype of the base: 2 has none

    def __eq__(self, other: Operand) -> Any:
        return NotImplemented if _is_identity(other) else np.equal(self, other)

    def __ne__(self, other: Operand) -> Any:
        return NotImplemented if _is_identity(other) else np.not_equal(self, other)

    def __bool__(self) -> bool:
        raise GraphgenError(
            f"{getattr(self, 'name', None) or 'a value'} has no truth value before the run; choose "
            f"with ops.where, and ask for the same value with `is`{user_line()}"
        )

    def __array__(self, *_: Any, **__: Any) -> Array:
        told = "numpy: a value has no elements before the run; use the operators of graphgen.ops"
        raise GraphgenError(told + user_line())

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Operand, **how: Any) -> Any:
        """What numpy's function of the same meaning is here, with an array on the left too."""
        if method != "__call__" or ufunc not in UFUNCS:
            return NotImplemented
        refuse_promotion(ufunc.__name__, inputs, how)
        result = TABLE["", UFUNCS[ufunc]](*inputs)
        return TABLE["", "Not"](result) if ufunc is np.not_equal else result


def _is_identity(other: Operand) -> bool:
    """Whether a comparison with `other` asks for the same value, as the libraries' do."""
    number = isinstance(other, (int, float, complex, np.ndarray, np.generic))
    return not number and (current_tape() is None or asked_by_library())


class Value(Operators, ir.Value):
    """A value of the graph that one can calculate with; nothing but `ir.Value` otherwise."""

    __slots__ = ()


def adopt(value: Operand) -> Operand:
    """Give a value of a foreign graph Python's operators, in place (the layout is the same)."""
    if type(value) is ir.Value:
        value.__class__ = Value
    return value


class Deferred(Operators):
    """An operand that becomes a value or an array when it is used, such as a parameter."""

    __slots__ = ()

    def resolve(self, tape: "Tape | None") -> Operand:
        """The graph's value inside a recording, the array outside one."""
        raise NotImplementedError


class Tape:
    """The nodes and constants recorded in one scope, with what is known of their types.

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
        """Have the names, inputs, weights and constants of the recording around this one."""
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

    def record(self, op: "Op", inputs: Sequence[Operand], attributes: Attributes) -> Operand:
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

    def _check_body(self, op: "Op", node: ir.Node, attributes: Attributes) -> None:
        """Raise what inference says of the body; of integers, which may be sizes, each time."""
        types = ", ".join(map(describe, node.inputs))
        key = (op, types, repr(attributes))
        if key in self.checked:
            return
        if "int" not in types:
            self.checked.add(key)
        try:
            with recording(context=self.context):
                op.expand(node.inputs, attributes)
        except GraphgenError as error:
            if error.__cause__ is not None:  # else the operator has no body for these
                raise GraphgenError(f"{op.name}({types}): {error}") from error

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> Value:
        """A graph input; asked for again by name, the same one."""
        value = Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(list(shape)))
        return self.inputs.setdefault(name, value)

    def operand(self, x: Operand) -> ir.Value:
        """`x` as a value: itself, or a constant."""
        return x if isinstance(x, ir.Value) else self.constant(x)

    def constant(self, x: Operand) -> Value:
        """A constant of this recording, in a build what the array holds now; equal ones shared."""
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


_TENSORS = (ir.Value, Deferred, np.ndarray)
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


class Op:
    """One operator of the table: its name, its meaning or body, its gradient, its recogniser."""

    def __init__(self, name: str, domain: str, function: Rule, *, composite: bool, outputs: Any):
        self.name, self.domain, self.function, self.composite = name, domain, function, composite
        self.outputs = outputs
        self.together = not composite  # one call gives all outputs, as a tuple
        self.whole = False  # recorded as itself even where primitives are asked for
        self.rule: Rule | None = None
        self.recogniser: Rule | None = None
        self.spellings: list[Rule] = []
        self.canonical: list[Rule] = []
        self.further: dict[int, Rule] = {}
        self.fixed: dict[str, str] = {}  # inputs that no gradient is to change, and what they are
        self.signature = inspect.signature(function)
        parameters = self.signature.parameters.values()
        self.inputs = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        self.variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        self.attributes = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        self.schema = schema_of(domain, name)
        self.kinds = {
            name: ir.AttributeType[str(formal.type).rpartition(".")[2]]
            for name, formal in (self.schema.attributes if self.schema else {}).items()
        }
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        self.__wrapped__ = function

    def __repr__(self) -> str:
        return f"<operator {'::'.join(filter(None, (self.domain, self.name)))}>"

    def vjp(self, rule: Rule) -> Rule:
        """Declare the gradient: `rule(g, y, *inputs, **attributes)` gives one cotangent per input.

        `g` is the cotangent of the output `y`; a None (or missing) result means no gradient. The
        walker sums a cotangent over broadcast dimensions, so a rule need not.
        """
        self.rule = rule
        return rule

    def output(self, index: int) -> Callable[[Rule], Rule]:
        """Declare the body of a further output of a composite: `body(*inputs, **attributes)`."""
        return lambda body: self.further.setdefault(index, body)

    def recognise(self, recogniser: Rule) -> Rule:
        """Declare by hand what is otherwise made from the body: see `graphgen.ops.pattern`."""
        self.recogniser = recogniser
        return recogniser

    def spelling(self, rule: Rule) -> Rule:
        """Declare the same result by another operator, for targets that have only that one.

        `rule(*inputs, **attributes)` gives the result, or None where the other cannot say it.
        """
        self.spellings.append(rule)
        return rule

    def __call__(self, *args: Operand, **kwargs: Operand) -> Any:
        """Compute on arrays, or record on values."""
        inputs, attributes = self.bind(args, kwargs)
        tape = current_tape()
        inputs = [x.resolve(tape) if isinstance(x, Deferred) else x for x in inputs]
        inputs = self.coerce(inputs)
        if not any(isinstance(x, ir.Value) for x in inputs):
            return self.compute(inputs, attributes)
        if tape is None:
            raise GraphgenError(f"{self.name} was called on graph values outside of gg.build")
        if self.composite:
            tape.declare(self.name)
        if not self.composite or not tape.primitives or self.whole:
            return tape.record(self, inputs, attributes)
        with tape.inside():
            return self.expand(inputs, attributes)

    def expand(self, inputs: Sequence[Operand], attributes: Attributes) -> Operand:
        """Record the body in place of the operator."""
        return self.function(*(adopt(x) for x in inputs), **attributes)

    def compute(self, inputs: Sequence[Operand], attributes: Attributes) -> Any:
        """The meaning on arrays, under ONNX's type rules: a leaked float64 is an error."""
        arrays = [x if x is None else np.asarray(x) for x in inputs]
        check_arrays(self.name, self.schema, arrays)
        with np.errstate(all="ignore"):  # infinities and NaN follow IEEE 754, as in the runtime
            results = self.function(*arrays, **attributes)
        several = isinstance(results, tuple)
        outputs = [np.asarray(r) for r in results] if several else [np.asarray(results)]
        wanted = self._type_variables(arrays)
        formals = self.schema.outputs if self.schema else ()
        for output, formal in zip(outputs, formals, strict=False):
            dtype = wanted.get(formal.type_str, output.dtype)
            if output.dtype != dtype:
                raise GraphgenError(f"{self.name} computed {output.dtype} where {dtype} is due")
        return tuple(outputs) if several else outputs[0]

    def bind(
        self, args: Sequence[Operand], kwargs: Mapping[str, Operand]
    ) -> tuple[list[Operand], Attributes]:
        """Split a call into ONNX inputs (trailing absent ones dropped) and attributes."""
        if self.variadic and len(args) == 1 and isinstance(args[0], (list, tuple)):
            args = args[0] if any(isinstance(x, _TENSORS) for x in args[0]) else args
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as e:
            known = ", ".join(self.attributes) or "none"
            raise GraphgenError(
                f"{self.name}: {e}; its inputs are {', '.join(self.inputs)}, "
                f"its attributes {known}{user_line()}"
            ) from e
        bound.apply_defaults()
        inputs = list(bound.args)
        expect_present(self.name, self.schema, inputs)
        while inputs and inputs[-1] is None:
            inputs.pop()
        return inputs, {
            name: check_attribute(
                self.name, name, bound.kwargs[name], default, self.kinds.get(name)
            )
            for name, default in self.attributes.items()
        }

    def _type_variables(self, inputs: Sequence[Operand]) -> dict[str, np.dtype[Any]]:
        """The numpy dtype that each type variable of the schema is bound to by `inputs`."""
        if self.schema is None:
            return {}
        bound: dict[str, np.dtype[Any]] = {}
        for i, x in enumerate(inputs):
            if isinstance(x, ir.Value) and x.dtype is not None:
                bound.setdefault(formal_input(self.schema, i).type_str, x.dtype.numpy())
            elif is_array(x):
                bound.setdefault(formal_input(self.schema, i).type_str, x.dtype)
        return bound

    def coerce(self, inputs: Sequence[Operand]) -> list[Operand]:
        """Give Python numbers the dtype that ONNX's type rules ask for at their place.

        A number takes the dtype of the operands with the same type variable, a list of sizes is
        one-dimensional int64 and may hold values (dimensions known only at run time).
        """
        if all(x is None or isinstance(x, ir.Value) or is_array(x) for x in inputs):
            return list(inputs)
        bound = self._type_variables(inputs)
        result: list[Operand] = []
        for i, x in enumerate(inputs):
            if x is None or isinstance(x, ir.Value) or is_array(x):
                result.append(x)
                continue
            if isinstance(x, (list, tuple)) and any(isinstance(d, _TENSORS) for d in x):
                result.append(TABLE["", "Concat"](*(size_as(self.name, d) for d in x), axis=0))
                continue
            dtype = number_dtype(self.name, x, inputs)
            if self.schema is not None:
                type_str = formal_input(self.schema, i).type_str
                dtype = bound.get(type_str, dtype)
                if self.name == "Pow" and bound.get("T", np.dtype(float)).kind in "iu":
                    dtype = check_power(x, bound["T"])  # numpy's has a dtype of its own
                if type_str in ("tensor(int64)", "Tind") and self.name not in ("Trilu", "Gather"):
                    dtype = np.dtype(np.int64) if x in ([], ()) else dtype
                    x = list(x) if isinstance(x, (list, tuple)) else [x]
            result.append(number_as(self.name, x, dtype))
        return result

    def count_outputs(self, inputs: Sequence[Operand], attributes: Attributes) -> int:
        """How many outputs a call has."""
        return int(self.outputs(inputs, attributes) if callable(self.outputs) else self.outputs)

    def node_attributes(self, attributes: Attributes) -> list[ir.Attr]:
        """ONNX attributes, typed by the schema, those at their default left out."""
        return onnx_attributes(self.name, attributes, self.attributes, self.kinds)


TABLE: dict[tuple[str, str], Op] = {}
"""Every operator, by (domain, ONNX name)."""


def primitive(name: str, *, outputs: Any = 1) -> Callable[[Rule], Op]:
    """Declare an operator by its meaning on numpy arrays."""
    return lambda function: _declare(Op(name, "", function, composite=False, outputs=outputs))


def composite(
    name: str, *, domain: str = "", outputs: Any = 1, together: bool = False
) -> Callable[[Rule], Op]:
    """Declare an operator by a body in simpler ones, for its first output, or all `together`."""

    def declare(function: Rule) -> Op:
        op = Op(name, domain, function, composite=True, outputs=outputs)
        op.together = together
        return _declare(op)

    return declare


def canonical(*ops: Op) -> Callable[[Rule], Rule]:
    """Declare a rule for nodes of these operators towards the canonical form.

    It looks at a node inside a recording, and gives a `Rewrite` or None.
    """

    def declare(rule: Rule) -> Rule:
        for op in ops:
            op.canonical.append(rule)
        return rule

    return declare


def _declare(op: Op) -> Op:
    if (op.domain, op.name) in TABLE:
        raise RuntimeError(f"{op!r} is declared twice")
    TABLE[op.domain, op.name] = op
    if op.schema is None and op.composite:
        registry.register(op.domain, op.name, since_version=1)(_infer_from_body(op))
    return op


def _infer_from_body(op: Op) -> Callable[[Any, ir.Node], None]:
    """Types of an operator that ONNX does not know: those of its body, recorded and dropped."""

    def rule(context: Any, node: ir.Node) -> None:
        with recording(context=context):
            given, attributes = list(map(adopt, node.inputs)), read_attributes(op, node)
            for i, body in {0: op.function, **op.further}.items():
                if i < len(node.outputs):
                    result = body(*given, **attributes)
                    node.outputs[i].type, node.outputs[i].shape = result.type, result.shape

    return rule


def find_op(node: ir.Node) -> Op | None:
    """The operator of a node, or None where the table has none."""
    return TABLE.get((node.domain, node.op_type))


def read_attributes(op: Op, node: ir.Node) -> Attributes:
    """A node's attributes as keyword arguments of its operator."""
    attributes = dict(op.attributes)
    for name, attr in node.attributes.items():
        if name not in attributes and is_default(node, attr):
            continue
        if name not in attributes:
            raise GraphgenError(
                f"{node.op_type} {node.name or ''}: attribute {name} is not supported; "
                f"{op!r} has {', '.join(attributes) or 'none'}"
            )
        attributes[name] = attr.value
    missing = [n for n, v in attributes.items() if v is inspect.Parameter.empty]
    if missing:
        raise GraphgenError(f"{node.op_type} {node.name or ''}: attribute {missing[0]} is missing")
    return attributes
