"""Types, symbolic shapes and shape values of one node at a time.

`infer(node, context)` runs our own equality checks, then the symbolic rules of the
onnx-shape-inference package, then onnx's per-node inference where that package has no rule.
Constants over 1 kB are never handed to onnx's inference.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, Protocol

import numpy as np
import onnx
import onnx_ir as ir
from onnx_shape_inference import OpUsageError, ShapeInferenceContext, ShapeInferenceError, registry

from graphgen.errors import GraphgenError, user_line
from graphgen.forms import MADE_UP, TEXTS, readable
from graphgen.maps import holds_maps
from graphgen.operands import onnx_dtype
from graphgen.repeats import ELEMENT, operands_of, recall, remember
from graphgen.rounded import FileSizes, Sizes, without_doubt
from graphgen.traits import Trait, collect, has

OPSET = 23
"""The opset inside: files below it are raised to it, files above it keep theirs."""

DOMAIN = "graphgen"
"""The domain of operators that ONNX does not have."""

_STANDARD = ("", "ai.onnx.ml")
"""The domains whose operators have mends: no name stands in both."""

Dim = int | ir.SymbolicDim

_Option = onnx.defs.OpSchema.FormalParameterOption

_LARGE = 1024
_ELEMENT = re.compile(rf"\b{ELEMENT}\d+\b")
_LIBRARY_ERRORS = (
    ValueError,
    OpUsageError,
    ShapeInferenceError,
    onnx.shape_inference.InferenceError,
)

CHECKS: dict[str, Callable[[ir.Node], None]] = {}
"""By operator, checks that the libraries lack: raises ValueError. Declared in ops/."""

Mend = Callable[[ir.Node, ShapeInferenceContext], None]

MENDS: dict[str | Trait, list[Mend]] = {}
"""By operator, and for all that broadcast: corrects what the libraries infer wrongly or not.

Declared in ops/ with `mends`: shapes.py, shape_values.py, spatial_shapes.py, features.py.
"""


def mends(*operators: str | Trait) -> Callable[[Mend], Mend]:
    """Declare a correction of what the libraries infer about these operators."""

    def declare(mend: Mend) -> Mend:
        for operator in operators:
            MENDS.setdefault(operator, []).append(mend)
        return mend

    return declare


class DeclaredSizes(Sizes):
    """The state of inference over a graph of the DSL: different names are different sizes.

    In a file they may be one size, because exporters name the sizes of each input separately.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.promised: dict[Dim, Dim] = {}  # sizes that the program declares equal to others


def new_context(
    opset_imports: dict[str, int] | None = None, *, declared: bool = False
) -> ShapeInferenceContext:
    """The state of inference over one graph: symbols handed out and shape values known."""
    registry.collect()
    collect()  # our own rules
    imports = opset_imports or {"": OPSET, DOMAIN: 1, "com.microsoft": 1}
    return (DeclaredSizes if declared else FileSizes)(imports, policy="refine")


@cache
def schema_of(domain: str, op_type: str, version: int = OPSET) -> onnx.defs.OpSchema | None:
    """The ONNX schema of an operator at an opset, or None if ONNX does not define it."""
    try:
        return onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None


@cache
def formal_input(schema: onnx.defs.OpSchema, index: int) -> onnx.defs.OpSchema.FormalParameter:
    """The formal parameter that input `index` fills; the last one repeats when variadic."""
    return schema.inputs[min(index, len(schema.inputs) - 1)]


def is_default(node: ir.Node, attr: ir.Attr) -> bool:
    """Whether an attribute has the value that ONNX gives it anyway."""
    schema = schema_of(node.domain, node.op_type)
    formal = schema.attributes.get(attr.name) if schema is not None else None
    if formal is None or formal.default_value.type == onnx.AttributeProto.UNDEFINED:
        return False
    return bool(ir.serde.deserialize_attribute(formal.default_value).value == attr.value)


