"""Operators, declared once: a primitive by its meaning in numpy, a composite by its body.

Called on arrays, an operator computes; called on values inside a recording, it adds a node. ONNX
*inputs* are the positional parameters of the declaring function, ONNX *attributes* its keyword-only
ones, with their ONNX names, so a node of any graph is a call of its operator.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Generic, Literal, get_args, get_origin
from weakref import WeakKeyDictionary

import numpy as np
import onnx
import onnx_ir as ir
from onnx_shape_inference import registry
from typing_extensions import ParamSpec, TypeVar

from graphgen.arrays import as_array
from graphgen.coerce import TENSORS, bound_dtypes, coerced, resolved
from graphgen.errors import GraphgenError, misspelled, user_line
from graphgen.infer import (
    DeclaredSizes,
    check_arrays,
    describe,
    expect_present,
    is_default,
    misfit,
    schema_of,
)
from graphgen.operands import (
    UFUNCS,
    check_attribute,
    is_array,
    onnx_attributes,
)
from graphgen.record import (
    TABLE,
    Attributes,
    Operand,
    Rule,
    current_tape,
    recording,
)
from graphgen.traits import NONE, TRAITS, Trait, collect, declare_traits
from graphgen.value import adopt

P = ParamSpec("P", default=...)
R = TypeVar("R", default=Any)
Given = ParamSpec("Given")
Made = TypeVar("Made")


class Op(Generic[P, R]):
    """One operator of the table: its name, its meaning or body, its gradient, its recognizer."""

    def __init__(
        self,
        name: str,
        domain: str,
        function: Callable[P, R],
        *,
        composite: bool,
        outputs: int | Callable[..., int],
    ):
        self.name, self.domain, self.composite, self.outputs = name, domain, composite, outputs
        self.function: Rule = function
        self.together = not composite  # one call returns all outputs, as a tuple
        self.whole = False  # recorded as itself even if primitives are wanted
        self.rule: Rule | None = None
        self.recognizer: Rule | None = None
        self.roots: tuple[str, ...] = ()
        self.variants: list[Rule] = []
        self.counted: Rule | None = None
        self.numbered: Rule | None = None
        self.traits = NONE
        self.canonical: list[Rule] = []
        self.further: dict[int, Rule] = {}
        self.fixed: dict[str, str] = {}  # inputs that no gradient may change, and what they are
        self.signature = inspect.signature(function)
        parameters = self.signature.parameters.values()
        self.inputs = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        self.variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        self.attributes = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        words = {p.name: p.annotation for p in parameters if get_origin(p.annotation) is Literal}
        self.choices = {name: get_args(annotation) for name, annotation in words.items()}
        self.schema = schema_of(domain, name)
        self.kinds = {
            name: ir.AttributeType[str(formal.type).rpartition(".")[2]]
            for name, formal in (self.schema.attributes if self.schema else {}).items()
        }
        self.__doc__: str | None = function.__doc__
        self.__name__, self.__qualname__ = function.__name__, function.__qualname__
        self.__module__, self.__wrapped__ = function.__module__, function

    def __repr__(self) -> str:
        return f"<operator {self}>"

    def __str__(self) -> str:
        """`Softmax`, or `com.microsoft::QuickGelu` outside the standard domain."""
        return f"{self.domain}::{self.name}" if self.domain else self.name

    def __get__(self, instance: object, owner: type | None = None) -> "Op[P, R]":
        """Itself, also as an attribute of a class; help() takes what has this for a function."""
        return self

    def vjp(self, rule: Rule) -> Rule:
        """Declare the gradient: a rule on what it names, which returns one cotangent per input.

        `g` is the cotangent of the result `y`; the other names are inputs and attributes. A None
        (or missing) cotangent means no gradient. The walker sums a cotangent over broadcast
        dimensions, so a rule need not do that. Raises RuntimeError for any other name.
        """
        self.rule = self.by_name(rule, "g", "y")
        return rule

    def output(self, index: int) -> Callable[[Rule], Rule]:
        """Declare the body of a further output of a composite, a function of what it names."""

        def declare(body: Rule) -> Rule:
            self.further[index] = self.by_name(body)
            return body

        return declare

    def recognize(self, *roots: str) -> Callable[[Rule], Rule]:
        """Declare by hand what `graphgen.recognize.pattern` otherwise makes from the body.

        The recognizer looks at one node at a time, those of the standard operators `roots`.
        """

        def declare(recognizer: Rule) -> Rule:
            self.recognizer, self.roots = recognizer, roots
            return recognizer

        return declare

    def variant(self, rule: Rule) -> Rule:
        """Declare the same result with another operator, for targets that have only that one.

        The rule, on what it names, returns the result, or None if the other cannot express it.
        """
        self.variants.append(self.by_name(rule))
        return rule

    def flops(self, rule: Rule) -> Rule:
        """Declare the floating-point operations of a call, by the shapes of what the rule names.

        The names are the result `y`, inputs and attributes. Without a rule, moving data costs
        nothing, and anything else one for each element; a composite costs what its body does.
        """
        self.counted = self.by_name(rule, "y")
        return rule

    def number(self, rule: Rule) -> Rule:
        """Declare the dtype of a Python number: `rule(number, dtype, bound)`.

        `dtype` is what ONNX's type rules give it, `bound` the dtypes of the type variables.
        """
        self.numbered = rule
        return rule

    def by_name(self, rule: Rule, *before: str) -> Rule:
        """`rule`, called like the operator, with the arguments `before` in front of its inputs.

        It gets the arguments that it names, and in `**attributes` the attributes that it does not.
        A variadic input is a tuple. Raises RuntimeError for a name that the operator lacks.
        """
        known, asked = (*before, *self.inputs, *self.attributes), set[str]()
        for p in inspect.signature(rule).parameters.values():
            if p.kind is p.VAR_KEYWORD:
                asked.update(self.attributes)
            elif p.name in known and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                asked.add(p.name)
            else:
                raise RuntimeError(f"{self!r}: a rule names {p}; it has {', '.join(known)}")

        def call(*args: Any, **attributes: Any) -> Any:
            bound = self.bind_names(args[len(before) :], attributes)
            given = dict(zip(before, args, strict=False)) | bound
            return rule(**{name: given[name] for name in asked})

        return call

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Compute on arrays, or record on values."""
        result: R = self.call(args, kwargs)
        return result

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a call with these arguments gives."""
        inputs, attributes = self.bind(args, kwargs)
        tape = current_tape()
        inputs = coerced(self, [resolved(x, tape) for x in inputs])
        if not any(not is_array(x) and isinstance(x, ir.Value) for x in inputs):
            return self.compute(inputs, attributes)
        if tape is None:
            raise GraphgenError(
                f"{self.name} was called on graph values outside gg.build{user_line()}"
            )
        if self.composite:
            tape.declare(self.name)
        if not self.composite or not tape.primitives or self.whole:
            return tape.record(self, inputs, attributes)
        with tape.inside():
            return self.expand(inputs, attributes)

    def expand(self, inputs: Sequence[Operand], attributes: Attributes) -> Any:
        """Record the body instead of the operator."""
        return self.function(*(adopt(x) for x in inputs), **attributes)

    def compute(self, inputs: Sequence[Operand], attributes: Attributes) -> Any:
        """The meaning on arrays, under ONNX's type rules: a leaked float64 is an error."""
        try:
            arrays = [x if x is None else as_array(x) for x in inputs]
        except ValueError as error:
            raise GraphgenError(f"{self.name}: {error}{user_line()}") from error
        check_arrays(self.name, self.schema, arrays)
        try:
            with np.errstate(all="ignore"):  # infinities and NaN follow IEEE 754, as in the runtime
                results = self.function(*arrays, **attributes)
        except (ValueError, IndexError) as error:
            given = self.node_attributes(attributes)
            raise misfit((self.domain, self.name), arrays, given, error) from error
        several = isinstance(results, tuple)
        outputs = [np.asarray(r) for r in results] if several else [np.asarray(results)]
        wanted = bound_dtypes(self.schema, arrays)
        formals = self.schema.outputs if self.schema else ()
        for output, formal in zip(outputs, formals, strict=False):
            dtype = wanted.get(formal.type_str, output.dtype)
            if output.dtype != dtype:
                raise GraphgenError(f"{self.name} computed {output.dtype}; it must be {dtype}")
        return tuple(outputs) if several else outputs[0]

    def bind(
        self, args: Sequence[Operand], kwargs: Mapping[str, Operand]
    ) -> tuple[list[Operand], Attributes]:
        """Split a call into ONNX inputs (trailing absent ones dropped) and attributes."""
        args = self._operands(args) if self.variadic else args
        bound = self.bind_names(args, kwargs)
        inputs = [bound[name] for name in self.inputs]
        if self.variadic:
            inputs += inputs.pop()
        expect_present(self.name, self.schema, inputs)
        while inputs and inputs[-1] is None:
            inputs.pop()
        return inputs, {
            name: check_attribute(
                self.name,
                name,
                bound[name],
                default,
                self.kinds.get(name),
                self.choices.get(name, ()),
            )
            for name, default in self.attributes.items()
        }

    def _operands(self, args: Sequence[Operand]) -> Sequence[Operand]:
        """The arguments of a variadic operator, which may also be given as one list."""
        first = args[0] if args else None
        if not isinstance(first, (list, tuple)):
            return args
        if len(args) > 1 and any(isinstance(x, TENSORS) for x in first):
            raise GraphgenError(
                f"{self.name}: {first!r} and {args[1]!r}: give the operands as one list or as "
                f"arguments, and attributes by name{user_line()}"
            )
        return first if len(args) == 1 else args

    def bind_names(self, args: Sequence[Operand], kwargs: Mapping[str, Operand]) -> dict[str, Any]:
        """A call's arguments by name, with defaults. Raises GraphgenError if they do not fit."""
        named = dict(zip(self.inputs, args, strict=False))
        if not self.variadic and len(args) == len(named) and named.keys().isdisjoint(kwargs):
            found: dict[str, Any] = {**self.defaults, **named, **kwargs}
            if found.keys() == self.signature.parameters.keys():
                return found  # what follows gives the same, but takes ten times as long
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as e:
            known = ", ".join(self.attributes) or "none"
            raise GraphgenError(
                f"{self.name}: {e}; its inputs are {', '.join(self.inputs)}, "
                f"its attributes {known}{misspelled(kwargs, [*self.attributes])}{user_line()}"
            ) from e
        bound.apply_defaults()
        return dict(bound.arguments)

    def count_outputs(self, inputs: Sequence[Operand], attributes: Attributes) -> int:
        """How many outputs a call has."""
        return int(self.outputs(inputs, attributes) if callable(self.outputs) else self.outputs)

    def node_attributes(self, attributes: Attributes) -> list[ir.Attr]:
        """ONNX attributes, typed by the schema, without those at their default."""
        return onnx_attributes(self.name, attributes, self.attributes, self.kinds)


