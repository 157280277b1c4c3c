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
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
from onnx_shape_inference import registry

from graphgen.errors import GraphgenError, user_line
from graphgen.infer import formal_input, infer, new_context, schema_of
from graphgen.subgraphs import read_by

Array: TypeAlias = np.ndarray[Any, Any]
Operand: TypeAlias = Any
"""A value, an array, a number, a list of sizes or a parameter."""

Attributes: TypeAlias = dict[str, Any]
Rule: TypeAlias = Callable[..., Operand]

PATH = "graphgen.path"
"""Node metadata: the module path a node belongs to, such as `decoder.layers.3.attention`."""


_UFUNCS: dict[np.ufunc, str] = {
    np.add: "Add",
    np.subtract: "Sub",
    np.multiply: "Mul",
    np.divide: "Div",
    np.power: "Pow",
    np.matmul: "MatMul",
    np.negative: "Neg",
    np.greater: "Greater",
    np.less: "Less",
    np.greater_equal: "GreaterOrEqual",
    np.less_equal: "LessOrEqual",
    np.bitwise_and: "And",
    np.bitwise_or: "Or",
    np.invert: "Not",
}


class Operators(np.lib.mixins.NDArrayOperatorsMixin):
    """Python's operators as operators of the table; comparisons give bool values, == identity."""

    __slots__ = ()
    __eq__, __ne__, __hash__ = object.__eq__, object.__ne__, object.__hash__
    __rpow__ = None  # type: ignore[assignment]  # the result has the dtype of the base: 2 has none

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Operand, **_: Any) -> Operand:
        """What numpy's function of the same meaning is here, with an array on the left too."""
        if method != "__call__" or ufunc not in _UFUNCS:
            return NotImplemented
        return TABLE["", _UFUNCS[ufunc]](*inputs)


