"""Random programs of the DSL, as Python source that hypothesis shrinks.

A program is drawn line by line, and each line runs at once on arrays and on values: what they
refuse, and the dtypes and sizes that they say, are compared there, so that a difference names one
line. What is drawn is defined everywhere: whole numbers are not divided by 0, floats that do not
fit are not cast to integers, and results are finite. Where floats may be rounded, nothing that
jumps is applied to them (floor, comparisons, casts to integers).
"""

import contextvars
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from hypothesis import strategies as st

import graphgen as gg
from graphgen import nn, ops
from graphgen.errors import GraphgenError
from graphgen.infer import new_context
from graphgen.nn.module import DType, members
from graphgen.record import recording
from graphgen.value import Size, Value

FILE = "program.py"
LARGEST = 2000  # exact in float16, if whole
DTYPES = ("float32", "float32", "float32", "int64", "int64", "float16", "int32", "uint8", "bool")

ALLOWED = {
    "whose dtype arrays would promote": "x ** y of two dtypes",
    "is a fraction on arrays": "x / y of integers",
    "a float64 of numpy makes an array double": "next to float32",
    "which holds no": "a number that takes the dtype of a tensor, which has no such",
    "it must be one of": "a dtype that the operator of ONNX does not take",
    "but the other operands are": "operands of different dtypes",
    r"(True|bool\[\]) is not an index": "NumPy's x[True] is a new axis",
    "which may not hold it": "a size beside a narrow dtype",
    "which ends at": "a number that the dtype does not hold",
    "numpy.* has no operator": "a function of numpy that ONNX lacks",
    "the exponent of integers": "known only at run time, or negative",
    "dimensions .* differ": "two names of sizes that are one number here",
    "is a whole number; calculate with": "a fraction of a size",
}
"""What a graph may refuse though arrays do not: the message, and when."""