def primitive(
    name: str,
    *,
    domain: str = "",
    outputs: int | Callable[..., int] = 1,
    traits: Trait = NONE,
    looks_up: tuple[int, tuple[int, ...]] | None = None,
    ufunc: np.ufunc | None = None,
) -> Callable[[Callable[Given, Made]], Op[Given, Made]]:
    """Declare an operator by its meaning on numpy arrays.

    Args:
        name: Its name in ONNX.
        domain: The runtime's own, for an operator that all targets have.
        outputs: How many it has, or a function of inputs and attributes that says so.
        traits: What passes may know about it.
        looks_up: Which operand selects the rows to take, and from which operands.
        ufunc: numpy's function that stands for a call on values.
    """

    def declare(function: Callable[Given, Made]) -> Op[Given, Made]:
        op = Op(name, domain, function, composite=False, outputs=outputs)
        if ufunc is not None:
            UFUNCS[ufunc] = op
        return _declare(op, traits, looks_up)

    return declare


def composite(
    name: str,
    *,
    domain: str = "",
    outputs: int | Callable[..., int] = 1,
    together: bool = False,
    traits: Trait = NONE,
    looks_up: tuple[int, tuple[int, ...]] | None = None,
) -> Callable[[Callable[Given, Made]], Op[Given, Made]]:
    """Declare an operator by a body of simpler ones, for its first output, or all `together`.

    The other arguments are those of `primitive`.
    """

    def declare(function: Callable[Given, Made]) -> Op[Given, Made]:
        op = Op(name, domain, function, composite=True, outputs=outputs)
        op.together = together
        return _declare(op, traits, looks_up)

    return declare