class Shaped(Protocol):
    """What has a dtype and sizes: a value, an array, a parameter."""

    @property
    def shape(self) -> Any:
        """Its sizes, ints or symbols, as an array's or an `onnx_ir.Shape`; None if not known."""

    @property
    def dtype(self) -> np.dtype[Any] | ir.DataType | None:
        """NumPy's of what programs calculate with, ONNX's of values of a graph."""


def describe(value: Shaped | None) -> str:
    """`float[batch, seq, 256]`: how errors and text goldens write a value's type."""
    if value is None:
        return "nothing"
    given: Any = getattr(value, "value", value)  # a value of the DSL says what it is in the graph
    dtype = given.dtype.name.lower() if given.dtype is not None else "unknown"
    if given.shape is None:
        return f"{dtype}[...]"
    return f"{dtype}[{', '.join(str(d) for d in given.shape)}]"


def is_named(dim: Dim) -> bool:
    """Whether a size is a number or made of the inputs' symbols, not one made up by inference."""
    return isinstance(dim, int) or (dim.value is not None and not MADE_UP.search(dim.value))


def is_rounded(dim: Dim) -> bool:
    """Whether a size is a quotient, power or function but Min: floor(Min(63, n)**2/n) may be n."""
    return bool(re.search(r"/|\*\*|\b(?!Min\()\w+\(", str(dim)))


def same_dim(a: Dim, b: Dim) -> bool:
    """Whether two dimensions are known to be equal (an unnamed one equals nothing)."""
    if isinstance(a, int) or isinstance(b, int):  # not of SymbolicDim: as a protocol it is slow
        return isinstance(a, int) and isinstance(b, int) and a == b
    return a.value is not None and a.value == b.value


def expect_same(dims: Sequence[Dim], context: ShapeInferenceContext) -> None:
    """Raise ValueError for sizes that differ in a graph of the DSL, if their names show it."""
    if isinstance(context, DeclaredSizes):
        first, *others = [context.promised.get(dim, dim) for dim in dims] or [1]
        for other in others:
            if same_size(first, other) is False:
                raise ValueError(
                    f"the dimensions {first} and {other} differ; give equal sizes one name, or, to "
                    "broadcast, give one of them the size 1"
                )


@lru_cache(TEXTS)
def same_size(a: Dim, b: Dim) -> bool | None:
    """Whether two sizes are the same, whatever their symbols stand for; None if unknown.

    It is unknown for made-up, cut or rounded ones: Min(4, n) is n in a running program.
    """
    if same_dim(a, b):
        return True
    if not all(is_named(d) and not is_rounded(d) and "Min(" not in str(d) for d in (a, b)):
        return None
    try:
        return bool((ir.SymbolicDim(str(a)) - ir.SymbolicDim(str(b))).simplify() == "0")
    except ValueError:  # a name that is not an expression
        return False


def same_shape(a: ir.Shape | None, b: ir.Shape | None) -> bool:
    """Whether two shapes are known and known to be equal."""
    return (
        a is not None and b is not None and len(a) == len(b) and all(map(same_dim, a.dims, b.dims))
    )


def incompatible(
    old: ir.Value, new: ir.Value, context: ShapeInferenceContext | None = None
) -> str | None:
    """Why `new` cannot stand for `old`, or None; `context` may know that two sizes are one."""
    if old.dtype is not None and new.dtype is not None and old.dtype != new.dtype:
        return f"the dtype would change: {describe(old)} to {describe(new)}"
    if old.shape is None or new.shape is None:
        return None
    if len(old.shape) != len(new.shape):
        return f"the rank would change: {describe(old)} to {describe(new)}"
    for a, b in zip(old.shape, new.shape, strict=True):
        one = same_dim(a, b) or (isinstance(context, FileSizes) and context.are_equal(a, b))
        if not one and is_named(a) and is_named(b):
            return f"the shape would change: {describe(old)} to {describe(new)}"
    return None


def is_known(node: ir.Node, context: ShapeInferenceContext) -> bool:
    """Whether anything can be inferred about a node's results."""
    version = context.get_opset_version(node.domain)
    rule = registry.get(node.domain, node.op_type, version=version)
    return rule is not None or schema_of(node.domain, node.op_type, version) is not None


