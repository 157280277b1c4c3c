"""Modules, parameters named by their path, and `build`, which turns a module into a model."""

import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
import onnx_ir as ir

from graphgen.arguments import checked, fitting
from graphgen.display import on_screen
from graphgen.edit import to_model
from graphgen.errors import GraphgenError, check_seed, user_line
from graphgen.forms import simplified
from graphgen.graph import DECLARED, NAMES_OF
from graphgen.infer import describe, new_context
from graphgen.operands import Array
from graphgen.record import Tape, current_tape, recording
from graphgen.value import Deferred, Tensor, Value, sizes_of

Initializer = Callable[[np.random.Generator, tuple[int, ...]], Array]


def normal(std: float) -> Initializer:
    """Gaussian weights of mean 0."""
    return partial(_normal, np.float32(std))  # unlike a lambda, modules with it can be pickled


def _normal(std: np.float32, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.standard_normal(shape, np.float32) * std


def zeros(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Zeros, for biases."""
    return np.zeros(shape, np.float32)


def ones(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Ones, for gains."""
    return np.ones(shape, np.float32)


class Parameter(Deferred):
    """A weight. In a build it is an initializer named by its path; elsewhere it is its array."""

    def __init__(self, shape: tuple[int, ...], *, initialize: Initializer):
        given: Any = shape
        sizes = given if isinstance(given, (tuple, list)) else (-1,)
        if not callable(initialize) or not all(hasattr(n, "__index__") and n >= 0 for n in sizes):
            raise GraphgenError(
                f"Parameter({given!r:.60}, initialize={initialize!r:.60}): give a tuple of sizes, "
                "and a function of a random generator and the sizes, such as nn.module.ones"
                f"{user_line()}"
            )
        self.shape, self.initialize = tuple(shape), initialize
        self.array: Any = None

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield f"Parameter({self.dtype}{[*self.shape]}{', no value yet' * (self.array is None)})"

    @property
    def dtype(self) -> Any:
        """The numpy dtype."""
        if self.array is None:
            return np.dtype(np.float32)
        dtype = self.array.dtype  # a lazy tensor knows it without being read
        return dtype.numpy() if isinstance(dtype, ir.DataType) else dtype

    def resolve(self, tape: Tape | None) -> ir.Value | Array:
        """The initializer of the open build, else the array."""
        if tape is not None and id(self) not in tape.names:
            raise GraphgenError(
                f"a parameter of shape {self.shape} is not in the module that is built: pass its "
                "module itself to build, or make it an attribute of the module that you "
                f"pass{user_line()}"
            )
        if self.array is None:
            raise GraphgenError(
                f"a parameter of shape {self.shape} has no value yet: call "
                "nn.initialize(module, seed=0) before calling the module on arrays, and hold "
                "parameters and modules as attributes, lists or dictionaries of the "
                f"module{user_line()}"
            )
        if tape is None:
            return np.asarray(self.array)
        name = tape.names[id(self)]
        if name not in tape.initializers:
            plain = isinstance(self.array, np.ndarray)  # ir.tensor takes nine times as long
            tensor = (ir.Tensor if plain else ir.tensor)(self.array, name=name)
            value = ir.Value(name=name, const_value=tensor, shape=ir.Shape(self.shape))
            value.type = ir.TensorType(tensor.dtype)
            tape.initializers[name] = value
        return tape.initializers[name]


class Module:
    """A block: its attributes are parameters or modules, and `__call__` uses them.

    Called on arrays it computes, called inside `build` it records; nodes carry the module's path.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            setattr(cls, "__init__", fitting(cls.__dict__["__init__"]))  # noqa: B010
        if "__call__" in cls.__dict__:
            setattr(cls, "__call__", fitting(_at_path(cls.__dict__["__call__"])))  # noqa: B010

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computes, on arrays or values; each class says it with its own types."""
        raise GraphgenError(
            f"{in_line(self)} has no __call__: define def __call__(self, x: gg.Tensor) -> gg.Tensor"
            f"{user_line()}"
        )

    @on_screen
    def __repr__(self) -> Iterator[str]:
        from graphgen.nn.tree import tree  # it stands above this file

        return tree(self)

    def expect_last(
        self, x: Tensor, features: int, *, rank: int | None = None, name: str = "x"
    ) -> None:
        """Raise unless the last dimension of x is `features`, and the number of them `rank`."""
        sizes = sizes_of(x)
        if not sizes or sizes[-1] != features:
            problem = f"its last dimension must be {features}"
        elif rank is not None and len(sizes) != rank:
            problem = f"it must have {rank} dimensions; add or join some with ops.reshape"
        else:
            return
        raise GraphgenError(f"{in_line(self)}: {name} is {describe(x)}; {problem}{user_line()}")


def in_line(given: object) -> str:
    """A module, or a function or method of one, in a line for errors: `LayerNorm(features=512)`."""
    owner = getattr(given, "__self__", None)
    if isinstance(owner, Module):
        return f"{in_line(owner)}.{getattr(given, '__name__', '__call__')}"
    if not isinstance(given, Module):
        return str(getattr(given, "__qualname__", given))
    parameters = inspect.signature(type(given).__init__).parameters.values()
    known = [(p, getattr(given, p.name, None)) for p in parameters]
    parts = [
        f"{p.name}={value!r}"
        for p, value in known
        if isinstance(value, (int, float, str)) and value != p.default
    ]
    return f"{type(given).__name__}({', '.join(parts)})"


def _at_path(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def wrapper(self: Module, *args: Any, **kwargs: Any) -> Any:
        tape = current_tape()
        path = tape.names.get(id(self)) if tape is not None else None
        if tape is None or not path:
            return call(self, *args, **kwargs)
        outer, tape.path = tape.path, path
        try:
            return call(self, *args, **kwargs)
        finally:
            tape.path = outer

    return wrapper


def members(
    module: Module | Parameter, prefix: str = ""
) -> Iterator[tuple[str, Module | Parameter]]:
    """Every module and parameter below `module` with its path, in the order of declaration."""
    pending: list[tuple[str, Module | Parameter]] = [(prefix, module)]
    seen: set[int] = set()
    while pending:
        path, item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        yield path, item
        if isinstance(item, Module):
            pending += [*children(item, path)][::-1]


def children(
    item: Any, path: str = "", within: tuple[int, ...] = ()
) -> Iterator[tuple[str, Module | Parameter]]:
    """The modules and parameters of a module with their paths, also in its lists and dictionaries.

    One that is held twice comes twice. `within` are the ids of the lists that hold `item`: one of
    them may hold itself.
    """
    found: Mapping[Any, Any]
    if isinstance(item, Module):
        found = vars(item)
    elif isinstance(item, dict):
        found = item
    else:
        found = dict(enumerate(item))
    for key, value in found.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, (Module, Parameter)):
            yield name, value
        elif isinstance(value, (dict, list, tuple)) and id(value) not in within:
            yield from children(value, name, (*within, id(value)))


def count_parameters(module: Module) -> int:
    """The number of elements of all parameters, each counted once."""
    return sum(math.prod(p.shape) for _, p in members(module) if isinstance(p, Parameter))


@checked
def initialize(
    module: Module, *, seed: int = 0, weights: Mapping[str, Any] | None = None
) -> dict[str, Parameter]:
    """Give every parameter its value, from (seed, path) or from `weights`; return them by path.

    Raises a GraphgenError that names all weights that are missing, left over or of another shape,
    and for two parameters of one path.
    """
    check_seed("initialize", seed)
    found = dict[str, Parameter]()
    for path, item in members(module):
        if path in found:
            raise GraphgenError(
                f"{in_line(module)} has two parameters of the path {path}: rename one of the "
                f"attributes or keys in it{user_line()}"
            )
        if isinstance(item, Parameter):
            found[path] = item
    if weights is not None:
        weights = {path: _to_array(path, given) for path, given in weights.items()}
        missing, extra = sorted(set(found) - set(weights)), sorted(set(weights) - set(found))
        wrong = [
            f"{path} is {weights[path].shape}, must be {p.shape}"
            for path, p in found.items()
            if path in weights and tuple(weights[path].shape) != p.shape
        ]
        problems = [
            *([f"missing: {', '.join(missing)}"] if missing else []),
            *([f"not in the module: {', '.join(extra)}"] if extra else []),
            *wrong,
        ]
        if problems:
            raise GraphgenError(
                f"weights do not fit {in_line(module)}: {'; '.join(problems)}{user_line()}"
            )
    for path, parameter in found.items():
        if weights is not None:
            parameter.array = weights[path]
        else:
            rng = np.random.default_rng([seed, crc32(path.encode())])
            made = _to_array(path, parameter.initialize(rng, parameter.shape))
            if tuple(made.shape) != parameter.shape:
                raise GraphgenError(
                    f"initialize: {path} is {parameter.shape}, and its initializer made "
                    f"{made.shape}: give a function that makes that shape{user_line()}"
                )
            parameter.array = made
    return found


def _to_array(path: str, given: Any) -> Any:
    """A weight as an array, or the tensor itself; lists of numbers become float32."""
    if isinstance(given, ir.TensorProtocol):
        return given
    try:
        return np.asarray(given, None if hasattr(given, "dtype") else np.float32)
    except (TypeError, ValueError) as error:
        raise GraphgenError(f"weights: {path} is not an array: {error}{user_line()}") from error


class TensorSpec:
    """A dtype and sizes of an input: `float32["batch", "seq", 256]`."""

    def __init__(self, dtype: ir.DataType, shape: tuple[int | str, ...]):
        self.dtype, self.shape = dtype, shape

    @on_screen
    def __repr__(self) -> Iterator[str]:
        sizes = ", ".join(json.dumps(size) for size in self.shape)
        yield f"{DType(self.dtype)!r}[{sizes or '()'}]"


class DType:
    """A dtype that becomes the specification of an input when you index it with sizes."""

    def __init__(self, dtype: ir.DataType):
        self.dtype = dtype.numpy()
        """NumPy's, so that NumPy takes it for one."""

    @on_screen
    def __repr__(self) -> Iterator[str]:
        name = self.dtype.name
        yield f"graphgen.{'bool_' if name == 'bool' else name}"

    def __getitem__(self, shape: int | str | tuple[int | str, ...]) -> TensorSpec:
        sizes = shape if isinstance(shape, tuple) else (shape,)
        for size in sizes:
            number = isinstance(size, int) and not isinstance(size, bool) and size >= 0
            if not number and not (isinstance(size, str) and simplified(size) is not None):
                raise GraphgenError(
                    f"{self.dtype.name}[...]: {size!r} is not a size; use a number, a name "
                    f'such as "batch", or an expression of names{user_line()}'
                )
            if isinstance(size, str) and re.search(r"\w-[^\W\d]", size):
                name, difference = size.replace("-", "_"), size.replace("-", " - ")
                raise GraphgenError(
                    f'{self.dtype.name}[...]: {size!r} means a difference; write "{name}" or '
                    f'"{difference}"{user_line()}'
                )
        return TensorSpec(ir.DataType.from_numpy(self.dtype), sizes)


float32, float16 = DType(ir.DataType.FLOAT), DType(ir.DataType.FLOAT16)
bfloat16, float64 = DType(ir.DataType.BFLOAT16), DType(ir.DataType.DOUBLE)
int64, int32, bool_ = DType(ir.DataType.INT64), DType(ir.DataType.INT32), DType(ir.DataType.BOOL)


Outputs: TypeAlias = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]
"""What a module or function may return for `build`."""


@checked
def build(
    module: Callable[..., Outputs],
    /,
    *,
    seed: int = 0,
    weights: Mapping[str, Any] | None = None,
    primitives: bool = False,
    training: bool = False,
    **inputs: TensorSpec,
) -> ir.Model:
    """Record one call of `module` as a model.

    Args:
        module: A module, a method of one (a part of it, with the same weights), or a function of
            the inputs.
        seed: Seeds each initial weight together with its path, so adding one changes no other.
        weights: The weights by path, instead of the seed; arrays are shared, not copied.
        primitives: Record the bodies of composite operators instead of the operators, except for
            dropout.
        training: Keep dropout, with `seed` and `step` as further inputs of the model.
        inputs: A dtype with sizes for each argument: `x=gg.float32["batch", "seq", 256]`. Different
            names are different sizes, so they do not broadcast: give equal sizes one name, or an
            expression of names such as "past + seq".

    Outputs are called `output`, `output_0` ... for a tuple, or by the keys of a dictionary.
    Raises GraphgenError if types or shapes do not fit, with the line that calls the operator.
    """
    for name, spec in inputs.items():
        if not isinstance(spec, TensorSpec):
            raise GraphgenError(
                f'build: {name} is {spec!r}; give a dtype with sizes, such as float32["batch", 256]'
                f"{user_line()}"
            )
    context = new_context(declared=True)
    with recording(primitives=primitives, training=training, context=context) as tape:
        root, found = getattr(module, "__self__", module), dict[str, Parameter]()
        if isinstance(root, Module):
            found = initialize(root, seed=seed, weights=weights)
            tape.names = {id(item): path for path, item in members(root)}
        values: dict[str, Any] = {
            name: tape.input(name, s.dtype, s.shape) for name, s in inputs.items()
        }
        try:
            inspect.signature(module).bind(**values)
        except (TypeError, ValueError) as e:  # a ValueError for what shows no signature
            raise GraphgenError(
                f"build: {in_line(module)} called with {', '.join(values)}: {e}{user_line()}"
            ) from e
        result: Any = module(**values)
        if isinstance(result, Value):
            outputs = {"output": result}
        elif isinstance(result, tuple):
            outputs = {f"output_{i}": value for i, value in enumerate(result)}
        elif isinstance(result, Mapping):
            outputs = dict(result)
        else:
            raise GraphgenError(
                f"build: {in_line(module)} returned {type(result).__name__}, not values; return a "
                f"value, a tuple or a dictionary of them{user_line()}"
            )
        for name, value in outputs.items():
            if not isinstance(name, str) or not isinstance(value, Value):
                raise GraphgenError(
                    f"build: {in_line(module)} returned {name!r}: {value!r}; an output is a value "
                    f"of the graph, and its name a string{user_line()}"
                )
        model = to_model(tape, outputs)
        model.metadata_props[DECLARED] = json.dumps(dict(sorted(tape.declared.items())))
        model.graph.meta[NAMES_OF] = partial(_names_of, found)
    return model


def _names_of(parameters: Mapping[str, Parameter], part: object) -> list[str] | None:
    """The names of the parameters of a module or parameter; None for anything else."""
    if not isinstance(part, (Module, Parameter)):
        return None
    own = {id(item) for _, item in members(part)}
    return [name for name, parameter in parameters.items() if id(parameter) in own] or None
