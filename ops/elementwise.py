"""Elementwise arithmetic, comparison and logic, broadcasting as in numpy."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphgen.errors import GraphgenError, user_line
from graphgen.graph import constant
from graphgen.infer import DOMAIN, describe
from graphgen.op import composite, primitive
from graphgen.operands import UFUNCS, number_as
from graphgen.ops.layout import cast_like, numpy_dtype
from graphgen.record import Operands, TensorLike
from graphgen.traits import Trait
from graphgen.value import Tensor, Value

_erf = np.vectorize(math.erf, otypes=[np.float64])


@primitive(
    "Add", ufunc=np.add, traits=Trait.CARRIES | Trait.BROADCASTS | Trait.COMMUTATIVE | Trait.BY_ROWS
)
def add(a: TensorLike, b: TensorLike) -> Tensor:
    """a + b."""
    return np.add(a, b)


@add.vjp
def _(g: Tensor) -> tuple[Tensor, ...]:
    """da = g, db = g."""
    return g, g


@composite("Sum", traits=Trait.BROADCASTS | Trait.COMMUTATIVE)
def total(*xs: Operands) -> Tensor:
    """The sum of the operands, elementwise."""
    given = list[Any](xs)
    if len(given) == 1:
        return identity(given[0])
    return functools.reduce(add, given[2:], add(*given[:2]))


@composite("Mean", traits=Trait.BROADCASTS | Trait.COMMUTATIVE)
def average(*xs: Operands) -> Tensor:
    """The mean of the operands, elementwise."""
    return total(*xs) / float(len(xs))


@primitive("Sub", ufunc=np.subtract, traits=Trait.CARRIES | Trait.BROADCASTS)
def sub(a: TensorLike, b: TensorLike) -> Tensor:
    """a - b."""
    return np.subtract(a, b)


@sub.vjp
def _(g: Tensor) -> tuple[Tensor, ...]:
    """da = g, db = -g."""
    return g, neg(g)


@primitive(
    "Mul",
    ufunc=np.multiply,
    traits=Trait.CARRIES | Trait.BROADCASTS | Trait.COMMUTATIVE | Trait.BY_ROWS,
)
def mul(a: TensorLike, b: TensorLike) -> Tensor:
    """a · b."""
    return np.multiply(a, b)


@mul.vjp
def _(g: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """da = g b, db = g a."""
    return g * b, g * a


@primitive("Div", ufunc=np.divide, traits=Trait.BROADCASTS | Trait.BY_ROWS)
def div(a: TensorLike, b: TensorLike) -> Tensor:
    """a / b; integers are divided towards zero.

    At run time, an integer divided by 0 is an error, and the smallest one divided by -1 ends the
    process; with `//`, it wraps around.
    """
    a, b = np.asarray(a), np.asarray(b)
    if np.issubdtype(a.dtype, np.integer):
        below = np.floor_divide(a, b)
        apart = (np.remainder(a, b) != 0) & ((a < 0) != (b < 0))
        return np.asarray(below + apart).astype(a.dtype)
    return np.asarray(np.divide(a, b))


@div.vjp
def _(g: Tensor, y: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """da = g / b, db = -g y / b."""
    da = g / b
    return da, neg(da * y)


@primitive("Neg", ufunc=np.negative)
def neg(x: Tensor) -> Tensor:
    """-x."""
    return np.negative(x)


@neg.vjp
def _(g: Tensor) -> Tensor:
    """dx = -g."""
    return neg(g)


@primitive("Pow", traits=Trait.BROADCASTS | Trait.WHOLE_AS_FLOAT)
def _pow(x: Tensor, exponent: TensorLike) -> Tensor:
    """x ** exponent, in x's dtype; of whole numbers in float64, as the runtime."""
    if np.asarray(x).dtype.kind in "iu":
        with np.errstate(all="ignore"):  # what is too large becomes the lowest number, as there
            return np.power(np.asarray(x, np.float64), exponent).astype(numpy_dtype(x))
    y = np.power(x, exponent)
    if np.size(exponent) == 1 and np.all(np.equal(exponent, 0.5)):  # of which numpy takes the root
        y = np.where(np.equal(x, -np.inf), np.inf, y) + 0.0
    return np.asarray(y).astype(numpy_dtype(x))


