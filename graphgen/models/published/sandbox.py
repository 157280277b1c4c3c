"""Templates, which are programs of others: jinja2's sandbox, within limits."""

import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from types import FrameType
from typing import Any

from graphgen.errors import needed

try:
    import resource
except ImportError:  # on Windows, which does not tell how much memory was used
    resource = None  # type: ignore[assignment]

_STEPS, _SECONDS = 1_000_000, 10.0
"""Lines that a template may run for one conversation, and for how long."""

_LONGEST = 10_000_000  # characters
_WIDEST = 1_000_000  # any number that a filter or a method is given
_MEMORY = 1 << 28  # bytes more than the process had
_WIDE = re.compile(r"\*|\d{5,}")


def rendered(template: Any, values: Mapping[str, Any]) -> str:
    """The text of a template. Raises whatever its expressions raise, and errors at its limits."""
    tracer, pieces, size = sys.gettrace(), list[str](), 0
    source, tracing = template.generate(values), _within_limits()
    sys.settrace(tracing)  # a loop may never end
    try:
        for piece in source:
            pieces.append(piece)
            size += len(piece)
            if size > _LONGEST:
                raise MemoryError(f"it writes more than {_LONGEST:,} characters")
    finally:
        sys.settrace(tracer)
    return "".join(pieces)


def _within_limits() -> Callable[[FrameType, str, Any], Any]:
    """A tracer that ends a template which runs for too many lines or too long, or takes memory."""
    steps, until, peak = 0, time.monotonic() + _SECONDS, _peak() + _MEMORY

    def step(frame: FrameType, event: str, _: object) -> Any:
        nonlocal steps
        if frame.f_code.co_filename != "<template>":
            return None
        steps += 1
        if steps > _STEPS:
            raise TimeoutError(f"it runs for more than {_STEPS:,} lines")
        if time.monotonic() > until:
            raise TimeoutError(f"it runs for more than {_SECONDS:g} seconds")
        if _peak() > peak:
            raise MemoryError(f"it takes more than {_MEMORY:,} bytes")
        return step

    return step


def _peak() -> int:
    """The most memory that the process had, in bytes; 0 where the system does not tell."""
    if resource is None:
        return 0  # type: ignore[unreachable]
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size


def _size(value: Any) -> int:
    """What a value counts when a result may be as large as the product of the values given."""
    if isinstance(value, list | tuple | range):
        return sum(len(x) + 1 if isinstance(x, str) else 1 for x in value)
    return len(value) if isinstance(value, str) else 1


def _bounded(function: Any) -> Any:
    """A filter or a method whose result cannot be much larger than a text may be."""

    @wraps(function, updated=("__dict__",) if hasattr(function, "__dict__") else ())
    def call(*given: Any, **named: Any) -> Any:
        given = tuple([*x] if isinstance(x, Iterator) else x for x in given)  # to be counted
        values = [getattr(function, "__self__", None), *given, *named.values()]
        numbers = [abs(value) for value in values if isinstance(value, int | float)]
        most = math.prod(max(1, size) for size in (*numbers, *map(_size, values)))
        result = None
        if most <= 100 * _LONGEST and max(numbers, default=0) <= _WIDEST:
            result = function(*given, **named)
        if result is None or (isinstance(result, str) and len(result) > _LONGEST):
            name = getattr(function, "__name__", "a call")
            raise needed("jinja2.sandbox").SecurityError(f"a result of {name} is too large")
        return result

    return call


def environment(begin: str, end: str, *, dated: bool) -> Any:
    """Where templates are compiled: what transformers gives them, and no way out.

    `begin` and `end` mark what stands in {% generation %}; only if `dated`, there is strftime_now.
    """
    jinja, sandbox, ext = needed("jinja2"), needed("jinja2.sandbox"), needed("jinja2.ext")
    immutable: Any = sandbox.ImmutableSandboxedEnvironment
    extension: Any = ext.Extension
    base: Any = jinja.utils.Namespace

    class Sandbox(immutable):  # type: ignore[misc]
        """Results that would fill the memory are refused, where one operation makes them."""

        intercepted_binops = frozenset(["*", "**", "%"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [abs(x) if isinstance(x, int | float) else _size(x) for x in (left, right)]
            numbers = all(isinstance(x, int | float) for x in (left, right))
            large = operator == "**" and max(sizes) > 64
            large = large or (operator == "*" and not numbers and sizes[0] * sizes[1] > _LONGEST)
            if large or (operator == "%" and isinstance(left, str) and _WIDE.search(left)):
                raise sandbox.SecurityError(f"a result of {operator} is too large")
            return super().call_binop(context, operator, left, right)

        def wrap_str_format(self, value: Any) -> Any:
            found = super().wrap_str_format(value)
            if found is not None and _WIDE.search(value.__self__):
                raise sandbox.SecurityError("a result of format is too large")
            return found

        def call(self, context: Any, function: Any, /, *given: Any, **named: Any) -> Any:
            if isinstance(getattr(function, "__self__", None), str):
                function = _bounded(function)
            return super().call(context, function, *given, **named)

    class Generation(extension):  # type: ignore[misc]
        """{% generation %} ... {% endgeneration %} around what the assistant says."""

        tags = frozenset(["generation"])

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_marked")
            return jinja.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{begin}{caller()}{end}"

    class Namespace(base):  # type: ignore[misc]
        """One without names such as __class__, which lead out of the sandbox."""

        def __init__(*given: Any, **named: Any) -> None:
            self, *values = given
            base.__init__(self)
            for name, value in dict(*values, **named).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise sandbox.SecurityError(f"a namespace cannot hold {name!r}")
            super().__setitem__(name, value)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        how: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    def raise_exception(message: str) -> None:
        raise jinja.TemplateError(message)

    found = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    found.filters["tojson"] = tojson
    found.filters = {name: _bounded(one) for name, one in found.filters.items()}
    found.globals.pop("lipsum")
    found.globals |= {"raise_exception": raise_exception, "namespace": Namespace}
    if dated:  # a text to learn from would be another one tomorrow, without it it has a date
        found.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return found
