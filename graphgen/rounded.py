"""Sizes with rounded quotients, of convolutions say: one form, and what is sure about them."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Any

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

SHOWN = "graphgen.shown"
"""In a graph's `meta`, `FileSizes.shown`: what is rewritten by it may not show it any more."""


class Sizes(ShapeInferenceContext):
    """The state of inference over a graph, in which no integer is too large for its dtype."""

    def set_symbolic_value(self, value: ir.Value, data: list[int | ir.SymbolicDim]) -> None:
        """Note what a tensor of sizes holds, unless it wraps around in the runtime."""
        dtype = value.dtype
        if dtype is None or not dtype.is_integer() or all(_holds(dtype, d) for d in data):
            super().set_symbolic_value(value, data)


def _holds(dtype: ir.DataType, element: int | ir.SymbolicDim) -> bool:
    """Whether integers of this dtype can be that number, or as large as sizes are."""
    if not isinstance(element, int):
        return dtype.bitwidth >= 32
    most = 1 << (dtype.bitwidth - dtype.is_signed())
    return (-most if dtype.is_signed() else 0) <= element < most


class FileSizes(Sizes):
    """The state of inference over a graph of a file, and how small sizes can be in a run of it.

    A difference such as n - 5 may be below 0, but not where a convolution of `graph` slides a
    window of 5 over n; its result has 1 element or more.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.graph: ir.Graph | None = None
        self.emptied: dict[str, str] = {}  # by size: the symbol with which it is 0
        # By size: the one that a reshape gives it, and that of x, which it keeps where that is 0.
        self.kept: dict[str, tuple[ir.SymbolicDim, int | ir.SymbolicDim]] = {}
        # Sizes that a reshape to numbers, or a sum, shows to be another one in every run.
        self.fixed: dict[str, int | ir.SymbolicDim] = {}
        self.least: dict[str, int] = {}  # of sizes without the numbers that are added to them
        self.asked: dict[str, int] = {}  # what was not known to be as large when it was asked for
        # Different sizes that are broadcast, by the name made up for the result, and that name.
        self.joined: dict[str, frozenset[str]] = {}
        self.names: dict[frozenset[str], ir.SymbolicDim] = {}
        self.shown: dict[frozenset[str], frozenset[str]] = {}  # some that all become, by a product

    def note(self, size: int | ir.SymbolicDim, least: int) -> None:
        """Note that a size is at least this in every run."""
        number, rest = _parts(str(size))
        self.least[rest] = max(least - number, self.least.get(rest, least - number))
        if (inside := _inside(rest, least - number)) is not None:
            symbol, bound = inside
            self.least[symbol] = max(bound, self.least.get(symbol, bound))

    def join(self, sizes: Sequence[int | ir.SymbolicDim]) -> int | ir.SymbolicDim:
        """What different sizes broadcast to: one name for the same sizes, in whatever steps."""
        if any(str(d) == "None" for d in sizes):
            return self.new_symbolic_dim()
        every = self._joined(*sizes)
        if len(every) == 1:
            return ir.SymbolicDim(*every)
        if every not in self.names:
            self.names[every] = self.new_symbolic_dim()
            self.joined[str(self.names[every])] = every
        return self.names[every]

    def name_of(self, sizes: Sequence[int | ir.SymbolicDim]) -> ir.SymbolicDim | None:
        """The name of what different sizes have been broadcast to, if they have."""
        return self.names.get(self._joined(*sizes))

    def _joined(self, *sizes: int | ir.SymbolicDim) -> frozenset[str]:
        """The sizes that are broadcast, as far as a product does not show that others have one.

        Next to n, Min(9, n) is n.
        """
        each = (self.joined.get(str(d), frozenset((str(d),))) for d in sizes)
        every = frozenset[str]().union(*each)
        every = frozenset(d for d in every if rest_below(d) not in every)
        for whole, part in self.shown.items():
            every = every - (whole - part) if part <= every else every
        return every

    def is_repeated_to(self, size: int | ir.SymbolicDim, other: int | ir.SymbolicDim) -> bool:
        """Whether a size is the other one or 1 in every run: they broadcast to the other."""
        return self._joined(size, other) == self._joined(other)

    def show_equal(self, a: int | ir.SymbolicDim, b: int | ir.SymbolicDim) -> None:
        """Note that two sizes are equal in every run, if one is what the other and more become.

        A reshape to a size may keep another instead where it is 0: where one of the others is, and
        b, one of them, is not 1.
        """
        for size, other in ((str(a), str(b)), (str(b), str(a))):
            (factor, name), (own, rest) = map(_factors, (size, other))
            kept = self.kept.get(name)
            every = self.joined.get(name if kept is None else str(kept[0]), frozenset())
            part = self.joined.get(rest, frozenset((rest,)))
            if own == factor and part < every and not any(map(self.is_made_up, every)):
                self.shown[every] = part

    def is_made_up(self, size: str) -> bool:
        """Whether inference made up a name in a size: it may have another one next time."""
        return any(map(self.is_generated_symbol, re.findall(r"\w+", size)))

    def are_equal(self, a: int | ir.SymbolicDim, b: int | ir.SymbolicDim) -> bool:
        """Whether two sizes are one in every run: a trace may reshape n elements to 12."""
        one, other = (d if isinstance(d, int) else self.fixed.get(str(d), d) for d in (a, b))
        shown = isinstance(one, int) or one is not a or other is not b
        return shown and str(one) == str(other)

    def fix(self, size: int | ir.SymbolicDim, other: int | ir.SymbolicDim) -> None:
        """Note that a size is another one in every run: so is n where 4·n is 4·m."""
        self.fixed[str(size)] = other
        (factor, name), (same, rest) = map(_factors, (str(size), str(other)))
        if factor == same > 1 and str(self.fixed.get(rest, rest)) != name:
            self.fixed[name] = self.fixed.get(rest, ir.SymbolicDim(rest))

    def is_at_least(self, size: int | ir.SymbolicDim, least: int, *, later: bool = False) -> bool:
        """Whether a size is known to be at least this in every run.

        If only a `later` node shows it, the graph is inferred again.
        """
        number, rest = _parts(str(size))
        bound = 0 if rest == "0" else self.least.get(rest)
        if (bound is not None and bound >= least - number) or smallest(str(size)) >= least:
            return True
        if self._smallest(rest) >= least - number:
            return True
        if later:
            wanted, bound = _inside(rest, least - number) or (rest, least - number)
            self.asked[wanted] = min(bound, self.asked.get(wanted, bound))
        return False

    def _smallest(self, size: str) -> float:
        """A number that a size is never below in a run; -inf if unknown."""
        expression = None if _UNKNOWN.search(size) else tree(size)
        return -math.inf if expression is None else _limits(expression, self.least)[0]


_UNKNOWN = re.compile(r"\bNone\b|\b_element_")


def _limits(expression: Any, least: Mapping[str, int]) -> tuple[float, float]:
    """The least and the largest that an expression of sizes can be, of which some have a least."""
    if expression.is_Symbol:
        return least.get(expression.name, 0), math.inf
    if expression.is_Rational:
        exact: Any = Fraction(int(expression.p), int(expression.q))
        return exact, exact
    parts = [_limits(part, least) for part in expression.args]
    lows, highs = [low for low, _ in parts], [high for _, high in parts]
    if expression.is_Add:
        return sum(lows), sum(highs)
    if expression.is_Mul:
        return reduce(_product, parts)
    if expression.func.__name__ == "floor":
        low, high = (x if math.isinf(x) else math.floor(x) for x in parts[0])
        return low, high
    if re.fullmatch("M(ax|in)", expression.func.__name__):  # of sympy, no operator
        choose = max if expression.func(0, 1) == 1 else min
        return choose(lows), choose(highs)
    return -math.inf, math.inf


def _product(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    every = [x * y if x and y else 0 for x in a for y in b]
    return min(every), max(every)


def _factors(size: str) -> tuple[int, str]:
    """A size as a number and the symbol that it multiplies."""
    expression = None if size.isidentifier() else tree(size)
    if expression is None:
        return 1, size
    factor, part = expression.as_coeff_Mul()
    return (int(factor), str(part)) if factor.is_Integer and part.is_Symbol else (1, size)


@lru_cache(1 << 12)
def _parts(size: str) -> tuple[int, str]:
    """A size as a number and what it is added to."""
    if size.isidentifier():
        return 0, size
    if (expression := tree(size)) is None:
        return 0, size
    number, rest = _flat(expression).as_coeff_Add()
    return (int(number), str(rest)) if number.is_Integer else (0, size)


@lru_cache(1 << 12)
def _inside(size: str, least: int) -> tuple[str, int] | None:
    """The symbol n of ⌊a·n + b⌋ with a > 0, and how large it is where that is at least a number."""
    if not size.startswith("floor("):
        return None
    expression: Any = ir.SymbolicDim(size)._expr
    if expression.func.__name__ != "floor":
        return None
    number, rest = expression.args[0].expand().as_coeff_Add()
    factor, symbol = rest.as_coeff_Mul()
    if not (symbol.is_Symbol and factor.is_Rational and number.is_Rational and factor > 0):
        return None
    return symbol.name, math.ceil((least - number) / factor)


@lru_cache(1 << 12)
def smallest(size: str) -> float:
    """A number that a size is never below, whatever sizes its symbols stand for; -inf if unknown.

    With whole numbers, (n - q + 1) / q ≤ ⌊n / q⌋ ≤ n / q, so 8·⌊n / 8⌋ + 8 - n is 1 or more.
    """
    if not re.search(r"floor\(|//", size) or _UNKNOWN.search(size):
        return -math.inf
    if (expression := tree(size)) is None:
        return -math.inf
    return max(map(_sum_of_least, (expression, _unrounded(expression))))


def _sum_of_least(expression: Any) -> float:
    """The number in a sum whose other terms are not negative."""
    number, rest = expression.expand().as_coeff_Add()
    others = rest.as_ordered_terms()
    sure = number.is_Rational and all(term.is_nonnegative for term in others)
    return math.ceil(number) if sure else -math.inf


def _unrounded(expression: Any) -> Any:
    """A lower bound of a sum, in which quotients are not rounded."""
    total = expression.expand()
    for term in total.as_ordered_terms():
        factor, part = term.as_coeff_Mul()
        if part.func.__name__ != "floor" or not factor.is_Rational:
            continue
        quotient = part.args[0].expand()
        parts = [each.as_coeff_Mul() for each in quotient.as_ordered_terms()]
        if not all(f.is_Rational and (p == 1 or p.is_integer) for f, p in parts):
            continue
        steps = math.lcm(*(int(f.q) for f, _ in parts))
        least = (quotient * steps - (steps - 1)) / steps if factor > 0 else quotient
        total += factor * (least - part)
    return total


def shorter(size: str, other: str) -> str:
    """The smaller of two sizes: one of them if it is known which, else Min of them."""
    for a, b in ((size, other), (other, size)):
        if smallest(f"({b}) - ({a})") >= 0:
            return a
    return f"Min({size}, {other})"


def tree(size: str) -> Any:
    """A size as an expression of sympy's, whose symbols are whole numbers; None if it is none.

    It is worked out once: forms.py lets the library remember what it reads.
    """
    try:
        return ir.SymbolicDim(size)._expr
    except ValueError:
        return None


def bounded(size: str) -> tuple[str, str, str] | None:
    """max or min, the bound and the rest of a size such as Max(1, n); None for any other."""
    return _bounded(size) if size.startswith(("Max(", "Min(")) else None


@lru_cache(1 << 12)
def _bounded(size: str) -> tuple[str, str, str] | None:
    if (expression := tree(size)) is None or len(expression.args) != 2:
        return None
    kind, (bound, rest) = expression.func.__name__.lower(), map(str, expression.args)
    return (kind, bound, rest) if kind in ("max", "min") else None


def rest_below(size: str) -> str | None:
    """What a size is, unless it is more than a number above 1: n, of Min(9, n); so with factors."""
    expression = tree(size) if "Min(" in size else None
    if expression is None:
        return None
    factor, part = expression.as_coeff_Mul()
    match bounded(str(part)):
        case "min", bound, _ if bound.isdecimal() and int(bound) > 1:
            return str(factor * part.args[1])
    return None


def without_doubt(shape: ir.Shape | None, context: ShapeInferenceContext) -> ir.Shape | None:
    """The shape with n for Max(0, n) where n is never below 0, for Max(1, n), and Max(m, n)."""
    if shape is None or not isinstance(context, FileSizes):
        return shape
    dims = list(shape)
    for i, d in enumerate(dims):
        match bounded(str(d)):
            case "max", "0" | "1" as least, rest:
                n = ir.SymbolicDim(rest)
                dims[i] = n if context.is_at_least(n, int(least)) else d
            case _, one, other if context.are_equal(*map(ir.SymbolicDim, (one, other))):
                dims[i] = ir.SymbolicDim(one)
    return ir.Shape(dims)


def spread(size: str) -> str:
    """A size in which a number is added inside of Max and Min: 1 + Max(0, n) is Max(1, n + 1)."""
    if not re.match(r"-?\d+ [-+] M|M.* [-+] \d+$", size):
        return size
    expression: Any = ir.SymbolicDim(size)._expr
    number, rest = expression.as_coeff_Add()
    chosen = re.fullmatch("M(ax|in)", rest.func.__name__)  # of sympy, no operator
    return str(rest.func(*(each + number for each in rest.args))) if chosen else size


def rejoined(size: str) -> str:
    """A size in which both parts of one axis are added: Max(0, n - k) + Min(k, n) is n."""
    if "Max(0, " not in size or "Min(" not in size:
        return size
    expression: Any = ir.SymbolicDim(size)._expr
    terms = expression.args if expression.is_Add else ()
    named = [x for x in terms if re.fullmatch("M(ax|in)", x.func.__name__)]  # of sympy
    parts = [[x for x in named if x.func(0, 1) == which] for which in (1, 0)]
    for after, before in itertools.product(*parts):
        for k, n in itertools.permutations(before.args, 2):
            if {*after.args} == {0, n - k}:
                return rejoined(str(expression - after - before + n))
    return size


def flattened(size: str) -> str:
    """A size with floor of sums once, in a form that is unique where there is no product of sizes.

    With a whole number a, ⌊(⌊x⌋ + a) / n⌋ is ⌊(x + a) / n⌋, and ⌊x + a⌋ is ⌊x⌋ + a; what is left
    below 1 in ⌊x + r⌋ is rounded down to the steps of x (Graham, Knuth and Patashnik, Concrete
    Mathematics, 3.2).
    """
    return str(_flat(ir.SymbolicDim(size)._expr)) if "floor(" in size else size


def _flat(expression: Any) -> Any:
    """The same of an expression of sympy's, whose symbols are whole numbers."""
    if expression.func.__name__ != "floor":
        return expression.func(*map(_flat, expression.args)) if expression.args else expression
    whole = _flat(expression.args[0]).cancel()
    inner = whole.expand()
    rest, terms = inner.as_coeff_Add()
    parts = [part.as_coeff_Mul() for part in terms.as_ordered_terms()] if terms != 0 else []
    if not rest.is_Rational or not all(f.is_Rational and part.is_integer for f, part in parts):
        return expression.func(whole)  # a quotient of sizes, say
    for factor, part in parts:
        others = [*(other for other, p in parts if p is not part), rest]
        inside = part.func.__name__ == "floor" and factor.p == 1
        if inside and all((other / factor).is_Integer for other in others):
            return _flat(expression.func(inner - factor * part + factor * part.args[0]))
    steps = math.lcm(1, *(int(factor.q) for factor, _ in parts))
    below = (rest % 1) * steps // 1
    return expression.func(inner - rest + below / steps) + rest // 1
