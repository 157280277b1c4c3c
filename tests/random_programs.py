"""Random programs of the DSL, as Python source that hypothesis shrinks.

A program is drawn line by line, and each line runs at once on arrays and on values: what they
refuse, and the dtypes and sizes that they say, are compared there, so that a difference names one
line. What is drawn is defined everywhere: whole numbers are not divided by 0, floats that do not
fit are not cast to integers, and results are small. Where floats may be rounded, nothing that
jumps is applied to them (floor, comparisons, casts to integers).

A few programs are about infinities and NaN instead, which their inputs hold.
"""

import contextvars
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from hypothesis import strategies as st
from random_lines import LINES

import graphgen as gg
from graphgen import nn, ops
from graphgen.errors import GraphgenError
from graphgen.infer import new_context
from graphgen.nn.module import DType, members
from graphgen.record import recording
from graphgen.value import Size, Value

FILE = "program.py"
LARGEST = 2000  # exact in float16, if whole
DTYPES = (
    *("float32", "float32", "float32", "float32", "int64", "int64"),
    *("float16", "int32", "uint8", "bool", "float64"),
)
CHOICES = 300  # for the choices of one program

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
    r"\[bool\[.* is none of them": "beside a mask of nothing, where NumPy does not look",
    r"Reshape\(.*\): 0 elements cannot become": "a 0 copies an axis, which has a name",
    "auto_pad=.* needs sizes known before the run": "dilations beside it, and a size with a name",
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
        self.wild = False  # whether inputs have infinities and NaN

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

    def tensor(
        self,
        kinds: str = "fiub",
        *,
        exact: bool = False,
        rank: int = 0,
        finite: bool = False,
        filled: bool = False,
        single: bool = False,
    ) -> str | None:
        """A name of a tensor of these kinds of dtype, rather a late one."""
        found = [
            name
            for name in self.names
            if (x := self.array(name)).dtype.kind in kinds
            and x.ndim >= rank
            and not (exact and name in self.inexact)
            and not (finite and not np.isfinite(x).all())
            and not (filled and not x.size)
            and not (single and x.dtype != np.float32)
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

    def axis(self, name: str) -> int:
        """An axis of a tensor that has one."""
        n = self.array(name).ndim
        return self.number(-n, n - 1)

    def axes(self, n: int) -> list[int]:
        """Some of n axes, in any order, from the front or the back."""
        chosen = [i for i in range(n) if self.chance(2)]
        chosen = chosen[::-1] if self.chance(3) else chosen
        return [self.one(i, i - n) for i in chosen]

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
        held = usual != "300" and (dtype.kind == "f" or "." not in str(usual))
        if held and self.chance(8):
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
            names = re.findall(r"\b[vxs]\d+\b", code)
            used = [self.values[n] for n in names]
            late = any(isinstance(d, Size) for v in used for d in getattr(v, "shape", None) or [v])
            late |= isinstance(problem, IndexError)  # elements that are known only at run time
            # NumPy makes a number of a float64 without axes, which stands beside no whole one.
            late |= any(isinstance(self.arrays[n], np.float64) for n in names)
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
                grid = np.asarray(one)[np.isfinite(one)] * 8
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
        """Whether a result is finite, unless inputs are not, and small enough for every dtype."""
        x = np.asarray(x)
        finite = np.isfinite(x)
        small = np.abs(x[finite].astype("f8")).max(initial=0) <= LARGEST
        return bool(x.dtype.kind == "b" or (small and (self.wild or finite.all())))

    # The whole

    def input(self, shape: tuple[Any, ...], dtype: str) -> None:
        name = f"x{len(self.specs)}"
        known = [self.sizes.get(d, d) for d in shape]
        low, high = (0, 2) if dtype == "bool" else (0, 9) if dtype == "uint8" else (-5, 6)
        array = self.rng.integers(low, high, known).astype(dtype)
        array = array / 2 if np.dtype(dtype).kind == "f" and self.chance(2) else array
        if self.wild and np.dtype(dtype).kind == "f":
            special = self.rng.choice([np.nan, np.inf, -np.inf], known)
            array = np.where(self.rng.random(known) < 0.3, special, array)
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
    return st.binary(min_size=CHOICES, max_size=CHOICES).map(lambda choices: drawn(choices, told))


def drawn(choices: bytes, told: Counter[str]) -> Program:
    """The program of these choices."""
    p = Program(choices, told)
    base: list[Any] = []
    p.wild = p.chance(8)
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