UNDECLARED: dict[str, list[Rule]] = {}
"""Rules of the canonical form for operators that are known by name only."""


def canonical(*ops: Op | str) -> Callable[[Rule], Rule]:
    """Declare a rule that turns nodes of these operators into the canonical form.

    It looks at a node inside a recording, and returns a `Rewrite` or None.
    """

    def declare(rule: Rule) -> Rule:
        for op in ops:
            rules = UNDECLARED.setdefault(op, []) if isinstance(op, str) else op.canonical
            rules.append(rule)
        return rule

    return declare


def _declare(
    op: Op[Given, Made], traits: Trait, looks_up: tuple[int, tuple[int, ...]] | None
) -> Op[Given, Made]:
    collect()  # an operator of a user's file has to differ from ours
    if (op.domain, op.name) in TABLE:
        raise RuntimeError(f"{op!r} is declared twice")
    TABLE[op.domain, op.name], op.traits = op, traits
    op.__doc__ = _documented(op)
    _is_one.cache_clear()
    if traits or looks_up:
        declare_traits(op.name, traits, domain=op.domain, looks_up=looks_up)
    if op.schema is None and op.composite:
        registry.collect()  # the library's rules, which are loaded only now
        if registry.get(op.domain, op.name, version=1) is None:
            infer_from_body(op)
    return op