@_pow.number
def _(exponent: Any, dtype: Any, bound: Mapping[str, Any]) -> Any:
    """The exponent of integers is one of them, though numpy's has its own dtype."""
    base = bound.get("T")
    if base is None or base.kind not in "iu":
        return dtype
    if np.any(np.asarray(exponent) < 0):
        raise GraphgenError(
            f"Pow: {exponent!r} with a base of {base}: integers have no negative powers; cast the "
            f"base to a float first{user_line()}"
        )
    return base


@_pow.vjp
def _(g: Tensor, y: Tensor, x: Tensor, exponent: Tensor) -> tuple[Tensor, ...]:
    """dx = g p x^(p-1), and 0 for p = 0; dp = g y ln x, and 0 for x = 0."""
    p, known = cast_like(exponent, x), constant(exponent) if isinstance(exponent, Value) else None
    base = x
    if known is None or not np.all(known):  # 0 · 0⁻¹ is no number
        base = where(equal(p, 0.0), 1.0, x)
    return g * p * _pow(base, p - 1.0), g * y * log(where(equal(x, 0.0), 1.0, x))


def pow(x: TensorLike, exponent: TensorLike) -> Tensor:
    """x ** exponent, in x's dtype; of integers a product, which is exact where it fits.

    The number 0.5 gives √x, as NumPy's operator does: NaN for -∞, of which a power is ∞. The
    runtime takes powers of integers in float64, which has 53 bits. Raises GraphgenError for
    integers with an exponent that is negative or a tensor.
    """
    base: Any = x
    if not hasattr(base, "dtype"):  # a number takes the dtype of the exponent
        tensor: Any = exponent if hasattr(exponent, "dtype") else np.asarray(base)
        base = number_as("Pow", base, numpy_dtype(tensor))
    if numpy_dtype(base).kind not in "iu":
        root = isinstance(exponent, (float, np.generic)) and exponent == 0.5
        return sqrt(base) if root else _pow(base, exponent)
    if isinstance(exponent, bool) or not isinstance(exponent, int) or exponent < 0:
        raise GraphgenError(
            f"Pow: {describe(base)} ** {exponent!r}: the exponent of integers is a whole number "
            f"that is at least 0, known before the run; cast the base to a float first{user_line()}"
        )
    number_as("Pow", exponent, numpy_dtype(base))  # NumPy takes none that the dtype does not hold
    result, square = None, base
    for i in range(exponent.bit_length()):
        square = square if i == 0 else square * square
        if exponent >> i & 1:
            result = square if result is None else result * square
    return base * 0 + 1 if result is None else identity(base) if result is base else result


UFUNCS[np.power] = pow


@primitive("Sqrt", ufunc=np.sqrt)
def sqrt(x: Tensor) -> Tensor:
    """√x."""
    return np.sqrt(x)


@sqrt.vjp
def _(g: Tensor, y: Tensor) -> Tensor:
    """dx = g / (2 y)."""
    return g * 0.5 / y


@primitive("Reciprocal", ufunc=np.reciprocal)
def reciprocal(x: Tensor) -> Tensor:
    """1 / x."""
    return np.reciprocal(x)


@reciprocal.vjp
def _(g: Tensor, y: Tensor) -> Tensor:
    """dx = -g y²."""
    return neg(g * y * y)


@primitive("Exp", ufunc=np.exp)
def exp(x: Tensor) -> Tensor:
    """eˣ."""
    return np.exp(x)


@exp.vjp
def _(g: Tensor, y: Tensor) -> Tensor:
    """dx = g y."""
    return g * y


@primitive("Log", ufunc=np.log)
def log(x: Tensor) -> Tensor:
    """ln x."""
    return np.log(x)


@log.vjp
def _(g: Tensor, x: Tensor) -> Tensor:
    """dx = g / x."""
    return g / x


@primitive("Abs", ufunc=np.absolute)
def abs(x: Tensor) -> Tensor:
    """|x|."""
    return np.abs(x)


@abs.vjp
def _(g: Tensor, x: Tensor) -> Tensor:
    """dx = g sign(x)."""
    return g * sign(x)


@primitive("Sign", ufunc=np.sign)
def sign(x: Tensor) -> Tensor:
    """-1, 0 or 1."""
    return np.sign(x)


@primitive("Floor", ufunc=np.floor)
def floor(x: Tensor) -> Tensor:
    """The largest whole number at most x."""
    return np.floor(x)


