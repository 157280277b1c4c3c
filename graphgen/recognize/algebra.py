"""What nodes compute, as sums of products of powers: one form, however a formula is written.

    x / √v = x · v^-½        x · x = x²        exp(a - b) = exp(a) · exp(b)⁻¹
    (a + b) · c = a·c + b·c   Σ (c · a) = c · Σ a where c does not vary along the sum's axes
    σ(a) = (1 + exp(a)⁻¹)⁻¹   tanh(a) = 2 σ(2a) - 1      mean(a) = Σ a / n

Two nodes with the same form are equal wherever both are defined, up to rounding.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import onnx_ir as ir


class Atom(NamedTuple):
    """A function of forms that is not a sum or product; also Σ and the maximum along axes."""

    kind: str
    axes: tuple[int, ...] = ()
    parts: tuple["Frozen", ...] = ()


Monomial: TypeAlias = frozenset[tuple[Atom | ir.Value, float]]
"""Factors and their exponents."""

Form: TypeAlias = dict[Monomial, float]
"""Products and their coefficients."""

Frozen: TypeAlias = frozenset[tuple[Monomial, float]]
Found: TypeAlias = dict[Any, Any]

X = Atom("x")
ROOT = "root"
ONE: Monomial = frozenset()
UNKNOWN = 0.123
"""A number in the form of a pattern that stands for any number."""

_ARITHMETIC = {"x", "sum", "size", "Log"}


def signs(form: Frozen) -> set[Any]:
    """What reveals a formula: functions, powers of x, terms of sums, and whether it has roots."""
    found: set[Any] = set()
    for atom, e in (factor for m, _ in form for factor in m):
        if not isinstance(atom, Atom):
            continue
        found |= {atom.kind} - _ARITHMETIC
        if e % 1 and atom.kind != "Exp":
            found.add(ROOT)
        for part in atom.parts:
            found |= signs(part)
            varying = {f for m, _ in part for f in m if f != (X, 1.0)}
            found |= {f for f in varying if f[0] == X or atom.kind == "Σ"}
    return found


def count(size: float | None, axes: tuple[int, ...]) -> Form:
    """How many elements lie along `axes`."""
    return literal(size) if size is not None else function("size", axes=axes)


def literal(c: float) -> Form:
    """A number."""
    return {ONE: c} if c else {}


def function(kind: str, *forms: Form, axes: tuple[int, ...] = ()) -> Form:
    """A function that is an atom."""
    return {frozenset({(Atom(kind, axes, tuple(map(freeze, forms))), 1.0)}): 1.0}


def freeze(form: Form) -> Frozen:
    """A form as part of an atom, its coefficients without the last rounding."""
    return frozenset((m, float(f"{c:.9g}")) for m, c in form.items())


def plus(a: Form, b: Form, factor: float = 1.0) -> Form:
    """a + factor · b."""
    result = dict(a)
    for m, c in b.items():
        result[m] = result.get(m, 0.0) + factor * c
        if abs(result[m]) < 1e-9 * abs(c):
            del result[m]
    return result


def times(a: Form, b: Form) -> Form:
    """a · b, multiplied out."""
    result: Form = {}
    for (m, c), (n, d) in itertools.product(a.items(), b.items()):
        exponents = dict(m)
        for atom, e in n:
            exponents[atom] = exponents.get(atom, 0.0) + e
        result = plus(result, _monomial(exponents, c * d))
    return result


def _monomial(exponents: Mapping[Atom | ir.Value, float], c: float) -> Form:
    """A product; a sum to the power of one is multiplied out."""
    rest = frozenset((atom, e) for atom, e in exponents.items() if abs(e) > 1e-9)
    result: Form = {rest: c}
    for atom, e in rest:
        if isinstance(atom, Atom) and atom.kind == "sum" and e == 1:
            result = times({rest - {(atom, e)}: c}, dict(atom.parts[0]))
            break
    return result


def power(a: Form, p: float) -> Form:
    """a to the power of p; sums are multiplied out if p is 1, 2 or 3."""
    if p in (1.0, 2.0, 3.0):
        return a if p == 1 else times(a, power(a, p - 1))
    if len(a) == 1:
        [(m, c)] = a.items()
        if p.is_integer() or _splits(m, c):
            return _monomial({atom: e * p for atom, e in m}, c**p)
    return {frozenset({(Atom("sum", (), (freeze(a),)), p)}): 1.0}


def _splits(m: Monomial, c: float) -> bool:
    """Whether a root or logarithm of c·m splits into its factors: none of them can be negative."""
    others = [e for a, e in m if not isinstance(a, Atom) or a.kind != "Exp"]
    return c > 0 and len(others) <= 1 and all(e % 2 != 0 for e in others)


def exponential(a: Form) -> Form:
    """exp(a): a product of powers, one for each term of a."""
    exponents: dict[Atom | ir.Value, float] = {}
    for m, c in a.items():
        [atom] = [a for a, e in m if len(m) == 1 and e == 1] or [X]
        if isinstance(atom, Atom) and atom.kind == "Log":
            [[(inner, _)]] = [inner for inner, _ in atom.parts[0]]
        else:
            inner = Atom("Exp", (), (freeze({m: 1.0}),))
        exponents[inner] = exponents.get(inner, 0.0) + c
    return _monomial(exponents, 1.0)


def logarithm(a: Form) -> Form:
    """ln a: a sum, one term for each factor of a."""
    [(m, c)] = a.items() if len(a) == 1 else [(ONE, -1.0)]
    if not _splits(m, c):
        m, c = frozenset({(Atom("sum", (), (freeze(a),)), 1.0)}), 1.0
    result = literal(math.log(c))
    for atom, e in m:
        if isinstance(atom, Atom) and atom.kind == "Exp":
            result = plus(result, dict(atom.parts[0]), e)
        else:
            result = plus(result, function("Log", {frozenset({(atom, 1.0)}): 1.0}), e)
    return result


def sigmoid(a: Form) -> Form:
    """1 / (1 + exp(-a))."""
    return power(plus({ONE: 1.0}, power(exponential(a), -1.0)), -1.0)


def total(a: Form, axes: tuple[int, ...], n: Form) -> Form:
    """Σ a along `axes`: factors that do not vary there go outside; Σ 1 = n."""
    result: Form = {}
    for m, c in a.items():
        outside = frozenset(factor for factor in m if _is_fixed(factor[0], axes))
        inner = n if outside == m else function("Σ", {m - outside: 1.0}, axes=axes)
        result = plus(result, times({outside: c}, inner))
    return result


def _is_fixed(atom: Atom | ir.Value, axes: tuple[int, ...]) -> bool:
    """Whether an atom is constant along `axes`."""
    if isinstance(atom, ir.Value):
        shape = atom.shape
        return shape is not None and all(-a > len(shape) or shape[a] == 1 for a in axes)
    if atom.axes and set(axes) <= set(atom.axes):
        return True
    return atom != X and all(
        _is_fixed(a, axes) for part in atom.parts for m, _ in part for a, _ in m
    )


def unify(wanted: Frozen, given: Frozen, found: Found, tolerance: float) -> Iterator[Found]:
    """The ways to read `given` as `wanted`: what its inputs are, and a number for `UNKNOWN`.

    An input is a value, or a number if a product lacks that factor.
    """
    if len(wanted) != len(given):
        return
    if not wanted:
        yield found
        return
    m, c = next(iter(wanted))
    for n, d in given:
        readings = [] if (read := _numbers(c, d, found, tolerance)) is None else [(m, read)]
        for atom, e in m if len(m) > len(n) else ():
            known = found.get(atom, d / c) if isinstance(atom, ir.Value) else None
            if isinstance(known, float) and math.isclose(known, d / c, rel_tol=tolerance):
                readings.append((m - {(atom, e)}, {**found, atom: d / c}))
        for factors, read in readings:
            for bound in _factors(factors, n, read, tolerance):
                yield from unify(wanted - {(m, c)}, given - {(n, d)}, bound, tolerance)


def _numbers(wanted: float, given: float, found: Found, tolerance: float) -> Found | None:
    if math.isclose(abs(wanted), UNKNOWN, rel_tol=1e-6):
        number = math.copysign(given, given * wanted)
        known = found.get("unknown", number)
        return {**found, "unknown": number} if math.isclose(known, number, rel_tol=1e-5) else None
    return found if math.isclose(wanted, given, rel_tol=tolerance) else None


def _factors(wanted: Monomial, given: Monomial, found: Found, tolerance: float) -> Iterator[Found]:
    if len(wanted) != len(given):
        return
    if not wanted:
        yield found
        return
    a, p = min(wanted, key=lambda factor: isinstance(factor[0], ir.Value))  # inputs come last
    for b, q in given:
        if (read := _numbers(p, q, found, tolerance)) is None:
            continue
        for bound in _atoms(a, b, read, tolerance):
            yield from _factors(wanted - {(a, p)}, given - {(b, q)}, bound, tolerance)


def _atoms(
    wanted: Atom | ir.Value, given: Atom | ir.Value, found: Found, tolerance: float
) -> Iterator[Found]:
    if isinstance(wanted, ir.Value):
        if isinstance(given, ir.Value) and found.get(wanted, given) is given:
            yield {**found, wanted: given}
        return
    if isinstance(given, ir.Value) or wanted.kind != given.kind:
        return
    if len(wanted.parts) != len(given.parts):
        return
    if wanted.axes:
        if found.get("axes", given.axes) != given.axes:
            return
        found = {**found, "axes": given.axes}
    for parts in {given.parts, given.parts[::-1]}:
        readings = [found]
        for w, g in zip(wanted.parts, parts, strict=True):
            readings = [b for f in readings for b in unify(w, g, f, tolerance)]
        yield from readings


def difference(wanted: Frozen, given: Frozen, tolerance: float) -> tuple[int, str]:
    """What keeps `given` from being `wanted`, and how near it is; (-1, "") for nothing."""
    return _Words().difference(wanted, given, tolerance, 0)


class _Words:
    """Forms in readable text; ? is any number. Atoms hold each other, and are written once."""

    def __init__(self) -> None:
        self._written: dict[Atom, str] = {}

    def difference(
        self, wanted: Frozen, given: Frozen, tolerance: float, depth: int
    ) -> tuple[int, str]:
        if len(wanted) != len(given):
            return 2 * depth, f"{self._text(given)} where {self._text(wanted)} is wanted"
        found = (-1, "")
        for (m, c), (n, d) in zip(self._ordered(wanted), self._ordered(given), strict=True):
            here = 2 * depth + 1, f"{self._term(n, d)} where {self._term(m, c)} is wanted"
            if len(m) != len(n) or _numbers(c, d, {}, tolerance) is None:
                found = max(found, here)
                continue
            for (a, p), (b, q) in zip(self._factors(m), self._factors(n), strict=True):
                if isinstance(a, Atom) and isinstance(b, Atom) and a.kind == b.kind:
                    for w, g in zip(a.parts, b.parts, strict=True):
                        found = max(found, self.difference(w, g, tolerance, depth + 1))
                same = next(_atoms(a, b, {}, tolerance), None) is not None
                if not same or _numbers(p, q, {}, tolerance) is None:
                    found = max(found, here)
        return found

    def _text(self, form: Frozen) -> str:
        terms = " + ".join(self._term(m, c) for m, c in self._ordered(form))
        return terms.replace("+ -", "- ") or "0"

    def _term(self, m: Monomial, c: float) -> str:
        factors = self._factors(m)
        words = [self._factor(a) + ("" if e == 1 else f"^{_digits(e)}") for a, e in factors]
        return "·".join(([_digits(c)] if c != 1 or not words else []) + words)

    def _factor(self, atom: Atom | ir.Value) -> str:
        if isinstance(atom, ir.Value):
            return str(atom.name)
        if atom == X:
            return "x"
        if atom not in self._written:
            name = {"sum": "", "Log": "ln", "Σ": "Σ"}.get(atom.kind)
            name = atom.kind.removeprefix("Reduce").lower() if name is None else name
            inner = ", ".join(map(self._text, atom.parts))
            few = inner if len(inner) <= _LONGEST else f"{inner[:_LONGEST]}…"
            self._written[atom] = f"{name}({few})"
        return self._written[atom]

    def _ordered(self, form: Frozen) -> list[tuple[Monomial, float]]:
        return sorted(form, key=lambda term: self._term(term[0], 1.0))

    def _factors(self, m: Monomial) -> list[tuple[Atom | ir.Value, float]]:
        return sorted(m, key=lambda factor: self._factor(factor[0]))


_LONGEST = 200
"""Characters of an atom's operands: formulas of many layers are longer than anybody reads."""


def _digits(number: float) -> str:
    unknown = math.isclose(abs(number), UNKNOWN, rel_tol=1e-6)
    return f"{'-' if number < 0 else ''}?" if unknown else f"{number:.6g}"
