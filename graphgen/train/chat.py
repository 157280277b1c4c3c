"""Conversations as texts: a folder's chat template, and which characters are the assistant's."""

import json
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from graphgen.errors import GraphgenError
from graphgen.export.rows import needed
from graphgen.files import present, read_bytes
from graphgen.train.tokens import Spans, Tokenizer

_FILE = "chat_template.jinja"
_BEGIN, _END = "\ufdd0", "\ufdd1"  # Unicode keeps them free for such marks
_STEPS = 1_000_000
"""Lines that a template may run for one conversation."""

_LONGEST = 10_000_000  # characters
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Template:
    """The chat template of a tokenizer's folder, rendered as transformers does, in a sandbox.

    The assistant's turns are what stands in {% generation %}, or else what each of its messages
    adds to the text of those before it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        source = _source(tokenizer)
        self._who = f"the chat template of {tokenizer.folder}"
        self._named = {name: tokenizer.text(name) or "" for name in _TOKENS}
        self._jinja = needed("jinja2")
        try:
            self._template = _environment().from_string(source)
        except (self._jinja.TemplateError, RecursionError) as error:
            raise GraphgenError(f"{self._who} is not one: {_first_line(error)}") from error
        self._marks = "generation" in source and "endgeneration" in source

    def render(self, messages: Sequence[Any], where: str) -> tuple[str, Spans]:
        """The text, and its parts that the assistant says.

        Raises GraphgenError for messages that the template refuses, and for one that changes what
        stands before a message.
        """
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise GraphgenError(
                    f"{where}: a message is {message!r:.60}; give objects with `role` and `content`"
                )
        whole = self._text(messages, where)
        if self._marks:
            return _unmarked(whole, where)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._text(messages[:i], where, add_generation_prompt=True)
                after = self._text(messages[: i + 1], where)
                if not after.startswith(before) or not whole.startswith(after):
                    raise GraphgenError(
                        f"{where}: {self._who} writes message {i + 1} otherwise when more follow, "
                        "so it is not known what the assistant says: put {% generation %} around it"
                    )
                spans.append((len(before), len(after)))
        return whole, spans

    def _text(
        self, messages: Sequence[Any], where: str, *, add_generation_prompt: bool = False
    ) -> str:
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        tracer, steps = sys.gettrace(), 0

        def step(frame: FrameType, event: str, _: object) -> Any:
            nonlocal steps
            if frame.f_code.co_filename != "<template>":
                return None
            steps += 1
            if steps > _STEPS:
                raise TimeoutError(f"it runs for more than {_STEPS:,} lines")
            return step

        sys.settrace(step)  # a loop may never end
        try:
            text: str = self._template.render(**self._named, **given, tools=None, documents=None)
        except Exception as error:  # whatever its expressions raise
            reason = f"{type(error).__name__}: {_first_line(error)}"
            raise GraphgenError(f"{where}: {self._who} ends in {reason}") from error
        finally:
            sys.settrace(tracer)
        return text


def _source(tokenizer: Tokenizer) -> str:
    """The text of the template: a file, or a field of tokenizer_config.json."""
    path, found = tokenizer.folder / _FILE, tokenizer.named.get("chat_template")
    if present(path):
        try:
            found = read_bytes(path).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise GraphgenError(f"{path} cannot be read: {error}") from error
    if isinstance(found, list):
        named = {x.get("name"): x.get("template") for x in found if isinstance(x, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise GraphgenError(
            f"{tokenizer.folder} has no chat template, which `messages` need: add {_FILE}"
        )
    return found


def _environment() -> Any:
    jinja, sandbox, ext = needed("jinja2"), needed("jinja2.sandbox"), needed("jinja2.ext")
    environment: Any = sandbox.ImmutableSandboxedEnvironment
    extension: Any = ext.Extension

    class Sandbox(environment):  # type: ignore[misc]
        """Products and powers that would fill the memory are refused."""

        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(x) if hasattr(x, "__len__") else x for x in (left, right)]
            numbers = all(isinstance(x, int | float) for x in (left, right))
            large = operator == "**" and max(map(abs, sizes)) > 64
            if large or (not numbers and sizes[0] * sizes[1] > _LONGEST):
                raise sandbox.SecurityError(f"a result of {operator} is too large")
            return super().call_binop(context, operator, left, right)

    class Generation(extension):  # type: ignore[misc]
        """{% generation %} ... {% endgeneration %} around what the assistant says."""

        tags = frozenset(["generation"])

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_marked")
            return jinja.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def raise_exception(message: str) -> None:
        raise jinja.TemplateError(message)

    found = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    found.filters["tojson"] = tojson
    found.globals["raise_exception"] = raise_exception
    # Not strftime_now: the text would be another one tomorrow. Templates have a date without it.
    return found


def _unmarked(text: str, where: str) -> tuple[str, Spans]:
    """A text without the marks, and what stood between them."""
    pieces, spans, size = list[str](), list[tuple[int, int]](), 0
    for i, piece in enumerate(text.split(_BEGIN)):
        inside, end, outside = piece.partition(_END)
        if (not end) == bool(i) or _END in outside:
            raise GraphgenError(f"{where}: a message has the character U+FDD0 or U+FDD1; remove it")
        if i:
            spans.append((size, size + len(inside)))
        pieces += [inside, outside]
        size += len(inside) + len(outside)
    return "".join(pieces), spans


def _first_line(error: BaseException) -> str:
    return (str(error) or "no reason").splitlines()[0]