class Program:
    """Lines that are right on arrays and in the graph, and the inputs to run them on."""

    def __init__(self, choices: bytes, told: Counter[str]):
        self._choices, self.told = iter(choices), told
        self.rng = np.random.default_rng(self.number(0, 255))
        self.sizes: dict[str, int] = {}
        self.specs: dict[str, tuple[str, tuple[Any, ...]]] = {}
        self.feeds: dict[str, Any] = {}
        self.lines: list[str] = []
        self.parts: list[str] = []
        self.arrays: dict[str, Any] = {"np": np, "ops": ops, "gg": gg, "self": nn.Module()}
        self.values: dict[str, Any] = dict(self.arrays)
        self.inexact: set[str] = set()
        self.names: list[str] = []  # of tensors
        self.counts: list[str] = []  # of sizes
        self.fresh = 0

    # Choices: the first option is the simplest

    def number(self, low: int, high: int) -> int:
        return low + next(self._choices, 0) % (high - low + 1)

    def one(self, *options: Any) -> Any:
        return options[self.number(0, len(options) - 1)]

    def chance(self, one_in: int) -> bool:
        return self.number(0, one_in - 1) == one_in - 1

    # What there is

    def array(self, name: str) -> Any:
        return np.asarray(self.arrays[name])

    def tensor(self, kinds: str = "fiub", *, exact: bool = False, rank: int = 0) -> str | None:
        """A name of a tensor of these kinds of dtype, rather a late one."""
        found = [
            name
            for name in self.names
            if self.array(name).dtype.kind in kinds
            and not (exact and name in self.inexact)
            and self.array(name).ndim >= rank
        ]
        return (
            found[-1 - min(self.number(0, 2 * len(found)) // 2, len(found) - 1)] if found else None
        )

    def alike(self, name: str, *, exact: bool = False) -> str:
        """A tensor of the same dtype that broadcasts, if there is one."""
        x = self.array(name)
        found = [name]
        for other in self.names:
            y = self.array(other)
            if y.dtype == x.dtype and not (exact and other in self.inexact):
                try:
                    np.broadcast_shapes(x.shape, y.shape)
                except ValueError:
                    continue
                found.append(other)
        return str(self.one(*found))

    def size(self) -> str:
        """A size in source: of a tensor, a name of one, or arithmetic."""
        if self.counts and self.chance(2):
            return str(self.one(*self.counts))
        name = self.tensor(rank=1)
        if name is None:
            return "2"
        axis = self.number(0, self.array(name).ndim - 1)
        axis -= self.one(0, self.array(name).ndim)
        plain = self.one(f"{name}.shape[{axis}]", f"ops.dim({name}, {axis})")
        return str(
            self.one(
                plain,
                plain,
                f"({plain} - 1)",
                f"{plain} // 2",
                f"({plain} * 2 + 1)",
                f"(3 - {plain})",
                f"-{plain}",
                f"({plain} + 5) % 3",
                f"({plain} - 7) // 2",
                f"({plain} - 7) % 3",
            )
        )

    def literal(self, dtype: Any, *, safe: bool = False) -> str:
        """A number or a small array, mostly one that the dtype takes; not 0 if `safe`."""
        whole = self.one(2, 1, -1, 3, -3, 5, 0)
        whole = whole or 4 if safe else whole
        fraction = self.one("0.5", "2.0", "-1.5", "0.25", "3.0", "-2.0")
        if dtype.kind == "b":
            usual = self.one("True", "False", "np.True_", "np.array([True])")
        elif dtype.kind == "f":
            usual = self.one(fraction, str(whole), f"np.{dtype}({fraction})")
        else:
            whole = abs(whole) if dtype.kind == "u" else whole
            usual = self.one(str(whole), str(whole), f"np.{dtype}({whole})")
        if self.chance(8):
            usual = self.one(
                fraction, "True", "np.float64(0.5)", "np.float32(2)", "np.int64(3)", "300"
            )
        if usual != "300" and self.chance(8):
            usual = f"np.array([{usual}], '{dtype}')"
        return str(usual)

    def operand(self, name: str, *, exact: bool = False, safe: bool = False) -> str:
        """What stands on the other side of an operator."""
        x = self.array(name)
        kind = self.number(0, 7)
        if kind == 3 and not safe:
            return self.size()
        if kind in (4, 5, 6) or safe:
            return self.literal(x.dtype, safe=safe)
        if kind == 7:
            return self.tensor(exact=exact) or "2"
        return self.alike(name, exact=exact)

    # Lines

    def attempt(self, code: str, *, rounded: bool = False, part: str = "") -> bool:
        """Add a line if both take it. Raises AssertionError where only one of them does."""
        if part:
            self.add_part(part)
        name = f"v{self.fresh}"
        try:
            with np.errstate(all="ignore"):
                array, problem = eval(compile(code, FILE, "eval"), self.arrays), None
        except Exception as error:  # numpy's are of several classes
            array, problem = None, error
        try:
            value = self.recorded.run(eval, compile(code, FILE, "eval"), self.values)
        except GraphgenError as error:
            assert re.search(r"\(program.py:1\)$", str(error)), f"{code}: no line: {error}"
            reason = next((why for text, why in ALLOWED.items() if re.search(text, str(error))), "")
            assert problem or reason, f"{self}\n{code}: only the graph refuses: {error}"
            self.told[f"refused: {reason}" if problem is None else "refused by both"] += 1
            return False
        except Exception as error:
            raise AssertionError(f"{self}\n{code}: {type(error).__name__}: {error}") from error
        if problem is not None:
            used = [self.values[n] for n in re.findall(r"\b[vxs]\d+\b", code)]
            late = any(isinstance(d, Size) for v in used for d in getattr(v, "shape", None) or [v])
            late |= isinstance(problem, IndexError)  # elements that are known only at run time
            assert late, f"{self}\n{code}: only arrays refuse: {problem!r}; the graph has {value!r}"
            self.told["refused at run time"] += 1
            return False
        several = isinstance(array, tuple)
        pairs = list(zip(array, value, strict=True)) if several else [(array, value)]
        for i, (one, other) in enumerate(pairs):
            self.compare(f"{code}: {'result ' + str(i) if several else 'the result'}", one, other)
        if not all(self.defined(one) for one, _ in pairs):
            return False
        used = set(re.findall(r"\b[vx]\d+\b", code))
        names = [f"{name}_{i}" for i in range(len(pairs))] if several else [name]
        if several:
            names = [f"v{self.fresh + i}" for i in range(len(pairs))]
        for each, (one, other) in zip(names, pairs, strict=True):
            self.arrays[each], self.values[each] = one, other
            if isinstance(other, Value):
                self.names.append(each)
                grid = one * 8
                exact = not rounded and not used & self.inexact
                if one.dtype.kind == "f" and not (exact and np.all(grid == np.rint(grid))):
                    self.inexact.add(each)
            elif isinstance(other, Size) or type(one) is int:
                self.counts.append(each)
        self.fresh += len(pairs)
        self.lines.append(f"{', '.join(names)}{',' * (several and len(names) == 1)} = {code}")
        return True

    def add_part(self, part: str) -> None:
        """A module as an attribute of the program."""
        exec(part, {"self": self.arrays["self"], "nn": nn})
        nn.initialize(self.arrays["self"], seed=0)
        self.tape.names = {id(item): path for path, item in members(self.arrays["self"])}
        self.parts.append(part)

    def compare(self, what: str, array: Any, value: Any) -> None:
        """What is known of a result before the run."""
        if isinstance(value, Size):
            assert isinstance(array, (int, np.integer)), f"{self}\n{what} is {array!r}, a size"
            return
        if not isinstance(value, Value):
            assert np.array_equal(array, value), f"{self}\n{what} is {array!r}, {value!r}"
            return
        array = np.asarray(array)
        told = f"{self}\n{what} is {array.dtype}{list(array.shape)} on arrays, in the graph {value}"
        assert value.dtype == array.dtype and value.ndim == array.ndim, told
        for given, wanted in zip(value.shape, array.shape, strict=True):
            known = self.sizes.get(str(given), given)
            assert isinstance(known, Size) or known == wanted, told

    def defined(self, x: Any) -> bool:
        """Whether a result is finite and small enough for every dtype."""
        x = np.asarray(x)
        if x.dtype.kind == "b":
            return True
        return bool(np.isfinite(x).all() and np.abs(x.astype("f8")).max(initial=0) <= LARGEST)

    # The whole

    def input(self, shape: tuple[Any, ...], dtype: str) -> None:
        name = f"x{len(self.specs)}"
        known = [self.sizes.get(d, d) for d in shape]
        low, high = (0, 2) if dtype == "bool" else (0, 9) if dtype == "uint8" else (-5, 6)
        array = self.rng.integers(low, high, known).astype(dtype)
        array = array / 2 if np.dtype(dtype).kind == "f" and self.chance(2) else array
        self.specs[name] = dtype, shape
        self.arrays[name] = self.feeds[name] = np.asarray(array, dtype)
        self.names.append(name)

    @property
    def source(self) -> str:
        """Python source of the program."""
        results = ", ".join(f'"{name}": {name}' for name in self.results)
        body = [*self.lines, f"return {{{results}}}"]
        made = "\n".join(f"        {line}" for line in self.parts or ["pass"])
        return (
            f"class Drawn(nn.Module):\n    def __init__(self):\n{made}\n\n"
            f"    def __call__(self, {', '.join(self.specs)}):\n"
            + "\n".join(f"        {line}" for line in body)
        )

    @property
    def results(self) -> list[str]:
        """What it returns: one name of each value that is not an input."""
        names = {self.values[n].value: n for n in self.names if n not in self.specs}
        return [n for value, n in names.items() if value.producer() is not None]

    def __str__(self) -> str:
        given = [
            f"{name} = np.array({self.feeds[name].tolist()}, '{dtype}').reshape("
            f"{self.feeds[name].shape})  # gg.{dtype}[{', '.join(map(repr, shape))}]"
            for name, (dtype, shape) in self.specs.items()
        ]
        return "\n" + "\n".join([*given, self.source])

    __repr__ = __str__

    def built(self) -> tuple[ir.Model, dict[str, Any]]:
        """The model, and what the same source computes on arrays."""
        space = {"nn": nn, "np": np, "ops": ops, "gg": gg}
        exec(compile(self.source, FILE, "exec"), space)
        module = space["Drawn"]()  # type: ignore[operator]
        specs = {
            name: DType(ir.DataType.from_numpy(np.dtype(dtype)))[shape]
            for name, (dtype, shape) in self.specs.items()
        }
        model = gg.build(module, **specs)
        with np.errstate(all="ignore"):
            return model, module(**self.feeds)


def programs(told: Counter[str]) -> st.SearchStrategy[Program]:
    """Programs of a few lines; all choices are drawn at once, as in random_graphs."""
    return st.binary(min_size=240, max_size=240).map(lambda choices: drawn(choices, told))


def drawn(choices: bytes, told: Counter[str]) -> Program:
    """The program of these choices."""
    p = Program(choices, told)
    base: list[Any] = []
    for symbol in ("b", "n", "d")[: p.number(1, 3)]:
        size = p.one(2, 3, 4, 1, 2, 3, 0) if symbol != "d" else p.one(4, 2)
        named = p.chance(2) and symbol != "d"
        if named:
            p.sizes[symbol] = size
        base.append(symbol if named else size)
    for _ in range(p.number(1, 4)):
        shape = [1 if p.chance(6) else d for d in base[p.number(0, len(base)) % len(base) :]]
        p.input(tuple(shape if not p.chance(12) else []), p.one(*DTYPES))
    p.recorded = contextvars.copy_context()
    for _ in in_recording(p):
        for _ in range(p.number(1, 9)):
            p.one(*LINES)(p)
    return p


def in_recording(p: Program) -> Iterator[None]:
    """Record what `p.recorded` runs; arrays are computed outside."""
    scope = recording(context=new_context(declared=True))
    tape = p.recorded.run(scope.__enter__)
    p.tape = tape
    for name, (dtype, shape) in p.specs.items():
        p.values[name] = tape.input(name, ir.DataType.from_numpy(np.dtype(dtype)), list(shape))
    try:
        yield
    finally:
        p.recorded.run(scope.__exit__, None, None, None)


# Lines


def arithmetic(p: Program) -> None:
    """x + y and the like, arrays, numbers and sizes on either side."""
    symbol = p.one("+", "-", "*", "/", "//", "%", "**")
    jumps = symbol in ("//", "%")
    name = p.tensor(exact=jumps) or "x0"
    other = p.operand(name, exact=jumps, safe=jumps)
    pair = [name, other]
    if symbol == "**":
        pair = [name, p.one("2", "3", "1", "0", "2.0", "0.5", "-1", other)]
    elif not jumps and p.chance(2):
        pair.reverse()
    p.attempt(f"{pair[0]} {symbol} {pair[1]}", rounded=symbol in ("/", "**"))


def comparison(p: Program) -> None:
    if name := p.tensor(exact=True):
        pair = [name, p.operand(name, exact=True)]
        if p.chance(2):
            pair.reverse()
        p.attempt(f"{pair[0]} {p.one('==', '!=', '<', '<=', '>', '>=')} {pair[1]}")


def bits(p: Program) -> None:
    if name := p.tensor("biu"):
        if p.chance(4):
            p.attempt(f"~{name}")
            return
        pair = [name, p.operand(name, exact=True)]
        if p.chance(2):
            pair.reverse()
        p.attempt(f"{pair[0]} {p.one('&', '|', '^')} {pair[1]}")


SMOOTH = ("exp", "tanh", "sin", "cos", "sqrt", "log")
NUMPY_ONLY = ("np.log1p", "np.arctan2", "np.cbrt")


def unary(p: Program) -> None:
    kind = p.one("neg", "abs", "numpy", "ops", "jump", "other")
    if kind in ("neg", "abs"):
        if name := p.tensor():
            p.attempt(p.one(f"-{name}", f"ops.neg({name})") if kind == "neg" else f"abs({name})")
    elif kind == "numpy" and (name := p.tensor("fffi")):
        p.attempt(f"{p.one('np', 'ops')}.{p.one(*SMOOTH)}({name})", rounded=True)
    elif kind == "ops" and (name := p.tensor("f")):
        called = p.one("sigmoid", "erf", "relu", "gelu", "silu", "elu", "softplus", "leaky_relu")
        p.attempt(f"ops.{called}({name})", rounded=True)
    elif kind == "jump" and (name := p.tensor("f", exact=True)):
        p.attempt(
            p.one(
                f"np.floor({name})",
                f"np.ceil({name})",
                f"np.rint({name})",
                f"np.sign({name})",
                f"ops.round({name})",
                f"np.isnan({name})",
            )
        )
    elif name := p.tensor("f"):
        p.attempt(f"{p.one('np.square', 'np.positive', *NUMPY_ONLY[::2])}({name})", rounded=True)


def cast(p: Program) -> None:
    to = p.one("float32", "int64", "float16", "int32", "uint8", "bool")
    if name := p.tensor(exact=to in ("int64", "int32", "uint8", "bool")):
        if to == "uint8" and p.array(name).min(initial=0) < 0:
            return  # undefined
        spelled = p.one(
            f"'{to}'",
            f"np.dtype('{to}')",
            *([] if to == "uint8" else [f"gg.{to}".replace("bool", "bool_")]),
        )
        code = p.one(f"{name}.astype({spelled})", f"ops.cast({name}, to={spelled})")
        p.attempt(code, rounded=to == "float16" and name in p.inexact)


def sizes(p: Program) -> None:
    p.attempt(p.size())


def index(p: Program) -> None:
    """Every kind of key that numpy has."""
    if not (name := p.tensor(rank=1) or p.tensor()):
        return
    shape, keys, used = p.array(name).shape, list[str](), False
    if p.chance(8) and name not in p.inexact and p.array(name).dtype.kind != "b":
        p.attempt(f"{name}[{name} > {p.one('0', '1', '-1')}]")
        return
    axis = 0
    while axis < len(shape) and (not keys or not p.chance(3)):
        n = shape[axis]
        kind = p.one(
            "slice", "int", "slice", "none", "dots", "ints", "bools", "value", "size", "odd"
        )
        if kind == "slice":
            bound = [p.one("", str(p.number(-n - 1, n + 1))) for _ in range(2)]
            step = p.one("", "", ":-1", ":2", ":-2", ":1")
            keys.append(":".join(bound) + step)
        elif kind == "int":
            plain = p.number(-n, max(n - 1, 0))
            keys.append(p.one(str(plain), f"np.int64({plain})"))
        elif kind == "none":
            keys.append("None")
            axis -= 1
            if len(keys) > 5:
                break
        elif kind == "dots" and not used:
            used = True
            keys.append("...")
            axis = max(axis, len(shape) - p.number(1, 2)) - 1
        elif kind == "ints" and n:
            listed = [p.number(-n, n - 1) for _ in range(p.number(1, 3))]
            shaped = p.one("", "", "[:, None]")
            keys.append(p.one(str(listed), f"np.array({listed}){shaped}"))
        elif kind == "bools":
            listed = [p.chance(2) for _ in range(n)]
            keys.append(f"np.array({listed}, bool)")
        elif kind == "value" and (i := p.tensor("iub")):
            keys.append(p.one(i, f"{i} % {n}") if n and p.array(i).dtype.kind != "b" else i)
        elif kind == "size":
            size = p.size()
            keys.append(p.one(f":{size}", f"{size}:", size, f"{size}::-1"))
        elif kind == "odd" and p.chance(3):
            keys.append(p.one("1.0", "'a'", str(n), str(-n - 1), "True", "..., ...", "::0"))
        axis += 1
    if keys:
        p.attempt(f"{name}[{', '.join(keys)}]")


def reduction(p: Program) -> None:
    called = p.one("sum", "mean", "max", "min", "prod", "l1", "l2", "sum_square", "log_sum_exp")
    name = p.tensor("f" if called in ("mean", "l2", "log_sum_exp") else "fffi", rank=1)
    if name:
        n = p.array(name).ndim
        axis = p.one(
            "",
            f", {p.number(-n, n - 1)}",
            f", [{p.number(-n, n - 1)}]",
            ", [0, -1]" if n > 1 else "",
        )
        keep = p.one("", ", keepdims=0", ", keepdims=False")
        empty = not p.array(name).size
        if empty and called != "sum":
            return  # of nothing: undefined
        exact = called in ("sum", "max", "min", "l1", "sum_square")
        p.attempt(f"ops.reduce_{called}({name}{axis}{keep})", rounded=not exact)


def position(p: Program) -> None:
    """Where the largest is, running sums, and the k largest."""
    if not (name := p.tensor("fi", exact=True, rank=1)) or not p.array(name).size:
        return
    n = p.array(name).ndim
    axis = p.number(-n, n - 1)
    p.attempt(
        p.one(
            f"ops.argmax({name}, axis={axis})",
            f"ops.cumsum({name}, {axis})",
            f"ops.cumsum({name}, {axis}, reverse=1, exclusive=1)",
            f"ops.top_k({name}, 1, axis={axis})[0]",
        )
    )


def layout(p: Program) -> None:
    if not (name := p.tensor(rank=1)):
        return
    x = p.array(name)
    n = x.ndim
    axis = p.number(-n, n - 1)
    other = p.alike(name)
    sizes_ = [f"{name}.shape[{i}]" for i in range(n)]
    perm = list(np.random.default_rng(p.number(0, 255)).permutation(n).tolist())
    half = f"{sizes_[axis]} // 2"
    p.attempt(
        p.one(
            f"ops.concat([{name}, {other}], axis={axis})",
            f"ops.concat({name}, {name}, axis={axis})",
            f"ops.stack([{name}, {other}], axis={axis})",
            f"ops.transpose({name}, perm={perm})",
            f"ops.reshape({name}, [-1])",
            f"ops.reshape({name}, [{', '.join([*sizes_[:-1], '1', sizes_[-1]])}])",
            f"ops.reshape({name}, [{' * '.join(sizes_)}])",
            f"ops.unsqueeze({name}, [{axis}])",
            f"ops.squeeze({name}, [{axis}])",
            f"ops.expand({name}, [2, {', '.join(sizes_)}])",
            f"ops.split({name}, axis={axis}, num_outputs={p.number(1, 2)})",
            f"ops.split({name}, [{half}, {sizes_[axis]} - {half}], axis={axis}, num_outputs=2)",
        )
    )


def choice(p: Program) -> None:
    if not (name := p.tensor()):
        return
    c, other = p.tensor("b") or "True", p.operand(name)
    low, high = p.literal(p.array(name).dtype), p.literal(p.array(name).dtype)
    p.attempt(
        p.one(
            f"ops.where({c}, {name}, {other})",
            f"ops.where({c}, {other}, {name})",
            f"ops.clip({name}, {low}, {high})",
            f"ops.clip({name}, {low})",
            f"np.maximum({name}, {other})",
            f"np.minimum({other}, {name})",
            f"ops.maximum({name}, {other})",
            f"ops.where({name} == {name}, {name}, {low})"
            if name not in p.inexact
            else name + "[...]",
        )
    )


def lookup(p: Program) -> None:
    name, i = p.tensor(rank=1), p.tensor("i")
    if name and i:
        n = p.array(name).ndim
        axis = p.number(-n, n - 1)
        size = p.one(f"{name}.shape[{axis}]", str(p.array(name).shape[axis] or 1))
        if p.array(name).shape[axis]:
            p.attempt(f"ops.gather({name}, {i} % {size}, axis={axis})")


def product(p: Program) -> None:
    """Matrix products, softmax and norms."""
    if not (name := p.tensor("f", rank=1)) or not p.array(name).size:
        return
    x = p.array(name)
    others = [
        o
        for o in p.names
        if p.array(o).dtype == x.dtype and p.array(o).ndim and p.array(o).shape[-1] == x.shape[-1]
    ]
    other = p.one(*others)
    m = p.array(other).ndim
    turned = f"ops.transpose({other}, perm={[*range(m - 2), m - 1, m - 2]})"
    axis = p.number(-x.ndim, x.ndim - 1)
    p.attempt(
        p.one(
            f"{name} @ {turned}" if m > 1 else f"{name} @ {other}",
            f"{name} @ {other}",
            f"np.matmul({name}, {other})",
            f"ops.softmax({name}, axis={axis})",
            f"ops.log_softmax({name}, axis={axis})",
            f"ops.layer_norm({name})",
            f"ops.rms_norm({name})",
        ),
        rounded=True,
    )


def module(p: Program) -> None:
    """A module of nn."""
    if not (name := p.tensor("f", rank=1)) or not p.array(name).size:
        return
    d, me = p.values[name].shape[-1], f"self.part{len(p.parts)}"
    if not isinstance(d, int):
        return
    made = p.one(
        f"nn.Linear({d}, 3)",
        f"nn.LayerNorm({d})",
        f"nn.RMSNorm({d})",
        f"nn.FeedForward({d}, 5, activation='{p.one('gelu', 'relu', 'silu')}')",
        f"nn.Attention({d}, num_heads={2 if d % 2 == 0 else 1})",
    )
    if "Attention" in made and p.array(name).ndim != 3:
        return
    p.attempt(f"{me}({name})", rounded=True, part=f"{me} = {made}")


LINES = (
    arithmetic,
    index,
    arithmetic,
    index,
    comparison,
    bits,
    unary,
    cast,
    sizes,
    reduction,
    position,
    layout,
    layout,
    choice,
    lookup,
    product,
    module,
)
"""What a line may be."""
