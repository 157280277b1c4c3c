"""Learning rates as functions of the step, counted from 1."""

import math
from collections.abc import Callable
from typing import TypeAlias

from graphgen.arguments import checked
from graphgen.errors import GraphgenError, positive, user_line, warn

__all__ = ["Schedule", "constant", "cosine", "inverse_sqrt", "linear", "noam", "polynomial"]

Schedule: TypeAlias = Callable[[int], float]


def __dir__() -> list[str]:
    return __all__


class _Named:
    """A schedule that knows what it is."""

    def __init__(self, name: str, rate: Schedule) -> None:
        self._name, self._rate = name, rate

    def __call__(self, step: int) -> float:
        return self._rate(step)

    def __repr__(self) -> str:
        return self._name


def name_of(schedule: Schedule) -> str | None:
    """The call that made a schedule of this module; None for another function."""
    return repr(schedule) if isinstance(schedule, _Named) else None


@checked
def constant(rate: float, *, warmup: int = 0) -> Schedule:
    """η(t) = rate · min(1, t / warmup)."""
    _check_rate("constant", rate)
    if warmup < 0:
        raise GraphgenError(f"constant(warmup={warmup}): warmup must be at least 0{user_line()}")
    name = f"constant({float(rate)}, warmup={warmup})"
    return _Named(name, lambda step: rate * min(1.0, step / max(warmup, 1)))


@checked
def linear(rate: float, *, warmup: int, steps: int) -> Schedule:
    """η(t) = rate · t / warmup up to `warmup`, then down to 0 at `steps`, both straight."""
    _check_rate("linear", rate)
    _check("linear", warmup, steps)

    def schedule(step: int) -> float:
        if step < warmup:
            return rate * step / warmup
        return rate * max(steps - step, 0) / (steps - warmup)

    return _Named(f"linear({float(rate)}, warmup={warmup}, steps={steps})", schedule)


@checked
def polynomial(
    rate: float, *, warmup: int, steps: int, final: float = 0.0, power: float = 1.0
) -> Schedule:
    """η(t) = rate · t / warmup up to `warmup`, then down to `final` at `steps`, and `final`.

    η(t) = final + (rate - final) (1 - (t - warmup) / (steps - warmup))^power.
    """
    _check_rate("polynomial", rate, final)
    _check("polynomial", warmup, steps, final)
    if not 0.0 < power < math.inf:
        raise GraphgenError(f"polynomial(power={power}): power must be positive{user_line()}")

    def schedule(step: int) -> float:
        if step < warmup:
            return rate * step / warmup
        left = max(steps - step, 0) / (steps - warmup)
        return final + (rate - final) * float(left**power)

    how = f"final={float(final)}, power={float(power)}"
    return _Named(f"polynomial({float(rate)}, warmup={warmup}, steps={steps}, {how})", schedule)


@checked
def cosine(
    rate: float, *, warmup: int, steps: int, final: float = 0.0, cycles: int = 1
) -> Schedule:
    """η(t) = rate · t / warmup up to `warmup`, then half a cosine from rate to `final` at `steps`.

    η(t) = final + (rate - final) (1 + cos(π (t - warmup) / (steps - warmup))) / 2, then `final`.
    With `cycles`, there are so many of these, one after the other, each from rate on, of one length
    (Loshchilov & Hutter, arXiv 1608.03983).
    """
    _check_rate("cosine", rate, final)
    _check("cosine", warmup, steps, final)
    positive("cosine", cycles=cycles)

    def schedule(step: int) -> float:
        if step < warmup:
            return rate * step / warmup
        if step >= steps:
            return final
        progress = cycles * (step - warmup) / (steps - warmup) % 1.0
        return final + (rate - final) * 0.5 * (1.0 + math.cos(math.pi * progress))

    how = f"final={float(final)}" + (f", cycles={cycles}" if cycles > 1 else "")
    return _Named(f"cosine({float(rate)}, warmup={warmup}, steps={steps}, {how})", schedule)


@checked
def inverse_sqrt(rate: float, *, warmup: int) -> Schedule:
    """η(t) = rate · min(t / warmup, √(warmup / t)) (T5, arXiv 1910.10683)."""
    _check_rate("inverse_sqrt", rate)
    if warmup < 1:
        problem = f"warmup must be at least 1{user_line()}"
        raise GraphgenError(f"inverse_sqrt(warmup={warmup}): {problem}")
    name = f"inverse_sqrt({float(rate)}, warmup={warmup})"
    return _Named(name, lambda step: rate * min(step / warmup, math.sqrt(warmup / step)))


@checked
def noam(features: int, *, warmup: int) -> Schedule:
    """η(t) = features^-½ · min(t^-½, t · warmup^-1.5) (arXiv 1706.03762, equation 3)."""
    if features < 1 or warmup < 1:
        raise GraphgenError(
            f"noam(features={features}, warmup={warmup}): both must be at least 1{user_line()}"
        )
    name = f"noam({features}, warmup={warmup})"
    return _Named(name, lambda step: features**-0.5 * min(step**-0.5, step * warmup**-1.5))


def named(
    name: str, *, rate: float | None, warmup: int, steps: int | None, features: int | None
) -> Schedule:
    """noam of `features`; linear or cosine over `steps`, inverse_sqrt or constant, at `rate`.

    The rate is 0.0003 if it is None.
    """
    match name:
        case "noam" if features is not None and rate is None:
            return noam(features, warmup=warmup)
        case "constant" if features is None:
            return constant(3e-4 if rate is None else rate, warmup=warmup)
        case "inverse_sqrt" if features is None:
            return inverse_sqrt(3e-4 if rate is None else rate, warmup=warmup)
        case "linear" | "cosine" if features is None and steps is not None:
            make = linear if name == "linear" else cosine
            return make(3e-4 if rate is None else rate, warmup=warmup, steps=steps)
    raise GraphgenError(
        f"schedule {name} with rate {rate}, steps {steps}, features {features}: noam takes features"
        " and no rate; constant and inverse_sqrt take a rate; linear and cosine take a rate and "
        "the number of steps"
        f"{user_line()}"
    )


def _check_rate(name: str, rate: float, final: float = 0.0) -> None:
    for what, number in (("rate", rate), ("final", final)):
        if not 0.0 <= number < math.inf:
            raise GraphgenError(
                f"{name}({what}={number}): a learning rate is finite and at least 0{user_line()}"
            )


def _check(name: str, warmup: int, steps: int, final: float = 0.0) -> None:
    if not 0 <= warmup < steps:
        raise GraphgenError(
            f"{name}(warmup={warmup}, steps={steps}): warmup must be at least 0 and below steps"
            f"{user_line()}"
        )
    if steps == 1 and not final:
        warn(f"{name}(steps=1): the only step has the rate 0, so it changes nothing")
