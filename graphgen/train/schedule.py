"""Learning rates as functions of the step t, which is counted from 1.

Schedules have the rates of those of torch and transformers, which count the updates before this
one, k = t - 1: the first update of a warm-up has the rate 0, and the last one is not at 0 yet.
"""

import math
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, TypeAlias

from graphgen.arguments import checked
from graphgen.errors import GraphgenError, positive, user_line

__all__ = [
    "Schedule",
    "constant",
    "cosine",
    "inverse_sqrt",
    "linear",
    "noam",
    "polynomial",
    "warmup_stable_decay",
]

Schedule: TypeAlias = Callable[[int], float]


def __dir__() -> list[str]:
    return __all__


class _Named:
    """A schedule that knows what made it: it shows that call, and is copied and pickled as it."""

    def __init__(self, rate: Schedule, make: Callable[..., Schedule], *args: Any, **how: Any):
        self._rate, self._make, self._args, self._how = rate, make, args, how

    def __call__(self, step: int) -> float:
        return self._rate(step)

    def __repr__(self) -> str:
        given = [*map(str, self._args), *(f"{name}={value}" for name, value in self._how.items())]
        return f"{self._make.__name__}({', '.join(given)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(self._make, *self._args, **self._how), ()


def name_of(schedule: Schedule) -> str | None:
    """The call that made a schedule of this module; None for another function."""
    return repr(schedule) if isinstance(schedule, _Named) else None


def _warmed(rate: float, warmup: int, then: Schedule) -> Schedule:
    """η(k) = rate · k / warmup up to `warmup`, and `then` of k, the updates before this one."""

    def schedule(step: int) -> float:
        before = step - 1
        return rate * before / warmup if before < warmup else then(before)

    return schedule


@checked
def constant(rate: float, *, warmup: int = 0) -> Schedule:
    """η(k) = rate · min(1, k / warmup)."""
    _check_rate("constant", rate)
    if warmup < 0:
        raise GraphgenError(f"constant(warmup={warmup}): warmup must be at least 0{user_line()}")
    return _Named(_warmed(rate, warmup, lambda _: rate), constant, float(rate), warmup=warmup)


@checked
def linear(rate: float, *, warmup: int, steps: int) -> Schedule:
    """η(k) = rate · k / warmup up to `warmup`, then down to 0 at `steps`, both straight."""
    _check_rate("linear", rate)
    _check("linear", warmup, steps)

    def falling(k: int) -> float:
        return rate * max(steps - k, 0) / (steps - warmup)

    schedule = _warmed(rate, warmup, falling)
    return _Named(schedule, linear, float(rate), warmup=warmup, steps=steps)


@checked
def polynomial(
    rate: float, *, warmup: int, steps: int, final: float = 0.0, power: float = 1.0
) -> Schedule:
    """η(k) = rate · k / warmup up to `warmup`, then down to `final` at `steps`, and `final`.

    η(k) = final + (rate - final) (1 - (k - warmup) / (steps - warmup))^power.
    """
    _check_rate("polynomial", rate, final)
    _check("polynomial", warmup, steps)
    if not 0.0 < power < math.inf:
        raise GraphgenError(f"polynomial(power={power}): power must be positive{user_line()}")

    def falling(k: int) -> float:
        left = max(steps - k, 0) / (steps - warmup)
        return final + (rate - final) * float(left**power)

    how = {"warmup": warmup, "steps": steps, "final": float(final), "power": float(power)}
    return _Named(_warmed(rate, warmup, falling), polynomial, float(rate), **how)


@checked
def cosine(
    rate: float, *, warmup: int, steps: int, final: float = 0.0, cycles: int = 1
) -> Schedule:
    """η(k) = rate · k / warmup up to `warmup`, then half a cosine from rate to `final` at `steps`.

    η(k) = final + (rate - final) (1 + cos(π (k - warmup) / (steps - warmup))) / 2, then `final`.
    With `cycles`, there are so many of these, one after the other, each from rate on, of one length
    (Loshchilov & Hutter, arXiv 1608.03983).
    """
    _check_rate("cosine", rate, final)
    _check("cosine", warmup, steps)
    positive("cosine", cycles=cycles)

    def falling(k: int) -> float:
        if k >= steps:
            return final
        progress = cycles * (k - warmup) / (steps - warmup) % 1.0
        return final + (rate - final) * 0.5 * (1.0 + math.cos(math.pi * progress))

    how = {"warmup": warmup, "steps": steps, "final": float(final)}
    more = {"cycles": cycles} if cycles > 1 else {}
    return _Named(_warmed(rate, warmup, falling), cosine, float(rate), **how, **more)