def _documented(op: Op) -> str:
    """What help() shows of an operator: its docstring, what its traits say, and its source."""
    parts = [inspect.cleandoc(op.function.__doc__ or "")]
    if Trait.BROADCASTS in op.traits and len(op.inputs) + op.variadic > 1:
        parts.append("Operands broadcast as in NumPy.")
    schema = op.schema or schema_of(op.domain, op.name, onnx.defs.onnx_opset_version())
    if not op.domain and schema is not None:
        page = f"https://onnx.ai/onnx/operators/onnx__{op.name}.html"
        parts.append(f"ONNX: {op.name}, as of opset {schema.since_version}, {page}")
    elif op.domain == "com.microsoft":
        page = "https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md"
        parts.append(f"ONNX Runtime: {op}, {page}")
    elif op.domain:
        parts.append(f"An operator of graphgen, {op}: a file holds its body as a function.")
    return "\n\n".join(parts)


def infer_from_body(op: Op) -> None:
    """Infer the types of an operator by recording its body, which is then dropped.

    It is used where neither ONNX nor the library has a rule, or the library's is wrong. Where the
    library's is right, it counts: it also covers operands for which there is no body, such as the
    packed ones of an attention. A node of a file gets no types if there is no body for its
    operands, or if the dtype of one is unknown. As the layers of a model are alike, a body is
    recorded once in a graph for each combination of operand types, unless an operand may hold
    sizes, or the body makes up new ones.
    """
    known: WeakKeyDictionary[Any, dict[object, list[ir.Value]]] = WeakKeyDictionary()

    def rule(context: Any, node: ir.Node) -> None:
        if any(x is not None and x.dtype is None for x in node.inputs):
            return
        found, operands = known.setdefault(context, {}), [x for x in node.inputs if x is not None]
        attributes = repr({name: attr.value for name, attr in node.attributes.items()})
        key = (*map(describe, node.inputs), len(node.outputs), attributes)
        results = found[key] if key in found else _types_of_body(op, node, context)
        for y, result in zip(node.outputs, results, strict=False):
            y.type, y.shape = result.type, None if result.shape is None else result.shape.copy()
        given = {str(dim) for x in operands for dim in x.shape or ()}
        made = {str(dim) for y in results for dim in y.shape or () if not isinstance(dim, int)}
        sizes = any(x.dtype in (ir.DataType.INT64, ir.DataType.INT32) for x in operands)
        if results and not sizes and made <= given and not isinstance(context, DeclaredSizes):
            found[key] = results

    registry.register(op.domain, op.name, since_version=1)(rule)


def _types_of_body(op: Op, node: ir.Node, context: Any) -> list[ir.Value]:
    """What the bodies of a node's outputs give; nothing where it has none."""
    with recording(context=context) as tape:
        try:
            given, attributes = list(map(adopt, node.inputs)), read_attributes(op, node)
            op.bind_names(given, attributes)
            needed = [p.default is p.empty for p in op.signature.parameters.values()]
            if any(x is None and must for x, must in zip(given, needed, strict=False)):
                return []
            bodies = [op.function, *(op.further.get(i) for i in range(1, len(node.outputs)))]
            made = [None if f is None else f(*given, **attributes) for f in bodies]
            return [ir.Value() if y is None else tape.operand(y) for y in made]
        except GraphgenError as error:
            # An error with a cause is one of inference, or a call that does not fit: the graph is
            # wrong. One without is the body's own: it does not support these operands, which a file
            # may have nevertheless.
            if error.__cause__ is not None or isinstance(context, DeclaredSizes):
                raise
            return []


def find_op(node: ir.Node) -> Op | None:
    """The operator of a node, or None if the table has none."""
    if not TABLE:
        collect()
    return TABLE.get((node.domain, node.op_type))


def is_a(node: ir.Node, *kinds: Op | Trait | str) -> bool:
    """Whether a node is of one of these operators, or of one with such a trait.

    A string is the name of a standard operator, for files that may name operators.
    """
    return _is_one(node.domain, node.op_type, kinds)


@cache  # optimize calls it a hundred thousand times
def _is_one(domain: str, name: str, kinds: tuple[Op | Trait | str, ...]) -> bool:
    collect()
    own = TRAITS.get((domain, name), NONE)
    known = TABLE.get((domain, name)) in kinds or (not domain and name in kinds)
    return known or any(isinstance(kind, Trait) and bool(kind & own) for kind in kinds)


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
