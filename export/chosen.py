"""Which weights `trainable=` and `frozen=` name."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import onnx_ir as ir

from graphgen.arguments import searched
from graphgen.errors import GraphgenError, spelled
from graphgen.export.uses import EXPORT, listed
from graphgen.graph import NAMES_OF, is_constant_name
from graphgen.value import Deferred

_Part: TypeAlias = str | Callable[..., Any] | Deferred
Parts: TypeAlias = _Part | Sequence[_Part]
"""Some weights of a model: a regular expression, searched in their names, one whole name, a module
or parameter of what the model was made of, or a list of these."""

_LONG = 400  # characters of names that are listed one by one


class Chosen:
    """What `trainable=` or `frozen=` names: by patterns, or meant by whole names or modules.

    No pattern means one of the `constants`.
    """

    def __init__(
        self,
        option: str,
        given: Parts,
        graph: ir.Graph,
        tied: Mapping[str, Sequence[str]],
        constants: Collection[str] = (),
        missing: Collection[str] = (),
    ) -> None:
        several = isinstance(given, Sequence) and not isinstance(given, str)
        parts: list[Any] = [*given] if several else [given]  # type: ignore[misc]
        texts = [repr(p) if isinstance(p, str) else type(p).__name__ for p in parts]
        words = [part for part in parts if isinstance(part, str)]
        self.given = f"{option}=" + (f"[{', '.join(texts)}]" if several else texts[0])
        if len(words) == len(parts):
            self.given = spelled(option, words if several else words[0])
        self.meant, self._patterns = set[str](), list[re.Pattern[str]]()
        self._unmatched = dict[str, list[str]]()
        self._option, self._tied, values = option, tied, graph.initializers
        self._constants = constants
        for part in parts:
            if not isinstance(part, str):
                self.meant.update(_names_of(part, option, graph))
            elif (part in values and not is_constant_name(part)) or part in missing:
                self.meant.add(part)
            else:
                self._patterns.append(searched(f"artifacts: {spelled(option, part)}", part))
                names = {*missing, *(n for name in tied if name in values for n in tied[name])}
                names.update(values)
                names = {n for n in names if self._patterns[-1].search(n)}
                if not any(n not in constants and not is_constant_name(n) for n in names):
                    self._unmatched[part] = sorted(names & {*constants})

    def matches(self, name: str) -> bool:
        """Whether a weight is chosen, by any of its names if the file says that it is tied."""
        if name in self.meant or name in self._constants:
            return name in self.meant
        names = [name, *self._tied.get(name, ())]
        return any(p.search(n) for p in self._patterns for n in names)

    def check(self, every: Iterable[str], renamed: Sequence[str]) -> None:
        """Raise if a pattern matches none of the weights, among them `every` parameter."""
        for text, constants in self._unmatched.items():
            some = ", ".join([*every][:6]) or "none"
            hint = f"; the exporter renamed {listed(renamed)}: {EXPORT}" if renamed else ""
            if constants:
                hint = f"; to train {constants[0]}, a constant, give its whole name"
            given = spelled(self._option, text)
            raise GraphgenError(f"artifacts: {given} matches no parameter; there are {some}{hint}")

    def of(self, names: Iterable[str]) -> list[str]:
        """Those of the names that are chosen."""
        return [name for name in names if self.matches(name) and not is_constant_name(name)]


def all_parts(given: Parts | None, names: Sequence[str]) -> Parts | None:
    """What is given, and these names."""
    parts = [] if given is None else [given] if isinstance(given, str) else given
    parts = [*parts] if isinstance(parts, Sequence) else [parts]
    return [*parts, *names] if names else given


def patterns_of(names: Sequence[str], others: Collection[str]) -> list[str]:
    """The names, or, where they are long, patterns that match all of them and none of the others.

    What differs in its numbers alone is one pattern.
    """
    if sum(map(len, names)) <= _LONG:
        return [*names]
    alike = dict[str, list[list[str]]]()
    for name in names:
        alike.setdefault(re.sub(r"\d+", "0", name), []).append(re.split(r"(\d+)", name))
    found = list[str]()
    for group in alike.values():
        columns = [[*dict.fromkeys(column)] for column in zip(*group, strict=True)]
        exact = [re.escape(c[0]) if len(c) == 1 else f"({'|'.join(c)})" for c in columns]
        loose = [r"\d+" if len(c) > 1 else part for c, part in zip(columns, exact, strict=True)]
        texts = [f"^{''.join(parts)}$" for parts in (loose, exact)] if len(group) > 1 else []
        fits = (x for x in texts if not any(re.search(x, name) for name in others))
        text = next(fits, None)
        found += ["".join(parts) for parts in group] if text is None else [text]
    return found


def _names_of(part: object, option: str, graph: ir.Graph) -> list[str]:
    """The names of a module's weights."""
    find = graph.meta.get(NAMES_OF)
    names = None if find is None else find(part)
    if names is None:
        who = "read from a file" if find is None else "not made of it"
        raise GraphgenError(
            f"artifacts: {option}= has {type(part).__name__}, and the model is {who}: give a "
            "pattern of names, a name, or a module of what gg.build or gg.from_torch has made it of"
        )
    return list(names)