@checked
def inverse_sqrt(rate: float, *, warmup: int) -> Schedule:
    """η(k) = rate · min(k / warmup, √(warmup / k)) (T5, arXiv 1910.10683)."""
    _check_rate("inverse_sqrt", rate)
    if warmup < 1:
        problem = f"warmup must be at least 1{user_line()}"
        raise GraphgenError(f"inverse_sqrt(warmup={warmup}): {problem}")
    schedule = _warmed(rate, warmup, lambda k: rate * math.sqrt(warmup / k))
    return _Named(schedule, inverse_sqrt, float(rate), warmup=warmup)


@checked
def warmup_stable_decay(
    rate: float, *, warmup: int, steps: int, decay: int, final: float = 0.0
) -> Schedule:
    """From `final` straight to rate at `warmup`, then rate, and down in the last `decay` steps.

    The fall to `final` is half a cosine, as `cosine`'s (MiniCPM, arXiv 2404.06395).
    """
    _check_rate("warmup_stable_decay", rate, final)
    _check("warmup_stable_decay", warmup, steps)
    if not 1 <= decay <= steps - warmup:
        raise GraphgenError(
            f"warmup_stable_decay(warmup={warmup}, steps={steps}, decay={decay}): decay must be at "
            f"least 1 and at most steps - warmup{user_line()}"
        )
    fall = cosine(rate, warmup=0, steps=decay, final=final)

    def schedule(step: int) -> float:
        k = step - 1
        if k < warmup:
            return final + (rate - final) * k / warmup
        return fall(step - steps + decay) if k > steps - decay else rate

    how = {"warmup": warmup, "steps": steps, "decay": decay, "final": float(final)}
    return _Named(schedule, warmup_stable_decay, float(rate), **how)


@checked
def noam(features: int, *, warmup: int) -> Schedule:
    """η(t) = features^-½ · min(t^-½, t · warmup^-1.5) (arXiv 1706.03762, equation 3)."""
    if features < 1 or warmup < 1:
        raise GraphgenError(
            f"noam(features={features}, warmup={warmup}): both must be at least 1{user_line()}"
        )

    def schedule(step: int) -> float:
        return float(features**-0.5 * min(step**-0.5, step * warmup**-1.5))

    return _Named(schedule, noam, features, warmup=warmup)


def named(
    name: str, *, rate: float | None, warmup: int, steps: int | None, features: int | None
) -> Schedule:
    """The schedule of a text, such as "cosine" or "cosine:cycles=3,final=1e-5".

    noam has `features`; the others `rate`, 0.0003 if it is None, and `steps` if they end.
    """
    make, options = parsed(name)
    wanted = signature(make).parameters
    usual: dict[str, Any] = {"warmup": warmup, "steps": steps, "features": features}
    usual["rate"] = 3e-4 if rate is None and "rate" in wanted else rate
    useless = [n for n in ("rate", "features") if n not in wanted and usual[n] is not None]
    missing = [n for n in usual if n in wanted and usual[n] is None]
    if useless or missing:
        what, one = ("takes no", useless[0]) if useless else ("needs", missing[0])
        raise GraphgenError(f"schedule {name} {what} {one}{user_line()}")
    given = [usual[n] for n in ("rate", "features") if n in wanted]
    return make(*given, **{n: usual[n] for n in ("warmup", "steps") if n in wanted}, **options)


def parsed(text: str) -> tuple[Callable[..., Schedule], dict[str, float]]:
    """`cosine` and {"cycles": 3} of "cosine:cycles=3"."""
    name, _, rest = text.partition(":")
    makes = {make.__name__: make for make in _MAKES}
    if name not in makes:
        raise GraphgenError(f"schedule {name!r}: choose {', '.join(makes)}{user_line()}")
    known = [n for n in signature(makes[name]).parameters if n not in _USUAL]
    found: dict[str, float] = {}
    for part in filter(None, rest.split(",")):
        option, _, value = part.partition("=")
        try:
            if option not in known or option in found:
                raise ValueError(option)
            found[option] = (float if option in ("final", "power") else int)(value)
        except ValueError:
            takes = ", ".join(f"{one}=X" for one in known) or "no options"
            problem = f"{part!r} does not fit: {name} takes {takes}{user_line()}"
            raise GraphgenError(f"schedule {text!r}: {problem}") from None
    return makes[name], found


_USUAL = ("rate", "warmup", "steps", "features")
_MAKES: tuple[Callable[..., Schedule], ...] = (
    cosine,
    linear,
    polynomial,
    warmup_stable_decay,
    constant,
    inverse_sqrt,
    noam,
)


def _check_rate(name: str, rate: float, final: float = 0.0) -> None:
    for what, number in (("rate", rate), ("final", final)):
        if not 0.0 <= number < math.inf:
            raise GraphgenError(
                f"{name}({what}={number}): a learning rate is finite and at least 0{user_line()}"
            )


def _check(name: str, warmup: int, steps: int) -> None:
    if not 0 <= warmup < steps:
        raise GraphgenError(
            f"{name}(warmup={warmup}, steps={steps}): warmup must be at least 0 and below steps"
            f"{user_line()}"
        )
