"""Learning rates as functions of the step, counted from 1."""

import math
from collections.abc import Callable
from typing import TypeAlias

from graphgen.errors import GraphgenError, user_line

__all__ = ["Schedule", "constant", "cosine", "linear", "noam"]

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


def constant(rate: float, *, warmup: int = 0) -> Schedule:
    """η(t) = rate · min(1, t / warmup)."""
    _check_rate("constant", rate)
    if warmup < 0:
        raise GraphgenError(f"constant(warmup={warmup}): warmup must be at least 0{user_line()}")
    name = f"constant({float(rate)}, warmup={warmup})"
    return _Named(name, lambda step: rate * min(1.0, step / max(warmup, 1)))


def linear(rate: float, *, warmup: int, steps: int) -> Schedule:
    """η(t) = rate · t / warmup up to `warmup`, then down to 0 at `steps`, both straight."""
    _check_rate("linear", rate)
    _check("linear", warmup, steps)

    def schedule(step: int) -> float:
        if step < warmup:
            return rate * step / warmup
        return rate * max(steps - step, 0) / (steps - warmup)

    return _Named(f"linear({float(rate)}, warmup={warmup}, steps={steps})", schedule)


def cosine(rate: float, *, warmup: int, steps: int, final: float = 0.0) -> Schedule:
    """η(t) = rate · t / warmup up to `warmup`, then half a cosine from rate to `final` at `steps`.

    η(t) = final + (rate - final) (1 + cos(π (t - warmup) / (steps - warmup))) / 2, then `final`
    (Loshchilov & Hutter, arXiv 1608.03983, without restarts).
    """
    _check_rate("cosine", rate)
    _check("cosine", warmup, steps)

    def schedule(step: int) -> float:
        if step < warmup:
            return rate * step / warmup
        progress = min((step - warmup) / (steps - warmup), 1.0)
        return final + (rate - final) * 0.5 * (1.0 + math.cos(math.pi * progress))

    name = f"cosine({float(rate)}, warmup={warmup}, steps={steps}, final={float(final)})"
    return _Named(name, schedule)


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
    """noam of `features`; linear or cosine over `steps`, or constant, at `rate` (0.0003)."""
    match name:
        case "noam" if features is not None and rate is None:
            return noam(features, warmup=warmup)
        case "constant" if features is None:
            return constant(3e-4 if rate is None else rate, warmup=warmup)
        case "linear" | "cosine" if features is None and steps is not None:
            make = linear if name == "linear" else cosine
            return make(3e-4 if rate is None else rate, warmup=warmup, steps=steps)
    raise GraphgenError(
        f"schedule {name} with rate {rate}, steps {steps}, features {features}: noam takes features"
        " and no rate; constant takes a rate; linear and cosine take a rate and the number of steps"
        f"{user_line()}"
    )


def _check_rate(name: str, rate: float) -> None:
    if not 0.0 <= rate < math.inf:
        raise GraphgenError(
            f"{name}(rate={rate}): a learning rate is finite and at least 0{user_line()}"
        )


def _check(name: str, warmup: int, steps: int) -> None:
    if not 0 <= warmup < steps:
        raise GraphgenError(
            f"{name}(warmup={warmup}, steps={steps}): warmup must be at least 0 and below steps"
            f"{user_line()}"
        )