class Value(Operators, ir.Value):
    """A value of the graph that one can calculate with; nothing but `ir.Value` otherwise."""

    __slots__ = ()

    def __bool__(self) -> bool:
        raise GraphgenError(
            f"{self.name or 'a value'} has no truth value before the run; choose with ops.where"
        )


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
        node = ir.Node(
            op.domain, op.name, operands, op.node_attributes(attributes), outputs=outputs
        )
        if self.path:
            node.metadata_props[PATH] = self.path
        self.nodes.append(node)
        infer(node, self.context)
        return tuple(outputs) if len(outputs) > 1 and op.together else outputs[0]

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> Value:
        """A graph input; asked for again by name, the same one."""
        value = Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(list(shape)))
        return self.inputs.setdefault(name, value)

    def operand(self, x: Operand) -> ir.Value:
        """`x` as a value: itself, or a constant."""
        return x if isinstance(x, ir.Value) else self.constant(x)

    def constant(self, x: Operand) -> Value:
        """A constant of this recording; equal ones under 1 kB are shared."""
        array = np.asarray(x)
        small = array.nbytes <= 1024
        key: object = (array.dtype.str, array.shape, array.tobytes()) if small else id(x)
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
        self._detach([node for node in self.nodes if node not in needed])
        self.nodes = [node for node in self.nodes if node in needed]

    def discard(self) -> None:
        """Forget everything recorded; nodes that no graph has taken are detached."""
        self._detach([node for node in self.nodes if node.graph is None])
        self.nodes, self.constants, self.kept = [], {}, False

    def _detach(self, nodes: Sequence[ir.Node]) -> None:
        """A dropped `ir.Node` would keep the uses of its inputs for ever."""
        for node in reversed(nodes):
            for i in range(len(node.inputs)):
                node.replace_input_with(i, None)


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
        while inputs and inputs[-1] is None:
            inputs.pop()
        return inputs, {name: bound.kwargs[name] for name in self.attributes}

    def _type_variables(self, inputs: Sequence[Operand]) -> dict[str, np.dtype[Any]]:
        """The numpy dtype that each type variable of the schema is bound to by `inputs`."""
        if self.schema is None:
            return {}
        bound: dict[str, np.dtype[Any]] = {}
        for i, x in enumerate(inputs):
            if isinstance(x, ir.Value) and x.dtype is not None:
                bound.setdefault(formal_input(self.schema, i).type_str, x.dtype.numpy())
            elif _is_array(x):
                bound.setdefault(formal_input(self.schema, i).type_str, x.dtype)
        return bound

    def coerce(self, inputs: Sequence[Operand]) -> list[Operand]:
        """Give Python numbers the dtype that ONNX's type rules ask for at their place.

        A number takes the dtype of the operands with the same type variable, a list of sizes is
        one-dimensional int64 and may hold values (dimensions known only at run time).
        """
        if all(x is None or isinstance(x, ir.Value) or _is_array(x) for x in inputs):
            return list(inputs)
        bound = self._type_variables(inputs)
        floats = [d for d in map(_float_dtype, inputs) if d is not None]
        result: list[Operand] = []
        for i, x in enumerate(inputs):
            if x is None or isinstance(x, ir.Value) or _is_array(x):
                result.append(x)
                continue
            if isinstance(x, (list, tuple)) and any(isinstance(d, ir.Value) for d in x):
                result.append(TABLE["", "Concat"](*map(_size, x), axis=0))
                continue
            dtype: Any = np.asarray(x).dtype
            if dtype.kind == "f" and (floats or not isinstance(x, np.generic)):
                dtype = floats[0] if floats else np.dtype(np.float32)
            if self.schema is not None:
                type_str = formal_input(self.schema, i).type_str
                dtype = bound.get(type_str, dtype)
                if type_str == "tensor(int64)" and self.name != "Trilu":
                    x = np.atleast_1d(x)
                    dtype = dtype if x.size else np.dtype(np.int64)
            try:
                result.append(np.asarray(x, float if dtype.hasobject else dtype))
            except (TypeError, ValueError) as error:
                raise GraphgenError(
                    f"{self.name}: {inputs[i]!r} is no operand; give a value, an array or a number"
                ) from error
        return result

    def count_outputs(self, inputs: Sequence[Operand], attributes: Attributes) -> int:
        """How many outputs a call has."""
        return int(self.outputs(inputs, attributes) if callable(self.outputs) else self.outputs)

    def node_attributes(self, attributes: Attributes) -> list[ir.Attr]:
        """ONNX attributes, typed by the schema, those at their default left out."""
        result = []
        for name, value in attributes.items():
            if value is None or (self.attributes[name] == value and self.schema is not None):
                continue
            kind = None
            if self.schema is not None:
                kind = ir.AttributeType[str(self.schema.attributes[name].type).split(".")[-1]]
            if isinstance(value, (ir.DataType, bool)):
                value = int(value)
            try:
                value = float(value) if kind == ir.AttributeType.FLOAT else value
                result.append(ir.convenience.convert_attribute(name, value, kind))
            except (TypeError, ValueError) as error:
                raise GraphgenError(
                    f"{self.name}: attribute {name} is {value!r}: {error}"
                ) from error
        return result


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


def is_default(node: ir.Node, attr: ir.Attr) -> bool:
    """Whether an attribute is written with the value that ONNX gives it anyway."""
    schema = schema_of(node.domain, node.op_type)
    formal = schema.attributes.get(attr.name) if schema is not None else None
    if formal is None or formal.default_value.type == onnx.AttributeProto.UNDEFINED:
        return False
    return bool(ir.serde.deserialize_attribute(formal.default_value).value == attr.value)


def _is_array(x: Operand) -> bool:
    """Whether an operand brings a dtype of its own; beside others that do, `np.sqrt(2)` does not.

    It is a Python float as well, and what numpy makes of float64 arrays without dimensions.
    """
    return isinstance(x, (np.ndarray, np.generic)) and not isinstance(x, float)


def _float_dtype(x: Operand) -> np.dtype[Any] | None:
    given = x.dtype if isinstance(x, ir.Value) or _is_array(x) else None
    dtype = ir.DataType.from_numpy(given) if isinstance(given, np.dtype) else given
    return dtype.numpy() if dtype is not None and dtype.is_floating_point() else None


def _size(d: Operand) -> Operand:
    return d if isinstance(d, ir.Value) else np.atleast_1d(np.asarray(d, np.int64))