def infer(node: ir.Node, context: ShapeInferenceContext) -> None:
    """Set the type, shape and shape value of every output of `node`.

    Raises a GraphgenError that names the operator, what arrived and what was wanted. The layers of
    a model are alike: what is known about a node with such operands is not worked out again.
    """
    key = operands_of(node, context)
    if key is not None and isinstance(context, DeclaredSizes):
        key = key, *context.promised.items()
    if key is not None and recall(node, key, context):
        return
    try:
        _check(node, context)
        _run_rules(node, context)
        _repair(node, context)
    except _LIBRARY_ERRORS as e:
        reason = re.split(r"\[\w+Error\] ", str(e))[-1].removeprefix(f"{node.op_type}: ")
        arrived = ", ".join(describe(value) for value in node.inputs)
        raise GraphgenError(f"{node.op_type}({arrived}): {reason}{user_line()}") from e
    if key is not None:
        remember(node, key, context)


def _run_rules(node: ir.Node, context: ShapeInferenceContext) -> None:
    version = context.get_opset_version(node.domain)
    rule = registry.get(node.domain, node.op_type, version=version)
    if rule is not None:
        try:
            rule(context, node)
        except IndexError as error:  # of the library's alone: it looks at no rank before an axis
            raise ValueError("an operand has too few dimensions") from error
        except (OverflowError, TypeError):  # casting a shape value to a dtype that cannot hold it
            pass
        return
    schema = schema_of(node.domain, node.op_type, version)
    if schema is None or any(v is not None and v.type is None for v in node.inputs):
        return
    # onnx's inference addresses values by name, so a node without names gets temporary ones.
    proto = ir.to_proto(node)
    names = [f"i{i}" if v is not None else "" for i, v in enumerate(node.inputs)]
    proto.input[:], proto.output[:] = names, [f"o{i}" for i in range(len(node.outputs))]
    types: dict[str, onnx.TypeProto] = {}
    small: dict[str, onnx.TensorProto] = {}
    for name, value in zip(names, node.inputs, strict=True):
        if value is None:
            continue
        types[name] = ir.serde.serialize_value(value, name=name).type
        constant = ir.convenience.get_const_tensor(value)
        if constant is not None and constant.nbytes <= _LARGE:
            small[name] = ir.to_proto(ir.tensor(constant.numpy(), name=name))
    imports = [onnx.helper.make_opsetid(d, v) for d, v in context.opset_imports.items()]
    found = onnx.shape_inference.infer_node_outputs(
        schema, proto, types, small, opset_imports=imports
    )
    for i, output in enumerate(node.outputs):
        if f"o{i}" in found and not holds_maps(found[f"o{i}"]):
            info = ir.serde.deserialize_value_info_proto(
                onnx.ValueInfoProto(name=f"o{i}", type=found[f"o{i}"]), None
            )
            output.type, output.shape = info.type, info.shape
            context.name_anonymous_dims(output)


def _check(node: ir.Node, context: ShapeInferenceContext) -> None:
    """Check what the library does not: arity, dtypes, axes, and dimensions that must be equal."""
    schema = schema_of(node.domain, node.op_type, context.get_opset_version(node.domain))
    if schema is None:
        return
    for verb, kind, least, most, values in (
        ("takes", "inputs", schema.min_input, schema.max_input, node.inputs),
        ("gives", "outputs", schema.min_output, schema.max_output, node.outputs),
    ):
        if not least <= len(values) <= most:
            raise ValueError(f"{verb} {least} to {most} {kind}, not {len(values)}")
    types = [None if v is None else v.type for v in node.inputs]
    check_dtypes(schema, tuple(t.dtype if isinstance(t, ir.TensorType) else None for t in types))
    x, axis = node.inputs[0] if node.inputs else None, node.attributes.get("axis")
    shape = None if x is None else x.shape
    # Of a quantized tensor with one scale, an axis has no meaning; ops/shapes.py checks the others.
    if axis is not None and shape is not None and not has(node, Trait.QUANTIZED):
        dims, index = len(shape) + has(node, Trait.ADDS_AXIS), axis.as_int()
        end = not dims or has(node, Trait.SPLITS_AXES)  # a scalar is taken to have an axis 0
        if not (end and index == dims):
            expect_axis(index, dims)
    if shape is not None and has(node, Trait.REDUCES) and isinstance(context, DeclaredSizes):
        axes = node.inputs[1] if len(node.inputs) > 1 else None
        known = None if axes is None else context.get_symbolic_value(axes)
        expect_distinct(known or (), len(shape))  # in a file, the runtime reduces one once
    check = CHECKS.get(node.op_type)
    if check is not None and all(v is None or v.shape is not None for v in node.inputs):
        check(node)