@primitive("Ceil", ufunc=np.ceil)
def ceil(x: Tensor) -> Tensor:
    """The smallest whole number at least x."""
    return np.ceil(x)


@primitive("Round", ufunc=np.rint)
def round(x: Tensor) -> Tensor:
    """The nearest whole number; of two, the even one."""
    return np.rint(x)


@sign.vjp
@floor.vjp
@ceil.vjp
@round.vjp
def _() -> None:
    """Flat wherever it has a derivative."""


@round.variant
def _(x: Tensor) -> Tensor:
    """Of floor: the difference to it is exact, and of two numbers as near the even one is taken."""
    below = floor(x)
    above, half = x - below, below * 0.5
    odd = not_equal(floor(half), half)
    up = logical_or(greater(above, 0.5), logical_and(equal(above, 0.5), odd))
    return where(up, below + 1.0, below)


@primitive("Tanh", ufunc=np.tanh, traits=Trait.BY_ROWS)
def tanh(x: Tensor) -> Tensor:
    """tanh x."""
    return np.tanh(x)


@tanh.vjp
def _(g: Tensor, y: Tensor) -> Tensor:
    """dx = g (1 - y²)."""
    return g * (1.0 - y * y)


@primitive("Sigmoid")
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e⁻ˣ), for x < 0 computed as eˣ / (1 + eˣ), which cannot overflow."""
    e = np.exp(-np.abs(np.asarray(x)))
    y: Tensor = np.where(np.asarray(x) >= 0, 1 / (1 + e), e / (1 + e))
    return y


@sigmoid.vjp
def _(g: Tensor, y: Tensor) -> Tensor:
    """dx = g y (1 - y)."""
    return g * y * (1.0 - y)


@primitive("Erf")
def erf(x: Tensor) -> Tensor:
    """2/√π ∫₀ˣ exp(-t²) dt."""
    return np.asarray(_erf(x)).astype(numpy_dtype(x))


@erf.vjp
def _(g: Tensor, x: Tensor) -> Tensor:
    """dx = g 2/√π exp(-x²)."""
    return g * (2.0 / math.sqrt(math.pi)) * exp(neg(x * x))


@primitive("Max", ufunc=np.maximum, traits=Trait.CARRIES | Trait.BROADCASTS | Trait.COMMUTATIVE)
def maximum(*xs: Operands) -> Tensor:
    """The largest of the operands, elementwise."""
    return np.asarray(functools.reduce(np.maximum, list[Any](xs)))


@maximum.vjp
def _(g: Tensor, y: Tensor, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The operands that equal the result share g equally."""
    return _select(g, y, xs)


@primitive("Min", ufunc=np.minimum, traits=Trait.CARRIES | Trait.BROADCASTS | Trait.COMMUTATIVE)
def minimum(*xs: Operands) -> Tensor:
    """The smallest of the operands, elementwise."""
    return np.asarray(functools.reduce(np.minimum, list[Any](xs)))