def expect_axis(axis: int, dims: int) -> None:
    """Raise ValueError for an axis that does not exist."""
    if not -dims <= axis < dims:
        given = f"axis {axis} does not exist in {dims} dimensions"
        raise ValueError(f"{given}; use {-dims} to {dims - 1}" if dims else given)


def expect_distinct(axes: Sequence[Dim], dims: int) -> None:
    """Raise ValueError for an axis that is named twice, as NumPy does."""
    given = [axis for axis in axes if isinstance(axis, int)]
    if dims and len({axis % dims for axis in given}) < len(given):
        raise ValueError(f"the axes {given} of {dims} dimensions name one twice; name each once")


def axis_from_front(who: str, axis: int, dims: int) -> int:
    """An axis counted from the first one. Raises GraphgenError if there are not as many."""
    try:
        expect_axis(axis, dims)
    except ValueError as error:
        raise GraphgenError(f"{who}: {error}{user_line()}") from error
    return axis % dims


@cache
def check_dtypes(
    schema: onnx.defs.OpSchema, dtypes: tuple[ir.DataType | None, ...], *, widened: bool = False
) -> None:
    """Raise ValueError unless an operator takes inputs of these dtypes together.

    With `widened`, double may stand for any floating-point dtype.
    """
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    bound: dict[str, ir.DataType] = {}
    for i, dtype in enumerate(dtypes):
        if dtype is None:
            continue
        formal = formal_input(schema, i)
        types = allowed.get(formal.type_str, (formal.type_str,))
        wide = widened and dtype == ir.DataType.DOUBLE and "tensor(float)" in types
        if f"tensor({dtype.name.lower()})" not in types and not wide:
            wanted = ", ".join(sorted(t.removeprefix("tensor(").removesuffix(")") for t in types))
            raise ValueError(f"{formal.name} is {dtype.name.lower()}; it must be one of {wanted}")
        variadic = formal.option == _Option.Variadic
        if variadic and not formal.is_homogeneous:
            continue
        other = bound.setdefault(formal.type_str, dtype)
        wide = widened and ir.DataType.DOUBLE in (dtype, other)
        if other != dtype and not (wide and dtype.is_floating_point() == other.is_floating_point()):
            raise ValueError(
                f"{formal.name} is {dtype.name.lower()}, but the other operands are "
                f"{other.name.lower()}; cast one of them"
            )


def check_arrays(who: str, schema: onnx.defs.OpSchema | None, arrays: Sequence[Any]) -> None:
    """Raise GraphgenError unless the arrays' dtypes go together; floats may be widened."""
    dtypes = tuple([None if x is None else onnx_dtype(x.dtype) for x in arrays])
    try:
        if schema is not None:
            check_dtypes(schema, dtypes, widened=True)
    except ValueError as error:
        given = ", ".join("nothing" if x is None else f"{x.dtype}{list(x.shape)}" for x in arrays)
        raise GraphgenError(f"{who}({given}): {error}{user_line()}") from error