@minimum.vjp
def _(g: Tensor, y: Tensor, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """As for the maximum."""
    return _select(g, y, xs)


def _select(g: Tensor, y: Tensor, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    hits = [equal(x, y) for x in xs]
    share = g / functools.reduce(add, (cast_like(hit, g) for hit in hits))
    return tuple(where(hit, share, 0.0) for hit in hits)


@primitive("Clip", traits=Trait.CARRIES)
def clip(x: Tensor, lowest: TensorLike | None = None, highest: TensorLike | None = None) -> Tensor:
    """x limited to [lowest, highest], one number each; a NaN is no limit."""
    for limit in (lowest, highest):
        if limit is not None and np.size(limit) != 1:
            raise GraphgenError(
                f"Clip: a limit is {describe(np.asarray(limit))}; it must be a scalar: tensors are "
                f"limits of ops.maximum and ops.minimum{user_line()}"
            )
    low, high = (None if v is None else np.reshape(v, ()) for v in (lowest, highest))
    x = x if low is None else np.where(np.less(x, low), low, x)
    return x if high is None else np.where(np.greater(x, high), high, x)


@clip.vjp
def _(
    g: Tensor, y: Tensor, x: Tensor, lowest: Tensor | None, highest: Tensor | None
) -> tuple[Tensor | None, ...]:
    """dx = g where x lies within the limits; a limit gets g where x lies beyond it.

    Where they are in the wrong order, the upper one is the result.
    """
    low = None if lowest is None else less(x, lowest)
    high = None if highest is None else greater(x, highest)
    if lowest is not None and highest is not None and low is not None:
        high = greater(where(low, lowest, x), highest)
        low = logical_and(low, logical_not(high))
    below, above = (None if hit is None else where(hit, g, 0.0) for hit in (low, high))
    return where(equal(x, y), g, 0.0), below, above


@primitive("Where", traits=Trait.BROADCASTS)
def where(condition: Tensor, x: TensorLike, y: TensorLike) -> Tensor:
    """x where the condition holds, else y."""
    return np.where(condition, x, y)


@where.vjp
def _(g: Tensor, condition: Tensor) -> tuple[Tensor | None, ...]:
    """dx = g where the condition holds, dy = g elsewhere."""
    return None, where(condition, g, 0.0), where(condition, 0.0, g)


@primitive("Equal", ufunc=np.equal, traits=Trait.BROADCASTS | Trait.COMMUTATIVE)
def equal(a: TensorLike, b: TensorLike) -> Tensor:
    """a = b."""
    return np.equal(a, b)


@primitive("Greater", ufunc=np.greater, traits=Trait.BROADCASTS)
def greater(a: TensorLike, b: TensorLike) -> Tensor:
    """a > b."""
    return np.greater(a, b)


@primitive("Less", ufunc=np.less, traits=Trait.BROADCASTS)
def less(a: TensorLike, b: TensorLike) -> Tensor:
    """a < b."""
    return np.less(a, b)


@primitive("GreaterOrEqual", ufunc=np.greater_equal, traits=Trait.BROADCASTS)
def greater_or_equal(a: TensorLike, b: TensorLike) -> Tensor:
    """a ≥ b."""
    return np.greater_equal(a, b)


@primitive("LessOrEqual", ufunc=np.less_equal, traits=Trait.BROADCASTS)
def less_or_equal(a: TensorLike, b: TensorLike) -> Tensor:
    """a ≤ b."""
    return np.less_equal(a, b)


@primitive("And", ufunc=np.logical_and, traits=Trait.BROADCASTS | Trait.COMMUTATIVE)
def logical_and(a: TensorLike, b: TensorLike) -> Tensor:
    """a ∧ b."""
    return np.logical_and(a, b)


@primitive("Or", ufunc=np.logical_or, traits=Trait.BROADCASTS | Trait.COMMUTATIVE)
def logical_or(a: TensorLike, b: TensorLike) -> Tensor:
    """a ∨ b."""
    return np.logical_or(a, b)


@primitive("Not", ufunc=np.logical_not)
def logical_not(x: Tensor) -> Tensor:
    """¬x."""
    return np.logical_not(x)


def not_equal(a: TensorLike, b: TensorLike) -> Tensor:
    """a ≠ b."""
    return logical_not(equal(a, b))


UFUNCS[np.not_equal] = not_equal


@primitive("Xor", ufunc=np.logical_xor, traits=Trait.BROADCASTS | Trait.COMMUTATIVE)
def logical_xor(a: TensorLike, b: TensorLike) -> Tensor:
    """a or b, not both."""
    return np.logical_xor(a, b)


@primitive("IsNaN", ufunc=np.isnan)
def is_nan(x: Tensor) -> Tensor:
    """Whether x is not a number."""
    return np.isnan(x)


@primitive("Mod", traits=Trait.BROADCASTS)
def mod(a: TensorLike, b: TensorLike, *, fmod: int = 0) -> Tensor:
    """The remainder, with the divisor's sign; with fmod=1 with the dividend's."""
    return np.fmod(a, b) if fmod else np.mod(a, b)


@mod.vjp
def _(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """da = g, db = -g (a - y) / b."""
    return g, neg(g * (a - y) / b)


@primitive("Identity", traits=Trait.MOVES | Trait.CHEAP | Trait.LAYOUT | Trait.VIEW)
def identity(x: TensorLike) -> Tensor:
    """x."""
    return np.asarray(x)


@identity.vjp
def _(g: Tensor) -> Tensor:
    """dx = g."""
    return g


@composite("StopGradient", domain=DOMAIN)
def stop_gradient(x: Tensor) -> Tensor:
    """x, which counts as a constant when gradients are taken."""
    return identity(x)


@stop_gradient.vjp
def _(g: Tensor) -> None:
    """dx = 0."""