def misfit(
    node: tuple[str, str], arrays: Sequence[Any], attributes: Sequence[ir.Attr], error: Exception
) -> GraphgenError:
    """The error for operands that NumPy cannot compute with: the same as in a graph, if it has one.

    `node` is the domain and the name of the operator.
    """
    values: list[ir.Value | None] = []
    for x in arrays:
        if x is None:
            values.append(None)
            continue
        value = ir.Value(const_value=ir.tensor(x), shape=ir.Shape(x.shape))
        value.type = ir.TensorType(ir.DataType.from_numpy(x.dtype))
        values.append(value)
    context = new_context(declared=True)
    schema = schema_of(*node, context.get_opset_version(node[0]))
    count = 1 if schema is None else schema.min_output
    try:
        infer(ir.Node(*node, values, attributes, num_outputs=count), context)
    except GraphgenError as same:
        return same
    given = ", ".join(map(describe, values))
    return GraphgenError(f"{node[1]}({given}): {error}{user_line()}")


def expect_present(who: str, schema: onnx.defs.OpSchema | None, inputs: Sequence[Any]) -> None:
    """Raise GraphgenError if None is given for an input that is not optional."""
    for i, x in enumerate(inputs if schema is not None else ()):
        formal = formal_input(schema, i) if x is None else None
        if formal is not None and formal.option != _Option.Optional:
            raise GraphgenError(f"{who}: {formal.name} is None; give an operand{user_line()}")


def _repair(node: ir.Node, context: ShapeInferenceContext) -> None:
    """Correct what the library infers too boldly or leaves unfinished."""
    broadcast = MENDS.get(Trait.BROADCASTS, ()) if has(node, Trait.BROADCASTS) else ()
    for mend in (*broadcast, *(MENDS.get(node.op_type, ()) if node.domain in _STANDARD else ())):
        mend(node, context)
    for value in node.outputs:
        _mark_elements(node, value, context)
        value.shape = without_doubt(readable(value.shape), context)
        if any(not isinstance(d, int) and _ELEMENT.search(str(d)) for d in value.shape or ()):
            shape = value.shape or ()
            value.shape = ir.Shape([None if _ELEMENT.search(str(d)) else d for d in shape])
        context.name_anonymous_dims(value)
    _repair_types(node, context)


def _mark_elements(node: ir.Node, value: ir.Value, context: ShapeInferenceContext) -> None:
    """Keep sizes and other elements of an integer tensor apart in what is known about a result.

    The library gives an unknown element a new symbol, as for a size; but an element may be -1 or 0,
    which mean something else to a Reshape. It also keeps the elements of tensors that are not
    lists, which other rules read as if they were.
    """
    known = context._symbolic_values.get(value)
    if known is None or has(node, Trait.CONSTANT):
        return
    if value.shape is None or len(value.shape) > 1 or math.prod(value.shape) != len(known):
        forget(value, context)
        return
    old = {*context.joined} if isinstance(context, FileSizes) else set[str]()
    for x in node.inputs:
        if x is not None:
            old.update(map(str, [*(context.get_symbolic_value(x) or ()), *(x.shape or ())]))
    for i, element in enumerate(known):
        name = str(element)
        if name.lstrip("-").isdigit():
            known[i] = int(name)  # n * 0, say
        if context.is_generated_symbol(name) and name not in old:
            known[i] = ir.SymbolicDim(f"{ELEMENT}{name.removeprefix('_d')}")


def forget(value: ir.Value, context: ShapeInferenceContext) -> None:
    """Treat the content of `value` as unknown."""
    context._symbolic_values.pop(value, None)
    value.const_value = None


def _repair_types(node: ir.Node, context: ShapeInferenceContext) -> None:
    """If the library gave up with the shape, the schema still says which input's dtype it is."""
    untyped = any(value.type is None for value in node.outputs)
    version = context.get_opset_version(node.domain)
    schema = schema_of(node.domain, node.op_type, version) if untyped else None
    if schema is None:
        return
    for value, formal in zip(node.outputs, schema.outputs, strict=False):
        for i, x in enumerate(node.inputs if value.type is None else ()):
            if x is not None and formal_input(schema, i).type_str == formal.type_str:
                value.type = value.type or x.type
